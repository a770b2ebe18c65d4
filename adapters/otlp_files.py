"""OTLP files -> export requests of spans and of log records, one after the other.

Reads what the OpenTelemetry Collector's file exporter writes: JSON lines (one export
request a line), length-delimited protobuf (4 bytes big-endian before each message),
either of them compressed message by message with zstd; and a file that is a single
request, protobuf or JSON; each also packed as a whole with gzip or zstd. It knows
framing; it does not know dialects or tables.

Invariants:
* one message at a time is in memory;
* a message that can't be parsed is a `Broken` with its line (JSON) or number
  (protobuf); what follows it is still read.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.exports.rows import PARQUET_MAGIC, Broken, Row, unpacked
from spangrad.errors import DialectError, StoreError
from spangrad.store.otlp import json_logs_to_protobuf, json_to_protobuf

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
HEAD_BYTES: Final = 64 * 2**10
PACKING_ERRORS: Final = (EOFError, OSError, zlib.error, pa.ArrowException)
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_MARKS: Final = (b'"resourceSpans"', b'"resourceLogs"', b'"resourceMetrics"', b'"resourceProfiles"')
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
OTHER_SIGNALS: Final = {"resourceMetrics": "metrics", "resourceProfiles": "profiles"}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A message of another signal."""

    signal: str


Message = ExportTraceServiceRequest | ExportLogsServiceRequest | Broken | Skipped | Row
"""A `Row` is a JSON object that is no OTLP."""


def messages(path: Path) -> Iterator[tuple[Message, int]]:
    """Every message of a file, each with the position in bytes behind it.

    Raises:
        DialectError: The file can't be opened.
    """
    with _opened(path) as file:
        head = unpacked(file).read(64)
        content = unpacked(file)
        try:
            if head.lstrip(_BLANK)[:1] in (b"{", b"") and not head.startswith(b"\x00"):
                found = _json_lines(path, content)
            elif int.from_bytes(head[:4], "big") > 0 and (content is not file or _fits(path, head)):
                found = _length_delimited(path, content)
            else:
                found = iter([_parse(path, 1, content.read())])
            for message in found:
                yield message, file.tell()
        except PACKING_ERRORS as error:
            yield Broken(str(path), 1, f"broken compression: {error}"), file.tell()


def is_otlp(path: Path) -> bool:
    """Whether a file is to be read as OTLP: JSON lines that begin so, or no JSON and no Parquet at all.

    Raises:
        DialectError: The file can't be opened.
    """
    with _opened(path) as file:
        try:
            head = unpacked(file).read(HEAD_BYTES)
        except PACKING_ERRORS:
            return False
    first = head.lstrip(_BLANK)[:1]
    if first == b"{" and not head.startswith(b"\x00"):
        return any(mark in head for mark in _MARKS)
    return first not in (b"", b"[") and not head.startswith(PARQUET_MAGIC)


def parse_json(path: Path, number: int, line: bytes) -> Message:
    """One request in JSON; a `Row` if it is another object."""
    return _parse_json(path, number, line)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DialectError(
            f"can't read {str(path)!r}: {error.strerror}; expected a file of traces"
        ) from error


def _fits(path: Path, head: bytes) -> bool:
    return int.from_bytes(head[:4], "big") <= path.stat().st_size - 4


def _json_lines(path: Path, file: BinaryIO) -> Iterator[Message]:
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf").strip()
        if number == 1 and line == b"{":
            yield _parse_json(path, number, line + file.read())
        elif line:
            yield _parse_json(path, number, line)


def _length_delimited(path: Path, file: BinaryIO) -> Iterator[Message]:
    number = 0
    while header := file.read(4):
        number += 1
        length = int.from_bytes(header, "big")
        body = file.read(length)
        if len(header) < 4 or len(body) < length:
            yield Broken(str(path), number, f"cut short: {len(body)} of {length} bytes are there")
            return
        yield _parse(path, number, body)


def _parse(path: Path, number: int, body: bytes) -> Message:
    if body.startswith(ZSTD_MAGIC):
        try:
            body = pa.CompressedInputStream(pa.BufferReader(body), "zstd").read()
        except OSError as error:
            return Broken(str(path), number, f"broken compression: {error}")
    if body[:1] == b"{":
        return _parse_json(path, number, body)
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        return _parse_logs(body) or Broken(str(path), number, f"no OTLP request: {error}")
    checked = _checked(path, number, request)
    return (_parse_logs(body) or checked) if isinstance(checked, Broken) else checked


def _parse_logs(body: bytes) -> ExportLogsServiceRequest | None:
    """The request, if it is one of log records: nothing in the framing says so.

    A log record begins with its time in 8 bytes, a span with a trace id, a metric with a name; read as
    the other, such a field is not there.
    """
    try:
        request = ExportLogsServiceRequest.FromString(body)
    except DecodeError:
        return None
    scopes = [scope for resource in request.resource_logs for scope in resource.scope_logs]
    records = [record for scope in scopes for record in scope.log_records]
    has_times = all(record.time_unix_nano or record.observed_time_unix_nano for record in records)
    return request if records and has_times else None


def _parse_json(path: Path, number: int, line: bytes) -> Message:
    try:
        if b'"resourceSpans"' in line:
            spans = ExportTraceServiceRequest.FromString(json_to_protobuf(line))
            return _checked(path, number, spans)
        if b'"resourceLogs"' in line:
            logs: ExportLogsServiceRequest = ExportLogsServiceRequest.FromString(json_logs_to_protobuf(line))
            return logs
    except StoreError as error:
        return Broken(str(path), number, str(error))
    return _other_signal(path, number, line)


def _other_signal(path: Path, number: int, line: bytes) -> Message:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Broken(str(path), number, f"invalid JSON: {error}")
    if not isinstance(content, dict):
        return Broken(str(path), number, f"no object: {content!r:.40}")
    signal = next((OTHER_SIGNALS[name] for name in content if name in OTHER_SIGNALS), None)
    return Skipped(signal) if signal else Row(number, content)


def _checked(path: Path, number: int, request: ExportTraceServiceRequest) -> Message:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) != TRACE_ID_BYTES or len(span.span_id) != SPAN_ID_BYTES:
                    ids = f"{span.trace_id.hex()!r} and {span.span_id.hex()!r}"
                    return Broken(
                        str(path), number, f"bad ids: trace and span id are {ids}; expected 16 and 8 bytes"
                    )
    return request
