"""The gate behind a publish: evaluate the candidate, promote it, keep it, or go back.

    published --> evaluated on held-out tasks --> better: promoted
                                              --> else: stays a candidate; after too many that are
                                                  worse, or one that is far worse: rolled back

Knows the store's decisions, held-out evaluation and kept weights. Does not know how weights are learned or
published: the run does that (`Trained`); nor how a run goes back: `rollbacks.py`.

Invariants:
* weights are on disk for good before their version is promoted;
* a version is evaluated once, on tasks that training never gets.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.errors import ConfigError, PublishError
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    PolicyDecision,
    origin_of,
    promoted_version,
)
from spangrad.trainer.evaluation import evaluate, held_out_rollouts, successes
from spangrad.trainer.plugins import load_tasks
from spangrad.trainer.promotion.rollbacks import Metrics, Rollbacks, Trained
from spangrad.trainer.promotion.rule import Comparison, Verdict, compare
from spangrad.trainer.promotion.weights import WEIGHTS_FILE, keep
from spangrad.trainer.rollouts.scheduling import ENDED
from spangrad.trainer.serving.fleet import Fleet
from spangrad.trainer.serving.publish import served_version

logger = logging.getLogger(__name__)

LABEL = "promotion"
"""Of the gate's evaluations: their split is `eval-promotion`."""


class Gate:
    """Judges the versions of one run."""

    def __init__(self, run: Trained, rollbacks: Rollbacks) -> None:
        """Choose the held-out tasks.

        Args:
            run: The run.
            rollbacks: How it goes back.

        Raises:
            ConfigError: There are fewer held-out tasks than the rule wants, or training has had one of them.
        """
        self._run = run
        self._rollbacks = rollbacks
        self._rule = run.config.promotion
        self._is_served = False
        """If this process published to production's engine: a number does not say whose weights it has."""
        config, wanted = run.config, self._rule.tasks
        tasks = load_tasks(
            config.agent.tasks, "eval", wanted, seed=config.eval.seed, base_dir=config.base_dir
        )
        if self._rule.engine_url is not None and config.learner.lora_rank:
            raise ConfigError(
                f"promotion.engine_url is {self._rule.engine_url!r} and learner.lora_rank"
                f" {config.learner.lora_rank}: checkpoints of promoted versions have adapters alone, which no"
                " engine can load as weights; leave one out"
            )
        if len(tasks) < wanted:
            raise ConfigError(
                f"{config.agent.tasks!r} has {len(tasks)} held-out tasks (split 'eval'), promotion.tasks is"
                f" {wanted}; lower it, or hold out more tasks"
            )
        self._held_out = {task["task_id"] for task in tasks}

    def refuse_held_out(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Let no task be trained on that candidates are judged by.

        Raises:
            ConfigError: One of the tasks is held out.
        """
        if both := sorted({task["task_id"] for task in tasks} & self._held_out):
            raise ConfigError(
                f"task {both[0]!r} of {self._run.config.agent.tasks!r} is for training, and held out to judge"
                " candidates by ([promotion]); give the splits 'train' and 'eval' different tasks"
            )

    def check(self) -> Metrics:
        """What is due for the version that is served now: after each publish, and when a run starts.

        Raises:
            StoreError: The weights to go back to are gone.
        """
        metrics = self._check()
        if self._rule.engine_url is not None:
            self._serve_promoted(self._rule.engine_url)
        return metrics

    def _check(self) -> Metrics:
        run = self._run
        if went_back := self._rollbacks.check():
            return went_back
        decisions = self._rollbacks.decisions()
        is_due = run.update_index % self._rule.every == 0 or promoted_version(decisions) is None
        if not is_due or _is_judged(run.policy_version, decisions):
            return {}
        return self._judge()

    def _judge(self) -> Metrics:
        run, rule, version = self._run, self._rule, self._run.policy_version
        started = time.monotonic()
        self._refuse_trained()
        found = evaluate(
            run.store,
            run.config,
            run.keys,
            label=LABEL,
            policy_version=version,
            temperature=rule.temperature,
            tasks=rule.tasks,
            served=run.served,
        )
        metrics = {"promotion/success": found.success, "time/promotion_s": time.monotonic() - started}
        said = {"success": found.success, "tasks": float(found.n), "unscored": float(found.unscored)}
        decisions = self._rollbacks.decisions()  # an admin may have decided meanwhile
        if went_back := self._rollbacks.carry_out(decisions):
            return metrics | went_back
        promoted = promoted_version(decisions)
        if promoted in (None, version):
            if promoted is None:
                self._promote(said, "the first version that was evaluated")
            else:
                self._rollbacks.decide(Decision.KEPT, said, "promoted before it was evaluated")
            return metrics | {"promotion/promoted": 1.0}
        comparison = compare(self._solved(version), self._solved(origin_of(promoted, decisions)))
        if comparison is None:
            self._rollbacks.decide(
                Decision.KEPT,
                said,
                f"can't be compared: version {promoted} was never evaluated on these tasks;"
                " promote by hand a version that was",
            )
            return metrics | {"promotion/promoted": 0.0}
        return metrics | self._settle(comparison, said, promoted, decisions)

    def _settle(
        self,
        comparison: Comparison,
        said: Metrics,
        promoted: int,
        decisions: Sequence[PolicyDecision],
    ) -> Metrics:
        """Decide, after a comparison with the promoted version."""
        verdict = comparison.verdict(self._rule)
        said = said | {
            "success": comparison.success,
            "promoted_success": comparison.promoted_success,
            "tasks": float(comparison.tasks),
            "gained": float(comparison.gained),
            "lost": float(comparison.lost),
            "p_value": comparison.p_value,
        }
        metrics = {
            "promotion/success": comparison.success,
            "promotion/promoted_success": comparison.promoted_success,
            "promotion/p_value": comparison.p_value,
            "promotion/promoted": float(verdict is Verdict.BETTER),
        }
        why = (
            f"{verdict}: {comparison.success:.3g} of {comparison.tasks} tasks, version {promoted} had"
            f" {comparison.promoted_success:.3g}; {comparison.gained} gained, {comparison.lost} lost,"
            f" p = {comparison.p_value:.2g}"
        )
        if verdict is Verdict.BETTER:
            self._promote(said, why)
            return metrics
        failures = _failures(decisions) + 1 if verdict is Verdict.WORSE else 0
        rule = self._rule
        is_far_worse = rule.rollback_drop is not None and comparison.drop >= rule.rollback_drop
        if is_far_worse or (rule.rollback_after and failures >= rule.rollback_after):
            if not is_far_worse:
                why += f"; {failures} evaluations in a row"
            return metrics | self._rollbacks.give_up(why, said)
        self._rollbacks.decide(Decision.KEPT, said, why)
        return metrics

    def _promote(self, said: Metrics, why: str) -> None:
        run = self._run
        path = keep(run.checkpointed(), run.folder, run.policy_version)
        self._rollbacks.decide(Decision.PROMOTED, said, why, path=path)

    def _serve_promoted(self, engine_url: str) -> None:
        """Have production's engine serve the promoted version; if it can't, again the next time."""
        run = self._run
        decisions = self._rollbacks.decisions()
        if (promoted := promoted_version(decisions)) is None:
            return
        try:
            served = served_version(engine_url)
            if served is not None and served > promoted:
                logger.warning(
                    "the engine at %s serves version %d, and version numbers only grow there: it does not"
                    " get version %d, which was promoted by hand; `spangrad rollback %s --to %d` serves its"
                    " weights under a new number",
                    *(engine_url, served, promoted, run.config.run.id, promoted),
                )
            elif served != promoted or not self._is_served:
                gateway_url, key = run.config.serving.gateway_url, run.keys.trainer
                production = Fleet([engine_url], gateway_url=gateway_url, gateway_key=key)
                production.publish(self._rollbacks.weights(promoted, decisions) / WEIGHTS_FILE, promoted)
                self._is_served = True
        except PublishError as error:
            logger.warning("the promoted version %d is not served in production: %s", promoted, error)

    def _solved(self, version: int) -> dict[tuple[int, str | None], bool]:
        """Whether a version succeeded, by place and task; without those that it was never asked."""
        run = self._run
        asked = held_out_rollouts(run.config, LABEL, version, self._rule.tasks)
        found = run.store.rollouts(rollout_ids=[rollout.rollout_id for rollout in asked])
        known = [rollout for rollout in found if rollout.status in ENDED]
        solved = successes(run.store, run.config, known)
        places = {rollout.rollout_id: place for place, rollout in enumerate(asked)}
        return {
            (places[rollout.rollout_id], rollout.task_id): solved[rollout.rollout_id] for rollout in known
        }

    def _refuse_trained(self) -> None:
        """Whatever has been trained on says nothing of a candidate."""
        run = self._run
        found = run.store.query(
            "SELECT min(task_id) AS task_id FROM rollouts WHERE run_id = ? AND split = 'train'"
            " AND task_id IN (SELECT unnest(?::VARCHAR[]))",
            [run.config.run.id, sorted(self._held_out)],
        )
        if (task_id := found[0]["task_id"]) is not None:
            raise ConfigError(
                f"run {run.config.run.id!r} was trained on task {task_id!r}, which is held out to judge"
                " candidates by ([promotion]); choose another eval.seed or other tasks of the split 'eval'"
            )


def _is_judged(version: int, decisions: Sequence[PolicyDecision]) -> bool:
    by = DecisionAuthor.TRAINER
    return any(one.policy_version == version and one.decided_by is by for one in decisions)


def _failures(decisions: Sequence[PolicyDecision]) -> int:
    """How many of the last evaluations in a row found the candidate worse."""
    failures = 0
    for one in reversed(decisions):
        if one.decision is not Decision.KEPT or not _was_worse(one.metrics):
            break
        failures += 1
    return failures


def _was_worse(metrics: Mapping[str, float]) -> bool:
    return metrics.get("lost", 0.0) > metrics.get("gained", 0.0)
