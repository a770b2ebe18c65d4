"""Section `[agent]`: the agent, its tasks and its reward.

An agent is a Python function, a program, or a server: exactly one of `function`, `command` and `url`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import require


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent, its tasks and its reward. Functions are `path/to/file.py:name` or `package.module:name`.

    An agent, tasks and a reward are needed unless a run trains on live sessions (`[production]`), or on what
    is stored (`[stored]`).
    """

    function: str = ""
    """Called as `function(task: dict)`; sync or async; returns something JSON can hold.
    `task["temperature"]` is the sampling temperature that the run asks for."""
    command: tuple[str, ...] = ()
    """Program and arguments, started in the folder of the config for every rollout. It reads the task as JSON
    from its standard input; what it prints is the output."""
    url: str = ""
    """Address that the task is posted to as JSON, http or https; the JSON of the answer is the output."""
    tasks: str = ""
    """A JSONL file (one task a line, with `task_id`, optionally `split`), or a function
    `tasks(split, n, seed)` that gives a list of tasks."""
    reward: str = ""
    """Called as `reward(task: dict, output) -> float | dict[str, float] | None` after the rollout ended,
    outside the agent's process. `credit.reward_weights` says which names of a dict count; a number is called
    `reward`."""
    concurrency: int = 16
    """Rollouts that one worker runs at the same time; 1 or more."""
    workers: int = 1
    """Rollout workers (Ray tasks); 1 or more."""
    timeout_s: float = 120.0
    """A rollout that takes longer has failed; more than 0."""
    max_attempts: int = 3
    """Attempts per rollout; 1 or more."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the agent's process; not with `url`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request to `url`, a key of its own say."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "agent.")
        for name in ("concurrency", "workers", "max_attempts"):
            require(getattr(self, name) >= 1, f"agent.{name}", getattr(self, name), "1 or more")
        require(self.timeout_s > 0, "agent.timeout_s", self.timeout_s, "more than 0")
        kinds = [f"agent.{name}" for name in ("function", "command", "url") if getattr(self, name)]
        if len(kinds) > 1:
            raise ConfigError(f"{' and '.join(kinds)} are an agent each, and a run has one; leave others out")
        if self.command:
            require(bool(self.command[0]), "agent.command", self.command, "a program and its arguments")
        if self.url:
            require(_is_address(self.url), "agent.url", self.url, "an address like http://HOST:PORT/PATH")
        if self.url and self.env:
            raise ConfigError(
                "agent.env has no effect with agent.url, whose server somebody else has started; leave it out"
            )
        if self.headers and not self.url:
            raise ConfigError("agent.headers has no effect without agent.url; leave it out")

    def check(self) -> None:
        """Check that all is there that rollouts need.

        Raises:
            ConfigError: The agent, its tasks or its reward is missing.
        """
        if not (self.function or self.command or self.url):
            raise ConfigError("agent: 'function' is missing, or 'command' or 'url'")
        for name in ("tasks", "reward"):
            if not getattr(self, name):
                raise ConfigError(f"agent: {name!r} is missing")


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)
