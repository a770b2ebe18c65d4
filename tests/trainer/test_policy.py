import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.errors import PolicyError
from spangrad.trainer.policies.policy import Conversation, conversation_of, make_policy, render

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "not rendered",
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"} for parameter in parameters},
            },
        },
    }
    for name, parameters in (("schema", ["table"]), ("query", ["sql", "limit"]), ("now", []))
]
SYSTEM, USER = {"role": "system", "content": "Answer."}, {"role": "user", "content": "How many?"}


def tool_call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


LOOK = tool_call("schema", '{"table": "orders"}')
SEEN = {"role": "tool", "tool_call_id": "c", "content": "orders(a,b) 'ok'\n12,NULL"}
ANSWER = {"role": "assistant", "content": "SELECT sum(a) FROM orders WHERE b = 'ok'"}
TALK = Conversation([SYSTEM, USER, LOOK, SEEN, ANSWER], TOOLS)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "made"
    make_policy(folder, [TALK] * 3, hidden=32, layers=1, heads=2, vocab=400)
    return folder


@pytest.fixture(scope="module")
def tokenizer(policy):
    return AutoTokenizer.from_pretrained(policy)


def prompt_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == render(Conversation(messages, TOOLS), add_generation_prompt=True)
    return list(ids)


def test_conversation_is_rendered_compactly():
    assert render(TALK) == (
        "<|im_start|>system\nAnswer.\nschema(table)\nquery(sql, limit)\nnow()<|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "schema", "arguments": {"table": "orders"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\norders(a,b) 'ok'\n12,NULL<|im_end|>\n"
        "<|im_start|>assistant\nSELECT sum(a) FROM orders WHERE b = 'ok'<|im_end|>\n"
    )
    assert render(Conversation([USER])).startswith("<|im_start|>user")


def test_string_arguments_are_verbatim_and_objects_are_rendered_as_the_parser_writes_them():
    odd = Conversation([USER, tool_call("query", '{"sql":   "a"}')], TOOLS)
    assert '"arguments": {"sql":   "a"}}\n' in render(odd)
    parsed = Conversation([USER, tool_call("query", {"sql": "é < 'x'"})], TOOLS)
    assert '"arguments": {"sql": "é < \'x\'"}}\n' in render(parsed)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "reply",
    [
        LOOK,
        tool_call(
            "query", json.dumps({"sql": "SELECT \"a\" FROM b WHERE c = 'd\n\\' -- é €"}, ensure_ascii=False)
        ),
        tool_call("now", "{}"),
        {**tool_call("query", '{"sql": "a", "limit": "3"}'), "content": "I look.\n"},
        {**LOOK, "tool_calls": LOOK["tool_calls"] * 2},
        ANSWER,
        {"role": "assistant", "content": ""},
    ],
)
def test_prompt_of_the_next_call_begins_with_prompt_and_reply(tokenizer, reply):
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    prompt = prompt_ids(tokenizer, [SYSTEM, USER])
    whole = tokenizer.apply_chat_template([SYSTEM, USER, reply], tools=TOOLS, return_dict=False)
    end = len(whole) - 1 - whole[::-1].index(tokenizer.eos_token_id)
    sampled = whole[len(prompt) : end + 1]
    parser = Hermes2ProToolParser(tokenizer)
    request: Any = None  # the parser does not look at it
    read = parser.extract_tool_calls(tokenizer.decode(sampled, skip_special_tokens=True), request)
    calls: list[dict[str, Any]] = [
        {"id": "x", "type": "function", "function": call.function.model_dump()} for call in read.tool_calls
    ]
    assert len(calls) == len(reply.get("tool_calls", []))
    sent_back = {"role": "assistant", "content": read.content, **({"tool_calls": calls} if calls else {})}
    for arguments_as_objects in (False, True):  # vLLM parses them before it renders
        if arguments_as_objects:
            for call in calls:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        following = prompt_ids(tokenizer, [SYSTEM, USER, sent_back, SEEN])
        assert following[: len(prompt) + len(sampled)] == prompt + sampled


def test_marks_of_a_tool_call_are_one_token_each_and_not_special(tokenizer):
    for mark in ("<tool_call>", "</tool_call>"):
        (token,) = tokenizer.encode(mark)
        assert tokenizer.decode([token], skip_special_tokens=True) == mark
    assert tokenizer.decode(tokenizer.encode("<|im_end|>"), skip_special_tokens=True) == ""


def test_envelope_of_a_known_tool_call_is_one_token_and_any_text_can_be_encoded(tokenizer):
    ids = tokenizer.encode('\n{"name": "schema", "arguments": {"table": "orders"}}\n')
    assert tokenizer.decode(ids[:1]) == '\n{"name": "schema", "arguments": {"table": "'
    for text in ("zebra €\x00 1999\r\n\t?!", '{"name": "other", "arguments": {"x": "', " ", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_assistant_mask_covers_the_replies_with_their_end(tokenizer):
    encoded = tokenizer.apply_chat_template(
        TALK.messages, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    kept = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    look = '<tool_call>\n{"name": "schema", "arguments": {"table": "orders"}}\n</tool_call><|im_end|>'
    assert tokenizer.decode(kept) == look + ANSWER["content"] + "<|im_end|>"


def test_policy_loads_and_has_the_sizes_that_were_asked_for(policy, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    assert model.config.hidden_size == 32 and model.config.num_hidden_layers == 1
    assert len(tokenizer) <= 400 and model.config.vocab_size >= len(tokenizer)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert torch.isfinite(model(torch.tensor([prompt_ids(tokenizer, [SYSTEM, USER])])).logits).all()


def test_same_seed_gives_the_same_folder_and_leaves_torchs_generator_alone(tmp_path, policy):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    make_policy(tmp_path / "again", [TALK] * 3, hidden=32, layers=1, heads=2, vocab=400)
    assert torch.rand(1) == expected
    make_policy(tmp_path / "other", [TALK] * 3, hidden=32, layers=1, heads=2, vocab=400, seed=1)

    def digests(folder: Path) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}

    assert digests(tmp_path / "again") == digests(policy)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(policy)["model.safetensors"]


def test_impossible_policies_are_refused(tmp_path):
    with pytest.raises(PolicyError, match="no conversations"):
        make_policy(tmp_path, [])
    with pytest.raises(PolicyError, match="hidden=30"):
        make_policy(tmp_path, [TALK], hidden=30, heads=4)


def test_conversation_of_a_call_ends_with_its_first_reply():
    call = ModelCall(
        "t-s", "t", "s", ["s"], "otel", 0, 1, Grade.TEXT, [], messages=[SYSTEM, USER], tools=TOOLS,
        choices=[Choice(ANSWER), Choice(LOOK)],
    )  # fmt: skip
    assert conversation_of(call) == Conversation([SYSTEM, USER, ANSWER], TOOLS)
