"""Losses and penalties of the trainer, as pure functions of tensors.

Knows: log-probabilities, masks, weights. Does not know: models, rows, rollouts or
how the weights came about.

Shape letters: B rows, T token positions, V vocabulary. A function that takes `_BT`
tensors takes any shape, as long as all arguments have the same one; the learner
passes the trained tokens alone, as one flat vector. Masks are bool. Everything else is float32 or
float64; results have the dtype of the log-probabilities (or values) that they are made of.

Invariants:
* positions outside the mask change neither value nor gradient, whatever they hold (NaN too);
* a loss is a plain sum of `weight * token loss`: the normalisation is in the weights, so
  splitting or merging rows or microbatches changes nothing;
* an empty mask is an error, never a division by a small number.
"""

from spangrad.trainer.learning.losses.cispo import cispo_loss, importance_sampling_loss
from spangrad.trainer.learning.losses.cloning import awr_loss, bc_loss
from spangrad.trainer.learning.losses.divergence import kl_k3, kl_penalty, log_ratio_penalty
from spangrad.trainer.learning.losses.dppo import dppo_loss
from spangrad.trainer.learning.losses.entropy import entropy_bonus, token_entropy
from spangrad.trainer.learning.losses.gspo import gspo_loss
from spangrad.trainer.learning.losses.masking import MAX_LOG_RATIO, log_ratio, weighted_sum
from spangrad.trainer.learning.losses.ppo import ppo_clip_loss
from spangrad.trainer.learning.losses.preference import dpo_loss, kto_loss, kto_reference_point
from spangrad.trainer.learning.losses.sapo import sapo_loss
from spangrad.trainer.learning.losses.values import value_loss

__all__ = [
    "MAX_LOG_RATIO",
    "awr_loss",
    "bc_loss",
    "cispo_loss",
    "dpo_loss",
    "dppo_loss",
    "entropy_bonus",
    "gspo_loss",
    "importance_sampling_loss",
    "kl_k3",
    "kl_penalty",
    "kto_loss",
    "kto_reference_point",
    "log_ratio",
    "log_ratio_penalty",
    "ppo_clip_loss",
    "sapo_loss",
    "token_entropy",
    "value_loss",
    "weighted_sum",
]
