"""Trajectories -> one advantage per step: A = A_episode + lambda * A_step.

Composes the estimators; knows no tokens and no stores.

Invariants:
* a rollout without a reward is left out of its group's statistics, gets no advantage
  (None, not 0) and is counted;
* statistics of the episode term are over rollouts, however many steps each has;
* a group that says nothing gives zeros, whatever the discount, and is counted: rewards paid sooner or
  later are no different rewards.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from spangrad.credit.batch import group_of
from spangrad.credit.branches import check_branches
from spangrad.credit.composing import composed, is_informative, returns_of, scored_batch, step_term, total_of
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.diagnostics import CreditDiagnostics, diagnose
from spangrad.credit.filtering import (
    MISSING,
    MISSING_SCORE,
    MISSING_VALUE,
    OVERLONG,
    REASONS,
    filtered,
    is_overlong,
    penalized,
)
from spangrad.credit.groups import LARGEST, labels
from spangrad.credit.scoring import cycle_test, lacks_scores, with_terms
from spangrad.credit.types import Trajectory
from spangrad.credit.values import lacks_values, require_values, value_targets
from spangrad.errors import CreditError


@dataclass(frozen=True, slots=True)
class CreditResult:
    """Advantages and what the batch looked like."""

    advantages: Mapping[tuple[str, str], float | None]
    """(rollout_id, call_id) -> advantage. None: not assigned, for the reason in `left_out`."""
    diagnostics: CreditDiagnostics
    left_out: Mapping[str, str] = field(default_factory=dict)
    """rollout_id -> why its steps have no advantage."""
    value_targets: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(rollout_id, call_id) -> what a critic should have said before the step, where a term asks one."""

    def of(self, rollout_id: str) -> dict[str, float]:
        """call_id -> advantage of one rollout, assigned ones only."""
        return {
            call: a
            for (rollout, call), a in self.advantages.items()
            if rollout == rollout_id and a is not None
        }


def assign(trajectories: Sequence[Trajectory], config: CreditConfig) -> CreditResult:
    """Give every step of every rollout with a reward its advantage.

        A_{i,t} = A^E_i + lambda * A^S_{i,t}

    Args:
        trajectories: Rollouts, in any order; a rollout id occurs once.
        config: Which estimators, with which constants.

    Raises:
        CreditError: A rollout or call occurs twice, a reward is not finite, or a term lacks something.

    Groups in which all rewards are equal, and lone rollouts, get zeros in both terms (a lone rollout's
    episode term: `config.singleton`); a running baseline and values know no groups. The paper's step
    term alone would train such a group for gamma < 1: the rewards differ by how far they are discounted,
    which says who was shorter and not who was better.
    """
    _check(trajectories)
    _check_needs(trajectories, config)
    left_out: dict[str, str] = {}
    for each in trajectories:
        if total_of(each, config) is None:
            left_out[each.rollout_id] = MISSING
        elif is_overlong(each, config):
            left_out[each.rollout_id] = OVERLONG
        elif lacks_scores(each, config):
            left_out[each.rollout_id] = MISSING_SCORE
        elif lacks_values(each, config):
            left_out[each.rollout_id] = MISSING_VALUE
    scored = [each for each in trajectories if each.rollout_id not in left_out]
    scored_N = returns_of(scored, config)
    shaping = cycle_test(scored, config)
    scored = penalized(with_terms(scored, config), config)
    batch = scored_batch(scored, config)
    step_S = step_term(batch, config)
    is_informative_N = is_informative(batch, config, step_S)
    trained, is_trained_informative_N = batch, is_informative_N
    by_filter = filtered(batch.returns_N, batch.group_ids_N, is_informative_N, config)
    if any(by_filter):
        names = zip(scored, by_filter, strict=True)
        left_out |= {each.rollout_id: name for each, name in names if name is not None}
        trained = scored_batch([each for each in scored if each.rollout_id not in left_out], config)
        step_S = step_term(trained, config)
        is_trained_informative_N = is_informative(trained, config, step_S)
    advantages_S = composed(trained, config, step_S, is_trained_informative_N[trained.rollout_index_S])
    given = iter(advantages_S.tolist())
    advantages: dict[tuple[str, str], float | None] = {
        (each.rollout_id, step.call_id): None if each.rollout_id in left_out else next(given)
        for each in trajectories
        for step in each.steps
    }
    targets: dict[tuple[str, str], float] = {}
    if config.needs_values:
        keys = [(each.rollout_id, step.call_id) for each in trained.trajectories for step in each.steps]
        targets = dict(zip(keys, value_targets(trained, config).tolist(), strict=True))
    counts = Counter(left_out.values())
    diagnostics = diagnose(
        returns_N=batch.returns_N,
        scored_N=scored_N,
        group_ids_N=batch.group_ids_N,
        is_informative_N=is_informative_N,
        group_ids_S=batch.group_ids_S,
        anchor_ids_S=batch.anchor_ids_S,
        exact_anchor_ids_S=batch.exact_anchor_ids_S if config.anchors == "similar" else None,
        advantages_S=advantages_S,
        rollouts=len(trajectories),
        baselines_N=batch.baselines_N if config.episode == "running_baseline" else None,
        missing_reward=counts[MISSING],
        dropped={name: counts[name] for name in config.drops},
        shaping=shaping,
    )
    return CreditResult(
        advantages, diagnostics, {rollout: REASONS[name] for rollout, name in left_out.items()}, targets
    )


def _check_needs(trajectories: Sequence[Trajectory], config: CreditConfig) -> None:
    """Refuse a batch that lacks what a term compares everywhere: then it was chosen by mistake.

    What only some rollouts lack is no mistake, nor is it what a filter leaves of them.
    """
    steps = [step for each in trajectories for step in each.steps]
    if config.episode == "gdpo" and trajectories and not any(each.components for each in trajectories):
        raise CreditError(
            "no rollout tells the parts of its outcome, which episode 'gdpo' compares; choose another"
        )
    if config.episode == "grpo_per_role" and steps and not any(step.role for step in steps):
        raise CreditError(
            "no call of this batch names its agent, so there is one role; choose episode 'grpo', or name"
            " agents (`gen_ai.agent.name`)"
        )
    if config.needs_actions and steps and not any(step.action for step in steps):
        raise CreditError("no step of this batch tells what was done; choose a term that needs no actions")
    require_values(trajectories, config)
    if config.needs_branches:
        check_branches(trajectories, labels([group_of(each) for each in trajectories]))


def _check(trajectories: Sequence[Trajectory]) -> None:
    seen: set[str] = set()
    for trajectory in trajectories:
        if trajectory.rollout_id in seen:
            raise CreditError(
                f"rollout {trajectory.rollout_id!r} occurs twice; credit needs one attempt of each"
            )
        seen.add(trajectory.rollout_id)
        calls = [step.call_id for step in trajectory.steps]
        if len(set(calls)) < len(calls):
            twice = next(call for call in calls if calls.count(call) > 1)
            raise CreditError(
                f"rollout {trajectory.rollout_id!r} has call {twice!r} twice; expected one step per call"
            )
        rewards = [trajectory.reward, *(step.reward for step in trajectory.steps)]
        for reward in rewards:
            if reward is not None and not (isinstance(reward, Real) and abs(reward) <= LARGEST):
                raise CreditError(
                    f"rollout {trajectory.rollout_id!r} has reward {reward!r}; expected a finite number of"
                    f" size {LARGEST:g} at most, or none"
                )
