"""An invariant: what must hold, the experiment that shows it, and the judgement."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Differences that fp32 sums in another order may have. RELATIVE is a fraction of the largest
# element.
RELATIVE = 1e-4
ABSOLUTE = 1e-6


class Broken(Exception):
    """Raised by a judgement where an invariant does not hold.

    Args:
        expected: what must hold, in a few words with numbers.
        seen: what the submission did.
        is_named: True if `seen` names a mistake, which other rows need not repeat.
    """

    def __init__(self, expected: str, seen: str, *, is_named: bool = False) -> None:
        super().__init__(f"expected {expected}; seen {seen}")
        self.expected = expected
        self.seen = seen
        self.is_named = is_named


class Absent(Exception):
    """Raised by a judgement where a part of the work is not handed in, such as a backward."""


class Refused(Exception):
    """Raised by a judgement where the submission raised an error for an input.

    `Invariant.may_refuse` says whether that is a fault.
    """


class Skipped(Exception):
    """Raised by a judgement that another row has made."""


@dataclass(frozen=True)
class Invariant:
    """Something that must hold.

    Attributes:
        title: the invariant, as a clause.
        experiment: name of the function that the children run.
        settings: its keyword arguments.
        ranks: numbers of ranks to examine, one after the other; 0 for one process without a group.
        judge: function of what the ranks noted, in rank order. It raises `Broken`.
        input: what was run, in one line.
        is_beyond: True for what handouts do not ask for, and real programs need.
        may_refuse: True if an error of the submission's own is accepted, because it does no harm.
    """

    title: str
    experiment: str
    judge: Callable[[list[dict[str, Any]]], None]
    input: str
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2, 3)
    is_beyond: bool = False
    may_refuse: bool = False


def is_near(seen: Tensor, expected: Tensor, relative: float = RELATIVE) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if seen.shape != expected.shape:
        return False
    # Relative to the largest element, since sums of many terms cancel to small ones.
    allowed = relative * expected.abs().max().item() + ABSOLUTE if expected.numel() else 0.0
    difference = (seen.double() - expected.double()).abs()
    # A comparison with NaN is False, and would pass as no difference.
    return bool(torch.isfinite(difference).all()) and not bool((difference > allowed).any())


def largest_difference(seen: Tensor, expected: Tensor) -> str:
    """Return the largest difference of two tensors in words."""
    if seen.shape != expected.shape:
        return f"shape {tuple(seen.shape)}, not {tuple(expected.shape)}"
    return f"differs by up to {(seen.double() - expected.double()).abs().max().item():.1e}"
