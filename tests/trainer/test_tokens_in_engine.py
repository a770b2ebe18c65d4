"""Tokens in with a real tokenizer, and through the gateway with a real engine."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.trainer.small_policy import make_tokenizer

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.tracer.gateway.tokens_in import Continuation, Turns, prompt_ids, renderings
from spangrad.trainer.serving.engine import Engine

IM_END = 2


@pytest.mark.parametrize("text", ["SELECT count(*)", "naïve \ufffd\n ", "x", ""])
def test_a_real_tokenizer_gives_the_plain_prompt_where_nothing_drifts(text: str) -> None:
    tokenizer: Any = make_tokenizer()
    turns = Turns()

    def render(body: dict[str, Any]) -> list[int]:
        generation = body.get("add_generation_prompt", True)
        ids: list[int] = tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=generation, return_dict=False
        )
        return ids

    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many orders?"}]
    first = {"model": "m", "messages": messages}
    reply = {"role": "assistant", "content": text}
    sampled = [*tokenizer.encode(text, add_special_tokens=False), IM_END]
    turns.remember(("r", 0), first, reply, [*render(first), *sampled], is_cut=False)
    request = {**first, "messages": [*messages, reply, {"role": "user", "content": "And now?"}]}
    found = turns.find(("r", 0), request)
    assert isinstance(found, Continuation)
    whole, other, earlier = (render(body) for body in renderings(request, found.reply_index))
    assert prompt_ids(found.turn, whole, other, earlier, ()) == render(request)


@pytest.mark.vllm
def test_a_real_engine_takes_the_rollouts_own_ids(engine: Engine) -> None:
    exporter = InMemorySpanExporter()
    config = GatewayConfig(engine_url=engine.url, store="unused", port=0, fidelity="tokens-in")

    def ask(url: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, "max_tokens": 24, **more}
        answer = httpx.post(f"{url}/rollout/r-1/v1/chat/completions", json=body, timeout=60.0)
        answer.raise_for_status()
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    user = {"role": "user", "content": "How many orders does ann have?"}
    more = {"role": "user", "content": "go on"}
    with running(config, exporter=exporter) as url:
        ask(url, user, logit_bias={str(IM_END): 100.0})  # ends at once: so the end of a turn is known
        reply = ask(url, user, ignore_eos=True, seed=1)  # random bytes that no tokenizer gives back
        again = ask(url, user, reply, more, ignore_eos=True, seed=2)
        ask(url, user, reply, more, again, more)
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    calls: list[Mapping[str, Any]] = [span.attributes or {} for span in spans]
    assert [call[names.TOKENS_IN] for call in calls[2:]] == ["used", "used"]
    rendered = httpx.post(
        f"{engine.url}/tokenize", json={"model": "policy", "messages": [more]}, timeout=60.0
    )
    newline = make_tokenizer().encode("\n", add_special_tokens=False)
    for before, after in pairwise(calls[1:]):
        prompt = names.unpack_ints(before[names.PROMPT_TOKEN_IDS])
        sampled = names.unpack_ints(before[names.SAMPLED_TOKEN_IDS])
        expected = [*prompt, *sampled, IM_END, *newline, *rendered.json()["tokens"]]
        assert names.unpack_ints(after[names.PROMPT_TOKEN_IDS]) == expected


@pytest.mark.vllm
def test_a_real_engine_tells_how_it_samples(engine: Engine) -> None:
    exporter = InMemorySpanExporter()
    with running(GatewayConfig(engine_url=engine.url, store="unused", port=0), exporter=exporter) as url:
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0).raise_for_status()
        httpx.post(f"{url}/spangrad/flush", timeout=60.0).raise_for_status()
    (span,) = exporter.get_finished_spans()
    attributes = span.attributes or {}
    assert attributes[names.SAMPLING_DEFAULTS] == "{}"  # `Engine` starts it so that there are none
    assert attributes[names.LOGPROBS_MODE] == "processed"
