"""Masks found by rendering with and without a reply, against a template's own generation marks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.credit.rendered import count_rewritten
from spangrad.credit.transitions import transitions
from spangrad.errors import GradeError
from spangrad.trainer.learning.reading_back import DROPS_THOUGHTS, REWRITES
from spangrad.trainer.learning.rendering import render_call, with_rendered_ids
from spangrad.trainer.policies.policy import Conversation, make_tokenizer, render

Message = Mapping[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "query",
        "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}},
    },
}
SYSTEM: Message = {"role": "system", "content": "Answer with SQL."}
ASKED: Message = {"role": "user", "content": "How many orders?"}
LOOK: Message = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "query", "arguments": '{"sql":"é"}'}}
    ],
}
SEEN: Message = {"role": "tool", "tool_call_id": "c", "content": "12"}
TOLD: Message = {"role": "assistant", "content": "There are 12."}
THINKS = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content and loop.index0 > ns.asked %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3 does it: thoughts are shown of replies to the last question alone."""
XML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<function=' + call.function.name + '>' }}{% for name, value in call.function.arguments | items %}"
    "{{ '<parameter=' + name + '>\\n' }}{{ value if value is string else value | tojson }}"
    "{{ '\\n</parameter>' }}"
    "{% endfor %}{{ '</function>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3.5 does it: arguments have to be objects, and are written as XML."""
FIRST_SYSTEM = (
    "{% for m in messages if m.role == 'system' %}{{ '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Puts what systems said at the beginning, wherever it was said."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer([render(Conversation([SYSTEM, ASKED, LOOK, SEEN, TOLD], [TOOL]))] * 3, vocab=400)


def with_template(tokenizer: Any, template: str) -> Any:
    other = make_tokenizer([render(Conversation([SYSTEM, ASKED, TOLD]))] * 3, vocab=400)
    other.chat_template = template
    return other


def calls_of(messages: Sequence[Message], tools: Sequence[Message] = (TOOL,)) -> list[ModelCall]:
    """A call for every reply of a conversation."""
    return [
        ModelCall(
            call_id=f"t-{index}",
            trace_id="t",
            span_id=str(index),
            span_ids=(str(index),),
            dialect="langfuse",
            start_ns=index,
            end_ns=index,
            grade=Grade.TEXT,
            grade_reasons=("no token ids",),
            messages=messages[:index],
            tools=tools,
            choices=[Choice(message, "stop")],
        )
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def told_by_template(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    told: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(told["input_ids"]), [bool(mask) for mask in told["assistant_masks"]]


def assert_same_mask(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message] = (TOOL,),
    given: Sequence[Message] | None = None,
) -> None:
    """The one row of a conversation trains exactly what the template marks, who may get other objects."""
    rendered = [with_rendered_ids(call, tokenizer) for call in calls_of(messages, tools)]
    (row,) = transitions(build_tree(rendered), None, group_id=None)
    ids, mask = told_by_template(tokenizer, messages if given is None else given, tools)
    trained = len(row.token_ids)
    assert row.token_ids.tolist() == ids[:trained]
    assert row.action_mask.tolist() == mask[:trained]
    assert not any(mask[trained:])


def test_a_row_trains_exactly_what_the_template_marks(tokenizer):
    assert_same_mask(tokenizer, [SYSTEM, ASKED, LOOK, SEEN, TOLD, ASKED, LOOK, SEEN, TOLD])
    assert_same_mask(tokenizer, [ASKED, TOLD], tools=())
    assert_same_mask(tokenizer, [ASKED, {**LOOK, "tool_calls": [*LOOK["tool_calls"]] * 2}, SEEN, SEEN, TOLD])


said = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
turns = st.lists(
    st.tuples(said, st.lists(st.tuples(said, said), max_size=2), said), min_size=1, max_size=3
).map(
    lambda found: [
        message
        for asked, looked, told in found
        for message in (
            {"role": "user", "content": asked},
            *(
                each
                for arguments, seen in looked
                for each in (
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c", "function": {"name": "query", "arguments": arguments}}],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": seen},
                )
            ),
            {"role": "assistant", "content": told},
        )
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(messages=turns)
def test_whatever_was_said_a_row_trains_what_the_template_marks_or_nothing(tokenizer, messages):
    try:
        for call in calls_of(messages):
            render_call(call, tokenizer)
    except GradeError:  # blank replies, and spaces that merge across the border
        assume(False)
    assert_same_mask(tokenizer, messages)


def test_thoughts_are_part_of_what_is_trained(tokenizer):
    thinking = with_template(tokenizer, THINKS)
    thought = {**TOLD, "reasoning": "Count them."}
    (call,) = calls_of([ASKED, thought], tools=())
    rendered = render_call(call, thinking)
    text = thinking.decode(list(rendered.sampled_token_ids))
    assert text == "<think>\nCount them.\n</think>\n\nThere are 12.<|im_end|>"
    assert rendered.notes == ()
    ids, mask = told_by_template(thinking, [ASKED, {**thought, "reasoning_content": "Count them."}], ())
    prompt = len(rendered.prompt_token_ids)
    marked = [index for index, is_marked in enumerate(mask) if is_marked]
    assert marked == list(range(prompt, prompt + len(rendered.sampled_token_ids)))
    assert ids[: marked[-1] + 1] == [*rendered.prompt_token_ids, *rendered.sampled_token_ids]


def test_a_thought_that_the_template_has_no_place_for_is_not_dropped_in_silence(tokenizer):
    (call,) = calls_of([ASKED, {**TOLD, "reasoning": "Count them."}])
    with pytest.raises(GradeError, match=r"loses the reply: .*'Count them\.' of the reply"):
        render_call(call, tokenizer)


def test_a_template_that_drops_earlier_thoughts_is_told(tokenizer):
    thinking = with_template(tokenizer, THINKS)
    thought = {**TOLD, "reasoning": "Count them."}
    first, second = calls_of([ASKED, thought, {"role": "user", "content": "Sure?"}, TOLD], tools=())
    assert render_call(first, thinking).notes == ()
    assert render_call(second, thinking).notes == (f"{DROPS_THOUGHTS}: message 1",)
    rendered = with_rendered_ids(second, thinking)
    assert rendered.grade_reasons == ("no token ids", f"{DROPS_THOUGHTS}: message 1")
    # What the second call trains is what the template marks in it: its own reply is the last.
    ids, mask = told_by_template(thinking, [*second.messages, TOLD], ())
    prompt, reply = rendered.prompt_token_ids or (), rendered.choices[0].sampled_token_ids or ()
    end = len(prompt) + len(reply)
    assert (ids[:end], mask[len(prompt) : end]) == ([*prompt, *reply], [True] * len(reply))


def test_a_message_that_the_template_leaves_out_is_told_and_one_written_as_json_is_not(tokenizer):
    (call,) = calls_of([SYSTEM, ASKED, {**SEEN, "content": 'orders: "é"\n12'}, TOLD], tools=())
    escaping = THINKS.replace("{% else %}{{ m.content +", "{% else %}{{ (m.content | tojson) +")
    assert render_call(call, with_template(tokenizer, escaping)).notes == ()
    silent = escaping.replace("{% for m in messages %}{{", "{% for m in messages[1:] %}{{")
    assert render_call(call, with_template(tokenizer, silent)).notes == (f"{REWRITES}: message 0",)


def test_a_template_with_a_form_of_its_own_shows_keys_and_values(tokenizer):
    arguments = '{"sql": "SELECT \\"é\\"", "limit":3, "deep": {"a":[1,null]}}'
    made = {"id": "c", "type": "function", "function": {"name": "query", "arguments": arguments}}
    calling = {**LOOK, "tool_calls": [made]}
    function = {"name": "query", "arguments": json.loads(arguments)}
    given = {**LOOK, "tool_calls": [{**made, "function": function}]}
    for replies, told in (([calling, SEEN, TOLD], [given, SEEN, TOLD]), ([calling], [given])):
        assert_same_mask(with_template(tokenizer, XML), [ASKED, *replies], given=[ASKED, *told])
    first, second = calls_of([ASKED, calling, SEEN, TOLD])
    for lossy in (
        XML.replace("value if value is string else value | tojson", "'?'"),
        XML.replace("+ name +", "+"),
    ):
        with pytest.raises(GradeError, match="loses the reply"):
            render_call(first, with_template(tokenizer, lossy))
        with pytest.raises(GradeError, match="loses an earlier tool call"):
            render_call(second, with_template(tokenizer, lossy))


@pytest.mark.parametrize("between", [SYSTEM, {"role": "user", "content": "Sure?"}])
def test_a_template_that_moves_messages_gives_rows_of_their_own_and_is_told(tokenizer, between):
    moving = with_template(tokenizer, FIRST_SYSTEM)
    calls = calls_of([ASKED, TOLD, between, TOLD], tools=())
    tree = build_tree([with_rendered_ids(call, moving) for call in calls])
    rows = transitions(tree, None, group_id=None)
    assert (len(rows), count_rewritten(tree)) == ((2, 1) if between is SYSTEM else (1, 0))
    # However it is cut into rows, every reply is trained once, and as the template marks it.
    for call in calls:
        ids, mask = told_by_template(moving, [*call.messages, call.choices[0].message], ())
        (segment,) = (s for row in rows for s in row.segments if s.call_id == call.call_id)
        row = next(row for row in rows if segment in row.segments)
        assert row.token_ids[: segment.stop].tolist() == ids[: segment.stop]
        assert all(mask[segment.start : segment.stop]) and not any(mask[segment.stop :])
