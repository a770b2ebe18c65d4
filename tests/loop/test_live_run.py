"""A run on what live agents do: real hub, gateway and vLLM, agents with OpenAI's SDK, feedback later."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from spangrad import feedback
from spangrad.trainer.serving.publish import served_version
from tests.loop.conftest import Ground, end
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

AGENT = """
import json, sys
import openai

gateway, key, *names = sys.argv[1:]
said = {}
for name in names:
    with openai.OpenAI(base_url=f"{gateway}/rollout/{name}/v1", api_key=key) as client:
        messages = [{"role": "user", "content": name}]
        for _ in range(2):
            reply = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=8, temperature=1.0
            )
            text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        said[name] = client.post("/end", cast_to=object)
print(json.dumps(said))
"""
"""One session after the other, two calls each; its end is told to the gateway."""
SIZE = 4
"""Sessions of an update."""


def config_of(ground: Ground) -> Path:
    """A session ends when its agent says so, or a day later; rewards have a name that no other test gives."""
    file = ground.folder / "live.toml"
    file.write_text(
        textwrap.dedent(f"""
        [run]
        id = "live"
        folder = "runs"
        updates = 9
        [hub]
        url = "{ground.stack.hub_url}"
        keys = "{ground.stack.keys_file}"
        [serving]
        engine_url = "{ground.stack.engine_url}"
        gateway_url = "{ground.stack.gateway_url}"
        model = "{ground.model}"
        [production]
        rollouts_per_update = {SIZE}
        idle_s = 86400.0
        held_out = 0.0
        [rollout]
        max_staleness = 1
        [credit]
        episode = "running_baseline"
        baseline_key = "all"
        reward_weights = {{thumb = 1.0}}
        [learner]
        lr = 1e-3
        threads = 1
        """)
    )
    return file


def sessions(ground: Ground, names: list[str]) -> None:
    """What agents do in a process that has nothing of spangrad, until the store knows of it."""
    command = [sys.executable, "-c", AGENT, ground.stack.gateway_url, ground.stack.keys.agent, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: {"rollout_id": name, "attempt": 0} for name in names}
    wait_until(lambda: len(ground.store.rollouts(rollout_ids=names)) == len(names))


def judge(ground: Ground, names: list[str]) -> None:
    """A person who likes every other one."""
    for place, name in enumerate(names):
        feedback(
            place % 2,
            rollout_id=name,
            name="thumb",
            store=ground.stack.hub_url,
            key=ground.stack.keys.evaluator,
        )


def test_live_sessions_are_trained_once_after_their_feedback_until_somebody_ends_the_run(ground):
    rounds = [[f"live-{number}-{place}" for place in range(SIZE)] for number in range(2)]
    process = ground.start(config_of(ground))
    try:
        for number, names in enumerate(rounds):
            wait_until(lambda: len(ground.store.policies("live")) > number, timeout_s=240)  # noqa: B023
            assert served_version(ground.engine.url) == number
            sessions(ground, names)
            assert len(ground.store.updates("live")) == number, "trained without a reward"
            judge(ground, names)
        wait_until(lambda: len(ground.store.policies("live")) > len(rounds), timeout_s=240)
    finally:
        process.terminate()
        code, out, err = end(process)
    assert code == 0, err
    assert "run live: 2 updates, policy version 2" in out
    updates = ground.store.updates("live")
    assert [update.rollout_ids for update in updates] == rounds
    for number, update in enumerate(updates):
        assert {one.consumed_by for one in ground.store.rollouts(rollout_ids=rounds[number])} == {number}
        assert update.metrics["gap/mean"] < 0.02
        assert update.metrics["data/staleness_max"] == 0
        assert update.metrics["data/trained_tokens"] > 0
        trained = {sample.call_id for sample in update.samples}
        calls = ground.store.query(
            "SELECT call_id FROM calls WHERE rollout_id IN (SELECT unnest(?))", [update.rollout_ids]
        )
        assert trained <= {call["call_id"] for call in calls} and len(calls) == 2 * SIZE
    assert served_version(ground.engine.url) == 2
