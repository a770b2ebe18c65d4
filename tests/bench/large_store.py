"""A store of a million model calls, and how long its questions take.

The rows are made by SQL, as the store would have written them: 64 rollouts side by side, 50 calls each, ids
and messages as differences to the call before. `python -m tests.bench.large_store PATH` makes one.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import duckdb

from spangrad.adapters import calls_of
from spangrad.adapters.report import report
from spangrad.store.file_store import FileStore
from spangrad.store.tables import database
from tests.bench.figures import Figure

MEMORY_LIMIT = "2GB"
CALLS = 50
SIDE_BY_SIDE = 64
PROMPT_IDS, SAMPLED_IDS = 80, 40
"""That a call adds."""

_MACROS = f"""
CREATE TEMP MACRO trace(r) AS md5('t' || r);
CREATE TEMP MACRO span(r, k) AS left(md5('s' || r || '-' || k), 16);
CREATE TEMP MACRO root(r) AS left(md5('root' || r), 16);
CREATE TEMP MACRO told(r, n) AS md5('in-' || r || '-' || n);
CREATE TEMP MACRO replied(r, k) AS md5('out-' || r || '-' || k);
CREATE TEMP MACRO start_of(r) AS 1700000000000000000 + (r // {SIDE_BY_SIDE}) * 60000000000;
CREATE TEMP MACRO ids(i, seed, n) AS
  list_transform(range(n), lambda x: (hash(i * 1000 + x + seed) % 150000)::INTEGER);
CREATE TEMP MACRO words(i) AS md5('w' || i) || ' ' || md5('x' || i) || ' ' || md5('y' || i);
CREATE TEMP MACRO message(role, i) AS
  '{{"role":"' || role || '","parts":[{{"type":"text","content":"' || words(i) || '"}}]}}';
"""
_CALL = f"""
SELECT i, r, k, trace(r) AS trace_id, span(r, k) AS span_id, trace(r) || '-' || span(r, k - 1) AS before,
  'rollout-' || r AS rollout_id, start_of(r) + k * 1000000000 + (r % {SIDE_BY_SIDE}) * 1000000 AS start_ns
FROM (SELECT i, i // {SIDE_BY_SIDE * CALLS} * {SIDE_BY_SIDE} + i % {SIDE_BY_SIDE} AS r,
  i % {SIDE_BY_SIDE * CALLS} // {SIDE_BY_SIDE} AS k FROM range($count) AS t(i))
"""
_REST = """
0 AS attempt, '' AS status_message, 'spangrad.tracer' AS scope, '1.0.0' AS scope_version,
'{}' AS scope_attributes, '' AS schema_url, '{"service.name":"agent"}' AS resource, '' AS resource_schema_url,
'[]' AS events, '[]' AS links, '' AS trace_state, 0 AS flags,
0 AS dropped_attributes, 0 AS dropped_events, 0 AS dropped_links
"""
_ATTRIBUTES = """
'{"spangrad.rollout.id":"' || rollout_id || '","spangrad.attempt":0,"gen_ai.operation.name":"chat",'
|| '"gen_ai.provider.name":"vllm","gen_ai.request.model":"policy",'
|| '"gen_ai.response.id":"chatcmpl-' || span_id || '","gen_ai.response.finish_reasons":["stop"],'
|| '"gen_ai.request.temperature":1.0,"gen_ai.input.messages":{"$messages":{"from":0,"new":2,"sep":","'
|| CASE WHEN k > 0 THEN ',"base":"' || before || '","keep":' || (2 * k) ELSE '' END || '}},'
|| '"gen_ai.output.messages":{"$messages":{"from":2,"new":1,"sep":","}},'
|| '"spangrad.logprobs_mode":"processed",'
|| '"spangrad.prompt_token_ids":{"$column":"new_prompt_token_ids"},'
|| '"spangrad.sampled_token_ids":{"$column":"sampled_token_ids"},'
|| '"spangrad.sampled_logprobs":{"$column":"sampled_logprobs"},'
|| '"spangrad.policy_versions":{"$column":"policy_versions"}}'
"""
_SPANS = f"""
INSERT INTO spans BY NAME
SELECT trace_id, span_id, root(r) AS parent_span_id, rollout_id, {_REST}, 'chat policy' AS name, 3 AS kind,
  start_ns::UBIGINT AS start_ns, (start_ns + 900000000)::UBIGINT AS end_ns,
  CASE WHEN i % 97 = 0 THEN 2 ELSE 0 END AS status_code, {_ATTRIBUTES} AS attributes,
  CASE WHEN k > 0 THEN before END AS prompt_base,
  CASE WHEN k > 0 THEN {PROMPT_IDS + SAMPLED_IDS} * k END AS prompt_keep,
  ids(i, 0, {PROMPT_IDS}) AS new_prompt_token_ids, ids(i, 500, {SAMPLED_IDS}) AS sampled_token_ids,
  list_transform(ids(i, 900, {SAMPLED_IDS}), lambda x: (x / -5e4)::FLOAT) AS sampled_logprobs,
  list_transform(range({SAMPLED_IDS}), lambda x: (r // 1000)::INTEGER) AS policy_versions,
  [told(r, 2 * k), told(r, 2 * k + 1), replied(r, k)] AS message_ids
FROM ({_CALL})
"""
_ROOTS = f"""
INSERT INTO spans BY NAME
SELECT trace(r) AS trace_id, root(r) AS span_id, 'rollout-' || r AS rollout_id, {_REST}, 'agent' AS name,
  1 AS kind, start_of(r)::UBIGINT AS start_ns, (start_of(r) + 50000000000)::UBIGINT AS end_ns,
  0 AS status_code,
  '{{"spangrad.span.role":"rollout","spangrad.rollout.id":"rollout-' || r || '","spangrad.attempt":0}}'
    AS attributes
FROM range($count) AS t(r)
"""
_MESSAGES = f"""
INSERT INTO messages
SELECT told(i // {2 * CALLS}, i % {2 * CALLS}),
  message(CASE WHEN i % 2 = 0 THEN 'user' ELSE 'assistant' END, i)
FROM range(2 * $count) AS t(i)
UNION ALL
SELECT replied(i // {CALLS}, i % {CALLS}), message('assistant', i || 'r') FROM range($count) AS t(i)
"""
_CALLS = f"""
INSERT INTO calls BY NAME
SELECT trace_id || '-' || span_id AS call_id, rollout_id, 0 AS attempt, trace_id, span_id,
  'spangrad' AS dialect, 'policy' AS model,
  CASE WHEN i % 97 = 0 THEN 'unusable' WHEN r % 4 = 0 THEN 'text' WHEN r % 4 = 1 THEN 'ids' ELSE 'exact' END
    AS grade,
  CASE WHEN i % 97 = 0 THEN ['error: APIError: ' || i]
    WHEN r % 4 = 0 THEN ['no token ids', 'tool results were re-serialised', 'arguments were re-serialised']
    WHEN r % 4 = 1 THEN ['policy version unknown: choice 0', 'sampled greedily: at temperature 0'] ELSE [] END
    AS grade_reasons,
  'stop' AS finish_reason, CASE WHEN k = 1 THEN 'title' ELSE 'agent' END AS purpose, 'act' AS step_name,
  start_ns::UBIGINT AS start_ns, (start_ns + 900000000)::UBIGINT AS end_ns,
  {PROMPT_IDS + SAMPLED_IDS} * k + {PROMPT_IDS} AS prompt_tokens, {SAMPLED_IDS} AS sampled_tokens,
  (r // 1000)::INTEGER AS policy_version, k::INTEGER AS step_index
FROM ({_CALL})
"""
_ROLLOUTS = """
INSERT INTO rollouts BY NAME
SELECT r AS seq, 'rollout-' || r AS rollout_id, 'task-' || r // 8 AS task_id, 'group-' || r // 8 AS group_id,
  'run' AS run_id, CASE WHEN r % 10 = 0 THEN 'eval' ELSE 'train' END AS split, 0 AS attempt,
  3 AS max_attempts, CASE WHEN r % 50 = 0 THEN 'failed' ELSE 'succeeded' END AS status,
  (r // 1000)::INTEGER AS policy_version, start_of(r) AS enqueued_ns, start_of(r) AS started_ns,
  start_of(r) + 50000000000 AS ended_ns, false AS is_recorded
FROM range($count) AS t(r)
"""
_REWARDS = """
INSERT INTO rewards BY NAME
SELECT md5('reward' || r) AS reward_id, 'rollout-' || r AS rollout_id, 0 AS attempt, 'reward' AS name,
  (hash(r) % 2)::DOUBLE AS value, 'evaluator' AS author, start_of(r) + 60000000000 AS time_ns
FROM range($count) AS t(r) WHERE r % 3 > 0
"""


def make_store(path: Path, rollouts: int) -> None:
    """Fill a new store. The number of rollouts is a multiple of 64."""
    FileStore(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute(_MACROS)
        for sql in (_ROLLOUTS, _REWARDS, _ROOTS):
            con.execute(sql, {"count": rollouts})
        for sql in (_SPANS, _CALLS, _MESSAGES):
            con.execute(sql, {"count": rollouts * CALLS})
        con.execute("CHECKPOINT")


def bench_large(path: str | None = None, *, rollouts: int = 20_032, rounds: int = 5) -> list[Figure]:
    """Questions to a store of a million calls with little memory, after each was asked once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(path or Path(folder, "large.duckdb"))
        if not file.exists():
            make_store(file, rollouts)
        with (
            mock.patch.object(database, "MEMORY_LIMIT", MEMORY_LIMIT),
            FileStore(file, read_only=True) as store,
        ):
            ((calls,),) = (row.values() for row in store.query("SELECT count(*) FROM calls"))
            size = file.stat().st_size
            figures = []
            for name, ask in questions(store, rollouts).items():
                took = [_seconds(ask) for _ in range(rounds + 1)]
                note = f"first {took[0]:.2f}, then {min(took[1:]):.2f} to {max(took[1:]):.2f}"
                figures.append(Figure(name, statistics.median(took[1:]), "s", at_most=1.0, note=note))
            return [Figure(f"size of {calls:,} calls", size / 2**30, "GiB"), *figures]


def questions(store: FileStore, rollouts: int) -> dict[str, Callable[[], object]]:
    """What is asked."""
    one = f"rollout-{rollouts // 2}"
    newest = "SELECT * FROM outcomes ORDER BY started DESC, rollout_id LIMIT 50"
    return {
        "the newest 50 rollouts with rewards and calls": lambda: store.query(newest),
        "all rollouts": lambda: list(store.rollouts()),
        "one rollout's calls": lambda: calls_of(store, [one]),
        "report": lambda: report(store),
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    make_store(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20_032)
