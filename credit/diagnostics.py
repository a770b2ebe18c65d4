"""What a batch can teach: numbers that explain a run that does not learn.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.gigpo import NO_ANCHOR, pool_ids
from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.credit.shaping import CycleTest


@dataclass(frozen=True, slots=True)
class CreditDiagnostics:
    """Counts and shares of one batch. Rewards are counted per rollout, then per group."""

    rollouts: int
    missing_reward: int
    """Rollouts left out because nobody scored them."""
    groups: int
    """Groups with at least one scored rollout."""
    informative_groups: int
    """Groups whose rewards differ; the others train nothing."""
    equal_groups: int
    """Groups with several scored rollouts whose rewards are all equal, however far they are discounted."""
    singleton_groups: int
    """Groups with one scored rollout and nothing to compare it with."""
    expected_informative_share: float | None
    """Mean of 1 - p^G - (1-p)^G over the groups, p the share of rollouts with the higher return. A measured
    share far below it: tasks are either always or never solved. None unless returns take at most two
    values."""
    anchor_coverage: float | None
    """Share of steps whose anchor pool has at least 2 members. None without steps."""
    anchor_coverage_exact: float | None
    """What it would be if only equal observations were one state. None unless similar ones are."""
    anchors_from_similarity: float | None
    """Share of steps whose pool holds observations that differ from theirs. None unless similar ones are one
    state."""
    reward_mean: float | None
    """Mean over groups of the mean return, as scored: an agent that farms shaping does not improve in it."""
    reward_std: float | None
    """Standard deviation of the same returns over all rollouts, population."""
    reward_std_in_groups: float | None
    """Mean over groups of the standard deviation inside, population."""
    advantage_abs_mean: float | None
    """Mean |A| over steps."""
    dropped: Mapping[str, int]
    """Rollouts that each filter left out, by its name."""
    shaping: CycleTest | None
    """What going in circles earns from what shaping adds; None: it adds nothing, or a potential."""
    without_baseline: int | None = None
    """Rollouts of which the running baseline expected nothing: of no known kind, or the first of theirs."""

    def metrics(self) -> Mapping[str, float]:
        """The numbers by name; what is not known is not in it."""
        share = self.informative_groups / self.groups if self.groups else None
        named = {
            "rollouts/all": self.rollouts,
            "rollouts/missing_reward": self.missing_reward,
            "groups/all": self.groups,
            "groups/informative": self.informative_groups,
            "groups/equal": self.equal_groups,
            "groups/singleton": self.singleton_groups,
            "groups/informative_share": share,
            "groups/informative_share_expected": self.expected_informative_share,
            "anchors/coverage": self.anchor_coverage,
            "anchors/coverage_exact": self.anchor_coverage_exact,
            "anchors/from_similarity": self.anchors_from_similarity,
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            "reward/std_in_groups": self.reward_std_in_groups,
            "advantage/abs_mean": self.advantage_abs_mean,
            "baseline/missing": self.without_baseline,
        }
        if self.shaping is not None:
            named |= {
                "shaping/farming_gain": self.shaping.gain,
                "shaping/cycles": self.shaping.cycles,
                "shaping/passes": self.shaping.passes,
            }
        named |= {f"dropped/{name}": count for name, count in self.dropped.items()}
        return {name: float(value) for name, value in named.items() if value is not None}


def diagnose(
    *,
    returns_N: Floats,
    scored_N: Floats,
    group_ids_N: Ints,
    is_informative_N: NDArray[np.bool_],
    group_ids_S: Ints,
    anchor_ids_S: Ints,
    exact_anchor_ids_S: Ints | None = None,
    advantages_S: Floats,
    rollouts: int,
    missing_reward: int,
    dropped: Mapping[str, int],
    shaping: CycleTest | None,
    baselines_N: Floats | None = None,
) -> CreditDiagnostics:
    """Describe a batch.

    Args:
        returns_N: Return of each scored rollout, as it is compared.
        scored_N: The same as it was scored, without penalties and what shaping adds.
        group_ids_N: Its group.
        is_informative_N: Whether the rewards of its group differ.
        group_ids_S: Group of each step of a scored rollout.
        anchor_ids_S: State of each step.
        exact_anchor_ids_S: The same by equal observations alone, where `anchor_ids_S` is by similarity.
        advantages_S: What each step got.
        rollouts: Rollouts in the batch, scored or not.
        baselines_N: What was expected of each scored rollout, where that is what it is compared with.
        missing_reward: Those that nobody scored.
        dropped: Those that each filter left out.
        shaping: The test of what shaping adds.
    """
    _, first = np.unique(group_ids_N, return_index=True)
    pools = pool_statistics(scored_N, group_ids_N, ddof=0)
    sizes, means, stds = pools.count_X[first], pools.mean_X[first], pools.std_X[first]
    sizes_S = _pool_sizes(group_ids_S, anchor_ids_S)
    exact_S = None if exact_anchor_ids_S is None else _pool_sizes(group_ids_S, exact_anchor_ids_S)
    is_informative = is_informative_N[first]
    informative, singleton = int(is_informative.sum()), int(((sizes == 1) & ~is_informative).sum())
    return CreditDiagnostics(
        rollouts=rollouts,
        missing_reward=missing_reward,
        groups=len(first),
        informative_groups=informative,
        equal_groups=len(first) - informative - singleton,
        singleton_groups=singleton,
        expected_informative_share=_expected_informative(returns_N, sizes),
        anchor_coverage=_share(sizes_S >= 2),
        anchor_coverage_exact=None if exact_S is None else _share(exact_S >= 2),
        anchors_from_similarity=None if exact_S is None else _share(sizes_S > exact_S),
        reward_mean=float(means.mean()) if len(first) else None,
        reward_std=float(scored_N.std()) if len(first) else None,
        reward_std_in_groups=float(stds.mean()) if len(first) else None,
        advantage_abs_mean=float(np.abs(advantages_S).mean()) if len(advantages_S) else None,
        without_baseline=None if baselines_N is None else int(np.isnan(baselines_N).sum()),
        dropped=dropped,
        shaping=shaping,
    )


def _expected_informative(returns_N: Floats, sizes: Ints) -> float | None:
    values = np.unique(returns_N)
    if not 1 <= len(values) <= 2:
        return None
    p = float((returns_N == values[1]).mean()) if len(values) == 2 else 0.0
    return float((1.0 - p**sizes - (1.0 - p) ** sizes).mean())


def _pool_sizes(group_ids_S: Ints, anchor_ids_S: Ints) -> Ints:
    """Members of each step's pool; 0 where the state is not known."""
    pool_S = pool_ids(group_ids_S, anchor_ids_S)
    return np.where(anchor_ids_S == NO_ANCHOR, 0, np.bincount(pool_S)[pool_S])


def _share(is_so_S: NDArray[np.bool_]) -> float | None:
    return float(is_so_S.mean()) if len(is_so_S) else None
