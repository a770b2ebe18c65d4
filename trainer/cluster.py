"""Ray for a run: the local cluster and the learner actor."""

import logging
import os
import shlex
import sys
from typing import Any

import ray

from spangrad.errors import ClusterError
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.processes import QUIET_ENV

OBJECT_STORE_BYTES = 200 * 2**20
LOGS = "/tmp/ray/session_latest/logs"
"""Where Ray keeps the logs of the newest local cluster, unless RAY_TMPDIR says otherwise."""


def start_ray() -> None:
    """Start a small cluster that ends with this process, if there is none."""
    if ray.is_initialized():
        return
    os.environ.update({name: value for name, value in QUIET_ENV.items() if name not in os.environ})
    ray.init(
        num_cpus=max(2, os.cpu_count() or 2),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=True,
        logging_level=logging.ERROR,
    )


def start_learner(config: LearnerConfig) -> Any:
    """The learner as a Ray actor in a process of its own; errors while loading surface at the first call."""
    actor = ray.remote(Learner).options(
        num_cpus=1,
        runtime_env={
            "env_vars": {**QUIET_ENV, "OMP_NUM_THREADS": str(config.threads)},
            # Ray puts it into a shell command as it is: a path with a space would fall apart.
            "py_executable": shlex.quote(sys.executable),
        },
    )
    return actor.remote(config)


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
