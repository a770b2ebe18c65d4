"""The conversation that every recorder was shown: four calls of the picnic agent, written out.

`told(calls)` brings what a dialect says of them into one form, so that dialects can be compared: arguments
parsed, "no content" in one spelling, what only some recorders know left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.adapters.model_call import ModelCall

SYSTEM = {
    "role": "system",
    "content": "You are a picnic planner. Use the tools, then answer in one sentence.",
}
USER = {"role": "user", "content": "MAIN: plan a picnic for Saturday."}
CAFE = "café — “pique-nique” 🍞"
LYON = ("call_get_weather_0", "get_weather", {"city": "Lyon", "days": 2})
OSLO = ("call_get_weather_1", "get_weather", {"city": "Oslo", "days": 1})
EUROS = ("call_convert_2", "convert", {"amount": 40, "src": "EUR", "dst": "NOK"})
NOTES = ("call_search_notes_3", "search_notes", {"query": CAFE, "limit": 3})
TOOLS_NOT_TOLD = (
    "tool definitions were not recorded: tools were used, so the model was shown more than the messages"
)
"""Of a recorder that keeps none."""
TOOLS = ("get_weather", "convert", "search_notes")
FINISH_REASONS = ["tool_calls", "tool_calls", "tool_calls", "stop"]
ANSWER = "Lyon is dry on Saturday; pack the blue blanket. 40 EUR is about 468 NOK."
ARGUMENTS = ['{"city": "Lyon", "days": 2}', '{"city": "Oslo", "days": 1}']
"""The first arguments, byte for byte as the model wrote them."""
WRITTEN = [
    ['{"city": "Lyon", "days": 2}'],
    ['{"city": "Oslo", "days": 1}', '{"amount": 40, "src": "EUR", "dst": "NOK"}'],
    [f'{{"query": "{CAFE}", "limit": 3}}'],
    [],
]
"""All arguments of each reply, as the model wrote them."""


def _tool(name: str, description: str, required: list[str], **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOL_DEFINITIONS = [
    _tool("get_weather", "Forecast for a city.", ["city"], city="string", days="integer"),
    _tool("convert", "Convert money.", ["amount", "src", "dst"], amount="number", src="string", dst="string"),
    _tool("search_notes", "Search the notes.", ["query"], query="string", limit="integer"),
]
"""As OpenAI's client sent them; frameworks word them in their own way."""


def calling(content: str | None, *calls: tuple[str, str, Mapping[str, Any]]) -> dict[str, Any]:
    """An assistant's message that calls tools."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(call_id: str, content: str) -> dict[str, Any]:
    """A tool's message."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def replies() -> list[dict[str, Any]]:
    """What the model answered in each of the four calls."""
    return [
        calling(None, LYON),
        calling("Two more look-ups.", OSLO, EUROS),
        calling(None, NOTES),
        {"role": "assistant", "content": ANSWER},
    ]


def requests(amount: str = "40") -> list[list[dict[str, Any]]]:
    """The messages of each of the four calls; LangChain's agent converts `40.0` euros."""
    first, second, third, _ = replies()
    notes = json.dumps([f"note about {CAFE}"] * 3, ensure_ascii=False)
    steps = [
        [SYSTEM, USER],
        [first, result(LYON[0], '{"city": "Lyon", "days": 2, "sky": "dry", "high_c": 18}')],
        [
            second,
            result(OSLO[0], '{"city": "Oslo", "days": 1, "sky": "dry", "high_c": 18}'),
            result(EUROS[0], f"{amount} EUR = 468.0 NOK"),
        ],
        [third, result(NOTES[0], notes)],
    ]
    return [[message for step in steps[: turn + 1] for message in step] for turn in range(4)]


def told(calls: Sequence[ModelCall]) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Request messages and first reply of each call, in the form of this module."""
    return [
        ([_plain(message) for message in call.messages], _plain(call.choices[0].message)) for call in calls
    ]


def expected(amount: str = "40") -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """What `told` gives for a recorder that keeps everything."""
    return list(zip(requests(amount), replies(), strict=True))


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in calls
        ]
    if message["role"] == "tool":
        plain["tool_call_id"] = message.get("tool_call_id")
    return plain


def _text(content: Any) -> Any:
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    return content or None
