"""What `spangrad promote` and `spangrad rollback` do: a decision in the store, and weights into an engine.

Knows the store, kept weights and an engine's address. Does not know a learner: whoever trains the run
carries a rollback out when it sees the decision.

* A decision is durable before anything follows from it; the same command again goes on where it ended.
* An engine's version numbers only grow: older weights come back under a new number, and only while nobody
  trains the run, who would give that number to other weights.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import ConfigError, PolicyError, StoreError
from spangrad.store.base import Store
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    Policy,
    PolicyDecision,
    origin_of,
    promoted_version,
)
from spangrad.trainer.learning.checkpoint import is_complete, load_counters
from spangrad.trainer.promotion.weights import WEIGHTS_FILE, folder_of, keep, run_folder
from spangrad.trainer.resuming import hold_folder
from spangrad.trainer.serving.fleet import Fleet
from spangrad.trainer.serving.publish import served_version


@dataclass(frozen=True, slots=True)
class Serving:
    """Where the weights are to be served."""

    engine_url: str
    gateway_url: str | None = None
    gateway_key: str | None = None

    def put(self, weights: Path, version: int) -> None:
        """Serve the weights of a file as a version."""
        fleet = Fleet([self.engine_url], gateway_url=self.gateway_url, gateway_key=self.gateway_key)
        fleet.publish(weights, version)


def promote(
    store: Store, run_id: str, version: int, *, reason: str, serving: Serving | None = None
) -> list[str]:
    """Make a version of a run the promoted one. Returns what to tell the person.

    Raises:
        StoreError: There is no such version, or its weights are gone.
        ConfigError: The engine serves a newer version.
        PublishError: The engine does not serve it.
    """
    policy = _policy(store, run_id, version)
    if serving is not None and (served := served_version(serving.engine_url) or 0) > version:
        raise ConfigError(
            f"the engine at {serving.engine_url} serves version {served}, and version numbers only grow"
            f" there; `spangrad rollback {run_id} --to {version}` serves the older weights under a new number"
        )
    told: list[str] = []
    path = None
    if (folder := run_folder(policy)) is not None and folder.is_dir():
        path = str(keep(Path(policy.path), folder, version))
    elif not Path(policy.path).exists():
        told.append(
            f"{policy.path} is not on this machine: the run's trainer keeps the weights, if it has them"
        )
    store.decide(_by_hand(run_id, version, Decision.PROMOTED, reason, path=path))
    told.append(f"version {version} of run {run_id!r} is the promoted one")
    if serving is not None:
        serving.put(_weights_file(Path(path or policy.path)), version)
        told.append(f"the engine at {serving.engine_url} serves it")
    return told


def roll_back(
    store: Store, run_id: str, to_version: int | None, *, reason: str, serving: Serving | None = None
) -> list[str]:
    """Give up all versions of a run that are newer than one, which becomes the promoted one.

    Args:
        store: Where the run is recorded.
        run_id: The run.
        to_version: The version to go back to; None: the one that was promoted before the present one.
        reason: Why, for people.
        serving: Engine that is to serve it now; None: the run's trainer does it.

    Raises:
        StoreError: There is no such version, or none was promoted before.
        PolicyError: Its weights are gone, or are of a kind that no engine can load.
        PublishError: The engine does not serve it.
    """
    decisions = store.decisions(run_id)
    if to_version is None:
        to_version = _promoted_before(store, run_id, decisions)
    policy = _policy(store, run_id, to_version)
    policies = store.policies(run_id)
    newest = max(one.policy_version for one in policies)
    store.decide(_by_hand(run_id, newest, Decision.ROLLED_BACK, reason, to_version=to_version))
    told = [
        f"version {to_version} of run {run_id!r} is the promoted one, those up to {newest} are given up;"
        " whoever trains the run goes on from there, at once or when it starts"
    ]
    if serving is None:
        return told
    with ExitStack() as held:
        folder = next((found for one in policies[::-1] if (found := run_folder(one)) is not None), None)
        if folder is None or not folder.is_dir():
            return [*told, "the run's folder is not on this machine: its trainer publishes the weights"]
        if (lock := hold_folder(folder)) is None:
            return [*told, "the run is being trained: its trainer publishes the weights"]
        held.enter_context(lock)
        source = folder_of(policy, decisions) or Path(policy.path)
        serving.put(_weights_file(source), newest + 1)
        note = f"the weights of version {to_version}, put back by hand"
        store.put_policy(Policy(run_id, newest + 1, str(source), time.time_ns(), to_version, note))
        store.decide(
            _by_hand(run_id, newest + 1, Decision.RESTORED, reason, to_version=to_version, path=str(source))
        )
    return [*told, f"the engine at {serving.engine_url} serves its weights as version {newest + 1}"]


def _by_hand(
    run_id: str,
    version: int,
    decision: Decision,
    reason: str,
    *,
    to_version: int | None = None,
    path: str | None = None,
) -> PolicyDecision:
    by = DecisionAuthor.ADMIN
    return PolicyDecision(
        run_id, version, decision, by, reason, to_version=to_version, path=path, time_ns=time.time_ns()
    )


def _policy(store: Store, run_id: str, version: int) -> Policy:
    policies = store.policies(run_id)
    if not policies:
        runs = sorted({policy.run_id for policy in store.policies()})
        raise StoreError(f"there is no run {run_id!r} with published versions; there are: {runs}")
    found = next((policy for policy in policies if policy.policy_version == version), None)
    if found is None:
        known = ", ".join(str(policy.policy_version) for policy in policies[-5:])
        raise StoreError(f"run {run_id!r} never published version {version}; the newest are: {known}")
    return found


def _promoted_before(store: Store, run_id: str, decisions: list[PolicyDecision]) -> int:
    now = promoted_version(decisions)
    earlier = store.query(
        "SELECT policy_version FROM policy_lineage WHERE run_id = ? AND status = 'superseded'", [run_id]
    )
    stood = {int(row["policy_version"]) for row in earlier}
    for end in range(len(decisions), 0, -1):
        then = promoted_version(decisions[:end])
        if now is not None and then in stood and origin_of(then, decisions) != origin_of(now, decisions):
            return then
    raise StoreError(
        f"no version of run {run_id!r} was promoted before the present one, {now}; name one with --to"
    )


def _weights_file(folder: Path) -> Path:
    """The file that an engine can load."""
    if is_complete(folder) and load_counters(folder).get("adapter") is not None:
        raise PolicyError(
            f"{str(folder)!r} has adapters alone, which no engine can load as weights; start the run's"
            " trainer, which serves the promoted version"
        )
    for name in (WEIGHTS_FILE, "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    raise PolicyError(
        f"the weights are gone: {str(folder)!r} has no {WEIGHTS_FILE} and no model.safetensors; take another"
        " version"
    )
