"""A user's function, called with a stored rollout.

Knows what it may return and how it may be written. Knows no store and no processes.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

from spangrad.adapters.scoring.stored_rollout import StoredRollout
from spangrad.adapters.scoring.values import as_rewards
from spangrad.user_code import load_callable

_AS_TRAINERS: Final = 2
"""Arguments of the reward function of a trainer's config: `reward(task, output)`."""


class Verifier:
    """A function of a `StoredRollout`, or of (task, output) as a trainer's config names it; async or not.

    A context: what is async runs in one event loop, so that a client that it keeps stays usable.
    """

    def __init__(self, spec: str, base_dir: str = ".") -> None:
        """Load it.

        Raises:
            ConfigError: No such file, module or name, or it can't be called. What the file itself raises.
        """
        self._function = load_callable(spec, base_dir)
        self._takes_two = _required(self._function) == _AS_TRAINERS
        self._runner = asyncio.Runner()

    def __call__(self, rollout: StoredRollout, name: str) -> dict[str, float] | None:
        """Rewards by name, a single number as `name`; None if it has no opinion.

        Raises:
            ValueError: It returned something else. Besides, whatever it raises.
        """
        arguments = (rollout.task, rollout.output) if self._takes_two else (rollout,)
        returned = self._function(*arguments)
        if inspect.isawaitable(returned):
            returned = self._runner.run(_result(returned))
        return as_rewards(returned, name)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the event loop."""
        self._runner.close()


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _required(function: Callable[..., Any]) -> int:
    """How many positional arguments it can't be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)
