"""Pairs from their definition: compare every two rollouts, walk along both token by token."""

from collections.abc import Mapping, Sequence

Call = tuple[tuple[int, ...], tuple[int, ...]]
"""All tokens before the reply, and the reply."""


def pairs(
    rollouts: Mapping[str, tuple[str, float | None, Sequence[Call]]], level: str, min_gap: float
) -> dict[tuple[str, str], tuple[list[Call], list[Call]]]:
    """(chosen, rejected) -> the calls of both that are compared; repetitions are not left out."""
    found = {}
    for better, (group, high, mine) in rollouts.items():
        for worse, (its_group, low, theirs) in rollouts.items():
            if group != its_group or high is None or low is None or not high - low > min_gap:
                continue
            if level == "rollout":
                found[better, worse] = (list(mine), list(theirs))
                continue
            for j, (prompt, reply) in enumerate(mine):
                forks = [k for k, (shown, said) in enumerate(theirs) if shown == prompt and said != reply]
                if forks:
                    k = forks[0]
                    if level == "step":
                        found[better, worse] = ([mine[j]], [theirs[k]])
                    else:
                        found[better, worse] = (list(mine[j:]), list(theirs[k:]))
                    break
    return found
