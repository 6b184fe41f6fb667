"""Weights of micro-batches in the gradient of a step: the right ones, and those of known mistakes.

The gradient of a step is that of the mean over all examples, or tokens, of all micro-batches of all
ranks. Where a micro-batch has more of them than another, a mean of means is another number. A loss
that returns (sum, count) says how many count. Of a loss that returns a mean, that can be seen only
where the batch has targets with `IGNORED`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

IGNORED = -100  # torch's default of `ignore_index`

# Weighings that are mistakes, where the loss returns (sum, count).
BATCHES_ALIKE = "all micro-batches alike"
RANKS_ALIKE = "ranks alike"
TURNS_ALIKE = "the first micro-batches of all ranks, the second ones, … alike"
# The weighing that may be meant, where the loss returns a mean.
TARGETS_ALIKE = "all targets alike"


@dataclass(frozen=True)
class Seen:
    """One rank's micro-batches of a step.

    Attributes:
        counts: for each micro-batch, the count that its loss returned; None where a loss is a mean.
        targets: for each micro-batch, by position in the batch, the elements of a tensor of
            integers and the number of those that are not `IGNORED`.
    """

    counts: list[float | None]
    targets: list[dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class Weights:
    """Factors of the gradients of one rank's micro-batches. The mean over ranks is then the step's.

    Attributes:
        right: factor of each micro-batch.
        at_end: part of it by which the training step multiplies the averaged gradients, after the
            wrapper has finished.
        others: the same under another weighing, by its name. Empty where it would give the same.
        share: fraction of all counted examples or tokens that this rank has. None where all
            micro-batches have the same number, or where the number is not known.
    """

    right: list[float]
    at_end: float
    others: Mapping[str, list[float]]
    share: float | None


def seen_in(micro_batches: Sequence[Any], counts: list[float | None]) -> Seen:
    """Return what this rank tells the others of its micro-batches."""
    targets = []
    for batch in micro_batches:
        of_batch = {}
        for position, leaf in enumerate(tree_leaves(batch)):
            is_tensor = isinstance(leaf, Tensor)
            # Targets are whole numbers. A tensor of floating point cannot hold `IGNORED`.
            if is_tensor and not leaf.is_floating_point() and not leaf.is_complex():
                counted = int((leaf != IGNORED).sum())
                of_batch[position] = (leaf.numel(), counted)
        targets.append(of_batch)
    return Seen(counts, targets)


def weights_of(everyone: Sequence[Seen], rank: int) -> Weights:
    """Return the weights of one rank's micro-batches.

    Args:
        everyone: micro-batches of each rank.
        rank: position of this rank in `everyone`.
    """
    # One micro-batch decides, because a loss function returns either form always.
    if everyone[rank].counts[0] is None:
        return _of_means(everyone, rank)
    counts = [seen.counts for seen in everyone]
    ranks = len(counts)
    number = len(counts[rank])
    total = sum(map(sum, counts))
    at_end = _quotient(ranks, total)
    right = [at_end] * number
    # With equal counts all weighings give the same gradient, so no mistake can be seen.
    if _all_equal(counts):
        return Weights(right, at_end, {}, None)
    of_rank = sum(counts[rank])
    of_turns = [sum(turn) for turn in zip(*counts, strict=True)]
    others = {
        BATCHES_ALIKE: [_quotient(1 / number, count) for count in counts[rank]],
        RANKS_ALIKE: [_quotient(1, of_rank)] * number,
        TURNS_ALIKE: [_quotient(ranks / number, count) for count in of_turns],
    }
    return Weights(right, at_end, others, _quotient(of_rank, total))


def _of_means(everyone: Sequence[Seen], rank: int) -> Weights:
    """Return the weights of losses that are means, already divided by the micro-batches."""
    number = len(everyone[rank].counts)
    right = [1.0] * number
    positions = set()  # positions in a batch of tensors in which any rank ignores a target
    for seen in everyone:
        for of_batch in seen.targets:
            for position, (elements, counted) in of_batch.items():
                if counted < elements:
                    positions.add(position)
    counts = []
    for seen in everyone:
        of_rank = []
        for of_batch in seen.targets:
            # Only tensors in which some target is ignored count as targets.
            counted = [of_batch[position][1] for position in positions if position in of_batch]
            of_rank.append(sum(counted))
        counts.append(of_rank)
    if not positions or _all_equal(counts):
        return Weights(right, 1.0, {}, None)
    total = sum(map(sum, counts))
    factor = _quotient(len(counts) * number, total)
    others = {TARGETS_ALIKE: [count * factor for count in counts[rank]]}
    return Weights(right, 1.0, others, _quotient(sum(counts[rank]), total))


def _all_equal(counts: Sequence[Sequence[float]]) -> bool:
    """Return whether all micro-batches of all ranks have the same count."""
    return len({count for of_rank in counts for count in of_rank}) == 1


def _quotient(share: float, count: float) -> float:
    """Return share / count, and NaN where nothing counts, as the trainer has."""
    return share / count if count else math.nan
