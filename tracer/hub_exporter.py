"""Sends finished spans to a hub over HTTP; what it does not take waits on disk.

Knows HTTP and the hub's answers; what a span is, is `exporter.py`'s and `otlp.py`'s business.

Invariants:
* `export` never raises and never blocks longer than `timeout_s` for a batch, and as long for what waits; the
  rest is sent the next time.
* A batch that the hub did not acknowledge is on disk before `export` returns, or counted in `lost_spans`.
* What waits on disk is sent after the next success, also by the next process that uses the folder; the
  store ignores spans that it has.
* A hub's exporter is waiting as long as its folder holds anything, whoever wrote it or is sending it.
* After a failure the hub is left alone for a while (1 s, doubling to 30 s); meanwhile batches go to disk.
  `force_flush` tries all the same.
* One thread of a process sends what waits on disk at a time; `export` never waits for it.
* A batch that the hub refuses for good (a 4xx that is not about keys, load or time) is dropped and
  counted: sending it again would hold up everything behind it. So are single spans that a hub names as
  rejected in its answer.
* What is logged of a refusal has the hub's own reason.
* A batch from disk to which the hub answers 5xx again and again lets those behind it pass: it stays on disk,
  and is tried every 30 s, by `force_flush`, and by the next process.
* HTTP goes through the standard library, below which spangrad captures nothing.
"""

import hashlib
import http.client
import json
import logging
import os
import ssl
import threading
import time
import zlib
from pathlib import Path
from urllib.parse import urlsplit

from spangrad.errors import ConfigError
from spangrad.tracer.exporter import WithSpool, span_count
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.spool import KEEP, Spool

logger = logging.getLogger(__name__)

_RETRY_LATER = frozenset({401, 403, 404, 408, 425, 429})
_REASON_CHARS = 300
_KEEP_S = 2.0
"""A connection is used again for so long: below the 5 s after which uvicorn, and so the hub, closes it."""
_GONE = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
"""Errors of a connection that the hub has closed: it saw nothing, or ignores what comes twice."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_FLUSH_RETRY_S = 0.25
_TRIES = 3
"""After so many 5xx a batch from disk is one that the hub may never take."""
_TRY_AGAIN_S = 30.0
_MOST_TRIED = 1000
"""Batches from disk whose 5xx are counted; then it begins anew."""
_UNDELIVERED = (OSError, http.client.HTTPException, ValueError)
"""ValueError: of a key, host or port that `http.client` won't send to."""


def spool_of_hub(url: str, sender: str = "") -> Path:
    """The folder in which spans for a hub wait by default.

    Whoever drains it sends all that is in it with its own key: senders with other keys have other folders.
    """
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return Path(".spangrad", "spool", f"{name}-{sender}" if sender else name)


class _ServerError(http.client.HTTPException):
    """5xx: the hub has failed, or fails at this batch."""


class HubExporter(WithSpool):
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
        self._parts = parts
        self._headers = {"Content-Type": "application/x-protobuf"}
        if key and key.strip():  # one read from a file ends in a newline
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        self.spool = Spool(spool_of_hub(self.url) if spool_dir is None else spool_dir)
        self._spooled = 0
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = float("-inf")
        self._closing_at = float("inf")
        self._tries: dict[tuple[int, int], int] = {}
        """Length and checksum of a batch on disk -> how often it got a 5xx."""
        self._try_again_at = float("-inf")
        self._problem_at_batch = ""
        self._told_kept = 0
        self._said = Periodically()
        self._kept: tuple[http.client.HTTPConnection, float] | None = None
        """A connection that nobody uses, and since when. After a fork it is the parent's."""
        self._own_process()

    def __del__(self) -> None:
        """Close the connection of whoever does not call `shutdown`."""
        if kept := vars(self).get("_kept"):
            kept[0].close()

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
        lost = self._keep(request, f"hub {self.url} does not take spans, and ")
        self._spooled = before + span_count(request) - lost
        return not lost

    def drain(self, *, at_once: bool = False) -> int:
        """Send what waits on disk, for `timeout_s`. Returns how many batches arrived.

        Does nothing while another thread of this process does it and, unless `at_once`, after a failure
        a moment ago.
        """
        self._close_idle()
        if not at_once and time.monotonic() < self._paused_until:
            return 0
        lock = self._drain_lock()
        if not self.is_waiting or not lock.acquire(blocking=False):
            return 0
        try:
            return self._drain(time.monotonic() + self.timeout_s, counts_as_failure=not at_once)
        finally:
            lock.release()

    def shutdown(self) -> None:
        """Close the connection and the spool's file."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[0].close()
        super().shutdown()

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
                self._try_again_at = float("-inf")
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
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[0].close()  # our descriptor; the parent's stays open

    def _drain_lock(self) -> threading.Lock:
        if self._pid != os.getpid():  # after a fork the lock may be held by a thread that is gone
            self._own_process()
        return self._lock

    def _drain(self, deadline: float, *, counts_as_failure: bool) -> int:
        sent = kept = 0

        def send(request: bytes) -> object:
            nonlocal sent, kept
            left = deadline - time.monotonic()
            if self._is_closing or left <= 0:
                raise TimeoutError("no time left")
            batch = (len(request), zlib.crc32(request))
            if self._tries.get(batch, 0) >= _TRIES and time.monotonic() < self._try_again_at:
                kept += 1
                return KEEP
            try:
                self._deliver(request, min(self.timeout_s, left))
            except _ServerError as error:
                self._problem_at_batch = str(error)
                if self._has_failed_too_often(batch):
                    kept += 1
                    return KEEP
                raise
            self._tries.pop(batch, None)
            sent += 1
            return None

        try:
            self.spool.drain(send)
        except _UNDELIVERED as error:
            if self._is_closing or time.monotonic() >= deadline:
                return sent
            if counts_as_failure:
                self._failed(error)
            else:
                self._say(error)
            return sent
        finally:
            if time.monotonic() >= self._try_again_at:
                self._try_again_at = time.monotonic() + _TRY_AGAIN_S
        if kept and sent:
            self._say_kept(kept)
        if sent:
            self._paused_until, self._pause_s = float("-inf"), _FIRST_PAUSE_S
        return sent

    def _say_kept(self, count: int) -> None:
        if count != self._told_kept:
            self._told_kept = count
            logger.warning(
                "hub %s fails each time at %d batches (%s); they stay in %r, the others go on",
                self.url,
                count,
                self._problem_at_batch,
                str(self.spool.directory),
            )

    def _has_failed_too_often(self, batch: tuple[int, int]) -> bool:
        if len(self._tries) >= _MOST_TRIED:
            self._tries.clear()
        self._tries[batch] = self._tries.get(batch, 0) + 1
        return self._tries[batch] > _TRIES

    def _deliver(self, request: bytes, timeout_s: float) -> bool:
        """Post once. Returns False, and counts, if the hub will never take it or some of its spans.

        Raises one of `_UNDELIVERED` if it may work later.
        """
        status, answer = self._post(request, timeout_s)
        is_taken = 200 <= status < 300
        if not is_taken and (status in _RETRY_LATER or not 400 <= status < 500):
            why = _reason(answer)
            kind = _ServerError if status >= 500 else http.client.HTTPException
            raise kind(f"status {status}{f': {why}' if why else ''}")
        refused, why = _rejected_spans(answer) if is_taken else (span_count(request), _reason(answer))
        if is_taken and not refused:
            return True
        self.lost_spans += refused
        self.told_spans = self.lost_spans
        self.problem = f"hub {self.url} refuses them with status {status}{f' ({why})' if why else ''}"
        logger.error(
            "hub %s refuses %d spans of a batch of %d bytes with status %d%s; they are dropped (%d so far)",
            self.url,
            refused,
            len(request),
            status,
            f" ({why})" if why else "",
            self.lost_spans,
        )
        return False

    def _post(self, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and answer. A connection of a moment ago is used again, and may be gone by now."""
        path = f"{self._parts.path.rstrip('/')}/v1/traces"
        connection = self._kept_connection()
        is_kept = connection is not None
        while True:
            connection = connection or self._connect(timeout_s)
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                connection.request("POST", path, request, self._headers)
                response = connection.getresponse()
                status, answer = response.status, response.read()
            except BaseException as error:
                connection.close()
                if not is_kept or not isinstance(error, _GONE):
                    raise
                connection, is_kept = None, False
                continue
            if response.will_close:
                connection.close()
            else:
                other, self._kept = self._kept, (connection, time.monotonic())
                if other is not None:  # another thread's
                    other[0].close()
            return status, answer

    def _kept_connection(self) -> http.client.HTTPConnection | None:
        """Take the one that is kept, if it is still good; else it is closed."""
        if self._pid != os.getpid():
            self._own_process()
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        connection, used_at = kept
        if time.monotonic() - used_at < _KEEP_S:
            return connection
        connection.close()
        return None

    def _close_idle(self) -> None:
        kept = self._kept
        if kept is not None and time.monotonic() - kept[1] >= _KEEP_S:
            self._kept_connection()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def _failed(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._say(error)

    def _say(self, error: Exception) -> None:
        if self.says_outages and self._said.due():
            logger.warning(
                "hub %s does not take spans (%s); they wait in %r", self.url, error, str(self.spool.directory)
            )


def _reason(answer: bytes) -> str:
    """What a hub says in the body of an error: the message of its JSON, or the text as it is."""
    text = answer.decode(errors="replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("message"), str):
        text = said["message"]
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:_REASON_CHARS]


def _rejected_spans(answer: bytes) -> tuple[int, str]:
    """How many spans a hub does not take of those that it was sent, and why."""
    if not answer:  # an empty message: protobuf is not loaded into the agent's process for that
        return 0, ""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:  # not OTLP's answer, but a success
        return 0, ""
    return int(partial.rejected_spans), str(partial.error_message)[:_REASON_CHARS]
