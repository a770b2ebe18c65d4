"""A reader says that a reply is complete only once all that was asked for has come to its end."""

import json
from typing import Any

import pytest

from spangrad.tracer.gateway.readers import TokenReader
from spangrad.tracer.gateway.rewrite import Route, upstream_request


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a"]}, 1),
        ({"prompt": [5, 6, 7]}, 1),  # one prompt of ids
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[5], [6, 7]], "n": 2}, 4),
    ],
)
def test_a_stream_is_complete_once_every_choice_of_every_prompt_has_ended(
    asked: dict[str, Any], count: int
) -> None:
    raw = json.dumps({"model": "m", "stream": True, **asked}).encode()
    reader = TokenReader(upstream_request(raw, Route.COMPLETION, {}), Route.COMPLETION, keeps_raw=False)
    for index in range(count):
        assert not reader.is_complete()
        chunk = {"choices": [{"index": index, "text": "x", "finish_reason": "stop"}]}
        reader.take(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert reader.is_complete()
