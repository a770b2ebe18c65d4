"""Configuration of a training run: one TOML file, checked before anything starts.

    [run]      what this run is called, where it keeps its state, how many updates
    [hub]      where the store answers
    [serving]  engines and gateway that serve the policy (spangrad.trainer.serving.serving_config)
    [agent]    the agent, its tasks and its reward (spangrad.trainer.rollouts.agent_config)
    [rollout]  how many rollouts an update learns from
    [curriculum]  turns of rollouts, drawing of tasks (spangrad.trainer.curriculum.curriculum_config)
    [credit]   estimators (spangrad.credit.CreditConfig)
    [preference]  which rollouts are better (spangrad.trainer.preference_config.PreferenceConfig)
    [learner]  optimizer and loss (spangrad.trainer.learning.learner.LearnerConfig)
    [eval]     held-out evaluation
    [promotion]  which versions are promoted (spangrad.trainer.promotion.rule.PromotionConfig)
    [monitor]  what pauses a run, or warns (spangrad.trainer.monitoring.monitor_config.MonitorConfig)
    [cluster]  the Ray cluster, and what goes where (spangrad.trainer.cluster_config.ClusterConfig)
    [production]  trains on sessions of live agents (spangrad.trainer.production.production_config);
               then [agent] is left out
    [stored]   trains on rollouts that are in the store (spangrad.trainer.stages.stored_config); then [agent]
               is left out, and no engine is needed
    [stop]     a metric that ends the run before its last update (spangrad.trainer.stages.stop_config)

A file with tables [[stage]] has several runs, one after the other (spangrad.trainer.stages.recipe).
An unknown section or key is an error that names the nearest known one. Paths are relative to
the folder of the TOML file. `--set learner.lr=1e-4` overrides one value, `--set credit={}` gives a section
its defaults. TOML has no None: where a setting may be None, "none" says so.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from spangrad.credit.aggregation import Aggregation
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.cluster_config import ClusterConfig
from spangrad.trainer.curriculum.curriculum_config import CurriculumConfig
from spangrad.trainer.learning.learner_config import CriticConfig, LearnerConfig, require
from spangrad.trainer.monitoring.monitor_config import MonitorConfig, check_monitors
from spangrad.trainer.preference_config import PreferenceConfig, check_effects
from spangrad.trainer.production.production_config import USED_OF_ROLLOUT, ProductionConfig, check_beside
from spangrad.trainer.promotion.rule import PromotionConfig
from spangrad.trainer.rollouts.agent_config import AgentConfig
from spangrad.trainer.serving.serving_config import ServingConfig
from spangrad.trainer.stages import stored_config
from spangrad.trainer.stages.stop_config import StopConfig
from spangrad.trainer.stages.stored_config import StoredConfig, check_stored

T = TypeVar("T")

STRAGGLER_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What this run is called and how far it goes."""

    id: str
    """Name of the run; the same name continues the same run."""
    folder: str = ".spangrad/runs"
    """Checkpoints and logs go to <folder>/<id>."""
    updates: int = 20
    """Number of updates after which the run is finished; 1 or more."""
    seed: int = 0
    """Chooses tasks and initialises the learner's random numbers; 0 or more."""
    keep_checkpoints: int = 2
    """Checkpoints kept on disk; 1 or more."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(bool(self.id) and all(c.isalnum() or c in "-_." for c in self.id), "run.id", self.id,
                 "letters, digits, '-', '_' and '.'")  # fmt: skip
        require(self.updates >= 1, "run.updates", self.updates, "1 or more")
        require(self.seed >= 0, "run.seed", self.seed, "0 or more")
        require(self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "1 or more")


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Where the store answers."""

    url: str = "http://127.0.0.1:4318"
    """Address of the hub."""
    keys: str | None = None
    """File with the hub's keys (`spangrad hub --keys FILE`); None: a hub without keys on loopback."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What an update learns from."""

    groups_per_update: int = 16
    """Tasks per update; 1 or more."""
    group_size: int = 8
    """Rollouts of each task; 2 or more, or 1 where nothing is compared inside groups, as with
    `credit.episode = "running_baseline"`, `"value_baseline"` or `credit.step = "gae"`; what would compare
    them is refused then."""
    temperature: float = 1.0
    """Sampling temperature for training rollouts; more than 0."""
    max_staleness: int = 1
    """Updates that a trained token may be older than the learner: so far may rollouts run ahead of it. 0: the
    synchronous algorithm, no rollout begins before the update before it is published. 0 or more."""
    straggler_s: float | None = STRAGGLER_S
    """How long an update that waits for one group alone goes on waiting while nothing of what it takes ends;
    then what has not ended of that group is cut: it counts as failed, never as 0. None: for ever. More
    than 0."""
    aggregation: Aggregation = "token-mean"
    """`token-mean`: every trained token counts the same, so that what all members of a group share cancels
    out. `rollout-token-mean`: every rollout counts the same, which favours the tokens of short ones.
    `rollout-step-mean`: the same, but only rollouts of few calls are favoured, not short answers.
    `row-token-mean`: every row counts the same, however many a rollout has. `constant`: rollouts are
    divided by `aggregation_tokens`."""
    aggregation_tokens: float | None = None
    """The constant of aggregation `constant`, in tokens; above 0. It is of the config, never of the batch."""
    informative_groups: int = 1
    """New sets of tasks are tried until so many groups of an update have an advantage other than 0; 1 or
    more, and not more than `refills` can give. With `credit.filters = ["zero_spread"]`: DAPO's dynamic
    sampling."""
    refills: int = 3
    """New sets of tasks tried at most; an update then learns from what there is, if anything. 0 or more."""
    reward_authors: tuple[Literal["agent", "evaluator", "operator"], ...] = ("evaluator", "operator")
    """Whose rewards count. `agent` can be forged by the policy's own process."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "rollout.")
        require(self.groups_per_update >= 1, "rollout.groups_per_update", self.groups_per_update, "1 or more")
        require(self.group_size >= 1, "rollout.group_size", self.group_size, "1 or more")
        require(self.temperature > 0, "rollout.temperature", self.temperature, "more than 0")
        require(self.max_staleness >= 0, "rollout.max_staleness", self.max_staleness, "0 or more")
        straggler_s = self.straggler_s
        require(
            straggler_s is None or straggler_s > 0, "rollout.straggler_s", straggler_s, "more than 0, or none"
        )
        if self.groups_per_update * self.group_size == 1 and straggler_s != STRAGGLER_S:
            raise ConfigError(
                f"rollout.straggler_s = {straggler_s!r} has no effect with one rollout an update: nothing is"
                " cut before something else has ended; leave it out"
            )
        tokens = self.aggregation_tokens
        require(tokens is None or tokens > 0, "rollout.aggregation_tokens", tokens, "more than 0")
        if (self.aggregation == "constant") != (tokens is not None):
            raise ConfigError(
                f"rollout.aggregation is {self.aggregation!r} and rollout.aggregation_tokens {tokens!r}; "
                "'constant' needs the number of tokens that rollouts are divided by, others have none"
            )
        require(self.refills >= 0, "rollout.refills", self.refills, "0 or more")
        is_set = 0 < len(set(self.reward_authors)) == len(self.reward_authors)
        require(is_set, "rollout.reward_authors", self.reward_authors, "one or more, each once")
        most = self.groups_per_update * (self.refills + 1)
        require(
            self.informative_groups >= 1, "rollout.informative_groups", self.informative_groups, "1 or more"
        )
        require(
            self.informative_groups <= (most if self.refills else 1),
            "rollout.informative_groups",
            self.informative_groups,
            f"at most {most}: groups_per_update with all refills" if self.refills else "1 with refills 0",
        )


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Held-out evaluation."""

    every: int = 0
    """Evaluate after every so many updates; 0: never in between."""
    tasks: int = 128
    """Held-out tasks before and after training, where that is evaluated (`spangrad demo`); 1 or more."""
    tasks_between: int = 64
    """Held-out tasks of the evaluations in between; 1 or more."""
    success_at: float = 1.0
    """A rollout succeeded if its reward, summed as `credit.reward_weights` says, is at least this."""
    seed: int = 1_000_003
    """Seed of the held-out tasks."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "eval.")
        require(self.every >= 0, "eval.every", self.every, "0 or more")
        for name in ("tasks", "tasks_between"):
            require(getattr(self, name) >= 1, f"eval.{name}", getattr(self, name), "1 or more")
        if not self.every and self.tasks_between != EvalConfig.__dataclass_fields__["tasks_between"].default:
            raise ConfigError(
                f"eval.tasks_between = {self.tasks_between!r} has no effect with eval.every 0, nothing in"
                " between; leave it out, or set eval.every"
            )


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything that `spangrad train` needs."""

    run: RunConfig
    agent: AgentConfig = field(default_factory=AgentConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    promotion: PromotionConfig = field(default_factory=PromotionConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    production: ProductionConfig | None = None
    """How a run trains on sessions of live agents; None: it does not."""
    stored: StoredConfig | None = None
    """Which stored rollouts a run trains on; None, and no `production`: it has rollouts made."""
    stop: StopConfig = field(default_factory=StopConfig)
    base_dir: str = "."
    """Folder that relative paths start from."""

    def __post_init__(self) -> None:
        """Refuse settings that the objective does not use."""
        aggregation = self.rollout.aggregation
        is_weighed = aggregation != RolloutConfig.__dataclass_fields__["aggregation"].default
        group_size = self.rollout.group_size
        of_agents: dict[str, tuple[Any, Collection[str]]] = {
            "agent": (self.agent, ()),
            "curriculum": (self.curriculum, ()),
            "eval": (self.eval, ()),
            "promotion": (self.promotion, ()),
        }
        if self.makes_rollouts:
            self.agent.check()
            self.curriculum.check(self.agent.tasks, self.rollout.groups_per_update)
        elif self.stored is None:
            group_size = 1
            rollout = {"rollout": (self.rollout, USED_OF_ROLLOUT)}
            check_beside(self.learner, self.credit, of_agents | rollout)
        elif self.production is not None:
            raise ConfigError("[stored] and [production] both say what is trained; leave one out")
        else:
            rollout = {"rollout": (self.rollout, stored_config.USED_OF_ROLLOUT)}
            serving = {"serving": (self.serving, stored_config.USED_OF_SERVING)}
            check_stored(self.learner, of_agents | rollout | serving)
        self.cluster.check(
            learners=self.learner.workers,
            workers=self.agent.workers,
            makes_rollouts=self.makes_rollouts,
            asks_engines=self.stored is None,
            names_engines=self.serving.engines != ServingConfig().engines,
        )
        check_effects(
            self.learner,
            self.credit,
            self.preference,
            is_weighed=is_weighed,
            group_size=None if self.stored is not None else group_size,
        )
        check_monitors(
            self.monitor,
            objective=self.learner.objective,
            uses_ratio=self.learner.uses_ratio,
            rewards=self.credit.reward_weights,
            eval_every=self.eval.every,
            group_size=group_size,
            is_stored=self.stored is not None,
        )
        critic_alone = self.learner.critic.warmup_updates if self.learner.critic is not None else 0
        require(
            critic_alone < self.run.updates or not critic_alone,
            "learner.critic.warmup_updates",
            critic_alone,
            f"fewer than run.updates, {self.run.updates}: the policy stays as it is in all of these",
        )
        if self.serving.transfer == "lora" and not self.learner.lora_rank:
            raise ConfigError(
                "serving.transfer is 'lora', but no adapter is trained; set learner.lora_rank, or leave it"
                " out"
            )
        require(
            self.learner.seed in (None, self.run.seed),
            "learner.seed",
            self.learner.seed,
            f"none: run.seed, {self.run.seed}, seeds the learner of a run",
        )
        require(
            self.serving.model in ("", self.learner.model_path) or not self.learner.model_path,
            "learner.model_path",
            self.learner.model_path,
            f"none: a run starts from serving.model, {self.serving.model!r}",
        )

    @property
    def makes_rollouts(self) -> bool:
        """Whether the run asks for rollouts itself."""
        return self.production is None and self.stored is None

    def version_of_rows(self, policy_version: int) -> int | None:
        """The learner's version, if those that sampled can be compared with it; None: they are others'."""
        return None if self.stored is not None else policy_version

    @property
    def critic(self) -> CriticConfig | None:
        """How the critic learns; None: the credit asks none."""
        return self.learner.critic or (CriticConfig() if self.credit.needs_values else None)

    @property
    def start_model(self) -> Path:
        """Folder of the model that the run starts from.

        Raises:
            ConfigError: None is named.
        """
        model = self.learner.model_path or self.serving.model
        if not model:
            raise ConfigError("serving.model is empty; name the folder of the model that the run starts from")
        return resolve(model, self.base_dir)

    def learner_from(self, model: Path) -> LearnerConfig:
        """The learner of this run, which starts from this model's folder."""
        return dataclasses.replace(
            self.learner, model_path=str(model), seed=self.run.seed, critic=self.critic
        )

    @property
    def folder(self) -> Path:
        """Where this run keeps its state."""
        return resolve(self.run.folder, self.base_dir) / self.run.id


def resolve(path: str, base_dir: str) -> Path:
    """`path`, relative to `base_dir` unless absolute."""
    return Path(base_dir, path).expanduser().resolve()


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, besides: Sequence[str] = ()
) -> TrainConfig:
    """Read a TOML file; `overrides` are as `apply_override` takes them, in their order.

    Sections in `besides` are somebody else's and are left out.

    Raises:
        ConfigError: The file can't be read, a key is unknown, a value has the wrong type or range.
    """
    file = Path(path)
    try:
        raw = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{str(file)!r} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} is not TOML: {error}") from error
    for section in besides:
        raw.pop(section, None)
    for override in overrides:
        apply_override(raw, override)
    return build_run(raw, file.resolve().parent, where=str(file))


def build_run(raw: Mapping[str, Any], base_dir: Path, *, where: str) -> TrainConfig:
    """Make the config of a run from the sections of a TOML file; relative paths start from `base_dir`.

    Raises:
        ConfigError: A section or key is unknown, a value has the wrong type or range.
    """
    sections = [f.name for f in dataclasses.fields(TrainConfig) if f.name != "base_dir"]
    if "stage" in raw:
        raise ConfigError(
            f"{where} has [[stage]]: it is a recipe of several runs, which `spangrad train` alone takes;"
            " expected the config of one"
        )
    for name, value in raw.items():
        if name in sections:
            continue
        known = f"known are {', '.join(sections)}"
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: key {name!r} is in no section; {known}")
        near = difflib.get_close_matches(name, sections, n=1)
        raise ConfigError(
            f"{where}: unknown section {name!r}; {f'did you mean {near[0]!r}?' if near else known}"
        )
    needed = ("run",) if "production" in raw or "stored" in raw else ("run", "agent")
    if missing := [name for name in needed if name not in raw]:
        other = "; a run on stored rollouts has [stored], stored = {} of all" if missing[0] == "agent" else ""
        raise ConfigError(f"{where}: section {missing[0]!r} is missing{other}")
    return dataclasses.replace(build(TrainConfig, raw, where=where), base_dir=str(base_dir))


def build(kind: type[T], raw: Mapping[str, Any], *, where: str) -> T:
    """Make a config dataclass from plain values, checking names and types."""
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(fields))}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
    values = {key: _value(hints[key], value, where=f"{where}: {key}") for key, value in raw.items()}
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: {missing[0]!r} is missing")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved config as plain values, to be written next to the run."""
    return dataclasses.asdict(config)


def _value(hint: Any, value: Any, *, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}, expected a table")
        return build(hint, value, where=where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in typing.get_args(hint) and value in (None, "none"):
            return None
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        for option in options[:-1]:
            try:
                return _value(option, value, where=where)
            except ConfigError:
                continue
        return _value(options[-1], value, where=where)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            near = difflib.get_close_matches(
                str(value), [str(a) for a in typing.get_args(hint)], n=1, cutoff=0.4
            )
            extra = f"; did you mean {near[0]!r}?" if near else ""
            choices = ", ".join(repr(a) for a in typing.get_args(hint))
            raise ConfigError(f"{where} is {value!r}, expected one of {choices}{extra}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}, expected a list")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, entry, where=where) for entry in value)
    if origin is not None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}, expected a table")
        item = typing.get_args(hint)[1]
        if item is str:
            return {str(key): str(entry) for key, entry in value.items()}
        return {str(key): _value(item, entry, where=f"{where}.{key}") for key, entry in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}, expected {hint.__name__}")
    return value


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Change one value of the sections of a TOML file: `section.key=value`, in TOML or as plain text.

    `section={}` gives a whole section its defaults, `section={key = value}` all but these.

    Raises:
        ConfigError: It has another form, or the section is no table.
    """
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if not equals or not (sections or isinstance(value, dict)):
        raise ConfigError(
            f"--set {override!r}: expected section.key=value, or section={{}} for the defaults of a section"
        )
    table: Any = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is not a table")
    table[key] = value
