"""What is wrong with files costs only itself, and is counted by kind with an example."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spangrad.adapters import trace_faults
from spangrad.adapters.ingest import NOT_TRACES, REPEATED, IngestReport, ingest
from spangrad.adapters.report import ADVICE
from spangrad.store.client import HubClient
from spangrad.store.faults import Faults, Outcome
from spangrad.store.file_store import OTHER_CONTENT, UNENDED, FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes
from tests.adapters.test_ingest import FIXTURES, MULTI_TURN, requests
from tests.store.hub_process import HubProcess
from tests.store.otlp_faults import (
    LEFT_OUT,
    MENDED,
    attribute,
    json_logs,
    json_request,
    json_span,
    wire_logs,
    wire_request,
)

S = 10**9
Kinds = dict[str, tuple[Outcome, int]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def kinds(report: IngestReport) -> Kinds:
    return {kind: (fault.outcome, fault.count) for kind, fault in report.faults.items()}


def jsonl(path: Path, *requests: Any) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in requests) + "\n")
    return path


def protobuf(path: Path, spans: Sequence[Span]) -> Path:
    path.write_bytes(encode_request(spans))
    return path


def names(store: FileStore) -> list[str]:
    return sorted(one.name for one in store.spans())


# one bad span


def test_a_bad_span_costs_neither_its_line_nor_its_request(store: FileStore, tmp_path: Path) -> None:
    spoiled = [more for more, _ in LEFT_OUT.values()]
    bad = [json_span(100 + number, **more) for number, more in enumerate(spoiled)]
    file = jsonl(
        tmp_path / "traces.jsonl", json_request(json_span(1), *bad, json_span(2)), json_request(json_span(3))
    )
    report = ingest([file], store)
    assert names(store) == ["span 1", "span 2", "span 3"]
    wanted = [kind for _, kind in LEFT_OUT.values()]
    assert kinds(report) == {kind: (Outcome.LEFT_OUT, wanted.count(kind)) for kind in wanted}
    assert report.faults["bad times"].example.startswith(f"{file}:1: span ")
    assert (report.spans, report.broken, report.broken_files) == (3, (), 0)
    assert json.dumps(report.to_json())


def test_what_could_be_mended_is_stored_and_counted(store: FileStore, tmp_path: Path) -> None:
    spans = [json_span(number, **more) for number, (more, _, _) in enumerate(MENDED.values(), start=1)]
    report = ingest([jsonl(tmp_path / "traces.jsonl", json_request(*spans))], store)
    assert [one.attributes["x"] for one in store.spans()] == [value for _, _, value in MENDED.values()]
    wanted = [kind for _, kind, _ in MENDED.values()]
    assert kinds(report) == {kind: (Outcome.MENDED, wanted.count(kind)) for kind in wanted}


def test_a_bad_span_costs_no_other_in_a_file_of_protobuf(store: FileStore, tmp_path: Path) -> None:
    file = tmp_path / "traces.pb"
    bodies = [wire_request(b"first", b"caf\xe9", b"last one"), wire_request(b"again")]
    file.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
    report = ingest([file], store)
    assert names(store) == ["caf\\xe9", "first", "last one"]
    assert kinds(report) == {
        "text that is no UTF-8": (Outcome.MENDED, 1),
        OTHER_CONTENT: (Outcome.LEFT_OUT, 1),
    }


def test_a_bad_log_record_costs_no_other(store: FileStore, tmp_path: Path) -> None:
    good = {"timeUnixNano": "5", "body": {"stringValue": "fine"}}
    file = jsonl(tmp_path / "logs.jsonl", json_logs(good, {**good, "timeUnixNano": "soon"}))
    packed = tmp_path / "logs.pb"
    packed.write_bytes(wire_logs(b"first", b"caf\xe9"))
    report = ingest([file, packed], store)
    assert report.logs == 3
    assert kinds(report) == {
        "bad times": (Outcome.LEFT_OUT, 1),
        "text that is no UTF-8": (Outcome.MENDED, 1),
    }


def test_rows_of_an_export_are_mended_and_counted_too(store: FileStore, tmp_path: Path) -> None:
    fixture = FIXTURES / "exports" / "agent_lightning" / "spans_v03.jsonl"
    row = json.loads(fixture.read_text().splitlines()[0])
    row["attributes"] |= {"big": 10**30, "text": "a\ud83d"}
    bad = {**row, "span_id": "288d"}
    file = jsonl(tmp_path / "spans.jsonl", row, bad)
    report = ingest([file], store)
    (kept,) = store.spans()
    assert (kept.attributes["big"], kept.attributes["text"]) == (str(10**30), "a\\ud83d")
    assert kinds(report) == {
        "lone surrogates": (Outcome.MENDED, 1),
        "integers beyond 64 bits": (Outcome.MENDED, 1),
        "bad ids": (Outcome.LEFT_OUT, 1),
        trace_faults.ORPHANS: (Outcome.KEPT, 1),
    }
    assert report.faults["bad ids"].example.startswith(f"{file}:2: ")


# lines and files


def test_half_lines_and_bad_lines_are_counted_apart(store: FileStore, tmp_path: Path) -> None:
    lines = MULTI_TURN.read_text().splitlines()
    file = tmp_path / "traces.jsonl"
    file.write_text(
        "\n".join(["no JSON at all", lines[0], lines[1][:-40], "{'a': 1}", lines[2], lines[3][:300]])
    )
    report = ingest([file], store)
    assert report.calls == 2
    assert kinds(report) == {"invalid JSON": (Outcome.LEFT_OUT, 2), "cut short": (Outcome.LEFT_OUT, 2)}
    assert report.faults["cut short"].example.startswith(f"{file}:3: ")


def test_of_a_cut_protobuf_file_the_messages_before_the_cut_are_read(
    store: FileStore, tmp_path: Path
) -> None:
    """Half a message is left out: it may lack what its spans are of, and the whole file can follow."""
    bodies = [wire_request(b"first"), wire_request(b"first", b"second")]
    whole = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    file = tmp_path / "traces.pb"
    file.write_bytes(whole[:-10])
    report = ingest([file], store)
    assert (names(store), kinds(report)) == (["first"], {"cut short": (Outcome.LEFT_OUT, 1)})
    file.write_bytes(whole)
    assert kinds(ingest([file], store)) == {REPEATED: (Outcome.KEPT, 2)}
    assert names(store) == ["first", "second"]
    file.write_bytes(bodies[0][:-10])
    assert ingest([file], store).broken_files == 1


def test_half_of_a_packed_file_gives_what_is_there(store: FileStore, tmp_path: Path) -> None:
    lines = MULTI_TURN.read_bytes().splitlines()
    file = tmp_path / "traces.jsonl.gz"
    many = [json.dumps(json_request(json_span(number, name="x" * 2000))).encode() for number in range(1, 200)]
    file.write_bytes(gzip.compress(b"\n".join([*lines, *many]))[:-100])
    report = ingest([file], store)
    assert report.calls == 4
    assert report.faults["cut short"].count == 1


def test_only_so_many_broken_lines_are_listed_and_all_are_counted(store: FileStore, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text("{broken\n" * 1500 + MULTI_TURN.read_text())
    report = ingest([file], store)
    assert (report.calls, len(report.broken)) == (4, 1000)
    assert sum(fault.count for fault in report.faults.values()) == 1500


UNREAD = {
    "table.csv": (b"id,input,output\n1,hi,hello\n2,ho,hallo\n", "comma-separated values (CSV)"),
    "table.tsv": (b"id\tinput\toutput\n1\thi\thello\n", "tab-separated values"),
    "quoted.csv": (b'id,text\n1,"a, b, c"\n', "comma-separated values (CSV)"),
    "prose.txt": (b"Well, it was fine.\nThe agent, as asked, did it, I think.\n", "plain text"),
    "notes.txt": ("Grüße\nThe agent was fine.\n".encode(), "plain text"),
    "latin.txt": (b"caf\xe9 au lait\n", "plain text"),
    "windows.jsonl": (MULTI_TURN.read_text().encode("utf-16"), "text in UTF-16; convert it"),
    "windows2.jsonl": (MULTI_TURN.read_text().encode("utf-16-le"), "text in UTF-16; convert it"),
    "garbage.gz": (b"\x1f\x8b\x08\x00 this is no gzip at all", "broken gzip"),
    "table.csv.gz": (gzip.compress(b"a,b\n1,2\n"), "comma-separated values (CSV), packed with gzip"),
    "empty.jsonl": (b"", "an empty file"),
    "blank.jsonl": (b"\n\n", "an empty file"),
    "page.html": (b"<!doctype html><html></html>", "HTML or XML"),
    "sheet.xlsx": (b"PK\x03\x04\x14\x00\x06\x00", "a zip archive; unpack it"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_is_not_read_is_told_in_plain_words(store: FileStore, tmp_path: Path, name: str) -> None:
    content, looks = UNREAD[name]
    (tmp_path / name).write_bytes(content)
    report = ingest([tmp_path / name], store)
    assert (report.broken_files, report.spans) == (1, 0)
    ((kind, fault),) = report.faults.items()
    assert (kind.startswith(f"{NOT_TRACES} {looks}"), fault.outcome, fault.count) == (
        True,
        Outcome.LEFT_OUT,
        1,
    )
    assert fault.example.startswith(f"{tmp_path / name}:1")


def test_a_folder_of_all_sorts_gives_what_is_in_it(store: FileStore, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, (content, _) in UNREAD.items():
        (folder / name).write_bytes(content)
    (folder / "traces.jsonl").write_bytes(MULTI_TURN.read_bytes())
    (folder / "traces.pb").write_bytes(requests()[0])
    jsonl(
        folder / "chat.jsonl",
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    )
    report = ingest([folder], store)
    assert (report.calls, report.broken_files) == (5, len(UNREAD))
    unread = [fault.count for kind, fault in report.faults.items() if kind.startswith(NOT_TRACES)]
    assert (sum(unread), kinds(report)[REPEATED]) == (len(UNREAD), (Outcome.KEPT, 1))


def test_a_small_protobuf_request_is_not_taken_for_json(store: FileStore, tmp_path: Path) -> None:
    """Its second byte is a length, and 123 of them is an opening brace, 91 a bracket."""
    for length in (91, 123):
        body = next(
            body for n in range(1, 99) if (body := wire_request(b"x" * n))[1] == length and len(body) < 128
        )
        (tmp_path / "request.bin").write_bytes(body)
        assert ingest([tmp_path / "request.bin"], store).spans == 1


# traces


def test_odd_traces_are_kept_and_counted_with_an_example(store: FileStore, tmp_path: Path) -> None:
    def at(name: str, begin_s: int, end_s: int, parent: str | None = None, trace: str = "1") -> Span:
        return span(name, trace=trace, parent=parent, start_ns=begin_s * S, end_ns=end_s * S)

    spans = [
        at("root", 100, 200),
        at("back", 150, 140, "root"),
        at("early", 90, 95, "root"),
        at("late", 210, 211, "root"),
        at("bit", 204, 205, "root"),
        at("longer", 199, 400, "root"),
        at("orphan", 100, 101, "none"),
        at("own", 100, 101, "own"),
        at("x", 100, 101, "y"),
        at("y", 100, 101, "x"),
        at("below", 100, 101, "x"),
        replace(at("zero", 100, 101), parent_span_id="0" * 16),
        replace(at("absurd", 100, 101, "root"), end_ns=2**64 - 1),
        at("else", 100, 101, "root", trace="2"),
        replace(at("big", 100, 101, "root"), attributes={"x": "y" * (2**20 + 1), "z": "y" * 2**20}),
    ]
    report = ingest([protobuf(tmp_path / "traces.pb", spans)], store)
    assert kinds(report) == {
        kind: (Outcome.KEPT, count)
        for kind, count in (
            (trace_faults.NEGATIVE, 1),
            (trace_faults.SKEW, 2),
            (trace_faults.ORPHANS, 2),
            (trace_faults.OWN_PARENTS, 1),
            (trace_faults.CYCLES, 2),
            (trace_faults.ABSURD, 1),
            (trace_faults.OVERSIZED, 1),
        )
    }
    assert "begins 10 s before its parent" in report.faults[trace_faults.SKEW].example
    assert report.faults[trace_faults.NEGATIVE].example.endswith("of -10 s")
    assert "'x' has 1048577" in report.faults[trace_faults.OVERSIZED].example
    assert len(list(store.spans())) == len(spans)


def test_calls_in_a_circle_of_parents_are_read(store: FileStore, tmp_path: Path) -> None:
    parents = (("a", "b"), ("b", "a"), ("own", "own"), ("below", "own"))
    spans = [
        span(name, parent=parent, attributes=text_attributes(**{c.RESPONSE_ID: name}))
        for name, parent in parents
    ]
    report = ingest([protobuf(tmp_path / "traces.pb", spans)], store)
    assert (report.calls, report.by_grade) == (4, {"text": 4})
    assert kinds(report) == {
        trace_faults.CYCLES: (Outcome.KEPT, 2),
        trace_faults.OWN_PARENTS: (Outcome.KEPT, 1),
    }


@pytest.mark.slow
def test_an_attribute_of_50_megabytes_is_stored_whole(store: FileStore, tmp_path: Path) -> None:
    text = "long " * (10 * 2**20)
    file = jsonl(
        tmp_path / "traces.jsonl",
        json_request(json_span(1), json_span(2, **attribute({"stringValue": text}))),
    )
    report = ingest([file], store)
    assert [one.attributes.get("x") for one in store.spans()] == [None, text]
    assert kinds(report) == {trace_faults.OVERSIZED: (Outcome.KEPT, 1)}


@pytest.mark.slow
def test_what_a_hub_does_not_take_at_once_is_sent_in_parts(tmp_path: Path) -> None:
    """The hub takes 64 MiB: spans of 40 and 66 have to go one by one, and the second one not even so."""
    sizes = {"a": 40 * 2**20, "b": 66 * 2**20, "c": 1}
    spans = [span(name, attributes={"x": name * size}) for name, size in sizes.items()]
    with HubProcess(tmp_path / "hub.duckdb") as process, HubClient(process.url, timeout_s=120) as client:
        report = ingest([protobuf(tmp_path / "traces.pb", spans)], client)
        found = [len(one.attributes["x"]) for one in client.spans()]
    assert sorted(found) == [1, 40 * 2**20]
    assert kinds(report) == {
        "spans that are too large for the hub": (Outcome.LEFT_OUT, 1),
        trace_faults.OVERSIZED: (Outcome.KEPT, 1),
    }


def test_orphans_whose_parent_comes_later_are_none(store: FileStore, tmp_path: Path) -> None:
    parent, child = span("a"), span("b", parent="a")
    first = ingest([protobuf(tmp_path / "child.pb", [child])], store)
    assert kinds(first) == {trace_faults.ORPHANS: (Outcome.KEPT, 1)}
    assert kinds(ingest([protobuf(tmp_path / "parent.pb", [parent])], store)) == {}


def test_a_long_chain_of_parents_costs_no_more_than_its_length(store: FileStore) -> None:
    spans = [span(f"s{n}", parent=f"s{n + 1}") for n in range(20_000)]
    found = Faults()
    trace_faults.count_faults(spans, [], found)
    assert list(found) == [trace_faults.ORPHANS]


def test_the_same_span_again_and_the_same_id_with_other_content_are_counted_apart(
    store: FileStore, tmp_path: Path
) -> None:
    one = span("a", attributes=text_attributes())
    other = replace(one, attributes=text_attributes(**{c.RESPONSE_ID: "r2"}))
    first = ingest([protobuf(tmp_path / "a.pb", [one, one, other])], store)
    assert kinds(first) == {OTHER_CONTENT: (Outcome.LEFT_OUT, 1), REPEATED: (Outcome.KEPT, 1)}
    assert one.span_id in first.faults[OTHER_CONTENT].example
    assert (first.spans, first.new_spans, first.calls) == (3, 1, 1)
    again = ingest([protobuf(tmp_path / "b.pb", [other, span("b")])], store)
    assert kinds(again) == {OTHER_CONTENT: (Outcome.LEFT_OUT, 1)}
    assert [found.attributes[c.RESPONSE_ID] for found in store.spans() if found.attributes] == ["r1"]


def test_a_span_that_comes_whole_after_it_was_stored_without_an_end_is_told_apart(
    store: FileStore, tmp_path: Path
) -> None:
    rows = (FIXTURES / "exports/langfuse/observations_v2.jsonl").read_text().splitlines()
    whole = json.loads(rows[0]) | {"parent_observation_id": None}
    (tmp_path / "early.jsonl").write_text(json.dumps(whole | {"output": None, "end_time": None}))
    (tmp_path / "late.jsonl").write_text(json.dumps(whole))
    first, again = (ingest([tmp_path / name], store) for name in ("early.jsonl", "late.jsonl"))
    assert (kinds(first), first.by_reason) == ({}, {"no output was recorded": 1})
    assert kinds(again) == {UNENDED: (Outcome.LEFT_OUT, 1)}
    assert "new store" in UNENDED and "new store" in ADVICE["no output was recorded"]


def test_calls_in_an_unknown_dialect_are_shown_beside_known_ones(store: FileStore, tmp_path: Path) -> None:
    own = {"llm_vendor.model": "m", "llm_vendor.prompt": "hi", "llm_vendor.completion": "ho"}
    spans = [
        span("a", attributes=text_attributes()),
        span("b", scope="acme.tracing", attributes={c.OPERATION_NAME: "chat"}),
        span("c", scope="acme.llm", attributes=own),
        span("d", scope="acme.http", attributes={"http.request.method": "POST", "device.model.name": "x"}),
    ]
    report = ingest([protobuf(tmp_path / "traces.pb", spans)], store)
    assert report.by_dialect == {"spangrad": 1, "no dialect": 2}
    assert kinds(report) == {trace_faults.UNKNOWN_DIALECT: (Outcome.KEPT, 2)}
    assert "acme." in report.faults[trace_faults.UNKNOWN_DIALECT].example
