"""Rows of exports on their way into a store: spans to the intake, scores kept until all spans are there.

Knows formats of rows; knows no framing and no tables. Invariant: whatever a row holds, it costs no other row.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.exports.formats import format_of
from spangrad.adapters.exports.rows import Broken, Row
from spangrad.adapters.exports.score import Scores
from spangrad.adapters.intake import Intake
from spangrad.adapters.otlp_files import Skipped, parse_json

OTLP_KEYS: Final = frozenset({"resourceSpans", "resourceLogs", "resourceMetrics", "resourceProfiles"})
_SHOWN: Final = 200

Unread = Broken | Skipped | ExportTraceServiceRequest | ExportLogsServiceRequest | None


class RowIntake:
    """Takes in rows, whatever format they are in."""

    def __init__(self, intake: Intake) -> None:
        """Spans go to this intake."""
        self._intake = intake
        self.by_format: Counter[str] = Counter()
        self.scores = Scores()
        self.unknown_rows = 0
        self.unknown_row: str | None = None
        """The first row that nobody knows."""

    def add(self, path: Path, row: Row) -> Unread:
        """Take in a row. Returns what is wrong with it or the OTLP message that it is, or None."""
        if OTLP_KEYS & row.value.keys():
            line = json.dumps(row.value, default=str).encode()
            message = parse_json(path, row.line, line, self._intake.faults)
            return None if isinstance(message, Row) else message
        try:
            known = format_of(row.value)
            if known is None:
                self._tell_unknown(path, row)
                return None
            spans, scores = list(known.spans_of(row.value)), list(known.scores_of(row.value))
        except Exception as error:  # boundary: whatever a row holds
            return Broken(str(path), row.line, f"it can't be read: {type(error).__name__}: {error}")
        self.by_format[known.name] += 1
        self.scores.add(scores)
        problem = self._intake.add_made(spans, f"{path}:{row.line}") if spans else None
        return None if problem is None else Broken(str(path), row.line, problem)

    def _tell_unknown(self, path: Path, row: Row) -> None:
        self.unknown_rows += 1
        if self.unknown_row is None:
            shown = json.dumps(row.value, default=str, ensure_ascii=False)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            self.unknown_row = f"{path}:{row.line}: {shown}"
