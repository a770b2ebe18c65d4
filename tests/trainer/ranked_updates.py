"""What a learner becomes over some updates: by itself, or as one of several processes.

python -m tests.trainer.ranked_updates RANK SIZE FOLDER     # FOLDER/policy is a model, FOLDER/ranks is made
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from tests.trainer.forking_rows import forking_rows
from tests.trainer.small_policy import make_row
from tests.trainer.test_critic import rows_of as rows_with_values
from tests.trainer.test_preference_learner import RETURNS
from tests.trainer.test_preference_learner import rows_of as rows_to_compare
from torch import Tensor

from spangrad.credit.pairs import paired
from spangrad.credit.transition import Transition
from spangrad.trainer.learning.checkpoint import latest
from spangrad.trainer.learning.corrections import CorrectionConfig
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import CriticConfig, LearnerConfig
from spangrad.trainer.learning.model import weight_tensors
from spangrad.trainer.learning.ranks import Ranks

UPDATES = 3
SHARDINGS: Final = ("ddp", "fsdp2")


def uneven_rows() -> list[Transition]:
    """Rows of 12 to 80 tokens, so that ranks have other numbers of microbatches."""
    return [make_row(seed, tokens=12 + 2 * seed * seed) for seed in range(7)]


def forks() -> list[Transition]:
    """Rows of two rollouts, which share what they begin with."""
    fork = [(None, 1.0, 9), (0, 0.8, 5), (0, 0.5, 7), (None, 1.0, 8), (3, 0.9, 6)]
    rows = forking_rows(fork, seed=3)
    return [replace(row, rollout_id=f"r{place // 3}") for place, row in enumerate(rows)]


def pairs() -> list[Transition]:
    """Two tasks' rollouts, which `dpo` compares."""
    return list(paired(rows_to_compare(), RETURNS).rows)


@dataclass(frozen=True)
class Scenario:
    rows: Callable[[], list[Transition]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    shardings: tuple[str, ...] = SHARDINGS


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "ppo": Scenario(
        uneven_rows,
        {"max_tokens_per_microbatch": 40, "minibatches_per_update": 2, "kl_coef": 0.02, "packing": "padded"},
    ),
    "tree": Scenario(forks, {"packing": "tree", "entropy_coef": 0.01}),
    "one row": Scenario(lambda: [make_row(1, tokens=40)], {"kl_monitor_rows": 0}),
    "dpo": Scenario(pairs, {"objective": "dpo", "max_tokens_per_microbatch": 48}),
    "critic": Scenario(
        rows_with_values, {"critic": CriticConfig(warmup_updates=1), "gradient_checkpointing": True}
    ),
    "corrected": Scenario(
        uneven_rows, {"correction": CorrectionConfig(proximal=True, token_tis=2.0), "epochs_per_update": 2}
    ),
    "lora": Scenario(uneven_rows, {"lora_rank": 4, "packing": "padded"}, shardings=("ddp",)),
}


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    """Of each update, without times; of cloning behind them."""
    scores: list[float]
    """Log-probabilities after the updates; behind them the values of a critic."""
    tensors: dict[str, Tensor]
    """Weights after the updates, and after one more of a learner that went on from the checkpoint."""


def outcome(scenario: Scenario, policy: Path, folder: Path, ranks: Ranks) -> Outcome:
    config = LearnerConfig(**{"model_path": str(policy), "lr": 1e-3, **scenario.settings})
    rows = scenario.rows()
    learner = Learner(config, ranks)
    metrics = [learner.update(rows, policy_version=1) for _ in range(UPDATES)]
    scores = np.concatenate(learner.score(rows)).tolist()
    if config.critic is not None:
        scores += [value for values in learner.values(rows) for value in values]
    tensors = weight_tensors(learner.model)
    learner.save(folder, record={"n": 1})
    if ranks.size > 1:
        dist.barrier()
    checkpoint = latest(folder)
    assert checkpoint is not None
    learner = Learner(config, ranks)
    assert learner.load(checkpoint) == {"n": 1}
    metrics.append(learner.update(rows, policy_version=1))
    tensors |= {f"resumed {name}": value.clone() for name, value in weight_tensors(learner.model).items()}
    metrics.append(learner.fit_bc(rows, steps=3, batch_rows=3, warmup_steps=1))
    kept = [{k: v for k, v in found.items() if not k.startswith("time/")} for found in metrics]
    return Outcome(kept, scores, tensors)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name, scenario in SCENARIOS.items():
        for sharding in scenario.shardings:
            ranks = Ranks(rank, size, sharding == "fsdp2")
            place = folder / "ranks" / name / sharding
            found = outcome(scenario, folder / "policy", place / "checkpoints", ranks)
            torch.save(found.tensors, place / f"{rank}.pt")
            (place / f"{rank}.json").write_text(json.dumps([found.metrics, found.scores]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
