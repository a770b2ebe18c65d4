"""What a Responses call holds, item by item, and how a cut stream is read."""

import base64
from typing import Any

import pytest

from spangrad.adapters.model_call import Grade
from spangrad.tracer import conventions as c
from tests.tracer.wire.exchange import model_call, recorded, sse

ASK: dict[str, Any] = {"model": "policy", "input": "Hi"}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
DATA = base64.b64encode(b"pixels").decode()


def reply(*items: Any, **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "model": "policy", "status": "completed", "output": list(items) or [TEXT]} | more


def holds(request: Any, response: Any) -> dict[str, Any]:
    return recorded(request, response, route="responses")


def graded(request: Any, response: Any) -> Any:
    return model_call(request, response, route="responses")


def test_what_the_assistant_did_in_one_go_is_one_turn() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        TEXT,
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":  1}'},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]
    turns = holds(ASK | {"input": items}, reply())[c.INPUT_MESSAGES]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    kinds = [part["type"] for part in turns[1]["parts"]]
    assert kinds == ["reasoning", "text", "tool_call", "tool_call"]
    messages = graded(ASK | {"input": items}, reply()).messages
    assert messages[1]["reasoning"] == "hm"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x":  1}'
    assert [message["content"] for message in messages[2:4]] == ["1", [{"type": "text", "text": "2"}]]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
            [{"type": "reasoning_summary", "content": "short"}],
        ),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": "Zm8="},
            [{"type": "reasoning_encrypted", "data": "Zm8="}],
        ),
        (
            {"type": "custom_tool_call", "call_id": "a", "name": "shell", "input": "ls"},
            [{"type": "custom_tool_call", "id": "a", "name": "shell", "input": "ls"}],
        ),
        (
            {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "x"}},
            [{"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "x"}}],
        ),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            [{"type": "refusal", "content": "no"}],
        ),
    ],
)
def test_every_kind_of_item_is_kept_as_what_it_is(item: Any, expected: Any) -> None:
    assert holds(ASK, reply(item))[c.OUTPUT_MESSAGES][0]["parts"] == expected
    turns = holds(ASK | {"input": [item]}, reply())[c.INPUT_MESSAGES]
    assert turns == [{"role": "assistant", "parts": expected}]


def test_bytes_of_images_and_files_are_references() -> None:
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"},
        {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_image", "image_url": "https://h/a.png"},
    ]
    screen = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{DATA}"}
    items = [
        {"role": "user", "content": content},
        {"type": "computer_call_output", "call_id": "a", "output": screen},
    ]
    made = {"type": "image_generation_call", "id": "i", "result": DATA}
    attributes = holds(ASK | {"input": items}, reply(made))
    assert DATA not in str(attributes)
    first, second = attributes[c.INPUT_MESSAGES]
    assert [part["type"] for part in first["parts"]] == ["blob", "blob", "file", "uri"]
    assert second["role"] == "tool"
    assert attributes[c.DROPPED]["media"].endswith("3 of them")
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"][0]["bytes"] == len(b"pixels")


@pytest.mark.parametrize(
    "where",
    [
        {"previous_response_id": "resp_0"},
        {"conversation": {"id": "conv_1"}},
        {"prompt": {"id": "pmpt_1", "variables": {"city": "Oslo"}}},
        {"input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "Hi"}]},
    ],
)
def test_a_prompt_that_is_partly_at_the_server_is_not_whole(where: dict[str, Any]) -> None:
    call = graded(ASK | where, reply())
    assert call.grade is Grade.UNUSABLE
    assert any(reason.startswith("earlier turns are at the server: ") for reason in call.grade_reasons)


def test_a_whole_prompt_is_graded_text() -> None:
    call = graded(ASK, reply())
    assert (call.grade, call.choices[0].finish_reason) == (Grade.TEXT, "stop")


@pytest.mark.parametrize(
    ("details", "finish", "grade"),
    [
        ({"reason": "max_output_tokens"}, "length", Grade.TEXT),
        ({"reason": "content_filter"}, "content_filter", Grade.UNUSABLE),
        (None, "incomplete", Grade.UNUSABLE),
    ],
)
def test_an_incomplete_reply_says_why(details: Any, finish: str, grade: Grade) -> None:
    call = graded(ASK, reply(status="incomplete", incomplete_details=details))
    assert (call.choices[0].finish_reason, call.grade) == (finish, grade)


def test_a_failed_reply_is_an_error() -> None:
    failed = reply(status="failed", output=[], error={"code": "server_error", "message": "died"})
    call = graded(ASK, failed)
    assert (call.grade, call.error) == (Grade.UNUSABLE, "server_error: died")


def test_a_reply_made_in_the_background_is_not_here_yet() -> None:
    call = graded(ASK | {"background": True}, reply(status="queued", output=[]))
    assert call.grade is Grade.UNUSABLE
    assert any("in the background" in reason for reason in call.grade_reasons)


def test_structured_output_masks_the_distribution() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    assert holds(ASK | {"text": {"format": form}}, reply())[c.CONSTRAINED] is True
    assert c.CONSTRAINED not in holds(ASK | {"text": {"format": {"type": "text"}}}, reply())


def test_usage_details_have_their_genai_names() -> None:
    usage = {
        "input_tokens": 9,
        "output_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    assert graded(ASK, reply(usage=usage)).usage == {
        "input_tokens": 9,
        "output_tokens": 5,
        "cache_read_tokens": 4,
        "reasoning_tokens": 3,
    }


def event(kind: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "output_index": index} | more


CALLING = {"type": "function_call", "call_id": "a", "name": "f"}
BEGUN = event("created", response=reply(status="in_progress", output=[]) | {"output": []})
PIECES = [
    event("output_item.added", 0, item={"type": "reasoning", "id": "r", "summary": []}),
    event("reasoning_summary_text.delta", 0, summary_index=0, delta="sho"),
    event("reasoning_summary_text.delta", 0, summary_index=0, delta="rt"),
    event("output_item.added", 1, item={"type": "message", "role": "assistant", "content": []}),
    event("output_text.delta", 1, content_index=0, delta="Hel"),
    event("output_text.delta", 1, content_index=0, delta="lo."),
    event("output_item.done", 1, item=TEXT),
    event("output_item.added", 2, item=CALLING | {"arguments": ""}),
    event("function_call_arguments.delta", 2, delta='{"x":'),
    event("function_call_arguments.delta", 2, delta="  1"),
]


def test_a_cut_stream_gives_what_had_come() -> None:
    attributes = holds(ASK, sse(BEGUN, *PIECES))
    assert attributes[c.STREAM_COMPLETE] is False
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"] == [
        {"type": "reasoning_summary", "content": "short"},
        {"type": "text", "content": "Hello."},
        {"type": "tool_call", "id": "a", "name": "f", "arguments": '{"x":  1'},
    ]
    assert graded(ASK, sse(BEGUN, *PIECES)).grade is Grade.UNUSABLE


@pytest.mark.parametrize(
    ("last", "is_complete", "finish"),
    [
        (event("completed", response=reply()), True, "completed"),
        (
            event(
                "incomplete",
                response=reply(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
            ),
            True,
            "max_output_tokens",
        ),
    ],
)
def test_the_last_event_has_all_of_it(last: Any, is_complete: bool, finish: str) -> None:
    attributes = holds(ASK, sse(BEGUN, *PIECES, last))
    assert attributes[c.STREAM_COMPLETE] is is_complete
    assert attributes[c.RESPONSE_FINISH_REASONS] == [finish]
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": "Hello."}]


@pytest.mark.parametrize(
    "last",
    [
        event("failed", response=reply(status="failed", output=[], error={"code": "boom"})),
        {"type": "error", "code": "boom", "message": "died"},
    ],
)
def test_a_stream_that_fails_is_an_error_and_incomplete(last: Any) -> None:
    attributes = holds(ASK, sse(BEGUN, *PIECES, last))
    assert attributes[c.STREAM_COMPLETE] is False
    assert attributes[c.ERROR_TYPE] in ("boom", "server_error")
