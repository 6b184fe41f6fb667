"""Cross-entropy over large vocabularies, with label smoothing and ignored targets.

Mathematics, per row of logits z over V classes, with target t and smoothing ε:
    m = max(z),  s = Σ_v exp(z_v − m)
    loss = log s + (1 − ε)·(m − z_t) + ε·(m − mean(z))
    dz_v = upstream·(exp(z_v − m)/s − (1 − ε)·[v = t] − ε/V)
Rows whose target is `ignore_index` have loss 0 and gradient 0. Reduction "mean" divides both by the
number of other rows. The mean of no rows is 0. m and s are stored apart: next to logits of 1e7,
their sum m + log s would lose log s when rounded to fp32.

Shapes: N rows, V classes. logits (N, V); targets (N) int64 or int32; loss, m and s (N) fp32.
Arithmetic is fp32 for every dtype of the logits. The gradient is rounded only after the upstream
gradient has been multiplied in.
Saved for backward: logits, targets, m, s.
Bytes: three passes over the logits. Forward reads z. Backward reads z and writes dz, into new
memory or over z. FLOPs: about 5 per logit and pass.

Kernels:
- `loss_kernel`: a program owns whole rows. It loops over a row once, and for every 16 bytes of a
  block it keeps a running maximum and a sum of exponentials relative to that maximum. They are
  merged once, at the end of the row (online softmax). With GRADIENT it then loops over the row
  again, from its end, and writes dz. That saves one launch where the upstream gradient is known,
  and the second loop finds as much of the row as fits in the L2.
- `gradient_kernel`: one program per block of one row, from the saved m and s.
- `total_kernel`: a single program for the sum of the losses, or for the number of rows that count.

A target that is neither `ignore_index` nor in [0, V) is an error. It is raised where the targets
are on a CPU. On a GPU a check would make the host wait, so the row's loss and gradient are NaN
instead. The kernels never read outside the row.

Source: Milakov & Gimelshein, Online normalizer calculation for softmax (2018).
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
    """Compute loss, m and s of the rows i, i + P, i + 2·P, … in program i of P.

    With GRADIENT, also compute dz, with the scalar at scale_ptr as the upstream gradient.
    """
    # With one program per row this loop runs once. With GRADIENT there is one program per
    # multiprocessor, so that only that many rows compete for the L2.
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        # int64: row · stride exceeds 2³¹ at row 16,744 of 128,256 classes.
        row = tl.cast(index, tl.int64)  # in the interpreter index is a Python integer
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
    """Compute one row of `loss_kernel`. The pointers are those of the row; dz may be z itself."""
    target = tl.load(target_ptr)
    # A block is (BLOCK/VECTOR, VECTOR). A thread loads VECTOR neighbouring columns, 16 bytes, at a
    # time. Their maximum needs no exchange between threads, and one rescaling serves all of them.
    offsets = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # For each vector of columns: the maximum so far, Σ exp(z − maximum), and Σ (z − first).
    largest = tl.full([BLOCK // VECTOR], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // VECTOR], tl.float32)
    plain = tl.zeros([BLOCK // VECTOR], tl.float32)
    if SMOOTH:
        # Σ z of large logits would lose digits. Add up differences from the row's first logit.
        first = tl.load(z_ptr).to(tl.float32)
        first = tl.where(first == float("-inf"), 0.0, first)
    for start in tl.range(0, cols, BLOCK):
        columns = start + offsets
        # Columns beyond the row are −inf: never the maximum, and 0 in the sum. KEPT: the loop for
        # the gradient reads the row again.
        z = load_fp32(
            z_ptr + columns, columns < cols, float("-inf"), KEPT if GRADIENT else STREAMED
        )
        larger = tl.maximum(largest, tl.max(z, 1))
        # While all logits are −inf, subtract 0: −inf − (−inf) is NaN.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        # The sum so far is relative to the old maximum. exp(largest − shift) makes it relative to
        # the new one.
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        if SMOOTH:
            plain += tl.sum(tl.where(columns < cols, z - first, 0.0), 1)
        largest = larger
    # Merge the vectors' sums, relative to the maximum of the row.
    m = tl.max(largest, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    s = tl.sum(total * tl.exp(largest - m), 0)
    kept = target != ignore_index
    within = (target >= 0) & (target < cols)
    # A target outside the row is not read, and gives NaN.
    # A second read of one element. To look for the target's column in the loop would cost a
    # comparison per column.
    z_target = tl.load(z_ptr + target, mask=kept & within, other=float("nan")).to(tl.float32)
    # −log softmax(z)_t = −(z_t − m − log s). The target has the weight 1 − ε, and log s the weight
    # 1, because all weights add up to 1.
    loss = tl.log(s) + (1.0 - smoothing) * (m - z_target)
    if SMOOTH:
        # ε·(m − mean(z)), with both relative to the first logit.
        loss += smoothing * ((m - first) - tl.sum(plain, 0) / cols)
    # A choice and not a product with 0: z_target of an ignored row is NaN.
    tl.store(loss_ptr, tl.where(kept, loss, 0.0))
    tl.store(largest_ptr, m)
    tl.store(total_ptr, s)
    if GRADIENT:
        # dz may overwrite z: wait until all threads have read z_target.
        tl.debug_barrier()
        # Added only here, because dz_ptr is None without GRADIENT.
        dz_ptr += dz_offset
        # A target outside the row makes its whole gradient NaN, so that the mistake spreads and is
        # seen.
        scale = tl.where(within, tl.load(scale_ptr), float("nan"))
        # One division per row instead of one per element.
        share = 1.0 / s
        blocks = tl.cdiv(cols, BLOCK)
        # All threads of the program take the same branch, since a program has one row at a time.
        if kept:
            # From the last block to the first: the blocks that were read last are still in the L2.
            # The target's column gets the same formula here, and its own below.
            for block in tl.range(0, blocks):
                columns = (blocks - 1 - block) * BLOCK + offsets
                z = load_fp32(z_ptr + columns, columns < cols, float("-inf"), STREAMED)
                # dloss/dz_v = softmax(z)_v − (1 − ε)·[v = t] − ε/V, here without the middle term.
                dz = tl.exp(z - m) * share
                if SMOOTH:
                    dz -= smoothing / cols
                store_rounded(dz_ptr + columns, dz * scale, columns < cols)
            # Write the target's column again, after the thread that owns it has. A test in the loop
            # would cost a comparison per column.
            tl.debug_barrier()
            # All three terms for v = t. m and s are still in registers, and z_target was read
            # before z could be overwritten.
            dz = (tl.exp(z_target - m) * share - smoothing / cols - (1.0 - smoothing)) * scale
            store_rounded(dz_ptr + target, dz, within)
        else:
            # An ignored row: zeros, whatever its logits are.
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
    """Compute BLOCK columns of one row of dz per program. dz may be z itself."""
    # The first programs own the last rows: the forward read those last, so they may be in the L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    kept = target != ignore_index
    # stride_upstream is 0 where all rows share one upstream gradient.
    scale = tl.load(upstream_ptr + row * stride_upstream).to(tl.float32) * tl.load(scale_ptr)
    scale = tl.where((target >= 0) & (target < cols), scale, float("nan"))
    # Columns beyond the row are loaded as 0 and need no −inf as in the forward: nothing is reduced
    # over the row, and they are not stored.
    z = load_fp32(z_ptr + row * stride_z + columns, columns < cols)
    m = tl.load(largest_ptr + row)
    # softmax(z) from the saved m and s. z ≤ m, so the exponential is at most 1.
    dz = tl.exp(z - m) * (1.0 / tl.load(total_ptr + row)) - smoothing / cols
    dz = tl.where(columns == target, dz - (1.0 - smoothing), dz)
    # Last, because it must override the NaN that an ignore_index outside [0, V) has put into scale.
    dz = tl.where(kept, dz * scale, 0.0)
    # Rows of dz have no gaps, unlike those of z. A program has read its columns by now and no other
    # program reads them, so dz may overwrite z.
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
    """Reduce over all rows in a single program.

    With COUNT, write 1/(number of rows that are not ignored) to scale. Otherwise write the sum of
    the losses times scale to total. One program adds in a fixed order, so the result is the same
    bit for bit, and N numbers are few.
    """
    offsets = tl.arange(0, BLOCK)
    # One sum per position in a block: threads exchange their sums only once, after the loop.
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, rows, BLOCK):
        inside = start + offsets < rows
        if COUNT:
            # 0 is a valid class, so rows past the end would count if `inside` did not cut them once
            # more.
            targets = tl.load(targets_ptr + start + offsets, mask=inside, other=0)
            kept = inside & (targets != ignore_index)
            acc += tl.where(kept, 1.0, 0.0)
        else:
            acc += tl.load(loss_ptr + start + offsets, mask=inside, other=0.0)
    if COUNT:
        # At least 1: the mean of no rows is 0 and not NaN.
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
    """Fill loss, largest, total and, where given, dz.

    Args:
        z: (N, V), logits with contiguous rows.
        targets: (N), class indices, contiguous.
        loss: (N) fp32, output.
        largest: (N) fp32, output: m.
        total: (N) fp32, output: s.
        ignore_index: target of rows that do not count.
        smoothing: ε.
        dz: (N, V), output, or None. It may be z.
        scale: one fp32 element by which the gradient is multiplied, required for dz.
    """
    rows, cols = z.shape
    if dz is None:
        # 16 columns per thread: two loads of 16 bytes for 16-bit logits.
        launch = chosen("cross_entropy", Launch(block=4096, warps=8))
    else:
        # One row per multiprocessor at a time: more rows at once would not fit in the L2, where the
        # second loop looks for them.
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
    """Fill dz.

    Args:
        z: (N, V), logits with contiguous rows.
        targets: (N), class indices, contiguous.
        largest: (N) fp32: m of each row.
        total: (N) fp32: s of each row.
        upstream: gradient of the loss, one element or one per row, contiguous.
        scale: one fp32 element, see `mean_scale`.
        dz: (N, V), output, contiguous. It may be z.
        ignore_index: target of rows that do not count.
        smoothing: ε.
    """
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
    """Return the factor of each row's loss, an fp32 scalar on the targets' device.

    It is 1/(number of rows that are not ignored) for the reduction "mean", and 1 otherwise.
    """
    if reduction != "mean":
        return targets.new_ones((), dtype=torch.float32)
    if _dispatch.idle(targets) or not _dispatch.runs_triton(targets):
        return 1.0 / (targets != ignore_index).sum().clamp(min=1).to(torch.float32)
    # One launch, where the line above takes five.
    scale = targets.new_empty((), dtype=torch.float32)
    _dispatch.launch(
        total_kernel,
        (1,),
        targets.contiguous(),
        scale,  # no loss is read and no total is written with COUNT: any pointer will do
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
    """Return the losses (N) for the reduction "none", and else their sum times scale, a scalar."""
    if reduction == "none":
        return loss
    if _dispatch.idle(loss) or not _dispatch.runs_triton(loss):
        return loss.sum() * scale
    # A tensor of its own: torch would not let the caller change a view in place.
    total = loss.new_empty(())
    _dispatch.launch(
        total_kernel,
        (1,),
        loss,  # no targets are read without COUNT: any pointer will do
        loss,
        scale,
        total,
        len(loss),
        0,  # ignore_index, not used
        COUNT=False,
        BLOCK=4096,
        num_warps=16,
    )
    return total


def check_classes(targets: Tensor, classes: int, ignore_index: int) -> None:
    """Raise ValueError if a target (N) on a CPU is neither in [0, classes) nor `ignore_index`.

    Targets on a GPU are not checked, because the host would have to wait for them.
    """
    if targets.is_cpu and not _dispatch.idle(targets):
        wrong = ((targets < 0) | (targets >= classes)) & (targets != ignore_index)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"targets has class {int(targets[row])} in row {row}; "
                f"allowed: 0 to {classes - 1}, or ignore_index, {ignore_index}"
            )


def _check(
    z: object, targets: object, ignore_index: object, smoothing: object, reduction: object
) -> None:
    """Raise TypeError or ValueError for arguments of `forward_op` that do not fit."""
    check("logits", z, 2)
    if z.dim() != 2 or z.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(z.shape)}; allowed: (rows, vocabulary)")
    check_arguments(z.shape[0], z, targets, ignore_index, smoothing, reduction)


@_dispatch.operator("cross_entropy_forward", _check, opaque=True)
def forward_op(
    z: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, m, s and scale.

    The loss is a scalar, or (N) for the reduction "none". m and s are (N) fp32. scale is the factor
    of each row's loss, see `mean_scale`.
    """
    check_classes(targets, z.shape[1], ignore_index)
    scale = mean_scale(targets, reduction, ignore_index)
    loss, largest, total = _empty_rows(z)
    if not _dispatch.idle(z):
        if _dispatch.runs_triton(z):
            launch_loss(
                as_rows(z), targets.contiguous(), loss, largest, total, ignore_index, smoothing
            )
        else:
            _plain_loss(z, targets, loss, largest, total, ignore_index, smoothing)
    return _reduced(loss, scale, reduction), largest, total, scale


def _plain_loss(
    z: Tensor,
    targets: Tensor,
    loss: Tensor,
    largest: Tensor,
    total: Tensor,
    ignore_index: int,
    smoothing: float,
) -> None:
    """Fill loss, m and s in plain torch; the arguments are those of `launch_loss`."""
    z = reference.wide(z)
    torch.amax(z, -1, out=largest)
    largest.masked_fill_(largest == -torch.inf, 0)  # −inf − (−inf) would be NaN
    torch.sum(torch.exp(z - largest[:, None]), -1, out=total)
    row_losses = reference.cross_entropy(
        z, targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none"
    )
    loss.copy_(row_losses)


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
    """Fill dz (N, V), contiguous, in z's dtype. It may be z."""
    if _dispatch.idle(z):
        return
    if not _dispatch.runs_triton(z):
        row_scale = upstream * scale
        gradient = plain_gradient(z, targets, largest, total, row_scale, ignore_index, smoothing)
        dz.copy_(gradient)
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
    """Return dz (N, V) in plain torch. scale has one element or one per row."""
    classes = z.shape[1]
    kept = (targets != ignore_index)[:, None]
    is_target = torch.arange(classes, device=z.device) == targets[:, None]
    probability = torch.exp(reference.wide(z) - largest[:, None]) * (1 / total[:, None])
    dz = probability - smoothing / classes - (1 - smoothing) * is_target
    # A row that has its target in no column has a target outside of [0, classes).
    dz = torch.where(is_target.any(1, keepdim=True), dz, torch.nan)
    return torch.where(kept, dz * scale.view(-1, 1), 0.0)


def _empty_rows(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate loss, m and s, three tensors (N) in fp32."""
    rows = z.shape[0]
    loss = z.new_empty(rows, dtype=torch.float32)
    largest = z.new_empty(rows, dtype=torch.float32)
    total = z.new_empty(rows, dtype=torch.float32)
    return loss, largest, total


def check_arguments(
    logits_rows: int,
    logits: Tensor,
    targets: object,
    ignore_index: object,
    label_smoothing: object,
    reduction: object,
) -> None:
    """Raise unless the targets fit the logits and the options are allowed.

    Args:
        logits_rows: number of rows of the logits.
        logits: tensor on whose device the targets must be.
        targets: class indices, one per row.
        ignore_index: target of rows that do not count.
        label_smoothing: ε, 0 to 1.
        reduction: one of REDUCTIONS.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device, number or reduction does not fit.
    """
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
    """Cross-entropy: `apply(logits, targets, …)` → loss, with the options of `cross_entropy`.

    Saved for backward: logits, targets, m, s, and one fp32 element, the factor of each row's loss.
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
        loss, largest, total, scale = forward_op(
            logits, targets, ignore_index, label_smoothing, reduction
        )
        if inplace_backward and ctx.needs_input_grad[0]:
            # A leaf's values belong to the caller, who would find gradients in their place. The
            # kernel writes a contiguous dz.
            if logits.is_leaf or not logits.is_contiguous():
                raise ValueError(
                    "inplace_backward writes the gradient over the logits, here a leaf or not "
                    "contiguous; allowed: contiguous results of other operations, or "
                    "inplace_backward=False"
                )
        ctx.ignore_index = ignore_index
        ctx.smoothing = float(label_smoothing)
        ctx.inplace = inplace_backward
        ctx.save_for_backward(logits, targets, largest, total, scale)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, largest, total, scale = ctx.saved_tensors
        if ctx.inplace and not torch.compiler.is_compiling():
            # The same memory and the same version counter: after the kernel has written dz, a
            # second backward raises instead of reading gradients as logits.
            dz = logits.detach()
        else:
            dz = logits.new_empty(logits.shape)
        # One element for "mean" and "sum", one per row for "none".
        upstream = dloss.reshape(-1)
        gradient_op(
            logits,
            targets,
            largest,
            total,
            upstream,
            scale,
            dz,
            ctx.ignore_index,
            ctx.smoothing,
        )
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
    """Return the cross-entropy of softmax(logits) with the targets, in fp32.

    The options mean what they mean for `torch.nn.functional.cross_entropy`.

    Args:
        logits: tensor (N, V) in fp32, fp16 or bf16, with any strides; differentiable once.
        targets: int64 or int32 tensor (N) of class indices.
        ignore_index: target of rows that do not count. If no row counts, the mean is 0, where torch
            returns NaN.
        label_smoothing: ε, 0 to 1: the weight that is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none" for a loss per row, (N).
        inplace_backward: whether backward writes the gradient over the logits. It saves memory of
            their size. The logits are then gone: a second backward, and any other operation that
            has saved them, raises torch's error about tensors modified in place. Code compiled by
            torch.compile ignores this option, because its compiler plans the memory.

    Returns:
        A scalar, or (N) for the reduction "none".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or option does not fit, or a target on a CPU is not in
            [0, V). Targets on a GPU are not checked: the loss and the gradient of such a row are
            NaN.
    """
    if not torch.is_grad_enabled() and isinstance(logits, Tensor):
        # Inside a Function gradients are always off, so it could not see that none are wanted here.
        logits = logits.detach()
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
    """Return the losses and the gradient of the logits in one launch, without autograd.

    Args:
        logits: tensor (N, V), contiguous.
        targets: int64 or int32 tensor (N) of class indices, contiguous.
        scale: one fp32 element by which the gradient is multiplied, see `mean_scale`.
        ignore_index: as for `cross_entropy`.
        label_smoothing: as for `cross_entropy`.
        out: tensor (N, V) that receives the gradient. It may be the logits, which are then
            overwritten. None allocates one.

    Returns:
        The loss per row, (N) fp32, not multiplied by scale, and the gradient of Σ loss·scale, (N,
        V) in the logits' dtype.
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
    gradient = plain_gradient(logits, targets, largest, total, scale, ignore_index, label_smoothing)
    return loss, out.copy_(gradient)


def cost(shape: tuple[int, int], dtype: torch.dtype, *, backward: bool = False) -> Cost:
    """Return the least work of one pass.

    Args:
        shape: (N, V).
        dtype: dtype of the logits.
        backward: whether to count the backward pass instead of the forward pass.
    """
    rows = shape[0]
    logits = torch.Size(shape).numel()
    passes = 2 if backward else 1  # z is read; backward also writes dz
    row_bytes = 20  # an int64 target and three fp32 numbers: loss, m and s
    return Cost(5 * logits, passes * logits * dtype.itemsize + row_bytes * rows)
