"""No dialect raises, whatever a span of it holds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.store.records import Span
from tests.adapters.captured import captured
from tests.adapters.test_dialect_openllmetry_legacy import flat

SPOILERS: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1.5, float("nan"), b"\xff", "", "text", "\ud800", [], [None], [1, "a"], {}),
    *({"a": {"b": [None]}}, {"content": 3}, {"tool_calls": 3}, {"tool_calls": [{"function": 1}]}),
    *({"index": "0", "message": {}}, {"index": 2**70, "message": None}, {"index": 0, "message": 7}),
    *([{"role": 1, "parts": [1]}], [{"role": "user", "content": 3}], [{"role": "user", "content": [None]}]),
    *("{", "[", '"', "[" * 5000, "null", "3", "[]", "{}", "[null]", '[{"role": "user"}]', "[{}]", "[{x"),
    *('[{"role": "user", "parts": 3}]', '[{"role": null, "parts": [null, {}]}]', '[{"type": 1}]'),
    *('[{"role": "user", "content": {"a": 1}}]', '[{"tool_calls": [null]}]', '{"choices": [{}]}'),
)
CALLS = {
    "openllmetry": "openllmetry_langchain/multi_turn",
    "openllmetry streamed": "openllmetry_openai/stream_tool",
    "otel_genai": "openai_v2_latest/stream_tool",
    "otel_genai_events": "genai_openai_events/n2",
    "otel_genai_legacy": "openai_v2_legacy/multi_turn",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("role", "parts", "type", "content", "tool_calls", "function", "name", "index", "message")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def spoiled(span: Span, values: tuple[Any, ...]) -> Iterator[Span]:
    """The span with each of its attributes, and those of its events, replaced by each value."""
    for name in span.attributes:
        for value in values:
            yield replace(span, attributes={**span.attributes, name: value})
    for index, event in enumerate(span.events):
        for name in event.attributes:
            for value in values:
                other = replace(event, attributes={**event.attributes, name: value})
                yield replace(span, events=(*span.events[:index], other, *span.events[index + 1 :]))


def last_call(name: str) -> Span:
    return [span for span in captured(name) if calls_from_spans([span])][-1]


@pytest.mark.parametrize("name", CALLS.values(), ids=CALLS)
def test_any_attribute_replaced_by_junk_never_raises(name):
    for span in spoiled(last_call(name), SPOILERS):
        calls_from_spans([span])


def test_any_attribute_of_a_flat_span_replaced_by_junk_never_raises():
    for span in spoiled(flat(), SPOILERS):
        calls_from_spans([span])


@settings(max_examples=60, deadline=None)
@given(value=JSON, which=st.sampled_from(list(CALLS.values())))
def test_any_attribute_replaced_by_any_value_never_raises(value, which):
    for span in spoiled(last_call(which), (value,)):
        calls_from_spans([span])
