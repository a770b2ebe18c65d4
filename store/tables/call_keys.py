"""What finds the calls that belong together: accounts of one call, and calls that go on from each other.

Knows the tables `call_keys` and `sessions`; does not know why calls are joined.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import duckdb

from spangrad.errors import StoreError
from spangrad.store.schema import CALL_KEYS
from spangrad.store.tables.rows import insert_rows, select_dicts

NEAR_NS: Final = 2 * 24 * 3600 * 10**9
"""How far from each other calls may be that are found by messages or by tool calls."""
APART_NS: Final = 3600 * 10**9
"""How long after its request the reply of a call may begin that is told in two spans."""

_LAST_NS: Final = 2**64 - 1

_GIVEN: Final = """
WITH given AS (SELECT unnest($call_ids::VARCHAR[]) AS call_id, unnest($traces::VARCHAR[]) AS trace_id,
  unnest($responses::VARCHAR[]) AS response_id, unnest($requests::VARCHAR[]) AS request_key,
  unnest($recorders::VARCHAR[][]) AS recorders, unnest($is_open::BOOLEAN[]) AS is_open,
  unnest($starts::UBIGINT[]) AS start_ns, unnest($ends::UBIGINT[]) AS end_ns)
SELECT DISTINCT g.call_id AS given_id, k.trace_id, k.trace_ids, k.rules FROM given g
"""
_BY_KEY: Final = """
JOIN call_keys k ON k.{key} = g.{key} WHERE
  (k.recorders <> g.recorders AND k.start_ns <= g.end_ns AND g.start_ns <= k.end_ns)
  OR (k.recorders = g.recorders AND g.is_open <> (len(k.reply_keys) = 0)
    AND greatest(k.start_ns, g.start_ns) - least(k.start_ns, g.start_ns) <= {apart})
"""
"""Accounts by other recorders at the same time, or by the same of a request and of its reply."""
_BY_TRACE: Final = """
JOIN (SELECT trace_id, trace_ids, rules, unnest(trace_ids) AS told_in FROM call_keys
  WHERE len(trace_ids) > 1) k ON k.told_in = g.trace_id
"""
"""What the given traces were found to tell of before."""

_TOLD_IN: Final = """
SELECT call_id, start_ns, end_ns FROM call_keys WHERE trace_id IN (SELECT unnest($traces::VARCHAR[]))
UNION SELECT call_id, start_ns, end_ns FROM (
  SELECT call_id, start_ns, end_ns, unnest(trace_ids) AS told_in FROM call_keys WHERE len(trace_ids) > 1)
  WHERE told_in IN (SELECT unnest($traces::VARCHAR[]))
"""
_NEAR: Final = "start_ns <= $latest AND end_ns >= $earliest"
_GOES_ON: Final = f"""
WITH given AS (SELECT * FROM call_keys WHERE call_id IN (SELECT unnest($call_ids))),
told AS (SELECT call_id, unnest(trace_ids) AS trace_id FROM call_keys WHERE len(trace_ids) > 1),
made AS (SELECT unnest(reply_keys) AS key FROM given),
shown AS (SELECT unnest(prefix_keys) AS key FROM given),
traces AS (SELECT trace_id FROM given UNION SELECT unnest(trace_ids) FROM given),
found AS (
SELECT call_id FROM call_keys k WHERE k.conversation_key IN (SELECT conversation_key FROM given)
UNION SELECT call_id FROM call_keys k WHERE k.response_id IN (SELECT previous_response_id FROM given)
UNION SELECT call_id FROM call_keys k WHERE k.previous_response_id IN (SELECT response_id FROM given)
UNION SELECT call_id FROM (SELECT call_id, unnest(reply_keys) AS key FROM call_keys WHERE {_NEAR})
  WHERE key IN (SELECT key FROM shown UNION SELECT key FROM made)
UNION SELECT call_id FROM (SELECT call_id, unnest(prefix_keys) AS key FROM call_keys WHERE {_NEAR})
  WHERE key IN (SELECT key FROM made)
UNION SELECT call_id FROM (SELECT call_id, unnest(tool_calls_made) AS key FROM call_keys WHERE {_NEAR})
  WHERE key IN (SELECT unnest(tool_calls_answered) FROM given UNION SELECT unnest(tool_calls_made) FROM given)
UNION SELECT call_id FROM (SELECT call_id, unnest(tool_calls_answered) AS key FROM call_keys WHERE {_NEAR})
  WHERE key IN (SELECT unnest(tool_calls_made) FROM given)
UNION SELECT call_id FROM call_keys k WHERE k.trace_id IN (SELECT trace_id FROM traces)
UNION SELECT call_id FROM told WHERE trace_id IN (SELECT trace_id FROM traces)
UNION SELECT k.call_id FROM call_keys k JOIN sessions s ON s.trace_id = k.trace_id WHERE s.rollout_id IN
  (SELECT n.rollout_id FROM sessions n JOIN traces t ON n.trace_id = t.trace_id))
SELECT call_id, start_ns, end_ns FROM call_keys WHERE call_id IN (SELECT call_id FROM found)
"""
"""Calls that may go on from the given ones, or those from them; what competes with that; what is joined."""


def put_call_keys(con: duckdb.DuckDBPyConnection, rows: Sequence[Mapping[str, Any]]) -> int:
    """Store keys of calls by `call_id`; later ones replace earlier ones."""
    names = {column.name for column in CALL_KEYS.columns}
    for row in rows:
        if unknown := row.keys() - names:
            raise StoreError(f"call {row.get('call_id')!r}: {sorted(unknown)} are no columns of `call_keys`")
    return insert_rows(
        con, CALL_KEYS, list({row["call_id"]: row for row in rows}.values()), conflict="replace"
    )


def related_accounts(
    con: duckdb.DuckDBPyConnection, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Stored calls that may be accounts of a given one (`given_id`): `trace_id`, `trace_ids`, `rules`."""
    if not rows:
        return []
    given = {
        "call_ids": [row["call_id"] for row in rows],
        "traces": [row["trace_id"] for row in rows],
        "responses": [row.get("response_id") for row in rows],
        "requests": [row.get("request_key") for row in rows],
        "recorders": [list(row.get("recorders") or ()) for row in rows],
        "is_open": [not row.get("reply_keys") for row in rows],
        "starts": [row["start_ns"] for row in rows],
        "ends": [row["end_ns"] for row in rows],
    }
    parts = [_BY_TRACE, *(_BY_KEY.format(key=key, apart=APART_NS) for key in ("response_id", "request_key"))]
    found = {
        (row["given_id"], row["trace_id"]): row
        for part in parts
        for row in select_dicts(con, _GIVEN + part, given)
    }
    return list(found.values())


def related_call_keys(
    con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str], limit: int
) -> list[dict[str, Any]]:
    """Keys of the calls in these traces and of all that may be of one rollout with any of them, and so on.

    No further ones are looked for once there are more than `limit`.
    """
    found = con.execute(_TOLD_IN, {"traces": list(trace_ids)}).fetchall()
    known: set[str] = set()
    while fresh := [row for row in found if row[0] not in known]:
        known.update(call_id for call_id, _, _ in fresh)
        if len(known) > limit:
            break
        given = {
            "call_ids": [call_id for call_id, _, _ in fresh],
            "earliest": max(min(start_ns for _, start_ns, _ in fresh) - NEAR_NS, 0),
            "latest": min(max(end_ns for _, _, end_ns in fresh) + NEAR_NS, _LAST_NS),
        }
        found = con.execute(_GOES_ON, given).fetchall()
    sql = "SELECT * FROM call_keys WHERE call_id IN (SELECT unnest(?::VARCHAR[]))"
    return select_dicts(con, sql, [list(known)])
