"""Rollout workers: claim rollouts from the hub, run the agent, grade, finish.

A worker is a Ray actor. It holds the evaluator's key and starts the agent in a child
process (`spangrad.trainer.rollouts.agent_host`) that holds the agent's key only. Grading
happens here (`endings.py`), after the rollout has ended.

* The gateway knows how many turns a rollout has before its agent gets the task.
* A rollout is finished only after its spans are durable in the store, the agent's and the gateway's.
* A gateway that was restarted or that dropped spans in mid-rollout may have lost calls: the attempt
  is run again. A restart is free, `FREE_GATEWAY_RETRIES` times a rollout; a drop uses the attempt up, as
  it may come back every time.
* An attempt that ended because the agent's server is away or busy is free, too, as often.
* Time in which the worker waits for the gateway, its engine or the agent's server counts in no rollout's
  timeout.
* A failed or overdue attempt is requeued while attempts are left; half a rollout is
  never marked as succeeded.
* A claim is made under the version that the engine serves then: it may change while the worker runs. After a
  failure the worker waits for the engine before it claims more; an engine that came back with older weights
  gets no rollouts.
* A rollout that was given up or lost its lease is no longer counted: another one takes its place. A program
  or a request is ended then, as one that is overdue is. A function can't be stopped without its neighbours:
  it goes on until it ends or is overdue, and then its process is started anew.
* A crash of the agent's process costs an attempt only where it is known whose fault it was.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from spangrad.errors import AgentUnavailableError, PublishError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.rollouts.agent_endpoint import wait_for_agent
from spangrad.trainer.rollouts.agent_process import AgentProcess, WorkerConfig
from spangrad.trainer.rollouts.endings import Endings, WorkerReport
from spangrad.trainer.rollouts.gateway_client import GatewayState, flush, give_turns, wait_for_engine
from spangrad.trainer.rollouts.heartbeat import Heartbeat
from spangrad.trainer.serving.fleet import served_versions
from spangrad.trainer.serving.transfers import transfer_of
from spangrad.user_code import load_callable

logger = logging.getLogger(__name__)

LEASE_S = 30.0
"""Lease of a claimed rollout; a heartbeat every third of it."""
FLUSH_EVERY_S = 0.25
"""Ended rollouts are flushed and finished together this often."""
FREE_RETRIES = 5
"""A rollout for which the gateway is another one, or the agent's server away, yet more often uses its
attempts up: it may be the reason, or two gateways share the address."""
STOP_S = 10.0
"""So long may a rollout take to end when it is told to; then the agent's process is started anew."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A claimed rollout."""

    rollout: Rollout
    until: float
    """When it is overdue, on the monotonic clock."""
    gateway: GatewayState | None
    """State of the gateway when it began."""
    is_stopping: bool = False
    """The agent's process was told to end it."""

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from others."""
        return self.rollout.rollout_id, self.rollout.attempt


class RolloutWorker:
    """Runs queued rollouts until none is left to claim; keeps the agent's process for the next time.

    The body of a Ray actor: one call of `run` at a time.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._name = f"worker-{os.getpid()}"
        self._host: AgentProcess | None = None
        self._abandoned: dict[tuple[str, int], _Attempt] = {}
        """No longer this worker's, and still running in the agent's process."""
        self._told = set[str]()
        """What was said of names of rewards; it is said once, not every update."""

    def run(self, config: WorkerConfig) -> WorkerReport:
        """Work until the queue has nothing left for this run and split.

        Raises:
            RolloutError: The agent can't be started, or its server can't be reached.
            EngineError: The engine stayed away.
        """
        self._config = config
        self._store: Store = open_store(config.store, config.evaluator_key)
        self._report = WorkerReport()
        self._endings = Endings(
            self._store,
            load_callable(config.reward, config.base_dir) if config.reward else None,
            self._report,
            counted=config.reward_names,
            told=self._told,
        )
        self._running: dict[str, _Attempt] = {}
        self._ended: dict[str, tuple[_Attempt, dict[str, Any]]] = {}
        self._is_more_queued = True
        """Whether the last claim got all that it asked for."""
        self._version = config.policy_version
        self._suspects = 0
        self._free_retries: Counter[tuple[str, str]] = Counter()
        """By rollout and what was to blame."""
        self._agent_host()  # an agent that can't be started must not cost a rollout its attempts
        self._wait_for_agent()
        self._gateway: GatewayState | None = None
        while config.has_gateway and self._gateway is None:
            self._flush()
        try:
            with Heartbeat(self._store, self._name, LEASE_S, self._held) as heartbeat:
                while True:
                    self._drop(heartbeat.take_lost())
                    self._claim()
                    if not self._running and not self._ended:
                        return self._report
                    self._collect()
                    self._finish_ended()
                    self._stop_overdue()
        finally:
            self._store.close()

    def stop(self) -> None:
        """End the agent's process."""
        if self._host is not None:
            self._host.stop()
            self._host = None
            self._abandoned.clear()

    def _claim(self) -> None:
        # After a crash with several rollouts running, each runs alone until the guilty one is known.
        most = 1 if self._suspects else self._config.concurrency
        free = most - len(self._running)
        if free <= 0 or not self._sees_weights():
            return
        claimed = self._store.claim(
            worker=self._name,
            limit=free,
            lease_s=LEASE_S,
            run_id=self._config.run_id,
            split=self._config.split,
            policy_version=self._version,
        )
        self._is_more_queued = len(claimed) == free
        for rollout in claimed:
            until = time.monotonic() + self._config.timeout_s
            self._running[rollout.rollout_id] = _Attempt(rollout, until, self._gateway)
        self._give_turns(claimed)
        for rollout in claimed:
            self._agent_host().send(
                {
                    "run": {
                        "rollout_id": rollout.rollout_id,
                        "attempt": rollout.attempt,
                        "task_id": rollout.task_id,
                        "task": {**(rollout.task or {}), "temperature": self._config.temperature},
                    }
                }
            )

    def _sees_weights(self) -> bool:
        """Whether an engine serves what rollouts may begin with; the oldest such version is `_version` then.

        Of several engines one with other weights gets no calls, or is published to before the next round.
        """
        config = self._config
        if not config.engine_urls:
            self._version = config.policy_version
            return True
        if self._report.engine_changed:
            return False
        began = time.monotonic()
        try:
            served = served_versions(config.engine_urls, transfer_of(config.transfer, config.model)).values()
        except PublishError as error:
            logger.warning("%s: %s", self._name, error)
            self._wait_for_engine(began)
            return False
        oldest = config.policy_version or 0
        self._version = min((one for one in served if one is not None and one >= oldest), default=None)
        self._report.engine_changed = self._version is None
        return not self._report.engine_changed

    def _drop(self, lost: Sequence[tuple[str, int]]) -> None:
        """Count no longer what somebody else has by now."""
        for key in lost:
            attempt = self._running.get(key[0])
            if attempt is not None and attempt.key == key:
                self._abandoned[key] = self._stop(self._running.pop(key[0]), "given up")
                self._report.lost_leases += 1
                logger.warning("%s: %s, attempt %d, is no longer this worker's", self._name, *key)

    def _give_turns(self, rollouts: Sequence[Rollout]) -> None:
        """Have the gateway know how many turns they have before their agents can take one."""
        config = self._config
        while config.has_gateway:
            began = time.monotonic()
            try:
                give_turns(config.gateway_url, config.evaluator_key, rollouts, config.turns_reply)
            except httpx.HTTPError as error:
                logger.warning("%s: the gateway takes no turns of rollouts: %s", self._name, error)
                self._wait_for_engine(began)
            else:
                return

    def _agent_host(self) -> AgentProcess:
        if self._host is not None and self._host.start != self._config.agent:
            self.stop()
        if self._host is None:
            self._host = AgentProcess(self._config)
        return self._host

    def _collect(self, within_s: float = FLUSH_EVERY_S) -> None:
        """Take replies for a while, or until a claim can be useful."""
        deadline = time.monotonic() + within_s
        while self._running:
            reply = self._agent_host().receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                return
            if "exit" in reply:
                self._agent_died(reply["exit"])
                return
            rollout_id = reply.get("done") or reply.get("failed")
            if rollout_id is None:
                continue
            self._abandoned.pop((rollout_id, reply["attempt"]), None)
            running = self._running.get(rollout_id)
            if running is not None and running.rollout.attempt == reply["attempt"]:
                self._ended[rollout_id] = (running, reply)  # before the pop: the heartbeat must see it
                del self._running[rollout_id]
                self._suspects = max(0, self._suspects - 1)
                if self._is_more_queued and not _is_away(reply):
                    self._claim()

    def _finish_ended(self) -> None:
        if not self._ended or not self._flush():
            return
        ended, handed_in = list(self._ended.values()), time.monotonic()
        for attempt, reply in ended:
            if time.monotonic() - handed_in > FLUSH_EVERY_S:  # a slow reward holds up no other rollout
                self._hand_in()
                handed_in = time.monotonic()
            rollout = attempt.rollout
            before, now = attempt.gateway, self._gateway
            if (before and before.instance) != (now and now.instance):
                text = "the gateway was restarted in mid-rollout; calls may be missing"
                blame = "it may end the gateway, or two share the address"
                self._fail_freely(rollout, "GatewayRestartedError", text, blame)
            elif _is_away(reply):
                self._fail_freely(rollout, reply["error_type"], reply["error"], "it may be the reason")
            elif "failed" in reply:
                self._endings.fail(rollout, reply["error_type"], reply["error"])
            elif before != now:
                text = "the gateway dropped spans in mid-rollout; calls may be missing"
                self._endings.fail(rollout, "SpansDroppedError", text)
            else:
                self._endings.succeed(rollout, reply["output"])
        self._hand_in()
        if any(_is_away(reply) for _, reply in ended):
            self._wait_for_agent()
        if any("failed" in reply for _, reply in ended):
            self._check_engine()

    def _flush(self) -> bool:
        """Whether the spans of everything that has ended are in the store; waits a little if they are not."""
        config = self._config
        is_flushed = self._host is None or self._host.flush()
        if is_flushed and config.has_gateway:
            began = time.monotonic()
            try:
                is_flushed, self._gateway = flush(config.gateway_url, config.evaluator_key)
            except httpx.HTTPError as error:
                logger.warning(
                    "%s: the gateway at %s can't hand over its spans: %s",
                    *(self._name, config.gateway_url, error),
                )
                self._wait_for_engine(began)
                return False
        if not is_flushed:
            logger.warning("%s: spans wait for the hub; rollouts end when they are there", self._name)
            time.sleep(FLUSH_EVERY_S)
        return is_flushed

    def _hand_in(self) -> None:
        for rollout_id in self._endings.hand_in():
            self._ended.pop(rollout_id, None)
            self._running.pop(rollout_id, None)

    def _fail_freely(self, rollout: Rollout, error_type: str, text: str, blame: str) -> None:
        """Have it run again; what is to blame if that comes to nothing every time is said then."""
        self._free_retries[rollout.rollout_id, error_type] += 1
        count = self._free_retries[rollout.rollout_id, error_type]
        if count > FREE_RETRIES:
            text += f" (time {count} for this rollout: {blame})"
        self._endings.fail(rollout, error_type, text, free=count <= FREE_RETRIES)

    def _stop_overdue(self) -> None:
        if not self._overdue(self._running) and not self._overdue(self._abandoned):
            return
        self._collect(0.0)  # what ended while the worker was busy is not overdue
        overdue, abandoned = self._overdue(self._running), self._overdue(self._abandoned)
        if not overdue and not abandoned:
            return
        why = f"over {self._config.timeout_s:.0f} s"
        self._report.timed_out += sum(not attempt.is_stopping for attempt in overdue)
        if not any(attempt.is_stopping for attempt in (*overdue, *abandoned)) and self._agent_host().can_stop:
            for attempt in overdue:
                self._running[attempt.rollout.rollout_id] = self._stop(attempt, why)
            for attempt in abandoned:
                self._abandoned[attempt.key] = self._stop(attempt, why)
            return
        self.stop()  # a thread can't be stopped, its process can
        guilty = {attempt.rollout.rollout_id for attempt in overdue}
        self._give_back("TimeoutError", f"{why}; the agent's process was restarted", guilty=guilty)

    def _stop(self, attempt: _Attempt, why: str) -> _Attempt:
        """Have the agent's process end it if it can; its reply says so."""
        host = self._agent_host()
        if not host.can_stop:
            return attempt
        host.send({"stop": attempt.rollout.rollout_id, "attempt": attempt.rollout.attempt, "why": why})
        return replace(attempt, until=time.monotonic() + STOP_S, is_stopping=True)

    def _overdue(self, attempts: Mapping[Any, _Attempt]) -> list[_Attempt]:
        now = time.monotonic()
        return [attempt for attempt in attempts.values() if attempt.until < now]

    def _agent_died(self, text: str) -> None:
        """Give its rollouts back; only one that ran alone is known to be the reason."""
        alone = set(self._running) if len(self._running) + len(self._abandoned) == 1 else set()
        self.stop()
        self._suspects = max(self._suspects, 0 if alone else len(self._running))
        self._give_back("AgentProcessError", text, guilty=alone)

    def _give_back(self, error_type: str, error: str, *, guilty: set[str]) -> None:
        # What has ended and is not flushed is given back too: its last spans may have died with the process.
        for attempt, _ in self._ended.values():
            self._endings.fail(attempt.rollout, error_type, error, free=True)
        for rollout_id, attempt in self._running.items():
            self._endings.fail(attempt.rollout, error_type, error, free=rollout_id not in guilty)
        self._hand_in()
        self._check_engine()

    def _check_engine(self) -> None:
        """After a failure: wait for the engine, and stop claiming if it came back with other weights."""
        config = self._config
        if not config.has_gateway:
            return
        self._wait_for_engine(time.monotonic())
        self._sees_weights()

    def _wait_for_engine(self, since: float) -> None:
        config = self._config
        wait_for_engine(config.gateway_url, config.engine_wait_s, config.evaluator_key)
        self._count_no_time(since)

    def _wait_for_agent(self) -> None:
        """Wait for the agent's server, if it is one."""
        began = time.monotonic()
        if self._config.url:
            wait_for_agent(self._config.url, self._config.engine_wait_s)
            self._count_no_time(began)

    def _count_no_time(self, since: float) -> None:
        waited_s = time.monotonic() - since
        for rollout_id, attempt in self._running.items():
            self._running[rollout_id] = replace(attempt, until=attempt.until + waited_s)

    def _held(self) -> list[tuple[str, int]]:
        ended = [attempt for attempt, _ in self._ended.copy().values()]
        return [attempt.key for attempt in (*self._running.copy().values(), *ended)]


def _is_away(reply: Mapping[str, Any]) -> bool:
    """Whether a rollout failed because the agent's server is away or busy."""
    return reply.get("error_type") == AgentUnavailableError.__name__
