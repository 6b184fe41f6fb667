"""Operations of the model, and the implementation of each.

The Transformer calls its operations through an `Ops` record, so that a hand-written kernel can
replace a torch operation without a change of the model. The functions here are plain torch, and
also the references that faster implementations are compared with.

Shapes: `B` batch, `T` sequence, `V` vocabulary, `H` heads, `D` width of a head, `d` any width.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.model.config import (
    ATTENTION_CHOICES,
    LOGITS_AT_ONCE,
    LOGITS_CHUNK,
    OPS_CHOICES,
    ModelConfig,
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q_BHTD, k_BKTD, v_BKTD → out_BHTD
# A function that takes a weight, and a function that returns its gradient.
PutOff = Callable[[Tensor, Callable[[], Tensor]], None]


@dataclass(frozen=True)
class Ops:
    """The operations of the Transformer, except its matmuls.

    Attributes:
        attention: `(q_BHTD, k_BKTD, v_BKTD) -> out_BHTD`, causal, scale 1/√D, K a divisor of H.
        rms_norm: `(x, weight_d, eps) -> y`, over the last dimension.
        add_rms_norm: `(x, residual, weight_d, eps) -> (y, x + residual)`, y the norm of that sum.
        swiglu: `(gate, up) -> silu(gate) * up`, any equal shapes.
        rope: `(x, cos, sin) -> y`; x `(..., T, D)`, cos and sin `(T, D)` in fp32 from
            `rope_tables`.
        cross_entropy: `(logits_BTV, targets_BT) -> mean loss`, a scalar.
        linear_cross_entropy: `(x_BTd, weight_Vd, targets_BT) -> mean loss`, the same of the logits
            x Wᵀ.

        embedding: `(tokens_BT, weight_Vd) -> x_BTd`.
        logits: `(x_BTd, weight_Vd) -> logits_BTV`.
        enter: `x_BTd -> x_BTd`, before attention and before the feed-forward layer.
        leave: `x_BTd -> x_BTd`, after them.
        positions: `(T, device) -> (T,)` in fp32, the positions of the tokens in their sequence.

    The last five communicate if several ranks share a model (`distlab.parallel.tensor_parallel`,
    `distlab.parallel.context_parallel`). Their defaults are for a rank that has the whole sequence
    and every row.
    """

    attention: Attention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor] = F.embedding
    logits: Callable[[Tensor, Tensor], Tensor] = lambda x, weight: linear(x, weight)
    enter: Callable[[Tensor], Tensor] = lambda x: x
    leave: Callable[[Tensor], Tensor] = lambda x: x
    positions: Callable[[int, torch.device], Tensor] = lambda T, device: positions(T, device)


def positions(T: int, device: torch.device) -> Tensor:
    """Return 0 … T − 1 in fp32, for a rank that has the whole sequence."""
    return torch.arange(T, device=device, dtype=torch.float32)


def naive_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Compute causal attention by the formula softmax(q kᵀ/√D + mask) v, with all scores in memory.

    The softmax runs in fp32 (fp64 for fp64 inputs), the two matmuls in the inputs' dtype or
    autocast's. Keys and values of fewer heads are repeated.

    Returns:
        `(B, H, T, D)` in the matmuls' dtype.
    """
    T, D = q_BHTD.shape[-2:]
    if k_BHTD.shape[1] != q_BHTD.shape[1]:
        shared_by = q_BHTD.shape[1] // k_BHTD.shape[1]
        # Neighbouring query heads share a head, so repeats are neighbours: 0 0 1 1, not 0 1 0 1.
        k_BHTD, v_BHTD = (x.repeat_interleave(shared_by, dim=1) for x in (k_BHTD, v_BHTD))
    # Divided by √D, because a dot product of D independent unit normals has that standard
    # deviation.
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-2, -1) / math.sqrt(D)
    # True above the diagonal: the keys that come after a query.
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(diagonal=1)
    scores_BHTT = scores_BHTT.masked_fill(future_TT, float("-inf"))
    weights_BHTT = scores_BHTT.softmax(
        dim=-1, dtype=torch.promote_types(scores_BHTT.dtype, torch.float32)
    )
    # Rounded to the dtype of the values, so that the matmul runs on tensor cores.
    return weights_BHTT.to(v_BHTD.dtype) @ v_BHTD


def rms_norm(x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, with statistics in fp32.

    By Zhang & Sennrich 2019.

    On a GPU an fp32 weight with x in bf16 or fp16 (FSDP's compute dtype) is rounded to x's dtype,
    because torch's fused kernel takes one dtype. The kernels of `ops="triton"` and compiled code
    multiply by it as it is.

    Returns:
        Tensor with the shape of x. Under autocast it has autocast's dtype, so that the matmuls that
        follow need no cast of their own. Otherwise it has x's dtype.
    """
    out_dtype = _autocast_dtype(x)
    # torch's fused kernel takes one dtype, and keeps its statistics in fp32 for bf16 and fp16
    # inputs.
    if x.dtype != weight_d.dtype:
        common = torch.promote_types(x.dtype, weight_d.dtype)
        narrower = common == weight_d.dtype and out_dtype == x.dtype
        if narrower and on_gpu(x) and not torch.compiler.is_compiling():
            if torch.is_autocast_enabled(x.device.type):
                return _MixedRMSNorm.apply(x, weight_d, eps)
            # Casting x and its gradient would cost three passes, 2 % of FSDP's step.
            common = x.dtype
        x, weight_d = x.to(common), weight_d.to(common)
    return F.rms_norm(x, weight_d.shape, weight_d, eps).to(out_dtype)


class _MixedRMSNorm(torch.autograd.Function):
    """RMSNorm of x in a narrower dtype than the weight's, by torch's fused kernels.

    It saves x as it is. Autograd would save the copy that the kernel reads, in the weight's dtype.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # rstd = 1/√(mean(x²) + eps), one fp32 number per row, which backward needs.
        y, rstd = torch.ops.aten._fused_rms_norm(x.to(weight.dtype), weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        _refuse_create_graph("a norm of x in a narrower dtype than the weight's")
        x, weight, rstd = ctx.saved_tensors
        # Backward casts x a second time. That costs a pass, and saves keeping the copy.
        wide = (dy.to(weight.dtype).contiguous(), x.to(weight.dtype))
        needs = list(ctx.needs_input_grad[:2])
        dx, dw = torch.ops.aten._fused_rms_norm_backward(*wide, weight.shape, rstd, weight, needs)
        return None if dx is None else dx.to(x.dtype), dw, None


def sdpa(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
    """Compute causal attention by torch's fused kernels. Keys and values may have fewer heads."""
    # Fewer of torch's kernels take `enable_gqa`, so it is set only where heads are shared.
    shared = k_BKTD.shape[1] != q_BHTD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=shared)


def attention_parts() -> tuple[Callable, Callable]:
    """Return forward and backward of attention over some of the keys.

    Context parallelism merges their results. On a CPU they compute in plain torch.
    """
    from kernels.flash_attention import part_backward, part_forward

    def forward(q: Tensor, *args: Any) -> Any:
        return part_forward(q, *args, plain=not on_gpu(q))

    def backward(q: Tensor, *args: Any) -> Any:
        return part_backward(q, *args, plain=not on_gpu(q))

    return forward, backward


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype where autocast is on, else x's.

    There is no autocast on meta, and autocast does not change fp64.
    """
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _refuse_create_graph(what: str) -> None:
    """Raise RuntimeError if gradients of gradients are wanted, which this backward does not have.

    torch's `once_differentiable` does not notice this if the upstream gradient requires no
    gradient, as that of a sum.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what}: the gradient of a gradient is not defined for it; "
            "where create_graph=True is needed, leave autocast and give both one dtype"
        )


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_d: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of x + residual, and that sum."""
    total = residual + x
    return rms_norm(total, weight_d, eps), total


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ, `(..., in) -> (..., out)`, in autocast's dtype where autocast is on.

    On a GPU under autocast the matmul that makes the weight's gradient returns it in the weight's
    own dtype, fp32. torch's form rounds it to autocast's dtype and casts it in a separate pass. The
    gradient is written to its `gradient_target`, by compiled code as well.
    """
    kind = x.device.type
    if on_gpu(x) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if weight.requires_grad and weight.dtype == torch.float32 and dtype != torch.float32:
            return _CastLinear.apply(x, weight, dtype)
    return F.linear(x, weight)


# True while `as_on_gpu` runs. The fake tensors of a simulation are on a CPU.
_simulates_gpu = False


def on_gpu(x: Tensor) -> bool:
    """Return True if a matmul of x can return another dtype than its inputs', as on a GPU."""
    return x.is_cuda or _simulates_gpu


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let the operations take their form for GPUs while the block runs. For simulations."""
    global _simulates_gpu
    before = _simulates_gpu
    _simulates_gpu = True
    try:
        yield
    finally:
        _simulates_gpu = before


def gradient_target(weight: Tensor) -> Tensor | None:
    """Return the preallocated buffer for this parameter's next gradient, or None.

    It is for example the parameter's place in a bucket, which a strategy sets as
    `weight.gradient_target`, or a function that allocates it. The caller must write the whole
    gradient to it. The buffer is returned once, so that a weight used twice in one graph does not
    overwrite its first gradient, and only if there is no gradient to add to. What ZeRO-2 puts into
    `.grad` is none.
    """
    if weight.grad is not None and not hasattr(weight.grad, "stands_in"):
        return None
    target = weight.__dict__.pop("gradient_target", None)
    if callable(target):
        return target()
    # A parameter that was copied or loaded has an empty size in its place (`parallel.bucketed`).
    return target if isinstance(target, Tensor) else None


class _CastLinear(torch.autograd.Function):
    """Linear layer of an fp32 weight in another dtype, in which x and the weight are saved.

    The saved copies have no graph that leads to x and the weight. So the gradient of a gradient
    raises RuntimeError.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        # Not saved as a tensor: backward needs the parameter object, whose `gradient_target` it
        # fills.
        ctx.weight = weight
        ctx.x_dtype = x.dtype
        x = x.to(dtype)
        cast = weight.to(dtype)
        ctx.save_for_backward(x, cast)
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, cast = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            # y = x·Wᵀ, so dx = dy·W and dW = dyᵀ·x.
            dx = (dy @ cast).to(ctx.x_dtype)
        dw = None
        if torch.compiler.is_compiling():
            # A compiled backward has no gradient of its own, which torch refuses by itself.
            if ctx.needs_input_grad[1]:
                dw = torch.ops.distlab.weight_gradient(ctx.weight, dy, x)
            return dx, dw, None
        _refuse_create_graph("a linear layer of a cast weight")
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(ctx.weight, dy, x)
        return dx, dw, None


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Return dyᵀ x in the weight's dtype, on a GPU in one pass, in its `gradient_target` if any."""
    # To two dimensions. `unsqueeze` allows an input of one.
    dy = dy.unsqueeze(0).flatten(0, -2)
    x = x.unsqueeze(0).flatten(0, -2)
    if not on_gpu(x) or x.dtype == weight.dtype:
        return torch.mm(dy.t(), x).to(weight.dtype)
    target = gradient_target(weight)
    if target is None:
        return _wide_product(dy.t(), x, weight.dtype)
    _wide_product(dy.t(), x, weight.dtype, out=target)
    # A new view, to which nothing else refers. Autograd makes it `.grad` without a copy.
    return target.view_as(target)


# `_weight_gradient` as an operator of torch. The compiler does not look inside an operator, so what
# `gradient_target` returns is decided in each step, and not once for all at compilation. It is not
# made by `torch.library.custom_op`, which refuses a result in the storage of an argument: a
# strategy may keep a weight and its bucket in one. The tag keeps it out of CUDA graphs, which would
# always write to the place that it had when they were captured.
_library = torch.library.Library("distlab", "FRAGMENT")
_library.define(
    "weight_gradient(Tensor weight, Tensor dy, Tensor x) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl("weight_gradient", _weight_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("distlab::weight_gradient", lib=_library)
def _like_the_weight(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a b in a wider dtype than theirs. cuBLAS writes it without a pass that casts."""
    return torch.mm(a, b, out_dtype=dtype, out=out)


def linear_with_late_weight(x: Tensor, weight: Tensor, *, put_off: PutOff) -> Tensor:
    """Return `linear` of x, whose backward only makes the gradient of x.

    It hands over the weight with the tensors that make its gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return linear(x, weight)
    kind, dtype = x.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return _LateLinear.apply(x, weight.detach().to(dtype), (weight, put_off))


class _LateLinear(torch.autograd.Function):
    """Linear layer that gets the weight in a tuple, unseen by autograd.

    Autograd would run the weight's hooks without a gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cast: Tensor, late: tuple[Tensor, PutOff]) -> Tensor:
        ctx.late = late
        ctx.x_dtype = x.dtype
        x = x.to(cast.dtype)
        ctx.save_for_backward(x, cast)
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, cast = ctx.saved_tensors
        weight, put_off = ctx.late
        # Only noted here. The schedule calls it later, in time that would otherwise be idle.
        put_off(weight, partial(_weight_gradient, weight, dy, x))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ cast).to(ctx.x_dtype)
        # No gradient for the weight: `put_off` delivers it.
        return dx, None, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, the element-wise part of SwiGLU (Shazeer 2020).

    The shapes must be equal.
    """
    return F.silu(gate) * up


def rope_tables(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles t·theta^(-2i/D) of positions t and pairs i, for `rope`.

    Returns:
        Two tables `(T, D)` in fp32: (cos | cos) and (−sin | sin), a half for each element of a
            pair.
    """
    # Plain multiplications: a matmul would be rounded to bf16 under autocast.
    exponents = (
        torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
    )
    angles = positions_T[:, None] * (theta**-exponents)[None, :]
    cos, sin = angles.cos(), angles.sin()
    # x_i takes −sin of its partner and x_{i+D/2} takes +sin, see `rope`.
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) by its position's angle.

    This is the rotary position embedding of Su et al. 2021. The pairs are the two halves of a head,
    as in GPT-NeoX and Llama, and not neighbours. For a model that is trained with it the two forms
    differ by a permutation of the columns of the projections.

    Args:
        x: queries or keys, `(..., T, D)`.
        cos: `(T, D)` in fp32, from `rope_tables`.
        sin: `(T, D)` in fp32, from `rope_tables`. Its first half is negative.

    Returns:
        Tensor with the shape and dtype of x, computed in fp32.
    """
    # Rolling by half a head puts each element's partner in its place. This takes five launches,
    # where rotating the halves separately takes eight, and backward also saves three. In eager mode
    # launches are the cost of this operation.
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean over all tokens of −log softmax(logits)[target], in fp32 (or fp64).

    Targets of −100 are left out.

    It is a function and not a method of the model, because data-parallel wrappers see only a
    model's `forward`: a loss computed by another method would bypass them.
    """
    logits = logits_BTV.flatten(0, -2)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # In fp32: a sum of V exponentials, of 150,000 for example, loses digits in 16 bits.
    return F.cross_entropy(logits.to(wide), targets_BT.flatten())


def linear_cross_entropy(x_BTd: Tensor, weight_Vd: Tensor, targets_BT: Tensor) -> Tensor:
    """Return `cross_entropy` of the logits x Wᵀ, which are in memory at once.

    Very many logits are computed in chunks by this lab's kernel.
    """
    # Bytes of all logits in fp32.
    if 4 * targets_BT.numel() * weight_Vd.shape[0] > LOGITS_AT_ONCE:
        return _triton_linear_cross_entropy(x_BTd, weight_Vd, targets_BT)
    return cross_entropy(linear(x_BTd, weight_Vd), targets_BT)


def _flash_attention() -> Attention:
    """Return this lab's Triton kernel. The import here lets other choices work without Triton."""
    try:
        from kernels._dispatch import interpreted
        from kernels.flash_attention import flash_attention
    except ImportError as error:
        raise ValueError(
            f"attention='flash' needs Triton ({error}); install it, or choose sdpa"
        ) from error
    if not (torch.cuda.is_available() or interpreted()):
        raise ValueError(
            "attention='flash' needs a CUDA device and there is none; choose sdpa or naive "
            "(TRITON_INTERPRET=1 runs it on a CPU, slowly)"
        )
    return partial(flash_attention, causal=True)


def _triton_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return `cross_entropy` by this lab's kernel, which reads logits in their own dtype."""
    from kernels.cross_entropy import cross_entropy as fused

    return fused(logits_BTV.flatten(0, -2), targets_BT.flatten())


def _triton_linear_cross_entropy(x_BTd: Tensor, weight_Vd: Tensor, targets_BT: Tensor) -> Tensor:
    """Return `linear_cross_entropy` with the logits of some rows in memory at a time.

    The forward also makes the gradients. In fp16 the kernel is not used: the loss scale comes with
    the upstream gradient, too late for gradients that exist already.
    """
    from kernels.linear_cross_entropy import linear_cross_entropy as fused

    if _autocast_dtype(x_BTd) == torch.float16:
        return _triton_cross_entropy(linear(x_BTd, weight_Vd), targets_BT)
    return fused(x_BTd.flatten(0, -2), weight_Vd, targets_BT.flatten(), chunk_bytes=LOGITS_CHUNK)


def _triton_ops(attention: Attention) -> Ops:
    """Return this lab's kernels. Without Triton, as on a CPU, they compute in plain torch."""
    from kernels import rmsnorm, rope, swiglu

    return Ops(
        attention=attention,
        rms_norm=rmsnorm.rms_norm,
        add_rms_norm=rmsnorm.add_rms_norm,
        swiglu=swiglu.swiglu,
        rope=rope.rope,
        cross_entropy=_triton_cross_entropy,
        linear_cross_entropy=_triton_linear_cross_entropy,
    )


# Operations that torch.compile fuses with the operations around them, where they cost nothing.
# Measured by `distlab run model_comparison`, see docs/results/kernels.md.
INDUCTORS = ("rms_norm", "add_rms_norm", "swiglu", "rope")


def _auto(name: str, ours: Callable, torchs: Callable) -> Callable:
    """Return an operation that calls `ours` on a GPU, and `torchs` elsewhere.

    In compiled code it leaves the operations of `INDUCTORS` to Inductor, which is faster there.
    """
    left_to_inductor = name in INDUCTORS

    def operation(x: Tensor, *args: object) -> object:
        if not x.is_cuda or (left_to_inductor and torch.compiler.is_compiling()):
            return torchs(x, *args)
        return ours(x, *args)

    return operation


# Number of pairs of query and key, over batch and heads, below which a call of our kernel is
# host-bound.
LEAST_PAIRS = 2**28


def attention_source(shape: Sequence[int], dtype: torch.dtype, *, hopper: bool) -> str:
    """Return the choice of `auto` for queries (B, H, T, D) in this dtype: `flash` or `sdpa`.

    This lab's kernels are ahead of torch's (cuDNN) on Hopper for heads of 64 to 256 in fp16 and
    bf16; see docs/results/flash_attention.md.
    """
    batch, heads, length, head_dim = shape
    is_fast_width = head_dim in (64, 80, 96, 128, 192, 256)
    is_fast_dtype = dtype in (torch.float16, torch.bfloat16)
    is_large = batch * heads * length * length >= LEAST_PAIRS
    if hopper and is_fast_width and is_fast_dtype and is_large:
        return "flash"
    return "sdpa"


def _on_hopper() -> bool:
    """Return True if the current GPU is a Hopper."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _auto_attention() -> Attention:
    """Return attention by `sdpa` or `flash`, whichever is known to be faster for a call."""
    if not _on_hopper():
        return sdpa
    flash = _flash_attention()

    def attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        source = attention_source(q_BHTD.shape, q_BHTD.dtype, hopper=q_BHTD.is_cuda)
        if source == "flash":
            return flash(q_BHTD, k_BKTD, v_BKTD)
        return sdpa(q_BHTD, k_BKTD, v_BKTD)

    return attention


def sources(config: ModelConfig, batch: int, dtype: torch.dtype, compile: str) -> dict[str, str]:
    """Return each operation's source on this GPU: naive, sdpa, flash, torch, inductor or triton."""
    attention = config.attention
    if attention == "auto":
        shape = batch, config.num_heads, config.context_length, config.head_dim
        attention = attention_source(shape, dtype, hopper=_on_hopper())
    fused = "triton"  # source of the operations of `INDUCTORS`
    if config.ops == "torch":
        fused = "torch" if compile == "off" else "inductor"
    elif config.ops == "auto" and compile != "off":
        fused = "inductor"
    found = {"attention": attention}
    for name in INDUCTORS:
        found[name] = fused
    found["cross_entropy"] = "torch" if config.ops == "torch" else "triton"
    return found


def get_ops(attention: str = "sdpa", ops: str = "torch") -> Ops:
    """Return the operations for a model.

    Args:
        attention: `naive` (plain torch, the reference), `sdpa` (torch's fused kernels), `flash`
            (`kernels.flash_attention`; CUDA, or Triton's interpreter), or `auto`, the one known to
            be faster.
        ops: `torch`, `triton` for the fused kernels of `kernels` in place of norms, SwiGLU, RoPE
            and the loss (fp32, fp16 and bf16; on a CPU these compute in plain torch), or `auto` for
            whichever is known to be faster, of each operation; `sources` says which that is.

    Raises:
        ValueError: no such implementation, or one that cannot run here; the message says what to
            choose.
    """
    if attention not in ATTENTION_CHOICES:
        raise ValueError(f"attention={attention!r}: choose one of {', '.join(ATTENTION_CHOICES)}")
    if ops not in OPS_CHOICES:
        raise ValueError(f"ops={ops!r}: choose one of {', '.join(OPS_CHOICES)}")
    if attention == "naive":
        function = naive_attention
    elif attention == "sdpa":
        function = sdpa
    elif attention == "flash":
        function = _flash_attention()
    else:
        function = _auto_attention()
    torchs = Ops(
        attention=function,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        swiglu=swiglu,
        rope=rope,
        cross_entropy=cross_entropy,
        linear_cross_entropy=linear_cross_entropy,
    )
    if ops == "torch":
        return torchs
    ours = _triton_ops(function)
    if ops == "triton":
        return ours
    faster = {}
    for name in (*INDUCTORS, "cross_entropy", "linear_cross_entropy"):
        faster[name] = _auto(name, getattr(ours, name), getattr(torchs, name))
    return replace(torchs, **faster)
