"""What an Anthropic call holds, block by block, and how a cut stream is read."""

import base64
from typing import Any

import pytest

from spangrad.adapters.model_call import Grade
from spangrad.tracer import conventions as c
from tests.tracer.wire.exchange import model_call, recorded, sse

ASK: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "Hi"}],
}
DATA = base64.b64encode(b"pixels").decode()


def reply(*blocks: Any, **more: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "Hello."}
    content = list(blocks) or [text]
    return {"id": "msg_1", "model": "policy", "content": content, "stop_reason": "end_turn"} | more


def holds(request: Any, response: Any) -> dict[str, Any]:
    return recorded(request, response, route="messages")


def parts(*blocks: Any) -> Any:
    return holds(ASK, reply(*blocks))[c.OUTPUT_MESSAGES][0]["parts"]


def test_every_kind_of_block_is_kept_as_what_it_is() -> None:
    citation = {"type": "char_location", "cited_text": "a"}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    assert parts(
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "Zm8="},
        {"type": "text", "text": "a", "citations": [citation]},
        search,
        found,
    ) == [
        {"type": "reasoning", "content": "hm", "signature": "s"},
        {"type": "reasoning_encrypted", "data": "Zm8="},
        {"type": "text", "content": "a", "citations": [citation]},
        search,
        found,
    ]


def test_images_and_documents_are_references() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    document = {"type": "document", "source": {"type": "base64", "media_type": "a/pdf", "data": DATA}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image], "is_error": True}
    content = [
        image,
        document,
        result,
        {"type": "image", "source": {"type": "url", "url": "https://h/a.png"}},
        {"type": "document", "source": {"type": "file", "file_id": "f"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
    ]
    attributes = holds(ASK | {"messages": [{"role": "user", "content": content}]}, reply())
    assert DATA not in str(attributes)
    turn = attributes[c.INPUT_MESSAGES][0]["parts"]
    assert [part["type"] for part in turn] == [
        "blob",
        "blob",
        "tool_call_response",
        "uri",
        "file",
        "document",
    ]
    assert turn[2]["is_error"] is True
    assert turn[5]["source"]["data"] == "words"
    assert attributes[c.DROPPED]["media"].endswith("3 of them")


def test_input_tokens_are_all_of_the_prompts() -> None:
    usage = {"input_tokens": 4, "output_tokens": 5, "cache_read_input_tokens": 30}
    call = model_call(ASK, reply(usage=usage | {"cache_creation_input_tokens": 2}), route="messages")
    assert call.usage == {
        "input_tokens": 36,
        "output_tokens": 5,
        "cache_read_tokens": 30,
        "cache_creation_tokens": 2,
    }


@pytest.mark.parametrize(
    ("reason", "finish", "grade"),
    [
        ("end_turn", "stop", Grade.TEXT),
        ("stop_sequence", "stop", Grade.TEXT),
        ("tool_use", "tool_calls", Grade.TEXT),
        ("max_tokens", "length", Grade.TEXT),
        ("refusal", "content_filter", Grade.UNUSABLE),
    ],
)
def test_stop_reasons_are_told_in_one_way(reason: str, finish: str, grade: Grade) -> None:
    call = model_call(ASK, reply(stop_reason=reason), route="messages")
    assert (call.choices[0].finish_reason, call.grade) == (finish, grade)


@pytest.mark.parametrize(
    ("more", "is_constrained"),
    [
        ({"tool_choice": {"type": "auto"}}, None),
        ({"tool_choice": {"type": "any"}}, True),
        ({"tool_choice": {"type": "tool", "name": "f"}}, True),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, True),
    ],
)
def test_a_masked_distribution_is_marked_and_the_request_field_kept(more: Any, is_constrained: Any) -> None:
    attributes = holds(ASK | more, reply())
    assert attributes.get(c.CONSTRAINED) is is_constrained
    assert attributes[c.REQUEST_EXTRA] == more


START = {"type": "message_start", "message": reply(stop_reason=None) | {"content": []}}


def block(index: int, begin: Any, *deltas: Any) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": begin},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
    ]


PIECES = [
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "h"},
        {"type": "thinking_delta", "thinking": "m"},
        {"type": "signature_delta", "signature": "s"},
    ),
    *block(1, {"type": "redacted_thinking", "data": "Zm8="}),
    *block(
        2,
        {"type": "text", "text": "", "citations": []},
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": "lo."},
        {"type": "citations_delta", "citation": {"cited_text": "a"}},
    ),
    *block(
        3,
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"x":'},
        {"type": "input_json_delta", "partial_json": "  1}"},
    ),
]
END = [{"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"}]
WHOLE = [
    {"type": "reasoning", "content": "hm", "signature": "s"},
    {"type": "reasoning_encrypted", "data": "Zm8="},
    {"type": "text", "content": "Hello.", "citations": [{"cited_text": "a"}]},
    {"type": "tool_call", "id": "t", "name": "f", "arguments": '{"x":  1}'},
]


def test_a_stream_adds_up() -> None:
    attributes = holds(ASK, sse(START, {"type": "ping"}, *PIECES, *END))
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"] == WHOLE
    assert attributes[c.STREAM_COMPLETE] is True


def test_a_cut_stream_gives_what_had_come() -> None:
    attributes = holds(ASK, sse(START, *PIECES[:-1]))
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"][-1]["arguments"] == '{"x":'
    assert attributes[c.STREAM_COMPLETE] is False


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_inside_a_stream_is_an_error(ends: bool) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    body = sse(START, *PIECES, error, *(END if ends else ()))
    attributes = holds(ASK, body)
    assert (attributes[c.ERROR_TYPE], attributes[c.STREAM_COMPLETE]) == ("overloaded_error", False)
    assert model_call(ASK, body, route="messages").grade is Grade.UNUSABLE


def test_a_stream_without_its_beginning_is_read_as_far_as_it_goes() -> None:
    attributes = holds(ASK, sse(*PIECES[1:3]))
    assert attributes[c.STREAM_COMPLETE] is False
    assert c.OUTPUT_MESSAGES in attributes
