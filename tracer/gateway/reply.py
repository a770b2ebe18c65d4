"""What the engine answered: one whole reply, or the same put together from chunks.

Invariant: concatenated chunks give the same `Reply` as the whole reply.

Knows OpenAI's and vLLM's JSON. Knows no spans; `record.py` turns a Reply into attributes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spangrad.tracer.wire.streams import has_text
from spangrad.tracer.wire.tokens import NO_LOGPROB

TEXT_FIELDS = ("content", "refusal", "reasoning", "reasoning_content")


@dataclass(slots=True)
class ReplyChoice:
    """One choice of a reply."""

    message: dict[str, Any] = field(default_factory=dict)
    """OpenAI form; tool call arguments as the raw string."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """vLLM's: the stop string or stop token that ended the choice; None: it ended by itself or was cut."""
    token_ids: list[int] | None = None
    chunks_without_ids: int = 0
    """Chunks that had text and no ids."""
    logprobs: list[float] | None = None
    """`NO_LOGPROB` where a token came without one."""

    def add_tokens(self, choice: Mapping[str, Any]) -> None:
        """Append the ids and logprobs of a choice or of its delta."""
        if choice.get("token_ids") is None and has_text(choice):
            self.chunks_without_ids += 1
        if (ids := choice.get("token_ids")) is not None:
            self.token_ids = (self.token_ids or []) + ids
        block = choice.get("logprobs")
        if not block:
            return
        values = block.get("token_logprobs")  # completions
        if values is None:  # chat
            values = [item.get("logprob") for item in block.get("content") or ()]
        known = [NO_LOGPROB if value is None else value for value in values]
        self.logprobs = (self.logprobs or []) + known

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        """Append a chat delta to the message."""
        if delta.get("role"):
            self.message["role"] = delta["role"]
        for name in TEXT_FIELDS:
            if delta.get(name):  # the first delta's content is "", also before a reply without text
                self.message[name] = (self.message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls") or ():
            _add_tool_call(self.message.setdefault("tool_calls", []), part)


@dataclass(slots=True)
class Reply:
    """The engine's answer so far."""

    response_id: str | None = None
    model: str | None = None
    choices: dict[int, ReplyChoice] = field(default_factory=dict)
    prompt_token_ids: list[int] | None = None
    usage: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    """The engine's error object; on a stream it comes as a chunk."""

    def add(self, data: Mapping[str, Any]) -> None:
        """Take in a whole reply or one chunk."""
        if isinstance(data.get("error"), dict):
            self.error = data["error"]
        self.response_id = data.get("id") or self.response_id
        self.model = data.get("model") or self.model
        self.usage = data.get("usage") or self.usage
        if data.get("prompt_token_ids") is not None:
            self.prompt_token_ids = data["prompt_token_ids"]
        for position, part in enumerate(data.get("choices") or ()):
            choice = self.choices.setdefault(part.get("index", position), ReplyChoice())
            choice.add_tokens(part)
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            if part.get("stop_reason") is not None:
                choice.stop_reason = part["stop_reason"]
            if part.get("prompt_token_ids") is not None:  # completions
                self.prompt_token_ids = part["prompt_token_ids"]
            if part.get("message") is not None:
                choice.message = part["message"]
            elif part.get("delta") is not None:
                choice.add_delta(part["delta"])
            elif part.get("text") is not None:
                choice.message.setdefault("role", "assistant")
                choice.message["content"] = (choice.message.get("content") or "") + part["text"]

    def is_complete(self, choice_count: int) -> bool:
        """Whether every choice has come to its end."""
        return len(self.choices) >= choice_count and all(
            choice.finish_reason is not None for choice in self.choices.values()
        )


def _add_tool_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    index = part.get("index", len(calls))
    call = next((known for known in calls if known["index"] == index), None)
    if call is None:
        call = {"index": index, "id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        calls.append(call)
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""
