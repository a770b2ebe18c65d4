"""What OTLP tells of a span or log record and no other column has a place for.

Knows the column `other`. Invariant: a record of which there is nothing of the kind has NULL there.
"""

from dataclasses import replace
from typing import Any, Final, TypeVar

from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.records import LogRecord, RepeatedKeys, Span

Record = TypeVar("Record", Span, LogRecord)

_ATTRIBUTES: Final = ("attributes", "resource", "scope_attributes")
_MORE: Final = ("resource_dropped_attributes", "scope_dropped_attributes", "entity_refs")


def other_of(record: Span | LogRecord) -> str | None:
    """The column of a record: hidden values of its attributes, and what its resource and scope have more."""
    told: dict[str, Any] = {}
    for name in _ATTRIBUTES:
        value = getattr(record, name)
        if isinstance(value, RepeatedKeys):
            told[name] = [list(pair) for pair in value.hidden]
    for name in _MORE:
        if value := getattr(record, name):
            told[name] = value
    return encode_json(told) if told else None


def with_other(record: Record, other: str) -> Record:
    """The record with what the column adds to it."""
    told = decode_json(other)
    for name in _ATTRIBUTES:
        if name in told:
            told[name] = RepeatedKeys(getattr(record, name), told[name])
    if "entity_refs" in told:
        told["entity_refs"] = tuple(told["entity_refs"])
    return replace(record, **told)
