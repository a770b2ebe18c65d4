"""Sampled tokens are trained or dropped for a reason, and nothing else."""

import pytest

from spangrad.credit.books import check_books, dropped_metrics, dropped_tokens
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.pipeline import credited_rows
from spangrad.credit.transitions import Refused
from spangrad.errors import BooksError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Rollout, RolloutStatus
from tests.credit.test_pipeline import filled, spans_of


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def test_books_that_do_not_balance_are_an_error_of_ours():
    check_books(10, 7, {"a": 2, "b": 1}, where="here")
    with pytest.raises(
        BooksError, match=r"here: 10 tokens were sampled, but 7 are trained and 2 dropped \(2 a\)"
    ):
        check_books(10, 7, {"a": 2}, where="here")
    with pytest.raises(BooksError, match="an error in spangrad"):
        check_books(10, 10, {"a": 1}, where="here")


def test_dropped_tokens_are_told_by_what_they_are_counted_as():
    refused = [
        Refused("r1", "a", "grade text: no ids of 1", 3, kind="grade text: no ids"),
        Refused("r2", "b", "grade text: no ids of 2", 4, kind="grade text: no ids"),
        Refused("r2", None, "nothing in it"),
    ]
    assert dropped_tokens(refused) == {"grade text: no ids": 7}
    assert dropped_metrics(dropped_tokens(refused)) == {"dropped/grade_text_no_ids": 7.0}


def with_failed(store: FileStore, rewards: dict[str, float | None]) -> list[Rollout]:
    """Rollouts of a group by their rewards, and one more whose engine was gone after its three tokens."""
    filled(store, rewards)
    store.enqueue([Rollout("broken", group_id="g", run_id="run", task_id="t")])
    (claimed,) = store.claim(worker="w", limit=1)
    store.put_otlp(encode_request(spans_of("broken", "99")))
    store.finish(
        "broken",
        claimed.attempt,
        status=RolloutStatus.FAILED,
        error_type="EngineError",
        error="connection refused",
    )
    return store.rollouts(run_id="run")


def test_a_rollout_that_failed_is_in_no_statistics_and_its_tokens_are_counted(store):
    config = CreditConfig(scale_by_std=False)
    batch = credited_rows(store, with_failed(store, {"good": 3.0, "bad": 1.0, "worse": 2.0}), config)
    of_rollout = {row.rollout_id: float(row.advantages[row.action_mask][0]) for row in batch.rows}
    assert of_rollout == {"good": 1.0, "bad": -1.0, "worse": 0.0}  # the mean is 2; with a 0 it would be 1.5
    assert batch.diagnostics["rollouts/all"] == 3
    (refused,) = batch.refused
    assert (refused.rollout_id, refused.call_id, refused.sampled_tokens) == ("broken", None, 3)
    assert dropped_metrics(dropped_tokens(batch.refused)) == {"dropped/rollout_did_not_succeed_failed": 3.0}
    assert batch.sampled_tokens == 12


def test_every_reason_has_its_tokens(store):
    rollouts = with_failed(store, {"good": 1.0, "bad": 0.0, "unscored": None})
    batch = credited_rows(store, rollouts, CreditConfig(), policy_version=6, max_staleness=9)
    assert dropped_tokens(batch.refused) == {
        "reward is missing": 3,
        "rollout did not succeed: failed": 3,
    }
    assert batch.sampled_tokens == 12 == 6 + sum(int(row.action_mask.sum()) for row in batch.rows)
    stale = credited_rows(store, rollouts, CreditConfig(), policy_version=6, max_staleness=0)
    assert dropped_tokens(stale.refused) == {"too stale": 9, "rollout did not succeed: failed": 3}
