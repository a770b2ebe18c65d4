"""What rendering makes of calls, and whose ids rows hold."""

import dataclasses
from collections import Counter

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.credit.rendered import (
    RENDERED,
    count_rewritten,
    models_of_row,
    rendered,
    row_models,
    with_unknown_tools,
)
from spangrad.credit.transitions import Refused, transitions
from spangrad.errors import GradeError
from tests.adapters.building import call

ASKED = {"role": "user", "content": "q"}
TOLD = {"role": "assistant", "content": "x"}


def text_call(name: str, prompt: list[int], reply: list[int], *messages: dict[str, str]) -> ModelCall:
    made = call(name, prompt, reply, start_ns=len(messages), grade=Grade.TEXT, messages=messages)
    return dataclasses.replace(made, choices=[Choice(TOLD, "stop", reply)])


def test_calls_that_go_on_in_words_and_not_in_tokens_are_counted():
    first = text_call("a", [1], [2], ASKED)
    goes_on = text_call("b", [1, 2, 3], [4], ASKED, TOLD, ASKED)
    rewritten = text_call("c", [1, 9, 3], [4], ASKED, TOLD, ASKED)
    other = text_call("d", [7], [8], {"role": "user", "content": "another"})
    assert count_rewritten(build_tree([first, goes_on, other])) == 0
    assert count_rewritten(build_tree([first, goes_on, rewritten, other])) == 1


def test_the_engines_own_forks_are_nobodys_rewriting():
    first, second = text_call("a", [1], [2], ASKED), text_call("b", [9], [4], ASKED, TOLD, ASKED)
    exact = [dataclasses.replace(one, grade=Grade.EXACT) for one in (first, second)]
    assert count_rewritten(build_tree(exact)) == 0


def test_a_recorder_that_left_tools_out_of_one_call_left_them_out_of_its_rollout():
    unknown = "tool definitions were not recorded"
    used, plain = text_call("a", [1], [2], ASKED), text_call("b", [3], [4], ASKED)
    used = dataclasses.replace(used, grade_reasons=("no token ids", f"{unknown}: tools were used"))
    other = dataclasses.replace(plain, dialect="langfuse")
    defined = dataclasses.replace(plain, tools=[{"type": "function", "function": {"name": "f"}}])
    exact = dataclasses.replace(plain, grade=Grade.EXACT)
    assert with_unknown_tools([plain, other]) == [plain, other]
    told, *same = with_unknown_tools([plain, used, other, defined, exact])
    assert same == [used, other, defined, exact]
    assert told.grade_reasons == (f"{unknown}: other calls of its rollout used some",)


def test_refusals_are_counted_by_kind_and_alterations_by_call():
    refused: list[Refused] = []
    notes: Counter[str] = Counter()

    def render(told: ModelCall) -> ModelCall:
        if told.call_id == "bad":
            raise GradeError("too long: call 'bad' has 9 tokens")
        altered = (*told.grade_reasons, "messages are dropped: message 1", "messages are dropped: message 2")
        return dataclasses.replace(told, grade_reasons=altered)

    for name in ("bad", "good", "fine"):
        rendered(text_call(name, [1], [2], ASKED), render, refused, notes)
    assert [(one.reason, one.counted_as) for one in refused] == [
        ("can't be rendered: too long: call 'bad' has 9 tokens", "can't be rendered: too long")
    ]
    assert notes == {"messages are dropped": 2}
    exact = call("bad", [1], [2])
    assert rendered(exact, render, refused, notes) is None
    assert refused[-1].counted_as == "too long"
    frozen = dataclasses.replace(exact, is_trained_policy=False)
    assert rendered(frozen, render, refused, notes) is frozen


def test_rows_are_told_by_whose_ids_they_hold():
    calls = [
        call("a", [1], [2], model="qwen"),
        call("b", [1, 2, 3], [4], start_ns=1, model="llama"),
        call("c", [7], [8], start_ns=2, model="qwen"),
        call("d", [5], [6], start_ns=3, grade=Grade.TEXT, model="qwen"),
    ]
    by_id = {one.call_id: one for one in calls}
    rows = transitions(build_tree(calls), None, group_id=None)
    assert sorted(models_of_row(row, by_id) for row in rows) == [["llama", "qwen"], ["qwen"], [RENDERED]]
    assert row_models(rows, by_id) == {"qwen": 2, "llama": 1, RENDERED: 1}
