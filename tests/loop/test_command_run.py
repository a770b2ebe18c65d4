"""A whole run whose agent is a program: real hub, gateway, vLLM and learner."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from spangrad.store.records import RolloutStatus
from tests.loop.conftest import end

pytestmark = pytest.mark.vllm
PROGRAM = Path(__file__).parent / "counting_program.py"


def test_a_program_is_trained_like_a_function(ground):
    config = ground.config("program", updates=2)
    function = next(line for line in config.read_text().splitlines() if line.startswith("function"))
    command = f'command = ["{sys.executable}", "-S", "{PROGRAM}"]'
    config.write_text(config.read_text().replace(function, command))
    code, out, err = end(ground.start(config))
    assert code == 0, err
    assert "2 updates, policy version 2" in out
    first, second = ground.store.updates("program")
    trained = ground.store.rollouts(rollout_ids=[*first.rollout_ids, *second.rollout_ids])
    assert {rollout.status for rollout in trained} == {RolloutStatus.SUCCEEDED}
    assert all(rollout.output["text"] is not None for rollout in trained)
    for update in (first, second):
        calls = Counter(sample.call_id for sample in update.samples)
        assert set(calls.values()) == {1} and update.metrics["data/trained_tokens"] > 0
        assert update.metrics["gap/published_mean"] < 0.02
