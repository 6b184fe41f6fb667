"""The public function `flash_attention`, and the autograd Functions behind it.

The Functions are the outermost layer: casts under autocast and reshaping happen inside them, and
`o.grad_fn.saved_tensors` shows what is kept for backward: q, k, v, o and the log-sum-exp, nothing
of size T².

Shapes: q (B, T, D) or (B, H, T, D); k and v (B, Tk, D) or (B, Hk, Tk, D), where H is a multiple of
Hk.
"""

import math

import torch
from torch import Tensor

from .._dispatch import Function, apply
from .._rows import autocast
from ..cost import Cost
from . import ops, tiled
from .options import DTYPES, check_call, check_documents, document_bounds, is_deterministic

# The options, from is_causal to return_lse, have no gradients.
_NO_GRADIENTS = [None] * 9


class FlashAttention2(Function):
    """Triton FlashAttention-2: `apply(q, k, v, is_causal=False)` → o, of q's shape.

    Further positional options are scale, window, alignment, precision, document_ids, deterministic,
    softcap and return_lse, as for `flash_attention`. Where Triton cannot run, the plain-torch tiles
    run instead. Saved for backward: q, k, v, o, and the log-sum-exp of shape `q.shape[:-1]`.

    Source: Dao, FlashAttention-2 (2023).
    """

    @staticmethod
    def forward(ctx, *arguments):
        q, k, v, return_lse = _begin(ctx, *arguments)
        o, lse = ops.forward_op(q, k, v, *ctx.options)
        ctx.save_for_backward(q, k, v, o, lse)
        if return_lse:
            return o, lse
        return o

    @staticmethod
    def backward(ctx, do, dlse=None):
        q, k, v, o, lse = ctx.saved_tensors
        if do.dtype is not o.dtype:
            do = do.to(o.dtype)
        grads = ops.backward_op(q, k, v, o, lse, do, dlse, ctx.deterministic, *ctx.options)
        return *grads, *_NO_GRADIENTS


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
    """Return q, k and v in autocast's dtype, and return_lse.

    Set `ctx.options`, the operators' arguments after the tensors, and `ctx.deterministic`.

    The operators check their arguments themselves. This checks the options that they do not have.
    With documents it checks all arguments first, because bounds are computed from them. It also
    does so if the caller allows other dtypes than the operators.

    Args:
        dtypes: dtypes to allow, or None for those of the operators.
    """
    options = (is_causal, scale, window, alignment, precision, softcap)
    # Before the checks: dtypes that differ may be equal after autocast.
    q, k, v = autocast(q, k, v)
    if document_ids is not None or dtypes:
        check_call(q, k, v, *options, dtypes=dtypes or DTYPES)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    ctx.deterministic = is_deterministic(deterministic)
    bounds = None
    if document_ids is not None:
        check_documents(q, k, document_ids)
        # Three dimensions: the caller has computed the bounds already.
        bounds = document_ids if document_ids.dim() == 3 else document_bounds(document_ids)
    ctx.options = (*options, bounds)
    return q, k, v, return_lse


class FlashAttention2PyTorch(Function):
    """The same algorithm in plain torch tiles (`tiled.py`), on any device.

    It also takes float64, for `gradcheck`. Arguments and saved tensors are those of
    `FlashAttention2`.
    """

    @staticmethod
    def forward(ctx, *arguments):
        q, k, v, return_lse = _begin(ctx, *arguments, dtypes=(*DTYPES, torch.float64))
        o, lse = tiled.forward(*ops.four_d(q, k, v), ops.problem_of(q, k, *ctx.options))
        o = o.view(q.shape)
        lse = lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, o, lse)
        if return_lse:
            return o, lse
        return o

    @staticmethod
    def backward(ctx, do, dlse=None):
        q, k, v, o, lse = ctx.saved_tensors
        problem = ops.problem_of(q, k, *ctx.options)
        dq, dk, dv = tiled.backward(*ops.four_d(q, k, v, o), lse, *ops.four_d(do), dlse, problem)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), *_NO_GRADIENTS


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
    """Return softmax(scale · q kᵀ + mask) v, without the (T, T) matrix in memory.

    The result is differentiable once in q, k and v. On CUDA tensors, and with TRITON_INTERPRET=1,
    the Triton kernels run. On other devices the plain-torch tiles run.

    Args:
        q: tensor (B, T, D) or (B, H, T, D) in fp32, fp16 or bf16, with any strides and D from 1 to
            256. Under autocast it is cast inside.
        k: tensor (B, Tk, D) or (B, Hk, Tk, D) of q's dtype. H must be a multiple of Hk
            (grouped-query attention, or multi-query attention for Hk = 1).
        v: tensor of k's shape and dtype.
        causal: bool, whether query i sees only keys j ≤ i + shift.
        scale: factor of the scores, above 0, that float32 can hold (1.2e-38 to 1.7e38). None means
            D ** -0.5.
        window: number of positions: query i sees only keys with |j − (i + shift)| ≤ window, itself
            and `window` positions on each side. With causal, later ones are still hidden. None
            means no window, and so does a window as long as q and k.
        alignment: position of query 0 among the keys if Tq ≠ Tk. "top-left" aligns the first
            positions (shift = 0). "bottom-right" aligns the last ones (shift = Tk − Tq), as for
            decoding with a cache.
        precision: arithmetic by which the GPU multiplies fp32 inputs. "emulated" uses the tensor
            cores and is here as exact as fp32, and several times as fast. It takes three TF32
            matmuls ("tf32x3") or six of bf16 ("bf16x6"), whichever is known to be faster for the
            head dim and length. "ieee" uses fp32 units. "tf32" is one matmul with 11 bits. fp16 and
            bf16 do not depend on it.
        document_ids: integers (B, T) for packed sequences with Tq = Tk: positions see each other
            only within one run of equal ids. To compute the bounds of documents only once for all
            layers, pass the result of `document_bounds` instead.
        deterministic: True for gradients that are bit-identical from run to run. False takes the
            fastest kernels, which may add parts of dQ in any order, so that its last bits change.
            Those for Hopper do that up to D = 128. o, dk and dv are always bit-identical. None
            follows `torch.use_deterministic_algorithms`.
        softcap: number c that caps scores smoothly: s becomes c · tanh(s / c), as in Gemma 2. On
            every GPU the Triton kernels take such calls.
        return_lse: bool, whether to also return the log-sum-exp of the scores, differentiable.

    Returns:
        A tensor of q's shape and dtype, or autocast's dtype. Rows that see no key are 0.
        With `return_lse` also (B, T) or (B, H, T) in fp32: log Σ exp(s) over visible keys, −∞ if
        there is none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape, dtype, device or number does not fit. The error says what is allowed.
        RuntimeError: from backward, with `create_graph=True`: the gradient of a gradient is not
            defined.

    Source: Dao, FlashAttention-2 (2023).
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


# Options of the operators for parts: scale, window, alignment, precision, softcap, bounds.
_PLAIN = (None, None, "bottom-right", "emulated", None, None)


def part_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, *, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention over a part of the keys, without autograd.

    Parts are merged by their log-sum-exps. The last query sees all keys of the part.

    Args:
        q: queries (B, H, Tq, D).
        k: keys (B, Hk, Tk, D).
        v: values (B, Hk, Tk, D).
        causal: bool, whether query i sees only keys j ≤ i + Tk − Tq.
        plain: bool, whether to compute in plain torch, where Triton cannot run or is interpreted.
            It also takes float64, and then lse is float64.
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
    """Return the gradients of q, k and v for one part of the keys, without autograd.

    Args:
        q, k, v, causal, plain: as for `part_forward`.
        o: result of attention over all keys.
        lse: log-sum-exp over all keys.
        do: gradient of o.
    """
    # With o and lse of *all* keys, P = exp(s − lse) is the part's share of the whole softmax, and Δ
    # is the whole row's. So the gradients of parts simply add up.
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
    """Return the least work of one pass.

    Args:
        q_shape: dimensions of q.
        k_shape: dimensions of k and v.
        dtype: dtype of q, k and v.
        causal, window, alignment: as for `flash_attention`.
        backward: whether to count the backward pass instead of the forward pass. By convention it
            has five matmuls, 2.5 times the FLOPs of the forward.
    """
    # 4·D per visible pair: two matmuls of 2·D each.
    flops = ops.forward_flops(q_shape, k_shape, k_shape, causal, None, window, alignment)
    q_bytes = math.prod(q_shape) * dtype.itemsize
    k_bytes = math.prod(k_shape) * dtype.itemsize
    lse_bytes = 4 * math.prod(q_shape[:-1])
    if backward:  # read q, k, v, o, do, lse; write dq, dk, dv
        return Cost(2.5 * flops, 4 * q_bytes + 4 * k_bytes + lse_bytes)
    return Cost(flops, 2 * q_bytes + 2 * k_bytes + lse_bytes)
