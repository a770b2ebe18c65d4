"""A model whose weights are divided over ranks (FSDP2), and its tensors as a whole again.

Each layer's weights are gathered for the time of its computing, those outside the layers for a whole pass.

Knows torch's FSDP2 and DTensors. Does not know: rows, losses, checkpoints.

Invariants:
* the gradient of a shard is the sum over ranks, not their mean;
* `whole` and a pass wait for the other ranks: all call them, in the same order;
* on a model or tensor that is not sharded every function here does nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")

_PASS = "spangrad_pass"
"""The method of a sharded model that computes something with its weights gathered."""


def shard(model: PreTrainedModel) -> None:
    """Leave this rank its part of a model that every rank has loaded."""
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    layers = [
        one for one in cast(torch.nn.Module, model).modules() if isinstance(one, GradientCheckpointingLayer)
    ]
    for module in (*layers, model):
        # Also the model's own weights are given back after a pass: what reads parameters finds shards.
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # a factor of its own is a reduction gloo lacks
    setattr(model, _PASS, lambda compute: compute())
    register_fsdp_forward_method(cast(torch.nn.Module, model), _PASS)


def in_pass(model: PreTrainedModel, compute: Callable[[], T]) -> T:
    """What `compute` returns, a tensor or a tuple of them, with the weights outside the layers gathered.

    The model's own `forward` gathers them itself; this is for what asks its parts.
    """
    return cast(T, getattr(model, _PASS)(compute)) if isinstance(model, FSDPModule) else compute()


def whole(value: Any) -> Any:
    """A tensor with all its parts."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def divided_as(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, on the device of another one and divided as that is."""
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def storage_place(value: Tensor) -> int:
    """Where a tensor, or this rank's part of it, is kept: equal for weights that are tied.

    A rank's part may be empty, but what it is padded to is not: all ranks find the same weights tied.
    """
    if isinstance(value, DTensor):
        return value.to_local().untyped_storage().data_ptr()
    return value.data_ptr()
