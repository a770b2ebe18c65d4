"""How what a run asks for changes as the policy gets better: section `[curriculum]`.

    turns     how many turns rollouts have: h_t = min(H_max, h_0 + D floor(t / T))
    sampling  which tasks are drawn: those that succeed neither always nor never

Knows settings, and what they change. Does not know: stores, gateways, tasks.
"""

from dataclasses import dataclass
from typing import Final, Literal

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import require

NO_TURNS_LEFT: Final = "I have no turns left."
MAX_TURNS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class TurnSchedule:
    """Turns of a rollout that is asked for when t updates are made.

        h_t = min(limit, start + step * floor(t / every))

    Source: ScalingInter-RL, arXiv:2509.08755. The gateway counts them, so agents need not know. Evaluations
    have as many turns as training ends with.
    """

    start: int
    """h_0: turns of the first rollouts; 1 or more."""
    step: int = 0
    """D: turns more after every so many updates; 0 or more, 0: always `start`."""
    every: int | None = None
    """T: updates, 1 or more; needed with a step."""
    limit: int | None = None
    """H_max: most turns, above `start`; needed with a step."""
    beyond: Literal["reply", "error"] = "reply"
    """What a call beyond the last turn gets: an ordinary reply of the assistant without tool calls, on which
    agents end, or an error (403), with which their rollouts fail unless they expect it."""
    reply: str = NO_TURNS_LEFT
    """The text of that reply. Agents that want JSON need a text that is."""

    def __post_init__(self) -> None:
        """Check ranges, and that every setting has an effect."""
        where = "curriculum.turns"
        check_values(self, f"{where}.")
        require(1 <= self.start <= MAX_TURNS, f"{where}.start", self.start, f"1 to {MAX_TURNS}")
        require(self.step >= 0, f"{where}.step", self.step, "0 or more")
        for name in ("every", "limit"):
            if (getattr(self, name) is None) != (self.step == 0):
                raise ConfigError(
                    f"{where}.step is {self.step} and {where}.{name} {getattr(self, name)!r}; a step needs"
                    " `every` and `limit`, and without one turns never change: leave both out"
                )
        if self.every is not None:
            require(self.every >= 1, f"{where}.every", self.every, "1 or more")
        if self.limit is not None:
            expected = f"above start, {self.start}, and at most {MAX_TURNS}"
            require(self.start < self.limit <= MAX_TURNS, f"{where}.limit", self.limit, expected)
        require(bool(self.reply.strip()), f"{where}.reply", self.reply, "a text")
        if self.beyond == "error" and self.reply != NO_TURNS_LEFT:
            raise ConfigError(f"{where}.reply has no effect with {where}.beyond 'error'; leave one out")

    def turns(self, updates: int) -> int:
        """Turns of rollouts that are asked for when so many updates are made."""
        raised = self.start + self.step * (updates // (self.every or 1))
        return min(self.most, raised)

    @property
    def most(self) -> int:
        """The number that turns end with."""
        return self.start if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Draw tasks by how often the run's own rollouts succeeded on them; formulas: `difficulty.py`."""

    band: tuple[float, float] = (0.2, 0.8)
    """Rates of success that are wanted, lowest and highest, 0 to 1."""
    exploration: float = 0.1
    """Share that is drawn without a look at success, so that no task is ever lost; above 0, below 1."""
    focus: float = 2.0
    """How much more tasks are drawn that are likely inside the band: by this power of that probability; above
    0. More learns more from a pool of mostly hopeless or solved tasks, and believes few rollouts sooner."""
    half_life: float = 20.0
    """Updates after which a rollout counts half: the policy has moved on; above 0."""
    success_at: float = 1.0
    """A rollout succeeded if its reward, summed as `credit.reward_weights` says, is at least this."""
    pool: int | None = None
    """Tasks that a function `tasks(split, n, seed)` is asked for, once; a file of tasks is a pool itself."""

    def __post_init__(self) -> None:
        """Check ranges."""
        where = "curriculum.sampling"
        check_values(self, f"{where}.")
        is_band = len(self.band) == 2 and 0 <= self.band[0] < self.band[-1] <= 1
        require(is_band, f"{where}.band", self.band, "two numbers, 0 to 1, the lower one first")
        if self.band == (0.0, 1.0):
            raise ConfigError(f"{where}.band is all rates, so every task is as good; leave the section out")
        require(0 < self.exploration < 1, f"{where}.exploration", self.exploration, "above 0 and below 1")
        require(self.focus > 0, f"{where}.focus", self.focus, "more than 0")
        require(self.half_life > 0, f"{where}.half_life", self.half_life, "more than 0")
        require(self.pool is None or self.pool >= 1, f"{where}.pool", self.pool, "1 or more")


@dataclass(frozen=True, slots=True)
class CurriculumConfig:
    """What a run asks for as it goes on. By default: any number of turns, all tasks alike."""

    turns: TurnSchedule | None = None
    """How many turns rollouts have; None: as many as their agents take."""
    sampling: SamplingConfig | None = None
    """Which tasks are drawn; None: all alike."""

    def __post_init__(self) -> None:
        """Refuse tables that nobody has read."""
        for value, kind, name in (
            (self.turns, TurnSchedule, "turns"),
            (self.sampling, SamplingConfig, "sampling"),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"curriculum.{name} is {value!r}, expected a {kind.__name__}")

    def turns_at(self, updates: int) -> int | None:
        """Turns of rollouts that are asked for when so many updates are made; None: any number."""
        return None if self.turns is None else self.turns.turns(updates)

    @property
    def most_turns(self) -> int | None:
        """Turns of an evaluation, the same at each, so that they can be compared; None: any number."""
        return None if self.turns is None else self.turns.most

    @property
    def turns_reply(self) -> str | None:
        """What a call beyond the last turn is answered; None: by an error."""
        return None if self.turns is None or self.turns.beyond == "error" else self.turns.reply

    def check(self, tasks: str, groups_per_update: int) -> None:
        """Refuse a pool that does not fit where the tasks come from. Raises ConfigError."""
        if self.sampling is None:
            return
        name, pool = "curriculum.sampling.pool", self.sampling.pool
        if tasks.endswith(".jsonl") and pool is not None:
            raise ConfigError(
                f"{name} has no effect: {tasks!r} is a file, all of it is the pool; leave it out"
            )
        if not tasks.endswith(".jsonl") and pool is None:
            raise ConfigError(
                f"{name} is missing: {tasks!r} is a function, say how many tasks to ask it for; success is"
                " remembered by task, so they have to come back"
            )
        if pool is not None:
            expected = f"rollout.groups_per_update, {groups_per_update}, or more"
            require(pool >= groups_per_update, name, pool, expected)
