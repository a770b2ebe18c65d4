"""Files of exports -> rows, one at a time.

Reads JSON lines, one JSON array, a page of an API (`{"data": [...]}`), one JSON object, Parquet; each also
packed with gzip or zstd, and below folders of Hive partitions. Knows framing; knows no system's rows.

Invariants:
* a row at a time is in memory, and of Parquet a batch; only a single object that is no page is read whole;
* a row that can't be parsed is a `Broken` with its line, and what follows it is still read;
* a string stays what was written: nothing is replaced, a row that is no UTF-8 is broken.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from spangrad.adapters.exports.json_elements import Elements, NotJson
from spangrad.errors import DialectError

PARQUET_MAGIC: Final = b"PAR1"
GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
BOM: Final = b"\xef\xbb\xbf"
HEAD_BYTES: Final = 64 * 2**10
BATCH_ROWS: Final = 64
CUT_SHORT: Final = "cut short"
NO_JSON: Final = "invalid JSON"
PAGE_KEYS: Final = ("data", "runs", "traces")
"""Where APIs put the rows of a page."""
_SCALAR: Final = rb'(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)'
_PAGE: Final = re.compile(
    rb'\{\s*(?:"(?:[^"\\]|\\.)*"\s*:\s*' + _SCALAR + rb'\s*,\s*)*"(?:data|runs|traces)"\s*:\s*\[\s*(?=[{\]])'
)
"""A page whose list comes before anything that is itself a list or an object."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    line: int
    """Line that it begins on; of Parquet, number of the row. From 1."""
    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Broken:
    """A row or message that could not be read."""

    path: str
    line: int
    """Line of a JSON file, number of the row or message in a binary one; from 1."""
    reason: str
    """`kind: detail`."""

    @property
    def kind(self) -> str:
        """What reports count it as."""
        return self.reason.partition(": ")[0]

    @property
    def detail(self) -> str:
        """What is behind that, if anything."""
        return self.reason.partition(": ")[2]


def rows(path: Path) -> Iterator[tuple[Row | Broken, int]]:
    """Every row of a file, each with the position in bytes behind which nothing has been read yet.

    Raises:
        DialectError: The file can't be opened.
    """
    try:
        file = path.open("rb", buffering=HEAD_BYTES)
    except OSError as error:
        raise DialectError(
            f"can't read {str(path)!r}: {error.strerror}; expected a file of traces"
        ) from error
    with file:
        if file.read(4) == PARQUET_MAGIC:
            yield from _parquet(path, file)
            return
        partition = _partition(path)
        for found in _json_rows(path, unpacked(file)):
            if partition and isinstance(found, Row):
                found = Row(found.line, {**partition, **found.value})
            yield found, file.tell()


def unpacked(file: BinaryIO) -> BinaryIO:
    """The content of a file from its beginning, whether packed with gzip, with zstd or not."""
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(GZIP_MAGIC):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if magic == ZSTD_MAGIC:
        return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))
    return file


def json_problem(error: Exception) -> str:
    """Why JSON could not be read: whether it ends too early, or is none."""
    if isinstance(error, json.JSONDecodeError):
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        return f"{CUT_SHORT if is_cut else NO_JSON}: {error}"
    return f"{NO_JSON}: {error}"


def packing_problem(error: Exception) -> str:
    """Why a packed file could not be read to its end."""
    return f"{CUT_SHORT if isinstance(error, EOFError) else 'broken compression'}: {error}"


def _json_rows(path: Path, file: BinaryIO) -> Iterator[Row | Broken]:
    line = 1
    try:
        buffered = (
            file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(Any, file), HEAD_BYTES)
        )
        head = _head(buffered)
        if head.startswith(b"["):
            elements = Elements(buffered, after=b"[")
            yield from _elements(path, elements)
            yield from _behind(path, elements)
        elif page := _PAGE.match(head):
            elements = Elements(buffered, after=page.group())
            yield from _elements(path, elements)
            elements.skip_object()
            yield from _behind(path, elements)
        elif _is_one_object(head):
            yield from _parsed(path, 1, buffered.read())
        else:
            for line, text in enumerate(buffered, start=1):
                if text.strip():
                    yield from _parsed(path, line, text)
    except (EOFError, OSError, zlib.error, pa.ArrowException) as error:
        yield Broken(str(path), line, packing_problem(error))


def _head(file: io.BufferedReader) -> bytes:
    """The first bytes, blanks before them skipped."""
    head = file.peek(HEAD_BYTES)
    if head.startswith(BOM):
        file.read(len(BOM))
        head = head[len(BOM) :]
    blanks = len(head) - len(head.lstrip())
    return file.peek(HEAD_BYTES)[blanks:] if blanks else head


def _is_one_object(head: bytes) -> bool:
    """Whether a file is one object over many lines: the first line is none, and the second begins none."""
    first, _, rest = head.partition(b"\n")
    if not first.startswith(b"{") or not rest:
        return False
    return not first.rstrip().endswith(b"}") and not rest.lstrip().startswith(b"{")


def _elements(path: Path, elements: Elements) -> Iterator[Row | Broken]:
    for line, value in elements:
        if isinstance(value, NotJson):
            yield Broken(str(path), line, value.reason)
        elif isinstance(value, dict):
            yield Row(line, value)
        else:
            yield Broken(str(path), line, f"no object: {value!r:.40}")


def _behind(path: Path, elements: Elements) -> Iterator[Row | Broken]:
    """Rows behind a list or a page: further pages, a line each."""
    for line, text in elements.lines_behind():
        yield from _parsed(path, line, text)


def _parsed(path: Path, line: int, text: bytes) -> Iterator[Row | Broken]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield Broken(str(path), line, json_problem(error))
        return
    if not isinstance(value, dict):
        yield Broken(str(path), line, f"no object: {value!r:.40}")
        return
    page = next((value[key] for key in PAGE_KEYS if _is_rows(value.get(key))), None)
    for each in [value] if page is None else page:
        yield Row(line, each)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _partition(path: Path) -> dict[str, str]:
    """Columns that are in the names of folders only (`session_id=.../year=2026/part-0.parquet`)."""
    pairs = (part.partition("=") for part in path.parts[:-1])
    return {key: value for key, found, value in pairs if found and key.isidentifier()}


def _parquet(path: Path, file: IO[bytes]) -> Iterator[tuple[Row | Broken, int]]:
    size = path.stat().st_size
    partition = _partition(path)
    number = 0
    try:
        table = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        total = max(table.metadata.num_rows, 1)
        for batch in table.iter_batches(batch_size=BATCH_ROWS):
            for value in batch.to_pylist():
                number += 1
                yield Row(number, partition | value), size * number // total
    except (pa.ArrowException, OSError, ValueError) as error:
        yield Broken(str(path), number + 1, f"broken Parquet: {error}"), size
