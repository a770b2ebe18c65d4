"""spangrad.store: spans, rollouts, rewards and updates in DuckDB, in this process or behind a hub.

Importing this loads neither DuckDB nor HTTP; `open_store` loads what the target needs.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spangrad.store.client import HubClient
    from spangrad.store.file_store import FileStore
    from spangrad.store.span_store import SpanStore

__all__ = ["FileStore", "HubClient", "SpanStore", "open_store"]


def open_store(
    target: str | os.PathLike[str], key: str | None = None, *, read_only: bool = False
) -> "FileStore | HubClient":
    """Open a store: `FileStore` for a path, `HubClient` for an http(s) URL.

    Args:
        target: Path of a DuckDB file, or URL of a hub.
        key: Key for the hub.
        read_only: Open a file for reading only, so that several processes can; a hub's key decides.
    """
    text = os.fspath(target)
    if text.startswith(("http://", "https://")):
        from spangrad.store.client import HubClient

        return HubClient(text, key)
    from spangrad.store.file_store import FileStore

    return FileStore(text, read_only=read_only)


def __getattr__(name: str) -> object:
    if name == "FileStore":
        from spangrad.store.file_store import FileStore

        return FileStore
    if name == "HubClient":
        from spangrad.store.client import HubClient

        return HubClient
    if name == "SpanStore":
        from spangrad.store.span_store import SpanStore

        return SpanStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
