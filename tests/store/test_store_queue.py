import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spangrad.errors import LeaseLostError, StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus, Span, SpanEvent, Update
from spangrad.tracer import conventions as names
from tests.store.building import conversation, new_trace, request, span
from tests.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def claim_expired(store: FileStore, worker: str = "late") -> list[Rollout]:
    found: list[Rollout] = []

    def ask() -> bool:
        found.extend(store.claim(worker=worker))
        return bool(found)

    wait_until(ask)
    return found


def test_a_rollout_goes_through_the_queue_unchanged(store: FileStore) -> None:
    task = {"question": "how many?", "limits": [1, 2.5, None]}
    asked = Rollout("r-1", task_id="t", group_id="g", run_id="run", task=task, max_attempts=2, split="eval")
    assert store.enqueue([asked]) == 1
    assert store.rollouts() == [asked]
    (claimed,) = store.claim(worker="w", policy_version=4, lease_s=60)
    assert (claimed.status, claimed.worker, claimed.policy_version) == (RolloutStatus.RUNNING, "w", 4)
    assert claimed.task == task
    assert claimed.lease_until_ns and claimed.started_ns
    assert claimed.lease_until_ns - claimed.started_ns == 60 * 10**9
    store.finish("r-1", 0, output={"answer": 3})
    (done,) = store.rollouts(status=RolloutStatus.SUCCEEDED)
    assert (done.output, done.lease_until_ns, done.attempt) == ({"answer": 3}, None, 0)
    assert done.ended_ns and done.ended_ns >= claimed.started_ns


def test_enqueueing_an_id_twice_leaves_the_first_alone(store: FileStore) -> None:
    assert store.enqueue([Rollout("a", task=1), Rollout("a", task=2), Rollout("b", task=1)]) == 2
    assert store.enqueue([Rollout("a", task=3), Rollout("c", task=1)]) == 1
    assert [(r.rollout_id, r.task) for r in store.rollouts()] == [("a", 1), ("b", 1), ("c", 1)]
    assert store.stats()["tasks"] == 1  # equal tasks are stored once


def test_enqueueing_wins_over_what_spans_told_of_the_same_id(store: FileStore) -> None:
    store.put_otlp(request([span(new_trace(), rollout="a", attempt=0)]))
    assert store.enqueue([Rollout("a", split="train")]) == 1
    assert [r.rollout_id for r in store.claim(worker="w")] == ["a"]


def test_claims_are_oldest_first_and_filtered(store: FileStore) -> None:
    for i in range(6):
        store.enqueue(
            [Rollout(f"r{i}", run_id="even" if i % 2 == 0 else "odd", split="eval" if i > 3 else "train")]
        )
    assert [r.rollout_id for r in store.claim(worker="w", run_id="odd", limit=2)] == ["r1", "r3"]
    assert [r.rollout_id for r in store.claim(worker="w", split="eval", limit=9)] == ["r4", "r5"]
    assert [r.rollout_id for r in store.claim(worker="w", limit=9)] == ["r0", "r2"]
    assert store.claim(worker="w") == []
    assert store.claim(worker="w", limit=0) == []


def test_a_lease_that_ran_out_is_claimed_again_as_the_next_attempt(store: FileStore) -> None:
    store.enqueue([Rollout("a", max_attempts=3)])
    store.claim(worker="dead", lease_s=0.05)
    (again,) = claim_expired(store)
    assert (again.attempt, again.worker) == (1, "late")
    with pytest.raises(LeaseLostError, match=r"attempt 0 .* attempt 1 is running"):
        store.finish("a", 0, output="late answer of the dead")
    store.finish("a", 1)


def test_a_rollout_fails_when_no_attempt_is_left(store: FileStore) -> None:
    store.enqueue([Rollout("a", max_attempts=1)])
    store.claim(worker="dead", lease_s=0.01)

    def is_failed() -> bool:
        assert store.claim(worker="w") == []
        return store.rollouts()[0].status is RolloutStatus.FAILED

    wait_until(is_failed)
    assert store.rollouts()[0].error_type == "LeaseExpired"


def test_an_expired_lease_still_counts_while_nobody_else_claimed(store: FileStore) -> None:
    store.enqueue([Rollout("a")])
    (claimed,) = store.claim(worker="w", lease_s=0.0)
    wait_until(lambda: time.time_ns() > (claimed.lease_until_ns or 0))
    store.finish("a", 0)


def test_heartbeats_extend_leases_and_name_the_lost_ones(store: FileStore) -> None:
    store.enqueue([Rollout("a"), Rollout("b"), Rollout("c")])
    first = store.claim(worker="w", limit=2, lease_s=1)
    store.finish("b", 0)
    lost = store.heartbeat([("a", 0), ("a", 1), ("b", 0), ("c", 0), ("none", 0)], worker="w", lease_s=500)
    assert lost == ["a", "b", "c", "none"]
    assert store.heartbeat([("a", 0)], worker="other") == ["a"]
    (extended,) = store.rollouts(rollout_ids=["a"])
    assert (extended.lease_until_ns or 0) > (first[0].lease_until_ns or 0) + 400 * 10**9


def test_retry_requeues_while_attempts_are_left_then_fails(store: FileStore) -> None:
    store.enqueue([Rollout("a", max_attempts=2)])
    store.claim(worker="w")
    for _ in range(2):  # the same again changes nothing
        store.finish("a", 0, error_type="EngineError", error="gone", retry=True)
    (queued,) = store.rollouts()
    assert (queued.status, queued.attempt, queued.error_type) == (RolloutStatus.QUEUED, 1, "EngineError")
    (again,) = store.claim(worker="w")
    assert again.attempt == 1
    store.finish("a", 1, error_type="EngineError", retry=True)
    assert store.rollouts()[0].status is RolloutStatus.FAILED
    assert store.claim(worker="w") == []


def test_a_free_retry_uses_up_no_attempt(store: FileStore) -> None:
    store.enqueue([Rollout("a", max_attempts=1)])
    for attempt in range(3):
        assert [r.attempt for r in store.claim(worker="w")] == [attempt]
        for _ in range(2):  # the same again changes nothing
            store.finish("a", attempt, error_type="EngineError", retry=True, free=True)
        (queued,) = store.rollouts()
        assert (queued.status, queued.error_type) == (RolloutStatus.QUEUED, "EngineError")
        assert (queued.attempt, queued.max_attempts) == (attempt + 1, attempt + 2)
    store.claim(worker="w")
    with pytest.raises(LeaseLostError, match="attempt 3 is running"):
        store.finish("a", 1, retry=True, free=True)
    with pytest.raises(StoreError, match="without retry"):
        store.finish("a", 3, free=True)
    store.finish("a", 3, error_type="AgentError", retry=True)
    assert store.rollouts()[0].status is RolloutStatus.FAILED


def test_requeueing_queues_ended_rollouts_that_no_update_consumed(store: FileStore) -> None:
    ids = ["failed", "good", "consumed", "running", "queued"]
    store.enqueue([Rollout(rollout_id, max_attempts=1, task=rollout_id) for rollout_id in ids])
    store.put_otlp(
        request([span(new_trace(), rollout="told", attempt=0, attributes={names.SPAN_ROLE: "rollout"})])
    )
    store.claim(worker="w", limit=4)
    store.finish("failed", 0, status=RolloutStatus.FAILED, error_type="E")
    store.finish("good", 0, output="x")
    store.finish("consumed", 0, output="y")
    store.commit_update(Update("run", 0, 1, ["consumed"], [], {}, "c"))
    before = {r.rollout_id: r for r in store.rollouts()}
    assert before["told"].status is RolloutStatus.SUCCEEDED
    everything = [*ids, "told", "none", "good"]
    assert store.requeue(everything) == 2
    assert store.requeue(everything) == store.requeue([]) == 0
    after = {r.rollout_id: r for r in store.rollouts()}
    assert {name for name in before if before[name] != after[name]} == {"failed", "good"}
    for name in ("failed", "good"):
        found = after[name]
        assert (found.status, found.attempt, found.max_attempts) == (RolloutStatus.QUEUED, 1, 2)
        assert (found.output, found.ended_ns, found.lease_until_ns) == (None, None, None)
    with pytest.raises(LeaseLostError):
        store.finish("good", 0, output="z")
    again = store.claim(worker="w", limit=9)
    assert [(r.rollout_id, r.attempt, r.task) for r in again] == [
        ("failed", 1, "failed"),
        ("good", 1, "good"),
        ("queued", 0, "queued"),
    ]
    store.finish("good", 1, output="z")


def test_giving_up_ends_what_is_queued_or_runs_whoever_has_it(store: FileStore) -> None:
    ids = ["good", "failed", "running", "queued", "left"]
    store.enqueue([Rollout(rollout_id) for rollout_id in ids])
    store.put_otlp(request([span(new_trace(), rollout="told", attempt=0)]))
    store.claim(worker="w", limit=3)
    store.finish("good", 0, output="x")
    store.finish("failed", 0, status=RolloutStatus.FAILED, error_type="E")
    before = {r.rollout_id: r for r in store.rollouts()}
    given = [*ids[:-1], "told", "none"]
    assert store.give_up(given, error_type="StragglerError", error="late") == 2
    assert store.give_up(given, error_type="StragglerError", error="late") == 0
    after = {r.rollout_id: r for r in store.rollouts()}
    assert {name for name in before if before[name] != after[name]} == {"running", "queued"}
    for name in ("running", "queued"):
        found = after[name]
        assert (found.status, found.attempt, found.failure) == (
            RolloutStatus.FAILED,
            0,
            "StragglerError: late",
        )
        assert found.ended_ns and found.lease_until_ns is None
    assert store.heartbeat([("running", 0)], worker="w") == ["running"]
    with pytest.raises(LeaseLostError):
        store.finish("running", 0, output="at last")
    assert [r.rollout_id for r in store.claim(worker="w", limit=9)] == ["left"]


def test_nothing_of_the_attempt_before_a_requeue_counts_for_the_next(store: FileStore) -> None:
    event = SpanEvent(names.REWARD_EVENT, 5, {names.REWARD_VALUE: 0.25})
    store.enqueue([Rollout("a")])
    store.claim(worker="w")
    store.put_otlp(request(conversation(new_trace(), "a", 2)))
    store.put_otlp(request([span(new_trace(), rollout="a", events=(event,))]))  # names no attempt
    store.put_rewards([Reward("a", 1.0)])
    store.finish("a", 0)
    assert {r.attempt for r in store.rewards(["a"])} == {None, 0}
    assert store.requeue(["a"]) == 1
    assert [(r.value, r.attempt) for r in store.rewards(["a"])] == [(0.25, 0), (1.0, 0)]
    (again,) = store.claim(worker="w")
    assert [s for s in store.spans(["a"]) if s.attempt == again.attempt] == []
    store.put_rewards([Reward("a", 0.5)])
    assert [r.value for r in store.rewards(["a"]) if r.attempt in (None, again.attempt)] == [0.5]


def test_finishing_the_same_way_twice_is_accepted_another_way_refused(store: FileStore) -> None:
    store.enqueue([Rollout("a")])
    with pytest.raises(LeaseLostError, match="is queued"):
        store.finish("a", 0)
    store.claim(worker="w")
    for _ in range(2):
        store.finish("a", 0, output=[1])
    with pytest.raises(LeaseLostError, match="is succeeded"):
        store.finish("a", 0, output=[2])
    with pytest.raises(StoreError, match="no rollout 'b'"):
        store.finish("b", 0)
    with pytest.raises(StoreError, match="queued"):
        store.finish("a", 0, status=RolloutStatus.QUEUED)


def test_threads_never_claim_the_same_rollout(store: FileStore) -> None:
    store.enqueue([Rollout(f"r{i}") for i in range(60)])

    def work(worker: int) -> list[str]:
        mine: list[str] = []
        while claimed := store.claim(worker=str(worker), limit=2):
            mine += [rollout.rollout_id for rollout in claimed]
        return mine

    with ThreadPoolExecutor(4) as pool:
        claimed = [rollout_id for mine in pool.map(work, range(4)) for rollout_id in mine]
    assert sorted(claimed) == sorted(f"r{i}" for i in range(60))


@pytest.mark.parametrize(
    "bad", [Rollout(""), Rollout("a", max_attempts=0), Rollout("a", status=RolloutStatus.RUNNING)]
)
def test_rollouts_that_make_no_sense_are_refused_with_the_whole_batch(store: FileStore, bad: Rollout) -> None:
    with pytest.raises(StoreError):
        store.enqueue([Rollout("good"), bad])
    assert store.rollouts() == []


def test_imported_rollouts_are_stored_as_ended_and_never_claimed(store: FileStore) -> None:
    done = Rollout("a", status=RolloutStatus.SUCCEEDED, split="expert", output="x", started_ns=1, ended_ns=2)
    store.enqueue([done])
    assert store.rollouts(split="expert", group_ids=None) == [done]
    assert store.claim(worker="w") == []


def test_rewards_carry_attempt_author_and_time_and_are_stored_once(store: FileStore) -> None:
    store.enqueue([Rollout("a")])
    store.claim(worker="dead", lease_s=0.0)
    claim_expired(store)
    given = Reward("a", 1.0, name="tests", author=RewardAuthor.AGENT, explanation="all passed")
    assert store.put_rewards([given, given]) == 1
    assert store.put_rewards([given]) == 0
    assert store.put_rewards([Reward("a", 0.0, name="tests"), Reward("a", 0.5, call_id="c", attempt=0)]) == 2
    rewards = store.rewards(["a"])
    assert [r.attempt for r in rewards if r.call_id is None] == [1, 1]
    assert [r.attempt for r in rewards if r.call_id] == [0]
    assert {r.author for r in rewards} == {RewardAuthor.OPERATOR}
    assert all(r.time_ns for r in rewards)
    assert store.rewards([]) == []
    assert len(store.rewards()) == 3
    with pytest.raises(StoreError, match="nan"):
        store.put_rewards([Reward("a", float("nan"))])


def values(store: FileStore) -> list[float]:
    return [reward.value for reward in store.rewards(["a"])]


def test_a_reward_set_back_to_an_earlier_value_counts(store: FileStore) -> None:
    for value, new in ((0.0, 1), (1.0, 1), (0.0, 1), (0.0, 0), (1.0, 1)):
        assert store.put_rewards([Reward("a", value)]) == new
    assert values(store) == [0.0, 1.0, 0.0, 1.0]
    assert store.put_rewards([Reward("a", 1.0, explanation="why")]) == 1


def test_a_request_sent_twice_changes_nothing_whatever_it_says(store: FileStore) -> None:
    given = [Reward("a", value) for value in (0.0, 1.0, 0.0)] + [Reward("b", 0.0), Reward("a", 1.0, "tests")]
    assert [store.put_rewards(given), store.put_rewards(given)] == [5, 0]
    assert [r.value for r in store.rewards(["a"]) if r.name == "reward"] == [0.0, 1.0, 0.0]


def test_a_reward_is_a_repeat_only_of_its_own_attempt_call_name_and_author(store: FileStore) -> None:
    same = [
        Reward("a", 1.0, attempt=0),
        Reward("a", 1.0, attempt=1),
        Reward("a", 1.0, attempt=0, call_id="c"),
        Reward("a", 1.0, attempt=0, name="tests"),
        Reward("b", 1.0, attempt=0),
    ]
    assert [store.put_rewards([reward]) for reward in same] == [1] * 5
    assert store.put_rewards([same[0]], author=RewardAuthor.EVALUATOR) == 1
    assert [store.put_rewards([reward]) for reward in same] == [0] * 5


def test_a_reward_with_a_time_is_one_row_and_one_given_now_comes_after_it(store: FileStore) -> None:
    past, future = Reward("a", 0.0, time_ns=5), Reward("a", 1.0, time_ns=time.time_ns() + 10**15)
    assert store.put_rewards([future, past]) == 2
    assert store.put_rewards([Reward("a", 0.0)]) == 1
    assert store.put_rewards([past, future]) == 0
    assert values(store) == [0.0, 1.0, 0.0]
    together = [Reward("b", float(i), time_ns=7) for i in range(20)]
    assert store.put_rewards(together) == 20
    assert [r.value for r in store.rewards(["b"])] == [float(i) for i in range(20)]


def root(attempt: int | None, *, status_code: int = 0, reward: float | None = None, task: str = "t") -> Span:
    event = SpanEvent(names.REWARD_EVENT, 5, {names.REWARD_VALUE: reward})
    return span(
        new_trace(),
        rollout="R",
        attempt=attempt,
        start_ns=1000 * (1 + (attempt or 0)),
        status_code=status_code,
        attributes={names.SPAN_ROLE: "rollout", names.TASK_ID: task, names.ERROR_TYPE: "E"},
        events=() if reward is None else (event,),
    )


def recorded(store: FileStore) -> tuple[object, ...]:
    (found,) = store.rollouts()
    assert found.max_attempts == found.attempt + 1
    return found.attempt, found.status, found.error_type, found.task_id, found.started_ns, found.ended_ns


@pytest.mark.parametrize("together", [False, True])
def test_a_recorded_rollout_is_at_the_highest_attempt_that_its_spans_name(
    store: FileStore, together: bool
) -> None:
    failed, good, late = root(0, status_code=2, task="t0"), root(2, task="t2"), root(1, status_code=2)
    call = span(new_trace(), rollout="R", attempt=2, start_ns=2500)
    if together:
        store.put_otlp(request([good, failed, call, late]))
    else:
        store.put_otlp(request([failed]))
        assert recorded(store) == (0, RolloutStatus.FAILED, "E", "t0", 1000, 1010)
        store.put_otlp(request([call]))
        assert recorded(store) == (2, RolloutStatus.RUNNING, None, "t0", 2500, None)
        store.put_otlp(request([good]))
        store.put_otlp(request([late]))
        store.put_otlp(request([root(None, status_code=2)]))  # names no attempt: of attempt 0
    assert recorded(store) == (2, RolloutStatus.SUCCEEDED, None, "t2", 3000, 3010)


def test_spans_do_not_change_the_attempt_of_an_enqueued_rollout(store: FileStore) -> None:
    store.enqueue([Rollout("R", max_attempts=3)])
    store.claim(worker="w")
    store.put_otlp(request([root(1)]))
    (found,) = store.rollouts()
    assert (found.attempt, found.status) == (0, RolloutStatus.RUNNING)


def test_a_reward_of_a_span_that_is_no_finite_number_is_said_and_left_out(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put_otlp(request([root(0, reward=float("nan")), root(0, reward=1.0)]))
    assert [reward.value for reward in store.rewards()] == [1.0]
    assert "a reward of rollout 'R' is nan" in caplog.text
