"""Rows of a large input, here with a border that is small enough for a CPU."""

import pytest
import torch

from distlab.kernel_check import OPERATIONS, large
from distlab.kernel_check.judge import Outcome

CPU = torch.device("cpu")
# Heads of attention are as large in the test as they are on a GPU.
NAMES = [name for name in OPERATIONS if not name.endswith("attention")]


def judged(function, name) -> Outcome:
    """Return the outcome of a function on an input of a little more than 4 rows."""
    elements = 4 * large.LARGE.get(name, large.ROWS).per_row
    case = large.large_case(OPERATIONS[name], backward=True, elements=elements)
    return large.judge_large(function, OPERATIONS[name], case, CPU, elements)


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_operations_are_right_in_their_rows(name):
    outcome = judged(OPERATIONS[name].exact, name)
    assert outcome.status == "right" and outcome.has_backward, outcome


@pytest.mark.parametrize("name", ["rms_norm", "matmul", "rope"])
@pytest.mark.parametrize("row", [0, 4, 7])
def test_a_wrong_row_is_named(name, row):
    def kernel(*tensors):
        result = OPERATIONS[name].exact(*tensors)
        keep = (torch.arange(len(result)) != row).to(result.dtype)
        return result * keep.view(-1, *[1] * (result.ndim - 1))

    outcome = judged(kernel, name)
    assert outcome.kind == "result above 2³¹ elements" and outcome.detail, outcome


def test_too_few_rows_are_a_wrong_shape():
    outcome = judged(lambda x, weight: x[:3], "rms_norm")
    assert outcome.kind == "shape above 2³¹ elements"


def test_the_largest_tensor_of_each_operation_needs_an_offset_of_64_bits():
    for operation in OPERATIONS.values():
        case = large.large_case(operation, backward=True)
        sizes, tensor = dict(case.sizes), large.LARGE.get(operation.name, large.ROWS).tensor
        elements = 1
        for name in tensor:
            elements *= sizes[name]
        assert 2**31 < elements < 1.01 * 2**31 and operation.is_valid(sizes)
        assert set(sizes) == set(operation.sizes)


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 80 * 2**30))
    operation = OPERATIONS["softmax"]
    case = large.large_case(operation, backward=True)
    outcome = large.judge_large(operation.exact, operation, case, torch.device("cuda"))
    assert outcome.status == "not tried"
    assert outcome.detail == (
        "tensors above 2³¹ elements need 24 GiB of the GPU's memory, and 10 GiB are free"
    )
