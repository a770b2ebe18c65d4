"""Behaviour cloning through the product's own path.

    expert plays the model -> the agent runs -> tracer -> hub -> calls graded `text`
      -> rendered with the chat template -> masked rows -> learner clones them

The result is a model folder, cached under a name that depends on what made it (`cache_name`).

* Only rollouts that succeeded are cloned; one that failed counts against the expert's success.
* A folder under that name is whole: it is made under a private name and renamed. Of two that
  make it at the same time the first one's is used by both.
"""

import errno
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from spangrad import adapters, credit
from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.calls import calls_of
from spangrad.adapters.grading import reason_kind
from spangrad.adapters.model_call import Grade, ModelCall
from spangrad.credit.aggregation import weigh
from spangrad.credit.settings import check_values, one_of
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import transitions
from spangrad.errors import EmptyBatchError, GradeError
from spangrad.store.base import Store
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.cluster import call
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.evaluation import values_of
from spangrad.trainer.learning.learner_config import DTYPES, LearnerConfig, require
from spangrad.trainer.learning.rendering import with_rendered_ids
from spangrad.trainer.plugins import load_tasks
from spangrad.trainer.policies.policy import conversation_of, make_policy
from spangrad.trainer.rollouts.scheduling import RunKeys, run_rollouts, worker_config
from spangrad.user_code import load_callable

SCHEDULE = "cosine"
"""Of the learning rate while cloning: after the rise it falls to 0."""


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
    keep_unknown_tools: bool = False
    """Also clone calls that used tools which nobody recorded, without them in the prompt."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "warm_start.")
        for name in ("rollouts", "steps", "batch_rows", "hidden", "layers", "heads", "vocab", "max_length"):
            require(getattr(self, name) >= 1, f"warm_start.{name}", getattr(self, name), "1 or more")
        require(self.warmup_steps >= 0, "warm_start.warmup_steps", self.warmup_steps, "0 or more")
        require(self.lr > 0, "warm_start.lr", self.lr, "more than 0")
        require(self.dtype in DTYPES, "warm_start.dtype", self.dtype, one_of(self.dtype, DTYPES))


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A cloned policy and how it came about."""

    folder: Path
    expert_success: float
    """Share of the expert's own rollouts that were right; one that failed or got no reward was not."""
    rollouts: int
    failed: int
    """Rollouts that failed; their calls are not cloned."""
    calls: int
    refused: int
    trained_tokens: int
    from_cache: bool
    loss: float
    """Mean loss of the last steps, nats per token."""
    refused_because: Mapping[str, int] = field(default_factory=dict)
    """Reason -> calls that were not cloned."""


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """What was recorded of the expert."""

    calls: list[ModelCall]
    """Of the rollouts that succeeded."""
    success: float
    """As `WarmStart.expert_success`."""
    failed: int


def cache_name(config: WarmStartConfig, train: TrainConfig, seed: int) -> str:
    """Name of the cached policy: a hash of what makes it.

    These are the settings of cloning, learner and agent, the seed, the example's Python files and those that
    the agent's command names, the source of adapters, credit, learner and policies, and the versions of
    torch and transformers.
    """
    digest = hashlib.sha256()
    agent = train.agent
    settings = [asdict(config), asdict(train.learner), seed, train.eval.success_at]
    settings += [agent.function, agent.command, agent.url, agent.tasks, agent.reward, dict(agent.env)]
    settings += [dict(train.credit.reward_weights)]
    settings += [importlib.metadata.version(name) for name in ("torch", "transformers")]
    digest.update(json.dumps(settings, default=str).encode())
    trainer = Path(__file__).resolve().parent.parent
    packages = [Path(module.__file__ or "").parent for module in (adapters, credit)]
    own = [*packages, trainer / "learning", trainer / "policies"]
    files = [file for folder in own for file in sorted(folder.rglob("*.py"))]
    theirs = {*Path(train.base_dir).glob("*.py"), *(Path(train.base_dir, word) for word in agent.command)}
    for file in [*sorted(file for file in theirs if file.is_file()), *files]:
        digest.update(f"{file.parent.name}/{file.name}".encode() + file.read_bytes())
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
) -> ExpertRecord:
    """Run the agent against the expert and read back what was recorded."""
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
    return read_expert(
        store,
        [rollout.rollout_id for rollout in rollouts],
        train.rollout.reward_authors,
        success_at=train.eval.success_at,
        reward_weights=train.credit.reward_weights,
    )


def read_expert(
    store: Store,
    rollout_ids: Sequence[str],
    reward_authors: Sequence[str],
    *,
    success_at: float,
    reward_weights: Mapping[str, float] | None = None,
) -> ExpertRecord:
    """What ended rollouts of the expert recorded.

    Args:
        store: Where they are.
        rollout_ids: All of them, at least one, whatever became of them.
        reward_authors: Whose rewards count.
        success_at: Least reward of a rollout that was right.
        reward_weights: What a reward is made of; by default the one called `reward`.
    """
    ended = store.rollouts(rollout_ids=rollout_ids)
    kept = [rollout for rollout in ended if rollout.status is RolloutStatus.SUCCEEDED]
    values = values_of(store, kept, reward_authors, reward_weights)
    return ExpertRecord(
        calls=calls_of(store, [rollout.rollout_id for rollout in kept]),
        success=sum(value >= success_at for value in values.values()) / len(rollout_ids),
        failed=len(rollout_ids) - len(kept),
    )


def cloning_rows(
    calls: Sequence[ModelCall], tokenizer: Any, *, keep_unknown_tools: bool = False
) -> tuple[list[Transition], Counter[str]]:
    """Text-grade calls -> rows that behaviour cloning trains on, and those refused: reason -> calls."""
    by_rollout: dict[str, list[ModelCall]] = {}
    refused: Counter[str] = Counter()
    first = "no call"
    for model_call in calls:
        try:
            if model_call.rollout_id is None:
                raise GradeError(f"the call is of no rollout: {model_call.call_id!r}")
            rendered = with_rendered_ids(model_call, tokenizer, keep_unknown_tools=keep_unknown_tools)
        except GradeError as error:
            first = str(error) if not refused else first
            refused[reason_kind(str(error))] += 1
            continue
        by_rollout.setdefault(model_call.rollout_id, []).append(rendered)
    rows: list[Transition] = []
    for group in by_rollout.values():
        rows += transitions(build_tree(group), None, group_id=None)
    if not rows:
        raise EmptyBatchError(f"none of {len(calls)} recorded calls can be cloned; first refusal: {first}")
    return weigh(rows), refused


def start_policy(
    folder: Path, calls: Sequence[ModelCall], config: WarmStartConfig, *, seed: int
) -> tuple[list[Transition], Counter[str]]:
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
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return cloning_rows(calls, tokenizer, keep_unknown_tools=config.keep_unknown_tools)


def cloning_config(train: TrainConfig, config: WarmStartConfig, start: Path, *, seed: int) -> LearnerConfig:
    """Settings of the learner that clones: those of the run that it uses, but for the warm start's.

    Without adapters: random weights have nothing that they could adapt.
    """
    plain = LearnerConfig(objective="bc")
    unused = {*plain.settings_unused(), "entropy_coef", "kl_coef", "echo_coef", "lora_rank"} - {"sharding"}
    kept = {f.name: getattr(train.learner, f.name) for f in fields(plain) if f.name not in unused}
    own = {
        "model_path": str(start),
        "objective": "bc",
        "lr": config.lr,
        "dtype": config.dtype,
        "seed": seed,
        "threads": 2,
    }
    return LearnerConfig(**kept | own)


def warm_start(
    store: Store,
    train: TrainConfig,
    config: WarmStartConfig,
    keys: RunKeys,
    *,
    learner: Callable[[LearnerConfig], Any],
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
        learner: Starts a learner actor.
        cache: Folder of finished policies.
        seed: Of expert, weights and data order.
        fresh: Make it again even if it is cached.
        on_progress: Called with (phase, done, all).
    """
    name = cache_name(config, train, seed)
    final = cache / name
    if not fresh and (cached := _cached(final)) is not None:
        return cached
    before = stamp_of(final)
    say = on_progress or (lambda phase, done, total: None)
    expert = record_expert(
        store,
        train,
        config,
        keys,
        run_id=f"expert-{name}",
        seed=seed,
        on_progress=lambda done, total: say("recording the expert", done, total),
    )
    cache.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        rows, refused = start_policy(private / "start", expert.calls, config, seed=seed)
        say("cloning", 0, config.steps)
        actor = learner(cloning_config(train, config, private / "start", seed=seed))
        fitted = call(
            actor.fit_bc,
            rows,
            config.steps,
            config.batch_rows,
            schedule=SCHEDULE,
            warmup_steps=config.warmup_steps,
        )
        call(actor.export_model, str(private / "model"))
        made = WarmStart(
            folder=final,
            expert_success=expert.success,
            rollouts=config.rollouts,
            failed=expert.failed,
            calls=len(expert.calls),
            refused=refused.total(),
            refused_because=dict(refused),
            trained_tokens=int(sum(row.action_mask.sum() for row in rows)),
            from_cache=False,
            loss=fitted["loss/bc"],
        )
        return install(made, private / "model", replaces=before)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def install(made: WarmStart, model: Path, *, replaces: tuple[int, int] | None) -> WarmStart:
    """Give a model folder its name in the cache, in one step; if another one was faster, take that.

    Args:
        made: What was made; `made.folder` is the name.
        model: Where it is now, on the same file system.
        replaces: What to move out of the way: `stamp_of(made.folder)` before the work began.
    """
    told = {k: v for k, v in asdict(made).items() if k not in ("folder", "from_cache")}
    (model / "warm_start.json").write_text(json.dumps(told, indent=2))
    if replaces is not None and stamp_of(made.folder) == replaces:
        with suppress(FileNotFoundError):
            made.folder.rename(model.with_name("replaced"))
    try:
        model.rename(made.folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or (theirs := _cached(made.folder)) is None:
            raise
        return theirs
    return made


def stamp_of(folder: Path) -> tuple[int, int] | None:
    """Tells a folder from another one of the same name; None if there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _cached(folder: Path) -> WarmStart | None:
    try:
        told = json.loads((folder / "warm_start.json").read_text())
    except FileNotFoundError:
        return None
    return WarmStart(**{**told, "folder": folder, "from_cache": True})
