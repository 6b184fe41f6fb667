"""Buffers, half precision, subgroups, arguments and results: what a wrapper must leave as it is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel import BucketedDDP, OverlapDDP, ZeroOptimizer, get_strategy, strategies_on
from tests.parallel.cases import build, by_op
from tests.parallel.test_contract import BACKENDS, STRATEGIES, on_two_ranks


class WithBuffers(nn.Module):
    """Buffers of several kinds, drawn anew by every rank."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.randn(3, 4))
        self.register_buffer("transposed", torch.randn(3, 4).t())
        self.register_buffer("count", torch.randint(0, 1000, ()))
        self.register_buffer("not_saved", torch.randn(5), persistent=False)

    def forward(self, x):
        return self.linear(x)


@on_two_ranks
def test_construction_takes_over_the_buffers_of_rank_0(context):
    """Of every strategy, torch's peers too; the ranks begin with different ones."""
    for name in strategies_on("cpu"):
        entry = get_strategy(name)
        if not entry.synchronizes:
            continue
        torch.manual_seed(10 + context.rank)
        model = WithBuffers()
        torch.manual_seed(10)
        expected = WithBuffers()
        entry.build(model, context.group, torch.optim.SGD)
        for (label, mine), theirs in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(mine, theirs), (name, label)


class Scaled(nn.Module):
    """Its gradient is `factor` everywhere."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, factor):
        return (self.weight * factor).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_half_precision_is_divided_before_it_is_summed(context, strategy, backend):
    """Check the mean in fp16: 40000 + 40000 exceeds fp16's maximum of 65504, the mean does not."""
    model = Scaled(torch.float16).to(context.device)
    wrapper = STRATEGIES[strategy](model, process_group=context.group)
    wrapper(torch.tensor(40000.0, dtype=torch.float16, device=context.device)).backward()
    wrapper.finish_gradient_synchronization()
    assert model.weight.grad[0].item() == 40000.0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks(3)
def test_a_subgroup_averages_among_itself(context, strategy):
    """Check that a subgroup averages its own ranks, starting from its first rank's values."""
    pair = dist.new_group([1, 2])
    if context.rank == 0:
        return
    torch.manual_seed(context.rank)
    model = Scaled(torch.float32)
    model.weight.data.fill_(context.rank)
    wrapper = STRATEGIES[strategy](model, process_group=pair)
    assert model.weight[0].item() == 1.0  # from the group's first rank, which is global rank 1
    wrapper(torch.tensor(float(context.rank))).backward()
    wrapper.finish_gradient_synchronization()
    assert model.weight.grad[0].item() == 1.5


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_a_dropped_wrapper_communicates_no_more(context, strategy):
    """Hooks hold their wrapper weakly: a model outlives a wrapper that nobody closed."""
    model = build("plain", 0, context.device)
    wrapper = STRATEGIES[strategy](model, process_group=context.group)
    del wrapper
    with CollectiveRecorder() as recorder:
        model(torch.ones(1, 6)).sum().backward()
    assert recorder.count == 0


@on_two_ranks
def test_messages_leave_while_backward_runs(context):
    """Of the strategies that overlap: all but the first layer's have left before that layer's
    gradient is there.

    Notes what has been sent when the first layer's gradient is computed, the last of all.
    """

    def bucketed(model, **options):
        return BucketedDDP(model, 1e-4, **options)

    def zero(model, **options):
        wrapper = bucketed(model, **options)
        model.optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1)
        return wrapper

    for make, op in (
        (OverlapDDP, "all_reduce"),
        (bucketed, "all_reduce"),
        (zero, "reduce_scatter"),
    ):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        wrapper = make(model, process_group=context.group)
        messages = 8 if make is OverlapDDP else len(wrapper.plan)
        for _ in range(2):
            wrapper.zero_grad()
            seen = []
            with CollectiveRecorder() as recorder:
                loss = wrapper(torch.ones(1, 6)).sum()
                hook = model[0].weight.register_hook(
                    lambda _, r=recorder, s=seen, op=op: s.append(by_op(r)[op][0])
                )
                assert recorder.count == 0
                loss.backward()
                assert by_op(recorder)[op][0] == messages  # all, before finish
                wrapper.finish_gradient_synchronization()
            hook.remove()
            # what remained was the first layer's weight and bias
            assert messages - 2 <= seen[0] < messages
