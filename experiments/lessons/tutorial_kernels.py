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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
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
    """Compute x xᵀ in fp16, by the kernel with errors."""
    rows, cols = x.shape
    return launch(
        gram_kernel, x, torch.zeros(rows, rows).half(), rows * rows, triton.cdiv(cols, 16)
    )


def our_gram(x: Tensor) -> Tensor:
    """Compute x xᵀ by `kernels`."""
    return matmul.matmul(x, x.T)


def exact_gram(x: Tensor) -> Tensor:
    """Compute x xᵀ by PyTorch."""
    return x @ x.T


def statistics(x: Tensor) -> Tensor:
    """Compute log Σ exp and the variance of rows, (2, rows, 1), by the kernel with errors."""
    return launch(statistics_kernel, x, torch.empty(2, len(x), 1), len(x))


def faulty_softmax(x: Tensor) -> Tensor:
    """Compute softmax of rows from the kernel's log Σ exp."""
    log_sum_exp, _ = statistics(x)
    return (x - log_sum_exp).exp()


def faulty_norm(x: Tensor) -> Tensor:
    """Compute LayerNorm of rows, without gain, from the kernel's variance."""
    _, variance = statistics(x)
    return (x - x.mean(1, keepdim=True)) * (variance + 1e-5).rsqrt()


def our_norm(x: Tensor) -> Tensor:
    """Compute LayerNorm of rows by `kernels`, with gains of one."""
    return layernorm.layer_norm(x, torch.ones(x.shape[1]))


def exact_norm(x: Tensor) -> Tensor:
    """Compute LayerNorm of rows, without gain, by PyTorch."""
    return torch.layer_norm(x, x.shape[1:])


def faulty_gelu(x: Tensor) -> Tensor:
    """Compute GeLU by the kernel with errors."""
    return launch(gelu_kernel, x, torch.empty_like(x), len(x))


@dataclass(frozen=True)
class Operation:
    """One operation as three functions of a matrix.

    Attributes:
        faulty: function with the errors.
        ours: public function of `kernels`.
        exact: function of PyTorch, called in float64.
    """

    faulty: Callable[[Tensor], Tensor]
    ours: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]


GRAM = Operation(gram, our_gram, exact_gram)
SOFTMAX = Operation(faulty_softmax, softmax.softmax, partial(torch.softmax, dim=1))
NORM = Operation(faulty_norm, our_norm, exact_norm)
GELU = Operation(faulty_gelu, elementwise.gelu, partial(F.gelu, approximate="tanh"))


@dataclass(frozen=True)
class HiddenError:
    """One error of a kernel, with inputs that hide it and show it.

    Attributes:
        name: name of the row.
        operation: operation that has the error.
        benign: input that hides it.
        hostile: input that shows it.
        shown_by: description of the hostile input.
        instead: description of what the function of `kernels` does.
    """

    name: str
    operation: Operation
    benign: Tensor
    hostile: Tensor
    shown_by: str
    instead: str


def hidden_errors() -> list[HiddenError]:
    """List the errors, with inputs drawn from torch's generator."""
    deep = torch.full((4, 512), 9.0)  # fp16 holds the sums of `short`: 2,592 and 1,944
    short = deep[:, :32]
    descending = torch.randn(4, 32).sort(descending=True).values
    return [
        HiddenError(
            name="small last group",
            operation=GRAM,
            benign=short,
            hostile=short[:3],
            shown_by="3 rows, groups of 2",
            instead="min(rows left, group)",
        ),
        HiddenError(
            name="wrapped offsets",
            operation=GRAM,
            benign=short,
            hostile=short[:, :24],
            shown_by="24 columns, blocks of 16",
            instead="masks, loads 0 there",
        ),
        HiddenError(
            name="sums in fp16",
            operation=GRAM,
            benign=short,
            hostile=deep,
            shown_by="sums of 41,472",
            instead="sums in fp32, rounds once",
        ),
        HiddenError(
            name="masked lanes are 0",
            operation=SOFTMAX,
            benign=descending,
            hostile=descending[:, :24] - 20,
            shown_by="24 columns, about −20",
            instead="loads −∞",
        ),
        HiddenError(
            name="sum not rescaled",
            operation=SOFTMAX,
            benign=descending,
            hostile=descending.flip(1),
            shown_by="maximum in the last block",
            instead="one maximum",
        ),
        HiddenError(
            name="equal weights",
            operation=NORM,
            benign=descending,
            hostile=descending[:, :24],
            shown_by="24 columns, blocks of 16",
            instead="weights by count",
        ),
        HiddenError(
            name="E[x²] − E[x]²",
            operation=NORM,
            benign=descending,
            hostile=descending + 1000,
            shown_by="mean of 1,000",
            instead="squares deviations",
        ),
        HiddenError(
            name="exp / (exp + 1)",
            operation=GELU,
            benign=descending,
            hostile=descending * 10,
            shown_by="values up to 20",
            instead="x / (1 + exp(−2u))",
        ),
    ]


@dataclass(frozen=True)
class TutorialKernelsConfig(Options):
    """Options of the experiment."""

    seed: int = option(0, "seed of the inputs", least=0)


def measure(config: TutorialKernelsConfig, context: RankContext, run: Run) -> None:
    """Add a row per error."""
    check_runs(context.device)
    torch.manual_seed(config.seed)
    with torch.device(context.device):
        for error in hidden_errors():
            operation = error.operation
            metrics = {
                "benign": distance(operation.faulty, operation.exact, error.benign),
                "hostile": distance(operation.faulty, operation.exact, error.hostile),
                "ours": distance(operation.ours, operation.exact, error.hostile),
            }
            run.add(error.name, metrics, shown_by=error.shown_by, instead=error.instead)


def distance(
    function: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], x: Tensor
) -> float:
    """Return the largest difference of a function's result from the exact one in float64."""
    return (function(x) - exact(x.double())).abs().max().item()


def wrong(records: Sequence[Record]) -> list[str]:
    """Name the errors that do not show exactly where they should: on the hostile input only."""
    found = []
    for record in records:
        benign, hostile, ours = (record.metrics[case] for case in ("benign", "hostile", "ours"))
        # "not <" instead of ">=": NaN also shows an error
        as_it_should = benign < TOLERANCE and not hostile < TOLERANCE and ours < TOLERANCE
        if not as_it_should:
            found.append(record.variant)
    return found


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
    reading="Benign and hostile are the largest differences of the faulty kernel from PyTorch in "
    "float64, on an input that hides the error and on the one that is described; ours is that of "
    "the public function on the hostile input. The last column says what that function does "
    "instead.",
)
EXPERIMENT = Experiment(
    TutorialKernelsConfig,
    measure,
    VIEW,
    presets={"smoke": {}},
    wrong=wrong,
)
