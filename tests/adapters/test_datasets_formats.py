"""The picnic conversation in every format, row by row, and what each format refuses.

Forms are those of the readers' documentation: OpenAI's fine-tuning input, TRL's dataset formats, verl's
RLHFDataset, LLaMA-Factory's SharegptDatasetConverter. None of them is installed here.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import json as arrow_json  # type: ignore[import-untyped]

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.datasets import FORMATS, Exported, Refusal
from spangrad.adapters.datasets.conversation import task_key
from spangrad.adapters.datasets.formats import Told
from spangrad.adapters.datasets.sharegpt import RESULTS_SEPARATOR
from spangrad.adapters.model_call import Choice, Grade
from tests.adapters import picnic
from tests.adapters.building import call
from tests.adapters.captured import captured

CALLS = calls_from_spans(captured("genai_openai/multi_turn"))
PICNIC = Exported("picnic", "task:picnic", CALLS, reward=1.0, task={"day": "Saturday"})
MESSAGES = [*picnic.requests()[-1], picnic.replies()[-1]]
"""The whole conversation, as `picnic` writes it: tool calls as (id, name, arguments)."""


def rows(name, *rollouts):
    return [one.row for one in FORMATS[name].rows(rollouts) if isinstance(one, Told)]


def refusals(name, *rollouts):
    return [one.reason for one in FORMATS[name].rows(rollouts) if isinstance(one, Refusal)]


def chat(name, *messages, reply="ok", **more):
    """A call of text: messages as (role, content)."""
    told = [{"role": role, "content": content} for role, content in messages]
    choice = Choice({"role": "assistant", "content": reply}, "stop")
    given = {"messages": told, "choices": [choice], "grade": Grade.TEXT, **more}
    return replace(call(name, []), prompt_token_ids=None, **given)


def test_messages_are_openais_fine_tuning_input():
    (row,) = rows("messages", PICNIC)
    assert [tool["function"]["name"] for tool in row["tools"]] == list(picnic.TOOLS)
    for told, expected in zip(row["messages"], MESSAGES, strict=True):
        calls = [
            {
                "id": i,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for i, name, arguments in expected.get("tool_calls", ())
        ]
        is_reply = expected["role"] == "assistant"
        assert told == {
            **{key: value for key, value in expected.items() if key != "tool_calls" and value is not None},
            **({"tool_calls": calls} if calls else {}),
            **({"weight": 1} if is_reply else {}),
        }
    first = row["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert first == picnic.ARGUMENTS[0]


def test_sharegpt_alternates_as_llama_factory_wants_it():
    (row,) = rows("sharegpt", PICNIC)
    turns = [turn["from"] for turn in row["conversations"]]
    calling = ["function_call", "observation"]
    assert turns == ["system", "human", *calling, *calling, *calling, "gpt"]
    values = [turn["value"] for turn in row["conversations"]]
    assert values[:2] == [picnic.SYSTEM["content"], picnic.USER["content"]]
    assert json.loads(values[2]) == {"name": "get_weather", "arguments": picnic.LYON[2]}
    said, _, parallel = values[4].partition("\n<tool_call>")
    assert said == "Two more look-ups."
    assert json.loads(parallel.removesuffix("</tool_call>")) == [
        {"name": "get_weather", "arguments": picnic.OSLO[2]},
        {"name": "convert", "arguments": picnic.EUROS[2]},
    ]
    results = [message["content"] for message in MESSAGES if message["role"] == "tool"]
    assert values[5] == RESULTS_SEPARATOR.join(results[1:3])
    assert values[-1] == picnic.ANSWER
    assert [tool["name"] for tool in json.loads(row["tools"])] == list(picnic.TOOLS)


def test_trl_sft_has_a_row_a_reply_with_arguments_as_objects():
    found = rows("trl-sft", PICNIC)
    for row, (request, reply), model_call in zip(found, picnic.expected(), CALLS, strict=True):
        assert [message["role"] for message in row["prompt"]] == [message["role"] for message in request]
        assert [message["content"] or None for message in row["prompt"]] == [m["content"] for m in request]
        (completion,) = row["completion"]
        told = [
            (one["id"], one["function"]["name"], one["function"]["arguments"])
            for one in completion.get("tool_calls", ())
        ]
        assert (completion["content"] or None, told) == (reply["content"], reply.get("tool_calls", []))
        assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == list(picnic.TOOLS)
        assert (row["rollout_id"], row["call_id"]) == ("picnic", model_call.call_id)


def test_trl_dpo_compares_the_first_replies_that_differ():
    other = replace(CALLS[1], choices=[Choice({"role": "assistant", "content": "Rain."}, "stop")])
    worse = Exported("worse", "task:picnic", [CALLS[0], other], reward=0.0)
    (row,) = rows("trl-dpo", PICNIC, worse)
    assert len(row["prompt"]) == len(CALLS[1].messages)
    assert row["chosen"][0]["content"] == "Two more look-ups."
    assert row["rejected"] == [{"role": "assistant", "content": "Rain."}]
    assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.0)
    assert row["rollout_ids"] == ["picnic", "worse"]


def test_trl_dpo_says_why_a_rollout_is_in_no_pair():
    same = Exported("same", "task:picnic", CALLS, reward=0.0)
    elsewhere = Exported("elsewhere", "task:picnic", [chat("x", ("user", "hello"))], reward=0.0)
    assert (
        refusals("trl-dpo", PICNIC, same, elsewhere)
        == ["it never replied differently to a prompt that the best rollout of its task was shown"] * 2
    )
    assert refusals("trl-dpo", PICNIC) == ["all rewards of its task are equal"]
    assert refusals("trl-dpo", replace(PICNIC, reward=None)) == ["no reward"]


def test_trl_grpo_and_verl_have_a_row_a_task():
    again = replace(PICNIC, rollout_id="again", reward=0.0)
    other = Exported("other", "task:other", [chat("x", ("developer", "be brief"), ("user", "hello"))])
    asked = [dict(picnic.SYSTEM), dict(picnic.USER)]
    grpo, bare = rows("trl-grpo", PICNIC, again, other)
    assert (grpo["prompt"], grpo["task_key"], grpo["task"]) == (asked, "task:picnic", '{"day": "Saturday"}')
    assert (grpo["rollouts"], grpo["mean_reward"]) == (2, 0.5)
    assert (bare["mean_reward"], "tools" in bare) == (None, False)
    verl, second = rows("verl", PICNIC, again, other)
    assert (verl["prompt"], verl["data_source"], verl["ability"]) == (asked, "spangrad", "agent")
    assert verl["reward_model"] == {"style": "rule", "ground_truth": '{"day": "Saturday"}'}
    assert [row["extra_info"]["index"] for row in (verl, second)] == [0, 1]
    assert json.loads(second["extra_info"]["tools"]) == []


def test_verl_begins_with_what_was_asked():
    late = Exported("late", "task:late", CALLS[1:])
    assert "verl begins" in refusals("verl", late)[0]


@pytest.mark.parametrize("name", ["messages", "sharegpt", "trl-sft", "trl-grpo", "verl"])
def test_a_prompt_that_is_known_as_ids_alone_is_refused(name):
    rollout = Exported("r", "task:t", [chat("a", messages=[])])
    assert len(refusals(name, rollout)) == 1


def test_a_reply_that_nobody_recorded_is_context():
    shown = [("user", "hi"), ("assistant", "an example"), ("user", "now you")]
    rollout = Exported("r", "task:t", [chat("a", *shown)])
    (row,) = rows("messages", rollout)
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, 1]
    assert refusals("sharegpt", rollout) == [
        "a reply is not the policy's, and every reply of ShareGPT is trained"
    ]


def test_where_conversations_fork_what_they_share_is_trained_once():
    first = chat("a", ("user", "hi"), reply="hello")
    forks = [
        chat(name, ("user", "hi"), ("assistant", "hello"), ("user", name), reply=f"re {name}", start_ns=n)
        for n, name in enumerate(("left", "right"), start=1)
    ]
    rollout = Exported("r", "task:t", [first, *forks])
    weights = [[message.get("weight") for message in row["messages"]] for row in rows("messages", rollout)]
    assert weights == [[None, 1, None, 1], [None, 0, None, 1]]
    assert len(rows("sharegpt", rollout)) == 1
    assert refusals("sharegpt", rollout) == [
        "a reply is in an earlier row, and every reply of ShareGPT is trained"
    ]
    assert len(rows("trl-sft", rollout)) == 3


def test_a_reply_is_told_as_it_was_sampled():
    asked = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1.0}'}}
    sent_back = {**asked, "id": "c9", "function": {"name": "f", "arguments": '{"x": 1.0}'}}
    reply = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [asked]}
    first = chat("a", ("user", "go"), choices=[Choice(reply, "tool_calls")])
    second = chat("b", start_ns=1, messages=[
        *first.messages,
        {"role": "assistant", "content": "", "tool_calls": [sent_back]},
        {"role": "tool", "content": "2", "tool_call_id": "c9"},
    ])  # fmt: skip
    rollout = Exported("r", "task:t", [first, second])
    (row,) = rows("messages", rollout)
    (told,) = row["messages"][1]["tool_calls"]
    assert (told["id"], told["function"]["arguments"]) == ("c9", '{"x":1.0}')
    (shared,) = rows("sharegpt", rollout)
    assert shared["conversations"][1]["value"].startswith("<think>\nhm\n</think>\n\n{")
    assert rows("trl-sft", rollout)[0]["completion"][0]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("name", "message", "reason"),
    [
        ("messages", {"role": "critic", "content": "x"}, "a message has role 'critic'"),
        (
            "messages",
            {"role": "user", "content": [{"type": "audio"}]},
            "a message has a part of type 'audio'",
        ),
        ("messages", {"role": "tool", "content": "x"}, "a tool's result names no call"),
        ("verl", {"role": "user", "content": [{"type": "file"}]}, "a message has a part of type 'file'"),
        (
            "sharegpt",
            {"role": "system", "content": "x"},
            "turns don't alternate: 'system' is out of its place",
        ),
        ("sharegpt", {"role": "user", "content": "x"}, "turns don't alternate: 'human' is out of its place"),
    ],
)
def test_what_a_format_has_no_form_for_is_refused_with_a_reason(name, message, reason):
    shown = [{"role": "user", "content": "hi"}, message]
    assert refusals(name, Exported("r", "task:t", [chat("a", messages=shown)])) == [reason]


@pytest.mark.parametrize("arguments", ["{", "[1]", '"text"'])
def test_arguments_that_are_no_object_go_where_they_may_stay_text(arguments):
    asked = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    reply = Choice({"role": "assistant", "content": None, "tool_calls": [asked]}, "tool_calls")
    rollout = Exported("r", "task:t", [chat("a", ("user", "go"), choices=[reply])])
    (row,) = rows("messages", rollout)
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert len(refusals("trl-sft", rollout)) == len(refusals("sharegpt", rollout)) == 1


keys = st.sampled_from(["type", "text", "function", "name", "arguments", "id"])
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["content", "tool_calls", "tool_call_id", "name", "refusal", "reasoning"])
broken = st.dictionaries(names, junk, max_size=4)


@settings(deadline=None)
@given(role=st.sampled_from(["system", "user", "assistant", "tool"]), message=broken, reply=broken)
def test_whatever_a_message_holds_it_is_told_or_refused(role, message, reply):
    shown = [{"role": "user", "content": "hi"}, {**message, "role": role}]
    replies = [Choice(reply, "stop"), Choice({"content": "x"}, "stop")]
    rollouts = [
        Exported(f"r{n}", "task:t", [chat("a", messages=shown, choices=[choice])], reward=n)
        for n, choice in enumerate(replies)
    ]
    for form in FORMATS.values():
        assert all(isinstance(one, Told | Refusal) for one in form.rows(rollouts))


def test_trl_files_load_as_a_table(tmp_path):
    """By the reader that `datasets` uses; what a row has not becomes None there, and TRL drops that."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows("trl-sft", PICNIC)))
    table = arrow_json.read_json(file)
    assert table.column_names == ["prompt", "completion", "tools", "rollout_id", "call_id"]
    assert table.column("prompt")[0].as_py()[1]["content"] == picnic.USER["content"]


def test_a_task_is_named_by_id_then_group_then_what_was_asked():
    first = CALLS[0]
    assert task_key("t", "g", first) == "task:t"
    assert task_key(None, "g", first) == "group:g"
    other = replace(first, messages=[*first.messages, {"role": "user", "content": "more"}])
    assert task_key(None, None, first) == task_key(None, None, replace(first, call_id="x"))
    assert task_key(None, None, first) != task_key(None, None, other)
