"""Scores of states: where they come from, and what they add to the rewards of steps.

A score is a number about a state: how far the agent has come, how probable the right answer is. There is one
before each step and one behind the last. They come from the rewards of steps with a name (`reward:NAME`: the
score behind each step; before the first it is 0), or from a function of the user,
`function(task, calls) -> numbers`, which may ask any model. For `shaping = "terms"` the numbers are the terms
themselves, one a step.

Only a difference of potentials leaves the best policy alone. What else is added is a new objective, and every
batch tells how much an agent earns by going in circles for it.

Shape letters: T steps of one rollout, S steps of all.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.scoring.values import as_number
from spangrad.credit.groups import Floats
from spangrad.credit.returns import returns_to_go
from spangrad.credit.shaping import CycleTest, farming_gain, potential_based
from spangrad.credit.terms import Batch
from spangrad.credit.types import Trajectory
from spangrad.errors import ConfigError, CreditError
from spangrad.store.records import Rollout
from spangrad.user_code import load_callable

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig

logger = logging.getLogger(__name__)

BY_REWARD: Final = "reward:"
NEW_OBJECTIVES: Final = ("score_gain", "terms")
_NO_RETURNS: Final = ("turn_credit", "igpo", "igpo_as_published")
"""Step terms whose `gamma` is of something else than the returns of steps."""
Score = Callable[[Rollout, Sequence[ModelCall], Mapping[str, float]], Sequence[float | None]]
"""(rollout, acting calls, call_id -> reward of the named kind) -> scores."""


def scorer(config: "CreditConfig", base_dir: str = ".") -> Score | None:
    """What gives scores; None: nobody wants any. It raises `CreditError` if the user's function fails.

    Raises:
        ConfigError: The function can't be loaded.
    """
    if (spec := config.scores) is None:
        return None
    is_terms = config.shaping == "terms"
    if spec.startswith(BY_REWARD):
        return lambda _, calls, given: (
            [given.get(call.call_id, 0.0) for call in calls]
            if is_terms
            else [0.0, *(given.get(call.call_id) for call in calls)]
        )
    function = load_callable(spec, base_dir)

    def ask(rollout: Rollout, calls: Sequence[ModelCall], _: Mapping[str, float]) -> list[float | None]:
        asked = f"scores {spec!r} of rollout {rollout.rollout_id!r}"
        if not calls:  # there is no state to ask about
            return [] if is_terms else [0.0]
        try:
            given = list(function(rollout.task, list(calls)))
        except Exception as error:  # the user's code: whatever it raises is told with its place
            raise CreditError(
                f"{asked} can't be had for {len(calls)} calls, {calls[0].call_id!r} to {calls[-1].call_id!r}:"
                f" {type(error).__name__}: {error}; mend the function and run the same again: nothing is lost"
            ) from error
        scores: list[float | None] = []
        for number, score in enumerate(given):
            try:
                scores.append(None if score is None else as_number(score))
            except ValueError as error:
                where = f"call {calls[number].call_id!r}" if number < len(calls) else "the end"
                raise CreditError(f"{asked}: {error}, at {where}; expected a finite number or None") from None
        return scores

    return ask


def tell_unscored(name: str, given: Iterable[str], *, rollouts: int) -> None:
    """Say that no step of the batch has the reward that scores are; `given` are the names that steps have."""
    logger.warning(
        "no step of %d rollouts has a reward %r of an author that counts, which credit.scores names:"
        " there are no scores; rewards that steps were given: %s",
        rollouts,
        name,
        ", ".join(map(repr, sorted(set(given)))) or "none",
    )


def lacks_scores(trajectory: Trajectory, config: "CreditConfig") -> bool:
    """Whether a score is missing that is needed: then nothing of the rollout can be credited.

    `turn_credit` does with the scores that there are.

    Raises:
        CreditError: There are more or fewer scores than states, or one is not finite.
    """
    if config.scores is None:
        return False
    scores = trajectory.scores
    if scores is None:
        return True
    wanted = len(trajectory.steps) + (config.shaping != "terms")
    if len(scores) != wanted or not all(score is None or math.isfinite(score) for score in scores):
        raise CreditError(
            f"rollout {trajectory.rollout_id!r} has scores {list(scores)!r} from {config.scores!r};"
            f" expected {wanted} finite numbers or None for its {len(trajectory.steps)} steps"
        )
    return config.shaping != "none" and None in scores


def with_terms(trajectories: Sequence[Trajectory], config: "CreditConfig") -> list[Trajectory]:
    """With the terms of a new objective added to the rewards of steps.

    score_gain: F_t = w (p_{t+1} - p_t);   terms: F_t = w f_t
    """
    if config.shaping not in NEW_OBJECTIVES:
        return list(trajectories)
    shaped = []
    for each in trajectories:
        terms = zip(each.steps, _terms(each, config).tolist(), strict=True)
        steps = [replace(step, reward=(step.reward or 0.0) + term) for step, term in terms]
        shaped.append(replace(each, steps=steps))
    return shaped


def with_potentials(batch: Batch, config: "CreditConfig") -> Batch:
    """With the difference of potentials added to the returns of steps, discounted as they are.

        G'_t = G_t + sum_{u >= t} gamma^{u-t} F_u = G_t - w Phi(s_t)   [ + w gamma^{T-t} Phi(s_T) if cut off ]

    Returns of rollouts stay as they are: there it would be the same constant for all that began alike. So
    does which groups say something: a potential alone is no reason to train on equal rewards.
    """
    if config.shaping != "potential" or not batch.trajectories:
        return batch
    terms = [
        potential_based(_weighted(each, config), gamma=config.gamma, is_truncated=each.is_truncated)
        for each in batch.trajectories
    ]
    lengths_N = np.array([len(term_T) for term_T in terms], dtype=np.int64)
    shaped_S = batch.step_returns_S + returns_to_go(np.concatenate(terms), lengths_N, config.gamma)
    return replace(batch, step_returns_S=shaped_S)


def cycle_test(trajectories: Sequence[Trajectory], config: "CreditConfig") -> CycleTest | None:
    """What going in circles earned in these rollouts from a new objective alone; None: there is none.

    States are the anchors; a state that is not known, and the one behind the last step, are like no other.
    The best circle of all rollouts counts, its place is in its own.
    """
    if config.shaping not in NEW_OBJECTIVES:
        return None
    found = CycleTest(0.0, 0, None, None)
    for each in trajectories:
        states = [step.anchor or object() for step in each.steps]
        own = farming_gain([*states, object()], _terms(each, config))
        cycles = found.cycles + own.cycles
        better = own.cycles and (not found.cycles or own.gain > found.gain)
        found = replace(own if better else found, cycles=cycles)
    return found


def check_shaping(config: "CreditConfig", used: frozenset[str]) -> None:
    """Refuse shaping that can't work with the terms, which use these settings.

    Raises:
        ConfigError: Says why.
    """
    if config.scores is not None and not all(config.scores.rpartition(":")[::2]):
        raise ConfigError(
            f"scores is {config.scores!r}; expected 'path/to/file.py:name', 'package.module:name' or"
            " 'reward:NAME'"
        )
    if config.scores is None and (config.shaping != "none" or config.step == "turn_credit"):
        what = f"step {config.step!r}" if config.shaping == "none" else f"shaping {config.shaping!r}"
        raise ConfigError(f"{what} needs scores; set them to a function, 'file.py:name', or to 'reward:NAME'")
    if config.shaping == "potential" and config.step == "gae":
        raise ConfigError(
            "shaping 'potential' adds nothing to step 'gae', whose critic learns what the potential says;"
            " choose another step term"
        )
    if config.shaping == "potential" and ("gamma" not in used or config.step in _NO_RETURNS):
        raise ConfigError(
            "shaping 'potential' changes returns of steps alone, and no term uses them; choose a step term"
            " that does, 'leave_one_out_to_go' for one"
        )
    if config.shaping in NEW_OBJECTIVES:
        if config.shaping == "terms" and config.step == "turn_credit":
            raise ConfigError(
                "shaping 'terms' takes scores for terms, one a step, and step 'turn_credit' for scores of"
                " states; choose shaping 'score_gain', or another step term"
            )
        if config.step == "mt_grpo" or not config.counts_step_rewards:
            weight = "" if config.step_weight else " and step_weight 0"
            raise ConfigError(
                f"shaping {config.shaping!r} gives every step a reward, which episode {config.episode!r} with"
                f" step {config.step!r}{weight} does not take; choose others"
            )
        if config.episode == "maxrl":
            raise ConfigError(
                f"shaping {config.shaping!r} can take a rollout below 0, where episode 'maxrl' has no"
                " meaning; choose 'potential', or another episode term"
            )
        if config.scores in {BY_REWARD + name for name in config.reward_weights}:
            raise ConfigError(f"scores {config.scores!r} would count twice: reward_weights has it, too")


def _weighted(trajectory: Trajectory, config: "CreditConfig") -> Floats:
    return config.shaping_weight * np.array(trajectory.scores or (), dtype=np.float64)


def _terms(trajectory: Trajectory, config: "CreditConfig") -> Floats:
    numbers = _weighted(trajectory, config)
    return numbers if config.shaping == "terms" else np.diff(numbers)
