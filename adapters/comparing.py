"""Messages in a form in which equal content is equal, however a client wrote it down.

Knows where clients differ: content as text or as parts, "" or null, arguments as text or parsed. What is
compared, and what is left out of it, is for the one who compares to say.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.adapters.reading import parsed


def plain_content(content: Any) -> Any:
    """Parts that are all text as one text; no content is empty text."""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    return content or ""


def plain_tool_calls(message: Mapping[str, Any]) -> list[Any]:
    """Name and parsed arguments of each tool call; one of another form stays as it is."""
    calls = message.get("tool_calls")
    return [_plain_call(call) for call in calls] if isinstance(calls, list | tuple) else []


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return [function.get("name"), parsed(function.get("arguments"))]
