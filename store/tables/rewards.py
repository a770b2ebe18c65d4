"""Rewards in and out.

Knows the table `rewards`. Invariants: the author is what the caller's key says; a reward
without an attempt is for the rollout's current one; the same reward twice is one row, and
another value is another row (readers take the last one of a name and author).
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
from spangrad.store.tables.rows import insert_rows, select_dicts


def put_rewards(con: duckdb.DuckDBPyConnection, rewards: Sequence[Reward], author: RewardAuthor) -> int:
    """Store rewards by this author. Returns how many were new."""
    for reward in rewards:
        if not math.isfinite(reward.value):
            raise StoreError(
                f"rollout {reward.rollout_id!r}: reward {reward.name!r} is {reward.value!r}; "
                "a reward is a finite number, and one that is missing is not sent"
            )
    ids = list({reward.rollout_id for reward in rewards})
    current = dict(
        con.execute(
            "SELECT rollout_id, attempt FROM rollouts WHERE rollout_id IN (SELECT unnest(?::VARCHAR[]))",
            [ids],
        ).fetchall()
    )
    filled = [
        replace(r, author=author, attempt=current.get(r.rollout_id) if r.attempt is None else r.attempt)
        for r in rewards
    ]
    return insert_rewards(con, [(reward, _identity(reward)) for reward in filled])


def insert_rewards(con: duckdb.DuckDBPyConnection, rewards: Sequence[tuple[Reward, str]]) -> int:
    """Store rewards under the given identities, once each."""
    now = time.time_ns()
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
            "time_ns": now if reward.time_ns is None else reward.time_ns,
        }
        for reward, identity in rewards
    }
    return insert_rows(con, REWARDS, list(rows.values()), conflict="ignore")


def _identity(reward: Reward) -> str:
    parts = [
        reward.rollout_id,
        reward.attempt,
        reward.call_id,
        reward.name,
        float(reward.value),
        str(reward.author),
        reward.explanation,
        reward.time_ns,
    ]
    return blake2b(encode_json(parts).encode(), digest_size=16).hexdigest()


def select_rewards(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str] | None) -> list[Reward]:
    """Rewards of these rollouts (all without), in order of time."""
    where, parameters = "", []
    if rollout_ids is not None:
        where, parameters = " WHERE rollout_id IN (SELECT unnest(?::VARCHAR[]))", [list(rollout_ids)]
    rows = select_dicts(con, f"SELECT * FROM rewards{where} ORDER BY time_ns, reward_id", parameters)
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
        )
        for row in rows
    ]
