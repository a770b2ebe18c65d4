"""`spangrad demo`: the whole loop on one machine, in minutes.

    hub up -> expert recorded and cloned (cached) -> engine and gateway up
      -> held-out success before -> updates -> held-out success after -> report

The example folder names everything in `demo.toml`: the agent, its tasks and reward, the
expert, the policy's shape and the training run. Nothing here knows the example.
"""

import copy
import dataclasses
import json
import math
import shlex
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from spangrad.errors import ConfigError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import RunEvent
from spangrad.trainer.cluster import start_learner, start_ray
from spangrad.trainer.config import TrainConfig, apply_override, build, build_run, to_dict
from spangrad.trainer.evaluation import Evaluation, evaluate, values_of
from spangrad.trainer.loop import train
from spangrad.trainer.policies.warm_start import WarmStart, WarmStartConfig, warm_start
from spangrad.trainer.processes import free_port, own_command
from spangrad.trainer.reporting.clock import Clock
from spangrad.trainer.reporting.report import (
    EvalResult,
    Example,
    LiveTable,
    RunReport,
    SuccessRate,
    write_report,
)
from spangrad.trainer.reporting.transcript import transcript
from spangrad.trainer.rollouts.scheduling import RunKeys
from spangrad.trainer.up import Stack, UpConfig
from spangrad.trainer.update_metrics import Metrics

EXAMPLE = "01_text_to_sql"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person can choose on the command line."""

    example: str | None = None
    """Folder with a `demo.toml`; None: the text-to-SQL example of this repository."""
    folder: str = ".spangrad/demo"
    """Where stores, reports and logs go, a folder for each run."""
    cache: str = ".spangrad/policies"
    """Where finished warm starts are kept."""
    seed: int = 0
    """Of expert, weights, data order and tasks, those of the evaluation too."""
    updates: int | None = None
    """None: as `demo.toml` says."""
    changes: Sequence[str] = ()
    """`section.key=value`: other settings of training than `demo.toml`'s. The warm start is made as that file
    says, so runs that differ in their changes alone begin with one policy."""
    json: bool = False
    """Print one JSON object as the last line."""
    fresh: bool = False
    """Make the warm start again even if it is cached."""
    keep_raw: bool = False
    """Keep the engine's raw replies beside the store, for audits."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo measured."""

    examples: list[Example]
    """One held-out task before and after: the first whose outcome changed."""
    before: Evaluation
    after: Evaluation
    before_sampled: Evaluation
    after_sampled: Evaluation
    updates: int
    minutes: float
    store: str
    report: str
    warm_start: WarmStart
    history: list[Metrics]
    events: list[RunEvent]
    """What monitors saw."""
    gap_mean: float
    """Mean engine-to-learner logprob gap over all updates, nats."""

    def to_json(self) -> dict[str, Any]:
        """The last line of `spangrad demo --json`."""
        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "before_sampled": self.before_sampled.to_json(),
            "after_sampled": self.after_sampled.to_json(),
            "updates": self.updates,
            "minutes": round(self.minutes, 2),
            "store": self.store,
            "report": self.report,
            "logprob_gap_mean": self.gap_mean,
            "expert_success": self.warm_start.expert_success,
            "warm_start_from_cache": self.warm_start.from_cache,
        }


def run_demo(options: DemoOptions, *, console: Console | None = None) -> DemoResult:
    """Run the demo; prints as it goes.

    Raises:
        ConfigError: No such example, or its `demo.toml` is wrong.
        SpangradError: A part could not be started; its log is named.
    """
    console = console or Console()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    started = time.monotonic()
    prepared = prepare(options)
    config, keys, clock = prepared.config, prepared.keys, Clock(console)
    with prepared.stack as stack:
        with clock("hub and Ray"):
            stack.start_hub()
            start_ray(config.learner.workers, config.cluster)
        store = open_store(stack.hub_url, stack.keys.trainer)
        with clock("warm start: an imperfect expert is recorded and cloned") as progress:
            warm = warm_start(
                store,
                prepared.unchanged,
                prepared.warm,
                keys,
                learner=start_learner,
                cache=Path(options.cache).resolve(),
                seed=options.seed,
                fresh=options.fresh,
                on_progress=progress,
            )
        console.print(_warm_line(warm))
        config = dataclasses.replace(
            config, serving=dataclasses.replace(config.serving, model=str(warm.folder))
        )
        with clock("vLLM and gateway"):
            stack.start_engine(str(warm.folder))
            stack.start_gateway()
        result = _close_the_loop(store, config, keys, stack, clock, console)
        store.close()
    minutes = (time.monotonic() - started) / 60
    result = dataclasses.replace(result, minutes=minutes, warm_start=warm)
    result = _write(result, config, prepared)
    _say(result, options, console)
    return result


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before the first process starts."""

    folder: Path
    example: Path
    warm: WarmStartConfig
    config: TrainConfig
    unchanged: TrainConfig
    """The same without `DemoOptions.changes`: what the warm start is made with."""
    stack: Stack
    keys: RunKeys


def prepare(options: DemoOptions) -> Prepared:
    """Read the example's `demo.toml`, choose a folder, ports and keys."""
    example = _example_folder(options.example)
    folder = _new_folder(Path(options.folder).resolve())
    warm, unchanged, config = _load(example, options, folder)
    stack = _stack(config, warm, folder, options)
    keys = RunKeys.of(stack.keys)
    config, unchanged = _with_addresses(config, stack), _with_addresses(unchanged, stack)
    return Prepared(folder, example, warm, config, unchanged, stack, keys)


def _close_the_loop(
    store: Store, config: TrainConfig, keys: RunKeys, stack: Stack, clock: Clock, console: Console
) -> DemoResult:
    def measure(label: str, version: int, temperature: float) -> Evaluation:
        with clock(f"held-out tasks {label}, {'greedy' if temperature == 0 else 'sampled'}") as progress:
            found = evaluate(
                store,
                config,
                keys,
                label=f"{label}-{'greedy' if temperature == 0 else 'sampled'}",
                policy_version=version,
                temperature=temperature,
                on_progress=lambda done, total: progress("", done, total),
            )
        console.print(
            f"  success {found.success:.1%}  (95%: {found.low:.1%} to {found.high:.1%}, {found.n} tasks)"
        )
        return found

    before = measure("before", 0, 0.0)
    before_sampled = measure("before", 0, config.rollout.temperature)
    with LiveTable(console=console) as table:
        report = train(config, keys=keys, on_update=table.add, on_note=table.note)
    version = report.policy_version
    after = measure("after", version, 0.0)
    after_sampled = measure("after", version, config.rollout.temperature)
    gaps = [gap for metrics in report.history if not math.isnan(gap := metrics.get("gap/mean", math.nan))]
    return DemoResult(
        examples=_examples(store, config, version),
        before=before,
        after=after,
        before_sampled=before_sampled,
        after_sampled=after_sampled,
        updates=report.updates,
        minutes=0.0,
        store=stack.config.store,
        report="",
        warm_start=None,  # type: ignore[arg-type]
        history=report.history,
        events=store.events(config.run.id),
        gap_mean=sum(gaps) / len(gaps) if gaps else math.nan,
    )


def _example_folder(example: str | None) -> Path:
    candidates = (
        [Path(example)]
        if example is not None
        else [Path("examples", EXAMPLE), Path(__file__).resolve().parent.parent / "examples" / EXAMPLE]
    )
    for folder in candidates:
        if (folder / "demo.toml").is_file():
            return folder.resolve()
    raise ConfigError(
        f"no demo.toml in {str(candidates[0])!r};"
        " run this in a checkout of spangrad, or name a folder with --example"
    )


OWN = (
    "cluster.",
    "hub.",
    "run.folder",
    "run.seed",
    "serving.engine_url",
    "serving.gateway_url",
    "serving.model",
)
"""Beginnings of what a demo sets itself."""


def _load(
    example: Path, options: DemoOptions, folder: Path
) -> tuple[WarmStartConfig, TrainConfig, TrainConfig]:
    """What `demo.toml` says of the warm start and of training, and training with the options' changes."""
    file = example / "demo.toml"
    try:
        raw = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{str(file)!r} is not TOML: {error}") from error
    warm = build(WarmStartConfig, raw.pop("warm_start", {}), where=f"{file}: warm_start")
    run = {**raw.get("run", {}), "seed": options.seed, "folder": str(folder / "runs")}
    if options.updates is not None:
        run["updates"] = options.updates
    raw["run"] = run
    changed = copy.deepcopy(raw)
    for change in options.changes:
        name = change.partition("=")[0].strip()
        if any(name.startswith(own) or own.startswith(f"{name}.") for own in OWN):
            raise ConfigError(f"--set {change!r}: the demo sets {', '.join(OWN)} itself; see its options")
        apply_override(changed, change)
    start, trained = (_of_seed(build_run(each, example, where=str(file)), options) for each in (raw, changed))
    return warm, start, trained


def _of_seed(config: TrainConfig, options: DemoOptions) -> TrainConfig:
    """Every seed is measured on held-out tasks of its own."""
    evaluation = dataclasses.replace(config.eval, seed=config.eval.seed + options.seed)
    return dataclasses.replace(config, eval=evaluation)


def _stack(config: TrainConfig, warm: WarmStartConfig, folder: Path, options: DemoOptions) -> Stack:
    return Stack(
        UpConfig(
            model=None,
            folder=str(folder),
            store=str(folder / "store.duckdb"),
            hub_port=free_port(),
            gateway_port=free_port(),
            engine_port=free_port(),
            served_name=config.serving.served_name,
            max_model_len=warm.max_length,
            max_num_seqs=max(8, config.agent.concurrency * config.agent.workers),
            lora_rank=config.learner.lora_rank if config.serving.transfer == "lora" else 0,
            raw_log=str(folder / "engine_replies.jsonl") if options.keep_raw else None,
        )
    )


def _with_addresses(config: TrainConfig, stack: Stack) -> TrainConfig:
    return dataclasses.replace(
        config,
        hub=dataclasses.replace(config.hub, url=stack.hub_url, keys=str(stack.keys_file)),
        serving=dataclasses.replace(
            config.serving, engine_url=stack.engine_url, gateway_url=stack.gateway_url
        ),
    )


def _new_folder(root: Path) -> Path:
    stem = time.strftime("%Y%m%d-%H%M%S")
    for extra in range(1000):
        folder = root / (stem if extra == 0 else f"{stem}-{extra}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"no free folder name below {str(root)!r}")


def _examples(store: Store, config: TrainConfig, version: int) -> list[Example]:
    """The first held-out task that was answered otherwise before than after, as text."""
    stems = [
        f"{config.run.id}-eval-before-greedy-v00000",
        f"{config.run.id}-eval-after-greedy-v{version:05d}",
    ]
    ids = [[f"{stem}-{index:04d}" for index in range(config.eval.tasks)] for stem in stems]
    ended = store.rollouts(rollout_ids=[*ids[0], *ids[1]])
    values = values_of(store, ended, config.rollout.reward_authors, config.credit.reward_weights)
    pairs = list(zip(*ids, strict=True))
    pair = next((pair for pair in pairs if values.get(pair[0]) != values.get(pair[1])), pairs[0])
    return [
        Example(title=title, text=transcript(store, rollout_id), reward=values.get(rollout_id))
        for title, rollout_id in zip(("before, greedy", "after, greedy"), pair, strict=True)
    ]


def _rate(found: Evaluation) -> SuccessRate:
    return SuccessRate(success=found.success, ci=(found.low, found.high), n=found.n)


def _write(result: DemoResult, config: TrainConfig, prepared: Prepared) -> DemoResult:
    curve_file = prepared.example / "cloning_curve.json"
    curve = json.loads(curve_file.read_text()) if curve_file.is_file() else {}
    report = RunReport(
        title=f"spangrad: {prepared.example.name}",
        before=EvalResult(greedy=_rate(result.before), sampled=_rate(result.before_sampled)),
        after=EvalResult(greedy=_rate(result.after), sampled=_rate(result.after_sampled)),
        updates=result.history,
        cloning_curve=curve.get("points", ()),
        cloning_source=measured_by(curve),
        config=to_dict(config),
        store=result.store,
        examples=result.examples,
        events=result.events,
        notes=[
            f"{result.updates} updates, {result.minutes:.1f} minutes, seed {config.run.seed}.",
            f"The cloned expert itself succeeds on {result.warm_start.expert_success:.0%} of its"
            f" {result.warm_start.rollouts} rollouts ({result.warm_start.failed} of them failed).",
            f"Mean engine-to-learner logprob gap: {result.gap_mean:.2g} nats.",
        ],
    )
    result = dataclasses.replace(result, report=str(write_report(prepared.folder / "report.html", report)))
    told = {**result.to_json(), "history": result.history}
    (prepared.folder / "result.json").write_text(json.dumps(told, indent=2))
    return result


def measured_by(curve: Mapping[str, Any]) -> str:
    """Where a `cloning_curve.json` comes from, as far as it says."""
    names = ("command", "date", "seed", "schedule")
    told = {name: curve[name] for name in names if name in curve}
    parts = [f"`{told.pop('command')}`"] if "command" in told else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in told.items())])


def _warm_line(warm: WarmStart) -> str:
    source = "from the cache" if warm.from_cache else f"{warm.calls} calls of {warm.rollouts} rollouts"
    told = "; ".join(f"{count}x {reason}" for reason, count in warm.refused_because.items())
    because = f" ({told})" if told else ""
    return (
        f"  {source}; {warm.failed} rollouts failed, {warm.refused} calls refused{because},"
        f" {warm.trained_tokens} tokens cloned;"
        f" the expert succeeds on {warm.expert_success:.0%}, cloning loss {warm.loss:.3f} nats/token"
    )


def _say(result: DemoResult, options: DemoOptions, console: Console) -> None:
    for name, before, after in (
        ("greedy", result.before, result.after),
        ("sampled", result.before_sampled, result.after_sampled),
    ):
        console.print(
            f"held-out success, {name}: {before.success:.1%} [{before.low:.1%}, {before.high:.1%}]"
            f" -> {after.success:.1%} [{after.low:.1%}, {after.high:.1%}]  ({after.n} tasks, 95% intervals)",
            highlight=False,
            markup=False,
        )
    console.print(f"engine-to-learner logprob gap: mean {result.gap_mean:.2g} nats", highlight=False)
    console.print(f"{result.updates} updates in {result.minutes:.1f} minutes", highlight=False)
    console.print(f"store:  {result.store}", soft_wrap=True, highlight=False)
    command = f"{own_command()} rollouts --store {shlex.quote(result.store)}"
    console.print(f"traces: {command}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"report: {result.report}", soft_wrap=True, highlight=False)
    if options.json:
        print(json.dumps(result.to_json()), flush=True)
