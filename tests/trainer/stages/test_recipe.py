"""What a file with stages says, and what it is refused for."""

from pathlib import Path

import pytest

from spangrad.errors import ConfigError
from spangrad.trainer.config import load_config
from spangrad.trainer.stages.recipe import Recipe, is_recipe, load_recipe

SHARED = """
[run]
id = "calc"
seed = 3
[hub]
url = "store.duckdb"
[serving]
model = "policy"
gateway_url = "http://127.0.0.1:9"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "agent.py:reward"
[rollout]
groups_per_update = 4
group_size = 3
"""
CLONE = """
[[stage]]
name = "clone"
stored = {splits = ["expert"], min_reward = 1.0}
run = {updates = 7}
learner = {objective = "bc", lr = 1e-3}
"""
RL = """
[[stage]]
name = "rl"
run = {updates = 5}
credit = {step = "gigpo"}
"""


def load(folder: Path, text: str, *changes: str) -> Recipe:
    file = folder / "recipe.toml"
    file.write_text(text)
    return load_recipe(file, changes)


def test_a_stage_is_what_all_share_with_its_own_settings_on_top(tmp_path):
    clone, rl = load(tmp_path, SHARED + CLONE + RL).stages
    assert (clone.name, clone.config.run.id, clone.config.run.updates) == ("clone", "calc.clone", 7)
    assert (rl.name, rl.config.run.id, rl.config.run.updates) == ("rl", "calc.rl", 5)
    assert clone.config.run.seed == rl.config.run.seed == 3
    assert (clone.config.learner.objective, rl.config.learner.objective) == ("bc", "ppo")
    assert (clone.config.learner.lr, rl.config.credit.step) == (1e-3, "gigpo")
    assert rl.config.folder == tmp_path / ".spangrad" / "runs" / "calc.rl"


def test_a_stage_on_stored_rollouts_takes_nothing_that_is_for_making_some(tmp_path):
    clone, rl = load(tmp_path, SHARED + CLONE + RL).stages
    assert (clone.config.agent.function, rl.config.agent.function) == ("", "agent.py:run")
    assert (clone.config.rollout.group_size, rl.config.rollout.group_size) == (8, 3)
    assert clone.config.rollout.groups_per_update == rl.config.rollout.groups_per_update == 4
    assert "127.0.0.1:9" not in clone.config.serving.gateway_url
    assert clone.config.serving.model == "policy"
    assert clone.config.stored is not None and rl.config.stored is None


def test_stored_rollouts_may_be_said_for_several_stages(tmp_path):
    more = "\n[stored]\nsplits = ['expert']\nmin_reward = 0.5\n"
    world = "\n[[stage]]\nname = 'world'\nstored = {min_reward = 'none'}\nlearner = {objective = 'bc'}\n"
    again = "\n[[stage]]\nname = 'again'\nstored = {}\nlearner = {objective = 'bc'}\n"
    stages = load(tmp_path, SHARED + more + world + again + RL).stages
    found = [stage.config.stored for stage in stages]
    assert [None if one is None else (one.splits, one.min_reward) for one in found] == [
        (("expert",), None),
        (("expert",), 0.5),
        None,
    ]


def test_an_override_is_for_all_stages_or_for_one(tmp_path):
    changes = ("run.seed=9", "rl.run.updates=2", "clone.learner.lr=0.5", "rl.stop.metric=reward/mean",
               "rl.stop.patience=3")  # fmt: skip
    clone, rl = load(tmp_path, SHARED + CLONE + RL, *changes).stages
    assert (clone.config.run.seed, rl.config.run.seed) == (9, 9)
    assert (clone.config.run.updates, rl.config.run.updates) == (7, 2)
    assert (clone.config.learner.lr, rl.config.stop.metric) == (0.5, "reward/mean")


def test_what_a_recipe_is_and_what_not(tmp_path):
    load(tmp_path, SHARED + RL)
    (tmp_path / "run.toml").write_text(SHARED)
    assert is_recipe(tmp_path / "recipe.toml")
    assert not is_recipe(tmp_path / "run.toml") and not is_recipe(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="which `spangrad train` alone takes"):
        load_config(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        (SHARED + CLONE + CLONE, (), "stage 2 has the name 'clone' of another stage"),
        (SHARED + CLONE.replace('"clone"', '"agent"'), (), "stage 1 has the name 'agent' of a section"),
        (SHARED + CLONE.replace('"clone"', '"clone-2"'), (), "the name of stage 1 is 'clone-2'"),
        (SHARED + CLONE.replace('"clone"', "3"), (), "the name of stage 1 is 3"),
        (SHARED + "[[stage]]\nrun = {updates = 1}\n", (), "the name of stage 1 is None"),
        (SHARED + "[stage]\nname = 'a'\n", (), r"no list of tables; write \[\[stage\]\]"),
        ("[[stage]]\nname = 'a'\n", (), "run.id is missing"),
        (SHARED + RL, ("rl.run.id=x",), "stage 'rl': run.id has no effect"),
        (SHARED + CLONE + RL, ("rl.serving.model=x",), "stage 'rl': serving.model has no effect"),
        (SHARED + RL, ("learner.model_path=x",), "learner.model_path has no effect in a recipe"),
        (SHARED + RL, ("rl.production.idle_s=9",), "no stage of a recipe"),
        (SHARED + RL, ("rl.learner.objektive=bc",), "'rl': learner: unknown key 'objektive'; did you mean"),
        (SHARED + RL, ("rl.lerner.lr=1",), "stage 'rl': unknown section 'lerner'"),
        (SHARED + CLONE, (), "serving.gateway_url has an effect in no stage"),
        (SHARED + CLONE, ("serving={}",), "agent.function has an effect in no stage"),
        (SHARED + RL, ("stored.passes=1",), "stored.passes has an effect in no stage"),
        (SHARED + RL, ("run.updates=4",), "run.updates has an effect in no stage"),
        (SHARED + CLONE + RL, ("clone.rollout.group_size=2",), "'clone': .*group_size has no effect with"),
        (SHARED + CLONE + RL, ("clone.agent.workers=2",), "'clone': .*agent.workers has no effect with"),
        (SHARED + CLONE + RL, ("clone.learner.objective=ppo",), "stage 'clone': .*compares the policy with"),
        (SHARED + CLONE + RL, ("clone.stored.splits=['eval']",), "stage 'clone': stored: .* train none"),
        (SHARED + CLONE + RL, ("rl.serving.transfer=lora", "rl.learner.lora_rank=2"), "transfer 'lora'"),
        (SHARED + CLONE + RL, ("stop.patience=3",), "stop.patience = 3 has no effect without stop.metric"),
    ],
)  # fmt: skip
def test_what_no_stage_could_do_is_refused_with_its_reason(tmp_path, text, changes, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, text, *changes)


def test_a_stage_without_a_source_lacks_its_agent(tmp_path):
    alone = '[run]\nid = "r"\n[[stage]]\nname = "a"\nlearner = {objective = "bc"}\n'
    with pytest.raises(ConfigError, match=r"stage 'a': section 'agent' is missing; .*stored = \{\}"):
        load(tmp_path, alone)


def test_an_unknown_stage_names_the_nearest(tmp_path):
    recipe = load(tmp_path, SHARED + CLONE + RL)
    with pytest.raises(ConfigError, match=r"--stage 'clon': the recipe has clone, rl.*'clone'"):
        recipe.stage("clon")
    assert recipe.before(recipe.stages[0]) is None
    assert recipe.before(recipe.stages[1]) == recipe.stages[0]
