"""Brings a store's file to the schema that this spangrad reads.

Knows the history of the schema: one function a version, append-only (a released one
never changes; a test compares their result with `schema.py`). Each runs in one
transaction together with the row that records it, so a crash leaves whole versions.
"""

import time
from collections.abc import Callable

import duckdb

from spangrad.errors import SchemaVersionError
from spangrad.store.schema import TABLES
from spangrad.store.views import VIEWS


def m001_initial(con: duckdb.DuckDBPyConnection) -> None:
    """Spans, calls, rollouts, rewards, policies, updates."""
    con.execute(_INITIAL)


def m002_place_of_calls(con: duckdb.DuckDBPyConnection) -> None:
    """Step index, state key and the reason of the purpose of calls."""
    for column in ("step_index INTEGER", "state_key VARCHAR", "purpose_reason VARCHAR"):
        con.execute(f"ALTER TABLE calls ADD COLUMN {column}")


def m003_logs(con: duckdb.DuckDBPyConnection) -> None:
    """Log records."""
    con.execute(_LOGS)


def m004_sessions(con: duckdb.DuckDBPyConnection) -> None:
    """Traces that are one rollout, and what is needed to find them."""
    con.execute(
        "CREATE TABLE sessions "
        "(trace_id VARCHAR NOT NULL, rollout_id VARCHAR NOT NULL, PRIMARY KEY (trace_id))"
    )
    con.execute(
        "CREATE TABLE call_keys (call_id VARCHAR NOT NULL, trace_id VARCHAR NOT NULL, "
        "start_ns UBIGINT NOT NULL, end_ns UBIGINT NOT NULL, conversation_id VARCHAR, response_id VARCHAR, "
        "previous_response_id VARCHAR, reply_keys VARCHAR[] NOT NULL, prefix_keys VARCHAR[] NOT NULL, "
        "tool_calls_made VARCHAR[] NOT NULL, tool_calls_answered VARCHAR[] NOT NULL, PRIMARY KEY (call_id))"
    )


def m005_unread_traces(con: duckdb.DuckDBPyConnection) -> None:
    """Traces whose calls are to be written to `calls`; in an older store those that have none there."""
    con.execute("CREATE TABLE unread_traces (trace_id VARCHAR NOT NULL, changed_ns BIGINT NOT NULL)")
    con.execute(
        "INSERT INTO unread_traces SELECT DISTINCT trace_id, 0 FROM spans "
        "WHERE trace_id NOT IN (SELECT trace_id FROM calls)"
    )


def m006_archive(con: duckdb.DuckDBPyConnection) -> None:
    """Parquet partitions beside the file, and the traces in them."""
    con.execute(
        "CREATE TABLE archives (file VARCHAR NOT NULL, part INTEGER NOT NULL, table_name VARCHAR NOT NULL, "
        "day VARCHAR NOT NULL, schema_version INTEGER NOT NULL, row_count BIGINT NOT NULL, "
        "size_bytes BIGINT NOT NULL, checksum VARCHAR NOT NULL, PRIMARY KEY (file))"
    )
    con.execute(
        "CREATE TABLE archived_traces "
        "(trace_id VARCHAR NOT NULL, rollout_ids VARCHAR[] NOT NULL, part INTEGER NOT NULL)"
    )
    con.execute("CREATE INDEX archived_traces_trace_id ON archived_traces (trace_id)")


def m007_other(con: duckdb.DuckDBPyConnection) -> None:
    """What OTLP tells and no other column has a place for."""
    for table in ("spans", "logs"):
        con.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS other JSON")


def m008_joins(con: duckdb.DuckDBPyConnection) -> None:
    """Why traces are joined or not, what finds other accounts of a call, rewards of traces.

    What has keys is read again, for those that it lacks.
    """
    for column in (
        "sessions ADD COLUMN IF NOT EXISTS reason VARCHAR",
        "call_keys ADD COLUMN IF NOT EXISTS conversation_key VARCHAR",
        "call_keys ADD COLUMN IF NOT EXISTS request_key VARCHAR",
        "call_keys ADD COLUMN IF NOT EXISTS recorders VARCHAR[]",
        "call_keys ADD COLUMN IF NOT EXISTS trace_ids VARCHAR[]",
        "call_keys ADD COLUMN IF NOT EXISTS rules VARCHAR[]",
        "rewards ADD COLUMN IF NOT EXISTS trace_id VARCHAR",
    ):
        con.execute(f"ALTER TABLE {column}")
    con.execute("INSERT INTO unread_traces SELECT DISTINCT trace_id, 0 FROM call_keys")


def m009_unknown_calls(con: duckdb.DuckDBPyConnection) -> None:
    """Calls in an unknown dialect; traces that have no others are read again, for those."""
    con.execute(
        "CREATE TABLE IF NOT EXISTS unknown_calls (trace_id VARCHAR NOT NULL, span_id VARCHAR NOT NULL, "
        "scope VARCHAR NOT NULL, attributes VARCHAR NOT NULL)"
    )
    con.execute(
        "INSERT INTO unread_traces SELECT DISTINCT trace_id, 0 FROM spans "
        "WHERE trace_id NOT IN (SELECT trace_id FROM calls)"
    )


def m010_tools(con: duckdb.DuckDBPyConnection) -> None:
    """The view `tools`, which costs a tenth and has an attempt everywhere: all views are made anew."""


def m011_archived_owners(con: duckdb.DuckDBPyConnection) -> None:
    """Rollouts of archived spans that were found later."""
    con.execute(
        "CREATE TABLE IF NOT EXISTS archived_owners (trace_id VARCHAR NOT NULL, span_id VARCHAR NOT NULL, "
        "rollout_id VARCHAR NOT NULL, attempt INTEGER)"
    )


def m012_users(con: duckdb.DuckDBPyConnection) -> None:
    """Users, whose calls are not joined to another's: what has keys is read again, for those."""
    con.execute("ALTER TABLE call_keys ADD COLUMN IF NOT EXISTS user_id VARCHAR")
    con.execute(
        "INSERT INTO unread_traces SELECT DISTINCT trace_id, 0 FROM call_keys "
        "WHERE trace_id NOT IN (SELECT trace_id FROM unread_traces)"
    )


def m013_lineage(con: duckdb.DuckDBPyConnection) -> None:
    """What an update is replayed from; loss weights; the view `lineage` anew, with them."""
    for column in (
        "updates ADD COLUMN IF NOT EXISTS config JSON",
        "updates ADD COLUMN IF NOT EXISTS parent VARCHAR",
        "update_samples ADD COLUMN IF NOT EXISTS loss_weight DOUBLE",
    ):
        con.execute(f"ALTER TABLE {column}")
    con.execute(
        "CREATE TABLE IF NOT EXISTS update_reads (run_id VARCHAR NOT NULL, update_index INTEGER NOT NULL, "
        "rollout_id VARCHAR NOT NULL, call_id VARCHAR, reward_id VARCHAR)"
    )


def m014_turn_budgets(con: duckdb.DuckDBPyConnection) -> None:
    """Turns of rollouts, and whether they sufficed: the view `outcomes` is made anew."""
    con.execute("ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turn_budget INTEGER")


def m015_events(con: duckdb.DuckDBPyConnection) -> None:
    """What monitors saw in updates."""
    con.execute(
        "CREATE TABLE IF NOT EXISTS events (run_id VARCHAR NOT NULL, update_index INTEGER NOT NULL, "
        "monitor VARCHAR NOT NULL, value DOUBLE NOT NULL, threshold DOUBLE NOT NULL, "
        "action VARCHAR NOT NULL, text VARCHAR NOT NULL, time_ns BIGINT NOT NULL, "
        "PRIMARY KEY (run_id, update_index, monitor))"
    )


def m016_policy_decisions(con: duckdb.DuckDBPyConnection) -> None:
    """Which versions were promoted or given up, by whom and why; the view `policy_lineage`."""
    con.execute(
        "CREATE TABLE IF NOT EXISTS policy_decisions (seq BIGINT NOT NULL, run_id VARCHAR NOT NULL, "
        "policy_version INTEGER NOT NULL, decision VARCHAR NOT NULL, decided_by VARCHAR NOT NULL, "
        "reason VARCHAR NOT NULL, metrics JSON NOT NULL, to_version INTEGER, path VARCHAR, "
        "time_ns BIGINT NOT NULL, PRIMARY KEY (seq))"
    )


def m017_stages(con: duckdb.DuckDBPyConnection) -> None:
    """Updates that consume nothing, versions whose parent is of another run, and the models handed over."""
    for column in (
        "updates ADD COLUMN IF NOT EXISTS consumes BOOLEAN",
        "policies ADD COLUMN IF NOT EXISTS parent_run VARCHAR",
        "policies ADD COLUMN IF NOT EXISTS model VARCHAR",
    ):
        con.execute(f"ALTER TABLE {column}")
    con.execute("UPDATE updates SET consumes = true")


MIGRATIONS: tuple[Callable[[duckdb.DuckDBPyConnection], None], ...] = (
    m001_initial,
    m002_place_of_calls,
    m003_logs,
    m004_sessions,
    m005_unread_traces,
    m006_archive,
    m007_other,
    m008_joins,
    m009_unknown_calls,
    m010_tools,
    m011_archived_owners,
    m012_users,
    m013_lineage,
    m014_turn_budgets,
    m015_events,
    m016_policy_decisions,
    m017_stages,
)
SCHEMA_VERSION = len(MIGRATIONS)


def schema_version(con: duckdb.DuckDBPyConnection) -> int:
    """Version of the file; 0 if it is no store (yet)."""
    known = con.execute(  # other programs have tables of that name, with other columns
        "SELECT count(*) FROM duckdb_columns() WHERE schema_name = 'main' "
        "AND table_name = 'schema_migrations' AND column_name IN ('version', 'name', 'applied_ns')"
    )
    if known.fetchall() != [(3,)]:
        return 0
    return int(con.execute("SELECT coalesce(max(version), 0) FROM schema_migrations").fetchall()[0][0])


def is_empty(con: duckdb.DuckDBPyConnection) -> bool:
    """Whether nobody has made anything in the file."""
    kinds = ("tables", "views", "schemas", "types", "functions")
    counts = [f"SELECT count(*) FROM duckdb_{kind}() WHERE NOT internal" for kind in kinds]
    counts.append("SELECT count(*) FROM duckdb_sequences()")
    return all(con.execute(sql).fetchall() == [(0,)] for sql in counts)


def check_version(con: duckdb.DuckDBPyConnection, name: str) -> int:
    """Version of the file. Raises SchemaVersionError if it is newer than this program."""
    version = schema_version(con)
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{name!r} has schema {version}, this spangrad reads up to {SCHEMA_VERSION}; "
            "upgrade with `pip install -U spangrad`"
        )
    return version


def migrate(con: duckdb.DuckDBPyConnection, name: str) -> list[int]:
    """Apply what is missing; returns the versions applied."""
    first = check_version(con, name) + 1
    for version in range(first, SCHEMA_VERSION + 1):
        step = MIGRATIONS[version - 1]
        con.begin()
        try:
            con.execute(
                "CREATE TABLE IF NOT EXISTS schema_migrations "
                "(version INTEGER PRIMARY KEY, name VARCHAR NOT NULL, applied_ns BIGINT NOT NULL)"
            )
            step(con)
            if version == SCHEMA_VERSION:
                for table in TABLES:
                    con.execute(";".join(table.comments()))
                for view in VIEWS:
                    con.execute(";".join(view.ddl()))
            con.execute(
                "INSERT INTO schema_migrations VALUES (?, ?, ?)", [version, step.__name__, time.time_ns()]
            )
            con.commit()
        except BaseException:
            con.rollback()
            raise
    return list(range(first, SCHEMA_VERSION + 1))


_INITIAL = """
CREATE TABLE spans (
  trace_id VARCHAR NOT NULL,
  span_id VARCHAR NOT NULL,
  parent_span_id VARCHAR,
  rollout_id VARCHAR,
  attempt INTEGER,
  name VARCHAR NOT NULL,
  kind INTEGER NOT NULL,
  start_ns UBIGINT NOT NULL,
  end_ns UBIGINT NOT NULL,
  status_code INTEGER NOT NULL,
  status_message VARCHAR NOT NULL,
  scope VARCHAR NOT NULL,
  scope_version VARCHAR NOT NULL,
  scope_attributes JSON NOT NULL,
  schema_url VARCHAR NOT NULL,
  resource JSON NOT NULL,
  resource_schema_url VARCHAR NOT NULL,
  attributes JSON NOT NULL,
  events JSON NOT NULL,
  links JSON NOT NULL,
  trace_state VARCHAR NOT NULL,
  flags BIGINT NOT NULL,
  dropped_attributes BIGINT NOT NULL,
  dropped_events BIGINT NOT NULL,
  dropped_links BIGINT NOT NULL,
  prompt_base VARCHAR,
  prompt_keep INTEGER,
  new_prompt_token_ids INTEGER[],
  sampled_token_ids INTEGER[],
  sampled_logprobs FLOAT[],
  policy_versions INTEGER[],
  message_ids VARCHAR[]
);
CREATE INDEX spans_trace_id ON spans (trace_id);
CREATE TABLE messages (
  message_id VARCHAR NOT NULL,
  content VARCHAR NOT NULL,
  PRIMARY KEY (message_id)
);
CREATE TABLE calls (
  call_id VARCHAR NOT NULL,
  rollout_id VARCHAR,
  attempt INTEGER NOT NULL,
  trace_id VARCHAR NOT NULL,
  span_id VARCHAR NOT NULL,
  dialect VARCHAR NOT NULL,
  model VARCHAR,
  grade VARCHAR NOT NULL,
  grade_reasons VARCHAR[] NOT NULL,
  finish_reason VARCHAR,
  purpose VARCHAR NOT NULL,
  step_name VARCHAR,
  start_ns UBIGINT NOT NULL,
  end_ns UBIGINT NOT NULL,
  prompt_tokens BIGINT,
  sampled_tokens BIGINT,
  policy_version INTEGER,
  PRIMARY KEY (call_id)
);
CREATE TABLE tasks (
  task_key VARCHAR NOT NULL,
  task JSON NOT NULL,
  PRIMARY KEY (task_key)
);
CREATE TABLE rollouts (
  seq BIGINT NOT NULL,
  rollout_id VARCHAR NOT NULL,
  task_id VARCHAR,
  task_key VARCHAR,
  group_id VARCHAR,
  run_id VARCHAR,
  split VARCHAR NOT NULL,
  attempt INTEGER NOT NULL,
  max_attempts INTEGER NOT NULL,
  status VARCHAR NOT NULL,
  policy_version INTEGER,
  worker VARCHAR,
  lease_until_ns BIGINT,
  enqueued_ns BIGINT NOT NULL,
  started_ns BIGINT,
  ended_ns BIGINT,
  output JSON,
  error_type VARCHAR,
  error VARCHAR,
  consumed_run VARCHAR,
  consumed_by INTEGER,
  is_recorded BOOLEAN NOT NULL,
  PRIMARY KEY (rollout_id)
);
CREATE TABLE rewards (
  reward_id VARCHAR NOT NULL,
  rollout_id VARCHAR NOT NULL,
  attempt INTEGER,
  call_id VARCHAR,
  name VARCHAR NOT NULL,
  value DOUBLE NOT NULL,
  author VARCHAR NOT NULL,
  explanation VARCHAR,
  time_ns BIGINT NOT NULL,
  PRIMARY KEY (reward_id)
);
CREATE TABLE policies (
  run_id VARCHAR NOT NULL,
  policy_version INTEGER NOT NULL,
  path VARCHAR NOT NULL,
  time_ns BIGINT NOT NULL,
  parent_version INTEGER,
  note VARCHAR NOT NULL,
  PRIMARY KEY (run_id, policy_version)
);
CREATE TABLE updates (
  run_id VARCHAR NOT NULL,
  update_index INTEGER NOT NULL,
  policy_version INTEGER NOT NULL,
  rollout_ids VARCHAR[] NOT NULL,
  checkpoint VARCHAR NOT NULL,
  time_ns BIGINT NOT NULL,
  PRIMARY KEY (run_id, update_index)
);
CREATE TABLE update_samples (
  run_id VARCHAR NOT NULL,
  update_index INTEGER NOT NULL,
  rollout_id VARCHAR NOT NULL,
  call_id VARCHAR NOT NULL,
  attempt INTEGER NOT NULL,
  advantage DOUBLE NOT NULL,
  trained_tokens BIGINT NOT NULL,
  policy_version INTEGER,
  staleness INTEGER
);
CREATE TABLE metrics (
  run_id VARCHAR NOT NULL,
  update_index INTEGER NOT NULL,
  name VARCHAR NOT NULL,
  value DOUBLE NOT NULL
);
"""

_LOGS = """
CREATE TABLE logs (
  log_id VARCHAR NOT NULL,
  trace_id VARCHAR,
  span_id VARCHAR,
  time_ns UBIGINT NOT NULL,
  observed_ns UBIGINT NOT NULL,
  event_name VARCHAR NOT NULL,
  body JSON NOT NULL,
  attributes JSON NOT NULL,
  severity_number INTEGER NOT NULL,
  severity_text VARCHAR NOT NULL,
  scope VARCHAR NOT NULL,
  scope_version VARCHAR NOT NULL,
  scope_attributes JSON NOT NULL,
  schema_url VARCHAR NOT NULL,
  resource JSON NOT NULL,
  resource_schema_url VARCHAR NOT NULL,
  flags BIGINT NOT NULL,
  dropped_attributes BIGINT NOT NULL,
  author VARCHAR NOT NULL,
  PRIMARY KEY (log_id)
);
CREATE INDEX logs_trace_id ON logs (trace_id);
"""
