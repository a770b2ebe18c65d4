"""A process whose hub is down holds no more after many calls than after few."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_calls_with_the_hub_down_cost_no_memory_and_no_more_disk_than_allowed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.tracer_memory", "--calls", "5000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["lost"] > 0  # the spool was full, so the rest ran with it full
    assert found["lost_in_queue"] == 0
    assert found["spool_mb"] <= found["bound_mb"]
    # 5,000 calls held would be 100 MB; the allocator takes steps of 4 to 8, now and then.
    assert found["rss_mb"][-1] - found["rss_mb"][1] < 12, found["rss_mb"]
