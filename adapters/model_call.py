"""ModelCall: one call to a model, whatever dialect told of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Grade(StrEnum):
    """What a call can honestly train. See the table in `adapters/README.md`."""

    EXACT = "exact"
    """Engine's prompt ids, sampled ids, behaviour logprobs and policy version: everything."""
    IDS = "ids"
    """Engine's ids without logprobs or version: weighted BC, preferences."""
    TEXT = "text"
    """Text only: BC, AWR, preferences, after rendering with a chat template."""
    UNUSABLE = "unusable"
    """Truncated, redacted, failed or lossy: nothing. The reason is kept."""


class Purpose(StrEnum):
    """What a call was for; only `agent` is trained unless asked."""

    AGENT = "agent"
    TITLE = "title"
    SUMMARY = "summary"
    JUDGE = "judge"
    EMBEDDING = "embedding"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply of a call (`n > 1` gives several)."""

    message: Mapping[str, Any]
    """OpenAI chat form: role, content, tool_calls (arguments as the raw string)."""
    finish_reason: str | None = None
    sampled_token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    """Behaviour logprobs in nats, one per sampled token."""
    policy_versions: Sequence[int] | None = None
    """One per sampled token."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call to a model. Ids, logprobs and versions are the engine's, never recomputed."""

    call_id: str
    """`<trace_id>-<span_id>` of the span that names the call (the client's, where several tell of it)."""
    trace_id: str
    span_id: str
    span_ids: Sequence[str]
    """All spans that were merged into this call."""
    trace_ids: Sequence[str] = field(default=(), kw_only=True)
    """Traces that these spans are in, the call's own first."""
    dialect: str
    start_ns: int
    end_ns: int
    grade: Grade
    grade_reasons: Sequence[str]
    """Why it is not graded better; empty for `exact`."""
    rollout_id: str | None = None
    attempt: int = 0
    model: str | None = None
    response_id: str | None = None
    conversation_id: str | None = None
    """Session, thread or conversation that a recorder named: a hint at what belongs to one rollout."""
    user_id: str | None = None
    """The user whom it is for, as a recorder named him."""
    service: str | None = None
    """Service of the recorder, or project of the export: a conversation id is one of theirs."""
    recorders: Sequence[str] = ()
    """Instrumentation scopes that told of the call, in alphabetical order."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Request messages in OpenAI chat form."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool definitions in OpenAI form (`{"type": "function", "function": {...}}`)."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """temperature, top_p, top_k, max_tokens, seed, stop, ... as requested, or as the engine's span tells."""
    choices: Sequence[Choice] = ()
    prompt_token_ids: Sequence[int] | None = None
    agent_name: str | None = None
    step_name: str | None = None
    step_index: int | None = None
    """Number of the step in its rollout, or in its graph."""
    state_key: str | None = None
    """What the agent said that it was looking at when the call began."""
    ancestor_span_ids: Sequence[str] = ()
    """Spans above the call in its trace, nearest first: tool, step, agent, rollout."""
    purpose: Purpose = Purpose.AGENT
    purpose_reason: str | None = None
    """Why it has that purpose; None: nothing says that it is not the agent acting."""
    is_trained_policy: bool = True
    """False: a frozen policy (a hosted model, a teacher)."""
    error: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)

    @property
    def parent_span_id(self) -> str | None:
        """The span that the call was made in."""
        return self.ancestor_span_ids[0] if self.ancestor_span_ids else None
