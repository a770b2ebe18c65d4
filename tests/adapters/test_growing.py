"""Messages that are read together are those that would be read alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.dialects.growing import growing_messages, read_together
from spangrad.adapters.messages import chat_messages


def message(content, **extra):
    return {"role": "user", "parts": [{"type": "text", "content": content}], **extra}


def alone(text):
    notes: list[str] = []
    try:
        return chat_messages(json.loads(text), notes), notes
    except ValueError as error:
        return type(error), str(error)


def together(text):
    notes: list[str] = []
    try:
        return growing_messages(text, notes), notes
    except ValueError as error:
        return type(error), str(error)


def test_the_next_turn_shows_the_same_messages():
    history = [message(f"turn {i}") for i in range(3)]
    with read_together():
        before = growing_messages(json.dumps(history[:2]), [])
        after = growing_messages(json.dumps(history), [])
    assert after == alone(json.dumps(history))[0]
    assert after[0] is before[0]
    assert growing_messages(json.dumps(history), []) is not after  # nothing is remembered outside


def test_what_is_noted_of_earlier_messages_is_noted_of_each_call():
    call = {"type": "tool_call", "id": "1", "name": "f", "arguments": {"a": 1}}
    history = [{"role": "assistant", "parts": [call]}, message("more")]
    with read_together():
        for length in (1, 2, 2):
            assert together(json.dumps(history[:length])) == alone(json.dumps(history[:length]))


elements = st.one_of(
    st.builds(message, st.text(max_size=4), name=st.sampled_from([None, "n", ","])),
    st.sampled_from(
        [
            *(1, 12, "a", [], [1], {"role": "user"}, {"role": "tool", "parts": [{"type": "blob"}]}),
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": {"a": [1]}}]},
            {"role": "assistant", "parts": [{"type": "tool_call", "name": "f", "arguments": {}}]},
        ]
    ),
)
spoilt = st.sampled_from(["", "]", ",", " ", "x", "[", ",,"])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(elements, max_size=6), st.lists(st.tuples(st.integers(0, 6), spoilt), max_size=8), st.booleans()
)
def test_reading_together_changes_nothing(history, cuts, dense):
    separators = (",", ":") if dense else (", ", ": ")
    with read_together():
        for length, end in cuts:
            text = json.dumps(history[:length], separators=separators) + end
            assert together(text) == alone(text)
            cut = text[: len(text) // 2]
            assert together(cut) == alone(cut)


@pytest.mark.parametrize("second", ["[12,1]", "[1", "[1,", "[1]]", "[1],[2]"])
def test_a_text_that_only_begins_alike_is_read_as_a_whole(second):
    with read_together():
        together("[1]")
        assert together(second) == alone(second)
