"""What comes for the updates of a run while it learns; workers are threads of the test."""

import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainer.idle_worker import IDLE
from tests.trainer.scripted_crew import ScriptedCrew
from tests.waiting import wait_until

from spangrad.errors import EngineError, RolloutError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout, RolloutStatus, Update
from spangrad.trainer.rollouts.admission import Pace
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.rollouts.feeder import Crew, Feeder

WORKER = replace(IDLE, base_dir=".", run_id="r", policy_version=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def make_set(index: int) -> list[list[Rollout]]:
    """Two groups of two."""
    return [
        [Rollout(f"{index}-{g}-{m}", group_id=f"{index}-{g}", run_id="r", max_attempts=1) for m in range(2)]
        for g in range(2)
    ]


def feeder(store: FileStore, crew: Crew, *, staleness: int = 0, straggler_s: float | None = None) -> Feeder:
    return Feeder(
        store,
        "r",
        Pace(groups_per_update=2, max_staleness=staleness, updates=3),
        make_set=make_set,
        crew=crew,
        worker=lambda: WORKER,
        before_round=lambda: None,
        slots=1,
        straggler_s=straggler_s,
    )


class NoCrew:
    """Nobody comes for what is queued."""

    has_idle = is_working = False

    def send(self, worker: WorkerConfig) -> None:
        raise AssertionError("nobody is idle")

    def returned(self) -> list[WorkerReport]:
        return []

    def stop(self) -> None:
        pass


class AwayCrew(NoCrew):
    """A crew that comes back with a failure."""

    def returned(self) -> list[WorkerReport]:
        raise EngineError("the engine stayed away")


def at_once(store: FileStore) -> ScriptedCrew:
    return ScriptedCrew(store, lambda rollout: ([], None))


def ids(rollouts: list[Rollout]) -> list[str]:
    return [rollout.rollout_id for rollout in rollouts]


def of_set(index: int) -> list[str]:
    return [rollout.rollout_id for members in make_set(index) for rollout in members]


def is_admitted(store: FileStore, *sets: int) -> bool:
    return ids(store.rollouts()) == [one for index in sets for one in of_set(index)]


def test_sets_follow_each_other_and_so_do_further_ones_of_the_same_update(store):
    with feeder(store, at_once(store)).started(update_index=0, policy_version=0) as fed:
        assert ids(fed.take().rollouts) == of_set(0)
        assert ids(fed.take(is_more=True).rollouts) == of_set(1)
        fed.advance(update_index=1, policy_version=1)
        taken = fed.take()
        assert (ids(taken.rollouts), taken.outstanding, taken.cut) == (of_set(2), 0, 0)
    assert is_admitted(store, 0, 1, 2)


def test_with_no_staleness_nothing_is_asked_for_before_the_weights_are_published(store):
    with feeder(store, at_once(store)).started(update_index=0, policy_version=0) as fed:
        fed.take()
        later = threading.Event()
        with ThreadPoolExecutor(1) as waiting:
            taking = waiting.submit(fed.take)
            assert not later.wait(1.0) and is_admitted(store, 0)
            fed.advance(update_index=1, policy_version=1)
            assert ids(taking.result(30).rollouts) == of_set(1)


def test_with_staleness_1_the_next_set_is_done_meanwhile_and_no_further_one(store):
    with feeder(store, at_once(store), staleness=1).started(update_index=0, policy_version=0) as fed:
        assert ids(fed.take().rollouts) == of_set(0)
        wait_until(lambda: len(store.rollouts(status=RolloutStatus.SUCCEEDED)) == 8)
        assert is_admitted(store, 0, 1)
        fed.advance(update_index=1, policy_version=1)
        taken = fed.take()
        assert ids(taken.rollouts) == of_set(1)
        fed.advance(update_index=2, policy_version=2)
        assert ids(fed.take().rollouts) == of_set(2)
        fed.advance(update_index=3, policy_version=3)
    assert is_admitted(store, 0, 1, 2)


def test_a_restart_takes_up_what_is_in_the_store_and_goes_on_behind_it(store):
    for index in range(2):
        store.enqueue([rollout for members in make_set(index) for rollout in members])
    at_once(store).send(WORKER)
    store.commit_update(Update("r", 0, 1, of_set(0), [], {}, "c"))
    started = feeder(store, at_once(store), staleness=1).started(update_index=1, policy_version=1)
    with started as fed:
        assert ids(fed.take().rollouts) == of_set(1)
        wait_until(lambda: is_admitted(store, 0, 1, 2))


def test_what_an_update_waits_for_alone_is_cut_and_the_group_goes_with_what_has_ended(store, caplog):
    with (
        feeder(store, NoCrew(), straggler_s=0.5).started(update_index=0, policy_version=0) as fed,
        ThreadPoolExecutor(1) as waiting,
    ):
        wait_until(store.rollouts)
        store.claim(worker="w", limit=4, policy_version=0, lease_s=300.0)
        taking = waiting.submit(fed.take)
        for rollout_id in ("0-0-0", "0-0-1", "0-1-0"):
            store.finish(rollout_id, 0)
        taken = taking.result(30)
    assert taken.cut == 1
    late = taken.rollouts[-1]
    assert (late.rollout_id, late.status, late.error_type) == (
        "0-1-1",
        RolloutStatus.FAILED,
        "StragglerError",
    )
    assert [r.status for r in taken.rollouts[:3]] == [RolloutStatus.SUCCEEDED] * 3
    assert "update 0 waited 0.5 s for 0-1 alone: 1 of its 2 rollouts are cut" in caplog.text


def test_without_a_limit_the_last_one_is_waited_for(store):
    with (
        feeder(store, NoCrew()).started(update_index=0, policy_version=0) as fed,
        ThreadPoolExecutor(1) as waiting,
    ):
        wait_until(store.rollouts)
        store.claim(worker="w", limit=4, policy_version=0, lease_s=300.0)
        taking = waiting.submit(fed.take)
        for rollout_id in ("0-0-0", "0-0-1", "0-1-0"):
            store.finish(rollout_id, 0)
        assert not threading.Event().wait(1.0) and not taking.done()
        store.finish("0-1-1", 0)
        assert taking.result(30).cut == 0


@pytest.mark.parametrize("is_waiting", [True, False])
def test_what_goes_wrong_beside_the_loop_is_raised_in_it(store, is_waiting):
    with feeder(store, AwayCrew()).started(update_index=0, policy_version=0) as fed:
        if not is_waiting:
            wait_until(lambda: fed._failure is not None)
        with pytest.raises(EngineError, match="the engine stayed away"):
            fed.take()


def test_tasks_that_can_not_be_made_end_the_run(store):
    def broken(index: int) -> list[list[Rollout]]:
        raise RolloutError(f"no task for set {index}")

    fed = feeder(store, NoCrew())
    fed._make_set = broken
    with (
        fed.started(update_index=0, policy_version=0),
        pytest.raises(RolloutError, match="no task for set 0"),
    ):
        fed.take()


def test_what_a_killed_process_held_is_said_once(store, caplog):
    with (
        caplog.at_level(logging.WARNING),
        feeder(store, NoCrew()).started(update_index=0, policy_version=0),
    ):
        wait_until(store.rollouts)
        store.claim(worker="worker-17", limit=4, lease_s=300.0)
        wait_until(lambda: "waiting for 4 rollouts that another process began (worker-17)" in caplog.text)
        assert not threading.Event().wait(1.0)
    assert caplog.text.count("waiting for") == 1


def test_ctrl_c_ends_the_wait_and_the_thread(store):
    started = feeder(store, NoCrew()).started(update_index=0, policy_version=0)
    main = threading.main_thread().ident
    assert main is not None
    with pytest.raises(KeyboardInterrupt), started as fed:
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        fed.take()
    assert "feeder" not in {thread.name for thread in threading.enumerate()}
