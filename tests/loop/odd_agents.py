"""Agents, tasks and rewards that misbehave, for tests of the rollout worker. No model is called."""

import os
import sys
import time


def run(task):
    """Do what the task says."""
    what = task["what"]
    if what == "exit":
        sys.exit(3)
    if what == "crash":
        os._exit(9)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise ValueError("not today")
    if what == "surrogate":
        return {"text": "\ud800"}
    if what == "nan":
        return {"value": float("nan")}
    return {"text": what}


async def run_async(task):
    """The same, as a coroutine."""
    return run(task)


def reward(task, output):
    """What the task asks for."""
    return task.get("reward", 1.0)


def exiting_reward(task, output):
    """A grader that ends the process."""
    sys.exit(1)
