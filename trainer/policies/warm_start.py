"""Behaviour cloning through the product's own path.

    expert plays the model -> the agent runs -> tracer -> hub -> calls graded `text`
      -> rendered with the chat template -> masked rows -> learner clones them

The result is a model folder, cached under a name that depends on everything that made
it; an interrupted warm start leaves nothing under that name.
"""

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import Grade, ModelCall
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import transitions, weigh
from spangrad.errors import EmptyBatchError, GradeError
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.cluster import call
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.evaluation import values_of
from spangrad.trainer.learning import learner, rendering
from spangrad.trainer.learning.rendering import with_rendered_ids
from spangrad.trainer.plugins import load_callable, load_tasks
from spangrad.trainer.policies import policy
from spangrad.trainer.policies.policy import conversation_of, make_policy
from spangrad.trainer.rollouts.scheduling import RunKeys, run_rollouts, worker_config


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """How the starting policy is made."""

    expert: str
    """`file.py:function`: called as `function(seed=...)`, gives a context manager whose value is the
    address of a server that speaks OpenAI's API."""
    rollouts: int = 800
    """Expert rollouts that are recorded."""
    steps: int = 500
    """Optimizer steps of cloning."""
    batch_rows: int = 16
    """Rows per step."""
    lr: float = 2e-3
    """Peak learning rate."""
    dtype: str = "bfloat16"
    """What cloning computes in, and what its weights are stored in."""
    warmup_steps: int = 20
    """Steps of linear rise of the learning rate."""
    hidden: int = 192
    """Width of the policy."""
    layers: int = 3
    """Its layers."""
    heads: int = 6
    """Its attention heads."""
    vocab: int = 1024
    """Largest vocabulary of its tokenizer."""
    max_length: int = 1024
    """Longest prompt plus reply, tokens."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A cloned policy and how it came about."""

    folder: Path
    expert_success: float
    """Share of the expert's own rollouts that were right."""
    rollouts: int
    calls: int
    refused: int
    trained_tokens: int
    from_cache: bool
    loss: float
    """Mean loss of the last steps, nats per token."""


def cache_name(config: WarmStartConfig, train: TrainConfig, seed: int) -> str:
    """Name of the cached policy: a hash of the files and settings that make it."""
    digest = hashlib.sha256()
    digest.update(
        json.dumps([asdict(config), seed, train.agent.tasks, train.agent.function], default=str).encode()
    )
    digest.update(importlib.metadata.version("torch").encode())
    own = [Path(module.__file__ or "") for module in (learner, policy, rendering)]
    for file in [*sorted(Path(train.base_dir).glob("*.py")), Path(__file__), *own]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def record_expert(
    store: Store,
    train: TrainConfig,
    config: WarmStartConfig,
    keys: RunKeys,
    *,
    run_id: str,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[ModelCall], float]:
    """Run the agent against the expert; returns the recorded calls and the expert's own success."""
    tasks = load_tasks(train.agent.tasks, "train", config.rollouts, seed=seed + 1, base_dir=train.base_dir)
    rollouts = [
        Rollout(
            rollout_id=f"{run_id}-{index:05d}",
            task_id=task["task_id"],
            run_id=run_id,
            task=task,
            split="expert",
        )
        for index, task in enumerate(tasks)
    ]
    with load_callable(config.expert, train.base_dir)(seed=seed) as expert_url:
        worker = worker_config(train, keys, split="expert", temperature=1.0, policy_version=None)
        worker = worker.recording(run_id=run_id, url=expert_url)
        # One chunk at a time, so that progress can be shown.
        for start in range(0, len(rollouts), 200):
            run_rollouts(store, rollouts[start : start + 200], worker, workers=train.agent.workers)
            if on_progress is not None:
                on_progress(min(start + 200, len(rollouts)), len(rollouts))
    ids = [rollout.rollout_id for rollout in rollouts]
    values = values_of(store, store.rollouts(rollout_ids=ids), train.rollout.reward_authors)
    success = sum(value >= train.eval.success_at for value in values.values()) / max(1, len(values))
    return calls_of(store, ids), success


def cloning_rows(calls: Sequence[ModelCall], tokenizer: Any) -> tuple[list[Transition], list[str]]:
    """Text-grade calls -> rows that behaviour cloning trains on, and why others were refused."""
    by_rollout: dict[str, list[ModelCall]] = {}
    refused: list[str] = []
    for model_call in calls:
        if model_call.grade is Grade.UNUSABLE or model_call.rollout_id is None:
            refused.append(f"{model_call.call_id}: {', '.join(model_call.grade_reasons)}")
            continue
        try:
            rendered = with_rendered_ids(model_call, tokenizer)
        except GradeError as error:
            refused.append(f"{model_call.call_id}: {error}")
            continue
        by_rollout.setdefault(model_call.rollout_id, []).append(rendered)
    rows: list[Transition] = []
    for group in by_rollout.values():
        rows += transitions(build_tree(group), None, group_id=None)
    if not rows:
        first = refused[0] if refused else "no call"
        raise EmptyBatchError(f"none of {len(calls)} recorded calls can be cloned; first refusal: {first}")
    return weigh(rows), refused


def start_policy(
    folder: Path, calls: Sequence[ModelCall], config: WarmStartConfig, *, seed: int
) -> tuple[list[Transition], list[str]]:
    """Make a policy with random weights whose tokenizer fits the calls; returns rows and refusals."""
    make_policy(
        folder,
        [conversation_of(recorded) for recorded in calls if recorded.grade is not Grade.UNUSABLE],
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        vocab=config.vocab,
        max_length=config.max_length,
        seed=seed,
    )
    return cloning_rows(calls, AutoTokenizer.from_pretrained(folder))


def warm_start(
    store: Store,
    train: TrainConfig,
    config: WarmStartConfig,
    keys: RunKeys,
    *,
    learner: Callable[[Path], Any],
    cache: Path,
    seed: int,
    fresh: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> WarmStart:
    """Make, or take from the cache, the policy that reinforcement learning starts from.

    Args:
        store: The hub.
        train: Names agent, tasks and reward.
        config: How to make the policy.
        keys: Bearer keys.
        learner: Starts a learner actor for a model folder.
        cache: Folder of finished policies.
        seed: Of expert, weights and data order.
        fresh: Make it again even if it is cached.
        on_progress: Called with (phase, done, all).
    """
    name = cache_name(config, train, seed)
    final = cache / name
    if not fresh and (final / "warm_start.json").is_file():
        told = json.loads((final / "warm_start.json").read_text())
        return WarmStart(**{**told, "folder": final, "from_cache": True})
    say = on_progress or (lambda phase, done, total: None)
    calls, expert_success = record_expert(
        store,
        train,
        config,
        keys,
        run_id=f"expert-{name}",
        seed=seed,
        on_progress=lambda done, total: say("recording the expert", done, total),
    )
    partial = cache / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    rows, refused = start_policy(partial / "start", calls, config, seed=seed)
    say("cloning", 0, config.steps)
    actor = learner(partial / "start")
    fitted = call(
        actor.fit_bc,
        rows,
        config.steps,
        config.batch_rows,
        schedule="cosine",
        warmup_steps=config.warmup_steps,
    )
    call(actor.export_model, str(partial / "model"))
    made = WarmStart(
        folder=final,
        expert_success=expert_success,
        rollouts=config.rollouts,
        calls=len(calls),
        refused=len(refused),
        trained_tokens=int(sum(row.action_mask.sum() for row in rows)),
        from_cache=False,
        loss=fitted["loss/bc"],
    )
    told = {k: v for k, v in asdict(made).items() if k not in ("folder", "from_cache")}
    (partial / "model" / "warm_start.json").write_text(json.dumps(told, indent=2))
    shutil.rmtree(final, ignore_errors=True)
    (partial / "model").rename(final)
    shutil.rmtree(partial, ignore_errors=True)
    return made
