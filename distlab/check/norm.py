"""The norm by which a wrapper clips, compared with the norm of the whole gradient.

A norm is one number. The mistake in a wrong one is found by computing the number that each known
mistake would give.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from distlab.check.expected import Expected
from distlab.check.signatures import (
    NORM_APART,
    NORM_LOCAL,
    NORM_PART,
    NORM_ROOTS,
    NORM_TIMES_RANKS,
    NORM_UNKNOWN,
)
from distlab.check.tensors import Tensors, wide

SUM_OF_SQUARES = 1e-4  # relative error of a norm in fp32, also of many elements


@dataclass(frozen=True)
class Norm:
    """The norm that a wrapper gives after one step, on one rank.

    Attributes:
        value: the norm. None if the wrapper gives none.
        before_factor: True if it was taken before the training step multiplied the gradients by
            ranks / count, as in `finish()`.
        shards: name → sum of squares of this rank's shard, of each parameter that is sharded.
    """

    value: float | None
    before_factor: bool
    shards: dict[str, float]


def norm_error(
    expected: Expected, gradients: Tensors, norms: Sequence[Norm]
) -> tuple[str, float] | None:
    """Return the mistake in a step's norm and its relative error. None if the norm is right.

    Args:
        expected: gradients of the step in one process.
        gradients: whole gradients of the wrapper, which are known to agree with those. Their norm
            differs from the one that the wrapper gives only by the rounding of the norm itself.
        norms: norm that each rank gives.
    """
    # A wrapper that does not clip has no norm to compare.
    if any(norm.value is None for norm in norms):
        return None
    factor = expected.at_end if norms[0].before_factor else 1.0
    seen = [norm.value * factor for norm in norms]
    squares = sum(wide(gradients[name]).square().sum().item() for name in expected.dtypes)
    whole = math.sqrt(squares)
    # A norm in the gradient's dtype rounds once for each tensor and once for all of them, each time
    # by half an eps. In fp32 a sum of many squares rounds by more than that.
    eps = max(torch.finfo(dtype).eps for dtype in expected.dtypes.values())
    allowed = (eps + SUM_OF_SQUARES) * whole
    if whole == 0:
        return None  # no tensor has a gradient in this step

    def agree(rights: Sequence[float]) -> bool:
        # What rounding does to a larger norm is larger.
        bounds = [allowed * max(1.0, right / whole) for right in rights]
        pairs = zip(seen, rights, bounds, strict=True)
        return all(abs(each - right) <= bound for each, right, bound in pairs)

    ranks = len(seen)
    if agree([whole] * ranks):
        return None
    error = max(abs(each - whole) for each in seen) / whole
    for signature, rights in _mistakes(expected, norms, squares):
        # The first mistake that fits is named, and the simplest ones come first.
        if agree(rights):
            return signature, error
    # Ranks that clip by different norms drift apart, which the message should say.
    if max(seen) - min(seen) > allowed:
        return NORM_APART, error
    return NORM_UNKNOWN, error


def _mistakes(
    expected: Expected, norms: Sequence[Norm], squares: float
) -> Iterator[tuple[str, list[float]]]:
    """Yield the norm of each rank under known mistakes."""
    ranks = len(norms)
    sharded = [sum(norm.shards.values()) for norm in norms]
    # Without shards every rank has the whole gradient. Rounding must not make a square negative.
    replicated = max(0.0, squares - sum(sharded)) if any(sharded) else squares

    def everywhere(square: float) -> list[float]:
        return [math.sqrt(square)] * ranks

    yield NORM_TIMES_RANKS, everywhere(ranks * replicated + sum(sharded))
    if any(sharded):
        yield NORM_LOCAL, [math.sqrt(replicated + shard) for shard in sharded]
        yield NORM_LOCAL, [math.sqrt(shard) for shard in sharded]
        roots = [math.sqrt(replicated + shard) for shard in sharded]
        yield NORM_ROOTS, [sum(roots)] * ranks
        yield NORM_ROOTS, [sum(map(math.sqrt, sharded))] * ranks
        yield NORM_PART, everywhere(replicated)
        yield NORM_PART, everywhere(sum(sharded))
        for shard in sharded:
            # The difference can be below zero by rounding alone.
            yield NORM_PART, everywhere(max(0.0, squares - shard))
    else:
        yield NORM_ROOTS, [ranks * math.sqrt(squares)] * ranks
    # Of the gradients before the reduction.
    own = []
    for rank in range(ranks):
        weights = [1.0 if each == rank else 0.0 for each in range(ranks)]
        of_rank = 0.0
        for name in expected.dtypes:
            of_rank += expected.combination(name, weights).value.square().sum().item()
        own.append(math.sqrt(of_rank))
    yield NORM_LOCAL, own
    yield NORM_LOCAL, [each / ranks for each in own]
    yield NORM_ROOTS, [sum(own)] * ranks
