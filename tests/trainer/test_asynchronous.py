"""Whole updates, with rollouts that go on meanwhile: store, queue, feeder, credit and learner are real.

Only what samples is not: workers are threads that end a rollout with tokens that follow from its name.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.building import span, text_attributes, token_attributes
from tests.trainer.scripted_crew import end_claimed
from tests.trainer.small_policy import make_policy
from tests.trainer.stub_weights import stub_weights
from tests.waiting import wait_until

from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout, Span, Update
from spangrad.tracer import conventions as c
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.crediting import Crediting
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.loop import Run
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.update_metrics import Metrics

UPDATES, GROUPS, SIZE = 4, 3, 2
AGENT = """
def run(task): ...
def tasks(split, n, seed): return [{"task_id": f"{seed}-{i}"} for i in range(n)]
def reward(task, output): ...
"""


def end(rollout: Rollout) -> tuple[list[Span], float]:
    """One call of tokens, and a reward, that follow from the rollout's name; sampled as it was claimed."""
    rng = random.Random(rollout.rollout_id)
    names = {c.ROLLOUT_ID: rollout.rollout_id, c.ATTEMPT: 0}
    trace = f"{rng.getrandbits(64):x}"
    root = span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)
    sampled = [rng.randrange(3, 300) for _ in range(rng.randrange(2, 9))]
    tokens = token_attributes([1, 2, rng.randrange(3, 300)], sampled, version=rollout.policy_version)
    told = text_attributes(**names, **tokens) | {c.RESPONSE_ID: rollout.rollout_id}
    # The first member of a group is the best, so that every group says something.
    reward = rng.random() + (rollout.rollout_id[-2:] == "00")
    return [root, span("a", trace=trace, parent="r", start_ns=10, attributes=told)], reward


class Threads:
    """Workers that take one rollout after the other, some milliseconds each, as far as there are permits."""

    def __init__(self, run: Run, permits: int) -> None:
        assert isinstance(run.store, FileStore)
        self._store, self._run = run.store, run
        self.permits = threading.Semaphore(permits)
        self._is_stopping = False
        self._working: list[threading.Thread] = []
        self._rng = random.Random(0)

    @property
    def is_working(self) -> bool:
        self._working = [one for one in self._working if one.is_alive()]
        return bool(self._working)

    @property
    def has_idle(self) -> bool:
        return not self.is_working

    def send(self, worker: WorkerConfig) -> None:
        self._working = [threading.Thread(target=self._work) for _ in range(4)]
        for one in self._working:
            one.start()

    def _work(self) -> None:
        while not self._is_stopping:
            if not self.permits.acquire(timeout=0.05):
                continue
            version = self._run.served.version
            claimed = self._store.claim(worker="w", run_id="r", split="train", policy_version=version)
            if not claimed:
                self.permits.release()
                return
            time.sleep(self._rng.uniform(0.0, 0.03))
            end_claimed(self._store, claimed[0], end)

    def returned(self) -> list[WorkerReport]:
        return []

    def stop(self) -> None:
        self._is_stopping = True
        for one in self._working:
            one.join()


def learner(config: TrainConfig, model: Path) -> Learner:
    lr, seed = config.learner.lr, config.run.seed
    return Learner(LearnerConfig(model_path=str(model), lr=lr, seed=seed, threads=1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Makes runs whose learner is here instead of in an actor."""
    monkeypatch.setattr("spangrad.trainer.loop.call", lambda method, *given, **named: method(*given, **named))
    (tmp_path / "agent.py").write_text(AGENT)
    made: list[Run] = []

    def make(staleness: int, store: Path) -> Run:
        file = tmp_path / "run.toml"
        file.write_text(f"""
            [run]
            id = "r"
            folder = "{store.stem}"
            updates = {UPDATES}
            [hub]
            url = "{store}"
            [serving]
            engine_url = "{engine.url}"
            gateway_url = "{engine.url}"
            model = "{model}"
            [agent]
            function = "agent.py:run"
            tasks = "agent.py:tasks"
            reward = "agent.py:reward"
            [rollout]
            groups_per_update = {GROUPS}
            group_size = {SIZE}
            max_staleness = {staleness}
            [learner]
            lr = 1e-2
        """)
        run = Run(load_config(file))
        run.learner = learner(run.config, model)
        made.append(run)
        return run

    with stub_weights() as engine:
        yield make
    for run in made:
        run.store.close()


def all_updates(run: Run, crew: Threads) -> list[Metrics]:
    """A run from beginning to end; its weights are served as soon as they are there."""
    history: list[Metrics] = []
    run.served.publish(0, run.learner.export_weights)
    with run.feed(crew):
        while run.update_index < UPDATES:
            history.append(run.learn(*run.collect()))
            run.served.publish(run.policy_version, run.learner.export_weights)
            run.source.advance(update_index=run.update_index, policy_version=run.policy_version)
    return history


def plain_loop(run: Run, model: Path, store: FileStore) -> tuple[list[Metrics], Learner]:
    """One set after the other."""
    history: list[Metrics] = []
    plain, crediting = learner(run.config, model), Crediting(run.config, model)
    for index in range(UPDATES):
        rollouts = [rollout for members in run._set(index) for rollout in members]
        store.enqueue(rollouts)
        for claimed in store.claim(worker="w", limit=len(rollouts), policy_version=index):
            end_claimed(store, claimed, end)
        ended = store.rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])
        history.append(plain.update(crediting.rows(store, ended, index).rows, policy_version=index))
    return history, plain


def weights(one: Learner) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = one.model.state_dict()
    return state


def test_with_no_staleness_losses_and_weights_are_those_of_a_plain_loop_bit_for_bit(
    make_run: Callable[..., Run], model: Path, tmp_path: Path
) -> None:
    run = make_run(0, tmp_path / "asynchronous.duckdb")
    history = all_updates(run, Threads(run, permits=10_000))
    with FileStore(tmp_path / "plain.duckdb") as store:
        expected, plain = plain_loop(run, model, store)
    assert [one["loss/total"] for one in history] == [one["loss/total"] for one in expected]
    assert [one["grad/norm"] for one in history] == [one["grad/norm"] for one in expected]
    trained = weights(run.learner)
    assert all(torch.equal(trained[name], value) for name, value in weights(plain).items())
    assert all(one["data/staleness_max"] == 0.0 for one in history)


def consumed(updates: list[Update]) -> Counter[str]:
    return Counter(rollout_id for update in updates for rollout_id in update.rollout_ids)


def test_with_staleness_1_rollouts_start_while_the_learner_works_and_none_is_older(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run(1, tmp_path / "ahead.duckdb")
    crew = Threads(run, permits=GROUPS * SIZE)
    worked: list[tuple[int, int]] = []
    update = run.learner.update

    def began_since(time_ns: int) -> bool:
        return any((rollout.started_ns or 0) > time_ns for rollout in run.store.rollouts(run_id="r"))

    def slow_update(*given: Any, **named: Any) -> Any:
        """Goes on until a rollout of the next set has begun, if there is one."""
        began = time.time_ns()
        crew.permits.release(GROUPS * SIZE)
        if run.update_index < UPDATES - 1:
            wait_until(lambda: began_since(began))
        metrics = update(*given, **named)
        worked.append((began, time.time_ns()))
        return metrics

    run.learner.update = slow_update
    history = all_updates(run, crew)
    rollouts = run.store.rollouts(run_id="r", split="train")
    for began, ended in worked[:-1]:
        assert any(began < (rollout.started_ns or 0) < ended for rollout in rollouts)
    updates = run.store.updates("r")
    assert consumed(updates) == Counter(rollout.rollout_id for rollout in rollouts)
    assert len(rollouts) == UPDATES * GROUPS * SIZE
    staleness = {sample.staleness for update in updates for sample in update.samples}
    assert staleness == {0, 1}
    assert all(one.get("dropped/too_stale", 0.0) == 0.0 for one in history)
    for one in history:
        shares = [one.get(f"data/staleness_{updates}", 0.0) for updates in (0, 1)]
        assert sum(shares) == pytest.approx(1.0)
        assert one["data/staleness_mean"] == pytest.approx(shares[1])
