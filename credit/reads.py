"""What a batch was made of, and a store that gives that and nothing that came later.

Knows which calls and rewards credit read. Does not know updates, learners or why somebody asks again.

Invariants:
* rewards and spans that came later change nothing: not a reward whose time is earlier, and not a span that
  gives a known call another name;
* what was read and is gone since is not made up: `RewardsNoted.given` of the second reading lacks it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.model_call import ModelCall
from spangrad.store.base import Store
from spangrad.store.records import LogRecord, Reward, Span, UpdateRead


class RewardsNoted:
    """A store that remembers the rewards that it gave; everything else is the store's."""

    def __init__(self, store: Store) -> None:
        """Note nothing yet."""
        self._store = store
        self.given: dict[str, Reward] = {}
        """By `reward_id`."""

    def rewards(self, rollout_ids: Sequence[str] | None = None) -> list[Reward]:
        """As `Store.rewards`."""
        found = self._store.rewards(rollout_ids)
        self.given.update((reward.reward_id, reward) for reward in found if reward.reward_id is not None)
        return found

    def __getattr__(self, name: str) -> Any:
        """Everything else of the store."""
        return getattr(self._store, name)


def reads_of(calls: Iterable[ModelCall], rewards: Iterable[Reward]) -> list[UpdateRead]:
    """Calls and rewards as an update keeps them."""
    return [
        *(UpdateRead(call.rollout_id, call_id=call.call_id) for call in calls if call.rollout_id is not None),
        *(UpdateRead(reward.rollout_id, reward_id=reward.reward_id) for reward in rewards),
    ]


def as_read(store: Store, reads: Sequence[UpdateRead]) -> Store:
    """The store as it was for whom these are all that was read of it."""
    return cast(Store, _AsRead(store, reads))


class _AsRead:
    def __init__(self, store: Store, reads: Sequence[UpdateRead]) -> None:
        self._store = store
        self._rewards = {read.reward_id for read in reads}
        self._calls = {read.call_id for read in reads}
        self._rollouts = {read.rollout_id for read in reads if read.call_id is not None}

    def rewards(self, rollout_ids: Sequence[str] | None = None) -> list[Reward]:
        return [one for one in self._store.rewards(rollout_ids) if one.reward_id in self._rewards]

    def spans(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> list[Span]:
        spans = list(self._store.spans(rollout_ids, trace_ids=trace_ids))
        records = list(self._store.logs(rollout_ids, trace_ids=trace_ids))
        while later := self._later(spans, records):
            spans = [span for span in spans if (span.trace_id, span.span_id) not in later]
        return spans

    def _later(self, spans: Sequence[Span], records: Sequence[LogRecord]) -> set[tuple[str, str]]:
        """Spans that name a call which was not known. Without them it may go by the name that it had."""
        return {
            (call.trace_id, call.span_id)
            for call in calls_from_spans(spans, records)
            if call.rollout_id in self._rollouts and call.call_id not in self._calls
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
