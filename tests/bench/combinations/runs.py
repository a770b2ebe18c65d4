"""One demo of an example for a combination of estimator and loss, and what its store says by length.

A finished run is a JSON file, `<name>-<seed>.json`, and is not run again.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.evaluation import values_of


@dataclass(frozen=True, slots=True)
class Combination:
    """Settings that take the place of the example's."""

    episode: str
    step: str
    objective: str
    changes: Sequence[str]

    @property
    def has_steps(self) -> bool:
        """Whether steps of a rollout are told apart."""
        return self.step != "none"

    @property
    def credit(self) -> str:
        """`grpo + gigpo`, `gigpo:gamma=1`."""
        terms = " + ".join(term for term in (self.episode, self.step) if term != "none")
        return f"{terms}:gamma=1" if self.has_steps and "credit.gamma=1" in self.changes else terms


def _combination(episode: str, step: str, objective: str, **settings: str) -> Combination:
    """Every setting that an example may have changed is named: what a term does not use, at its default."""
    named = {
        "credit.episode": episode,
        "credit.step": step,
        "credit.gamma": "0.95" if step == "none" else "0.9",
        "credit.scale_by_std": "true",
        "rollout.max_staleness": "0",
        "learner.objective": objective,
    }
    changes = [f"{key}={value}" for key, value in {**named, **settings}.items()]
    return Combination(episode, step, objective, changes)


COMBINATIONS: Mapping[str, Combination] = {
    "grpo-ppo": _combination("grpo", "none", "ppo"),
    "gigpo-ppo": _combination("none", "gigpo", "ppo"),
    "loo_to_go-ppo": _combination("none", "leave_one_out_to_go", "ppo"),
    # What episode terms credit is not discounted: as they are, but for telling steps apart.
    "gigpo_whole-ppo": _combination("none", "gigpo", "ppo", **{"credit.gamma": "1"}),
    "loo_to_go_whole-ppo": _combination("none", "leave_one_out_to_go", "ppo", **{"credit.gamma": "1"}),
    "rloo-dapo": _combination("rloo", "none", "dapo"),
    # A call is two tokens long: bounds for whole sequences of text would stop at once.
    "rloo-gspo": _combination(
        "rloo", "none", "gspo", **{"learner.clip_low": "0.2", "learner.clip_high": "0.28"}
    ),
    "grpo_gigpo-cispo": _combination("grpo", "gigpo", "cispo"),
    "maxrl-sapo": _combination("maxrl", "none", "sapo"),
    "reinforce_pp_baseline-dppo": _combination("reinforce_pp_baseline", "none", "dppo_tv"),
}


def is_done(out: Path, name: str, seed: int) -> bool:
    """Whether the run need not be run again."""
    return _file(out, name, seed).is_file()


def read_runs(out: Path) -> list[dict[str, Any]]:
    """All finished runs."""
    return [json.loads(file.read_text()) for file in sorted(out.glob("*-[0-9]*.json"))]


def run(
    example: str, name: str, seed: int, out: Path, *, changes: Sequence[str] = (), keep: bool = False
) -> dict[str, Any]:
    """Run the demo in a process of its own, and write what it measured; its folder goes, unless `keep`."""
    folder = out / f"{name}-{seed}"
    command = [sys.executable, "-m", "spangrad", "demo", "--example", example, "--seed", str(seed), "--json"]
    command += ["--folder", str(folder)]
    for change in (*COMBINATIONS[name].changes, *changes):
        command += ["--set", change]
    print("$ spangrad", " ".join(command[3:]), flush=True)
    last, errors = "", out / f"{name}-{seed}.err"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as demo,
    ):
        for last in demo.stdout or ():
            print("   ", last, end="", flush=True)
    told = {} if demo.returncode else json.loads(last)
    why = errors.read_text().strip().rpartition("\n")[2]
    if demo.returncode and "nothing to learn" not in why:
        raise SystemExit(f"{name}, seed {seed}: the demo ended with exit code {demo.returncode}: {why}")
    found = record(example, name, seed, folder, minutes=told.get("minutes"))
    part = _file(out, name, seed).with_suffix(".part")
    part.write_text(json.dumps(found, indent=1))
    part.rename(_file(out, name, seed))
    errors.unlink()
    if not keep:
        shutil.rmtree(folder)
    return found


def record(example: str, name: str, seed: int, folder: Path, *, minutes: float | None) -> dict[str, Any]:
    """What the newest demo in a folder measured.

    `minutes` None: training stopped before its end, since no group's rollouts differed and all was worse
    than before; there is no evaluation after it.
    """
    with open_store(max(folder.glob("*/store.duckdb"))) as store:
        points, updates = points_of(store), len(store.updates())
    return {
        "name": name,
        "seed": seed,
        "example": Path(example).name,
        "date": time.strftime("%Y-%m-%d"),
        "minutes": minutes,
        "updates": updates,
        "has_stopped": minutes is None,
        "points": points,
    }


def points_of(store: Store, *, authors: Sequence[str] = ("evaluator", "operator")) -> list[dict[str, Any]]:
    """Successes by length of task, of every evaluation and of the rollouts of every update.

    Returns:
        `update`: how many updates the policy had seen; `how`: `greedy`, `sampled` (held-out tasks) or
        `train` (sampled, tasks drawn for that update); `by`: length -> [successes, rollouts].
    """
    ended = [rollout for rollout in store.rollouts() if _point(rollout) is not None]
    values = values_of(store, ended, authors)
    counts: dict[tuple[int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    seen = set[tuple[str, tuple[int, str]]]()
    for rollout in ended:
        point = _point(rollout)
        assert point is not None
        if point[1] != "train":  # the last evaluation in between asks some of what the one after asks again
            if (asked := (rollout.task["task_id"], point)) in seen:
                continue
            seen.add(asked)
        cell = counts[point][str(rollout.task.get("shortest", "all"))]
        cell[0] += values.get(rollout.rollout_id, 0.0) >= 1.0
        cell[1] += 1
    return [
        {
            "update": update,
            "how": how,
            "by": dict(sorted(by.items(), key=lambda item: (len(item[0]), item[0]))),
        }
        for (update, how), by in sorted(counts.items())
    ]


def in_order(found: Iterable[str]) -> list[str]:
    """Lengths, the shortest first."""
    return sorted(found, key=lambda length: (len(length), length))


def _point(rollout: Rollout) -> tuple[int, str] | None:
    if found := re.search(r"-u(\d{5})", rollout.rollout_id):
        return int(found[1]), "train"
    if found := re.search(
        r"-eval-(?:before|between|after)(?:-greedy|(-sampled))?-v(\d{5})-", rollout.rollout_id
    ):
        return int(found[2]), "sampled" if found[1] else "greedy"
    return None


def _file(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-{seed}.json"
