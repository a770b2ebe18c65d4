"""Agent Lightning: spans of 0.3 and events of 1.0 become calls with the engine's ids.

`events_v1*.jsonl` were answered by the server of 1.0.2, in front of a stand-in for vLLM. `spans_v03.jsonl`
was written by the `Span` type of 0.3.0 from spans of the OpenTelemetry SDK that have the attributes which
AgentOps and 0.3.0 give them; a run of 0.3.0 itself was not recorded.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans, calls_of
from spangrad.adapters.exports.agent_lightning import scores_of, spans_of
from spangrad.adapters.exports.formats import format_of
from spangrad.adapters.grading import reason_kind
from spangrad.adapters.ingest import ingest
from spangrad.adapters.model_call import Grade, ModelCall
from spangrad.store.file_store import FileStore
from spangrad.store.records import RolloutStatus
from tests.adapters import picnic
from tests.adapters.captured import FIXTURES

FOLDER = FIXTURES / "exports" / "agent_lightning"
NAMES = ("spans_v03", "events_v1", "events_v1_triplet")


def rows(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def calls(name: str) -> list[ModelCall]:
    return calls_from_spans(span for row in rows(name) for span in spans_of(row))


def raw() -> list[dict[str, Any]]:
    return rows("request_response", FOLDER.parent / "plain_chat")


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_known(name):
    assert {found.name for row in rows(name) if (found := format_of(row))} == {"agent_lightning"}


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_logprobs_are_those_of_the_raw_responses(name):
    for row, call in zip(raw(), calls(name)[:4], strict=True):
        choice = row["response"]["choices"][0]
        assert call.prompt_token_ids == row["response"]["prompt_token_ids"]
        assert call.choices[0].sampled_token_ids == choice["token_ids"]
        logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
        assert call.choices[0].logprobs == pytest.approx(logprobs)


def test_events_are_exact_with_the_version_that_the_server_named():
    found = calls("events_v1")
    assert picnic.told(found[:4]) == picnic.expected()
    assert [call.grade for call in found] == [Grade.EXACT] * 4 + [Grade.UNUSABLE]
    assert found[4].grade_reasons == ("error: BadRequestError: no",)
    assert {v for call in found[:4] for v in call.choices[0].policy_versions or ()} == {3}
    assert found[0].sampling["temperature"] == 1.0
    assert [call.choices[0].finish_reason for call in found[:4]] == picnic.FINISH_REASONS
    assert {call.rollout_id for call in found} == {rows("events_v1")[0]["rollout_id"]}


def test_trimmed_events_have_ids_and_no_more():
    """Nothing tells whether the replies were finished: export events without `format=triplet`."""
    found = calls("events_v1_triplet")
    assert {call.grade for call in found} == {Grade.UNUSABLE}
    assert {reason_kind(reason) for call in found[:4] for reason in call.grade_reasons} == {
        "no finish reason"
    }
    assert not any(call.messages for call in found)


def test_spans_of_0_3_are_read_and_say_what_they_lack():
    found = calls("spans_v03")
    told, expected = picnic.told(found), picnic.expected()
    assert [request for request, _ in told] == [request for request, _ in expected]
    replies = [{"content": None, **reply, "tool_calls": None} for _, reply in expected]
    assert [{**reply, "tool_calls": None} for _, reply in told] == replies  # calls are in spans below
    assert [tool["function"]["name"] for tool in found[0].tools] == list(picnic.TOOLS)
    assert {call.grade for call in found} == {Grade.IDS}
    assert {reason_kind(reason) for call in found for reason in call.grade_reasons} == {
        "policy version unknown",
        "logprobs are not of the sampled distribution",
    }
    assert {call.rollout_id for call in found} == {"ro-1/at-1"}


def test_without_ids_a_reply_whose_tool_calls_are_elsewhere_is_no_text():
    def without_ids(row):
        attributes = {k: v for k, v in row["attributes"].items() if not k.endswith("_token_ids")}
        return {**row, "attributes": attributes}

    spans = [span for row in rows("spans_v03") for span in spans_of(without_ids(row))]
    found = calls_from_spans(spans)
    assert [call.grade for call in found] == [Grade.UNUSABLE] * 3 + [Grade.TEXT]
    assert "tool calls of the reply are in other spans" in found[0].grade_reasons


def test_rewards_of_both_generations():
    spans = [score for row in rows("spans_v03") for score in scores_of(row)]
    assert [(s.name, s.value, s.span_id) for s in spans] == [("reward", 0.5, None), ("brevity", 1.0, None)]
    [event] = [score for row in rows("events_v1") for score in scores_of(row)]
    assert (event.name, event.value, event.explanation, event.author) == ("reward", 0.75, "dry", "agent")


def test_a_reward_that_the_server_filled_in_is_none():
    row = rows("events_v1")[-1]
    row["data"] = {"value": 0.0, "source": "fallback"}
    [score] = scores_of(row)
    assert (score.value, score.label) == (None, "fallback")


def test_attempts_with_names_are_rollouts_of_their_own():
    row = rows("events_v1")[0]
    attempts = [{**row, "attempt_id": attempt} for attempt in ("0", "2", "at-x")]
    found = calls_from_spans(span for each in attempts for span in spans_of(each))
    assert {(call.rollout_id, call.attempt) for call in found} == {
        (row["rollout_id"], 0),
        (row["rollout_id"], 2),
        (f"{row['rollout_id']}/at-x", 0),
    }


def test_ingested_events_are_a_rollout_with_its_reward(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        report = ingest([FOLDER / "events_v1.jsonl"], store)
        assert (report.calls, report.by_format, report.new_rewards) == (5, {"agent_lightning": 7}, 1)
        [rollout] = store.rollouts()
        [reward] = store.rewards([rollout.rollout_id])
        assert (reward.value, reward.call_id, reward.attempt) == (0.75, None, 0)
        assert rollout.status is RolloutStatus.SUCCEEDED
        assert len(calls_of(store, [rollout.rollout_id])) == 5
        assert ingest([FOLDER / "events_v1.jsonl"], store).new_spans == 0


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(junk=_JUNK, name=st.sampled_from(NAMES), pick=st.integers(0, 100))
def test_junk_anywhere_never_raises(junk, name, pick):
    row = json.loads(json.dumps(rows(name)[0]))
    inner = row["attributes"] if "attributes" in row else row["data"]
    for place in (row, inner):
        key = sorted(place)[pick % len(place)]
        kept, place[key] = place[key], junk
        if format_of(row) is not None:
            assert all(call.grade for call in calls_from_spans(spans_of(row)))
            assert list(scores_of(row)) is not None
        place[key] = kept
