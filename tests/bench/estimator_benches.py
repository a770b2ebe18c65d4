"""The figures of credit: a million steps in one pass, and states by similarity as the text grows."""

import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spangrad.credit import CreditConfig, Step, Trajectory, assign, gigpo_as_published
from spangrad.credit.groups import Floats, labels
from spangrad.credit.returns import returns_to_go
from tests.bench.figures import Figure
from tests.bench.gigpo_loops import clusters, gigpo_loops

GROUP, LENGTH, STATES = 8, 50, 100
"""Rollouts of a group, steps of a rollout, states of a group: 400 steps, most in a pool with others."""
GIGPO = CreditConfig(step="gigpo", ddof=1)
SIMILAR = CreditConfig(step="gigpo", anchors="similar", similarity=0.9)
PEAK = """import sys
from tests.bench.estimator_benches import peak_mb
print(peak_mb(int(sys.argv[1]), sys.argv[2]))
"""


class Given(NamedTuple):
    """Rollouts as columns."""

    rewards: Sequence[Sequence[float]]
    """Of rollout i in step t."""
    groups: Sequence[str]
    anchors: Sequence[Sequence[str]]

    def first(self, rollouts: int) -> "Given":
        """The first of them."""
        return Given(self.rewards[:rollouts], self.groups[:rollouts], self.anchors[:rollouts])


def bench_estimators(*, steps: int = 1_000_000, part: int = 20_000, similar: int = 100_000) -> list[Figure]:
    """GiGPO over many steps beside Python loops over some of them; similarity at n, 2n, 4n and 8n steps."""
    data = batch(steps)
    few = data.first(part // LENGTH)
    gigpo_loops(*data.first(GROUP))  # warms up
    looped, loops = timed(lambda: gigpo_loops(*few))
    arrays = arrays_of(data)
    work = partial(from_arrays, *arrays)
    arrays_s, ours = min((timed(work) for _ in range(3)), key=lambda pair: pair[0])
    del arrays, work
    np.testing.assert_allclose(ours[:part], np.asarray(loops), atol=1e-3)
    trajectories = trajectories_of(data)
    assign_s, _ = timed(partial(assign, trajectories, GIGPO))
    del trajectories
    loop_s = looped / part * steps
    beside = f"loops: {looped / part * 1e6:.1f} µs a step, on {part:,} steps"
    figures = [
        Figure(
            f"GiGPO of {steps:,} steps, from arrays",
            loop_s / arrays_s,
            "times",
            at_least=100,
            note=f"{arrays_s:.2f} s with names of groups and states; {beside}",
        ),
        Figure(
            "the same by `assign`, from trajectories", loop_s / assign_s, "times", note=f"{assign_s:.1f} s"
        ),
    ]
    for path, count in (("arrays", steps), ("assign", steps), ("similar", similar)):
        command = [sys.executable, "-c", PEAK, str(count), path]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        name = f"memory, {count:,} steps by {path}: peak of the process"
        figures.append(Figure(name, peak, "MB", at_most=1000, note="with interpreter, torch and rollouts"))
    return [*figures, *_similarity(similar)]


def _similarity(most: int) -> list[Figure]:
    sizes = [most // 8, most // 4, most // 2, most]
    seconds = []
    for size in [sizes[0], *sizes]:  # the first one warms up
        trajectories = observed(size)
        taken, _ = timed(partial(assign, trajectories, SIMILAR))
        seconds.append(taken)
    rates = [taken / size * 1e6 for taken, size in zip(seconds[1:], sizes, strict=True)]
    note = ", ".join(f"{size:,}: {taken:.2f} s" for taken, size in zip(seconds[1:], sizes, strict=True))
    name = f"similar anchors: time a step at {sizes[-1]:,} steps, of that at {sizes[0]:,}"
    texts = [step.observation or "" for step in observed(LENGTH * 3)[0].steps]
    texts += [step.observation or "" for step in observed(LENGTH * 3)[1].steps]
    peer, _ = timed(partial(clusters, texts, 0.95))
    return [
        Figure(name, rates[-1] / rates[0], "of it", at_most=1.3, note=f"{note}; {rates[-1]:.0f} µs a step"),
        Figure(
            f"the same, of greedy difflib in a group of {len(texts)} steps",
            peer / len(texts) * 1e6 / rates[-1],
            "times",
            note=f"difflib: {peer / len(texts) * 1e3:.1f} ms a step, growing with the states of a group",
        ),
    ]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds and result."""
    gc.collect()
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def batch(steps: int) -> Given:
    """Rollouts that are paid at their end."""
    chance = random.Random(0)
    count = steps // LENGTH
    rewards = [[0.0] * (LENGTH - 1) + [float(chance.random() < 0.5)] for _ in range(count)]
    groups = [f"task {i // GROUP}" for i in range(count)]
    names = [f"{chance.getrandbits(128):032x}" for _ in range(STATES)]
    return Given(rewards, groups, [chance.choices(names, k=LENGTH) for _ in range(count)])


def arrays_of(data: Given) -> tuple[Floats, list[str], list[str]]:
    """Rewards (N, T), names of groups, names of the states of all steps."""
    names = [anchor for row in data.anchors for anchor in row]
    return np.array(data.rewards, dtype=np.float64), list(data.groups), names


def from_arrays(rewards_NT: Floats, groups: list[str], anchors: list[str]) -> Floats:
    """The published estimator by ours: names to numbers, returns, both terms."""
    lengths_N = np.full(len(rewards_NT), LENGTH)
    return gigpo_as_published(
        rewards_NT.sum(axis=1),
        labels(groups),
        returns_to_go(rewards_NT.reshape(-1), lengths_N, 0.95),
        np.repeat(np.arange(len(rewards_NT)), LENGTH),
        labels(anchors),
    )


def trajectories_of(data: Given) -> list[Trajectory]:
    """The same as rollouts with an outcome."""
    return [
        Trajectory(f"r{i}", group, row[-1], [Step(f"r{i}-{t}", t, anchor) for t, anchor in enumerate(states)])
        for i, (row, group, states) in enumerate(zip(*data, strict=True))
    ]


def peak_mb(steps: int, path: str) -> float:
    """Most memory that this process has had when it is done."""
    data = batch(steps)
    if path == "arrays":
        from_arrays(*arrays_of(data))
    elif path == "similar":
        assign(observed(steps), SIMILAR)
    else:
        trajectories = trajectories_of(data)
        del data
        assign(trajectories, GIGPO)
    status = Path("/proc/self/status").read_text()  # getrusage also counts the process that started this one
    return float(status.split("VmHWM:")[1].split()[0]) / 1e3


def observed(steps: int) -> list[Trajectory]:
    """Rollouts whose observations, of about 300 characters, have a clock in them and one other word."""
    chance = random.Random(0)
    words = [f"{chance.getrandbits(24):06x}" for _ in range(500)]
    found = []
    for i in range(steps // LENGTH):
        if i % GROUP == 0:
            states = [chance.choices(words, k=40) for _ in range(STATES)]
        seen = []
        for _ in range(LENGTH):
            state = list(chance.choice(states))
            state[chance.randrange(40)] = chance.choice(words)
            seen.append(f"[{chance.randrange(10**4):04d} s] {' '.join(state)}")
        own = [Step(f"r{i}-{t}", t, text, observation=text) for t, text in enumerate(seen)]
        found.append(Trajectory(f"r{i}", f"task {i // GROUP}", float(chance.random() < 0.5), own))
    return found
