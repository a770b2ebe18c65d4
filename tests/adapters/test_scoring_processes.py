"""Verifiers in processes of their own, over a real store: what they cost, what is stored, what is skipped."""

import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from spangrad.adapters.scoring import StoredRollout
from spangrad.adapters.scoring.verifier_pool import Outcome, verdicts
from spangrad.adapters.scoring.verify import Verification, VerificationReport, verify
from spangrad.errors import ConfigError, PermissionDeniedError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus
from tests.store.hub_process import HubProcess
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.slow

CHECKS = """
import os, subprocess, sys, threading, time
from pathlib import Path

def by_task(rollout):
    what = rollout.task["what"]
    if what == "raise":
        raise RuntimeError("no " + "x" * 10**7)
    if what == "exit":
        sys.exit(1)
    if what == "die":
        os._exit(7)
    if what == "hang":
        time.sleep(1000)
    return {"nothing": None, "wrong": "text"}.get(what, rollout.task["n"])

def both(rollout):
    Path(rollout.task["n"]).touch()
    while not Path(rollout.task["other"]).exists():
        time.sleep(0.01)
    return 1

def dies_later(rollout):
    Path("pid").write_text(str(os.getpid()))
    threading.Timer(0.05, os._exit, [1]).start()
    return 1

def environment(rollout):
    print("printed")
    assert sys.stdin.read() == ""
    key = subprocess.run(["printenv", "SPANGRAD_KEY"], capture_output=True).stdout
    return float("SPANGRAD_KEY" in os.environ or bool(key))

def remembers(rollout):
    with open("seen", "a") as seen:
        seen.write(rollout.rollout_id + "\\n")
    return rollout.attempt + 1

def names(rollout):
    remembers(rollout)
    return {"a": 1, "b": 0}

broken = 1 / 0 if os.environ.get("BREAK") else None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "checks.py").write_text(CHECKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollouts(*tasks):
    return [StoredRollout(f"r-{number}", task, None, ()) for number, task in enumerate(tasks)]


def judged(given, name, **more):
    with closing(verdicts(given, f"checks.py:{name}", **more)) as found:
        return {one.rollout_id: one for one in found if one is not None}


def ended(store, *ids):
    store.enqueue([Rollout(one, task={"n": 1}) for one in ids])
    for rollout in store.claim(worker="w", limit=len(ids)):
        store.finish(rollout.rollout_id, rollout.attempt)


def seen(folder):
    file = folder / "seen"
    found = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return sorted(found)


def verified(store, function, **more):
    report = VerificationReport()
    verify(store, store.rollouts(), Verification(f"checks.py:{function}", **{"workers": 2, **more}), report)
    return report


def test_a_verifier_that_raises_hangs_or_dies_costs_its_rollout_alone(folder):
    whats = ["raise", "1", "exit", "die", "2", "hang", "nothing", "wrong", "die", "3"]
    given = rollouts(*({"what": what, "n": number} for number, what in enumerate(whats)))
    found = judged(given, "by_task", workers=2, timeout_s=2.0)
    assert [found[f"r-{number}"].outcome for number in range(len(whats))] == [
        Outcome.RAISED,
        Outcome.SCORED,
        Outcome.RAISED,
        Outcome.DIED,
        Outcome.SCORED,
        Outcome.TIMED_OUT,
        Outcome.NO_OPINION,
        Outcome.RAISED,
        Outcome.DIED,
        Outcome.SCORED,
    ]
    assert [found[f"r-{number}"].values for number in (1, 4, 9)] == [{"reward": n} for n in (1.0, 4.0, 9.0)]
    assert str(found["r-0"].error).startswith("RuntimeError: no xxx") and len(str(found["r-0"].error)) < 3000
    assert found["r-2"].error == "SystemExit: 1 (checks.py:10)"
    assert found["r-3"].error == "its process ended with 7"
    assert found["r-5"].error == "it took longer than 2 s"
    assert found["r-7"].error == "ValueError: 'text' is no finite number"


def test_rollouts_are_judged_in_parallel(folder):
    given = rollouts({"n": "a", "other": "b"}, {"n": "b", "other": "a"})
    assert {one.outcome for one in judged(given, "both", workers=2).values()} == {Outcome.SCORED}


def test_a_process_that_ends_between_two_rollouts_costs_neither(folder):
    first, second = rollouts({}, {})

    def one_after_the_other():
        yield first
        wait_until(lambda: Path("pid").exists() and not is_alive(int(Path("pid").read_text())))
        yield second

    found = judged(one_after_the_other(), "dies_later")
    assert [one.outcome for one in found.values()] == [Outcome.SCORED] * 2


def test_a_verifier_has_no_key_no_input_and_prints_to_standard_error(folder, monkeypatch, capfd):
    monkeypatch.setenv("SPANGRAD_KEY", "secret")
    assert judged(rollouts({}), "environment")["r-0"].values == {"reward": 0.0}
    assert os.environ["SPANGRAD_KEY"] == "secret"
    assert capfd.readouterr().out == ""


def test_one_that_can_not_be_loaded_is_an_error_and_judges_nothing(folder, monkeypatch):
    for spec, says in (
        ("checks.py:nosuch", "^'checks.py:nosuch': 'checks.py' has no function 'nosuch'$"),
        ("nosuch:fn", "^'nosuch:fn' can't be imported: No module named 'nosuch'$"),
        ("checks", "^'checks' names no function"),
    ):
        with pytest.raises(ConfigError, match=says):
            list(verdicts(rollouts({}), spec, workers=2))
    monkeypatch.setenv("BREAK", "1")
    with pytest.raises(
        ConfigError, match=r"'checks:by_task' can't be loaded: ZeroDivisionError: .* \(checks.py:43\)"
    ):
        list(verdicts(rollouts({}), "checks:by_task"))


def test_one_that_can_not_be_loaded_is_an_error_where_nothing_is_left_to_judge(folder):
    with FileStore(folder / "s.duckdb") as store:
        ended(store, "r-1")
        store.put_rewards([Reward("r-1", 0.5)])
        with pytest.raises(ConfigError, match="'nosuch:fn' can't be imported"):
            verify(store, store.rollouts(), Verification("nosuch:fn"), VerificationReport())
        assert verified(store, "remembers").already_scored == 1


def test_rewards_are_stored_with_their_author_attempt_and_where_they_are_from(folder):
    with FileStore(folder / "s.duckdb") as store:
        ended(store, "r-1", "r-2")
        store.requeue(["r-2"])
        ended(store)
        store.enqueue([Rollout("queued")])
        (again,) = store.claim(worker="w", limit=1)
        store.finish(again.rollout_id, again.attempt)
        store.claim(worker="w", limit=1)
        store.enqueue([Rollout("failed", max_attempts=1)])
        (failed,) = store.claim(worker="w", limit=1)
        store.finish("failed", failed.attempt, status=RolloutStatus.FAILED, error="no")
        report = verified(store, "remembers")
        given = [(r.rollout_id, r.value, r.name, r.attempt, r.author) for r in store.rewards()]
        why = {r.explanation for r in store.rewards()}
    assert sorted(given) == [
        ("r-1", 1.0, "reward", 0, RewardAuthor.OPERATOR),
        ("r-2", 2.0, "reward", 1, RewardAuthor.OPERATOR),
    ]
    assert why == {"given by checks.py:remembers"}
    assert seen(folder) == ["r-1", "r-2"]
    assert (report.rollouts, report.not_succeeded, report.new_rewards) == (4, 2, 2)
    assert report.to_json()["by_outcome"] == {"scored": 2}
    assert report.to_json()["means"] == {"reward": 1.5}


def test_what_has_this_reward_by_this_author_is_left_alone_unless_again(folder):
    with FileStore(folder / "s.duckdb") as store:
        ended(store, "r-1", "r-2", "r-3", "r-4")
        store.put_rewards([Reward("r-1", 0.5)])
        store.put_rewards([Reward("r-2", 0.5)], author=RewardAuthor.EVALUATOR)
        store.put_rewards([Reward("r-3", 0.5, call_id="x-y"), Reward("r-3", 0.5, name="other")])
        report = verified(store, "remembers")
        assert (report.already_scored, report.new_rewards) == (1, 3)
        assert seen(folder) == ["r-2", "r-3", "r-4"]
        assert verified(store, "remembers").already_scored == 4
        assert seen(folder) == []
        again = verified(store, "remembers", again=True)
        assert (again.by_outcome, again.new_rewards) == (Counter(scored=4), 1)
        assert seen(folder) == ["r-1", "r-2", "r-3", "r-4"]
        assert verified(store, "remembers", name="new").new_rewards == 4


def test_rewards_that_a_function_names_itself_are_not_asked_for_twice(folder):
    with FileStore(folder / "s.duckdb") as store:
        ended(store, "r-1", "r-2")
        assert verified(store, "names").new_rewards == 4
        assert {(r.name, r.explanation) for r in store.rewards()} == {
            ("a", "given and named by checks.py:names"),
            ("b", "given and named by checks.py:names"),
        }
        assert verified(store, "names").already_scored == 2
        assert verified(store, "remembers").already_scored == 0


def test_a_hub_knows_the_author_by_the_key(folder):
    keys = Keys.generate()
    keys.save(folder / "keys.json")
    with HubProcess(folder / "s.duckdb", keys=folder / "keys.json") as hub:
        with HubClient(hub.url, keys.trainer) as trainer:
            ended(trainer, "r-1", "r-2")
            trainer.put_rewards([Reward("r-1", 0.5)])
        with HubClient(hub.url, keys.evaluator) as evaluator:
            listed = evaluator.rollouts()
            assert evaluator.reward_author() is RewardAuthor.EVALUATOR
            assert verified(evaluator, "remembers").new_rewards == 2
            assert verified(evaluator, "remembers").already_scored == 2
        assert seen(folder) == ["r-1", "r-2"]
        with HubClient(hub.url, keys.trainer) as trainer:
            assert trainer.reward_author() is RewardAuthor.OPERATOR
            report = verified(trainer, "remembers")
            assert (report.already_scored, report.new_rewards) == (1, 1)
        seen(folder)
        with HubClient(hub.url, keys.agent) as agent, pytest.raises(PermissionDeniedError):
            verify(agent, listed, Verification("checks.py:remembers"), VerificationReport())
    assert seen(folder) == []
