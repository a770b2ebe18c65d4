"""Rewards in and out.

Knows the table `rewards`. Invariants: the author is what the caller's key says; a reward
without an attempt is for the rollout's current one. A reward with a time is one row, however
often it is sent; one without is given now, and is a repeat only of the latest row of its
(rollout, attempt, call, name, trace, author): any other value is another row, later than all before
(readers take the last one of a name and author).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import duckdb

from spangrad.errors import StoreError
from spangrad.store.encoding import encode_json
from spangrad.store.records import Reward, RewardAuthor
from spangrad.store.schema import REWARDS
from spangrad.store.tables.placing import placed
from spangrad.store.tables.rows import insert_rows, select_dicts

_Subject = tuple[str, int | None, str | None, str, str | None]
"""(rollout_id, attempt, call_id, name, trace_id): what a reward is about."""
_LAST_NS = 2**63 - 1


def put_rewards(con: duckdb.DuckDBPyConnection, rewards: Sequence[Reward], author: RewardAuthor) -> int:
    """Store rewards by this author. Returns how many were new."""
    for reward in rewards:
        if not math.isfinite(reward.value):
            raise StoreError(
                f"rollout {reward.rollout_id!r}: reward {reward.name!r} is {reward.value!r}; "
                "a reward is a finite number, and one that is missing is not sent"
            )
    unnumbered = {reward.rollout_id for reward in rewards if reward.attempt is None}
    select = "SELECT rollout_id, attempt FROM rollouts WHERE rollout_id IN (SELECT unnest(?::VARCHAR[]))"
    current = dict(con.execute(select, [list(unnumbered)]).fetchall()) if unnumbered else {}
    filled = [
        replace(r, author=author, attempt=current.get(r.rollout_id) if r.attempt is None else r.attempt)
        for r in rewards
    ]
    filled = placed(con, filled)
    timed = [reward for reward in filled if reward.time_ns is not None]
    new = insert_rewards(con, [(reward, _identity(reward)) for reward in timed])
    given = _not_repeated(con, [reward for reward in filled if reward.time_ns is None], author)
    return new + insert_rewards(con, [(reward, _identity(reward)) for reward in given])


def insert_rewards(con: duckdb.DuckDBPyConnection, rewards: Sequence[tuple[Reward, str]]) -> int:
    """Store rewards, which have a time, under the given identities, once each."""
    rows = {
        identity: {
            "reward_id": identity,
            "rollout_id": reward.rollout_id,
            "attempt": reward.attempt,
            "call_id": reward.call_id,
            "name": reward.name,
            "value": reward.value,
            "author": str(reward.author),
            "explanation": reward.explanation,
            "time_ns": reward.time_ns,
            "trace_id": reward.trace_id,
        }
        for reward, identity in rewards
    }
    if not rows:
        return 0
    known = con.execute(
        "SELECT reward_id FROM rewards WHERE reward_id IN (SELECT unnest(?::VARCHAR[]))", [list(rows)]
    ).fetchall()
    for (identity,) in known:
        del rows[identity]
    return insert_rows(con, REWARDS, list(rows.values()))  # `ignore` would change their order


def _not_repeated(
    con: duckdb.DuckDBPyConnection, rewards: Sequence[Reward], author: RewardAuthor
) -> list[Reward]:
    """Rewards given now that say something new, with times behind all that is known of their subject."""
    known: dict[_Subject, list[Reward]] = {}
    for row in select_rewards(con, list({reward.rollout_id for reward in rewards})) if rewards else ():
        if row.author == author:
            known.setdefault(_subject(row), []).append(row)
    by_subject: dict[_Subject, list[Reward]] = {}
    for reward in rewards:
        said = by_subject.setdefault(_subject(reward), [])
        if not said or _content(said[-1]) != _content(reward):
            said.append(reward)
    now = time.time_ns()
    fresh: list[Reward] = []
    for subject, said in by_subject.items():
        before = known.get(subject, [])
        contents = [_content(reward) for reward in said]
        if contents == [_content(row) for row in before[-len(said) :]]:
            continue  # the whole request came before
        if before and contents[0] == _content(before[-1]):
            said = said[1:]
        first = max(now, (before[-1].time_ns or 0) + 1) if before else now
        fresh += [replace(reward, time_ns=min(first + i, _LAST_NS)) for i, reward in enumerate(said)]
    return fresh


def _subject(reward: Reward) -> _Subject:
    return reward.rollout_id, reward.attempt, reward.call_id, reward.name, reward.trace_id


def _content(reward: Reward) -> tuple[float, str | None]:
    return float(reward.value), reward.explanation


def _identity(reward: Reward) -> str:
    about: list[str | int | None] = [reward.rollout_id, reward.attempt, reward.call_id]
    if reward.trace_id is not None:  # the rest follows from what is joined to it
        about = ["trace", reward.trace_id]
    parts = [
        *about,
        reward.name,
        float(reward.value),
        str(reward.author),
        reward.explanation,
        reward.time_ns,
    ]
    return blake2b(encode_json(parts).encode(), digest_size=16).hexdigest()


def select_rewards(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str] | None) -> list[Reward]:
    """Rewards of these rollouts (all without), in order of time; of the same time, as they came."""
    where, parameters = "", []
    if rollout_ids is not None:
        where, parameters = " WHERE rollout_id IN (SELECT unnest(?::VARCHAR[]))", [list(rollout_ids)]
    rows = select_dicts(con, f"SELECT * FROM rewards{where} ORDER BY time_ns, rowid", parameters)
    return [
        Reward(
            rollout_id=row["rollout_id"],
            value=row["value"],
            name=row["name"],
            call_id=row["call_id"],
            author=RewardAuthor(row["author"]),
            explanation=row["explanation"],
            attempt=row["attempt"],
            time_ns=row["time_ns"],
            trace_id=row["trace_id"],
            reward_id=row["reward_id"],
        )
        for row in rows
    ]
