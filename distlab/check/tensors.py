"""Copies of a model's tensors by the names of the bare module."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distlab.parallel.shard import plain_name

# Allowed roundings of fp32, in units of eps. A wrapper that cuts a matmul adds in another order.
SLACK = 32

Tensors = dict[str, Tensor]


def plain(name: str) -> str:
    """Return the name in the bare module, without parts from compilation and checkpointing."""
    return plain_name(name).replace("_checkpoint_wrapped_module.", "")


def copies(parameters: Tensors, module: nn.Module | None = None) -> Tensors:
    """Return copies on the CPU of parameters, and of the buffers of a module."""
    together = parameters if module is None else parameters | buffers_of(module)
    return {plain(name): tensor.detach().cpu().clone() for name, tensor in together.items()}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the bare module, a tied one by its first name."""
    return {plain(name): parameter for name, parameter in module.named_parameters()}


def buffers_of(module: nn.Module) -> Tensors:
    """Return the buffers by their names in the bare module."""
    return {plain(name): buffer for name, buffer in module.named_buffers()}


@torch.no_grad()
def load(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the parameters and buffers of a module that are given by name."""
    for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
        if name in values:
            tensor.data.copy_(values[name])


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp64 on the CPU; a complex one with its two parts as a last dimension."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def per_element(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of `wide`, or a mask of it, with one row for each element of its parameter.

    Args:
        shape: shape of the parameter. A complex element has two numbers in its row.
    """
    return tensor.reshape(shape.numel(), -1)
