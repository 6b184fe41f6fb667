"""Numbers of a decoder-only Transformer, which every formula of this folder starts from.

Theory takes numbers, not models. `ModelShape` holds the widths, and `ModelShape.of(config)` copies
them from any object that has attributes of these names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from distlab.theory.checks import at_least_one


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
        kv_heads = self.num_kv_heads
        at_least_one(
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            num_kv_heads=1 if kv_heads is None else kv_heads,
            tensor=self.tensor,
            stages=self.stages,
        )
        _check_divides("num_heads", self.num_heads, "d_model", self.d_model)
        if kv_heads is not None:
            _check_divides("num_kv_heads", kv_heads, "num_heads", self.num_heads)
        # Tensor parallelism cuts between heads, columns and words, never through one.
        for name in ("num_heads", "num_kv_heads", "d_ff", "vocab_size"):
            size = getattr(self, name)
            if size is not None and size % self.tensor:
                raise ValueError(f"{self.tensor} ranks cannot share {name}={size} evenly")

    @staticmethod
    def of(config: Any, tensor: int = 1) -> "ModelShape":
        """Return the shape of a model.

        Args:
            config: object with the attributes of a model, for example a configuration.
            tensor: number of ranks that share every matrix.
        """
        return ModelShape(
            d_model=config.d_model,
            d_ff=config.d_ff,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            vocab_size=config.vocab_size,
            tie_embeddings=config.tie_embeddings,
            num_kv_heads=config.num_kv_heads,
            tensor=tensor,
        )

    def of_pipeline(self, ranks: int, blocks: Sequence[int]) -> list["ModelShape"]:
        """Return the part of each rank of a pipeline.

        Stage s is on rank s mod `ranks`.

        Args:
            ranks: number of ranks.
            blocks: number of blocks of each stage.
        """
        parts = []
        for rank in range(ranks):
            part = replace(
                self,
                # Stages rank, rank + ranks, rank + 2·ranks, …
                num_layers=sum(blocks[rank::ranks]),
                stages=len(blocks) // ranks,
                has_embedding=rank == 0,
                has_head=rank == ranks - 1,
            )
            parts.append(part)
        return parts

    @property
    def heads(self) -> int:
        """Heads of queries on a rank."""
        return self.num_heads // self.tensor

    @property
    def width(self) -> int:
        """Width of the queries of a rank's heads. d for one rank alone."""
        return self.d_model // self.tensor

    @property
    def kv_width(self) -> int:
        """Width of the keys of a rank's heads, and of the values, k."""
        # Heads of keys are as wide as heads of queries. Only their number differs.
        head_width = self.d_model // self.num_heads
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        return head_width * kv_heads // self.tensor

    @property
    def inner(self) -> int:
        """Columns of the feed-forward block on a rank. f for one rank alone."""
        return self.d_ff // self.tensor

    @property
    def words(self) -> int:
        """Rows of the embedding, and of the head, on a rank. V for one rank alone."""
        return self.vocab_size // self.tensor

    @cached_property
    def matrices_per_block(self) -> tuple[int, ...]:
        """Elements of the matrices of one block, in order of execution: qkv, output, w1, w3, w2."""
        return tuple(math.prod(shape) for shape in self.matrix_shapes_per_block)

    @cached_property
    def matrix_shapes_per_block(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices of one block, (outputs, inputs)."""
        d, q, f = self.d_model, self.width, self.inner
        # Ranks of tensor parallelism cut qkv, w1 and w3 by outputs, and output and w2 by inputs.
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
        """Number of matrices of the embedding's size: it, and a head that is not tied to it."""
        has_own_head = self.has_head and not self.tie_embeddings
        return self.has_embedding + has_own_head

    @property
    def norms(self) -> int:
        """Number of norms: two of each block, and the final one."""
        return 2 * self.num_layers + self.has_head

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters: once or twice V·d, L blocks, and d of the final norm."""
        vocabularies = self.vocabularies * self.embedding_parameters
        blocks = self.num_layers * self.block_parameters
        final_norm = self.d_model if self.has_head else 0
        return vocabularies + blocks + final_norm

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of every parameter in registration order, a tied one once."""
        qkv, output, w1, w3, w2 = self.matrix_shapes_per_block
        norm = (self.d_model,)
        embedding = (self.words, self.d_model)
        shapes = []
        if self.has_embedding:
            shapes.append(embedding)
        for _ in range(self.num_layers):
            shapes += [norm, qkv, output, norm, w1, w3, w2]
        if self.has_head:
            shapes.append(norm)
            if not self.tie_embeddings:
                shapes.append(embedding)
        return shapes

    def parameter_units(self) -> list[str | None]:
        """Return the unit that gathers each parameter: a block, the embedding or the head.

        The order is that of registration. None for norms, which are not gathered.
        """
        units = []
        if self.has_embedding:
            units.append("embedding")
        for block in range(self.num_layers):
            unit = f"block {block}"
            # In the order of `parameter_shapes`. Norms are in no unit.
            units += [None, unit, unit, None, unit, unit, unit]
        if self.has_head:
            units.append(None)
            if not self.tie_embeddings:
                units.append("head")
        return units

    def parameter_numels(self) -> list[int]:
        """Return the elements of every parameter in registration order, a tied one once."""
        return [math.prod(shape) for shape in self.parameter_shapes()]


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    found = set()
    # Divisors come in pairs, of which the smaller is at most the root.
    for small in range(1, int(number**0.5) + 1):
        if number % small == 0:
            found.add(small)
            found.add(number // small)
    return sorted(found)


def _check_divides(name: str, part: int, name_of_whole: str, whole: int) -> None:
    """Check that `part` divides `whole`.

    Raises:
        ValueError: it does not. The message has the nearest number that does.
    """
    if whole % part:
        nearest = min(divisors(whole), key=lambda divisor: abs(divisor - part))
        raise ValueError(
            f"{name}={part} does not divide {name_of_whole}={whole}; "
            f"the nearest that does is {nearest}"
        )
