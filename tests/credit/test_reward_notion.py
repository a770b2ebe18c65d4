"""What a report counts as a rewarded rollout is what credit has a reward for, and an export a number."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spangrad.adapters import account_unread, calls_of
from spangrad.adapters.report import report
from spangrad.commands.transition_files import outcomes_by
from spangrad.credit.rewards import DEFAULT_AUTHORS
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes

FIRST, SECOND = (f"{'1'.rjust(32, '0')}-{name.encode().hex().rjust(16, '0')}" for name in "ab")
AGENT, EVALUATOR, OPERATOR = RewardAuthor.AGENT, RewardAuthor.EVALUATOR, RewardAuthor.OPERATOR


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """One recorded rollout of two calls, in its attempt 1."""
    with FileStore(tmp_path / "s.duckdb") as opened:
        named = {c.ROLLOUT_ID: "r", c.ATTEMPT: 1}
        root = span("r", attributes={**named, c.SPAN_ROLE: "rollout"}, end_ns=99)
        told = [
            span(name, parent="r", start_ns=start, attributes=text_attributes(**{c.RESPONSE_ID: name}))
            for name, start in (("a", 1), ("b", 50))
        ]
        opened.put_otlp(encode_request([root, *told]))
        account_unread(opened)
        yield opened


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], None),
        ([(Reward("r", 0.5), OPERATOR)], 0.5),
        ([(Reward("r", 0.5), AGENT)], None),
        ([(Reward("r", 0.5, attempt=0), OPERATOR)], None),
        ([(Reward("r", 0.5, name="style"), OPERATOR)], None),
        ([(Reward("r", 0.5), OPERATOR), (Reward("r", 0.75), EVALUATOR)], 0.5),
        ([(Reward("r", 0.5), EVALUATOR), (Reward("r", 0.75), EVALUATOR)], 0.75),
        ([(Reward("r", 0.5, call_id=FIRST), OPERATOR)], None),
        ([(Reward("r", 0.5, call_id=FIRST), OPERATOR), (Reward("r", 0.25, call_id=SECOND), EVALUATOR)], 0.75),
        ([(Reward("r", 0.5, call_id=FIRST), OPERATOR), (Reward("r", 1.0), EVALUATOR)], 1.5),
    ],
)
def test_a_report_and_an_export_agree_on_what_a_rollout_is_worth(
    store: FileStore, given: list[tuple[Reward, RewardAuthor]], expected: float | None
) -> None:
    for reward, author in given:
        store.put_rewards([reward], author=author)
    rollouts = store.rollouts()
    worth = outcomes_by(store, DEFAULT_AUTHORS)(rollouts, {"r": calls_of(store, ["r"])})
    assert worth == {"r": expected}
    assert report(store).rewarded_rollouts == (expected is not None)


def test_another_reward_counts_where_it_is_asked_for(store: FileStore) -> None:
    store.put_rewards([Reward("r", 0.5, name="style"), Reward("r", 1.0, name="speed", call_id=FIRST)])
    assert (report(store).rewarded_rollouts, report(store).other_rewards) == (0, {"speed": 1, "style": 1})
    found = report(store, reward="style")
    assert (found.rewarded_rollouts, found.other_rewards) == (1, {"speed": 1})
    needing = {objective.objective: objective.calls for objective in found.objectives}
    assert needing["preferences: DPO, KTO"] == 2
    outcomes = outcomes_by(store, DEFAULT_AUTHORS, {"style": 1.0})(
        store.rollouts(), {"r": calls_of(store, ["r"])}
    )
    assert outcomes == {"r": 0.5}
