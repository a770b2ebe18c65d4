"""A gateway holds no more after many calls than after few."""

import sys
from pathlib import Path

import pytest

from tests.bench.capture_benches import GATEWAY_LOAD, gateway_process, program, rss_mb, served


@pytest.mark.slow
def test_calls_through_a_gateway_cost_it_no_memory(tmp_path: Path) -> None:
    marks = []
    with (
        served(GATEWAY_LOAD, "engine") as engine,
        served(GATEWAY_LOAD, "hub") as hub,
        gateway_process(engine, str(tmp_path), store=hub) as (gateway, pid),
    ):
        for _ in range(4):
            program(sys.executable, GATEWAY_LOAD, "load", f"{gateway}/rollout/m/0", "--calls", 800)
            marks.append(rss_mb(pid))
    assert marks[-1] - marks[0] < 8, marks
