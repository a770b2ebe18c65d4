import json

import pytest

from spangrad.errors import ConfigError
from spangrad.trainer.plugins import load_tasks
from spangrad.user_code import is_async, load_callable


def test_a_function_is_loaded_from_a_file_with_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_plugin.py").write_text("VALUE = 41\n")
    (tmp_path / "plugin_file.py").write_text(
        "import neighbour_of_plugin\n"
        "def run(task):\n    return neighbour_of_plugin.VALUE + 1\n"
        "async def arun(task):\n    return 1\n"
    )
    assert load_callable("plugin_file.py:run", str(tmp_path))({}) == 42
    assert is_async(load_callable("plugin_file.py:arun", str(tmp_path)))
    assert not is_async(load_callable("plugin_file.py:run", str(tmp_path)))


def test_a_function_is_loaded_from_a_module():
    assert load_callable("json:dumps") is json.dumps


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no_colon", "names no function"),
        ("nowhere.py:run", "does not exist"),
        ("json:nothing", "has no function 'nothing'"),
        ("no_such_module_at_all:run", "can't be imported"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec, says):
    with pytest.raises(ConfigError, match=says):
        load_callable(spec)


def test_a_task_file_is_split_shuffled_by_seed_and_repeated_for_training_only(tmp_path):
    lines = [{"task_id": f"t{i}", "split": "eval" if i < 2 else "train"} for i in range(6)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    train = load_tasks("tasks.jsonl", "train", 10, seed=1, base_dir=str(tmp_path))
    assert len(train) == 10 and {t["task_id"] for t in train} == {"t2", "t3", "t4", "t5"}
    assert train == load_tasks("tasks.jsonl", "train", 10, seed=1, base_dir=str(tmp_path))
    assert train != load_tasks("tasks.jsonl", "train", 10, seed=2, base_dir=str(tmp_path))
    assert len(load_tasks("tasks.jsonl", "eval", 10, seed=1, base_dir=str(tmp_path))) == 2


def test_a_task_without_an_id_or_a_broken_line_is_named(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(ConfigError, match="text 'task_id'"):
        load_tasks("tasks.jsonl", "train", 1, seed=0, base_dir=str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n{"task')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        load_tasks("tasks.jsonl", "train", 1, seed=0, base_dir=str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n')
    with pytest.raises(ConfigError, match="no task of split 'eval'"):
        load_tasks("tasks.jsonl", "eval", 1, seed=0, base_dir=str(tmp_path))
