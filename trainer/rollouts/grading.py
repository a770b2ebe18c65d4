"""What a run's reward function says of a rollout, as rewards of the store.

Knows what the function may return and which names the run counts. Knows no queue and no authors.
"""

from collections.abc import Callable, Collection
from typing import Any

from spangrad.adapters.scoring.values import as_rewards
from spangrad.store.records import DEFAULT_REWARD, Reward, Rollout


def rewards_given(function: Callable[..., Any], rollout: Rollout, output: Any) -> list[Reward]:
    """Grade one rollout; nothing if the function has no opinion. What it raises goes on.

    Raises:
        ValueError: It returned neither a finite number, nor a dict of them by name, nor None.
    """
    given = as_rewards(function({**(rollout.task or {})}, output), DEFAULT_REWARD) or {}
    return [
        Reward(rollout_id=rollout.rollout_id, value=value, name=name, attempt=rollout.attempt)
        for name, value in given.items()
    ]


def other_names_told(given: Collection[Reward], wanted: Collection[str]) -> str | None:
    """What to say if a function's names are not those that count; None if they are, or there are none.

    Args:
        given: What the function said of one rollout.
        wanted: Names in `credit.reward_weights`.
    """
    names = {reward.name for reward in given}
    if not names or names == set(wanted):
        return None
    told = f"the reward function gives {_listed(names)}, credit.reward_weights counts {_listed(wanted)}"
    if idle := names - set(wanted):
        told += f"; {_listed(idle)} will train nothing"
    if missing := set(wanted) - names:
        told += f"; without {_listed(missing)}, unless somebody else gives it, a rollout has no reward"
    return told


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
