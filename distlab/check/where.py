"""The first module whose output, or the gradient of whose output, differs from that in one process.

Hooks on every module record fingerprints: on the ranks under the wrapper, in the copy that repeats
a rank's micro-batches from the same parameters, and in the copy with parameters moved by their last
bit, which measures the noise. A fingerprint is a few numbers, so that no output is kept.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distlab.check.tensors import SLACK, plain, wide
from distlab.parallel.shard import local_part

WIDTH = 1021  # elements of a tensor that are projected together
PROJECTIONS = 8
NOISE = 10  # times the change that was measured may be right: it is measured a few times only
OUTPUT, GRADIENT = "the output", "the gradient of the output"


class Call(NamedTuple):
    """A tensor that a module returned, or its gradient.

    Attributes:
        step, micro_batch: numbers from 1 on.
        what: `OUTPUT` or `GRADIENT`.
        module: name and class of the module.
        number: number of the module's call in this micro-batch, from 0 on.
        leaf: position of the tensor in what the module returned.
    """

    step: int
    micro_batch: int
    what: str
    module: str
    number: int
    leaf: int


@dataclass(frozen=True)
class Fingerprint:
    """A tensor's shape, its norm, and PROJECTIONS numbers.

    The numbers are linear in the tensor. The root mean square of their differences between two
    tensors estimates the norm of the tensors' difference.
    """

    shape: tuple[int, ...]
    norm: float
    numbers: tuple[float, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Fingerprint":
        """Project a tensor on random directions, always the same ones for its number of elements.

        Each direction is the outer product of two random vectors, so that a large tensor needs no
        random numbers for all of its elements.
        """
        values = wide(local_part(tensor)).flatten()
        rows = -(-values.numel() // WIDTH)
        padded = nn.functional.pad(values, (0, rows * WIDTH - values.numel())).view(rows, WIDTH)
        generator = torch.Generator().manual_seed(0)
        columns = torch.randn(WIDTH, PROJECTIONS, generator=generator, dtype=torch.float64)
        weights = torch.randn(rows, PROJECTIONS, generator=generator, dtype=torch.float64)
        numbers = (padded @ columns * weights).sum(0)
        return Fingerprint(tuple(tensor.shape), values.norm().item(), tuple(numbers.tolist()))

    def distance(self, other: "Fingerprint", factor: float = 1.0) -> float:
        """Return an estimate of the norm of this tensor minus factor · the other."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        squares = [(mine - factor * theirs) ** 2 for mine, theirs in pairs]
        # The mean over the projections is an unbiased estimate of the squared norm.
        return math.sqrt(sum(squares) / len(squares))


Calls = dict[Call, Fingerprint]


class Trace:
    """Fingerprints of what each module returns, in the order of the calls.

    Args:
        module: module in which they have their names. A wrapper may keep its parts in other ones.
    """

    def __init__(self, module: nn.Module):
        self.calls: Calls = {}
        self._modules = dict(module.named_modules())
        self._place = (0, 0)  # step and micro-batch
        self._numbers: Counter[str] = Counter()

    def begin(self, step: int, micro_batch: int) -> None:
        """Note that the calls from now on belong to this micro-batch."""
        self._place = (step, micro_batch)
        # Calls are counted anew for each micro-batch, so that ranks number them alike.
        self._numbers.clear()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record inside. Begin after the module was wrapped, so that these hooks are the last."""
        handles = []
        for name, module in self._modules.items():
            shown = f"{plain(name) or 'the whole model'} ({type(module).__name__})"
            handles.append(module.register_forward_hook(partial(self._record, shown)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # backward recomputes a checkpointed part
        # A module may be called several times in one forward.
        number = self._numbers[name]
        self._numbers[name] += 1
        for leaf, tensor in enumerate(tree_leaves(output)):
            # Integers, such as indices, have no noise and no gradient.
            if not isinstance(tensor, Tensor) or not (
                tensor.is_floating_point() or tensor.is_complex()
            ):
                continue
            self.calls[Call(*self._place, OUTPUT, name, number, leaf)] = Fingerprint.of(tensor)
            if tensor.grad_fn is not None:
                call = Call(*self._place, GRADIENT, name, number, leaf)
                tensor.register_hook(partial(self._record_gradient, call))

    def _record_gradient(self, call: Call, gradient: Tensor) -> None:
        self.calls[call] = Fingerprint.of(gradient)


def first_difference(ranks: Sequence[Calls], alone: Sequence[Calls], moved: Sequence[Calls]) -> str:
    """Return a sentence about the first module that differs on any rank.

    Args:
        ranks: calls of each rank, under the wrapper.
        alone: calls of each rank's copy.
        moved: calls of each rank's copy with parameters moved by their last bit.
    """
    found = {}  # rank → (position in the copy's calls, call, relative difference)
    compared = 0
    for rank, (seen, right, other) in enumerate(zip(ranks, alone, moved, strict=True)):
        compared += len(seen.keys() & right.keys())
        different = _first_of_rank(seen, right, other, len(ranks))
        if different is not None:
            found[rank] = different
    if not compared:
        return "no module of the model was called, so that none could be compared"
    if not found:
        return "no module differs: outputs and their gradients are those of one process"
    # The earliest call on any rank is nearest to the cause.
    _, call, _ = min(found.values())
    same = {rank: size for rank, (_, each, size) in found.items() if each == call}
    names = ", ".join(map(str, same))
    return (
        f"first, {call.what} of {call.module} differs on rank{'s' * (len(same) > 1)} {names}, in "
        f"step {call.step}, micro-batch {call.micro_batch}, by {max(same.values()):.1e} of its norm"
    )


def _first_of_rank(
    seen: Calls, right: Calls, moved: Calls, ranks: int
) -> tuple[tuple[int, int, int], Call, float] | None:
    """Return the first call of a rank that differs: its place, itself, its relative difference."""
    noise = _noise(right, moved)
    factors: dict[int, float] = {}  # step → what all gradients are multiplied by
    for position, (call, expected) in enumerate(right.items()):
        given = seen.get(call)
        if given is None or given.shape != expected.shape:
            continue  # not called, or given a part of the sequence
        allowed = NOISE * noise[_kind(call)]
        # A difference of sums in another order is allowed in any case.
        allowed += SLACK * torch.finfo(torch.float32).eps * expected.norm
        factor = 1.0
        if call.what == GRADIENT:
            # The factor is found once for each step, at its first gradient.
            if call.step not in factors:
                factors[call.step] = _factor(given, expected, allowed, right, ranks)
            factor = factors[call.step]
        difference = given.distance(expected, factor)
        # A NaN in the copy as well is not a difference.
        is_nan = math.isnan(difference) and not math.isnan(expected.norm)
        if difference > factor * allowed or is_nan:
            size = difference / max(factor * expected.norm, 1e-300)
            return (call.step, call.micro_batch, position), call, size
    return None


def _factor(
    given: Fingerprint, expected: Fingerprint, allowed: float, right: Calls, ranks: int
) -> float:
    """Return the factor of a step's gradients: a wrapper may divide the loss, and add later."""
    micro_batches = max(call.micro_batch for call in right)
    for factor in (1.0, ranks, 1 / ranks, micro_batches, 1 / micro_batches):
        if given.distance(expected, factor) <= factor * allowed:
            return factor
    # No factor fits, so the gradient itself is wrong.
    return 1.0


def _noise(right: Calls, moved: Mapping[Call, Fingerprint]) -> dict[tuple[str, str, int], float]:
    """Return the largest change of each kind of tensor where parameters move by their last bit."""
    noise: dict[tuple[str, str, int], float] = {}
    for call, expected in right.items():
        kind = _kind(call)
        # A call that the moved copy did not make gives no noise.
        change = moved[call].distance(expected) if call in moved else 0.0
        noise[kind] = max(noise.get(kind, 0.0), change)
    return noise


def _kind(call: Call) -> tuple[str, str, int]:
    return call.what, call.module, call.leaf
