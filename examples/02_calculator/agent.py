"""A plain OpenAI-SDK loop that solves word problems with a calculator.

Its last message is the answer. It talks to whatever `OPENAI_BASE_URL` names, and knows
nothing of training.

    OPENAI_BASE_URL=http://127.0.0.1:8100/v1 OPENAI_API_KEY=none \
        python agent.py "12 boxes with 7 pears each: how many?"
"""

import json
import os
import sys
from functools import lru_cache
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from word_problems import calculate

SYSTEM_PROMPT = "Answer with a number."
MAX_CALLS = 4
"""Model calls that a problem may take; a run that needs more has no answer."""
MAX_TOKENS = 48
"""Of one reply."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Value of an expression of integers, +, - and *.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


@lru_cache(maxsize=8)
def _client(base_url: str | None) -> OpenAI:
    return OpenAI(base_url=base_url)


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Solve `task["question"]`.

    Returns:
        `answer`, the text of the last message ("" if there is none), and `calls`, the
        number of model calls.
    """
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task["question"]},
    ]
    for calls in range(1, MAX_CALLS + 1):
        completion = _client(os.environ.get("OPENAI_BASE_URL")).chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "policy"),
            messages=messages,
            tools=TOOLS,
            temperature=float(task.get("temperature", 1.0)),
            max_completion_tokens=MAX_TOKENS,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return {"answer": (message.content or "").strip(), "calls": calls}
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for call in message.tool_calls:
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)  # TOOLS has no other kind
            content = _use_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return {"answer": "", "calls": MAX_CALLS}


def _use_tool(name: str, arguments: str) -> str:
    try:
        if name != "calculate":
            raise ValueError(f"no tool {name!r}")
        return str(calculate(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"[:80]


if __name__ == "__main__":
    print(run({"question": sys.argv[1], "temperature": 0.0})["answer"])
