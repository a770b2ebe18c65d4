"""Text that stands before what was sampled (`echo`, a prefilled reply) never counts as sampled."""

import json
from typing import Any

import httpx
import pytest

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.record import reply_attributes
from spangrad.tracer.gateway.reply import Reply
from spangrad.tracer.gateway.versions import SampledBy
from tests.gateway.gateway_setup import Setup, body, dropped, ids, logprobs

PREFILLED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The "}]


def recorded(request: dict[str, Any], *replies: dict[str, Any]) -> dict[str, Any]:
    reply = Reply()
    for part in replies:
        reply.add(part)
    return reply_attributes(reply, request, versions=SampledBy(3, 3), logprobs_mode="processed")


def content(attributes: dict[str, Any]) -> str:
    text: str = json.loads(attributes[names.OUTPUT_MESSAGES])[0]["parts"][0]["content"]
    return text


def completion(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": "stop", **more}]}


def chat_reply(text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    tokens = {"token_ids": [8, 9], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
    return {"choices": [{**choice, **tokens}], "prompt_token_ids": [5, 6, 7]}


def test_an_echo_reaches_the_client_and_is_no_part_of_the_recorded_reply(gateway: Setup) -> None:
    request = {"model": "stub", "prompt": "say it", "echo": True}
    direct, through = (
        httpx.post(f"{url}/v1/completions", json=request) for url in (gateway.engine.url, gateway.url)
    )
    assert through.content == direct.content
    assert through.json()["choices"][0]["text"].startswith("say it")
    assert gateway.engine.requests[-1] == request
    attributes = gateway.attributes()
    assert content(dict(attributes)) == "say it <end>"  # the stub repeats its prompt
    assert names.SAMPLED_TOKEN_IDS not in attributes


@pytest.mark.parametrize("prompt", ["no beginning of it", [5, 6], ["one", "two"]])
def test_an_echo_that_can_not_be_told_from_the_reply_is_named(prompt: Any) -> None:
    attributes = recorded({"prompt": prompt, "echo": True}, completion("say it and more"))
    assert "echo" in dropped(attributes)[names.OUTPUT_MESSAGES]


def test_logprobs_of_an_echoed_prompt_are_not_among_the_sampled_ones() -> None:
    request = {"prompt": "say", "echo": True, "return_token_ids": True, "logprobs": 0}
    told = {"token_ids": [8, 9], "prompt_token_ids": [5, 6, 7]}
    values = {"logprobs": {"token_logprobs": [None, -3.0, -2.0, -0.5, -0.25]}}
    attributes = recorded(request, completion(" it", **told, **values))
    assert ids(attributes) == [8, 9] and logprobs(attributes) == [-0.5, -0.25]
    assert content(attributes) == " it" and dropped(attributes) == {}


def test_logprobs_of_the_prompt_without_its_ids_leave_no_guess() -> None:
    request = {"prompt": "say", "echo": True, "return_token_ids": True, "logprobs": 0}
    told = {"token_ids": [8, 9], "logprobs": {"token_logprobs": [None, -3.0, -0.5, -0.25]}}
    attributes = recorded(request, completion(" it", **told))
    assert names.SAMPLED_TOKEN_IDS not in attributes and names.SAMPLED_LOGPROBS not in attributes


def test_a_prefilled_reply_is_part_of_the_prompt() -> None:
    request = {"messages": PREFILLED, "continue_final_message": True, "add_generation_prompt": False}
    attributes = recorded(request, chat_reply("sky"))
    assert ids(attributes) == [8, 9] and content(attributes) == "sky"
    assert names.unpack_ints(attributes[names.PROMPT_TOKEN_IDS]) == [5, 6, 7]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echoed_prefill_is_taken_off_the_recorded_reply(is_stream: bool) -> None:
    request = {"messages": PREFILLED, "echo": True, "continue_final_message": True}
    if is_stream:
        deltas = [{"index": 0, "delta": {"content": text}} for text in ("The ", "sky")]
        parts = [{"choices": [delta]} for delta in deltas]
        attributes = recorded(
            request, *parts, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        )
    else:
        attributes = recorded(request, chat_reply("The sky"))
        assert ids(attributes) == [8, 9]
    assert content(attributes) == "sky" and names.OUTPUT_MESSAGES not in dropped(attributes)


def test_an_echo_without_a_prefill_is_none() -> None:
    attributes = recorded(body("q", echo=True), chat_reply("The sky"))
    assert content(attributes) == "The sky" and dropped(attributes) == {}
