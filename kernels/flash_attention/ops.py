"""The launches as operators of torch: `torch.compile` sees two opaque calls and no graph break.

Both run the Triton kernels on (B, H, T, D) where those can run, and otherwise the plain-torch
tiles. They have no autograd formula: function.py holds the autograd Functions.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _dispatch
from . import configs, hopper, tiled
from .options import Problem, band, check_call, visible_pairs

# Elements from row to row. Kernels compute offsets within a tile, of up to 128 rows, in 32 bits.
FURTHEST_ROWS = 2**24


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return x in a layout that the kernels take, as a copy if necessary.

    They take any strides but need a contiguous last dimension. Three layouts are copied: an
    expanded last dimension, for example of dO; rows that are FURTHEST_ROWS or more apart; and the
    result of `empty_like` for overlapping rows, which has gaps inside of rows.
    """
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    if dense and x.stride(-2) < FURTHEST_ROWS:
        return x
    return x.contiguous()


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """Return (B, H, T, D) tensors whose D is a multiple of 16, padded with zeros if necessary.

    Kernels would load rows of another length element by element.
    """
    # 16 elements: rows of every dtype then begin at multiples of 16 bytes.
    missing = -tensors[0].shape[-1] % 16
    aligned = []
    for x in tensors:
        if missing:
            x = F.pad(x, (0, missing))
        # If heads were innermost in memory, `pad` keeps them there, where kernels cannot load.
        aligned.append(_rows_contiguous(x))
    return aligned


def four_d(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as (B, H, T, D), with one head if they are (B, T, D)."""
    return tuple(t if t.dim() == 4 else t.unsqueeze(1) for t in tensors)


def problem_of(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    alignment: str,
    precision: str,
    softcap: float | None,
    bounds: Tensor | None,
) -> Problem:
    """Return the problem that a call's options define for tensors of these shapes."""
    return Problem(
        band=band(q.shape[-2], k.shape[-2], causal, window, alignment),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        precision=precision,
        softcap=softcap,
        bounds=bounds,
    )


@_dispatch.operator("flash_attention_forward", check_call, opaque=True)
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    alignment: str,
    precision: str,
    softcap: float | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return o, like q, and the log-sum-exp (B, H, Tq) in fp32.

    Args:
        q: queries (B, H, Tq, D) or (B, Tq, D).
        k, v: keys and values (B, Hk, Tk, D) or (B, Tk, D).
        causal, scale, window, alignment, precision, softcap: as for `flash_attention`.
        bounds: documents as `document_bounds` returns them, or None.
    """
    problem = problem_of(q, k, causal, scale, window, alignment, precision, softcap, bounds)
    shape = q.shape
    q, k, v = (_rows_contiguous(x) for x in four_d(q, k, v))
    o = _rows_contiguous(torch.empty_like(q))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if not _dispatch.idle(q):
        # Without keys there is no tile to walk over. The plain-torch tiles know what to return.
        if k.numel() and _dispatch.runs_triton(q):
            _launch_forward(q, k, v, o, lse, problem)
        else:
            torch._foreach_copy_((o, lse), tiled.forward(q, k, v, problem))
    return o.view(shape), lse.view(shape[:-1])


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem
) -> None:
    """Fill o and lse by the Hopper kernel if it takes the call, otherwise by the Triton kernel."""
    from .forward import launch_forward  # not at the top: Triton may be missing

    head_dim = q.shape[-1]
    q, k, v = _aligned(q, k, v)
    if hopper.serves("forward", q, k, v, problem, o):
        hopper.launch_forward(q, k, v, o, lse, problem)
        return
    # Only for the Triton kernels: the Hopper kernels have one arithmetic.
    problem = configs.settled(q, problem)
    is_padded = head_dim != q.shape[-1]
    # Zeros in padded columns of q and k add nothing to scores, and padded columns of v give columns
    # of o that are cut off below.
    out = torch.empty_like(q) if is_padded else o
    run = partial(launch_forward, q, k, v, out, lse, problem)
    run(configs.choose("forward", q, problem, run))
    if is_padded:
        o.copy_(out[..., :head_dim])


@_dispatch.operator("flash_attention_backward", opaque=True)
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    deterministic: bool,
    causal: bool,
    scale: float | None,
    window: int | None,
    alignment: str,
    precision: str,
    softcap: float | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        q, k, v, o, lse: tensors that the forward saved.
        do: gradient of o.
        dlse: gradient of lse, or None if it is zero.
        deterministic: whether the gradients must be bit-identical in every run.
        causal, scale, window, alignment, precision, softcap, bounds: as for `forward_op`.
    """
    problem = problem_of(q, k, causal, scale, window, alignment, precision, softcap, bounds)
    shapes = q.shape, k.shape, v.shape
    q, k, v = (_rows_contiguous(x) for x in four_d(q, k, v))
    o, do = four_d(o, do)
    lse = lse.contiguous().view(q.shape[:-1])
    if dlse is not None:
        dlse = dlse.contiguous().view(q.shape[:-1])
    grads = tuple(_rows_contiguous(torch.empty_like(x)) for x in (q, k, v))
    # Without keys, o does not depend on q, and the kernels would have no tile to walk over.
    if _dispatch.idle(q) or k.numel() == 0:
        for grad in grads:
            grad.zero_()
    elif not _dispatch.runs_triton(q):
        torch._foreach_copy_(grads, tiled.backward(q, k, v, o, lse, do, dlse, problem))
    else:
        _launch_backward(q, k, v, o, lse, do, dlse, grads, problem, deterministic)
    return tuple(grad.view(shape) for grad, shape in zip(grads, shapes, strict=True))


def _launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    grads: tuple[Tensor, ...],
    problem: Problem,
    deterministic: bool,
) -> None:
    """Fill grads by the Hopper kernels if they take the call, otherwise by the Triton kernels."""
    from .backward import launch_delta, launch_dkdv, launch_dq

    head_dim = q.shape[-1]
    q, k, v, o, do = _aligned(q, k, v, o, do)
    # The one pass for head dims up to 128 adds parts of dQ in any order, which a deterministic call
    # must not do.
    order_fits = not deterministic or not hopper.adds_in_any_order(q)
    if order_fits and hopper.serves("backward", q, k, v, problem, do, *grads):
        hopper.launch_backward(q, k, v, o, lse, do, *grads, problem, dlse)
        return
    problem = configs.settled(q, problem)
    is_padded = head_dim != q.shape[-1]
    dq, dk, dv = [torch.empty_like(x) for x in (q, k, v)] if is_padded else grads
    saved = launch_delta(q, k, v, o, lse, do, dlse=dlse)
    run = partial(launch_dkdv, saved, dk, dv, problem)
    # `run` with a tile launches the kernel. `choose` may also call it, to measure.
    run(configs.choose("dkdv", q, problem, run))
    run = partial(launch_dq, saved, dq, problem)
    run(configs.choose("dq", q, problem, run))
    if is_padded:
        for grad, padded in zip(grads, (dq, dk, dv), strict=True):
            grad.copy_(padded[..., :head_dim])


@register_flop_formula(torch.ops.distlab_kernels.flash_attention_forward)
def forward_flops(q, k, v, causal, scale, window, alignment, *_, out_shape=None, **__) -> int:
    """Return the FLOPs of two matmuls per visible pair, for torch's FLOP counter.

    Masks of documents are not counted: their bounds are values of a tensor. The arguments are those
    of `forward_op`, with shapes instead of tensors.
    """
    *batch_and_heads, query_count, head_dim = q
    key_count = k[-2]
    lo, hi = band(query_count, key_count, causal, window, alignment)
    pairs = visible_pairs(query_count, key_count, lo, hi)
    return 4 * math.prod(batch_and_heads) * head_dim * pairs


@register_flop_formula(torch.ops.distlab_kernels.flash_attention_backward)
def backward_flops(
    q,
    k,
    v,
    o,
    lse,
    do,
    dlse,
    deterministic,
    causal,
    scale,
    window,
    alignment,
    *_,
    out_shape=None,
    **__,
) -> int:
    """Return the FLOPs of five matmuls per visible pair, for torch's FLOP counter.

    Five is the convention, also for the two-pass backward, which computes seven. The arguments are
    those of `backward_op`, with shapes instead of tensors.
    """
    return forward_flops(q, k, v, causal, scale, window, alignment) * 5 // 2
