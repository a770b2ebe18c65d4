"""Reading: what one span says about one model call, in no dialect.

Every dialect makes readings; merging and grading know only them. This module holds
that value and how a span's attributes are looked up without trusting their types.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spangrad.adapters.model_call import Choice, Purpose
from spangrad.store.records import Span


@dataclass(slots=True)
class Reading:
    """One span's account of a model call. `None` and empty mean that the span does not say.

    Whoever made one fills it in; from then on nobody changes it. Not frozen: that makes forty fields three
    times as slow.
    """

    span: Span
    dialect: str
    is_gateway: bool = False
    """The account comes from the gateway: the exact request, the engine's ids."""
    model: str | None = None
    response_id: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    keeps_tools: bool = False
    """Its recorder kept the request itself: tools that it does not tell were not offered."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    choices: Sequence[Choice] = ()
    prompt_token_ids: Sequence[int] | None = None
    agent_name: str | None = None
    step_name: str | None = None
    step_index: int | None = None
    state_key: str | None = None
    ancestor_span_ids: Sequence[str] = ()
    """Nearest first."""
    rollout_id: str | None = None
    conversation_id: str | None = None
    """Session, thread or conversation that the recorder names."""
    user_id: str | None = None
    """The user whom it is for, by itself or what is above it."""
    attempt: int | None = None
    purpose: Purpose | None = None
    is_trained_policy: bool | None = None
    error: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    is_streamed: bool = False
    is_stream_complete: bool | None = None
    is_whole: bool = False
    """The reply came in one piece, and its recorder keeps no finish reasons of such replies."""
    logprobs_mode: str | None = None
    unknown_defaults: str | None = None
    """Why it is not known what the engine put in for what the request leaves out."""
    is_constrained: bool = False
    faults: Sequence[str] = ()
    """Why the content can't be trusted at all."""
    notes: Sequence[str] = ()
    """Why the text is not byte for byte what the model saw or wrote."""
    token_losses: Sequence[str] = ()
    """Why ids, logprobs or versions are not on the span, as its recorder tells."""
    text_losses: Sequence[str] = ()
    """Why the text is not all that the model saw, so that only ids can tell."""
    redacted: Sequence[str] = ()
    """Attributes out of which the recorder took text, of the request or the reply."""
    is_cached: bool = False
    """The reply came out of a cache."""
    synthetic: str | None = None
    """Why the gateway answered itself, and no model."""
    is_part: bool = False
    """Tells more of a call that another span of its recorder names: the one above, or an earlier request."""
    began_ns: int | None = None
    """Of a part: when its reply began, as the part says."""
    parts: Sequence[Span] = ()
    """Spans whose accounts were put into this one."""


def text(attributes: Mapping[str, Any], name: str) -> str | None:
    """A non-empty string attribute; None if it is absent or of another type."""
    value = attributes.get(name)
    return value if isinstance(value, str) and value else None


def whole_number(attributes: Mapping[str, Any], name: str) -> int | None:
    """An integer attribute; None if it is absent or of another type."""
    value = attributes.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parsed(value: Any) -> Any:
    """What JSON text stands for; anything else, and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
