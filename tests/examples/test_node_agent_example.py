"""The Node.js agent through a real gateway: its calls are recorded as the engine sampled them."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from spangrad.adapters import Grade, ModelCall, calls_of
from spangrad.store.file_store import FileStore
from spangrad.tracer.gateway import GatewayConfig, running
from tests.examples.loading import EXAMPLES
from tests.gateway.stub_engine import StubEngine, prompt_ids, stub_engine, tokens_of

NODE = shutil.which("node")
AGENT = EXAMPLES / "03_node_agent" / "agent.mjs"
# What an environment does that has no address for every rollout.
WITH_HEADERS = """
const plain = globalThis.fetch;
const ours = {"x-spangrad-rollout": "by-header", "x-spangrad-attempt": "2"};
globalThis.fetch = (url, options) => plain(url, {...options, headers: {...options.headers, ...ours}});
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="there is no `node` on the PATH: install Node.js 18 or newer"),
]


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with stub_engine() as engine:
        yield engine


@pytest.fixture
def recorded(engine: StubEngine, tmp_path: Path) -> Callable[..., list[ModelCall]]:
    """Runs the agent through a gateway; gives what it printed and its calls."""

    def run(path: str, question: str, *options: str) -> list[ModelCall]:
        config = GatewayConfig(engine_url=engine.url, store=str(tmp_path / "store.duckdb"), port=0)
        with running(config) as url:
            printed.append(ask(f"{url}{path}/v1", question, *options))
        with FileStore(tmp_path / "store.duckdb") as store:
            return calls_of(store)

    return run


printed: list[str] = []


def ask(base_url: str, question: str, *options: str) -> str:
    assert NODE is not None
    done = subprocess.run(
        [NODE, *options, str(AGENT), question],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_MODEL": "stub"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(calls: list[ModelCall], rollout_id: str, attempt: int, question: str, engine: StubEngine) -> None:
    answer = tokens_of("Orléans: dry", tools=True)
    assert printed.pop() == "".join(token.delta.get("content", "") for token in answer) + "\n"
    assert [call.grade for call in calls] == [Grade.EXACT, Grade.EXACT], [
        call.grade_reasons for call in calls
    ]
    assert {(call.rollout_id, call.attempt) for call in calls} == {(rollout_id, attempt)}
    for call, sampled, asked in zip(
        calls, (tokens_of("TOOL", tools=True), answer), engine.requests, strict=True
    ):
        (choice,) = call.choices
        assert list(choice.sampled_token_ids or ()) == [token.id for token in sampled]
        assert list(call.prompt_token_ids or ()) == prompt_ids(asked["messages"])
        assert len(choice.logprobs or ()) == len(choice.policy_versions or ()) == len(sampled)
        assert list(call.messages) == asked["messages"]
        assert call.sampling["temperature"] == 0.7
    assert calls[0].messages[0]["content"] == question
    (tool_call,) = calls[0].choices[0].message["tool_calls"]
    assert tool_call["function"] == {"name": "look", "arguments": '{"city": "Orléans"}'}
    assert calls[0].choices[0].finish_reason == "tool_calls"


def test_calls_of_a_node_agent_are_exact_and_belong_to_the_rollout_of_its_address(
    engine: StubEngine, recorded: Callable[..., list[ModelCall]]
) -> None:
    calls = recorded("/rollout/by-address/1", "Use the TOOL for Orléans")
    check(calls, "by-address", 1, "Use the TOOL for Orléans", engine)


def test_calls_of_a_node_agent_belong_to_the_rollout_of_its_header(
    engine: StubEngine, recorded: Callable[..., list[ModelCall]]
) -> None:
    hook = f"data:text/javascript,{quote(WITH_HEADERS)}"
    calls = recorded("", "Use the TOOL for Orléans", "--import", hook)
    check(calls, "by-header", 2, "Use the TOOL for Orléans", engine)


def test_a_node_agent_prints_the_same_with_and_without_the_gateway(
    engine: StubEngine, recorded: Callable[..., list[ModelCall]]
) -> None:
    recorded("/rollout/r-1", "Use the TOOL for Orléans")
    assert printed.pop() == ask(f"{engine.url}/v1", "Use the TOOL for Orléans")
