"""Where finished spans go, and the spool beside a store's file, which is one such place.

`Exporter`s are OTel's `SpanExporter`s that any span processor can drive from its own thread, with counts;
the one that sends to a hub is in `hub_exporter.py`. They know OTLP and the spool; they do not know rollouts
or model calls.

Invariants:
* `export` never raises.
* What `export` can neither deliver nor keep on disk is counted in `lost_spans`, span by span.
* A disk without room for a batch takes as many of its spans as fit.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from spangrad.errors import StoreError
from spangrad.tracer.journal import recover
from spangrad.tracer.otlp import encode_request, encode_span
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.spool import Spool

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 2**20
"""Batches above it are split, down to single spans."""
_RESOURCE_BYTES = 64 * 2**10
"""Kept free in a request for what describes the process."""


def spool_of_store(store_path: str | os.PathLike[str]) -> Path:
    """The folder in which spans wait until the store's file is opened."""
    path = Path(store_path).absolute()
    return path.with_name(path.name + ".spool")


def encode(spans: Sequence[ReadableSpan]) -> list[bytes]:
    """OTLP `ExportTraceServiceRequest`s of these spans, none above `MAX_REQUEST_BYTES` unless one span is."""
    requests: list[bytes] = []
    together: list[tuple[ReadableSpan, list[bytes]]] = []
    size = 0
    for span in spans:
        encoded = encode_span(span)
        own = sum(map(len, encoded)) + 8  # its tag and length
        if together and size + own > MAX_REQUEST_BYTES - _RESOURCE_BYTES:
            requests.append(encode_request(together))
            together, size = [], 0
        together.append((span, encoded))
        size += own
    if together:
        requests.append(encode_request(together))
    return requests


class Exporter(SpanExporter):
    """What whoever drives an exporter needs to know beyond what OTel's interface tells."""

    lost_spans: int = 0
    """Spans that could be neither delivered nor kept."""
    told_spans: int = 0
    """How many had been lost when that was last said."""
    problem: str = ""
    """Where and why the last of them were lost."""
    says_losses: bool = True
    """Whether losses are logged; they are counted all the same."""
    says_outages: bool = True
    """Whether it is logged that a hub takes no spans; False where another process says it."""
    make_room: Callable[[], object] | None = None
    """Called once, when the disk is full: frees what can be done without."""

    @property
    def is_waiting(self) -> bool:
        """Whether something waits on disk."""
        return False

    @property
    def waiting(self) -> int:
        """How many spans of this process wait on disk."""
        return 0

    @property
    def folder(self) -> Path | None:
        """Where something waits on disk, if there is such a place."""
        return None

    def check(self) -> None:
        """Raise StoreError if it is known now that nothing can be delivered or kept."""

    def drain(self, *, at_once: bool = False) -> int:
        """Send what waits on disk. Returns how many batches arrived."""
        return 0

    def recover(self) -> None:
        """Let what killed processes have left in their journals wait on disk."""

    def close_soon(self, within_s: float) -> None:
        """The process is about to end."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Whether everything that `export` has kept or delivered is where it belongs."""
        return True


class OtherExporter(Exporter):
    """Any exporter of OTel's, for which a failure is a loss."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Hand everything on to `exporter`."""
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Hand on, and count a failure; raises what the other raises."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost_spans += len(spans)
            self.problem = f"{type(self._exporter).__name__} failed to export them"
        return result

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Hand on; OTel's base class answers None, for it holds nothing back."""
        return self._exporter.force_flush(timeout_millis) is not False

    def shutdown(self) -> None:
        """Hand on."""
        self._exporter.shutdown()


class WithSpool(Exporter):
    """Keeps batches in a spool, all of them or those that it can't deliver."""

    spool: Spool
    _said: Periodically

    @property
    def folder(self) -> Path:
        """The spool's."""
        return self.spool.directory

    def recover(self) -> None:
        """Into the spool, so that journals of killed processes don't add up."""
        recover(self.spool)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Deliver a batch, or keep it on disk."""
        good = all([self.export_request(request) for request in encode(spans)])
        return SpanExportResult.SUCCESS if good else SpanExportResult.FAILURE

    def export_request(self, request: bytes) -> bool:
        """Deliver or keep one encoded request. Returns False if it is lost."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Close the spool's file."""
        self.spool.close()

    def _keep(self, request: bytes, before: str = "") -> int:
        """Write to disk, span by span if the disk has no room for all. Returns how many spans are lost.

        `before`: what went wrong before, for the warning.
        """
        if self.spool.append(request):
            return 0
        if not self.spool.is_disk_full:
            lost = span_count(request)
        else:
            if self.make_room is not None:
                free, self.make_room = self.make_room, None
                free()
                if self.spool.append(request):
                    return 0
            parts = split(request)
            lost = len(parts) - (sum(map(self.spool.append, parts)) if len(parts) > 1 else 0)
        if lost:
            self.lost_spans += lost
            where = str(self.spool.directory)
            self.problem = f"{before}spool {where!r} can't be written ({self.spool.problem})"
            if self.says_losses and self._said.due():
                self.told_spans = self.lost_spans
                logger.warning("%s: %d spans lost so far", self.problem, self.lost_spans)
        return lost


class SpoolExporter(WithSpool):
    """Writes batches into the spool of a store's file; the store takes them from there."""

    def __init__(self, store_path: str | os.PathLike[str]) -> None:
        """`store_path`: the store's file, which need not exist."""
        self.spool = Spool(spool_of_store(store_path))
        self._said = Periodically()

    def check(self) -> None:
        """Raise StoreError if the folder can't be made or written."""
        try:
            self.spool.check()
        except OSError as error:
            raise StoreError(
                f"nothing can be recorded: {str(self.spool.directory)!r} can't be written"
                f" ({error.strerror}); free or allow it, or name another store with --store"
            ) from error

    def export_request(self, request: bytes) -> bool:
        """Write one encoded request to disk."""
        return not self._keep(request)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True: what is on disk has arrived."""
        return True


def split(request: bytes) -> list[bytes]:
    """Requests of one span each; the request itself if it can't be read."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

    try:
        resources = ExportTraceServiceRequest.FromString(request).resource_spans
    except DecodeError:
        return [request]
    return [
        ExportTraceServiceRequest(
            resource_spans=[
                ResourceSpans(
                    resource=resource.resource,
                    schema_url=resource.schema_url,
                    scope_spans=[ScopeSpans(scope=scope.scope, schema_url=scope.schema_url, spans=[span])],
                )
            ]
        ).SerializeToString()
        for resource in resources
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def span_count(request: bytes) -> int:
    """How many spans an encoded request has."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        resources = ExportTraceServiceRequest.FromString(request).resource_spans
    except DecodeError:
        return 1
    return sum(len(scope.spans) for resource in resources for scope in resource.scope_spans)
