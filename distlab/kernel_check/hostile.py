"""Inputs that show what a kernel's own test hides: sizes, values and layouts that are hard.

A `Case` is a description. `drawn` makes its tensors. Every tensor lies in a larger buffer whose
other elements are NaN, so that a kernel which reads outside of its input returns NaN.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from distlab.kernel_check.operations import (
    DIFFERENT,
    IGNORED,
    PARAMETERS,
    ROWS_OF_SUM,
    TALL_ROWS,
    Argument,
    Operation,
    Sizes,
)

GUARD = 1024  # elements of NaN before a tensor, and at least as many after it
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UPSTREAM = ("contiguous", "transposed", "expanded")


@dataclass(frozen=True)
class Case:
    """One input of an operation.

    Attributes:
        operation: name of the operation.
        sizes: name → size.
        dtype: name in `DTYPES`.
        values: kind of values of the arguments with the role `values`.
        layout: strides of these arguments, see `laid_out`, or `DIFFERENT` or `PARAMETERS`.
        upstream: strides of the gradient that backward is given, one of `UPSTREAM`. None: forward
            alone, and under `torch.no_grad()`.
        seed: integer that fixes the values.
        is_repeated: True to call the kernel first with other values of the same sizes.
    """

    operation: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str = "fp32"
    values: str = "normal"
    layout: str = "contiguous"
    upstream: str | None = "contiguous"
    seed: int = 0
    is_repeated: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes)
        words = [sizes, self.dtype]
        if self.values != "normal":
            words.append(f"values {self.values}")
        if self.layout == DIFFERENT:
            words.append("inputs with different strides")
        elif self.layout == PARAMETERS:
            words.append("every second element of weights, targets or tables")
        elif self.layout != "contiguous":
            words.append(f"{self.layout} inputs")
        if self.upstream is None:
            words.append("without gradients")
        elif self.upstream != "contiguous":
            words.append(f"{self.upstream} upstream gradient")
        if self.is_repeated:
            words.append("after a call with other values")
        return ", ".join(words)


def cases(
    operation: Operation, dtypes: Sequence[str], *, backward: bool, count: int, seed: int
) -> Iterator[Case]:
    """Yield the plain case, then cases with one thing that is hard, then random combinations.

    Args:
        dtypes: names in `DTYPES`.
        backward: True to run the backward also.
        count: number of random combinations.
        seed: integer that fixes which combinations are drawn.
    """
    upstream = "contiguous" if backward else None
    plain = Case(operation.name, _plain_sizes(operation), upstream=upstream)
    ragged = replace(plain, sizes=_ragged_sizes(operation))  # where values meet masks
    yield plain
    yield ragged
    # With a seed of its own, so that a result of the plain case is not right by chance.
    yield replace(plain, is_repeated=True, seed=1)
    if backward:
        # As in inference, where a kernel may take another path, and may write over its input.
        yield replace(ragged, upstream=None)
        yield replace(plain, upstream=None, is_repeated=True, seed=1)
    for layout in operation.all_layouts[1:]:
        yield replace(ragged, layout=layout)
    for layout in UPSTREAM[1:] if backward else ():
        yield replace(ragged, upstream=layout)
    for values in operation.values[1:]:
        yield replace(ragged, values=values)
    largest = tuple((name, max(candidates)) for name, candidates in operation.sizes.items())
    for dtype in dtypes[1:]:
        yield replace(ragged, dtype=dtype)
        yield replace(plain, sizes=largest, dtype=dtype)  # where rounding errors of sums add up
    for name, candidates in operation.sizes.items():  # one size at a time, smallest first
        for size in candidates:
            sizes = {**dict(plain.sizes), name: size}
            if size != dict(plain.sizes)[name] and operation.is_valid(sizes):
                yield replace(plain, sizes=tuple(sizes.items()))
    few_columns = _narrow_sizes(operation)
    for rows in TALL_ROWS:
        sizes = {**few_columns, operation.rows: rows}
        yield replace(plain, sizes=tuple(sizes.items()))
    if backward and "mean 1,000" in operation.values:
        # Where a sum over rows in half precision is wrong. All its terms have one sign.
        sizes = {**few_columns, operation.rows: ROWS_OF_SUM}
        for dtype in dtypes[1:]:
            case = replace(plain, sizes=tuple(sizes.items()), dtype=dtype)
            yield replace(case, values="mean 1,000", upstream="expanded")
    for values in operation.values[1:]:
        yield replace(plain, values=values)
    for dtype in dtypes[1:]:
        yield replace(plain, dtype=dtype)
    random = Random(seed)
    for number in range(count):
        sizes = {name: random.choice(list(sizes)) for name, sizes in operation.sizes.items()}
        if operation.is_valid(sizes):
            yield Case(
                operation.name,
                tuple(sizes.items()),
                random.choice(dtypes),
                random.choice(operation.values),
                random.choice(operation.all_layouts),
                random.choice(UPSTREAM) if backward else None,
                seed=number + 1,
            )


def _plain_sizes(operation: Operation) -> tuple[tuple[str, int], ...]:
    """Return sizes that every tutorial's test has: powers of two, or the smallest there are."""
    sizes = {}
    for name, candidates in operation.sizes.items():
        wanted = [size for size in candidates if size in (2, 64)]
        sizes[name] = max(wanted or candidates)
    return tuple(sizes.items())


def _ragged_sizes(operation: Operation) -> tuple[tuple[str, int], ...]:
    """Return sizes that are one more than a tile, or else the largest below 128."""
    sizes = {}
    for name, candidates in operation.sizes.items():
        wanted = [size for size in candidates if size in (3, 33, 65)]
        sizes[name] = max(wanted or [size for size in candidates if size < 128])
    if not operation.is_valid(sizes):
        return _plain_sizes(operation)
    return tuple(sizes.items())


def _narrow_sizes(operation: Operation) -> Sizes:
    """Return sizes at which many rows cost little: 16 where that is a candidate, or else small."""
    sizes = {}
    for name, candidates in operation.sizes.items():
        # A row of one or two elements hides mistakes, and heads need 16 dimensions.
        wide_enough = [size for size in candidates if size >= 16]
        sizes[name] = min(wide_enough or candidates)
    return sizes


def simpler(case: Case, operation: Operation) -> Iterator[Case]:
    """Yield cases with one thing simpler than in this one, the largest simplification first."""
    if case.layout != "contiguous":
        yield replace(case, layout="contiguous")
    if case.upstream not in (None, "contiguous"):
        yield replace(case, upstream="contiguous")
    if case.values != "normal":
        yield replace(case, values="normal")
    if case.dtype != "fp32":
        yield replace(case, dtype="fp32")
    for name, size in case.sizes:
        for smaller in operation.candidates(name):
            sizes = {**dict(case.sizes), name: smaller}
            # Small sizes first, so that the first one that still fails is the smallest.
            if smaller < size and operation.is_valid(sizes):
                yield replace(case, sizes=tuple(sizes.items()))


def drawn(
    case: Case, operation: Operation, device: torch.device, fill: float = float("nan")
) -> list[Tensor]:
    """Return the tensors of a case, each within a larger buffer.

    Args:
        fill: value of the other elements of the buffer.
    """
    generator = torch.Generator().manual_seed(case.seed)
    sizes = dict(case.sizes)
    tensors = []
    others = itertools.cycle(("contiguous", "transposed", "sliced"))
    for argument in operation.arguments:
        shape = tuple(sizes[name] for name in argument.shape)
        values = _values(argument, shape, case, sizes, generator)
        layout = "contiguous"
        if argument.role != "values" and case.layout == PARAMETERS:
            layout = "every second"
        elif argument.role == "values" and case.layout == DIFFERENT:
            layout = next(others)
        elif argument.role == "values" and case.layout != PARAMETERS:
            layout = case.layout
        if argument.role == "targets":
            # A class, because a kernel that reads it as a target must not read far outside.
            tensors.append(laid_out(values, layout, fill=0).to_device(device))
            continue
        is_table = argument.role in ("cosines", "sines")  # rope's tables are fp32 in any dtype
        values = values.to(torch.float32 if is_table else DTYPES[case.dtype])
        tensors.append(laid_out(values, layout, fill).to_device(device))
    return tensors


@dataclass(frozen=True)
class LaidOut:
    """Values with strides of their own in a larger buffer."""

    buffer: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def to_device(self, device: torch.device) -> Tensor:
        """Return the tensor on a device, with the same strides."""
        return self.buffer.to(device).as_strided(self.shape, self.strides, GUARD)


def laid_out(values: Tensor, layout: str, fill: float) -> LaidOut:
    """Return these values in a layout.

    Layouts: `transposed` has its columns next to each other in memory. `sliced` is a part of wider
    rows. `every second` takes every second element of a row. `expanded` repeats its first row with
    stride 0. `rank 4` has two dimensions of size 1 in addition, in front.
    """
    shape = tuple(values.shape)
    strides = list(torch.empty(shape, device="meta").stride())
    if len(shape) < 2 and layout != "every second":
        layout = "contiguous"
    if layout == "transposed":
        strides = list(torch.empty((*shape[:-2], shape[-1], shape[-2]), device="meta").stride())
        strides[-1], strides[-2] = strides[-2], strides[-1]
    elif layout == "sliced":
        strides = list(torch.empty((*shape[:-1], shape[-1] + 7), device="meta").stride())
    elif layout == "every second":
        strides = [2 * stride for stride in strides]
    elif layout == "expanded":
        values = values[..., :1, :].expand(shape)
        strides = list(torch.empty((*shape[:-2], 1, shape[-1]), device="meta").stride())
        strides[-2] = 0
    elif layout == "rank 4" and len(shape) < 4:
        extra = 4 - len(shape)
        shape = (1,) * extra + shape
        strides = [strides[0] * values.shape[0]] * extra + strides
        values = values.reshape(shape)
    # Elements from the first to the last, gaps included.
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    # A kernel that takes an expanded tensor for a contiguous one reads `numel` elements. They are
    # in the buffer, so that such a kernel returns NaN and does not crash.
    buffer = torch.full((GUARD + extent + GUARD + values.numel(),), fill, dtype=values.dtype)
    target = buffer.as_strided(shape, strides, GUARD)
    if layout == "expanded":
        first = [0 if stride == 0 else slice(None) for stride in strides]
        target[tuple(first)] = values[tuple(first)]
    else:
        target.copy_(values)
    return LaidOut(buffer, shape, tuple(strides))


def _values(
    argument: Argument,
    shape: tuple[int, ...],
    case: Case,
    sizes: Sizes,
    generator: torch.Generator,
) -> Tensor:
    """Return the values of one argument in float64, or indices for targets."""
    if argument.role == "targets":
        return _targets(shape[0], sizes[argument.of], case, generator)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if argument.role == "weight":
        return 1 + 0.1 * normal
    if argument.role == "small":
        return 0.1 * normal
    if argument.role in ("cosines", "sines"):
        return rope_table(argument.role, *shape)
    kind = case.values
    if kind == "mean 1,000":
        return 1000 + normal
    if kind == "±50":
        return 50 * normal.sign()
    if kind == "−1e5":  # logits to which a mask was added
        return torch.where(normal > 0.5, -1e5 if case.dtype != "fp16" else -1e4, normal)
    if kind == "mean −1e5":  # a row that such a mask hides completely
        return normal - (1e5 if case.dtype != "fp16" else 1e4)
    if kind == "−inf":
        values = torch.where(normal > 0.5, float("-inf"), normal)
        values[..., 0, :] = float("-inf")  # a row that is masked completely
        return values
    if kind == "large":  # the squares of these values overflow in fp16
        return 1e4 * normal.clamp(-3, 3)
    if kind == "tiny":
        return 1e-4 * normal
    if kind == "zeros":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "constant":
        return torch.full(shape, 9.0, dtype=torch.float64)
    if kind == "ascending":  # the largest value is in the last block
        return normal.sort(-1).values * 4
    return normal


def _targets(count: int, classes: int, case: Case, generator: torch.Generator) -> Tensor:
    targets = torch.randint(classes, (count,), generator=generator)
    if case.values == "all ignored":
        return torch.full((count,), IGNORED)
    targets[0] = classes - 1
    if count > 2:
        targets[1] = IGNORED
    return targets


def rope_table(role: str, length: int, width: int) -> Tensor:
    """Return the table (length, width) of rope for `cosines` or `sines`, in float64."""
    rates = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    if role == "cosines":
        return torch.cat([angles.cos(), angles.cos()], -1)
    return torch.cat([-angles.sin(), angles.sin()], -1)
