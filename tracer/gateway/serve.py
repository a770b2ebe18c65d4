"""Run a gateway: in this thread until it is stopped, or beside other work.

Invariant: the port is taken before anything else starts, or `PortInUseError` is raised.
"""

import errno
import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from opentelemetry.sdk.trace.export import SpanExporter

from spangrad.errors import CaptureError, ConfigError, PortInUseError
from spangrad.tracer.gateway.app import create_app
from spangrad.tracer.gateway.config import GatewayConfig

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""Longest time, in seconds, that a thread of the gateway's process keeps the interpreter from another one."""
GC_NEW = 10_000
"""Objects that have come to stay before the new ones are looked through."""


def serve(config: GatewayConfig) -> None:
    """Serve until SIGINT or SIGTERM; the spans of ended calls are handed over before it returns.

    Raises:
        PortInUseError: The address is taken.
        ConfigError: The address is not this machine's, or nothing could be recorded.
    """
    with _listen(config) as listener:
        server = _server(config, None)
        urls = ", ".join([*(engine.url for engine in config.all_engines), *config.hosted])
        logger.info("gateway %s -> %s", _url(listener), urls)
        with _as_own_process():
            server.run(sockets=[listener])


@contextmanager
def running(config: GatewayConfig, *, exporter: SpanExporter | None = None) -> Iterator[str]:
    """Serve in a thread of its own; gives the gateway's base URL. Raises as `serve` does."""
    with _listen(config) as listener:
        server = _server(config, exporter)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="spangrad-gateway", daemon=True
        )
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.005)
            if not server.started:
                raise CaptureError("the gateway stopped while it started; its log says why")
            yield _url(listener)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _as_own_process() -> Iterator[None]:
    """Settings of the interpreter for a process that does nothing else: no call waits for long.

    What is loaded by now is not looked through at each full garbage collection, what is new is not at every
    call, and the thread that encodes spans gives the interpreter to the one that serves within 0.5 ms.
    """
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_NEW, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


def _server(config: GatewayConfig, exporter: SpanExporter | None) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            create_app(config, exporter=exporter),
            log_config=None,
            access_log=False,
            ws="none",
            # Not the environment's FORWARDED_ALLOW_IPS: with `*` any caller could say that it is local.
            forwarded_allow_ips="127.0.0.1",
            lifespan="on",
            timeout_graceful_shutdown=config.shutdown_s,
        )
    )


def _listen(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            address = f"port {config.port} on {config.host}"
            raise PortInUseError(
                f"{address} is taken; stop what listens there or choose another port"
            ) from error
        raise ConfigError(
            f"the gateway can't listen on {config.host!r} port {config.port}: {error.strerror}"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
