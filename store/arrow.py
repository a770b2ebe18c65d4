"""Answers as Arrow between the hub and whoever asks: an IPC stream that any Arrow library reads.

Knows bytes and batches; knows no HTTP and no SQL. Invariants:

* no more than a batch is in memory;
* a part is never taken for the whole: after an error there is no end of the stream, and the connection
  is to break. What went wrong is in the custom metadata of a last, empty batch, for `batches_from_ipc`.
"""

import io
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.errors import SpangradError, StoreError
from spangrad.store.wire import error_from_wire

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
MAX_ANSWER_BYTES: Final = 4 * 2**30

_ERROR: Final = b"spangrad.error"
_MESSAGE: Final = b"spangrad.message"


def ipc_from_answer(
    answer: AbstractContextManager[Any], *, max_bytes: int = MAX_ANSWER_BYTES
) -> Generator[bytes, None, None]:
    """The stream of an answer, piece by piece. Raises StoreError beyond `max_bytes`."""
    pieces = _Pieces()
    with answer as reader, pa.ipc.new_stream(pieces, reader.schema) as stream:
        yield pieces.take()
        try:
            for batch in reader:
                stream.write_batch(batch)
                if pieces.size > max_bytes:
                    raise StoreError(f"the answer has more than {max_bytes} bytes; ask for less at a time")
                yield pieces.take()
        except SpangradError as error:
            told = {_ERROR: type(error).__name__, _MESSAGE: str(error)}
            stream.write_batch(pa.RecordBatch.from_pylist([], schema=reader.schema), told)
            yield pieces.take()
            raise
    yield pieces.take()


def answer_from_ipc(pieces: Iterable[bytes]) -> Any:
    """The `pyarrow.RecordBatchReader` of such a stream. Raises, while read, what the sender raised."""
    stream = pa.ipc.open_stream(io.BufferedReader(_Body(pieces)))

    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            try:
                batch, told = stream.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            if told is not None and _ERROR in told:
                raise error_from_wire(told[_ERROR].decode(), told[_MESSAGE].decode())
            yield batch

    return pa.RecordBatchReader.from_batches(stream.schema, batches())


class _Pieces(io.RawIOBase):
    """Keeps what is written until it is taken."""

    def __init__(self) -> None:
        self.size = 0
        self._written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._written.append(piece)
        self.size += len(piece)
        return len(piece)

    def take(self) -> bytes:
        taken = b"".join(self._written)
        self._written.clear()
        return taken


class _Body(io.RawIOBase):
    """Pieces as a file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        target = memoryview(buffer)
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
