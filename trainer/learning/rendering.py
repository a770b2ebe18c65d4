"""Text-grade calls to token ids, through the policy's own chat template.

Knows: chat templates, tokenizers, how a reply looks when it is read back. Does not know:
where the call came from or what will be trained on it.

Invariants:
* the rendered conversation begins with the rendered prompt, in text and in token ids;
* the completion ends with the end-of-turn token, as the policy would sample it; what the
  template adds behind that token is left out;
* what was recorded of the reply (content with the white space at its ends, thoughts, tool names, argument
  strings, byte for byte) can be read in the decoded completion; anything else is a `GradeError`, never a
  quiet repair;
* a message of the prompt that can't be read in it is told (`RenderedCall.notes`): templates drop
  earlier thoughts, some of them other messages; so are tools that a template leaves out,
  and what it adds to a reply of content alone;
* a template that tells the time is given the call's own, in UTC: the same call always gives the same ids;
* a prompt that is known to lack something, as tools that nobody recorded, is not rendered unasked.

Errors read `what: where and why`; calls with the same `what` can be counted.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol, cast

from jinja2 import TemplateError

from spangrad.adapters.grading import TOOLS_UNKNOWN, reason_kind
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.errors import GradeError
from spangrad.trainer.learning.reading_back import (
    added_to_reply,
    lost_calls,
    lost_of_reply,
    says_something,
    unread,
)
from spangrad.trainer.learning.vocabulary import Vocabulary, check_vocabulary

DROPS_ENDS: Final = "drops white space at the ends of the reply"
DROPS_TOOLS: Final = "the chat template leaves out the tool definitions"
TELLS_TIME: Final = "the chat template tells the time"
TIME_UNKNOWN: Final = f"{TELLS_TIME}, which was not recorded"
_NOT_RECORDED_NS: Final = 86_400 * 10**9
"""Calls that nobody gave a time are numbered from 0."""
_CANT_RENDER: Final = (TemplateError, TypeError, ValueError, KeyError, AttributeError)

Template = Callable[..., str]
"""Messages and `tools` to text."""


class ChatTokenizer(Vocabulary, Protocol):
    """The part of a Hugging Face tokenizer that rendering needs."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-turn token."""

    def apply_chat_template(self, conversation: Any, tools: Any = None, **kwargs: Any) -> Any:
        """Render messages."""

    def encode(self, text: Any, **kwargs: Any) -> Any:
        """Text to ids."""


@dataclass(frozen=True, slots=True)
class RenderedCall:
    """Token ids of a call that was recorded as text."""

    prompt_token_ids: tuple[int, ...]
    """What the policy would have been shown."""
    sampled_token_ids: tuple[int, ...]
    """What it would have had to sample to give the recorded reply, end of turn included."""
    notes: tuple[str, ...] = ()
    """What of the call can't be read in the prompt, and what time is told in it: `what: which`."""


def _text_content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(parts) == len(content):
            return "".join(str(part["text"]) for part in parts)
    raise GradeError(f"a message has content that is not text: {where}; only text can be rendered")


def _argument_string(arguments: object) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _template_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Message with plain text content and the argument strings as they were recorded.

    Thoughts are under `reasoning_content`, too, where the templates of Qwen, DeepSeek and GLM look for them,
    and under `thinking`, where gpt-oss does.
    """
    normal = {**message, "role": message["role"], "content": _text_content(message.get("content"), where)}
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        normal |= {"reasoning_content": thought, "thinking": thought}
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


def _ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return cast("list[int]", tokenizer.encode(text, add_special_tokens=False))


def _render(
    messages: list[dict[str, Any]],
    reply: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    template: Template,
    where: str,
) -> tuple[str, str]:
    try:
        prompt = template(messages, tools=tools, add_generation_prompt=True)
        full = template([*messages, reply], tools=tools)
    except _CANT_RENDER as error:
        raise GradeError(f"the chat template can't render it: {where}: {error}") from error
    if not full.startswith(prompt):
        raise GradeError(
            f"the chat template rewrites earlier text: {where}: the rendered conversation does not begin "
            "with the rendered prompt, so the reply has no place of its own"
        )
    return prompt, full


def _leaves_out(
    tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]], prompt: str, template: Template
) -> bool:
    """Whether the prompt is the same without the tools."""
    try:
        return tools is not None and template(messages, tools=None, add_generation_prompt=True) == prompt
    except _CANT_RENDER:
        return False


def _completion(prompt: str, full: str, tokenizer: ChatTokenizer, where: str) -> RenderedCall:
    prompt_ids, full_ids = _ids(tokenizer, prompt), _ids(tokenizer, full)
    if full_ids[: len(prompt_ids)] != prompt_ids:
        raise GradeError(
            f"the tokenizer merges text across the border between prompt and reply: {where}: the tokens of "
            "the conversation do not begin with the tokens of its prompt"
        )
    completion = full_ids[len(prompt_ids) :]
    end = tokenizer.eos_token_id
    if end not in completion:
        raise GradeError(
            f"the chat template does not end a reply with the tokenizer's end token: {where}: no {end!r}"
        )
    return RenderedCall(tuple(prompt_ids), tuple(completion[: completion.index(end) + 1]))


def _conversation(
    call: ModelCall, choice_index: int, where: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and reply of a call, ready for a template."""
    if not call.messages or choice_index >= len(call.choices):
        raise GradeError(
            f"messages or reply are not there: {where} has {len(call.messages)} messages and "
            f"{len(call.choices)} replies; need both to render reply {choice_index}"
        )
    choice = call.choices[choice_index]
    if choice.finish_reason == "length":
        raise GradeError(f"the reply was cut at the token limit: {where}; its end was never produced")
    try:
        messages = [_template_message(m, f"{where} message {i}") for i, m in enumerate(call.messages)]
        return messages, _template_message({**choice.message, "role": "assistant"}, f"{where} reply")
    except (KeyError, TypeError, AttributeError) as error:
        raise GradeError(f"a message is not in OpenAI chat form: {where}: {error!r}") from error


def render_call(call: ModelCall, tokenizer: ChatTokenizer, *, choice_index: int = 0) -> RenderedCall:
    """Token ids of a recorded call, as the policy would have seen and sampled it.

    Argument strings go into the template as recorded. Where the template escapes them once
    more, or can't take strings, it gets the parsed objects instead; the result counts only if
    the recorded strings come out again byte for byte, or keys and values where the template
    writes no JSON.

    Args:
        call: A call with messages and a reply.
        tokenizer: The policy's tokenizer; its `eos_token` must end an assistant turn.
        choice_index: Which reply of the call.

    Raises:
        GradeError: The call can't be rendered so that it reads back as recorded; says why.
    """
    where = f"call {call.call_id!r}"
    messages, reply = _conversation(call, choice_index, where)
    if not says_something(reply):
        raise GradeError(f"the reply has neither content nor tool calls: {where}; nothing to clone")
    tools = [dict(tool) for tool in call.tools] or None
    notes: dict[str, None] = {}

    def strftime_now(form: str) -> str:
        told = datetime.fromtimestamp(call.start_ns // 10**9, UTC)
        kind = TELLS_TIME if call.start_ns >= _NOT_RECORDED_NS else TIME_UNKNOWN
        notes[f"{kind}: it was given {told:%Y-%m-%d %H:%M:%S} UTC"] = None
        return told.strftime(form)

    template = partial(tokenizer.apply_chat_template, tokenize=False, strftime_now=strftime_now)
    try:
        rendered = _rendered(messages, reply, messages, reply, tools, template, tokenizer, where)
    except GradeError:
        shown, given = [_with_parsed_arguments(each) for each in messages], _with_parsed_arguments(reply)
        if shown == messages and given == reply:
            raise
        rendered = _rendered(messages, reply, shown, given, tools, template, tokenizer, where)
    return dataclasses.replace(rendered, notes=(*rendered.notes, *notes))


def _rendered(
    messages: list[dict[str, Any]],
    reply: dict[str, Any],
    shown: list[dict[str, Any]],
    given: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    template: Template,
    tokenizer: ChatTokenizer,
    where: str,
) -> RenderedCall:
    """Render what the template is given, and read in it what was recorded."""
    prompt, full = _render(shown, given, tools, template, where)
    by_value = shown is not messages
    if (lost := lost_calls(messages, prompt, by_value=by_value)) is not None:
        raise GradeError(
            f"the chat template loses an earlier tool call: {where}: {lost!r} of an earlier tool call is not "
            "in the rendered prompt"
        )
    rendered = _completion(prompt, full, tokenizer, where)
    text = tokenizer.decode(
        list(rendered.sampled_token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if (lost := lost_of_reply(reply, text, by_value=by_value)) is not None:
        is_trimmed = lost == reply["content"] != lost.strip() and lost.strip() in text
        raise GradeError(
            f"the chat template or the tokenizer {DROPS_ENDS if is_trimmed else 'loses the reply'}: {where}: "
            f"{lost!r} of the reply is not in the decoded completion {text!r}"
        )
    said = tokenizer.decode(
        list(rendered.sampled_token_ids[:-1]), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    notes = [*added_to_reply(reply, said), *unread(messages, prompt)]
    if _leaves_out(tools, shown, prompt, template):
        notes.append(f"{DROPS_TOOLS}: {where} was offered {len(tools or ())}")
    return dataclasses.replace(rendered, notes=tuple(notes))


def with_rendered_ids(
    call: ModelCall, tokenizer: ChatTokenizer, *, keep_unknown_tools: bool = False
) -> ModelCall:
    """The call with token ids filled in; its grade stays `text`, for the ids are ours, not the engine's.

    A call of grade `exact` or `ids` has the engine's ids: they are checked and stay as they are.

    Args:
        call: The call. What its messages lose in the prompt is added to its reasons.
        tokenizer: The policy's.
        keep_unknown_tools: Also render a call that used tools which nobody recorded. Its prompt is then not
            the one that the model was shown.

    Raises:
        GradeError: The call is unusable, can't be rendered faithfully, or has ids of another vocabulary.
    """
    if call.grade is Grade.UNUSABLE:
        raise GradeError(f"the call is unusable: {call.call_id!r}: {'; '.join(call.grade_reasons)}")
    if call.grade in (Grade.EXACT, Grade.IDS):
        check_vocabulary(call, tokenizer)
        return call
    if not keep_unknown_tools and any(reason_kind(why) == TOOLS_UNKNOWN for why in call.grade_reasons):
        raise GradeError(
            f"{TOOLS_UNKNOWN}: call {call.call_id!r} was shown more than its messages; "
            "`--keep-unknown-tools` renders such calls without"
        )
    rendered = [render_call(call, tokenizer, choice_index=i) for i in range(max(1, len(call.choices)))]
    choices: list[Choice] = [
        dataclasses.replace(choice, sampled_token_ids=ids.sampled_token_ids)
        for choice, ids in zip(call.choices, rendered, strict=True)
    ]
    return dataclasses.replace(
        call,
        prompt_token_ids=rendered[0].prompt_token_ids,
        choices=tuple(choices),
        grade_reasons=(*call.grade_reasons, *rendered[0].notes),
    )
