"""The section `[curriculum]`: the schedule of turns, ranges, and what would have no effect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.errors import ConfigError
from spangrad.trainer.config import load_config
from spangrad.trainer.curriculum.curriculum_config import CurriculumConfig, SamplingConfig, TurnSchedule

RUN = """
[run]
id = "r"
[agent]
function = "agent.py:run"
tasks = "{tasks}"
reward = "reward.py:reward"
[curriculum]
{curriculum}
"""


def load(tmp_path, curriculum, tasks="tasks.jsonl", overrides=()):
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(tasks=tasks, curriculum=curriculum))
    return load_config(file, overrides).curriculum


def test_turns_are_raised_step_by_step_up_to_the_limit(tmp_path):
    # ScalingInter-RL's SearchQA: 5, 8, 10 for 100 updates each, here with equal steps: 5, 8, 10 (not 11).
    curriculum = load(tmp_path, "turns = {start = 5, step = 3, every = 100, limit = 10}")
    asked = (0, 99, 100, 199, 200, 10_000)
    assert [curriculum.turns_at(updates) for updates in asked] == [5, 5, 8, 8, 10, 10]
    assert curriculum.most_turns == 10 and curriculum.turns_reply == "I have no turns left."


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 30), st.integers(1, 60), st.integers(0, 5000))
def test_the_formula(start, step, every, more, updates):
    schedule = TurnSchedule(start=start, step=step, every=every, limit=start + more)
    assert schedule.turns(updates) == min(start + more, start + step * (updates // every))
    assert schedule.turns(updates) <= schedule.turns(updates + 1) <= schedule.most


def test_turns_may_stay_as_they_are_and_nothing_is_bound_by_default(tmp_path):
    fixed = load(tmp_path, "turns = {start = 4}")
    assert {fixed.turns_at(updates) for updates in range(50)} == {4} and fixed.most_turns == 4
    default = load(tmp_path, "")
    assert default == CurriculumConfig()
    assert (default.turns_at(3), default.most_turns, default.turns_reply) == (None, None, None)
    assert load(tmp_path, "turns = {start = 4, beyond = 'error'}").turns_reply is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("turns = {}", "'start' is missing"),
        ("turns = {start = 0}", "curriculum.turns.start is 0, expected 1 to 1000000"),
        ("turns = {start = 4, step = -1}", "curriculum.turns.step is -1, expected 0 or more"),
        ("turns = {start = 4, step = 2}", "step is 2 and curriculum.turns.every None; a step needs"),
        ("turns = {start = 4, step = 2, every = 5}", "step is 2 and curriculum.turns.limit None"),
        ("turns = {start = 4, every = 5}", "step is 0 and curriculum.turns.every 5"),
        ("turns = {start = 4, limit = 9}", "step is 0 and curriculum.turns.limit 9"),
        ("turns = {start = 4, step = 1, every = 0, limit = 9}", "turns.every is 0, expected 1 or more"),
        ("turns = {start = 4, step = 1, every = 1, limit = 4}", "turns.limit is 4, expected above start, 4"),
        ("turns = {start = 4, beyond = 'stop'}", "'stop', expected one of 'reply', 'error'"),
        ("turns = {start = 4, reply = ' '}", "curriculum.turns.reply is ' ', expected a text"),
        (
            "turns = {start = 4, beyond = 'error', reply = 'x'}",
            "reply has no effect with curriculum.turns.be",
        ),
        ("sampling = {band = [0.8, 0.2]}", "expected two numbers, 0 to 1, the lower one first"),
        ("sampling = {band = [0.5]}", "expected two numbers, 0 to 1"),
        ("sampling = {band = [0.0, 1.5]}", "expected two numbers, 0 to 1"),
        ("sampling = {band = [0.0, 1.0]}", "band is all rates"),
        ("sampling = {exploration = 0.0}", "exploration is 0.0, expected above 0 and below 1"),
        ("sampling = {exploration = 1.0}", "exploration is 1.0, expected above 0 and below 1"),
        ("sampling = {focus = 0.0}", "focus is 0.0, expected more than 0"),
        ("sampling = {half_life = 0.0}", "half_life is 0.0, expected more than 0"),
        ("sampling = {success_at = nan}", "success_at is nan, expected a finite number"),
        ("sampling = {pool = 100}", "pool has no effect: 'tasks.jsonl' is a file, all of it is the pool"),
        ("sampler = {}", "unknown key 'sampler'; did you mean 'sampling'?"),
    ],
)
def test_what_can_not_be_or_has_no_effect_is_refused(tmp_path, line, says):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, line)
    assert says in str(caught.value)


def test_a_function_needs_a_pool_of_at_least_an_updates_groups(tmp_path):
    with pytest.raises(ConfigError, match=r"pool is missing: 'tasks\.py:tasks' is a function"):
        load(tmp_path, "sampling = {}", "tasks.py:tasks")
    with pytest.raises(ConfigError, match=r"pool is 15, expected rollout\.groups_per_update, 16, or"):
        load(tmp_path, "sampling = {pool = 15}", "tasks.py:tasks")
    assert load(tmp_path, "sampling = {pool = 16}", "tasks.py:tasks").sampling == SamplingConfig(pool=16)


def test_a_table_of_the_section_can_be_left_out_by_an_override(tmp_path):
    lines = "turns = {start = 4}\nsampling = {}"
    found = load(tmp_path, lines, overrides=["curriculum.turns=none", "curriculum.sampling.focus=3"])
    assert found == CurriculumConfig(sampling=SamplingConfig(focus=3.0))
