"""StoredRollout: what a verifier gets, and how it is read.

Knows rollouts and their calls. Knows no rewards: what a rollout got before is no argument for what it gets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import ModelCall, Purpose
from spangrad.store.base import Store
from spangrad.store.records import Rollout

READ_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One rollout that ended, as it is in the store."""

    rollout_id: str
    task: Any
    """What the agent was asked, JSON, as it was enqueued; None of a rollout that was only recorded."""
    output: Any
    """What the agent returned, JSON; None of a rollout that was only recorded: see `final_text`."""
    calls: Sequence[ModelCall]
    """Every model call of the current attempt in order of time, embeddings and judges included."""
    task_id: str | None = None
    group_id: str | None = None
    run_id: str | None = None
    split: str = "train"
    attempt: int = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation of the last call that acted, its reply included, in OpenAI chat form.

        Of an agent with one conversation this is all of it, tool calls and results too. What sub-agents
        said, or what was compacted away, is in `calls` alone. Empty if no call is known.
        """
        call = self._last()
        if call is None:
            return []
        reply = [dict(choice.message) for choice in call.choices[:1]]
        return [*(dict(message) for message in call.messages), *reply]

    @property
    def final_text(self) -> str | None:
        """Text of the last reply; None if there is none, or if it only calls tools."""
        call = self._last()
        return None if call is None else _text(call.choices[0].message)

    def _last(self) -> ModelCall | None:
        """The last call with a reply; one of the agent itself, if there is one."""
        replied = [call for call in self.calls if call.choices]
        acting = [call for call in replied if call.purpose is Purpose.AGENT]
        return next(reversed(acting or replied), None)


def stored_rollouts(store: Store, rollouts: Sequence[Rollout]) -> Iterator[StoredRollout]:
    """These rollouts with their calls, some at a time."""
    for start in range(0, len(rollouts), READ_AT_ONCE):
        chunk = rollouts[start : start + READ_AT_ONCE]
        calls: dict[str | None, list[ModelCall]] = {}
        for call in calls_of(store, [rollout.rollout_id for rollout in chunk]):
            calls.setdefault(call.rollout_id, []).append(call)
        for rollout in chunk:
            yield StoredRollout(
                rollout_id=rollout.rollout_id,
                task=rollout.task,
                output=rollout.output,
                calls=tuple(calls.get(rollout.rollout_id, ())),
                task_id=rollout.task_id,
                group_id=rollout.group_id,
                run_id=rollout.run_id,
                split=rollout.split,
                attempt=rollout.attempt,
            )


def _text(message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content or None
    if not isinstance(content, Sequence):
        return None
    parts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "".join(part for part in parts if isinstance(part, str)) or None
