"""Ids and logprobs are the engine's, or they are left out and named."""

from typing import Any

import pytest

from spangrad.tracer import conventions as c
from tests.tracer.wire.exchange import HI, choice, completion, recorded, sse


def content(*values: float | None) -> dict[str, Any]:
    top = [{"token": "y", "logprob": -3.0}]
    return {"content": [{"token": "x", "logprob": value, "top_logprobs": top} for value in values]}


def usage(completion_tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 2, "completion_tokens": completion_tokens}}


def test_logprobs_of_the_sampled_tokens_are_kept_and_those_of_others_not() -> None:
    attributes = recorded(HI, completion(choice(token_ids=[4, 5], logprobs=content(-0.5, -1.0)), **usage(2)))
    assert c.unpack_ints(attributes[c.SAMPLED_TOKEN_IDS]) == [4, 5]
    assert c.unpack_floats(attributes[c.SAMPLED_LOGPROBS]) == [-0.5, -1.0]
    assert c.DROPPED not in attributes


def test_ids_of_choices_that_a_server_does_not_number_stay_with_their_text() -> None:
    choices = [choice(text, token_ids=[number]) for number, text in enumerate(("zero", "one"))]
    for unnumbered in choices:
        del unnumbered["index"]
    attributes = recorded(HI | {"n": 2}, completion(*choices))
    assert [message["parts"][0]["content"] for message in attributes[c.OUTPUT_MESSAGES]] == ["zero", "one"]
    ids = [attributes[c.choice_key(c.SAMPLED_TOKEN_IDS, number)] for number in range(2)]
    assert [c.unpack_ints(packed) for packed in ids] == [[0], [1]]


@pytest.mark.parametrize("hole", [None, -9999.0])
def test_a_token_without_a_logprob_is_a_hole(hole: float | None) -> None:
    attributes = recorded(HI, completion(choice(token_ids=[4, 5], logprobs=content(-0.5, hole))))
    assert c.unpack_ints(attributes[c.SAMPLED_TOKEN_IDS]) == [4, 5]
    assert c.SAMPLED_LOGPROBS not in attributes
    assert attributes[c.DROPPED] == {c.SAMPLED_LOGPROBS: "a sampled token came without a logprob"}


@pytest.mark.parametrize("count", [1, 3])
def test_logprobs_that_do_not_cover_the_ids_are_left_out_never_padded(count: int) -> None:
    attributes = recorded(HI, completion(choice(token_ids=[4, 5], logprobs=content(*[-0.5] * count))))
    assert c.unpack_ints(attributes[c.SAMPLED_TOKEN_IDS]) == [4, 5]
    assert attributes[c.DROPPED] == {c.SAMPLED_LOGPROBS: f"2 token ids, {count} logprobs"}


def test_a_forced_end_of_turn_token_is_not_among_the_sampled_ids() -> None:
    """Cut by its limit after two tokens; the server adds an end-of-turn token to the list."""
    reply = completion(choice(finish="length", token_ids=[4, 5, 151645]), **usage(2))
    attributes = recorded(HI, reply)
    assert c.SAMPLED_TOKEN_IDS not in attributes
    assert attributes[c.DROPPED] == {c.SAMPLED_TOKEN_IDS: "3 token ids came, usage counts 2"}


def test_a_stream_that_lost_an_id_on_the_way_has_none() -> None:
    def chunk(finish: str | None, **update: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {}, "finish_reason": finish} | update]}

    body = sse(chunk(None, token_ids=[4]), chunk("stop"), {"choices": []} | usage(2))
    attributes = recorded(HI, body)
    assert c.SAMPLED_TOKEN_IDS not in attributes
    assert "usage counts 2" in attributes[c.DROPPED][c.SAMPLED_TOKEN_IDS]
    unfinished = recorded(HI, sse(chunk(None, token_ids=[4]) | usage(7)))
    assert c.unpack_ints(unfinished[c.SAMPLED_TOKEN_IDS]) == [4]  # usage is a running count there


def test_usage_counts_all_choices() -> None:
    two = [choice(token_ids=[4], index=0), choice(token_ids=[5, 6], index=1)]
    attributes = recorded(HI | {"n": 2}, completion(*two, **usage(3)))
    assert c.unpack_ints(attributes[c.choice_key(c.SAMPLED_TOKEN_IDS, 1)]) == [5, 6]


def test_beam_search_has_no_behaviour_logprobs() -> None:
    reply = completion(choice(token_ids=[4], logprobs=content(-0.5)))
    attributes = recorded(HI | {"use_beam_search": True}, reply)
    assert c.SAMPLED_LOGPROBS not in attributes


def test_logprobs_of_a_refusal_count() -> None:
    logprobs = {"content": None, "refusal": content(-0.5)["content"]}
    attributes = recorded(HI, completion(choice(token_ids=[4], logprobs=logprobs)))
    assert c.unpack_floats(attributes[c.SAMPLED_LOGPROBS]) == [-0.5]


def test_a_stream_of_several_choices_keeps_the_ids_of_each() -> None:
    def chunk(index: int, finish: str | None, ids: list[int], *values: float) -> dict[str, Any]:
        update = {"index": index, "delta": {"content": "x"}, "finish_reason": finish, "token_ids": ids}
        return {"choices": [update | {"logprobs": content(*values)}]}

    body = sse(
        chunk(1, None, [5], -0.5), chunk(0, "stop", [4], -1.0), chunk(1, "length", [6], -2.0),
        {"choices": []} | usage(3),
    )  # fmt: skip
    attributes = recorded(HI | {"n": 2}, body)
    second = c.choice_key(c.SAMPLED_TOKEN_IDS, 1), c.choice_key(c.SAMPLED_LOGPROBS, 1)
    assert c.unpack_ints(attributes[c.SAMPLED_TOKEN_IDS]) == [4]
    assert c.unpack_ints(attributes[second[0]]) == [5, 6]
    assert c.unpack_floats(attributes[second[1]]) == [-0.5, -2.0]
    assert attributes[c.STREAM_COMPLETE] is True
