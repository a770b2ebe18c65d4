"""What the agents of an update did, in numbers: `behavior/*`.

Knows rollouts and their calls. Does not know the store, credit or what came before: that is compared by the
monitors. Of calls only those count in which the trained policy acted, of rollouts those that have one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from spangrad.adapters.call_tree import in_order
from spangrad.adapters.model_call import ModelCall
from spangrad.credit.actions import action_of
from spangrad.credit.transitions import acts
from spangrad.store.records import Rollout
from spangrad.trainer.monitoring.written_paths import paths_in_code, written_paths


def behavior_metrics(
    calls: Sequence[ModelCall], rollouts: Sequence[Rollout], test_files: Sequence[str]
) -> dict[str, float]:
    """Numbers of the rollouts of an update; those that nothing is known of are left out.

    Args:
        calls: Calls of these rollouts, others are left out.
        rollouts: They say which task each is of.
        test_files: Patterns of files, as `monitor.test_files`.
    """
    acting = acting_by_rollout(calls, rollouts)
    if not acting:
        return {}
    lengths = np.array([len(mine) for mine in acting.values()], dtype=np.float64)
    edits = [any(True for _ in edited_test_files(mine, test_files)) for mine in acting.values()]
    metrics = {
        "behavior/steps_mean": float(lengths.mean()),
        "behavior/steps_median": float(np.median(lengths)),
        "behavior/steps_low": float(np.quantile(lengths, 0.25, method="lower")),
        "behavior/test_edits": sum(edits) / len(edits),
    }
    alike = share_alike(first_steps_of(acting, rollouts))
    return metrics if alike is None else metrics | {"behavior/first_step_alike": alike}


def acting_by_rollout(calls: Sequence[ModelCall], rollouts: Sequence[Rollout]) -> dict[str, list[ModelCall]]:
    """Calls in which the policy acted, in order, by rollout; rollouts without one are left out."""
    known = {rollout.rollout_id for rollout in rollouts}
    found: dict[str, list[ModelCall]] = {}
    for call in in_order(calls):
        if call.rollout_id in known and acts(call):
            found.setdefault(call.rollout_id, []).append(call)
    return found


def first_steps_of(
    acting: Mapping[str, Sequence[ModelCall]], rollouts: Sequence[Rollout]
) -> list[tuple[str, str]]:
    """Task and first reply (its hash) of each rollout of which both are known."""
    tasks = {rollout.rollout_id: rollout.task_id for rollout in rollouts}
    firsts = [(tasks[rollout_id], action_of(mine[0])) for rollout_id, mine in acting.items()]
    return [(task, action) for task, action in firsts if task is not None and action is not None]


def share_alike(first_steps: Sequence[tuple[str, str]]) -> float | None:
    """Share of pairs of rollouts of different tasks that begin with the same reply.

        sum_a (n_a^2 - sum_t n_ta^2) / (n^2 - sum_t n_t^2)

    n rollouts, n_a of them begin with reply a, n_t are of task t, n_ta both. None: there are no two tasks.
    """
    by_task = Counter(task for task, _ in first_steps)
    by_action = Counter(action for _, action in first_steps)
    by_both = Counter(first_steps)
    pairs = len(first_steps) ** 2 - sum(count**2 for count in by_task.values())
    alike = sum(count**2 for count in by_action.values()) - sum(count**2 for count in by_both.values())
    return alike / pairs if pairs else None


def edited_test_files(calls: Sequence[ModelCall], patterns: Sequence[str]) -> Iterator[str]:
    """Paths that match a pattern, and that a tool call of these replies or code in them writes to."""
    for call in calls:
        for choice in call.choices:
            for path in _written(choice.message):
                if is_test_file(path, patterns):
                    yield path


def is_test_file(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern says so: of the file's name, or with `/` of the end of its path."""
    plain = path.replace("\\", "/").removeprefix("./")
    name = plain.rpartition("/")[2]
    return any(
        fnmatchcase(plain, pattern) or fnmatchcase(plain, f"*/{pattern}")
        if "/" in pattern
        else fnmatchcase(name, pattern)
        for pattern in patterns
    )


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a reply, without what it calls."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def _written(message: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    calls = message.get("tool_calls") or ()
    for each in calls:
        function = each.get("function", each) if isinstance(each, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        found |= written_paths(str(function.get("name", "")), arguments)
    if not calls:
        for block in text_of(message).split("```")[1::2]:  # agents without tools write commands in blocks
            found |= paths_in_code(block.partition("\n")[2])
    return found
