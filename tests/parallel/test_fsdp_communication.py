"""What FSDP sends and when, what it holds meanwhile, and what happens when ranks differ."""

import time
from unittest import mock

import pytest
import torch

from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel.fsdp import FSDP
from distlab.parallel.fsdp.unit import FlatParam, State
from distlab.testing import run_ranks
from tests.parallel.cases import CASES, TwoBranches, build
from tests.parallel.test_contract import BACKENDS, on_two_ranks
from tests.parallel.test_fsdp import backward_and_finish, own_loss, wrapped

TIMEOUT_S = 3.0


# Elements of the flat buffers at two ranks. Embedding and head: 11 rows of 7 → 6 rows for each
# rank. A block: 13 rows of 7 at offset 0 and 7 rows of 13 at offset 104 (of 13 and 8) → 195 →
# slices of a multiple of 7 and 13, 182.
E, B = 84, 364


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
@on_two_ranks
def test_collectives_of_a_usual_step(context, dtype, backend):
    """Check for two all-gathers, one unit ahead, and one reduce-scatter per unit on all ranks.

    Parameters travel in the compute type, gradients in fp32, all norms and biases in one
    all-reduce.
    """
    fsdp = wrapped(context, dtype)
    backward_and_finish(fsdp, context)  # learns the order, with one exchange per unit
    fsdp.zero_grad()
    with CollectiveRecorder() as recorder:
        backward_and_finish(fsdp, context, 1)
    calls = [(call.op, call.numel, call.dtype) for call in recorder.calls]
    assert not recorder.others  # nothing like a barrier
    gathered, reduced = dtype or torch.float32, torch.float32
    forward = [("all_gather", n, gathered) for n in (E, B, B, B, E)]
    backward = [
        ("all_gather", E, gathered),  # the head, in use
        ("all_gather", B, gathered),  # blocks.2, one ahead
        # blocks.1, when blocks.2 is in use, and before the head's gradients
        ("all_gather", B, gathered),
        ("reduce_scatter", E, reduced),
        ("all_gather", B, gathered),
        ("reduce_scatter", B, reduced),
        ("all_gather", E, gathered),
        ("reduce_scatter", B, reduced),
        ("reduce_scatter", B, reduced),
        ("reduce_scatter", E, reduced),
    ]
    # Norms of three blocks and the last, biases of three blocks, seven elements each, and seven
    # used flags; the bucket is padded to the world size where its plan says so.
    assert calls[:-1] == forward + backward
    assert (
        calls[-1][0] == "all_reduce" and calls[-1][1] in (56, 57) and calls[-1][2] == torch.float32
    )


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_parameters_that_are_kept_are_gathered_once_a_step_and_given_back_at_its_end(
    context, backend
):
    """Two micro-batches and an evaluation between steps: gathers, reductions, gradients, and what
    memory stays.
    """
    found = []
    for keep in (False, True):
        fsdp = wrapped(context, keep_gathered=keep)
        for _ in range(2):
            fsdp.zero_grad()
            with CollectiveRecorder() as recorder:
                with fsdp.no_sync():
                    own_loss(fsdp, context.rank, 0, context.device).backward()
                held = [size > 0 for size in bytes_held(fsdp)]
                backward_and_finish(fsdp, context, 1)
        assert held == [keep] * 5 and bytes_held(fsdp) == [0] * 5
        with torch.no_grad():
            own_loss(fsdp, context.rank, 0, context.device)
        assert bytes_held(fsdp) == [0] * 5
        ops = [call.op for call in recorder.calls]
        assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (5 if keep else 20, 5)
        found.append([shard.grad for shard in fsdp.parameters()])
    assert all(map(torch.equal, *found))


def bytes_held(fsdp):
    """Bytes of each unit's gathered buffers, freed or not."""
    held = []
    for unit in fsdp._units:
        held.append(sum(param.buffer.untyped_storage().nbytes() for param in unit.params))
    return held


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_at_most_two_units_are_gathered(context, backend):
    """Check the bound on gathered memory.

    The first step does not know the order of the units, so it fetches none ahead.
    The test counts the units that hold memory each time a unit runs forward or backward.
    """
    fsdp = wrapped(context)
    held: dict[str, list[int]] = {"forward": [], "backward": []}

    def flat_gradients():
        return sum(s.has_gradient + (s._reducing is not None) for s in fsdp.flat_params)

    def count(when):
        return lambda *_: held[when].append(sum(size > 0 for size in bytes_held(fsdp)))

    for block in fsdp.module.blocks:
        block.up.register_forward_hook(count("forward"))
        block.up.register_full_backward_hook(count("backward"))
    gradients: list[int] = []
    accumulate = FlatParam.accumulate_gradients

    def counted(param):
        arrived = accumulate(param)
        gradients.append(flat_gradients())
        return arrived

    for number in range(2):
        loss = own_loss(fsdp, context.rank, number, context.device)
        assert bytes_held(fsdp) == [0] * len(fsdp._units)  # full weights are gone after forward
        with mock.patch.object(FlatParam, "accumulate_gradients", counted):
            loss.backward()
        assert bytes_held(fsdp) == [0] * len(fsdp._units)  # and after backward
        fsdp.finish_gradient_synchronization()
        fsdp.zero_grad()
    assert set(gradients) == {1}  # one flat gradient at a time
    assert held["forward"] == held["backward"] == [1, 1, 1, 2, 2, 2]


@on_two_ranks
def test_outside_forward_a_module_holds_its_shard(context):
    """A freed buffer read by an operator would end the process.

    Attributes therefore find the shard.
    """
    fsdp = wrapped(context)
    down = fsdp.module.blocks[0].down
    backward_and_finish(fsdp, context)
    shard = fsdp.get_parameter("module.blocks.0.down.weight")
    assert down.weight is shard and shard.shape == ((6, 13), (1, 13))[context.rank]
    with pytest.raises(RuntimeError, match=r"unit 'blocks\.0' runs outside the forward"):
        fsdp.module.blocks[0](torch.ones(1, 7, device=context.device))
    assert down.weight is shard


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_ranks_that_run_different_units_are_told_which(context, backend):
    """The contract's line on FSDP: in the first step every rank raises, and names both units."""
    fsdp, begin = (
        FSDP(build("unused-on-some", 0, context.device), process_group=context.group),
        time.monotonic(),
    )
    with pytest.raises(RuntimeError, match=r"rank 0 runs unit 'left' and rank 1 runs unit 'right'"):
        CASES["unused-on-some"].loss(fsdp, context.rank, 0, context.device)
    assert time.monotonic() - begin < 20


def different_units_later(context):
    torch.manual_seed(0)
    fsdp = FSDP(TwoBranches(), process_group=context.group)
    x = torch.ones(2, 6)
    for _ in range(2):
        fsdp(x, "left right").sum().backward()
        fsdp.finish_gradient_synchronization()
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        fsdp(x, "right left" if context.rank == 1 else "left right")
    return str(caught.value), time.monotonic() - begin


def test_a_rank_that_changes_the_order_later_raises_before_it_sends():
    """The contract's line on FSDP: two units of one size would be mixed without an error."""
    results = run_ranks(different_units_later, 2, group_timeout_s=TIMEOUT_S)
    (peer, peer_s), (deviant, deviant_s) = results
    assert "unit 'right' runs where unit 'left' ran the last time" in deviant
    # It has not waited for a message, which would have taken all of the timeout.
    assert deviant_s < TIMEOUT_S
    # no hang, and it says where
    assert "gathering unit 'right' failed" in peer and peer_s < TIMEOUT_S + 15


@on_two_ranks
def test_all_ranks_may_change_the_order_together(context):
    """After relearn_order() on each."""
    torch.manual_seed(0)
    fsdp = FSDP(TwoBranches(), process_group=context.group)
    x = torch.ones(2, 6)
    fsdp(x, "left right").sum().backward()
    fsdp.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match="the pass ends where unit 'right' ran the last time"):
        fsdp(x, "left")
    fsdp.relearn_order()
    fsdp(x, "left").sum().backward()
    fsdp.finish_gradient_synchronization()
    assert all(unit.state is State.SHARDED for unit in fsdp._units)
