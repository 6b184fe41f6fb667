"""Cross-entropy over large vocabularies, with label smoothing and ignored targets.

Math, per row with target t:  m = max z,  s = Σ_v exp(z_v − m),  loss = log s + (1 − ε)·(m − z_t) + ε·(m − mean(z)).
    dz_v = upstream·(exp(z_v − m)/s − (1 − ε)·[v = t] − ε/V), 0 in ignored rows.
With reduction "mean" both are divided by the number of rows that are not ignored; of none, the mean
is 0. m and s are kept apart: their sum m + log s, rounded to fp32, would lose log s beside logits
of 1e7.

Shapes: `N` rows, `V` vocabulary: logits (N, V), targets (N) int64, loss, m and s (N) fp32. Bytes:
three passes over the logits, whatever arrives from upstream: forward reads z, backward reads z and
writes dz, new or over z. Nothing is rounded before the upstream has come in. FLOPs: about 5 per
logit and pass. `loss_and_gradient` makes both in one launch where the upstream is known: each row
is read for the sums and again, from its end, for the gradient, which hits the L2 as far as that
reaches. Saved for backward: logits, targets, m, s. Arithmetic in fp32 for every input dtype.

The sums are online: each thread keeps a running maximum and a sum scaled by it, per 16 bytes that
it loads, and the program merges them once at the end of the row (Milakov & Gimelshein 2018).

A target that is neither `ignore_index` nor within [0, V) is an error: raised where the targets are
on a CPU; on a GPU, where a check would make the host wait, its row's loss and gradient are NaN.
Nothing outside the row is read.
"""

import torch
from torch import Tensor

from . import _dispatch, reference
from ._dispatch import KEPT, STREAMED, Function, apply, cdiv, tl, triton
from ._rows import Launch, as_rows, check, check_device, chosen, load_fp32, store_rounded
from .cost import Cost

REDUCTIONS = ("mean", "sum", "none")


@triton.jit
def loss_kernel(
    z_ptr,
    target_ptr,
    loss_ptr,
    largest_ptr,
    total_ptr,
    dz_ptr,
    scale_ptr,
    rows,
    cols,
    stride_z,
    stride_dz,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Loss, m and s of every num_programs-th row and, with GRADIENT, dz times the scalar at scale_ptr."""
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)  # the interpreter counts with Python integers
        _one_row(
            z_ptr + row * stride_z,
            target_ptr + row,
            loss_ptr + row,
            largest_ptr + row,
            total_ptr + row,
            dz_ptr,
            row * stride_dz,
            scale_ptr,
            cols,
            ignore_index,
            smoothing,
            SMOOTH,
            GRADIENT,
            BLOCK,
            VECTOR,
        )


@triton.jit
def _one_row(
    z_ptr,
    target_ptr,
    loss_ptr,
    largest_ptr,
    total_ptr,
    dz_ptr,
    dz_offset,
    scale_ptr,
    cols,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row of `loss_kernel`; the pointers are those of the row, dz may be z itself."""
    target = tl.load(target_ptr)
    # VECTOR neighbouring columns are one thread's: their maximum costs no exchange and one
    # rescaling serves all.
    offsets = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    largest = tl.full([BLOCK // VECTOR], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // VECTOR], tl.float32)
    plain = tl.zeros([BLOCK // VECTOR], tl.float32)
    if SMOOTH:
        # The sum of large logits would be rounded: what is added up are differences from the first
        # of the row.
        first = tl.load(z_ptr).to(tl.float32)
        first = tl.where(first == float("-inf"), 0.0, first)
    for start in tl.range(0, cols, BLOCK):
        columns = start + offsets
        z = load_fp32(
            z_ptr + columns, columns < cols, float("-inf"), KEPT if GRADIENT else STREAMED
        )
        larger = tl.maximum(largest, tl.max(z, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # nothing but −inf so far
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        if SMOOTH:
            plain += tl.sum(tl.where(columns < cols, z - first, 0.0), 1)
        largest = larger
    m = tl.max(largest, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    s = tl.sum(total * tl.exp(largest - m), 0)
    kept = target != ignore_index
    within = (target >= 0) & (target < cols)
    z_target = tl.load(z_ptr + target, mask=kept & within, other=float("nan")).to(tl.float32)
    loss = tl.log(s) + (1.0 - smoothing) * (m - z_target)
    if SMOOTH:
        loss += smoothing * ((m - first) - tl.sum(plain, 0) / cols)
    tl.store(loss_ptr, tl.where(kept, loss, 0.0))
    tl.store(largest_ptr, m)
    tl.store(total_ptr, s)
    if GRADIENT:
        tl.debug_barrier()  # all threads have read z_target, which may be overwritten now
        dz_ptr += dz_offset
        scale = tl.where(within, tl.load(scale_ptr), float("nan"))
        share = 1.0 / s
        blocks = tl.cdiv(cols, BLOCK)
        if kept:
            for block in tl.range(0, blocks):
                columns = (blocks - 1 - block) * BLOCK + offsets
                z = load_fp32(z_ptr + columns, columns < cols, float("-inf"), STREAMED)
                dz = tl.exp(z - m) * share
                if SMOOTH:
                    dz -= smoothing / cols
                store_rounded(dz_ptr + columns, dz * scale, columns < cols)
            tl.debug_barrier()  # the one column that differs is written again, after all
            dz = (tl.exp(z_target - m) * share - smoothing / cols - (1.0 - smoothing)) * scale
            store_rounded(dz_ptr + target, dz, within)
        else:
            for block in tl.range(0, blocks):
                columns = block * BLOCK + offsets
                nothing = tl.zeros([BLOCK // VECTOR, VECTOR], dz_ptr.dtype.element_ty)
                tl.store(dz_ptr + columns, nothing, mask=columns < cols)


@triton.jit
def gradient_kernel(
    z_ptr,
    target_ptr,
    largest_ptr,
    total_ptr,
    upstream_ptr,
    scale_ptr,
    dz_ptr,
    cols,
    stride_z,
    stride_upstream,
    blocks,
    ignore_index,
    smoothing,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row of dz, which may be z; the last rows, which the forward read last, first."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    kept = target != ignore_index
    scale = tl.load(upstream_ptr + row * stride_upstream).to(tl.float32) * tl.load(scale_ptr)
    scale = tl.where((target >= 0) & (target < cols), scale, float("nan"))
    z = load_fp32(z_ptr + row * stride_z + columns, columns < cols)
    dz = (
        tl.exp(z - tl.load(largest_ptr + row)) * (1.0 / tl.load(total_ptr + row)) - smoothing / cols
    )
    dz = tl.where(columns == target, dz - (1.0 - smoothing), dz)
    dz = tl.where(kept, dz * scale, 0.0)
    store_rounded(dz_ptr + row * cols + columns, dz, columns < cols)


@triton.jit
def total_kernel(
    targets_ptr,
    loss_ptr,
    scale_ptr,
    total_ptr,
    rows,
    ignore_index,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: with COUNT 1 / (rows that are not ignored) into scale, else the sum of loss times scale."""
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, rows, BLOCK):
        inside = start + offsets < rows
        if COUNT:
            kept = inside & (
                tl.load(targets_ptr + start + offsets, mask=inside, other=0) != ignore_index
            )
            acc += tl.where(kept, 1.0, 0.0)
        else:
            acc += tl.load(loss_ptr + start + offsets, mask=inside, other=0.0)
    if COUNT:
        tl.store(scale_ptr, 1.0 / tl.maximum(tl.sum(acc, 0), 1.0))
    else:
        tl.store(total_ptr, tl.sum(acc, 0) * tl.load(scale_ptr))


def launch_loss(
    z: Tensor,
    targets: Tensor,
    loss: Tensor,
    largest: Tensor,
    total: Tensor,
    ignore_index: int,
    smoothing: float,
    dz: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Fill loss, m (`largest`) and s (`total`) and, where given, dz (which may be z) times the one element of scale."""
    rows, cols = z.shape
    if dz is None:
        launch = chosen("cross_entropy", Launch(block=4096, warps=8))
    else:  # one row per multiprocessor: what it reads again is still in the L2
        launch = chosen("cross_entropy_both", Launch(block=16384, warps=32, per_sm=1))
    launch.start(
        loss_kernel,
        (launch.programs(rows, z.device),),
        z,
        targets,
        loss,
        largest,
        total,
        dz,
        scale,
        rows,
        cols,
        z.stride(0),
        0 if dz is None else dz.stride(0),
        ignore_index,
        float(smoothing),
        SMOOTH=smoothing != 0,
        GRADIENT=dz is not None,
        VECTOR=16 // z.element_size(),
    )


def launch_gradient(
    z: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    upstream: Tensor,
    scale: Tensor,
    dz: Tensor,
    ignore_index: int,
    smoothing: float,
) -> None:
    """Fill dz, contiguous. upstream has one element or one per row."""
    rows, cols = z.shape
    launch = chosen("cross_entropy_gradient", Launch(block=4096, warps=8))
    blocks = cdiv(cols, launch.block)
    launch.start(
        gradient_kernel,
        (rows * blocks,),
        z,
        targets,
        largest,
        total,
        upstream,
        scale,
        dz,
        cols,
        z.stride(0),
        1 if upstream.numel() > 1 else 0,
        blocks,
        ignore_index,
        float(smoothing),
    )


def mean_scale(targets: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """What each row's loss is multiplied by, a scalar in fp32 on the targets' device."""
    if reduction != "mean":
        return targets.new_ones((), dtype=torch.float32)
    if _dispatch.idle(targets) or not _dispatch.runs_triton(targets):
        return 1.0 / (targets != ignore_index).sum().clamp(min=1).to(torch.float32)
    scale = targets.new_empty((), dtype=torch.float32)
    _dispatch.launch(
        total_kernel,
        (1,),
        targets.contiguous(),
        scale,
        scale,
        scale,
        len(targets),
        ignore_index,
        COUNT=True,
        BLOCK=4096,
        num_warps=16,
    )
    return scale


def _reduced(loss: Tensor, scale: Tensor, reduction: str) -> Tensor:
    """What is returned of the rows' losses, which is no view of them: those cannot be changed in place."""
    if reduction == "none":
        return loss
    if _dispatch.idle(loss) or not _dispatch.runs_triton(loss):
        return loss.sum() * scale
    total = loss.new_empty(())
    _dispatch.launch(
        total_kernel,
        (1,),
        loss,
        loss,
        scale,
        total,
        len(loss),
        0,
        COUNT=False,
        BLOCK=4096,
        num_warps=16,
    )
    return total


def check_classes(targets: Tensor, classes: int, ignore_index: int) -> None:
    """Raise ValueError for a target (N) outside [0, classes), on a CPU; a GPU's are not looked at: that would wait."""
    if targets.is_cpu and not _dispatch.idle(targets):
        wrong = ((targets < 0) | (targets >= classes)) & (targets != ignore_index)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"targets has class {int(targets[row])} in row {row}; allowed: 0 to {classes - 1}, or "
                f"ignore_index, {ignore_index}"
            )


def _check(
    z: object, targets: object, ignore_index: object, smoothing: object, reduction: object
) -> None:
    check("logits", z, 2)
    if z.dim() != 2 or z.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(z.shape)}; allowed: (rows, vocabulary)")
    check_arguments(z.shape[0], z, targets, ignore_index, smoothing, reduction)


@_dispatch.operator("cross_entropy_forward", _check, opaque=True)
def forward_op(
    z: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z (N, V), targets (N) → the loss, m and s (N) fp32, and what each row's loss was multiplied by."""
    check_classes(targets, z.shape[1], ignore_index)
    scale = mean_scale(targets, reduction, ignore_index)
    loss, largest, total = _empty_rows(z)
    if not _dispatch.idle(z):
        if _dispatch.runs_triton(z):
            launch_loss(
                as_rows(z), targets.contiguous(), loss, largest, total, ignore_index, smoothing
            )
        else:
            z = reference.wide(z)
            torch.amax(z, -1, out=largest).masked_fill_(largest == -torch.inf, 0)
            torch.sum(torch.exp(z - largest[:, None]), -1, out=total)
            loss.copy_(
                reference.cross_entropy(
                    z,
                    targets,
                    ignore_index=ignore_index,
                    label_smoothing=smoothing,
                    reduction="none",
                )
            )
    return _reduced(loss, scale, reduction), largest, total, scale


@_dispatch.operator("cross_entropy_gradient", mutates_args=("dz",), opaque=True)
def gradient_op(
    z: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    upstream: Tensor,
    scale: Tensor,
    dz: Tensor,
    ignore_index: int,
    smoothing: float,
) -> None:
    """Fill dz (N, V), contiguous, in z's dtype; it may be z."""
    if _dispatch.idle(z):
        return
    if not _dispatch.runs_triton(z):
        dz.copy_(
            plain_gradient(z, targets, largest, total, upstream * scale, ignore_index, smoothing)
        )
        return
    launch_gradient(
        as_rows(z),
        targets.contiguous(),
        largest,
        total,
        upstream.contiguous(),
        scale,
        dz,
        ignore_index,
        smoothing,
    )


def plain_gradient(
    z: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    scale: Tensor,
    ignore_index: int,
    smoothing: float,
) -> Tensor:
    """dz (N, V) in plain torch; scale has one element or one per row."""
    kept = (targets != ignore_index)[:, None]
    hot = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    p = torch.exp(reference.wide(z) - largest[:, None]) * (1 / total[:, None])
    dz = torch.where(
        hot.any(1, keepdim=True), p - smoothing / z.shape[1] - (1 - smoothing) * hot, torch.nan
    )
    return torch.where(kept, dz * scale.view(-1, 1), 0.0)


def _empty_rows(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, m and s, three tensors (N) in fp32."""
    return tuple(z.new_empty(z.shape[0], dtype=torch.float32) for _ in range(3))


def check_arguments(
    logits_rows: int,
    logits: Tensor,
    targets: object,
    ignore_index: object,
    label_smoothing: object,
    reduction: object,
) -> None:
    """Raise unless the targets fit `logits_rows` rows and the options are allowed."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"targets has dtype {targets.dtype}; allowed: int64, int32 (class indices)"
        )
    if tuple(targets.shape) != (logits_rows,):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; allowed: ({logits_rows},), one per row"
        )
    check_device("targets", targets, "logits", logits)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index is {ignore_index}; allowed: what int64 holds")
    is_number = isinstance(label_smoothing, int | float) and not isinstance(label_smoothing, bool)
    if not is_number or not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing!r}; allowed: a number from 0 to 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed: {', '.join(REDUCTIONS)}")


class CrossEntropy(Function):
    """`apply(logits, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean", inplace_backward=False)`.

    Saved: logits, targets, m, s, and one fp32 element (1 over the number of rows that count).
    """

    @staticmethod
    def forward(
        ctx,
        logits,
        targets,
        ignore_index=-100,
        label_smoothing=0.0,
        reduction="mean",
        inplace_backward=False,
    ):
        loss, *saved = forward_op(logits, targets, ignore_index, label_smoothing, reduction)
        if (
            inplace_backward
            and ctx.needs_input_grad[0]
            and (logits.is_leaf or not logits.is_contiguous())
        ):
            raise ValueError(
                "inplace_backward writes the gradient over the logits, here a leaf or not contiguous; "
                "allowed: contiguous results of other operations, or inplace_backward=False"
            )
        ctx.options = ignore_index, float(label_smoothing)
        ctx.inplace = inplace_backward
        ctx.save_for_backward(logits, targets, *saved)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, *saved, scale = ctx.saved_tensors
        if ctx.inplace and not torch.compiler.is_compiling():
            dz = logits.detach()
        else:
            dz = logits.new_empty(logits.shape)
        gradient_op(logits, *saved, dloss.reshape(-1), scale, dz, *ctx.options)
        return dz, None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """Cross-entropy of softmax(logits) with the targets, as `torch.nn.functional.cross_entropy`; fp32.

    Args:
        logits: (N, V), fp32, fp16 or bf16, any strides; differentiable.
        targets: (N) int64 or int32 class indices.
        ignore_index: rows with this target count nothing; where all do, the mean is 0 (torch gives
            NaN).
        label_smoothing: ε, the weight that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for (N).
        inplace_backward: backward writes the gradient over the logits, which saves as much memory
            as they take. They are then gone: a second backward, and any other that has saved them,
            raises torch's error about tensors modified in place. Compiled code, whose memory the
            compiler plans, does not.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed; on
            a CPU also a target outside [0, V). On a GPU nobody looks, and such a row's loss and
            gradient are NaN.
    """
    if not torch.is_grad_enabled() and isinstance(logits, Tensor):
        logits = logits.detach()  # inside the Function nobody could tell that no gradient is wanted
    return apply(
        CrossEntropy, logits, targets, ignore_index, label_smoothing, reduction, inplace_backward
    )


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss (N) fp32, gradient of Σ loss·scale in the logits), in one launch and without autograd.

    Args:
        scale: one fp32 element, see `mean_scale`.
        out: where the gradient goes; the logits themselves are allowed, and overwritten.
    """
    out = logits.new_empty(logits.shape) if out is None else out
    if logits.numel() and _dispatch.runs_triton(logits):
        loss, largest, total = _empty_rows(logits)
        launch_loss(
            logits, targets, loss, largest, total, ignore_index, label_smoothing, out, scale
        )
        return loss, out
    loss, largest, total, _ = forward_op(
        logits, targets, ignore_index, float(label_smoothing), "none"
    )
    return loss, out.copy_(
        plain_gradient(logits, targets, largest, total, scale, ignore_index, label_smoothing)
    )


def cost(shape: tuple[int, int], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Least FLOPs and bytes of one pass: the logits; backward also their gradient."""
    count = torch.Size(shape).numel()
    return Cost(5 * count, (1 + backward) * count * dtype.itemsize + 20 * shape[0])
