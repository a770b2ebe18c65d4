"""Places where calls may pass that the tracer could not attach to: said once, counted, said at the end.

Knows modules and versions; it does not know how capturing works (`capture.py` tells what it did not find).

Invariants:
* A client whose internals have changed degrades with one warning that names its version, never in silence.
* Nothing in here raises into the import that it looks at (`hooks.py` sees to it), or imports anything.
"""

import logging
from importlib import metadata
from types import ModuleType
from typing import Final

from spangrad.tracer.hooks import when_imported

logger = logging.getLogger(__name__)

WATCHED: Final = ("httpx", "httpx2")
"""Libraries below which calls are captured."""
CLIENTS: Final = ("openai", "anthropic")
"""SDKs that say in public names which library they send with."""
_PUBLIC_CLIENTS: Final = ("DefaultHttpxClient", "DefaultAsyncHttpxClient")

_found: dict[str, None] = {}


def found() -> tuple[str, ...]:
    """Every blind spot of this process, in the order in which they were met."""
    return tuple(_found)


def tell(spot: str) -> None:
    """Count a blind spot, and say it if it is new."""
    if spot not in _found:
        _found[spot] = None
        logger.warning(
            "%s: calls through it are not recorded; another version may be, or put the gateway "
            "in front of the model",
            spot,
        )


def tell_again() -> None:
    """Say how many there were: the process is about to end."""
    if _found:
        logger.warning("spangrad could not watch %d places: %s", len(_found), "; ".join(_found))


def watch_clients() -> None:
    """Look at each SDK once it is imported."""
    for name in CLIENTS:
        when_imported(name, _look)


def in_client(module: ModuleType) -> list[str]:
    """What of an SDK is not sent with a library that is watched."""
    spots = []
    for name in _PUBLIC_CLIENTS:
        client = getattr(module, name, None)
        if not isinstance(client, type):
            spots.append(f"{described(module.__name__)} has no {name}")
        elif not any(base.__module__.partition(".")[0] in WATCHED for base in client.__mro__):
            library = client.__mro__[-2].__module__.partition(".")[0]
            spots.append(f"{described(module.__name__)} sends {name} with {library!r}")
    return spots


def described(module: str) -> str:
    """A module's name with the version of its distribution, if it is known."""
    top = module.partition(".")[0]
    try:
        return f"{module} {metadata.version(top.replace('_', '-'))}"
    except metadata.PackageNotFoundError:
        return f"{module} of unknown version"


def _look(module: ModuleType) -> None:
    for spot in in_client(module):
        tell(spot)
