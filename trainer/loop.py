"""The training loop: take -> credit -> (take more) -> update -> checkpoint -> commit -> publish.

    with Run(config) as run:
        while run.wait():
            batch, rollouts, metrics = run.collect()
            run.learn(batch, rollouts, metrics)
            run.publish()

Rollouts go on meanwhile (`rollouts/feeder.py`), by at most `rollout.max_staleness` updates; 0 is the
synchronous algorithm.

Exactly once. An update becomes real in this order: (1) the learner's state after it,
together with the list of rollouts it consumed, is a durable checkpoint; (2) the store
commits the update and marks these rollouts consumed, in one transaction; (3) the
weights are published. After a crash before (1) the update never happened and the same
rollouts are trained again from the state before it; after a crash between (1) and (2)
the checkpoint's list is committed; after a crash before (3) the weights are published.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.pipeline import CreditedBatch
from spangrad.credit.transition import Transition
from spangrad.errors import ConvergedError, EmptyBatchError, PublishError, StoreError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Policy, Rollout, Update
from spangrad.trainer.cluster import call, start_learner, start_ray
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.crediting import Crediting, as_trained
from spangrad.trainer.curriculum.sampler import TaskSampler, turn_metrics
from spangrad.trainer.evaluation import Evaluation, evaluate_between
from spangrad.trainer.learning import checkpoint
from spangrad.trainer.monitoring.behavior import behavior_metrics
from spangrad.trainer.monitoring.watch import Watch
from spangrad.trainer.nothing_to_learn import nothing_to_learn
from spangrad.trainer.probe import probe_row, scored_whole
from spangrad.trainer.production.harvest import Harvest
from spangrad.trainer.promotion.gate import Gate
from spangrad.trainer.promotion.rollbacks import Rollbacks
from spangrad.trainer.replaying import made_of
from spangrad.trainer.resuming import claim_folder, continues, load_keys, repair, update_from_json
from spangrad.trainer.rollouts.admission import Pace
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.feeder import Crew, Feeder
from spangrad.trainer.rollouts.scheduling import RunKeys, Workers, set_rollouts, worker_config
from spangrad.trainer.rollouts.source import Source
from spangrad.trainer.serving.fleet import Probe
from spangrad.trainer.serving.own_engines import engines_and_places
from spangrad.trainer.serving.served import ServedPolicy
from spangrad.trainer.stages.deck import Deck
from spangrad.trainer.stages.handing_over import policy_of
from spangrad.trainer.stages.stopping import check_metric, why_ended
from spangrad.trainer.update_metrics import (
    Metrics,
    batch_metrics,
    checked_books,
    rollout_metrics,
    with_reasons_of_both,
)
from spangrad.user_code import load_callable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainReport:
    """What a call of `train` did."""

    updates: int = 0
    """Updates of the run so far."""
    policy_version: int = 0
    history: list[Metrics] = field(default_factory=list)
    """Metrics of every update of this call."""
    evaluations: list[Evaluation] = field(default_factory=list)
    ended: str | None = None
    """Why the run has gone as far as it should; None: it has not."""


class Run:
    """One training run: its learner, its store, its place in the loop."""

    def __init__(
        self,
        config: TrainConfig,
        keys: RunKeys | None = None,
        *,
        on_note: Callable[[str], None] | None = None,
        parent: Policy | None = None,
    ) -> None:
        """Check what can be checked before anything is started.

        Args:
            config: See `spangrad.trainer.config`.
            keys: Bearer keys; None: read from `hub.keys`.
            on_note: Called with a line for the person who started the run.
            parent: Another run's version, whose weights are those of the starting model; None: of none.

        Raises:
            ConfigError: Agent, tasks or reward can't be loaded, or the run was begun with other ones.
            PolicyError: The model folder can't be loaded.
            HubUnreachableError: No hub answers.
            EngineError: No engine answers.
        """
        self.config = config
        self.keys = keys or load_keys(config)
        self._on_note = on_note or logger.info
        self.update_index = 0
        self.policy_version = 0
        self.parent_version: int | None = None
        """The version that the learner's weights were made from."""
        self._parent = parent
        self.ended: str | None = None
        """Why the run has gone as far as it should; None: it has not."""
        self.folder = config.folder
        self.checkpoints = self.folder / "checkpoints"
        self._model = config.start_model
        self._crediting = Crediting(config, self._model)
        if config.makes_rollouts:
            self._reward = load_callable(config.agent.reward, config.base_dir)
        self.rollbacks = Rollbacks(self, self._on_note)
        self.gate = Gate(self, self.rollbacks) if config.promotion.every else None
        self.store: Store = open_store(config.hub.url, self.keys.trainer)
        self._sampler = TaskSampler(config, self.store) if config.makes_rollouts else None
        self.store.last_update(config.run.id)
        self.watch = Watch(self.store, config, roll_back=self._give_up, tell=on_note)
        self.served = ServedPolicy(config.serving, self.keys.trainer, self.folder / "weights")
        if config.stored is None and config.cluster.engines is None:
            self.served.fleet.others(0)  # raises if no engine answers
        self._weights = self._model
        """Where the learner's current weights are kept: the starting folder, then a checkpoint."""
        self.source: Source
        """Of its rollouts, for as long as `feed` or `harvest` lasts."""
        self._probe_rows = [probe_row()]
        self._probe_before: list[NDArray[np.float32]] | None = None
        """The learner's logprobs of `_probe_rows` before the update that is to be published."""

    def __enter__(self) -> "Run":
        """Start Ray, the learner and rollouts, and continue where the last process ended.

        Raises:
            PausedError: A monitor paused the run.
        """
        with ExitStack() as begun:
            begun.callback(self.store.close)
            self._begin(begun)
            self._begun = begun.pop_all()
        return self

    def _begin(self, begun: ExitStack) -> None:
        self.rollbacks.refuse_without_target()
        begun.enter_context(claim_folder(self.folder, self.config))
        if (line := continues(self.store, self.config, self.checkpoints)) is not None:
            self._on_note(line)
        start_ray(self.config.learner.workers, self.config.cluster)
        begun.enter_context(engines_and_places(self.config, self.served, self.keys.trainer))
        self.learner = start_learner(self.config.learner_from(self._model))
        self._resume()
        self._judge()
        self.watch.check()
        if self.config.stored is not None:
            self.source = Deck(self.store, self.config, self.config.stored, on_note=self._on_note)
            return
        if self.config.production is not None:
            begun.enter_context(self.harvest())
            return
        repair(self.store, self.config, self.keys, self._reward)
        begun.enter_context(self.feed(Workers(self.config.agent.workers)))

    def __exit__(self, *_: object) -> None:
        """End what feeds it, let go of the store and the folder; Ray ends with the process."""
        self._begun.close()

    def _resume(self) -> None:
        """Load the newest checkpoint, commit what it recorded, publish what should be served."""
        newest = checkpoint.latest(self.checkpoints)
        committed = self.store.last_update(self.config.run.id)
        if newest is not None:
            record = call(self.learner.load, str(newest))
            update = update_from_json(record["update"])
            self.update_index = update.update_index + 1
            self.policy_version, self.parent_version = record.get(
                "restored", (update.policy_version, update.policy_version - 1)
            )
            self._weights = newest
            if committed is None or committed.update_index < update.update_index:
                self.store.commit_update(dataclasses.replace(update, checkpoint=str(newest)))
        if committed is not None and committed.update_index >= self.update_index:
            raise StoreError(
                f"run {self.config.run.id!r}: the store has update {committed.update_index}, but the newest"
                f" checkpoint in {str(self.checkpoints)!r} is before it;"
                " bring the checkpoints back or choose another run.id"
            )
        # A number alone does not say whose weights they are: another run may have published to this engine.
        self._publish_weights()

    @contextmanager
    def feed(self, crew: Crew) -> Iterator[Feeder]:
        """Have rollouts done, from here on and ahead of the learner, for as long as the block lasts."""
        config = self.config
        self.source = feeder = Feeder(
            self.store,
            config.run.id,
            Pace(config.rollout.groups_per_update, config.rollout.max_staleness, config.run.updates),
            make_set=self._set,
            crew=crew,
            worker=self._worker,
            before_round=self.served.ensure,
            slots=config.agent.workers * config.agent.concurrency,
            straggler_s=config.rollout.straggler_s,
        )
        with feeder.started(update_index=self.update_index, policy_version=self.policy_version):
            yield feeder

    @contextmanager
    def harvest(self) -> Iterator[Harvest]:
        """Look what live agents have done and what was said of it, for as long as the block lasts."""
        assert self.config.production is not None
        self.source = harvest = Harvest(
            self.store,
            self.config,
            self.config.production,
            before_look=self.served.ensure,
            on_note=self._on_note,
        )
        with harvest.started(update_index=self.update_index, policy_version=self.policy_version):
            yield harvest

    def wait(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> bool:
        """Whether there is an update to collect for; a run on live sessions waits until there are enough."""
        why = self.source.ended() or why_ended(self.store, self.config, self.update_index)
        self.ended = self.ended or why
        if self.ended is not None:
            return False
        return self.source.wait(is_asked_to_stop)

    def collect(self) -> tuple[CreditedBatch, list[Rollout], Metrics]:
        """Rollouts of the next update, credited; more are taken until enough groups say something."""
        config = self.config.rollout
        seen: list[Rollout] = []
        metrics: Metrics = {"rollout/cut": 0.0, "time/wait_s": 0.0}
        started = time.monotonic()
        informative = 0
        refills = config.refills if self.config.makes_rollouts else 0
        for refill in range(refills + 1):
            if refill:
                logger.warning(
                    "update %d: %d of the groups of %d rollouts say something, %d are wanted;"
                    " trying other tasks, refill %d of %d",
                    *(self.update_index, informative, len(seen), config.informative_groups),
                    *(refill, refills),
                )
            taken = self.source.take(is_more=bool(refill))
            seen += taken.rollouts
            if not refill:
                metrics |= self.source.meanwhile(taken)
            metrics["rollout/cut"] += taken.cut
            metrics["time/wait_s"] += taken.waited_s
            critic = None if self.config.critic is None else self._values
            batch = self._crediting.rows(self.store, seen, self.policy_version, critic)
            informative = self._crediting.informative_groups(batch)
            if informative >= config.informative_groups or (informative and refill == refills):
                return (
                    batch,
                    seen,
                    metrics
                    | rollout_metrics(seen)
                    | {
                        "rollout/refills": float(refill),
                        "rollout/informative_groups": float(informative),
                        "time/credit_s": time.monotonic() - started - metrics["time/wait_s"],
                    },
                )
        why = self._crediting.why_nothing(batch, seen)
        raise nothing_to_learn(self.store, self.config, self.update_index, batch, seen, why=why)

    def go_on_after(self, error: EmptyBatchError) -> None:
        """Say that an update was passed by, or why the run ends.

        Raises:
            EmptyBatchError: There is nothing else to learn from.
        """
        if isinstance(error, ConvergedError):
            self.ended = "nothing is left to learn"
        elif self.config.makes_rollouts:
            raise error
        elif not self.source.has_others:
            raise EmptyBatchError(f"none of the stored rollouts can be learned from; the last ones: {error}")
        self._on_note(str(error))

    def _values(self, rows: Sequence[Transition]) -> Sequence[Sequence[float]]:
        values: Sequence[Sequence[float]] = call(self.learner.values, rows)
        return values

    def _worker(self) -> WorkerConfig:
        return worker_config(
            self.config,
            self.keys,
            split="train",
            temperature=self.config.rollout.temperature,
            policy_version=self.served.version,
            engine_urls=self.served.engine_urls,
        )

    def learn(self, batch: CreditedBatch, rollouts: list[Rollout], metrics: Metrics) -> Metrics:
        """One update: learner, durable checkpoint, commit."""
        started = time.monotonic()
        metrics = metrics | batch_metrics(batch) | (self._sampler.metrics() if self._sampler else {})
        metrics |= turn_metrics(rollouts, batch.calls)
        metrics |= behavior_metrics(batch.calls, rollouts, self.config.monitor.test_files)
        if self.config.stored is None:
            self._probe_rows = list(batch.rows[:4])
            self._probe_before = call(self.learner.score, [scored_whole(row) for row in self._probe_rows])
        version = self.config.version_of_rows(self.policy_version)
        learnt = call(self.learner.update, batch.rows, policy_version=version)
        metrics |= with_reasons_of_both(metrics, learnt)
        metrics |= checked_books(metrics, where=f"update {self.update_index}")
        metrics["time/update_s"] = time.monotonic() - started
        update = Update(
            run_id=self.config.run.id,
            update_index=self.update_index,
            policy_version=self.policy_version + 1,
            rollout_ids=[rollout.rollout_id for rollout in rollouts],
            samples=as_trained(batch.samples, call(self.learner.trained_calls)),
            metrics=metrics,
            checkpoint="",
            time_ns=time.time_ns(),
            consumes=self.config.stored is None,
            **made_of(self.config, batch, self._weights),
        )
        self._weights = call(
            self.learner.save,
            str(self.checkpoints),
            record={"update": dataclasses.asdict(update)},
            keep=self.config.run.keep_checkpoints,
        )
        self.store.commit_update(dataclasses.replace(update, checkpoint=str(self._weights)))
        self.update_index += 1
        self.policy_version, self.parent_version = self.policy_version + 1, self.policy_version
        return metrics

    def checkpointed(self) -> Path:
        """The checkpoint of the learner's state; of the starting weights one that no resume looks at."""
        newest = checkpoint.latest(self.checkpoints)
        if newest is None:
            newest = call(self.learner.save, str(self.folder / "start"), record={}, keep=1)
        return Path(newest)

    def go_back(self, source: Path, to_version: int) -> None:
        """Make the state in a checkpoint, that of `to_version`, a new version, and publish it."""
        newest = checkpoint.latest(self.checkpoints)
        if newest is None:
            raise StoreError(f"run {self.config.run.id!r} has made no update that could be given up")
        call(self.learner.load, str(source))
        self.policy_version = 1 + max(one.policy_version for one in self.store.policies(self.config.run.id))
        self.parent_version = to_version
        record = checkpoint.load_record(newest) | {"restored": [self.policy_version, to_version]}
        keep = self.config.run.keep_checkpoints
        self._weights = call(self.learner.save, str(self.checkpoints), record=record, keep=keep)
        self._publish_weights()

    def publish(self) -> Metrics:
        """Serve the learner's weights, prove that they are served, and judge them; then others may follow.

        Where monitors may give the version up, others follow behind `Watch.check` (`advance`).
        """
        started = time.monotonic()
        metrics = self._publish_weights() | {"time/publish_s": time.monotonic() - started}
        metrics |= self._judge()
        if not self.watch.may_roll_back:
            self.advance()
        return metrics

    def advance(self) -> None:
        """Let rollouts of the version that is served now follow; said again, it changes nothing."""
        self.source.advance(update_index=self.update_index, policy_version=self.policy_version)

    def _judge(self) -> Metrics:
        """What follows from decisions about the version that is served, and from its evaluation, if due."""
        return self.rollbacks.check() if self.gate is None else self.gate.check()

    def _give_up(self, why: str, numbers: Mapping[str, float]) -> None:
        """Go back to the promoted version, which the next update starts from."""
        metrics = self.rollbacks.give_up(why, numbers) | self._judge()
        self.store.put_metrics(self.config.run.id, self.update_index - 1, metrics)

    def _publish_weights(self) -> Metrics:
        if self.config.stored is not None:  # no engine serves it
            self._put_policy()
            return {}
        while True:
            try:
                return self._publish_once()
            except PublishError as error:
                if not self.served.was_away():
                    raise
                logger.warning("publishing again: %s", error)
                self._probe_before = None  # what the engine serves now was never compared with it

    def _publish_once(self) -> Metrics:
        probe = Probe(
            token_ids=[row.token_ids.tolist() for row in self._probe_rows],
            learner=call(self.learner.score, [scored_whole(row) for row in self._probe_rows]),
            tolerance_nats=self.config.serving.publish_tolerance,
            learner_before=self._probe_before,
        )
        report = self.served.publish(self.policy_version, self._export, probe)
        # Only now: engines that may still be paused by a publish that died can't say what they compute.
        self._probe_before = None
        self._put_policy()
        return report.metrics()

    def _put_policy(self) -> None:
        version, made_from = self.policy_version, self.parent_version
        record = policy_of(self.config.run.id, version, self._weights, made_from, self._parent)
        self.store.put_policy(record)

    def _export(self, path: str) -> object:
        """Write what is published: a file of all weights, or an adapter's folder below `path`."""
        serving = self.config.serving
        if serving.transfer == "lora":
            named = {"model": serving.served_name, "version": self.policy_version}
            return call(self.learner.export_adapter, path, **named)
        return call(self.learner.export_weights, path)

    def _set(self, index: int) -> list[list[Rollout]]:
        """The groups of a set of tasks; what is in the store already is asked for again as it is."""
        assert self._sampler is not None
        tasks = self._sampler.tasks(index)
        if self.gate is not None:
            self.gate.refuse_held_out(tasks)
        turns = self.config.curriculum.turns_at(self.update_index)
        rollouts = set_rollouts(self.config, index, tasks, turn_budget=turns)
        size = self.config.rollout.group_size
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def train(
    config: TrainConfig,
    *,
    keys: RunKeys | None = None,
    on_update: Callable[[int, Metrics], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    evaluate_after: bool = True,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
    parent: Policy | None = None,
    on_end: Callable[[Run, str], None] | None = None,
) -> TrainReport:
    """Run until `run.updates` updates are done, `[stop]` says so, or nothing is left to learn.

    The same command continues after a crash.

    Args:
        config: See `spangrad.trainer.config`.
        keys: Bearer keys; None: read from `hub.keys`.
        on_update: Called with (update index, metrics) after every update.
        on_note: Called with a line for the person who started the run: where it continues, why it ended.
        evaluate_after: Evaluate in between as `eval.every` says.
        is_asked_to_stop: Asked between two updates; a run on live sessions ends where it says so.
        parent: As of a `Run`.
        on_end: Called with the run and why, when it has gone as far as it should.

    Raises:
        PausedError: A monitor paused the run; all that was trained is kept.
    """
    report = TrainReport()
    with Run(config, keys, on_note=on_note, parent=parent) as run:
        while run.wait(is_asked_to_stop):
            try:
                batch, rollouts, metrics = run.collect()
            except EmptyBatchError as error:
                run.go_on_after(error)
                continue
            metrics = run.learn(batch, rollouts, metrics)
            later = run.publish()
            if evaluate_after and config.eval.every and run.update_index % config.eval.every == 0:
                found = evaluate_between(run.store, config, run.keys, run.policy_version, run.served)
                later |= found.metrics
                report.evaluations.append(found.evaluation)
            run.store.put_metrics(config.run.id, run.update_index - 1, later)
            metrics |= later
            report.history.append(metrics)
            if on_update is not None:
                on_update(run.update_index - 1, metrics)
            check_metric(config, metrics, run.update_index)
            run.watch.check()
            run.advance()
        if run.ended is not None and on_end is not None:
            on_end(run, run.ended)
        report.ended = run.ended
        report.updates = run.update_index
        report.policy_version = run.policy_version
    return report
