"""Observations as targets beside the policy's own tokens: what ECHO trains.

Knows rows and batches. A target that no call of its row sampled is an observation; nothing else marks it.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from spangrad.credit.transition import Transition
from spangrad.errors import CreditError
from spangrad.trainer.learning.model import TargetStats
from spangrad.trainer.learning.packing import Batch
from spangrad.trainer.learning.selection import row_name


def with_observations(rows: Sequence[Transition]) -> list[Transition]:
    """The rows with their observations as targets too: `action_mask` holds both.

    Raises:
        CreditError: A row does not know its observations, or trains tokens that none of its segments names,
            which would be taken for observations.
    """
    both = []
    for row in rows:
        if row.observation_mask is None:
            raise CreditError(
                f"{row_name(row)}: nothing says which tokens are observations; learner.echo_coef needs rows "
                "from spangrad.credit.transitions"
            )
        named = row.action_mask.copy()
        for segment in row.segments:
            named[segment.start : segment.stop] = False
        if named.any() or (row.observation_mask & row.action_mask).any():
            raise CreditError(
                f"{row_name(row)}: {int(named.sum())} trained tokens are of no call of the row, and "
                f"{int((row.observation_mask & row.action_mask).sum())} are observations as well; "
                "learner.echo_coef needs every sampled token in a segment"
            )
        both.append(replace(row, action_mask=row.action_mask | row.observation_mask))
    return both


def is_observation(batch: Batch) -> Tensor:
    """Which targets of a batch of such rows are observations, (M,) bool in mask order."""
    return (batch.call_ids_BT == batch.row_ids_BT)[batch.target_mask_BT]


def own_targets(
    batch: Batch, stats: TargetStats, reference_M: Tensor | None
) -> tuple[Batch, TargetStats, Tensor | None]:
    """The same without observations: the tokens that the policy sampled."""
    own_M = ~is_observation(batch)
    own_BT = batch.target_mask_BT & (batch.call_ids_BT != batch.row_ids_BT)
    entropy_M = None if stats.entropy_M is None else stats.entropy_M[own_M]
    return (
        replace(batch, target_mask_BT=own_BT),
        TargetStats(stats.logprobs_M[own_M], entropy_M),
        None if reference_M is None else reference_M[own_M],
    )
