import pytest

from spangrad.errors import ConfigError
from spangrad.trainer.config import load_config

MINIMAL = """
[run]
id = "r"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "reward.py:reward"
"""


def write(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def test_a_minimal_file_gets_defaults_and_its_own_folder(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert config.rollout.group_size == 8
    assert config.base_dir == str(tmp_path)
    assert config.folder == tmp_path / ".spangrad" / "runs" / "r"


def test_an_unknown_key_names_the_nearest_one(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'groupsize'; did you mean 'group_size'\?"):
        load_config(write(tmp_path, MINIMAL + "[rollout]\ngroupsize = 4\n"))


def test_an_unknown_section_names_the_nearest_one(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'leaner'; did you mean 'learner'\?"):
        load_config(write(tmp_path, MINIMAL + "[leaner]\nlr = 1e-4\n"))


def test_a_missing_section_is_named(tmp_path):
    with pytest.raises(ConfigError, match="'agent' is missing"):
        load_config(write(tmp_path, '[run]\nid = "r"\n'))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[rollout]\ngroup_size = 1\n", "rollout.group_size is 1, expected 2 or more"),
        ('[rollout]\ngroup_size = "8"\n', "group_size is '8', expected int"),
        ("[rollout]\ngroup_size = true\n", "group_size is True, expected int"),
        ("[hub]\nurl = 3\n", "url is 3, expected str"),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_expected(tmp_path, line, says):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL + line))
    assert says in str(caught.value)


def test_overrides_win_and_take_toml_or_plain_text(tmp_path):
    config = load_config(
        write(tmp_path, MINIMAL), ["rollout.group_size=4", "run.id=other", "rollout.temperature=1"]
    )
    assert (config.rollout.group_size, config.run.id, config.rollout.temperature) == (4, "other", 1.0)


def test_an_override_with_an_unknown_key_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'temprature'; did you mean 'temperature'"):
        load_config(write(tmp_path, MINIMAL), ["rollout.temprature=1"])


def test_a_file_that_is_not_toml_or_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(write(tmp_path, "[run"))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "none.toml")
