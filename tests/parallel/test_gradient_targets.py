"""Gradients that the model writes straight into a bucket: the same means, without a copy, whatever
happens around.
"""

from dataclasses import replace

import pytest
import torch

from distlab.comm import collectives
from distlab.model.config import preset
from distlab.model.ops import gradient_target
from distlab.model.transformer import TransformerLM
from distlab.parallel import get_strategy
from distlab.parallel.bucketed import GradientBucket
from distlab.parallel.buckets import plan_buckets
from distlab.testing import run_ranks
from distlab.train.data import SyntheticTokens
from distlab.train.step import next_token_loss


def test_a_gradient_that_lies_in_its_bucket_is_not_copied():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    (plan,) = plan_buckets([6], [torch.float32], None)
    bucket = GradientBucket(plan, [parameter])
    bucket.views[0].copy_(torch.arange(6.0).view(2, 3))
    parameter.grad = bucket.views[0].view_as(bucket.views[0])
    written = parameter.grad._version
    bucket.add(0)
    assert parameter.grad is bucket.views[0]
    assert parameter.grad._version == written
    assert torch.equal(parameter.grad, torch.arange(6.0).view(2, 3))


def test_a_target_is_not_the_gradient_that_someone_keeps():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    (plan,) = plan_buckets([6], [torch.float32], None)
    bucket = GradientBucket(plan, [parameter])
    for number in range(3):
        parameter.grad = None
        target = gradient_target(parameter)
        parameter.grad = target.fill_(number).view_as(target)
        bucket.add(0)
        bucket.unpack()
        if number == 0:
            kept = parameter.grad
        del target
        assert bucket.buffer[:6].tolist() == [number] * 6
    assert kept.tolist() == torch.zeros(2, 3).tolist()


def test_a_target_is_given_away_once_and_only_without_a_gradient():
    weight = torch.nn.Parameter(torch.zeros(2))
    target = torch.zeros(2)
    assert gradient_target(weight) is None
    weight.gradient_target = target
    weight.grad = torch.ones(2)
    assert gradient_target(weight) is None  # there is something to add to
    weight.grad = None
    assert gradient_target(weight) is target
    assert gradient_target(weight) is None  # used twice in one graph


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["flat", "bucketed"])
def test_a_closed_wrapper_offers_no_memory(context, name):
    module = torch.nn.Linear(3, 2)
    wrapper, _ = get_strategy(name).build(module, context.group, torch.optim.SGD)
    wrapper(torch.ones(1, 3)).sum().backward()
    wrapper.finish_gradient_synchronization()
    assert "gradient_target" in module.weight.__dict__
    wrapper.close()
    assert not any("gradient_target" in parameter.__dict__ for parameter in module.parameters())


def averages_what_the_model_writes(context, name, tied, set_to_none):
    config = replace(preset("tiny"), context_length=32, tie_embeddings=tied)
    data = SyntheticTokens(
        config.vocab_size, 2, 32, seed=0, rank=context.rank, device=context.device
    )
    strategy = get_strategy(name)
    model = TransformerLM(config, device=context.device, seed=0)
    wrapper, _ = strategy.build(model, context.group, torch.optim.SGD, bucket_size_mb=0.5)
    plain = TransformerLM(config, device=context.device, seed=0)

    def backward(module, step):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = next_token_loss(module, data.batch(step))
        loss.backward()

    for step in range(0, 6, 2):
        model.zero_grad(set_to_none=set_to_none)
        plain.zero_grad(set_to_none=set_to_none)
        if step:  # two micro-batches
            with wrapper.no_sync():
                backward(wrapper, step)
            backward(plain, step)
        backward(wrapper, step + 1)
        backward(plain, step + 1)
        wrapper.finish_gradient_synchronization()
        for (label, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            expected = collectives.sum_tensor(theirs.grad / context.world_size, context.group)
            # The embedding's gradient is summed by atomic additions, in any order.
            exact = not label.startswith("embedding")
            tolerance = 0 if exact else 1e-2
            torch.testing.assert_close(
                mine.grad, expected, rtol=tolerance, atol=tolerance * 1e-3, msg=label
            )
    wrapper.close()
    assert not any("gradient_target" in parameter.__dict__ for parameter in model.parameters())


@pytest.mark.multigpu
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["naive", "flat", "bucketed", "bucketed-dma"])
def test_the_means_are_those_of_gradients_made_apart(name, tied, set_to_none):
    run_ranks(averages_what_the_model_writes, 2, name, tied, set_to_none, backend="nccl")


@pytest.mark.gpu
def test_a_weight_gradient_is_the_fp32_sum_of_its_product():
    """Nearer to float64 than torch's under autocast, which rounds it to bf16.

    The result and dx are torch's.
    """
    from distlab.model.ops import linear

    torch.manual_seed(0)
    weight = torch.randn(48, 64, device="cuda", requires_grad=True)
    x = torch.randn(2, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(2, 100, 48, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (linear, torch.nn.functional.linear):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = function(x, weight)
        results.append((y, *torch.autograd.grad(y, (x, weight), dy)))
    (y, dx, dw), (y_torch, dx_torch, dw_torch) = results
    assert torch.equal(y, y_torch) and torch.equal(dx, dx_torch) and dw.dtype == torch.float32
    exact = dy.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
    assert (dw - exact).norm() < 1e-5 * exact.norm() < (dw_torch - exact).norm()
