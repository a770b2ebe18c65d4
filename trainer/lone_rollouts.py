"""What says nothing where every rollout is alone in its group: a run of such rollouts refuses it.

Knows settings. Does not know: stores, learners.
"""

from collections.abc import Sequence

from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.estimators import STEP_TERMS
from spangrad.errors import ConfigError
from spangrad.trainer.learning.objectives import OBJECTIVES


def check_lone(objective: str, credit: CreditConfig, *, because: str, instead: str) -> None:
    """Refuse what compares rollouts of a group where each of them is alone in its own.

    Args:
        objective: `learner.objective`.
        credit: Estimators.
        because: Why they are alone.
        instead: What to choose, if no credit says anything of them.

    Raises:
        ConfigError: Nothing of the objective, or a setting that was changed, says anything of such rollouts.
    """
    needs_credit = OBJECTIVES[objective].needs_credit
    if not (credit.counts_lone if needs_credit else objective != "dpo"):
        what = f"credit.episode {credit.episode!r}" if needs_credit else "learner.objective 'dpo'"
        instead = instead if needs_credit else "learner.objective 'kto' or 'bc', which compare none"
        raise ConfigError(f"{because}: {what} compares rollouts of a task; choose {instead}")
    if needs_credit and credit.needs_groups:
        raise ConfigError(f"{because}: {_why(credit, credit.needs_groups)}")


def _why(credit: CreditConfig, names: Sequence[str]) -> str:
    told = " and ".join(f"credit.{name} = {_shown(getattr(credit, name))}" for name in names)
    if "filters" in names:
        return f"{told} would leave out every rollout, whose group has no spread; leave that out"
    alike = ", ".join(name for name, term in STEP_TERMS.items() if term.counts_lone)
    instead = f", or choose a step term that needs no others: {alike}" if "step" in names else ""
    return f"{told} can change nothing: there is nobody to compare a rollout with; leave that out{instead}"


def _shown(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
