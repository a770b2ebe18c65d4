"""Rollout workers: claim rollouts from the hub, run the agent, grade, finish.

A worker is a Ray task. It holds the evaluator's key and starts the agent in a child
process (`spangrad.trainer.agent_host`) that holds the agent's key only. Grading
happens here, after the rollout has ended.

* A rollout is finished only after its spans are durable in the store.
* A failed or overdue attempt is requeued while attempts are left; half a rollout is
  never marked as succeeded.
* A reward function that raises gives no reward, not 0; it is counted.
* While the engine is away no attempt is burned: the worker waits for it.
"""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from spangrad.errors import EngineError, LeaseLostError, RolloutError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Reward, Rollout, RolloutStatus
from spangrad.trainer.plugins import load_callable
from spangrad.trainer.processes import QUIET_ENV, die_with_parent, last_line

logger = logging.getLogger(__name__)

LEASE_S = 30.0
"""Lease of a claimed rollout; a heartbeat every third of it."""
FLUSH_EVERY_S = 0.25
"""Ended rollouts are flushed and finished together this often."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a rollout worker needs to know."""

    store: str
    """Hub URL."""
    evaluator_key: str | None
    agent_key: str | None
    gateway_url: str
    model: str
    """Name under which the policy is served."""
    function: str
    reward: str | None
    """None: rollouts get no reward (recording an expert, say)."""
    base_dir: str
    run_id: str
    split: str
    concurrency: int
    timeout_s: float
    temperature: float
    """Put into the task as `temperature`."""
    log: str
    """File for what the agent prints."""
    policy_version: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    engine_wait_s: float = 180.0
    check_engine: bool = True
    """False: `gateway_url` is no gateway but some other server that speaks OpenAI's API (an expert, say)."""

    def recording(self, *, run_id: str, url: str) -> "WorkerConfig":
        """The same worker for rollouts of another run against another server."""
        return replace(self, run_id=run_id, gateway_url=url.removesuffix("/v1"), check_engine=False)


@dataclass(slots=True)
class WorkerReport:
    """What one worker did."""

    finished: int = 0
    failed_attempts: int = 0
    timed_out: int = 0
    lost_leases: int = 0
    reward_errors: int = 0
    first_error: str | None = None
    """Text of the first failure or reward error, for the person who looks."""


class RolloutWorker:
    """Runs queued rollouts of one run and split until none is left to claim."""

    def __init__(self, config: WorkerConfig) -> None:
        """Connect to the hub and load the reward function."""
        self._config = config
        self._store: Store = open_store(config.store, config.evaluator_key)
        self._reward: Callable[..., Any] | None = (
            load_callable(config.reward, config.base_dir) if config.reward else None
        )
        self._running: dict[str, tuple[Rollout, float]] = {}
        self._ended: list[tuple[Rollout, dict[str, Any]]] = []
        self._report = WorkerReport()
        self._name = f"worker-{os.getpid()}"
        self._host: _HostProcess | None = None

    def run(self) -> WorkerReport:
        """Work until the queue has nothing left for this run and split."""
        beat = threading.Event()
        beating = threading.Thread(target=self._heartbeat, args=(beat,), daemon=True, name="heartbeat")
        beating.start()
        try:
            while True:
                self._claim()
                if not self._running and not self._ended:
                    return self._report
                self._collect()
                self._finish_ended()
                self._stop_overdue()
        finally:
            beat.set()
            if self._host is not None:
                self._host.stop()
            beating.join()
            self._store.close()

    def _claim(self) -> None:
        free = self._config.concurrency - len(self._running)
        if free <= 0:
            return
        claimed = self._store.claim(
            worker=self._name,
            limit=free,
            lease_s=LEASE_S,
            run_id=self._config.run_id,
            split=self._config.split,
            policy_version=self._config.policy_version,
        )
        for rollout in claimed:
            self._running[rollout.rollout_id] = (rollout, time.monotonic() + self._config.timeout_s)
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

    def _agent_host(self) -> "_HostProcess":
        if self._host is None:
            self._host = _HostProcess(self._config)
        return self._host

    def _collect(self) -> None:
        """Take replies for FLUSH_EVERY_S, or until a claim can be useful."""
        deadline = time.monotonic() + FLUSH_EVERY_S
        while self._running and (left := deadline - time.monotonic()) > 0:
            reply = self._agent_host().receive(left)
            if reply is None:
                continue
            if "exit" in reply:
                self._host = None
                self._requeue_all("AgentHostError", reply["exit"])
                return
            rollout_id = reply.get("done") or reply.get("failed")
            if rollout_id is None:
                continue
            rollout, _ = self._running.pop(rollout_id, (None, 0.0))
            if rollout is not None and rollout.attempt == reply["attempt"]:
                self._ended.append((rollout, reply))

    def _finish_ended(self) -> None:
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        if self._host is not None and not self._host.flush():
            logger.warning("%s: the tracer could not hand over all spans in time", self._name)
        failures = [reply for _, reply in ended if "failed" in reply]
        for rollout, reply in ended:
            if "failed" in reply:
                self._fail(rollout, reply["error_type"], reply["error"])
            else:
                self._finish(rollout, reply["output"])
        if failures and self._config.check_engine:
            wait_for_engine(self._config.gateway_url, self._config.engine_wait_s)

    def _finish(self, rollout: Rollout, output: Any) -> None:
        value = None
        if self._reward is not None:
            try:
                value = self._reward({**(rollout.task or {})}, output)
            except Exception as error:  # the reward is missing, not 0
                self._report.reward_errors += 1
                self._remember(f"reward of {rollout.rollout_id}: {type(error).__name__}: {error}")
        try:
            if value is not None:
                self._store.put_rewards(
                    [Reward(rollout_id=rollout.rollout_id, value=float(value), attempt=rollout.attempt)]
                )
            self._store.finish(rollout.rollout_id, rollout.attempt, output=output)
            self._report.finished += 1
        except LeaseLostError:
            self._report.lost_leases += 1

    def _fail(self, rollout: Rollout, error_type: str, error: str) -> None:
        self._report.failed_attempts += 1
        self._remember(f"{rollout.rollout_id}: {error_type}: {error}")
        try:
            self._store.finish(
                rollout.rollout_id,
                rollout.attempt,
                status=RolloutStatus.FAILED,
                error_type=error_type,
                error=error,
                retry=True,
            )
        except LeaseLostError:
            self._report.lost_leases += 1

    def _stop_overdue(self) -> None:
        now = time.monotonic()
        overdue = [rollout for rollout, until in self._running.values() if until < now]
        if not overdue:
            return
        self._report.timed_out += len(overdue)
        if self._host is not None:  # a thread can't be stopped, its process can
            self._host.stop()
            self._host = None
        self._requeue_all(
            "TimeoutError", f"over {self._config.timeout_s:.0f} s; the agent's process was restarted"
        )

    def _requeue_all(self, error_type: str, error: str) -> None:
        running, self._running = self._running, {}
        for rollout, _ in running.values():
            self._fail(rollout, error_type, error)
        if running and self._config.check_engine:
            wait_for_engine(self._config.gateway_url, self._config.engine_wait_s)

    def _heartbeat(self, stop: threading.Event) -> None:
        while not stop.wait(LEASE_S / 3):
            held = [(r.rollout_id, r.attempt) for r, _ in list(self._running.values())]
            held += [(r.rollout_id, r.attempt) for r, _ in list(self._ended)]
            if not held:
                continue
            try:
                self._store.heartbeat(held, worker=self._name, lease_s=LEASE_S)
            except Exception as error:  # a missed beat only risks the lease
                logger.warning("%s: heartbeat failed: %s", self._name, error)

    def _remember(self, text: str) -> None:
        if self._report.first_error is None:
            self._report.first_error = text
            logger.warning("%s", text)


class _HostProcess:
    """The agent's process, seen from the worker."""

    def __init__(self, config: WorkerConfig) -> None:
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._flushes = 0
        self._flushed = threading.Condition()
        self._flushed_up_to = (0, True)
        log = Path(config.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "spangrad.trainer.agent_host",
                    *("--function", config.function),
                    *("--base-dir", config.base_dir),
                    *("--concurrency", str(config.concurrency)),
                    *("--store", config.store),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_agent_env(config),
                preexec_fn=die_with_parent,
            )
        threading.Thread(target=self._read, daemon=True, name="agent-host").start()
        first = self.receive(120.0)
        if first is None or "ready" not in first:
            self.stop()
            raise RolloutError(
                f"the agent {config.function!r} could not be started: {last_line(log)} (log: {log})"
            )

    def send(self, request: dict[str, Any]) -> None:
        """Send one request; a dead process is noticed by `receive`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Next reply, or None; `{"exit": text}` when the process has ended."""
        try:
            return self._replies.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def flush(self, timeout_s: float = 35.0) -> bool:
        """Wait until all spans of ended rollouts are handed over."""
        self._flushes += 1
        self.send({"flush": self._flushes})
        with self._flushed:
            reached = self._flushed.wait_for(
                lambda: self._flushed_up_to[0] >= self._flushes or self._process.poll() is not None, timeout_s
            )
            return reached and self._flushed_up_to == (self._flushes, True)

    def stop(self) -> None:
        """End the process: close its input, wait shortly, then kill."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            if "flushed" in reply:
                with self._flushed:
                    self._flushed_up_to = (reply["flushed"], reply["ok"])
                    self._flushed.notify_all()
            else:
                self._replies.put(reply)
        code = self._process.wait()
        with self._flushed:
            self._flushed.notify_all()
        self._replies.put({"exit": f"the agent's process ended with {code}: {last_line(self._log)}"})


def _agent_env(config: WorkerConfig) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SPANGRAD_", "RAY_"))}
    env |= QUIET_ENV
    env |= {
        "OPENAI_BASE_URL": f"{config.gateway_url}/v1",
        "OPENAI_API_KEY": config.agent_key or "none",
        "OPENAI_MODEL": config.model,
        "OMP_NUM_THREADS": "1",
        "LANGSMITH_TRACING": "false",
    }
    if config.agent_key:
        env["SPANGRAD_KEY"] = config.agent_key
    return env | dict(config.env)


def engine_answers(gateway_url: str) -> bool:
    """True if the gateway is up and says that its engine answers."""
    try:
        reply = httpx.get(f"{gateway_url}/spangrad/health", timeout=10.0)
        return reply.status_code == 200 and bool(reply.json().get("engine_reachable"))
    except (httpx.HTTPError, ValueError):
        return False


def wait_for_engine(gateway_url: str, timeout_s: float) -> None:
    """Wait until the engine behind a gateway answers; EngineError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not engine_answers(gateway_url):
        if time.monotonic() > deadline:
            raise EngineError(
                f"no engine has answered behind {gateway_url} for {timeout_s:.0f} s;"
                " start it again (`spangrad serve`), then the same command continues"
            )
        time.sleep(0.5)


def run_worker(config: WorkerConfig) -> WorkerReport:
    """Body of the Ray task."""
    return RolloutWorker(config).run()
