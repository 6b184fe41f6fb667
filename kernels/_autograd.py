"""Gradients of gradients: not defined for these kernels, and refused instead of silently left out."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_order(backward: Callable) -> Callable:
    """For the `backward` of an autograd Function whose gradients cannot be differentiated: refuses create_graph=True.

    torch's `once_differentiable` returns such gradients with a graph that ends in an error, but only if the upstream
    gradient requires one, which a loss's does not; and `torch.autograd.grad`, which walks only where a path leads
    to its inputs, never meets that error. So this refuses at once.

    Raises:
        RuntimeError: from the decorated function, when it is called to make a graph.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled code refuses by itself
            name = type(ctx).__name__.removesuffix("Backward")
            raise RuntimeError(f"{name} was called with create_graph=True, but the gradient of its gradient is not "
                               "defined: write it in torch's own operations where that is needed")
        return backward(ctx, *upstream)

    return wrapper
