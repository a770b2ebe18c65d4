"""Whether token ids are a tokenizer's."""

from typing import Any

import pytest
from tests.adapters.building import call
from tests.trainer.small_policy import make_tokenizer

from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.errors import GradeError
from spangrad.trainer.learning.rendering import with_rendered_ids
from spangrad.trainer.learning.vocabulary import check_size, check_vocabulary

SAID = "There are 12 orders in all, and ann has three of them."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def told(ids: list[int], **message: Any) -> ModelCall:
    made = call("a", [5, 6], ids, model="qwen")
    choice = Choice({"role": "assistant", **message}, "stop", ids)
    return ModelCall(**{**{f: getattr(made, f) for f in made.__slots__}, "choices": [choice]})


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        (SAID, {"content": SAID}),
        (f"{SAID}<|im_end|>", {"content": SAID}),
        (f"<think>\nwell\n</think>\n\n{SAID}<|im_end|>", {"content": SAID}),
        (f"  {SAID}", {"content": SAID}),
        (SAID, {"content": f"{SAID} and a guardrail's own words"}),
        (SAID, {"content": [{"type": "text", "text": SAID}]}),
        ('<tool_call>\n{"name": "query", "arguments": {"a": 1}}\n</tool_call>',
         {"content": None, "tool_calls": [{"function": {"name": "query", "arguments": '{"a":1}'}}]}),
        ("sure: é", {"content": "sure: \ufffd"}),
        ("5", {"content": "5"}),
        ("<|im_end|>", {"content": ""}),
        (SAID, {"content": None, "reasoning": SAID}),
    ],
)  # fmt: skip
def test_ids_that_say_what_was_recorded_are_the_tokenizers(tokenizer, sampled, message):
    check_vocabulary(told(tokenizer.encode(sampled, add_special_tokens=False), **message), tokenizer)


def test_ids_that_say_something_else_are_refused(tokenizer):
    ids = tokenizer.encode(SAID, add_special_tokens=False)
    with pytest.raises(GradeError, match=r"another vocabulary: .*'a' choice 0 is 'There are.*by 'qwen'"):
        check_vocabulary(told([i + 1 for i in ids], content=SAID), tokenizer)


def test_ids_that_the_tokenizer_does_not_have_are_refused(tokenizer):
    beyond = told([len(tokenizer)], content="")
    with pytest.raises(GradeError, match=f"sampled id {len(tokenizer)}, and the vocabulary has"):
        check_vocabulary(beyond, tokenizer)
    with pytest.raises(GradeError, match="prompt id 6, and the vocabulary has 6 tokens"):
        check_size(told([1], content=""), 6)
    check_size(told([1], content=""), 7)


def test_engine_ids_are_checked_where_text_is_rendered(tokenizer):
    with pytest.raises(GradeError, match="another vocabulary"):
        with_rendered_ids(told([100_000], content=SAID), tokenizer)
    right = told(tokenizer.encode(SAID, add_special_tokens=False), content=SAID)
    assert right.grade is Grade.EXACT
    assert with_rendered_ids(right, tokenizer) is right
