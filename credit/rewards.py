"""Which of the stored rewards count for a rollout, and how they add up.

Rules, in this order:
* only rewards of an allowed author, for this attempt (or for none in particular), and none that are too large
  for sums of their squares (`groups.LARGEST`);
* of one author and name, the last one given wins; one for a trace and one for that trace's last call add up;
* of several authors of one name, the operator's beats the evaluator's beats the agent's;
* the outcome is the sum of weight * value over the wanted names; if one of them is
  missing, the outcome is missing. It is never 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from spangrad.adapters.model_call import ModelCall
from spangrad.credit.groups import LARGEST
from spangrad.credit.transitions import MISSING_REWARD, Refused, acts, trajectory_of
from spangrad.credit.types import Trajectory
from spangrad.store.base import Store
from spangrad.store.records import DEFAULT_REWARD, Reward, RewardAuthor, Rollout

DEFAULT_AUTHORS: Final = (str(RewardAuthor.EVALUATOR), str(RewardAuthor.OPERATOR))
DEFAULT_WEIGHTS: Final[Mapping[str, float]] = {DEFAULT_REWARD: 1.0}
PRECEDENCE: Final = (RewardAuthor.AGENT, RewardAuthor.EVALUATOR, RewardAuthor.OPERATOR)
"""Weakest first."""


@dataclass(frozen=True, slots=True)
class RolloutRewards:
    """What a rollout got."""

    outcome: float | None
    """None: a wanted reward is missing."""
    steps: Mapping[str, float]
    """call_id -> reward of that call."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Wanted name -> what the outcome got of it, without its weight."""


def by_rollout(given: Iterable[Reward]) -> dict[str, list[Reward]]:
    """Rewards by rollout id, in their order."""
    found: dict[str, list[Reward]] = {}
    for reward in given:
        found.setdefault(reward.rollout_id, []).append(reward)
    return found


def rewards_of(
    rollout: Rollout,
    given: Sequence[Reward],
    calls: Sequence[ModelCall],
    *,
    authors: Sequence[str] = DEFAULT_AUTHORS,
    weights: Mapping[str, float] | None = None,
) -> RolloutRewards:
    """Add up the rewards of one rollout.

    Args:
        rollout: The rollout; its `attempt` is the one that counts.
        given: Stored rewards, of other rollouts too, in order of time.
        calls: The rollout's calls; a reward may name a call by its id or by any of its spans, or a step by
            its span: it is for the last call in it that acts.
        authors: Whose rewards count.
        weights: Name -> weight; by default `reward` alone, with weight 1.
    """
    wanted = DEFAULT_WEIGHTS if weights is None else weights
    acting = sorted((call for call in calls if acts(call)), key=lambda call: call.start_ns)
    call_ids = {
        f"{call.trace_id}-{above}": call.call_id for call in acting for above in call.ancestor_span_ids
    }
    call_ids |= {span_id: call.call_id for call in calls for span_id in call.span_ids}
    call_ids |= {f"{call.trace_id}-{span_id}": call.call_id for call in calls for span_id in call.span_ids}
    latest: dict[tuple[tuple[str | None, str, str | None], RewardAuthor], float] = {}
    for reward in given:
        if (
            not _is_current(reward, rollout)
            or reward.author not in authors
            or reward.author is None
            or reward.name not in wanted
            or abs(reward.value) > LARGEST
        ):
            continue
        call_id = None if reward.call_id is None else call_ids.get(reward.call_id, reward.call_id)
        part = None if call_id is None else reward.trace_id
        latest[(call_id, reward.name, part), reward.author] = reward.value
    best: dict[tuple[str | None, str, str | None], float] = {}
    for (about, _), value in sorted(latest.items(), key=lambda item: PRECEDENCE.index(item[0][1])):
        best[about] = value
    components = {name: best.get((None, name, None)) for name in wanted}
    known = [wanted[name] * value for name, value in components.items() if value is not None]
    steps: dict[str, float] = {}
    for (call_id, name, _), value in best.items():
        if call_id is not None:
            steps[call_id] = steps.get(call_id, 0.0) + wanted[name] * value
    outcome = sum(known) if len(known) == len(wanted) and known else None
    return RolloutRewards(outcome, steps, components)


def with_names(
    store: Store,
    refused: Sequence[Refused],
    rollouts: Sequence[Rollout],
    trajectories: Sequence[Trajectory],
    authors: Sequence[str],
) -> list[Refused]:
    """With the names of rewards where one is missing: which is, and which the rollout has instead."""
    lacking = {one.rollout_id for one in refused if one.reason == MISSING_REWARD}
    ids = [rollout.rollout_id for rollout in rollouts if rollout.rollout_id in lacking]
    given = by_rollout(store.rewards(ids) if ids else ())
    why = {
        rollout.rollout_id: _missing_because(rollout, given.get(rollout.rollout_id, ()), each, authors)
        for rollout, each in zip(rollouts, trajectories, strict=True)
        if rollout.rollout_id in lacking
    }
    return [
        replace(one, reason=why.get(one.rollout_id or "", MISSING_REWARD), kind=MISSING_REWARD)
        if one.reason == MISSING_REWARD
        else one
        for one in refused
    ]


def _missing_because(
    rollout: Rollout, given: Sequence[Reward], trajectory: Trajectory, authors: Sequence[str]
) -> str:
    lacking = ", ".join(repr(name) for name, value in trajectory.components.items() if value is None)
    there = {
        f"{reward.name!r}{'' if reward.call_id is None else ' for a call'}"
        f"{'' if reward.author in authors else f' by {reward.author}, who does not count'}"
        f"{f' of {reward.value:g}, which is too large' if abs(reward.value) > LARGEST else ''}"
        for reward in given
        if _is_current(reward, rollout)
    }
    instead = f"; there is {', '.join(sorted(there))}" if there else ""
    return f"{MISSING_REWARD}{f': {lacking}' if lacking else ''}{instead}"


def _is_current(reward: Reward, rollout: Rollout) -> bool:
    return reward.rollout_id == rollout.rollout_id and reward.attempt in (None, rollout.attempt)


def total_reward(
    rollout: Rollout,
    given: Sequence[Reward],
    calls: Sequence[ModelCall],
    *,
    authors: Sequence[str] = DEFAULT_AUTHORS,
    weights: Mapping[str, float] | None = None,
) -> float | None:
    """What credit takes a rollout to be worth: `Trajectory.total_reward` of its calls and rewards."""
    rewards = rewards_of(rollout, given, calls, authors=authors, weights=weights)
    return trajectory_of(
        calls,
        rewards.outcome,
        rollout_id=rollout.rollout_id,
        step_rewards=rewards.steps,
        with_actions=False,
    ).total_reward
