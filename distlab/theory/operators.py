"""Launches of a training step, operator by operator: FLOPs and bytes, from the model's numbers.

The lab's Transformer as it runs with torch's operators (`eager`), counted as
`distlab.simulate.events` counts the real one (a test compares both). The same after torch.compile
or with fused kernels (`fused`), where each chain of element-wise operations reads its inputs once
and writes its outputs once. And `composite`: eager, with RMSNorm as separate operators in fp32, as
torch before 2.8 ran it.

Letters: n tokens at once, d d_model, f d_ff, k width of all keys, V vocabulary; c bytes of the
computation, r of the residual stream. Attention is causal: it counts half of the scores; its
backward makes five matmuls where forward makes two. Of ranks that share matrices
(`ModelShape.tensor`), d of attention, f, k and V are a rank's, and norms and the residual stream
have its part of the tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distlab.theory.checks import at_least_one, one_of
from distlab.theory.memory.activations import FP32, Precision
from distlab.theory.memory.recompute import KEEPS, RECOMPUTATION
from distlab.theory.model_shape import ModelShape
from distlab.theory.muon import orthogonalize_flops

ATTENTION = "_scaled_dot_product_attention"
KERNELS = ("eager", "composite", "fused")
# Bytes per element of an RMSNorm in separate operators, x in two bytes: to fp32 6, square 8, mean
# 4, scaled 8, back 6, weight 4; backward about two and a half times as many (torch 2.6's
# at::rms_norm and the formulas of its operators).
COMPOSITE_NORM = (36, 92)

Launch = tuple[str, int, int]  # name, FLOPs, bytes
Launches = Iterator[Launch]


@dataclass(frozen=True)
class Compute:
    """One operator: its FLOPs (matmuls and attention only), bytes read and written, and phase."""

    name: str
    flops: int
    bytes: int
    phase: str

    @property
    def is_attention(self) -> bool:
        """Return whether it is fused attention, forward or backward."""
        return "dot_product" in self.name  # torch has several

    @property
    def launches(self) -> int:
        """Number of kernels on a GPU.

        A norm's backward has a second kernel for the weight. Attention's backward has one before it
        for dO·O and one after it that rounds dq.
        """
        return (
            3
            if self.is_attention and self.phase == "backward"
            else 1 + (self.name == "rms_norm_backward")
        )


@dataclass(frozen=True)
class Workload:
    """Work of one rank in a micro-batch.

    Args:
        shape: shape of the model.
        batch, context: number of sequences, and of this rank's tokens in each.
        precision: bytes per element. `copies_weights` means autocast.
        kernels: `eager`, `composite` or `fused`, see above.
        keep: results that blocks keep of their forward, a name in
            `distlab.theory.memory.recompute.KEEPS`. The rest runs again in backward. `none`: all is
            kept.
        fused_loss: True for a cross-entropy in chunks with the head: not all logits are in memory
            at once, and the forward makes the gradients.
        shards: number of ranks that parameters are sharded over. None for a strategy that keeps
            them whole.
        optimizer: `adamw`, or `muon` for the matrices of blocks.
        sharing: number of ranks that share sequences. A query sees that many times the keys.

    Raises:
        ValueError: an unknown name, or a size below one.
    """

    shape: ModelShape
    batch: int
    context: int
    precision: Precision
    kernels: str = "eager"
    keep: str = "none"
    fused_loss: bool = False
    shards: int | None = None
    sharing: int = 1
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        at_least_one(batch=self.batch, context=self.context, shards=self.shards or 1)
        one_of("kernels", self.kernels, KERNELS)
        one_of("keep", self.keep, RECOMPUTATION)

    @property
    def tokens(self) -> int:
        """Number of tokens, n."""
        return self.batch * self.context

    @property
    def residual(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.tokens // self.shape.tensor * self.shape.d_model

    def outside(self) -> list[Compute]:
        """Everything but the blocks: embedding, final norm, head, loss, optimizer."""
        return [*self._ends_forward(), *self._ends_backward(), *self._update()]

    def block(self) -> list[Compute]:
        """One block: forward, what runs again, backward."""
        unit = self._unit(self.shape.block_matrices)
        forward = [Compute(*each, "forward") for each in (*unit, *self._forward())]
        again = [Compute(*each, "backward") for each in self._again()]
        return [*forward, *again, *(Compute(*each, "backward") for each in self._backward())]

    # -- one block ------------------------------------------------------------------------------------------------

    def _matmul(self, inputs: int, outputs: int) -> Launch:
        n, c = self.tokens, self.precision.compute
        return "mm", 2 * n * inputs * outputs, c * (n * inputs + inputs * outputs + n * outputs)

    def _both_gradients(self, inputs: int, outputs: int) -> Launches:
        """Yield the gradient of a matmul's weight, and that of its input.

        Under autocast, linear layers write the former in fp32.
        """
        name, flops, moved = self._matmul(inputs, outputs)
        yield (
            name,
            flops,
            moved
            + (FP32 - self.precision.compute) * self.precision.copies_weights * inputs * outputs,
        )
        yield name, flops, moved

    def _cast(self, weight: int) -> Launches:
        if self.precision.copies_weights:
            yield "_to_copy", 0, (FP32 + self.precision.compute) * weight

    def _norm(self, adds: bool) -> Launches:
        """RMSNorm of the residual stream, to which a branch is added first where `adds`."""
        nd, c, r = self.residual, self.precision.compute, self.precision.residual
        if self.kernels == "fused":
            yield "add_rms_norm" if adds else "rms_norm", 0, ((c + r) * adds + r + c) * nd
            return
        if self.shards is not None:  # the weight stays in fp32
            yield "_to_copy", 0, (FP32 + c) * self.shape.d_model
        if adds:
            yield "add", 0, (c + 2 * r) * nd
        yield "rms_norm", 0, (COMPOSITE_NORM[0] if self.kernels == "composite" else 2 * r) * nd
        if r != c:
            yield "_to_copy", 0, (r + c) * nd

    def _norm_backward(self) -> Launches:
        """And the sum with what comes down the residual stream."""
        nd, c, r = self.residual, self.precision.compute, self.precision.residual
        if self.kernels == "fused":
            yield "rms_norm_backward", 0, (c + 3 * r) * nd
            return
        if r != c:
            yield "_to_copy", 0, (r + c) * nd
        yield (
            "rms_norm_backward",
            0,
            (COMPOSITE_NORM[1] if self.kernels == "composite" else 4 * r) * nd,
        )
        yield "add", 0, 3 * r * nd

    def _rope(self, backward: bool = False) -> Launches:
        """Yield the rotation of queries and keys in fp32.

        Backward also joins the gradients of q, k and v.
        """
        shape, c, n = self.shape, self.precision.compute, self.tokens
        rotated, all_three = (
            n * (shape.width + shape.kv_width),
            n * (shape.width + 2 * shape.kv_width),
        )
        cast, add = ("_to_copy", 0, (FP32 + c) * rotated), ("add", 0, 3 * FP32 * rotated)
        if self.kernels == "fused":
            yield "rope", 0, 2 * c * (rotated + all_three * backward)
        elif backward:
            mul, roll = ("mul", 0, 2 * FP32 * rotated), ("roll", 0, 2 * c * rotated)
            together = [("cat", 0, 2 * c * all_three)] * 2
            yield from (roll, *[cast] * (3 * (c != FP32)), mul, roll, mul, add, *together)
        else:
            mul = "mul", 0, (c + FP32) * rotated
            yield from (mul, ("roll", 0, 2 * c * rotated), mul, add, *[cast] * (c != FP32))

    def _attention(self, matmuls: int) -> Launch:
        shape, c, n = self.shape, self.precision.compute, self.tokens
        times = 1 if matmuls == 2 else 2
        moved = times * c * n * (2 * shape.width + 2 * shape.kv_width) + FP32 * n * shape.heads
        return ATTENTION, matmuls * n * self.context * self.sharing * shape.width, moved

    def _swiglu(self) -> Launches:
        nf, c = self.tokens * self.shape.inner, self.precision.compute
        if self.kernels == "fused":
            yield "swiglu", 0, 3 * c * nf
        else:
            yield from (("silu", 0, 2 * c * nf), ("mul", 0, 3 * c * nf))

    def _add(self) -> Launch:
        return "add", 0, (self.precision.compute + 2 * self.precision.residual) * self.residual

    def _forward(self, kept: Sequence[str] = ()) -> Launches:
        """But for the operators whose results were kept."""
        (qkv, _), (d, width), (f, _) = self.shape.matrix_shapes_per_block[:3]

        def linear(name: str, inputs: int, outputs: int) -> Launches:
            yield from self._cast(inputs * outputs)
            if name not in kept:
                yield self._matmul(inputs, outputs)

        yield from self._norm(adds=False)
        yield from linear("qkv", d, qkv)
        yield from self._rope()
        if "attention" not in kept:
            yield self._attention(2)
        yield from linear("output", width, d)
        yield from self._norm(adds=True)
        yield from linear("w1", d, f)
        yield from linear("w3", d, f)
        yield from self._swiglu()
        yield from linear("w2", f, d)
        yield self._add()

    def _again(self) -> Launches:
        """Yield all that was not kept, up to the last matmul, whose result is not needed.

        Under autocast that matmul runs before torch notices that every result is there.
        """
        if self.keep != "none":
            kept = KEEPS[self.keep]
            yield from list(
                self._forward(kept if self.precision.copies_weights else (*kept, "w2"))
            )[:-1]

    def _backward(self) -> Launches:
        (qkv, _), (d, width), (f, _) = self.shape.matrix_shapes_per_block[:3]
        c, n = self.precision.compute, self.tokens
        yield from self._both_gradients(f, d)
        if self.kernels == "fused":
            yield "swiglu_backward", 0, 6 * c * n * f
        else:
            yield from (("mul", 0, 3 * c * n * f),) * 2
            yield "silu_backward", 0, 3 * c * n * f
        for _ in range(2):
            yield from self._both_gradients(d, f)
        yield "add", 0, 3 * c * n * d
        yield from self._norm_backward()
        yield from self._both_gradients(width, d)
        yield self._attention(5)
        yield from self._rope(backward=True)
        yield from self._both_gradients(d, qkv)
        yield from self._norm_backward()
        yield from self._unit(self.shape.block_matrices, backward=True)

    def _unit(self, weight: int, backward: bool = False) -> Launches:
        """Yield FSDP's casts and copies of a unit.

        The shard is cast before each of two gathers, and gradients are copied into the buffer to
        send.
        """
        if self.shards is not None:
            casts = FP32 + self.precision.compute
            yield "_to_copy", 0, casts * weight // self.shards
            if backward:
                yield "_foreach_copy_", 0, casts * weight

    # -- the rest -------------------------------------------------------------------------------------------------

    def _ends_forward(self) -> Iterator[Compute]:
        c, r, n = self.precision.compute, self.precision.residual, self.tokens
        d, nv = self.shape.d_model, n * self.shape.words
        if self.shape.has_embedding:
            yield Compute("embedding", 0, r * (self.shape.embedding_parameters + n * d), "forward")
        units = [
            unit
            for _ in range(self.shape.vocabularies)
            for unit in self._unit(self.shape.embedding_parameters)
        ]
        yield from (Compute(*each, "forward") for each in units)
        if not self.shape.has_head:
            return
        ends = [*self._norm(adds=False), *self._cast(self.shape.embedding_parameters)]
        ends.append(self._matmul(d, self.shape.words))
        if self.fused_loss:
            ends += [
                ("linear_cross_entropy", 0, 2 * c * nv),
                *self._both_gradients(d, self.shape.words),
            ]
        else:
            ends += [("_to_copy", 0, (FP32 + c) * nv)] * (c != FP32)
            # the largest, the difference from it, its exponential, their sum
            if self.shape.tensor > 1:
                ends += [
                    ("amax", 0, FP32 * nv),
                    *[("exp", 0, 2 * FP32 * nv)] * 2,
                    ("sum", 0, FP32 * nv),
                ]
            else:
                ends += [("_log_softmax", 0, 2 * FP32 * nv), ("nll_loss", 0, FP32 * nv)]
        yield from (Compute(*each, "forward") for each in ends)

    def _ends_backward(self) -> Iterator[Compute]:
        c, r, n = self.precision.compute, self.precision.residual, self.tokens
        shape, nv = self.shape, n * self.shape.words
        ends = []
        if shape.has_head and not self.fused_loss:
            ends = [
                ("nll_loss_backward", 0, 2 * FP32 * nv),
                ("_log_softmax_backward", 0, 3 * FP32 * nv),
            ]
            ends += [("add", 0, 3 * FP32 * nv)] * (self.shape.tensor > 1)
            ends += [("_to_copy", 0, (FP32 + c) * nv)] * (c != FP32)
            ends += self._both_gradients(shape.d_model, shape.words)
        if shape.has_head:
            ends += self._norm_backward()
        if shape.has_embedding:
            written = (r if self.shards is not None else FP32) * shape.embedding_parameters
            ends.append(("embedding_backward", 0, written + r * n * shape.d_model))
        for _ in range(self.shape.vocabularies):
            ends += self._unit(shape.embedding_parameters, backward=True)
        yield from (Compute(*each, "backward") for each in ends)

    def _update(self) -> Iterator[Compute]:
        """Yield AdamW's update, which reads and writes parameters, gradients and moments in fp32.

        Muon has one moment of a matrix, and also its update in fp32 and bf16.
        """
        blocks, by_muon = self.shape.num_layers, 0
        for shape in self.shape.matrix_shapes_per_block if self.optimizer == "muon" else ():
            numel = blocks * math.prod(shape)
            by_muon += numel
            yield Compute(
                "orthogonalize",
                blocks * orthogonalize_flops(*shape),
                14 * FP32 * numel,
                "optimizer",
            )
        yield Compute(
            "_fused_adamw_", 0, 8 * FP32 * (self.shape.num_parameters - by_muon), "optimizer"
        )
