"""Short answers against the right ones: exact match, containment, F1 over words.

Source: SQuAD's normalisation, arXiv:1606.05250, as Search-R1 (arXiv:2503.09516) scores with it.
"""

import re
import string
from collections import Counter
from collections.abc import Collection

from spangrad.credit.verifiers.arguments import strings
from spangrad.errors import CreditError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """In lower case, without (ASCII) punctuation and English articles, single spaces between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: object, golds: str | Collection[str]) -> float:
    """1.0 if the answer is one of the right ones after normalising both, else 0.0.

    Args:
        answer: What the agent said; what is no string is wrong.
        golds: The right answer, or all that count as right.

    Raises:
        CreditError: There is no right answer, or one is blank or no string.
    """
    wanted = [normalized(gold) for gold in _golds(golds)]
    return float(isinstance(answer, str) and normalized(answer) in wanted)


def contains_match(answer: object, golds: str | Collection[str]) -> float:
    """1.0 if a right answer occurs in the answer, as whole words, else 0.0. Rewards saying everything.

    Arguments and errors as of `exact_match`; a right answer of which normalising leaves nothing never occurs.
    """
    wanted = [normalized(gold) for gold in _golds(golds)]
    said = f" {normalized(answer)} " if isinstance(answer, str) else ""
    return float(any(gold and f" {gold} " in said for gold in wanted))


def f1_score(answer: object, golds: str | Collection[str]) -> float:
    """Harmonic mean of precision and recall over words, the best over the right answers.

        F1 = 2 P R / (P + R),   P = common / words of the answer,   R = common / words of the right one

    Words are counted as often as they occur. If one side has no words, both must have none.
    Arguments and errors as of `exact_match`.

    Returns:
        0.0 to 1.0.
    """
    wanted = [normalized(gold).split() for gold in _golds(golds)]
    if not isinstance(answer, str):
        return 0.0
    said = normalized(answer).split()
    return max(_f1(said, gold) for gold in wanted)


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    common = (Counter(said) & Counter(gold)).total()
    return 2.0 * common / (len(said) + len(gold))


def _golds(golds: str | Collection[str]) -> list[str]:
    found = [golds] if isinstance(golds, str) else strings(golds, "the right answers")
    if not found or not all(map(str.strip, found)):
        raise CreditError(
            f"the right answers are {golds!r:.200}; expected at least one, and none that is blank"
        )
    return found
