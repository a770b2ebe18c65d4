"""The rollout follows work to Ray tasks, in a real local Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spangrad.tracer import conventions as c
from tests.tracer.recording import calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer

pytest.importorskip("ray")

DRIVER = """
import os, sys, threading
import httpx, ray, spangrad

url = sys.argv[1]

@ray.remote
def task(prompt, *, again=False):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    httpx.post(url + "/chat/completions", json=body)
    return task.options(name="inner").remote("inner " + prompt) if again else prompt

@ray.remote
def items(prompt):
    for number in range(2):
        body = {"model": "policy", "messages": [{"role": "user", "content": f"item{number} {prompt}"}]}
        httpx.post(url + "/chat/completions", json=body)
        yield number

@ray.remote
class Actor:
    def __init__(self, store):
        spangrad.init(store=store)
    def ask(self, prompt, headers):
        with spangrad.continue_rollout(headers):
            body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
            httpx.post(url + "/chat/completions", json=body)
        return spangrad.flush()

if __name__ == "__main__":
    spangrad.init(store="s")
    barrier = threading.Barrier(2)
    failed = []
    with spangrad.rollout(rollout_id="starts the cluster"):
        ray.init(num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
        spawned = ray.get(ray.remote(lambda: os.environ.get("SPANGRAD_ROLLOUT")).remote())
        assert spawned is None, spawned
    actor = Actor.options(num_cpus=0).remote(os.path.abspath('s'))

    def agent(name):
        try:
            with spangrad.rollout(rollout_id=name):
                barrier.wait(60)
                inner = ray.get(task.remote("task " + name, again=True))
                assert ray.get(inner) == "inner task " + name
                assert [ray.get(item) for item in items.remote(name)] == [0, 1]
                ray.get(actor.ask.remote("actor " + name, spangrad.rollout_headers()))
                try:
                    task.remote()
                except TypeError as error:
                    assert "missing a required argument: 'prompt'" in str(error), error
                else:
                    raise AssertionError("Ray checks arguments at the call")
                barrier.wait(60)
        except BaseException as error:
            failed.append(error)
            barrier.abort()
            raise

    threads = [threading.Thread(target=agent, args=(name,)) for name in ("a", "b")]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failed
    ray.get(task.remote("outside"))
    ray.shutdown()
"""


@pytest.mark.slow
def test_ray_tasks_belong_to_the_rollout_that_started_them(model: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = dict(os.environ) | {"RAY_USAGE_STATS_ENABLED": "0"}
    ended = subprocess.run(
        [sys.executable, "driver.py", model.url],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    spans = spans_of_store(tmp_path / "s")
    owner = {root[c.ROLLOUT_ID]: (root.trace_id, root.span_id) for root in roots(spans)}
    found = {call.prompt(): call.get(c.ROLLOUT_ID) for call in calls(spans)}
    assert found.pop("outside", None) is None  # a worker that is killed at once may lose it
    kinds = ("task ", "inner task ", "item0 ", "item1 ", "actor ")
    assert found == {f"{kind}{name}": name for name in ("a", "b") for kind in kinds}
    for call in calls(spans):
        if call.prompt() != "outside":
            assert (call.trace_id, call.parent_id) == owner[call[c.ROLLOUT_ID]]
