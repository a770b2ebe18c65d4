"""Trajectories -> the arrays that estimators see.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections.abc import Sequence

import numpy as np

from spangrad.credit.gigpo import NO_ANCHOR
from spangrad.credit.groups import Ints, labels
from spangrad.credit.returns import returns_to_go, sums_to_go
from spangrad.credit.similar import similar_anchors
from spangrad.credit.terms import Batch
from spangrad.credit.types import Step, Trajectory


def batch_of(
    known: Sequence[Trajectory], returns: Sequence[float], *, gamma: float, similarity: float | None
) -> Batch:
    """Arrays of rollouts whose returns are known.

    Args:
        known: The rollouts.
        returns: Their returns.
        gamma: Discount of step returns.
        similarity: From which likeness on observations are one state; None: only equal ones are.
    """
    steps = [step for trajectory in known for step in trajectory.steps]
    lengths_N = np.array([len(trajectory.steps) for trajectory in known], dtype=np.int64)
    ends_N = np.cumsum(lengths_N)
    rewards_S = np.array([step.reward or 0.0 for step in steps], dtype=np.float64)
    outcomes_N = np.array([trajectory.reward or 0.0 for trajectory in known], dtype=np.float64)
    rewards_S[ends_N[lengths_N > 0] - 1] += outcomes_N[lengths_N > 0]
    # By name: which groups a filter leaves out must not depend on the order of rollouts.
    group_ids_N = np.unique([group_of(trajectory) for trajectory in known], return_inverse=True)[1]
    rollout_index_S = np.repeat(np.arange(len(known)), lengths_N)
    exact_S = _exact_anchors(steps)
    anchors_S = exact_S
    if similarity is not None:
        anchors_S = similar_anchors(
            [step.observation for step in steps],
            [step.anchor for step in steps],
            group_ids_N[rollout_index_S],
            exact_S,
            similarity=similarity,
        )
    return Batch(
        trajectories=known,
        returns_N=np.array(returns, dtype=np.float64),
        group_ids_N=group_ids_N,
        tokens_N=np.array([_tokens(trajectory) for trajectory in known], dtype=np.int64),
        step_returns_S=returns_to_go(rewards_S, lengths_N, gamma),
        undiscounted_S=sums_to_go(rewards_S, lengths_N),
        rollout_index_S=rollout_index_S,
        step_index_S=np.arange(len(steps)) - np.repeat(ends_N - lengths_N, lengths_N),
        anchor_ids_S=anchors_S,
        exact_anchor_ids_S=exact_S,
        rewards_S=rewards_S,
        baselines_N=np.array([trajectory.baseline for trajectory in known], dtype=np.float64),
        values_S=np.array([value for each in known for value in _values(each)[:-1]], dtype=np.float64),
        bootstraps_N=np.array(
            [_values(each)[-1] if each.is_truncated else 0.0 for each in known], dtype=np.float64
        ),
    )


def group_of(trajectory: Trajectory) -> str:
    """The group's name; a rollout without one is a group of its own."""
    return (
        f"group {trajectory.group_id}"
        if trajectory.group_id is not None
        else f"rollout {trajectory.rollout_id}"
    )


def _values(trajectory: Trajectory) -> Sequence[float | None]:
    return trajectory.values or [None] * (len(trajectory.steps) + 1)


def _exact_anchors(steps: Sequence[Step]) -> Ints:
    is_known_S = np.array([step.anchor is not None for step in steps], dtype=np.bool_)
    return np.where(is_known_S, labels([step.anchor or "" for step in steps]), NO_ANCHOR)


def _tokens(trajectory: Trajectory) -> int:
    counts = [step.tokens for step in trajectory.steps]
    return -1 if None in counts else sum(count for count in counts if count is not None)
