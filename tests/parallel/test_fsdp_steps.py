"""What an optimizer's step may find in `.grad`: the mean over ranks, unedited, or edited alike on every rank."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.comm import RankContext
from distlab.parallel.fsdp import FSDP
from tests.parallel.test_contract import BACKENDS, assert_same_on_all_ranks, full_gradients, run
from tests.parallel.test_fsdp import OneProcess, own_loss, own_model

UNFINISHED = "call finish_gradient_synchronization\\(\\) after backward, before optimizer.step\\(\\)"
EDITED = r"gradient of '[a-z.0-9]+' was edited .*fsdp\.clip_grad_norm_.*with fsdp\.elementwise_gradient_edits"


def wrapped(context: RankContext) -> FSDP:
    return FSDP(own_model(context.rank, context.device), process_group=context.group)


def backward(fsdp: FSDP, context: RankContext, step: int = 0) -> None:
    own_loss(fsdp, context.rank, step, context.device).backward()


def finished(fsdp: FSDP, context: RankContext, step: int = 0) -> None:
    backward(fsdp, context, step)
    fsdp.finish_gradient_synchronization()


class VectorAtTheEnd(nn.Module):
    """Only the last vector is trained, so backward reaches no unit."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def unfinished(context: RankContext) -> None:
    fsdp = wrapped(context)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    before = [p.detach().clone() for p in fsdp.parameters()]
    backward(fsdp, context)
    for call in (optimizer.step, lambda: fsdp.clip_grad_norm_(1.0), lambda: _enter(fsdp)):
        with pytest.raises(RuntimeError, match=UNFINISHED):
            call()
    assert all(torch.equal(a, b) for a, b in zip(before, fsdp.parameters(), strict=True))
    fsdp.finish_gradient_synchronization()
    optimizer.step()

    optimizer.zero_grad()
    with fsdp.no_sync():
        backward(fsdp, context)
    fsdp.finish_gradient_synchronization()  # nothing synchronised to wait for
    with pytest.raises(RuntimeError, match=UNFINISHED + ".*under no_sync"):
        optimizer.step()
    fsdp.zero_grad()
    optimizer.step()  # nothing to step

    def closure(finish: bool) -> Tensor:
        optimizer.zero_grad()
        loss = own_loss(fsdp, context.rank, 0, context.device)
        loss.backward()
        if finish:
            fsdp.finish_gradient_synchronization()
        return loss

    optimizer.step(lambda: closure(True))
    with pytest.raises(RuntimeError, match=UNFINISHED):
        optimizer.step(lambda: closure(False))

    vector = FSDP(VectorAtTheEnd(), process_group=context.group)
    optimizer = torch.optim.SGD([p for p in vector.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        vector(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=UNFINISHED):
            optimizer.step()
        vector.finish_gradient_synchronization()
        optimizer.step()


def _enter(fsdp: FSDP) -> None:
    with fsdp.elementwise_gradient_edits():
        raise AssertionError("not reached")


def test_a_step_without_finish_raises():
    """Else the vectors would be stepped by this rank's gradients alone, and the ranks would drift apart."""
    run(unfinished, 2)


def compiled_step(context: RankContext) -> None:
    fsdp = wrapped(context)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for number in range(2):
        finished(fsdp, context, number)
        before = [p.detach().clone() for p in fsdp.parameters()]
        step()
        assert all(not torch.equal(a, b) for a, b in zip(before, fsdp.parameters(), strict=True) if b.numel())
        optimizer.zero_grad()
    backward(fsdp, context)
    with pytest.raises(RuntimeError, match=UNFINISHED):
        step()
    fsdp.finish_gradient_synchronization()
    torch.nn.utils.clip_grad_norm_(fsdp.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=EDITED):
        step()


def test_a_compiled_step_is_checked_each_time():
    run(compiled_step, 1)


def torchs_clipping(context: RankContext) -> None:
    def edit_one(fsdp: FSDP, kind: str) -> None:
        parameter = next(p for n, p in fsdp.named_parameters() if n.endswith(kind) and p.numel())
        parameter.grad = parameter.grad * 1

    edits: dict[str, Callable[[FSDP], Any]] = {
        "norm": lambda fsdp: torch.nn.utils.clip_grad_norm_(fsdp.parameters(), 0.1),
        "norm, not foreach": lambda fsdp: torch.nn.utils.clip_grad_norm_(
            fsdp.parameters(), 0.1, foreach=False
        ),
        "value": lambda fsdp: torch.nn.utils.clip_grad_value_(fsdp.parameters(), 0.1),
        "a shard's replaced": lambda fsdp: edit_one(fsdp, "head.weight"),
        "a vector's replaced": lambda fsdp: edit_one(fsdp, "bias"),
    }
    for name, edit in edits.items():
        fsdp = wrapped(context)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        finished(fsdp, context)
        edit(fsdp)
        for call in (
            optimizer.step,
            lambda fsdp=fsdp: fsdp.clip_grad_norm_(1.0),
            lambda fsdp=fsdp: _enter(fsdp),
        ):
            with pytest.raises(RuntimeError, match=EDITED):
                call()
                pytest.fail(name)
        if "vector" not in name:  # a forward and finish make it no better
            own_loss(fsdp, context.rank, 1, context.device)
            fsdp.finish_gradient_synchronization()
            with pytest.raises(RuntimeError, match=EDITED):
                optimizer.step()
        optimizer.zero_grad(set_to_none="norm" in name)
        finished(fsdp, context)
        optimizer.step()
        assert_same_on_all_ranks(list(fsdp.gather_full_params().values()), context)


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_of_this_ranks_gradients_raise_at_the_step(backend):
    """`torch.nn.utils.clip_grad_norm_` takes the norm of this rank's shards and would scale the vectors by it."""
    run(torchs_clipping, 2, backend=backend)


def permitted(context: RankContext) -> None:
    fsdp = wrapped(context)
    one = OneProcess(lambda: own_model(0, context.device), context.world_size, torch.optim.SGD, lr=0.1)
    sharded = [p for n, p in fsdp.named_parameters() if n.endswith("weight") and "norm" not in n]
    others = [p for p in fsdp.parameters() if all(p is not q for q in sharded)]
    # Nesterov's momentum is added to the gradients themselves.
    optimizers = [
        torch.optim.SGD(sharded, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        torch.optim.AdamW(others, lr=0.1),
    ]
    finished(fsdp, context)
    one.backward(lambda model, rank: own_loss(model, rank, 0, context.device))
    with fsdp.elementwise_gradient_edits():
        torch.nn.utils.clip_grad_value_(fsdp.parameters(), 0.01)
    torch.nn.utils.clip_grad_value_(one.model.parameters(), 0.01)
    for name, gradient in full_gradients(fsdp, context).items():
        assert torch.equal(gradient, one.model.get_parameter(name).grad), name
    fsdp.clip_grad_norm_(0.1)
    for _ in range(2):  # the second step without a new backward
        for optimizer in optimizers:
            optimizer.step()
    assert_same_on_all_ranks(list(fsdp.gather_full_params().values()), context)
    optimizers[1].zero_grad()
    optimizers[0].step()
    sharded[0].grad.mul_(2)
    with pytest.raises(RuntimeError, match=EDITED):
        optimizers[1].step()

    fsdp = wrapped(context)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    finished(fsdp, context)
    with pytest.raises(ZeroDivisionError), fsdp.elementwise_gradient_edits():
        torch._foreach_mul_([p.grad for p in fsdp.parameters()], 0.5)
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match=EDITED):  # half done
        optimizer.step()
    fsdp.close()
    optimizer.step()  # of nobody's parameters


@pytest.mark.parametrize("backend", BACKENDS)
def test_edits_element_by_element_several_optimizers_and_steps_work(backend):
    run(permitted, 2, backend=backend)


def dropped_by_the_optimizer(context: RankContext, kept: bool, zeroed: str) -> None:
    """A step as if a backward before it, which nobody finished, had never been."""
    fsdp, plain = wrapped(context), wrapped(context)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (fsdp, plain)]
    for step in range(2):
        with fsdp.no_sync() if kept else nullcontext():
            (own_loss(fsdp, context.rank, 7, context.device) * float("nan")).backward()
        {"optimizer": optimizers[0], "module": fsdp.module, "wrapper": fsdp}[zeroed].zero_grad()
        for each, optimizer in zip((fsdp, plain), optimizers, strict=True):
            with each.no_sync():
                backward(each, context, step)
            finished(each, context, step + 10)
            optimizer.step()
            optimizer.zero_grad()
    for mine, expected in zip(fsdp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, expected)

    with fsdp.no_sync() if kept else nullcontext():
        backward(fsdp, context)
    # What has not been sent would not know; torch itself refuses to write to the zeros that stand for it.
    with pytest.raises(RuntimeError, match=r"changed between .*zero_grad\(set_to_none=True\) drops|single memory loc"):
        optimizers[0].zero_grad(set_to_none=False)
        backward(fsdp, context)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zeroed", ["optimizer", "module", "wrapper"])
@pytest.mark.parametrize("kept", [False, True], ids=["sent", "no_sync"])
def test_zero_grad_drops_a_backward_that_was_not_finished(kept, zeroed, backend):
    """A skipped batch, a generator's step through a discriminator, a loss of NaN under no_sync()."""
    run(dropped_by_the_optimizer, 2, kept, zeroed, backend=backend)


def dropped_then_finished(context: RankContext) -> None:
    fsdp = wrapped(context)
    with fsdp.no_sync():
        (own_loss(fsdp, context.rank, 7, context.device) * float("nan")).backward()
    fsdp.module.zero_grad()
    own_loss(fsdp, context.rank, 0, context.device)  # a forward alone
    fsdp.finish_gradient_synchronization()
    assert all(p.grad is None or not p.grad.any() for p in fsdp.parameters())


def test_what_was_dropped_is_not_sent_by_finish_either():
    run(dropped_then_finished, 2)
