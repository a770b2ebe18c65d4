"""The signals that a store takes, and how their requests are nested: resource, scope, span or log record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal."""

    noun: str
    """What one element is called in examples."""
    request: Any
    """Class of its export request."""
    fields: Sequence[str]
    """Of resources in a request, of scopes in a resource, of elements in a scope."""
    json_names: Sequence[str]
    """The same in JSON."""

    def names(self, depth: int) -> tuple[str, str]:
        """Both names of the children of a level; JSON may have either."""
        return self.json_names[depth], self.fields[depth]

    def is_element(self, depth: int) -> bool:
        """Whether the children of a level are spans or log records."""
        return depth == len(self.fields) - 1

    def count(self, request: Any) -> int:
        """How many spans or log records a request has."""
        outer, middle, inner = self.fields
        scopes = (scope for resource in getattr(request, outer) for scope in getattr(resource, middle))
        return sum(len(getattr(scope, inner)) for scope in scopes)

    def part(self, request: Any, begin: int, end: int) -> Any:
        """A copy of a request with some of its spans or log records."""
        outer, middle, inner = self.fields
        part = self.request()
        part.CopyFrom(request)
        for resource in getattr(part, outer):
            for scope in getattr(resource, middle):
                elements = getattr(scope, inner)
                count = len(elements)
                del elements[max(end, 0) :]
                del elements[: max(begin, 0)]
                begin, end = begin - count, end - count
        return part


SPANS: Final = Signal(
    "span",
    ExportTraceServiceRequest,
    ("resource_spans", "scope_spans", "spans"),
    ("resourceSpans", "scopeSpans", "spans"),
)
LOGS: Final = Signal(
    "log record",
    ExportLogsServiceRequest,
    ("resource_logs", "scope_logs", "log_records"),
    ("resourceLogs", "scopeLogs", "logRecords"),
)
