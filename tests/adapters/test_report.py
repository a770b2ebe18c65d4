"""What a store can train, counted in a real file."""

import json
import re
from pathlib import Path

import pytest

from spangrad.adapters import account_unread, grading, ingest
from spangrad.adapters.dialects import genai_events, genai_generic, genai_legacy, imported
from spangrad.adapters.report import ADVICE, OBJECTIVES, report
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout
from tests.adapters.building import span, text_attributes
from tests.adapters.captured import FIXTURES


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def test_an_empty_store_can_train_nothing(store):
    found = report(store)
    assert (found.rollouts, found.calls, found.grades, list(found.reasons)) == (0, 0, {}, [])
    assert {objective.calls for objective in found.objectives} == {0}


def test_captured_calls_are_counted_with_what_to_do(store):
    ingest([FIXTURES / "genai_openai" / name for name in ("multi_turn.otlp.jsonl", "fail.otlp.jsonl")], store)
    found = report(store)
    assert (found.calls, found.grades, found.rollouts) == (7, {"text": 4, "unusable": 3}, 4)
    can = {objective.objective: (objective.rollouts, objective.calls) for objective in found.objectives}
    assert (can["reinforcement learning"], can["behaviour cloning"]) == ((0, 0), (1, 4))
    reasons = {reason.reason: reason for reason in found.reasons}
    assert (reasons["no token ids"].calls, reasons["error"].calls) == (4, 3)
    assert "spangrad run" in str(reasons["no token ids"].advice)
    assert json.dumps(found.to_json())


def test_calls_in_an_unknown_dialect_are_counted_by_scope_until_they_are_told_otherwise(store):
    own = {"acme.model": "m", "acme.prompt": "hi", "acme.completion": "ho"}
    spans = [span(letter, scope=scope, attributes=own) for letter, scope in zip("abc", "xyx", strict=True)]
    store.put_otlp(encode_request([*spans, span("d", attributes=text_attributes())]))  # live
    for _ in range(2):  # read again: counted once
        account_unread(store)
        found = report(store)
        assert found.calls == 1
        assert [(row["scope"], row["calls"]) for row in found.unknown_calls] == [("x", 2), ("y", 1)]
        assert f"span {spans[1].span_id} of trace {spans[1].trace_id}" in found.unknown_calls[1]["example"]
        assert "acme.model, acme.prompt, acme.completion" in found.unknown_calls[1]["example"]
        store.put_otlp(encode_request([span("e", attributes={})]))
    assert json.dumps(found.to_json())


def test_tokens_of_text_are_what_its_recorder_counts_and_unknown_where_it_does_not(store):
    ingest([FIXTURES / "genai_openai"], store)
    cloning = report(store).objectives[-1]
    told = store.query("SELECT sampled_tokens FROM calls WHERE grade = 'text' AND sampled_tokens IS NOT NULL")
    assert (cloning.calls, len(told), cloning.sampled_tokens) == (18, 17, None)
    assert cloning.tokens == f"{sum(row['sampled_tokens'] for row in told)} by usage, 1 calls unknown"
    ingest([FIXTURES / "exports" / "agent_lightning" / "events_v1.jsonl"], store)
    both = report(store).objectives[-1]
    assert both.sampled_tokens and both.usage_tokens == cloning.usage_tokens
    assert both.tokens == f"{both.sampled_tokens} + {cloning.tokens}"


def test_what_can_train_has_no_call_of_a_rollout_that_failed_or_has_not_ended(store):
    ingest([FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"], store)
    [rollout] = store.rollouts()
    store.enqueue([Rollout(rollout.rollout_id)])
    found = report(store)
    assert (found.unfinished_rollouts, found.grades) == (1, {"text": 4})
    assert {(one.calls, one.tokens) for one in found.objectives} == {(0, "0")}


def test_only_a_trusted_reward_lets_a_rollout_train_what_needs_one(store):
    ingest([FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"], store)
    [rollout] = store.rollouts()
    for author, calls in ((RewardAuthor.AGENT, 0), (RewardAuthor.EVALUATOR, 4)):
        store.put_rewards([Reward(rollout.rollout_id, 1.0)], author=author)
        can = {objective.objective: objective.calls for objective in report(store).objectives}
        assert can["preferences: DPO, KTO"] == calls


def test_every_reason_that_grading_gives_has_advice():
    source = Path(grading.__file__).read_text()
    given = {text.split(":")[0] for text in re.findall(r'yield f?"([a-z][^"{]+?)[":]', source)}
    assert len(given) > 12
    assert given - set(ADVICE) <= {
        "no token was sampled",
        "a logprob is no logprob",
        "policy versions don't cover the reply",
    }


@pytest.mark.parametrize(
    "reason",
    [
        *(genai_events.NO_RECORD, genai_events.NOT_CAPTURED, genai_generic.NO_CONTENT),
        *(genai_legacy.NO_RECORDS, genai_legacy.NOT_CAPTURED, genai_legacy.TEXT_BESIDE_CALLS),
        *(imported.FINISH_NOT_TOLD, "unreadable: gen_ai.prompt: it is a number"),
        "attributes are missing: message 0, though llm.input_messages.48 is there",
    ],
)
def test_content_that_is_not_there_has_advice(reason):
    assert grading.reason_kind(reason) in ADVICE


def test_objectives_ask_for_a_reward_or_say_that_they_do_not():
    assert [needs for _, _, needs in OBJECTIVES] == [True, True, True, False]
