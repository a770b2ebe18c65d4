"""Attributes of `/embeddings` calls: the text that went in, and how long the vectors are, which stay out.

Knows OpenAI's embeddings API. Invariant: what went in as token ids is counted and named in
`spangrad.dropped`, for it has no text.
"""

from collections.abc import Mapping
from typing import Any

from spangrad.tracer import conventions as c
from spangrad.tracer.wire.chat import (
    Attributes,
    identity_attributes,
    put_messages,
    request_attributes,
    usage_attributes,
)

_USAGE = {"prompt_tokens": c.INPUT_TOKENS}
_FLOAT32_BYTES = 4


def embeddings_request(request: Mapping[str, Any], dropped: dict[str, str]) -> Attributes:
    """What was to be embedded."""
    attributes = request_attributes({key: value for key, value in request.items() if key != "input"})
    attributes.setdefault(c.PURPOSE, "embedding")
    given = request.get("input")
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        parts = [{"type": "text", "content": text} for text in texts]
        put_messages(attributes, [{"role": "user", "parts": parts}], dropped)
    else:
        count = len(texts) if isinstance(texts, list) else 0
        dropped[c.INPUT_MESSAGES] = f"the input was no text but a list of {count} entries"
    return attributes


def embeddings_response(
    response: Mapping[str, Any], dropped: dict[str, str], request: Mapping[str, Any] | None = None
) -> Attributes:
    """How long the vectors are, and what they cost."""
    attributes = identity_attributes(response) | usage_attributes(response.get("usage"), _USAGE)
    first = next(iter(response.get("data") or ()), None)
    vector = first.get("embedding") if isinstance(first, Mapping) else None
    if isinstance(vector, list):
        attributes[c.EMBEDDING_DIMENSIONS] = len(vector)
    elif isinstance(vector, str):  # base64 of float32
        padding = vector.count("=", -2)
        attributes[c.EMBEDDING_DIMENSIONS] = (len(vector) * 3 // 4 - padding) // _FLOAT32_BYTES
    return attributes
