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


def wrapped(context, shard_gradients=True, case="plain", bucket_size_mb=SMALL):
    wrapper = BucketedDDP(
        build(case, 0, context.device), bucket_size_mb, process_group=context.group
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
    for parameter in wrapper.module.parameters():
        assert parameter.grad.untyped_storage().nbytes() == parameter.element_size()
        assert parameter.grad.isnan().all()
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


@pytest.mark.parametrize("by", ["optimizer", "wrapper", "module"])
@on_two_ranks
def test_a_step_that_is_skipped_leaves_nothing(context, by):
    """Its collectives are completed, and the next step is that of a wrapper which never ran it."""
    ends = []
    for skips in (False, True):
        wrapper, optimizer = wrapped(context)
        if skips:
            loss_of(wrapper, context, 7).backward()
            {"optimizer": optimizer, "wrapper": wrapper, "module": wrapper.module}[by].zero_grad()
        loss_of(wrapper, context, 0).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        ends.append([parameter.detach().clone() for parameter in wrapper.module.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before forward", "before backward"])
@on_two_ranks
def test_the_modules_own_zero_grad_zeroes_the_means(context, when, to_none):
    ends = []
    for shard_gradients in (False, True):
        wrapper, optimizer = wrapped(context, shard_gradients)
        for number in range(3):
            if when == "before forward":
                wrapper.module.zero_grad(to_none)
            loss = loss_of(wrapper, context, number)
            if when == "before backward":
                wrapper.module.zero_grad(to_none)
            loss.backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in wrapper.module.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("bucket_size_mb", [SMALL, 25.0])
@on_two_ranks
def test_what_is_zeroed_begins_anew_and_the_rest_is_added_to(context, bucket_size_mb):
    """Also inside a bucket, as without a wrapper."""
    alone = build("plain", 0, context.device)
    wrapper, _ = wrapped(context, bucket_size_mb=bucket_size_mb)
    for number in range(3):
        if number == 2:
            for module in (alone, wrapper.module):
                for parameter in list(module.parameters())[::2]:
                    parameter.grad = None
        loss_of(wrapper, context, number).backward()
        wrapper.finish_gradient_synchronization()
        for rank in range(2):
            (CASES["plain"].loss(alone, rank, number, context.device) / 2).backward()
    for shard in wrapper.shards():
        expected = alone.get_parameter(shard.name).grad.reshape(-1)
        wrapper.gradients()
        if shard.tensor.grad is not None:
            mine = expected[shard.start : shard.start + shard.tensor.numel()]
            torch.testing.assert_close(shard.tensor.grad.reshape(-1), mine)


@on_two_ranks
def test_gradients_that_are_never_zeroed_are_added_to_over_steps(context):
    """As torch does without a wrapper, and under its DDP."""
    alone = build("plain", 0, context.device)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    wrapper, optimizer = wrapped(context)
    for number in range(3):
        loss_of(wrapper, context, number).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        for rank in range(2):
            (CASES["plain"].loss(alone, rank, number, context.device) / 2).backward()
        plain.step()
    for mine, expected in zip(wrapper.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("foreach", [True, False])
@on_two_ranks
def test_torchs_clipping_raises(context, foreach):
    """It would see none of the gradients, and clip nothing."""
    wrapper, _ = wrapped(context)
    loss_of(wrapper, context, 0).backward()
    wrapper.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.nn.utils.clip_grad_norm_(wrapper.parameters(), 1.0, foreach=foreach)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.nn.utils.clip_grad_value_(wrapper.parameters(), 1.0, foreach=foreach)


@on_two_ranks
def test_a_closed_wrapper_leaves_no_stand_in(context):
    wrapper, _ = wrapped(context)
    loss_of(wrapper, context, 0).backward()
    wrapper.finish_gradient_synchronization()
    wrapper.close()
    assert all(parameter.grad is None for parameter in wrapper.module.parameters())
    loss_of(wrapper.module, context, 0).backward()
    assert all(parameter.grad.isfinite().all() for parameter in wrapper.module.parameters())


@on_two_ranks
def test_edits_reach_the_means_or_are_refused(context):
    wrapper, optimizer = wrapped(context)
    loss_of(wrapper, context, 0).backward()
    wrapper.finish_gradient_synchronization()
    before = [gradient.clone() for gradient in wrapper.gradients().every()]
    with wrapper.elementwise_gradient_edits():
        for gradient in wrapper.gradients().every():
            gradient.mul_(2.0)
    for gradient, unedited in zip(wrapper.gradients().every(), before, strict=True):
        assert torch.equal(gradient, 2 * unedited)
    weight = wrapper.trainable[0]
    for edit in ("set", "zeroed"):
        refused = pytest.raises(RuntimeError, match="was set or zeroed")
        with refused, wrapper.elementwise_gradient_edits():
            if edit == "set":
                weight.grad = torch.ones_like(weight)
            else:
                weight.grad.zero_()
        with pytest.raises(RuntimeError, match="is not as finish_gradient_synchronization"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(wrapper, context, 0).backward()
        wrapper.finish_gradient_synchronization()


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


@on_two_ranks
def test_a_second_backward_is_no_skipped_step(context):
    """Also where the stand-in of the only parameter was taken away when backward reached it."""

    def one_parameter():
        wrapper = BucketedDDP(nn.Linear(4, 4, bias=False), process_group=context.group)
        return wrapper, ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1, shard_gradients=True)

    inputs = [drawn(number + 2 * context.rank, 2, 4) for number in range(2)]
    wrapper, _ = one_parameter()
    wrapper(inputs[0]).sum().backward()
    with pytest.raises(RuntimeError, match="became ready twice"):
        wrapper(inputs[1]).sum().backward()

    wrapper, optimizer = one_parameter()
    wrapper(inputs[0]).sum().backward()
    optimizer.zero_grad()  # skips the step
    wrapper(inputs[1]).sum().backward()
    wrapper.finish_gradient_synchronization()
    skipped = [gradient.clone() for gradient in wrapper.gradients().every()]
    wrapper, _ = one_parameter()
    wrapper(inputs[1]).sum().backward()
    wrapper.finish_gradient_synchronization()
    assert all(map(torch.equal, skipped, wrapper.gradients().every()))
