"""The numbers of a decoder-only Transformer that every formula of this folder starts from.

Theory is given numbers, not models: `ModelShape` holds the widths, and `ModelShape.of(config)`
copies them from anything that has attributes of these names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from distlab.theory.checks import at_least_one

OF_A_RANK = ("tensor", "stages", "has_embedding", "has_head")  # which no model says


@dataclass(frozen=True)
class ModelShape:
    """Pre-norm blocks of attention (fused qkv, output) and SwiGLU (three matrices), no biases.

    Args:
        d_model: d, width of the residual stream.
        d_ff: f, inner width of the feed-forward block.
        num_layers: L, number of blocks.
        num_heads: H, number of heads, which must divide d.
        vocab_size: V, number of rows of the embedding and of the head.
        tie_embeddings: True if the head uses the embedding's matrix.
        num_kv_heads: number of heads of keys and values, each shared by an equal number of query
            heads (Ainslie et al. 2023, "GQA"). It must divide H. None: H.
        tensor: T ranks that share every matrix, and the sequence between blocks. All sizes that
            follow from the widths are then those of one rank: its heads, columns and words, and
            whole norms. The widths above stay the model's.
        stages: number of stages of a pipeline on this rank. `num_layers` then counts their blocks
            (`of_pipeline`).
        has_embedding, has_head: True if this rank of a pipeline has the first stage, and the last,
            which also has the final norm.

    Raises:
        ValueError: a size below one, heads that do not divide the width (with the nearest that do),
            or ranks that do not divide the heads, columns or words.
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int
    tie_embeddings: bool = False
    num_kv_heads: int | None = None
    tensor: int = 1
    stages: int = 1
    has_embedding: bool = True
    has_head: bool = True

    def __post_init__(self) -> None:
        sizes = {
            name: size
            for name, size in vars(self).items()
            if not isinstance(size, bool) and size is not None
        }
        at_least_one(**sizes)
        for part, whole in (("num_heads", "d_model"), ("num_kv_heads", "num_heads")):
            if part in sizes and sizes[whole] % sizes[part]:
                near = min(divisors(sizes[whole]), key=lambda heads: abs(heads - sizes[part]))
                raise ValueError(
                    f"{part}={sizes[part]} does not divide {whole}={sizes[whole]}; the nearest that does is {near}"
                )
        for name in ("num_heads", "num_kv_heads", "d_ff", "vocab_size"):
            if sizes.get(name, 0) % self.tensor:
                raise ValueError(f"{self.tensor} ranks cannot share {name}={sizes[name]} evenly")

    @staticmethod
    def of(config: Any, tensor: int = 1) -> "ModelShape":
        """Return the shape of an object with such attributes, for example a configuration."""
        names = [field.name for field in fields(ModelShape) if field.name not in OF_A_RANK]
        return ModelShape(**{name: getattr(config, name) for name in names}, tensor=tensor)

    def of_pipeline(self, ranks: int, blocks: Sequence[int]) -> list["ModelShape"]:
        """Return the part of each rank of a pipeline.

        Stage s has `blocks[s]` blocks and is on rank s mod `ranks`.
        """
        return [
            replace(
                self,
                num_layers=sum(blocks[rank::ranks]),
                stages=len(blocks) // ranks,
                has_embedding=rank == 0,
                has_head=rank == ranks - 1,
            )
            for rank in range(ranks)
        ]

    @property
    def heads(self) -> int:
        """Heads of queries on a rank."""
        return self.num_heads // self.tensor

    @property
    def width(self) -> int:
        """Width of the queries of a rank's heads; d for one rank alone."""
        return self.d_model // self.tensor

    @property
    def kv_width(self) -> int:
        """Width of the keys of a rank's heads, and of the values, k."""
        return self.d_model // self.num_heads * (self.num_kv_heads or self.num_heads) // self.tensor

    @property
    def inner(self) -> int:
        """Columns of the feed-forward block on a rank; f for one rank alone."""
        return self.d_ff // self.tensor

    @property
    def words(self) -> int:
        """Rows of the embedding, and of the head, on a rank; V for one rank alone."""
        return self.vocab_size // self.tensor

    @cached_property
    def matrices_per_block(self) -> tuple[int, ...]:
        """Elements of the matrices of one block, in order of execution: qkv, output, w1, w3, w2."""
        return tuple(map(math.prod, self.matrix_shapes_per_block))

    @cached_property
    def matrix_shapes_per_block(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices of one block, (outputs, inputs)."""
        d, q, f = self.d_model, self.width, self.inner
        return ((q + 2 * self.kv_width, d), (d, q), (f, d), (f, d), (d, f))

    @cached_property
    def block_matrices(self) -> int:
        """Elements of all matrices of one block."""
        return sum(self.matrices_per_block)

    @property
    def block_parameters(self) -> int:
        """Elements of a block, 2·d² + 2·d·k + 3·d·f + 2·d: matrices and two norms."""
        return self.block_matrices + 2 * self.d_model

    @property
    def embedding_parameters(self) -> int:
        """V·d, elements of the embedding. The head has the same number, or no matrix if tied."""
        return self.words * self.d_model

    @property
    def vocabularies(self) -> int:
        """Matrices of the embedding's size: it, and a head that is not tied to it."""
        return self.has_embedding + (self.has_head and not self.tie_embeddings)

    @property
    def norms(self) -> int:
        """Two of each block, and the final one."""
        return 2 * self.num_layers + self.has_head

    @cached_property
    def num_parameters(self) -> int:
        """All distinct parameters: embeddings (once or twice V·d), L blocks, final norm d."""
        norm = self.has_head * self.d_model
        return (
            self.vocabularies * self.embedding_parameters
            + self.num_layers * self.block_parameters
            + norm
        )

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of every parameter in registration order, a tied one once."""
        qkv, output, w1, w3, w2 = self.matrix_shapes_per_block
        norm, embedding = (self.d_model,), (self.words, self.d_model)
        block = [norm, qkv, output, norm, w1, w3, w2]
        ends = [norm] if self.tie_embeddings else [norm, embedding]
        return [embedding] * self.has_embedding + block * self.num_layers + ends * self.has_head

    def parameter_units(self) -> list[str | None]:
        """Unit that gathers each parameter, in registration order: a block, embedding or head.

        None for norms, which are not gathered.
        """
        blocks = [
            None if at in (0, 3) else f"block {block}"
            for block in range(self.num_layers)
            for at in range(7)
        ]
        ends = [None] if self.tie_embeddings else [None, "head"]
        return ["embedding"] * self.has_embedding + blocks + ends * self.has_head

    def parameter_numels(self) -> list[int]:
        """Elements of every parameter in registration order, a tied one once."""
        return [math.prod(shape) for shape in self.parameter_shapes()]


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
