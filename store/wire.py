"""Records as JSON between `HubClient` and the hub.

Knows the records' fields; knows no HTTP. Spans travel as OTLP protobuf, in frames:

    uint32 LE size | JSON [[rollout_id, attempt], ...] | uint32 LE size | ExportTraceServiceRequest

one [rollout_id, attempt] a span, as OTLP has no field for what a span inherited. A frame
of two zeros ends the stream; a stream without it was cut off. Log records likewise, without owners:

    uint32 LE size | ExportLogsServiceRequest
"""

import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import islice
from typing import Any, Final, TypeVar

from spangrad import errors
from spangrad.errors import SpangradError, StoreError
from spangrad.store.checking import check_fields
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.otlp import decode_logs, decode_request, encode_logs, encode_request
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    Ending,
    LogRecord,
    Policy,
    PolicyDecision,
    Reward,
    RewardAuthor,
    Rollout,
    RolloutStatus,
    RunEvent,
    Span,
    UnreadTrace,
    Update,
    UpdateRead,
    UpdateSample,
)

Record = TypeVar(
    "Record",
    Rollout,
    Ending,
    Reward,
    Update,
    Policy,
    PolicyDecision,
    RunEvent,
    UpdateSample,
    UpdateRead,
    UnreadTrace,
)

SPANS_TYPE: Final = "application/x-spangrad-spans"
LOGS_TYPE: Final = "application/x-spangrad-logs"
_SIZE: Final = struct.Struct("<I")
_SPANS_PER_FRAME: Final = 64
_END: Final = _SIZE.pack(0) * 2


def record_to_wire(
    record: Rollout | Ending | Reward | Update | Policy | PolicyDecision | RunEvent | UnreadTrace,
) -> dict[str, Any]:
    """A record as a dict for `encode_json`."""
    return asdict(record)


def record_from_wire(kind: type[Record], data: Any) -> Record:
    """A record from its dict. Raises StoreError naming what does not fit."""
    if not isinstance(data, Mapping):
        raise StoreError(f"a {kind.__name__} was expected, got {data!r:.80}; send an object")
    unknown = data.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise StoreError(f"a {kind.__name__} has no field {sorted(unknown)[0]!r}; the sender may be newer")
    check_fields(kind, data)
    converted = {
        name: value if value is None or name not in _CONVERT else _CONVERT[name](value)
        for name, value in data.items()
    }
    try:
        return kind(**converted)
    except TypeError as error:
        raise StoreError(f"a {kind.__name__} lacks a field: {error}") from error


def records_from_wire(kind: type[Record], data: Any) -> list[Record]:
    """A list of records."""
    if not isinstance(data, list):
        raise StoreError(f"a list of {kind.__name__} was expected, got {data!r:.80}")
    return [record_from_wire(kind, item) for item in data]


def error_from_wire(kind: str, message: str) -> SpangradError:
    """An error of ours from the name of its class; StoreError for a name that is unknown here."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, SpangradError):
        return found(message)
    return StoreError(message)


def status_from_wire(value: Any) -> RolloutStatus:
    """A status from its text."""
    try:
        return RolloutStatus(value)
    except ValueError as error:
        raise StoreError(
            f"{value!r} is no status of a rollout; give one of {list(map(str, RolloutStatus))}"
        ) from error


def _samples(data: Any) -> list[UpdateSample]:
    return records_from_wire(UpdateSample, data)


def _reads(data: Any) -> list[UpdateRead]:
    return records_from_wire(UpdateRead, data)


_CONVERT: Final[Mapping[str, Callable[[Any], Any]]] = {
    "status": status_from_wire,
    "author": RewardAuthor,
    "decision": Decision,
    "decided_by": DecisionAuthor,
    "samples": _samples,
    "reads": _reads,
}


def spans_to_frames(spans: Iterable[Span]) -> Generator[bytes, None, None]:
    """Frames of a stream of spans, the last one included."""
    iterator = iter(spans)
    while chunk := list(islice(iterator, _SPANS_PER_FRAME)):
        owners = encode_json([[span.rollout_id, span.attempt] for span in chunk]).encode()
        request = encode_request(chunk)
        yield _SIZE.pack(len(owners)) + owners + _SIZE.pack(len(request)) + request
    yield _END


def spans_from_frames(pieces: Iterable[bytes]) -> Iterator[Span]:
    """Spans of a stream of bytes. Raises StoreError if the stream ends early."""
    source = _Source(pieces)
    while True:
        owners = source.take_part()
        request = source.take_part()
        if not owners and not request:
            return
        spans, _ = decode_request(request)
        named: Sequence[Sequence[Any]] = decode_json(owners.decode())
        for span, (rollout_id, attempt) in zip(spans, named, strict=True):
            yield replace(span, rollout_id=rollout_id, attempt=attempt)


def logs_to_frames(records: Iterable[LogRecord]) -> Generator[bytes, None, None]:
    """Frames of a stream of log records, the last one included."""
    iterator = iter(records)
    while chunk := list(islice(iterator, _SPANS_PER_FRAME)):
        request = encode_logs(chunk)
        yield _SIZE.pack(len(request)) + request
    yield _SIZE.pack(0)


def logs_from_frames(pieces: Iterable[bytes]) -> Iterator[LogRecord]:
    """Log records of a stream of bytes. Raises StoreError if the stream ends early."""
    source = _Source(pieces)
    while request := source.take_part():
        yield from decode_logs(request)


class _Source:
    """Bytes in the portions that are asked for."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._buffer = bytearray()

    def take_part(self) -> bytes:
        (size,) = _SIZE.unpack(self._take(_SIZE.size))
        return self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            piece = next(self._pieces, None)
            if piece is None:
                raise StoreError("the hub's answer was cut off; ask again")
            self._buffer += piece
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken
