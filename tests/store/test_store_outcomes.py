"""How a rollout ended that nobody enqueued and no root span of spangrad's tells of."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import RolloutStatus, Span
from spangrad.tracer import conventions as names
from tests.store.building import new_trace, span

TRACE = new_trace()
RUNNING, SUCCEEDED, FAILED = RolloutStatus.RUNNING, RolloutStatus.SUCCEEDED, RolloutStatus.FAILED


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def take(store: FileStore, *spans: Span) -> RolloutStatus:
    """Store these spans, and read what they tell."""
    for one in spans:
        store.put_otlp(encode_request([one]))
    store.put_calls([], read={one.trace_id: one.changed_ns for one in store.unread_traces()})
    (found,) = store.rollouts()
    return found.status


def root(*, status_code: int = 0, start_ns: int = 1000) -> Span:
    return span(TRACE, rollout="R", start_ns=start_ns, status_code=status_code)


def call(parent: str | None = None, *, scope: str = "theirs", status_code: int = 0) -> Span:
    made = span(TRACE, parent=parent or "b" * 16, rollout="R", start_ns=2000, status_code=status_code)
    return replace(made, scope=scope)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_last_root_span_says_how_it_ended_in_whatever_order_spans_come(
    store: FileStore, order: tuple[int, ...]
) -> None:
    told = [root(), root(status_code=2, start_ns=1500), call()]
    assert take(store, *(told[number] for number in order)) is FAILED
    (found,) = store.rollouts()
    assert (found.started_ns, found.ended_ns, found.failure) == (1000, 2010, "the last root span says ERROR")


def test_a_call_that_failed_is_no_failed_rollout(store: FileStore) -> None:
    assert take(store, call(status_code=2)) is SUCCEEDED
    assert take(store, root()) is SUCCEEDED


def test_a_span_below_one_of_no_rollout_is_a_root(store: FileStore) -> None:
    server = span(TRACE)
    below = replace(root(status_code=2), parent_span_id=server.span_id)
    assert take(store, below, server) is FAILED


def test_what_the_tracer_records_runs_until_its_root_span_has_come(store: FileStore) -> None:
    assert take(store, call(scope=names.SCOPE_TRACER)) is RUNNING
    assert take(store, call()) is RUNNING
    own = replace(root(status_code=2), scope=names.SCOPE_TRACER)
    ended = replace(own, attributes={**own.attributes, names.SPAN_ROLE: "rollout"})
    assert take(store, ended) is FAILED
    assert take(store, call(), call(scope=names.SCOPE_TRACER)) is FAILED


def test_a_span_of_the_tracer_after_others_says_that_it_runs(store: FileStore) -> None:
    assert take(store, call(scope=names.SCOPE_GATEWAY)) is SUCCEEDED
    assert take(store, call(scope=names.SCOPE_TRACER)) is RUNNING
    (found,) = store.rollouts()
    assert found.ended_ns is None


def test_spans_of_a_later_attempt_count_alone(store: FileStore) -> None:
    assert take(store, root(status_code=2)) is FAILED
    again = span(new_trace(), rollout="R", attempt=1, start_ns=5000)
    assert take(store, again, root(status_code=2)) is SUCCEEDED
    (found,) = store.rollouts()
    assert (found.attempt, found.started_ns, found.error) == (1, 5000, None)


def test_who_finishes_a_rollout_is_not_contradicted(store: FileStore) -> None:
    store.put_otlp(encode_request([root()]))
    store.finish("R", 0, status=FAILED, error_type="Stopped")
    assert take(store, call()) is FAILED
