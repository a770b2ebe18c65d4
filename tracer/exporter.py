"""Where finished spans go, and the spool beside a store's file, which is one such place.

`Exporter`s are OTel's `SpanExporter`s that any span processor can drive from its own thread, with counts;
the one that sends to a hub is in `hub_exporter.py`. They know OTLP and the spool; they do not know rollouts
or model calls.

Invariants:
* `export` never raises.
* What `export` can neither deliver nor keep on disk is counted in `dropped`.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

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

    lost_spans: int
    """Spans that could be neither delivered nor kept."""

    @property
    def dropped(self) -> int:
        """Batches that could be neither delivered nor kept, whole or in part."""
        raise NotImplementedError

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
        self.lost_spans = 0
        self._lost_batches = 0

    @property
    def dropped(self) -> int:
        """Batches that it failed to export."""
        return self._lost_batches

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Hand on, and count a failure; raises what the other raises."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost_batches += 1
            self.lost_spans += len(spans)
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


class SpoolExporter(WithSpool):
    """Writes batches into the spool of a store's file; the store takes them from there."""

    def __init__(self, store_path: str | os.PathLike[str]) -> None:
        """`store_path`: the store's file, which need not exist."""
        self.spool = Spool(spool_of_store(store_path))
        self.lost_spans = 0
        self._said = Periodically()

    @property
    def dropped(self) -> int:
        """Batches that could not be kept."""
        return self.spool.dropped

    def export_request(self, request: bytes) -> bool:
        """Write one encoded request to disk."""
        kept = self.spool.append(request)
        if not kept:
            self.lost_spans += span_count(request)
            if self._said.due():
                logger.warning(
                    "spool %r is full or can't be written: %d batches lost so far",
                    str(self.spool.directory),
                    self.dropped,
                )
        return kept

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True: what is on disk has arrived."""
        return True


def span_count(request: bytes) -> int:
    """How many spans an encoded request has."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        resources = ExportTraceServiceRequest.FromString(request).resource_spans
    except DecodeError:
        return 1
    return sum(len(scope.spans) for resource in resources for scope in resource.scope_spans)
