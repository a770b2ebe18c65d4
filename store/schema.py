"""The tables of a store, declared once.

Knows names, types and what each column means; renders DDL from that. Knows no
connection: `migrations.py` brings a file to this state, and a test holds the two
together. A change here needs a new migration.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `type` is a DuckDB type."""

    name: str
    type: str
    doc: str
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One table, its key and its indexes."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()

    def ddl(self) -> list[str]:
        """The statements that create the table."""
        lines = [f"{c.name} {c.type}{'' if c.nullable else ' NOT NULL'}" for c in self.columns]
        if self.key:
            lines.append(f"PRIMARY KEY ({', '.join(self.key)})")
        create = f"CREATE TABLE {self.name} (\n  " + ",\n  ".join(lines) + "\n)"
        return [create, *(f"CREATE INDEX {self.name}_{c} ON {self.name} ({c})" for c in self.indexes)]

    def comments(self) -> list[str]:
        """The statements that attach the docs, for whoever looks at the file with another tool."""
        statements = [f"COMMENT ON TABLE {self.name} IS {_quoted(self.doc)}"]
        for column in self.columns:
            statements.append(f"COMMENT ON COLUMN {self.name}.{column.name} IS {_quoted(column.doc)}")
        return statements


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_OTHER = (
    "what no other column has a place for: attributes of the resource and scope that were dropped, what the "
    "resource's are of, values of keys that were sent more than once"
)

SPANS = Table(
    "spans",
    "One OpenTelemetry span, lossless. Unique by (trace_id, span_id): the one writer sees to it.",
    (
        Column("trace_id", "VARCHAR", "32 hex digits"),
        Column("span_id", "VARCHAR", "16 hex digits"),
        Column("parent_span_id", "VARCHAR", "16 hex digits; NULL on a root", True),
        Column("rollout_id", "VARCHAR", "own attribute, or the nearest ancestor's", True),
        Column("attempt", "INTEGER", "attempt of that rollout", True),
        Column("name", "VARCHAR", "span name"),
        Column("kind", "INTEGER", "OTLP SpanKind: 1 internal, 2 server, 3 client"),
        Column("start_ns", "UBIGINT", "Unix time, ns"),
        Column("end_ns", "UBIGINT", "Unix time, ns"),
        Column("status_code", "INTEGER", "0 unset, 1 ok, 2 error"),
        Column("status_message", "VARCHAR", "error text"),
        Column("scope", "VARCHAR", "instrumentation scope"),
        Column("scope_version", "VARCHAR", "version of the scope"),
        Column("scope_attributes", "JSON", "attributes of the scope"),
        Column("schema_url", "VARCHAR", "schema of the scope's spans"),
        Column("resource", "JSON", "attributes of the resource"),
        Column("resource_schema_url", "VARCHAR", "schema of the resource"),
        Column(
            "attributes", "JSON", "all attributes; $column, $messages and $bytes stand for what is elsewhere"
        ),
        Column("events", "JSON", "list of name, time_ns, attributes, dropped"),
        Column("links", "JSON", "list of links"),
        Column("trace_state", "VARCHAR", "W3C tracestate"),
        Column("flags", "BIGINT", "OTLP flags"),
        Column("dropped_attributes", "BIGINT", "dropped by the SDK"),
        Column("dropped_events", "BIGINT", "dropped by the SDK"),
        Column("dropped_links", "BIGINT", "dropped by the SDK"),
        Column("prompt_base", "VARCHAR", "trace_id-span_id of the call whose ids the prompt repeats", True),
        Column("prompt_keep", "INTEGER", "how many ids of that call's prompt + sampled ids it repeats", True),
        Column("new_prompt_token_ids", "INTEGER[]", "the prompt's ids behind those", True),
        Column("sampled_token_ids", "INTEGER[]", "ids that the engine sampled (choice 0)", True),
        Column("sampled_logprobs", "FLOAT[]", "behaviour logprobs, nats (choice 0)", True),
        Column("policy_versions", "INTEGER[]", "version that sampled each id (choice 0)", True),
        Column(
            "message_ids", "VARCHAR[]", "messages that this span was the first of its chain to show", True
        ),
        Column("other", "JSON", _OTHER, True),
    ),
    indexes=("trace_id",),
)

MESSAGES = Table(
    "messages",
    "Chat messages and tool definitions, each stored once.",
    (
        Column("message_id", "VARCHAR", "BLAKE2b-128 of the content, hex"),
        Column("content", "VARCHAR", "one element of a gen_ai.* JSON array, byte for byte"),
    ),
    key=("message_id",),
)

LOGS = Table(
    "logs",
    "One OpenTelemetry log record, lossless: recorders keep messages and evaluations there.",
    (
        Column("log_id", "VARCHAR", "BLAKE2b-128 of the record: the same record twice is one row"),
        Column("trace_id", "VARCHAR", "32 hex digits; NULL where it names no trace", True),
        Column("span_id", "VARCHAR", "16 hex digits; NULL where it names no span", True),
        Column("time_ns", "UBIGINT", "Unix time, ns; 0: the recorder does not say"),
        Column("observed_ns", "UBIGINT", "Unix time, ns; when it was collected"),
        Column("event_name", "VARCHAR", "name of the event; older recorders have it as an attribute"),
        Column("body", "JSON", "any value; $bytes and $float as in spans.attributes"),
        Column("attributes", "JSON", "all attributes"),
        Column("severity_number", "INTEGER", "OTLP SeverityNumber"),
        Column("severity_text", "VARCHAR", "its name at the source"),
        Column("scope", "VARCHAR", "instrumentation scope"),
        Column("scope_version", "VARCHAR", "version of the scope"),
        Column("scope_attributes", "JSON", "attributes of the scope"),
        Column("schema_url", "VARCHAR", "schema of the scope's records"),
        Column("resource", "JSON", "attributes of the resource"),
        Column("resource_schema_url", "VARCHAR", "schema of the resource"),
        Column("flags", "BIGINT", "OTLP flags"),
        Column("dropped_attributes", "BIGINT", "dropped by the SDK"),
        Column("author", "VARCHAR", "whose key brought it: agent, evaluator or operator"),
        Column("other", "JSON", _OTHER, True),
    ),
    key=("log_id",),
    indexes=("trace_id",),
)

CALLS = Table(
    "calls",
    "One model call, normalised from one or more spans by the adapters. `unread_traces`: those to come.",
    (
        Column("call_id", "VARCHAR", "trace_id-span_id of the span that names the call"),
        Column("rollout_id", "VARCHAR", "rollout that made it", True),
        Column("attempt", "INTEGER", "attempt of that rollout"),
        Column("trace_id", "VARCHAR", "trace of the span"),
        Column("span_id", "VARCHAR", "the span"),
        Column("dialect", "VARCHAR", "span dialect that was read"),
        Column("model", "VARCHAR", "model", True),
        Column("grade", "VARCHAR", "exact, ids, text or unusable"),
        Column("grade_reasons", "VARCHAR[]", "why it is not better"),
        Column("finish_reason", "VARCHAR", "of choice 0", True),
        Column("purpose", "VARCHAR", "agent, title, summary, judge, embedding, other"),
        Column("step_name", "VARCHAR", "step of the agent", True),
        Column("start_ns", "UBIGINT", "Unix time, ns"),
        Column("end_ns", "UBIGINT", "Unix time, ns"),
        Column("prompt_tokens", "BIGINT", "tokens of the prompt", True),
        Column("sampled_tokens", "BIGINT", "tokens sampled, all choices; without ids the usage told", True),
        Column("policy_version", "INTEGER", "lowest version that sampled a token of it", True),
        Column("step_index", "INTEGER", "number of the step in its rollout, or in its graph", True),
        Column("state_key", "VARCHAR", "what the agent said that it was looking at", True),
        Column("purpose_reason", "VARCHAR", "the rule that says so; NULL: none does, it acts", True),
    ),
    key=("call_id",),
)

UNKNOWN_CALLS = Table(
    "unknown_calls",
    "Spans that look like model calls, in a dialect that nobody reads: `calls` has none of them.",
    (
        Column("trace_id", "VARCHAR", "trace of the span"),
        Column("span_id", "VARCHAR", "the span"),
        Column("scope", "VARCHAR", "its instrumentation scope"),
        Column("attributes", "VARCHAR", "names of its first attributes"),
    ),
)

UNREAD_TRACES = Table(
    "unread_traces",
    "Traces that got spans or log records since their calls were written to `calls`; a row for each time.",
    (
        Column("trace_id", "VARCHAR", "the trace"),
        Column("changed_ns", "BIGINT", "Unix time, ns; when they came"),
    ),
)

SESSIONS = Table(
    "sessions",
    "Traces of which no span names a rollout, and the rollout that they were found to be of.",
    (
        Column("trace_id", "VARCHAR", "the trace"),
        Column("rollout_id", "VARCHAR", "trace id of the rollout's earliest trace"),
        Column(
            "reason", "VARCHAR", "rule that joined it to an earlier trace, or what kept it from one", True
        ),
    ),
    key=("trace_id",),
)

CALL_KEYS = Table(
    "call_keys",
    "What finds what a call goes on from, and other accounts of it, where its recorder names no rollout.",
    (
        Column("call_id", "VARCHAR", "the call"),
        Column("trace_id", "VARCHAR", "its trace"),
        Column("start_ns", "UBIGINT", "Unix time, ns"),
        Column("end_ns", "UBIGINT", "Unix time, ns"),
        Column("conversation_id", "VARCHAR", "session, thread or conversation that the recorder names", True),
        Column("response_id", "VARCHAR", "id of the response", True),
        Column("previous_response_id", "VARCHAR", "id of the response that it goes on from", True),
        Column("reply_keys", "VARCHAR[]", "hash of messages and reply, one a choice"),
        Column("prefix_keys", "VARCHAR[]", "hashes of the messages up to its last assistant messages"),
        Column("tool_calls_made", "VARCHAR[]", "ids of the tool calls in its reply"),
        Column("tool_calls_answered", "VARCHAR[]", "ids of the tool calls whose results it shows"),
        Column(
            "conversation_key", "VARCHAR", "hash of service and conversation; NULL: it may be anybody's", True
        ),
        Column("request_key", "VARCHAR", "hash of the messages, for other accounts of the call", True),
        Column("recorders", "VARCHAR[]", "instrumentation scopes that told of it", True),
        Column("trace_ids", "VARCHAR[]", "traces that it is told in", True),
        Column("rules", "VARCHAR[]", "rules that may join it; NULL: all", True),
        Column("user_id", "VARCHAR", "user whom it is for, as the recorder names him", True),
    ),
    key=("call_id",),
)

TASKS = Table(
    "tasks",
    "What agents are asked; the rollouts of a group share one row.",
    (
        Column("task_key", "VARCHAR", "BLAKE2b-128 of the content, hex"),
        Column("task", "JSON", "the task"),
    ),
    key=("task_key",),
)

ROLLOUTS = Table(
    "rollouts",
    "One run of an agent on one task: the queue, and what became of it.",
    (
        Column("seq", "BIGINT", "order of enqueueing"),
        Column("rollout_id", "VARCHAR", "name of the rollout"),
        Column("task_id", "VARCHAR", "name of the task", True),
        Column("task_key", "VARCHAR", "row in tasks", True),
        Column("group_id", "VARCHAR", "rollouts that are compared with each other", True),
        Column("run_id", "VARCHAR", "training run that asked for it", True),
        Column("split", "VARCHAR", "train, eval, expert, ...; recorded: only seen in spans"),
        Column("attempt", "INTEGER", "current attempt, from 0"),
        Column("max_attempts", "INTEGER", "attempts allowed"),
        Column("status", "VARCHAR", "queued, running, succeeded, failed"),
        Column("policy_version", "INTEGER", "current when it was claimed", True),
        Column("worker", "VARCHAR", "who claimed it last", True),
        Column("lease_until_ns", "BIGINT", "Unix time, ns; only while running", True),
        Column("enqueued_ns", "BIGINT", "Unix time, ns"),
        Column("started_ns", "BIGINT", "of the current attempt", True),
        Column("ended_ns", "BIGINT", "of the current attempt", True),
        Column("output", "JSON", "what the agent returned", True),
        Column("error_type", "VARCHAR", "error of the last attempt that failed", True),
        Column("error", "VARCHAR", "its text", True),
        Column("consumed_run", "VARCHAR", "run of the update that consumed it", True),
        Column("consumed_by", "INTEGER", "index of the update that consumed it", True),
        Column("is_recorded", "BOOLEAN", "nobody enqueued it: known from its spans"),
        Column(
            "turn_budget", "INTEGER", "calls of the policy that its agent may make; NULL: any number", True
        ),
    ),
    key=("rollout_id",),
)

REWARDS = Table(
    "rewards",
    "Numbers given for a rollout or a call. Later rows of the same name and author correct earlier ones.",
    (
        Column("reward_id", "VARCHAR", "hash of what was sent: the same reward twice is one row"),
        Column("rollout_id", "VARCHAR", "rollout"),
        Column("attempt", "INTEGER", "attempt of the rollout", True),
        Column("call_id", "VARCHAR", "trace_id-span_id of a call or step; NULL: for the whole rollout", True),
        Column("name", "VARCHAR", "name of the reward"),
        Column("value", "DOUBLE", "reward units"),
        Column("author", "VARCHAR", "agent, evaluator or operator; by key, never by claim"),
        Column("explanation", "VARCHAR", "why", True),
        Column("time_ns", "BIGINT", "Unix time, ns"),
        Column("trace_id", "VARCHAR", "the part that it was given for: one trace of the rollout", True),
    ),
    key=("reward_id",),
)

POLICIES = Table(
    "policies",
    "Published versions of a policy.",
    (
        Column("run_id", "VARCHAR", "training run"),
        Column("policy_version", "INTEGER", "+1 for every publish"),
        Column("path", "VARCHAR", "folder of the weights"),
        Column("time_ns", "BIGINT", "Unix time, ns"),
        Column("parent_version", "INTEGER", "version it was trained from", True),
        Column("note", "VARCHAR", "free text; of a run's last version why it ended"),
        Column("parent_run", "VARCHAR", "run of the parent, where it is another one", True),
        Column("model", "VARCHAR", "model folder with its weights; NULL: none was handed over", True),
    ),
    key=("run_id", "policy_version"),
)

POLICY_DECISIONS = Table(
    "policy_decisions",
    "Who promoted or gave up which version, and why. Only ever added to; `policy_lineage` has where each "
    "version stands now.",
    (
        Column("seq", "BIGINT", "order of the decisions"),
        Column("run_id", "VARCHAR", "training run"),
        Column("policy_version", "INTEGER", "version; of a rollback the newest that is given up"),
        Column("decision", "VARCHAR", "promoted, kept, rolled_back or restored"),
        Column("decided_by", "VARCHAR", "trainer: by its rule; admin: a person"),
        Column("reason", "VARCHAR", "why"),
        Column("metrics", "JSON", "what the evaluation found, by name"),
        Column("to_version", "INTEGER", "version whose weights stand in, after a rollback", True),
        Column("path", "VARCHAR", "folder where the weights of a promoted version are kept", True),
        Column("time_ns", "BIGINT", "Unix time, ns; the sender's clock"),
    ),
    key=("seq",),
)

UPDATES = Table(
    "updates",
    "One optimizer step; committed in one transaction with everything it consumed.",
    (
        Column("run_id", "VARCHAR", "training run"),
        Column("update_index", "INTEGER", "0, 1, 2, ... without a gap"),
        Column("policy_version", "INTEGER", "version that it produced"),
        Column("rollout_ids", "VARCHAR[]", "everything that it took: trained, filtered or dropped"),
        Column("checkpoint", "VARCHAR", "folder with the state after the update"),
        Column("time_ns", "BIGINT", "Unix time, ns"),
        Column("config", "JSON", "the run's config as it was; no values of agent.env", True),
        Column(
            "parent", "VARCHAR", "folder with the state before the update: a checkpoint, or the model", True
        ),
        Column("consumes", "BOOLEAN", "false: it only read its rollouts, and others may train them", True),
    ),
    key=("run_id", "update_index"),
)

UPDATE_SAMPLES = Table(
    "update_samples",
    "Lineage: the calls that an update trained on.",
    (
        Column("run_id", "VARCHAR", "training run"),
        Column("update_index", "INTEGER", "update"),
        Column("rollout_id", "VARCHAR", "rollout"),
        Column("call_id", "VARCHAR", "call"),
        Column("attempt", "INTEGER", "attempt of the rollout"),
        Column("advantage", "DOUBLE", "mean over the call's trained tokens"),
        Column("trained_tokens", "BIGINT", "tokens with a loss"),
        Column("policy_version", "INTEGER", "version that sampled it", True),
        Column("staleness", "INTEGER", "in updates", True),
        Column(
            "loss_weight", "DOUBLE", "of each of its trained tokens; a mean if they are in several rows", True
        ),
    ),
)

UPDATE_READS = Table(
    "update_reads",
    "Lineage: what an update was made of, trained or not. One row a model call or reward that credit read.",
    (
        Column("run_id", "VARCHAR", "training run"),
        Column("update_index", "INTEGER", "update"),
        Column("rollout_id", "VARCHAR", "rollout"),
        Column("call_id", "VARCHAR", "the call", True),
        Column("reward_id", "VARCHAR", "the reward", True),
    ),
)

METRICS = Table(
    "metrics",
    "Numbers of an update.",
    (
        Column("run_id", "VARCHAR", "training run"),
        Column("update_index", "INTEGER", "update"),
        Column("name", "VARCHAR", "area/name"),
        Column("value", "DOUBLE", "value"),
    ),
)

EVENTS = Table(
    "events",
    "What monitors saw in the updates of a run, and what was done about it.",
    (
        Column("run_id", "VARCHAR", "training run"),
        Column("update_index", "INTEGER", "update"),
        Column("monitor", "VARCHAR", "name of the monitor: a setting of the section [monitor]"),
        Column("value", "DOUBLE", "what it measured, in the unit of its threshold"),
        Column("threshold", "DOUBLE", "its threshold at that time"),
        Column("action", "VARCHAR", "warn, pause or rollback"),
        Column(
            "text", "VARCHAR", "what it saw, with examples; empty where a rollout of the update was deleted"
        ),
        Column("time_ns", "BIGINT", "Unix time, ns"),
    ),
    key=("run_id", "update_index", "monitor"),
)

ARCHIVES = Table(
    "archives",
    "Parquet files beside the store's file that hold old spans, log records and messages.",
    (
        Column("file", "VARCHAR", "path below <store>.archive"),
        Column("part", "INTEGER", "number of the partition: the files that were moved together"),
        Column("table_name", "VARCHAR", "table whose rows it holds"),
        Column("day", "VARCHAR", "UTC day on which they ended"),
        Column("schema_version", "INTEGER", "schema of the store that wrote it"),
        Column("row_count", "BIGINT", "rows"),
        Column("size_bytes", "BIGINT", "size"),
        Column("checksum", "VARCHAR", "BLAKE2b-128 of the file, hex"),
    ),
    key=("file",),
)

ARCHIVED_TRACES = Table(
    "archived_traces",
    "Traces with spans or log records in the archive.",
    (
        Column("trace_id", "VARCHAR", "the trace"),
        Column("rollout_ids", "VARCHAR[]", "rollouts that moved with it"),
        Column("part", "INTEGER", "the partition, in archives"),
    ),
    indexes=("trace_id",),
)

ARCHIVED_OWNERS = Table(
    "archived_owners",
    "A span in the archive whose rollout was found only later: an ancestor that names one came late.",
    (
        Column("trace_id", "VARCHAR", "its trace"),
        Column("span_id", "VARCHAR", "the span"),
        Column("rollout_id", "VARCHAR", "the nearest ancestor's"),
        Column("attempt", "INTEGER", "attempt of that rollout", True),
    ),
)

TABLES = (
    SPANS,
    MESSAGES,
    LOGS,
    CALLS,
    UNKNOWN_CALLS,
    UNREAD_TRACES,
    SESSIONS,
    CALL_KEYS,
    TASKS,
    ROLLOUTS,
    REWARDS,
    POLICIES,
    POLICY_DECISIONS,
    UPDATES,
    UPDATE_SAMPLES,
    UPDATE_READS,
    METRICS,
    EVENTS,
    ARCHIVES,
    ARCHIVED_TRACES,
    ARCHIVED_OWNERS,
)
