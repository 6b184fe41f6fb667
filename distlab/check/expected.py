"""The gradients that are right, and how far a right one may be away from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.check.reference import Sums
from distlab.check.tensors import SLACK, per_element


@dataclass(frozen=True)
class Right:
    """A value, and the largest distance of a right one from it.

    Attributes:
        value: expected tensor, in fp64.
        element: largest difference of one element.
        rms: largest root mean square of the differences.
    """

    value: Tensor
    element: Tensor
    rms: float

    def distance(self, seen: Tensor) -> float:
        """Return how far a tensor is away, in units of what is allowed; it agrees up to 1."""
        error = (seen - self.value).abs()
        # NaN minus a number is NaN, which no comparison would find too large.
        if not error.isfinite().all():
            return math.inf
        # 0/0 would be NaN. An element that agrees exactly is 0 away, also where nothing is allowed.
        elements = torch.where(error == 0, error, error / self.element).max().item()
        # Two bounds: one for the worst element, which always holds, and a tighter one for the whole
        # tensor, which finds small mistakes in all elements.
        rms = error.square().mean().sqrt().item()
        return max(elements, rms and rms / max(self.rms, 1e-300))

    def agrees(self, seen: Tensor) -> bool:
        """Return whether a tensor is as near as a right one."""
        return self.distance(seen) <= 1

    def of_elements(self, elements: Tensor, shape: torch.Size) -> "Right":
        """Return some elements of a parameter of this shape, in which all of the error may be."""
        all_of_it = math.sqrt(shape.numel() / max(len(elements), 1))
        return Right(
            per_element(self.value, shape)[elements],
            per_element(self.element, shape)[elements],
            all_of_it * self.rms,
        )

    def plus(self, other: "Right", factor: float = 1.0, own: float = 1.0) -> "Right":
        """Return own · this + factor · the other."""
        return Right(
            own * self.value + factor * other.value,
            # Errors add up without sign, because the worst case is what is allowed.
            abs(own) * self.element + abs(factor) * other.element,
            abs(own) * self.rms + abs(factor) * other.rms,
        )


class Expected:
    """The gradients of one step, added up from those of every rank and micro-batch.

    Args:
        of_ranks: for each rank, sums by parameter.
        dtypes: parameter name → dtype.
        micro_batches: number per rank and step.
        at_end: see `Weights`.
    """

    def __init__(
        self,
        of_ranks: Sequence[Mapping[str, Sums]],
        dtypes: Mapping[str, torch.dtype],
        micro_batches: int,
        at_end: float,
    ):
        self.at_end = at_end
        self.of_ranks, self.dtypes, self.micro_batches = of_ranks, dtypes, micro_batches
        self.ranks = len(of_ranks)
        # The last parameter that was asked for, and its right gradient. A judge asks for that of a
        # wrong one several times in a row.
        self._last: tuple[str, Right] | None = None

    def mean(self, name: str) -> Right:
        """Return the right gradient."""
        if self._last is None or self._last[0] != name:
            # Each rank contributes the same share of the mean.
            self._last = name, self.combination(name, [1 / self.ranks] * self.ranks)
        return self._last[1]

    def combination(self, name: str, weights: Sequence[float], part: str = "own") -> Right:
        """Return Σ over ranks of weight × gradient, and the error that rounding may cause.

        Let u = eps / 2 of the parameter's dtype. Each addition and division rounds by at most u
        times its result.

        - An element passes M additions on its rank, P of the reduction, and up to four divisions
          and casts. Partial sums are at most the sum of absolute values, whatever the order, so all
          roundings together are at most (M + P + 4) · u · Σ |w| |g|. That holds always, and for
          bf16 it is too much: a missing rank of eight may hide.
        - Roundings have no common sign, so their squares add up: a rounding is uniform in ± u of
          its partial sum and has the variance u² / 3 of its square. The root mean square over the
          elements of a tensor is held against four times that. Another order of additions has other
          partial sums of the same size.
        - Forward and backward round as well, and another right implementation of them (a matmul
          that is cut, fused kernels) rounds otherwise. `Copy.move` measures how much that is for
          each tensor. A tensor whose exact gradient is zero consists of it.
        - Sums inside a matmul in another order: SLACK · (P + M) · eps of fp32 of the largest
          summand.
        - Numbers below the smallest normal one of fp16 lose bits at every division.

        Args:
            part: sum of each rank to add up, see `Sums.part`.
        """
        sums = [rank[name] for rank in self.of_ranks]
        info = torch.finfo(self.dtypes[name])
        unit = info.eps / 2
        # 4 stands for divisions and casts, see the list above.
        roundings = self.micro_batches + self.ranks + 4
        weighted = [weight * each.part(part) for weight, each in zip(weights, sums, strict=True)]
        value = torch.stack(weighted).sum(0)
        total_weight = sum(map(abs, weights))
        largest = max(each.largest for each in sums)

        hard = torch.zeros_like(value)
        variance = 2 * value.square()
        noise, shift = torch.zeros_like(value), torch.zeros_like(value)
        running = torch.zeros_like(value)
        # The terms of the list above, rank by rank.
        for weight, each, sent in zip(weights, sums, weighted, strict=True):
            # This term is the bound that always holds, element by element.
            hard += roundings * unit * abs(weight) * each.magnitude
            running = running + sent
            # Each square is the variance of one rounding, in units of u²/3.
            variance += weight**2 * each.partial + sent.square() + running.square()
            noise += weight**2 * each.noise
            shift += weight * each.shift
        # Changes of micro-batches that have a common sign do not average out.
        noise = torch.maximum(noise, shift.square())

        floor = (
            SLACK
            * (self.ranks + self.micro_batches)
            # In bf16 the matmuls still add in fp32, so the smaller eps counts.
            * min(info.eps, torch.finfo(torch.float32).eps)
        )
        floor = floor * largest * total_weight
        # Numbers below the smallest normal one have an absolute error, whatever their size.
        floor += (
            roundings
            * self.micro_batches
            * info.smallest_normal
            * info.eps
            * max(1.0, total_weight)
        )
        elements = value.numel()
        few = 1 + 2 / math.sqrt(elements)  # the mean of few squares spreads
        rounding = unit * math.sqrt(variance.mean().item() / 3)
        wobble = math.sqrt(noise.mean().item())
        return Right(
            value,
            # Six times the noise of the noisiest element leaves no right element outside.
            hard + floor + 6 * math.sqrt(noise.max().item()),
            floor + 4 * few * (rounding + wobble),
        )
