"""Where finished spans go: to a hub over HTTP, or into the spool beside a store's file.

Both are `Exporter`s, OTel's `SpanExporter`s that any span processor can drive from its own thread, with
counts. They know OTLP, HTTP and the spool; they do not know rollouts or model calls.

Invariants:
* `export` never raises and never blocks longer than `timeout_s` for a batch.
* A batch that the hub did not acknowledge is on disk before `export` returns, or counted in `dropped`.
* What waits on disk is sent after the next success, also by the next process that uses the folder; the
  store ignores spans that it has.
* A hub's exporter is waiting as long as its folder holds anything, whoever wrote it or is sending it.
* After a failure the hub is left alone for a while (1 s, doubling to 30 s); meanwhile batches go to disk.
  `force_flush` tries all the same.
* One thread of a process sends what waits on disk at a time; `export` never waits for it.
* A batch that the hub refuses for good (a 4xx that is not about keys, load or time) is dropped and
  counted: sending it again would hold up everything behind it. So are single spans that a hub names as
  rejected in its answer.
* HTTP goes through the standard library, below which spangrad captures nothing.
"""

import hashlib
import http.client
import logging
import os
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from spangrad.errors import ConfigError
from spangrad.tracer.journal import recover
from spangrad.tracer.otlp import encode_request, encode_span
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.spool import Spool

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 2**20
"""Batches above it are split, down to single spans."""
_RESOURCE_BYTES = 64 * 2**10
"""Kept free in a request for what describes the process."""
_RETRY_LATER = frozenset({401, 403, 404, 408, 425, 429})
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_FLUSH_RETRY_S = 0.25
_UNDELIVERED = (OSError, http.client.HTTPException, ValueError)
"""ValueError: of a key, host or port that `http.client` won't send to."""


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


class _WithSpool(Exporter):
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


class SpoolExporter(_WithSpool):
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
            self.lost_spans += _span_count(request)
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


class HubExporter(_WithSpool):
    """Posts batches to a hub's `/v1/traces`; what it can't deliver waits on disk."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        spool_dir: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 3.0,
    ) -> None:
        """Look for what an earlier process left behind; connect later.

        Args:
            url: Base URL of the hub.
            key: Sent as `Authorization: Bearer`.
            spool_dir: Default: `.spangrad/spool/<hash of the URL>` in the working directory.
            timeout_s: For connecting, and for each wait for an answer.

        Raises:
            ConfigError: `url` is not an http(s) URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"hub URL {url!r} must look like 'http://host:port'")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.rejected = 0
        """Batches that the hub refused for good, whole or in part."""
        self.lost_spans = 0
        self._parts = parts
        self._headers = {"Content-Type": "application/x-protobuf"}
        if key and key.strip():  # one read from a file ends in a newline
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        if spool_dir is None:
            spool_dir = Path(".spangrad", "spool", hashlib.sha256(self.url.encode()).hexdigest()[:16])
        self.spool = Spool(spool_dir)
        self._spooled = 0
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = float("-inf")
        self._closing_at = float("inf")
        self._said = Periodically()
        self._own_process()

    @property
    def dropped(self) -> int:
        """Batches that could be neither delivered nor kept."""
        return self.spool.dropped + self.rejected

    @property
    def is_waiting(self) -> bool:
        """Whether something waits on disk for the hub, also what other processes left there."""
        return self.spool.size_bytes() > 0

    @property
    def waiting(self) -> int:
        """How many spans of this process wait on disk, or 1 if only others' do. Exact once it is 0."""
        return max(1, self._spooled) if self.is_waiting else 0

    def export_request(self, request: bytes) -> bool:
        """Deliver one encoded request, or keep it on disk. Returns False if it is lost."""
        if self._paused_until <= time.monotonic() < self._closing_at:
            try:
                delivered = self._deliver(request, self.timeout_s)
            except _UNDELIVERED as error:
                self._failed(error)
            else:
                self._pause_s = _FIRST_PAUSE_S
                self.drain()
                return delivered
        before = self._spooled if self.is_waiting else 0
        kept = self.spool.append(request)
        self._spooled = before + (_span_count(request) if kept else 0)
        if not kept:
            self.lost_spans += _span_count(request)
            if self._said.due():
                logger.warning(
                    "hub %s does not answer and spool %r is full: %d batches lost so far",
                    self.url,
                    str(self.spool.directory),
                    self.dropped,
                )
        return kept

    def drain(self, *, at_once: bool = False) -> int:
        """Send what waits on disk. Returns how many batches arrived.

        Does nothing while another thread of this process does it and, unless `at_once`, after a failure
        a moment ago.
        """
        if not at_once and time.monotonic() < self._paused_until:
            return 0
        lock = self._drain_lock()
        if not self.is_waiting or not lock.acquire(blocking=False):
            return 0
        try:
            return self._drain(float("inf"), counts_as_failure=not at_once)
        finally:
            lock.release()

    def close_soon(self, within_s: float) -> None:
        """The process is about to end: drain no more, and after `within_s` put batches on disk at once."""
        self._closing_at = time.monotonic() + within_s

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what waits on disk, as often as it takes, without regard to recent failures.

        Returns whether everything that `export` has kept or delivered is at the hub. False: time ran out,
        or `close_soon` was called; what waits is sent later.
        """
        deadline = time.monotonic() + timeout_millis / 1000
        lock = self._drain_lock()
        while self.is_waiting:
            if self._is_closing or not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            try:
                self._drain(deadline, counts_as_failure=False)
            finally:
                lock.release()
            left = deadline - time.monotonic()
            if left <= 0:
                return not self.is_waiting
            if self.is_waiting:
                time.sleep(min(left, _FLUSH_RETRY_S))
        return True

    @property
    def _is_closing(self) -> bool:
        return self._closing_at != float("inf")

    def _own_process(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _drain_lock(self) -> threading.Lock:
        if self._pid != os.getpid():  # after a fork the lock may be held by a thread that is gone
            self._own_process()
        return self._lock

    def _drain(self, deadline: float, *, counts_as_failure: bool) -> int:
        def send(request: bytes) -> None:
            left = deadline - time.monotonic()
            if self._is_closing or left <= 0:
                raise TimeoutError("no time left")
            self._deliver(request, min(self.timeout_s, left))

        try:
            sent = self.spool.drain(send)
        except _UNDELIVERED as error:
            if self._is_closing or time.monotonic() >= deadline:
                return 0
            if counts_as_failure:
                self._failed(error)
            else:
                self._say(error)
            return 0
        if sent:
            self._paused_until, self._pause_s = float("-inf"), _FIRST_PAUSE_S
        return sent

    def _deliver(self, request: bytes, timeout_s: float) -> bool:
        """Post once. Returns False, and counts, if the hub will never take it or some of its spans.

        Raises one of `_UNDELIVERED` if it may work later.
        """
        parts = self._parts
        assert parts.hostname is not None
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}/v1/traces", request, self._headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        is_taken = 200 <= response.status < 300
        if not is_taken and (response.status in _RETRY_LATER or not 400 <= response.status < 500):
            raise http.client.HTTPException(f"status {response.status}")
        refused = _rejected_spans(answer) if is_taken else _span_count(request)
        if is_taken and not refused:
            return True
        self.rejected += 1
        self.lost_spans += refused
        logger.error(
            "hub %s refuses %d spans of a batch of %d bytes with status %d; they are dropped (%d so far)",
            self.url,
            refused,
            len(request),
            response.status,
            self.lost_spans,
        )
        return False

    def _failed(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._say(error)

    def _say(self, error: Exception) -> None:
        if self._said.due():
            logger.warning(
                "hub %s does not take spans (%s); they wait in %r", self.url, error, str(self.spool.directory)
            )


def _span_count(request: bytes) -> int:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        resources = ExportTraceServiceRequest.FromString(request).resource_spans
    except DecodeError:
        return 1
    return sum(len(scope.spans) for resource in resources for scope in resource.scope_spans)


def _rejected_spans(answer: bytes) -> int:
    if not answer:  # an empty message: protobuf is not loaded into the agent's process for that
        return 0
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        return int(ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans)
    except DecodeError:  # not OTLP's answer, but a success
        return 0
