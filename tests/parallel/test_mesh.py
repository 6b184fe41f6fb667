"""A mesh of two shard groups of two ranks: what is sent, when, and what is refused."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from distlab.comm import collectives
from distlab.comm.subgroups import hybrid_mesh, resolve_mesh
from distlab.measure.collectives import CollectiveRecorder
from distlab.model import TransformerLM, preset
from distlab.parallel import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    ZeroOptimizer,
    get_strategy,
)
from distlab.testing import run_ranks
from distlab.theory import volume
from distlab.train.step import TrainStep, next_token_loss
from tests.parallel.cases import CASES, build
from tests.parallel.test_contract import on_four_ranks, train_beside_reference
from tests.parallel.test_fsdp import own_loss, wrapped

CONFIG = preset(
    "tiny", num_layers=2, d_model=18, d_ff=26, num_heads=1, vocab_size=23, context_length=8
)
ON_A_MESH = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": partial(BucketedDDP, bucket_size_mb=1e-3),
    "hsdp": FSDP,
}


@on_four_ranks
def test_replicas_average_their_shards_behind_backward(context):
    """A unit's slice leaves for the other group after its reduce-scatter, while the next unit
    computes.
    """
    fsdp = wrapped(context, mesh=hybrid_mesh(context.group, 2))
    for number in range(2):
        fsdp.zero_grad()
        with CollectiveRecorder() as recorder:
            own_loss(fsdp, context.rank, number, context.device).backward()
            in_backward = recorder.count
            fsdp.finish_gradient_synchronization()
    calls = [(call.op, call.numel) for call in recorder.calls]
    assert all(other == calls for other in collectives.gather_objects(calls, context.group))
    calls.insert(in_backward, ("backward ends", 0))
    E, B = 84, 364  # elements of the flat buffers at two ranks, see test_fsdp_communication
    assert [call for call in calls if call[0] != "all_gather"] == [
        ("reduce_scatter", E),
        ("all_reduce", E // 2),
        ("reduce_scatter", B),
        ("all_reduce", B // 2),
        ("reduce_scatter", B),
        ("all_reduce", B // 2),
        ("reduce_scatter", B),
        ("all_reduce", B // 2),
        ("reduce_scatter", E),
        ("all_reduce", E // 2),
        ("backward ends", 0),  # with every shard's gradient in place, where zero_grad() finds it
        ("all_reduce", 56),  # norms and biases, seven times seven, and their flags: over all ranks
    ]


@on_four_ranks
def test_messages_in_two_levels_use_both_kinds_of_links_at_once(context):
    """Gradients of 3, 24, 8, 64, 8 and 48 elements, the first padded: each start moves those before
    it on.
    """
    ddp = OverlapDDP(
        build("plain", context.rank, context.device), mesh=hybrid_mesh(context.group, 2)
    )
    with CollectiveRecorder() as recorder:
        CASES["plain"].loss(ddp, context.rank, 0, context.device).backward()
    in_backward = [(call.op, call.numel) for call in recorder.calls]
    ddp.finish_gradient_synchronization()
    assert in_backward[:9] == [
        ("reduce_scatter", 4),
        ("reduce_scatter", 24),
        ("all_reduce", 2),
        ("reduce_scatter", 8),
        ("all_gather", 4),
        ("all_reduce", 12),
        ("reduce_scatter", 64),
        ("all_gather", 24),
        ("all_reduce", 4),
    ]


@pytest.mark.parametrize("world_size, size", [(2, 1), (2, 2), (4, 2)])
@pytest.mark.ranks
def test_calls_and_bytes_are_those_of_the_closed_form(context, world_size, size):
    """Of a settled step, by strategy."""
    named = list(TransformerLM(CONFIG, device="meta").named_parameters())
    numels, mesh = [p.numel() for _, p in named], (world_size // size, size)
    assert len(numels) % 2  # so messages with flags are padded
    expected = {
        **dict.fromkeys(
            ("naive", "overlap"), volume.each_gradient(numels, [4] * len(numels), mesh=mesh)
        ),
        "flat": volume.bucketed(numels, [4] * len(numels), None, mesh=mesh),
        "bucketed": volume.model_volume(
            get_strategy("bucketed-two-level"),
            named,
            bucket_size_mb=1e-3,
            world_size=world_size,
            shard_size=size,
        ),
        "hsdp": volume.model_volume(
            get_strategy("hsdp"), named, world_size=world_size, shard_size=size
        ),
    }
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for name, make in ON_A_MESH.items():
        model = make(
            TransformerLM(CONFIG, seed=context.rank), mesh=hybrid_mesh(context.group, size)
        )
        train = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), next_token_loss)
        for _ in range(2):
            with CollectiveRecorder() as recorder:
                train([(tokens, tokens)])
        form = expected[name]
        assert (recorder.count, recorder.total_bytes) == (form.collectives, form.bytes), name


@on_four_ranks
def test_replicas_average_once_per_step_of_four_micro_batches(context):
    """The links between shard groups are slow, so only the last micro-batch uses them.

    Inside its group each micro-batch reduce-scatters.
    """
    named = list(TransformerLM(CONFIG, device="meta").named_parameters())
    form = volume.model_volume(
        get_strategy("hsdp"), named, world_size=4, shard_size=2, micro_batches=4
    )
    model = FSDP(TransformerLM(CONFIG, seed=context.rank), mesh=hybrid_mesh(context.group, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = TrainStep(model, optimizer, next_token_loss)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(2):
        with CollectiveRecorder() as recorder:
            train([(tokens, tokens)] * 4)
    assert (recorder.count, recorder.total_bytes) == (form.collectives, form.bytes)
    calls = [call.op for call in recorder.calls]
    buffers = len(model.flat_params)
    assert calls.count("all_gather") == 4 * 2 * buffers
    assert calls.count("reduce_scatter") == 4 * buffers
    # One for each buffer, and one over all ranks for norms and biases.
    assert calls.count("all_reduce") == buffers + 1
    last_gather = max(at for at, op in enumerate(calls) if op == "all_gather")
    first_between = calls.index("all_reduce")
    # All of them are under the last backward, in which each buffer is gathered once.
    assert calls[first_between:last_gather].count("all_gather") < buffers


@pytest.mark.parametrize("case", ["plain", "tied", "frozen"])
@on_four_ranks
def test_four_micro_batches_on_a_mesh_train_as_one_process(context, case):
    train_beside_reference(context, "fsdp", case, set_to_none=True, shard_size=2, micro=4)


@on_four_ranks
def test_no_sync_on_a_mesh_keeps_shards_only(context):
    """Of full gradients nothing is left, and the sum is as large as the shards."""
    fsdp = wrapped(context, mesh=hybrid_mesh(context.group, 2))
    for number in range(2):
        with fsdp.no_sync():
            own_loss(fsdp, context.rank, number, context.device).backward()
        for param in fsdp.flat_params:
            assert param._gradient_storage.nbytes() == 0
            assert param.group_sum.numel() == param.layout.slice_numel
    own_loss(fsdp, context.rank, 2, context.device).backward()
    fsdp.finish_gradient_synchronization()
    assert all(param.group_sum is None for param in fsdp.flat_params)


@on_four_ranks
def test_a_micro_batch_that_raises_on_a_mesh_leaves_nothing(context):
    """Inside no_sync(), after one that did not: the next step is as if neither had been."""
    ends = []
    for fails in (False, True):
        gradients = []
        fsdp = wrapped(context, mesh=hybrid_mesh(context.group, 2))
        for step in range(2):
            if fails:
                with fsdp.no_sync():
                    own_loss(fsdp, context.rank, 7, context.device).backward()
                    # On every rank, after the units behind this block were sent.
                    handle = fsdp.module.blocks[0].register_full_backward_hook(raises)
                    loss = own_loss(fsdp, context.rank, 8, context.device)
                    with pytest.raises(MemoryError, match="injected"):
                        loss.backward()
                    handle.remove()
            with fsdp.no_sync():
                own_loss(fsdp, context.rank, 2 * step, context.device).backward()
            own_loss(fsdp, context.rank, 2 * step + 1, context.device).backward()
            fsdp.finish_gradient_synchronization()
            gradients += [parameter.grad.clone() for parameter in fsdp.parameters()]
            fsdp.zero_grad()
        ends.append(gradients)
    assert all(map(torch.equal, *ends))


def raises(*_):
    raise MemoryError("injected")


@on_four_ranks
def test_a_mesh_that_does_not_fit_is_refused_with_what_to_give(context):
    two, pair = init_device_mesh("cpu", (2, 2)), torch.distributed.new_group([0, 1])
    linear = torch.nn.Linear(2, 2)
    mistakes = [
        ("mesh=2: give a torch.distributed.device_mesh.DeviceMesh", lambda: FSDP(linear, mesh=2)),
        (
            "mesh has 1 dimension.* leave mesh out",
            lambda: NaiveDDP(linear, mesh=init_device_mesh("cpu", (4,))),
        ),
        (
            "shard_size=3 does not divide the 4 ranks; allowed: .1, 2, 4.",
            lambda: hybrid_mesh(context.group, 3),
        ),
        (
            "ZeroOptimizer shards over all ranks.* FSDP",
            lambda: ZeroOptimizer(BucketedDDP(linear, mesh=two), torch.optim.SGD),
        ),
    ]
    if context.rank < 2:
        mistakes += [
            (
                "mesh of 2 × 2 ranks does not hold the process group's ranks .0, 1.",
                lambda: resolve_mesh(two, pair),
            ),
            ("a mesh is made of all 4 ranks of the job, not of 2", lambda: hybrid_mesh(pair, 1)),
        ]
    for words, mistake in mistakes:
        with pytest.raises((ValueError, TypeError), match=words):
            mistake()


def hosts_of_different_sizes(context, names):
    from distlab.comm import subgroups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subgroups.socket, "gethostname", lambda: names[context.rank])
        try:
            return hybrid_mesh(context.group).size(1)
        except ValueError as error:
            return str(error)


def test_a_shard_group_is_a_host_unless_said_otherwise():
    assert run_ranks(hosts_of_different_sizes, 4, ["a", "a", "b", "b"]) == [2] * 4
    assert all(
        "give shard_size" in str(text)
        for text in run_ranks(hosts_of_different_sizes, 3, ["a", "b", "a"])
    )
