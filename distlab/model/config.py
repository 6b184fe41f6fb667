"""Model sizes by name, checked when they are made, and the options of commands that run a model.

The names and (d_model, d_ff, layers, heads) come from the course handouts (Stanford CS336). They
fix the shape, not the parameter count: with SwiGLU's three matrices the "10B" shape has 12.8
billion parameters, so commands print `ModelConfig.num_parameters` instead of the name.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from distlab.options import Options, option, unknown
from distlab.precision import DTYPES

ATTENTION_CHOICES = ("naive", "sdpa", "flash", "auto")
OPS_CHOICES = ("torch", "triton", "auto")
COMPILE_CHOICES = ("off", "model", "blocks")

# Tensors that a block keeps for backward, from the least memory to the most. Each level also keeps
# the tensors of the levels before it.
KEPT = (
    "block",  # the input of the block
    "attention",  # attention's output, with the log-sum-exp
    "output",  # the output projection's result
    "qkv",  # queries, keys and values before rotation
    "gate-up",  # SwiGLU's gate and up
    "none",  # everything: nothing is recomputed
)
# "selective" is outside of this order: attention's output and every other matmul's result
# (torchtitan's policy "op").
RECOMPUTATION = (*KEPT, "selective")

# Bytes of a sequence's logits in fp32 above which the loss is computed in the head.
LOGITS_AT_ONCE = 2 * 2**30
LOGITS_CHUNK = 512 * 2**20  # bytes of logits that the head then holds at a time

Checkpointing = bool | int | str


def kept_levels(choice: Checkpointing, num_layers: int) -> tuple[str, ...]:
    """Return for each block what it keeps for backward, an entry of `RECOMPUTATION`.

    The rest is recomputed.

    Args:
        choice: entry of `RECOMPUTATION` for all blocks, or several with their numbers of blocks,
            `qkv:25,gate-up:9`, in this order. Groups of blocks (see `checkpoint_segments`)
            recompute every block: `block`.

    Raises:
        ValueError: neither of these, or numbers that do not add up to `num_layers`.
    """
    if not (isinstance(choice, str) and ":" in choice):
        if not checkpoint_segments(choice):
            level = "none"
        elif choice in RECOMPUTATION:
            level = choice
        else:
            level = "block"
        return (level,) * num_layers
    levels: list[str] = []
    is_valid = True
    for part in choice.split(","):
        level, _, number = part.partition(":")
        count = int(number) if number.isdecimal() else 0
        is_valid = is_valid and level in RECOMPUTATION and count > 0
        if len(levels) + count > num_layers:
            is_valid = False
            break  # the number may be so large that a list of it takes all memory
        levels += [level] * count
    if not is_valid or len(levels) != num_layers:
        raise ValueError(
            f"checkpointing {choice!r}: give LEVEL:BLOCKS, several with commas, whose numbers add "
            f"up to the {num_layers} blocks of the model; levels are {', '.join(RECOMPUTATION)}"
        )
    return tuple(levels)


def checkpoint_segments(choice: Checkpointing) -> tuple[int, ...]:
    """Return the numbers of consecutive blocks that backward recomputes together.

    There is one number for each level of segments, the outermost first. No number: nothing is
    recomputed.

    Args:
        choice: `none` or False: all activations are kept, (). `block` or True: each block by
            itself, (1,). The choices that keep something of each block, see `kept_levels`, also
            give (1,). `every-4` or 4: groups of four blocks, of which only the input is kept, (4,).
            `every-8-2`: groups of eight that are recomputed in groups of two, (8, 2).

    Raises:
        ValueError: anything else.
    """
    if choice in (False, "none"):
        return ()
    if isinstance(choice, str) and (choice in RECOMPUTATION or ":" in choice):
        return (1,)
    if not isinstance(choice, str):
        sizes = [choice]
    elif re.fullmatch(r"every(-[0-9]+)+", choice):
        sizes = [int(size) for size in choice.split("-")[1:]]
    else:
        sizes = []
    shrinks = all(inner < outer for outer, inner in itertools.pairwise(sizes))
    if not sizes or not shrinks or not isinstance(sizes[-1], int) or sizes[-1] < 1:
        others = [name for name in RECOMPUTATION if name not in ("block", "none")]
        raise ValueError(
            f"checkpointing {choice!r}: choose none, block, every-K with K blocks per group, "
            f"every-K-J with smaller groups of J inside, or what blocks keep: {', '.join(others)}"
        )
    return tuple(int(size) for size in sizes)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only Transformer language model.

    Args:
        d_model: width of the residual stream.
        d_ff: inner width of SwiGLU (each of its three matrices is d_model × d_ff).
        num_layers: number of blocks.
        num_heads: number of attention heads. It must divide d_model into heads of even width (RoPE
            rotates pairs).
        num_kv_heads: number of heads of keys and values, each shared by an equal number of query
            heads (grouped-query attention, Ainslie et al. 2023). It must divide num_heads. None:
            num_heads.
        vocab_size: number of rows of the token embedding and of the head.
        context_length: number of tokens of the longest sequence that `forward` accepts.
        rope_theta: base of the rotary frequencies (Su et al. 2021, RoFormer; 10,000 there).
        tie_embeddings: True if the head uses the embedding's matrix.
        norm_eps: number added to the mean square inside RMSNorm.
        dropout: probability of dropping an element of the embedding and of each block's two
            outputs.
        attention: name of its implementation, see `distlab.model.ops.get_ops`.
        ops: implementation of the other operations: `torch`, this lab's `triton` kernels, or
            `auto`.

    Raises:
        ValueError: a value outside its range. The message says what was given, what is allowed and
            what to do.
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    context_length: int = 512
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attention: str = "sdpa"
    ops: str = "torch"
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        sizes = ["d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length"]
        if self.num_kv_heads is not None:
            sizes.append("num_kv_heads")
        for name in sizes:
            value = getattr(self, name)
            # `True` is an int in Python.
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a positive integer; give 1 or more")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of num_heads={self.num_heads}; "
                "choose num_heads among the divisors of d_model"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}: "
                "heads of queries share those of keys and values evenly; choose num_kv_heads among "
                "the divisors of num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"d_model={self.d_model} / num_heads={self.num_heads}: heads of odd width "
                f"{self.head_dim}, but RoPE rotates pairs of elements; choose num_heads so that "
                "the width is even"
            )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(
                    f"{name}={value!r}: must be positive; leave it out for the default"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout!r}: must be in [0, 1); give 0 for none")
        for name, allowed in (("attention", ATTENTION_CHOICES), ("ops", OPS_CHOICES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(allowed)}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head, d_model / num_heads."""
        return self.d_model // self.num_heads

    @property
    def loss_in_head(self) -> bool:
        """True if the head computes the loss, in chunks, without all logits at a time.

        With torch's operations and few logits the loss is computed outside. In the head, FSDP would
        also keep the head's weight.
        """
        # 4 bytes per logit in fp32. The batch is not known here, so one sequence decides.
        return self.ops != "torch" or 4 * self.context_length * self.vocab_size > LOGITS_AT_ONCE

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.kv_heads * self.head_dim

    def sizes(self, batch: int) -> dict[str, int]:
        """Return arguments for `distlab.theory.flops`, for a step of `batch` sequences."""
        return {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "num_layers": self.num_layers,
            "kv_width": self.kv_width,
            "batch": batch,
            "context": self.context_length,
        }

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, with a tied matrix counted once.

        Embedding V·d; per block 2·d² + 2·d·k (fused qkv d² + 2·d·k with keys of width k, output
        d²), 3·d·f (SwiGLU) and 2·d (norms); final norm d; head V·d unless it is tied.
        """
        d, f, vocabulary = self.d_model, self.d_ff, self.vocab_size
        block = 2 * d * d + 2 * d * self.kv_width + 3 * d * f + 2 * d
        head = 0 if self.tie_embeddings else vocabulary * d
        return vocabulary * d + self.num_layers * block + d + head


PRESETS: dict[str, ModelConfig] = {
    # About 80 ms per training step (batch 4, AdamW) on one CPU core; the others are meant for a
    # GPU.
    "tiny": ModelConfig(128, 512, 4, 4, context_length=64),
    "small": ModelConfig(768, 3072, 12, 12),
    "medium": ModelConfig(1024, 4096, 24, 16),
    "large": ModelConfig(1280, 5120, 36, 20),
    "xl": ModelConfig(2560, 10240, 32, 32),
    "10B": ModelConfig(4608, 12288, 50, 36),
    "gpt2-xl": ModelConfig(1600, 6400, 48, 25),
    # Of the 2026 leaderboard of the course (8.1 billion parameters), and of Llama 3 (Grattafiori et
    # al. 2024, table 3).
    "8B": ModelConfig(4096, 11008, 34, 32, vocab_size=151_936, context_length=32_768),
    "llama-8B": ModelConfig(
        4096,
        14336,
        32,
        32,
        num_kv_heads=8,
        vocab_size=128_256,
        context_length=8192,
        rope_theta=500_000.0,
    ),
    "llama-70B": ModelConfig(
        8192,
        28672,
        80,
        64,
        num_kv_heads=8,
        vocab_size=128_256,
        context_length=8192,
        rope_theta=500_000.0,
    ),
    "llama-405B": ModelConfig(
        16_384,
        53_248,
        126,
        128,
        num_kv_heads=8,
        vocab_size=128_256,
        context_length=8192,
        rope_theta=500_000.0,
    ),
    # Llama 2 (Touvron et al. 2023), and models for plans of many hosts. GPT-3's two matrices of d ×
    # 4d have the parameters and FLOPs of three of d × 8d/3.
    "llama2-7B": ModelConfig(4096, 11008, 32, 32, vocab_size=32_000, context_length=4096),
    "llama2-13B": ModelConfig(5120, 13824, 40, 40, vocab_size=32_000, context_length=4096),
    "100B": ModelConfig(
        10_240, 27_648, 92, 80, num_kv_heads=8, vocab_size=128_256, context_length=8192
    ),
    "gpt3-175B": ModelConfig(
        12_288, 32_768, 96, 96, vocab_size=51_200, context_length=2048, tie_embeddings=True
    ),
}


def preset(name: str, **overrides: object) -> ModelConfig:
    """Return a preset with some fields replaced: `preset("xl", context_length=1024)`.

    None keeps a field.

    Raises:
        ValueError: no such preset or no such field (the message lists them), or an override out of
            range.
    """
    if name not in PRESETS:
        raise ValueError(f"model size {unknown(name, PRESETS)}")
    known = [field.name for field in fields(ModelConfig)]
    for key in overrides:
        if key not in known:
            raise ValueError(f"model option {unknown(key, known)}")
    given = {key: value for key, value in overrides.items() if value is not None}
    return replace(PRESETS[name], **given)


def model_of(sizes: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a mapping with the fields of `ModelConfig`.

    `context` is also allowed for `context_length`.

    Raises:
        ValueError: an unknown field, a missing one, or a value out of range.
    """
    given = dict(sizes)
    if "context" in given:
        given["context_length"] = given.pop("context")
    known = [field.name for field in fields(ModelConfig)]
    required = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
    missing = [name for name in required if name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        raise ValueError(
            f"a model takes {', '.join(known)}; {missing or 'nothing'} is missing and "
            f"{unknown or 'nothing'} is unknown"
        )
    return ModelConfig(**given)


@dataclass(frozen=True)
class ModelChanges(Options):
    """Changes to a preset and the implementation: options of commands that run or predict a model.

    Args:
        context: number of tokens per sequence.
        vocab: number of entries of the vocabulary.
        d_model: field of `ModelConfig`, like the next four. None keeps the preset's.
        d_ff: inner width of SwiGLU.
        layers: number of blocks.
        heads: number of attention heads.
        kv_heads: number of heads of keys and values.
        attention: name of the implementation of attention, see `distlab.model.ops.get_ops`.
        ops: name of the implementation of the other operations.
        compile: `off`, the whole `model` as one graph, or the `blocks` one by one.
    """

    context: int | None = option(None, "tokens per sequence (default: the preset's)", minimum=1)
    vocab: int | None = option(None, "entries of the vocabulary (default: the preset's)", minimum=1)
    d_model: int | None = option(None, "width of the model (default: the preset's)", minimum=1)
    d_ff: int | None = option(None, "inner width of SwiGLU (default: the preset's)", minimum=1)
    layers: int | None = option(None, "number of blocks (default: the preset's)", minimum=1)
    heads: int | None = option(None, "number of attention heads (default: the preset's)", minimum=1)
    kv_heads: int | None = option(
        None, "number of heads of keys and values (default: the preset's)", minimum=1
    )
    attention: str = option(
        "sdpa",
        "attention: naive, torch's sdpa, flash (this lab's kernel), or auto: the faster",
        choices=ATTENTION_CHOICES,
    )
    ops: str = option(
        "torch",
        "operations: torch, triton (this lab's kernels, also AdamW), or auto: the faster of each",
        choices=OPS_CHOICES,
    )
    compile: str = option(
        "off", "compilation: off, the model as one graph, or its blocks", choices=COMPILE_CHOICES
    )

    def dimensions(self) -> dict[str, int]:
        """Return the fields of `ModelConfig` that were given."""
        given = {
            "context_length": self.context,
            "vocab_size": self.vocab,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
        }
        return {name: value for name, value in given.items() if value is not None}

    def changed(self, base: ModelConfig) -> ModelConfig:
        """Return `base` with the options that were given.

        Raises:
            ValueError: dimensions that do not go together.
        """
        return replace(base, attention=self.attention, ops=self.ops, **self.dimensions())


@dataclass(frozen=True)
class ModelOptions(ModelChanges):
    """The model of a command, and its dtype and recomputation.

    Args:
        size: name of a preset, which the other options change.
        dtype: `fp32`, or `bf16`/`fp16` computation over fp32 parameters (fp16 with a loss scale in
            training).
        checkpointing: activations to recompute in backward, see `checkpoint_segments` and
            `kept_levels`. `auto` recomputes as little as the memory allows, see
            `distlab.train.memory_budget`.

    Raises:
        ValueError: a value that is not allowed. The message says what is.
    """

    size: str = option("tiny", f"model preset: {', '.join(PRESETS)}", choices=tuple(PRESETS))
    dtype: str = option(
        "fp32",
        "dtype of the computation: fp32, or bf16 or fp16 over fp32 parameters",
        choices=tuple(DTYPES),
    )
    checkpointing: str = option(
        "none",
        "activations that backward recomputes: none, each block, every-K, every-K-J; each block "
        "except its attention, output, qkv or gate-up and those before it in this list, or "
        "(selective) its attention and every other matmul; or auto: as many as memory requires",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.model()
        if self.checkpointing != "auto":
            kept_levels(self.checkpointing, model.num_layers)

    def base(self) -> ModelConfig:
        """Return the preset."""
        return PRESETS[self.size]

    def model(self) -> ModelConfig:
        """Return the preset with the overrides."""
        return self.changed(self.base())
