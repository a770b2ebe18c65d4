"""What a store's calls can train, and what to change where they were recorded so that they can train more.

Counts come from the tables `calls`, `unknown_calls` and `rollouts` and the view `trusted_rewards`, so a
report costs one pass over summaries, whatever the size of the spans. Knows grades, objectives and reasons;
reads no span.

Invariants:
* every call of purpose `agent` is counted once in `grades`, and in each objective that its grade allows if
  its rollout succeeded: `spangrad export` and training take no others;
* a reason without advice is still shown, with its count;
* a rollout has a reward where credit sees one: given for the rollout, or for every call of it that acts;
* calls in an unknown dialect are in none of these counts, and in one of their own, by scope;
* traces whose calls are not in the tables yet are counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from spangrad.adapters.grading import TOOLS_UNKNOWN
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.store.base import Store
from spangrad.store.records import DEFAULT_REWARD

OBJECTIVES: Final = (
    ("reinforcement learning", (Grade.EXACT,), True),
    ("weighted cloning, AWR", (Grade.EXACT, Grade.IDS, Grade.TEXT), True),
    ("preferences: DPO, KTO", (Grade.EXACT, Grade.IDS, Grade.TEXT), True),
    ("behaviour cloning", (Grade.EXACT, Grade.IDS, Grade.TEXT), False),
)
"""Name, grades that may train it, whether it needs rewards; `DESIGN.md` section 3."""

ADVICE: Final[Mapping[str, str]] = {
    "no token ids": (
        "record below the SDK: `spangrad run -- CMD`, or send the agent through `spangrad "
        "gateway`, which asks vLLM for `return_token_ids` and `logprobs`; this recorder or its "
        "client drops them"
    ),
    "no prompt token ids": "ask vLLM for `return_token_ids: true`; `spangrad gateway` does",
    "no sampled token ids": "ask vLLM for `return_token_ids: true`; `spangrad gateway` does",
    "no logprobs": (
        "ask for `logprobs: true` and start vLLM with `--logprobs-mode processed_logprobs`; "
        "`spangrad gateway` and `spangrad serve` do"
    ),
    "logprobs don't cover the reply": (
        "record below the SDK or at the gateway; a client between them lost some"
    ),
    "a logprob is missing": "upgrade vLLM, and look for a logits processor that bans what was sampled",
    "policy version unknown": (
        "send the agent through `spangrad gateway`, which stamps the version of the weights"
    ),
    "logprobs are not of the sampled distribution": (
        "start vLLM with `--logprobs-mode processed_logprobs`, or sample at temperature 1 without "
        "top_p, top_k and penalties"
    ),
    "a learner can't recompute the sampled distribution": (
        "sample with temperature alone: no top_p, top_k, min_p, penalties"
    ),
    "a token id is negative": "find out who pads: the ids are left out, and only the text is used",
    "usage contradicts the token ids": (
        "record at the gateway: somebody between the engine and the recorder lost ids, or counts by itself"
    ),
    "finish reasons contradict each other": "upgrade the recorder: it tells two reasons why one reply ended",
    "sampled greedily": "sample at a temperature above 0: greedy replies explore nothing",
    "sampled under constraint": (
        "leave out `response_format`, grammars and forced tool choices where replies are to be "
        "trained with RL"
    ),
    "sampling defaults unknown": (
        "send the agent through `spangrad gateway`, which asks the engine for its defaults"
    ),
    "arguments were re-serialised": (
        "record with a tracer that keeps arguments as strings (spangrad, OpenInference, "
        "Langfuse); this one parsed them, so tool calls may differ in bytes"
    ),
    "tool results were re-serialised": "record with a tracer that keeps tool results as strings",
    TOOLS_UNKNOWN: (
        "record with what keeps tool definitions: `spangrad run -- CMD`, or "
        "`opentelemetry-instrumentation-genai-openai` in place of its forerunner `-openai-v2`, which has no "
        "switch for them; `--keep-unknown-tools` clones such calls without"
    ),
    "attributes were dropped": (
        "set OTEL_ATTRIBUTE_COUNT_LIMIT and OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT to 10000 where the "
        "agent runs: the SDK's 128 evict the oldest messages"
    ),
    "stream was left early": "nothing: the agent stopped reading, so the reply is not what was sampled",
    "no finish reason": (
        "upgrade the recorder, or record below the SDK: without it a cut reply can't be told"
    ),
    "finish reason was not recorded": (
        "record at the gateway or below the SDK, if replies that the context's end may have cut matter: this "
        "recorder keeps no finish reason of replies that came in one piece"
    ),
    "reply was not finished": "nothing: the engine or a filter ended it",
    "error": "nothing to train; `spangrad calls` shows what failed",
    "unreadable": (
        "record with `spangrad run -- CMD`, or upgrade the recorder: the attribute or event that the example "
        "names is in a form that is not read"
    ),
    "attributes are missing": (
        "set OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT to 10000 where the agent runs: the SDK's 128 evict the "
        "oldest messages"
    ),
    "finish reasons are not told": (
        "ingest requests with their responses, if replies that were cut matter: a conversation that was "
        "written down does not tell them from whole ones"
    ),
    "invalid JSON": (
        "set OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT higher, or not at all: the attribute was cut in the middle"
    ),
    "no input messages were recorded": (
        "switch on content capture where the agent runs; that of OpenTelemetry's recorders: "
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY (older ones: true)"
    ),
    "no output was recorded": (
        "of an export taken while the agent ran: export again, and ingest that into a new store; else switch "
        "on content capture where the agent runs, that of OpenTelemetry's recorders: "
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY (older ones: true)"
    ),
    "content is not on the span, nor in a log record": (
        "ingest the recorder's log records, too: a collector writes them into a file of their own; "
        "if there are none, switch on content capture where the agent runs"
    ),
    "content was not captured": (
        "switch on content capture where the agent runs: "
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY (older recorders: true)"
    ),
    "content was not recorded": "switch on content capture where the agent runs",
    "messages are missing": (
        "set OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT to 10000 where the agent runs: the SDK's 128 evict the "
        "oldest messages"
    ),
    "tools are missing": "set OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT to 10000 where the agent runs",
    "text beside tool calls may be missing": (
        "record with OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental: this mode leaves it out of "
        "earlier turns"
    ),
    "text was redacted": "train on what is not redacted: the model saw other text than is stored",
    "text was scrubbed": (
        "switch the recorder's scrubbing off for prompts and replies that are to be trained"
    ),
    "the reply came out of a cache": (
        "switch the cache off where replies are to be trained: nothing was sampled"
    ),
    "tool calls of several choices are told as one choice's": (
        "ask for one choice, or send the agent through `spangrad gateway`; LiteLLM numbers them as one's"
    ),
    "chunks of the stream are missing": (
        "set OTEL_SPAN_EVENT_COUNT_LIMIT to 10000 where the agent runs: MLflow keeps a stream as events"
    ),
    "a form that is not read": (
        "nothing yet: of MLflow the forms of OpenAI and LangChain are read, of older Logfire that of OpenAI"
    ),
    "a part has no chat form": "nothing yet: audio, files and images other than by URL are not rendered",
}
"""Kind of reason -> what to do where the calls were recorded."""

_COUNTS_SQL: Final = "SELECT purpose, dialect, grade, count(*) AS calls FROM calls GROUP BY ALL"
_REASONS_SQL: Final = """
WITH lists AS (
  SELECT row_number() OVER () AS list, reasons, calls FROM (
    SELECT grade_reasons AS reasons, count(*) AS calls FROM calls
    WHERE purpose = 'agent' AND len(grade_reasons) > 0 GROUP BY grade_reasons)),
kinds AS (
  SELECT list, split_part(told, ': ', 1) AS kind, min(told) AS example, any_value(calls) AS calls
  FROM (SELECT list, calls, unnest(reasons) AS told FROM lists) GROUP BY list, kind)
SELECT kind AS reason, sum(calls)::BIGINT AS calls, min(example) AS example
FROM kinds GROUP BY kind ORDER BY calls DESC, reason
"""
"""Many calls have the same reasons, word for word: those are counted before they are taken apart."""
_REWARDED: Final = """
WITH acting AS (
  SELECT rollout_id, attempt, count(*) AS calls FROM calls
  WHERE purpose = 'agent' AND grade <> 'unusable' GROUP BY ALL),
rewarded AS (
  SELECT t.rollout_id FROM trusted_rewards t JOIN rollouts r USING (rollout_id)
  LEFT JOIN acting a ON a.rollout_id = r.rollout_id AND a.attempt = r.attempt
  WHERE t.name = $reward GROUP BY t.rollout_id, a.calls
  HAVING bool_or(t.call_id IS NULL) OR count(*) >= a.calls)
"""
_OBJECTIVES_SQL: Final = f"""{_REWARDED},
counted AS (
  SELECT c.rollout_id, c.grade, count(*) AS calls, sum(c.sampled_tokens) FILTER (NOT c.is_told) AS by_ids,
    sum(c.sampled_tokens) FILTER (c.is_told) AS by_usage,
    count(*) FILTER (c.sampled_tokens IS NULL) AS unknown
  FROM (SELECT *, grade = 'text' AND (list_contains(grade_reasons, 'no token ids')
    OR list_contains(grade_reasons, 'no sampled token ids: choice 0')) AS is_told
    FROM calls WHERE purpose = 'agent') c
  JOIN rollouts r ON r.rollout_id = c.rollout_id AND r.attempt = c.attempt
  WHERE r.status = 'succeeded' GROUP BY ALL),
told AS (
  SELECT *, coalesce(rollout_id IN (SELECT rollout_id FROM rewarded), false) AS has_reward FROM counted),
wanted AS (SELECT unnest($numbers) AS number, unnest($grades) AS grades, unnest($needed) AS needed)
SELECT coalesce(sum(t.calls), 0)::BIGINT AS calls, count(DISTINCT t.rollout_id) AS rollouts,
  sum(t.by_ids)::BIGINT AS sampled_tokens, sum(t.by_usage)::BIGINT AS usage_tokens,
  coalesce(sum(t.unknown), 0)::BIGINT AS unknown_calls
FROM wanted w LEFT JOIN told t ON list_contains(w.grades, t.grade) AND (t.has_reward OR NOT w.needed)
GROUP BY w.number ORDER BY w.number
"""
_ROLLOUTS_SQL: Final = f"""{_REWARDED}
SELECT count(*) AS rollouts, count(*) FILTER (rollout_id IN (SELECT rollout_id FROM rewarded)) AS rewarded,
  count(*) FILTER (status = 'failed') AS failed,
  count(*) FILTER (status IN ('queued', 'running')) AS unfinished FROM rollouts
"""


_UNKNOWN_SQL: Final = """
SELECT scope, count(*) AS calls,
  min('span ' || span_id || ' of trace ' || trace_id || ' with the attributes ' || attributes) AS example
FROM unknown_calls GROUP BY scope ORDER BY calls DESC, scope
"""
_OTHERS_SQL: Final = """
SELECT name, count(DISTINCT rollout_id) AS rollouts FROM trusted_rewards WHERE NOT list_contains(?, name)
GROUP BY name ORDER BY rollouts DESC, name
"""


@dataclass(frozen=True, slots=True)
class Objective:
    """What can be trained in one way."""

    objective: str
    needs: str
    """Grades, and whether a reward."""
    rollouts: int
    calls: int
    sampled_tokens: int | None
    """Tokens that the engine sampled, by their ids; None: no ids are known."""
    usage_tokens: int | None
    """Of calls without ids, as the usage says that was recorded; None: none was."""
    unknown_calls: int
    """Calls that have neither."""

    @property
    def tokens(self) -> str:
        """How many tokens were sampled, and who says so."""
        told = [(self.sampled_tokens, ""), (self.usage_tokens, " by usage")]
        known = " + ".join(f"{count}{by}" for count, by in told if count is not None)
        unknown = f"{f'{self.unknown_calls} calls ' if known else ''}unknown" if self.unknown_calls else ""
        return ", ".join(filter(None, (known, unknown))) or "0"


@dataclass(frozen=True, slots=True)
class Reason:
    """What keeps calls from a better grade."""

    reason: str
    calls: int
    example: str
    advice: str | None


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a store holds, and what it is good for."""

    rollouts: int
    rewarded_rollouts: int
    """With the reward that was asked for, given by somebody whom the policy can't reach."""
    failed_rollouts: int
    unfinished_rollouts: int
    """Waiting or running: nothing of them is trained or exported yet, nor of those that failed."""
    calls: int
    """Of purpose `agent`: the ones that can be trained at all."""
    other_calls: Mapping[str, int]
    """Calls of other purposes: titles, judges, embeddings, ..."""
    grades: Mapping[str, int]
    dialects: Sequence[Mapping[str, Any]]
    objectives: Sequence[Objective]
    reasons: Sequence[Reason]
    reward: str
    """Name of the reward that was asked for."""
    other_rewards: Mapping[str, int]
    """Rollouts by name of another trusted reward that they, or calls of them, have."""
    unknown_calls: Sequence[Mapping[str, Any]]
    """What looks like model calls, in a dialect that nobody reads: by scope, each with an example."""
    unread_traces: int
    """Traces whose newest spans are not in these counts yet."""

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def report(store: Store, *, reward: str = DEFAULT_REWARD) -> StoreReport:
    """Count what a store's calls can train, by the reward of that name."""
    (rollouts,) = store.query(_ROLLOUTS_SQL, {"reward": reward})
    (unread,) = store.query("SELECT count(DISTINCT trace_id) AS traces FROM unread_traces")
    grades, others, dialects = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for row in store.query(_COUNTS_SQL):
        dialects[row["dialect"], row["grade"]] += row["calls"]
        counter, kind = (grades, "grade") if row["purpose"] == Purpose.AGENT else (others, "purpose")
        counter[row[kind]] += row["calls"]
    return StoreReport(
        rollouts=rollouts["rollouts"],
        rewarded_rollouts=rollouts["rewarded"],
        failed_rollouts=rollouts["failed"],
        unfinished_rollouts=rollouts["unfinished"],
        calls=sum(grades.values()),
        other_calls=dict(others),
        grades={grade: grades[grade] for grade in Grade if grade in grades},
        dialects=[
            {"dialect": dialect, "grade": grade, "calls": calls}
            for (dialect, grade), calls in sorted(dialects.items(), key=lambda each: (-each[1], each[0]))
        ],
        objectives=_objectives(store, reward),
        reasons=[
            Reason(row["reason"], row["calls"], row["example"], ADVICE.get(row["reason"]))
            for row in store.query(_REASONS_SQL)
        ],
        reward=reward,
        other_rewards=other_rewards(store, reward),
        unknown_calls=store.query(_UNKNOWN_SQL),
        unread_traces=unread["traces"],
    )


def other_rewards(store: Store, *wanted: str) -> dict[str, int]:
    """Rollouts by name of a trusted reward that is none of these."""
    return {row["name"]: row["rollouts"] for row in store.query(_OTHERS_SQL, [list(wanted)])}


def _objectives(store: Store, reward: str) -> list[Objective]:
    given = {
        "numbers": list(range(len(OBJECTIVES))),
        "grades": [[str(grade) for grade in grades] for _, grades, _ in OBJECTIVES],
        "needed": [needs_reward for _, _, needs_reward in OBJECTIVES],
        "reward": reward,
    }
    found = store.query(_OBJECTIVES_SQL, given)
    return [
        Objective(
            name,
            f"{'/'.join(grades)}{', a reward' if needs_reward else ''}",
            row["rollouts"],
            row["calls"],
            row["sampled_tokens"] if row["calls"] else 0,
            row["usage_tokens"],
            row["unknown_calls"],
        )
        for (name, grades, needs_reward), row in zip(OBJECTIVES, found, strict=True)
    ]
