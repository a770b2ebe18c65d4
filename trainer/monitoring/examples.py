"""Examples of what a monitor found, out of an update's rollouts: read only where there is one to show."""

from collections import Counter
from collections.abc import Callable, Sequence

from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import ModelCall
from spangrad.credit.actions import action_of
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.monitoring.behavior import acting_by_rollout, edited_test_files, first_steps_of, text_of
from spangrad.trainer.monitoring.monitor_config import MonitorConfig

SHOWN = 3
LONGEST = 80


def example_of(
    name: str, rollouts: Callable[[], Sequence[Rollout]], store: Store, config: MonitorConfig
) -> str:
    """What goes behind the text of an event of this monitor; empty where it has no examples.

    Args:
        name: The monitor.
        rollouts: Gives those of the update; only called where they are needed.
        store: Has their calls.
        config: Its `test_files` are looked for.
    """
    if name not in ("first_steps", "test_edits"):
        return ""
    ended = rollouts()
    calls = calls_of(store, [rollout.rollout_id for rollout in ended]) if ended else ()
    acting = acting_by_rollout(calls, ended)
    if name == "first_steps":
        return _commonest_start(acting, ended)
    found = [
        f"{path!r} in {rollout_id}"
        for rollout_id, mine in acting.items()
        for path in sorted(set(edited_test_files(mine, config.test_files)))
    ]
    return f": {', '.join(found[:SHOWN])}" if found else ""


def _commonest_start(acting: dict[str, list[ModelCall]], rollouts: Sequence[Rollout]) -> str:
    """The first reply that most rollouts begin with, as text."""
    counted = Counter(action for _, action in first_steps_of(acting, rollouts))
    if not counted:
        return ""
    action, count = counted.most_common(1)[0]
    rollout_id, mine = next((name, mine) for name, mine in acting.items() if action_of(mine[0]) == action)
    message = mine[0].choices[0].message
    called = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = f"{called[0].get('name')}({called[0].get('arguments')})" if called else text_of(message)
    return f", {count} of {len(acting)} with {said[:LONGEST]!r}, as in {rollout_id}"
