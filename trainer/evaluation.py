"""Success on held-out tasks, with an interval."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spangrad.credit.rewards import by_rollout, rewards_of
from spangrad.errors import ConfigError
from spangrad.store.base import Store
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.config import EvalConfig, TrainConfig
from spangrad.trainer.learning.monitors import wilson_interval
from spangrad.trainer.plugins import load_tasks
from spangrad.trainer.rollouts.scheduling import RunKeys, run_rollouts, worker_config
from spangrad.trainer.serving.served import ServedPolicy


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Share of held-out tasks on which the agent succeeded, one rollout each."""

    success: float
    low: float
    high: float
    """Wilson's 95% interval."""
    n: int
    temperature: float
    policy_version: int
    unscored: int
    """Rollouts that failed or got no reward; they count as no success."""

    def to_json(self) -> dict[str, Any]:
        """`{"success", "ci", "n"}`."""
        return {"success": self.success, "ci": [self.low, self.high], "n": self.n}


def check_only_between(config: EvalConfig, *, has_promotions: bool, updates: int | None = None) -> None:
    """Refuse settings of a run that evaluates neither before nor after, if it does at all.

    Args:
        config: The section `[eval]`.
        has_promotions: Whether candidates are judged, by the same seed and what counts as success.
        updates: How many the run makes; None: it shares the section with others, which may make more.

    Raises:
        ConfigError: One was changed that has no effect there.
    """
    if updates is not None and config.every > updates:
        raise ConfigError(
            f"eval.every = {config.every!r} has no effect with run.updates {updates}: the run ends before;"
            f" choose {updates} or fewer, or leave it out"
        )
    default = EvalConfig()
    idle = {"tasks"} if config.every else {field.name for field in fields(config)}
    if has_promotions:
        idle -= {"seed", "success_at"}
    for name in sorted(idle):
        if (value := getattr(config, name)) != getattr(default, name):
            because = "and not before and after" if config.every else "if eval.every says how often"
            raise ConfigError(
                f"eval.{name} = {value!r} has no effect: a training run evaluates in between, {because};"
                " leave it out"
            )


def evaluate(
    store: Store,
    config: TrainConfig,
    keys: RunKeys,
    *,
    label: str,
    policy_version: int,
    temperature: float = 0.0,
    tasks: int | None = None,
    served: ServedPolicy | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run the agent once on each held-out task.

    Args:
        store: The hub.
        config: Names the agent, the tasks and what counts as success.
        keys: Bearer keys.
        label: Tells this evaluation from others of the run; the same label and version is not run again.
        policy_version: Version that is served now.
        temperature: Sampling temperature; 0 is greedy.
        tasks: How many held-out tasks; None: `eval.tasks`.
        served: Makes sure that the engines serve `policy_version`.
        on_progress: Called with (ended, all).
    """
    count = config.eval.tasks if tasks is None else tasks
    rollouts = held_out_rollouts(config, label, policy_version, count)
    worker = worker_config(
        config,
        keys,
        split=f"eval-{label}",
        temperature=temperature,
        policy_version=policy_version,
        engine_urls=() if served is None else served.engine_urls,
    )
    ended, _ = run_rollouts(
        store,
        rollouts,
        worker,
        workers=config.agent.workers,
        before_round=None if served is None else served.ensure,
        on_progress=on_progress,
    )
    values = values_of(store, ended, config.rollout.reward_authors, config.credit.reward_weights)
    solved = sum(is_success(values.get(rollout.rollout_id), config) for rollout in rollouts)
    low, high = wilson_interval(solved, len(rollouts))
    return Evaluation(
        success=solved / len(rollouts),
        low=low,
        high=high,
        n=len(rollouts),
        temperature=temperature,
        policy_version=policy_version,
        unscored=len(rollouts) - len(values),
    )


@dataclass(frozen=True, slots=True)
class Between:
    """An evaluation between two updates, and what an update records of it."""

    evaluation: Evaluation
    metrics: dict[str, float]


def evaluate_between(
    store: Store, config: TrainConfig, keys: RunKeys, policy_version: int, served: ServedPolicy
) -> Between:
    """Evaluate greedily on `eval.tasks_between` tasks; the arguments are those of `evaluate`."""
    started = time.monotonic()
    found = evaluate(
        store,
        config,
        keys,
        label="between",
        policy_version=policy_version,
        tasks=config.eval.tasks_between,
        served=served,
    )
    return Between(found, {"eval/success_greedy": found.success, "time/eval_s": time.monotonic() - started})


def held_out_rollouts(config: TrainConfig, label: str, policy_version: int, tasks: int) -> list[Rollout]:
    """The rollouts of an evaluation: one of each of so many held-out tasks, in a fixed order."""
    chosen = load_tasks(config.agent.tasks, "eval", tasks, seed=config.eval.seed, base_dir=config.base_dir)
    return [
        Rollout(
            rollout_id=f"{config.run.id}-eval-{label}-v{policy_version:05d}-{index:04d}",
            task_id=task["task_id"],
            run_id=config.run.id,
            task=task,
            max_attempts=config.agent.max_attempts,
            split=f"eval-{label}",
            turn_budget=config.curriculum.most_turns,
        )
        for index, task in enumerate(chosen)
    ]


def successes(store: Store, config: TrainConfig, ended: Sequence[Rollout]) -> dict[str, bool]:
    """Whether each of these rollouts succeeded."""
    values = values_of(store, ended, config.rollout.reward_authors, config.credit.reward_weights)
    return {one.rollout_id: is_success(values.get(one.rollout_id), config) for one in ended}


def is_success(value: float | None, config: TrainConfig) -> bool:
    """Whether the outcome of a rollout is a success; None, of one that failed or got no reward, is none."""
    return value is not None and value >= config.eval.success_at


def values_of(
    store: Store,
    rollouts: Sequence[Rollout],
    authors: Sequence[str],
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Outcome of each rollout that succeeded, as credit counts it; those without one are absent.

    `weights` are `credit.reward_weights`; by default `reward` alone counts.
    """
    ended = [rollout for rollout in rollouts if rollout.status is RolloutStatus.SUCCEEDED]
    given = by_rollout(store.rewards([rollout.rollout_id for rollout in ended]) if ended else ())
    found: dict[str, float] = {}
    for rollout in ended:
        mine = given.get(rollout.rollout_id, ())
        rewards = rewards_of(rollout, mine, (), authors=authors, weights=weights)
        if rewards.outcome is not None:
            found[rollout.rollout_id] = rewards.outcome
    return found
