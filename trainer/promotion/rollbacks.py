"""Going back to the promoted version of a run: the decision, and its weights as a new version.

    ROLLED_BACK  -->  weights of `to_version` in a new checkpoint  -->  published  -->  RESTORED

Knows the store's decisions and kept weights. Does not know why: the gate, a monitor or an admin decides. How
weights are loaded and published, the run knows (`Trained`).

Invariants:
* a decision is durable before anything follows from it, and what follows is done again if the process died
  before it was done: each step says in the store, or in the run's checkpoint, that it has been;
* a rollback makes a new version: numbers only grow.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from spangrad.errors import ConfigError, StoreError
from spangrad.store.base import Store
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    PolicyDecision,
    origin_of,
    pending_rollback,
    promoted_version,
)
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.promotion.weights import folder_of, keep, kept_folder
from spangrad.trainer.rollouts.scheduling import RunKeys
from spangrad.trainer.serving.served import ServedPolicy

Metrics = dict[str, float]


class Trained(Protocol):
    """The run whose versions are judged."""

    config: TrainConfig
    keys: RunKeys
    store: Store
    folder: Path
    update_index: int
    policy_version: int
    parent_version: int | None
    served: ServedPolicy

    def checkpointed(self) -> Path:
        """The checkpoint of `policy_version`."""
        ...

    def go_back(self, source: Path, to_version: int) -> None:
        """Make the state in a checkpoint, that of `to_version`, a new version, and publish it."""


class Rollbacks:
    """Those of one run."""

    def __init__(self, run: Trained, note: Callable[[str], None]) -> None:
        """Nothing is carried out before `check`.

        Args:
            run: The run.
            note: Called with a line for the person who started the run.
        """
        self._run = run
        self._note = note

    def refuse_without_target(self) -> None:
        """See that monitors can go back, if they are to.

        Raises:
            ConfigError: The run has no promoted version, and promotes none.
        """
        run = self._run
        asking = [name for name, action in run.config.monitor.actions.items() if action == "rollback"]
        if asking and not run.config.promotion.every and promoted_version(self.decisions()) is None:
            raise ConfigError(
                f"monitor.actions.{asking[0]} is 'rollback', and run {run.config.run.id!r} has no promoted"
                " version to go back to; set promotion.every, which promotes the first one, or promote one by"
                " hand (`spangrad promote`), or choose 'pause'"
            )

    def decisions(self) -> list[PolicyDecision]:
        """All about the run, in order."""
        return self._run.store.decisions(self._run.config.run.id)

    def check(self) -> Metrics:
        """Carry out what was decided and is not done: after each publish, and when a run starts.

        Raises:
            StoreError: The weights to go back to are gone.
        """
        decisions = self.decisions()
        self._keep_promoted(decisions)
        return self.carry_out(decisions)

    def give_up(self, why: str, metrics: Mapping[str, float]) -> Metrics:
        """Go back from the version that is served now to the promoted one.

        Args:
            why: For people.
            metrics: What spoke against it.

        Raises:
            StoreError: The weights to go back to are gone, or the version is the promoted one itself.
        """
        decisions = self.decisions()
        if pending_rollback(decisions) is None:
            to_version = promoted_version(decisions)
            self.decide(Decision.ROLLED_BACK, metrics, why, to_version=to_version)
        return self.check()

    def carry_out(self, decisions: Sequence[PolicyDecision]) -> Metrics:
        """Put the weights of the version that was gone back to in the place of all newer ones, if one was."""
        rollback = pending_rollback(decisions)
        if rollback is None:
            return {}
        run, to_version = self._run, rollback.to_version
        assert to_version is not None
        source = self.weights(to_version, decisions)
        is_back = run.parent_version == to_version and run.policy_version > rollback.policy_version
        if not is_back:
            if run.policy_version > rollback.policy_version:  # published while somebody decided
                why = f"trained from version {rollback.policy_version}, which was given up"
                self.decide(Decision.ROLLED_BACK, {}, why, to_version=to_version)
            run.go_back(source, to_version)
        said = next((one.metrics for one in reversed(decisions) if one.policy_version == to_version), {})
        why = f"the weights of version {to_version}, put back"
        self.decide(Decision.RESTORED, said, why, to_version=to_version, path=source)
        return {"promotion/rolled_back": 1.0}

    def decide(
        self,
        decision: Decision,
        metrics: Mapping[str, float],
        reason: str,
        *,
        to_version: int | None = None,
        path: Path | None = None,
    ) -> None:
        """Record a decision about the version that is served now, and tell it."""
        run = self._run
        made = PolicyDecision(
            run_id=run.config.run.id,
            policy_version=run.policy_version,
            decision=decision,
            decided_by=DecisionAuthor.TRAINER,
            reason=reason,
            metrics=dict(metrics),
            to_version=to_version,
            path=None if path is None else str(path),
            time_ns=time.time_ns(),
        )
        run.store.decide(made)
        self._note(f"version {run.policy_version} is {decision.replace('_', ' ')}: {reason}")

    def weights(self, version: int, decisions: Sequence[PolicyDecision]) -> Path:
        """The checkpoint that has a version's weights.

        Raises:
            StoreError: There is none any more.
        """
        run = self._run
        kept = kept_folder(run.folder, origin_of(version, decisions))
        policies = run.store.policies(run.config.run.id)
        policy = next(one for one in policies if one.policy_version == version)
        source = kept if kept.is_dir() else folder_of(policy, decisions)
        if source is None:
            raise StoreError(
                f"run {run.config.run.id!r} was rolled back to version {version}, whose weights are gone:"
                f" neither {str(kept)!r} nor {policy.path!r} is a complete checkpoint; bring them back, or"
                " promote a version that is there"
            )
        return source

    def _keep_promoted(self, decisions: Sequence[PolicyDecision]) -> None:
        """Keep the weights of what was promoted by hand elsewhere, if they are still there."""
        run, promoted = self._run, promoted_version(decisions)
        if promoted is None or origin_of(promoted, decisions) != promoted:
            return
        if kept_folder(run.folder, promoted).is_dir():
            return
        policy = next(one for one in run.store.policies(run.config.run.id) if one.policy_version == promoted)
        if (folder := folder_of(policy, decisions)) is not None:
            keep(folder, run.folder, promoted)
