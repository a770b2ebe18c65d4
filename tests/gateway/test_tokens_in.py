"""Prompts made of a rollout's own ids, with toy templates whose every token is known.

A character is one token; so is every mark of the template.
"""

import asyncio
import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest

from spangrad.tracer.gateway.follow_up import TokensIn
from spangrad.tracer.gateway.reply import Reply, ReplyChoice
from spangrad.tracer.gateway.rewrite import UpstreamRequest
from spangrad.tracer.gateway.tokens_in import Continuation, Fallback, Turns, prompt_ids, renderings, unfit

USER, ASSISTANT, TOOL, END, NEWLINE, THINK, THOUGHT, CALL, CALLED, TOOLS = range(1, 11)
OWNER = ("r-1", 0)
Message = dict[str, Any]


def chars(text: str) -> list[int]:
    return [100 + ord(letter) for letter in text]


@dataclass(frozen=True)
class Template:
    """A chat template that may do what real ones do."""

    strips_thinking: bool = False
    """Thinking stays only in the last turn of all."""
    lists_tools_last: bool = False
    """Tools stand before the last user message, wherever that is."""
    drops_replies: bool = False
    last_end: int = END
    """What ends a turn that nothing follows."""

    def __call__(self, body: dict[str, Any]) -> list[int]:
        messages: list[Message] = body["messages"]
        last_user = max((at for at, m in enumerate(messages) if m["role"] == "user"), default=0)
        ids: list[int] = []
        for at, message in enumerate(messages):
            is_last = at == len(messages) - 1
            if self.lists_tools_last and at == last_user:
                ids += [TOOLS, *chars("a long list of tools")]
            ids += self._turn(message, keeps_thinking=is_last or not self.strips_thinking, is_last=is_last)
        return ids + ([ASSISTANT] if body.get("add_generation_prompt", True) else [])

    def _turn(self, message: Message, *, keeps_thinking: bool, is_last: bool) -> list[int]:
        content = chars(message.get("content") or "")
        if message["role"] != "assistant":
            return [USER if message["role"] == "user" else TOOL, *content, END, NEWLINE]
        if self.drops_replies:
            return []
        thinking = message.get("reasoning")
        thought = [THINK, *chars(thinking), THOUGHT] if thinking and keeps_thinking else []
        calls = [
            token
            for call in message.get("tool_calls") or ()
            for token in (CALL, *chars(call["function"]["arguments"]), CALLED)
        ]
        return [ASSISTANT, *thought, *content, *calls, self.last_end if is_last else END, NEWLINE]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def asked(*messages: Message, **settings: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **settings}


def follow(
    turns: Turns, request: dict[str, Any], template: Callable[[Any], list[int]], ends: Collection[int] = ()
) -> list[int] | str:
    """The prompt of a follow-up call, or why the plain one has to do."""
    found = turns.find(OWNER, request)
    if isinstance(found, Fallback):
        return found.reason
    whole, other, earlier = (template(body) for body in renderings(request, found.reply_index))
    ids = prompt_ids(found.turn, whole, other, earlier, ends)
    return ids.reason if isinstance(ids, Fallback) else ids


def remembered(
    request: dict[str, Any], reply: Message, sampled: list[int], *, is_cut: bool = False
) -> tuple[Turns, list[int]]:
    """A table with one turn, and that turn's ids."""
    turns = Turns()
    ids = [*Template()(request), *sampled]
    turns.remember(OWNER, request, reply, ids, is_cut=is_cut)
    return turns, ids


def test_a_follow_up_has_the_ids_that_were_sampled_and_what_the_template_adds() -> None:
    first = asked(user("q"))
    turns, ids = remembered(first, said("ab"), [777, END])  # "ab" was sampled as one token
    next_prompt = follow(turns, asked(user("q"), said("ab"), user("r")), Template())
    assert ids == [USER, 213, END, NEWLINE, ASSISTANT, 777, END]
    assert next_prompt == [*ids, NEWLINE, USER, *chars("r"), END, NEWLINE, ASSISTANT]


def test_a_template_that_drops_thinking_cannot_rewrite_what_was_sampled() -> None:
    thinking = [THINK, *chars("hm"), THOUGHT, *chars("ab"), END]
    for template in (Template(strips_thinking=True), Template()):
        for reasoning in ({}, {"reasoning": "hm"}, {"reasoning_content": "hm"}):
            turns, ids = remembered(asked(user("q")), said("ab", reasoning="hm"), thinking)
            request = asked(user("q"), said("ab", **reasoning), user("r"))
            assert follow(turns, request, template) == [*ids, NEWLINE, *template(asked(user("r")))]
    plain = Template(strips_thinking=True)(asked(user("q"), said("ab", reasoning="hm"), user("r")))
    assert THINK not in plain


def test_a_chain_of_calls_keeps_every_sampled_token_once() -> None:
    turns, template, messages = Turns(), Template(strips_thinking=True), [user("q")]
    prompt = template(asked(*messages))
    for number in range(4):
        sampled = [THINK, 900 + number, THOUGHT, *chars(str(number)), END]
        turns.remember(
            OWNER, asked(*messages), said(str(number), reasoning="t"), [*prompt, *sampled], is_cut=False
        )
        messages += [said(str(number)), user("more")]
        following = follow(turns, asked(*messages), template)
        assert isinstance(following, list) and following[: len(prompt) + len(sampled)] == [*prompt, *sampled]
        prompt = following
    assert [token for token in prompt if token >= 900] == [900, 901, 902, 903]


@pytest.mark.parametrize("seed", range(20))
def test_without_drift_the_prompt_is_the_plain_one(seed: int) -> None:
    rng = random.Random(seed)
    template, turns, messages = Template(), Turns(), [user("start")]
    for _ in range(rng.randint(1, 5)):
        request = asked(*messages)
        text = "".join(rng.choices("abxy ", k=rng.randint(1, 6)))
        reply = said(text)
        turns.remember(OWNER, request, reply, [*template(request), *chars(text), END], is_cut=False)
        news = [user("".join(rng.choices("abxy", k=3))) for _ in range(rng.randint(1, 2))]
        messages += [reply, *news]
        assert follow(turns, asked(*messages), template) == template(asked(*messages))


@pytest.mark.parametrize("text", ["cut off in the", "x", ""])
def test_the_end_of_a_cut_turn_is_the_templates_and_part_of_the_prompt(text: str) -> None:
    turns, ids = remembered(asked(user("q")), said(text), chars(text or "s"), is_cut=True)
    request = asked(user("q"), said(text), user("r"))
    assert follow(turns, request, Template(), ends={END}) == [
        *ids,
        END,
        NEWLINE,
        *Template()(asked(user("r"))),
    ]
    unknown = "the turn was cut, and the token that ends a turn is not known"
    assert follow(turns, request, Template()) == unknown


def tool_call(arguments: str, call_id: str = "c1") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_a_turn_of_tool_calls_is_continued_with_the_tools_answer() -> None:
    arguments = '{"city":"Oslo"}'
    sampled = [CALL, 800, 801, CALLED, END]
    turns, ids = remembered(asked(user("q")), said(None, tool_calls=[tool_call(arguments)]), sampled)
    answer = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    for sent_back in (arguments, '{"city": "Oslo"}'):
        for content in (None, ""):
            reply = said(content, tool_calls=[tool_call(sent_back)], refusal=None)
            expected = [*ids, NEWLINE, TOOL, *chars("rain"), END, NEWLINE, ASSISTANT]
            assert follow(turns, asked(user("q"), reply, answer), Template()) == expected
    other = said(None, tool_calls=[tool_call('{"city":"Rome"}')])
    assert follow(turns, asked(user("q"), other, answer), Template()) == "continues no earlier call"


def test_arguments_that_nest_without_end_are_compared_as_text() -> None:
    reply = said(None, tool_calls=[tool_call("[" * 5000)])
    request = asked(user("q"))
    turns, ids = remembered(request, reply, [777, END])
    found = turns.find(OWNER, asked(user("q"), reply, user("r")))
    assert isinstance(found, Continuation) and list(found.turn.ids) == ids


def test_a_reply_that_cannot_be_remembered_ends_all_the_same() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    message = said("a", tool_calls=[{"id": "c1", "function": {"name": "look", "arguments": deep}}])
    content = json.dumps(asked(user("q"))).encode()
    call = TokensIn().start("r-1", 0, UpstreamRequest(None, content, strip_ids=True, strip_logprobs=True))
    asyncio.run(call.content(None, {}))  # type: ignore[arg-type]  # a first call asks no engine
    choice = ReplyChoice(message, finish_reason="stop", token_ids=[777, END])
    call.end(Reply(prompt_token_ids=[5], choices={0: choice}))
    assert call.outcome == "fallback: first call of the rollout"


def test_a_cut_tool_call_gets_the_end_of_a_turn_and_no_characters_of_its_own() -> None:
    call = said(None, tool_calls=[tool_call('{"city')])
    turns, ids = remembered(asked(user("q")), call, [CALL, 800], is_cut=True)
    answer = {"role": "tool", "tool_call_id": "c1", "content": "no"}
    following = follow(turns, asked(user("q"), call, answer), Template(), ends={END})
    assert following == [*ids, END, NEWLINE, TOOL, *chars("no"), END, NEWLINE, ASSISTANT]


def test_a_stop_token_inside_the_turns_end_leaves_the_rest_of_it_to_the_template() -> None:
    call = said(None, tool_calls=[tool_call("{}")])
    turns, ids = remembered(asked(user("q")), call, [CALL, 800, CALLED])  # stop_token_ids=[CALLED]
    answer = {"role": "tool", "tool_call_id": "c1", "content": "no"}
    following = follow(turns, asked(user("q"), call, answer), Template())
    assert following == [*ids, END, NEWLINE, TOOL, *chars("no"), END, NEWLINE, ASSISTANT]


def test_every_choice_of_a_call_can_be_continued() -> None:
    turns, request = Turns(), asked(user("q"), n=2)
    for token, text in ((701, "a"), (702, "b")):
        turns.remember(OWNER, request, said(text), [5, token, END], is_cut=False)
    for token, text in ((701, "a"), (702, "b")):
        following = follow(turns, asked(user("q"), said(text), user("r")), Template())
        assert isinstance(following, list) and following[:3] == [5, token, END]


def test_of_two_replies_that_read_alike_none_is_guessed() -> None:
    turns, request = Turns(), asked(user("q"), n=2)
    for token, thinking in ((701, "hm"), (702, "oh"), (702, "oh")):
        turns.remember(OWNER, request, said("a", reasoning=thinking), [5, token, END], is_cut=False)
    for reply in (said("a"), said("a", reasoning="hm"), said("a", reasoning="oh")):
        assert follow(turns, asked(user("q"), reply, user("r")), Template()) == (
            "two replies read alike: it is not known which of them is continued"
        )


def test_the_longest_turn_is_continued() -> None:
    turns, messages = Turns(), [user("q")]
    turns.remember(OWNER, asked(*messages), said("a"), [1, END], is_cut=False)
    messages += [said("a"), user("r")]
    turns.remember(OWNER, asked(*messages), said("b"), [1, END, 2, END], is_cut=False)
    found = turns.find(OWNER, asked(*messages, said("b"), user("s")))
    assert isinstance(found, Continuation) and (found.reply_index, list(found.turn.ids)) == (
        3,
        [1, END, 2, END],
    )


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (asked(user("q"), said("ab"), user("r"), model="other"), "continues no earlier call"),
        (asked(user("q"), said("ab"), user("r"), tools=[{"a": 1}]), "continues no earlier call"),
        (
            asked(user("q"), said("ab"), user("r"), chat_template_kwargs={"enable_thinking": False}),
            "continues no earlier call",
        ),
        (asked(user("Q"), said("ab"), user("r")), "continues no earlier call"),
        (asked(user("q"), said("aB"), user("r")), "continues no earlier call"),
        (asked(user("q"), said("ab", reasoning="rewritten"), user("r")), "continues no earlier call"),
        (asked(user("q"), said("ab")), "nothing follows the earlier reply"),
    ],
)
def test_a_request_that_does_not_continue_the_call_falls_back(request_: dict[str, Any], reason: str) -> None:
    turns, _ = remembered(asked(user("q")), said("ab", reasoning="hm"), [777, END])
    assert follow(turns, request_, Template()) == reason


def test_another_rollout_or_attempt_is_not_continued() -> None:
    turns, _ = remembered(asked(user("q")), said("ab"), [777, END])
    request = asked(user("q"), said("ab"), user("r"))
    for owner in (("r-2", 0), ("r-1", 1)):
        assert turns.find(owner, request) == Fallback("first call of the rollout")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (Template(drops_replies=True), "the template leaves the reply out"),
        (Template(last_end=TOOLS), "the template ends a turn otherwise once another follows"),
        (Template(lists_tools_last=True), "the template moves history behind the turn: 21 tokens"),
    ],
)
def test_a_template_that_cannot_be_followed_falls_back(template: Template, reason: str) -> None:
    turns, _ = remembered(asked(user("q")), said("ab"), [777, END])
    assert follow(turns, asked(user("q"), said("ab"), user("r")), template) == reason


def test_a_last_token_that_the_template_does_not_end_turns_with_falls_back() -> None:
    turns, _ = remembered(asked(user("q")), said("ab"), [777, 50])
    reason = follow(turns, asked(user("q"), said("ab"), user("r")), Template())
    assert reason == "the turn's last token does not end a turn: 50"
    (letter,) = chars("r")  # also not if what follows has it
    turns, _ = remembered(asked(user("q")), said("ab"), [777, letter])
    reason = follow(turns, asked(user("q"), said("ab"), user("r")), Template())
    assert reason == f"the turn's last token does not end a turn: {letter}"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"messages": "no"}, "no messages"),
        ({"messages": [5]}, "no messages"),
        (asked(user("q"), echo=True), "the client sets echo"),
        (asked(user("q"), kv_transfer_params={}), "the client sets kv_transfer_params"),
        (asked(user("q"), truncate_prompt_tokens=5), "the client sets truncate_prompt_tokens"),
        (asked({"role": "user", "content": [{"type": "image_url"}]}), "content that is not text"),
        (asked({"role": "user", "content": [{"type": "text", "text": "a"}]}, echo=False), None),
    ],
)
def test_requests_that_the_engine_would_not_take_ids_with_fall_back(
    request_: dict[str, Any], reason: str | None
) -> None:
    assert unfit(request_) == (None if reason is None else Fallback(reason))


def test_renderings_have_the_settings_that_the_prompt_depends_on() -> None:
    settings = {"tools": [{"a": 1}], "chat_template_kwargs": {"x": 1}, "reasoning_effort": "none"}
    request = asked(user("q"), said("a"), user("r"), temperature=0.5, **settings)
    whole, other, earlier = renderings(request, 1)
    assert whole["model"] == "m" and whole["tools"] == [{"a": 1}] and "temperature" not in whole
    assert whole["chat_template_kwargs"] == {"x": 1, "reasoning_effort": "none", "enable_thinking": False}
    assert [len(body["messages"]) for body in (whole, other, earlier)] == [3, 3, 2]
    assert "add_generation_prompt" not in whole and earlier["add_generation_prompt"] is False
    assert json.dumps(request) == json.dumps(
        asked(user("q"), said("a"), user("r"), temperature=0.5, **settings)
    )


def test_memory_is_bounded_and_the_turn_used_longest_ago_makes_way() -> None:
    turns = Turns(max_bytes=10_000)
    for number in range(100):
        turns.remember((f"r-{number}", 0), asked(user("q")), said("a"), list(range(200)), is_cut=False)
        turns.find(("r-0", 0), asked(user("q"), said("a"), user("r")))
        assert turns.size_bytes <= 10_000
    follow_up = asked(user("q"), said("a"), user("r"))
    assert isinstance(turns.find(("r-0", 0), follow_up), Continuation)
    assert isinstance(turns.find(("r-99", 0), follow_up), Continuation)
    assert turns.find(("r-50", 0), follow_up) == Fallback("first call of the rollout")
    turns.remember(("r-99", 0), asked(user("q")), said("a"), list(range(20)), is_cut=False)  # the same again
    assert turns.size_bytes <= 10_000


def test_the_same_call_again_takes_no_more_memory() -> None:
    turns, sizes = Turns(), []
    for _ in range(3):
        turns.remember(OWNER, asked(user("q")), said("a"), [1, 2, END], is_cut=False)
        sizes.append(turns.size_bytes)
    assert len(set(sizes)) == 1


def test_a_turn_larger_than_the_memory_is_not_kept() -> None:
    turns = Turns(max_bytes=1000)
    turns.remember(OWNER, asked(user("q")), said("a"), list(range(1000)), is_cut=False)
    assert turns.size_bytes == 0
