"""Conversations in ShareGPT's from/value form, as LLaMA-Factory reads it.

Its converter (`SharegptDatasetConverter`) skips in silence what does not go human or observation, gpt or
function_call, human or observation, ...; so such a conversation is `NoForm` here. Where one turn has to hold
several things, they are written as LLaMA-Factory itself writes them: results of parallel calls with the
separator of its OpenAI converter, text before a call in front of `<tool_call>`, reasoning in `<think>`.
"""

import json
from collections.abc import Iterator
from typing import Final

from spangrad.adapters.datasets.chat import NoForm, Row, arguments_of, name_of, text_of, tool_calls_of
from spangrad.adapters.datasets.conversation import Conversation, Message

RESULTS_SEPARATOR: Final = "\n</tool_response>\n<tool_response>\n"
_ASKING: Final = ("human", "observation")
_ANSWERING: Final = ("gpt", "function_call")


def sharegpt_row(conversation: Conversation) -> Row:
    """`conversations`, and `tools` as JSON where there are any.

    Raises:
        NoForm: ShareGPT can't tell it.
    """
    wrote = zip(conversation.messages, conversation.own, conversation.new, strict=True)
    replies = [(own, new) for message, own, new in wrote if message.get("role") == "assistant"]
    if not all(own for own, _ in replies):
        raise NoForm("a reply is not the policy's, and every reply of ShareGPT is trained")
    if not all(new for _, new in replies):
        raise NoForm("a reply is in an earlier row, and every reply of ShareGPT is trained")
    turns: list[dict[str, str]] = []
    for turn in _turns(conversation):
        if turns and turn["from"] == turns[-1]["from"] == "observation":
            turns[-1]["value"] += RESULTS_SEPARATOR + turn["value"]
        else:
            turns.append(turn)
    alternating = turns[1:] if turns and turns[0]["from"] == "system" else turns
    for index, turn in enumerate(alternating):
        if turn["from"] not in (_ANSWERING if index % 2 else _ASKING):
            raise NoForm(f"turns don't alternate: {turn['from']!r} is out of its place")
    row: Row = {"conversations": turns}
    if conversation.call.tools:
        functions = [tool.get("function", tool) for tool in conversation.call.tools]
        row["tools"] = json.dumps(functions, ensure_ascii=False)
    return row


def _turns(conversation: Conversation) -> Iterator[dict[str, str]]:
    for message in conversation.messages:
        role = message.get("role")
        if role == "assistant":
            yield _reply(message)
        elif role in ("system", "developer"):
            yield {"from": "system", "value": text_of(message)}
        elif role == "tool":
            yield {"from": "observation", "value": text_of(message)}
        elif role == "user":
            yield {"from": "human", "value": text_of(message)}
        else:
            raise NoForm(f"a message has role {role!r:.40}")


def _reply(message: Message) -> dict[str, str]:
    thought = f"<think>\n{message['reasoning']}\n</think>\n\n" if message.get("reasoning") else ""
    text, calls = text_of(message), tool_calls_of(message)
    if not calls:
        return {"from": "gpt", "value": thought + text}
    told = [{"name": name_of(call), "arguments": arguments_of(call)} for call in calls]
    value = json.dumps(told if len(told) > 1 else told[0], ensure_ascii=False)
    if text:
        value = f"{text}\n<tool_call>{value}</tool_call>"
    return {"from": "function_call", "value": thought + value}
