"""What the learners of one policy share: each computes a part of the rows, and all know the whole.

    every rank: all rows of a step -> its own part -> gradients, summed -> the same step
                                                   -> numbers, gathered -> the same metrics

Knows torch.distributed, rows by their lengths. Does not know: models, losses, how the processes were started.

Invariants:
* every row is computed by exactly one rank, and the same rows are divided in the same way;
* gradients are added up, never averaged: a loss is a plain sum over rows, whose weights travel with them;
* what is decided from (scores, gradients, metrics) is the same on every rank: all raise what one raises;
* one rank alone shares nothing, and calls nothing of torch.distributed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from spangrad.credit.transition import Transition
from spangrad.trainer.learning.packing import trimmed_length

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train one policy; torch's process group is there already."""

    rank: int = 0
    """From 0; the first one writes files."""
    size: int = 1
    """How many there are."""
    is_sharded: bool = False
    """Each rank holds a part of the weights (FSDP2), and all compute in step; or each holds all of them."""

    @property
    def is_first(self) -> bool:
        """Whether this one writes what all have."""
        return self.rank == 0

    def share(self, rows: Sequence[Transition]) -> list[int]:
        """Places of this rank's rows, in order.

        Rows of a rollout stay together: they share what they begin with. The rollout with the most tokens is
        given away first, each to the rank that has the fewest so far.
        """
        if self.size == 1:
            return list(range(len(rows)))
        rollouts: dict[tuple[str, int], list[int]] = {}
        for place, row in enumerate(rows):
            rollouts.setdefault((row.rollout_id, row.attempt), []).append(place)
        tokens = {key: sum(trimmed_length(rows[i]) for i in places) for key, places in rollouts.items()}
        loads = [0] * self.size
        mine: list[int] = []
        for key in sorted(rollouts, key=lambda key: -tokens[key]):  # stable: ties in the rows' order
            rank = loads.index(min(loads))
            loads[rank] += tokens[key]
            if rank == self.rank:
                mine += rollouts[key]
        return sorted(mine)

    def gather(self, mine: T) -> list[T]:
        """What every rank has, by rank; every rank has to call it."""
        if self.size == 1:
            return [mine]
        everyones: list[T | None] = [None] * self.size
        dist.all_gather_object(everyones, mine)
        return everyones  # type: ignore[return-value]

    def idle_passes(self, passes: int) -> int:
        """Passes without rows that this rank has to make beside its own, to keep in step with the others."""
        return max(self.gather(passes)) - passes if self.is_sharded else 0

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of all ranks, in place; a parameter that no rank has one of keeps none.

        Shards need none of it: their backward passes have done so.
        """
        if self.size == 1 or self.is_sharded:
            return
        trained = [one for one in parameters if one.requires_grad]
        has_gradient = torch.tensor([one.grad is not None for one in trained], dtype=torch.uint8)
        if trained:
            has_gradient = has_gradient.to(trained[0].device)
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
        sums = []
        for one, is_there in zip(trained, has_gradient.tolist(), strict=True):
            if is_there:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                sums.append(dist.all_reduce(one.grad, async_op=True))
        for pending in sums:
            pending.wait()
