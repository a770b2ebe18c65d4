"""Accounts of sampled tokens: every one is trained, or dropped for a reason that is named.

    sampled = trained + sum over reasons of dropped

Knows counts and reasons. Does not know what rows or calls are made of.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from spangrad.credit.transitions import Refused
from spangrad.errors import BooksError


def dropped_tokens(refused: Iterable[Refused]) -> dict[str, int]:
    """Sampled tokens of what was refused, by what it is counted as; reasons without a token are left out."""
    found: Counter[str] = Counter()
    for one in refused:
        found[one.counted_as] += one.sampled_tokens
    return dict(+found)


def check_books(sampled: int, trained: int, dropped: Mapping[str, int], *, where: str) -> None:
    """Refuse accounts that do not add up.

    Args:
        sampled: Tokens sampled, counted where they were read.
        trained: Tokens trained, counted in the rows.
        dropped: Reason -> tokens.
        where: What the accounts are of.

    Raises:
        BooksError: A token is missing, or counted twice.
    """
    gone = sum(dropped.values())
    if sampled != trained + gone:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
        raise BooksError(
            f"{where}: {sampled} tokens were sampled, but {trained} are trained and {gone} dropped"
            f" ({reasons}); that is an error in spangrad: please report it with this line"
        )


def dropped_metrics(dropped: Mapping[str, int]) -> dict[str, float]:
    """Metrics `dropped/<reason>`, with the reason in lower case and underscores."""
    found: Counter[str] = Counter()
    for reason, count in dropped.items():
        found["dropped/" + re.sub(r"[^a-z0-9]+", "_", reason.lower()).strip("_")[:60]] += count
    return {name: float(count) for name, count in found.items()}
