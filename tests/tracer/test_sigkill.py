"""SIGKILL costs at most the call that is in progress: what had returned is in the store afterwards."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spangrad.store.file_store import FileStore
from spangrad.tracer import conventions as c
from tests.tracer.recording import spans_of_request
from tests.tracer.stub_server import HubServer, ModelServer

AGENT = """
import os, signal, sys, openai, spangrad
spangrad.init(store=sys.argv[1], spool_dir="spool", service_name="agent")
client = openai.OpenAI(base_url=sys.argv[2], api_key="k", max_retries=0)
def ask(prompt, stream=False):
    message = {"role": "user", "content": prompt + " " + "x" * 20_000}
    got = client.chat.completions.create(model="policy", messages=[message], stream=stream)
    if stream:
        list(got)
name, count = sys.argv[3], int(sys.argv[4])
for number in range(count):
    with spangrad.rollout(rollout_id=f"{name}-{number}"):
        ask(f"{name}-{number}-first", stream=True)
        ask(f"{name}-{number}-second")
        spangrad.reward(number)
with spangrad.rollout(rollout_id=f"{name}-open"):
    with spangrad.step("last step"):
        ask(f"{name}-open-last")
    os.kill(os.getpid(), signal.SIGKILL)
"""
NEXT = "import spangrad, sys; spangrad.init(store=sys.argv[1], spool_dir='spool'); assert spangrad.flush(60)"
COUNTS = (0, 1, 2, 20)

pytestmark = pytest.mark.slow


def run(folder: Path, code: str, *arguments: object) -> int:
    program = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(program, cwd=folder, timeout=120).returncode


def first_words(count: int, name: str) -> list[str]:
    finished = [f"{name}-{number}-{which}" for number in range(count) for which in ("first", "second")]
    return [*finished, f"{name}-open-last"]


@pytest.mark.parametrize("is_hanging", [False, True], ids=["hub", "hub that hangs"])
def test_sigkill_costs_no_call_that_had_returned_for_a_hub(
    model: ModelServer, hub: HubServer, tmp_path: Path, is_hanging: bool
) -> None:
    expected = []
    for number, count in enumerate(COUNTS):
        if is_hanging:
            hub.hold = threading.Event()
        assert run(tmp_path, AGENT, hub.url, model.url, f"a{number}", count) == -9
        if hub.hold is not None:
            hub.hold.set()
        expected += first_words(count, f"a{number}")
    assert run(tmp_path, NEXT, hub.url) == 0
    spans = {span.span_id: span for request in hub.requests for span in spans_of_request(request)}
    asked = [span.prompt().split()[0] for span in spans.values() if span.is_call]
    assert sorted(asked) == sorted(expected)
    ended = {span[c.ROLLOUT_ID] for span in spans.values() if span.is_root}
    assert ended == {f"a{number}-{n}" for number, count in enumerate(COUNTS) for n in range(count)}
    assert [span.name for span in spans.values()].count("last step") == len(COUNTS)
    assert {span.resource["service.name"] for span in spans.values()} == {"agent"}
    assert list((tmp_path / "spool").iterdir()) == []


def test_sigkill_costs_no_call_that_had_returned_for_a_file(model: ModelServer, tmp_path: Path) -> None:
    path, folder = tmp_path / "store.duckdb", tmp_path / "store.duckdb.spool"
    expected = []
    for number, count in enumerate(COUNTS):
        assert run(tmp_path, AGENT, path, model.url, f"a{number}", count) == -9
        expected += first_words(count, f"a{number}")
        if number == 1:
            FileStore(path).close()
        assert len(list(folder.glob("*.journal"))) <= 1  # the next process has taken in the one before
    with FileStore(path) as store:
        spans = list(store.spans())
        asked = [
            span.attributes[c.INPUT_MESSAGES].split('"content":"')[1].split()[0]
            for span in spans
            if c.INPUT_MESSAGES in span.attributes
        ]
    assert sorted(asked) == sorted(expected)
    assert list(folder.iterdir()) == []
