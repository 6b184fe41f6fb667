"""Dtypes under a compute dtype: matrices and what enters their products are cast, norms stay in
fp32.
"""

import copy
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from distlab.model.ops import get_ops
from distlab.model.transformer import RMSNorm as OurRMSNorm
from distlab.parallel.fsdp import FSDP
from tests.parallel.test_contract import BACKENDS, on_two_ranks
from tests.parallel.test_fsdp import OwnRMSNorm

HALVES = [torch.float16, torch.bfloat16]


class Norms(nn.Module):
    """Everything of torch's, and of one's own, that owns vectors only.

    And torch's modules that want one dtype.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv1d(8, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norms = nn.ModuleList(
            [
                nn.LayerNorm(8),
                nn.RMSNorm(8),
                OwnRMSNorm(8),
                OurRMSNorm(8, 1e-5, get_ops()),
                nn.PReLU(),
            ]
        )
        nn.init.ones_(self.norms[3].weight)
        self.of_channels = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True)])

    def forward(self, x):
        x = self.conv(self.batch_norm(self.layer(x).transpose(1, 2))).transpose(1, 2)
        x = x + self.attention(x, x, key_padding_mask=None, value=x, need_weights=False)[0]
        for norm in self.norms:
            x = norm(x)
        for norm in self.of_channels:
            x = norm(x.transpose(1, 2)).transpose(1, 2)
        return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES)
@on_two_ranks
def test_norms_of_all_kinds_compute_in_fp32(context, dtype, backend):
    """Check that FSDP casts inputs only of modules that own matrices. BatchNorm stays fp32."""
    torch.manual_seed(0)
    model = Norms().to(context.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.1)
    twin = copy.deepcopy(model)
    fsdp = FSDP(model, dtype, process_group=context.group)
    dtypes = []
    for module in [*model.norms, *model.of_channels]:
        module.register_forward_hook(
            lambda module, args, output: dtypes.append((output.dtype, module.weight.dtype))
        )
    x = torch.randn(4, 5, 8, device=context.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's RMSNorm warns of operands of two dtypes
        out = fsdp(x)
        out.float().square().mean().backward()
    fsdp.finish_gradient_synchronization()
    assert fsdp.module.batch_norm.running_mean.dtype == torch.float32
    assert out.dtype == dtype and set(dtypes) == {(dtype, torch.float32)} and len(dtypes) == 7
    twin(x).square().mean().backward()
    for name, parameter in fsdp.named_parameters():
        expected = twin.get_parameter(name.removeprefix("module.")).grad
        if parameter.shape == expected.shape:
            assert parameter.grad.dtype == torch.float32
            # Nine roundings of activations to 8 or 11 bits, in sums of 160 terms around one.
            torch.testing.assert_close(parameter.grad, expected, rtol=0.05, atol=0.05)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class OfContainers(nn.Module):
    """Reads its inputs out of containers, and fills one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, batch, pair, *, more, filled):
        filled.append(batch["ids"])
        inputs = [batch["x"], pair.first, pair.second, *more]
        assert {value.dtype for value in inputs} == {torch.bfloat16}
        assert batch["ids"].dtype == torch.int64
        return sum(value @ self.weight for value in inputs)


@on_two_ranks
def test_inputs_inside_of_containers_are_cast_and_containers_without_any_stay(context):
    fsdp = FSDP(OfContainers(), torch.bfloat16, process_group=context.group)
    x = torch.ones(2, 4)
    filled = []
    batch = {"x": x, "ids": torch.arange(2)}
    fsdp(batch, Pair(x, 2 * x), more=[x, x], filled=filled).sum().backward()
    fsdp.finish_gradient_synchronization()
    assert len(filled) == 1 and batch["x"] is x and x.dtype == torch.float32
    (gradient,) = fsdp.gradients().every()
    assert torch.equal(gradient, torch.full_like(gradient, 12.0))
