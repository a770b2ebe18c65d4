"""The hub as a process: address, signals, an orderly end.

Knows sockets and uvicorn. Invariants: the address is taken before the store is opened;
SIGTERM and SIGINT end it with everything written and the log folded into the file; after a
fatal error of the database it ends with an error, and whoever watches it starts it again.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from spangrad.errors import ConfigError, PortInUseError, StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.hub import LOOPBACK_HOSTS, Beside, create_app
from spangrad.store.hub_address import announced
from spangrad.store.keys import Keys
from spangrad.tracer.access import is_loopback

DEFAULT_PORT = 4318
"""Where OpenTelemetry exporters send to unless told otherwise."""
SHUTDOWN_S = 10


def serve(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    keys: Keys | None = None,
    on_ready: Callable[[str], None] | None = None,
    beside: Beside | None = None,
) -> None:
    """Run a hub on a store file until SIGTERM or SIGINT.

    Args:
        path: Store file, made if need be.
        host: Address to listen on; other than loopback only with keys.
        port: Port; 0 takes a free one.
        keys: Who may do what; without, every caller is an admin.
        on_ready: Called with the hub's URL once requests are answered.
        beside: Run in a thread meanwhile; it is to return soon when the event is set.

    Raises ConfigError for an open address without keys, PortInUseError if the address is taken,
    StoreError if the database met a fatal error.
    """
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached by others and the hub has no keys; give keys, or use 127.0.0.1"
        )
    with _listen(host, port) as listener:
        store = FileStore(path)
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}"
        hosts = LOOPBACK_HOSTS | {host.strip("[]").lower()} if is_loopback(host) else None
        app = create_app(
            store, keys=keys, allowed_hosts=hosts, on_invalidated=lambda: server.stop(), beside=beside
        )
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=SHUTDOWN_S
        )
        server = _Server(config, lambda: on_ready(url) if on_ready else None)
        with announced(path, url):
            _run(server, listener)
    if store.is_invalidated:
        raise StoreError(
            f"the database {str(path)!r} met a fatal error; what was acknowledged is in it, "
            "so start the hub again"
        )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """Answer what has come, then end."""
        self.should_exit = True


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve. Uvicorn hands the signal that ended it to the handler from before: ours, which ignores it."""
    if threading.current_thread() is not threading.main_thread():
        server.run(sockets=[listener])
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    address = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PortInUseError(
            f"{host}:{port} can't be listened on ({error.strerror}); stop what uses it, or take another port"
        ) from error
    return listener
