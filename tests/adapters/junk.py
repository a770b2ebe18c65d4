"""Spans with one attribute replaced by something that nobody expects there."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from spangrad.store.records import Span

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 2**40, 1.5, float("nan"), b"\xff\x00", "", " ", "text", "\ud800"),
    *([], [None], [1, "a"], {}, {"a": {"b": [None]}}, [{"role": 1, "parts": [1]}]),
    *("{", "[", '"', "[1, 2", '{"a": ', "[" * 5000, "null", "true", "3", '"a"', "[]", "{}", "[null]"),
    *('[{"role": "user"}]', '[{"role": "user", "parts": 3}]', '[{"role": null, "parts": [null, {}]}]'),
    *('{"messages": 3}', '{"messages": [null, 3, {}]}', '{"messages": [{"role": "user", "content": 3}]}'),
    *('{"choices": null}', '{"choices": [null]}', '{"choices": [{}, 3]}', '{"choices": {"a": 1}}'),
    *('{"choices": [{"index": "a", "message": {"tool_calls": [3]}, "token_ids": ["a"], "logprobs": 3}]}',),
    *("['a'", "{'a': {1}}", "{'choices': [nan]}", "[{'index': None, 'token_ids': 'abc'}]", "{1, 2}", "[...]"),
)

KEYS = (
    *("role", "parts", "type", "content", "tool_calls", "function", "name", "arguments", "index", "path"),
    *("choices", "message", "messages", "token_ids", "logprobs", "usage", "stream"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def spoiled(span: Span) -> Iterator[Span]:
    """The span with each of its attributes, and of its events', replaced by each kind of junk."""
    for name in span.attributes:
        for value in JUNK:
            yield replace(span, attributes={**span.attributes, name: value})
    for index, event in enumerate(span.events[:3]):
        for name in event.attributes:
            for value in JUNK:
                other = replace(event, attributes={**event.attributes, name: value})
                yield replace(span, events=(*span.events[:index], other, *span.events[index + 1 :]))


def as_text(value: Any) -> str:
    """JSON text of a drawn value."""
    return json.dumps(value)


def spoiled_rows(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The row with every value in it, at any depth, replaced by some kinds of junk."""
    for path in _paths(row):
        for value in (
            None,
            True,
            -1,
            2**40,
            float("nan"),
            b"\xff",
            "text",
            [],
            [None],
            {},
            {"a": 1},
            "[1, 2",
        ):
            yield _put(row, path, value)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*path, key)
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield (*path, index)
            yield from _paths(inner, (*path, index))


def _put(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _put(value[path[0]], path[1:], junk)
    return copy
