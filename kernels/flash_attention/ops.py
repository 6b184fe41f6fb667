"""The launches as `torch.library` custom operators, so that `torch.compile` sees two opaque calls and no graph break.

Both run the Triton kernels where those can run, on (B, H, T, D), and the tiled plain-torch code
elsewhere. They have no autograd formula: `function.py` holds the autograd Functions.
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

# elements; kernels compute offsets within a tile, of up to 128 rows, in 32 bits
FURTHEST_ROWS = 2**24


def _rows_contiguous(x: Tensor) -> Tensor:
    """The kernels take any strides but need a contiguous last dimension; an expanded dO, say, is copied here.

    So are rows that lie FURTHEST_ROWS or more apart, and what torch's `empty_like` makes of
    overlapping rows, which has gaps inside of rows.
    """
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    return x if dense and x.stride(-2) < FURTHEST_ROWS else x.contiguous()


def _aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Head dims that are no multiple of 16 would be loaded element by element: such tensors are copied and padded.

    Padding keeps heads innermost in memory where they were, which is no layout for the kernels.
    """
    padding = (0, -tensors[0].shape[-1] % 16)
    return tuple(_rows_contiguous(F.pad(x, padding) if padding[1] else x) for x in tensors)


def four_d(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With a dimension of one head where there is none."""
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
    """What the options of a call mean for tensors of these shapes."""
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return Problem(
        band(q.shape[-2], k.shape[-2], causal, window, alignment),
        factor,
        precision,
        softcap,
        bounds,
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
    """q (B, H, Tq, D), k and v (B, Hk, Tk, D), or without heads → o like q, lse (B, H, Tq) fp32."""
    problem = problem_of(q, k, causal, scale, window, alignment, precision, softcap, bounds)
    shape = q.shape
    q, k, v = (_rows_contiguous(x) for x in four_d(q, k, v))
    o = _rows_contiguous(torch.empty_like(q))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if not _dispatch.idle(q):
        if k.numel() and _dispatch.runs_triton(q):
            _launch_forward(q, k, v, o, lse, problem)
        else:
            torch._foreach_copy_((o, lse), tiled.forward(q, k, v, problem))
    return o.view(shape), lse.view(shape[:-1])


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, problem: Problem
) -> None:
    from .forward import launch_forward  # Triton may be missing where this is never reached

    head_dim = q.shape[-1]
    q, k, v = _aligned(q, k, v)
    if hopper.serves("forward", q, k, v, problem, o):
        hopper.launch_forward(q, k, v, o, lse, problem)
        return
    problem = configs.settled(q, problem)
    out = o if head_dim == q.shape[-1] else torch.empty_like(q)
    run = partial(launch_forward, q, k, v, out, lse, problem)
    run(configs.choose("forward", q, problem, run))
    if out is not o:
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
    """Gradients of q, k, v from what the forward saved, do, like o, and dlse, like lse."""
    problem = problem_of(q, k, causal, scale, window, alignment, precision, softcap, bounds)
    shapes = q.shape, k.shape, v.shape
    q, k, v = (_rows_contiguous(x) for x in four_d(q, k, v))
    o, do = four_d(o, do)
    lse, dlse = (x if x is None else x.contiguous().view(q.shape[:-1]) for x in (lse, dlse))
    grads = tuple(_rows_contiguous(torch.empty_like(x)) for x in (q, k, v))
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
    from .backward import launch_delta, launch_dkdv, launch_dq

    head_dim = q.shape[-1]
    q, k, v, o, do = _aligned(q, k, v, o, do)
    if not (deterministic and hopper.adds_in_any_order(q)) and hopper.serves(
        "backward", q, k, v, problem, do, *grads
    ):
        hopper.launch_backward(q, k, v, o, lse, do, *grads, problem, dlse)
        return
    problem = configs.settled(q, problem)
    outs = grads if head_dim == q.shape[-1] else tuple(torch.empty_like(x) for x in (q, k, v))
    saved = launch_delta(q, k, v, o, lse, do, dlse=dlse)
    for kernel, run in (
        ("dkdv", partial(launch_dkdv, saved, outs[1], outs[2], problem)),
        ("dq", partial(launch_dq, saved, outs[0], problem)),
    ):
        run(configs.choose(kernel, q, problem, run))
    if outs is not grads:
        for grad, out in zip(grads, outs, strict=True):
            grad.copy_(out[..., :head_dim])


@register_flop_formula(torch.ops.distlab_kernels.flash_attention_forward)
def forward_flops(q, k, v, causal, scale, window, alignment, *_, out_shape=None, **__) -> int:
    """Two matmuls per visible pair; document masks are not looked into."""
    *outer, query_count, head_dim = q
    pairs = visible_pairs(query_count, k[-2], *band(query_count, k[-2], causal, window, alignment))
    return 4 * math.prod(outer) * head_dim * pairs


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
    """Five matmuls per visible pair, the convention, although the two-pass backward computes seven."""
    return forward_flops(q, k, v, causal, scale, window, alignment) * 5 // 2
