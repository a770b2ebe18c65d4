"""OTLP's JSON form (hex ids, enums as numbers) -> messages, all at once or, where that fails, one by one.

Knows what protobuf's JSON parser refuses and what of that can be kept in another form; knows no framing.
Invariant: what is mended says in the stored text what was sent.
"""

import base64
import binascii
import copy
import json
import math
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf import json_format  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from spangrad.store.faults import Faults, Outcome
from spangrad.store.requests.signals import Signal
from spangrad.tracer.conventions import storable

UNFIT: Final = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError),
    json_format.ParseError,
)
"""What a parser says of data that it can't take."""
SURROGATES: Final = "lone surrogates"
BIG_NUMBERS: Final = "integers beyond 64 bits"
BARE_FLOATS: Final = "NaN or Infinity without quotes"
OTHER_TYPES: Final = "values of another type than they say"
UNKNOWN_FIELDS: Final = "fields that OTLP does not have, left off"
BAD_IDS: Final = "bad ids"
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_SCALARS: Final = frozenset(
    {"stringValue", "boolValue", "intValue", "doubleValue", "bytesValue"}
    | {"string_value", "bool_value", "int_value", "double_value", "bytes_value"}
)
_KINDS: Final = (
    (("UnixNano", "unix_nano"), "bad times"),
    (("enum value",), "unknown enum values"),
    (("too deep", "recursion"), "nested too deep"),
)
"""Words of an error -> kind of the fault."""


class _BadId(ValueError):
    """An id that is no hex."""


def parsed(data: Any, signal: Signal) -> Any:
    """A request out of its decoded JSON, which is changed on the way. Raises one of `UNFIT`."""
    elements = [data]
    for depth in range(len(signal.fields)):
        elements = [inner for outer in elements for inner in _items(outer, *signal.names(depth))]
    for element in elements:
        _prepare(element)
    request = signal.request()
    json_format.ParseDict(data, request)  # strict: else it takes text where an object should be, and drops it
    return request


def salvaged(data: Any, signal: Signal, faults: Faults) -> Any:
    """The request with what of it can be read. Raises one of `UNFIT` if the data is no request."""
    request = signal.request()
    if isinstance(data, dict) and data and not data.keys() & set(signal.names(0)):
        raise TypeError(f"{signal.json_names[0]!r} was expected, got {list(data)!r:.80}")
    _fill(request, data, signal, 0, faults)
    return request


def _fill(into: Message, data: Any, signal: Signal, depth: int, faults: Faults) -> None:
    names = signal.names(depth)
    repeated = getattr(into, names[1])
    for child in _items(data, *names):
        own, inside = child, 1
        if not signal.is_element(depth):
            own, inside = _split(child, signal, depth + 1)
        if not _parse(
            repeated.add(),
            own,
            signal.noun if signal.is_element(depth) else "resource or scope",
            inside,
            faults,
        ):
            del repeated[-1]
        elif not signal.is_element(depth):
            try:
                _fill(repeated[-1], child, signal, depth + 1, faults)
            except TypeError as error:
                faults.add("wrong types", Outcome.LEFT_OUT, str(error))


def _split(container: Any, signal: Signal, depth: int) -> tuple[Any, int]:
    """A resource or scope without what is in it, and how many spans or log records these are, at least 1."""
    if not isinstance(container, dict):
        return container, 1
    own = {name: value for name, value in container.items() if name not in signal.names(depth)}
    return own, max(1, _count([container], signal, depth))


def _count(containers: Sequence[Any], signal: Signal, depth: int) -> int:
    try:
        inside = [one for container in containers for one in _items(container, *signal.names(depth))]
    except TypeError:
        return 1
    return len(inside) if signal.is_element(depth) else _count(inside, signal, depth + 1)


def _parse(into: Message, data: Any, noun: str, count: int, faults: Faults) -> bool:
    """Read one message, mended if need be. Returns whether it could be read."""
    try:
        own = copy.deepcopy(data)
        _prepare(own)
        json_format.ParseDict(own, into)
        return True
    except UNFIT:
        into.Clear()
    mender = _Mender()
    try:
        own = mender.mended(data)
        mender.look_for_unknown(own, into.DESCRIPTOR)
        _prepare(own)
        _check_enums(own)
        json_format.ParseDict(own, into, ignore_unknown_fields=True)
    except UNFIT as error:
        faults.add(_kind(error), Outcome.LEFT_OUT, f"{_called(noun, data)}: {error}", count)
        return False
    for kind in sorted(mender.kinds):
        faults.add(kind, Outcome.MENDED, _called(noun, data))
    return True


def _prepare(element: dict[str, Any]) -> None:
    """Bring ids into the form that protobuf's parser reads."""
    _ids_to_base64(element)
    for link in _items(element, "links"):
        _ids_to_base64(link)


def _check_enums(element: dict[str, Any]) -> None:
    """Raise ValueError for a name that is none: the parser would leave it out with the unknown fields."""
    _check_enum(element.get("kind"), Span.SpanKind)
    _check_enum(element.get("severityNumber"), SeverityNumber)
    if isinstance(status := element.get("status"), dict):
        _check_enum(status.get("code"), Status.StatusCode)


def _check_enum(value: Any, enum: Any) -> None:
    if isinstance(value, str) and not value.isdecimal() and value not in enum.keys():  # noqa: SIM118
        raise ValueError(f"enum value {value!r} is none of {list(enum.keys())}")


def _items(data: Any, *names: str) -> Sequence[dict[str, Any]]:
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, got {data!r:.40}")
    for name in names:
        if name in data:
            found = data[name] or []
            if not isinstance(found, list):
                raise TypeError(f"a list of {name} was expected, got {found!r:.40}")
            return found
    return []


def _ids_to_base64(data: dict[str, Any]) -> None:
    for name in _IDS:
        if data.get(name):
            try:
                data[name] = base64.b64encode(binascii.unhexlify(data[name])).decode("ascii")
            except (ValueError, TypeError) as error:
                raise _BadId(f"{name} is {data[name]!r:.60}; hex digits were expected") from error


def _kind(error: BaseException) -> str:
    if isinstance(error, _BadId):
        return BAD_IDS
    text = str(error)
    return next((kind for words, kind in _KINDS if any(word in text for word in words)), "wrong types")


def _called(noun: str, data: Any) -> str:
    if not isinstance(data, dict):
        return noun
    span_id, trace_id = data.get("spanId", data.get("span_id")), data.get("traceId", data.get("trace_id"))
    return f"{noun} {span_id!r:.40} of trace {trace_id!r:.40}" if span_id or trace_id else noun


class _Mender:
    """Makes values fit that OTLP has no form for, and remembers of what kinds they were."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def mended(self, value: Any) -> Any:
        """A copy in which every attribute value fits."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self.mended(each) for each in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((name, content),) = value.items()
            if name in _SCALARS and not isinstance(content, dict | list):
                return self._scalar(name, content)
        return {self._text(key): self.mended(each) for key, each in value.items()}

    def look_for_unknown(self, data: Any, descriptor: Any) -> None:
        """Remember fields that a message does not have. Raises TypeError for what is no object."""
        if not isinstance(data, dict):
            raise TypeError(f"an object was expected, got {data!r:.40}")
        by_json_name = {field.json_name: field for field in descriptor.fields}
        for name, value in data.items():
            field = by_json_name.get(name) or descriptor.fields_by_name.get(name)
            if field is None:
                self.kinds.add(UNKNOWN_FIELDS)
            elif field.message_type is not None and value is not None:
                for each in value if isinstance(value, list) else [value]:
                    self.look_for_unknown(each, field.message_type)

    def _scalar(self, name: str, content: Any) -> dict[str, Any]:
        if isinstance(content, float) and not math.isfinite(content) and name.startswith("double"):
            self.kinds.add(BARE_FLOATS)
            return {name: "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"}
        fitting = {name: self._text(content) if isinstance(content, str) else content}
        try:
            json_format.ParseDict(fitting, AnyValue())
            return fitting
        except UNFIT:
            is_number = name.startswith("int") and str(content).lstrip("-").isdecimal()
            self.kinds.add(BIG_NUMBERS if is_number else OTHER_TYPES)
            return {"stringValue": self._text(content if isinstance(content, str) else json.dumps(content))}

    def _text(self, text: str) -> str:
        kept = storable(text)
        if kept != text:
            self.kinds.add(SURROGATES)
        return kept
