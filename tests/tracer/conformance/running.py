"""Runs a case with and without the tracer, and says what was recorded and what the agent got."""

import asyncio
import functools
import inspect
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

import spangrad
from spangrad.adapters import ModelCall, calls_of
from spangrad.store import FileStore
from tests.tracer.conformance.case import AT_END, Case
from tests.tracer.conformance.engine import Engine, Seen, replaying
from tests.waiting import wait_until

_GATEWAY = """
import json, sys
from spangrad.tracer.gateway import GatewayConfig, serve
serve(GatewayConfig(**json.loads(sys.argv[1])))
"""
_OURS = ("traceparent", "x-spangrad-rollout", "x-spangrad-attempt", "x-spangrad-step")
_SPAN_FIELDS = (
    "call_id",
    "trace_id",
    "span_id",
    "span_ids",
    "trace_ids",
    "ancestor_span_ids",
    "recorders",
    "service",
    "start_ns",
    "end_ns",
    "rollout_id",
)


@dataclass(frozen=True)
class Outcome:
    """One run of a case."""

    result: Any
    """What the agent got, as plain data with the names of its types."""
    sent: Sequence[Seen]
    """What reached the server, without the headers that we add."""


class Player:
    """Plays cases, all async ones in one event loop: clients keep connections that belong to theirs."""

    def __init__(self, engine: Engine, store: FileStore, gateway_url: Callable[[], str]) -> None:
        self.engine = engine
        self.store = store
        self.gateway_url = gateway_url
        self._runner = asyncio.Runner()
        self._runner.get_loop()  # from now on the thread's, also for sync code that asks for one
        self._numbers = count()

    def close(self) -> None:
        """Close what clients keep, and the loop."""
        for function in AT_END:
            self._runner.run(_awaited(function()))
        self._runner.close()

    def play(self, case: Case) -> Outcome:
        """Run a case once. Fails if its session is not played to the end, or more is asked for."""
        url = f"{self.gateway_url() if case.through_gateway else self.engine.url}/v1"
        self.engine.play(case.session)
        try:
            result = case.function(url)
            if inspect.isawaitable(result):
                result = self._runner.run(_awaited(result), context=copy_context())
        except (Exception, asyncio.CancelledError) as error:
            result = error
        with suppress(AssertionError):  # a client may hang up before the server has heard it
            wait_until(lambda: self.engine.unexpected or not self.engine.left, timeout_s=5)
        got = plain(result, self.engine.url, url.removesuffix("/v1"))
        assert not self.engine.unexpected, (got, self.engine.unexpected)
        assert not self.engine.left, (got, f"exchanges not asked for: {len(self.engine.left)}")
        return Outcome(got, sorted((_without_ours(seen) for seen in self.engine.seen), key=repr))

    def record(self, case: Case) -> tuple[Outcome, list[ModelCall]]:
        """Run a case with the tracer on, inside a rollout. Also gives the calls that it recorded."""
        rollout_id = f"r-{next(self._numbers)}"
        if case.through_gateway:
            self.gateway_url()  # starts it, if need be, where it belongs to no rollout
        spangrad.init(store=self.store.path)
        try:
            with spangrad.rollout(rollout_id=rollout_id):
                outcome = self.play(case)
        finally:
            assert spangrad.shutdown()
        if case.through_gateway:
            httpx.post(f"{self.gateway_url()}/spangrad/flush", timeout=30).raise_for_status()
        self.store.drain()
        return outcome, calls_of(self.store, [rollout_id])


async def _awaited(result: Any) -> Any:
    return await result


@contextmanager
def player_in(folder: Path) -> Iterator[Player]:
    """A player with an engine, a gateway before it, and a store in `folder` that both recorders write to."""
    path = folder / "store.duckdb"
    with replaying() as engine, FileStore(path) as store, _gateway(engine.url, path) as gateway_url:
        player = Player(engine, store, gateway_url)
        try:
            yield player
        finally:
            player.close()


@contextmanager
def _gateway(engine_url: str, store: Path) -> Iterator[Callable[[], str]]:
    """Gives a function that starts a gateway when it is first called: a process, where nothing is patched."""
    with ExitStack() as stack:

        @functools.cache
        def start() -> str:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            settings = {"engine_url": engine_url, "store": str(store), "port": port}
            process = subprocess.Popen([sys.executable, "-c", _GATEWAY, json.dumps(settings)])
            stack.callback(process.wait)
            stack.callback(process.terminate)
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: process.poll() is not None or _answers(f"{url}/spangrad/health"))
            return url

        yield start


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def in_order(case: Case, calls: list[ModelCall]) -> list[ModelCall]:
    """Calls that run beside each other in the order of the case's wants."""
    if not case.is_parallel:
        return calls
    places = [[list(choice) for choice in want.sampled] for want in case.wants]
    return sorted(
        calls, key=lambda call: places.index([list(x.sampled_token_ids or ()) for x in call.choices])
    )


def as_json(call: ModelCall) -> dict[str, Any]:
    """A call without what differs from run to run, and without what it does not have."""
    fields = asdict(call)
    told: dict[str, Any] = {"spans": len(fields["span_ids"]), "ancestors": len(fields["ancestor_span_ids"])}
    for name in _SPAN_FIELDS:
        del fields[name]
    kept: dict[str, Any] = json.loads(json.dumps(fields, default=_listed).replace("httpx2.", "httpx."))
    told.update(_present(kept))
    return told


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else str(value)


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item not in (None, [], {}, "")}
    return [_present(item) for item in value] if isinstance(value, list) else value


def plain(value: Any, *urls: str) -> Any:
    """Plain data that is equal if, and only if, an agent could see no difference."""
    if isinstance(value, BaseException):
        return [_type(value), _without(str(value), urls), plain(value.__cause__, *urls)]
    if isinstance(value, BaseModel):
        return [_type(value), plain(value.model_dump(warnings=False), *urls)]
    if isinstance(value, Mapping):
        return {str(key): plain(item, *urls) for key, item in value.items() if not _is_fresh(key, item)}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(plain(item, *urls) for item in value)]
    if isinstance(value, str):
        return _without(value, urls)
    if value is None or isinstance(value, int | float | bytes | Enum):
        return value
    fields = getattr(value, "__dict__", None)
    return [_type(value), plain(fields, *urls)] if isinstance(fields, dict) else _type(value)


def _is_fresh(key: Any, item: Any) -> bool:
    """Made anew in every run by the client itself."""
    if key == "id" and isinstance(item, str):
        return item.startswith(("run-", "lc_run-", "lc_"))
    return key in ("litellm_call_id", "response_time_ms", "_response_ms", "created")


def _without(text: str, urls: Sequence[str]) -> str:
    for url in urls:
        text = text.replace(url, "URL").replace(url.removeprefix("http://"), "HOST")
    return text


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _without_ours(seen: Seen) -> Seen:
    headers = {name: value for name, value in seen.headers.items() if name not in _OURS}
    return Seen(seen.path, headers, seen.body)
