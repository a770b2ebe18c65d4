"""Make a small Langfuse export to try `clone_export.py` with; whoever has one does not need this file.

The agent of examples/02_calculator, unchanged, solves problems; its scripted expert plays the model,
and every exchange is noted as Langfuse's wrapper of OpenAI's client notes it. The rows have the columns
of Langfuse's blob export, and the same arguments give the same rows.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from spangrad.trainer.policies.scripted_model import serve_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "02_calculator"))
agent, expert, reward, tasks = map(import_module, ("agent", "expert", "reward", "tasks"))

SCORE = "right"
"""Name of the scores: 1 if the answer is the solution."""
RUNS_PER_TASK = 2
UNSCORED_EVERY = 10
"""Nobody looked at every tenth trace: it has no score, which is not a score of 0."""
START = datetime(2026, 11, 2, 9)


class Recording:
    """What Langfuse would have of a model that the expert plays."""

    def __init__(self, seed: int) -> None:
        self.observations: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self._seed = seed
        self._trace_id = self._root_id = ""
        self._clock = START

    def begin_trace(self, name: str) -> None:
        self._trace_id, self._root_id = _hex(name, 32), _hex(f"{name} root", 16)

    def reply(self, messages: Sequence[Mapping[str, Any]], asked_before: int) -> Mapping[str, Any]:
        """The expert's next message, noted as a generation."""
        message: Mapping[str, Any] = expert.reply(messages, self._seed, asked_before=asked_before)
        self._observe(
            "GENERATION",
            "OpenAI-generation",
            {"tools": agent.TOOLS, "messages": messages},
            message,
            parent=self._root_id,
            provided_model_name="expert",
            model_parameters=json.dumps({"temperature": 1.0, "max_completion_tokens": agent.MAX_TOKENS}),
        )
        return message

    def end_trace(self, task: Mapping[str, Any], output: Mapping[str, Any], score: float | None) -> None:
        self._observe("AGENT", "calculator-agent", {"args": [task]}, output, trace_name="calculator-agent")
        if score is None:
            return
        self.scores.append(
            {
                "id": f"score-{self._trace_id[:16]}",
                "timestamp": self._now(),
                "project_id": "proj-example",
                "environment": "default",
                "trace_id": self._trace_id,
                "observation_id": None,
                "session_id": None,
                "dataset_run_id": None,
                "name": SCORE,
                "value": score,
                "source": "API",
                "comment": None,
                "data_type": "BOOLEAN",
                "string_value": str(bool(score)),
                "created_at": self._now(),
                "updated_at": self._now(),
            }
        )

    def _observe(
        self, kind: str, name: str, asked: object, told: object, *, parent: str = "", **more: str
    ) -> None:
        start = self._now()
        self.observations.append(
            {
                "id": _hex(f"{self._trace_id} {len(self.observations)}", 16) if parent else self._root_id,
                "trace_id": self._trace_id,
                "project_id": "proj-example",
                "environment": "default",
                "type": kind,
                "parent_observation_id": parent,
                "start_time": start,
                "end_time": self._now(),
                "name": name,
                "metadata": {},
                "level": "DEFAULT",
                "status_message": "",
                "input": json.dumps(asked),
                "output": json.dumps(told),
                "provided_model_name": "",
                "model_parameters": "",
                "usage_details": {},
                "completion_start_time": None,
                "session_id": "",
                "tags": [],
                **more,
            }
        )

    def _now(self) -> str:
        self._clock += timedelta(milliseconds=20)
        return self._clock.isoformat(" ", "microseconds")


def make_export(folder: Path, *, traces: int = 1200, seed: int = 0) -> list[Path]:
    """Run the agent, write `observations.jsonl` and `scores.jsonl`, and return their paths."""
    recording = Recording(seed)
    with serve_model(recording.reply) as base_url:
        os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
        todo = tasks.tasks("train", -(-traces // RUNS_PER_TASK), seed)
        for number in range(traces):
            task = todo[number // RUNS_PER_TASK]
            recording.begin_trace(f"{seed} {number}")
            output = agent.run(task)
            score = None if number % UNSCORED_EVERY == 9 else reward.reward(task, output)
            recording.end_trace(task, output, score)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "observations.jsonl", folder / "scores.jsonl"]
    for path, rows in zip(paths, (recording.observations, recording.scores), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def _hex(name: str, digits: int) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:digits]
