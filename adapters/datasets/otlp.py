"""Spans and log records of a store -> OTLP, as the OpenTelemetry Collector's file exporter writes it.

Canonical order: spans by trace, start and id, log records by trace and time; some hundred to a message.
`spangrad ingest` reads either form back. Nothing is left out of the copy; secrets are counted only.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.datasets.card import Side
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.datasets.selecting import Progress, in_parts
from spangrad.adapters.dialects import NO_DIALECT, recognise
from spangrad.store.base import Store
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord, Span

_CALLS: Final = """
SELECT dialect, grade, count(*) AS calls FROM calls
WHERE $rollouts::VARCHAR[] IS NULL OR rollout_id IN (SELECT unnest($rollouts::VARCHAR[])) GROUP BY ALL
"""
"""A call counts once, in however many spans it is told."""
AT_ONCE: Final = 200
"""Spans or records of a message."""
_IDS: Final = ("traceId", "spanId", "parentSpanId")


def write_copy(
    folder: Path,
    store: Store,
    rollout_ids: Sequence[str] | None,
    scanner: Scanner,
    *,
    as_json: bool,
    progress: Progress | None = None,
) -> Side:
    """Write `otlp.jsonl` or `otlp.pb` with what the store has of these rollouts (of everything without)."""
    side = Side("otlp.jsonl" if as_json else "otlp.pb")
    rollouts: set[str] = set()

    def looked_at(spans: Iterable[Span]) -> Iterator[Span]:
        for span in spans:
            scanner.has_secret([span.attributes, [event.attributes for event in span.events]])
            if span.rollout_id is not None:
                rollouts.add(span.rollout_id)
            side.dialects.update({NO_DIALECT} & {recognise(span)})
            yield span

    total = 0
    if progress is not None and rollout_ids is None:
        (row,) = store.query("SELECT (SELECT count(*) FROM spans) + (SELECT count(*) FROM logs) AS total")
        total = int(row["total"])
    copied = requests(looked_at(store.spans(rollout_ids)), store.logs(rollout_ids))
    with (folder / side.file).open("wb") as file:
        for request, count, is_logs in copied:
            file.write(json_line(request, is_logs=is_logs) if as_json else framed(request))
            side.rows += count
            if progress is not None:
                progress(side.rows, max(total, side.rows))
    side.rollouts = len(rollouts)
    for row in store.query(_CALLS, {"rollouts": None if rollout_ids is None else list(rollout_ids)}):
        side.calls += row["calls"]
        side.dialects[row["dialect"]] += row["calls"]
        side.grades[row["grade"]] += row["calls"]
    return side


def requests(spans: Iterable[Span], records: Iterable[LogRecord]) -> Iterator[tuple[bytes, int, bool]]:
    """Export requests as protobuf, each with how many spans or records, and whether it is records."""
    for part in in_parts(spans, AT_ONCE):
        yield encode_request(part), len(part), False
    for logs in in_parts(records, AT_ONCE):
        yield encode_logs(logs), len(logs), True


def json_line(request: bytes, *, is_logs: bool) -> bytes:
    """A request in OTLP's JSON form: ids in hex, enums as numbers."""
    message = (ExportLogsServiceRequest if is_logs else ExportTraceServiceRequest).FromString(request)
    told = json_format.MessageToDict(message, use_integers_for_enums=True)
    for resource in told.get("resourceLogs" if is_logs else "resourceSpans", ()):
        for scope in resource.get("scopeLogs" if is_logs else "scopeSpans", ()):
            for one in scope.get("logRecords" if is_logs else "spans", ()):
                _ids_to_hex(one)
                for link in one.get("links", ()):
                    _ids_to_hex(link)
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def framed(request: bytes) -> bytes:
    """A request behind its length in 4 bytes, big-endian."""
    return len(request).to_bytes(4, "big") + request


def _ids_to_hex(data: dict[str, Any]) -> None:
    for name in _IDS:
        if data.get(name):
            data[name] = base64.b64decode(data[name]).hex()
