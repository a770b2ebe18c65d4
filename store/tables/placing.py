"""Where rewards of traces belong: to the rollout that the trace is, or to the last call of a part of it.

Knows the tables `sessions`, `calls`, `spans` and `rewards`. A reward of a trace is its rollout's while no
other trace of the rollout has calls; in a longer one it is kept at the trace's last call that acted, under
its name.

Invariant: the place follows from the trace and what is joined to it by now, not from what came first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import duckdb

from spangrad.store.records import Reward

Place = tuple[str, str | None]
"""(rollout id, call id or None)."""

_LAST_CALLS = """
SELECT trace_id, coalesce(
  arg_max(call_id, (start_ns, call_id)) FILTER (purpose = 'agent' AND grade <> 'unusable'),
  arg_max(call_id, (start_ns, call_id)))
FROM calls WHERE trace_id IN (SELECT unnest(?::VARCHAR[])) GROUP BY trace_id
"""
_LAST_SPANS = """
SELECT trace_id, trace_id || '-' || arg_max(span_id, (start_ns, span_id))
FROM spans WHERE trace_id IN (SELECT unnest(?::VARCHAR[])) GROUP BY trace_id
"""
"""Of traces that only tell of other traces' calls."""


def places(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> dict[str, Place]:
    """Where a reward of each of these traces belongs; those that are of no session are left out."""
    if not trace_ids:
        return {}
    members = dict(
        con.execute(
            "SELECT trace_id, rollout_id FROM sessions WHERE rollout_id IN "
            "(SELECT rollout_id FROM sessions WHERE trace_id IN (SELECT unnest(?::VARCHAR[])))",
            [list(trace_ids)],
        ).fetchall()
    )
    last = dict(con.execute(_LAST_CALLS, [list(members)]).fetchall())
    parts = Counter(members[trace_id] for trace_id in last)
    known = [trace_id for trace_id in trace_ids if trace_id in members]
    if others := [t for t in known if t not in last and parts[members[t]] > 1]:
        last |= dict(con.execute(_LAST_SPANS, [others]).fetchall())
    return {t: (members[t], last.get(t) if parts[members[t]] > 1 else None) for t in known}


def placed(con: duckdb.DuckDBPyConnection, rewards: Sequence[Reward]) -> list[Reward]:
    """The rewards, those of traces where they belong by now."""
    known = places(con, sorted({reward.trace_id for reward in rewards if reward.trace_id is not None}))
    return [_at(reward, known) for reward in rewards]


def place_again(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str], former: Sequence[str]) -> None:
    """Move stored rewards to where they belong, now that these traces were joined or parted.

    Args:
        con: In a transaction.
        trace_ids: Traces of the rollouts that have others by now.
        former: What their rollouts were called: ids of traces.
    """
    con.execute(
        "UPDATE rewards SET rollout_id = s.rollout_id FROM sessions s WHERE rewards.call_id IS NULL "
        "AND s.trace_id = rewards.rollout_id AND rewards.rollout_id <> s.rollout_id "
        "AND rewards.rollout_id IN (SELECT unnest(?::VARCHAR[]))",
        [list(former)],
    )
    con.execute(
        "UPDATE rewards SET rollout_id = s.rollout_id FROM sessions s WHERE rewards.call_id IS NOT NULL "
        "AND s.trace_id = split_part(rewards.call_id, '-', 1) AND rewards.rollout_id <> s.rollout_id "
        "AND rewards.rollout_id IN (SELECT unnest(?::VARCHAR[]))",
        [list(former)],
    )
    told = con.execute(
        "SELECT DISTINCT trace_id FROM rewards WHERE trace_id IN (SELECT unnest(?::VARCHAR[]))",
        [list(trace_ids)],
    ).fetchall()
    for trace_id, (rollout_id, call_id) in places(con, [trace_id for (trace_id,) in told]).items():
        con.execute(
            "UPDATE rewards SET rollout_id = $rollout, call_id = $call WHERE trace_id = $trace "
            "AND (rollout_id <> $rollout OR call_id IS DISTINCT FROM $call)",
            {"rollout": rollout_id, "call": call_id, "trace": trace_id},
        )


def _at(reward: Reward, known: Mapping[str, Place]) -> Reward:
    if reward.trace_id is None or reward.trace_id not in known:
        return reward
    rollout_id, call_id = known[reward.trace_id]
    return replace(reward, rollout_id=rollout_id, call_id=call_id)
