"""Estimators side by side on one batch, without a model.

Knows trajectories and configs; no stores, no tokens, no text. What differs between two estimators on the same
rollouts is the estimators' doing, so a choice can be looked at before anything is trained with it.

* A group is wasted on an estimator if every step of it gets 0, and there is a reason for it.
* Nothing is drawn at random: the same batch gives the same numbers.

Shape letters: S steps of scored rollouts, F folds, E estimators, X numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np

from spangrad.credit.assign import CreditResult, assign
from spangrad.credit.batch import group_of
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.diagnostics import CreditDiagnostics
from spangrad.credit.groups import Floats
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import CreditError

FOLDS: Final = 8
"""Parts that a group is cut into for `ComparedEstimator.noise`; a group with no more members: one each."""
NO_REWARD: Final = "no rollout has a reward"
ALONE: Final = "one rollout has a reward: nothing to compare it with"
EQUAL: Final = "all returns are equal"
NOT_BETWEEN: Final = "rewards differ, but not between what is compared"


@dataclass(frozen=True, slots=True)
class ComparedEstimator:
    """What one estimator makes of the batch."""

    name: str
    settings: Mapping[str, Any]
    """Those that it uses."""
    informative_groups: int = 0
    """Groups with an advantage that is not 0."""
    nonzero_share: float | None = None
    """Share of steps whose advantage is not 0."""
    abs_mean: float | None = None
    """Mean |A| over steps: its scale, which says nothing about quality."""
    effective_steps: float | None = None
    """(sum |A|)^2 / sum A^2: how many steps of equal |A| would weigh as these do."""
    noise: float | None = None
    """Standard error that an advantage has from who else is in its group, of its own size: the square root of
    the mean jackknife variance over the mean A^2. None: no group has three scored rollouts, all is 0, or the
    estimator refuses what is left without some of them."""
    diagnostics: CreditDiagnostics | None = None
    refused: str | None = None
    """Why it has no numbers for this batch."""


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """Rollouts that are compared with each other."""

    group: str
    """Its id; of a rollout without a group `rollout` and the rollout's."""
    rollouts: int
    steps: int
    returns: Sequence[float]
    """Of the scored ones."""
    wasted: Mapping[str, str]
    """Estimator -> why it gives the group nothing."""


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step of a scored rollout."""

    group: str
    rollout_id: str
    call_id: str
    step_index: int
    return_: float
    """Of the rollout."""
    advantages: Mapping[str, float | None]
    """None: the estimator's own filters left it out."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Estimators on one batch."""

    estimators: Sequence[ComparedEstimator]
    rank_correlation: Mapping[str, Mapping[str, float | None]]
    """Spearman's, over steps with an advantage from all; None where one of the two is the same everywhere."""
    groups: Sequence[ComparedGroup]
    steps: Sequence[ComparedStep]
    """Those that any estimator gave an advantage."""

    def disagreements(self) -> list[tuple[float, ComparedStep]]:
        """Steps by how far apart their ranks are (share of the batch), the farthest first."""
        names = [one.name for one in self.estimators if one.refused is None]
        steps = [step for step in self.steps if None not in step.advantages.values()]
        if len(names) < 2 or not steps:
            return []
        values_ES = np.array([[step.advantages[name] for step in steps] for name in names], dtype=np.float64)
        ranks_ES = np.array([_ranks(values_S) for values_S in values_ES])
        apart_S = np.ptp(ranks_ES, axis=0) / max(len(steps) - 1, 1)
        order = np.argsort(-apart_S, kind="stable")
        return [(float(apart_S[number]), steps[number]) for number in order]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        for one, told in zip(self.estimators, found["estimators"], strict=True):
            told["diagnostics"] = None if one.diagnostics is None else dict(one.diagnostics.metrics())
        for step in found["steps"]:
            step["return"] = step.pop("return_")
        return found


Entry = tuple[CreditConfig, Sequence[Trajectory]]


def compare(entries: Mapping[str, Entry]) -> Comparison:
    """Give the same rollouts to every estimator.

    Args:
        entries: Name -> estimator, and the rollouts as it takes them: the same ones, scored or not, for all.

    Raises:
        CreditError: A rollout occurs twice, a reward is not finite, or no estimator can take the batch.

    An estimator that the batch lacks something for (`opo` needs lengths) has `refused` instead of numbers.
    """
    results: dict[str, CreditResult] = {}
    errors: dict[str, CreditError] = {}
    for name, (config, trajectories) in entries.items():
        try:
            results[name] = assign(trajectories, config)
        except CreditError as error:
            errors[name] = error
    if errors and not results:
        raise next(iter(errors.values()))
    known = next((trajectories for name, (_, trajectories) in entries.items() if name in results), ())
    groups: dict[str, list[Trajectory]] = {}
    for one in known:
        groups.setdefault(group_of(one), []).append(one)
    places = [
        (one, step)
        for one in known
        for step in one.steps
        if any(result.advantages.get(_key(one, step)) is not None for result in results.values())
    ]
    found = {
        # None becomes NaN: left out
        name: np.array([result.advantages.get(_key(*place)) for place in places], dtype=np.float64)
        for name, result in results.items()
    }
    is_shared_S = np.isfinite(np.array(list(found.values()))).all(axis=0)
    estimators = [
        _compared(name, entry, results[name], found[name], places)
        if name in results
        else ComparedEstimator(name, _settings(entry[0]), refused=str(errors[name]))
        for name, entry in entries.items()
    ]
    ranks = {name: _ranks(values_S[is_shared_S]) for name, values_S in found.items()}
    return Comparison(
        estimators=estimators,
        rank_correlation={
            one: {other: _correlation(ranks[one], ranks[other]) for other in ranks} for one in ranks
        },
        groups=_groups(groups, found, places, results),
        steps=[
            ComparedStep(
                group=_shown(one),
                rollout_id=one.rollout_id,
                call_id=step.call_id,
                step_index=step.step_index,
                return_=float(one.total_reward or 0.0),
                advantages={
                    name: float(values_S[number]) if np.isfinite(values_S[number]) else None
                    for name, values_S in found.items()
                },
            )
            for number, (one, step) in enumerate(places)
        ],
    )


Places = Sequence[tuple[Trajectory, Step]]


def _settings(config: CreditConfig) -> dict[str, Any]:
    used = config.settings_used()
    return {one.name: getattr(config, one.name) for one in fields(config) if one.name in used}


def _key(one: Trajectory, step: Step) -> tuple[str, str]:
    return one.rollout_id, step.call_id


def _shown(one: Trajectory) -> str:
    return group_of(one) if one.group_id is None else one.group_id


def _compared(
    name: str, entry: Entry, result: CreditResult, values_S: Floats, places: Places
) -> ComparedEstimator:
    own_S = values_S[np.isfinite(values_S)]
    sizes_S, squares = np.abs(own_S), float((own_S**2).sum())
    credited = {group_of(one) for (one, _), a in zip(places, values_S, strict=True) if a and np.isfinite(a)}
    return ComparedEstimator(
        name=name,
        settings=_settings(entry[0]),
        informative_groups=len(credited),
        nonzero_share=float((own_S != 0).mean()) if len(own_S) else None,
        abs_mean=float(sizes_S.mean()) if len(own_S) else None,
        effective_steps=float(sizes_S.sum()) ** 2 / squares if squares else None,
        noise=_noise(entry, values_S, places),
        diagnostics=result.diagnostics,
    )


def _noise(entry: Entry, values_S: Floats, places: Places) -> float | None:
    """How much of an advantage is due to whom its rollout was compared with.

    var(A_s) = (m - 1) / m sum_f (A_{s,f} - mean_f)^2,   f: each of m folds that s is not in, left out
    noise = sqrt(mean_s var(A_s) / mean_s A_s^2)   over groups with at least three scored rollouts

    The delete-a-group jackknife; with one rollout a fold, of a mean of m others it is their variance / m.
    """
    config, trajectories = entry
    groups: dict[str, list[str]] = {}
    for one in trajectories:
        if one.total_reward is not None:
            groups.setdefault(group_of(one), []).append(one.rollout_id)
    fold_of = {
        rollout_id: (number % FOLDS, min(len(ids), FOLDS))
        for ids in groups.values()
        if len(ids) >= 3
        for number, rollout_id in enumerate(ids)
    }
    own = [
        number
        for number, (one, _) in enumerate(places)
        if one.rollout_id in fold_of and np.isfinite(values_S[number])
    ]
    if not own:
        return None
    folds = max(of for _, of in fold_of.values())
    again_FS = np.full((folds, len(own)), np.nan)
    members = [one for one in trajectories if one.rollout_id in fold_of]
    for fold in range(folds):
        try:
            found = assign([one for one in members if fold_of[one.rollout_id][0] != fold], config).advantages
        except CreditError:  # only those of the fold branch, say
            return None
        for column, number in enumerate(own):
            mine, of = fold_of[places[number][0].rollout_id]
            if mine != fold < of:  # a fold beyond those of its group leaves nobody of it out
                # What is filtered out without somebody has no advantage then: 0, as what is wasted.
                again_FS[fold, column] = found[_key(*places[number])] or 0.0
    m_S = np.isfinite(again_FS).sum(axis=0)
    variances_S = (m_S - 1) * np.nanvar(again_FS, axis=0)
    size = float((values_S[own] ** 2).mean())
    return math.sqrt(float(variances_S.mean()) / size) if size else None


def _groups(
    groups: Mapping[str, Sequence[Trajectory]],
    found: Mapping[str, Floats],
    places: Places,
    results: Mapping[str, CreditResult],
) -> list[ComparedGroup]:
    own: dict[str, list[int]] = {name: [] for name in groups}
    for number, (one, _) in enumerate(places):
        own[group_of(one)].append(number)
    compared = []
    for name, members in groups.items():
        returns = [float(one.total_reward) for one in members if one.total_reward is not None]
        wasted = {
            estimator: _why(returns, [results[estimator].left_out.get(one.rollout_id) for one in members])
            for estimator, values_S in found.items()
            if not np.nan_to_num(values_S[own[name]]).any()
        }
        steps = sum(len(one.steps) for one in members)
        compared.append(ComparedGroup(_shown(members[0]), len(members), steps, returns, wasted))
    return compared


def _why(returns: Sequence[float], left_out: Sequence[str | None]) -> str:
    if not returns:
        return NO_REWARD
    if None not in left_out:
        return "; ".join(dict.fromkeys(map(str, left_out)))
    if len(returns) == 1:
        return ALONE
    return EQUAL if min(returns) == max(returns) else NOT_BETWEEN


def _ranks(values_X: Floats) -> Floats:
    """0, 1, 2, ... from the least on; equal numbers share the mean of theirs."""
    _, place_X, counts = np.unique(values_X, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return np.asarray((ends - (counts + 1) / 2)[place_X])


def _correlation(first_X: Floats, second_X: Floats) -> float | None:
    if not len(first_X) or np.ptp(first_X) == 0 or np.ptp(second_X) == 0:
        return None
    return float(np.corrcoef(first_X, second_X)[0, 1])
