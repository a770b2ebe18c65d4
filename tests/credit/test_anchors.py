"""Anchor states: equal observations are equal, whatever their ids."""

import dataclasses
from typing import Any

from spangrad.credit.anchors import anchor_of, history_keys, observation_of
from tests.adapters.building import call

ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "question"}]


def anchor(messages: list[dict[str, Any]]) -> str | None:
    return anchor_of(dataclasses.replace(call("a", [1], [2]), messages=messages))


def reply(name: str) -> dict[str, Any]:
    function = {"name": "query", "arguments": "{}"}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": name, "function": function}]}


def result(name: str, content: str = "rows") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def test_a_first_step_is_anchored_at_the_last_user_message():
    assert anchor(ASKED) == anchor([{"role": "system", "content": "other"}, ASKED[1]])
    assert anchor(ASKED) != anchor([ASKED[0], {"role": "user", "content": "another"}])


def test_a_later_step_is_anchored_at_what_followed_the_last_reply():
    first = anchor([*ASKED, reply("x1"), result("x1")])
    assert first == anchor([*ASKED, reply("x0"), result("x0", "error"), reply("x2"), result("x2")])
    assert first != anchor([*ASKED, reply("x1"), result("x1", "no rows")])
    assert first != anchor(ASKED)


def test_all_results_of_a_parallel_call_are_the_observation():
    both = [*ASKED, reply("x"), result("x", "1"), result("y", "2")]
    assert anchor(both) != anchor(both[:-1])


def test_a_state_that_the_agent_names_is_the_anchor_whatever_it_was_shown():
    keyed = [
        dataclasses.replace(call("a", [1], [2]), messages=messages, state_key=key)
        for messages, key in ((ASKED, "room"), ([], "room"), (ASKED, "hall"))
    ]
    first, second, third = map(anchor_of, keyed)
    assert first is not None
    assert first == second
    assert len({first, third, anchor(ASKED)}) == 3


def test_text_as_string_and_as_parts_is_the_same_state():
    as_parts = [{"role": "user", "content": [{"type": "text", "text": "question"}]}]
    assert anchor(as_parts) == anchor(ASKED)


def test_a_step_without_an_observation_has_no_anchor():
    assert anchor([]) is None
    assert anchor([*ASKED, {"role": "assistant", "content": "go on"}]) is None


def test_an_observation_can_be_nested_as_deep_as_its_author_likes():
    def nested(depth: int, inmost: str) -> list[dict[str, Any]]:
        value: Any = {"text": inmost, "id": inmost}
        for _ in range(depth):
            value = {"rows": [value, "x"]}
        return [*ASKED, reply("x"), {"role": "tool", "tool_call_id": inmost, "content": value}]

    deep, other = nested(2000, "a"), nested(2000, "b")
    assert anchor(deep) == anchor(nested(2000, "a")) != anchor(other)
    assert history_keys(deep)[-1] == history_keys(nested(2000, "a"))[-1] != history_keys(other)[-1]
    shallow = dataclasses.replace(call("a", [1], [2]), messages=nested(2, "a"))
    written = '{"content": {"rows": [{"rows": [{"text": "a"}, "x"]}, "x"]}, "role": "tool"}'
    assert observation_of(shallow) == written
    assert (observation_of(dataclasses.replace(shallow, messages=deep)) or "").count('"x"') == 2000
