"""What a chat completion holds, part by part."""

import base64
import hashlib
import json
from typing import Any

import pytest

from spangrad.adapters.model_call import Grade
from spangrad.tracer import conventions as c
from tests.tracer.wire.exchange import HI, choice, completion, model_call, recorded, sse

PIXELS = b"\x89PNG not really"
DATA = base64.b64encode(PIXELS).decode()
REFERENCE = {"type": "blob", "sha256": hashlib.sha256(PIXELS).hexdigest(), "bytes": len(PIXELS)}


def parts(response: Any, request: Any = HI, **more: Any) -> Any:
    return recorded(request, response, **more)[c.OUTPUT_MESSAGES][0]["parts"]


def asked(*content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return HI | {"messages": [{"role": role, "content": list(content)} | more]}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"reasoning": "hm"}, [{"type": "reasoning", "content": "hm"}]),
        ({"reasoning_content": "hm"}, [{"type": "reasoning", "content": "hm"}]),
        (
            {"reasoning_content": "hm", "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
            [{"type": "reasoning", "content": "hm"}],
        ),
        (
            {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
            [{"type": "reasoning", "content": "hm", "signature": "s"}],
        ),
        (
            {"thinking_blocks": [{"type": "redacted_thinking", "data": "Zm8="}]},
            [{"type": "reasoning_encrypted", "data": "Zm8="}],
        ),
        (
            {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
            [{"type": "reasoning", "content": "hm"}],
        ),
        (
            {"reasoning_details": [{"type": "reasoning.summary", "summary": "short"}]},
            [{"type": "reasoning_summary", "content": "short"}],
        ),
    ],
)
def test_reasoning_is_one_part_under_whatever_name_it_comes(message: Any, expected: Any) -> None:
    assert parts(completion(choice("x", message=message))) == [*expected, {"type": "text", "content": "x"}]


def delta(finish: str | None = None, index: int = 0, **update: Any) -> dict[str, Any]:
    return {"id": "r-1", "choices": [{"index": index, "delta": update, "finish_reason": finish}]}


def test_streamed_thinking_blocks_add_up() -> None:
    def thought(**block: Any) -> dict[str, Any]:
        return delta(thinking_blocks=[{"type": "thinking"} | block])

    body = sse(
        thought(thinking="Look "), thought(thinking="it up."), thought(thinking="", signature="s"),
        thought(thinking="Again."), delta(content="x"), delta("stop"),
    )  # fmt: skip
    assert parts(body) == [
        {"type": "reasoning", "content": "Look it up.", "signature": "s"},
        {"type": "reasoning", "content": "Again."},
        {"type": "text", "content": "x"},
    ]


def test_a_summary_of_reasoning_is_not_taken_for_reasoning() -> None:
    details = [{"type": "reasoning.summary", "summary": "short"}]
    call = model_call(HI, completion(choice("x", message={"reasoning_details": details})))
    assert call.choices[0].message == {"role": "assistant", "content": "x"}
    assert call.grade is Grade.TEXT
    assert "what was thought is not known: the server gave a summary" in call.grade_reasons


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
            REFERENCE | {"modality": "image", "mime_type": "image/png"},
        ),
        (
            {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
            REFERENCE | {"modality": "audio", "mime_type": "audio/wav"},
        ),
        (
            {"type": "file", "file": {"file_data": f"data:text/plain;base64,{DATA}", "filename": "a"}},
            REFERENCE | {"modality": "file", "mime_type": "text/plain", "name": "a"},
        ),
        (
            {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{DATA}"}},
            REFERENCE | {"modality": "video", "mime_type": "video/mp4"},
        ),
        (
            {"type": "new_kind", "inside": [{"type": "base64", "media_type": "image/gif", "data": DATA}]},
            {"type": "new_kind", "inside": [REFERENCE | {"modality": "image", "mime_type": "image/gif"}]},
        ),
    ],
)
def test_bytes_of_media_are_replaced_by_a_reference_and_the_call_says_so(part: Any, expected: Any) -> None:
    attributes = recorded(asked({"type": "text", "text": "See"}, part), completion())
    assert attributes[c.INPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": "See"}, expected]
    assert attributes[c.DROPPED]["media"].endswith("1 of them")
    assert DATA not in json.dumps(attributes)


def test_media_in_tool_results_and_replies_are_references_too() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
    request = asked({"type": "text", "text": "a"}, image, role="tool", tool_call_id="t")
    spoken = {"id": "a-1", "data": DATA, "transcript": "Hello.", "expires_at": 1}
    attributes = recorded(request, completion(choice(None, message={"audio": spoken, "images": [image]})))
    assert DATA not in json.dumps(attributes)
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"][1]["transcript"] == "Hello."


def test_images_by_url_and_files_by_id_stay() -> None:
    request = asked(
        {"type": "image_url", "image_url": {"url": "https://h/a.png"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    )
    attributes = recorded(request, completion())
    assert attributes[c.INPUT_MESSAGES][0]["parts"] == [
        {"type": "uri", "modality": "image", "uri": "https://h/a.png"},
        {"type": "file", "modality": "file", "file_id": "file-1"},
    ]
    assert c.DROPPED not in attributes


def test_a_call_with_a_referenced_image_needs_ids_to_be_good_for_something() -> None:
    request = asked({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}})
    text_only = model_call(request, completion())
    assert text_only.grade is Grade.UNUSABLE
    assert "bytes of images, sound or files are not kept: 1 of them" in text_only.grade_reasons
    with_ids = model_call(request, completion(choice(token_ids=[4]), prompt_token_ids=[1, 2]))
    assert with_ids.grade is Grade.IDS


def test_text_that_looks_like_base64_is_text() -> None:
    attributes = recorded(HI | {"messages": [{"role": "tool", "content": DATA * 50}]}, completion())
    assert attributes[c.INPUT_MESSAGES][0]["parts"][0]["response"] == DATA * 50


def test_legacy_functions_are_tools() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    attributes = recorded(HI | {"functions": [function], "function_call": "auto"}, completion())
    assert attributes[c.TOOL_DEFINITIONS] == [function]
    assert attributes[c.REQUEST_EXTRA] == {"function_call": "auto"}
    assert model_call(HI | {"functions": [function]}, completion()).tools == [
        {"type": "function", "function": function}
    ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_custom_tools_are_parts_of_their_own(is_stream: bool) -> None:
    call = {"id": "t", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
    whole: Any = completion(choice(None, finish="tool_calls", message={"tool_calls": [call]}))
    if is_stream:
        pieces = [call | {"index": 0, "custom": {"name": "shell", "input": "ls "}}]
        rest = [{"index": 0, "custom": {"input": "-l"}}]
        whole = sse(delta(tool_calls=pieces), delta("tool_calls", tool_calls=rest))
    (part,) = parts(whole)
    assert part == {"type": "custom_tool_call", "id": "t", "name": "shell", "input": "ls -l"}


def test_a_streamed_legacy_function_call_and_sound_add_up() -> None:
    body = sse(
        delta(function_call={"name": "f", "arguments": '{"a"'}),
        delta(function_call={"arguments": ": 1}"}),
        delta(audio={"id": "a-1", "transcript": "Hel"}),
        delta(audio={"transcript": "lo.", "data": DATA}),
        delta("function_call"),
    )
    spoken, called = parts(body)
    assert called == {"type": "tool_call", "id": None, "name": "f", "arguments": '{"a": 1}'}
    assert (spoken["sha256"], spoken["transcript"]) == (REFERENCE["sha256"], "Hello.")


def test_a_refusal_is_kept() -> None:
    refused = completion(choice(None, message={"refusal": "I won't."}))
    assert parts(refused) == [{"type": "refusal", "content": "I won't."}]
    assert (
        parts(sse(delta(refusal="I "), delta(refusal="won't."), delta("stop")))[-1]["content"] == "I won't."
    )


def test_usage_details_have_their_genai_names() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    attributes = recorded(HI, completion(usage=usage))
    names = (c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.CACHE_READ_TOKENS, c.REASONING_TOKENS)
    assert [attributes[name] for name in names] == [9, 5, 4, 3]
    assert c.CACHED not in attributes


def test_an_event_that_cannot_be_read_costs_that_event_and_the_grade() -> None:
    body = sse(delta(content="Hel")) + b'data: {"choices": [{"del\n\n' + sse(delta("stop", content="lo"))
    attributes = recorded(HI, body)
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": "Hello"}]
    assert model_call(HI, body).grade is Grade.UNUSABLE


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_is_taken_off_the_reply(is_stream: bool) -> None:
    request = {"model": "policy", "prompt": ["Say it: "], "echo": True, "logprobs": 1}
    logprobs = {"tokens": ["Say", " it: ", "yes"], "token_logprobs": [None, -1.0, -0.5]}
    answer = {"index": 0, "text": "Say it: yes", "finish_reason": "stop", "logprobs": logprobs}
    whole: Any = sse({"choices": [answer]}) if is_stream else {"choices": [answer]}
    attributes = recorded(request, whole, route="completions")
    assert attributes[c.INPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": "Say it: "}]
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": "yes"}]
    assert c.SAMPLED_LOGPROBS not in attributes
    assert "echo" in attributes[c.DROPPED][c.SAMPLED_LOGPROBS]


def test_a_completion_of_several_prompts_has_no_ids_and_trains_nothing() -> None:
    request = {"model": "policy", "prompt": ["a", "b"]}
    answers = [
        {"index": i, "text": "x", "finish_reason": "stop", "token_ids": [i], "prompt_token_ids": [7]}
        for i in range(2)
    ]
    attributes = recorded(request, {"choices": answers}, route="completions")
    assert attributes[c.REQUEST_EXTRA] == {"prompt": ["a", "b"]}
    assert c.SAMPLED_TOKEN_IDS not in attributes
    assert "several prompts" in attributes[c.DROPPED][c.SAMPLED_TOKEN_IDS]
    assert model_call(request, {"choices": answers}, route="completions").grade is Grade.UNUSABLE
    streamed = recorded(request, sse({"choices": answers[:1]}), route="completions")
    assert streamed[c.STREAM_COMPLETE] is False  # the second prompt has no reply


def test_completions_have_their_logprobs_whole_and_streamed() -> None:
    def answer(texts: list[str], values: list[float], finish: str | None) -> dict[str, Any]:
        logprobs = {"tokens": texts, "token_logprobs": values}
        return {
            "choices": [{"index": 0, "text": "".join(texts), "finish_reason": finish, "logprobs": logprobs}]
        }

    request = {"model": "policy", "prompt": "a"}
    whole = recorded(request, answer(["x", "y"], [-1.0, -2.0], "stop"), route="completions")
    body = sse(answer(["x"], [-1.0], None), answer(["y"], [-2.0], "stop"))
    streamed = recorded(request, body, route="completions")
    assert c.unpack_floats(whole[c.SAMPLED_LOGPROBS]) == [-1.0, -2.0]
    assert whole[c.SAMPLED_LOGPROBS] == streamed[c.SAMPLED_LOGPROBS]
    assert whole[c.OUTPUT_MESSAGES] == streamed[c.OUTPUT_MESSAGES]
