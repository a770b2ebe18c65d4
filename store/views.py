"""Views: the questions that are asked of a store again and again.

Each is a SELECT over the tables of `schema.py`, with a doc that whoever opens the file
sees. `migrations.py` makes them anew with every new schema; a change here needs one.

Invariant: a time that is none (a clock may say anything) is NULL, and costs no other row.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """One view. `select` is what it stands for."""

    name: str
    doc: str
    select: str

    def ddl(self) -> list[str]:
        """The statements that make it, over an older one of the name."""
        doc = self.doc.replace("'", "''")
        return [
            f"CREATE OR REPLACE VIEW {self.name} AS {self.select}",
            f"COMMENT ON VIEW {self.name} IS '{doc}'",
        ]


STEPS = View(
    "steps",
    "One model call of an agent, numbered from 0 in its rollout; calls of other purposes are left out.",
    """
    SELECT rollout_id, attempt,
      row_number() OVER (PARTITION BY rollout_id, attempt ORDER BY start_ns, call_id) - 1 AS step,
      step_name, call_id, trace_id, span_id, model, grade, finish_reason, prompt_tokens, sampled_tokens,
      policy_version, state_key, TRY(make_timestamp_ns(start_ns::BIGINT)) AS started,
      (end_ns::DOUBLE - start_ns::DOUBLE) / 1e6 AS duration_ms
    FROM calls WHERE purpose = 'agent'
    """,
)

TOOLS = View(
    "tools",
    "One use of a tool, by whichever recorder: its name, and whether its span says that it failed.",
    """
    SELECT coalesce(s.rollout_id, n.rollout_id) AS rollout_id, coalesce(s.attempt, 0) AS attempt,
      s.trace_id, s.span_id, s.parent_span_id,
      coalesce(s.attributes->>'$."gen_ai.tool.name"', s.attributes->>'$."tool.name"', s.name) AS tool,
      s.status_code = 2 AS failed, s.status_message AS error, s.attributes->>'$."error.type"' AS error_type,
      TRY(make_timestamp_ns(s.start_ns::BIGINT)) AS started,
      (s.end_ns::DOUBLE - s.start_ns::DOUBLE) / 1e6 AS duration_ms
    FROM spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id
    WHERE (contains(s.attributes::VARCHAR, 'tool"') OR contains(s.attributes::VARCHAR, 'TOOL')) AND (
      s.attributes->>'$."gen_ai.operation.name"' = 'execute_tool'
      OR s.attributes->>'$."spangrad.span.role"' = 'tool'
      OR s.attributes->>'$."openinference.span.kind"' = 'TOOL'
      OR s.attributes->>'$."langfuse.observation.type"' = 'tool'
      OR s.attributes->>'$."traceloop.span.kind"' = 'tool'
      OR s.attributes->>'$."langsmith.span.kind"' = 'tool'
      OR s.attributes->>'$."mlflow.spanType"' = '"TOOL"')
    """,
)
"""To look for a text costs a tenth of reading seven values, and all of these have one of the two in them."""

TOOL_ERRORS = View(
    "tool_errors", "Uses of tools whose spans say that they failed.", "SELECT * FROM tools WHERE failed"
)

LINEAGE = View(
    "lineage",
    "What each update trained on, down to the span: advantage, loss weight, tokens, version that sampled it.",
    """
    SELECT u.run_id, u.update_index, u.policy_version AS trained_version, x.rollout_id, x.attempt, x.call_id,
      c.trace_id, c.span_id, c.step_name, x.advantage, x.loss_weight, x.trained_tokens,
      x.policy_version AS sampled_version, x.staleness, u.checkpoint,
      TRY(make_timestamp_ns(u.time_ns)) AS committed
    FROM update_samples x JOIN updates u USING (run_id, update_index) LEFT JOIN calls c USING (call_id)
    """,
)

TRUSTED_REWARDS = View(
    "trusted_rewards",
    "What counts by default: of the current attempt, by evaluator or operator. One row a rollout, call and "
    "name: the last one given, an operator's before an evaluator's; a trace's and its last call's added.",
    """
    SELECT rollout_id, call_id, name, sum(value) AS value FROM (
      SELECT w.rollout_id, w.call_id, w.name, if(w.call_id IS NULL, NULL, w.trace_id) AS part,
        arg_max(w.value, (w.author = 'operator', w.time_ns, w.rowid)) AS value
      FROM rewards w
      JOIN rollouts r ON r.rollout_id = w.rollout_id AND r.attempt = coalesce(w.attempt, r.attempt)
      WHERE w.author <> 'agent' GROUP BY ALL)
    GROUP BY ALL
    """,
)

OUTCOMES = View(
    "outcomes",
    "One rollout with the last trusted reward of each name, its calls and tokens, and whether its turns did "
    "not suffice.",
    """
    SELECT r.rollout_id, r.task_id, r.group_id, r.run_id, r.split, r.status, r.attempt, w.rewards,
      coalesce(k.calls, 0) AS calls, k.sampled_tokens, k.worst_grade, r.turn_budget,
      coalesce(k.out_of_turns, false) AS out_of_turns, r.error_type, r.error,
      r.consumed_run, r.consumed_by, TRY(make_timestamp_ns(r.started_ns)) AS started
    FROM rollouts r
    LEFT JOIN (
      SELECT rollout_id, map_from_entries(list({'k': name, 'v': value} ORDER BY name)) AS rewards
      FROM trusted_rewards WHERE call_id IS NULL GROUP BY ALL) w ON w.rollout_id = r.rollout_id
    LEFT JOIN (
      SELECT rollout_id, attempt, count(*) FILTER (is_agent) AS calls,
        sum(sampled_tokens) FILTER (is_agent)::BIGINT AS sampled_tokens,
        max_by(grade, list_position(['exact', 'ids', 'text', 'unusable'], grade)) FILTER (is_agent)
          AS worst_grade,
        bool_or(out_of_turns) AS out_of_turns
      FROM (
        SELECT *, purpose = 'agent' AS is_agent,
          coalesce(purpose_reason = 'synthetic: turn budget', false) AS out_of_turns FROM calls)
      GROUP BY ALL) k
      ON k.rollout_id = r.rollout_id AND k.attempt = r.attempt
    """,
)

GRADES = View(
    "grades",
    "How many calls of a dialect have a grade for a reason; a call with several reasons is in several rows.",
    """
    SELECT dialect, grade, reason, count(*) AS calls FROM (
      SELECT dialect, grade, unnest(
        CASE WHEN len(grade_reasons) = 0 THEN [NULL]
        ELSE list_distinct(list_transform(grade_reasons, lambda x: split_part(x, ':', 1))) END) AS reason
      FROM calls)
    GROUP BY ALL
    """,
)

ALARMS = View(
    "alarms",
    "What monitors saw in updates, the newest first, with the version that the update made and its folder.",
    """
    SELECT e.run_id, e.update_index, e.monitor, e.action, e.value, e.threshold, e.text,
      u.policy_version AS trained_version, u.checkpoint, TRY(make_timestamp_ns(e.time_ns)) AS seen
    FROM events e LEFT JOIN updates u USING (run_id, update_index)
    ORDER BY e.time_ns DESC, e.run_id, e.update_index DESC, e.monitor
    """,
)

POLICY_LINEAGE = View(
    "policy_lineage",
    "Each published version with its parent, where it stands (candidate, promoted, superseded or "
    "rolled_back), the update that made it, and the last decision about it: by whom, why, on what metrics. "
    "The parent may be another run's version (parent_run), and others may start from its model folder.",
    """
    WITH became AS (
      SELECT run_id, seq, if(decision = 'rolled_back', to_version, policy_version) AS policy_version,
        'promoted' AS status
      FROM policy_decisions WHERE decision <> 'kept'
      UNION ALL
      SELECT d.run_id, d.seq, p.policy_version, 'rolled_back'
      FROM policy_decisions d JOIN policies p ON p.run_id = d.run_id
        AND p.policy_version > d.to_version AND p.policy_version <= d.policy_version
      WHERE d.decision = 'rolled_back'),
    latest AS (
      SELECT run_id, policy_version, arg_max(status, seq) AS status FROM became GROUP BY ALL),
    promoted AS (
      SELECT run_id, arg_max(policy_version, seq) AS policy_version FROM became
      WHERE status = 'promoted' GROUP BY ALL),
    said AS (
      SELECT run_id, policy_version, arg_max(decided_by, seq) AS decided_by, arg_max(reason, seq) AS reason,
        arg_max(time_ns, seq) AS time_ns, arg_max(path, seq) AS path,
        arg_max(metrics, seq) FILTER (metrics::VARCHAR <> '{}') AS metrics
      FROM policy_decisions GROUP BY ALL)
    SELECT p.run_id, p.policy_version, p.parent_run, p.parent_version, p.note, p.model,
      CASE WHEN b.status IS NULL THEN 'candidate' WHEN b.status = 'rolled_back' THEN 'rolled_back'
        WHEN m.policy_version = p.policy_version THEN 'promoted' ELSE 'superseded' END AS status,
      u.update_index, r.value AS reward_mean, (s.metrics->>'$.success')::DOUBLE AS success, s.metrics,
      s.decided_by, s.reason, TRY(make_timestamp_ns(s.time_ns)) AS decided,
      TRY(make_timestamp_ns(p.time_ns)) AS published, coalesce(s.path, p.path) AS path
    FROM policies p
    LEFT JOIN latest b USING (run_id, policy_version) LEFT JOIN said s USING (run_id, policy_version)
    LEFT JOIN promoted m ON m.run_id = p.run_id
    LEFT JOIN updates u ON u.run_id = p.run_id AND u.policy_version = p.policy_version
    LEFT JOIN metrics r ON r.run_id = u.run_id AND r.update_index = u.update_index
      AND r.name = 'reward/mean'
    """,
)

VIEWS = (STEPS, TOOLS, TOOL_ERRORS, LINEAGE, POLICY_LINEAGE, TRUSTED_REWARDS, OUTCOMES, GRADES, ALARMS)
