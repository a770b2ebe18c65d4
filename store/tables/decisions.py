"""What was decided about published versions: promoted, kept, rolled back, restored.

Knows the table `policy_decisions`, and `policies`. Invariants:

* rows are only ever added: what a version is now follows from all of them, in order;
* a decision is about a version that was published, and fits the decisions before it;
* the trainer's own decisions are bound by its rule: it promotes what was evaluated, and goes back to
  what is promoted. An admin is free.
"""

import math
import time
from dataclasses import asdict, replace

import duckdb

from spangrad.errors import StoreError
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    PolicyDecision,
    pending_rollback,
    promoted_version,
)
from spangrad.store.schema import POLICY_DECISIONS
from spangrad.store.tables.rows import insert_rows, select_dicts

_GOES_BACK = (Decision.ROLLED_BACK, Decision.RESTORED)


def insert_decision(con: duckdb.DuckDBPyConnection, decision: PolicyDecision) -> bool:
    """Add a decision; False if it is there."""
    stamped = replace(decision, time_ns=decision.time_ns or time.time_ns())
    before = select_decisions(con, stamped.run_id)
    if stamped in before:
        return False
    _check(con, stamped, before)
    (seq,) = con.execute("SELECT coalesce(max(seq), 0) + 1 FROM policy_decisions").fetchall()[0]
    row = asdict(stamped) | {"seq": seq, "metrics": encode_json(dict(stamped.metrics))}
    insert_rows(con, POLICY_DECISIONS, [row])
    return True


def select_decisions(con: duckdb.DuckDBPyConnection, run_id: str | None) -> list[PolicyDecision]:
    """Decisions in order."""
    where = "" if run_id is None else " WHERE run_id = $run"
    given = {} if run_id is None else {"run": run_id}
    rows = select_dicts(con, f"SELECT * EXCLUDE (seq) FROM policy_decisions{where} ORDER BY seq", given)
    return [
        PolicyDecision(
            **row
            | {
                "decision": Decision(row["decision"]),
                "decided_by": DecisionAuthor(row["decided_by"]),
                "metrics": decode_json(row["metrics"]),
            }
        )
        for row in rows
    ]


def _check(con: duckdb.DuckDBPyConnection, one: PolicyDecision, before: list[PolicyDecision]) -> None:
    published = [
        version
        for (version,) in con.execute(
            "SELECT policy_version FROM policies WHERE run_id = ? ORDER BY policy_version", [one.run_id]
        ).fetchall()
    ]
    what = f"{one.decision} version {one.policy_version} of run {one.run_id!r}"
    for version in (one.policy_version, one.to_version):
        if version is not None and version not in published:
            known = ", ".join(map(str, published[-5:])) or "none"
            raise StoreError(f"{what}: version {version} was never published; the newest are: {known}")
    if (one.to_version is not None) != (one.decision in _GOES_BACK):
        raise StoreError(f"{what}: to_version is {one.to_version!r}; a rollback has one, nothing else has")
    if one.to_version is not None and one.to_version >= one.policy_version:
        raise StoreError(f"{what}: to_version is {one.to_version}, which is no earlier version")
    if not all(math.isfinite(value) for value in one.metrics.values()):
        raise StoreError(f"{what}: metrics {dict(one.metrics)!r:.200} have a number that is none")
    if one.decided_by is DecisionAuthor.ADMIN:
        return
    if one.decision is Decision.PROMOTED and not one.metrics.get("tasks", 0) > 0:
        raise StoreError(f"{what}: a trainer promotes what it evaluated; send the metrics, with `tasks`")
    if one.decision is Decision.PROMOTED and pending_rollback(before) is not None:
        raise StoreError(f"{what}: the run was rolled back meanwhile; a trainer carries that out first")
    promoted = promoted_version(before)
    if one.decision is Decision.ROLLED_BACK and one.to_version != promoted:
        raise StoreError(f"{what}: a trainer goes back to the promoted version, {promoted}")
