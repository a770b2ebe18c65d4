"""Dialect OTel GenAI, as its instrumentations wrote it."""

import pytest

from spangrad.adapters.calls import calls_from_spans
from tests.adapters import picnic
from tests.adapters.captured import captured


@pytest.mark.parametrize(("recorder", "amount"), [("genai_openai", "40"), ("genai_langchain", "40.0")])
def test_a_whole_conversation_reads_as_it_was(recorder, amount):
    calls = calls_from_spans(captured(f"{recorder}/multi_turn"))
    assert picnic.told(calls) == picnic.expected(amount)
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
