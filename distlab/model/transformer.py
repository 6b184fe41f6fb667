"""A decoder-only Transformer language model, with guarantees for the strategies that wrap it.

    tokens_BT → embedding → N × [ x + attention(norm(x)); x + swiglu(norm(x)) ] → norm → head →
    logits_BTV

A strategy may rely on these properties, and tests check them:

- *Registration order is execution order*, so that gradients become ready in exactly the reverse of
  `parameters()`: buckets filled backwards leave in the order in which they are complete.
- *No buffers.* The rotary tables are computed once per forward and passed to the blocks. torch DDP
  broadcasts buffers on every forward, which would be communication that no strategy asked for.
- *Blocks are the children of one `nn.ModuleList`* named `blocks`, the unit that sharding gathers.
  Every parameter is used by the `forward` of the module that owns it.
- *Initialisation depends on the seed alone*, never on the rank or on what was drawn before.

Shapes: `B` batch, `T` sequence, `d` d_model, `f` d_ff, `H` heads, `K` heads of keys and values, `D`
= d/H, `V` vocabulary. The model knows no ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distlab.model.config import Checkpointing, ModelConfig, checkpoint_segments, kept_levels
from distlab.model.ops import Ops, PutOff, get_ops, linear, linear_with_late_weight, rope_tables
from distlab.model.recompute import contexts


class Split(NamedTuple):
    """Rule by which ranks share a matrix.

    Attributes:
        dim: dimension to cut.
        sizes: sizes of the parts of this dimension, each of which is cut equally, in units.
        unit: number of rows of a unit.
        what: name of the units, for messages.
    """

    dim: int
    sizes: tuple[int, ...]
    unit: int
    what: str


class Linear(nn.Linear):
    """Layer `nn.Linear` without bias whose weight is left as it is allocated.

    The model draws all parameters itself. torch's own initialisation, thrown away a moment later,
    would take tens of seconds for 3.4 B parameters on a CPU core, and would move the global
    generator.
    """

    multiply = staticmethod(linear)

    def __init__(self, inputs: int, outputs: int, **factory) -> None:
        super().__init__(inputs, outputs, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight)

    def reset_parameters(self) -> None:
        """Do nothing. The values are drawn by `TransformerLM.reset_parameters`."""


class Head(Linear):
    """Logits `(..., d) -> (..., V)`; with targets `(...)` their mean cross-entropy, by `ops`.

    The loss is computed here because a sharded weight is whole only while this forward runs.
    """

    def __init__(self, inputs: int, outputs: int, ops: Ops, **factory) -> None:
        super().__init__(inputs, outputs, **factory)
        self.ops = ops

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.ops.logits(x, self.weight)
        return self.ops.linear_cross_entropy(x, self.weight, targets)


class Embedding(nn.Embedding):
    """Layer `nn.Embedding` left as it is allocated, like `Linear`, and looked up by `ops`."""

    def __init__(self, rows: int, width: int, ops: Ops, **factory) -> None:
        super().__init__(rows, width, **factory)
        self.ops = ops

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ops.embedding(tokens, self.weight)

    def reset_parameters(self) -> None:
        """Do nothing. The values are drawn by `TransformerLM.reset_parameters`."""


class RMSNorm(nn.Module):
    """RMSNorm, `(..., d) -> (..., d)`. Under autocast the output has autocast's dtype.

    With a second tensor, `(x, residual) -> (norm(x + residual), x + residual)`.
    """

    # FSDP reads this: the fp32 weight may be used with inputs in another dtype, which outputs keep.
    takes_mixed_dtypes = True

    def __init__(self, width: int, eps: float, ops: Ops, **factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **factory))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions, `(B, T, d) -> (B, T, d)`."""

    def __init__(self, config: ModelConfig, ops: Ops, **factory) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.ops = ops
        self.qkv = Linear(config.d_model, config.d_model + 2 * config.kv_width, **factory)
        self.output = Linear(config.d_model, config.d_model, **factory)

    def forward(self, x_BTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv_BTHD = self.qkv(self.ops.enter(x_BTd)).unflatten(-1, (-1, self.head_dim))
        # Numbers of heads on this rank. Ranks of tensor parallelism share the heads.
        # For each head of keys there are H/K heads of queries, one of keys and one of values.
        K = qkv_BTHD.shape[2] // (self.num_heads // self.kv_heads + 2)
        H = qkv_BTHD.shape[2] - 2 * K
        # Rotating queries and keys together takes half the launches. A single split takes a single
        # concatenation in backward.
        qk_BHTD, v_BKTD = qkv_BTHD.transpose(1, 2).split([H + K, K], dim=1)
        q_BHTD, k_BKTD = self.ops.rope(qk_BHTD, cos, sin).split([H, K], dim=1)
        out_BHTD = self.ops.attention(q_BHTD, k_BKTD, v_BKTD)
        return self.ops.leave(self.output(out_BHTD.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU, w2(silu(w1 x) · w3 x), `(B, T, d) -> (B, T, d)`.

    The matrices are registered in the order of execution: w1, w3, w2.
    """

    def __init__(self, config: ModelConfig, ops: Ops, **factory) -> None:
        super().__init__()
        self.ops = ops
        self.w1 = Linear(config.d_model, config.d_ff, **factory)
        self.w3 = Linear(config.d_model, config.d_ff, **factory)
        self.w2 = Linear(config.d_ff, config.d_model, **factory)

    def forward(self, x_BTd: Tensor) -> Tensor:
        x_BTd = self.ops.enter(x_BTd)
        return self.ops.leave(self.w2(self.ops.swiglu(self.w1(x_BTd), self.w3(x_BTd))))


class Block(nn.Module):
    """One pre-norm layer, `(B, T, d) -> (B, T, d)`. cos and sin are the rotary tables, `(T, D)`.

    `keep`, an entry of `config.RECOMPUTATION`, names the tensors to keep for backward.
    Recomputation begins and ends inside this forward, so code that a strategy or torch.compile
    wraps around a block (gathering, casts) is not repeated.
    """

    def __init__(self, config: ModelConfig, ops: Ops, **factory) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, ops, **factory)
        self.attention = Attention(config, ops, **factory)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps, ops, **factory)
        self.feed_forward = FeedForward(config, ops, **factory)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTd: Tensor, cos: Tensor, sin: Tensor, keep: str = "none") -> Tensor:
        if keep == "none":
            return self._layer(x_BTd, cos, sin)
        # Only dropout draws random numbers, and saving the generators' states takes time.
        draws = self.dropout.p > 0
        if keep == "block":
            return checkpoint(
                self._layer, x_BTd, cos, sin, use_reentrant=False, preserve_rng_state=draws
            )
        return checkpoint(
            self._layer,
            x_BTd,
            cos,
            sin,
            use_reentrant=False,
            preserve_rng_state=draws,
            context_fn=partial(contexts, keep),
        )

    def _layer(self, x_BTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        branch_BTd = self.dropout(self.attention(self.attention_norm(x_BTd), cos, sin))
        # The norm also returns the sum: with a fused kernel, adding costs no pass of its own.
        normed_BTd, x_BTd = self.feed_forward_norm(branch_BTd, x_BTd)
        return x_BTd + self.dropout(self.feed_forward(normed_BTd))


class TransformerLM(nn.Module):
    """The language model of this lab.

    Args:
        config: shape and implementations of the model.
        device: device to make the parameters on (`None`: torch's default device). On `"meta"`
            nothing is allocated. `.to_empty(device=…)` followed by `.reset_parameters(seed)` then
            gives the same values as direct construction.
        dtype: dtype of the parameters (`None`: torch's default).
        seed: integer that fixes the initial parameters.
        checkpoint_blocks: recomputation in backward instead of keeping activations. False or
            `none`; True or `block` for each block by itself; 4 or `every-4` for groups of four,
            `every-8-2` for groups of eight with groups of two inside;
            `attention` and others for what each block keeps (`config.kept_levels`). It may be
            changed later through the attribute of this name.

    Dropout draws from torch's global generator: seed that one per rank.

    Attributes:
        num_blocks: number of blocks of the whole model, also if a rank of a pipeline keeps only
            some (`keep_blocks`).
        width: width of the residual stream.

    Raises:
        ValueError: from `forward`, for tokens that are not `(B, T)` or longer than
            `context_length`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        checkpoint_blocks: Checkpointing = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = checkpoint_blocks
        factory = {"device": device, "dtype": dtype}
        ops = get_ops(config.attention, config.ops)
        self.embedding = Embedding(config.vocab_size, config.d_model, ops, **factory)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, ops, **factory) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps, ops, **factory)
        self.head = Head(config.d_model, config.vocab_size, ops, **factory)
        self._tie()
        self.num_blocks = config.num_layers
        self.width = config.d_model
        # Of the whole model: `reset_parameters` also draws the values of blocks that are dropped.
        self._shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        self.reset_parameters(seed)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        x: Tensor | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """Return next-token logits `(B, T, V)`, in autocast's dtype or the parameters'.

        With targets `(B, T)` return the mean cross-entropy, a scalar. The config's `ops` decide
        whether all logits are in memory for it.

        Args:
            x: output of the blocks before `blocks`, `(B, T, d)`.
            blocks: numbers of the blocks to run, by default all. Without the last block the result
                is the output of the blocks, `(B, T, d)`.
        """
        if tokens_BT.ndim != 2 or tokens_BT.shape[1] > self.config.context_length:
            raise ValueError(
                f"tokens of shape {tuple(tokens_BT.shape)}: expected (batch, sequence) with "
                f"sequence at most context_length={self.config.context_length}; cut it, or raise "
                "context_length in the config"
            )
        config = self.config
        blocks = range(config.num_layers) if blocks is None else blocks
        positions_T = self.operations().positions(tokens_BT.shape[1], tokens_BT.device)
        cos, sin = rope_tables(positions_T, config.head_dim, config.rope_theta)
        x_BTd = self.dropout(self.embedding(tokens_BT)) if x is None else x
        choice = self.checkpoint_blocks if torch.is_grad_enabled() else "none"
        # Without gradients nothing is kept, and so nothing is recomputed.
        levels = kept_levels(choice, config.num_layers)
        # A rank of a pipeline has only some of the blocks, under their numbers in the whole model.
        block_by_number = dict(self.blocks.named_children())
        running = [(block_by_number[str(number)], levels[number]) for number in blocks]
        x_BTd = _run_blocks(running, checkpoint_segments(choice), x_BTd, cos, sin)
        if blocks.stop < config.num_layers:
            return x_BTd
        x_BTd = self.norm(x_BTd)
        if targets_BT is None:
            return self.head(x_BTd)
        return self.head(x_BTd, targets_BT)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Redraw every parameter from a separate generator on the parameters' device.

        Matrices are normal with std 0.02, the two projections that write to the residual stream
        with 0.02/√(2·num_layers) (Radford et al. 2019, GPT-2), norms are ones. The normal is not
        truncated: beyond three standard deviations there are values of 0.06, which do no harm,
        while cutting them costs several more passes over billions of elements. Equal seeds give
        equal bits on one kind of device, whatever the world size or rank. CPU and CUDA generators
        differ from each other. On meta nothing happens. If a rank keeps only some blocks, the
        values of the others are drawn and dropped.
        """
        held = {}
        for name, parameter in self.named_parameters():
            # torch.compile puts a module of this name around a block
            held[name.replace("_orig_mod.", "")] = parameter
        first = next(iter(held.values()))
        device, dtype = first.device, first.dtype
        if device.type == "meta":
            return
        # A generator of its own, so that neither the global one nor what was drawn before matters.
        generator = torch.Generator(device=device).manual_seed(seed)
        # 2·L branches add to the stream. Their variances add up to that of one with 0.02.
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, shape in self._shapes.items():
            parameter = held.get(name)
            if len(shape) == 1:  # a norm
                if parameter is not None:
                    parameter.fill_(1.0)
                continue
            if parameter is None:
                # Drawn and dropped: the generator must move as on a rank that has this block.
                parameter = torch.empty(shape, dtype=dtype, device=device)
            writes_residual = name.endswith(("attention.output.weight", "feed_forward.w2.weight"))
            std = residual_std if writes_residual else 0.02
            parameter.normal_(0.0, std, generator=generator)

    def splits(self) -> dict[str, Split]:
        """Return name → `Split` of each matrix that ranks can share. Vectors stay whole.

        A tied matrix has one entry.
        """
        config = self.config
        width = config.head_dim
        query_heads = (config.num_heads,)
        qkv_heads = (config.num_heads, config.kv_heads, config.kv_heads)
        columns = Split(0, (config.d_ff,), 1, "columns of the feed-forward layer")
        # Column-parallel matrices are cut by outputs (dimension 0), row-parallel ones by inputs
        # (1). Source: Shoeybi et al. 2019, "Megatron-LM", sec. 3.
        rows_of = {
            "attention.qkv": Split(0, qkv_heads, width, "attention heads"),
            "attention.output": Split(1, query_heads, width, "attention heads"),
            "feed_forward.w1": columns,
            "feed_forward.w3": columns,
            "feed_forward.w2": columns._replace(dim=1),
        }
        vocabulary = Split(0, (config.vocab_size,), 1, "words of the vocabulary")
        found = {"embedding.weight": vocabulary, "head.weight": vocabulary}
        # A head that is tied to the embedding is not among them.
        names = [name for name, _ in self.named_parameters()]
        for name in names:
            # The last two parts before `weight`, which are the same in a compiled block.
            layer = ".".join(name.split(".")[-3:-1])
            if layer in rows_of:
                found[name] = rows_of[layer]
        return {name: found[name] for name in names if name in found}

    def keep_blocks(self, kept: Sequence[range]) -> None:
        """Keep the part of the model that a rank of a pipeline has: some blocks.

        The embedding stays with the first block, norm and head with the last. The parameters keep
        the names of the whole model.

        Raises:
            ValueError: the head shares the embedding's matrix (`tie_embeddings`). The first stage
                and the last would each need it.
        """
        numbers: set[int] = set()
        for blocks in kept:
            numbers.update(blocks)
        has_first = 0 in numbers
        has_last = self.config.num_layers - 1 in numbers
        if self.config.tie_embeddings:
            raise ValueError(
                "pipeline: the head shares the embedding's matrix, and they are on different "
                "ranks: set tie_embeddings to False"
            )
        for number in set(range(self.config.num_layers)) - numbers:
            # `del self.blocks[number]` would renumber the others.
            del self.blocks._modules[str(number)]
        if not has_first:
            # None, and not deleted: `forward` and wrappers still find the attribute.
            self.embedding = None
        if not has_last:
            self.norm = self.head = None

    def put_off_weights(self, put_off: PutOff) -> None:
        """Let backward hand over each weight of the blocks instead of making its gradient.

        The tensors that make the gradient are handed over with it.

        Raises:
            ValueError: blocks recompute. The inputs of their matrices would then stay longer than
                the activations that were kept.
        """
        if checkpoint_segments(self.checkpoint_blocks):
            raise ValueError(
                "zero-bubble keeps the inputs of matrices until their gradients are made, and "
                "recomputation exists to keep them shorter: take 1f1b or interleaved, or no "
                "recomputation"
            )
        for module in self.blocks.modules():
            if isinstance(module, Linear):
                module.multiply = partial(linear_with_late_weight, put_off=put_off)

    def replace_ops(self, **operations: Callable) -> None:
        """Replace operations, by their names in `Ops`, in every module that has them."""
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = replace(module.ops, **operations)

    def operations(self) -> Ops:
        """Return the operations that the modules call."""
        return next(module.ops for module in self.modules() if hasattr(module, "ops"))

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def _apply(self, fn, recurse: bool = True):
        # Leaving meta (`to_empty`) makes a new Parameter per owner, which would untie the head.
        super()._apply(fn, recurse)
        self._tie()
        return self


def _run_blocks(
    blocks: Sequence[tuple[Block, str]],
    segments: Sequence[int],
    x_BTd: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Run the blocks in order.

    Args:
        blocks: (block, entry of `RECOMPUTATION` that says what it keeps) in order.
        segments: numbers of blocks that backward recomputes together, see `checkpoint_segments`.
        x_BTd: input of the first block.
        cos: rotary table.
        sin: rotary table.
    """
    if not segments or segments[0] == 1:
        for block, keep in blocks:
            x_BTd = block(x_BTd, cos, sin, keep if segments else "none")
        return x_BTd
    size, *sizes_inside = segments
    for start in range(0, len(blocks), size):
        segment = blocks[start : start + size]
        x_BTd = checkpoint(_run_blocks, segment, sizes_inside, x_BTd, cos, sin, use_reentrant=False)
    return x_BTd
