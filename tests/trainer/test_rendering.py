import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.trainer.small_policy import ALWAYS_SERIALISED, make_tokenizer
from transformers import PreTrainedTokenizerFast

from spangrad.adapters.grading import reason_kind
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.errors import GradeError
from spangrad.trainer.learning.rendering import (
    DROPS_TOOLS,
    TELLS_TIME,
    TIME_UNKNOWN,
    render_call,
    with_rendered_ids,
)

TOOLS = [{"type": "function", "function": {"name": "query", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def text_of(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def tool_call(arguments: object, name: str = "query") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def make_call(
    reply: Mapping[str, Any],
    *,
    messages: Sequence[Mapping[str, Any]] = ({"role": "user", "content": "How many orders?"},),
    grade: Grade = Grade.TEXT,
    finish_reason: str = "stop",
    others: Sequence[Mapping[str, Any]] = (),
) -> ModelCall:
    return ModelCall(
        call_id="t-s",
        trace_id="t",
        span_id="s",
        span_ids=("s",),
        dialect="genai",
        start_ns=0,
        end_ns=1,
        grade=grade,
        grade_reasons=("no token ids",),
        messages=messages,
        tools=TOOLS,
        choices=[Choice(message, finish_reason) for message in (reply, *others)],
    )


def test_a_reply_is_rendered_as_the_policy_would_sample_it(tokenizer):
    call = make_call({"role": "assistant", "content": "There are 12."})
    rendered = render_call(call, tokenizer)
    assert text_of(tokenizer, rendered.prompt_token_ids) == (
        f"<|im_start|>system\nTools:{json.dumps(TOOLS[0]['function'])}<|im_end|>\n"
        "<|im_start|>user\nHow many orders?<|im_end|>\n<|im_start|>assistant\n"
    )
    # The newline that the template adds behind the end token was never sampled.
    assert text_of(tokenizer, rendered.sampled_token_ids) == "There are 12.<|im_end|>"
    assert rendered.sampled_token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "arguments",
    ['{"sql": "SELECT 1"}', '{"sql":"SELECT  1" }', '{"sql": "é', "not json at all", "[1, 2]"],
)
def test_argument_strings_keep_their_bytes_even_when_they_are_no_json(tokenizer, arguments):
    call = make_call({"role": "assistant", "content": None, "tool_calls": [tool_call(arguments)]})
    text = text_of(tokenizer, render_call(call, tokenizer).sampled_token_ids)
    assert text == f'<tool_call>\n{{"name": "query", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def test_a_template_that_serialises_arguments_itself_is_used_only_if_the_bytes_come_back():
    serialising = make_tokenizer(ALWAYS_SERIALISED)
    plain = {"role": "assistant", "content": "", "tool_calls": [tool_call('{"sql": "SELECT 1"}')]}
    text = text_of(serialising, render_call(make_call(plain), serialising).sampled_token_ids)
    assert '"arguments": {"sql": "SELECT 1"}}' in text
    for arguments in ('{"sql":"SELECT 1"}', "not 'json'\n"):
        odd = {"role": "assistant", "content": "", "tool_calls": [tool_call(arguments)]}
        with pytest.raises(GradeError, match=r"call 't-s'.*of the reply is not in the decoded completion"):
            render_call(make_call(odd), serialising)
        history: list[dict[str, Any]] = [
            {"role": "user", "content": "hi"},
            odd,
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
        ]
        with pytest.raises(GradeError, match="of an earlier tool call is not in the rendered prompt"):
            render_call(make_call({"role": "assistant", "content": "1"}, messages=history), serialising)


def test_the_prompt_of_the_next_call_continues_this_one(tokenizer):
    first = make_call({"role": "assistant", "content": "", "tool_calls": [tool_call('{"sql": "x"}')]})
    second = make_call(
        {"role": "assistant", "content": "12"},
        messages=[*first.messages, first.choices[0].message, {"role": "tool", "content": "12"}],
    )
    a, b = render_call(first, tokenizer), render_call(second, tokenizer)
    path = a.prompt_token_ids + a.sampled_token_ids
    assert b.prompt_token_ids[: len(path)] == path


def test_text_parts_are_joined_and_other_parts_refused(tokenizer):
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    call = make_call({"role": "assistant", "content": "2"}, messages=[{"role": "user", "content": parts}])
    assert "How many?<|im_end|>" in text_of(tokenizer, render_call(call, tokenizer).prompt_token_ids)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]
    with pytest.raises(GradeError, match="content that is not text: call 't-s' message 0"):
        render_call(make_call({"role": "assistant", "content": "2"}, messages=image), tokenizer)


def test_what_cannot_be_rendered_faithfully_is_refused_with_the_reason(tokenizer):
    say = {"role": "assistant", "content": "12"}
    for call, reason in (
        (make_call(say, finish_reason="length"), "cut at the token limit"),
        (make_call({"role": "assistant", "content": ""}), "neither content nor tool calls"),
        (make_call(say, messages=()), "0 messages and 1 replies"),
        (make_call(say, messages=[{"content": "x"}]), "not in OpenAI chat form"),
        (make_call({"role": "assistant", "tool_calls": [{"id": "c"}]}), "not in OpenAI chat form"),
        # The end token inside the text would end the turn early.
        (make_call({"role": "assistant", "content": "a<|im_end|>b"}), "not in the decoded completion"),
    ):
        with pytest.raises(GradeError, match=reason):
            render_call(call, tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            "does not begin",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end a reply"),
        ("{{ raise_exception('tools are not supported') }}", "can't render it.*tools are not supported"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>", "does not begin"),
    ],
)
def test_a_template_that_breaks_the_rules_is_refused(template, reason):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(GradeError, match=reason):
        render_call(make_call({"role": "assistant", "content": "12"}), tokenizer)


TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "said",
    [
        {"content": "  leading and trailing \n\n"},
        {"content": "12\n"},
        {"content": " 12", "reasoning_content": "there are 12"},  # it is in the thought
    ],
)
def test_white_space_at_the_ends_that_a_template_drops_is_refused_as_such(tokenizer, said):
    call = make_call({"role": "assistant", **said})
    whole = text_of(
        tokenizer, render_call(make_call({"content": said["content"]}), tokenizer).sampled_token_ids
    )
    assert whole == f"{said['content']}<|im_end|>"
    trimming = make_tokenizer()
    trimming.chat_template = TRIMMING
    with pytest.raises(GradeError, match="drops white space at the ends of the reply: call 't-s': "):
        render_call(call, trimming)
    plain = make_call({**said, "role": "assistant", "content": said["content"].strip()})
    ids = render_call(plain, trimming).sampled_token_ids
    assert text_of(trimming, ids).endswith(f"{said['content'].strip()}<|im_end|>")


def test_content_that_a_template_drops_is_not_found_in_the_thought():
    dropping = make_tokenizer()
    dropping.chat_template = TRIMMING.replace("{{ m.content | trim }}", "")
    call = make_call({"role": "assistant", "content": "12", "reasoning_content": "there are 12"})
    with pytest.raises(GradeError, match=r"loses the reply: .*'12' of the reply is not in"):
        render_call(call, dropping)


def test_tokens_merged_across_the_border_are_refused():
    tokenizer = make_tokenizer()
    # "or" + "ders" are one token in this vocabulary's " orders".
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} or{% else %}"
        "ders{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(GradeError, match="merges text across the border"):
        render_call(make_call({"role": "assistant", "content": "12"}), tokenizer)


def test_with_rendered_ids_fills_every_reply_and_keeps_the_grade(tokenizer):
    replies = [{"role": "assistant", "content": text} for text in ("12", "13")]
    call = with_rendered_ids(make_call(replies[0], others=replies[1:]), tokenizer)
    assert call.grade is Grade.TEXT
    assert call.prompt_token_ids == render_call(call, tokenizer).prompt_token_ids
    texts = [text_of(tokenizer, choice.sampled_token_ids or ()) for choice in call.choices]
    assert texts == ["12<|im_end|>", "13<|im_end|>"]
    assert all(choice.logprobs is None for choice in call.choices)


def test_with_rendered_ids_never_touches_the_engines_ids(tokenizer):
    exact = make_call({"role": "assistant", "content": "12"}, grade=Grade.EXACT)
    assert with_rendered_ids(exact, tokenizer) is exact
    broken = make_call({"role": "assistant", "content": "12"}, grade=Grade.UNUSABLE)
    with pytest.raises(GradeError, match="unusable: 't-s': no token ids"):
        with_rendered_ids(broken, tokenizer)


def test_tools_that_a_template_leaves_out_are_told(tokenizer):
    deaf = make_tokenizer()
    deaf.chat_template = deaf.chat_template.replace("{%- if tools %}", "{%- if false %}")
    call = make_call({"role": "assistant", "content": "12"})
    assert with_rendered_ids(call, tokenizer).grade_reasons == call.grade_reasons
    told = f"{DROPS_TOOLS}: call 't-s' was offered 1"
    assert with_rendered_ids(call, deaf).grade_reasons == (*call.grade_reasons, told)
    assert render_call(replace(call, tools=()), deaf).notes == ()


def test_text_that_a_template_adds_to_a_reply_is_told_and_counted_with_it():
    adding = make_tokenizer()
    written = "<|im_start|>assistant\n{{ m.content }}"
    said = "{{ 'The answer: it is ' }}{{ m.content }}{{ ' Bye.' }}"
    adding.chat_template = adding.chat_template.replace(written, written.replace("{{ m.content }}", said))
    (told,) = render_call(make_call({"role": "assistant", "content": "12"}), adding).notes
    assert told == reason_kind(told) == "the chat template adds to replies, 'The answer:it is' and 'Bye.'"
    calling = {"role": "assistant", "content": "12", "tool_calls": [tool_call("{}")]}
    assert render_call(make_call(calling), adding).notes == ()


@pytest.mark.parametrize(
    ("start_ns", "told", "time"),
    [
        (1_795_964_032_999_999_999, TELLS_TIME, "2026-11-29 14:53:52"),
        (3, TIME_UNKNOWN, "1970-01-01 00:00:00"),
    ],
)
def test_a_template_that_tells_the_time_is_given_the_calls_own_and_says_so(start_ns, told, time):
    dated = make_tokenizer()
    dated.chat_template = "{{ strftime_now('%d %b %Y %H:%M:%S') }}" + dated.chat_template
    call = replace(make_call({"role": "assistant", "content": "12"}), start_ns=start_ns)
    rendered = render_call(call, dated)
    assert rendered.notes == (f"{told}: it was given {time} UTC",)
    begins = datetime.fromisoformat(time).strftime("%d %b %Y %H:%M:%S<|im_start|>")
    assert text_of(dated, rendered.prompt_token_ids).startswith(begins)
