"""The critic: a value head on the policy's last hidden states, and how it learns.

    V(s) = w . h(s) / H + b,   h: the hidden state that predicts the first token of a call

Knows hidden states and what should have been said of them. Does not know: rows, returns, how advantages are
made. Divided by the width H, a step of the optimizer moves a value by about the learning rate, whatever the
model.

Invariants:
* hidden states are taken as they are: no gradient of a value reaches the policy, which learns what it would
  from the same advantages without a critic, and nothing of the critic is in an export;
* it begins at 0 and draws no random numbers;
* saved and loaded it continues bit for bit.

Shape letters: M trained tokens of a batch, S states (calls), H hidden.
"""

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spangrad.credit.transition import Transition
from spangrad.errors import PolicyError
from spangrad.trainer.learning.learner_config import CriticConfig
from spangrad.trainer.learning.losses import value_loss
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.optimizer import load_optimizer, optimizer_tensors
from spangrad.trainer.learning.packing import Batch
from spangrad.trainer.learning.ranks import Ranks
from spangrad.trainer.learning.selection import row_name

logger = logging.getLogger(__name__)


class Critic(torch.nn.Module):
    """The value head and its optimizer, float32."""

    def __init__(
        self, config: CriticConfig, hidden_size: int, *, betas: tuple[float, float], device: torch.device
    ) -> None:
        """Begin at 0."""
        super().__init__()
        self.config = config
        self.weight_H = torch.nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros((), device=device))
        self._optimizer = torch.optim.AdamW(self.parameters(), lr=config.lr, betas=betas, weight_decay=0.0)
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.updates = 0
        """Updates so far, over all resumes."""

    @property
    def is_alone(self) -> bool:
        """Whether the next update trains the critic and leaves the policy as it is."""
        return self.updates < self.config.warmup_updates

    def values(self, hidden_MH: Tensor) -> Tensor:
        """Values, shape (M,), float32; no gradient goes to the hidden states."""
        return hidden_MH.detach().float() @ self.weight_H / len(self.weight_H) + self.bias

    def see(self, batch: Batch, hidden_MH: Tensor) -> None:
        """Keep the states of a batch that have something to teach, for `fit`."""
        targets_M = batch.value_targets_BT[batch.target_mask_BT]
        is_state_M = ~torch.isnan(targets_M)
        old_M = batch.values_BT[batch.target_mask_BT]
        self._seen.append((hidden_MH.detach()[is_state_M], targets_M[is_state_M], old_M[is_state_M]))

    def forget(self) -> None:
        """Drop what an update that failed has seen."""
        self._seen.clear()

    def fit(self, totals: Totals, ranks: Ranks) -> None:
        """Learn from all states that any rank saw since the last time: `config.steps` steps on all at once.

        Raises:
            PolicyError: The loss is not finite; the critic is as it was before that step.
        """
        device = self.bias.device
        seen = [states for of_rank in ranks.gather(self._seen) for states in of_rank]
        self._seen = []
        if not seen:
            return
        hidden_SH, targets_S, old_S = (
            torch.cat([part.to(device) for part in parts]) for parts in zip(*seen, strict=True)
        )
        if not len(targets_S):  # a correction left the first token of every call out
            return
        for _ in range(self.config.steps):
            loss = value_loss(self.values(hidden_SH), targets_S, old_S, clip=self.config.clip)
            if not math.isfinite(value := float(loss.detach())):
                raise PolicyError(
                    f"the loss of the critic is {value!r}; lower learner.critic.lr ({self.config.lr!r})"
                )
            self._optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            self._optimizer.step()
        with torch.no_grad():
            fitted = (self.values(hidden_SH) - targets_S).square().mean()
        totals.add_mean("value/loss_fitted", fitted, len(targets_S))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps, by file stem."""
        weights = {name: value.detach().cpu().clone() for name, value in self.named_parameters()}
        return {"critic": weights, "critic_optimizer": optimizer_tensors(self._optimizer, self)}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Continue from `tensors` of a checkpoint; without a critic in it, begin at 0."""
        if "critic" not in tensors:
            logger.warning("the checkpoint has no critic: it begins at 0")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                saved = tensors.get("critic", {}).get(name)
                parameter.copy_(torch.zeros_like(parameter) if saved is None else saved)
        load_optimizer(self._optimizer, self, tensors.get("critic_optimizer", {}))
        self.updates = updates


def critic_metrics(rows: Sequence[Transition]) -> dict[str, float]:
    """How right the critic was about the calls of these rows, before it learnt from them.

    explained variance = 1 - Var(G - V) / Var(G); not there where all G are the same.
    """
    told = [
        (segment.value, segment.value_target)
        for row in rows
        for segment in row.segments
        if segment.value is not None and segment.value_target is not None
    ]
    values_S, targets_S = np.array(told, dtype=np.float64).reshape(-1, 2).T
    metrics = {"value/states": float(len(told))}
    if told:
        metrics |= {
            "value/mean": float(values_S.mean()),
            "value/loss": float(((values_S - targets_S) ** 2).mean()),
        }
    if len(set(targets_S.tolist())) > 1:
        metrics["value/explained_variance"] = float(1.0 - (targets_S - values_S).var() / targets_S.var())
    return metrics


def values_of_calls(row: Transition, values_M: NDArray[np.float32]) -> list[float]:
    """Of values before all action tokens of a row, those before the first token of each call.

    Raises:
        PolicyError: The row does not train a call's first token.
    """
    places = np.flatnonzero(row.action_mask)
    first = np.searchsorted(places, [segment.start for segment in row.segments])
    for segment, index in zip(row.segments, first.tolist(), strict=True):
        if index == len(places) or places[index] != segment.start:
            raise PolicyError(
                f"{row_name(row)}: the first token of call {segment.call_id!r} (place {segment.start}) is not"
                " in the action mask; a value is read before it, so give the row as credit made it"
            )
    return [float(value) for value in values_M[first]]
