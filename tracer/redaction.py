"""Take what must not leave the process out of spans: `spangrad.init(redact=...)`.

Runs on the worker's thread, before anything is sent or written to disk. Knows spans and attribute names; what
is to be taken out is the rule's business, a function from a text to a text. Invariants:
* The rule sees every text: messages, reasoning, tool arguments and results, request fields, explanations of
  rewards, exceptions and their traces. Names of models, tools, rollouts and steps, ids and tool definitions
  stay.
* Text that a rule fails on is replaced by `FAILED`; it is never sent in clear.
* A span that changed says where, in `spangrad.redacted`. Token ids and logprobs of such a call spell the text
  out again, so they are dropped and named; so are ids beside which there is no text to look at. That goes for
  a prompt that was asked as ids, too.
* Only what has its place in the form of a message is a name or an id: objects inside of parts are all text.
* Keys are taken out of exceptions, error messages and types also where no rule was given.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Status
from opentelemetry.util.types import AttributeValue

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as c
from spangrad.tracer.periodically import Periodically

logger = logging.getLogger(__name__)

Rule = Callable[[str], str]

FAILED: Final = "[redacted: the rule failed]"
IDS: Final = "[redacted: token ids]"
STATUS: Final = "status"
"""Name in `spangrad.redacted` of the status message."""
_TOKEN_DATA = (c.PROMPT_TOKEN_IDS, c.SAMPLED_TOKEN_IDS, c.SAMPLED_LOGPROBS, c.POLICY_VERSIONS)
_CONTENT = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.REQUEST_EXTRA)
_KEPT = frozenset(
    {
        c.OPERATION_NAME,
        c.PROVIDER_NAME,
        c.CONVERSATION_ID,
        c.AGENT_NAME,
        c.REQUEST_MODEL,
        c.RESPONSE_ID,
        c.RESPONSE_MODEL,
        c.RESPONSE_FINISH_REASONS,
        c.TOOL_DEFINITIONS,
        c.TOOL_NAME,
        c.TOOL_CALL_ID,
        c.ROLLOUT_ID,
        c.TASK_ID,
        c.SPAN_ROLE,
        c.STEP_NAME,
        c.PURPOSE,
        c.POLICY,
        c.LOGPROBS_MODE,
        c.REWARD_NAME,
        c.REDACTED,
        "exception.type",
        "server.address",
    }
)
"""Attributes that are names and ids, not text."""
_STRUCTURE = frozenset(
    {"type", "role", "id", "finish_reason", "modality", "mime_type", "sha256", "file_id", "signature"}
)
"""Keys of messages and parts whose values are not text."""
_AS_IDS = ("prompt", "prompt_token_ids")
"""Request fields that may hold the prompt as token ids."""
_MESSAGE, _PART, _TEXT = range(3)
"""How deep in the JSON of messages something is: below a part everything is text."""
_SHORT = 64
"""Looking such a text up costs as much as looking through it."""
_EXCEPTIONS = ("exception.message", "exception.stacktrace")

_KEY_WORDS = (
    r"(?:api[-_ ]?key|apikey|access[-_ ]?(?:key|token)|auth[-_ ]?token|client[-_ ]?secret|secret[-_ ]?key"
    r"|password|passwd|x-amz-signature|x-goog-signature)"
)
_NAMED = rf"(?<![A-Za-z0-9])(?P<name>{_KEY_WORDS}\\?[\"']?\s*[:=]\s*"
"""Begin of a `name=value` pair whose value is a secret: what is in quotes, or has a digit in it."""
_PEM = "[A-Z ]*PRIVATE KEY-----"
# Every pattern looks ahead a bounded way only: text comes from anywhere, and a search holds the interpreter.
_SECRETS = (
    ("private key", re.compile(rf"-----BEGIN {_PEM}.*?(?:-----END {_PEM}|\Z)", re.S)),
    ("api key", re.compile(r"\b(?:sk|pk|rk)[-_](?=[A-Za-z_-]{0,80}[0-9])[A-Za-z0-9_-]{16,}")),
    ("api key", re.compile(r"\b(?:gsk_|hf_|r8_|npm_|xai-|nvapi-|pplx-|glpat-|pypi-)[A-Za-z0-9_-]{16,}")),
    ("api key", re.compile(r"\b(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}")),
    ("api key", re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}")),
    ("api key", re.compile(r"\bAIza[A-Za-z0-9_-]{30,}")),
    ("api key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("token", re.compile(r"\beyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*")),
    ("token", re.compile(r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/=-]{12,}")),
    ("password", re.compile(r"(?<=://)[^\s/:@\"']{1,200}:[^\s/@\"']{1,200}(?=@)")),
    ("secret", re.compile(rf"(?i){_NAMED}\\?[\"'])[^\"'\\]{{8,}}")),
    ("secret", re.compile(rf"(?i){_NAMED})(?=[^\s\"'&,;]*[0-9])[^\s\"'&,;\\}}\])]{{8,}}")),
    ("secret", re.compile(r"(?<=[?&]sig=)[^\s\"'&]{8,}")),
)  # fmt: skip
_EMAIL = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.[A-Za-z]{2,24}\b")


def secrets(text: str) -> str:
    """`text` without what looks like an API key, a bearer token, a private key or a password in a URL."""
    for kind, pattern in _SECRETS:
        name = r"\g<name>" if "name" in pattern.groupindex else ""
        text = pattern.sub(f"{name}[redacted: {kind}]", text)
    return text


def emails(text: str) -> str:
    """`text` without e-mail addresses."""
    return _EMAIL.sub("[redacted: e-mail]", text)


def default(text: str) -> str:
    """Both built-in rules."""
    return emails(secrets(text))


RULES: Final[dict[str, Rule]] = {"default": default, "emails": emails, "secrets": secrets}
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})


def rule_of(redact: bool | str | Rule | None) -> Rule | None:
    """The rule that a setting means; None: none.

    Raises:
        ConfigError: It is neither a rule's name nor a function.
    """
    if redact is None or redact is False:
        return None
    if redact is True:
        return default
    if isinstance(redact, str):
        name = redact.strip().lower()
        if name in _OFF:
            return None
        if name in _ON:
            return default
        if name in RULES:
            return RULES[name]
        raise ConfigError(f"redact={redact!r} is no rule; expected one of {sorted(RULES)}, or a function")
    if callable(redact):
        return redact
    raise ConfigError(f"redact={redact!r} is no rule; expected True, one of {sorted(RULES)}, or a function")


def remembering(rule: Rule | None) -> Rule | None:
    """A built-in rule so that it is asked once about a text that comes again, as in every call of an agent.

    Another one is asked each time: what it takes out may change.
    """
    return Remembered(rule) if rule is not None and rule in RULES.values() else rule


class Remembered:
    """A rule that is asked once about a text.

    For one thread at a time. The texts that were seen longest ago make way.
    """

    def __init__(self, rule: Rule, *, max_chars: int = 8 * 2**20) -> None:
        """`rule` gives the same for the same text."""
        self._rule = rule
        self._max_chars = max_chars
        self._chars = 0
        self._known: OrderedDict[str, str] = OrderedDict()

    def __call__(self, text: str) -> str:
        """What the rule makes of a text."""
        if len(text) < _SHORT:
            return self._rule(text)
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            return known
        clean = self._rule(text)
        size = 2 * len(text)
        if isinstance(clean, str) and size <= self._max_chars:
            self._known[text] = text if clean == text else clean
            self._chars += size
            while self._chars > self._max_chars:
                self._chars -= 2 * len(self._known.popitem(last=False)[0])
        return clean


def redacted_span(span: ReadableSpan, rule: Rule | None) -> ReadableSpan:
    """The span without what the rule takes out; itself if that is nothing."""
    redactor = _Redactor(rule)
    attributes = redactor.attributes(span.attributes or {})
    events = [redactor.event(event) for event in span.events]
    status = redactor.status(span.status)
    if not redactor.places:
        return span
    attributes[c.REDACTED] = json.dumps(sorted(redactor.places))
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=attributes,
        events=events,
        links=span.links,
        kind=span.kind,
        status=status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


class _Redactor:
    """Applies a rule to one span and remembers where it changed something."""

    def __init__(self, rule: Rule | None) -> None:
        self._rule = rule
        self.places: set[str] = set()

    def attributes(self, given: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
        if self._rule is None:
            kept = dict(given)
            if isinstance(kind := kept.get(c.ERROR_TYPE), str):  # `Rollout.fail` takes any text
                kept[c.ERROR_TYPE] = self._text(c.ERROR_TYPE, kind, secrets)
            return kept
        kept = {name: value if name in _KEPT else self._value(name, value) for name, value in given.items()}
        unseen = c.PROMPT_TOKEN_IDS in kept and c.INPUT_MESSAGES not in kept
        if unseen or self.places.intersection(_CONTENT):
            self._drop_tokens(kept, is_unseen=unseen)
        if c.INPUT_MESSAGES not in kept or self.places.intersection(_CONTENT):
            self._drop_asked_ids(kept)
        return kept

    def event(self, event: Event) -> Event:
        attributes = dict(event.attributes or {})
        for name, value in attributes.items():
            if name in _EXCEPTIONS and isinstance(value, str):
                attributes[name] = self._text(name, value, secrets)
            if self._rule is not None and name not in _KEPT:
                attributes[name] = self._value(name, attributes[name])
        return Event(event.name, attributes, event.timestamp)

    def status(self, status: Status) -> Status:
        if status.description is None:
            return status
        message = self._text(STATUS, status.description, secrets)
        if self._rule is not None:
            message = self._text(STATUS, message, self._rule)
        return Status(status.status_code, message)

    def _value(self, name: str, value: AttributeValue) -> AttributeValue:
        if isinstance(value, str):
            if value[:1] in ("[", "{"):
                return self._json(name, value)
            return self._text(name, value)
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._text(name, item) if isinstance(item, str) else item for item in value]
        return value

    def _json(self, name: str, value: str) -> str:
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError):
            return self._text(name, value)
        known, self.places = self.places, set()
        try:
            clean = self._walk(name, decoded, _MESSAGE if name in _CONTENT[:2] else _TEXT)
        except RecursionError:  # nested so deep that not all of it can be seen
            self.places.add(name)
            clean = FAILED
        finally:
            changed, self.places = bool(self.places), known | self.places
        return json.dumps(clean, ensure_ascii=True, separators=(",", ":")) if changed else value

    def _walk(self, name: str, value: Any, depth: int) -> Any:
        if isinstance(value, str):
            return self._text(name, value)
        if isinstance(value, Mapping):
            if depth == _TEXT:
                return {self._text(name, key): self._walk(name, item, _TEXT) for key, item in value.items()}
            return {
                key: item
                if self._is_structure(key, value)
                else self._walk(name, item, _PART if (depth, key) == (_MESSAGE, "parts") else _TEXT)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._walk(name, item, depth) for item in value]
        return value

    @staticmethod
    def _is_structure(key: str, owner: Mapping[str, Any]) -> bool:
        named = key in _STRUCTURE or (key == "name" and owner.get("type") == "tool_call")
        return named and not isinstance(owner[key], Mapping | list)

    def _text(self, name: str, text: str, rule: Rule | None = None) -> str:
        rule = rule or self._rule
        assert rule is not None
        try:
            clean = rule(text)
            if not isinstance(clean, str):
                raise TypeError(f"a rule returned {type(clean).__name__}; expected a text")
        except BaseException:  # the boundary: foreign code, on our thread
            if _said.due():
                logger.warning("redact= failed; the text is replaced by %r", FAILED, exc_info=True)
            clean = FAILED
        if clean != text:
            self.places.add(name)
        return c.storable(clean)

    def _drop_tokens(self, attributes: dict[str, AttributeValue], *, is_unseen: bool) -> None:
        found = [name for name in attributes if name.startswith(_TOKEN_DATA)]
        if not found:
            return
        for name in found:
            del attributes[name]
        told = attributes.get(c.DROPPED)
        dropped = json.loads(told) if isinstance(told, str) else {}
        why = "there is no text to look at" if is_unseen else "the ids would spell out what was redacted"
        dropped |= dict.fromkeys(found, f"redacted: {why}")
        attributes[c.DROPPED] = json.dumps(dropped)
        self.places.update(found)

    def _drop_asked_ids(self, attributes: dict[str, AttributeValue]) -> None:
        extra = attributes.get(c.REQUEST_EXTRA)
        if not isinstance(extra, str):
            return
        try:
            asked = json.loads(extra)
        except (ValueError, RecursionError):
            return
        found = [name for name in _AS_IDS if _has_numbers(asked.get(name))]
        if found:
            attributes[c.REQUEST_EXTRA] = json.dumps(asked | dict.fromkeys(found, IDS), separators=(",", ":"))
            self.places.add(c.REQUEST_EXTRA)


def _has_numbers(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, list) and any(map(_has_numbers, value)))


_said = Periodically()
