"""What a call was for, by hint or by rule.

A pure function of one (merged) reading. The rules are conservative: a call that they
take for something else than acting is not trained. A reason reads `rule: detail`, so
that reasons can be counted.

Rules, the first that fits:
* synthetic: the gateway answered itself, whatever the call was meant for;
* hint: `spangrad.purpose`, the header `x-spangrad-purpose`, or the span's attribute;
* operation: the route of embeddings;
* step name: the step is called what agents call a step that titles, summarises or judges, and
  nothing more;
* known prompt: a request without tools begins as that of a program that is known to make such calls.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from spangrad.adapters.model_call import Purpose
from spangrad.adapters.reading import Reading
from spangrad.tracer import conventions as c

EMBEDDINGS: Final = "embeddings"
NO_TURN_LEFT: Final = f"synthetic: {c.NO_TURN_LEFT}"
"""The reason of a call for which its rollout had no turn left."""

_CHAT = "(?:conversation|chat|thread|session|history|messages|context|memory)"
STEP_NAMES: Final = {
    Purpose.TITLE: re.compile(
        rf"(?:(?:generate|create|make|write|get|set|add)_)?(?:{_CHAT}_)?(?:title|topic_title)"
        r"(?:_(?:generator|generation|maker|writer|node|step))?"
    ),
    Purpose.SUMMARY: re.compile(
        rf"(?:summari[sz]e|compact|condense)_(?:the_)?{_CHAT}"
        rf"|{_CHAT}_(?:summary|summari[sz]er|summari[sz]ation|compaction|compactor)"
        r"|summari[sz](?:e|er|ation)(?:_(?:node|step))?|compaction"
        r"|summarization_?middleware(?:_before_model)?"
    ),
    Purpose.JUDGE: re.compile(
        r"(?:llm_(?:as_(?:a_)?)?)?judge(?:_(?:answer|response|reply|output|result|node|step))?"
    ),
}
"""Of names in lower case, with underscores for everything between words."""
KNOWN_PROMPTS: Final = (
    (
        "title generator",
        Purpose.TITLE,
        r"you are an? (?:conversation |chat |thread |session )?title generator\b",
    ),
    ("Open WebUI's titles", Purpose.TITLE, r"### task:\s*generate a concise, 3-5 word title\b"),
    ("Open WebUI's tags", Purpose.OTHER, r"### task:\s*generate 1-3 broad tags\b"),
    ("Open WebUI's follow-ups", Purpose.OTHER, r"### task:\s*suggest 3-5 relevant follow-up questions\b"),
    (
        "LibreChat's titles",
        Purpose.TITLE,
        r"(?:provide|please generate) a concise, 5-word-or-less title for the conversation\b",
    ),
    (
        "conversation summary",
        Purpose.SUMMARY,
        r"you are a helpful ai assistant tasked with summarizing conversations\b"
        r"|your task is to create a detailed summary of the conversation so far\b"
        r"|<role>\s*context extraction assistant\s*</role>",
    ),
    (
        "impartial judge",
        Purpose.JUDGE,
        r"(?:\[(?:system|instruction)\]\s*)?please act as an impartial judge and evaluate the quality\b",
    ),
)
"""(name, purpose, how the system message or the last user message begins), as the programs have them."""
_COMPILED: Final = tuple((name, purpose, re.compile(text, re.I)) for name, purpose, text in KNOWN_PROMPTS)
_ANY: Final = re.compile("|".join(f"(?:{text})" for _, _, text in KNOWN_PROMPTS), re.I)
_BEGINNING: Final = 400


def purpose_of(reading: Reading) -> tuple[Purpose, str | None]:
    """The purpose of a call, and the rule that says so; None for a call that no rule knows: it acts."""
    if reading.synthetic is not None:
        return Purpose.OTHER, f"synthetic: {reading.synthetic}"
    is_embedding = reading.span.attributes.get(c.OPERATION_NAME) == EMBEDDINGS
    if is_embedding and reading.purpose in (None, Purpose.EMBEDDING):
        return Purpose.EMBEDDING, f"operation: {EMBEDDINGS}"
    if reading.purpose is not None:
        return reading.purpose, "hint"
    if reading.step_name is not None:
        name = _words(reading.step_name)
        for purpose, pattern in STEP_NAMES.items():
            if pattern.fullmatch(name):
                return purpose, f"step name: {reading.step_name}"
    if not reading.tools:
        found = [rule for text in _beginnings(reading) if (rule := _known_prompt(text)) is not None]
        if found:
            known, purpose, _ = _COMPILED[min(found)]
            return purpose, f"known prompt: {known}"
    return Purpose.AGENT, None


@lru_cache(maxsize=256)
def _known_prompt(beginning: str) -> int | None:
    """The first of the known prompts that begins so; remembered, for the calls of an agent begin alike."""
    if _ANY.match(beginning) is None:
        return None
    return next(number for number, (_, _, pattern) in enumerate(_COMPILED) if pattern.match(beginning))


def _words(name: str) -> str:
    """`SummarizeChat` and `summarize-chat` as `summarize_chat`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")


def _beginnings(reading: Reading) -> list[str]:
    """How the system message and the last user message begin."""
    first = next((m for m in reading.messages if m.get("role") in ("system", "developer")), None)
    last = next((m for m in reversed(reading.messages) if m.get("role") == "user"), None)
    return [_text(message).lstrip()[:_BEGINNING] for message in (first, last) if message is not None]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content[: 2 * _BEGINNING]
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return next((text for text in texts if isinstance(text, str)), "")
