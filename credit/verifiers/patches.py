"""Patches against the right patch: SWE-RL's similarity."""

from collections import Counter
from collections.abc import Mapping
from difflib import Match, SequenceMatcher
from itertools import accumulate
from typing import Final

from spangrad.errors import CreditError

MALFORMED: Final = -1.0
"""What a patch that is none gets."""
MAX_CHARACTERS: Final = 20_000
"""The matcher is quadratic: it looks at so much of a file's diff."""
MAX_PAIRS: Final = 20_000_000
"""Pairs of equal characters, or lines, that it looks at for a file."""


def patch_similarity(
    predicted: object, right: Mapping[str, str], *, max_characters: int = MAX_CHARACTERS
) -> float:
    """Mean similarity of the diffs of all files that one side touches.

        s = (1 / |P u R|) sum_f ratio(P_f, R_f);   ratio = 2 M / (|P_f| + |R_f|), 0 if one side lacks f

    with M the characters in matching blocks. Source: SWE-RL, arXiv:2502.18449. Here the work has a bound:
    where a file's diffs would take more than `MAX_PAIRS`, M is what matches line by line (and of that, where
    it takes as many again, what was found until then): a bound from below. Equal diffs are 1.

    Args:
        predicted: Path -> diff as the agent wrote it. No mapping of strings, or an empty one, is
            malformed.
        right: Path -> diff of the right patch; not empty.
        max_characters: Characters of a file's diff that are compared; 1 or more. Of a longer prediction only
            the beginning can match while all of it counts in the denominator: a bound from below.

    Returns:
        0.0 to 1.0, or `MALFORMED`.

    Raises:
        CreditError: `right` is no patch, empty, or longer than what is compared.
    """
    if not isinstance(right, Mapping) or not all(
        isinstance(one, str) for item in right.items() for one in item
    ):
        raise CreditError(f"the right patch is {right!r:.200}; expected path -> diff, both strings")
    longest = max((len(diff) for diff in right.values()), default=0)
    if not right or not 1 <= longest <= max_characters:
        raise CreditError(
            f"the right patch has {len(right)} files, the longest diff {longest} characters; expected at "
            f"least one file and 1 to {max_characters} characters (raise max_characters)"
        )
    if not isinstance(predicted, Mapping) or not predicted:
        return MALFORMED
    if not all(isinstance(part, str) for item in predicted.items() for part in item):
        return MALFORMED
    files = predicted.keys() | right.keys()
    return sum(_ratio(predicted.get(f), right.get(f), max_characters) for f in sorted(files)) / len(files)


def _ratio(predicted: str | None, right: str | None, max_characters: int) -> float:
    if predicted is None or right is None:
        return 0.0
    if predicted == right:
        return 1.0
    compared = predicted[:max_characters]
    matched, is_whole = _matched(list(compared), list(right))
    if not is_whole:
        matched, _ = _matched(compared.splitlines(keepends=True), right.splitlines(keepends=True))
    return 2.0 * matched / (len(predicted) + len(right))


def _matched(predicted: list[str], right: list[str]) -> tuple[int, bool]:
    """Characters of the parts in matching blocks, and whether the work's bound allowed to find all."""
    matcher = _Matcher(predicted, right)
    blocks = matcher.get_matching_blocks()
    found = sum(len(part) for block in blocks for part in predicted[block.a : block.a + block.size])
    return found, matcher.left >= 0


class _Matcher(SequenceMatcher[str]):
    """Finds nothing more once it would have looked at more than `MAX_PAIRS` pairs of equal parts."""

    def __init__(self, predicted: list[str], right: list[str]) -> None:
        super().__init__(None, predicted, right, autojunk=False)
        self.left = MAX_PAIRS
        counts = Counter(right)
        pairs = (1 + counts[part] for part in predicted)
        self._pairs_before = list(accumulate(pairs, initial=0))

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> Match:
        end = len(self._pairs_before) - 1 if ahi is None else ahi
        if self.left >= 0:
            self.left -= self._pairs_before[end] - self._pairs_before[alo]
        return super().find_longest_match(alo, ahi, blo, bhi) if self.left >= 0 else Match(alo, blo, 0)
