"""Linear layer and cross-entropy together, without all logits of the batch in memory.

Mathematics:
    z = x wᵀ,  loss = cross_entropy(z, targets)
    dx = dz w,  dw = dzᵀ x

Shapes: N rows, width D, V classes. x (N, D), w (V, D), targets (N). Logits are rounded to the
inputs' dtype, as by a linear layer. Softmax and sums are fp32.
FLOPs: 2·N·D·V per matmul, one matmul forward and two for the gradients. They take most of the time.

How it works. The rows are treated in chunks:
1. A matmul computes the logits of a chunk.
2. `cross_entropy.loss_and_gradient` turns them into their own gradient, in place.
3. Two more matmuls compute the chunk's dx and its part of dw.
So the gradients are computed in the *forward*, for an upstream gradient of 1. Backward multiplies
them by the upstream scalar. No matmul is computed twice, and only one chunk's logits exist at a
time. The matmuls are cuBLAS's: the purpose is to save memory, and a kernel of our own would not be
faster.
Saved for backward: dx and dw, each only if it is needed. The first backward multiplies them in
place and gives them away.

Memory, in addition to inputs and gradients: the logits of one chunk. Where there are several chunks
and dw has 16 bits, also the fp32 sum of dw, 4·V·D bytes, during the forward. If all logits take no
more memory than that sum, they are one chunk, because each further chunk would read and write the
sum, 8·V·D bytes.

Precision of dw: its sum over the chunks is fp32 and rounded once, so the error does not grow with
the number of chunks. In bf16 it is 0.3 % of the largest element. A sum in bf16 would be off by
1.3 % after 32 chunks and 2.5 % after 128. An fp32 weight that autocast casts gets the fp32 sum
itself. dw exists before backward knows where gradients are wanted, so a `gradient_target` of the
weight is not written.

Measured on an H100 at 8192×4096×128256: the loss reads the logits twice and writes them once, which
takes 6 % of the time of the three matmuls (37.0 ms with it, 35.1 ms without). Running it on another
stream next to the matmul of the following chunk, with 2, 4 or 8 chunks, hides nothing (37.5 to 38.4
ms), because the matmul becomes slower by more. Computing maxima and sums in the matmul before it
stores a tile costs 1.2 ms and saves 0.7 ms.

Source: Hsu et al., Liger Kernel (2024), for gradients in the forward.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _dispatch
from ._dispatch import Function, apply, cdiv
from ._rows import check, common_dtype
from ._scale import scale_
from .cost import Cost
from .cross_entropy import check_arguments, check_classes, loss_and_gradient, mean_scale

CHUNK_BYTES = 512 * 2**20  # largest chunk of logits, unless the caller chooses


def chunk_rows(rows: int, vocabulary: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of rows per chunk.

    There are as few chunks of at most `chunk_bytes` as possible, of about equal length. Long chunks
    are multiples of 128 rows, so that the matmul has no partial tiles.

    Args:
        rows: number of rows.
        vocabulary: number of classes.
        itemsize: bytes per logit.
        chunk_bytes: largest number of bytes of one chunk's logits.
    """
    max_rows = max(1, chunk_bytes // (vocabulary * itemsize))
    if rows <= max_rows:
        return max(rows, 1)
    chunks = cdiv(rows, max_rows)
    # Equal chunks: a short last one would be a matmul that does not fill the GPU.
    even_rows = cdiv(rows, chunks)
    if even_rows < 128:
        return even_rows
    rounded_up = cdiv(even_rows, 128) * 128
    # Rounding up must not pass the limit.
    max_rounded = max(max_rows // 128 * 128, 128)
    return min(rounded_up, max_rounded)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add the product a b to total in place, or with `first` overwrite total with it.

    The product is rounded only to total's dtype. That may be fp32 where a and b have 16 bits.

    Args:
        total: (M, N). With `first` it may be uninitialised.
        a: (M, K).
        b: (K, N).
        first: whether to overwrite.
    """
    if total.dtype == a.dtype or not a.is_cuda:  # out_dtype exists on CUDA only
        # beta=0 also means that total is not read: uninitialised memory may hold a NaN, and 0·NaN
        # is NaN.
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if first else 1)
    elif first:
        # The accumulator of the matmul is fp32. With out_dtype it is not rounded to 16 bits before
        # it is added to total.
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
    """Return loss, dx and dw for an upstream gradient of 1.

    Args:
        x: (N, D), input.
        w: (V, D), weight of x's dtype.
        targets: (N), class indices.
        ignore_index: target of rows that do not count.
        smoothing: ε of the label smoothing.
        mean: whether to divide by the number of rows that count.
        need_dx: whether to compute dx. Otherwise it is empty.
        need_dw: whether to compute dw. Otherwise it is empty.
        chunk_bytes: largest number of bytes of one chunk's logits.
        dw_dtype: dtype of dw.
    """
    rows = x.shape[0]
    dx_shape = x.shape if need_dx else (0,)
    dw_shape = w.shape if need_dw else (0,)
    if _dispatch.idle(targets):
        return (
            x.new_zeros((), dtype=torch.float32),
            x.new_empty(dx_shape),
            w.new_zeros(dw_shape, dtype=dw_dtype),
        )
    check_classes(targets, w.shape[0], ignore_index)
    step = chunk_rows(rows, w.shape[0], x.element_size(), chunk_bytes)
    # N·V·itemsize ≤ 4·V·D: all logits take no more memory than the fp32 sum that chunks would need.
    if need_dw and dw_dtype != torch.float32 and rows * x.element_size() <= 4 * x.shape[1]:
        step = rows
    # The product of a single chunk is not added to anything, and may be rounded at once.
    single = step >= rows and dw_dtype == w.dtype
    dx = x.new_empty(dx_shape)
    dw = w.new_empty(dw_shape, dtype=w.dtype if single else torch.float32)
    total = x.new_zeros((), dtype=torch.float32)
    # 1/(rows that count) of the whole batch, not of a chunk: the chunks' gradients then simply add
    # up.
    scale = mean_scale(targets, "mean" if mean else "sum", ignore_index)
    with torch.autocast(x.device.type, enabled=False):  # the dtypes are chosen above
        for first in range(0, rows, step):
            chunk = slice(first, first + step)
            # (rows of the chunk, V): the only logits that exist now.
            z = x[chunk] @ w.T
            loss, dz = loss_and_gradient(
                z,
                targets[chunk].contiguous(),
                scale,
                ignore_index=ignore_index,
                label_smoothing=smoothing,
                out=z,  # from here on z is its own gradient
            )
            # The losses are not multiplied by scale, so their sum is scaled once, at the end.
            total += loss.sum()
            if need_dx:
                # A row of dx belongs to one chunk and is written in place. dw has a part from every
                # chunk.
                torch.mm(dz, w, out=dx[chunk])
            if need_dw:
                _add_product(dw, dz.T, x[chunk], first == 0)
            # Otherwise these would still be in memory when the next chunk's logits are allocated.
            del z, dz, loss
    return total * scale, dx, dw.to(dw_dtype)


@register_flop_formula(torch.ops.distlab_kernels.linear_cross_entropy)
def flops(
    x, w, targets, ignore_index, smoothing, mean, need_dx, need_dw, *_, out_shape=None, **__
) -> int:
    """Return the FLOPs of the matmuls, which are all that torch's FlopCounterMode counts.

    torch passes the shapes of tensors instead of the tensors.
    """
    rows, width = x
    classes = w[0]
    return 2 * rows * width * classes * (1 + need_dx + need_dw)


class LinearCrossEntropy(Function):
    """Linear layer and cross-entropy: `apply(x, weight, targets, …)` → loss, a scalar.

    The options are those of `linear_cross_entropy`. Kept for one backward: the gradients for an
    upstream gradient of 1.
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
                f"weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}; "
                "allowed: (V, D) and (N, D)"
            )
        ctx.dtypes = x.dtype, weight.dtype  # before autocast: those of the gradients
        dtype = common_dtype("weight", weight, "x", x)
        x = x.to(dtype)
        weight = weight.to(dtype)
        check_arguments(x.shape[0], x, targets, ignore_index, label_smoothing, reduction)
        if reduction == "none":
            raise ValueError(
                "reduction is 'none'; allowed: mean, sum (gradients are made in the forward)"
            )
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes!r}; allowed: a positive number of bytes")
        need_dx, need_dw = ctx.needs_input_grad[:2]
        loss, dx, dw = forward_op(
            x,
            weight,
            targets,
            ignore_index,
            float(label_smoothing),
            reduction == "mean",
            need_dx,
            need_dw,
            chunk_bytes,
            ctx.dtypes[1],
        )
        # Not by save_for_backward: backward gives them away, so the graph must let go of them.
        ctx.gradients = [dx, dw]
        return loss

    @staticmethod
    def backward(ctx, dloss):
        gradients = ctx.gradients
        # Backward scales the gradients in place and returns them, so a second backward would scale
        # them twice.
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError(
                "linear_cross_entropy makes its gradients once, in its forward, and an earlier "
                "backward of this graph was given them: call it again, or add the losses up first"
            )
        results = []
        for position, gradient in enumerate(gradients):
            if torch.compiler.is_compiling():
                # As `scale_` does: zeros stay zeros where the factor is infinite or NaN.
                scaled = (gradient.float() * dloss).to(gradient.dtype)
                gradient = torch.where(gradient == 0, gradient, scaled)
            else:
                scale_(gradient, dloss)
            if ctx.needs_input_grad[position]:
                results.append(gradient.to(ctx.dtypes[position]))
            else:
                results.append(None)
        dx, dw = results
        return dx, dw, None, None, None, None, None


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
    """Return cross_entropy(x weightᵀ, targets) in fp32.

    Only one chunk of logits is in memory at a time. The result is differentiable once in x and
    weight, by one backward.

    Args:
        x: tensor (N, D) in fp32, fp16 or bf16; cast under autocast.
        weight: tensor (V, D) of x's dtype; cast under autocast.
        targets: as for `cross_entropy`.
        ignore_index: as for `cross_entropy`.
        label_smoothing: as for `cross_entropy`.
        reduction: "mean" or "sum", as for `cross_entropy`.
        chunk_bytes: largest number of bytes of one chunk's logits. Where the logits need several
            chunks, the gradient of a 16-bit weight is summed in fp32, which takes 4·V·D bytes
            during the forward. Logits that take no more than these are one chunk in any case. An
            fp32 weight under autocast gets an fp32 gradient, which exists from forward to backward
            and needs no further sum.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or option does not fit, or a target on a CPU is not in
            [0, V). Targets on a GPU are not checked: the loss, and the gradients that such a row
            reaches, are NaN.
    """
    if not torch.is_grad_enabled() and isinstance(x, Tensor) and isinstance(weight, Tensor):
        # Inside a Function gradients are always off, so it could not see that none are wanted here.
        x = x.detach()
        weight = weight.detach()
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
    """Return the least work of forward and both gradients together.

    It counts the three matmuls, and x, w, dx and dw once each. It does not count what a single
    chunk does not need: each further chunk reads and writes dw in fp32, 8·V·D bytes, and rounding
    that to 16 bits at the end moves 6·V·D bytes.

    Args:
        shape: (N, D, V).
        dtype: dtype of x and weight.
    """
    rows, width, vocabulary = shape
    flops = 6 * rows * width * vocabulary
    return Cost(flops, 2 * (rows + vocabulary) * width * dtype.itemsize)
