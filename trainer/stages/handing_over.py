"""What a run leaves to the next one: the weights of its last version, as a model folder that the store names.

    run.folder/model <- weights of the last version (1)
    policies: the last version's record names the folder, and why the run ended (2)

Knows a run's learner and the table `policies`. Does not know: recipes, credit.

Invariants:
* a run whose last version has a model in the store has ended; others start from that folder;
* whoever dies before (1) or between (1) and (2) left a run that has not ended: its restart makes the folder
  again, with the same weights;
* the first version of a run that starts from another one names its parent's run and version, before anything
  is learned.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spangrad.store.base import Store
from spangrad.store.records import Policy
from spangrad.trainer.cluster import call

if TYPE_CHECKING:
    from spangrad.trainer.loop import Run

_RUNS: Final = """
SELECT DISTINCT run_id FROM policies
WHERE starts_with(run_id, $run) AND regexp_full_match(substr(run_id, len($run) + 1), '(-[0-9]+)?')
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """One run, as the store knows it."""

    run_id: str
    number: int
    """Which run of its name it is, from 1."""
    parent_run: str | None
    """Run whose weights it started from; None: none."""
    handed_over: Policy | None
    """Its last version, with a model folder; None: it has not ended."""


def policy_of(
    run_id: str, version: int, weights: Path, parent_version: int | None, parent: Policy | None
) -> Policy:
    """The record of a run's version; `parent` is that of its first one, if the run starts from another's."""
    record = Policy(run_id, version, str(weights), parent_version=parent_version)
    if parent is None or version:
        return record
    return replace(record, parent_version=parent.policy_version, parent_run=parent.run_id)


def hand_over(run: "Run", why: str) -> None:
    """Keep the weights of a run that has ended as a model folder, and say so in the store."""
    folder = run.folder / "model"
    call(run.learner.export_model, str(folder))
    policies = run.store.policies(run.config.run.id)
    (last,) = (one for one in policies if one.policy_version == run.policy_version)
    run.store.put_policy(replace(last, note=why, model=str(folder)))


def runs_named(store: Store, run_id: str) -> list[Trained]:
    """The run of this name, and those that made it again (`NAME-2`, ...), in the order of their numbers."""
    names = [row["run_id"] for row in store.query(_RUNS, {"run": run_id})]
    found = [_trained(store, name, int(name.removeprefix(run_id)[1:] or 1)) for name in names]
    return sorted(found, key=lambda run: run.number)


def handed_over(store: Store, run_id: str) -> Policy | None:
    """A run's last version, with its model folder; None: the run has not ended."""
    return next((one for one in reversed(store.policies(run_id)) if one.model is not None), None)


def _trained(store: Store, run_id: str, number: int) -> Trained:
    first = next((one for one in store.policies(run_id) if one.policy_version == 0), None)
    return Trained(run_id, number, None if first is None else first.parent_run, handed_over(store, run_id))
