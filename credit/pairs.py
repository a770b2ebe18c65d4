"""Which sequence is better than which: pairs for direct preference optimisation.

Knows rows and the returns of their rollouts. Forks are found in token ids: two calls with the same tokens
before them and other tokens of their own.

Invariants:
* a pair is of one group, and what is chosen in it has the higher return; both sides are judged under one id;
* every sampled token is in one row, as before: a row is split where its calls are in different pairs;
* a call that no pair compares is in `refused`, with its reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final, Literal

import numpy as np

from spangrad.credit.groups import LARGEST
from spangrad.credit.transition import CallSegment, Preference, Transition
from spangrad.credit.transitions import MISSING_REWARD, Refused
from spangrad.errors import ConfigError, CreditError

Level = Literal["rollout", "tail", "step"]
LEVELS: Final = ("rollout", "tail", "step")
OUTSIDE: Final = "its pairs compare other calls of its rollout"
Place = tuple[int, int]
"""Row, and segment of the row."""


@dataclass(frozen=True, slots=True)
class Preferred:
    """Rows with what a preference loss needs to know of them, and calls that it has no use for."""

    rows: Sequence[Transition]
    refused: Sequence[Refused]
    diagnostics: Mapping[str, float]
    """`preference/*`: `credit/README.md`."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A trained call of a rollout, with what tells its tokens from others'."""

    place: Place
    step_index: int
    before: bytes
    """Hash of the tokens before the reply."""
    through: bytes
    """Hash of the tokens up to the reply's end."""


def paired(
    rows: Sequence[Transition],
    returns: Mapping[str, float | None],
    *,
    level: Level = "rollout",
    min_gap: float = 0.0,
    pairs_per_group: int = 0,
) -> Preferred:
    """Pair the better rollouts of each group with its worse ones.

        rollout   all calls of both: ETO, arXiv:2403.02502
        tail      from the first call on in which they differ after the same tokens: IPR, arXiv:2406.11176
        step      that call alone: Step-DPO, arXiv:2406.18629

    A pair needs R_chosen - R_rejected > `min_gap`. Every pair weighs 1 / P, P pairs in all. Differs from the
    papers: theirs have an expert's rollout on one side; here rollouts of the group are on both, so that IPR's
    Monte-Carlo returns of a step are the returns of the rollouts that take it.

    Args:
        rows: Of one attempt of every rollout. A row without a group has nothing to be compared with.
        returns: rollout_id -> return, reward units; None or absent: nobody scored it.
        level: What of the two rollouts is compared; see above.
        min_gap: Reward units, 0 or more.
        pairs_per_group: The pairs with the largest gaps that a group gives, in order of the rows where gaps
            are equal; 0: all.

    Returns:
        Rows with preferences (the pair's id is `<chosen> > <rejected>`), in the order of `rows`.

    Raises:
        ConfigError: A setting is out of its range.
        CreditError: A rollout has two attempts, or a return is not finite.

    Two sequences of the same tokens, and a pair that says the same as an earlier one, teach nothing (again)
    and are left out.
    """
    if level not in LEVELS:
        raise ConfigError(f"level is {level!r}; expected one of {', '.join(LEVELS)}")
    if not min_gap >= 0 or pairs_per_group < 0:
        raise ConfigError(
            f"min_gap is {min_gap!r} and pairs_per_group {pairs_per_group!r}; expected 0 or more"
        )
    check_returns(rows, returns)
    calls = _calls(rows)
    pairs: list[tuple[str, Sequence[_Call], Sequence[_Call]]] = []
    why = {rollout: MISSING_REWARD for rollout in calls if returns.get(rollout) is None}
    for members in _groups(rows, why):
        pairs += _pairs_of_group(members, calls, returns, level, min_gap, pairs_per_group, why)
    judged: dict[Place, list[Preference]] = {}
    for name, chosen, rejected in pairs:
        for side, is_good in ((chosen, True), (rejected, False)):
            for call in side:
                judged.setdefault(call.place, []).append(Preference(name, is_good, 1.0 / len(pairs)))
    compared = {rows[place[0]].rollout_id for place in judged}
    why.update(dict.fromkeys(compared, OUTSIDE))
    return with_preferences(rows, judged, why, {"preference/pairs": float(len(pairs))})


def with_preferences(
    rows: Sequence[Transition],
    judged: Mapping[Place, Sequence[Preference]],
    why: Mapping[str, str],
    diagnostics: Mapping[str, float],
) -> Preferred:
    """Rows whose calls are judged alike; what nothing judges is refused with its rollout's reason."""
    kept: list[Transition] = []
    refused: list[Refused] = []
    for r, row in enumerate(rows):
        alike: dict[tuple[Preference, ...], list[CallSegment]] = {}
        for s, segment in enumerate(row.segments):
            if (r, s) in judged:
                alike.setdefault(tuple(judged[r, s]), []).append(segment)
            else:
                refused.append(left_out(row, segment, why[row.rollout_id]))
        parts = [restricted(row, segments, preferences) for preferences, segments in alike.items()]
        kept += _with_observations(row, parts)
    return Preferred(kept, refused, {**diagnostics, "preference/left_out": float(len(refused))})


def _with_observations(row: Transition, parts: Sequence[Transition]) -> list[Transition]:
    """The parts of a row, of which the longest alone has its observations."""
    longest = max(range(len(parts)), key=lambda k: len(parts[k].token_ids)) if parts else 0
    return [
        part
        if (mask := row.observation_mask) is None
        else replace(part, observation_mask=mask[: len(part.token_ids)] & (k == longest))
        for k, part in enumerate(parts)
    ]


def left_out(row: Transition, segment: CallSegment, reason: str) -> Refused:
    """A trained call of a row that is trained no more."""
    return Refused(row.rollout_id, segment.call_id, reason, segment.stop - segment.start)


def restricted(
    row: Transition, segments: Sequence[CallSegment], preferences: Sequence[Preference]
) -> Transition:
    """The row that trains these of its calls alone; tokens behind the last of them are cut off.

    Its advantages are the preferences' mean sign, +1 for good and -1 for bad: what the store is told of them.
    """
    signs = [1.0 if preference.is_good else -1.0 for preference in preferences]
    stop = segments[-1].stop
    mask = np.zeros(stop, dtype=np.bool_)
    for segment in segments:
        mask[segment.start : segment.stop] = row.action_mask[segment.start : segment.stop]
    return replace(
        row,
        segments=tuple(segments),
        token_ids=row.token_ids[:stop],
        action_mask=mask,
        behavior_logprobs=np.where(mask, row.behavior_logprobs[:stop], np.nan).astype(np.float32),
        policy_versions=np.where(mask, row.policy_versions[:stop], -1).astype(np.int32),
        advantages=np.where(mask, sum(signs) / len(signs), 0.0),
        preferences=tuple(preferences),
    )


def check_returns(rows: Sequence[Transition], returns: Mapping[str, float | None]) -> None:
    """Refuse two attempts of a rollout, and returns that are no numbers.

    Raises:
        CreditError: There is one.
    """
    attempts: dict[str, int] = {}
    for row in rows:
        if attempts.setdefault(row.rollout_id, row.attempt) != row.attempt:
            raise CreditError(
                f"rollout {row.rollout_id!r} has rows of attempts {attempts[row.rollout_id]} and "
                f"{row.attempt}; preferences need one attempt of each"
            )
    for rollout, value in returns.items():
        if value is not None and not abs(value) <= LARGEST:
            raise CreditError(
                f"rollout {rollout!r} has return {value!r}; expected a finite one of size"
                f" {LARGEST:g} at most, or none"
            )


def _groups(rows: Sequence[Transition], why: dict[str, str]) -> list[list[str]]:
    """Scored rollouts by group, each in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.rollout_id in why:
            continue
        if row.group_id is None:
            why[row.rollout_id] = "no group says what it can be compared with"
        elif row.rollout_id not in (members := groups.setdefault(row.group_id, [])):
            members.append(row.rollout_id)
    return list(groups.values())


def _calls(rows: Sequence[Transition]) -> dict[str, list[_Call]]:
    """Trained calls of every rollout, in order of their steps."""
    calls: dict[str, list[_Call]] = {}
    for r, row in enumerate(rows):
        found = calls.setdefault(row.rollout_id, [])
        running, at = blake2b(digest_size=16), 0
        for s, segment in enumerate(row.segments):
            running.update(row.token_ids[at : segment.start].tobytes())
            before = running.digest()
            running.update(row.token_ids[segment.start : segment.stop].tobytes())
            at = segment.stop
            found.append(_Call((r, s), segment.step_index, before, running.digest()))
    for found in calls.values():
        found.sort(key=lambda call: call.step_index)
    return calls


def _pairs_of_group(
    members: Sequence[str],
    calls: Mapping[str, Sequence[_Call]],
    returns: Mapping[str, float | None],
    level: Level,
    min_gap: float,
    limit: int,
    why: dict[str, str],
) -> list[tuple[str, Sequence[_Call], Sequence[_Call]]]:
    scored = [(rollout, value) for rollout in members if (value := returns[rollout]) is not None]
    gaps = [
        (high - low, chosen, rejected)
        for chosen, high in scored
        for rejected, low in scored
        if high - low > min_gap
    ]
    if not gaps:
        spread = max(value for _, value in scored) - min(value for _, value in scored)
        reason = f"no return of its group differs by more than {min_gap!r}"
        if len(scored) == 1:
            reason = "no other rollout of its group has a reward"
        elif spread == 0:
            reason = "all returns of its group are equal"
        why.update(dict.fromkeys(members, reason))
        return []
    pairs: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], tuple[str, list[_Call], list[_Call]]] = {}
    for _, chosen, rejected in sorted(gaps, key=lambda gap: -gap[0]):
        if limit and len(pairs) == limit:
            break
        sides = _sides(calls[chosen], calls[rejected], level)
        if sides is None:
            reason = "no call of it differs from one of a better or worse rollout after the same tokens"
            why.update({chosen: reason, rejected: reason})
            continue
        said = (tuple(call.through for call in sides[0]), tuple(call.through for call in sides[1]))
        if said[0] == said[1] or said in pairs:
            same = (
                "the same tokens as what it is compared with" if said[0] == said[1] else "a pair said before"
            )
            why.update({chosen: same, rejected: same})
            continue
        pairs[said] = (f"{chosen} > {rejected}", *sides)
    compared = {rollout for _, *both in gaps for rollout in both}
    for rollout in members:
        too_close = f"no return of its group differs by more than {min_gap!r}"
        rest = f"other pairs of its group have larger gaps; {limit} are taken"
        why.setdefault(rollout, rest if rollout in compared else too_close)
    return list(pairs.values())


def _sides(
    chosen: Sequence[_Call], rejected: Sequence[_Call], level: Level
) -> tuple[list[_Call], list[_Call]] | None:
    if level == "rollout":
        return list(chosen), list(rejected)
    at: dict[bytes, list[int]] = {}
    for k, call in enumerate(rejected):
        at.setdefault(call.before, []).append(k)
    for j, call in enumerate(chosen):
        for k in at.get(call.before, ()):
            if rejected[k].through != call.through:
                ends = (j + 1, k + 1) if level == "step" else (len(chosen), len(rejected))
                return list(chosen[j : ends[0]]), list(rejected[k : ends[1]])
    return None
