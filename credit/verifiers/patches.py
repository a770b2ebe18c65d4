"""Patches against the right patch: SWE-RL's similarity."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Final

from spangrad.errors import CreditError

MALFORMED: Final = -1.0
"""What a patch that is none gets."""
MAX_CHARACTERS: Final = 20_000
"""The matcher is quadratic: it looks at so much of a file's diff."""


def patch_similarity(
    predicted: object, right: Mapping[str, str], *, max_characters: int = MAX_CHARACTERS
) -> float:
    """Mean similarity of the diffs of all files that one side touches.

        s = (1 / |P u R|) sum_f ratio(P_f, R_f);   ratio = 2 M / (|P_f| + |R_f|), 0 if one side lacks f

    with M the characters in matching blocks. Source: SWE-RL, arXiv:2502.18449.

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
    total = len(predicted) + len(right)
    if not total:
        return 1.0
    blocks = SequenceMatcher(None, predicted[:max_characters], right, autojunk=False).get_matching_blocks()
    return 2.0 * sum(block.size for block in blocks) / total
