"""18 kernels with one mistake each: right on their author's input, and each named by the
checker.
"""

import math
import re
from dataclasses import dataclass

import pytest
import torch

from distlab.kernel_check import OPERATIONS
from distlab.kernel_check.hostile import cases, drawn
from distlab.kernel_check.report import examine
from tests.commands import ROOT

pytest.importorskip("triton")
from examples import faulty_kernels

CPU = torch.device("cpu")
PAGE = ROOT / "docs" / "learn" / "tutorial_kernels.md"

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU does not interpret kernels"
)


@dataclass(frozen=True)
class Mistake:
    """A kernel and what the checker says of it.

    Attributes:
        kernel: name in `examples.faulty_kernels`.
        operation: operation that it claims to be.
        kind: what is wrong.
        smallest: pattern that is found in the smallest input that shows it.
    """

    kernel: str
    operation: str
    kind: str
    smallest: str


MISTAKES = (
    # One row of tiles where a group has two: the second tile is never written.
    Mistake("small_last_group", "matmul", "uninitialised memory", "M=1 K=1 N=33, fp32"),
    # K is not a multiple of the block.
    Mistake("wrapped_offsets", "matmul", "result", "M=1 K=1 N=1, fp32"),
    # The longest sums.
    Mistake("sums_in_fp16", "matmul", "result", "K=257 .*fp16"),
    # 15 is the smallest size here that is not a power of two.
    Mistake("masked_lanes_are_zero", "softmax", "result", "N=1 D=15, fp32"),
    Mistake("padding_in_variance", "layer_norm", "result", "N=1 D=15, fp32"),
    # The second block has one element, and the largest.
    Mistake("sum_not_rescaled", "softmax", "result", "N=1 D=65, fp32, values ascending"),
    Mistake("equal_weights_of_blocks", "layer_norm", "result", "N=1 D=65, fp32"),
    Mistake("square_minus_square", "layer_norm", "result", "D=2, fp32, values mean 1,000"),
    Mistake("exp_overflow", "gelu", "result is NaN", "D=63, fp32, values ascending"),
    # Two rows, because the first one begins at the same element in any layout.
    Mistake("StridedUpstream", "gelu", "gradient of x", "N=2 D=2, fp32, transposed upstream"),
    Mistake("row_stride_ignored", "softmax", "result is NaN", "N=2 D=1, fp32, sliced inputs"),
    Mistake("transposed_as_contiguous", "add", "result", "N=2 D=2, fp32, transposed inputs"),
    # The smallest number of targets of which one is ignored.
    Mistake("mean_over_all_tokens", "cross_entropy", "result", "N=3 D=2, fp32"),
    # One key, whose logit is far below 0.
    Mistake("maximum_from_zero", "causal_attention", "result is NaN", "T=1, fp32, values ±50"),
    Mistake("finite_sentinel", "softmax", "result", "N=1 D=1, fp32, values mean −1e5"),
    # 1,600 gradients of logits, whose absolute values add up to at most 2.
    Mistake("SmallGradientsDropped", "linear_cross_entropy", "gradient of x", "N=16 D=16 V=100"),
    Mistake("AllIgnored", "cross_entropy", "gradient of logits is NaN", "values all ignored"),
    Mistake("cached_by_shape", "rms_norm", "result", "N=1 D=1, fp32, after a call with other"),
)


class Found(Exception):
    """Ends an examination: what it looks for is found."""


def until_found(kernel, operation, kind):
    """Examine a kernel until a mistake of this kind is found.

    It shows in the first 20 of about 50 inputs. The interpreter would take many seconds for the
    rest of them.

    Returns:
        The outcomes of the inputs so far, and the finding.
    """
    outcomes, findings = [], []

    def found(finding):
        findings.append(finding)
        if finding.kind == kind:
            raise Found

    with pytest.raises(Found):
        examine(
            kernel,
            operation,
            CPU,
            backward=True,
            count=0,
            seed=0,
            seconds=math.inf,
            begin=lambda number, case: None,
            end=outcomes.append,
            found=found,
            rest=lambda left: None,
        )
    return outcomes, findings[-1]


@pytest.mark.parametrize(
    "mistake", [pytest.param(mistake, id=mistake.kernel) for mistake in MISTAKES]
)
def test_the_plain_input_hides_a_mistake_and_the_checker_names_it(mistake):
    operation = OPERATIONS[mistake.operation]
    kernel = getattr(faulty_kernels, mistake.kernel)

    plain = next(cases(operation, ["fp32"], backward=False, count=0, seed=0))
    tensors = drawn(plain, operation, CPU)
    call = getattr(kernel, "apply", kernel)  # a subclass of torch.autograd.Function has `apply`
    # fp32 sums of 64 elements in another order than torch's
    torch.testing.assert_close(call(*tensors), operation.exact(*tensors), atol=1e-5, rtol=1e-5)

    outcomes, finding = until_found(kernel, operation, mistake.kind)
    # The plain input was right, and none was refused.
    assert {outcome.status for outcome in outcomes} == {"right", "wrong"}
    assert re.search(mistake.smallest, finding.smallest), finding


def test_the_page_has_a_row_for_each_mistake():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len({mistake.kernel for mistake in MISTAKES}) == len(rows) == 18
    for mistake in MISTAKES:
        (row,) = (row for row in rows if row.startswith(f"| `{mistake.kernel}`"))
        assert re.search(mistake.smallest, row) and f"| {mistake.operation} |" in row
