"""What a file looks like: OTLP, rows of an export, or something that is not read.

Knows the first bytes of files, unpacked; reads no rows. Invariants:
* JSON lines stay JSON lines when their first line is broken;
* what is not read is told in words that somebody knows who has the file before them.
"""

import zlib
from enum import Enum, auto
from pathlib import Path
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.adapters.exports.rows import GZIP_MAGIC, PARQUET_MAGIC, ZSTD_MAGIC, unpacked
from spangrad.errors import DialectError

PACKING_ERRORS: Final = (EOFError, OSError, zlib.error, pa.ArrowException)
HEAD_BYTES: Final = 64 * 2**10
READ: Final = (
    "read are OTLP traces and logs (JSON lines, JSON, protobuf) and exports of Langfuse, LangSmith, Phoenix, "
    "MLflow and others (JSON, JSON lines, Parquet), also packed with gzip or zstd"
)
EMPTY: Final = "an empty file"
PLAIN_TEXT: Final = "plain text"
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_MARK_AND_BLANK: Final = b"\xef\xbb\xbf \t\r"
_OTLP_MARKS: Final = (b'"resourceSpans"', b'"resourceLogs"', b'"resourceMetrics"', b'"resourceProfiles"')
_MAGICS: Final = (
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (8, b"DUCK", "a DuckDB database"),
    (0, b"PK\x03\x04", "a zip archive; unpack it (a spreadsheet is one, too; export it as JSON)"),
    (257, b"ustar", "a tar archive; unpack it"),
    (4, b"1AY&SY", "packed with bzip2; unpack it"),
    (0, b"\xfd7zXZ\x00", "packed with xz; unpack it"),
    (0, b"%PDF-", "a PDF"),
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"Obj\x01", "Avro; export it as JSON lines or Parquet"),
    (0, b"ARROW1", "an Arrow file; export it as Parquet"),
)
"""Where it stands, what stands there, what such a file is."""
_UTF16: Final = "text in UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`"
_CONTROL: Final = bytes(code for code in range(32) if code not in b"\t\n\r\f\x1b")
"""Bytes that no text has, and every protobuf message that holds another one."""
_CSV: Final = "comma-separated values (CSV)"
_SEPARATORS: Final = ((b",", _CSV), (b";", _CSV), (b"\t", "tab-separated values"))
_SUFFIXES: Final = {".csv": _CSV, ".tsv": "tab-separated values"}


class Framing(Enum):
    """How a file is to be read."""

    OTLP = auto()
    ROWS = auto()
    UNREAD = auto()


def framing(path: Path) -> tuple[Framing, str]:
    """How to read a file, and of one that is not read, what it looks like.

    Raises:
        DialectError: The file can't be opened.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            try:
                head = unpacked(file).read(HEAD_BYTES)
            except PACKING_ERRORS as error:
                return Framing.UNREAD, f"broken {_packing(magic)}: {error}"
    except OSError as error:
        raise DialectError(
            f"can't read {str(path)!r}: {error.strerror}; expected a file of traces"
        ) from error
    kind, looks = _framing(head)
    packing = _packing(magic)
    if looks == PLAIN_TEXT:
        looks = next((name for suffix, name in _SUFFIXES.items() if suffix in path.suffixes), looks)
    return kind, f"{looks}, packed with {packing}" if looks and packing else looks


def _framing(head: bytes) -> tuple[Framing, str]:
    text = head.lstrip(_BLANK)
    if head.startswith(PARQUET_MAGIC):
        return Framing.ROWS, ""
    if not text:
        return Framing.UNREAD, EMPTY
    if looks := next((name for at, magic, name in _MAGICS if head[at:].startswith(magic)), None):
        return Framing.UNREAD, looks
    if _is_utf16(head):
        return Framing.UNREAD, _UTF16
    if not is_json(head):
        return (Framing.UNREAD, _text_kind(text)) if _is_text(head) else (Framing.OTLP, "")
    return (Framing.OTLP if _has_marks(head) and not text.startswith(b"[") else Framing.ROWS), ""


def is_json(head: bytes) -> bool:
    """Whether a file that begins so holds JSON, also behind a first line that is broken.

    A protobuf request begins with a line feed, and with a brace behind it if it is 123 bytes long.
    """
    if head.lstrip(_MARK_AND_BLANK).startswith((b"{", b"[")):
        return True
    if not _is_text(head):
        return False
    text = head.lstrip(_BLANK)
    if text.startswith(b"[") or any(line.startswith(b"{") for line in text.splitlines()):
        return True
    return b"\n" not in text and b'":' in text  # in the middle of a long line


def _is_text(head: bytes) -> bool:
    return head.translate(None, _CONTROL) == head


def _has_marks(head: bytes) -> bool:
    return any(mark in head for mark in _OTLP_MARKS)


def _is_utf16(head: bytes) -> bool:
    """Whether it is marked as such, or every other byte of it is zero."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return True
    even, odd = head[:200:2], head[1:200:2]
    return len(odd) > 1 and ((not any(even) and b"\x00" not in odd) or (not any(odd) and b"\x00" not in even))


def _text_kind(text: bytes) -> str:
    lines = [line for line in text.splitlines()[:10] if line.strip()]
    if text.startswith((b"<", b"<!")):
        return "HTML or XML"
    if text.startswith(b"data:"):
        return "a recorded stream (server-sent events), not traces"
    for separator, name in _SEPARATORS:
        counts = {line.count(separator) for line in lines}
        if len(lines) > 1 and len(counts) == 1 and min(counts) > 0:
            return name
    return PLAIN_TEXT


def _packing(magic: bytes) -> str:
    if magic.startswith(GZIP_MAGIC):
        return "gzip"
    return "zstd" if magic == ZSTD_MAGIC else ""
