"""JSON text for what JSON has no word for.

OTLP attribute values include bytes and non-finite floats; both must survive a JSON
column. A dict with one key that begins with `$` is a tag:

    {"$bytes": base64}   {"$float": "nan"}   {"$map": {...}}   a dict that looks like a tag
    {"$repeated": [{...}, [[key, value], ...]]}   a dict some of whose keys were sent more than once

Other modules add tags of their own at the top level of `attributes` (`$column`,
`$messages`). Knows values and text; knows no tables.

Invariant: `decode_json(encode_json(v)) == v`, types included, for every OTLP value.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.errors import StoreError
from spangrad.store.records import RepeatedKeys


def encode_json(value: Any) -> str:
    """JSON text of a value of str, bool, int, float, bytes, None, lists and dicts."""
    return json_text(tagged(value))


def json_text(value: Any) -> str:
    """Compact JSON of a value that holds no bytes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{_short(value)} can't be stored as JSON: {error}") from error


def decode_json(text: str) -> Any:
    """Undo `encode_json`."""
    return untagged(json.loads(text))


def tagged(value: Any) -> Any:
    """Replace what JSON can't hold by tags."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise StoreError(f"{_short(value)} has keys that are no strings; JSON needs strings")
        inner = {key: tagged(item) for key, item in value.items()}
        if isinstance(value, RepeatedKeys):
            return {"$repeated": [inner, [[key, tagged(hidden)] for key, hidden in value.hidden]]}
        return {"$map": inner} if is_tag(inner) else inner
    if isinstance(value, Sequence):
        return [tagged(item) for item in value]
    raise StoreError(
        f"{_short(value)} of type {type(value).__name__} can't be stored; give str, number or JSON"
    )


def untagged(value: Any) -> Any:
    """Undo `tagged`."""
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not is_tag(value):
        return {key: untagged(item) for key, item in value.items()}
    ((tag, content),) = value.items()
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$float":
        return float(content)
    if tag == "$map":
        return {key: untagged(item) for key, item in content.items()}
    if tag == "$repeated":
        inner = {key: untagged(item) for key, item in content[0].items()}
        return RepeatedKeys(inner, [(key, untagged(hidden)) for key, hidden in content[1]])
    raise StoreError(f"unknown tag {tag!r} in stored JSON; the file is damaged or written by another program")


def is_tag(value: Mapping[str, Any]) -> bool:
    """Whether a dict would be read as a tag."""
    return len(value) == 1 and next(iter(value)).startswith("$")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
