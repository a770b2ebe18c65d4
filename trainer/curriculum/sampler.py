"""The tasks of a run, set by set: drawn by seed alone, or by how often each of them succeeded.

Invariants:
* a set depends on the run's seed, the set and what the store knows when it is asked for;
* a group that is in the store keeps its task, whatever has been learned since;
* by success: no set has a task twice, and one that waits for an update comes last, so that a refill tries
  others.

Knows the store and the config of a run. Does not know: workers, learners.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.purpose import NO_TURN_LEFT
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.curriculum.difficulty import (
    Floats,
    chance_in_band,
    draw,
    drawing_chances,
    relative_entropy,
    success_means,
)
from spangrad.trainer.curriculum.evidence import successes_by_task
from spangrad.trainer.plugins import load_pool, load_tasks
from spangrad.trainer.rollouts.names import group_id

Task = dict[str, Any]


class TaskSampler:
    """Gives the tasks of one set after the other."""

    def __init__(self, config: TrainConfig, store: Store) -> None:
        """Load the pool, or try to load tasks.

        Raises:
            ConfigError: There are no tasks, or too few, or two of the pool have one id.
        """
        self._config = config
        self._store = store
        self._sampling = config.curriculum.sampling
        self._pool: list[Task] = []
        if self._sampling is None:
            load_tasks(config.agent.tasks, "train", 1, seed=0, base_dir=config.base_dir)
        else:
            self._pool = load_pool(
                config.agent.tasks,
                self._sampling.pool,
                seed=_bits(f"{config.run.seed}-pool"),
                least=config.rollout.groups_per_update,
                base_dir=config.base_dir,
            )

    def tasks(self, set_index: int) -> list[Task]:
        """The tasks of a set, one a group."""
        config, count = self._config, self._config.rollout.groups_per_update
        seed = _bits(f"{config.run.seed}-{set_index}")
        if self._sampling is None:
            return load_tasks(config.agent.tasks, "train", count, seed=seed, base_dir=config.base_dir)
        groups = [group_id(config.run.id, set_index, place) for place in range(count)]
        known = {rollout.group_id: rollout.task for rollout in self._store.rollouts(group_ids=groups)}
        if len(known) == count:
            return [known[group] for group in groups]
        there = {task["task_id"] for task in known.values()}
        waiting = set(self._waiting())
        _, chances_N = self._chances()
        order = [self._pool[n] for n in draw(chances_N, len(self._pool), np.random.default_rng(seed))]
        order.sort(key=lambda task: task["task_id"] in waiting)
        fresh = (task for task in order if task["task_id"] not in there)
        return [known[group] if group in known else next(fresh) for group in groups]

    def metrics(self) -> dict[str, float]:
        """What is known of the pool now, and how evenly it is drawn from; nothing without `sampling`."""
        if self._sampling is None:
            return {}
        counts_N2, chances_N = self._chances()
        means_N = success_means(counts_N2[:, 0], counts_N2[:, 1])
        low, high = self._sampling.band
        return {
            "curriculum/tasks": float(len(self._pool)),
            "curriculum/seen": float((counts_N2.sum(axis=1) > 0).mean()),
            "curriculum/in_band": float(((low <= means_N) & (means_N <= high)).mean()),
            "curriculum/entropy": relative_entropy(chances_N),
            "curriculum/success_mean": float(means_N.mean()),
            "curriculum/success_spread": float(means_N.std()),
        }

    def _waiting(self) -> list[str]:
        """Tasks that were asked for and that no update has learned from."""
        sql = (
            "SELECT DISTINCT task_id FROM rollouts"
            " WHERE run_id = ? AND split = 'train' AND consumed_by IS NULL AND task_id IS NOT NULL"
        )
        with self._store.query_arrow(sql, [self._config.run.id]) as answer:
            return [str(row["task_id"]) for row in answer.read_all().to_pylist()]

    def _chances(self) -> tuple[Floats, Floats]:
        """Successes and failures of every task of the pool, and its chance to be drawn."""
        assert self._sampling is not None
        config = self._config
        found = successes_by_task(
            self._store,
            config.run.id,
            half_life=self._sampling.half_life,
            success_at=self._sampling.success_at,
            authors=config.rollout.reward_authors,
            weights=config.credit.reward_weights,
        )
        counts_N2 = np.array([found.get(task["task_id"], (0.0, 0.0)) for task in self._pool])
        weights_N = chance_in_band(counts_N2[:, 0], counts_N2[:, 1], self._sampling.band)
        return counts_N2, drawing_chances(
            weights_N, exploration=self._sampling.exploration, focus=self._sampling.focus
        )


def turn_metrics(rollouts: Sequence[Rollout], calls: Sequence[ModelCall]) -> dict[str, float]:
    """Turns of these rollouts on average, and the share whose turns did not suffice; nothing without budgets.

    `calls` are theirs, whatever they are for.
    """
    budgets = {one.rollout_id: one.turn_budget for one in rollouts if one.turn_budget is not None}
    if not budgets:
        return {}
    cut = {call.rollout_id for call in calls if call.purpose_reason == NO_TURN_LEFT}
    return {
        "curriculum/turns": sum(budgets.values()) / len(budgets),
        "curriculum/out_of_turns": len(cut & budgets.keys()) / len(budgets),
    }


def _bits(text: str) -> int:
    return random.Random(text).getrandbits(31)
