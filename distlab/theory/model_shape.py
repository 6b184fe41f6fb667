"""The numbers of a decoder-only Transformer that every formula of this folder starts from.

Theory is given numbers, not models: `ModelShape` holds the widths, and `ModelShape.of(config)` copies them from
anything that has attributes of these names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from distlab.theory.checks import at_least_one


@dataclass(frozen=True)
class ModelShape:
    """Pre-norm blocks of attention (fused qkv, output) and SwiGLU (three matrices), no biases.

    Args:
        d_model: d, width of the residual stream.
        d_ff: f, inner width of the feed-forward block.
        num_layers: L, blocks.
        num_heads: H; must divide d.
        vocab_size: V, rows of the embedding and of the head.
        tie_embeddings: whether the head uses the embedding's matrix.
        num_kv_heads: heads of keys and values, each shared by H/this many heads of queries (Ainslie et al. 2023,
            "GQA"); None for one each. Must divide H.

    Raises:
        ValueError: a size below one, or heads that do not divide the width (with the nearest that do).
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int
    tie_embeddings: bool = False
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        sizes = {name: size for name, size in vars(self).items() if name != "tie_embeddings" and size is not None}
        at_least_one(**sizes)
        if self.d_model % self.num_heads:
            near = min(divisors(self.d_model), key=lambda heads: abs(heads - self.num_heads))
            raise ValueError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}; the nearest that does is {near}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; choose one of "
                f"{', '.join(map(str, divisors(self.num_heads)))}"
            )

    @staticmethod
    def of(config: Any) -> "ModelShape":
        """The shape of any object with attributes of these names, such as a model's configuration."""
        known = {field.name: getattr(config, field.name, None) for field in fields(ModelShape)}
        return ModelShape(**known)

    @property
    def kv_width(self) -> int:
        """Width of all keys, and of all values: d without grouped queries."""
        return self.d_model * (self.num_kv_heads or self.num_heads) // self.num_heads

    @property
    def matrices_per_block(self) -> tuple[int, ...]:
        """Elements of the matrices of one block in the order in which they run: qkv, output, w1, w3, w2."""
        return tuple(map(math.prod, self.matrix_shapes_per_block))

    @property
    def matrix_shapes_per_block(self) -> tuple[tuple[int, int], ...]:
        """Their shapes, (outputs, inputs)."""
        d, f = self.d_model, self.d_ff
        return ((d + 2 * self.kv_width, d), (d, d), (f, d), (f, d), (d, f))

    @property
    def block_parameters(self) -> int:
        """2·d·(d + kv_width) + 3·d·f + 2·d: matrices and two norms."""
        return sum(self.matrices_per_block) + 2 * self.d_model

    @property
    def embedding_parameters(self) -> int:
        """V·d; the head has as many, or none of its own if tied."""
        return self.vocab_size * self.d_model

    @property
    def num_parameters(self) -> int:
        """All distinct parameters: embeddings (once or twice V·d), L blocks, final norm d."""
        copies = 1 if self.tie_embeddings else 2
        return copies * self.embedding_parameters + self.num_layers * self.block_parameters + self.d_model

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of every parameter in registration order, a tied one once."""
        qkv, output, w1, w3, w2 = self.matrix_shapes_per_block
        norm, embedding = (self.d_model,), (self.vocab_size, self.d_model)
        block = [norm, qkv, output, norm, w1, w3, w2]
        head = [] if self.tie_embeddings else [embedding]
        return [embedding, *(block * self.num_layers), norm, *head]

    def parameter_numels(self) -> list[int]:
        """Elements of every parameter in registration order, a tied one once."""
        return [math.prod(shape) for shape in self.parameter_shapes()]


@dataclass(frozen=True)
class Model(ModelShape):
    """A `ModelShape` with the tokens of a sequence, for a planner that builds no model."""

    context_length: int = 512

    def sizes(self, batch: int) -> dict[str, int]:
        """What the functions of `distlab.theory.flops` take, for a step of `batch` sequences."""
        names = ("d_model", "d_ff", "num_layers", "vocab_size", "kv_width")
        return {name: getattr(self, name) for name in names} | {"batch": batch, "context": self.context_length}


MODELS = {
    # The 8 B model of this lab's long runs, and published ones by their papers and configuration files.
    "8B": Model(4096, 11008, 34, 32, 151_936, context_length=8192),
    "llama3-8b": Model(4096, 14336, 32, 32, 128_256, num_kv_heads=8, context_length=8192),
    "llama3-70b": Model(8192, 28672, 80, 64, 128_256, num_kv_heads=8, context_length=8192),
    "llama2-7b": Model(4096, 11008, 32, 32, 32_000, context_length=4096),
    "llama2-13b": Model(5120, 13824, 40, 40, 32_000, context_length=4096),
    "100B": Model(10_240, 27_648, 92, 80, 128_256, num_kv_heads=8, context_length=8192),
    # Two matrices of d × 4d have the parameters and FLOPs of three of d × 8d/3.
    "gpt3-175b": Model(12_288, 32_768, 96, 96, 51_200, tie_embeddings=True, context_length=2048),
}


def model_of(known: str | Mapping[str, Any]) -> Model:
    """A model by its name in `MODELS`, or of an object with the fields of `ModelShape` and `context`.

    Raises:
        ValueError: an unknown name or field, or a missing one.
    """
    if isinstance(known, str):
        if known not in MODELS:
            raise ValueError(f"model {known!r} is unknown; choose one of {', '.join(MODELS)}, or give its sizes")
        return MODELS[known]
    sizes = {("context_length" if name == "context" else name): value for name, value in known.items()}
    try:
        return Model(**sizes)
    except TypeError as wrong:
        names = ", ".join(field.name for field in fields(Model))
        raise ValueError(f"a model takes {names} (context for context_length): {wrong}") from None


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
