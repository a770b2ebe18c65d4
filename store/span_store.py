"""`SpanStore`: a store's spans, calls, rollouts and rewards as tables, for notebooks and scripts.

Knows the views and tables that it asks; it is a front of a file or of a hub and holds nothing: a file
is open, for reading, only while an answer is fetched, so that it keeps no writer out. What waits to be
taken in or to be read is, before, as by every command that shows a store.

Invariants: values of a question are parameters, never text of its SQL; a name that the store does not know
is an error that names the nearest one; of more rows than `limit` the newest are given, the oldest first.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from spangrad.errors import StoreError
from spangrad.store.answers import Query
from spangrad.store.base import Store
from spangrad.store.names import nearest
from spangrad.store.records import RewardAuthor, RolloutStatus
from spangrad.user_code import load_callable

Wanted = str | Sequence[str] | None
"""One name, several, or any."""
Since = datetime | date | str | None
"""A time (UTC, if it says no zone), a day, or either in ISO form."""

_READER: Final = "spangrad.adapters.accounts:account_unread"
"""What reads the calls of traces that nobody has read yet; by name, as dialects are a layer above."""
GRADES: Final = ("exact", "ids", "text", "unusable")

_TIME: Final = "TRY(make_timestamp_ns({}::BIGINT))"
_SPAN_TIMES: Final = (
    f"{_TIME.format('s.start_ns')} AS started, (s.end_ns::DOUBLE - s.start_ns::DOUBLE) / 1e6 AS duration_ms"
)


_HOME: Final[Mapping[str, str]] = dict.fromkeys(
    ("rollout_id", "run_id", "task_id", "group_id", "split"), "rollouts"
)
"""Tables that know a name, if not the one that is asked."""
_CHECKED: Final = {"grade", "status", "author"}
"""Columns whose values are known, whatever is in the store."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is asked for: a SELECT, its column of time, and what rows of one time are ordered by."""

    select: str
    time: str
    order: str


_CALLS: Final = _Kind(
    f"""
    SELECT s.call_id, s.rollout_id, s.attempt, s.step_name, s.purpose, s.model, s.grade, s.grade_reasons,
      s.finish_reason, s.prompt_tokens, s.sampled_tokens, s.policy_version, s.state_key, s.dialect,
      r.run_id, r.split, s.trace_id, s.span_id, {_SPAN_TIMES}
    FROM calls s LEFT JOIN rollouts r USING (rollout_id)
    WHERE r.attempt IS NULL OR r.attempt = s.attempt
    """,
    "started",
    "call_id",
)
_ROLLOUTS: Final = _Kind("SELECT * FROM outcomes", "started", "rollout_id")
_STEPS: Final = _Kind("SELECT * FROM steps", "started", "call_id")
_TOOLS: Final = _Kind("SELECT * FROM tools", "started", "span_id")
_REWARDS: Final = _Kind(
    f"""
    SELECT rollout_id, attempt, call_id, name, value, author, explanation, {_TIME.format("time_ns")} AS given
    FROM rewards
    """,
    "given",
    "rollout_id, name, author, value",
)
_LINEAGE: Final = _Kind("SELECT * FROM lineage", "committed", "run_id, update_index, rollout_id, call_id")
_SPANS: Final = _Kind(
    f"""
    SELECT s.trace_id, s.span_id, s.parent_span_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id,
      s.attempt, s.name, s.kind, s.status_code, s.status_message, s.scope, s.attributes, s.events, s.resource,
      {_SPAN_TIMES}
    FROM spans s LEFT JOIN sessions n USING (trace_id)
    """,
    "started",
    "trace_id, span_id",
)


class SpanStore:
    """Questions to a store, read-only: a file, beside others that read it, or a hub, while it writes."""

    def __init__(self, target: "str | os.PathLike[str] | Store", key: str | None = None) -> None:
        """Nothing is opened yet.

        Args:
            target: Path of a DuckDB file, URL of a hub, or a store that is open already.
            key: Key for the hub; an evaluator's is enough.
        """
        self._target = target
        self._key = key
        self._one_at_a_time = threading.Lock()

    def calls(
        self,
        *,
        rollout: Wanted = None,
        run: Wanted = None,
        model: Wanted = None,
        grade: Wanted = None,
        purpose: Wanted = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Model calls of rollouts' current attempts: model, grade with its reasons, sizes, policy version."""
        _check("grade", grade, GRADES)
        given = {"rollout_id": rollout, "run_id": run, "model": model, "grade": grade, "purpose": purpose}
        return self._query(_CALLS, "calls", given, since, limit)

    def rollouts(
        self,
        *,
        rollout: Wanted = None,
        run: Wanted = None,
        task: Wanted = None,
        group: Wanted = None,
        split: Wanted = None,
        status: Wanted = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Rollouts with their last trusted rewards, calls, sampled tokens and worst grade."""
        _check("status", status, RolloutStatus)
        given = {
            "rollout_id": rollout,
            "run_id": run,
            "task_id": task,
            "group_id": group,
            "split": split,
            "status": status,
        }
        return self._query(_ROLLOUTS, "rollouts", given, since, limit)

    def steps(
        self,
        *,
        rollout: Wanted = None,
        model: Wanted = None,
        grade: Wanted = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Model calls of agents, numbered in their rollout; of every attempt."""
        _check("grade", grade, GRADES)
        given = {"rollout_id": rollout, "model": model, "grade": grade}
        return self._query(_STEPS, "calls", given, since, limit)

    def tools(
        self,
        *,
        rollout: Wanted = None,
        tool: Wanted = None,
        failed: bool | None = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Uses of tools, by whichever recorder; with `failed`, only those that failed, or that did not."""
        return self._query(
            _TOOLS, "tools", {"rollout_id": rollout, "tool": tool}, since, limit, failed=failed
        )

    def tool_errors(
        self, *, rollout: Wanted = None, tool: Wanted = None, since: Since = None, limit: int | None = None
    ) -> Query:
        """Uses of tools that failed, with the error."""
        return self.tools(rollout=rollout, tool=tool, failed=True, since=since, limit=limit)

    def rewards(
        self,
        *,
        rollout: Wanted = None,
        name: Wanted = None,
        author: Wanted = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Every reward that was given; of one name and author the last one counts."""
        _check("author", author, RewardAuthor)
        given = {"rollout_id": rollout, "name": name, "author": author}
        return self._query(_REWARDS, "rewards", given, since, limit)

    def lineage(
        self,
        *,
        run: Wanted = None,
        update: int | None = None,
        rollout: Wanted = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Calls that updates trained on: advantage, tokens, the version that sampled them, span."""
        given = {"run_id": run, "rollout_id": rollout}
        return self._query(_LINEAGE, "lineage", given, since, limit, update_index=update)

    def spans(
        self,
        *,
        rollout: Wanted = None,
        trace: Wanted = None,
        name: Wanted = None,
        since: Since = None,
        limit: int | None = None,
    ) -> Query:
        """Spans, with attributes as JSON, in which `$messages` and `$column` stand for what is stored once.

        `open_store(...).spans()` gives them whole, `spangrad.adapters.calls_of` as model calls.
        """
        given = {"rollout_id": rollout, "trace_id": trace, "name": name}
        return self._query(_SPANS, "spans", given, since, limit)

    def sql(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Query:
        """Any SELECT of DuckDB's SQL; values go into `parameters`, for `?` or `$name`."""
        return Query(self._opened, statement, parameters, where=self._where)

    def __repr__(self) -> str:
        """What it asks."""
        return f"SpanStore({self._where!r})"

    @property
    def _where(self) -> str:
        if isinstance(self._target, str | os.PathLike):
            return os.fspath(self._target)
        return str(getattr(self._target, "path", None) or getattr(self._target, "url", "the store"))

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        if not isinstance(self._target, str | os.PathLike):
            yield self._target
            return
        target = os.fspath(self._target)
        with self._one_at_a_time:  # a process opens a file once
            if target.startswith(("http://", "https://")):
                from spangrad.store.client import HubClient

                with HubClient(target, self._key) as client:
                    yield client
            else:
                from spangrad.store.reading import open_to_read

                with open_to_read(target, read_traces=_read_traces) as store:
                    yield store

    def _query(
        self,
        kind: _Kind,
        table: str,
        named: Mapping[str, Wanted],
        since: Since,
        limit: int | None,
        **equal: bool | int | None,
    ) -> Query:
        wanted = {column: [names] if isinstance(names, str) else names for column, names in named.items()}
        parameters: dict[str, Any] = {
            column: list(map(str, names)) for column, names in wanted.items() if names is not None
        }
        conditions = [f"{column} IN (SELECT unnest(${column}::VARCHAR[]))" for column in parameters]
        names = [
            (_HOME.get(column, table), column, name)
            for column in parameters
            if column not in _CHECKED
            for name in parameters[column]
        ]
        for column, value in equal.items():
            if value is not None:
                conditions.append(f"{column} = ${column}")
                parameters[column] = value
        if since is not None:
            conditions.append(f"epoch_ns({kind.time}) >= $since")
            parameters["since"] = _nanoseconds(since)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        order = f"{kind.time}, {kind.order}"
        sql = f"SELECT * FROM ({kind.select}) {where}"
        if limit is not None:
            newest = ", ".join(f"{column.strip()} DESC" for column in order.split(","))
            sql = f"SELECT * FROM ({sql} ORDER BY {newest} LIMIT $limit)"
            parameters["limit"] = limit
        return Query(self._opened, f"{sql} ORDER BY {order}", parameters, where=self._where, names=names)


def _read_traces(store: Store) -> None:
    load_callable(_READER)(store)


def _check(what: str, wanted: Wanted, known: "Sequence[str] | type[StrEnum]") -> None:
    names = [str(name) for name in known]
    for name in [wanted] if isinstance(wanted, str) else wanted or ():
        if name not in names:
            raise StoreError(f"{what} is {name!r}, expected one of {', '.join(names)}{nearest(name, names)}")


def _nanoseconds(since: datetime | date | str) -> int:
    time = since
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError as error:
            raise StoreError(
                f"since is {since!r}, expected a date or a time such as '2026-11-30T12:00'"
            ) from error
    if not isinstance(time, datetime):
        time = datetime(time.year, time.month, time.day)
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
