"""Values of calls: asked of a critic for the rows of whole rollouts, and told back to the rows that train it.

Knows rows and trajectories; not what a critic is made of.

A rollout that was cut off has no state behind its last step that a critic could be asked about (what would
have been answered was never shown), so the value before that step stands for it: a last step that was cut off
is neither blamed nor praised for what nobody saw.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from spangrad.adapters.call_tree import CallTree, build_tree
from spangrad.adapters.model_call import ModelCall, Purpose
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import transitions
from spangrad.credit.types import Trajectory

Critic = Callable[[Sequence[Transition]], Sequence[Sequence[float]]]
"""Rows -> what is still to come before each of their calls, in the order of their segments."""


def valued(trajectories: Sequence[Trajectory], trees: Iterable[CallTree], critic: Critic) -> list[Trajectory]:
    """The trajectories with values: all calls that have token ids, in one question to the critic."""
    rows = [row for tree in trees for row in transitions(tree, None, group_id=None)]
    found: dict[tuple[str, str], float] = {}
    for row, values in zip(rows, critic(rows) if rows else (), strict=True):
        for segment, value in zip(row.segments, values, strict=True):
            found[row.rollout_id, segment.call_id] = float(value)
    return [replace(each, values=_values(each, found)) for each in trajectories]


def valued_calls(
    trajectories: Sequence[Trajectory], calls_by_rollout: Mapping[str, Sequence[ModelCall]], critic: Critic
) -> list[Trajectory]:
    """The trajectories with values of the calls that they were made of."""
    sampled = (
        [call for call in calls_by_rollout[each.rollout_id] if call.purpose is not Purpose.EMBEDDING]
        for each in trajectories
    )
    return valued(trajectories, map(build_tree, sampled), critic)


def with_values(
    rows: Iterable[Transition],
    trajectories: Iterable[Trajectory],
    targets: Mapping[tuple[str, str], float],
) -> list[Transition]:
    """The rows with what the critic said and should have said before each of their calls."""
    said = {
        (each.rollout_id, step.call_id): value
        for each in trajectories
        for step, value in zip(each.steps, each.values or (), strict=False)
    }
    return [
        replace(
            row,
            segments=tuple(
                replace(
                    segment,
                    value=said.get((row.rollout_id, segment.call_id)),
                    value_target=targets.get((row.rollout_id, segment.call_id)),
                )
                for segment in row.segments
            ),
        )
        for row in rows
    ]


def _values(trajectory: Trajectory, found: Mapping[tuple[str, str], float]) -> list[float | None]:
    before = [found.get((trajectory.rollout_id, step.call_id)) for step in trajectory.steps]
    return [*before, before[-1] if before else None]
