"""The optimizer, and its state as plain named tensors.

Knows: AdamW, parameter names. Does not know: losses or files.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.sharding import divided_as, whole


def make_optimizer(model: torch.nn.Module, config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters that are not frozen; weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    """State of every parameter as `<parameter name>.<state name>`, on the CPU."""
    return {
        f"{name}.{key}": whole(value.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave, in place of the present state."""
    optimizer.state.clear()
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters[name]
        is_of_each_weight = value.shape == parameter.shape
        optimizer.state[parameter][key] = (
            divided_as(value, parameter) if is_of_each_weight else value.to(parameter.device)
        )
