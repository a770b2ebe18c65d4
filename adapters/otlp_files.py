"""OTLP files -> export requests of spans and of log records, one after the other.

Reads what the OpenTelemetry Collector's file exporter writes: JSON lines (one export
request a line), length-delimited protobuf (4 bytes big-endian before each message),
either of them compressed message by message with zstd; and a file that is a single
request, protobuf or JSON; each also packed as a whole with gzip or zstd. It knows
framing; it does not know dialects or tables.

Invariants:
* one message at a time is in memory;
* a message that can't be parsed is a `Broken` with its line (JSON) or number
  (protobuf); what follows it is still read;
* a span or record that can't be read is counted in `faults`, and costs its message nothing else.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.exports.rows import ZSTD_MAGIC, Broken, Row, json_problem, packing_problem, unpacked
from spangrad.adapters.file_kinds import HEAD_BYTES, PACKING_ERRORS, is_json
from spangrad.errors import DialectError, StoreError
from spangrad.store.faults import Faults
from spangrad.store.requests import logs_request, trace_request

OTHER_SIGNALS: Final = {"resourceMetrics": "metrics", "resourceProfiles": "profiles"}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A message of another signal."""

    signal: str


Message = ExportTraceServiceRequest | ExportLogsServiceRequest | Broken | Skipped | Row
"""A `Row` is a JSON object that is no OTLP."""


def messages(path: Path, faults: Faults | None = None) -> Iterator[tuple[Message, int]]:
    """Every message of a file, each with the position in bytes behind it.

    What of a message was left out or mended is counted in `faults`.

    Raises:
        DialectError: The file can't be opened.
    """
    faults = Faults() if faults is None else faults
    with _opened(path) as file:
        try:
            head = unpacked(file).read(HEAD_BYTES)
            content = unpacked(file)
            if is_json(head):
                found = _json_lines(path, content, faults)
            elif _is_length_delimited(path, head, is_packed=content is not file):
                found = _length_delimited(path, content, faults)
            else:
                found = iter([_parse(path, 1, content.read(), faults)])
            for message in found:
                yield message, file.tell()
        except PACKING_ERRORS as error:
            yield Broken(str(path), 1, packing_problem(error)), file.tell()


def parse_json(path: Path, number: int, line: bytes, faults: Faults) -> Message:
    """One request in JSON; a `Row` if it is another object."""
    try:
        if b'"resourceSpans"' in line:
            return _told(path, number, trace_request(line, is_json=True), faults)
        if b'"resourceLogs"' in line:
            return _told(path, number, logs_request(line, is_json=True), faults)
    except StoreError as error:
        cause = error.__cause__
        problem = (
            json_problem(cause) if isinstance(cause, json.JSONDecodeError) else f"no OTLP request: {error}"
        )
        return Broken(str(path), number, problem)
    return _other_signal(path, number, line)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DialectError(
            f"can't read {str(path)!r}: {error.strerror}; expected a file of traces"
        ) from error


def _is_length_delimited(path: Path, head: bytes, *, is_packed: bool) -> bool:
    """Whether the first 4 bytes are a length; one beyond the end begins a message that was cut."""
    length = int.from_bytes(head[:4], "big")
    is_message = head[:1] == b"\x00" and head[4:].startswith((b"\n", b"{", ZSTD_MAGIC))
    return length > 0 and (is_packed or length <= path.stat().st_size - 4 or is_message)


def _json_lines(path: Path, file: BinaryIO, faults: Faults) -> Iterator[Message]:
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf").strip()
        if number == 1 and line == b"{":
            yield parse_json(path, number, line + file.read(), faults)
        elif line:
            yield parse_json(path, number, line, faults)


def _length_delimited(path: Path, file: BinaryIO, faults: Faults) -> Iterator[Message]:
    number = 0
    while header := file.read(4):
        number += 1
        length = int.from_bytes(header, "big")
        body = file.read(length)
        if len(header) < 4 or len(body) < length:
            yield Broken(str(path), number, f"cut short: {len(body)} of {length} bytes are there")
            return
        yield _parse(path, number, body, faults)


def _parse(path: Path, number: int, body: bytes, faults: Faults) -> Message:
    if body.startswith(ZSTD_MAGIC):
        try:
            body = pa.CompressedInputStream(pa.BufferReader(body), "zstd").read()
        except OSError as error:
            return Broken(str(path), number, packing_problem(error))
    if body[:1] == b"{":
        return parse_json(path, number, body, faults)
    if (logs := _logs(body, is_damaged=False)) is None:
        try:
            spans = trace_request(body)
            if spans[0].resource_spans or not spans[1]:
                return _told(path, number, spans, faults)
            problem = f"no spans and no log records: {spans[1].told()}"
        except StoreError as error:
            problem = f"no OTLP request: {error}"
        if (logs := _logs(body, is_damaged=True)) is None:
            return Broken(str(path), number, problem)
    return _told(path, number, logs, faults)


def _logs(body: bytes, *, is_damaged: bool) -> tuple[ExportLogsServiceRequest, Faults] | None:
    """The request, if it is one of log records: nothing in the framing says so.

    A log record begins with its time in 8 bytes, a span with a trace id, a metric with a name; read as
    the other, such a field is not there.
    """
    try:
        if not is_damaged:
            ExportLogsServiceRequest.FromString(body)
        request, faults = logs_request(body)
    except (DecodeError, StoreError):
        return None
    scopes = [scope for resource in request.resource_logs for scope in resource.scope_logs]
    records = [record for scope in scopes for record in scope.log_records]
    has_times = all(record.time_unix_nano or record.observed_time_unix_nano for record in records)
    return (request, faults) if records and has_times else None


def _told(
    path: Path,
    number: int,
    found: tuple[ExportTraceServiceRequest | ExportLogsServiceRequest, Faults],
    faults: Faults,
) -> Message:
    request, of_request = found
    faults.merge(of_request, place=f"{path}:{number}: ")
    return request


def _other_signal(path: Path, number: int, line: bytes) -> Message:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Broken(str(path), number, json_problem(error))
    if not isinstance(content, dict):
        return Broken(str(path), number, f"no object: {content!r:.40}")
    signal = next((OTHER_SIGNALS[name] for name in content if name in OTHER_SIGNALS), None)
    return Skipped(signal) if signal else Row(number, content)
