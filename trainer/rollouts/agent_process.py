"""The agent's process, seen from the worker that starts it.

Knows the protocol of `spangrad.trainer.rollouts.agent_host` and what belongs in that process's
environment: the agent's key, never another. Knows no queue and no rewards.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spangrad.errors import RolloutError
from spangrad.store.records import DEFAULT_REWARD
from spangrad.trainer.processes import QUIET_ENV, die_with_parent, last_line
from spangrad.trainer.rollouts.agent_start import AgentStart
from spangrad.trainer.serving.serving_config import TransferName


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a rollout worker needs to know."""

    store: str
    """Hub URL."""
    evaluator_key: str | None
    agent_key: str | None
    gateway_url: str
    engine_urls: tuple[str, ...]
    """Where the served version can be asked; none: it is not checked."""
    model: str
    """Name under which the policy is served."""
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
    function: str = ""
    command: tuple[str, ...] = ()
    url: str = ""
    """The agent: one of the three."""
    headers: Mapping[str, str] = field(default_factory=dict)
    policy_version: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    engine_wait_s: float = 180.0
    has_gateway: bool = True
    """False: `gateway_url` is no gateway but some other server that speaks OpenAI's API (an expert, say)."""
    reward_names: tuple[str, ...] = (DEFAULT_REWARD,)
    """Rewards that count; others are stored and told."""
    turns_reply: str | None = None
    """What the gateway answers beyond a rollout's last turn; None: an error."""
    transfer: TransferName = "file"
    """How the policy got into the engines: where they tell its version."""

    @property
    def agent(self) -> AgentStart:
        """What the agent's process is to know."""
        return AgentStart(
            function=self.function,
            command=self.command,
            url=self.url,
            headers=dict(self.headers),
            env=dict(self.env),
            base_dir=self.base_dir,
            store=self.store,
            gateway_url=self.gateway_url,
            has_gateway=self.has_gateway,
            key=self.agent_key,
            model=self.model,
        )

    def recording(self, *, run_id: str, url: str) -> "WorkerConfig":
        """The same worker for rollouts of another run against another server."""
        return replace(
            self, run_id=run_id, gateway_url=url.removesuffix("/v1"), engine_urls=(), has_gateway=False
        )


class AgentProcess:
    """One running agent host."""

    def __init__(self, config: WorkerConfig) -> None:
        """Start it and wait until it has loaded the agent; RolloutError with its last words if it can't."""
        self.start = config.agent
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._flushes = 0
        self._flushed = threading.Condition()
        self._flushed_up_to = (0, True)
        log = Path(config.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spangrad.trainer.rollouts.agent_host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_agent_env(config),
                preexec_fn=None if self.start.may_outlive_its_parent else die_with_parent,
            )
        self._reader = threading.Thread(target=self._read, daemon=True, name="agent-host")
        self._reader.start()
        self._write(self.start.to_json())
        first = self.receive(120.0)
        if first is None or "ready" not in first:
            self.stop()
            raise RolloutError(
                f"the agent {self.start.name!r} could not be started: {last_line(log)} (log: {log})"
            )
        self.can_stop: bool = first["can_stop"]
        """Whether a single rollout can be ended."""

    def send(self, request: dict[str, Any]) -> None:
        """Send one request; a dead process is noticed by `receive`."""
        self._write(json.dumps(request))

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
        self._reader.join(5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

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
