"""What scripts do to a wrapped module besides training it: right under every strategy, or refused in one sentence."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.comm import RankContext
from distlab.parallel import FSDP, BucketedDDP, FlatDDP, NaiveDDP, ShardedOptimizer, ZeroOptimizer
from distlab.parallel.base import ParallelModel
from tests.parallel.test_contract import run

Made = tuple[ParallelModel, torch.optim.Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def wrapped(context: RankContext, kind: Callable[..., ParallelModel] | str, module: nn.Module | None = None) -> Made:
    module, group = module or net(), context.group
    if kind == "zero1":
        wrapper = BucketedDDP(module, process_group=group)
        return wrapper, ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.5)
    if kind == "sharded":
        wrapper = BucketedDDP(module, process_group=group)
        return wrapper, ShardedOptimizer(wrapper.parameters(), torch.optim.SGD, group, lr=0.5)
    wrapper = kind(module, process_group=group)
    return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.5)


def step(forward: Callable, made: Made, context: RankContext, number: int, update: Callable | None = None) -> None:
    wrapper, optimizer = made
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + context.rank))
    optimizer.zero_grad()
    forward(x).square().mean().backward()
    wrapper.finish_gradient_synchronization()
    (update or optimizer.step)()


def full(made: Made) -> list[Tensor]:
    return [value.detach().clone() for value in made[0].full_parameters().values()]


# -- values assigned by `.data` ------------------------------------------------------------------------------


def _as_a_vector(parameters: list[nn.Parameter]) -> None:
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector / 2, parameters)


def _one_by_one(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data / 2


def _swapped(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() / 2))


def assigned(context: RankContext) -> None:
    for assign in (_as_a_vector, _one_by_one, _swapped):
        ends = []
        for kind in (BucketedDDP, "zero1", FSDP):
            made = wrapped(context, kind)
            step(made[0], made, context, 0)
            assign(list(made[0].parameters()))
            step(made[0], made, context, 1)
            step(made[0], made, context, 2)
            before = full(made)
            ends.append(before)
            assign(list(made[0].parameters()))
            for shard, mine in zip(made[0].shards(), made[0].parameters(), strict=True):  # what a checkpoint stores
                part = mine.detach().flatten()[shard.start : shard.start + shard.tensor.numel()]
                assert kind is FSDP or torch.equal(shard.tensor.flatten(), part)
            for value, half in zip(before, full(made), strict=True):
                torch.testing.assert_close(half, value / 2)
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0])
    for kind in ("zero1", FSDP):
        made = wrapped(context, kind)
        parameter = max(made[0].parameters(), key=torch.numel)
        parameter.data = parameter.data.half()
        with pytest.raises(ValueError, match=r"\.data was assigned .*float16.*: assign the same"):
            made[0].full_parameters() if kind is FSDP else made[0].shards()


def test_values_that_are_assigned_reach_the_shards():
    """`vector_to_parameters`, `p.data = …` and `swap_tensors`, beside a wrapper that keeps parameters whole."""
    run(assigned, 2)


# -- copies --------------------------------------------------------------------------------------------------


def copied(context: RankContext) -> None:
    x = torch.ones(2, 6)
    for kind in (NaiveDDP, FlatDDP, BucketedDDP, "zero1"):
        made = wrapped(context, kind)
        step(made[0], made, context, 0)
        module = made[0].module
        average = copy.deepcopy(module)
        average.load_state_dict(module.state_dict())  # as an average of weights begins
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.load_state_dict(module.state_dict(), assign=True)
        for other in (average, loaded):
            assert torch.equal(other(x), module(x))
            other(x).sum().backward()  # on one rank as on two: nothing is sent
        assert made[0].check_gradients() is None
        with pytest.raises(RuntimeError, match=r"replaced '0\.weight'"):
            module.load_state_dict(average.state_dict(), assign=True)
    module = FSDP(net(), process_group=context.group).module
    for duplicate in (copy.deepcopy, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(TypeError, match=r"holds this rank's shards and cannot be copied, .*: take gather_full"):
            duplicate(module)


def test_a_copy_of_the_wrapped_module_is_an_ordinary_module():
    """Averaged weights by deepcopy, `torch.save(wrapper.module)`; shards are no module by themselves."""
    run(copied, 2)


# -- torch.compile -------------------------------------------------------------------------------------------


def compiled(context: RankContext) -> None:
    def trained(kind: Any, part: str, normed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        made = wrapped(context, kind, blocks if normed else net())
        wrapper, optimizer = made
        forward = torch.compile(wrapper, backend="aot_eager") if part == "wrapper" else wrapper
        update = torch.compile(optimizer.step, backend="aot_eager") if part == "step" else None
        for number in range(3):
            step(forward, made, context, number, update)
        return full(made)

    for normed in (False, True):  # it was the second FSDP at which Dynamo failed
        expected = trained(BucketedDDP, "", normed)
        for kind, part in (("zero1", "step"), ("sharded", "step"), (FSDP, "wrapper")):
            torch.testing.assert_close(trained(kind, part, normed), expected)


def test_a_compiled_step_and_a_compiled_wrapper_train_alike():
    run(compiled, 2)


# -- refused -------------------------------------------------------------------------------------------------


def refused(context: RankContext) -> None:
    x = torch.ones(2, 6)
    for hook in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        wrapper = FSDP(net(), process_group=context.group)
        handle = hook(wrapper.module[2].weight, lambda _: None)
        wrapper(x).sum().backward()
        with pytest.raises(ValueError, match=r"hook on '2\.weight' never fires.*: remove it"):
            wrapper.finish_gradient_synchronization()
        handle.remove()
        wrapper.finish_gradient_synchronization()
    wrapper = FSDP(net(), torch.bfloat16, process_group=context.group)
    dict(wrapper.module.named_parameters())["2.bias"].register_hook(lambda _: None)  # forward reads a copy of it
    wrapper(x).sum().backward()
    with pytest.raises(ValueError, match=r"hook on '2\.bias' never fires"):
        wrapper.finish_gradient_synchronization()

    wrapper = FSDP(net(), process_group=context.group)
    for inputs in ([wrapper.module[0].weight], list(wrapper.parameters())):
        wrapper(x).sum().backward(inputs=inputs)
        with pytest.raises(RuntimeError, match=r"no backward has brought .*: call loss\.backward\(\) without inputs"):
            wrapper.finish_gradient_synchronization()
    inputs = x.clone().requires_grad_()
    assert torch.autograd.grad(wrapper(inputs).sum(), inputs)[0].any()  # is not refused
    wrapper(x).sum().backward()
    wrapper.finish_gradient_synchronization()

    with pytest.raises(ValueError, match=r"'0' renormalises its rows in forward \(max_norm\).*: leave max_norm out"):
        wrapped(context, "zero1", nn.Sequential(nn.Embedding(5, 4, max_norm=0.5)))
    with pytest.raises(RuntimeError, match=r"forward writes to '0\.weight' in place .*: write to fsdp\.parameters"):
        module = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5))
        FSDP(module, process_group=context.group)(torch.tensor([1, 2]))


def test_what_a_strategy_cannot_do_it_names():
    """Hooks on shards, `backward(inputs=…)`, an embedding's `max_norm`."""
    run(refused, 2)
