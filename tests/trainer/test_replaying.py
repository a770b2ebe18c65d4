"""An update made again from the store: the same, whatever came later; and whatever was changed is found."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.building import span
from tests.trainer.made_updates import GROUPS, Training, config_of, spans_of

from spangrad.adapters import account_unread
from spangrad.errors import StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.trainer.replaying import Replay, replay

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {"credit": {"step": "gigpo", "gamma": 0.9}},
    "minibatches": {
        "learner": {"minibatches_per_update": 2, "epochs_per_update": 2, "kl_coef": 0.1, "entropy_coef": 0.01}
    },
    "corrections": {"learner": {"correction": {"proximal": True, "token_tis": float("inf"), "m2_max": 0.5}}},
    "critic": {
        "credit": {"episode": "none", "step": "gae", "gamma": 0.9},
        "learner": {"critic": {"lr": 0.1, "steps": 2}},
    },
    "running baseline": {"credit": {"episode": "running_baseline", "baseline_key": "task_id"}},
    "adapters": {"learner": {"lora_rank": 2}},
    "preferences": {"learner": {"objective": "dpo"}},
}


@pytest.fixture
def start(tmp_path: Path, policy: Path) -> Iterator[Callable[..., Training]]:
    begun: list[Training] = []

    def make(**sections: Any) -> Training:
        begun.append(Training(config_of(tmp_path, policy, **sections)))
        return begun[-1]

    yield make
    for training in begun:
        training.close()


def again(training: Training, index: int, **options: Any) -> Replay:
    """The replay of a committed update, as the store has it."""
    (update,) = training.store.updates("r", update_index=index)
    return replay(training.store, update, **options)


def differing(found: Replay) -> set[str]:
    return {check.what for check in found.checks if not check.is_same}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_is_made_again_to_the_last_bit(start, name):
    training = start(**SETTINGS[name])
    for _ in range(2):
        training.update(training.collect())
    for index in (0, 1):  # from the model's folder, and from a checkpoint
        found = again(training, index)
        assert found.has_loss and not found.notes
        assert differing(found) == set()
        numbers = {check.what: check for check in found.checks}
        assert {
            "loss/total",
            "grad/norm",
            "data/trained_tokens",
            "advantage",
            "loss_weight",
        } <= numbers.keys()
        assert numbers["loss/total"].recorded == numbers["loss/total"].replayed != 0
        assert numbers["grad/norm"].recorded == numbers["grad/norm"].replayed != 0
        assert numbers["calls read"].recorded == 10


def test_what_came_to_the_store_later_changes_nothing(start):
    training = start(**SETTINGS["running baseline"])
    for _ in range(2):
        training.update(training.collect(failed=1))
    store = training.store
    training.reward("u1-g0-m0", 9.0)
    training.reward("u1-g0-m1", 9.0, time_ns=1)  # given later, of a time before all others
    training.reward("u0-g0-m0", 9.0)  # of what the running baseline rests on
    (first, second) = store.rollouts(rollout_ids=["u1-g0-m0", "u1-g1-m1"])
    later = spans_of(first, 1, (7, 7, 7, 7), "9999")
    failed = spans_of(second, 1, (7, 7, 7, 7), "9998")
    renamed = span("late", trace="2000", parent="c0", attributes=later[1].attributes)
    store.put_otlp(encode_request([*later, *failed, renamed]))
    account_unread(store)
    training.update(training.collect())
    found = again(training, 1)
    assert found.has_loss and differing(found) == set()


def test_a_reward_that_was_changed_is_found(start):
    training = start()
    training.update(training.collect())
    training.close()
    with FileStore(training.path) as store, store.database.transaction() as con:
        con.execute("UPDATE rewards SET value = 0.9 WHERE rollout_id = 'u0-g0-m1'")
    training.store = FileStore(training.path)
    found = again(training, 0)
    assert {"loss/total", "grad/norm", "advantage", "reward/mean"} <= differing(found)


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("UPDATE update_samples SET advantage = -advantage WHERE rollout_id = 'u0-g0-m0'", {"advantage"}),
        ("UPDATE update_samples SET loss_weight = 2 * loss_weight", {"loss_weight"}),
        ("UPDATE metrics SET value = value * 1.01 WHERE name = 'loss/total'", {"loss/total"}),
        ("UPDATE metrics SET value = value + 1 WHERE name = 'data/trained_tokens'", {"data/trained_tokens"}),
        ("INSERT INTO metrics VALUES ('r', 0, 'dropped/made_up', 1)", {"dropped/made_up"}),
        ("DELETE FROM update_samples WHERE rollout_id = 'u0-g1-m1' AND trained_tokens = 4", None),
        ("DELETE FROM rewards WHERE rollout_id = 'u0-g0-m2'", None),
    ],
)
def test_a_record_that_was_changed_is_found(start, sql, what):
    training = start()
    training.update(training.collect())
    training.close()
    with FileStore(training.path) as store, store.database.transaction() as con:
        con.execute(sql)
    training.store = FileStore(training.path)
    found = again(training, 0)
    assert not found.is_same
    if what is not None:
        assert differing(found) == what
        assert [check.what for check in found.checks if not check.is_same and check.call is None] == [
            name for name in what if "/" in name
        ]


def test_without_the_weights_before_it_credit_and_rows_are_made_again_and_that_is_said(start):
    training = start()
    for _ in range(2):
        training.update(training.collect())
    parent = training.updates[1].parent
    assert parent is not None
    shutil.rmtree(parent)
    found = again(training, 1)
    assert found.is_same and not found.has_loss
    assert {"advantage", "loss_weight", "trained_tokens"} <= {check.what for check in found.checks}
    assert "loss/total" not in {check.what for check in found.checks}
    (line,) = found.notes
    assert parent in line and "run.keep_checkpoints" in line
    training.close()
    with FileStore(training.path) as store, store.database.transaction() as con:
        con.execute("UPDATE update_samples SET advantage = 0.5 WHERE rollout_id = 'u1-g0-m0'")
    training.store = FileStore(training.path)
    assert differing(again(training, 1)) == {"advantage"}


@pytest.mark.parametrize(
    ("name", "compared", "says"),
    [
        ("corrections", {"advantage"}, "learner.correction"),
        ("critic", set(), "what the critic said"),
    ],
)
def test_what_rests_on_the_weights_is_not_said_to_be_equal_without_them(start, name, compared, says):
    training = start(**SETTINGS[name])
    for _ in range(2):
        training.update(training.collect())
    shutil.rmtree(str(training.updates[1].parent))
    found = again(training, 1)
    whats = {check.what for check in found.checks}
    assert compared <= whats and not whats & {"trained_tokens", "loss_weight", "data/trained_tokens"}
    assert says in " ".join(found.notes) and not found.has_loss


def test_a_rollout_that_is_gone_and_an_update_of_an_older_spangrad_are_one_clear_error(start):
    training = start()
    update = training.update(training.collect())
    with pytest.raises(StoreError, match="update 0 of run 'r' was made by an older spangrad"):
        replay(training.store, dataclasses.replace(update, config=None))
    with pytest.raises(
        StoreError, match="1 of the 6 rollouts of update 0 are no longer in the store, 'gone'"
    ):
        replay(training.store, dataclasses.replace(update, rollout_ids=[*update.rollout_ids, "gone"]))


def test_what_an_update_keeps_of_its_config_holds_no_value_of_the_agents_environment(start):
    training = start()
    update = training.update(training.collect(GROUPS[:1]))
    assert update.config is not None and update.config["agent"]["env"] == {}
    assert "hidden" not in str(update.config)
