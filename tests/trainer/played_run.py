"""A whole run in this process: store, credit, learner, checkpoints and publishing are real.

Played are vLLM (an HTTP server with its control routes, whose logprobs are the small model's), the agents
(they take what is queued and end it) and Ray (the learner is here).
"""

import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.adapters.building import span, text_attributes, token_attributes
from tests.trainer.json_server import Replying, serving
from tests.trainer.small_policy import make_model, make_policy

from spangrad.errors import SpangradError
from spangrad.store import open_store
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Policy, PolicyDecision, Reward, RewardAuthor, Rollout, Span, Update
from spangrad.tracer import conventions as c
from spangrad.trainer import loop
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.evaluation import Evaluation, evaluate
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.loop import TrainReport
from spangrad.trainer.rollouts import scheduling
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.rollouts.scheduling import RunKeys
from spangrad.trainer.rollouts.worker import RolloutWorker

RUN = """
[run]
id = "r"
updates = 2
[hub]
url = "{folder}/store.duckdb"
[serving]
engine_url = "{url}"
gateway_url = "{url}"
model = "policy"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "agent.py:reward"
[rollout]
groups_per_update = 2
group_size = 2
max_staleness = 0
[learner]
threads = 1
"""
OFF_BY = 0.01
"""Nats between what the played engine says from its second version on and what its weights are."""


@dataclass
class PlayedServer:
    """What one served address was asked for, and how."""

    url: str
    asked: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    version: str = "none"
    weights: Path | None = None
    slow_s: float = 0.0
    """How long it takes to begin an update of weights."""
    is_down: bool = False
    """As a gateway: it takes no flush, and its engine does not answer."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(path)
        match path.partition("?")[0]:
            case "/spangrad/flush":
                assert not self.is_down
                return {"instance": "one", "spans": {"dropped": 0}}
            case "/spangrad/health":
                return {"engine": {"reachable": not self.is_down}}
            case "/start_weight_update":
                time.sleep(self.slow_s)
            case "/weight_info":
                return {"weight_version": self.version}
            case "/v1/models":
                return {"data": [{"id": "policy", "max_model_len": 512}]}
            case "/update_weights":
                self.weights = Path(body["update_info"]["path"])
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/reset_prefix_cache":
                return {"success": True}
            case "/v1/completions":
                rows = enumerate(body["prompt"])
                return {"choices": [{"index": i, "prompt_logprobs": self._logprobs(row)} for i, row in rows]}
        return {}

    def _logprobs(self, row: Sequence[int]) -> list[dict[str, Any] | None]:
        assert self.weights is not None
        model = make_model()
        model.load_state_dict(load_file(self.weights))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([list(row)])).logits[0], -1)
        off = 0.0 if self.version == "0" else OFF_BY
        said = [float(logprobs[place, token]) - off for place, token in enumerate(row[1:])]
        return [None, *({str(t): {"logprob": one}} for t, one in zip(row[1:], said, strict=True))]


@contextmanager
def played_server() -> Iterator[PlayedServer]:
    """Serve until the end of the block."""

    class Handler(Replying):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.content() or b"{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            played.keys.add(self.headers.get("authorization"))
            try:
                said = json.dumps(played.answer(self.path, body)).encode()
            except AssertionError:
                self.close_connection = True
                return
            with contextlib.suppress(BrokenPipeError):  # who asked waited no longer
                self.reply(said)

    with serving(Handler) as url:
        played = PlayedServer(url)
        yield played


@dataclass
class Played:
    """What is left of a run, and what was asked on its way."""

    config: TrainConfig
    report: TrainReport | None = None
    error: str | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    decisions: list[PolicyDecision] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    asked: dict[str, list[str]] = field(default_factory=dict)
    """Paths that were asked of each server."""
    keys: dict[str, set[str | None]] = field(default_factory=dict)
    """What each server was shown."""
    workers: list[int] = field(default_factory=list)
    """How many were asked for."""

    def of_split(self, split: str) -> list[Rollout]:
        return [one for one in self.rollouts if (one.split or "").startswith(split)]

    def tasks(self, split: str) -> list[str]:
        return [str(one.task_id) for one in self.of_split(split)]

    def metric(self, name: str) -> float:
        """Of the first update."""
        assert self.updates, self.error
        return float(self.updates[0].metrics[name])


def write_run(folder: Path, url: str, tasks: Sequence[Mapping[str, Any]], more: str = "") -> Path:
    """The config of a run with these tasks, beside a policy of its own; `more` is further TOML."""
    make_policy(folder / "policy")
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (folder / "agent.py").write_text("def run(task): ...\ndef reward(task, output): ...\n")
    file = folder / "run.toml"
    file.write_text(RUN.format(folder=folder, url=url) + more)
    return file


class Agents:
    """Takes the place of Ray's workers: ends at once what is queued, as the tasks say.

    A task is `{"task_id", "rewards": of each member}`.
    """

    def __init__(
        self, played: Played, *, dull: int = 0, is_late: bool = False, gets_worse: bool = False
    ) -> None:
        """Of one run.

        Args:
            played: Is told what happens.
            dull: So many rollouts get the same reward before the tasks' own count.
            is_late: The last member of every group but the first never ends.
            gets_worse: Rollouts of evaluations get no reward but with the first version.
        """
        self.played = played
        self.store: FileStore | None = None
        self._dull = dull
        self._is_late = is_late
        self._gets_worse = gets_worse
        self._ended = 0
        self._reports: list[WorkerReport] = []

    has_idle = True
    is_working = False

    def hired(self, count: int) -> "Agents":
        """What a run or an evaluation asks for."""
        self.played.workers.append(count)
        return self

    def open(self, target: str, key: str | None = None) -> FileStore:
        """What the run opens is where the agents take from."""
        store = open_store(target, key)
        assert isinstance(store, FileStore)
        self.store = store
        return store

    def send(self, worker: WorkerConfig) -> None:
        """End everything."""
        assert self.store is not None
        for rollout in self.store.claim(
            worker="played",
            limit=10_000,
            run_id=worker.run_id,
            split=worker.split,
            policy_version=worker.policy_version,
        ):
            self._end(self.store, rollout, worker.policy_version or 0)
        self._reports.append(WorkerReport())

    def returned(self, *, within_s: float = 0.0) -> list[WorkerReport]:
        """One for every time that they were sent."""
        told, self._reports = self._reports, []
        return told

    def stop(self) -> None:
        """Nothing is left of them."""

    def _end(self, store: FileStore, rollout: Rollout, version: int) -> None:
        self._ended += 1
        rewards = (rollout.task or {})["rewards"]
        member = int(rollout.rollout_id[-2:]) if rollout.split == "train" else 0
        if self._is_late and member == 2 and not str(rollout.group_id).endswith("g000"):
            return
        trace = zlib.crc32(f"{rollout.rollout_id} {rollout.attempt}".encode())
        store.put_otlp(encode_request(_spans(rollout.rollout_id, trace, member, version)))
        reward = 0.5 if self._ended <= self._dull else rewards[member]
        if self._gets_worse and version and rollout.split != "train":
            reward = 0.0
        given = [Reward(rollout.rollout_id, reward, attempt=rollout.attempt)]
        store.put_rewards(given, author=RewardAuthor.EVALUATOR)
        store.finish(rollout.rollout_id, rollout.attempt)


class RealAgents(Agents):
    """A real worker of this process, with the agent in a process of its own; no call is recorded."""

    def open(self, target: str, key: str | None = None) -> Any:
        """The hub that the worker asks, too."""
        return open_store(target, key)

    def send(self, worker: WorkerConfig) -> None:
        """Work until nothing is left."""
        real = RolloutWorker()
        try:
            self._reports.append(real.run(worker))
        finally:
            real.stop()


def _spans(rollout_id: str, trace: int, member: int, version: int) -> list[Span]:
    """A call that all members begin with, one in which they part, and one more for every member before it."""
    names = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT: 0}
    spans = [span("r", trace=f"{trace:x}", attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)]
    ids, messages = [1, 2], [{"role": "user", "parts": [{"type": "text", "content": "q"}]}]
    for index, reply in enumerate([[3, 5], [3, 10 + member], *[[3, 7]] * member]):
        seen = {c.INPUT_MESSAGES: json.dumps(messages), c.RESPONSE_ID: f"{rollout_id}-{index}"}
        told = text_attributes(**names, **token_attributes(ids, reply, version=version), **seen)
        spans.append(span(f"c{index}", trace=f"{trace:x}", parent="r", start_ns=10 + index, attributes=told))
        ids = [*ids, *reply, 8]
        for role in ("assistant", "user"):
            messages = [*messages, {"role": role, "parts": [{"type": "text", "content": "on"}]}]
    return spans


@contextmanager
def played_by(agents: Agents) -> Iterator[None]:
    """Agents and the learner are here, instead of in Ray's actors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Workers", agents.hired)
        patch.setattr(scheduling, "Workers", agents.hired)
        patch.setattr(loop, "open_store", agents.open)
        patch.setattr(loop, "start_ray", lambda workers, cluster: None)
        patch.setattr(loop, "start_learner", Learner)
        patch.setattr(loop, "call", lambda method, *given, **named: method(*given, **named))
        yield


def play(config: TrainConfig, *, are_agents_real: bool = False, **how: Any) -> Played:
    """`train` with the played parts, and agents like `how`; an error of ours is a part of what is left."""
    played = Played(config)
    agents = RealAgents(played) if are_agents_real else Agents(played, **how)
    with played_by(agents):
        try:
            played.report = loop.train(config)
        except SpangradError as error:
            played.error = str(error)
    with open_store(config.hub.url) as store:
        played.rollouts = store.rollouts(run_id=config.run.id)
        played.rewards = store.rewards([one.rollout_id for one in played.rollouts])
        played.updates = store.updates(config.run.id)
        played.policies = store.policies(config.run.id)
        played.decisions = store.decisions(config.run.id)
    return played


def play_evaluation(config: TrainConfig) -> Evaluation:
    """`evaluate` as a demo asks for it before and after, with the played agents."""
    agents = Agents(Played(config))
    with played_by(agents), agents.open(config.hub.url) as store:
        return evaluate(store, config, RunKeys(), label="before", policy_version=0)
