"""Where finished spans go: to a hub over HTTP, or into the spool beside a store's file.

Both are OTel `SpanExporter`s that any span processor can drive, from its own thread. They know OTLP,
HTTP and the spool; they do not know rollouts or model calls.

Invariants:
* `export` never raises and never blocks longer than `timeout_s` for a batch.
* A batch that the hub did not acknowledge is on disk before `export` returns, or counted in `dropped`.
* What waits on disk is sent after the next success, also by the next process that uses the folder; the
  store ignores spans that it has.
* After a failure the hub is left alone for a while (1 s, doubling to 30 s); meanwhile batches go to disk.
* A batch that the hub refuses for good (a 4xx that is not about keys, load or time) is dropped and
  counted: sending it again would hold up everything behind it.
* HTTP goes through the standard library, below which spangrad captures nothing.
"""

import hashlib
import http.client
import logging
import os
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from spangrad.errors import ConfigError
from spangrad.tracer.spool import Spool

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 2**20
"""Batches above it are split, down to single spans."""
_RETRY_LATER = frozenset({401, 403, 404, 408, 425, 429})
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_LOG_EVERY_S = 30.0


def spool_of_store(store_path: str | os.PathLike[str]) -> Path:
    """The folder in which spans wait until the store's file is opened."""
    path = Path(store_path).absolute()
    return path.with_name(path.name + ".spool")


def encode(spans: Sequence[ReadableSpan]) -> list[bytes]:
    """OTLP `ExportTraceServiceRequest`s of these spans, none above `MAX_REQUEST_BYTES` unless one span is."""
    request: bytes = encode_spans(spans).SerializeToString()
    if len(request) <= MAX_REQUEST_BYTES or len(spans) < 2:
        return [request]
    middle = len(spans) // 2
    return encode(spans[:middle]) + encode(spans[middle:])


class SpoolExporter(SpanExporter):
    """Writes batches into the spool of a store's file; the store takes them from there."""

    def __init__(self, store_path: str | os.PathLike[str]) -> None:
        """`store_path`: the store's file, which need not exist."""
        self.spool = Spool(spool_of_store(store_path))
        self._said = Periodically()

    @property
    def dropped(self) -> int:
        """Batches that could not be kept."""
        return self.spool.dropped

    @property
    def is_waiting(self) -> bool:
        """Never: what is on disk has arrived."""
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write a batch to disk."""
        return _result(all([self.export_request(request) for request in encode(spans)]))

    def export_request(self, request: bytes) -> bool:
        """Write one encoded request to disk."""
        kept = self.spool.append(request)
        if not kept and self._said.due():
            logger.warning(
                "spool %r is full or can't be written: %d batches lost so far",
                str(self.spool.directory),
                self.dropped,
            )
        return kept

    def drain(self) -> int:
        """Nothing to do: the store empties the spool."""
        return 0

    def close_soon(self, within_s: float) -> None:
        """Nothing to do: a write to disk is quick."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True

    def shutdown(self) -> None:
        """Close the file."""
        self.spool.close()


class HubExporter(SpanExporter):
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
        """Batches that the hub refused for good."""
        self._parts = parts
        self._headers = {"Content-Type": "application/x-protobuf"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        if spool_dir is None:
            spool_dir = Path(".spangrad", "spool", hashlib.sha256(self.url.encode()).hexdigest()[:16])
        self.spool = Spool(spool_dir)
        self._waiting = self.spool.size_bytes() > 0
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = float("-inf")
        self._closing_at = float("inf")
        self._said = Periodically()

    @property
    def dropped(self) -> int:
        """Batches that could be neither delivered nor kept."""
        return self.spool.dropped + self.rejected

    @property
    def is_waiting(self) -> bool:
        """Whether something waits on disk for the hub."""
        return self._waiting

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Deliver a batch, or keep it on disk."""
        return _result(all([self.export_request(request) for request in encode(spans)]))

    def export_request(self, request: bytes) -> bool:
        """Deliver one encoded request, or keep it on disk. Returns False if it could do neither."""
        if self._paused_until <= time.monotonic() < self._closing_at:
            try:
                self._deliver(request)
            except (OSError, http.client.HTTPException) as error:
                self._failed(error)
            else:
                self._pause_s = _FIRST_PAUSE_S
                self.drain()
                return True
        kept = self.spool.append(request)
        self._waiting = self._waiting or kept
        if not kept and self._said.due():
            logger.warning(
                "hub %s does not answer and spool %r is full: %d batches lost so far",
                self.url,
                str(self.spool.directory),
                self.dropped,
            )
        return kept

    def drain(self) -> int:
        """Send what waits on disk, unless the hub failed a moment ago. Returns how many batches arrived."""
        if not self._waiting or self._is_closing or time.monotonic() < self._paused_until:
            return 0
        try:
            sent = self.spool.drain(self._deliver_waiting)
        except (OSError, http.client.HTTPException) as error:
            if not self._is_closing:
                self._failed(error)
            return 0
        self._waiting = False
        return sent

    def close_soon(self, within_s: float) -> None:
        """The process is about to end: drain no more, and after `within_s` put batches on disk at once."""
        self._closing_at = time.monotonic() + within_s

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True

    def shutdown(self) -> None:
        """Close the spool's file."""
        self.spool.close()

    @property
    def _is_closing(self) -> bool:
        return self._closing_at != float("inf")

    def _deliver_waiting(self, request: bytes) -> None:
        if self._is_closing:
            raise http.client.HTTPException("closing")
        self._deliver(request)

    def _deliver(self, request: bytes) -> None:
        """Post once. Raises OSError or HTTPException if it may work later; counts what never will."""
        parts = self._parts
        assert parts.hostname is not None
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}/v1/traces", request, self._headers)
            response = connection.getresponse()
            response.read()
        finally:
            connection.close()
        if 200 <= response.status < 300:
            return
        if response.status in _RETRY_LATER or not 400 <= response.status < 500:
            raise http.client.HTTPException(f"status {response.status}")
        self.rejected += 1
        logger.error(
            "hub %s refuses a batch of %d bytes with status %d; it is dropped (%d so far)",
            self.url,
            len(request),
            response.status,
            self.rejected,
        )

    def _failed(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if self._said.due():
            logger.warning(
                "hub %s does not take spans (%s); they wait in %r", self.url, error, str(self.spool.directory)
            )


class Periodically:
    """Says at most once in 30 s that it is time to log."""

    def __init__(self) -> None:
        """The first time is due."""
        self._next = float("-inf")

    def due(self) -> bool:
        """Whether the last time was long enough ago."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOG_EVERY_S
        return True


Exporter = SpoolExporter | HubExporter


def _result(good: bool) -> SpanExportResult:
    return SpanExportResult.SUCCESS if good else SpanExportResult.FAILURE
