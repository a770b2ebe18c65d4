"""OTLP's protobuf form, read field by field where protobuf's parser refuses the whole.

Knows the wire format. Invariants: a span or log record that can be parsed alone is there as it came; in
one that can't, text that is no UTF-8 is escaped; only then it is left out.
"""

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from spangrad.store.faults import Faults, Outcome
from spangrad.store.requests.from_json import SURROGATES
from spangrad.store.requests.signals import Signal
from spangrad.tracer.conventions import storable

NOT_UTF8: Final = "text that is no UTF-8"
BROKEN_BYTES: Final = "bytes that are no protobuf"
CUT_SHORT: Final = "cut short"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES: Final = 10

Field = tuple[int, int, int, int, int]
"""Number, wire type; where it begins, where its content begins, where it ends."""


def salvaged_wire(body: bytes, signal: Signal, faults: Faults) -> Any:
    """The request with what of it can be read. No faults and nothing in it: the bytes are no request."""
    request = signal.request()
    found = Faults()
    if _fill(request, body, signal, 0, found):
        faults.merge(found)
    return request


def _fill(into: Message, body: bytes, signal: Signal, depth: int, faults: Faults) -> int:
    """Read the children of one level. Returns how many spans or log records were met, good or bad."""
    field: Any = into.DESCRIPTOR.fields_by_name[signal.fields[depth]]
    repeated = getattr(into, field.name)
    _, children, problem = _split(body, field.number)
    met = 0
    for child in children:
        if signal.is_element(depth):
            met += 1
            if not _parse(repeated.add(), child, signal.noun, faults):
                del repeated[-1]
            continue
        own, _, _ = _split(child, field.message_type.fields_by_name[signal.fields[depth + 1]].number)
        container = repeated.add()
        if _parse(container, own, "resource or scope", faults):
            met += _fill(container, child, signal, depth + 1, faults)
        else:
            del repeated[-1]
    if problem:
        faults.add(CUT_SHORT, Outcome.LEFT_OUT, f"what follows {len(children)} {field.name}: {problem}")
    return met


def _split(body: bytes, number: int) -> tuple[bytes, list[bytes], str | None]:
    """The other fields of a message, the children that a field of it holds, and what ended it early."""
    own, children = bytearray(), []
    try:
        for found, wire, begin, content, end in _fields(body):
            if found == number and wire == _BYTES:
                children.append(body[content:end])
            else:
                own += body[begin:end]
    except ValueError as error:
        return bytes(own), children, str(error)
    return bytes(own), children, None


def _parse(into: Message, body: bytes, noun: str, faults: Faults) -> bool:
    """Read one message, mended if need be. Returns whether it could be read."""
    try:
        into.ParseFromString(body)
        return True
    except DecodeError:
        into.Clear()
    kinds: set[str] = set()
    try:
        into.ParseFromString(_mended(body, into.DESCRIPTOR, kinds))
    except (DecodeError, ValueError, RecursionError) as error:
        faults.add(BROKEN_BYTES, Outcome.LEFT_OUT, f"{_called(noun, body, into.DESCRIPTOR)}: {error}")
        return False
    for kind in sorted(kinds):
        faults.add(kind, Outcome.MENDED, _called(noun, body, into.DESCRIPTOR))
    return True


def _mended(body: bytes, descriptor: Any, kinds: set[str]) -> bytes:
    """The message with its text in UTF-8. Raises ValueError if it is no message."""
    made = bytearray()
    for number, wire, begin, content, end in _fields(body):
        field: Any = descriptor.fields_by_number.get(number)
        if field is None or wire != _BYTES or field.type == FieldDescriptor.TYPE_BYTES:
            made += body[begin:end]
            continue
        value = body[content:end]
        if field.type == FieldDescriptor.TYPE_STRING:
            value = _in_utf8(value, kinds)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            value = _mended(value, field.message_type, kinds)
        made += _varint(number << 3 | _BYTES) + _varint(len(value)) + value
    return bytes(made)


def _in_utf8(text: bytes, kinds: set[str]) -> bytes:
    try:
        text.decode()
        return text
    except UnicodeDecodeError:
        pass
    try:
        kept = storable(text.decode("utf-8", "surrogatepass"))
        kinds.add(SURROGATES)
    except UnicodeDecodeError:
        kept = text.decode("utf-8", "backslashreplace")
        kinds.add(NOT_UTF8)
    return kept.encode()


def _called(noun: str, body: bytes, descriptor: Any) -> str:
    ids: dict[str, str] = {}
    try:
        for number, wire, _, content, end in _fields(body):
            name = descriptor.fields_by_number[number].name if number in descriptor.fields_by_number else ""
            if wire == _BYTES and name in ("trace_id", "span_id"):
                ids[name] = body[content:end].hex()
    except ValueError:
        pass
    return f"{noun} {ids.get('span_id')!r:.40} of trace {ids.get('trace_id')!r:.40}" if ids else noun


def _fields(body: bytes) -> Iterator[Field]:
    """The fields of a message, one after the other. Raises ValueError where there is none."""
    position = 0
    while position < len(body):
        begin = position
        tag, position = _read_varint(body, position)
        number, wire, content = tag >> 3, tag & 7, position
        if wire == _VARINT:
            _, position = _read_varint(body, position)
        elif wire == _FIXED64:
            position += 8
        elif wire == _FIXED32:
            position += 4
        elif wire == _BYTES:
            length, content = _read_varint(body, position)
            position = content + length
        else:
            raise ValueError(f"byte {begin} begins no field")
        if not number or position > len(body):
            raise ValueError(f"the field at byte {begin} does not end inside its message")
        yield number, wire, begin, content, position


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(_VARINT_BYTES):
        if position >= len(body):
            break
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"no number ends at byte {position}")


def _varint(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
