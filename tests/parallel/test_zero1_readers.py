"""ZeroOptimizer's parameters while they are being gathered, in both modes: a reader gets the new
values.

By default `step()` waits. With `overlap_gather=True` the next forward waits, block by block, and
`synchronize()` and state dicts wait for all. The all-gathers here are late: their results are put
in place by `wait()` and not before, so that a reader that does not wait is wrong in every run.
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

from distlab.comm import collectives
from distlab.parallel import BucketedDDP, ZeroOptimizer
from tests.fuzz import Late, late_arrivals
from tests.parallel.cases import drawn
from tests.parallel.test_contract import on_two_ranks

SMALL = 80 / 2**20  # MiB: a bucket for each linear layer of 4 × 4


late_gathers = partial(late_arrivals, "all_gather")


class Blocks(nn.Module):
    """Three blocks in a list, or the same layers in a sequence, where no child is a block."""

    def __init__(self, in_list=True):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks) if in_list else nn.Sequential(*blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ReadsItsHead(nn.Module):
    """Blocks, then a head whose weight is read without calling the head, as a fused loss does."""

    def __init__(self):
        super().__init__()
        self.body = Blocks()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.body(x), self.head.weight, self.head.bias)


class TiedToABlock(nn.Module):
    """A first layer whose weight is also that of the last block."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)  # so that nothing else waits for its bucket
        self.body = Blocks()
        self.body.blocks[2][0].weight = self.first.weight

    def forward(self, x):
        return self.body(self.first(x))


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


def stepped(context, module, overlap):
    """Return the wrapper and optimizer of a module one step on, and what its parameters must be."""
    plain = copy.deepcopy(module)
    square(plain, batch(0, 0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    wrapper = BucketedDDP(module, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, overlap_gather=overlap, lr=0.5)
    with late_gathers():
        square(wrapper, batch(0, 0)).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
    return wrapper, optimizer, [parameter.detach() for parameter in plain.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_every_way_to_read_a_parameter_gets_its_new_value(context, overlap):
    """After `step()`, or with overlap after `synchronize()`: what an ordinary SGD step gives.

    Also through an alias that was taken before the step.
    """
    for name, read in READERS.items():
        model = make()
        weight = model.blocks[1][0].weight
        _, optimizer, expected = stepped(context, model, overlap)
        if overlap:
            optimizer.synchronize()
        tolerance = 1e-4 if name == "print" else 0
        torch.testing.assert_close(read(weight), expected[2], rtol=0, atol=tolerance, msg=name)
        assert type(weight) is nn.Parameter and type(copy.deepcopy(weight)) is nn.Parameter


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_state_dicts_synchronize_and_close_wait_for_all_parameters(context, overlap):
    model = make()
    wrapper, _, expected = stepped(context, model, overlap)
    for state in (model.state_dict(), wrapper.state_dict()):
        assert all(map(torch.equal, state.values(), expected))

    model = make()
    stepped(context, model, overlap)
    block = model.blocks[2].state_dict()  # of a part
    assert torch.equal(block["0.weight"], expected[4])

    model = make()
    stepped(context, model, overlap)
    loaded = {name: torch.full_like(value, 3.0) for name, value in make().state_dict().items()}
    model.load_state_dict(loaded)  # a gather that arrives later must not overwrite it
    model.blocks[0](batch(0, 0))
    assert all(torch.equal(p, loaded[name]) for name, p in model.named_parameters())

    for wait in (ZeroOptimizer.synchronize, ZeroOptimizer.close):
        model = make()
        aliases = [parameter.detach() for parameter in model.parameters()]
        _, optimizer, _ = stepped(context, model, overlap)
        wait(optimizer)
        now = [parameter.detach() for parameter in model.parameters()]
        assert all(map(torch.equal, now, expected)), wait
        assert len(aliases) == len(now)


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_a_forward_reads_the_new_values_wherever_they_are(context, overlap):
    """Of blocks, of layers outside of blocks, of a weight that only the root reads, of the module
    alone.
    """
    for build in (Blocks, partial(Blocks, in_list=False), ReadsItsHead, TiedToABlock):
        for through_wrapper in (True, False):
            for gradients in (True, False):
                torch.manual_seed(0)
                model = build()
                plain = copy.deepcopy(model)
                wrapper, _, _ = stepped(context, model, overlap)
                square(plain, batch(0, 0)).backward()
                torch.optim.SGD(plain.parameters(), lr=0.5).step()
                with torch.set_grad_enabled(gradients):
                    mine = (wrapper if through_wrapper else model)(batch(0, 1))
                    assert torch.equal(mine, plain(batch(0, 1))), (build, through_wrapper)


@on_two_ranks
def test_a_copy_of_the_module_waits_for_nothing(context):
    """It takes the hooks along, which hold the process group."""
    model = make()
    _, optimizer, expected = stepped(context, model, True)
    optimizer.synchronize()
    other = copy.deepcopy(model)
    other(batch(0, 0))
    assert all(map(torch.equal, other.state_dict().values(), expected))


@pytest.mark.parametrize("compile_blocks", [False, True])
@on_two_ranks
def test_gathers_stay_under_the_forward_block_by_block(context, compile_blocks):
    model = make()
    if compile_blocks:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager")
    wrapper = BucketedDDP(model, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.AdamW, overlap_gather=True)
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
        model.train()
        assert not waited  # none of these reads a value
        before = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: before.append(len(waited)))
        wrapper(batch(0, 0))
        assert before == [1, 2, 3] and len(waited) == 3

        train(wrapper, optimizer, square, context.rank, range(1))
        waited.clear()
        with torch.no_grad():
            model.blocks[0](batch(0, 0))
        assert len(waited) == 3  # torch's modules take shortcuts without autograd


@on_two_ranks
def test_parameters_outside_of_blocks_are_gathered_first(context):
    """The wrapper's forward waits for them, so the gathers of blocks must not come before
    theirs.
    """
    model = ReadsItsHead()
    wrapper = BucketedDDP(model, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, overlap_gather=True, lr=0.5)
    order = []

    def noted(output, own, group):
        order.append(output.data_ptr())
        return gather(output, own, group)

    gather = collectives.all_gather
    square(wrapper, batch(0, 0)).backward()
    wrapper.finish_gradient_synchronization()
    with mock.patch.object(collectives, "all_gather", noted):
        optimizer.step()
    assert order[0] == model.head.weight.untyped_storage().data_ptr()
    assert len(order) == len(wrapper.buckets)


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


def _compiled_in_place():
    """Blocks whose hooks are part of their graphs."""
    model = make()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model, square


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
    "in-place": _compiled_in_place,
    "function-before-forward": _function_compiled,
}


def frames_compiled(context, how, overlap, in_flight):
    """Train next to averaging of whole gradients, bit for bit.

    Args:
        in_flight: False waits for the parameters after every step.

    Returns:
        Number of frames that Dynamo compiled in the first three steps under ZeRO, and in the three
        after.
    """
    torch._dynamo.reset()
    model, loss_of = COMPILED[how]()
    plain = BucketedDDP(model, SMALL, process_group=context.group)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = train(plain, sgd, loss_of, context.rank, range(6))
    plain.close()

    model, loss_of = COMPILED[how]()  # Dynamo has met this code
    wrapper = BucketedDDP(model, SMALL, process_group=context.group)
    optimizer = ZeroOptimizer(wrapper, torch.optim.SGD, overlap_gather=overlap, lr=0.5)
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
    optimizer.synchronize()
    for mine, other in zip(wrapper.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    return totals[2], totals[-1] - totals[2]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", COMPILED)
@on_two_ranks
def test_compiled_code_reads_new_values_and_is_not_compiled_again(context, how, overlap):
    """A read before the forward needs `synchronize()` after the step, if gathers overlap."""
    early_waited, _ = frames_compiled(context, how, overlap, False)
    if overlap and how == "function-before-forward":
        return
    early, late = frames_compiled(context, how, overlap, True)
    assert late == 0 and early == early_waited
