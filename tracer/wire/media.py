"""References that stand in a span for images, sound and files.

    {"type": "blob", "modality": "image", "mime_type": "image/png", "sha256": "9f86..", "bytes": 61234}
    {"type": "uri",  "modality": "image", "uri": "https://..."}
    {"type": "file", "modality": "file",  "file_id": "file-1"}

Knows how OpenAI's and Anthropic's APIs carry bytes in JSON. Invariants:
* No base64 data of a request or reply is in what these functions return; its hash and length are.
* Only what these APIs mark as data is taken for data: text that looks like base64 is what the model read.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

_DATA_KEYS = {"b64_json": "image", "file_data": "file", "image_data": "image", "audio_data": "audio"}
"""Fields that hold base64 wherever they are."""


def blob(data: Any, modality: str, mime_type: str | None) -> dict[str, Any]:
    """The reference to base64 `data`."""
    text = data if isinstance(data, str) else ""
    try:
        raw = base64.b64decode(text)
    except (binascii.Error, ValueError):
        raw = text.encode("utf-8", "replace")
    return {
        "type": "blob",
        "modality": modality,
        "mime_type": mime_type,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "bytes": len(raw),
    }


def by_url(url: Any, modality: str) -> dict[str, Any]:
    """The reference to what a URL names, or holds (`data:`)."""
    text = str(url)
    if text.startswith("data:"):
        head, comma, data = text.partition(",")
        if comma and head.endswith(";base64"):
            return blob(data, modality, head[len("data:") : -len(";base64")] or None)
    return {"type": "uri", "modality": modality, "uri": text}


def by_id(file_id: Any, modality: str) -> dict[str, Any]:
    """The reference to a file that the server keeps."""
    return {"type": "file", "modality": modality, "file_id": file_id}


def without_data(value: Any) -> Any:
    """JSON `value` with references in place of all that is marked as base64 data in it."""
    if isinstance(value, str):
        return by_url(value, _modality_of(value)) if _is_data_url(value) else value
    if isinstance(value, Mapping):
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            mime_type = value.get("media_type")
            return blob(value["data"], str(mime_type or "").partition("/")[0] or "file", mime_type)
        return {
            key: blob(item, _DATA_KEYS[key], None)
            if key in _DATA_KEYS and isinstance(item, str) and not _is_data_url(item)
            else without_data(item)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [without_data(item) for item in value]
    return value


def references_in(value: Any) -> int:
    """How many blobs were replaced by references in JSON `value`."""
    count = 0
    if isinstance(value, dict):
        if value.get("type") == "blob" and "sha256" in value:
            return 1
        for item in value.values():
            if isinstance(item, dict | list):
                count += references_in(item)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                count += references_in(item)
    return count


def _is_data_url(text: str) -> bool:
    return text.startswith("data:") and ";base64," in text[:200]


def _modality_of(url: str) -> str:
    kind = url[len("data:") :].partition("/")[0]
    return kind if kind in ("image", "audio", "video") else "file"
