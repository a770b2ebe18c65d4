"""An agent can't reach what controls an engine, however it writes the address: raw requests, as bytes.

The engine of these tests answers whatever it is asked, and remembers it.
"""

import importlib.util
import posixpath
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.tracer.gateway.app import READABLE
from spangrad.tracer.gateway.routes import PASSED_ON, ROUTES

KEY, OPERATOR = "sk-agents-0123456789", "sk-operator-0123456789"
CONTROL: Final = (
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
    *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/weight_checker", "/weight_info", "/server_info", "/get_world_size", "/scale_elastic_ep"),
    *("/is_scaling_elastic_ep", "/fault_tolerance/apply", "/abort_requests", "/start_profile"),
    *("/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/shutdown", "/metrics"),
    *("/docs", "/openapi.json", "/load", "/kv_event_sources", "/fault_tolerance/status", "/tokenizer_info"),
)
SAMPLES_OR_READS: Final = frozenset(
    {
        *("/classify", "/cohere/v2/chat", "/cohere/v2/chat/render", "/detokenize", "/generative_scoring"),
        *("/inference/v1/generate", "/invocations", "/ping", "/pooling", "/rerank", "/score", "/tokenize"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions/batch"),
        *("/v1/chat/completions/derender", "/v1/chat/completions/render", "/v1/completions/derender"),
        *("/v1/completions/render", "/v1/messages/render", "/v1/rerank", "/v1/responses/render", "/v1/score"),
        *("/v1/systemone", "/v2/embed", "/v2/rerank"),
    }
)
"""What else vLLM answers to a POST: it changes nothing, and is not passed on either."""
SOME: Final = ("/pause", "/collective_rpc", "/update_weights", "/v1/load_lora_adapter", "/server_info")
WRITTEN: Final = (
    *("{0}", "{0}/", "/{0}", "{0}//", "{1}", "{0}?a=b", "{0}#a", "{0};a", "{0}%20", "{0}%00", "{0}%0a"),
    *("/v1/..{0}", "/v1/%2e%2e{0}", "/v1/.%2e{0}", "/v1/..%2f{2}", "/v1/%2e%2e%2f{2}", "/v1/%252e%252e{0}"),
    *("/v1/..%252f{2}", "/v1//..{0}", "/v1/../{0}", "/v1/models/../..{0}", "/v1/models/%2e%2e/%2e%2e{0}"),
    *("/v1/models/..%5c..%5c{2}", "/v1/..\\{2}", "/v1/.{0}", "/v1/%2e{0}", "/v1/models%3f/..{0}"),
    *("/v1/models%23/../..{0}", "/v1/chat/completions/../../..{0}", "/v1/chat/completions/%2e%2e{0}"),
    *("/v1/responses/../../cancel/..{0}", "/v1/responses/..%2f..%2f{2}%3f/cancel", "/health/..{0}"),
    *("/health%2f..{0}", "/v1/responses/%2e%2e/cancel", "/version/%2e%2e{0}", "/rollout/r/v1/../../../..{0}"),
    *("/rollout/..%2f..%2f{2}/v1/models", "/rollout/r/0/v1/%2e%2e/%2e%2e{0}", "/rollout/r/v1/..%2f..{0}"),
    *(
        "/v1/end/../..{0}",
        "/v1/end/%2e%2e/%2e%2e{0}",
        "/rollout/r/v1/end{0}",
        "/rollout/..%2f..%2f{2}/v1/end",
    ),
    *("/spangrad/..{0}", "/spangrad/engines/..%2f..{0}", "//127.0.0.1{0}", "/@127.0.0.1{0}"),
    *("/v1/@127.0.0.1{0}", "/v1/http:%2f%2f127.0.0.1{0}", "http://127.0.0.1{0}", "http://{3}{0}", "*"),
)
"""{0} is the path, {1} in capitals, {2} without its first slash, {3} the engine's address."""
METHODS: Final = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "post",
    "ANY",
)


class Engine:
    """What an engine was asked: method and target, as they came."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[tuple[str, str]] = []


@contextmanager
def answering_engine() -> Iterator[Engine]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            engine.asked.append((self.command, self.path))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "2")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(b"{}")

        def __getattr__(self, name: str) -> object:
            if name.startswith("do_"):
                return self._answer
            raise AttributeError(name)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine = Engine(f"127.0.0.1:{server.server_port}")
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            yield engine
        finally:
            server.shutdown()
            serving.join()


class Agent:
    """An agent with a key, on the gateway's machine, that writes its requests itself."""

    def __init__(self, gateway: str, engine: Engine) -> None:
        self.engine = engine
        self._address = urlsplit(gateway)

    def ask(self, method: str, target: str, *headers: str, body: bytes = b"{}") -> int:
        """The status of the answer; 0: the connection was closed."""
        host = f"{self._address.hostname}:{self._address.port}"
        told = [f"host: {host}", f"authorization: Bearer {KEY}", "connection: close"]
        names = {header.partition(":")[0].lower() for header in headers}
        told = [line for line in told if line.partition(":")[0] not in names]
        told += [*headers, "content-type: application/json", f"content-length: {len(body)}"]
        head = "\r\n".join([f"{method} {target} HTTP/1.1", *told, "", ""])
        assert self._address.hostname is not None and self._address.port is not None
        with socket.create_connection((self._address.hostname, self._address.port), timeout=20) as connection:
            connection.sendall(head.encode("latin-1") + body)
            answer = connection.makefile("rb").readline().split()
        return int(answer[1]) if len(answer) > 1 else 0


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with answering_engine() as engine:
        config = GatewayConfig(
            f"http://{engine.address}",
            store="unused",
            agent_key=KEY,
            operator_keys=[OPERATOR],
            health_interval_s=3600,
            port=0,
        )
        with running(config, exporter=InMemorySpanExporter()) as gateway:
            yield Agent(gateway, engine)


OWN: Final = frozenset({"/weight_info", "/health", "/server_info", "/version"})
"""What the gateway asks an engine of itself, with GET."""
POSTED: Final = frozenset({*(route.path for route in ROUTES), *PASSED_ON})


def bad(asked: list[tuple[str, str]], own: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """What no agent may make a gateway ask: all but reads below /v1 and what is recorded or passed on."""
    found = []
    for method, target in asked:
        path = target.partition("?")[0]
        plain = unquote(unquote(path))
        is_plain = posixpath.normpath(plain).startswith("/v1/") and ".." not in plain.split("/")
        is_read = method in ("GET", "HEAD") and (path in READABLE or is_plain)
        is_posted = method == "POST" and any(
            re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", known), path) and is_plain for known in POSTED
        )
        if not (is_read or is_posted or (method, path) in own):
            found.append((method, target))
    return found


def asked_by_itself(agent: Agent) -> set[tuple[str, str]]:
    """What the gateway asks an engine when a call comes, whatever the agent wants."""
    agent.engine.asked.clear()
    assert agent.ask("POST", "/v1/chat/completions", body=b'{"messages": []}') == 200
    own = {(method, path) for method, path in agent.engine.asked if method == "GET"}
    agent.engine.asked.clear()
    return own


def test_an_agent_reaches_no_control_endpoint_however_it_writes_the_path(agent: Agent) -> None:
    own = asked_by_itself(agent)
    reached = 0
    for path in SOME:
        for form in WRITTEN:
            target = form.format(path, path.upper(), path[1:], agent.engine.address)
            for method in ("POST", "GET"):
                agent.ask(method, target)
                reached += len(agent.engine.asked)
                assert bad(agent.engine.asked, own) == [], (method, target)
                agent.engine.asked.clear()
    assert reached, "nothing got to the engine at all: the test shows nothing"


@pytest.mark.parametrize("method", METHODS)
def test_an_agent_reaches_no_control_endpoint_with_any_method(agent: Agent, method: str) -> None:
    own = asked_by_itself(agent)
    for path in CONTROL:
        status = agent.ask(method, path)
        assert status in (0, 400, 404, 405) or (method in ("GET", "HEAD") and path.startswith("/v1/")), path
        if not path.startswith("/v1/"):
            assert set(agent.engine.asked) <= own, path
        assert bad(agent.engine.asked, own) == [], path
        agent.engine.asked.clear()


@pytest.mark.parametrize(
    "headers",
    [
        ("x-http-method-override: POST",),
        ("x-http-method: POST", "x-method-override: POST"),
        ("x-original-url: {0}", "x-rewrite-url: {0}"),
        ("x-forwarded-prefix: {0}", "x-forwarded-host: {1}", "forwarded: host={1}"),
        ("host: {1}",),
        ("host: {1}{0}",),
        ("upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13", "sec-websocket-key: a"),
        ("upgrade: h2c", "connection: upgrade, http2-settings", "http2-settings: AAMAAABk"),
        ("transfer-encoding: chunked",),
        ("x-spangrad-policy: latest", "x-forwarded-for: 127.0.0.1"),
        (f"x-api-key: {KEY}", "authorization: Bearer none"),
    ],
    ids=lambda headers: headers[0].partition(":")[0],
)
def test_an_agent_reaches_no_control_endpoint_with_any_header(agent: Agent, headers: tuple[str, ...]) -> None:
    own = asked_by_itself(agent)
    for path in SOME:
        told = [header.format(path, agent.engine.address) for header in headers]
        for method in ("GET", "POST"):
            for target in (path, "/v1/models", "/health", f"/v1/responses/x/cancel?{path}"):
                agent.ask(method, target, *told)
        assert bad(agent.engine.asked, own) == []
        agent.engine.asked.clear()


def test_a_request_behind_another_one_is_one_of_its_own(agent: Agent) -> None:
    """A body that looks like a request is none: what is said of its length is what counts."""
    own = asked_by_itself(agent)
    inner = f"POST /pause HTTP/1.1\r\nhost: {agent.engine.address}\r\ncontent-length: 0\r\n\r\n".encode()
    for more in ((), ("transfer-encoding: chunked",), ("content-length: 0",)):
        agent.ask("POST", "/v1/responses/x/cancel", *more, body=inner)
        agent.ask("POST", "/v1/chat/completions", *more, body=b"0\r\n\r\n" + inner)
    assert bad(agent.engine.asked, own) == []


def test_every_route_of_the_installed_vllm_that_takes_a_post_is_known() -> None:
    """A new one is to be looked at: does it control the engine, or does it sample?"""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent / "entrypoints"
    route = re.compile(r'@\w*(?:router|app)\.(?:post|put|patch|delete)\(\s*"([^"]+)')
    found = {path for file in folder.rglob("*.py") for path in route.findall(file.read_text())}
    assert {"/pause", "/collective_rpc", "/v1/load_lora_adapter"} <= found
    assert found - {*CONTROL, *SAMPLES_OR_READS, *POSTED} == set()
