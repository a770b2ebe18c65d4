"""Which calls are one rollout and which are apart: raw clients, retries, sub-agents, several candidates.

From files, through `ingest`, to what is exported. Listed in `CASES.md`.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.sessions import Rule
from spangrad.cli import app
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes, token_attributes
from tests.adapters.captured import FIXTURES

GENAI = "opentelemetry.instrumentation.genai.openai"
OPENINFERENCE = "openinference.instrumentation.openai"
Ids = tuple[int, ...]


def exported(folder: Path, store: Path, form: str, *options: str) -> list[dict[str, Any]]:
    """The rows of an export, run as a user runs it."""
    out = folder / f"{form}-{store.name}"
    command = ["export", str(out), "--format", form, "--store", str(store), *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    if form == "transitions":
        return list(pq.read_table(out / "train.parquet").to_pylist())
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def stored(folder: Path, *spans: Span) -> Path:
    """A store into which a file with these spans was ingested, each rollout that they name with its end."""
    file, store = folder / "traces.pb", folder / "store.duckdb"
    named = {(one.trace_id, one.attributes[c.ROLLOUT_ID], one.attributes.get(c.ATTEMPT, 0)) for one in spans}
    roots = [
        span("r", trace=trace, attributes={c.ROLLOUT_ID: name, c.ATTEMPT: attempt, c.SPAN_ROLE: "rollout"})
        for trace, name, attempt in sorted(named)
    ]
    file.write_bytes(encode_request([*roots, *spans]))
    with FileStore(store) as opened:
        ingest([file], opened)
    return store


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}], **more}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": "call_3f9a2b17", **fields}


def genai(number: int, asked: list[dict[str, Any]], reply: dict[str, Any], **more: Any) -> Span:
    """The only span of a trace, as a raw client's recorder writes it."""
    told = {
        c.INPUT_MESSAGES: json.dumps(asked),
        c.OUTPUT_MESSAGES: json.dumps([{**reply, "finish_reason": "stop"}]),
        c.RESPONSE_ID: f"response-{number}",
    }
    attributes = text_attributes(**told, **more)
    return span("a", trace=str(number), scope=GENAI, start_ns=100 * number, attributes=attributes)


def responses(number: int, **asked: Any) -> Span:
    """A call of the Responses API in which the server keeps the earlier turns."""
    request = {"model": "policy", "input": [{"role": "user", "content": f"question {number}"}], **asked}
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}]
    reply = {"id": f"resp_{number}", "object": "response", "status": "completed", "output": output}
    told = {"openinference.span.kind": "LLM", "llm.model_name": "policy"}
    for name, value in (("input", request), ("output", reply)):
        told |= {f"{name}.value": json.dumps(value), f"{name}.mime_type": "application/json"}
    return span("a", trace=str(number), scope=OPENINFERENCE, start_ns=100 * number, attributes=told)


def by_prefix() -> list[Span]:
    history: list[dict[str, Any]] = []
    spans = []
    for number in (1, 2, 3):
        history = [*history, said("user", f"question {number}")]
        spans.append(genai(number, history, reply := said("assistant", f"answer {number}")))
        history = [*history, reply]
    return spans


def by_tool_call() -> list[Span]:
    """The history is cut: what is left shows the result of a call that an earlier reply made."""
    calling = {"role": "assistant", "parts": [part("tool_call", name="look", arguments={"a": 1})]}
    result = {"role": "tool", "parts": [part("tool_call_response", response="dry")]}
    again = {
        "role": "assistant",
        "parts": [part("tool_call", name="look", arguments={}) | {"id": "call_77d0c5e1"}],
    }
    last = {"role": "tool", "parts": [part("tool_call_response", response="wet") | {"id": "call_77d0c5e1"}]}
    return [
        genai(1, [said("user", "weather?")], calling),
        genai(2, [said("user", "summary of before"), result], again),
        genai(3, [said("user", "another summary"), last], said("assistant", "done")),
    ]


def by_conversation() -> list[Span]:
    return [
        genai(
            n, [said("user", f"question {n}")], said("assistant", "yes"), **{c.CONVERSATION_ID: "order-1047"}
        )
        for n in (1, 2, 3)
    ]


def by_response() -> list[Span]:
    return [responses(1), *(responses(n, previous_response_id=f"resp_{n - 1}") for n in (2, 3))]


@pytest.mark.parametrize(
    ("spans", "rule"),
    [
        (by_prefix(), Rule.PREFIX),
        (by_tool_call(), Rule.TOOL_CALL),
        (by_conversation(), Rule.CONVERSATION),
        (by_response(), Rule.RESPONSE),
    ],
    ids=["message-prefix", "tool-call-id", "conversation-id", "response-id"],
)
def test_one_span_traces_of_a_raw_client_are_chained(tmp_path, spans, rule):
    alone = genai(9, [said("user", "something else")], said("assistant", "no"))
    (tmp_path / "traces.pb").write_bytes(encode_request([alone, *reversed(spans)]))
    with FileStore(tmp_path / "store.duckdb") as store:
        report = ingest([tmp_path / "traces.pb"], store)
        found = calls_of(store)
    assert report.joined_by == {str(rule): 2}
    assert [call.rollout_id for call in found] == [*[spans[0].trace_id] * 3, alone.trace_id]


def exact(name: str, prompt: Ids, *replies: Ids, start: int = 0, **more: Any) -> Span:
    """A call with ids as a gateway records it: what ids say is said in words, too."""
    asked = [said("user", " ".join(map(str, prompt)))]
    told = [said("assistant", " ".join(map(str, reply)), finish_reason="stop") for reply in replies]
    attributes: dict[str, Any] = {}
    for index, reply in enumerate(replies):
        attributes |= token_attributes(prompt, reply, choice=index)
    attributes |= {
        c.INPUT_MESSAGES: json.dumps(asked),
        c.OUTPUT_MESSAGES: json.dumps(told),
        c.RESPONSE_FINISH_REASONS: ["stop"] * len(replies),
        c.RESPONSE_ID: f"response-{name}",
    }
    trace = more.pop("trace", "1")
    named = text_attributes(**{**attributes, **more})
    return span(name, trace=trace, scope=c.SCOPE_GATEWAY, start_ns=start, end_ns=start + 1, attributes=named)


def trained(rows: list[dict[str, Any]]) -> list[list[int]]:
    """The ids that each row trains."""
    return [
        [token for token, own in zip(row["token_ids"], row["action_mask"], strict=True) if own]
        for row in rows
    ]


def test_what_a_rollouts_earlier_attempts_sampled_is_in_no_sample_and_has_steps_of_its_own(tmp_path):
    def attempt(number: int, *replies: Ids) -> list[Span]:
        prompt: Ids = (1, 2)
        calls = []
        for step, reply in enumerate(replies):
            name = "abc"[step]
            more = {c.ROLLOUT_ID: "r", c.ATTEMPT: number, c.RESPONSE_ID: f"{number}-{name}"}
            calls.append(exact(name, prompt, reply, start=10 * step, trace=str(number + 1), **more))
            prompt = (*prompt, *reply, 3)
        return calls

    store = stored(tmp_path, *attempt(0, (10, 11), (12,)), *attempt(1, (20,), (21, 22), (23,)))
    (row,) = exported(tmp_path, store, "transitions", "--clone")
    assert (row["attempt"], trained([row])) == (1, [[20, 21, 22, 23]])
    with FileStore(store) as opened:
        steps = opened.query("SELECT rollout_id, attempt, step, call_id FROM steps ORDER BY attempt, step")
    assert [(step["attempt"], step["step"]) for step in steps] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert len({step["call_id"] for step in steps}) == 5


def test_sub_agents_in_one_session_keep_lineages_of_their_own(tmp_path):
    """The lead's turns still extend each other, however many calls of others came between."""
    named: Any = {c.ROLLOUT_ID: "r", c.CONVERSATION_ID: "session"}
    lead = [((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 2, 3, 4, 5, 6), (7,))]
    one = [((50, 51), (52,)), ((50, 51, 52, 53), (54,))]
    two = [((60, 61), (62,)), ((60, 61, 62, 63), (64,))]
    order = [lead[0], one[0], two[0], two[1], lead[1], one[1], lead[2]]
    spans = [exact("abcdefg"[at], *turn, start=10 * at, **named) for at, turn in enumerate(order)]
    rows = exported(tmp_path, stored(tmp_path, *spans), "transitions", "--clone")
    assert sorted(trained(rows)) == [[3, 5, 7], [52, 54], [62, 64]]
    assert sorted(row["token_ids"] for row in rows) == [
        [1, 2, 3, 4, 5, 6, 7],
        [50, 51, 52, 53, 54],
        [60, 61, 62, 63, 64],
    ]


@pytest.mark.parametrize("name", ["genai_langchain/parallel", "openinference_langchain/parallel_async"])
def test_sub_agents_that_are_known_as_text_alone_are_conversations_of_their_own(tmp_path, name):
    with FileStore(tmp_path / "store.duckdb") as store:
        ingest([FIXTURES / f"{name}.otlp.jsonl"], store)
        replies = [call.choices[0].message for call in calls_of(store)]
    rows = exported(tmp_path, tmp_path / "store.duckdb", "messages")
    told = [m for row in rows for m in row["messages"] if m["role"] == "assistant" and m["weight"] == 1]
    assert len(rows) > 1 and len(told) == len(replies) == 5
    assert Counter(str(m.get("content") or "") for m in told) == Counter(
        str(reply.get("content") or "") for reply in replies
    )


def test_all_candidates_of_a_call_are_kept(tmp_path):
    candidates = ((10, 11), (12,), (13, 14, 15), (16,))
    named: Any = {c.ROLLOUT_ID: "r"}
    store = stored(tmp_path, exact("a", (1, 2), *candidates, **named))
    with FileStore(store) as opened:
        (call,) = calls_of(opened)
    assert [choice.sampled_token_ids for choice in call.choices] == list(map(list, candidates))
    rows = exported(tmp_path, store, "transitions", "--clone")
    assert trained(rows) == list(map(list, candidates))
    replies = [row["completion"][0]["content"] for row in exported(tmp_path, store, "trl-sft")]
    assert replies == ["10 11", "12", "13 14 15", "16"]
    assert len(exported(tmp_path, store, "messages")) == 4


def test_candidates_that_were_asked_for_one_by_one_are_all_kept(tmp_path):
    """Four equal requests, and the agent goes on from the third of them."""
    named: Any = {c.ROLLOUT_ID: "r"}
    asked = [exact("abcd"[at], (1, 2), (10 + at,), start=10 * at, **named) for at in range(4)]
    going_on = exact("e", (1, 2, 12, 3), (30,), start=50, **named)
    rows = exported(tmp_path, stored(tmp_path, *asked, going_on), "transitions", "--clone")
    assert sorted(trained(rows)) == [[10], [11], [12, 30], [13]]
