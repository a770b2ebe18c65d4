"""`spangrad run -- python agent.py`: the example agents, unchanged, are recorded and print what they did."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spangrad.adapters import Grade, ModelCall, calls_of
from spangrad.store.file_store import FileStore
from spangrad.store.records import RolloutStatus, Span
from spangrad.tracer.current import ENVIRONMENT
from tests.examples.loading import EXAMPLES, from_example

pytestmark = pytest.mark.slow

AGENTS = {
    "01_text_to_sql": ["cost/done", "How much did ann spend in may?"],
    "02_calculator": ["62 boxes with 10 apples each and 7 more: how many?"],
}

PARENT = """
import subprocess, sys
agent = [sys.executable, "agent.py", *sys.argv[1:]]
direct = subprocess.run(agent, capture_output=True, text=True, check=True).stdout
below_a_shell = subprocess.check_output(["sh", "-c", '"$@"; exit $?', "sh", *agent], text=True)
print(direct + below_a_shell, end="")
"""
"""An agent that has a Python child, and one below a shell, call the model."""

WITH_OTEL = """
import json, runpy, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class ToFile(SpanExporter):
    def export(self, spans):
        with open(out, "a") as file:
            for span in spans:
                parent = span.parent and format(span.parent.span_id, "x")
                ids = [format(span.context.trace_id, "x"), format(span.context.span_id, "x"), parent]
                file.write(json.dumps([span.name, dict(span.attributes), *ids]) + "\\n")
        return SpanExportResult.SUCCESS

out, sys.argv = sys.argv[1], ["agent.py", *sys.argv[2:]]
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)
sys.path.insert(0, ".")
with trace.get_tracer("theirs").start_as_current_span("the application's own", attributes={"a": 1}):
    runpy.run_path("agent.py", run_name="__main__")
assert trace.get_tracer_provider() is provider
"""


@contextmanager
def expert(example: str) -> Iterator[dict[str, str]]:
    """The environment of an agent whose model is a fresh expert: it answers anew as it answered before."""
    with from_example(example, "expert:serve_expert")(0, 3) as base_url:
        environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
        yield environment | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}


def printed(argv: list[str], example: str) -> str:
    with expert(example) as environment:
        done = subprocess.run(
            argv, cwd=EXAMPLES / example, env=environment, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_run(argv: list[str], example: str, store: Path) -> str:
    run = [sys.executable, "-m", "spangrad", "run", "--store", str(store), "--rollout", "r-1", "--"]
    return printed([*run, *argv], example)


def stored(store: Path) -> tuple[list[ModelCall], list[Span]]:
    with FileStore(store) as opened:
        (rollout,) = opened.rollouts()
        assert (rollout.rollout_id, rollout.status) == ("r-1", RolloutStatus.SUCCEEDED)
        return calls_of(opened), list(opened.spans())


def check_conversation(calls: list[ModelCall], question: str) -> None:
    """Each call holds the conversation so far, and what it holds can be cloned."""
    assert len(calls) >= 1
    for call in calls:
        assert call.rollout_id == "r-1"
        assert call.grade is Grade.TEXT, call.grade_reasons
        assert question in [message["content"] for message in call.messages if message["role"] == "user"]
    for before, after in pairwise(calls):
        assert list(after.messages)[: len(before.messages)] == list(before.messages)
        assert after.messages[len(before.messages)]["role"] == "assistant"


@pytest.mark.parametrize("example", AGENTS)
def test_an_example_agent_is_recorded_without_a_change(example: str, tmp_path: Path) -> None:
    argv = [sys.executable, "agent.py", *AGENTS[example]]
    assert under_run(argv, example, tmp_path / "s") == printed(argv, example)
    calls, spans = stored(tmp_path / "s")
    check_conversation(calls, AGENTS[example][-1])
    assert len({span.trace_id for span in spans}) == 1


@pytest.mark.parametrize("example", AGENTS)
def test_calls_of_an_agents_child_processes_are_its_own(example: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, *AGENTS[example]]
    assert under_run(argv, example, tmp_path / "s") == printed(argv, example)
    calls, spans = stored(tmp_path / "s")
    question = AGENTS[example][-1]
    turns = [index for index, call in enumerate(calls) if len(call.messages) == 2]
    assert len(turns) == 2  # system and user: each child begins a conversation
    check_conversation(calls[: turns[1]], question)
    check_conversation(calls[turns[1] :], question)
    assert len({span.trace_id for span in spans}) == 1


def their_spans(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("example", AGENTS)
def test_the_applications_own_tracing_is_as_without_us(example: str, tmp_path: Path) -> None:
    without = [sys.executable, "-c", WITH_OTEL, str(tmp_path / "without"), *AGENTS[example]]
    with_us = [sys.executable, "-c", WITH_OTEL, str(tmp_path / "with"), *AGENTS[example]]
    assert under_run(with_us, example, tmp_path / "s") == printed(without, example)
    theirs, alone = their_spans(tmp_path / "with"), their_spans(tmp_path / "without")
    assert [span[:2] for span in theirs] == [span[:2] for span in alone]
    calls, spans = stored(tmp_path / "s")
    check_conversation(calls, AGENTS[example][-1])
    assert not {span.span_id for span in spans} & {span[3].rjust(16, "0") for span in theirs}
    assert [span[4] for span in theirs] == [span[4] for span in alone]
