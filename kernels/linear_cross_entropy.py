"""Linear layer and cross-entropy together, without the logits of the whole batch in memory.

Math:  z = x wᵀ,  loss = cross_entropy(z, targets);  dx = dz w,  dw = dzᵀ x.

Shapes: `N` rows, `D` width, `V` vocabulary: x (N, D), w (V, D), targets (N). FLOPs: 2·N·D·V per product, one product
forward and two for the gradients. Bytes: compute-bound. Memory beyond inputs and gradients: one chunk of logits.

The rows are treated in chunks. A chunk's logits come from one matrix product; `cross_entropy.loss_and_gradient` turns
them into their own gradient where they lie; two more products take that to dx and dw. So the gradients are made in the
*forward* and backward only multiplies them by the upstream scalar; no product is computed twice, and the logits of one
chunk are all that ever exists. The products are cuBLAS's: this is about memory, and nothing would be faster.

Kept for backward: dx, dw (those that are needed); the first backward multiplies them in place and gives them away.
Logits are rounded to the inputs' type, as by a linear layer; sums and softmax are fp32. dw is summed over a handful of
chunks in w's type; each adds half a unit in the last place.

Source: the idea of gradients in the forward: Liger Kernel (Hsu et al. 2024).
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.flop_counter import register_flop_formula

from ._rows import autocast_dtype, check, check_device
from ._scale import scale_
from .cost import Cost
from .cross_entropy import check_arguments, loss_and_gradient, mean_scale

CHUNK_BYTES = 512 * 2**20


def chunk_rows(rows: int, vocabulary: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows per chunk: as few chunks of at most `chunk_bytes` as possible, equally long, multiples of 128 if many."""
    most = max(1, chunk_bytes // (vocabulary * itemsize))
    if rows <= most:
        return max(rows, 1)
    even = -(-rows // -(-rows // most))
    return even if even < 128 else min(-(-even // 128) * 128, max(most // 128 * 128, 128))


@torch.library.custom_op("distlab_kernels::linear_cross_entropy", mutates_args=())
def forward_op(x: Tensor, w: Tensor, targets: Tensor, ignore_index: int, smoothing: float, mean: bool, need_dx: bool,
               need_dw: bool, chunk_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, dx and dw for an upstream gradient of 1; gradients that are not needed are empty."""
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    dw = w.new_empty(0)
    if need_dw:
        dw = torch.empty_like(w) if x.shape[0] else torch.zeros_like(w)
    total = torch.zeros(1, dtype=torch.float32, device=x.device)
    scale = mean_scale(targets, "mean" if mean else "sum", ignore_index)
    step = chunk_rows(x.shape[0], w.shape[0], x.element_size(), chunk_bytes)
    for first in range(0, x.shape[0], step):
        piece = slice(first, first + step)
        z = x[piece] @ w.T
        loss, dz = loss_and_gradient(z, targets[piece].contiguous(), scale, ignore_index=ignore_index,
                                     label_smoothing=smoothing, out=z)
        total += loss.sum()
        if need_dx:
            torch.mm(dz, w, out=dx[piece])
        if need_dw:
            dw.addmm_(dz.T, x[piece], beta=1 if first else 0)  # 0: what lies in dw is not read
        del z, dz, loss
    return (total * scale).squeeze(0), dx, dw


@forward_op.register_fake
def _(x, w, targets, ignore_index, smoothing, mean, need_dx, need_dw, chunk_bytes):
    dx, dw = (torch.empty_like(t) if need else t.new_empty(0) for t, need in ((x, need_dx), (w, need_dw)))
    return x.new_empty((), dtype=torch.float32), dx, dw


@register_flop_formula(torch.ops.distlab_kernels.linear_cross_entropy)
def flops(x, w, targets, ignore_index, smoothing, mean, need_dx, need_dw, *_, out_shape=None, **__) -> int:
    """Products only, as FlopCounterMode counts."""
    return 2 * x[0] * x[1] * w[0] * (1 + need_dx + need_dw)


class LinearCrossEntropy(Function):
    """`apply(x, weight, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean", chunk_bytes=CHUNK_BYTES)`.

    Kept: the gradients for an upstream of 1, for one backward.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean",
                chunk_bytes=CHUNK_BYTES):
        check("x", x, 2)
        check("weight", weight, 2)
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.shape[0] == 0:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}; allowed: (V, D) and (N, D)")
        check_device("weight", weight, "x", x)
        check_arguments(x.shape[0], x, targets, ignore_index, label_smoothing, reduction)
        if reduction == "none":
            raise ValueError("reduction is 'none'; allowed: mean, sum (gradients are made in the forward)")
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes!r}; allowed: a positive number of bytes")
        ctx.dtypes = x.dtype, weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            x, weight = (t.to(autocast_dtype(t)) for t in (x, weight))
        if x.dtype != weight.dtype:
            raise ValueError(f"weight has dtype {weight.dtype}, x {x.dtype}; they must be equal")
        need = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            loss, dx, dw = forward_op(x, weight, targets, ignore_index, float(label_smoothing), reduction == "mean",
                                      need[0], need[1], chunk_bytes)
        ctx.gradients = dx, dw
        return loss

    @staticmethod
    def backward(ctx, dloss):
        grads, ctx.gradients = ctx.gradients, None
        if grads is None:
            raise RuntimeError("linear_cross_entropy makes its gradients once, in its forward, and an earlier backward "
                               "of this graph was given them: call it again, or add the losses up first")
        if torch.compiler.is_compiling():
            grads = [grad * dloss.to(grad.dtype) for grad in grads]
        else:
            for grad in grads:
                scale_(grad, dloss)
        grads = (grad.to(dtype) if need else None for grad, dtype, need in
                 zip(grads, ctx.dtypes, ctx.needs_input_grad, strict=False))
        return *grads, None, None, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100,
                         label_smoothing: float = 0.0, reduction: str = "mean",
                         chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """cross_entropy(x weightᵀ, targets), fp32, with one chunk of logits in memory at a time; first order only.

    Args:
        x: (N, D), fp32, fp16 or bf16; weight: (V, D) of the same type; both differentiable. Cast under autocast.
        targets, ignore_index, label_smoothing: as for `cross_entropy`; reduction "mean" or "sum".
        chunk_bytes: largest chunk of logits.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.
    """
    if not torch.is_grad_enabled() and isinstance(x, Tensor) and isinstance(weight, Tensor):
        x, weight = x.detach(), weight.detach()  # inside the Function nobody could tell that no gradient is wanted
    return LinearCrossEntropy.apply(x, weight, targets, ignore_index, label_smoothing, reduction, chunk_bytes)


def cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """Of forward and both gradients for (N, D, V): three products; x, w, dx and dw once."""
    rows, width, vocabulary = shape
    return Cost(6 * rows * width * vocabulary, 2 * (rows + vocabulary) * width * dtype.itemsize)
