"""What is checked before an optimizer steps averaged parameters: that gradients were finished, and
nobody has edited only a part of them since."""

import copy
import pickle
import re
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from distlab.parallel import FSDP, BucketedDDP, ZeroOptimizer, get_strategy
from tests.fuzz import Matrix
from tests.parallel.cases import CASES, OneProcess, build, drawn
from tests.parallel.test_contract import assert_same_on_all_ranks, on_two_ranks


@contextmanager
def unchanged(wrapper):
    """Check that nothing inside changes a parameter."""
    wrapper.synchronize()  # ZeRO gathers under the next forward
    before = [parameter.detach().clone() for parameter in wrapper.parameters()]
    yield
    for parameter, value in zip(wrapper.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def loss_of(wrapper, rank, step=0):
    return CASES["plain"].loss(wrapper, rank, step, torch.device("cpu"))


AVERAGING = ("naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "zero2")


def every_wrapper_and_its_optimizer(context, names=(*AVERAGING, "fsdp")):
    for name in names:
        module = build("plain", 0, context.device)
        yield get_strategy(name).build(
            module, context.group, torch.optim.SGD, {"lr": 0.1}, bucket_size_mb=1e-4
        )


@on_two_ranks
def test_a_step_before_finish_raises_under_every_strategy(context):
    """Else the ranks would drift apart."""
    unfinished = pytest.raises(
        RuntimeError, match=r"call finish_gradient_synchronization\(\) after backward"
    )
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
        with unchanged(wrapper):
            loss_of(wrapper, context.rank)
            optimizer.step()  # of a forward alone nothing has arrived
            loss_of(wrapper, context.rank).backward()
            with unfinished:
                optimizer.step()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        assert_same_on_all_ranks([*wrapper.full_parameters().values()], context)

        def closure(finish, wrapper=wrapper, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(wrapper, context.rank, 1)
            loss.backward()
            if finish:
                wrapper.finish_gradient_synchronization()
            return loss

        assert optimizer.step(lambda closure=closure: closure(True)) > 0
        zero = isinstance(optimizer, ZeroOptimizer)
        if zero or isinstance(wrapper, FSDP):
            editor = optimizer if zero else wrapper
            # torch's SGD has stepped when it is told
            with unchanged(wrapper) if zero else nullcontext(), unfinished:
                optimizer.step(lambda closure=closure: closure(False))
            with unfinished:
                editor.clip_grad_norm_(1.0)
            wrapper.finish_gradient_synchronization()
            optimizer.zero_grad()
            if not zero:
                wrapper.close()
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
                with pytest.raises(
                    RuntimeError, match=r"shards of an FSDP wrapper .* closed.*build"
                ):
                    optimizer.step()  # of what were shards


def backward_of(module):
    module(torch.ones(2, 6)).square().mean().backward()


CHANGES = (
    lambda module: setattr(module, "4", nn.Linear(8, 3)),
    lambda module: module[2].register_parameter("scale", nn.Parameter(torch.ones(1))),
)


@on_two_ranks
def test_a_module_that_changes_after_wrapping_is_refused_under_every_strategy(context):
    """Its new parameters would never be averaged, and the ranks would drift apart."""
    for change in CHANGES:
        for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
            for _ in range(2):  # the second step compares nothing unless something was registered
                optimizer.zero_grad()
                loss_of(wrapper, context.rank).backward()
                wrapper.finish_gradient_synchronization()
                optimizer.step()
            optimizer.zero_grad()
            change(wrapper.module)
            with pytest.raises(
                ValueError, match=r"' is trained now and was not when .*wrap the module again"
            ):
                backward_of(wrapper)
                wrapper.finish_gradient_synchronization()


@on_two_ranks
def test_new_names_and_frozen_layers_are_no_change(context):
    for wrapper, _ in every_wrapper_and_its_optimizer(context, AVERAGING):
        torch.nn.utils.spectral_norm(wrapper.module[2])  # the same parameter under another name
        wrapper.module.append(nn.Linear(3, 3).requires_grad_(False))
        backward_of(wrapper)
        wrapper.finish_gradient_synchronization()


def halve(parameter):
    parameter.grad = parameter.grad * 0.5


def halve_data(parameter):
    """Give the same tensor other memory, which torch does not count as a change."""
    parameter.grad.data = parameter.grad.data * 0.5


def halve_by_set(parameter):
    with torch.no_grad():
        parameter.grad.set_(parameter.grad * 0.5)


@pytest.mark.parametrize("edit", [halve, halve_data, halve_by_set])
@on_two_ranks
def test_an_edit_of_a_mean_changes_this_step_and_no_later_one(context, edit):
    """`.grad` is a view of the bucket's memory. A view that was given other memory stayed the place
    that gradients were copied to, and the bucket sent those of an earlier step.
    """
    for name in ("naive", "flat", "overlap", "bucketed", "sharded-optimizer"):
        for set_to_none in (True, False):
            make = partial(build, "plain", 0, context.device)
            wrapper, optimizer = get_strategy(name).build(
                make(), context.group, torch.optim.SGD, {"lr": 0.1}, bucket_size_mb=1e-4
            )
            one = OneProcess(make, context.world_size, torch.optim.SGD, lr=0.1)
            for step in range(3):
                optimizer.zero_grad(set_to_none)
                one.zero_grad()
                loss_of(wrapper, context.rank, step).backward()
                wrapper.finish_gradient_synchronization()
                one.backward(lambda model, rank, step=step: loss_of(model, rank, step))
                for parameter in (*wrapper.module.parameters(), *one.model.parameters()):
                    edit(parameter)
                optimizer.step()
                one.optimizer.step()
            for mine, expected in zip(
                wrapper.module.parameters(), one.model.parameters(), strict=True
            ):
                assert torch.equal(mine, expected), (name, set_to_none)


@on_two_ranks
def test_gradients_that_are_kept_over_a_step_stay_as_they_were(context):
    """As under torch's DDP. They were views of a bucket, which the next backward overwrites."""
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context, (*AVERAGING[:-1], "fsdp")):
        kept = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(wrapper, context.rank, step).backward()
            wrapper.finish_gradient_synchronization()
            gradients = [p.grad for p in wrapper.parameters() if p.grad is not None]
            kept.append((gradients, [gradient.clone() for gradient in gradients]))
            optimizer.step()
        for gradients, values in kept:
            assert all(map(torch.equal, gradients, values)), type(optimizer).__name__


@on_two_ranks
def test_a_module_that_is_cast_after_wrapping_is_right_or_refused(context):
    """Its gradients were given other memory with it, and were averaged no more."""
    for dtype in (torch.float64, torch.bfloat16):
        for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
            loss_of(wrapper, context.rank).backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
            wrapper.module.to(dtype)
            inputs = torch.full((2, 6), context.rank + 1.0, dtype=dtype)
            try:
                optimizer.zero_grad()
                wrapper(inputs).square().mean().backward()
                wrapper.finish_gradient_synchronization()
            except (TypeError, RuntimeError) as error:
                assert re.search(
                    "cast the module before wrapping|was given other memory", str(error)
                ), error
                wrapper.close(restore=False)
                continue
            gradients = [parameter.grad for parameter in wrapper.module.parameters()]
            assert {gradient.dtype for gradient in gradients} == {dtype}
            assert_same_on_all_ranks(gradients, context)


@on_two_ranks
def test_gradients_edited_before_finish_raise_under_every_strategy(context):
    """Some are on their way already: half of an edit would be averaged, or none of it."""
    for edit in ("clipped", "one dropped", "in a hook", "other memory"):
        for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
            if isinstance(wrapper, FSDP) and edit not in ("clipped", "other memory"):
                continue  # is right; has its own refusal
            if wrapper.accumulates_shards:
                continue  # torch raises, see `test_zero2.py`
            parameters = list(wrapper.module.parameters())
            if edit == "in a hook":
                for parameter in parameters:
                    parameter.register_post_accumulate_grad_hook(halve)
            loss_of(wrapper, context.rank).backward()
            if edit == "clipped":
                torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            if edit == "one dropped":
                parameters[-1].grad = None
            if edit == "other memory":
                halve_data([p for p in wrapper.parameters() if p.grad is not None][-1])
            with unchanged(wrapper):
                with pytest.raises(
                    RuntimeError, match=r"changed between backward and finish.*after finish"
                ):
                    wrapper.finish_gradient_synchronization()
                with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
                    optimizer.step()


@on_two_ranks
def test_a_step_after_backwards_under_no_sync_alone_raises_under_every_strategy(context):
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
        with wrapper.no_sync():
            loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        with (
            unchanged(wrapper),
            pytest.raises(RuntimeError, match=r"call finish_grad.*under no_sync\(\) are sent by"),
        ):
            optimizer.step()
        wrapper.zero_grad()
        optimizer.step()  # nothing to step
        loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        assert_same_on_all_ranks([*wrapper.full_parameters().values()], context)


def with_scalar():
    """A matrix, a vector and a number."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), Matrix("scalar", 2))


def scalar_loss(model, rank, number):
    return model(drawn(10 * number + rank, 4, 3)).square().mean()


def by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.01)


def replaced(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad.sign()


def given_other_memory(parameters):
    for parameter in parameters:
        parameter.grad.data = parameter.grad.data.sign()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
@pytest.mark.ranks
def test_edits_of_gradients_reach_the_step_or_stop_it(context, kind, world_size):
    """Right element by element, inside the named context: as in one process; all else raises before
    anything steps.

    `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's shards, and scale the
    vectors by it.
    """
    make = get_strategy(kind).build
    wrapper, optimizer = make(
        with_scalar(), context.group, torch.optim.SGD, {"lr": 0.5}, bucket_size_mb=1e-5
    )
    one = OneProcess(with_scalar, context.world_size, torch.optim.SGD, lr=0.5)

    def backward(number):
        optimizer.zero_grad()
        one.zero_grad()
        scalar_loss(wrapper, context.rank, number).backward()
        wrapper.finish_gradient_synchronization()
        one.backward(lambda model, rank: scalar_loss(model, rank, number))

    def step_alike():
        optimizer.step()
        one.optimizer.step()
        full = [*wrapper.full_parameters().values()]
        for mine, expected in zip(full, one.model.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
        assert_same_on_all_ranks(full, context)

    for number, edit in enumerate((by_value, replaced, given_other_memory)):
        backward(number)
        with wrapper.elementwise_gradient_edits():
            edit(wrapper.parameters())
        edit(one.model.parameters())
        step_alike()  # reaches the rank that owns an element, whichever that is

    backward(5)
    norm = torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.01)
    torch.testing.assert_close(wrapper.clip_grad_norm_(0.01), norm)
    step_alike()

    edited = r"(ZeroOptimizer|fsdp)\.clip_grad_norm_\(max_norm\).*elementwise_grad"
    by_norm = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.01)
    for edit in (
        by_norm,
        by_value,
        replaced,
        given_other_memory,
        lambda parameters: halve([p for p in parameters if p.numel()][-1]),
        lambda parameters: halve_data([p for p in parameters if p.numel()][-1]),
    ):
        backward(6)
        edit(wrapper.parameters())
        with unchanged(wrapper):
            with pytest.raises(RuntimeError, match=edited):
                optimizer.step()
            told = pytest.raises(RuntimeError, match=r"is not as finish|was edited")
            with told, wrapper.elementwise_gradient_edits():
                pass
    backward(7)
    step_alike()

    if kind == "fsdp":
        backward(8)
        with pytest.raises(ZeroDivisionError), wrapper.elementwise_gradient_edits():
            replaced(wrapper.parameters())
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="was edited"):  # half done
            optimizer.step()
    else:
        other = torch.optim.SGD(wrapper.parameters(), lr=0.5)
        with (
            unchanged(wrapper),
            pytest.raises(RuntimeError, match=r"ZeroOptimizer that was made.*not with SGD"),
        ):
            other.step()


@on_two_ranks
def test_grad_scaler_is_refused_on_every_rank_where_gradients_are_sharded(context):
    """Else the rank that overflowed would skip a step that the others take.

    In an element that rank 1 owns, of rank 1's own gradient, an overflow: rank 0 would see nothing
    of it.
    """
    zero = BucketedDDP(build("plain", 0, context.device), process_group=context.group)
    fsdp = FSDP(build("plain", 0, context.device), process_group=context.group)
    optimizers = (
        (zero, ZeroOptimizer(zero, torch.optim.AdamW, lr=0.1), torch.amp.GradScaler),
        (fsdp, torch.optim.AdamW(fsdp.parameters(), lr=0.1, fused=True), ShardedGradScaler),
    )
    factor = float("inf") if context.rank == 1 else 1.0
    for wrapper, optimizer, cls in optimizers:
        scaler = cls(context.device.type, init_scale=4.0)
        scaler.scale(loss_of(wrapper, context.rank) * factor).backward()
        wrapper.finish_gradient_synchronization()
        with (
            unchanged(wrapper),
            pytest.raises(RuntimeError, match=f"{cls.__name__} decides .* use .*LossScaler"),
        ):
            scaler.step(optimizer)
        optimizer.zero_grad()
        loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        cls(context.device.type, enabled=False).step(optimizer)


# Regression: unscaling leaves no trace in a gradient's version. After it, finish wrote the mean of
# the scaled gradients back, and training went wrong without an error.
@on_two_ranks
def test_gradients_are_not_unscaled_before_finish(context):
    scaler = torch.amp.GradScaler(context.device.type, init_scale=1024.0)
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context, AVERAGING[:5]):
        scaler.scale(loss_of(wrapper, context.rank)).backward()
        with (
            unchanged(wrapper),
            pytest.raises(RuntimeError, match=r"after backward, before .* GradScaler.unscale_\(\)"),
        ):
            scaler.unscale_(optimizer)
        wrapper.finish_gradient_synchronization()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert_same_on_all_ranks([*wrapper.full_parameters().values()], context)
    [(_, optimizer)] = every_wrapper_and_its_optimizer(context, ("zero1",))
    with pytest.raises(RuntimeError, match=r"decides by the gradients .* use .*LossScaler"):
        scaler.unscale_(optimizer)
    torch.amp.GradScaler(context.device.type, enabled=False).unscale_(optimizer)


@on_two_ranks
def test_gradients_that_were_set_without_a_forward_are_refused_under_zero(context):
    """Nothing would average them, and the step would speak of clipping."""
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context, ("zero1", "zero2")):
        for parameter in wrapper.parameters():
            parameter.grad = torch.ones_like(parameter)
        with unchanged(wrapper), pytest.raises(RuntimeError, match="call the wrapper's forward"):
            wrapper.finish_gradient_synchronization()
        optimizer.zero_grad()
        loss_of(wrapper, context.rank).backward()
        for _ in range(2):  # the second finish has nothing to do
            wrapper.finish_gradient_synchronization()
        optimizer.step()


@on_two_ranks
def test_a_gradient_that_was_not_zeroed_is_named_with_its_model(context):
    [(wrapper, optimizer)] = every_wrapper_and_its_optimizer(context, ("zero1",))
    for step in range(2):
        if step:
            model = type(wrapper.module).__name__
            with pytest.raises(RuntimeError, match=rf"of {model} was not zeroed .*or freeze it"):
                loss_of(wrapper, context.rank).backward()
            break
        loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()


@on_two_ranks
def test_an_optimizer_of_shards_is_not_copied(context):
    for _, optimizer in every_wrapper_and_its_optimizer(context, ("sharded-optimizer", "zero1")):
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match=r"cannot be copied or pickled.*Save its state_dict"
            ):
                attempt(optimizer)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        real = torch.linspace(-1, 1, 32).view(8, 4)
        self.weight = nn.Parameter(torch.complex(real, real.flip(0)))

    def forward(self, x):
        return (x.cfloat() @ self.weight).abs()


# Regression: FSDP replicates a complex matrix, and said that its gradient had been edited.
@on_two_ranks
def test_fsdp_trains_a_complex_matrix(context):
    one, fsdp = Complex(), FSDP(Complex(), process_group=context.group)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, fsdp)]
    for step in range(2):
        x = drawn(step, 4, 8)
        one(x).square().mean().backward()
        fsdp(x.chunk(2)[context.rank]).square().mean().backward()
        fsdp.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    [found] = fsdp.full_parameters().values()
    torch.testing.assert_close(found, one.weight.detach())


@on_two_ranks
def test_gradients_are_half_edited_after_a_block_that_raised(context):
    """torch does not count an edit through `.data`, so the block itself has to be noticed."""
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context, ("zero1", "fsdp")):
        loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        with pytest.raises(KeyError), wrapper.elementwise_gradient_edits():
            next(wrapper.parameters()).grad.data.mul_(2)
            raise KeyError
        with unchanged(wrapper), pytest.raises(RuntimeError, match="elementwise_gradient_edits"):
            optimizer.step()


@on_two_ranks
def test_an_embedding_that_renormalises_its_rows_is_refused_on_several_ranks(context):
    """Each rank would renormalise the rows of its own batch, and the weights would differ."""
    for name in ("naive", "flat", "overlap", "bucketed", "sharded-optimizer"):
        module = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5))
        with pytest.raises(ValueError, match=r"DDP: '0' renormalises its rows.*leave max_norm out"):
            get_strategy(name).build(module, context.group, torch.optim.SGD, {"lr": 0.1})
