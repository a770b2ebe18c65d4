"""Whose conversation it is: ids of sessions, threads, conversations and users, as something to join by.

Knows resources of spans and columns of exports; does not know calls or stores.

Invariants:
* the same id of two services, or of two projects, is two conversations;
* an id that anybody could have thought of is nobody's.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from spangrad.store.records import Span

LETTERS_NEEDED: Final = 6
"""Letters and digits that an id has at least, beside PLACEHOLDERS; a number has as many digits."""
DIFFERENT_NEEDED: Final = 3
"""How many different ones are among them."""
PLACEHOLDERS: Final = frozenset(
    [
        *(
            "a",
            "an",
            "the",
            "my",
            "your",
            "our",
            "id",
            "ids",
            "no",
            "new",
            "none",
            "null",
            "nil",
            "nan",
            "na",
        ),
        *("undefined", "unknown", "unset", "empty", "default", "dummy", "placeholder", "true", "false"),
        *(
            "test",
            "tests",
            "testing",
            "demo",
            "dev",
            "development",
            "local",
            "localhost",
            "prod",
            "production",
        ),
        *(
            "staging",
            "main",
            "example",
            "sample",
            "foo",
            "bar",
            "user",
            "users",
            "guest",
            "anonymous",
            "admin",
        ),
        *(
            "session",
            "sessions",
            "sess",
            "thread",
            "threads",
            "conversation",
            "conversations",
            "conv",
            "chat",
        ),
        *("chats", "run", "trace", "group", "agent", "assistant", "bot"),
    ]
)
"""Words that say nothing of whose an id is."""
PROJECT: Final = "spangrad.export.project"
"""Attribute of a span that was made of an export: the project that it is of, where its columns do not say."""
PROJECTS: Final = (
    PROJECT,
    "langfuse.row.project_id",
    "langfuse.row.projectId",
    "langsmith.row.session_id",
    "langsmith.row.session_name",
    "langsmith.trace.session_name",
)
"""Attributes that name the project of a span without a service; LangSmith's session is its project."""
USERS: Final = (
    *("user.id", "enduser.id", "langfuse.user.id", "enduser.pseudo.id"),
    *("langsmith.metadata.user_id", "traceloop.association.properties.user_id"),
    "metadata.user_api_key_end_user_id",
)
"""Attributes that name the user whom a call is for."""
NOBODY: Final = frozenset(
    ["none", "null", "nil", "nan", "undefined", "unknown", "unset", "anonymous", "default"]
)
"""What stands there where there is no user, in any case."""
_PROJECT_NAME: Final = "openinference.project.name"
_WORDS: Final = re.compile(r"[^\W_]+")
_NUMBERED: Final = re.compile(r"([^\W\d_]+)(\d*)")


def service_of(span: Span) -> str | None:
    """The service that recorded a span, or the project that it was exported from; None: it tells none."""
    resource = span.resource
    name = _text(resource, "service.name")
    if name is not None and not name.startswith("unknown_service"):
        namespace = _text(resource, "service.namespace")
        return name if namespace is None else f"{namespace}/{name}"
    project = _text(resource, _PROJECT_NAME)
    if project is None and span.attributes.keys().isdisjoint(PROJECTS):
        return None
    return project or next((found for key in PROJECTS if (found := _text(span.attributes, key))), None)


def user_of(span: Span) -> str | None:
    """The user whom a span, or its resource, is for; None: it names none."""
    for values in (span.attributes, span.resource):
        for key in () if values.keys().isdisjoint(USERS) else USERS:
            told = values.get(key)
            if isinstance(told, str | int) and str(told).casefold() not in ("", *NOBODY):
                return str(told)
    return None


def is_specific(conversation_id: str) -> bool:
    """Whether an id is one that only one conversation has.

    Without the words of PLACEHOLDERS it has six letters and digits or more, three different ones among
    them: `thread-1`, `None`, `default`, `12345` and `000000` are not, `7f3a-21` and `order-1047` are.
    """
    rest = "".join(map(_rest_of, _WORDS.findall(conversation_id.casefold())))
    return len(rest) >= LETTERS_NEEDED and len(set(rest)) >= DIFFERENT_NEEDED


def _rest_of(word: str) -> str:
    """A word; of a placeholder only the number behind it."""
    numbered = _NUMBERED.fullmatch(word)
    return numbered[2] if numbered and numbered[1] in PLACEHOLDERS else word


def conversation_key(service: str | None, conversation_id: str | None) -> str | None:
    """The same for the same conversation of the same service; None where the id is not specific."""
    if conversation_id is None or not is_specific(conversation_id):
        return None
    told = repr((service, conversation_id)).encode("utf-8", "surrogatepass")
    return blake2b(told, digest_size=16).hexdigest()


def _text(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    return value if isinstance(value, str) and value else None
