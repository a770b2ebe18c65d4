"""What a learner is made from.

Knows: the ranges of its settings. Does not know: torch.
"""

import math
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from spangrad.credit.settings import check_values, one_of
from spangrad.errors import ConfigError
from spangrad.trainer.learning.corrections import CorrectionConfig
from spangrad.trainer.learning.objectives import OBJECTIVES, KlEstimator, SequenceUnit

DTYPES = ("float32", "bfloat16")
PACKINGS = ("auto", "tree", "varlen", "padded")
SHARDINGS = ("ddp", "fsdp2")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """How the value head learns that `credit.step = "gae"` and `credit.episode = "value_baseline"` ask."""

    lr: float = 0.05
    """Learning rate of its AdamW: about how far a step moves a value, in reward units; above 0."""
    steps: int = 10
    """Steps for each optimizer step of the policy, on the same calls, without a forward pass; 1 or more."""
    clip: float | None = None
    """How far an update may take a value and still gain by it, reward units (0.5 in verl), above 0; None: as
    far as it likes."""
    warmup_updates: int = 0
    """First updates, in which the critic learns and the policy stays as it is; 0 or more."""

    def __post_init__(self) -> None:
        """Refuse values that can't be used."""
        check_values(self, "learner.critic.")
        for name, holds, expected in (
            ("lr", self.lr > 0, "more than 0"),
            ("steps", self.steps >= 1, "1 or more"),
            ("clip", self.clip is None or self.clip > 0, "more than 0"),
            ("warmup_updates", self.warmup_updates >= 0, "0 or more"),
        ):
            require(bool(holds), f"learner.critic.{name}", getattr(self, name), expected)


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What a learner is made from; checked when made. A changed setting that nothing uses is refused."""

    model_path: str = ""
    """Hugging Face folder of the starting policy; a training run starts from `serving.model`, and another
    beside it is refused."""
    dtype: str = "float32"
    """`float32`, or `bfloat16`: compute in bfloat16 over float32 weights and export bfloat16."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`; with `workers` above 1 `cuda` is a GPU for each."""
    workers: int = 1
    """Processes that train the policy together, under Ray Train; 1 or more. The rows of each optimizer step
    are divided over them. Changes no number but rounding: a run may go on with another number."""
    sharding: str = "ddp"
    """What each worker holds: `ddp` (all weights; gradients are summed once a step) or `fsdp2` (its part of
    weights, gradients and optimizer state; layers are gathered while they compute). Not with adapters."""
    lr: float = 1e-4
    """Peak learning rate of AdamW; above 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates, each in [0, 1)."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices (never of norms and biases); 0 or more."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; above 0."""
    warmup_updates: int = 0
    """The learning rate rises linearly over this many calls of `update`; 0 or more."""
    decay_updates: int = 0
    """The learning rate falls linearly to a tenth over this many calls of `update`; 0: it does not fall."""
    objective: str = "ppo"
    """Loss of `update`: a name in `objectives.OBJECTIVES`; `trainer/README.md` has the table."""
    clip_low: float | None = None
    """Bound on the lower side, above 0 and below 1 (`cispo`: or 1, no bound); None: the objective's own. It
    is of the ratio's distance from 1, of the probability's move (`dppo_tv`) or its divergence (`dppo_kl`)."""
    clip_high: float | None = None
    """Bound on the upper side, above 0; None: the objective's own."""
    dual_clip: float | None = 3.0
    """`ppo`: largest loss per unit of negative advantage, above 1; None switches it off."""
    sequence: SequenceUnit = "call"
    """What has one ratio in `gspo`, `gspo_token` and in corrections of sequences: the tokens that one model
    `call` sampled, so that it is the same however a rollout is cut into rows; or the trained tokens of a
    `row`, of any number of calls."""
    tau_positive: float = 1.0
    """`sapo`: how fast the gate closes on good tokens; above 0."""
    tau_negative: float = 1.05
    """`sapo`: how fast the gate closes on bad tokens; above 0."""
    max_ratio: float = 20.0
    """`dppo_tv`, `dppo_kl`: cap of the importance weight; above 1."""
    log_ratio_coef: float = 0.0
    """Weight of the squared log-ratio to the policy that sampled; 0 or more. Not with `correction.proximal`,
    which puts another in its place."""
    awr_beta: float = 1.0
    """`awr`: advantage that multiplies a token's weight by e; above 0."""
    awr_max_weight: float = 20.0
    """`awr`: largest factor of a token; above 0."""
    preference_beta: float = 0.1
    """`dpo`, `kto`: how fast a preference saturates, per nat; above 0. Small: far from the start."""
    label_smoothing: float = 0.0
    """`dpo`: share of pairs that are taken to be the wrong way round; 0 to below 0.5."""
    good_weight: float = 1.0
    """`kto`: weight of good sequences; above 0."""
    bad_weight: float = 1.0
    """`kto`: weight of bad sequences; above 0. The paper keeps good_weight * good / (bad_weight * bad) within
    1 to 4 / 3."""
    echo_coef: float = 0.0
    """Weight of the cross-entropy on what the environment answered, token by token beside the objective; 0 or
    more. 0.1 in prime-rl."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What to do about tokens that another policy than the learner's sampled; one table, such as
    `{token_band = [0.5, 5.0]}`. For every objective with a ratio."""
    critic: CriticConfig | None = None
    """How the critic learns, if the credit asks one; one table, such as `{lr = 0.02, clip = 0.5}`. None: in a
    run as by default where the credit asks one; a learner alone has none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 or more."""
    kl_coef: float = 0.0
    """Weight of the penalty that holds the policy to its start; 0 or more."""
    kl_estimator: KlEstimator = "k2"
    """Form of that penalty; `k3_unbiased` needs an objective with a ratio, and not
    `correction.proximal`. See `losses.kl_penalty`."""
    epochs_per_update: int = 1
    """Passes over the rows of one update; 1 or more."""
    minibatches_per_update: int = 1
    """Optimizer steps per pass; 1 or more."""
    max_tokens_per_microbatch: int = 4096
    """Tokens in one forward pass, padding included; changes no number but rounding.

    On a CPU 2048 to 4096 is fastest (activations stay in the cache); on a GPU what memory allows.
    """
    packing: str = "auto"
    """How rows are laid out for a pass: `tree` (a token that rows begin with in common is computed once),
    `varlen` (in one line, nothing shared, no padding), `padded`, or `auto`: what computes fewest tokens.

    Changes no number but rounding. A model that takes no packs gets `padded` from `auto`, with a warning,
    and refuses the other two. On a GPU `auto` pads, too: packs are not proven there.
    """
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which computes the layer again: changes no number,
    about a third more time for a fraction of the memory."""
    lora_rank: int = 0
    """Train adapters of this rank beside frozen weights, instead of the weights; 0: train the weights.

    Adapters want about ten times the learning rate. Exports hold merged weights.
    """
    lora_alpha: float = 32.0
    """Scale of the adapters' output, divided by the rank; above 0."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get adapters, such as `q_proj`; none named: all but the output layer."""
    kl_monitor_rows: int = 128
    """`policy/kl_to_start` is measured on at most this many rows, taken at random; 0 or more. All are where
    `kl_coef` is above 0, none where the objective needs no starting policy (`bc`, `awr`)."""
    seed: int | None = None
    """Seeds the order of rows; 0 or more. None: 0; in a training run `run.seed`, and another is refused."""
    threads: int = 0
    """torch CPU threads of the process; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        """Refuse values that can't be used, and changed ones that nothing uses."""
        check_values(self, "learner.")
        require(
            isinstance(self.correction, CorrectionConfig),
            "learner.correction",
            self.correction,
            "a CorrectionConfig",
        )
        is_critic = self.critic is None or isinstance(self.critic, CriticConfig)
        require(is_critic, "learner.critic", self.critic, "a CriticConfig")
        objective = OBJECTIVES.get(self.objective)
        require(
            objective is not None, "learner.objective", self.objective, one_of(self.objective, OBJECTIVES)
        )
        clip = objective.clip if objective is not None else None
        for name, holds, expected in (
            ("dtype", self.dtype in DTYPES, one_of(self.dtype, DTYPES)),
            ("device", re.fullmatch(r"cpu|cuda(:\d+)?", self.device), "cpu, cuda or cuda:N"),
            ("workers", self.workers >= 1, "1 or more"),
            ("sharding", self.sharding in SHARDINGS, one_of(self.sharding, SHARDINGS)),
            ("lr", self.lr > 0, "more than 0"),
            ("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two of 0 to below 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("max_grad_norm", self.max_grad_norm > 0, "more than 0"),
            ("warmup_updates", self.warmup_updates >= 0, "0 or more"),
            ("decay_updates", self.decay_updates >= 0, "0 or more"),
            ("lora_targets", len(set(self.lora_targets)) == len(self.lora_targets), "each once"),
            (
                "clip_low",
                self.clip_low is None or 0 < self.clip_low < 1 or (clip and self.clip_low == clip[0]),
                "more than 0 and less than 1",
            ),
            ("clip_high", self.clip_high is None or self.clip_high > 0, "more than 0"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "more than 1"),
            ("tau_positive", self.tau_positive > 0, "more than 0"),
            ("tau_negative", self.tau_negative > 0, "more than 0"),
            ("max_ratio", self.max_ratio > 1, "more than 1"),
            ("log_ratio_coef", self.log_ratio_coef >= 0, "0 or more"),
            ("awr_beta", self.awr_beta > 0, "more than 0"),
            ("awr_max_weight", self.awr_max_weight > 0, "more than 0"),
            ("preference_beta", self.preference_beta > 0, "more than 0"),
            ("label_smoothing", 0 <= self.label_smoothing < 0.5, "0 to below 0.5"),
            ("good_weight", self.good_weight > 0, "more than 0"),
            ("bad_weight", self.bad_weight > 0, "more than 0"),
            ("echo_coef", self.echo_coef >= 0, "0 or more"),
            ("entropy_coef", self.entropy_coef >= 0, "0 or more"),
            ("kl_coef", self.kl_coef >= 0, "0 or more"),
            ("epochs_per_update", self.epochs_per_update >= 1, "1 or more"),
            ("minibatches_per_update", self.minibatches_per_update >= 1, "1 or more"),
            ("max_tokens_per_microbatch", self.max_tokens_per_microbatch >= 1, "1 or more"),
            ("packing", self.packing in PACKINGS, one_of(self.packing, PACKINGS)),
            ("lora_rank", self.lora_rank >= 0, "0 or more"),
            ("lora_alpha", self.lora_alpha > 0, "more than 0"),
            ("kl_monitor_rows", self.kl_monitor_rows >= 0, "0 or more"),
            ("seed", self.seed is None or self.seed >= 0, "0 or more"),
            ("threads", self.threads >= 0, "0 or more"),
        ):
            require(bool(holds), f"learner.{name}", getattr(self, name), expected)
        self._check_effects()

    @property
    def uses_ratio(self) -> bool:
        """Whether the objective compares the current with the behaviour policy."""
        return OBJECTIVES[self.objective].uses_ratio

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of an update, if it has as many groups as minibatches."""
        return self.epochs_per_update * self.minibatches_per_update

    @property
    def needs_all_tokens(self) -> bool:
        """Whether rows train something without an advantage other than 0: by another term, or a critic."""
        coefs = (self.entropy_coef, self.kl_coef, self.log_ratio_coef, self.echo_coef)
        return max(coefs) > 0 or self.critic is not None

    def loss_settings(self) -> dict[str, Any]:
        """The settings of the objective alone, by name; its own clip bounds where none are named."""
        objective = OBJECTIVES[self.objective]
        own = dict(zip(("clip_low", "clip_high"), objective.clip or (), strict=False))
        return {
            name: own.get(name) if getattr(self, name) is None else getattr(self, name)
            for name in objective.names
        }

    def settings_unused(self) -> dict[str, str]:
        """Settings that change nothing, and why."""
        objective = OBJECTIVES[self.objective]
        unused = frozenset().union(*(one.names for one in OBJECTIVES.values())) - objective.names
        if not objective.uses_ratio:
            unused |= {"log_ratio_coef", "correction"}
        if not objective.needs_credit:
            unused |= {"critic"}
        if self.correction.uses_sequences:
            unused -= {"sequence"}
        because = {name: f"with objective {self.objective!r}" for name in unused}
        if self.kl_coef == 0:
            because["kl_estimator"] = "with kl_coef 0"
        elif self.kl_estimator == "k3_unbiased" and not objective.uses_ratio:
            because["kl_estimator"] = f"with objective {self.objective!r}, which has no ratio to weigh it by"
        if self.kl_coef > 0:
            because["kl_monitor_rows"] = "with a kl_coef above 0, which compares every row"
        elif not (objective.uses_ratio or objective.compares_sequences):
            because["kl_monitor_rows"] = f"with objective {self.objective!r} and kl_coef 0"
        if self.lora_rank == 0:
            because |= dict.fromkeys(
                ("lora_alpha", "lora_targets"), "with lora_rank 0, which has no adapters"
            )
        if self.correction.proximal and self.steps_per_update == 1:
            unmoved = objective.names - ({"sequence"} if self.correction.uses_sequences else set())
            because |= dict.fromkeys(
                unmoved,
                "with learner.correction.proximal and one optimizer step an update, whose ratio to the policy"
                " before it is 1",
            )
        if self.workers == 1:
            because["sharding"] = "with workers 1, which holds everything"
        return because

    def _check_effects(self) -> None:
        defaults = {
            one.name: one.default if one.default_factory is MISSING else one.default_factory()
            for one in fields(self)
        }
        if self.objective == "gspo" and self.correction.token_tis is not None:
            raise ConfigError(
                "learner.correction.token_tis gives the tokens of a sequence different weights, and gspo has "
                "one ratio for all of them; choose sequence_tis, or objective 'gspo_token'"
            )
        if self.workers > 1 and self.device.startswith("cuda:"):
            raise ConfigError(
                f"learner.device is {self.device!r}, one GPU, and learner.workers {self.workers}; choose "
                "'cuda': each worker gets a GPU of its own"
            )
        if self.sharding == "fsdp2" and self.lora_rank:
            raise ConfigError(
                "learner.sharding = 'fsdp2' divides weights, gradients and optimizer state, and lora_rank "
                f"{self.lora_rank} trains adapters beside frozen weights, which are merged whole; choose "
                "'ddp'"
            )
        critic_steps = self.steps_per_update * self.critic.steps if self.critic is not None else 0
        if self.critic is not None and self.critic.clip is not None and critic_steps == 1:
            raise ConfigError(
                f"learner.critic.clip = {self.critic.clip!r} has no effect with learner.critic.steps 1 and"
                " one optimizer step an update, which begins at the old values; leave it out, or take more"
            )
        needy = {
            "log_ratio_coef": self.log_ratio_coef > 0,
            "kl_estimator": self.kl_coef > 0 and self.kl_estimator == "k3_unbiased",
        }
        for name in (name for name, is_on in needy.items() if is_on and self.correction.proximal):
            raise ConfigError(
                f"learner.{name} = {getattr(self, name)!r} needs the policy that sampled, and "
                "learner.correction.proximal puts the policy before the update in its place; choose one"
            )
        for name, why in self.settings_unused().items():
            if (value := getattr(self, name)) != defaults[name]:
                raise ConfigError(
                    f"learner.{name} = {value!r} has no effect {why}; leave it out, or choose what uses it"
                )


def require(holds: bool, key: str, value: object, expected: str) -> None:
    """Refuse the value of a setting that is out of its range.

    Raises:
        ConfigError: `holds` is false; says the value and what was expected.
    """
    if not holds:
        raise ConfigError(f"{key} is {value!r}, expected {expected}")


def update_lr(config: LearnerConfig, updates: int) -> float:
    """Learning rate of the call of `update` that follows `updates` earlier ones."""
    rise = min(1.0, (updates + 1) / max(1, config.warmup_updates))
    fall = max(0.1, 1.0 - 0.9 * updates / config.decay_updates) if config.decay_updates else 1.0
    return config.lr * rise * fall


def scheduled_lr(lr: float, step: int, steps: int, *, schedule: str, warmup_steps: int) -> float:
    """Learning rate of step `step` of `steps`: linear rise, then `cosine`, `linear` or `constant` to the end.

    The falling schedules reach 0 one step after the last.

    Raises:
        ConfigError: There is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (1.0 - progress) if schedule == "linear" else lr
