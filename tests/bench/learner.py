"""What a learner's update costs beside a bare transformers forward and backward pass of the same tokens.

Every token of every row is trained ("dense"), so that nothing is won by leaving positions out. The learner's
side is a whole update: packing, the loss with its monitors, clipping and AdamW. The bare side is
`model(input_ids, labels=...).loss.backward()` in the same dtype, on rows of one length, and no more.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from spangrad.credit import Transition
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import load_model
from tests.bench.figures import Figure
from tests.trainer.small_policy import make_model, make_row

SIZES = {"the demo's model": (192, 1024), "32,000 tokens": (192, 32_000)}
"""Hidden width and vocabulary, four layers each."""
ROWS, TOKENS = 16, 257
"""4,096 predicted tokens: one microbatch."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _rows(vocabulary: int) -> list[Transition]:
    rows = [make_row(seed, tokens=TOKENS, vocab=vocabulary) for seed in range(ROWS)]
    is_trained = np.arange(TOKENS) > 0
    return [
        replace(
            row,
            action_mask=is_trained,
            behavior_logprobs=np.full(TOKENS, -np.log(vocabulary), dtype=np.float32),
            policy_versions=np.where(is_trained, 1, -1).astype(np.int32),
            advantages=np.where(is_trained, (-1.0) ** place, 0.0),
            loss_weight=1.0 / (ROWS * (TOKENS - 1)),
        )
        for place, row in enumerate(rows)
    ]


def work_of(side: str, folder: str, vocabulary: int, dtype: str) -> Callable[[], object]:
    """One update of a learner, or one bare pass (`side` is `bare`)."""
    rows = _rows(vocabulary)
    if side == "learner":
        learner = Learner(LearnerConfig(model_path=folder, lr=1e-6, dtype=dtype, kl_monitor_rows=0))
        return lambda: learner.update(rows)
    model: Any = load_model(folder, device=torch.device("cpu"))
    ids_BT = torch.from_numpy(np.stack([row.token_ids for row in rows]).astype(np.int64))

    def bare() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return bare


def _peak_mb(side: str, folder: str, vocabulary: int, dtype: str) -> float:
    """Memory of two rounds at their highest, beyond the loaded model, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.learner", side, folder, str(vocabulary), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _resident_mb(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def bench_dense(*, blocks: int = 7) -> list[Figure]:
    """Tokens a second and peak memory of an update, of the bare pass's."""
    disable_progress_bar()
    torch.set_num_threads(2)
    figures: list[Figure] = []
    for name, (hidden, vocabulary) in SIZES.items():
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                make_model(hidden=hidden, layers=4, vocab=vocabulary).save_pretrained(folder)
                figures += _compared(f"learner, {name}, {dtype}", folder, vocabulary, dtype, blocks)
    return figures


def _compared(name: str, folder: str, vocabulary: int, dtype: str, blocks: int) -> list[Figure]:
    sides = {side: work_of(side, folder, vocabulary, dtype) for side in ("learner", "bare")}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(-1, blocks):
        for side in sorted(sides, reverse=bool(block % 2)):
            began = time.perf_counter()
            sides[side]()
            if block >= 0:
                seconds[side].append(time.perf_counter() - began)
    ratios = [bare / own for own, bare in zip(seconds["learner"], seconds["bare"], strict=True)]
    rates = {side: ROWS * (TOKENS - 1) / min(times) for side, times in seconds.items()}
    peaks = {side: _peak_mb(side, folder, vocabulary, dtype) for side in sides}
    return [
        Figure(
            f"{name}: tokens/s of a whole update",
            statistics.median(ratios),
            "of the bare pass's",
            at_least=0.95,
            note=f"best {rates['learner']:,.0f}, bare {rates['bare']:,.0f}",
        ),
        Figure(
            f"{name}: peak memory",
            peaks["learner"] / peaks["bare"],
            "of the bare pass's",
            at_most=1.0,
            note=f"{peaks['learner']:,.0f} MB, bare {peaks['bare']:,.0f} MB",
        ),
    ]


def _main() -> None:
    side, folder, vocabulary, dtype = sys.argv[1:]
    disable_progress_bar()
    torch.set_num_threads(2)
    work = work_of(side, folder, int(vocabulary), dtype)
    before = _resident_mb("VmRSS")
    for _ in range(2):
        work()
    print(json.dumps(_resident_mb("VmHWM") - before))


if __name__ == "__main__":
    _main()
