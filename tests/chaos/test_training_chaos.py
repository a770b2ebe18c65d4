"""A demo run whose processes are killed at random ends like one that nobody disturbs.

SPANGRAD_CHAOS_S: how long, in seconds (`make chaos`: 120; without it the test is left out); the run then goes
on to its end.
SPANGRAD_CHAOS_SEED: which kills, and when. SPANGRAD_CHAOS_UPDATES: of the run. SPANGRAD_CHAOS_POLICY: folder
of the policy that it begins with; by default it is made, as `spangrad demo` does.

* SIGKILL of the trainer, a learner rank, a rollout worker, the hub, the gateway, the engine: what mends it
  is `spangrad up`, and somebody who starts the trainer again when it has ended.
* Every finished rollout is trained once, or is of the sets that were to come; no call of a trained rollout
  is lost or of another attempt.
* The policy is as good: Wilson's intervals of held-out success have numbers in common.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.keys import Keys
from spangrad.store.records import RolloutStatus
from spangrad.trainer.processes import free_port
from tests.chaos.process_tree import find
from tests.chaos.test_chaos import ROOT, SECONDS, SEED, SPANGRAD, answers, start
from tests.waiting import wait_until

UPDATES = int(os.environ.get("SPANGRAD_CHAOS_UPDATES", "12"))
POLICY = os.environ.get("SPANGRAD_CHAOS_POLICY")
GROUPS, SIZE, STALENESS = 4, 8, 1
PARTS = [sys.executable, "-m", "tests.chaos.demo_parts"]
ENDS_IN_S: Final = 1200
"""How long a run may take that nobody disturbs (any more)."""
OF_STACK: Final = {"hub": "spangrad hub", "gateway": "spangrad gateway", "engine": "vllm.entrypoints"}
OF_TRAINER: Final = {"learner rank": "ray::RayTrainWorker", "rollout worker": "ray::RolloutWorker"}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + 3 * ENDS_IN_S),
    pytest.mark.skipif("SPANGRAD_CHAOS_S" not in os.environ, reason="it takes minutes: `make chaos`"),
]


@dataclass
class Ground:
    """What `spangrad up` keeps running, and a run on it."""

    folder: Path
    stack: ExitStack
    model: str
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(3)])

    def __post_init__(self) -> None:
        """Start it, and wait until it serves."""
        hub, gateway, engine = map(str, self.ports)
        argv = [*SPANGRAD, "up", self.model, "--folder", ".", "--store", "store.duckdb"]
        argv += ["--hub-port", hub, "--gateway-port", gateway, "--engine-port", engine]
        self.up = start(argv, self.folder / "up", self.stack)
        wait_until(lambda: answers(f"http://127.0.0.1:{gateway}/spangrad/health"), timeout_s=300)
        keys = Keys.load(self.folder / "up" / "keys.json")
        self.store: Store = open_store(f"http://127.0.0.1:{hub}", keys.trainer)
        self.stack.callback(self.store.close)

    def settings(self, run_id: str) -> list[str]:
        hub, gateway, engine = (f"http://127.0.0.1:{port}" for port in self.ports)
        return [
            *(f"hub.url={hub}", f"hub.keys={self.folder}/up/keys.json", f"serving.engine_url={engine}"),
            *(f"serving.gateway_url={gateway}", f"serving.model={self.model}", f"run.id={run_id}"),
            *(f"run.folder={self.folder}/runs", f"run.updates={UPDATES}", "agent.max_attempts=1000"),
            *(f"rollout.groups_per_update={GROUPS}", f"rollout.group_size={SIZE}"),
            *(f"rollout.max_staleness={STALENESS}", f"learner.decay_updates={UPDATES}"),
            *("agent.concurrency=24", "learner.workers=2", "learner.threads=1"),
        ]

    def train(self, run_id: str) -> "subprocess.Popen[str]":
        argv = [*PARTS, "train", *self.settings(run_id)]
        return start(argv, self.folder / run_id, self.stack)

    def success(self, run_id: str) -> dict[str, Any]:
        """Of the policy that is served, on held-out tasks."""
        argv = [*PARTS, "evaluate", str(UPDATES), *self.settings(run_id)]
        found: dict[str, Any] = json.loads(said_by(start(argv, self.folder / run_id, self.stack))[-1])
        return found


def said_by(process: "subprocess.Popen[str]") -> list[str]:
    """Wait until a process ends well: the lines that it said."""
    out, _ = process.communicate(timeout=ENDS_IN_S)
    assert process.returncode == 0, out
    return out.splitlines()


def disturb(ground: Ground, run_id: str, rng: random.Random) -> tuple[Counter[str], int]:
    """Kill something at random until the time is over; start the trainer again until all updates are made.

    Returns:
        What was killed how often, and how often the trainer was started.
    """
    killed: Counter[str] = Counter()
    trainer, starts, began = ground.train(run_id), 1, time.monotonic()
    while time.monotonic() - began < SECONDS + ENDS_IN_S:
        try:
            if trainer.wait(rng.uniform(5, 45)) == 0:
                return killed, starts
            trainer, starts = ground.train(run_id), starts + 1
        except subprocess.TimeoutExpired:
            if time.monotonic() - began < SECONDS:
                killed += kill_one(trainer.pid, ground.up.pid, rng)
    raise AssertionError(f"it has not ended; killed: {killed}, {starts} trainers; {log_of(ground, run_id)}")


def kill_one(trainer: int, up: int, rng: random.Random) -> Counter[str]:
    """SIGKILL for one process of one kind, of the kinds that there are now."""
    there: dict[str, Sequence[int]] = {"trainer": [trainer]}
    there |= {kind: find(trainer, words) for kind, words in OF_TRAINER.items()}
    there |= {kind: find(up, words) for kind, words in OF_STACK.items()}
    kind = rng.choice([kind for kind, pids in there.items() if pids])
    os.kill(rng.choice(there[kind]), signal.SIGKILL)
    return Counter([kind])


def log_of(ground: Ground, run_id: str) -> str:
    return (ground.folder / run_id / "log").read_text()[-3000:]


def check_ledger(store: Store, run_id: str) -> None:
    """Each finished rollout was trained once, whole, or is of the sets that were to come."""
    updates = store.updates(run_id)
    assert [update.update_index for update in updates] == list(range(UPDATES))
    consumed = Counter(name for update in updates for name in update.rollout_ids)
    assert set(consumed.values()) == {1}
    rollouts = {one.rollout_id: one for one in store.rollouts(run_id=run_id, split="train")}
    assert consumed.keys() <= rollouts.keys()
    for update in updates:
        assert {rollouts[name].consumed_by for name in update.rollout_ids} == {update.update_index}
    left = [one for name, one in rollouts.items() if name not in consumed]
    assert {one.consumed_by for one in left} <= {None}
    assert len(left) <= (STALENESS + 1) * GROUPS * SIZE
    assert {rollouts[name].status for name in consumed} == {RolloutStatus.SUCCEEDED}
    for update in updates:
        calls = Counter(sample.call_id for sample in update.samples)
        assert set(calls.values()) == {1}
        assert {(s.rollout_id, s.attempt) for s in update.samples} <= {
            (name, rollouts[name].attempt) for name in update.rollout_ids
        }
        assert {sample.staleness for sample in update.samples} <= set(range(STALENESS + 1))
    asked = "SELECT DISTINCT c.rollout_id FROM calls c JOIN rollouts r USING (rollout_id, attempt)"
    with store.query_arrow(f"{asked} WHERE r.run_id = $run AND r.split = 'train'", {"run": run_id}) as rows:
        recorded = {row["rollout_id"] for row in rows.read_all().to_pylist()}
    assert consumed.keys() <= recorded


def test_a_run_that_is_killed_everywhere_ends_with_a_policy_as_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        cache = str(ROOT / ".spangrad" / "policies")
        warm = [*PARTS, "warm", str(tmp_path / "warm"), cache]
        model = POLICY or said_by(start(warm, tmp_path / "begun", stack))[-1]
        ground = Ground(tmp_path, stack, model)
        began = time.monotonic()
        said_by(ground.train("calm"))
        calm_s = time.monotonic() - began
        check_ledger(ground.store, "calm")
        calm = ground.success("calm")
        began = time.monotonic()
        killed, starts = disturb(ground, "killed", random.Random(SEED))
        killed_s = time.monotonic() - began
        wait_until(lambda: answers(f"http://127.0.0.1:{ground.ports[1]}/spangrad/health"), timeout_s=120)
        check_ledger(ground.store, "killed")
        found = ground.success("killed")
        attempts = ground.store.query(
            "SELECT sum(attempt) AS n FROM rollouts WHERE run_id = 'killed' AND split = 'train'"
        )[0]["n"]
    with capsys.disabled():
        print(
            f"\nchaos of {UPDATES} updates, {SECONDS:.0f} s, seed {SEED}: {dict(sorted(killed.items()))},"
            f" {starts} trainers, {attempts} attempts lost, {killed_s:.0f} s; undisturbed {calm_s:.0f} s;"
            f" success {found['success']:.1%} {found['ci']}, undisturbed {calm['success']:.1%} {calm['ci']}"
        )
    assert killed, "nothing was killed: give it more time with SPANGRAD_CHAOS_S"
    assert found["ci"][0] <= calm["ci"][1] and calm["ci"][0] <= found["ci"][1]
