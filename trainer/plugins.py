"""Load the task list that a config names: a JSONL file, or a function."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from spangrad.errors import ConfigError
from spangrad.user_code import load_callable


def load_tasks(spec: str, split: str, count: int, *, seed: int, base_dir: str = ".") -> list[dict[str, Any]]:
    """`count` tasks of a split, in a fixed order for a seed.

    A JSONL file is shuffled by the seed and repeated if it is shorter than `count`
    (held-out splits are not repeated). Lines without `split` count as `train`.

    Raises:
        ConfigError: No task of that split, or a task without `task_id`.
    """
    if spec.endswith(".jsonl"):
        tasks = _tasks_from_file(Path(base_dir, spec), split)
        random.Random(f"{seed}-{split}").shuffle(tasks)
        if split == "train" and tasks:
            tasks = [tasks[i % len(tasks)] for i in range(count)]
        tasks = tasks[:count]
    else:
        tasks = list(load_callable(spec, base_dir)(split, count, seed))
    return _checked(tasks, spec, split)


def load_pool(
    spec: str, count: int | None, *, seed: int, least: int, base_dir: str = "."
) -> list[dict[str, Any]]:
    """All tasks that training draws from: those of a JSONL file, or `count` of a function, each once.

    Raises:
        ConfigError: There are fewer than `least`, a task has no `task_id`, or two have the same.
    """
    if spec.endswith(".jsonl"):
        tasks = _tasks_from_file(Path(base_dir, spec), "train")
    else:
        tasks = list(load_callable(spec, base_dir)("train", count, seed))
    ids = Counter(task["task_id"] for task in _checked(tasks, spec, "train"))
    twice = next((task_id for task_id, times in ids.items() if times > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{spec!r}: {ids[twice]} tasks have the id {twice!r}; success is remembered by id, so each task"
            " needs its own"
        )
    if len(tasks) < least:
        raise ConfigError(
            f"{spec!r} has {len(tasks)} tasks of split 'train' for {least} groups an update, each of another"
            " task; lower rollout.groups_per_update, or leave curriculum.sampling out"
        )
    return tasks


def _checked(tasks: list[dict[str, Any]], spec: str, split: str) -> list[dict[str, Any]]:
    if not tasks:
        raise ConfigError(f"{spec!r} has no task of split {split!r}")
    for task in tasks:
        if not isinstance(task, dict) or not isinstance(task.get("task_id"), str):
            raise ConfigError(f"{spec!r}: a task must be an object with a text 'task_id', got {task!r:.200}")
    return tasks


def _tasks_from_file(file: Path, split: str) -> list[dict[str, Any]]:
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"tasks file {str(file)!r} can't be read: {error.strerror}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{str(file)!r} line {number} is not JSON: {error}") from error
        if isinstance(task, dict) and task.get("split", "train") == split:
            tasks.append(task)
    return tasks
