"""What an agent's process is told first: which agent it runs, and how that reaches the policy.

Written by the worker, read by `spangrad.trainer.rollouts.agent_host`. Has the agent's key, never another.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self
from urllib.parse import quote

MAX_OUTPUT_BYTES: Final = 2**20
"""Of what a program prints or a server answers. Outputs are stored, many in one request to the hub."""


@dataclass(frozen=True, slots=True)
class AgentStart:
    """Two workers' configs that start the same agent can share its process."""

    function: str
    command: tuple[str, ...]
    url: str
    """One of the three; the others are empty."""
    headers: Mapping[str, str]
    """For `url`."""
    env: Mapping[str, str]
    base_dir: str
    """Folder of files that `function` and `command` name."""
    store: str
    gateway_url: str
    has_gateway: bool
    """False: `gateway_url` is a server that knows nothing of rollouts."""
    key: str | None
    """The agent's."""
    model: str
    """Name under which the policy is served."""

    @property
    def name(self) -> str:
        """How to call the agent."""
        return self.function or self.url or shlex.join(self.command)

    @property
    def may_outlive_its_parent(self) -> bool:
        """Whether the process is to see that the worker has gone, and end programs of programs then.

        Where a function of somebody else's runs in it, it can't be relied on for that.
        """
        return bool(self.command)

    def policy_url(self, rollout: Mapping[str, Any]) -> str:
        """Address at which the gateway takes calls for those of this attempt; clients add `/v1`."""
        if not self.has_gateway:
            return self.gateway_url
        return f"{self.gateway_url}/rollout/{quote(rollout['rollout_id'], safe='')}/{rollout['attempt']}"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Undo `to_json`."""
        told = json.loads(line)
        return cls(**{**told, "command": tuple(told["command"])})
