"""The section `[cluster]` of a run's config: which Ray cluster it runs on, and what goes where.

Knows values and what has an effect beside what. Loads no Ray.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import require

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]
"""`pack`: on as few nodes as possible; `spread`: on as many; `strict_`: on one, or each on another, or not at
all."""
_LEAST = {"count": 1, "gpus": 0, "cpus": 1, "max_model_len": 2, "max_num_seqs": 1}
"""Of a run's own engines."""


@dataclass(frozen=True, slots=True)
class LearnerPlace:
    """Where learner workers go."""

    resources: Mapping[str, float] = field(default_factory=dict)
    """What each needs of its node beside a CPU, and a GPU where `learner.device` is `cuda`: names that nodes
    were started with (`ray start --resources`)."""
    placement: Placement = "pack"
    """Of several learner workers."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "cluster.learner.")
        _check_resources("learner", self.resources)


@dataclass(frozen=True, slots=True)
class WorkersPlace:
    """Where rollout workers go, those of evaluations to the same places."""

    cpus: float = 0.0
    """CPUs that each has for itself and its agents; 0 or more."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each needs of its node, as for the learner."""
    placement: Placement = "pack"
    """Of several workers (`agent.workers`)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "cluster.workers.")
        require(self.cpus >= 0, "cluster.workers.cpus", self.cpus, "0 or more")
        _check_resources("workers", self.resources)


@dataclass(frozen=True, slots=True)
class OwnEnginesConfig:
    """vLLM servers that the run starts, starts again, and ends."""

    count: int = 1
    """How many; 1 or more."""
    gpus: int = 0
    """GPUs of each, over which vLLM divides the model; 0: it computes on CPUs. 0 or more."""
    cpus: int = 1
    """CPUs that each has, and threads that it computes with where it has no GPU; 1 or more."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each needs of its node, as for the learner."""
    placement: Placement = "pack"
    """Of several engines."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32: the learner recomputes the engine's logprobs to about 1e-5 nats; bfloat16: to about 0.04."""
    max_model_len: int = 1024
    """Longest prompt plus completion, tokens; 2 or more."""
    max_num_seqs: int = 64
    """Calls that each computes at the same time; more wait. 1 or more."""
    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM's server; they win over what is set here."""
    startup_timeout_s: float = 300.0
    """How long a start may take, seconds; more than 0."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "cluster.engines.")
        for name, least in (
            ("count", 1),
            ("gpus", 0),
            ("cpus", 1),
            ("max_model_len", 2),
            ("max_num_seqs", 1),
        ):
            value = getattr(self, name)
            require(value >= least, f"cluster.engines.{name}", value, f"{least} or more")
        timeout_s = self.startup_timeout_s
        require(timeout_s > 0, "cluster.engines.startup_timeout_s", timeout_s, "more than 0")
        _check_resources("engines", self.resources)
        _refuse_lone("engines.placement", self.placement, self.count, "cluster.engines.count")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Which Ray cluster, and who goes where in it."""

    address: str = "local"
    """`local`: one that the run starts on its machine and that ends with it. `auto`, or the head's
    `host:port`: one that runs; the run's machine is a node of it."""
    wait_s: float = 60.0
    """How long the cluster may take to have places for all, seconds; more than 0."""
    learner: LearnerPlace = field(default_factory=LearnerPlace)
    workers: WorkersPlace = field(default_factory=WorkersPlace)
    engines: OwnEnginesConfig | None = None
    """Engines of the run's own; None: `serving.engine_url` or `serving.engine_urls` names them."""

    def __post_init__(self) -> None:
        """Refuse what has no effect on a cluster of one machine."""
        check_values(self, "cluster.")
        require(self.wait_s > 0, "cluster.wait_s", self.wait_s, "more than 0")
        host, colon, port = self.address.rpartition(":")
        is_address = bool(host and colon and port.isdecimal()) and "/" not in host
        require(
            self.address in ("local", "auto") or is_address,
            "cluster.address",
            self.address,
            "'local', 'auto' or 'host:port' of the head (`ray start --head`)",
        )
        if not self.is_local:
            return
        sections: list[tuple[str, Any, tuple[str, ...]]] = [
            ("learner.", self.learner, ("resources", "placement")),
            ("workers.", self.workers, ("cpus", "resources", "placement")),
            ("engines.", self.engines, ("resources", "placement")),
            ("", None if self.engines else self, ("wait_s",)),
        ]
        for section, settings, names in sections:
            for name in names:
                if settings is not None and getattr(settings, name) != _default(settings, name):
                    raise ConfigError(
                        f"cluster.{section}{name} = {getattr(settings, name)!r} has no effect with"
                        " cluster.address 'local', one machine of its own; leave it out, or name a cluster"
                    )

    @property
    def is_local(self) -> bool:
        """Whether the run starts a cluster of its own."""
        return self.address == "local"

    def check(
        self, *, learners: int, workers: int, makes_rollouts: bool, asks_engines: bool, names_engines: bool
    ) -> None:
        """Refuse what has no effect beside the rest of the config.

        Args:
            learners: `learner.workers`.
            workers: `agent.workers`.
            makes_rollouts: False: the run learns from live agents, or from what is in the store.
            asks_engines: False: it learns from the store alone.
            names_engines: Whether `serving` names engines.

        Raises:
            ConfigError: Says which setting, and why.
        """
        _refuse_lone("learner.placement", self.learner.placement, learners, "learner.workers")
        if not makes_rollouts and self.workers != WorkersPlace():
            raise ConfigError(
                "cluster.workers has no effect with [production] and [stored], where the run makes no"
                " rollouts; leave one out"
            )
        if self.engines is not None and not asks_engines:
            raise ConfigError(
                "cluster.engines has no effect with [stored], where no engine is asked; leave one out"
            )
        _refuse_lone("workers.placement", self.workers.placement, workers, "agent.workers")
        if self.workers.placement != "pack" and not (self.workers.cpus or self.workers.resources):
            raise ConfigError(
                f"cluster.workers.placement = {self.workers.placement!r} has no effect on workers that need"
                " nothing of a node; set cluster.workers.cpus or cluster.workers.resources"
            )
        if self.engines is not None and names_engines:
            raise ConfigError(
                "serving.engine_url or serving.engine_urls names engines beside cluster.engines, which the"
                " run starts and which alone would count; leave out one of them"
            )


def may_listen(host: str) -> bool:
    """Whether an engine, whose control endpoints take no key, may listen at this address."""
    address = ipaddress.ip_address(host)
    return (address.is_private or address.is_loopback) and not address.is_unspecified


def _check_resources(section: str, resources: Mapping[str, float]) -> None:
    for name, amount in resources.items():
        where = f"cluster.{section}.resources.{name}"
        if name.lower() in ("cpu", "gpu", "memory", "object_store_memory"):
            raise ConfigError(
                f"{where} is not a resource of one's own; expected a name that nodes were given"
            )
        if not amount > 0 or (amount > 1 and amount != int(amount)):
            raise ConfigError(f"{where} is {amount!r}, expected a share of 1, or a whole number")


def _refuse_lone(name: str, placement: Placement, count: int, what: str) -> None:
    if count == 1 and placement != "pack":
        raise ConfigError(f"cluster.{name} = {placement!r} has no effect with {what} 1; leave it out")


def _default(settings: Any, name: str) -> Any:
    (one,) = (one for one in fields(settings) if one.name == name)
    return one.default if one.default_factory is MISSING else one.default_factory()
