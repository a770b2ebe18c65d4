"""Files of exports, row by row: every framing, broken rows by line, no more in memory than a row."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.exports.rows import Broken, Row, rows
from spangrad.errors import DialectError
from tests.adapters.captured import FIXTURES

EXPORTS = FIXTURES / "exports"
ROWS = [
    {"id": 1, "text": "café 🍞"},
    {"id": 2, "text": 'brackets ]} and "quotes" \\'},
    {"id": 3, "deep": [{}]},
]
BAD_ELEMENTS = [json.dumps(ROWS[0]), '{"a": nul}', "17", *map(json.dumps, ROWS[1:])]


def values(path: Path) -> list[Any]:
    return [found.value for found, _ in rows(path) if isinstance(found, Row)]


def broken(path: Path) -> list[Broken]:
    return [found for found, _ in rows(path) if isinstance(found, Broken)]


def lines(items) -> str:
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items)


FRAMINGS = {
    "lines": lines(ROWS),
    "lines with blanks": "\n\n" + lines(ROWS).replace("\n", "\r\n\r\n") + "\n",
    "array": json.dumps(ROWS),
    "array over lines": "\n " + json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n",
    "page": json.dumps({"object": "list", "n": 3, "data": ROWS, "meta": {"next": [1]}}),
    "page over lines": json.dumps({"data": ROWS, "meta": {"next": "x"}}, indent=2),
    "page, the list last": json.dumps({"meta": {"next": "x"}, "data": ROWS}),
    "a page a line": lines([{"data": ROWS[:2], "next": 1}, {"data": ROWS[2:], "next": None}]),
    "with a byte order mark": "\ufeff" + lines(ROWS),
}


@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
@pytest.mark.parametrize("framing", FRAMINGS)
def test_every_framing_gives_the_same_rows(tmp_path, framing, packing):
    body = FRAMINGS[framing].encode()
    if packing == "gzip":
        body = gzip.compress(body[:20]) + gzip.compress(body[20:])  # two members, as appended files have
    elif packing == "zstd":
        body = pa.compress(body, "zstd", asbytes=True)
    file = tmp_path / "export.bin"
    file.write_bytes(body)
    assert values(file) == ROWS
    assert broken(file) == []


def test_real_exports_are_read_whole():
    counts = {path.name: len(values(path)) for path in sorted(EXPORTS.rglob("*.*")) if path.is_file()}
    assert counts["ui_export.json"] == 4
    assert counts["api_v2_observations_page.json"] == 6
    assert counts["observations_v2.jsonl"] == 48
    assert counts["spans_otlpv1.json"] == counts["spans_api.jsonl"] == 33
    assert counts["spans_dataframe_jsonified.parquet"] == 33


def test_one_object_over_lines_is_one_row(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"info": {"id": 1}, "data": {"spans": []}}, indent=2))
    assert values(file) == [{"info": {"id": 1}, "data": {"spans": []}}]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (f'{lines(ROWS[:1])}\n{{"cut\n[1]\n{lines(ROWS[1:])}', [2, 3]),
        ('{"cut": \n' + lines(ROWS), [1]),
        ("[\n" + ",\n".join(BAD_ELEMENTS) + "]", [3, 4]),
        (json.dumps(ROWS)[:-1], [1]),
        (json.dumps(ROWS)[:-1] + ', {"id": 4, "te', [1, 1]),
        (f"{json.dumps(ROWS)}\nrubbish", [2]),
    ],
    ids=["lines", "the first line", "array", "array without end", "array cut off", "text behind an array"],
)  # fmt: skip
def test_what_is_broken_is_told_with_its_line_and_costs_no_other(tmp_path, text, numbers):
    file = tmp_path / "export.json"
    file.write_text(text)
    assert values(file) == ROWS
    assert [each.line for each in broken(file)] == numbers


@pytest.mark.parametrize("framing", ["lines", "array"])
def test_what_is_no_utf8_is_broken_and_not_replaced(tmp_path, framing):
    file = tmp_path / "export.json"
    file.write_bytes(FRAMINGS[framing].encode().replace(b"caf", b"caf\xff"))
    assert values(file) == ROWS[1:]
    assert len(broken(file)) == 1


def test_a_packed_file_that_was_cut_off_gives_what_is_there(tmp_path):
    many = [{"id": i, "noise": f"{i * 7919 % 104729:x}" * 9} for i in range(5000)]
    for name, body in (
        ("a.gz", gzip.compress(lines(many).encode())),
        ("a.zst", pa.compress(lines(many).encode(), "zstd", asbytes=True)),
    ):
        file = tmp_path / name
        file.write_bytes(body[: len(body) // 2])
        found = values(file)
        assert found == many[: len(found)]
        assert broken(file)


def test_parquet_is_read_by_batches_with_what_folders_are_named(tmp_path):
    folder = tmp_path / "session_id=p1" / "year=2026"
    folder.mkdir(parents=True)
    file = folder / "part-0.parquet"
    pq.write_table(pa.table({"id": list(range(500)), "year": [7] * 500}), file, row_group_size=100)
    found = values(file)
    assert [row["id"] for row in found] == list(range(500))
    assert found[0] == {"session_id": "p1", "year": 7, "id": 0}  # what the row says itself is believed
    file.write_bytes(file.read_bytes()[:-9])
    assert broken(file)[0].reason.startswith("broken Parquet")


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(DialectError, match=r"nothing\.jsonl"):
        next(rows(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize("framing", ["lines", "array", "page"])
def test_a_large_file_needs_no_memory_of_its_size(tmp_path, framing):
    file = tmp_path / "large.json"
    row = json.dumps({"text": "x" * 10_000})
    begin, between, end = {
        "lines": ("", "\n", ""),
        "array": ("[", ",", "]"),
        "page": ('{"data":[', ",", "]}"),
    }[framing]
    with file.open("w") as out:
        out.write(begin + row)
        for _ in range(4000):
            out.write(between + row)
        out.write(end)
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows(file)) == 4001
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20 < file.stat().st_size
    finally:
        tracemalloc.stop()


def test_an_element_larger_than_a_chunk_is_read(tmp_path):
    file = tmp_path / "large.json"
    large = [{"text": "é" * 3_000_000}, {"id": 2}]
    file.write_text(json.dumps(large, ensure_ascii=False))
    assert values(file) == large


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    items=st.lists(st.dictionaries(st.text(), _JSON, min_size=1, max_size=3), max_size=4),
    indent=st.none() | st.just(2),
)
def test_an_array_is_read_as_json_has_it(tmp_path_factory, items, indent):
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps(items, indent=indent))
    assert values(file) == items


@given(noise=st.text('[]{},:"\\ \n1an', max_size=30), at=st.integers(0, 40))
def test_noise_in_an_array_never_raises_and_ends(tmp_path_factory, noise, at):
    file = tmp_path_factory.getbasetemp() / "noise.json"
    text = json.dumps([{"a": 1}, {"b": [2, "x"]}, {"c": {}}])
    file.write_text(text[:at] + noise + text[at:])
    assert all(isinstance(found, Row | Broken) for found, _ in rows(file))
