"""`cases/capture.md`, Duplicates: one call is one call, however many layers and HTTP attempts it took."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest

import spangrad
from spangrad.adapters import Grade, ModelCall, calls_of
from spangrad.store.file_store import FileStore
from spangrad.tracer.gateway import GatewayConfig, running
from tests.gateway.stub_engine import prompt_ids, stub_engine, tokens_of
from tests.tracer.canned import completion, serving, whole

AGENTS = {
    "openai": """
import openai
sdk = openai.OpenAI(base_url=url, api_key="k")
result = sdk.chat.completions.create(model="m", messages=messages, stream=stream)
""",
    "langchain": """
import langchain_openai
chat = langchain_openai.ChatOpenAI(base_url=url, api_key="k", model="m")
result = (chat.stream if stream else chat.invoke)("a b")
""",
    "litellm": """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
result = litellm.completion(model="openai/m", api_base=url, api_key="k", messages=messages, stream=stream)
""",
}
BEFORE = """
import sys
url, stream, messages = sys.argv[1], sys.argv[2] == "stream", [{"role": "user", "content": "a b"}]
"""
AFTER = """
for part in result if stream else (): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("agent", AGENTS)
def test_a_call_that_client_and_gateway_record_is_one_exact_call(
    tmp_path: Path, agent: str, way: str
) -> None:
    """The client's span names rollout and step, the gateway's has ids, logprobs and version."""
    store = tmp_path / "store.duckdb"
    with stub_engine() as engine:
        with running(GatewayConfig(engine_url=engine.url, store=str(store), port=0)) as url:
            run = [sys.executable, "-m", "spangrad", "run", "--store", str(store), "--rollout", "r-1", "--"]
            subprocess.run(
                [*run, sys.executable, "-c", BEFORE + AGENTS[agent] + AFTER, f"{url}/v1", way],
                check=True,
                timeout=240,
            )
        assert len(engine.requests) == 1
        asked = engine.requests[0]["messages"]
    with FileStore(store) as opened:
        spans = [span for span in opened.spans() if "gen_ai.operation.name" in span.attributes]
        (call,) = calls_of(opened)
    assert len(spans) == 2
    assert (call.grade, call.rollout_id) == (Grade.EXACT, "r-1"), call.grade_reasons
    assert set(call.span_ids) == {span.span_id for span in spans}
    assert list(call.prompt_token_ids or ()) == prompt_ids(asked)
    assert list(call.choices[0].sampled_token_ids or ()) == [t.id for t in tokens_of("a b", tools=False)]


def test_an_sdks_silent_retries_are_one_clean_call_with_its_own_latency(tmp_path: Path) -> None:
    """429, 429, 200: two failed attempts, of no use for training, and one call without their wait."""
    limited = whole({"error": {"message": "slow down"}}, 429)
    spangrad.init(store=tmp_path / "s")
    with serving(limited, limited, whole(completion("Hi"))) as server:
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=2)
        with sdk, spangrad.rollout(rollout_id="r-1"):
            sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert len(server.asked) == 3
    first, second, answered = graded(tmp_path / "s")
    for failed in (first, second):
        assert failed.grade is Grade.UNUSABLE
        assert failed.error is not None and failed.error.startswith("429") and not failed.choices
    assert answered.grade is Grade.TEXT
    assert first.end_ns <= second.start_ns and second.end_ns <= answered.start_ns


def test_a_retry_by_the_agent_is_a_second_sample(tmp_path: Path) -> None:
    spangrad.init(store=tmp_path / "s")
    with (
        serving(whole(completion("no JSON")), whole(completion("{}"))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as sdk,
    ):
        content = ""
        while content != "{}":
            reply = sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            content = reply.choices[0].message.content or ""
    calls = graded(tmp_path / "s")
    assert [call.choices[0].message["content"] for call in calls] == ["no JSON", "{}"]
    assert {call.grade for call in calls} == {Grade.TEXT}


def graded(store: Path) -> list[ModelCall]:
    assert spangrad.shutdown()
    with FileStore(store) as opened:
        return calls_of(opened)
