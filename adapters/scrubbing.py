"""Text that a tracer's scrubber has put in place of what the model saw.

Knows the marks that scrubbers leave; it does not know dialects. Conservative: a mark counts where it is all
of a text, or where no person would write it. What spangrad recorded itself is not looked at: there such a
text is what the model saw.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

SCRUBBED: Final = "text was scrubbed"
_UNMISTAKABLE = re.compile(
    r"\[Scrubbed due to '[^'\n]{1,80}'\]"  # Logfire
    r"|redacted-by-litellm"
    r"|<fully masked due to failed mask function>"  # Langfuse
    r"|__REDACTED__"  # OpenInference
    r"|\[redacted: [a-z -]{3,30}\]"  # spangrad
    r"|\[(?:REDACTED_[A-Z_]{3,30}|[A-Z_]{3,30}_REDACTED)\]"  # LiteLLM, Presidio
)
_WHOLE = re.compile(
    r"[\[<({*_\s]*(?:redacted|scrubbed|masked|filtered|removed|hidden|content redacted|hidden for privacy)"
    r"[\])>}*_\s]*",
    re.IGNORECASE,
)
_DELIMITED = re.compile(r"[\[<({*_]")
_IN_JSON = re.compile(r"\"[\[<(](?:redacted|scrubbed|masked|filtered|removed)[\])>]\"", re.IGNORECASE)
_ASTERISKS = re.compile(r"\s*\*{3,}\s*")


def scrub_mark(text: str) -> str | None:
    """The mark that a scrubber left in a text, if it did."""
    if found := _UNMISTAKABLE.search(text) or _IN_JSON.search(text):
        return found.group()
    if len(text) <= 60 and (_ASTERISKS.fullmatch(text) or _is_whole(text)):
        return text.strip()
    return None


def scrubbed(messages: Sequence[Mapping[str, Any]], where: str) -> Iterator[str]:
    """A reason for the first message that has such a text."""
    for index, message in enumerate(messages):
        for text in _texts(message):
            if (mark := scrub_mark(text)) is not None:
                yield f"{SCRUBBED}: {where} {index} has {mark!r}"
                return


def _is_whole(text: str) -> bool:
    return _WHOLE.fullmatch(text) is not None and (
        _DELIMITED.match(text.lstrip()) is not None or text.strip() in ("REDACTED", "MASKED", "SCRUBBED")
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _texts(item)
