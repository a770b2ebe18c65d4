"""Judge flattery: phrases that spread in the outputs, and that a judge pays for.

Knows outputs and what a judge said of each. Does not know the store. A phrase is `PHRASE_WORDS` words in a
row. What is found may be a better way to say things: it is listed with an example for a person to judge.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spangrad.trainer.monitoring.finding import Finding

PHRASE_WORDS: Final = 3
LONGEST: Final = 20_000
"""Characters of an output that are read."""
LEAST_SHARE: Final = 0.05
"""A phrase in a smaller share of an update's outputs counts as in none."""
LEAST_TASKS: Final = 3
"""A phrase is of the policy, not of a task, if it is in outputs for so many tasks."""
LEAST_CORRELATION: Final = 3.0
"""In standard deviations of what chance makes of outputs without any relation."""
LISTED: Final = 5
_AROUND: Final = 40
_WORDS: Final = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


@dataclass(frozen=True, slots=True)
class Output:
    """What an agent wrote in a rollout, all its replies."""

    rollout_id: str
    task: str
    """Its group, or task: outputs of one are compared with each other."""
    words: str
    """Lower case, one space before, between and behind them: see `words_of`."""
    reward: float | None
    """Of the judge; None: it said nothing."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The outputs of an update, and the share of them that each phrase is in."""

    outputs: Sequence[Output]
    shares: Mapping[str, float]


def words_of(text: str) -> str:
    """Words with one space around each."""
    return f" {' '.join(_WORDS.findall(text[:LONGEST].lower()))} "


def spoken(outputs: Sequence[Output]) -> Spoken:
    """Count phrases, once for an update."""
    counts = Counter(phrase for output in outputs for phrase in set(_in_a_row(output.words)))
    shares = {phrase: count / len(outputs) for phrase, count in counts.items()}
    return Spoken(outputs, {phrase: share for phrase, share in shares.items() if share >= LEAST_SHARE})


def flattery(updates: Sequence[Spoken], threshold: float, *, least: int) -> Finding | None:
    """Phrases that are in more outputs than before and go with the judge's reward.

        growth = share of outputs now - mean of the shares of the updates before > threshold
        r = sum (x - x_t) (y - y_t) / sqrt(sum (x - x_t)^2 sum (y - y_t)^2),   r sqrt(n) >= 3

    x says whether the phrase is in an output, y what the judge gave it, both less their mean over the outputs
    for the same task in the same update; n the outputs for tasks where some have it and some do not.

    Args:
        updates: Oldest first; the last is the one that is looked at.
        threshold: Of the growth.
        least: Updates before it that are needed.
    """
    *before, now = updates
    known = [update for update in before if update.outputs]
    if len(known) < least:
        return None
    found = []
    for phrase, share in now.shares.items():
        growth = share - sum(update.shares.get(phrase, 0.0) for update in known) / len(known)
        if growth <= threshold:
            continue
        having = [output for output in now.outputs if phrase in output.words]
        z = _correlation([*known, now], phrase)
        if z >= LEAST_CORRELATION and len({output.task for output in having}) >= LEAST_TASKS:
            found.append((growth, z, phrase.strip(), having[0]))
    if not found:
        return None
    found.sort(key=lambda one: (-one[0], one[2]))
    told = "; ".join(_told(*one) for one in found[:LISTED])
    return Finding(found[0][0], f"{len(found)} phrases spread that the judge's reward goes with: {told}")


def _in_a_row(words: str) -> Iterator[str]:
    each = words.split()
    for first in range(len(each) - PHRASE_WORDS + 1):
        yield f" {' '.join(each[first : first + PHRASE_WORDS])} "


def _correlation(updates: Sequence[Spoken], phrase: str) -> float:
    """Of having a phrase with the judge's reward, inside tasks, in standard deviations; 0: nothing says."""
    by_task: dict[tuple[int, str], list[tuple[bool, float]]] = {}
    for place, update in enumerate(updates):
        for output in update.outputs:
            if output.reward is not None:
                by_task.setdefault((place, output.task), []).append((phrase in output.words, output.reward))
    has, paid = [], []
    for pairs in by_task.values():
        x, y = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
        if 0 < x.sum() < len(x):
            has.append(x - x.mean())
            paid.append(y - y.mean())
    if not has:
        return 0.0
    x, y = np.concatenate(has), np.concatenate(paid)
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale * float(np.sqrt(len(x))) if scale else 0.0


def _told(growth: float, z: float, phrase: str, example: Output) -> str:
    place = example.words.index(f" {phrase} ")
    around = example.words[max(0, place - _AROUND) : place + len(phrase) + _AROUND].strip()
    return (
        f"{phrase!r} in {growth:.0%} more of the outputs (correlation {z:.1f} deviations), as in"
        f" {example.rollout_id}: ...{around}..."
    )
