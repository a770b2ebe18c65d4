"""Which rollout or call a row of rewards is about, as the store knows it.

Knows the store's tables of spans, sessions and rollouts. Knows no files and no values.

Invariants: a row is placed exactly, or left out with the reason; ids that contradict each other place
nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from spangrad.adapters.calls import calls_from_spans, calls_of
from spangrad.adapters.exports.rewards import MANY_ROLLOUTS, NO_SPAN, NO_TRACE, Place, places_of
from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.scoring.reward_rows import RewardRow
from spangrad.store.base import Store

NO_ROLLOUT: Final = "no such rollout"
NO_ATTEMPT: Final = "no such attempt of the rollout"
NO_RESPONSE: Final = "no call with that response_id"
MANY_CALLS: Final = "several calls with that response_id"
MANY_SPANS: Final = "several spans with that span_id"
CONTRADICTION: Final = "rollout_id and trace_id are of different rollouts"
READ_AT_ONCE: Final = 16

_OWNERS: Final = (
    "SELECT DISTINCT s.trace_id, s.rollout_id FROM spans s "
    "WHERE s.trace_id IN (SELECT unnest(?)) AND s.rollout_id IS NOT NULL"
)
_BY_SPAN: Final = (
    "SELECT DISTINCT s.trace_id, s.span_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id "
    "FROM spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id "
    "WHERE s.span_id IN (SELECT unnest(?)) AND coalesce(s.rollout_id, n.rollout_id) IN (SELECT unnest(?))"
)


def place_rows(store: Store, rows: Sequence[RewardRow]) -> list[Place | str]:
    """Where each row belongs, or why nowhere; in the order of the rows."""
    known = {
        rollout.rollout_id
        for rollout in store.rollouts(rollout_ids=sorted({row.rollout_id for row in rows if row.rollout_id}))
    }
    traces = _traces_of_spans(store, rows)
    wanted = [_key(row, traces) for row in rows]
    keys = [key for key in wanted if isinstance(key, tuple)]
    found = places_of(store, keys) if keys else {}
    shared = sorted({key[0] for key, place in found.items() if place == MANY_ROLLOUTS})
    owners = store.query(_OWNERS, [shared]) if shared else []
    owned = {(row["trace_id"], row["rollout_id"]) for row in owners}
    placed: list[Place | str] = []
    for row, key in zip(rows, wanted, strict=True):
        place = None if isinstance(key, str) or key is None else found.get(key, NO_TRACE)
        if place == MANY_ROLLOUTS and (row.trace_id, row.rollout_id) in owned:
            place = Place(str(row.rollout_id), None, None)
        placed.append(_place(row, key, place, known))
    return _of_attempts_there_are(store, rows, _by_response(store, rows, placed))


def _of_attempts_there_are(
    store: Store, rows: Sequence[RewardRow], placed: Sequence[Place | str]
) -> list[Place | str]:
    """The same places, but of attempts that have not begun: rollouts are at one, a trace of none at 0."""
    places = [
        place if isinstance(place, Place) and row.attempt else None
        for row, place in zip(rows, placed, strict=True)
    ]
    named = sorted({place.rollout_id for place in places if place is not None})
    found = store.rollouts(rollout_ids=named) if named else ()
    current = {rollout.rollout_id: rollout.attempt for rollout in found}
    return [
        NO_ATTEMPT
        if place is not None and (row.attempt or 0) > current.get(place.rollout_id, 0)
        else placed[number]
        for number, (row, place) in enumerate(zip(rows, places, strict=True))
    ]


def _traces_of_spans(store: Store, rows: Iterable[RewardRow]) -> dict[tuple[str, str], set[str]]:
    """(rollout id, span id) -> traces, for rows that name a span and not its trace."""
    asked = [row for row in rows if row.rollout_id and row.span_id and row.trace_id is None]
    if not asked:
        return {}
    parameters = [sorted({str(row.span_id) for row in asked}), sorted({str(row.rollout_id) for row in asked})]
    found: dict[tuple[str, str], set[str]] = {}
    for row in store.query(_BY_SPAN, parameters):
        found.setdefault((row["rollout_id"], row["span_id"]), set()).add(row["trace_id"])
    return found


def _key(row: RewardRow, traces: dict[tuple[str, str], set[str]]) -> tuple[str, str | None] | str | None:
    """(trace id, span id) that a row is about; why there is none; or None: it names a rollout alone."""
    if row.trace_id is not None:
        return row.trace_id, row.span_id
    if row.span_id is None:
        return None
    candidates = traces.get((str(row.rollout_id), row.span_id), set())
    if len(candidates) != 1:
        return MANY_SPANS if candidates else NO_SPAN
    return next(iter(candidates)), row.span_id


def _place(
    row: RewardRow, key: tuple[str, str | None] | str | None, found: Place | str | None, known: set[str]
) -> Place | str:
    if row.rollout_id is not None and row.rollout_id not in known:
        # A trace of no rollout is one under its own id.
        if isinstance(found, Place) and found.rollout_id == row.rollout_id:
            return _with_row(row, key, found)
        return NO_ROLLOUT
    if isinstance(key, str):
        return key
    if key is None:
        return Place(str(row.rollout_id), row.attempt, None)
    if not isinstance(found, Place):
        is_others = found == MANY_ROLLOUTS and row.rollout_id is not None
        return CONTRADICTION if is_others else found or NO_TRACE
    if row.rollout_id not in (None, found.rollout_id):
        return CONTRADICTION
    return _with_row(row, key, found)


def _with_row(row: RewardRow, key: tuple[str, str | None] | str | None, found: Place) -> Place:
    """The place with what the row itself says: its attempt, that it is for the rollout, or for a call."""
    call_id, part = found.call_id, found.trace_id if row.rollout_id is None else None
    if row.is_call and isinstance(key, tuple):
        call_id, part = f"{key[0]}-{key[1]}", None
    attempt = found.attempt if row.attempt is None else row.attempt
    return Place(found.rollout_id, attempt, call_id, part)


def _by_response(store: Store, rows: Sequence[RewardRow], placed: list[Place | str]) -> list[Place | str]:
    """The same places, narrowed to the call whose response a row names."""
    asked = sorted(
        {
            place.rollout_id
            for row, place in zip(rows, placed, strict=True)
            if row.response_id is not None and isinstance(place, Place)
        }
    )
    calls: dict[tuple[str, str], list[ModelCall]] = {}
    for start in range(0, len(asked), READ_AT_ONCE):
        chunk = asked[start : start + READ_AT_ONCE]
        for call in calls_of(store, chunk):
            calls.setdefault((call.rollout_id or "", call.response_id or ""), []).append(call)
        for call in calls_from_spans(store.spans(trace_ids=chunk), store.logs(trace_ids=chunk)):
            if call.rollout_id is None:
                calls.setdefault((call.trace_id, call.response_id or ""), []).append(call)
    return [
        place
        if row.response_id is None or isinstance(place, str)
        else _narrowed(row, place, calls.get((place.rollout_id, row.response_id), []))
        for row, place in zip(rows, placed, strict=True)
    ]


def _narrowed(row: RewardRow, place: Place, calls: Sequence[ModelCall]) -> Place | str:
    if row.trace_id is not None:
        calls = [call for call in calls if row.trace_id in (call.trace_id, *call.trace_ids)]
    if row.span_id is not None:
        calls = [call for call in calls if row.span_id in call.span_ids]
    if len(calls) != 1:
        return MANY_CALLS if calls else NO_RESPONSE
    (call,) = calls
    return Place(place.rollout_id, call.attempt if row.attempt is None else row.attempt, call.call_id)
