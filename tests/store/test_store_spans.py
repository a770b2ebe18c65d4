import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.errors import StoreError
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import decode_request, encode_request, json_to_protobuf
from spangrad.store.records import RewardAuthor, RolloutStatus, Span, SpanEvent
from spangrad.store.tables import compact, lineage
from spangrad.tracer import conventions as names
from tests.store.building import conversation, new_trace, request, span

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
)
tricky_keys = st.sampled_from(["$bytes", "$messages", "$column", "$map", "$float", "a", ""])
keys = st.one_of(tricky_keys, st.text(max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)
message_texts = st.one_of(
    st.lists(
        st.dictionaries(st.text(max_size=4), values.filter(lambda v: not _has_bytes(v)), max_size=2)
    ).map(lambda items: json.dumps(items, default=str)),
    st.sampled_from(
        [
            "[]",
            "[ ]",
            "[1,2]",
            "[1, 2,3]",
            "[1 ,2]",
            "[1,2",
            "[1,]",
            "[1]x]",
            "[1]",
            "[12]",
            "[12, 3]",
            "[NaN]",
        ]
    ),
    st.sampled_from(
        ['[{"a":1},\n{"a":1}]', "nonsense", '{"a":1}', '["a]",[[]]]', '["\\u0000"]', "[" * 50 + "]" * 50]
    ),
)
attribute_maps = st.dictionaries(keys, values, max_size=4).flatmap(
    lambda plain: st.fixed_dictionaries(
        {},
        optional={
            names.INPUT_MESSAGES: message_texts,
            names.OUTPUT_MESSAGES: message_texts,
            names.TOOL_DEFINITIONS: st.one_of(message_texts, values),
            names.PROMPT_TOKEN_IDS: st.one_of(
                st.lists(st.integers(0, 3), max_size=12).map(names.pack_ints), st.binary(max_size=9), values
            ),
            names.SAMPLED_TOKEN_IDS: st.one_of(
                st.lists(st.integers(0, 3), max_size=4).map(names.pack_ints), st.binary(max_size=9)
            ),
            names.SAMPLED_LOGPROBS: st.binary(max_size=16),
            names.POLICY_VERSIONS: st.binary(max_size=9),
            names.choice_key(names.SAMPLED_TOKEN_IDS, 1): st.binary(max_size=9),
            names.ROLLOUT_ID: st.sampled_from(["r1", "r2", ""]),
        },
    ).map(lambda known: plain | known)
)


def _has_bytes(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_bytes, value))
    if isinstance(value, dict):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes)


uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
links = st.fixed_dictionaries(
    {
        "trace_id": st.sampled_from(["ab" * 16, ""]),
        "span_id": st.just("cd" * 8),
        "trace_state": st.text(max_size=3),
        "attributes": st.dictionaries(keys, values, max_size=2),
        "dropped_attributes": uint32,
        "flags": uint32,
    }
)
any_spans = st.builds(
    Span,
    trace_id=st.sampled_from(["11" * 16, "22" * 16]),
    span_id=st.integers(1, 2**64 - 1).map(lambda i: f"{i:016x}"),
    parent_span_id=st.one_of(st.none(), st.just("0" * 15 + "1")),
    name=st.text(max_size=5),
    kind=st.integers(0, 9),
    start_ns=uint64,
    end_ns=uint64,
    status_code=st.integers(0, 2),
    status_message=st.text(max_size=5),
    scope=st.text(max_size=3),
    scope_version=st.text(max_size=3),
    attributes=attribute_maps,
    resource=st.dictionaries(keys, values, max_size=2),
    events=st.lists(
        st.builds(SpanEvent, st.text(max_size=4), uint64, st.dictionaries(keys, values, max_size=2), uint32),
        max_size=2,
    ).map(tuple),
    links=st.lists(links, max_size=2).map(tuple),
    trace_state=st.text(max_size=3),
    flags=uint32,
    dropped_attributes=uint32,
    dropped_events=uint32,
    dropped_links=uint32,
    scope_attributes=st.dictionaries(keys, values, max_size=2),
    schema_url=st.text(max_size=3),
    resource_schema_url=st.text(max_size=3),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileStore]:
    with FileStore(tmp_path_factory.mktemp("store") / "s.duckdb") as opened:
        yield opened


def without_owner(spans: list[Span]) -> dict[tuple[str, str], Span]:
    return {(s.trace_id, s.span_id): replace(s, rollout_id=None, attempt=None) for s in spans}


@given(value=values)
def test_json_gives_back_values_of_every_kind(value: Any) -> None:
    back = decode_json(encode_json(value))
    assert back == value
    assert repr(back) == repr(value)  # 1 is not 1.0, -0.0 is not 0.0


@given(spans=st.lists(any_spans, max_size=4))
@settings(max_examples=60)
def test_otlp_gives_back_spans_of_every_kind(spans: list[Span]) -> None:
    back, rejected = decode_request(encode_request(spans))
    assert rejected == 0
    assert [replace(s, rollout_id=None, attempt=None) for s in back] == spans


@given(batches=st.lists(st.lists(any_spans, max_size=4), max_size=3))
@settings(max_examples=60)
def test_store_gives_back_spans_of_every_kind(store: FileStore, batches: list[list[Span]]) -> None:
    fresh_traces = {"11" * 16: new_trace(), "22" * 16: new_trace()}
    sent: dict[tuple[str, str], Span] = {}
    for batch in batches:
        batch = [replace(one, trace_id=fresh_traces[one.trace_id]) for one in batch]
        new = store.put_otlp(request(batch))
        fresh = {(s.trace_id, s.span_id) for s in batch} - sent.keys()
        assert new == len(fresh)
        for one in batch:
            sent.setdefault((one.trace_id, one.span_id), one)
    stored = without_owner(list(store.spans(trace_ids=list(fresh_traces.values()))))
    assert stored == without_owner(list(sent.values()))
    for key, one in stored.items():
        assert list(one.attributes) == list(sent[key].attributes)
        assert repr(dict(one.attributes)) == repr(dict(sent[key].attributes))


def test_nan_values_and_nan_logprobs_come_back_bit_for_bit(tmp_path: Path) -> None:
    odd = b"\x01\x00\xc0\x7f" + b"\x00\x00\x80\x3f"  # a NaN with a payload, 1.0
    one = span(new_trace(), attributes={names.SAMPLED_LOGPROBS: odd, "x": [float("nan"), float("-inf")]})
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request([one]))
        (back,) = store.spans()
    assert back.attributes[names.SAMPLED_LOGPROBS] == odd
    assert repr(back.attributes["x"]) == "[nan, -inf]"


def test_spans_come_back_after_reopening_and_from_a_read_only_store(tmp_path: Path) -> None:
    trace_id = new_trace()
    spans = conversation(trace_id, "r", 6)
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request(spans[:3]))
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request(spans[2:]))
    with FileStore(tmp_path / "s.duckdb", read_only=True) as store:
        assert list(store.spans(["r"])) == spans
        assert list(store.spans(trace_ids=[trace_id])) == spans
        assert list(store.spans([])) == []
        assert list(store.spans(["other"])) == []
        with pytest.raises(StoreError, match="read_only"):
            store.put_otlp(request(spans))


def test_spans_are_ordered_by_trace_and_start(tmp_path: Path) -> None:
    spans = [
        span(trace_id, start_ns=start) for trace_id in (new_trace(), new_trace()) for start in (30, 10, 20)
    ]
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request(spans))
        assert list(store.spans()) == sorted(spans, key=lambda s: (s.trace_id, s.start_ns))


def stored_per_turn(store: FileStore) -> list[dict[str, Any]]:
    return store.query(
        "SELECT len(new_prompt_token_ids) AS ids, len(message_ids) AS messages, "
        "len(attributes::VARCHAR) AS json FROM spans ORDER BY start_ns"
    )


def test_what_a_turn_stores_does_not_grow_with_its_number(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s.duckdb") as store:
        for one in conversation(new_trace(), "r", 40):  # one batch a turn
            store.put_otlp(request([one]))
        turns = stored_per_turn(store)
        # 40 ids of the tool's answer are new: the prompt before and the 60 sampled ones are known.
        assert [turn["ids"] for turn in turns[1:]] == [40] * 39
        # 1 answer in the output, 1 answer and 1 question in the input; tools once.
        assert [turn["messages"] for turn in turns[1:]] == [3] * 39
        assert turns[-1]["json"] <= turns[1]["json"] + 10
        # system + 40 questions + 39 answers in inputs + 40 answers in outputs + 5 tools
        assert store.stats()["messages"] == 1 + 40 + 39 + 40 + 5


def test_a_prompt_that_forks_keeps_what_it_shares(tmp_path: Path) -> None:
    trace_id = new_trace()
    shared = list(range(300))
    prompts = [[*shared, 1, 2, 3], [*shared, 9, 9], shared[:10]]
    spans = [
        span(trace_id, rollout="r", start_ns=i, attributes={names.PROMPT_TOKEN_IDS: names.pack_ints(ids)})
        for i, ids in enumerate(prompts)
    ]
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request(spans))
        assert list(store.spans()) == spans
        lengths = store.query("SELECT len(new_prompt_token_ids) AS n FROM spans ORDER BY start_ns")
    assert [row["n"] for row in lengths] == [303, 2, 0]


@pytest.mark.parametrize("limit", [0, 2000])
def test_forgetting_recent_calls_changes_no_result(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "KNOWN_MESSAGES", limit)
    monkeypatch.setattr(lineage, "CACHED_SPANS", limit)
    monkeypatch.setattr(compact.Compactor.__init__, "__defaults__", (limit,))
    spans = [s for i in range(3) for s in conversation(new_trace(), f"r{i}", 6)]
    random.Random(0).shuffle(spans)
    with FileStore(tmp_path / "s.duckdb") as store:
        for one in spans:
            store.put_otlp(request([one]))
            assert store.put_otlp(request([one])) == 0
        stored = {s.span_id: s for s in store.spans()}
    assert stored == {s.span_id: s for s in spans}


def test_rollouts_of_one_call_do_not_push_out_those_that_grow() -> None:
    compactor = compact.Compactor(100_000)
    *first, third = conversation(new_trace(), "r", 3)
    for one in first:
        compactor.pack(one, "r")
    for number in range(60):
        for single in conversation(new_trace(), f"single-{number}", 1):
            compactor.pack(single, f"single-{number}")
    columns, _ = compactor.pack(third, "r")
    assert len(columns["new_prompt_token_ids"]) == 40


def test_the_same_batch_twice_is_stored_once_also_after_reopening(tmp_path: Path) -> None:
    body = request(conversation(new_trace(), "r", 5))
    with FileStore(tmp_path / "s.duckdb") as store:
        assert store.put_otlp(body + body) == 5  # protobuf messages concatenate
        assert store.put_otlp(body) == 0
    with FileStore(tmp_path / "s.duckdb") as store:
        assert store.put_otlp(body) == 0
        assert store.stats()["spans"] == 5


def family(rollout: str) -> list[Span]:
    """root (has the rollout) > child > grandchild, and a sibling of another rollout below the child."""
    trace_id = new_trace()
    root = span(trace_id, rollout=rollout, attempt=2, attributes={names.SPAN_ROLE: "rollout"}, start_ns=1)
    child = span(trace_id, parent=root.span_id, start_ns=2)
    reward = SpanEvent(names.REWARD_EVENT, 5, {names.REWARD_NAME: "tests", names.REWARD_VALUE: 0.5})
    grandchild = span(trace_id, parent=child.span_id, events=(reward,), start_ns=3)
    other = span(trace_id, parent=child.span_id, rollout=rollout + "-sub", attempt=0, start_ns=4)
    below = span(trace_id, parent=other.span_id, start_ns=5)
    return [root, child, grandchild, other, below]


@pytest.mark.parametrize("seed", range(6))
def test_spans_get_the_rollout_of_their_nearest_ancestor_in_any_order_of_arrival(
    tmp_path: Path, seed: int
) -> None:
    spans = family("r")
    arrival = random.Random(seed).sample(spans, len(spans))
    store = FileStore(tmp_path / "s.duckdb")
    for i, one in enumerate(arrival):
        if i == seed % 5:  # what was only in memory is gone
            store.close()
            store = FileStore(tmp_path / "s.duckdb")
        store.put_otlp(request([one]))
    owners = [(s.rollout_id, s.attempt) for s in store.spans(trace_ids=[spans[0].trace_id])]
    assert owners == [("r", 2), ("r", 2), ("r", 2), ("r-sub", 0), ("r-sub", 0)]
    (reward,) = store.rewards(["r"])
    assert (reward.value, reward.name, reward.author, reward.attempt, reward.call_id) == (
        0.5,
        "tests",
        RewardAuthor.AGENT,
        2,
        None,
    )
    store.put_otlp(request(spans))
    assert len(store.rewards()) == 1
    store.close()


def test_a_reward_event_on_a_model_call_is_for_that_call(tmp_path: Path) -> None:
    event = SpanEvent(names.REWARD_EVENT, 5, {names.REWARD_VALUE: 1})
    call = span(new_trace(), rollout="r", attributes={names.OPERATION_NAME: "chat"}, events=(event, event))
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request([call]))
        rewards = store.rewards(["r"])
    assert [(r.call_id, r.value) for r in rewards] == [(f"{call.trace_id}-{call.span_id}", 1.0)] * 2


def test_parents_in_a_circle_do_no_harm(tmp_path: Path) -> None:
    one = span(new_trace())
    two = span(one.trace_id, parent=one.span_id)
    owned = span(one.trace_id, rollout="r")
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request([replace(one, parent_span_id=two.span_id), two, owned]))
        assert len(list(store.spans(["r"]))) == 1


def test_a_rollout_that_nobody_enqueued_is_known_from_its_spans(tmp_path: Path) -> None:
    trace_id = new_trace()
    call = span(trace_id, rollout="r", attempt=0, start_ns=500)
    error = {names.SPAN_ROLE: "rollout", names.TASK_ID: "t", names.ERROR_TYPE: "KeyError"}
    root = span(trace_id, rollout="r", attempt=0, start_ns=400, attributes=error, status_code=2)
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request([call]))
        (rollout,) = store.rollouts()
        assert (rollout.status, rollout.split) == (RolloutStatus.RUNNING, "recorded")
        assert store.claim(worker="w") == []
        store.put_otlp(request([root]))
        (rollout,) = store.rollouts()
    assert (rollout.status, rollout.task_id, rollout.error_type) == (RolloutStatus.FAILED, "t", "KeyError")
    assert (rollout.started_ns, rollout.ended_ns) == (400, 410)


def test_spans_without_ids_are_left_out_and_garbage_is_refused(tmp_path: Path) -> None:
    good = span(new_trace())
    with FileStore(tmp_path / "s.duckdb") as store:
        assert (
            store.put_otlp(request([replace(good, trace_id="00" * 16), replace(good, span_id=""), good])) == 1
        )
        with pytest.raises(StoreError, match="no OTLP"):
            store.put_otlp(b"\xff\xff not protobuf")


def test_otlp_json_reads_hex_ids_numbers_as_text_and_bytes() -> None:
    value = {"kvlistValue": {"values": [{"key": "b", "value": {"bytesValue": "AQI="}}]}}
    one = {
        "traceId": "0AF7651916CD43DD8448EB211C80319C",
        "spanId": "b7ad6b7169203331",
        "parentSpanId": "",
        "name": "n",
        "kind": 3,
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": 1544712661000000000,
        "attributes": [{"key": "i", "value": {"intValue": "9"}}, {"key": "m", "value": value}],
        "links": [{"traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203332"}],
        "unknownField": 1,
    }
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}).encode()
    (back,), _ = decode_request(json_to_protobuf(body))
    assert back.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert (back.span_id, back.parent_span_id, back.kind) == ("b7ad6b7169203331", None, 3)
    assert (back.start_ns, back.end_ns) == (1544712660000000000, 1544712661000000000)
    assert back.attributes == {"i": 9, "m": {"b": b"\x01\x02"}}
    assert back.links[0]["span_id"] == "b7ad6b7169203332"
    for bad in (
        b"[]",
        b"nonsense",
        b'{"resourceSpans": 3}',
    ):
        with pytest.raises(StoreError, match="JSON"):
            json_to_protobuf(bad)
