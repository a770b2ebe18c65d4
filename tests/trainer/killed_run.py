"""A played run in a process of its own, which is killed by SIGKILL at a moment that is named."""

import functools
import importlib
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer.played_run import play

from spangrad.trainer.config import load_config


@dataclass(frozen=True)
class Moment:
    """A call of a function, or the end of one."""

    name: str
    """`module:function` or `module:Class.method`."""
    times: int = 1
    when: str = "after"

    def __str__(self) -> str:
        return f"{self.when}-{self.name.partition(':')[2]}-{self.times}"


def kill_at(moment: Moment) -> None:
    """Let this process die then."""
    module, _, path = moment.name.partition(":")
    *outer, last = path.split(".")
    owner: Any = functools.reduce(getattr, outer, importlib.import_module(module))
    function, calls = getattr(owner, last), iter(range(1, sys.maxsize))

    @functools.wraps(function)
    def wrapped(*given: Any, **named: Any) -> Any:
        is_now = next(calls) == moment.times
        if is_now and moment.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*given, **named)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, wrapped)


def run_killed(config: Path, moment: Moment) -> None:
    """Run in such a process, and see that it dies then."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # torch is imported once
    process = processes.Process(target=_run, args=(config, moment), daemon=True)
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL, f"the moment never came: {process.exitcode}"


def _run(config: Path, moment: Moment) -> None:
    kill_at(moment)
    play(load_config(config))
