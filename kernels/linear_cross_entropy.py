"""Linear layer and cross-entropy together, without the logits of the whole batch in memory.

Math:  z = x wᵀ,  loss = cross_entropy(z, targets);  dx = dz w,  dw = dzᵀ x.

Shapes: `N` rows, `D` width, `V` vocabulary: x (N, D), w (V, D), targets (N). FLOPs: 2·N·D·V per
matmul, one matmul forward and two for the gradients. Bytes: compute-bound. Memory beyond inputs and
gradients: one chunk of logits, and during the forward 4·V·D bytes where dw is summed in fp32 but
wanted in 16 bits. Where all logits take no more than that, they are one chunk: the sum would move
8·V·D bytes for every other.

The loss reads the logits twice and writes them once: at 8192×4096×128256 6 % of the time of the
three matmuls on an H100 (37.0 ms beside 35.1). Begun on another stream, beside the matmul of the
next of 2, 4 or 8 chunks, it hides nothing (37.5 to 38.4 ms): a matmul in chunks, which shares its
multiprocessors, is slower by more. Maxima and sums made by the matmul, before it stores a tile,
cost 1.2 ms and save 0.7.

The rows are treated in chunks. A chunk's logits come from one matmul;
`cross_entropy.loss_and_gradient` turns them into their own gradient in place; two more matmuls
compute dx and dw from it. So the gradients are computed in the *forward* and backward only
multiplies them by the upstream scalar; no matmul is computed twice, and the logits of one chunk are
all that ever exists. The matmuls are cuBLAS's: this is about memory, and nothing would be faster.

Kept for backward: dx, dw (those that are needed); the first backward multiplies them in place and
gives them away. Logits are rounded to the inputs' dtype, as by a linear layer; sums and softmax are
fp32. dw is summed over the chunks in fp32 and rounded once: its error does not grow with the number
of chunks (in bf16 0.3 % of the largest element; a sum in bf16 would be 1.3 % off after 32 chunks
and 2.5 % after 128). A weight in fp32, cast by autocast, gets that sum as it is. dw exists before
backward knows where gradients are wanted: a `gradient_target` of the weight is not written.

Source: the idea of gradients in the forward: Liger Kernel (Hsu et al. 2024).
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _dispatch
from ._dispatch import Function, apply
from ._rows import check, common_dtype
from ._scale import scale_
from .cost import Cost
from .cross_entropy import check_arguments, check_classes, loss_and_gradient, mean_scale

CHUNK_BYTES = 512 * 2**20


def chunk_rows(rows: int, vocabulary: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows per chunk: as few chunks of at most `chunk_bytes` as possible, equally long, multiples of 128 if many."""
    most = max(1, chunk_bytes // (vocabulary * itemsize))
    if rows <= most:
        return max(rows, 1)
    even = -(-rows // -(-rows // most))
    return even if even < 128 else min(-(-even // 128) * 128, max(most // 128 * 128, 128))


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (M, N) += a (M, K) b (K, N), or = with `first`, whatever lies in total; rounded to total's dtype only."""
    if total.dtype == a.dtype or not a.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if first else 1)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@_dispatch.operator("linear_cross_entropy", opaque=True)
def forward_op(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    mean: bool,
    need_dx: bool,
    need_dw: bool,
    chunk_bytes: int,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, dx and dw (in dw_dtype) for an upstream gradient of 1; gradients that are not needed are empty."""
    shapes = x.shape if need_dx else (0,), w.shape if need_dw else (0,)
    if _dispatch.idle(targets):
        return (
            x.new_zeros((), dtype=torch.float32),
            x.new_empty(shapes[0]),
            w.new_zeros(shapes[1], dtype=dw_dtype),
        )
    check_classes(targets, w.shape[0], ignore_index)
    step = chunk_rows(x.shape[0], w.shape[0], x.element_size(), chunk_bytes)
    if need_dw and dw_dtype != torch.float32 and x.shape[0] * x.element_size() <= 4 * x.shape[1]:
        step = x.shape[0]  # all logits are no larger than the sum in fp32 that chunks would need
    # a single matmul needs no sum of higher precision
    rounded = step >= x.shape[0] and dw_dtype == w.dtype
    dx, dw = (
        x.new_empty(shapes[0]),
        w.new_empty(shapes[1], dtype=w.dtype if rounded else torch.float32),
    )
    total = x.new_zeros((), dtype=torch.float32)
    scale = mean_scale(targets, "mean" if mean else "sum", ignore_index)
    with torch.autocast(x.device.type, enabled=False):
        for first in range(0, x.shape[0], step):
            chunk = slice(first, first + step)
            z = x[chunk] @ w.T
            loss, dz = loss_and_gradient(
                z,
                targets[chunk].contiguous(),
                scale,
                ignore_index=ignore_index,
                label_smoothing=smoothing,
                out=z,
            )
            total += loss.sum()
            if need_dx:
                torch.mm(dz, w, out=dx[chunk])
            if need_dw:
                _add_product(dw, dz.T, x[chunk], first == 0)
            del z, dz, loss
    return total * scale, dx, dw.to(dw_dtype)


@register_flop_formula(torch.ops.distlab_kernels.linear_cross_entropy)
def flops(
    x, w, targets, ignore_index, smoothing, mean, need_dx, need_dw, *_, out_shape=None, **__
) -> int:
    """Matmuls only, as FlopCounterMode counts."""
    return 2 * x[0] * x[1] * w[0] * (1 + need_dx + need_dw)


class LinearCrossEntropy(Function):
    """`apply(x, weight, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean", chunk_bytes=CHUNK_BYTES)`.

    Kept: the gradients for an upstream of 1, for one backward.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        weight,
        targets,
        ignore_index=-100,
        label_smoothing=0.0,
        reduction="mean",
        chunk_bytes=CHUNK_BYTES,
    ):
        check("x", x, 2)
        check("weight", weight, 2)
        if (
            x.dim() != 2
            or weight.dim() != 2
            or x.shape[1] != weight.shape[1]
            or weight.shape[0] == 0
        ):
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}; allowed: (V, D) and (N, D)"
            )
        ctx.dtypes = x.dtype, weight.dtype
        dtype = common_dtype("weight", weight, "x", x)
        x, weight = x.to(dtype), weight.to(dtype)
        check_arguments(x.shape[0], x, targets, ignore_index, label_smoothing, reduction)
        if reduction == "none":
            raise ValueError(
                "reduction is 'none'; allowed: mean, sum (gradients are made in the forward)"
            )
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes!r}; allowed: a positive number of bytes")
        need = ctx.needs_input_grad
        loss, *ctx.gradients = forward_op(
            x,
            weight,
            targets,
            ignore_index,
            float(label_smoothing),
            reduction == "mean",
            need[0],
            need[1],
            chunk_bytes,
            ctx.dtypes[1],
        )
        return loss

    @staticmethod
    def backward(ctx, dloss):
        grads, ctx.gradients = ctx.gradients, None
        if grads is None:
            raise RuntimeError(
                "linear_cross_entropy makes its gradients once, in its forward, and an earlier backward "
                "of this graph was given them: call it again, or add the losses up first"
            )
        if torch.compiler.is_compiling():
            grads = [
                torch.where(grad == 0, grad, (grad.float() * dloss).to(grad.dtype))
                for grad in grads
            ]
        else:
            for grad in grads:
                scale_(grad, dloss)
        grads = (
            grad.to(dtype) if need else None
            for grad, dtype, need in zip(grads, ctx.dtypes, ctx.needs_input_grad, strict=False)
        )
        return *grads, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """cross_entropy(x weightᵀ, targets), fp32, with one chunk of logits in memory at a time; first order only.

    Args:
        x: (N, D), fp32, fp16 or bf16; weight: (V, D) of the same dtype; both differentiable. Cast
            under autocast.
        targets, ignore_index, label_smoothing: as for `cross_entropy`; reduction "mean" or "sum".
        chunk_bytes: largest chunk of logits. Where the logits do not fit into one, weight's
            gradient is summed in fp32, which takes 4·V·D bytes during the forward if the weight has
            16 bits; where all logits take no more than these, they are one chunk all the same. An
            fp32 weight under autocast gets an fp32 gradient, kept from forward to backward, and
            needs nothing beside it.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed; on
            a CPU also a target outside [0, V). On a GPU nobody looks, and the loss and the
            gradients that such a row reaches are NaN.
    """
    if not torch.is_grad_enabled() and isinstance(x, Tensor) and isinstance(weight, Tensor):
        # inside the Function nobody could tell that no gradient is wanted
        x, weight = x.detach(), weight.detach()
    return apply(
        LinearCrossEntropy,
        x,
        weight,
        targets,
        ignore_index,
        label_smoothing,
        reduction,
        chunk_bytes,
    )


def cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """Of forward and both gradients for (N, D, V): three matmuls; x, w, dx and dw once.

    Not counted, since a single chunk does without: each further chunk reads and writes dw in fp32,
    8·V·D bytes, and rounding dw to 16 bits at the end moves 6·V·D.
    """
    rows, width, vocabulary = shape
    return Cost(6 * rows * width * vocabulary, 2 * (rows + vocabulary) * width * dtype.itemsize)
