"""What of a batch is left out before anything is compared, and why: the filters by name, in their order.

A rollout that is left out gets no advantage (None, not 0), is in no statistics, and is counted under its
reason: nothing is dropped silently. An overlong rollout is left out, or made to pay; its reward is never
taken for 0.

Shape letters: N rollouts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from spangrad.credit.filters import Bools, overlong_penalty, top_p_by_spread, top_share_by_spread
from spangrad.credit.groups import Floats, Ints
from spangrad.credit.transitions import MISSING_REWARD
from spangrad.credit.types import Trajectory
from spangrad.errors import CreditError

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig

MISSING: Final = "missing_reward"
MISSING_SCORE: Final = "missing_score"
MISSING_VALUE: Final = "missing_value"
OVERLONG: Final = "overlong"
OVERLONG_SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    "keep": frozenset(),
    "mask": frozenset({"overlong_limit"}),
    "penalize": frozenset({"overlong_limit", "overlong_buffer", "overlong_factor"}),
}
"""What is done about overlong rollouts -> the settings that it uses."""
REASONS: Final[Mapping[str, str]] = {
    MISSING: MISSING_REWARD,
    MISSING_SCORE: "the score of a state is missing",
    MISSING_VALUE: "the value of a state is missing: its call has no token ids to ask the critic about",
    OVERLONG: "overlong: it was cut off, or sampled more tokens than credit.overlong_limit",
    "zero_spread": "filter zero_spread: nothing that is compared in its group differs",
    "top_share": "filter top_share: the rewards of its group differ less than those of groups that stay",
    "top_p": "filter top_p: the rewards of its group differ less than those of groups that stay",
}
"""Why a rollout has no advantage: name in the diagnostics -> in words."""

FILTERS: Final[Mapping[str, Callable[[Floats, Ints, Bools, "CreditConfig"], Bools]]] = {
    "zero_spread": lambda _returns_N, _group_ids_N, is_informative_N, _config: is_informative_N,
    "top_share": lambda returns_N, group_ids_N, _, config: top_share_by_spread(
        returns_N, group_ids_N, config.top_share
    ),
    "top_p": lambda returns_N, group_ids_N, _, config: top_p_by_spread(returns_N, group_ids_N, config.top_p),
}
"""(returns, groups, whether the group says something, config) -> which rollouts stay."""


def filtered(
    returns_N: Floats, group_ids_N: Ints, is_informative_N: Bools, config: "CreditConfig"
) -> list[str | None]:
    """The filter that leaves each rollout out, or None; each filter sees what those before it left.

    `zero_spread` goes by what the terms compare (with a step term, rollouts of equal returns can earn them in
    different steps); the others by the spread of returns, as published.
    """
    left_out: list[str | None] = [None] * len(returns_N)
    left = np.arange(len(returns_N))
    for name in config.filters:
        stays = FILTERS[name](returns_N[left], group_ids_N[left], is_informative_N[left], config)
        for n in left[~stays]:
            left_out[n] = name
        left = left[stays]
    return left_out


def leaves_out_lone(filters: Sequence[str], *, counts_lone: bool) -> bool:
    """Whether no rollout that is alone in its group stays, whatever it returned.

    `counts_lone`: whether a term finds something to compare in one; its return has no spread.
    """
    return any(name != "zero_spread" or not counts_lone for name in filters)


def is_overlong(trajectory: Trajectory, config: "CreditConfig") -> bool:
    """Whether it is left out as overlong: cut off, or with more sampled tokens than the limit (0: none).

    Raises:
        CreditError: There is a limit and a call does not tell its tokens.
    """
    if config.overlong != "mask":
        return False
    return trajectory.is_truncated or 0 < config.overlong_limit < _length(trajectory, config)


def penalized(trajectories: Sequence[Trajectory], config: "CreditConfig") -> list[Trajectory]:
    """With what it costs to come near the limit (`overlong_penalty`) added to outcomes, if that is asked for.

    Raises:
        CreditError: A call does not tell its tokens.
    """
    if config.overlong != "penalize":
        return list(trajectories)
    penalties_N = overlong_penalty(
        np.array([_length(each, config) for each in trajectories], dtype=np.int64),
        limit=config.overlong_limit,
        buffer=config.overlong_buffer,
        factor=config.overlong_factor,
    )
    return [
        replace(each, reward=(each.reward or 0.0) + penalty)
        for each, penalty in zip(trajectories, penalties_N.tolist(), strict=True)
    ]


def _length(trajectory: Trajectory, config: "CreditConfig") -> int:
    if not config.overlong_limit:
        return 0
    counts = [step.tokens for step in trajectory.steps]
    if None in counts:
        raise CreditError(
            f"rollout {trajectory.rollout_id!r} has a call without token ids, so it has no length to hold"
            " against overlong_limit; leave the limit out"
        )
    return sum(count or 0 for count in counts)
