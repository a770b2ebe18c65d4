"""A recipe whose store, credit, learner, checkpoints, model folders and publishing are real.

Played are vLLM and the agents (see `played_run.py`), and Ray: the learner is in this process.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.played_run import Agents, Played, _spans, played_by

from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, Update
from spangrad.trainer.stages import handing_over, running
from spangrad.trainer.stages.recipe import Recipe, load_recipe
from spangrad.trainer.stages.running import StageReport, train_recipe

RECIPE = """
[run]
id = "calc"
folder = "runs"
[hub]
url = "{folder}/store.duckdb"
[serving]
engine_url = "{url}"
gateway_url = "{url}"
model = "{model}"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "agent.py:reward"
[rollout]
groups_per_update = 2
group_size = 2
max_staleness = 0
[learner]
threads = 1
lr = 1e-2

[[stage]]
name = "world"
stored = {{splits = ["expert"], passes = 1}}
learner = {{objective = "bc"}}
preference = {{target = "observations", good_at = "none"}}

[[stage]]
name = "clone"
stored = {{splits = ["expert"], min_reward = 0.4}}
run = {{updates = 3}}
learner = {{objective = "bc"}}
preference = {{good_at = 0.4}}

[[stage]]
name = "prefer"
stored = {{runs = ["old"]}}
run = {{updates = 2}}
learner = {{objective = "dpo"}}

[[stage]]
name = "rl"
run = {{updates = 2}}
"""


class NamedAgents(Agents):
    """What they do follows from the rollout's name alone, whichever process they are in."""

    def _end(self, store: FileStore, rollout: Rollout, version: int) -> None:
        member = int(rollout.rollout_id[-2:])
        trace = int.from_bytes(blake2b(rollout.rollout_id.encode(), digest_size=15).digest(), "big")
        store.put_otlp(encode_request(_spans(rollout.rollout_id, trace, member, version)))
        given = [Reward(rollout.rollout_id, (rollout.task or {})["rewards"][member], attempt=rollout.attempt)]
        store.put_rewards(given, author=RewardAuthor.EVALUATOR)
        store.finish(rollout.rollout_id, rollout.attempt)


@contextmanager
def played(recipe: Recipe) -> Iterator[None]:
    """Nothing of the recipe needs Ray or an engine that computes."""
    agents = NamedAgents(Played(recipe.stages[0].config))
    with played_by(agents), pytest.MonkeyPatch.context() as patch:
        patch.setattr(handing_over, "call", lambda method, *given, **named: method(*given, **named))
        patch.setattr(running, "stop_ray", lambda: None)
        yield


def play_recipe(file: Path, only: str | None = None, notes: list[str] | None = None) -> list[StageReport]:
    """Train what is left of a recipe."""
    recipe = load_recipe(file)
    with played(recipe):
        return train_recipe(recipe, only=only, on_note=None if notes is None else notes.append)


def dies(point: str, count: int) -> Callable[[str], None]:
    """SIGKILL when the point is passed so often."""
    passed = 0

    def at(now: str) -> None:
        nonlocal passed
        passed += now == point
        if passed == count and now == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def main(file: str, point: str, count: str) -> None:
    """Train a recipe, and die at a point of it."""
    at = dies(point, int(count))
    commit, put = FileStore.commit_update, FileStore.put_policy

    def commit_update(store: FileStore, update: Update) -> bool:
        at("before a commit")
        done = commit(store, update)
        at("behind a commit")
        return done

    def put_policy(store: FileStore, policy: Any) -> None:
        what = "model" if policy.model else "first version" if policy.policy_version == 0 else "version"
        at(f"before a {what}")
        put(store, policy)
        at(f"behind a {what}")

    FileStore.commit_update, FileStore.put_policy = commit_update, put_policy  # type: ignore[method-assign, assignment]
    play_recipe(Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
