"""What an optimizer's step may find in `.grad`: the mean over ranks, unedited, or edited alike on
every rank.
"""

from contextlib import nullcontext

import pytest
import torch

from distlab.comm.subgroups import hybrid_mesh
from tests.parallel.test_contract import (
    BACKENDS,
    assert_same_on_all_ranks,
    on_one_rank,
    on_two_ranks,
)
from tests.parallel.test_fsdp import backward_and_finish, own_loss, wrapped

UNFINISHED = (
    "call finish_gradient_synchronization\\(\\) after backward, before optimizer.step\\(\\)"
)
EDITED = (
    r"gradient of '[a-z.0-9]+' was edited .*fsdp\.clip_grad_norm_.*"
    r"with fsdp\.elementwise_gradient_edits"
)


def backward(fsdp, context, step=0):
    own_loss(fsdp, context.rank, step, context.device).backward()


@on_one_rank
def test_a_compiled_step_is_checked_each_time(context):
    fsdp = wrapped(context)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    backward_and_finish(fsdp, context)
    step()
    optimizer.zero_grad()
    backward(fsdp, context)
    with pytest.raises(RuntimeError, match=UNFINISHED):
        step()
    fsdp.finish_gradient_synchronization()
    torch.nn.utils.clip_grad_norm_(fsdp.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=EDITED):
        step()


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_several_optimizers_and_steps_work(context, backend):
    fsdp = wrapped(context)
    matrices = [p for p in fsdp.parameters() if p.ndim > 1]
    # Nesterov's momentum is added to the gradients themselves.
    optimizers = [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        torch.optim.AdamW([p for p in fsdp.parameters() if p.ndim < 2], lr=0.1),
    ]
    backward_and_finish(fsdp, context)
    for _ in range(2):  # the second step without a new backward
        for optimizer in optimizers:
            optimizer.step()
    assert_same_on_all_ranks(list(fsdp.gather_full_params().values()), context)
    optimizers[1].zero_grad()
    optimizers[0].step()
    matrices[0].grad.mul_(2)
    with pytest.raises(RuntimeError, match=EDITED):
        optimizers[1].step()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zeroed", ["optimizer", "module", "wrapper"])
@pytest.mark.parametrize(
    "kept, on_mesh",
    [(False, False), (True, False), (True, True)],
    ids=["sent", "no_sync", "no_sync-on-a-mesh"],
)
@on_two_ranks
def test_zero_grad_drops_a_backward_that_was_not_backward_and_finish(
    context, kept, on_mesh, zeroed, backend
):
    """A skipped batch, a generator's step through a discriminator, a loss of NaN under no_sync().

    A step as if a backward before it, which nobody finished, had never been.
    """
    mesh = hybrid_mesh(context.group, 1) if on_mesh else None
    fsdp, plain = wrapped(context, mesh=mesh), wrapped(context, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (fsdp, plain)]
    for step in range(2):
        with fsdp.no_sync() if kept else nullcontext():
            (own_loss(fsdp, context.rank, 7, context.device) * float("nan")).backward()
        zeroes = {"optimizer": optimizers[0], "module": fsdp.module, "wrapper": fsdp}
        zeroes[zeroed].zero_grad()
        for each, optimizer in zip((fsdp, plain), optimizers, strict=True):
            with each.no_sync():
                backward(each, context, step)
            backward_and_finish(each, context, step + 10)
            optimizer.step()
            optimizer.zero_grad()
    for mine, expected in zip(fsdp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, expected)

    with fsdp.no_sync() if kept else nullcontext():
        backward(fsdp, context)
    # What has not been sent would not know; torch itself refuses to write to the zeros that stand
    # for it.
    with pytest.raises(
        RuntimeError,
        match=r"changed between .*zero_grad\(set_to_none=True\) drops|single memory loc",
    ):
        optimizers[0].zero_grad(set_to_none=False)
        backward(fsdp, context)


@pytest.mark.parametrize("on_mesh", [False, True])
@on_two_ranks
def test_what_was_dropped_is_not_sent_by_finish_either(context, on_mesh):
    fsdp = wrapped(context, mesh=hybrid_mesh(context.group, 1) if on_mesh else None)
    with fsdp.no_sync():
        (own_loss(fsdp, context.rank, 7, context.device) * float("nan")).backward()
    fsdp.module.zero_grad()
    own_loss(fsdp, context.rank, 0, context.device)  # a forward alone
    fsdp.finish_gradient_synchronization()
    assert all(p.grad is None or not p.grad.any() for p in fsdp.parameters())
