"""Chunks that real servers send, added up."""

import json
from typing import Any

import pytest

from spangrad.tracer import conventions as c
from spangrad.tracer.wire.chat import response_attributes
from spangrad.tracer.wire.streams import assemble_chat, events


def sse(*chunks: Any, newline: str = "\n") -> bytes:
    return "".join(
        f"data: {json.dumps(chunk, ensure_ascii=False)}{newline}{newline}" for chunk in chunks
    ).encode()


def choice(index: int = 0, *, finish: str | None = None, **update: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {}, "finish_reason": finish} | update]}


def test_events_are_split_at_line_ends_only() -> None:
    text = "a\u2028b\u0085c\x0bd"
    for newline in ("\n", "\r\n", "\r"):
        assert [data.decode() for _, data in events(sse(text, text, newline=newline))] == [
            json.dumps(text, ensure_ascii=False)
        ] * 2
    assert list(events(b": comment\nevent: e\ndata: 1\ndata: 2\n\ndata: tail")) == [("e", b"1\n2")]


def test_ids_of_chunks_without_text_count() -> None:
    body = sse(
        choice(delta={"content": "a"}, token_ids=[1]),
        choice(token_ids=[2, 3]),
        choice(delta={"reasoning": "hm"}, token_ids=[4]),
        choice(finish="stop", token_ids=[5]),
    )
    assembled = assemble_chat(body, 1)
    assert assembled.is_complete
    (only,) = assembled.body["choices"]
    assert only["token_ids"] == [1, 2, 3, 4, 5]
    assert only["message"] == {"content": "a", "reasoning": "hm"}


@pytest.mark.parametrize(
    "lost", [{"delta": {"content": "b"}}, {"delta": {"tool_calls": [{"index": 0}]}}, {"text": "b"}]
)
def test_ids_are_left_out_if_a_chunk_with_text_lost_its_own(lost: dict[str, Any]) -> None:
    body = sse(
        choice(delta={"content": "a"}, token_ids=[1]),
        choice(**lost),
        choice(delta={"content": ""}),  # nothing was sampled for it
        choice(finish="stop", token_ids=[3]),
    )
    dropped: dict[str, str] = {}
    attributes = response_attributes(assemble_chat(body, 1).body, dropped)
    assert c.SAMPLED_TOKEN_IDS not in attributes
    assert dropped[c.SAMPLED_TOKEN_IDS] == "1 chunks with text came without token ids"


def test_a_stream_is_complete_only_if_every_choice_asked_for_has_ended() -> None:
    first = choice(0, delta={"content": "a"}, finish="stop")
    second = choice(1, delta={"content": "b"}, finish="length")
    assert not assemble_chat(sse(first), 2).is_complete
    assert assemble_chat(sse(first, second), 2).is_complete
    assert not assemble_chat(sse(choice(delta={"content": "a"})) + b"data: [DONE]\n\n", 1).is_complete
    assert not assemble_chat(b"", 1).is_complete


def test_an_error_inside_a_stream_is_found() -> None:
    assembled = assemble_chat(sse(choice(delta={"content": "a"}), {"error": {"message": "died"}}), 1)
    assert assembled.error == {"message": "died"}
    assert not assembled.is_complete


def test_tool_calls_without_index_are_told_apart_by_their_id() -> None:
    def piece(arguments: str, **more: Any) -> dict[str, Any]:
        call = {"function": {"name": more.pop("name", None), "arguments": arguments}} | more
        return choice(delta={"tool_calls": [call]})

    body = sse(
        piece("", id="a", name="f"), piece('{"x":'), piece(" 1}"), piece("{}", id="b", name="g")
    ) + sse(choice(finish="tool_calls"))
    (only,) = assemble_chat(body, 1).body["choices"]
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in only["message"]["tool_calls"]
    ] == [("a", "f", '{"x": 1}'), ("b", "g", "{}")]


def test_ids_hidden_in_logprobs_or_provider_fields_are_found() -> None:
    content = [{"token": "token_id:7", "logprob": -1.0}, {"token": "token_id:9", "logprob": -2.0}]
    hidden = response_attributes(
        {"choices": [{"index": 0, "message": {"content": "x"}, "logprobs": {"content": content}}]}, {}
    )
    assert c.unpack_ints(hidden[c.SAMPLED_TOKEN_IDS]) == [7, 9]
    moved = response_attributes(
        {"choices": [{"message": {"content": "x"}, "provider_specific_fields": {"token_ids": [7]}}]}, {}
    )
    assert c.unpack_ints(moved[c.SAMPLED_TOKEN_IDS]) == [7]


def test_a_list_with_a_hole_is_left_out_and_named() -> None:
    dropped: dict[str, str] = {}
    attributes = response_attributes(
        {
            "choices": [
                {
                    "message": {"content": "x"},
                    "token_ids": [1, None],
                    "logprobs": {"content": [{"token": "x", "logprob": None}]},
                }
            ]
        },
        dropped,
    )
    assert c.SAMPLED_TOKEN_IDS not in attributes
    assert set(dropped) == {c.SAMPLED_TOKEN_IDS, c.SAMPLED_LOGPROBS}
