"""What goes out comes in as it was: own formats through files, rows of other systems through a store."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from spangrad.adapters.calls import calls_of
from spangrad.adapters.exports import langfuse, langsmith
from spangrad.adapters.exports.formats import format_of
from spangrad.adapters.exports.rows import Row, rows
from spangrad.adapters.ingest import ingest
from spangrad.adapters.model_call import ModelCall
from spangrad.cli import app
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.tracer import conventions as c
from tests.adapters import picnic
from tests.adapters.building import span, text_attributes, token_attributes
from tests.adapters.captured import FIXTURES

FEW = settings(max_examples=10)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def stored(store: Path, *files: Path) -> list[ModelCall]:
    with FileStore(store) as opened:
        report = ingest(files, opened)
        assert (report.unknown_rows, report.broken) == (0, ())
        return calls_of(opened)


def export(out: Path, form: str, store: Path, *options: str) -> Path:
    command = ["export", str(out), "--format", form, "--store", str(store), *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
arguments = st.dictionaries(words, st.none() | st.booleans() | st.integers(-9, 9) | words, max_size=2)
spellings = st.tuples(
    arguments, st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]), st.booleans()
).map(lambda told: json.dumps(told[0], separators=told[1], ensure_ascii=told[2]))


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation of text and tool calls, their arguments spelled in any way."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}] * draw(st.integers(0, 1))
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for number in range(draw(st.integers(0, 2))):
            calls = [
                {
                    "id": f"call_{turn}_{number}_{which}",
                    "type": "function",
                    "function": {
                        "name": draw(st.sampled_from(["look", "convert"])),
                        "arguments": draw(spellings),
                    },
                }
                for which in range(draw(st.integers(1, 2)))
            ]
            messages.append({"role": "assistant", "content": draw(st.none() | words), "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(words)} for call in calls
            ]
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


def told(calls: list[ModelCall]) -> list[Any]:
    """What calls say, byte for byte; content that is absent in either of two ways is absent."""
    return sorted(
        json.dumps(
            [
                [
                    _said(message)
                    for message in (*call.messages, {**call.choices[0].message, "role": "assistant"})
                ],
                [tool["function"] for tool in call.tools],
            ]
        )
        for call in calls
    )


def _said(message: Any) -> Any:
    kept = {key: message.get(key) or None for key in ("role", "content", "tool_call_id")}
    return [kept, [call["function"] | {"id": call["id"]} for call in message.get("tool_calls") or ()]]


@FEW
@given(st.lists(conversations(), min_size=1, max_size=3, unique_by=json.dumps))
def test_chat_that_went_in_comes_out_as_chat_and_in_again(drawn: list[list[dict[str, Any]]]) -> None:
    with folder() as at:
        sent = [{"messages": messages, "tools": picnic.TOOL_DEFINITIONS} for messages in drawn]
        (at / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sent))
        first = stored(at / "first.duckdb", at / "chat.jsonl")
        out = export(at / "out", "messages", at / "first.duckdb", "--keep-secrets", "--keep-repeats")
        second = stored(at / "second.duckdb", out / "train.jsonl")
        assert len(first) == sum(message["role"] == "assistant" for messages in drawn for message in messages)
        assert set(told(second)) == set(told(first))  # one may begin another, and is then told with it


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@FEW
@given(st.lists(st.tuples(st.integers(0, 5), ids, ids, st.booleans()), min_size=1, max_size=8))
def test_transitions_hold_every_sampled_token_with_what_is_known_of_it(
    drawn: list[tuple[int, list[int], list[int], bool]],
) -> None:
    """Each call goes on from an earlier one, or begins anew; rows are read back with nothing but Parquet."""
    named = {c.ROLLOUT_ID: "r"}
    spans, known = [span("root", attributes={**named, c.SPAN_ROLE: "rollout"})], {}
    sequences: list[list[int]] = [[]]
    for number, (earlier, more, reply, is_fresh) in enumerate(drawn):
        prompt = more if is_fresh else [*sequences[earlier % len(sequences)], *more]
        logprobs = [-(number + place + 1) / 8 for place in range(len(reply))]
        attributes = token_attributes(prompt, reply, logprobs, version=number)
        attributes |= {**named, c.RESPONSE_ID: f"r{number}"}
        one = span(f"s{number}", start_ns=20 * number, attributes=text_attributes(**attributes))
        spans.append(one)
        known[one.span_id] = (prompt, reply, logprobs, number)
        sequences.append([*prompt, *reply])
    with folder() as at:
        (at / "traces.pb").write_bytes(encode_request(spans))
        stored(at / "store.duckdb", at / "traces.pb")
        out = export(at / "out", "transitions", at / "store.duckdb", "--clone", "--keep-secrets")
        found = pq.read_table(out / "train.parquet").to_pylist()
    seen = []
    for row in found:
        mask = [False] * len(row["token_ids"])
        for segment in row["segments"]:
            prompt, reply, logprobs, version = known[segment["span_id"]]
            start, stop = segment["start"], segment["stop"]
            assert row["token_ids"][:stop] == [*prompt, *reply]
            assert row["behavior_logprobs"][start:stop] == logprobs
            assert row["policy_versions"][start:stop] == [version] * len(reply)
            assert row["advantages"][start:stop] == [1.0] * len(reply)
            mask[start:stop] = [True] * len(reply)
            seen.append(segment["span_id"])
        assert row["action_mask"] == mask
        assert [value is None for value in row["behavior_logprobs"]] == [not own for own in mask]
    assert sorted(seen) == sorted(known)
    assert sum(row["loss_weight"] * sum(row["action_mask"]) for row in found) == pytest.approx(1.0)


FILES = [
    path
    for name in ("agent_lightning", "langfuse", "langsmith", "phoenix", "plain_chat")
    for path in sorted((FIXTURES / "exports" / name).rglob("*.*"))
] + sorted((FIXTURES / "mlflow_json").glob("*.jsonl"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [dict(row.value) for row, _ in rows(path) if isinstance(row, Row)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_spans_of_an_export_are_in_the_store_as_they_were_made(tmp_path: Path, path: Path) -> None:
    """Each format's own tests show that its spans give the row back, as far as they say so."""
    made = {
        (one.trace_id, one.span_id): one
        for row in rows_of(path)
        if (form := format_of(row)) is not None
        for one in form.spans_of(row)
    }
    with FileStore(tmp_path / "store.duckdb") as store:
        assert ingest([path], store).unknown_rows == 0
        found = {(one.trace_id, one.span_id): one for one in store.spans()}
    assert found.keys() == made.keys()
    assert encode_request(found.values()) == encode_request(made[key] for key in found)


columns = st.dictionaries(
    st.sampled_from(
        ["input", "output", "metadata", "comment", "inputs", "outputs", "extra", "tags", "été", "x"]
    ),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=5,
)
LANGFUSE = {
    "trace_id": "t",
    "type": "GENERATION",
    "start_time": "2026-11-29 15:20:00.000000",
    "level": "DEFAULT",
}
LANGSMITH = {"trace_id": "t", "run_type": "llm", "start_time": "2026-11-29T15:20:00"}


@FEW
@pytest.mark.parametrize(
    ("system", "fixed"), [(langfuse, LANGFUSE), (langsmith, LANGSMITH)], ids=["langfuse", "langsmith"]
)
@given(drawn=st.lists(columns, min_size=1, max_size=4))
def test_any_row_of_a_system_comes_out_of_the_store_as_it_went_in(
    system: Any, fixed: Any, drawn: Any
) -> None:
    sent = {f"row-{number}": {"id": f"row-{number}", **fixed, **more} for number, more in enumerate(drawn)}
    with folder() as at:
        (at / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sent.values()))
        with FileStore(at / "store.duckdb") as store:
            assert ingest([at / "rows.jsonl"], store).broken == ()
            found = [system.original(one) for one in store.spans()]
    assert {row["id"]: row for row in found} == sent
