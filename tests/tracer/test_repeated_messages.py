"""Requests of a conversation are read as `json.loads` reads them, and decoded only where they are new."""

import json
import random
from typing import Any

import pytest

from spangrad.tracer.wire import repeated
from spangrad.tracer.wire.repeated import Reader, once


def turns(count: int, name: str = "a") -> list[dict[str, Any]]:
    return [{"role": "user", "content": f'{name} {number} "]}}, {{ü'} for number in range(count)]


def request(messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, "temperature": 0.5, **more}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n ", " :\t")])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_growing_conversation_reads_as_json_does(separators: tuple[str, str], ascii_only: bool) -> None:
    reader = Reader()
    for count in (1, 2, 3, 7, 7, 4, 5, 40):
        given = request(turns(count), tools=[{"type": "function", "messages": ["not these"]}])
        body = json.dumps(given, separators=separators, ensure_ascii=ascii_only).encode()
        assert reader.read(body) == given


def test_conversations_that_mix_and_branch_read_as_json_does() -> None:
    chosen, reader = random.Random(3), Reader()
    for _ in range(300):
        messages = turns(chosen.randrange(9), chosen.choice("abcdefgh"))
        for place in range(len(messages)):
            if chosen.random() < 0.1:
                messages[place] = {"role": "tool", "content": [chosen.random(), None, {"messages": []}]}
        given = request(messages, n=chosen.randrange(3))
        if chosen.random() < 0.3:
            given = {"tools": [{"messages": [1]}], "first": '"messages": [', **given}
        assert reader.read(json.dumps(given).encode()) == given


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": []}',
        b'{"metadata": {"messages": [1, 2]}, "messages": []}',
        b'{"metadata": {"messages": [1, 2]}}',
        b'{"messages": [1], "messages": [2, 3]}',
        b'{"messages": [1], "messages": []}',
        b'{"messages": [1, [2], "3", null, {"a": {}}]}',
        b'{"messages": "none"}',
        b'{"prompt": "\\"messages\\": [1]"}',
        b'  {"messages" : [ {"a":1} , {"b":2} ] , "n" : 1 }  ',
        b'[["messages", 1]]',
        json.dumps(request(turns(3))).encode("utf-16"),
    ],
)
def test_odd_requests_read_as_json_does(body: bytes) -> None:
    reader = Reader()
    for _ in range(2):
        assert reader.read(body) == dict(json.loads(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [1',
        b'{"messages": [1 2]}',
        b'{"messages": [1]',
        b'{"messages": [1]}}',
        b'{"messages": [1\xc2\xa0]}',
    ],
)
def test_broken_requests_fail_as_json_does(body: bytes) -> None:
    reader = Reader()
    reader.read(b'{"messages": [1, 2]}')
    with pytest.raises(ValueError):
        json.loads(body)
    with pytest.raises(ValueError):
        reader.read(body)


def test_a_number_that_grows_is_another_message() -> None:
    reader = Reader()
    for body in (b'{"messages": [1, 2]}', b'{"messages": [1, 23]}', b'{"messages": [12, 3]}'):
        assert reader.read(body) == json.loads(body)


def test_what_is_made_of_a_repeated_message_is_made_once() -> None:
    made: list[Any] = []

    def make(message: Any) -> int:
        made.append(message["content"])
        return len(made)

    reader = Reader()
    for count in (3, 5, 5, 6):
        found = reader.read(json.dumps(request(turns(count), n=count)).encode())
        assert [once(make, message) for message in found["messages"]] == list(range(1, count + 1))
    assert made == [turn["content"] for turn in turns(6)]
    assert once(len, [1, 2]) == 2  # not from a reader: made each time


def test_what_is_remembered_is_bounded() -> None:
    reader = Reader(max_chars=5000)
    for number in range(100):
        given = request(turns(number % 30 + 1, str(number)))
        assert reader.read(json.dumps(given).encode()) == given
        assert sum(len(known.text) for known in reader._known) <= 5000
        assert len(reader._known) <= repeated.MAX_CONVERSATIONS
    assert reader.read(json.dumps(request(turns(400))).encode()) == request(turns(400))
    assert reader._known == []
