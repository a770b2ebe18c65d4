"""What a step did, without what never repeats: the reply that the policy gave.

Where the reply calls tools, the calls are the action, whatever was said beside them; else its text is.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spangrad.adapters.model_call import ModelCall


def action_of(call: ModelCall) -> str | None:
    """Hash of the reply's tool calls, or of its content.

    None where there is no reply, or several, or one that is nested too deep to be written as JSON.
    """
    if len(call.choices) != 1:
        return None
    message = call.choices[0].message
    tools = [_called(each.get("function", each)) for each in message.get("tool_calls") or ()]
    done = tools or message.get("content")
    if not done:
        return None
    try:
        text = json.dumps(done, sort_keys=True, ensure_ascii=False)
    except RecursionError:
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _called(function: Mapping[str, Any]) -> tuple[Any, Any]:
    """Name and arguments; what is JSON counts whatever its spaces and order."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a policy can write `[[[[...` to the end
            arguments = json.loads(arguments)
    return function.get("name"), arguments
