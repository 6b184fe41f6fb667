"""Launches of a training step, operator by operator: FLOPs and bytes, from the model's numbers.

Three forms of the lab's Transformer:

- `eager`: as it runs with torch's operators. `distlab.simulate.events` counts the real one, and a
  test compares both.
- `fused`: after torch.compile or with fused kernels, where each chain of element-wise operations
  reads its inputs once and writes its outputs once.
- `composite`: eager, with RMSNorm as separate operators in fp32, as torch before 2.8 ran it.

FLOPs are those of matmuls, 2·n·inputs·outputs. Bytes are the elements that an operator reads and
writes times their size. Attention is causal and counts half of the scores, so each of its matmuls
takes n·T·d FLOPs. Forward makes two of them, and backward five: the scores again and four
gradients (Dao et al. 2022, "FlashAttention", appendix B).

Letters: n tokens at once, d d_model, f d_ff, k width of all keys, V vocabulary; c bytes per element
of the computation, r of the residual stream. Of ranks that share matrices (`ModelShape.tensor`), d
of attention, f, k and V are a rank's, and norms and the residual stream have its part of the
tokens.
"""

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
# 4, scaled 8, back 6, weight 4. Backward takes about two and a half times as many (torch 2.6's
# at::rms_norm and the formulas of its operators).
COMPOSITE_NORM = 36
COMPOSITE_NORM_BACKWARD = 92

Launch = tuple[str, int, int]  # name, FLOPs, bytes
Launches = Iterator[Launch]


@dataclass(frozen=True)
class Compute:
    """Work of one operator.

    Args:
        name: name of the operator, as torch or the lab's kernel calls it.
        flops: FLOPs of matmuls and attention, 0 for other operators.
        bytes: bytes read and written.
        phase: `forward`, `backward` or `optimizer`.
    """

    name: str
    flops: int
    bytes: int
    phase: str

    @property
    def is_attention(self) -> bool:
        """Return whether the operator is fused attention, forward or backward."""
        return "dot_product" in self.name  # torch has several such operators

    @property
    def launches(self) -> int:
        """Return the number of kernels on a GPU."""
        if self.is_attention and self.phase == "backward":
            return 3  # one before it for dO·O, and one after it that rounds dq
        if self.name == "rms_norm_backward":
            return 2  # a second kernel for the weight
        return 1


@dataclass(frozen=True)
class Workload:
    """Work of one rank in a micro-batch.

    Args:
        shape: shape of the model.
        batch: number of sequences.
        context: number of this rank's tokens in each sequence.
        precision: bytes per element. `copies_weights` means autocast.
        kernels: `eager`, `composite` or `fused`, see above.
        keep: name of the results that blocks keep of their forward, in
            `distlab.theory.memory.recompute.KEEPS`. The rest runs again in backward. `none`: blocks
            are not recomputed.
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
        """Return the operators outside of the blocks: embedding, final norm, head, loss, update."""
        return [
            *_in_phase("forward", self._ends_forward()),
            *_in_phase("backward", self._ends_backward()),
            *_in_phase("optimizer", self._update()),
        ]

    def block(self) -> list[Compute]:
        """Return the operators of one block: forward, what runs again, backward."""
        return [
            *_in_phase("forward", self._unit(self.shape.block_matrices)),
            *_in_phase("forward", self._forward()),
            *_in_phase("backward", self._again()),
            *_in_phase("backward", self._backward()),
        ]

    # -- one block ---------------------------------------------------------------------------------

    def _forward(self, kept: Sequence[str] = ()) -> Launches:
        """Yield a block's forward.

        Args:
            kept: names of operations that do not run, because their results were kept.
        """
        (qkv, _), (d, width), (f, _) = self.shape.matrix_shapes_per_block[:3]
        yield from self._norm(adds=False)
        yield from self._linear("qkv", d, qkv, kept)
        yield from self._rope()
        if "attention" not in kept:
            yield self._attention()
        yield from self._linear("output", width, d, kept)
        yield from self._norm(adds=True)
        yield from self._linear("w1", d, f, kept)
        yield from self._linear("w3", d, f, kept)
        yield from self._swiglu()
        yield from self._linear("w2", f, d, kept)
        yield self._add()

    def _again(self) -> Launches:
        """Yield what a recomputed block runs again in backward."""
        if self.keep == "none":
            return
        kept = KEEPS[self.keep]
        if not self.precision.copies_weights:
            # The last matmul, w2, does not run: backward does not need its result. Under autocast
            # it runs before torch notices that every saved tensor is there.
            kept = (*kept, "w2")
        launches = list(self._forward(kept))
        yield from launches[:-1]  # without the addition at the end of the block

    def _backward(self) -> Launches:
        """Yield a block's backward, from its end to its start."""
        (qkv, _), (d, width), (f, _) = self.shape.matrix_shapes_per_block[:3]
        c, n = self.precision.compute, self.tokens
        yield from self._both_gradients(f, d)  # w2
        if self.kernels == "fused":
            yield "swiglu_backward", 0, 6 * c * n * f
        else:
            yield "mul", 0, 3 * c * n * f
            yield "mul", 0, 3 * c * n * f
            yield "silu_backward", 0, 3 * c * n * f
        yield from self._both_gradients(d, f)  # w3
        yield from self._both_gradients(d, f)  # w1
        # Adds the gradients of the norm's output that come from w1 and from w3.
        yield "add", 0, 3 * c * n * d
        yield from self._norm_backward()
        yield from self._both_gradients(width, d)  # output
        yield self._attention_backward()
        yield from self._rope_backward()
        yield from self._both_gradients(d, qkv)
        yield from self._norm_backward()
        yield from self._unit_backward(self.shape.block_matrices)

    # -- operations of a block ---------------------------------------------------------------------

    def _matmul(self, inputs: int, outputs: int) -> Launch:
        """Return a matmul of n rows."""
        n, c = self.tokens, self.precision.compute
        # x and W are read, the result is written.
        elements = n * inputs + inputs * outputs + n * outputs
        return "mm", 2 * n * inputs * outputs, c * elements

    def _linear(self, name: str, inputs: int, outputs: int, kept: Sequence[str]) -> Launches:
        """Yield the cast of a linear layer's matrix, and its matmul unless the result was kept."""
        yield from self._cast(inputs * outputs)
        if name not in kept:
            yield self._matmul(inputs, outputs)

    def _both_gradients(self, inputs: int, outputs: int) -> Launches:
        """Yield the gradient of a matmul's weight, and that of its input.

        Under autocast, linear layers write the former in fp32.
        """
        name, flops, moved = self._matmul(inputs, outputs)
        wider_bytes = 0
        if self.precision.copies_weights:
            # The gradient of W is written in fp32, and not in the dtype of the computation.
            wider_bytes = (FP32 - self.precision.compute) * inputs * outputs
        yield name, flops, moved + wider_bytes
        yield name, flops, moved

    def _cast(self, weight: int) -> Launches:
        """Yield autocast's copy of a matrix.

        Args:
            weight: elements of the matrix.
        """
        if self.precision.copies_weights:
            yield "_to_copy", 0, (FP32 + self.precision.compute) * weight

    def _norm(self, adds: bool) -> Launches:
        """Yield RMSNorm of the residual stream.

        Args:
            adds: True if the result of a branch is added to the stream first.
        """
        nd, c, r = self.residual, self.precision.compute, self.precision.residual
        if self.kernels == "fused":
            if adds:
                # Branch and stream are read, in c and r bytes. The norm and the sum are written, in
                # c and r.
                yield "add_rms_norm", 0, 2 * (c + r) * nd
            else:
                yield "rms_norm", 0, (r + c) * nd
            return
        if self.shards is not None:  # the weight stays in fp32
            yield "_to_copy", 0, (FP32 + c) * self.shape.d_model
        if adds:
            yield self._add()
        yield "rms_norm", 0, (COMPOSITE_NORM if self.kernels == "composite" else 2 * r) * nd
        if r != c:
            yield "_to_copy", 0, (r + c) * nd

    def _norm_backward(self) -> Launches:
        """Yield RMSNorm's backward, and the sum with the gradient of the residual stream."""
        nd, c, r = self.residual, self.precision.compute, self.precision.residual
        if self.kernels == "fused":
            # Read: the norm's gradient (c), the stream and its gradient so far. Written: their sum
            # (r each).
            yield "rms_norm_backward", 0, (c + 3 * r) * nd
            return
        if r != c:
            yield "_to_copy", 0, (r + c) * nd
        # One kernel reads x and the gradient and writes that of x. The second, for the weight,
        # counts one more read.
        itemsizes = COMPOSITE_NORM_BACKWARD if self.kernels == "composite" else 4 * r
        yield "rms_norm_backward", 0, itemsizes * nd
        yield "add", 0, 3 * r * nd

    def _rope(self) -> Launches:
        """Yield the rotation of queries and keys in fp32: x·cos + roll(x)·sin."""
        c = self.precision.compute
        rotated = self._rotated
        if self.kernels == "fused":
            yield "rope", 0, 2 * c * rotated
            return
        yield "mul", 0, (c + FP32) * rotated
        yield "roll", 0, 2 * c * rotated
        yield "mul", 0, (c + FP32) * rotated
        yield "add", 0, 3 * FP32 * rotated
        if c != FP32:
            yield "_to_copy", 0, (FP32 + c) * rotated

    def _rope_backward(self) -> Launches:
        """Yield the rotation's backward, which also joins the gradients of q, k and v."""
        c = self.precision.compute
        rotated = self._rotated
        all_three = self.tokens * (self.shape.width + 2 * self.shape.kv_width)
        if self.kernels == "fused":
            yield "rope", 0, 2 * c * (rotated + all_three)
            return
        yield "roll", 0, 2 * c * rotated
        if c != FP32:
            for _ in range(3):
                yield "_to_copy", 0, (FP32 + c) * rotated
        yield "mul", 0, 2 * FP32 * rotated
        yield "roll", 0, 2 * c * rotated
        yield "mul", 0, 2 * FP32 * rotated
        yield "add", 0, 3 * FP32 * rotated
        yield "cat", 0, 2 * c * all_three
        yield "cat", 0, 2 * c * all_three

    @property
    def _rotated(self) -> int:
        """Elements of queries and keys."""
        return self.tokens * (self.shape.width + self.shape.kv_width)

    def _attention(self) -> Launch:
        """Return attention, which makes two matmuls. It reads q, k and v and writes the result."""
        # One fp32 number per token and head, which backward reads.
        log_sum_exp = FP32 * self.tokens * self.shape.heads
        return ATTENTION, 2 * self._flops_of_scores, self._attention_bytes + log_sum_exp

    def _attention_backward(self) -> Launch:
        """Return attention's backward, which makes five matmuls and also moves all gradients."""
        log_sum_exp = FP32 * self.tokens * self.shape.heads
        return ATTENTION, 5 * self._flops_of_scores, 2 * self._attention_bytes + log_sum_exp

    @property
    def _flops_of_scores(self) -> int:
        """FLOPs of one matmul over the causal half of the scores."""
        return self.tokens * self.context * self.sharing * self.shape.width

    @property
    def _attention_bytes(self) -> int:
        """Bytes of queries, keys, values and the result."""
        elements = self.tokens * (2 * self.shape.width + 2 * self.shape.kv_width)
        return self.precision.compute * elements

    def _swiglu(self) -> Launches:
        """Yield silu(w1 x)·w3 x."""
        nf, c = self.tokens * self.shape.inner, self.precision.compute
        if self.kernels == "fused":
            # Gate and up are read, the product is written.
            yield "swiglu", 0, 3 * c * nf
        else:
            yield "silu", 0, 2 * c * nf
            yield "mul", 0, 3 * c * nf

    def _add(self) -> Launch:
        """Return the addition of a branch to the residual stream."""
        # The branch and the stream are read, and the stream is written.
        return "add", 0, (self.precision.compute + 2 * self.precision.residual) * self.residual

    def _unit(self, weight: int) -> Launches:
        """Yield FSDP's cast of a unit's shard before a gather.

        Args:
            weight: elements of the unit.
        """
        if self.shards is not None:
            yield "_to_copy", 0, (FP32 + self.precision.compute) * weight // self.shards

    def _unit_backward(self, weight: int) -> Launches:
        """Yield FSDP's cast before the second gather, and the copy of gradients into the buffer.

        Args:
            weight: elements of the unit.
        """
        yield from self._unit(weight)
        if self.shards is not None:
            yield "_foreach_copy_", 0, (FP32 + self.precision.compute) * weight

    # -- the rest ----------------------------------------------------------------------------------

    def _ends_forward(self) -> Launches:
        """Yield the forward of embedding, final norm, head and loss."""
        shape = self.shape
        c, r, n = self.precision.compute, self.precision.residual, self.tokens
        if shape.has_embedding:
            yield "embedding", 0, r * (shape.embedding_parameters + n * shape.d_model)
        for _ in range(shape.vocabularies):
            yield from self._unit(shape.embedding_parameters)
        if not shape.has_head:
            return
        yield from self._norm(adds=False)
        yield from self._linear("head", shape.d_model, shape.words, kept=())
        logits = n * shape.words
        if self.fused_loss:
            yield "linear_cross_entropy", 0, 2 * c * logits
            yield from self._both_gradients(shape.d_model, shape.words)
            return
        if c != FP32:
            yield "_to_copy", 0, (FP32 + c) * logits
        # The parts of the loss, between which ranks that share the vocabulary combine one number
        # per token.
        if shape.tensor > 1:
            yield "amax", 0, FP32 * logits  # the largest
            yield "exp", 0, 2 * FP32 * logits  # the difference from it
            yield "exp", 0, 2 * FP32 * logits  # its exponential
            yield "sum", 0, FP32 * logits
        else:
            yield "_log_softmax", 0, 2 * FP32 * logits
            yield "nll_loss", 0, FP32 * logits

    def _ends_backward(self) -> Launches:
        """Yield the backward of loss, head, final norm and embedding."""
        shape = self.shape
        c, r, n = self.precision.compute, self.precision.residual, self.tokens
        if shape.has_head:
            # A fused loss has made these gradients in the forward.
            if not self.fused_loss:
                logits = n * shape.words
                yield "nll_loss_backward", 0, 2 * FP32 * logits
                yield "_log_softmax_backward", 0, 3 * FP32 * logits
                if shape.tensor > 1:
                    yield "add", 0, 3 * FP32 * logits
                if c != FP32:
                    yield "_to_copy", 0, (FP32 + c) * logits
                yield from self._both_gradients(shape.d_model, shape.words)
            yield from self._norm_backward()
        if shape.has_embedding:
            # FSDP looks up in a gathered copy in r bytes, and its gradient has that dtype.
            gradient_itemsize = r if self.shards is not None else FP32
            written = gradient_itemsize * shape.embedding_parameters
            yield "embedding_backward", 0, written + r * n * shape.d_model
        for _ in range(shape.vocabularies):
            yield from self._unit_backward(shape.embedding_parameters)

    def _update(self) -> Launches:
        """Yield the update, which reads and writes parameters, gradients and state in fp32.

        AdamW reads parameter, gradient and two moments, and by the schema of torch's operator
        writes all four: 8 numbers. Muon has one moment of a matrix, and also its update in fp32 and
        bf16.
        """
        blocks = self.shape.num_layers
        updated_by_muon = 0
        if self.optimizer == "muon":
            for rows, columns in self.shape.matrix_shapes_per_block:
                elements = blocks * rows * columns
                updated_by_muon += elements
                yield (
                    "orthogonalize",
                    blocks * orthogonalize_flops(rows, columns),
                    14 * FP32 * elements,
                )
        updated_by_adamw = self.shape.num_parameters - updated_by_muon
        yield "_fused_adamw_", 0, 8 * FP32 * updated_by_adamw


def _in_phase(phase: str, launches: Launches) -> Iterator[Compute]:
    """Yield launches as operators of one phase."""
    for name, flops, moved in launches:
        yield Compute(name, flops, moved, phase)
