"""Decisions about published versions, and where each version stands after them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import PermissionDeniedError, StoreError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys, Role
from spangrad.store.records import Decision, DecisionAuthor, Policy, PolicyDecision, Update, promoted_version
from tests.store.hub_process import HubProcess

EVALUATED = {"success": 0.75, "tasks": 64.0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        for version in range(5):
            opened.put_policy(Policy("run", version, f"ckpt/{version}", 7, max(version - 1, 0) or None))
        yield opened


def decided(version: int, decision: Decision = Decision.PROMOTED, **changes: Any) -> PolicyDecision:
    by: dict[str, Any] = {
        "decided_by": DecisionAuthor.TRAINER,
        "reason": "better",
        "metrics": EVALUATED,
        "time_ns": version,
    }
    return PolicyDecision("run", version, decision, **(by | changes))


def rolled_back(version: int, to: int, **changes: Any) -> PolicyDecision:
    return decided(version, Decision.ROLLED_BACK, to_version=to, metrics={}, **changes)


def standing(store: FileStore) -> dict[int, str]:
    rows = store.query("SELECT policy_version, status FROM policy_lineage ORDER BY policy_version")
    shown = [row["policy_version"] for row in rows if row["status"] == "promoted"]
    promoted = promoted_version(store.decisions("run"))
    assert shown == ([] if promoted is None else [promoted])
    return {row["policy_version"]: row["status"] for row in rows}


def test_where_versions_stand_follows_from_the_decisions(store: FileStore) -> None:
    assert set(standing(store).values()) == {"candidate"}
    assert store.decide(decided(0))
    assert store.decide(decided(1, Decision.KEPT))
    assert standing(store) == {0: "promoted"} | dict.fromkeys((1, 2, 3, 4), "candidate")
    store.decide(decided(2))
    assert standing(store) == {0: "superseded", 1: "candidate", 2: "promoted", 3: "candidate", 4: "candidate"}
    store.decide(rolled_back(4, 2))
    after = {0: "superseded", 1: "candidate", 2: "promoted", 3: "rolled_back", 4: "rolled_back"}
    assert standing(store) == after
    store.put_policy(Policy("run", 5, "ckpt/5", 7, parent_version=2))
    store.decide(decided(5, Decision.RESTORED, to_version=2))
    assert standing(store) == after | {2: "superseded", 5: "promoted"}
    # An admin goes back behind it, and changes his mind.
    store.decide(rolled_back(5, 0, decided_by=DecisionAuthor.ADMIN))
    assert standing(store) == {0: "promoted"} | dict.fromkeys((1, 2, 3, 4, 5), "rolled_back")
    store.decide(decided(3, decided_by=DecisionAuthor.ADMIN, metrics={}))
    assert standing(store) == {0: "superseded", 3: "promoted"} | dict.fromkeys((1, 2, 4, 5), "rolled_back")


def test_runs_do_not_mix(store: FileStore) -> None:
    store.put_policy(Policy("other", 1, "x"))
    store.decide(decided(1))
    store.decide(replace(decided(1), run_id="other"))
    rows = store.query("SELECT run_id FROM policy_lineage WHERE status = 'promoted' ORDER BY run_id")
    assert [row["run_id"] for row in rows] == ["other", "run"]
    assert [one.run_id for one in store.decisions()] == ["run", "other"]
    assert len(store.decisions("other")) == 1


def test_the_view_tells_lineage_and_why(store: FileStore) -> None:
    store.commit_update(Update("run", 0, 1, [], [], {"reward/mean": 0.5}, "ckpt/1"))
    store.decide(decided(1, path="promoted/1"))
    store.decide(decided(1, Decision.KEPT, reason="no longer", metrics={}, time_ns=8_000))
    (row,) = store.query("SELECT * EXCLUDE (published) FROM policy_lineage WHERE policy_version = 1")
    assert str(row.pop("decided")) == "1970-01-01T00:00:00.000008"
    assert row.pop("metrics") == '{"success":0.75,"tasks":64.0}'
    assert row == {
        "run_id": "run",
        "policy_version": 1,
        "parent_run": None,
        "parent_version": None,
        "note": "",
        "model": None,
        "status": "promoted",
        "update_index": 0,
        "reward_mean": 0.5,
        "success": 0.75,
        "decided_by": "trainer",
        "reason": "no longer",
        "path": "promoted/1",
    }
    rows = store.query("SELECT path, reason FROM policy_lineage WHERE policy_version = 2")
    assert rows == [{"path": "ckpt/2", "reason": None}]


def test_the_same_decision_again_is_one(store: FileStore) -> None:
    assert store.decide(decided(1))
    assert not store.decide(decided(1))
    assert store.decide(decided(1, time_ns=9))
    assert [one.time_ns for one in store.decisions("run")] == [1, 9]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (decided(9), "version 9 was never published; the newest are: 0, 1, 2, 3, 4"),
        (replace(decided(1), run_id="nobody"), "the newest are: none"),
        (rolled_back(3, 7), "version 7 was never published"),
        (decided(3, Decision.ROLLED_BACK), "to_version is None; a rollback has one"),
        (decided(3, to_version=1), "to_version is 1; a rollback has one, nothing else"),
        (rolled_back(2, 2), "is no earlier version"),
        (decided(1, metrics={"success": float("nan"), "tasks": 1.0}), "a number that is none"),
        (decided(1, metrics={}), "a trainer promotes what it evaluated"),
        (decided(1, metrics={"tasks": 0.0}), "a trainer promotes what it evaluated"),
        (rolled_back(3, 1), "a trainer goes back to the promoted version, 2"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(store: FileStore, bad: PolicyDecision, message: str) -> None:
    store.decide(decided(2))
    with pytest.raises(StoreError, match=message):
        store.decide(bad)
    assert store.decisions() == [decided(2)]


def test_decisions_survive_the_process(store: FileStore, tmp_path: Path) -> None:
    store.decide(decided(1, path="p"))
    store.decide(rolled_back(3, 1))
    before = store.decisions()
    store.close()
    with FileStore(tmp_path / "s.duckdb") as again:
        assert again.decisions() == before == [decided(1, path="p"), rolled_back(3, 1)]


def test_a_trainer_can_not_decide_in_the_name_of_an_admin(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    assert keys.admin is not None
    with HubProcess(tmp_path / "s.duckdb", keys=tmp_path / "keys.json") as hub:
        by_hand = decided(1, decided_by=DecisionAuthor.ADMIN, metrics={})
        with (
            HubClient(hub.url, keys.agent) as agent,
            HubClient(hub.url, keys.evaluator) as evaluator,
            HubClient(hub.url, keys.trainer) as trainer,
            HubClient(hub.url, keys.admin) as admin,
        ):
            trainer.put_policy(Policy("run", 1, "p"))
            for refused in (
                lambda: agent.decide(decided(1)),
                lambda: agent.decisions(),
                lambda: evaluator.decide(decided(1)),
                lambda: trainer.decide(by_hand),
            ):
                with pytest.raises(PermissionDeniedError, match="key"):
                    refused()
            assert admin.decide(by_hand)
            assert trainer.decide(decided(1, time_ns=0))
            first, second = evaluator.decisions("run")
            assert first == by_hand
            assert replace(second, time_ns=1) == decided(1)
            assert second.time_ns > 1
            with pytest.raises(StoreError, match="never published"):
                trainer.decide(decided(2))
            with pytest.raises(StoreError, match="decide"):
                trainer._call("decide", {"decision": {**vars_of(by_hand), "decision": "crowned"}})


def vars_of(decision: PolicyDecision) -> dict[str, Any]:
    return {"run_id": "run", "policy_version": 1, "decided_by": "trainer", "reason": decision.reason}


def test_without_an_admin_key_the_trainers_is_the_admins(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"agent": "a" * 20, "evaluator": "e" * 20, "trainer": "t" * 20}))
    old.chmod(0o600)
    keys = Keys.load(old)
    assert [keys.role_of(letter * 20) for letter in "aetx"] == [Role.AGENT, Role.EVALUATOR, Role.ADMIN, None]
    keys.save(old)
    assert Keys.load(old) == keys
    with_admin = replace(keys, admin="m" * 20)
    roles = [with_admin.role_of(letter * 20) for letter in "aetm"]
    assert roles == [Role.AGENT, Role.EVALUATOR, Role.TRAINER, Role.ADMIN]
