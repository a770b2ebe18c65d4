"""`spangrad ingest` killed in the middle and run again: the store is as if nothing had happened."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spangrad.adapters.calls import calls_of
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord
from tests.adapters.building import span, text_attributes
from tests.command_line import spangrad

pytestmark = pytest.mark.slow

CONVERSATIONS, TURNS = 150, 4
KILLS = 4


def traces(folder: Path) -> list[Path]:
    """A raw client's traces of one span each, verdicts in a file of log records, and rows with scores."""
    spans, verdicts = [], []
    for number in range(CONVERSATIONS):
        history: list[dict[str, Any]] = []
        for turn in range(TURNS):
            history = [*history, told("user", f"question {turn} of {number}: " + "why? " * 50)]
            reply = told("assistant", f"answer {turn} of {number}")
            attributes = text_attributes(
                **{
                    "gen_ai.input.messages": json.dumps(history),
                    "gen_ai.output.messages": json.dumps([{**reply, "finish_reason": "stop"}]),
                    "gen_ai.response.id": f"r-{number}-{turn}",
                }
            )
            at = number * TURNS + turn + 1
            spans.append(span("a", trace=f"{at:x}", scope="raw", start_ns=100 * at, attributes=attributes))
            history = [*history, reply]
        verdict = {"gen_ai.evaluation.name": "good", "gen_ai.evaluation.score.value": number % 2}
        last = spans[-1]
        verdicts.append(
            LogRecord(last.trace_id, last.span_id, at, at, "gen_ai.evaluation.result", attributes=verdict)
        )
    rows = [
        {
            "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}],
            "reward": n,
        }
        for n in range(200)
    ]
    files = [folder / "traces.pb", folder / "verdicts.pb", folder / "rows.jsonl"]
    parts = [encode_request(spans[at : at + 50]) for at in range(0, len(spans), 50)]
    files[0].write_bytes(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    files[1].write_bytes(encode_logs(verdicts))
    files[2].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return files


def told(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def content(store: Path) -> dict[str, Any]:
    """All that an ingest puts into a store, but the time at which a reward without one was given."""
    with FileStore(store) as opened:
        return {
            "spans": list(opened.spans()),
            "logs": list(opened.logs()),
            "calls": calls_of(opened),
            "summaries": opened.query("SELECT * FROM calls ORDER BY call_id"),
            "sessions": opened.query("SELECT * FROM sessions ORDER BY trace_id"),
            "rollouts": sorted((r.rollout_id, r.status, r.started_ns, r.ended_ns) for r in opened.rollouts()),
            "rewards": sorted((r.rollout_id, r.call_id or "", r.name, r.value) for r in opened.rewards()),
        }


def test_an_ingest_that_was_killed_and_run_again_leaves_nothing_out_and_nothing_twice(tmp_path: Path) -> None:
    files = list(map(str, traces(tmp_path)))
    whole, killed = tmp_path / "whole.duckdb", tmp_path / "killed.duckdb"
    began = time.monotonic()
    assert spangrad("ingest", *files, "--store", str(whole)).returncode == 0
    took_s = time.monotonic() - began
    command = [sys.executable, "-m", "spangrad", "ingest", *files, "--store", str(killed)]
    ends = []
    for number in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(took_s * (0.35 + 0.6 * number / KILLS))
        except subprocess.TimeoutExpired:
            process.kill()
        ends.append(process.wait(60))
    assert -9 in ends
    assert spangrad("ingest", *files, "--store", str(killed)).returncode == 0
    expected, found = content(whole), content(killed)
    for what, things in expected.items():
        assert found[what] == things, what
    assert len(expected["sessions"]) == CONVERSATIONS * TURNS + 200
    assert len(expected["rewards"]) == CONVERSATIONS + 200
