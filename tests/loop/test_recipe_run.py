"""A recipe against a real hub, gateway and vLLM: made rollouts, stored ones, made ones again."""

import subprocess
import sys
from pathlib import Path

import pytest

from spangrad.trainer.serving.publish import served_version
from tests.loop.conftest import end

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STAGES = """
[[stage]]
name = "explore"
run = {updates = 1}
[[stage]]
name = "clone"
stored = {runs = ["staged.explore"], passes = 1}
learner = {objective = "bc"}
preference = {good_at = "none"}
[[stage]]
name = "rl"
run = {updates = 1}
"""


def test_stages_follow_one_another_and_the_engine_serves_what_was_cloned(ground):
    file = Path(ground.config("staged", updates=1, max_staleness=0))
    text = file.read_text()
    shared = text.replace("updates = 1\n", "").replace('[credit]\nstep = "gigpo"\n', "")
    assert len(text) > len(shared)
    file.write_text(shared + STAGES)
    process = subprocess.Popen(
        [sys.executable, "-m", "spangrad", "train", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, out, err = end(process, timeout_s=400)
    assert code == 0, err
    assert "run staged.explore: 1 updates, policy version 1 (run.updates: 1 updates)" in out
    assert "run staged.clone: 1 updates, policy version 1 (stored.passes: 1 over 2 groups" in out
    assert "run staged.rl: 1 updates, policy version 1" in out
    (update,) = ground.store.updates("staged.rl")
    assert update.metrics["gap/mean"] < 0.02  # the engine sampled with the weights of the clone
    first = ground.store.policies("staged.rl")[0]
    assert (first.parent_run, first.parent_version) == ("staged.clone", 1)
    assert update.parent == ground.store.policies("staged.clone")[-1].model
    assert served_version(ground.engine.url) == 1
