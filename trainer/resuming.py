"""What a run needs to go on where it ended: its folder, its keys, its unfinished rollouts.

* One process trains a run at a time: its folder is locked for as long as the process lives.
* What an update asks for can't change in the middle of a run.
* A repaired agent or reward is tried on what the broken one left.
"""

import fcntl
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

from spangrad.credit.rewards import by_rollout, rewards_of
from spangrad.errors import ConfigError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.keys import Keys
from spangrad.store.records import Reward, RolloutStatus, Update, UpdateRead, UpdateSample
from spangrad.trainer.config import TrainConfig, resolve, to_dict
from spangrad.trainer.learning import checkpoint
from spangrad.trainer.rollouts.grading import other_names_told, rewards_given
from spangrad.trainer.rollouts.scheduling import RunKeys

logger = logging.getLogger(__name__)

FIXED_SETTINGS: Final = (
    ("agent", "tasks"),
    ("rollout", "groups_per_update"),
    ("rollout", "group_size"),
    ("rollout", "temperature"),
    ("run", "seed"),
)
"""Settings that say what an update asks for: changed in the middle, they would mix tasks in a group."""


def load_keys(config: TrainConfig) -> RunKeys:
    """Keys of the hub that the config names; none on a hub without keys."""
    if config.hub.keys is None:
        return RunKeys()
    return RunKeys.of(Keys.load(resolve(config.hub.keys, config.base_dir)))


def hold_folder(folder: Path) -> TextIO | None:
    """Lock a run's folder until the file is closed; None if another process holds it."""
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def claim_folder(folder: Path, config: TrainConfig) -> TextIO:
    """Take the run's folder for this process alone, and write the resolved config into it.

    Raises:
        ConfigError: Another process trains this run, or it was begun with settings that may not change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (lock := hold_folder(folder)) is None:
        raise ConfigError(
            f"run {config.run.id!r} is being trained by another process; stop it or choose another run.id"
        )
    file, now = folder / "config.json", json.loads(json.dumps(to_dict(config), default=str))
    if file.is_file():
        before = json.loads(file.read_text())
        for section, key in FIXED_SETTINGS:
            was, is_now = before.get(section, {}).get(key), now[section][key]
            if was != is_now:
                lock.close()
                raise ConfigError(
                    f"run {config.run.id!r} was begun with {section}.{key} = {was!r}, now it is {is_now!r};"
                    " choose another run.id"
                )
    part = folder / "config.json.part"
    with checkpoint.writing("the config", file, "nothing was begun"):
        part.write_text(json.dumps(now, indent=2))
        part.replace(file)  # a process that dies here leaves a whole one
    return lock


def continues(store: Store, config: TrainConfig, checkpoints: Path) -> str | None:
    """One line that says where the run goes on; None if it begins.

    Raises:
        StoreError: The newest checkpoint can't be read.
    """
    run = f"run {config.run.id!r}"
    newest = checkpoint.latest(checkpoints)
    if newest is None:
        if not store.rollouts(run_id=config.run.id, split="train"):
            return None
        return f"continuing {run} at update 0 (no checkpoint yet: from the starting weights)"
    done = update_from_json(checkpoint.load_record(newest)["update"]).update_index + 1
    if done >= config.run.updates:
        return f"{run} has all its {config.run.updates} updates (checkpoint {newest}); serving its policy"
    return f"continuing {run} at update {done} (checkpoint {newest})"


def repair(store: Store, config: TrainConfig, keys: RunKeys, reward: Callable[..., Any]) -> None:
    """Let a run go on after its agent or its reward was repaired.

    Rollouts that failed are queued again, and those that no update has consumed are graded again.
    """
    rollouts = store.rollouts(run_id=config.run.id, split="train")
    left = [rollout for rollout in rollouts if rollout.consumed_by is None]
    store.requeue([rollout.rollout_id for rollout in left if rollout.status is RolloutStatus.FAILED])
    ended = [rollout for rollout in left if rollout.status is RolloutStatus.SUCCEEDED]
    known = by_rollout(store.rewards([rollout.rollout_id for rollout in ended]) if ended else ())
    again: list[Reward] = []
    other_names: str | None = None
    for rollout in ended:
        try:
            given = rewards_given(reward, rollout, rollout.output)
        except (Exception, SystemExit) as error:  # the reward stays as it is
            logger.warning("reward of %s: %s: %s", rollout.rollout_id, type(error).__name__, error)
            continue
        other_names = other_names or other_names_told(given, config.credit.reward_weights)
        before = rewards_of(
            rollout,
            known.get(rollout.rollout_id, ()),
            (),
            authors=config.rollout.reward_authors,
            weights={one.name: 1.0 for one in given},
        )
        again += [one for one in given if one.value != before.components[one.name]]
    if other_names is not None:
        logger.warning("%s", other_names)
    if again:
        evaluator = open_store(config.hub.url, keys.evaluator)
        evaluator.put_rewards(again)
        evaluator.close()


def update_from_json(raw: dict[str, Any]) -> Update:
    """Undo `dataclasses.asdict` of an update, as checkpoints record it."""
    samples = [UpdateSample(**sample) for sample in raw["samples"]]
    return Update(
        **{**raw, "samples": samples, "reads": [UpdateRead(**read) for read in raw.get("reads", ())]}
    )
