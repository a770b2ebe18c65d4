"""Rationales before an expert's actions: which alternatives they are shown, and what becomes of the calls."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.credit.reflection import Rationale, Tried, reflected
from spangrad.credit.transitions import transitions
from spangrad.errors import CreditError
from spangrad.trainer.learning.rendering import with_rendered_ids
from tests.adapters.building import call
from tests.trainer.small_policy import make_tokenizer

Message = Mapping[str, Any]
ASKED: list[Message] = [{"role": "user", "content": "how many?"}]


def acted(name: str, messages: Sequence[Message], content: str, *, at: int = 0, **more: Any) -> ModelCall:
    plain = call(name, [1], [2], start_ns=at, rollout_id=name[0], grade=Grade.TEXT)
    choice = Choice({"role": "assistant", "content": content}, finish_reason="stop")
    return dataclasses.replace(plain, messages=messages, choices=(choice,), prompt_token_ids=None, **more)


def rollout(name: str, *turns: str) -> list[ModelCall]:
    """Says the turns; the environment answers each with the same word behind it."""
    calls, messages = [], list(ASKED)
    for step, said in enumerate(turns):
        calls.append(acted(f"{name}{step}", list(messages), said, at=step))
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": f"{said}!"}]
        messages[-1] = {**messages[-1], "tool_call_id": f"{name}-{step}"}  # never twice the same
    return calls


ROLLOUTS = {
    "e": rollout("e", "look", "count"),
    "b": rollout("b", "look", "guess"),
    "c": rollout("c", "ask", "count"),
    "d": rollout("d", "look", "guess"),
}
OUTCOMES = {"e": 1.0, "b": 0.0, "c": 0.5, "d": 0.2}


def test_a_rationale_sees_what_else_was_tried_in_the_state_and_what_came_of_it():
    seen: list[tuple[Tried, Sequence[Tried]]] = []

    def reflect(expert: Tried, alternatives: Sequence[Tried]) -> Rationale:
        seen.append((expert, alternatives))
        return Rationale("Looking is free.", "judge-1")

    found = reflected({"e": ROLLOUTS["e"]}, ROLLOUTS, OUTCOMES, reflect)
    assert [made.call_id for made in found.calls] == ["e0", "e1"]
    (first, others), (second, more) = seen
    assert [(one.call.call_id, one.outcome) for one in others] == [("c0", 0.5)]
    assert [message["content"] for message in others[0].next_messages] == ["ask!"]
    assert [message["content"] for message in first.next_messages] == ["look!"]
    # b and d guessed alike: shown once; tool-call ids do not part the states.
    assert [one.call.call_id for one in more] == ["b1"]
    assert (second.outcome, second.next_messages) == (1.0, ())


def test_what_is_reflected_is_cloned_as_text_and_says_who_wrote_it():
    found = reflected(
        {"e": ROLLOUTS["e"][:1]}, ROLLOUTS, OUTCOMES, lambda *_: Rationale("Looking is free.", "judge-1")
    )
    (made,) = found.calls
    assert made.choices[0].message["content"] == "Looking is free.\n\nlook"
    assert made.grade_reasons == ("a rationale was put before the reply: by judge-1, frozen",)
    assert (made.grade, made.prompt_token_ids, made.choices[0].sampled_token_ids) == (Grade.TEXT, None, None)
    assert made.messages == ROLLOUTS["e"][0].messages
    tokenizer = make_tokenizer()
    (row,) = transitions(build_tree([with_rendered_ids(made, tokenizer)]), None, group_id="g")
    trained = tokenizer.decode(row.token_ids[row.action_mask].tolist())
    assert trained == "Looking is free.\n\nlook<|im_end|>"
    assert row.grade == "text"


def test_a_rationale_can_be_a_thought():
    found = reflected(
        {"e": ROLLOUTS["e"][:1]}, ROLLOUTS, OUTCOMES, lambda *_: Rationale("Why not.", "m"), place="reasoning"
    )
    assert found.calls[0].choices[0].message == {
        "role": "assistant",
        "content": "look",
        "reasoning": "Why not.",
    }


def test_what_has_no_reflection_says_why():
    found = reflected({"e": ROLLOUTS["e"]}, {"c": ROLLOUTS["c"]}, OUTCOMES, lambda *_: None)
    assert found.calls == []
    assert [(one.call_id, one.reason) for one in found.left_out] == [
        ("e0", "nothing was written about it"),
        ("e1", "nothing else was tried in its state"),
    ]


def test_the_worst_alternatives_are_shown():
    shown: list[Sequence[Tried]] = []
    others = {name: rollout(name, f"try {name}") for name in "bcd"}
    outcomes = {"b": 0.5, "c": 0.0, "d": None, "e": 1.0}
    reflected(
        {"e": ROLLOUTS["e"][:1]},
        others,
        outcomes,
        lambda _, alternatives: shown.append(alternatives),
        most=2,
    )
    assert [[one.call.call_id for one in each] for each in shown] == [["d0", "c0"]]


def test_what_can_not_be_used_is_refused():
    one = {"e": ROLLOUTS["e"]}
    for rationale in (Rationale(" ", "judge-1"), Rationale("Because.", "")):
        with pytest.raises(CreditError, match=r"call 'e0': the rationale is .*; expected some text"):
            reflected(one, ROLLOUTS, OUTCOMES, lambda *_, said=rationale: said)
    with pytest.raises(CreditError, match="most is 0; expected 1 or more"):
        reflected(one, ROLLOUTS, OUTCOMES, lambda *_: None, most=0)


def test_calls_of_another_policy_are_neither_experts_nor_alternatives():
    frozen = {name: [dataclasses.replace(c, is_trained_policy=False) for c in calls]
              for name, calls in ROLLOUTS.items()}  # fmt: skip
    found = reflected({"e": frozen["e"]}, ROLLOUTS, OUTCOMES, lambda *_: Rationale("x", "m"))
    assert ([one.reason for one in found.left_out], found.calls) == (["frozen policy"] * 2, [])
    found = reflected({"e": ROLLOUTS["e"]}, frozen, OUTCOMES, lambda *_: Rationale("x", "m"))
    assert {one.reason for one in found.left_out} == {"nothing else was tried in its state"}
