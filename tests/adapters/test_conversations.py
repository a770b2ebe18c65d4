"""Whose conversation an id is."""

from dataclasses import replace

import pytest

from spangrad.adapters.conversations import (
    DIFFERENT_NEEDED,
    LETTERS_NEEDED,
    conversation_key,
    is_specific,
    service_of,
)
from spangrad.adapters.exports import langfuse, langsmith, mlflow
from tests.adapters.building import span


@pytest.mark.parametrize(
    "conversation_id",
    [
        *("", " ", "None", "null", "nil", "undefined", "default", "test", "session", "N/A"),
        *("1", "42", "12345", "thread-1", "thread-42", "sess-7", "session_0001", "my-session-1", "Chat 3"),
        *(
            "000000",
            "xxxxxxxx",
            "00000000-0000-0000-0000-000000000000",
            "user-12345",
            "alice",
            "test-default",
        ),
    ],
)
def test_an_id_that_anybody_could_have_thought_of_is_not_specific(conversation_id):
    assert not is_specific(conversation_id)
    assert conversation_key("service", conversation_id) is None


@pytest.mark.parametrize(
    "conversation_id",
    ["123456", "7f3a21", "order-1047", "thread-493021", "01a22b49-dfe5-7674-a316-54da8ef27b9a", "žluťoučký"],
)
def test_an_id_with_six_letters_and_digits_is_specific(conversation_id):
    assert is_specific(conversation_id)


def test_the_limits_are_as_documented():
    assert (LETTERS_NEEDED, DIFFERENT_NEEDED) == (6, 3)
    assert "six letters and digits or more, three different ones" in (is_specific.__doc__ or "")


def test_an_id_is_of_a_service():
    keys = [conversation_key(service, "7f3a21") for service in ("a", "b", None)]
    assert len(set(keys)) == 3
    assert conversation_key("a", "\ud800 7f3a21") is not None


@pytest.mark.parametrize(
    ("resource", "service"),
    [
        ({"service.name": "shop"}, "shop"),
        ({"service.name": "shop", "service.namespace": "eu"}, "eu/shop"),
        ({"service.name": "unknown_service:python"}, None),
        ({"service.name": "unknown_service", "openinference.project.name": "picnic"}, "picnic"),
        ({"service.name": 3}, None),
        ({}, None),
    ],
)
def test_the_service_is_what_the_resource_tells(resource, service):
    assert service_of(replace(span(), resource=resource)) == service


def test_the_project_of_an_export_stands_for_the_service():
    times = {"start_time": "2026-11-29T15:12:54+00:00", "end_time": "2026-11-29T15:12:55+00:00"}
    run = {"id": "r", "trace_id": "r", "run_type": "llm", "session_id": "p-1", "dotted_order": "", **times}
    [of_langsmith] = langsmith.spans_of(run)
    row = {"id": "o", "trace_id": "t", "type": "GENERATION", "level": "DEFAULT", "project_id": "p-2", **times}
    [of_langfuse] = langfuse.spans_of(row)
    assert (service_of(of_langsmith), service_of(of_langfuse)) == ("p-1", "p-2")


@pytest.mark.parametrize(
    "info",
    [
        {"experiment_id": "17"},
        {"trace_location": {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": "17"}}},
    ],
)
def test_the_experiment_is_on_every_span_of_mlflow(info):
    told = {"info": {"trace_id": "tr-1", **info}, "data": {"spans": [{"name": "a"}, {"name": "b"}]}}
    assert [service_of(each) for each in mlflow.spans_of(told)] == ["17", "17"]
