"""Ray for a run: its cluster, places in it, and the learner as an actor, alone or as a group of workers."""

import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import ray
from ray.exceptions import RayError, RayTaskError

from spangrad.errors import ClusterError
from spangrad.trainer.cluster_config import ClusterConfig
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.places import Mark, Places
from spangrad.trainer.processes import QUIET_ENV

OBJECT_STORE_BYTES = 200 * 2**20
LOGS = "/tmp/ray/session_latest/logs"
"""Where Ray keeps the logs of the newest local cluster, unless RAY_TMPDIR says otherwise."""
CONNECT_S: Final = 10.0
_TOKEN: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(slots=True)
class Reserved:
    """What a run has in a cluster that it joined."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    learner: Places | None = None
    """None: a local cluster, or Ray Train finds places for several workers."""
    workers: Places | None = None
    """None: rollout workers need nothing of a node."""
    mark: Mark | None = None
    """None: everything is on one machine."""
    idle: list[Any] = field(default_factory=list)
    """Rollout workers that nobody has sent; they keep their agents' processes."""


_RESERVED: list[Reserved] = [Reserved()]
"""Of this process, as Ray itself is; the last one counts."""


def start_ray(learner_workers: int = 1, cluster: ClusterConfig | None = None) -> None:
    """Join the cluster, or start a small one that ends with this process; nothing if one was started before.

    A small one has a place for every learner, and for every engine of the run's own.

    Raises:
        ClusterError: There is none to join.
    """
    if ray.is_initialized():
        return
    cluster = cluster or ClusterConfig()
    os.environ.update({name: value for name, value in QUIET_ENV.items() if name not in os.environ})
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not cluster.is_local:
        _join(cluster.address, quiet)
        return
    engine_cpus = cluster.engines.count * cluster.engines.cpus if cluster.engines else 0
    ray.init(
        num_cpus=max(2, os.cpu_count() or 2, learner_workers) + engine_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        configure_logging=True,
        **quiet,
    )


def _join(address: str, quiet: dict[str, Any]) -> None:
    has_token = any(name in os.environ for name in _TOKEN) or Path("~/.ray/auth_token").expanduser().is_file()
    mode_before = os.environ.get("RAY_AUTH_MODE")
    if has_token:  # as `ray start` does; `ray.init` joins without one unless it is told to
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        if ":" in address:  # Ray itself goes on trying for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        if mode_before is None:  # a cluster that this process starts later has no such token
            os.environ.pop("RAY_AUTH_MODE", None)
        said = " ".join(str(error.__cause__ or error).split())
        raise ClusterError(
            f"the Ray cluster at {address!r} (cluster.address) can't be joined: {said[-300:]}; start a node"
            " of it on this machine: `ray start --address`"
        ) from error


@contextmanager
def reserved(
    cluster: ClusterConfig, learner: LearnerConfig, workers: int, folder: Path
) -> Iterator[Mark | None]:
    """Have places for the learner and for so many rollout workers, for as long as the block lasts.

    Gives what shows whether another machine sees `folder`; None: all is on this one.

    Raises:
        ClusterError: The cluster has no such places, or the learner's does not see the folder.
    """
    if cluster.is_local:
        yield None
        return
    with ExitStack() as held:
        now = Reserved(cluster, mark=Mark.put(folder))
        if learner.workers == 1:
            places = Places("learner", _learner_needs(cluster, learner), 1, "pack", within_s=cluster.wait_s)
            now.learner = held.enter_context(places)
            look = cast(Any, ray.remote)(_look).options(num_cpus=0, **places.options(0))
            wait_for(look.remote(now.mark, "the learner"))
        needs = cluster.workers
        each = {"CPU": needs.cpus, **needs.resources} if needs.cpus else dict(needs.resources)
        if workers and each:
            now.workers = held.enter_context(
                Places("rollout workers", each, workers, needs.placement, within_s=cluster.wait_s)
            )
        _RESERVED.append(now)
        held.callback(_RESERVED.remove, now)
        yield now.mark


def worker_options(place: int) -> dict[str, Any]:
    """Options of the actor of a rollout worker; evaluations have others at the same places."""
    places = _RESERVED[-1].workers
    return {"num_cpus": 0, **({} if places is None else places.options(place))}


def idle_workers() -> list[Any]:
    """Actors of rollout workers that nobody has sent, to be taken and given back."""
    return _RESERVED[-1].idle


def stop_ray() -> None:
    """End the cluster of this process, if there is one, with all its actors."""
    for one in _RESERVED:
        one.idle.clear()
    ray.shutdown()


def start_learner(config: LearnerConfig) -> Any:
    """The learner as a Ray actor in a process of its own; errors while loading surface at the first call.

    With `workers` above 1 it is an actor that has as many learners do each call together.

    Raises:
        ClusterError: The cluster has no place for so many workers.
    """
    now = _RESERVED[-1]
    env: dict[str, Any] = {"env_vars": {**QUIET_ENV, "OMP_NUM_THREADS": str(config.threads)}}
    if now.cluster.is_local:  # nodes of another cluster have Pythons of their own
        # Ray puts it into a shell command as it is: a path with a space would fall apart.
        env["py_executable"] = shlex.quote(sys.executable)
    needs = _learner_needs(now.cluster, config)
    if config.workers == 1:
        options: dict[str, Any] = {"num_cpus": 1}
        if now.learner is not None:
            options |= {"num_gpus": needs.get("GPU", 0), "resources": dict(now.cluster.learner.resources)}
            options |= now.learner.options(0)
        return ray.remote(Learner).options(runtime_env=env, **options).remote(config)
    from spangrad.trainer.learner_group import RANKS, LearnerGroup  # Ray Train takes a second to import

    found = cast(Any, ray).cluster_resources()
    for needed, amount in needs.items():
        if found.get(needed, 0) < config.workers * amount:
            raise ClusterError(
                f"learner.workers is {config.workers}, each with a {needed}, and the Ray cluster has"
                f" {int(found.get(needed, 0))}; lower it"
            )
    # Ray Train goes to a folder of its own, where relative paths of a config would mean something else.
    own_env = {**env, "env_vars": {**env["env_vars"], "RAY_CHDIR_TO_TRIAL_DIR": "0"}}
    group = cast(Any, ray.remote)(num_cpus=0, concurrency_groups={RANKS: config.workers})(LearnerGroup)
    scaling = {"resources_per_worker": needs, "placement_strategy": now.cluster.learner.placement.upper()}
    return group.options(runtime_env=own_env).remote(config, own_env, scaling, now.mark)


def _learner_needs(cluster: ClusterConfig, config: LearnerConfig) -> dict[str, float]:
    """What one learner worker needs of its node."""
    return {"CPU": 1.0, **({"GPU": 1.0} if config.device == "cuda" else {}), **cluster.learner.resources}


def _look(mark: Mark, who: str) -> None:
    mark.check(who)


def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method of an actor and wait; an error arrives as what it was, not wrapped."""
    return wait_for(method.remote(*arguments, **named))


def wait_for(result: Any) -> Any:
    """`ray.get`, with the error that was raised over there instead of Ray's wrapping of it.

    Raises:
        ClusterError: Ray itself failed: an actor died or could not be started.
    """
    try:
        return ray.get(result)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise
    except RayError as error:
        said = " ".join(str(error).split())
        raise ClusterError(f"Ray: {type(error).__name__}: {said[:500]} (its logs: {LOGS})") from error
