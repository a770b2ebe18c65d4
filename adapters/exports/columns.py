"""Rows of exports as attributes of a span, and back.

Knows plain values and times; does not know vendors.

Invariants:
* every column of a row is one attribute, so that the row can be given back: what an attribute can't hold
  (None, lists, objects, huge numbers, text that is no UTF-8) is JSON, and `<prefix>json_columns` says where;
* an id of OTel's form stays as it is, a UUID loses its hyphens where OTel's is as long, any other is hashed.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from spangrad.adapters.exports import ids
from spangrad.adapters.reading import parsed

TRACE_ID_DIGITS: Final = 32
SPAN_ID_DIGITS: Final = 16
JSON_COLUMNS: Final = "json_columns"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_INT64: Final = 2**63


def otel_id(told: str, digits: int) -> str:
    """An id with so many hex digits: the vendor's, if it has this form, else its BLAKE2 hash."""
    plain = told.lower()
    if len(plain) == digits + 4 and _UUID.fullmatch(plain) and plain.strip("0-"):
        return plain.replace("-", "")
    return ids.trace_id(told) if digits == TRACE_ID_DIGITS else ids.span_id(told)


def nanoseconds(told: Any) -> int | None:
    """A time in ns since 1970; None if it is none. Without a zone it is UTC."""
    moment = told
    if isinstance(told, str):
        try:
            moment = datetime.fromisoformat(told.strip())
        except ValueError:
            return None
    if not isinstance(moment, datetime):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    time_ns = (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    return time_ns if 0 <= time_ns < _INT64 else None


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    return float(value) if math.isfinite(value) else None


def text(value: Any) -> str | None:
    """A string that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


def mapping(value: Any) -> Mapping[str, Any]:
    """An object: JSON, text of JSON, or the pairs of a map of Parquet's; an empty one for anything else."""
    value = parsed(value)
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = {str(key): inner for key, inner in value}
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> Sequence[Any]:
    """A list; an empty one for anything else."""
    return value if isinstance(value, list) else ()


def plain_mapping(value: Any) -> dict[str, Any]:
    """An object; an empty one for anything else, text of JSON too."""
    return dict(value) if isinstance(value, Mapping) else {}


def attributes_of(row: Mapping[str, Any], prefix: str, places: Mapping[str, str]) -> dict[str, Any]:
    """Every column as an attribute: `places` names those that a dialect has, others get the prefix."""
    attributes: dict[str, Any] = {}
    as_json: list[str] = []
    for column, value in row.items():
        name = attribute_name(places.get(column, prefix + column))
        if is_plain(value):
            attributes[name] = value
        else:
            attributes[name] = to_json(value)
            as_json.append(column)
    attributes[prefix + JSON_COLUMNS] = json.dumps(as_json)
    return attributes


def row_of(attributes: Mapping[str, Any], prefix: str, places: Mapping[str, str]) -> dict[str, Any]:
    """The row that `attributes_of` was given; times of a binary format come back as ISO 8601."""
    as_json = json.loads(attributes[prefix + JSON_COLUMNS])
    columns = {name: column for column, name in places.items()}
    row: dict[str, Any] = {}
    for name, value in attributes.items():
        column = columns.get(name) or (name.removeprefix(prefix) if name.startswith(prefix) else None)
        if column is not None and name != prefix + JSON_COLUMNS:
            row[column] = json.loads(value) if column in as_json else value
    return row


def attribute_name(name: str) -> str:
    """A name that an attribute can have: what is no UTF-8 is written out."""
    return name.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """ASCII JSON of a value; times as ISO 8601, other strangers as text."""
    return json.dumps(value, default=_stranger)


def _stranger(value: Any) -> Any:
    return value.isoformat() if isinstance(value, (datetime, date)) else str(value)


def is_plain(value: Any) -> bool:
    """Whether an attribute can hold the value."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return -_INT64 <= value < _INT64
    return isinstance(value, float) and math.isfinite(value)
