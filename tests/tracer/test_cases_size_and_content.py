"""`cases/capture.md`, Size and content: a long conversation and a large call are whole, or it is said."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import spangrad
from spangrad.store.file_store import FileStore
from spangrad.tracer import conventions as c
from spangrad.tracer.runtime import active
from tests.tracer.canned import completion, serving, whole
from tests.tracer.recording import Recorded, calls
from tests.tracer.stub_server import HubServer, ModelServer
from tests.waiting import wait_until

Finish = Callable[[], list[Recorded]]
LIMITS = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
)


def ask(url: str, prompt: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    assert httpx.post(f"{url}/chat/completions", json=body, timeout=60).status_code == 200


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an application may have set for its own tracing."""
    for name in LIMITS:
        monkeypatch.setenv(name, "8")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")


def test_a_conversation_of_hundreds_of_messages_is_whole(
    small_limits: None, model: ModelServer, recorded: Finish
) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    for number in range(300):
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "yes"},
        ]
    messages.append({"role": "user", "content": "Hello"})
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(200)]
    request = {
        "model": "policy",
        "messages": messages,
        "tools": tools,
        **{f"field_{n}": n for n in range(200)},
    }
    with spangrad.rollout(rollout_id="r-1"):
        httpx.post(f"{model.url}/chat/completions", json=request)
        for _ in range(50):
            spangrad.reward(1.0)
    spans = recorded()
    (call,) = calls(spans)
    assert [m["parts"][0]["content"] for m in call.json(c.INPUT_MESSAGES)] == [m["content"] for m in messages]
    assert call.json(c.TOOL_DEFINITIONS) == tools
    assert call.json(c.REQUEST_EXTRA) == {f"field_{n}": n for n in range(200)}
    assert c.DROPPED not in call.attributes
    (root,) = [span for span in spans if span.is_root]
    assert len(root.events) == 50


def test_a_call_above_every_limit_for_a_message_costs_its_neighbours_nothing(
    hub: HubServer, model: ModelServer
) -> None:
    spangrad.init(store=hub.url)
    hub.hold = threading.Event()
    ask(model.url, "zero")
    runtime = active()
    assert runtime is not None
    wait_until(lambda: not runtime.worker._queue)  # the hub has it, and what follows is one batch
    for prompt in ("one", "two " + "x" * 6 * 2**20, "three"):
        ask(model.url, prompt)
    hub.hold.set()
    assert spangrad.flush()
    large = [request for request in hub.requests if len(request) > 6 * 2**20]
    assert large and all(request.count(b"gen_ai.input.messages") == 1 for request in large)
    assert len({span.span_id for span in hub.spans()}) == 4


HUB = """
import sys
from spangrad.store import hub, serve
hub.MAX_BODY_BYTES = 5 * 2**20
serve.serve(sys.argv[1], port=0, on_ready=lambda url: print(url, flush=True))
"""


@pytest.mark.slow
def test_a_span_that_a_hub_refuses_for_its_size_is_the_only_one_that_is_lost(
    model: ModelServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.duckdb"
    with subprocess.Popen([sys.executable, "-c", HUB, str(path)], stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None
        spangrad.init(store=hub.stdout.readline().strip())
        for prompt in ("one", "two " + "x" * 6 * 2**20, "three"):
            ask(model.url, prompt)
        assert spangrad.flush(60)
        spangrad.shutdown()
        hub.terminate()
    with FileStore(path) as store:
        assert store.stats()["spans"] == 2
    assert "refuses 1 spans" in caplog.text


def test_a_reply_of_many_megabytes_is_whole(recorded: Finish) -> None:
    text = "y" * 8 * 2**20
    with serving(whole(completion(text))) as server:
        ask(f"{server.url}/v1", "x")
    (call,) = calls(recorded())
    found: Any = call.json(c.OUTPUT_MESSAGES)[0]["parts"][0]["content"]
    assert found == text
