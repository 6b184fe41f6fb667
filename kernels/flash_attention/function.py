"""Attention as people call it: two autograd Functions and one plain function.

The Functions are the outermost layer: casts under autocast and reshaping happen inside them, and
`o.grad_fn.saved_tensors` shows what is kept for backward: q, k, v, o and the log-sum-exp, nothing
of size T².

Shapes: q (B, T, D) or (B, H, T, D); k and v (B, Tk, D) or (B, Hk, Tk, D), H a multiple of Hk.
"""

import math

import torch
from torch import Tensor

from .._dispatch import Function, apply
from .._rows import autocast
from ..cost import Cost
from . import ops, tiled
from .options import DTYPES, check_call, check_documents, document_bounds, is_deterministic


class FlashAttention2(Function):
    """Triton FlashAttention-2: `apply(q, k, v, is_causal=False)` → o, of q's shape.

    Further positional options: scale, window, alignment, precision, document_ids, deterministic,
    softcap, return_lse; see `flash_attention`. Where Triton cannot run the plain-torch tiles are
    used instead. Saved: q, k, v, o, and the log-sum-exp of shape `q.shape[:-1]`.

    Source: Dao, FlashAttention-2 (2023).
    """

    @staticmethod
    def forward(ctx, *arguments):
        q, k, v, return_lse = _begin(ctx, *arguments)
        o, lse = ops.forward_op(q, k, v, *ctx.options)
        ctx.save_for_backward(q, k, v, o, lse)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        q, k, v, o, lse = ctx.saved_tensors
        do = do if do.dtype is o.dtype else do.to(o.dtype)
        grads = ops.backward_op(q, k, v, o, lse, do, dlse, ctx.deterministic, *ctx.options)
        return *grads, *[None] * 9


def _begin(
    ctx,
    q,
    k,
    v,
    is_causal=False,
    scale=None,
    window=None,
    alignment="top-left",
    precision="emulated",
    document_ids=None,
    deterministic=None,
    softcap=None,
    return_lse=False,
    *,
    dtypes=None,
):
    """q, k and v as autocast wants them and return_lse, and in ctx what the operators are given besides.

    Checks what the operator does not, and with documents all; for `dtypes` all, too.
    """
    options = is_causal, scale, window, alignment, precision, softcap
    cast = autocast(q, k, v)
    if document_ids is not None or dtypes:
        check_call(*cast, *options, dtypes=dtypes or DTYPES)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    ctx.deterministic = is_deterministic(deterministic)
    if document_ids is not None:
        check_documents(*cast[:2], document_ids)
        document_ids = document_ids if document_ids.dim() == 3 else document_bounds(document_ids)
    ctx.options = *options, document_ids
    return *cast, return_lse


class FlashAttention2PyTorch(Function):
    """The same algorithm in plain torch tiles (`tiled.py`), on any device; float64 too, for `gradcheck`."""

    @staticmethod
    def forward(ctx, *arguments):
        q, k, v, return_lse = _begin(ctx, *arguments, dtypes=(*DTYPES, torch.float64))
        o, lse = tiled.forward(*ops.four_d(q, k, v), ops.problem_of(q, k, *ctx.options))
        o, lse = o.view(q.shape), lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, o, lse)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        q, k, v, o, lse = ctx.saved_tensors
        problem = ops.problem_of(q, k, *ctx.options)
        grads = tiled.backward(*ops.four_d(q, k, v, o), lse, *ops.four_d(do), dlse, problem)
        return *(g.view(x.shape) for g, x in zip(grads, (q, k, v), strict=True)), *[None] * 9


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    alignment: str = "top-left",
    precision: str = "emulated",
    document_ids: Tensor | None = None,
    deterministic: bool | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + mask) v, without the (T, T) matrix in memory; differentiable in q, k and v.

    Args:
        q: (B, T, D) or (B, H, T, D), fp32, fp16 or bf16, any strides; 1 ≤ D ≤ 256. Under autocast,
            cast inside.
        k, v: (B, Tk, D) or (B, Hk, Tk, D); H a multiple of Hk (grouped-query, multi-query for Hk =
            1).
        causal: query i sees keys j ≤ i + shift.
        scale: factor of the scores, above 0, that float32 holds (1.2e-38 to 1.7e38); None means D
            ** -0.5.
        window: query i sees only keys with |j − (i + shift)| ≤ window (itself and `window`
            positions on each side, the later ones only if not causal); None means no window, and so
            does one as long as q and k.
        alignment: where query 0 stands when Tq ≠ Tk: "top-left" aligns the first positions (shift =
            0), "bottom-right" the last ones (shift = Tk − Tq), as for decoding with a cache.
        precision: how the GPU multiplies fp32 inputs: "emulated" on the tensor cores, as exact as
            fp32 here and several times as fast, by three TF32 matmuls ("tf32x3") or six of bf16
            ("bf16x6"), whichever is known to be the faster for the head dim and length; "ieee",
            fp32 units; "tf32", one matmul with 11 bits. fp16 and bf16 do not depend on it.
        document_ids: (B, T) integers for packed sequences, Tq = Tk: positions see each other only
            within one run of equal ids. Or what `document_bounds` made of them, or of cu_seqlens,
            once for all layers.
        deterministic: True for gradients that are bit-identical from run to run. False takes the
            fastest kernels, whose sums of dQ may come in any order, so that its last bits change
            (those for Hopper do that up to D = 128; o, dk and dv are bit-identical always). None
            follows `torch.use_deterministic_algorithms`.
        softcap: caps scores smoothly: s becomes softcap · tanh(s / softcap), as in Gemma 2. The
            Triton kernels take such calls on every GPU.
        return_lse: whether to return the log-sum-exp of the scores too, differentiable.

    Returns:
        (B, T, D) or (B, H, T, D) in q's dtype (autocast's under autocast). Rows that see no key are
            0.
        With `return_lse` also (B, T) or (B, H, T) in fp32: log Σ exp(s) over visible keys, −inf
            where there is none.

    Raises:
        ValueError, TypeError: an argument that does not fit, with its name and what is allowed.

    Source: Dao, FlashAttention-2 (2023). On CUDA tensors, and with TRITON_INTERPRET=1, the Triton
    kernels run; on other devices the plain-torch tiles. `create_graph=True` raises: the gradient of
    a gradient is not defined.
    """
    return apply(
        FlashAttention2,
        q,
        k,
        v,
        causal,
        scale,
        window,
        alignment,
        precision,
        document_ids,
        deterministic,
        softcap,
        return_lse,
    )


# no scale, window, softcap or documents
_PLAIN = (None, None, "bottom-right", "emulated", None, None)


def part_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, *, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, to be merged with others by the log-sum-exp: (o, lse), without autograd.

    Shapes as for `flash_attention`, of four dimensions; the last query sees all of these keys.
    `plain` torch, for where Triton cannot run or is interpreted, knows float64, too, whose lse is
    then float64.
    """
    if not plain:
        return ops.forward_op(q, k, v, causal, *_PLAIN)
    o, lse = tiled.forward(q, k, v, ops.problem_of(q, k, causal, *_PLAIN))
    return o.to(q.dtype), lse


def part_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    *,
    plain: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one such part; o, lse and do are those over all keys."""
    if not plain:
        return ops.backward_op(q, k, v, o, lse, do, None, is_deterministic(None), causal, *_PLAIN)
    grads = tiled.backward(q, k, v, o, lse, do, None, ops.problem_of(q, k, causal, *_PLAIN))
    return tuple(grad.to(q.dtype) for grad in grads)


def cost(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    causal: bool = False,
    window: int | None = None,
    alignment: str = "top-left",
    backward: bool = False,
) -> Cost:
    """FLOPs and bytes one pass must do at the least.

    Args:
        q_shape, k_shape: as for `flash_attention`.
        backward: the backward instead of the forward; counted by convention as five matmuls (2.5 ×
            the forward).
    """
    flops = ops.forward_flops(q_shape, k_shape, k_shape, causal, None, window, alignment)
    q_bytes = math.prod(q_shape) * dtype.itemsize
    k_bytes = math.prod(k_shape) * dtype.itemsize
    lse_bytes = 4 * math.prod(q_shape[:-1])
    if backward:  # read q, k, v, o, do, lse; write dq, dk, dv
        return Cost(2.5 * flops, 4 * q_bytes + 4 * k_bytes + lse_bytes)
    return Cost(flops, 2 * q_bytes + 2 * k_bytes + lse_bytes)
