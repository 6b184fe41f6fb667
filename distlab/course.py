"""The hook functions that the tests of Stanford's CS336 systems assignment ask for.

A suite asks its `tests/adapters.py` for functions by name; with

    from distlab.course import *

as its only line, the suite of any year tests this package (docs/learn/course.md says how). The
module stays for the tests of this package and of `distlab grade`. A student needs `distlab grade`
instead, which examines their own functions of these names. Read your course's policy first. The
functions name what the suites name. Everything behind them is public under its own name in
`distlab.parallel` and `kernels`.

| form | functions |
|---|---|
| 2024 | RMSNorm, individual and bucketed DDP, sharded optimizer |
| 2025 | FlashAttention-2, individual and bucketed DDP, sharded optimizer |
| 2026 | FlashAttention-2, DDP (`get_ddp`), FSDP, sharded optimizer |
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from distlab.parallel import FSDP, BucketedDDP, OverlapDDP, ShardedOptimizer
from kernels.flash_attention import FlashAttention2, FlashAttention2PyTorch
from kernels.rmsnorm import RMSNorm, RMSNormPyTorch

__all__ = [
    "ddp_bucketed_on_after_backward",
    "ddp_bucketed_on_train_batch_start",
    "ddp_individual_parameters_on_after_backward",
    "ddp_on_after_backward",
    "fsdp_gather_full_params",
    "fsdp_on_after_backward",
    "get_ddp",
    "get_ddp_bucketed",
    "get_ddp_individual_parameters",
    "get_flashattention_autograd_function_pytorch",
    "get_flashattention_autograd_function_triton",
    "get_fsdp",
    "get_rmsnorm_autograd_function_pytorch",
    "get_rmsnorm_autograd_function_triton",
    "get_sharded_optimizer",
    "rmsnorm_backward_g_pytorch",
    "rmsnorm_backward_x_pytorch",
]

FunctionClass = type[torch.autograd.Function]
EPS = 1e-5  # number that the assignments' RMSNorm adds to the mean square

# -- kernels ---------------------------------------------------------------------------------------


def get_flashattention_autograd_function_pytorch() -> FunctionClass:
    """Return FlashAttention-2 in plain torch, for any device.

    Call `.apply(q, k, v, is_causal=False)` with tensors (batch, seq, d).
    """
    return FlashAttention2PyTorch


def get_flashattention_autograd_function_triton() -> FunctionClass:
    """Return FlashAttention-2 in Triton, for a GPU or the interpreter.

    Call `.apply(q, k, v, is_causal=False)` with tensors (batch, seq, d).
    """
    return FlashAttention2


def get_rmsnorm_autograd_function_pytorch() -> FunctionClass:
    """RMSNorm with its backward written out in torch: `.apply(x, g, eps=1e-5)`, x (…, D), g (D)."""
    return RMSNormPyTorch


def get_rmsnorm_autograd_function_triton() -> FunctionClass:
    """RMSNorm in Triton: `.apply(x, g, eps=1e-5)`, x (…, D), g (D), on a GPU or interpreted."""
    return RMSNorm


def rmsnorm_backward_g_pytorch(grad_output: Tensor, x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of RMSNorm's gain: grad_output and x (…, D), g (D) → (D)."""
    return _rmsnorm_gradients(grad_output, x, g)[1]


def rmsnorm_backward_x_pytorch(grad_output: Tensor, x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of RMSNorm's input: grad_output and x (…, D), g (D) → (…, D)."""
    return _rmsnorm_gradients(grad_output, x, g)[0]


def _rmsnorm_gradients(grad_output: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    # The suite may call this without gradients, and the backward needs a graph.
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), g.detach().requires_grad_()
        return torch.autograd.grad(RMSNormPyTorch.apply(*leaves, EPS), leaves, grad_output)


# -- data parallelism ------------------------------------------------------------------------------


def ddp_on_after_backward(
    ddp_model: OverlapDDP | BucketedDDP, optimizer: Optimizer | None = None
) -> None:
    """Call after backward, before the step: every `.grad` is then the mean over ranks."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(
    ddp_model: BucketedDDP, optimizer: Optimizer | None = None
) -> None:
    """Call before forward.

    Buckets reset themselves when a step is finished: nothing is left to do.
    """


# Called with a module. It sends an all-reduce per gradient, during backward.
get_ddp = get_ddp_individual_parameters = OverlapDDP
# Called with a module and the MiB of a bucket. None: one bucket.
get_ddp_bucketed = BucketedDDP
ddp_individual_parameters_on_after_backward = ddp_bucketed_on_after_backward = ddp_on_after_backward

# -- sharding --------------------------------------------------------------------------------------

# Called with a module and the dtype to compute in. Shards and their gradients stay fp32. Build the
# optimizer from the wrapper's `parameters()`, which are this rank's shards.
get_fsdp = FSDP
# Called with parameters, an optimizer's class and the options of that class.
get_sharded_optimizer = ShardedOptimizer


def fsdp_on_after_backward(fsdp_model: FSDP, optimizer: Optimizer | None = None) -> None:
    """Call after backward, before the step: the shards' `.grad` are then the mean over ranks."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: FSDP) -> dict[str, Tensor]:
    """Every parameter in full under its original name, on every rank; call it on every rank."""
    return fsdp_model.gather_full_params()
