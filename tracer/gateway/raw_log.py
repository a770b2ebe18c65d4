"""A file with the engine's raw replies, one JSON line a call: for checking what was recorded.

Knows JSON and files. Knows nothing of what is in a reply.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as names
from spangrad.tracer.wire.fast_json import loads


class RawLog:
    """Appends to one file; a line is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending. Raises ConfigError."""
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"gateway.raw_log {str(path)!r} can't be written: {error.strerror}") from error

    def write(
        self,
        span: SpanContext,
        origin: Mapping[str, Any],
        request: bytes,
        replies: Sequence[bytes],
        *,
        is_stream: bool,
    ) -> None:
        """Append one call: the request that the engine got, and its reply or its chunks."""
        parsed = [parse_json(reply) for reply in replies]
        line = {
            "span_id": format_span_id(span.span_id),
            "trace_id": format_trace_id(span.trace_id),
            "rollout_id": origin.get(names.ROLLOUT_ID),
            "attempt": origin.get(names.ATTEMPT),
            "request": parse_json(request),
            "response": parsed if is_stream else next(iter(parsed), None),
        }
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_json(raw: bytes) -> Any:
    """`raw` as JSON, or None if it is none."""
    try:
        return loads(raw)
    except (ValueError, RecursionError):
        return None
