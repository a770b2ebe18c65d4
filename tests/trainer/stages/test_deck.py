"""Which stored rollouts a run takes, and in which order, whatever comes in between."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.stages.recorded import record

from spangrad.errors import ConfigError, StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Update
from spangrad.trainer.config import TrainConfig, build_run
from spangrad.trainer.rollouts.source import Taken
from spangrad.trainer.stages.deck import DEALT, Deck, choose

GROUPS = [((1.0, (3, 9)), (0.0, (3, 8)))] * 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as store:
        yield store


def config_of(folder: Path, **stored: Any) -> TrainConfig:
    raw: Mapping[str, Any] = {
        "run": {"id": "r", "folder": str(folder / "runs"), "seed": 4},
        "rollout": {"groups_per_update": 2},
        "learner": {"objective": "bc"},
        "stored": stored,
    }
    config = build_run(raw, folder, where="here")
    config.folder.mkdir(parents=True, exist_ok=True)
    return config


def deck_of(store: FileStore, config: TrainConfig, notes: list[str] | None = None) -> Deck:
    assert config.stored is not None
    return Deck(store, config, config.stored, on_note=(notes if notes is not None else []).append)


def chosen(store: FileStore, folder: Path, **stored: Any) -> list[str]:
    config = config_of(folder, **stored)
    assert config.stored is not None
    return [name for group in choose(store, config, config.stored) for name in group]


def taken(deck: Deck) -> list[str]:
    return [rollout.rollout_id for rollout in deck.take().rollouts]


def learn(store: FileStore, deck: Deck, index: int, ids: list[str]) -> None:
    """What a run does of an update behind `take`."""
    update = Update("r", index, index + 1, ids, [], deck.meanwhile(Taken([])), "c", consumes=False)
    store.commit_update(update)
    deck.advance(update_index=index + 1, policy_version=index + 1)


def test_every_group_is_dealt_once_a_pass_and_each_pass_has_its_order(store, tmp_path):
    ids = record(store, GROUPS)
    deck = deck_of(store, config_of(tmp_path, passes=2))
    orders = []
    for _ in range(2):
        assert deck.ended() is None
        dealt = [taken(deck) for _ in range(3)]
        assert [len(part) for part in dealt] == [4, 4, 2]  # of 5 groups of 2; none crosses the pass
        orders.append([name for part in dealt for name in part])
        assert sorted(orders[-1]) == sorted(ids)
        assert all(
            first[:-3] == second[:-3]
            for part in dealt
            for first, second in zip(part[::2], part[1::2], strict=True)
        )
    assert orders[0] != orders[1]
    assert deck.ended() == "stored.passes: 2 over 5 groups of stored rollouts"
    assert deck.meanwhile(Taken([])) == {
        DEALT: 10,
        "stored/groups": 5,
        "stored/rollouts": 10,
        "stored/passes": 2,
    }


def test_a_restart_goes_on_behind_the_last_update_with_the_same_groups(store, tmp_path):
    record(store, GROUPS)
    config = config_of(tmp_path)
    deck = deck_of(store, config)
    whole = [taken(deck) for _ in range(7)]
    deck = deck_of(store, config)
    learn(store, deck, 0, taken(deck))
    assert taken(deck) == whole[1]  # and is passed by
    learn(store, deck, 1, taken(deck))
    taken(deck)  # whoever took this dies
    deck = deck_of(store, config)
    assert [taken(deck) for _ in range(4)] == whole[3:]


def test_what_comes_to_the_store_later_is_not_taken_and_what_is_gone_is_an_error(store, tmp_path):
    ids = record(store, GROUPS)
    config, notes = config_of(tmp_path), list[str]()
    deck_of(store, config, notes)
    assert notes == [
        f"run 'r' trains 10 stored rollouts in 5 groups ({config.folder / 'stored.json'} names them)"
    ]
    record(store, GROUPS, run_id="later")
    deck = deck_of(store, config, notes)
    assert len(notes) == 1
    assert sorted(name for _ in range(3) for name in taken(deck)) == sorted(ids)
    with store.database.transaction() as con:
        con.execute("DELETE FROM rollouts WHERE rollout_id = ?", [ids[0]])
    deck = deck_of(store, config)
    with pytest.raises(StoreError, match=f"1 of the rollouts .* are no longer in the store, '{ids[0]}'"):
        for _ in range(3):
            taken(deck)


def test_a_choice_that_was_not_written_whole_is_made_again(store, tmp_path):
    record(store, GROUPS)
    config = config_of(tmp_path)
    (config.folder / "stored.part").write_text('{"settings": {')  # whoever wrote this died
    assert len(taken(deck_of(store, config))) == 4
    assert len(json.loads((config.folder / "stored.json").read_text())["groups"]) == 5


def test_the_choice_cant_change_in_the_middle_of_a_run_but_passes_can(store, tmp_path):
    record(store, GROUPS)
    deck_of(store, config_of(tmp_path, passes=1))
    deck_of(store, config_of(tmp_path, passes=2))
    with pytest.raises(
        ConfigError, match=r"begun with stored.min_reward = None, now it is 1.0; choose another"
    ):
        deck_of(store, config_of(tmp_path, min_reward=1.0))


def test_a_group_is_left_until_all_were_dealt_in_vain(store, tmp_path):
    record(store, GROUPS)
    deck = deck_of(store, config_of(tmp_path))
    assert deck.has_others
    taken(deck), taken(deck)
    assert deck.has_others
    ids = taken(deck)
    assert not deck.has_others
    learn(store, deck, 0, ids)
    assert deck.has_others


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ({}, {"a-expert-g0-m0", "a-expert-g0-m1", "b-train-g0-m0", "b-train-g0-m1"}),
        ({"splits": ["expert"]}, {"a-expert-g0-m0", "a-expert-g0-m1"}),
        ({"runs": ["b"]}, {"b-train-g0-m0", "b-train-g0-m1"}),
        ({"min_reward": 0.5}, {"a-expert-g0-m0", "b-train-g0-m0"}),
        ({"min_grade": "exact"}, {"a-expert-g0-m0", "a-expert-g0-m1", "b-train-g0-m0", "b-train-g0-m1"}),
        (
            {"where": "rewards['reward'] < $most", "parameters": {"most": 0.5}},
            {"a-expert-g0-m1", "b-train-g0-m1"},
        ),
        (
            {"where": "run_id = $run OR true", "parameters": {"run": "a"}, "splits": ["train"]},
            {"b-train-g0-m0", "b-train-g0-m1"},
        ),
    ],
)
def test_rollouts_fit_all_that_is_said_and_never_measure(store, tmp_path, stored, wanted):
    record(store, GROUPS[:1], run_id="a")
    record(store, [*GROUPS[:1], ((1.0, (3, 4)),)], run_id="b", split="train", failed=1)
    record(store, GROUPS[:1], run_id="c", split="eval-between")
    assert set(chosen(store, tmp_path, **stored)) == wanted


def test_a_grade_that_no_call_has_a_condition_that_is_none_and_nothing_that_fits_are_clear_errors(
    store, tmp_path
):
    record(store, GROUPS[:1])
    with store.database.transaction() as con:
        con.execute("UPDATE calls SET grade = 'text' WHERE step_name IS NULL")
    with pytest.raises(
        ConfigError,
        match=r"no rollout in the store fits \[stored\] of run 'r'; there are 2 succeeded of split expert",
    ):
        chosen(store, tmp_path, min_grade="ids")
    assert len(chosen(store, tmp_path, min_grade="text")) == 2
    for where, parameters in (
        ("nonsense = 1", {}),
        ("calls < $most", {}),
        ("calls < 9", {"most": 1}),
        ("1; DROP TABLE spans", {}),
    ):
        with pytest.raises(ConfigError, match="is no condition over the view outcomes"):
            chosen(store, tmp_path, where=where, parameters=parameters)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"splits": ["eval-between"]}, "measure policies and train none"),
        ({"passes": 0}, "stored.passes is 0, expected 1 or more"),
        ({"parameters": {"a": 1}}, "no effect without stored.where"),
        ({"where": "calls < $own_a", "parameters": {"own_a": 1}}, "does not begin with 'own_'"),
        ({"min_grade": "unusable"}, "expected one of 'exact', 'ids', 'text', 'any'"),
        ({"min_reward": float("nan")}, "a finite number"),
        ({"split": ["expert"]}, "did you mean 'splits'"),
    ],
)
def test_settings_that_choose_nothing_are_refused(tmp_path, stored, said):
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path, **stored)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"learner": {"objective": "ppo"}},
            r"'ppo' compares the policy with the one that sampled.*'bc', 'awr'",
        ),
        ({"agent": {"function": "a.py:run"}}, r"agent.function has no effect with \[stored\]"),
        ({"rollout": {"group_size": 4}}, r"rollout.group_size has no effect with \[stored\]"),
        ({"eval": {"every": 2}}, r"eval.every has no effect with \[stored\]"),
        ({"serving": {"engine_url": "http://h:1"}}, r"serving.engine_url has no effect with \[stored\]"),
        ({"monitor": {"spread": 0.1}}, r"monitor.spread has no effect with \[stored\]"),
        ({"monitor": {"verifier": "v"}}, r"monitor.verifier has no effect with \[stored\]"),
        ({"production": {}}, r"\[stored\] and \[production\] both say"),
    ],
)
def test_settings_of_others_have_no_effect_beside_stored_rollouts(tmp_path, sections, said):
    raw = {"run": {"id": "r"}, "learner": {"objective": "bc"}, "stored": {}, **sections}
    with pytest.raises(ConfigError, match=said):
        build_run(raw, tmp_path, where="here")


def test_the_seed_says_the_order(store, tmp_path):
    record(store, GROUPS)
    config = config_of(tmp_path)
    other = replace(config, run=replace(config.run, seed=5))
    first = taken(deck_of(store, config))
    assert first == taken(deck_of(store, config)) != taken(deck_of(store, other))
