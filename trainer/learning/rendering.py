"""Text-grade calls to token ids, through the policy's own chat template.

Knows: chat templates, tokenizers, how a reply looks when it is read back. Does not know:
where the call came from or what will be trained on it.

Invariants:
* the rendered conversation begins with the rendered prompt, in text and in token ids;
* the completion ends with the end-of-turn token, as the policy would sample it; what the
  template adds behind that token is left out;
* what was recorded (content, tool names, argument strings byte for byte) can be read in the
  decoded completion; anything else is a `GradeError`, never a quiet repair.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from jinja2 import TemplateError

from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.errors import GradeError


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering needs."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-turn token."""

    def apply_chat_template(self, conversation: Any, tools: Any = None, **kwargs: Any) -> Any:
        """Render messages."""

    def encode(self, text: Any, **kwargs: Any) -> Any:
        """Text to ids."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Ids to text."""


@dataclass(frozen=True, slots=True)
class RenderedCall:
    """Token ids of a call that was recorded as text."""

    prompt_token_ids: tuple[int, ...]
    """What the policy would have been shown."""
    sampled_token_ids: tuple[int, ...]
    """What it would have had to sample to give the recorded reply, end of turn included."""


def _text_content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(parts) == len(content):
            return "".join(str(part["text"]) for part in parts)
    raise GradeError(f"{where} has content that is not text; only text can be rendered with a chat template")


def _argument_string(arguments: object) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _template_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Message with plain text content and the argument strings as they were recorded."""
    normal = {**message, "role": message["role"], "content": _text_content(message.get("content"), where)}
    normal.pop("tool_calls", None)
    if message.get("tool_calls"):
        normal["tool_calls"] = [
            {
                **call,
                "type": "function",
                "function": {
                    **call["function"],
                    "name": call["function"]["name"],
                    "arguments": _argument_string(call["function"].get("arguments")),
                },
            }
            for call in message["tool_calls"]
        ]
    return normal


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The same message with arguments as objects, for templates that serialise them themselves."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            return message
        if not isinstance(arguments, dict):
            return message
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _reply_parts(message: Mapping[str, Any]) -> list[str]:
    """What must be readable in a rendered reply."""
    parts = [message["content"].strip()] if message["role"] == "assistant" else []
    for call in message.get("tool_calls", ()):
        parts += [str(call["function"]["name"]), _argument_string(call["function"]["arguments"])]
    return [part for part in parts if part]


def _tool_parts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tool calls of earlier replies, which the prompt must show unaltered."""
    return [part for message in messages for part in _reply_parts({**message, "content": ""})]


def _missing(parts: Sequence[str], text: str) -> str | None:
    return next((part for part in parts if part not in text), None)


def _ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return cast("list[int]", tokenizer.encode(text, add_special_tokens=False))


def _render(
    messages: list[dict[str, Any]],
    reply: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    tokenizer: ChatTokenizer,
    where: str,
) -> tuple[str, str]:
    try:
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        full = tokenizer.apply_chat_template([*messages, reply], tools=tools, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise GradeError(f"{where} can't be rendered with the policy's chat template: {error}") from error
    if not full.startswith(prompt):
        raise GradeError(
            f"{where}: the rendered conversation does not begin with the rendered prompt; the chat template "
            "rewrites earlier text, so the reply has no place of its own"
        )
    return prompt, full


def _completion(prompt: str, full: str, tokenizer: ChatTokenizer, where: str) -> RenderedCall:
    prompt_ids, full_ids = _ids(tokenizer, prompt), _ids(tokenizer, full)
    if full_ids[: len(prompt_ids)] != prompt_ids:
        raise GradeError(
            f"{where}: the tokens of the conversation do not begin with the tokens of its prompt; the "
            "tokenizer merges text across the border between prompt and reply"
        )
    completion = full_ids[len(prompt_ids) :]
    end = tokenizer.eos_token_id
    if end not in completion:
        raise GradeError(
            f"{where}: the chat template does not end a reply with the tokenizer's end token (id {end!r}); "
            "expected one"
        )
    return RenderedCall(tuple(prompt_ids), tuple(completion[: completion.index(end) + 1]))


def _conversation(
    call: ModelCall, choice_index: int, where: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and reply of a call, ready for a template."""
    if not call.messages or choice_index >= len(call.choices):
        raise GradeError(
            f"{where} has {len(call.messages)} messages and {len(call.choices)} replies; need both to render "
            f"reply {choice_index}"
        )
    choice = call.choices[choice_index]
    if choice.finish_reason == "length":
        raise GradeError(f"{where}: the reply was cut at the token limit; its end was never produced")
    try:
        messages = [_template_message(m, f"{where} message {i}") for i, m in enumerate(call.messages)]
        return messages, _template_message({**choice.message, "role": "assistant"}, f"{where} reply")
    except (KeyError, TypeError, AttributeError) as error:
        raise GradeError(f"{where} has a message that is not in OpenAI chat form: {error!r}") from error


def render_call(call: ModelCall, tokenizer: ChatTokenizer, *, choice_index: int = 0) -> RenderedCall:
    """Token ids of a recorded call, as the policy would have seen and sampled it.

    Argument strings go into the template as recorded. Where the template escapes them once
    more, it gets the parsed objects instead, and the result counts only if the recorded
    strings come out again byte for byte.

    Args:
        call: A call with messages and a reply.
        tokenizer: The policy's tokenizer; its `eos_token` must end an assistant turn.
        choice_index: Which reply of the call.

    Raises:
        GradeError: The call can't be rendered so that it reads back as recorded; says why.
    """
    where = f"call {call.call_id!r}"
    messages, reply = _conversation(call, choice_index, where)
    reply_parts, tool_parts = _reply_parts(reply), _tool_parts(messages)
    if not reply_parts:
        raise GradeError(f"{where}: the reply has neither content nor tool calls; nothing to clone")
    tools = [dict(tool) for tool in call.tools] or None

    problem = ""
    parsed = [_with_parsed_arguments(message) for message in messages]
    for attempt_messages, attempt_reply in ((messages, reply), (parsed, _with_parsed_arguments(reply))):
        prompt, full = _render(attempt_messages, attempt_reply, tools, tokenizer, where)
        lost = _missing(tool_parts, prompt)
        if lost is not None:
            problem = problem or f"{where}: {lost!r} of an earlier tool call is not in the rendered prompt"
            continue
        rendered = _completion(prompt, full, tokenizer, where)
        text = tokenizer.decode(
            list(rendered.sampled_token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        lost = _missing(reply_parts, text)
        if lost is None:
            return rendered
        problem = problem or f"{where}: {lost!r} of the reply is not in the decoded completion {text!r}"
    raise GradeError(f"{problem}; the chat template or the tokenizer loses it")


def with_rendered_ids(call: ModelCall, tokenizer: ChatTokenizer) -> ModelCall:
    """The call with token ids filled in; its grade stays `text`, for the ids are ours, not the engine's.

    A call of grade `exact` or `ids` has the engine's ids and is returned as it is.

    Raises:
        GradeError: The call is unusable or can't be rendered faithfully.
    """
    if call.grade in (Grade.EXACT, Grade.IDS):
        return call
    if call.grade is Grade.UNUSABLE:
        raise GradeError(f"call {call.call_id!r} is unusable: {'; '.join(call.grade_reasons)}")
    rendered = [render_call(call, tokenizer, choice_index=i) for i in range(max(1, len(call.choices)))]
    choices: list[Choice] = [
        dataclasses.replace(choice, sampled_token_ids=ids.sampled_token_ids)
        for choice, ids in zip(call.choices, rendered, strict=True)
    ]
    return dataclasses.replace(call, prompt_token_ids=rendered[0].prompt_token_ids, choices=tuple(choices))
