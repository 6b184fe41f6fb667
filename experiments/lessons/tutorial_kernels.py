"""Which input shows the error of a kernel that passes its own test?

    distlab run tutorial_kernels                     # on a GPU, a few seconds
    TRITON_INTERPRET=1 distlab run tutorial_kernels  # without one
    distlab run tutorial_kernels --seed 1            # other values

Tutorials and course notes print kernels with errors that the shapes and values of their own tests
hide. The kernels here are written for this lesson and have such errors, several each. Each is run
on a benign input, on which it is right, and for each of its errors on a hostile one; the public
function of `kernels` also runs on the hostile input. Every result is compared with PyTorch's in
float64. Blocks have 16 elements, so that small inputs have several.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Run,
    View,
    headline_from,
    option,
)
from distlab.report import text_column
from kernels import elementwise, layernorm, matmul, softmax
from kernels._dispatch import check_runs, tl, triton

# each error is above 0.1; fp32 rounds by less than 1e-4, and that where the mean is 1,000
TOLERANCE = 1e-3


@triton.jit
def gram_kernel(x_ptr, y_ptr, rows, cols):
    """Compute y (rows, rows) += x xᵀ, with a program per element and block of columns.

    The order is that of tiles in groups.
    """
    place = tl.program_id(0)
    row = place // (2 * rows) * 2 + place % 2  # ERROR: the last group may have one row
    col = place % (2 * rows) // 2
    # ERROR: beyond the last column the first are added again
    k = (tl.program_id(1) * 16 + tl.arange(0, 16)) % cols
    part = tl.sum(tl.load(x_ptr + row % rows * cols + k) * tl.load(x_ptr + col * cols + k), 0)
    # ERROR: y has the sum so far
    tl.atomic_add(y_ptr + row * rows + col, part.to(tl.float16), mask=row < rows)


@triton.jit
def statistics_kernel(x_ptr, y_ptr, rows, cols):
    """Compute y (2, rows) = log Σ exp and variance of rows of x, a program per row, by blocks."""
    row = tl.program_id(0)
    top = float("-inf")
    total = 0.0
    mean = 0.0
    square = 0.0
    for start in range(0, cols, 16):
        col = start + tl.arange(0, 16)
        # ERROR: exp(0 − top) is not 0
        x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
        top = tl.maximum(top, tl.max(x, 0))
        # ERROR: the sum so far is relative to an earlier maximum
        total += tl.sum(tl.exp(x - top), 0)
        # ERROR: a short block counts as much as others
        count = tl.minimum(cols - start, 16) * tl.cdiv(cols, 16)
        mean += tl.sum(x, 0) / count
        square += tl.sum(x * x, 0) / count
    tl.store(y_ptr + row, top + tl.log(total))
    tl.store(y_ptr + rows + row, square - mean * mean)  # ERROR: the difference of two large numbers


@triton.jit
def gelu_kernel(x_ptr, y_ptr, rows, cols):
    """Compute y (rows, cols) = GeLU(x), a row of 32 per program."""
    at = tl.program_id(0) * 32 + tl.arange(0, 32)
    x = tl.load(x_ptr + at)
    power = tl.exp(1.5957691 * (x + 0.044715 * x * x * x))
    tl.store(y_ptr + at, x * power / (power + 1))  # ERROR: ∞ / ∞, where the power overflows


def launch(kernel, x: Tensor, y: Tensor, *grid: int) -> Tensor:
    """Fill y from x (rows, columns) and return it."""
    kernel[grid](x.contiguous(), y, *x.shape)
    return y


def gram(x: Tensor) -> Tensor:
    """Compute x xᵀ in fp16."""
    rows, cols = x.shape
    return launch(
        gram_kernel, x, torch.zeros(rows, rows).half(), rows * rows, triton.cdiv(cols, 16)
    )


def statistics(x: Tensor) -> Tensor:
    """Log Σ exp and the variance of rows, (2, rows, 1)."""
    return launch(statistics_kernel, x, torch.empty(2, len(x), 1), len(x))


# Each operation with the errors, from `kernels`, and in PyTorch.
GRAM = gram, lambda x: matmul.matmul(x, x.T), lambda x: x @ x.T
SOFTMAX = lambda x: (x - statistics(x)[0]).exp(), softmax.softmax, lambda x: x.softmax(1)
NORM = (
    lambda x: (x - x.mean(1, keepdim=True)) * (statistics(x)[1] + 1e-5).rsqrt(),
    lambda x: layernorm.layer_norm(x, torch.ones(x.shape[1])),
    lambda x: torch.layer_norm(x, x.shape[1:]),
)
GELU = (
    lambda x: launch(gelu_kernel, x, torch.empty_like(x), len(x)),
    elementwise.gelu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
)


def trials() -> list[tuple]:
    """List the errors.

    Each has name, operation, benign input, hostile input, this input in words, and what ours does.
    """
    deep = torch.full((4, 512), 9.0)  # fp16 holds the sums of `short`: 2,592 and 1,944
    short = deep[:, :32]
    descending = torch.randn(4, 32).sort(descending=True).values
    return [
        (
            "small last group",
            GRAM,
            short,
            short[:3],
            "3 rows, groups of 2",
            "min(rows left, group)",
        ),
        (
            "wrapped offsets",
            GRAM,
            short,
            short[:, :24],
            "24 columns, blocks of 16",
            "masks, loads 0 there",
        ),
        ("sums in fp16", GRAM, short, deep, "sums of 41,472", "sums in fp32, rounds once"),
        (
            "masked lanes are 0",
            SOFTMAX,
            descending,
            descending[:, :24] - 20,
            "24 columns, about −20",
            "loads −∞",
        ),
        (
            "sum not rescaled",
            SOFTMAX,
            descending,
            descending.flip(1),
            "maximum in the last block",
            "one maximum",
        ),
        (
            "equal weights",
            NORM,
            descending,
            descending[:, :24],
            "24 columns, blocks of 16",
            "weights by count",
        ),
        (
            "E[x²] − E[x]²",
            NORM,
            descending,
            descending + 1000,
            "mean of 1,000",
            "squares deviations",
        ),
        (
            "exp / (exp + 1)",
            GELU,
            descending,
            descending * 10,
            "values up to 20",
            "x / (1 + exp(−2u))",
        ),
    ]


@dataclass(frozen=True)
class Config(Options):
    """Options of the experiment."""

    seed: int = option(0, "seed of the inputs", least=0)


def measure(config: Config, context: RankContext, run: Run) -> None:
    """Add a row per error."""
    check_runs(context.device)
    torch.manual_seed(config.seed)
    with torch.device(context.device):
        for name, (faulty, ours, exact), benign, hostile, shown_by, instead in trials():
            errors = {
                case: (function(x) - exact(x.double())).abs().max().item()
                for case, function, x in (
                    ("benign", faulty, benign),
                    ("hostile", faulty, hostile),
                    ("ours", ours, hostile),
                )
            }
            run.add(name, errors, shown_by=shown_by, instead=instead)


VIEW = View(
    columns=[
        Column("variant", "error"),
        text_column("config.shown_by", "hostile input"),
        Column("metrics.benign", "benign", ".0e"),
        Column("metrics.hostile", "hostile", ".0e"),
        Column("metrics.ours", "ours", ".0e"),
        text_column("config.instead", "ours instead"),
    ],
    headline=headline_from("{device_name}, torch {torch}, triton {triton}"),
    reading="Benign and hostile are the largest differences of the faulty kernel from PyTorch in float64, on an input "
    "that hides the error and on the one that is described; ours is that of the public function on the hostile input. "
    "The last column says what that function does instead.",
)
EXPERIMENT = Experiment(
    Config,
    measure,
    VIEW,
    presets={"smoke": {}},
    wrong=lambda records: [
        r.variant
        for r in records
        if [error < TOLERANCE for error in r.metrics.values()] != [True, False, True]
    ],
)
