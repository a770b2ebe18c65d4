"""Agents, tasks and rewards that misbehave, for tests of the rollout worker."""

import os
import signal
import sys
import time
from pathlib import Path

import httpx


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
    if what == "call":
        _call()
    if what == "call until told to stop":
        return {"calls": _until_told()}
    if what == "kill gateway":
        _call()
        if not (marker := Path(task["marker"])).exists():
            marker.touch()
            os.kill(task["pid"], signal.SIGKILL)  # its span of the call above dies with it
        _wait_for_gateway()
        _call("hello again")
    if what == "kill worker" and not (marker := Path(task["marker"])).exists():
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    if what == "wait for grader":
        _wait_until(Path(task["marker"]).exists)
    if what == "outlive gateway":
        _wait_until(lambda: not Path(f"/proc/{task['pid']}").exists())
    return {"text": what}


def _until_told():
    """Act for as long as the policy has something to do, at most 20 times."""
    for number in range(20):
        if _call(f"go {number}").json()["choices"][0]["message"]["content"] == "Enough.":
            return number
    return 20


def _call(text="hello"):
    body = {"model": "none", "messages": [{"role": "user", "content": text}]}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    return httpx.post(url, json=body, headers=headers, timeout=20).raise_for_status()


def _wait_until(condition):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)


def _wait_for_gateway():
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/spangrad/health", timeout=5)
        except httpx.HTTPError:
            time.sleep(0.05)
        else:
            return


async def run_async(task):
    """The same, as a coroutine."""
    return run(task)


def reward(task, output):
    """What the task asks for."""
    return task.get("reward", 1.0)


def slow_reward(task, output):
    """A grader that takes longer than a rollout may, where the task says so."""
    if "grade_s" in task:
        Path(task["marker"]).touch()
        time.sleep(task["grade_s"])
    return 1.0


def exiting_reward(task, output):
    """A grader that ends the process."""
    sys.exit(1)
