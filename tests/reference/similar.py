"""Pools of similar texts: every pair compared, counted with a Counter."""

from collections import Counter
from collections.abc import Sequence


def dice(first: str, second: str, *, shingle: int = 4) -> float:
    """2 |X n Y| / (|X| + |Y|) of the multisets of shingles, ends padded."""
    bags = []
    for text in (first, second):
        padded = text + "\0" * (shingle - 1)
        bags.append(Counter(padded[i : i + shingle] for i in range(len(text))))
    return 2 * (bags[0] & bags[1]).total() / (bags[0].total() + bags[1].total())


def leaders(
    texts: Sequence[str], groups: Sequence[int], counts: Sequence[int], similarity: float
) -> list[int]:
    """Most frequent first, then by text: whoever has no leader leads and takes all similar without one."""
    order = sorted(range(len(texts)), key=lambda i: (groups[i], -counts[i], texts[i].encode()))
    found: dict[int, int] = {}
    for i in order:
        if i in found:
            continue
        found[i] = i
        for j in order:
            if j not in found and groups[j] == groups[i] and dice(texts[i], texts[j]) >= similarity:
                found[j] = i
    return [found[i] for i in range(len(texts))]
