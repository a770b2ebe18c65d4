"""The rollout goes along with HTTP requests, and goes on in the server that gets them."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import spangrad
from spangrad.tracer import conventions as c
from spangrad.tracer.current import ENVIRONMENT
from spangrad.tracer.hops import MAX_ID_CHARS
from tests.tracer.recording import Recorded, calls, roots
from tests.tracer.stub_server import ModelServer

Finish = Callable[[], list[Recorded]]
NAMES = (c.HEADER_ROLLOUT, c.HEADER_ATTEMPT, "traceparent")


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that answers any request with the headers that it got, or with the redirect it names."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            _, _, target = self.path.partition("/redirect?to=")
            body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
            self.send_response(307 if target else 200)
            if target:
                self.send_header("location", target)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/tool"
    server.shutdown()
    server.server_close()
    thread.join()


def ours(headers: dict[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in NAMES if name in headers}


def test_every_request_of_a_rollout_names_it(recorded: Finish, echo: str) -> None:
    async def ask() -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.post(echo, json={})).json()

    with spangrad.rollout(rollout_id="r-1", attempt=2):
        expected = spangrad.rollout_headers()
        assert ours(httpx.get(echo).json()) == expected
        assert ours(asyncio.run(ask())) == expected
    assert ours(httpx.get(echo).json()) == {}
    (root,) = roots(recorded())
    assert expected == {
        c.HEADER_ROLLOUT: "r-1",
        c.HEADER_ATTEMPT: "2",
        "traceparent": f"00-{root.trace_id}-{root.span_id}-01",
    }
    assert spangrad.rollout_headers() == {}


def test_headers_that_a_request_has_are_left_as_they_are(recorded: Finish, echo: str) -> None:
    with spangrad.rollout(rollout_id="r-1"):
        theirs = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}
        got = httpx.get(echo, headers=theirs).json()
        assert (got["traceparent"], got[c.HEADER_ROLLOUT]) == (theirs["traceparent"], "r-1")
        got = httpx.get(echo, headers={c.HEADER_ROLLOUT: "theirs"}).json()
        assert (got[c.HEADER_ROLLOUT], c.HEADER_ATTEMPT in got) == ("theirs", False)


def test_a_call_that_was_sent_is_the_request_that_the_agent_made(
    recorded: Finish, model: ModelServer
) -> None:
    with spangrad.rollout():
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
        sent = httpx.post(f"{model.url}/chat/completions", json=body).request
    assert not [name for name in sent.headers if name.startswith(("x-spangrad", "traceparent"))]
    (call,) = calls(recorded())
    assert model.seen[-1].headers["traceparent"].split("-")[2] == call.span_id


def test_hosts_that_may_not_be_told_are_not(recorded: Finish, echo: str) -> None:
    def got(url: str) -> dict[str, str]:
        return ours(client.get(url).json())

    with spangrad.rollout(), httpx.Client(proxy=echo) as client:  # which answers in every host's name
        assert got("http://api.example.org/tool") == {}
        assert got("http://8.8.8.8/tool") == {}
        assert set(got("http://10.0.0.1/tool")) == set(NAMES)


def test_a_request_that_was_sent_is_the_one_that_the_agent_made(recorded: Finish, echo: str) -> None:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(echo, json={})

    with spangrad.rollout():
        sent = [httpx.get(echo), asyncio.run(ask())]
        with pytest.raises(httpx.ConnectError) as caught:
            httpx.get("http://127.0.0.1:9/tool")
    assert all(set(ours(answer.json())) == set(NAMES) for answer in sent)
    for made in (*(answer.request for answer in sent), caught.value.request):
        assert ours(dict(made.headers)) == {}


def test_a_call_that_a_redirect_sends_on_is_recorded_with_its_request(
    recorded: Finish, echo: str, model: ModelServer
) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    with spangrad.rollout():
        to = f"{model.url}/chat/completions"
        httpx.post(f"{echo}/redirect?to={to}", json=body, follow_redirects=True).raise_for_status()
    (call,) = calls(recorded())
    assert call.prompt() == "Hello"


def test_one_request_object_that_is_sent_twice_at_once_is_two_calls(
    recorded: Finish, model: ModelServer
) -> None:
    async def ask() -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
        async with httpx.AsyncClient() as client:
            request = client.build_request("POST", f"{model.url}/chat/completions", json=body)
            await asyncio.gather(client.send(request), client.send(request))

    with spangrad.rollout():
        asyncio.run(ask())
    assert len(calls(recorded())) == 2


@pytest.mark.parametrize("path", ["tool", "v1/chat/completions"])
def test_a_redirect_takes_no_header_to_a_host_that_may_not_be_told(
    recorded: Finish, echo: str, path: str
) -> None:
    theirs = {"x-theirs": "1"}
    with spangrad.rollout(rollout_id="r"), httpx.Client(proxy=echo, follow_redirects=True) as client:

        def post(to: str) -> dict[str, str]:
            reply = client.post(f"http://10.0.0.1/redirect?to={to}/{path}", json={}, headers=theirs)
            assert [r.status_code for r in reply.history] == [307]
            return dict(reply.json())

        public, private = post("http://api.example.org"), post("http://10.0.0.2")
    assert (ours(public), public["x-theirs"]) == ({}, "1")
    assert (private[c.HEADER_ROLLOUT], private["x-theirs"]) == ("r", "1")
    for call in calls(recorded()):
        if call["server.address"] == "10.0.0.2":  # the span that the server is told of is this one's
            assert private["traceparent"] == f"00-{call.trace_id}-{call.span_id}-01"


def test_a_tool_servers_calls_belong_to_the_caller(recorded: Finish, model: ModelServer) -> None:
    async def tool(request: Request) -> PlainTextResponse:
        body = {"model": "policy", "messages": [{"role": "user", "content": request.query_params["word"]}]}
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{model.url}/chat/completions", json=body)
        return PlainTextResponse(reply.json()["choices"][0]["message"]["content"])

    app = Starlette(routes=[Route("/tool", tool)])
    app.add_middleware(spangrad.RolloutMiddleware)

    async def ask(word: str, headers: dict[str, str]) -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as client:
            return (await client.get("/tool", params={"word": word}, headers=headers)).text

    async def all_at_once() -> tuple[str, ...]:
        context = f"00-{'a' * 32}-{'b' * 16}-01"
        first = {c.HEADER_ROLLOUT: "one", c.HEADER_ATTEMPT: "3", "traceparent": context}
        second = {c.HEADER_ROLLOUT: "two"}
        return tuple(await asyncio.gather(ask("first", first), ask("second", second), ask("third", {})))

    assert asyncio.run(all_at_once()) == ("You said first.", "You said second.", "You said third.")
    found = {call.prompt(): call for call in calls(recorded())}
    owner = {word: (call.get(c.ROLLOUT_ID), call.get(c.ATTEMPT)) for word, call in found.items()}
    assert owner == {"first": ("one", 3), "second": ("two", 0), "third": (None, None)}
    assert (found["first"].trace_id, found["first"].parent_id) == ("a" * 32, "b" * 16)


def test_a_rollout_is_taken_along_by_hand(recorded: Finish) -> None:
    with spangrad.rollout(rollout_id="one") as handle:
        headers = spangrad.rollout_headers()
        with spangrad.rollout(rollout_id="two"):
            with spangrad.continue_rollout(headers) as continued:
                assert continued is handle is spangrad.current_rollout()
            with spangrad.continue_rollout({}) as nothing:
                assert nothing is None
                current = spangrad.current_rollout()
                assert current is not None and current.rollout_id == "two"
    with spangrad.continue_rollout(headers) as continued:
        assert continued is not None and continued is not handle
        assert (continued.rollout_id, continued.span) == ("one", None)
    with pytest.raises(KeyError), spangrad.continue_rollout(headers):
        raise KeyError
    assert spangrad.current_rollout() is None


def test_under_spangrad_run_starlette_continues_rollouts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen_by_app(app: Starlette) -> str:
        async def ask() -> str:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://tool"
            ) as client:
                return (await client.get("/", headers={c.HEADER_ROLLOUT: "callers"})).text

        return asyncio.run(ask())

    async def tool(request: Request) -> PlainTextResponse:
        current = spangrad.current_rollout()
        return PlainTextResponse(current.rollout_id if current else "none")

    app = Starlette(routes=[Route("/", tool)])
    original = vars(Starlette)["__call__"]
    spangrad.init(store=tmp_path / "s")
    assert seen_by_app(app) == "none"
    spangrad.shutdown()
    monkeypatch.setenv(ENVIRONMENT, "process&attempt=0")
    spangrad.init(store=tmp_path / "s")
    assert seen_by_app(app) == "callers"
    assert inspect.iscoroutinefunction(app.__call__)  # or servers take it for an older protocol
    server = uvicorn.Config(app, log_config=None)
    server.load()  # it tries whether the application is a function that makes one
    assert server.interface == "asgi3"
    spangrad.shutdown()
    assert vars(Starlette)["__call__"] is original


@pytest.mark.parametrize(
    "headers",
    [
        {c.HEADER_ROLLOUT: ""},
        {c.HEADER_ROLLOUT: "r" * (MAX_ID_CHARS + 1)},
        {c.HEADER_ROLLOUT: "a\x00b"},
        {c.HEADER_ROLLOUT: "a\nspangrad: forged"},
        {c.HEADER_ROLLOUT: "r\udc80"},
        {c.HEADER_ROLLOUT: "r", c.HEADER_ATTEMPT: "-1"},
        {c.HEADER_ROLLOUT: "r", c.HEADER_ATTEMPT: "two"},
        {c.HEADER_ROLLOUT: "r", c.HEADER_ATTEMPT: "9" * 5000},
        {c.HEADER_ROLLOUT: "r", c.HEADER_ATTEMPT: "٣"},
        {c.HEADER_ROLLOUT: None},
        {c.HEADER_ATTEMPT: "1"},
        [("only-a-name",)],
        [(c.HEADER_ROLLOUT.encode(), b"\xff\xfe")],
        None,
        7,
    ],
)
def test_headers_that_can_not_be_ours_are_ignored(recorded: Finish, headers: Any) -> None:
    with spangrad.continue_rollout(headers) as continued:
        assert continued is None


@pytest.mark.parametrize("context", ["", "00-0-0-01", f"00-{'0' * 32}-{'b' * 16}-01", "x" * 100_000])
def test_a_traceparent_that_can_not_be_one_costs_only_the_parent(recorded: Finish, context: str) -> None:
    pairs = [
        (b"X-Spangrad-Rollout", b"r"),
        (b"x-spangrad-rollout", b"second"),
        (b"traceparent", context.encode()),
    ]
    with spangrad.continue_rollout(pairs) as continued:
        assert continued is not None
        assert (continued.rollout_id, continued.attempt, continued.context) == ("r", 0, None)


def test_the_middleware_passes_other_scopes_and_errors_on(recorded: Finish) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])
        raise KeyError("theirs")

    async def nothing(*_: Any) -> None:
        pass

    for scope in ({"type": "lifespan"}, {"type": "websocket", "headers": [(b"x-spangrad-rollout", b"r")]}):
        with pytest.raises(KeyError, match="theirs"):
            asyncio.run(spangrad.RolloutMiddleware(app)(scope, nothing, nothing))
    assert seen == ["lifespan", "websocket"]
