"""What a wrapper refuses, and that the message says what to do."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import collectives
from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    ShardedOptimizer,
    ZeroOptimizer,
)
from distlab.parallel.checks import refuse_shared_memory
from tests.parallel.cases import OneProcess, by_op, drawn
from tests.parallel.test_contract import STRATEGIES, on_one_rank, on_two_ranks


def message_of(make):
    """The text of the ValueError, TypeError or RuntimeError that `make` raises."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        make()
    return str(caught.value)


@pytest.mark.ranks(3)
def test_ranks_with_different_models_all_get_the_same_error(context):
    """Check that every rank raises before any broadcast, and names both ranks' tensors."""
    for difference in (
        lambda model: model.append(nn.Linear(1, 1)),
        lambda model: model[0].bias.requires_grad_(False),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(3, 4).t())),
        lambda model: model.register_buffer("extra", torch.zeros(1)),
    ):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        if context.rank == 1:
            difference(model)
        with CollectiveRecorder() as recorder:
            text = message_of(lambda model=model: NaiveDDP(model, process_group=context.group))
        assert "broadcast" not in by_op(recorder)
        assert (
            "rank 0" in text and "rank 1" in text and "build the same model on every rank" in text
        )
        assert {*collectives.gather_objects(text, context.group)} == {text}


@on_two_ranks
def test_mistakes_are_named_with_what_to_do_instead(context):
    """Check that each error says what to do: frozen models, odd tensors, wrong groups, copies."""
    frozen = nn.Linear(2, 2).requires_grad_(False)
    wrapped = nn.Linear(2, 2)
    complex_ = nn.Linear(2, 2)
    complex_.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    two_devices = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    first = BucketedDDP(wrapped, process_group=context.group)
    only_rank_0 = dist.new_group([0])
    naive = partial(NaiveDDP, process_group=context.group)
    sparse, image = naive(nn.Embedding(5, 3, sparse=True)), naive(nn.Conv2d(3, 4, 3))
    bucketed = partial(BucketedDDP, nn.Linear(2, 2), process_group=context.group)
    rows = [
        ("no parameter that requires a gradient", partial(naive, frozen)),
        ("move the module to one device", partial(naive, two_devices)),
        ("'weight' is torch.complex64", partial(naive, complex_)),
        (r"call close\(\) on that wrapper first", partial(naive, wrapped)),
        ("bucket_size_mb=0.*positive", partial(bucketed, 0)),
        ("wrap the copy again", partial(copy.deepcopy, first)),
        ("wrap the copy again", partial(pickle.dumps, first)),
        (
            "'p1' and 'p2' are two parameters on the same memory",
            partial(naive, overlapping("transposed")),
        ),
        (
            "'1.weight' is uninitialized.*run one forward",
            partial(naive, nn.Sequential(wrapped, nn.LazyLinear(3))),
        ),
        (
            "cannot change 'weight' from torch.float32 on cpu to torch.float16 on cpu.*before "
            "wrapping",
            first.half,
        ),
        ("cannot change.*before wrapping", partial(first.to, "meta")),
        ("cannot change.*before wrapping", partial(image.to, memory_format=torch.channels_last)),
        ("'weight' is sparse", sparse(torch.tensor([1, 2])).sum().backward),
    ]
    if context.rank == 1:
        rows.append(("not a member", partial(NaiveDDP, nn.Linear(2, 2), process_group=only_rank_0)))
    for words, mistake in rows:
        text = message_of(mistake)
        assert re.search(words, text, re.DOTALL), (words, text)
    assert first.to(torch.float32).cpu().float() is first  # changes nothing
    first.close()
    naive(wrapped)  # after close() the same module can be wrapped again


class Holding(nn.Module):
    """Parameters as given, `p0`, `p1`, …"""

    def __init__(self, *parameters):
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)


def overlapping(kind):
    """Two parameters that share some memory."""
    whole = torch.randn(6, 6)
    pairs = {
        "transposed": (whole, whole.t()),
        "one-row": (whole[:4], whole[3:]),
        "columns": (whole[:, :3], whole[:, 3:]),
        "expanded": (whole[0, 3:4].expand(5, 1), whole[0]),
        "other-dtype": (whole, whole.view(torch.float64)),
    }
    first, second = pairs[kind]
    return Holding(nn.Parameter(torch.randn(2)), nn.Parameter(first), nn.Parameter(second))


@pytest.mark.parametrize("kind", ["transposed", "one-row", "columns", "expanded", "other-dtype"])
def test_two_parameters_on_the_same_memory_are_refused_by_name(kind):
    model = overlapping(kind)
    text = message_of(lambda: refuse_shared_memory(model))
    assert "'p1'" in text and "'p2'" in text and "one Parameter object" in text
    model.p1.requires_grad_(False)
    assert message_of(lambda: refuse_shared_memory(model)) == text
    model.p2.requires_grad_(False)
    refuse_shared_memory(model)  # constants may share


def test_parameters_that_only_share_a_storage_are_two_parameters():
    whole = torch.randn(6, 6)
    flat = whole.view(-1)
    for parts in (
        # as in a flattened model
        [flat[:7], flat[7:9], flat[9:9], flat[9:].view(3, 9), torch.randn(36)],
        [whole[:3].t(), whole[3:5], whole[5]],
    ):
        refuse_shared_memory(Holding(*map(nn.Parameter, parts)))
    tied = nn.Linear(3, 3)
    refuse_shared_memory(nn.Sequential(tied, tied))


def penalised(critic, rank):
    """A loss plus a penalty on the slope in x (Gulrajani et al. 2017)."""
    x = drawn(rank, 4, 6).requires_grad_()
    out = critic(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (slope.norm(dim=1) - 1).square().mean()


@on_two_ranks
def test_a_gradient_penalty_is_right_by_autograd_grad_and_refused_by_backward(context):
    """A `.grad` that is part of a graph cannot be averaged: the graph would be cut off without a
    word.
    """

    def critic():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    one = OneProcess(critic, context.world_size, torch.optim.SGD)
    one.backward(penalised)
    for strategy, make in STRATEGIES.items():
        wrapper = make(critic(), process_group=context.group)
        penalised(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        for mine, expected in zip(wrapper.parameters(), one.model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad, msg=strategy)
        wrapper.zero_grad()
        loss = wrapper(torch.ones(1, 6)).square().sum()
        with pytest.raises(
            RuntimeError,
            match=r"the gradient of '[02].*torch\.autograd\.grad\(.*create_graph=True\)",
        ):
            loss.backward(create_graph=True)
        wrapper.zero_grad()


@on_one_rank
def test_a_parameter_unfrozen_after_wrapping_is_named(context):
    """A hook cannot be there for it, so its gradient would silently differ between ranks."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    wrapper = NaiveDDP(model, process_group=context.group)
    model.bias.requires_grad_(True)
    wrapper(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="'bias' was frozen"):
        wrapper.finish_gradient_synchronization()


TORCH_NAMES = {  # what somebody who knows torch's classes writes
    "bucket_cap_mb": (BucketedDDP, (), {"bucket_cap_mb": 25}, "give bucket_size_mb, in MiB"),
    "device_ids": (NaiveDDP, ([0],), {}, "move the module to this rank's device"),
    "mp_policy": (FSDP, (), {"mp_policy": None}, "give compute_dtype"),
    "sharding_strategy": (FSDP, (), {"sharding_strategy": 1}, "two-dimensional mesh"),
    "find_unused_parameters": (FlatDDP, (), {"find_unused_parameters": True}, "leave it out"),
}


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_arguments_of_torchs_wrappers_are_answered_by_ours(name, one_rank):
    wrapper, positional, named, answer = TORCH_NAMES[name]
    with pytest.raises(TypeError, match=answer):
        wrapper(nn.Linear(2, 2), *positional, **named)


@pytest.mark.parametrize("wrapper", [NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP, FSDP])
def test_a_process_group_by_position_is_answered_by_its_name(wrapper, one_rank):
    with pytest.raises(TypeError, match=r"give it by name, process_group="):
        wrapper(nn.Linear(2, 2), one_rank.group)


def test_arguments_of_torchs_sharded_optimizer_are_answered_by_ours(one_rank):
    ddp = BucketedDDP(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="give optimizer_cls"):
        ZeroOptimizer(ddp, optimizer_class=torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="overlap_with_ddp: leave it out"):
        ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
