"""What an optimizer's step may find in `.grad`: the mean over ranks, unedited, or edited alike on every rank."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from distlab.comm import RankContext
from distlab.parallel import ShardedOptimizer
from distlab.parallel.fsdp import FSDP
from tests.parallel.test_contract import BACKENDS, assert_same_on_all_ranks, run
from tests.parallel.test_fsdp import OneProcess, full_gradients, own_loss, own_model

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


def not_elementwise(context: RankContext) -> None:
    fsdp = wrapped(context)
    finished(fsdp, context)
    before = [p.detach().clone() for p in fsdp.parameters()]
    for optimizer, message in (
        (
            torch.optim.Adafactor(fsdp.parameters()),
            "Adafactor is not element-wise: on this rank's rows of a matrix",
        ),
        (torch.optim.Muon([p for p in fsdp.parameters() if p.ndim == 2]), "Muon is not element-wise"),
        (
            ShardedOptimizer(fsdp.parameters(), torch.optim.SGD, process_group=context.group, lr=0.1),
            "sharded already",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, fsdp.parameters(), strict=True))


def test_optimizers_that_need_whole_matrices_are_refused_at_their_first_step():
    run(not_elementwise, 2)


def overflow(context: RankContext, scaler_cls: type, fused: bool, where: str) -> list[str]:
    """Three steps with a GradScaler; in the second, one element of rank 1's shards overflows.

    Returns what happened on this rank in each step.
    """
    fsdp = wrapped(context)
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.1, fused=fused)
    group = {"process_group": context.group} if scaler_cls is ShardedGradScaler else {}
    scaler = scaler_cls(context.device.type, init_scale=4.0, **group)
    events = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(own_loss(fsdp, context.rank, step, context.device)).backward()
        fsdp.finish_gradient_synchronization()
        if step == 1 and context.rank == 1:
            shard = next(p for n, p in fsdp.named_parameters() if n.endswith("head.weight"))
            shard.grad.detach().data.view(-1)[0] = float("inf")  # `.data` has a version counter of its own
        before = [p.detach().clone() for p in fsdp.parameters()]
        try:
            if where == "unscaled inside":
                with fsdp.elementwise_gradient_edits():
                    scaler.unscale_(optimizer)
            with fsdp.elementwise_gradient_edits() if where == "stepped inside" else nullcontext():
                scaler.step(optimizer)
            scaler.update()
        except RuntimeError as error:
            return [
                *events,
                "raised" if "inside `with fsdp.elementwise_gradient_edits():`" in str(error) else str(error),
            ]
        moved = any(not torch.equal(a, b) for a, b in zip(before, fsdp.parameters(), strict=True))
        events.append(f"{'stepped' if moved else 'skipped'}, scale {scaler.get_scale()}")
        assert_same_on_all_ranks(list(fsdp.gather_full_params().values()), context)
    return events


# A fused optimizer skips on the device; torch's ShardedGradScaler does not serve those.
SCALERS = [(ShardedGradScaler, False), (torch.amp.GradScaler, False), (torch.amp.GradScaler, True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["unscaled inside", "stepped inside"])
@pytest.mark.parametrize(("scaler", "fused"), SCALERS)
def test_gradscalers_skip_together_inside_the_context(scaler, fused, where, backend):
    """An overflow is in one rank's shard only: torch's plain scaler, too, finds it on every rank."""
    expected = ["stepped, scale 4.0", "skipped, scale 2.0", "stepped, scale 2.0"]
    assert run(overflow, 2, scaler, fused, where, backend=backend) == [expected, expected]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("scaler", "fused"), SCALERS)
def test_gradscalers_raise_outside_the_context(scaler, fused, backend):
    """At the first step that they take: from then on ranks could decide apart."""
    assert run(overflow, 2, scaler, fused, "outside", backend=backend) == [["raised"], ["raised"]]
