"""Ray for a run: the local cluster, and the learner as an actor, alone or as a group of workers."""

import logging
import os
import shlex
import sys
from typing import Any, cast

import ray

from spangrad.errors import ClusterError
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.processes import QUIET_ENV

OBJECT_STORE_BYTES = 200 * 2**20
LOGS = "/tmp/ray/session_latest/logs"
"""Where Ray keeps the logs of the newest local cluster, unless RAY_TMPDIR says otherwise."""


def start_ray(learner_workers: int = 1) -> None:
    """Start a small cluster that ends with this process, if there is none; with a place for every learner."""
    if ray.is_initialized():
        return
    os.environ.update({name: value for name, value in QUIET_ENV.items() if name not in os.environ})
    ray.init(
        num_cpus=max(2, os.cpu_count() or 2, learner_workers),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=True,
        logging_level=logging.ERROR,
    )


def start_learner(config: LearnerConfig) -> Any:
    """The learner as a Ray actor in a process of its own; errors while loading surface at the first call.

    With `workers` above 1 it is an actor that has as many learners do each call together.

    Raises:
        ClusterError: The cluster has no place for so many workers.
    """
    env: dict[str, Any] = {
        "env_vars": {**QUIET_ENV, "OMP_NUM_THREADS": str(config.threads)},
        # Ray puts it into a shell command as it is: a path with a space would fall apart.
        "py_executable": shlex.quote(sys.executable),
    }
    if config.workers == 1:
        return ray.remote(Learner).options(num_cpus=1, runtime_env=env).remote(config)
    from spangrad.trainer.learner_group import RANKS, LearnerGroup  # Ray Train takes a second to import

    needed = "GPU" if config.device == "cuda" else "CPU"
    found = int(cast(Any, ray).cluster_resources().get(needed, 0))
    if found < config.workers:
        raise ClusterError(
            f"learner.workers is {config.workers}, each with a {needed}, and the Ray cluster has {found};"
            " lower it"
        )
    # Ray Train goes to a folder of its own, where relative paths of a config would mean something else.
    own_env = {**env, "env_vars": {**env["env_vars"], "RAY_CHDIR_TO_TRIAL_DIR": "0"}}
    group = cast(Any, ray.remote)(num_cpus=0, concurrency_groups={RANKS: config.workers})(LearnerGroup)
    return group.options(runtime_env=own_env).remote(config, own_env)


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
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        said = " ".join(str(error).split())
        raise ClusterError(f"Ray: {type(error).__name__}: {said[:500]} (its logs: {LOGS})") from error
