"""ZeroOptimizer's parameters while they are being gathered: whoever reads one, wherever, gets the new values.

The all-gathers here are late: what they bring is put in place by `wait()` and not before, so that a
reader that does not wait is wrong in every run.
"""

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.parallel import BucketedDDP, ZeroOptimizer
from tests.fuzz import Late, late_arrivals
from tests.parallel.cases import drawn
from tests.parallel.test_contract import on_one_rank, on_two_ranks

SMALL = 80 / 2**20  # MiB: a bucket for each linear layer of 4 × 4


late_gathers = partial(late_arrivals, "all_gather")


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make():
    torch.manual_seed(0)
    return Blocks()


def batch(rank, step):
    return drawn(10 * step + rank, 2, 3, 4)


def train(wrapper, optimizer, loss_of, rank, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(wrapper, batch(rank, step))
        loss.backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def square(wrapper, x):
    return wrapper(x).square().mean()


class Logged(nn.Parameter):
    """A parameter of a class that handles operators itself."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})


def _pointed_to(parameter):
    """As a kernel reads it: by its address."""
    import ctypes

    floats = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
    return torch.tensor(list(floats)).view(parameter.shape)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda w: F.linear(torch.eye(4), w).t(),
    "data": lambda w: w.data,
    "list": lambda w: torch._foreach_add([w], 0.0)[0],
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "address": _pointed_to,
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "print": lambda w: eval(
        repr(w).partition("\n")[2], {"tensor": torch.tensor, "requires_grad": True, "True": True}
    ),
}


def stepped(context, module):
    """A module one step on, its parameters in flight, and what they will be."""
    plain = copy.deepcopy(module)
    square(plain, batch(0, 0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    wrapper = BucketedDDP(module, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.5)
    with late_gathers():
        square(wrapper, batch(0, 0)).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
    return wrapper, optimizer, [parameter.detach() for parameter in plain.parameters()]


@on_one_rank
def test_every_way_to_read_a_parameter_in_python_waits_for_it(context):
    """At one rank, whose all-gather is as late; what is read is what an ordinary SGD step gives."""
    for name, read in READERS.items():
        model = make()
        _, _, expected = stepped(context, model)
        weight = model.blocks[1][0].weight
        torch.testing.assert_close(
            read(weight), expected[2], rtol=0, atol=1e-4 if name == "print" else 0, msg=name
        )
        assert type(weight) is nn.Parameter and type(copy.deepcopy(weight)) is nn.Parameter
    model = make()
    linear = model.blocks[1][0]
    linear.weight = Logged(linear.weight.detach())
    _, _, expected = stepped(context, model)
    assert torch.equal(linear.weight.data, expected[2]) and type(linear.weight) is Logged


@on_one_rank
def test_values_are_loaded_when_they_have_arrived_and_two_calls_wait_for_what_reads_unseen(context):
    """`load_state_dict`; `synchronize()` and `close()`."""
    model = make()
    _, _, expected = stepped(context, model)
    loaded = {name: torch.full_like(value, 3.0) for name, value in make().state_dict().items()}
    model.load_state_dict(loaded)  # nothing that was on its way may come over it later
    assert all(torch.equal(p, loaded[name]) for name, p in model.named_parameters())

    for wait in (ZeroOptimizer.synchronize, ZeroOptimizer.close):
        model = make()
        wrapper = BucketedDDP(model, SMALL, process_group=context.group)
        optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.5)
        aliases = [parameter.detach() for parameter in model.parameters()]  # below Python's sight
        with late_gathers():
            square(wrapper, batch(0, 0)).backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
        wait(optimizer)
        for alias, value in zip(aliases, expected, strict=True):
            assert torch.equal(alias, value), wait
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("compile_blocks", [False, True])
@on_one_rank
def test_gathers_stay_under_the_forward_module_by_module(context, compile_blocks):
    model = make()
    if compile_blocks:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager")
    wrapper = BucketedDDP(model, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.AdamW)
    waited: list[int] = []
    wait = Late.wait

    def noted(late):
        waited.append(late.target.numel())
        wait(late)

    with late_gathers(), mock.patch.object(Late, "wait", noted):
        train(wrapper, optimizer, square, context.rank, range(1))
        assert not waited
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        wrapper.zero_grad()
        for parameter in model.parameters():
            assert parameter.grad is None and parameter.is_leaf
        model.train()
        assert not waited  # nothing of this reads a value
        before = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: before.append(len(waited)))
        wrapper(batch(0, 0))
        # An ordinary container has no parameters of its own; a compiled one waits for all that is
        # in it.
        assert before == ([1, 2, 3] if compile_blocks else [0, 1, 2]) and len(waited) == 3

        train(wrapper, optimizer, square, context.rank, range(1))
        waited.clear()
        with torch.no_grad():
            model.blocks[0](batch(0, 0))
        assert len(waited) == 3  # torch's modules take shortcuts without autograd


# the frames are the same under every backend
compiled = partial(torch.compile, backend="aot_eager")


def _compiled_before_wrapping():
    model = make()
    made = compiled(model)
    made(batch(0, 0)).sum().backward()  # a warm-up: Dynamo's graph is made without hooks
    model.zero_grad()
    return made, square


def _wrapper_compiled():
    once = cache(compiled)

    def loss_of(wrapper, x):
        return once(wrapper)(x).square().mean()

    return make(), loss_of


def _function_compiled():
    """A compiled function reads a weight before the wrapper's forward."""
    model = make()
    read = compiled(lambda x: F.linear(x, model.blocks[1][0].weight))
    read(batch(0, 0)).sum().backward()
    model.zero_grad()
    return model, lambda wrapper, x: (read(x) + wrapper(x)).square().mean()


COMPILED = {
    "before-wrapping": _compiled_before_wrapping,
    "wrapper": _wrapper_compiled,
    "function-before-forward": _function_compiled,
}


def frames_compiled(context, how, in_flight):
    """Train beside averaging of whole gradients, bit for bit.

    Args:
        in_flight: False waits for the parameters after every step.

    Returns:
        How many frames Dynamo compiled in the first three steps under ZeRO, and in the three after.
    """
    torch._dynamo.reset()
    model, loss_of = COMPILED[how]()
    plain = BucketedDDP(model, SMALL, process_group=context.group)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = train(plain, sgd, loss_of, context.rank, range(6))
    plain.close()

    model, loss_of = COMPILED[how]()  # Dynamo has met this code
    wrapper = BucketedDDP(model, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.5)
    torch._dynamo.utils.counters.clear()
    frames = torch._dynamo.utils.counters["frames"]
    losses, totals = [], []
    with late_gathers():
        for step in range(6):
            losses += train(wrapper, optimizer, loss_of, context.rank, range(step, step + 1))
            totals.append(frames["total"])
            if not in_flight:
                optimizer.synchronize()
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for mine, theirs in zip(wrapper.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return totals[2], totals[-1] - totals[2]


@pytest.mark.parametrize("how", COMPILED)
@on_two_ranks
def test_compiled_code_reads_what_has_arrived_and_is_not_compiled_again_and_again(context, how):
    """Where the wrapper's forward can wait before, parameters in flight cost no compilation; where it cannot, one."""
    early_settled, _ = frames_compiled(context, how, False)
    early, late = frames_compiled(context, how, True)
    assert late == 0
    assert early == early_settled or (
        how == "function-before-forward" and early <= early_settled + 2
    )
