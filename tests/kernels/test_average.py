"""The kernel that averages: any number of others, any length, sums in fp32 or in fp64."""

import pytest
import torch

from kernels.average import average_into

from .near import near


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("numel", [0, 50, 4097])
def test_own_becomes_the_mean(numel, count, dtype):
    generator = torch.Generator().manual_seed(0)
    everything = torch.randn(count + 1, numel, generator=generator).to(dtype)
    own = everything[0].clone()
    # rows longer than what is read
    padded = torch.full((count, numel + 7), float("nan"), dtype=dtype)
    padded[:, :numel] = everything[1:]
    average_into(own, padded[:, :numel], 1 / (count + 1))
    expected = everything.double().mean(0)
    # One rounding to the type; the sum adds count roundings.
    ulps = (count + 2) * torch.finfo(dtype).eps
    near(own, expected, ulps)


def test_rows_far_apart():
    """Two rows 2³⁰ elements apart are 2³¹ from the first to the third.

    Nothing but the elements is touched.
    """
    storage = torch.empty(2**31 + 4, dtype=torch.float16)
    others = storage.as_strided((3, 4), (2**30, 1))
    others.copy_(torch.arange(12.0).view(3, 4))
    own = torch.zeros(4, dtype=torch.float16)
    average_into(own, others, 1.0)
    assert own.tolist() == [12.0, 15.0, 18.0, 21.0]
