"""What of recorded messages can be read in the text that a chat template made of them.

Knows messages as a template gets them (content a text, arguments a string) and rendered texts; knows no
template and no tokens.

Invariants:
* of a reply and of earlier tool calls everything must be there: content, thoughts, names, argument strings
  byte for byte, the content beside the thought and not in it. White space around a thought is the template's.
  Only where a template writes arguments in another form than JSON are keys and values enough;
* what else of a prompt is not there is told, and costs nobody a row: templates drop earlier thoughts, some of
  them other messages, and the policy would be shown no more.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

DROPS_THOUGHTS: Final = "the chat template drops earlier thoughts"
REWRITES: Final = "the chat template drops or rewrites messages"
ADDS: Final = "the chat template adds to replies"

Message = Mapping[str, Any]


def says_something(reply: Message) -> bool:
    """Whether there is anything to read in a reply."""
    return bool(reply["content"].strip() or thought_of(reply) or reply.get("tool_calls"))


def lost_of_reply(reply: Message, text: str, *, by_value: bool = False) -> str | None:
    """What of a reply is not in the text; None if all is there. `by_value`: as in `lost_calls`."""
    content, thought = reply["content"], thought_of(reply)
    if thought not in text:
        return thought
    beside = text.replace(thought, "\0", 1) if thought and thought not in content else text
    return content if content not in beside else lost_calls([reply], text, by_value=by_value)


def added_to_reply(reply: Message, text: str) -> Iterator[str]:
    """What a template wrote before and behind a reply of content alone: `what, text`.

    Of thoughts and tool calls nobody can tell what is added from the form that they are written in.
    """
    if thought_of(reply) or reply.get("tool_calls"):
        return
    before, _, behind = text.partition(reply["content"])
    if added := [part.strip() for part in (before, behind) if part.strip()]:
        # In one piece: what stands before the first ": " is what is counted.
        yield f"{ADDS}, {' and '.join(map(repr, added))}".replace(": ", ":")


def lost_calls(messages: Sequence[Message], text: str, *, by_value: bool = False) -> str | None:
    """A name or the arguments of a tool call in the messages that is not in the text; None if all are.

    With `by_value`, of a template that got arguments as objects: if it writes no JSON, their keys and values.
    """
    calls = (call["function"] for message in messages for call in message.get("tool_calls", ()))
    for function in calls:
        name, arguments = str(function["name"]), str(function["arguments"])
        if name not in text:
            return name
        if arguments not in text and not (by_value and _has_values(arguments, text)):
            return arguments
    return None


def unread(messages: Sequence[Message], prompt: str) -> Iterator[str]:
    """What of the messages can't be read in the prompt, white space aside: `what: which messages`."""
    shown, at = _dense(prompt), 0
    lost: dict[str, list[int]] = {}
    for index, message in enumerate(messages):
        for kind, text in ((DROPS_THOUGHTS, thought_of(message)), (REWRITES, message["content"])):
            # Messages mostly come in their order, so that what is behind the last one is looked at first.
            places = (shown.find(form, start) for form in _forms(text) for start in (at, 0))
            place = next((found for found in places if found >= 0), None)
            if place is None:
                lost.setdefault(kind, []).append(index)
            at = max(at, place or 0)
    yield from (f"{kind}: message {', '.join(map(str, which))}" for kind, which in lost.items())


def thought_of(message: Message) -> str:
    """What a reply was thinking."""
    return str(message.get("reasoning_content") or "").strip()


def _has_values(arguments: str, text: str) -> bool:
    """Whether the text has arguments in a form of its own (XML, a call in Python): each key and value."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    shown = _dense(text)
    if not isinstance(parsed, dict) or any(form in shown for form in _json_forms(parsed)):
        return False  # it writes JSON, and other JSON than the model did
    return all(
        any(form in shown for form in (*_forms(str(value)), *_json_forms(value)))
        for pair in parsed.items()
        for value in pair
    )


def _forms(text: str) -> Iterator[str]:
    """How templates write a text: as it is, or as JSON."""
    yield _dense(text)
    yield from (form[1:-1] for form in _json_forms(text))


def _json_forms(value: Any) -> Iterator[str]:
    yield from (_dense(json.dumps(value, ensure_ascii=escapes)) for escapes in (False, True))


def _dense(text: str) -> str:
    return "".join(text.split())
