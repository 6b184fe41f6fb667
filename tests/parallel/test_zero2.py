"""ZeroOptimizer with `shard_gradients=True`: ZeRO-1's training, with the memory of shards only."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

from distlab.comm import collectives
from distlab.measure import CollectiveRecorder
from distlab.model.ops import gradient_target
from distlab.parallel import BucketedDDP, ZeroOptimizer
from tests.parallel.cases import CASES, build, drawn
from tests.parallel.test_contract import on_two_ranks

SMALL = 104 / 2**20  # MiB: many buckets
NOT_ZEROED = r"were not zeroed .*call zero_grad\(\) of the ZeroOptimizer or of the wrapper"


def wrapped(context, shard_gradients=True, case="plain"):
    wrapper = BucketedDDP(
        build(case, 0, context.device), bucket_size_mb=SMALL, process_group=context.group
    )
    options = {"lr": 0.1, "momentum": 0.9, "shard_gradients": shard_gradients}
    return wrapper, ZeroOptimizer(wrapper, torch.optim.SGD, **options)


def loss_of(wrapper, context, number, case="plain"):
    return CASES[case].loss(wrapper, context.rank, number, context.device)


@pytest.mark.parametrize("case", ["plain", "tied", "unused-on-some", "mixed-dtypes", "odd-strides"])
@on_two_ranks
def test_steps_are_those_of_zero1_bit_for_bit(context, case):
    """Norms, parameters and the optimizer's state, whether no_sync() keeps gradients or not."""
    ends = []
    for shard_gradients in (False, True):
        wrapper, optimizer = wrapped(context, shard_gradients, case)
        seen = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            with wrapper.no_sync() if step == 2 else nullcontext():
                loss_of(wrapper, context, 2 * step, case).backward()
            if step == 2:
                loss_of(wrapper, context, 2 * step + 1, case).backward()
            wrapper.finish_gradient_synchronization()
            seen.append(wrapper.clip_grad_norm_(0.1))
            optimizer.step()
        seen += [parameter.detach().clone() for parameter in wrapper.module.parameters()]
        for state in optimizer.state_dict()["state"].values():
            seen.append(state["momentum_buffer"])
        ends.append(seen)
    assert all(map(torch.equal, *ends))


@on_two_ranks
def test_a_finish_after_each_micro_batch_adds_to_the_shards(context):
    """Means of micro-batches are summed, which rounds otherwise than the mean of their sum."""
    ends = []
    for shard_gradients in (False, True):
        wrapper, optimizer = wrapped(context, shard_gradients)
        for step in range(2):
            optimizer.zero_grad()
            for number in range(3):
                adds_locally = number < 2 and not shard_gradients
                with wrapper.no_sync() if adds_locally else nullcontext():
                    loss_of(wrapper, context, 3 * step + number).backward()
                if shard_gradients:
                    wrapper.finish_gradient_synchronization()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in wrapper.module.parameters()])
    torch.testing.assert_close(*ends)


@on_two_ranks
def test_gradients_are_freed_bucket_by_bucket(context):
    wrapper, optimizer = wrapped(context)
    assert len(wrapper.buckets) > 3
    allocated = []
    send = collectives.reduce_scatter_mean

    def sent(*arguments):
        allocated.append(sum(bucket.buffer is not None for bucket in wrapper.buckets))
        return send(*arguments)

    with patch.object(collectives, "reduce_scatter_mean", sent):
        loss_of(wrapper, context, 0).backward()
    assert max(allocated) == 2  # one was filled, and the one before is on its way
    wrapper.finish_gradient_synchronization()
    assert all(bucket.buffer is None for bucket in wrapper.buckets)
    assert all(parameter.grad is None for parameter in wrapper.module.parameters())
    held = wrapper.gradients().every()
    assert sum(gradient.numel() for gradient in held) <= sum(
        plan.slice_numel for plan in wrapper.plan
    )
    optimizer.step()
    optimizer.zero_grad()
    assert not wrapper.gradients().every()


class Written(torch.autograd.Function):
    """A linear layer that writes its weight's gradient to its target, as ours does on a GPU."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        target = gradient_target(ctx.weight)
        torch.mm(dy.t(), x, out=target)
        return dy @ ctx.weight, target.view_as(target)


@on_two_ranks
def test_a_gradient_is_written_to_memory_that_is_allocated_for_it(context):
    module = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    wrapper = BucketedDDP(module, bucket_size_mb=SMALL, process_group=context.group)
    ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1, shard_gradients=True)
    assert len(wrapper.buckets) == 4
    found = []
    for written in (False, True):
        wrapper.zero_grad()
        x = drawn(context.rank, 3, 4).requires_grad_()
        for layer in module:
            x = Written.apply(x, layer.weight) if written else layer(x)
        x.square().mean().backward()
        wrapper.finish_gradient_synchronization()
        found.append([gradient.clone() for gradient in wrapper.gradients().every()])
    assert all(map(torch.equal, *found))
    wrapper.close()
    assert not any("gradient_target" in parameter.__dict__ for parameter in module.parameters())


@pytest.mark.parametrize("by", ["optimizer", "wrapper"])
@on_two_ranks
def test_a_step_that_is_skipped_leaves_nothing(context, by):
    """Its collectives are completed, and the next step is that of a wrapper which never ran it."""
    ends = []
    for skips in (False, True):
        wrapper, optimizer = wrapped(context)
        if skips:
            loss_of(wrapper, context, 7).backward()
            (optimizer if by == "optimizer" else wrapper).zero_grad()
            assert not wrapper.gradients().every()
        loss_of(wrapper, context, 0).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        ends.append([parameter.detach().clone() for parameter in wrapper.module.parameters()])
    assert all(map(torch.equal, *ends))


@on_two_ranks
def test_gradients_of_the_last_step_are_not_added_to(context):
    """The module's own zero_grad() finds no gradients, and the wrapper cannot see that it ran."""
    wrapper, optimizer = wrapped(context)
    loss_of(wrapper, context, 0).backward()
    wrapper.finish_gradient_synchronization()
    optimizer.step()
    wrapper.module.zero_grad()
    with pytest.raises(RuntimeError, match=NOT_ZEROED):
        loss_of(wrapper, context, 1).backward()
        wrapper.finish_gradient_synchronization()


@on_two_ranks
def test_a_gradient_that_is_set_after_finish_is_refused(context):
    wrapper, optimizer = wrapped(context)
    loss_of(wrapper, context, 0).backward()
    wrapper.finish_gradient_synchronization()
    weight = wrapper.trainable[0]
    refused = pytest.raises(RuntimeError, match="is not as finish_gradient_synchronization")
    with refused, wrapper.elementwise_gradient_edits():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="is not as finish_gradient_synchronization"):
        optimizer.step()


@on_two_ranks
def test_each_micro_batch_sends_its_gradients_and_the_step_gathers_once(context):
    wrapper = BucketedDDP(nn.Linear(4, 4), process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1, shard_gradients=True)
    with CollectiveRecorder() as recorder:
        for number in range(3):
            wrapper(drawn(number, 2, 4)).sum().backward()
            wrapper.finish_gradient_synchronization()
        optimizer.step()
    # A reduce-scatter and the used flags of each micro-batch, and the all-gather.
    assert recorder.count == 3 * 2 + 1
