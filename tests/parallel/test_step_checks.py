"""What is checked before an optimizer steps averaged parameters: that gradients were finished, and nobody has edited
only a part of them since."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from distlab.comm import RankContext
from distlab.parallel import FSDP, BucketedDDP, ShardedOptimizer, ZeroOptimizer
from tests.parallel.cases import CASES, build
from tests.parallel.test_contract import STRATEGIES, assert_same_on_all_ranks, run


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in module.parameters()]
    yield
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def loss_of(wrapper: nn.Module, rank: int, step: int = 0) -> Tensor:
    return CASES["plain"].loss(wrapper, rank, step, torch.device("cpu"))


def averaging_and_its_optimizer(context: RankContext) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    for make in STRATEGIES.values():
        wrapper = make(build("plain", 0, context.device), process_group=context.group)
        yield wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1)
    wrapper = BucketedDDP(build("plain", 0, context.device), process_group=context.group)
    yield wrapper, ShardedOptimizer(wrapper.parameters(), torch.optim.SGD, context.group, lr=0.1)
    wrapper = BucketedDDP(build("plain", 0, context.device), process_group=context.group)
    yield wrapper, ZeroOptimizer(wrapper, torch.optim.SGD, lr=0.1)


def forgotten_finish(context: RankContext) -> None:
    for wrapper, optimizer in averaging_and_its_optimizer(context):
        with unchanged(wrapper):
            loss_of(wrapper, context.rank)
            optimizer.step()  # of a forward alone nothing has arrived
            loss_of(wrapper, context.rank).backward()
            with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) after backward"):
                optimizer.step()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        assert_same_on_all_ranks([parameter.data for parameter in wrapper.parameters()], context)

        def closure(finish: bool, wrapper=wrapper, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(wrapper, context.rank, 1)
            loss.backward()
            if finish:
                wrapper.finish_gradient_synchronization()
            return loss

        assert optimizer.step(lambda closure=closure: closure(True)) > 0
        if isinstance(optimizer, ZeroOptimizer):
            with unchanged(wrapper), pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
                optimizer.step(lambda closure=closure: closure(False))
            with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
                optimizer.clip_grad_norm_(1.0)
            wrapper.finish_gradient_synchronization()
            optimizer.zero_grad()
        else:
            wrapper.close()  # the parameters are anybody's again
            loss_of(wrapper.module, context.rank).backward()
            optimizer.step()


def test_a_step_before_finish_raises_under_every_strategy():
    run(forgotten_finish, 2)


def every_wrapper_and_its_optimizer(context: RankContext) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    yield from averaging_and_its_optimizer(context)
    fsdp = FSDP(build("plain", 0, context.device), process_group=context.group)
    yield fsdp, torch.optim.SGD(fsdp.parameters(), lr=0.1)


def backward_of(module: nn.Module) -> Tensor:
    loss = module(torch.ones(2, 6)).square().mean()
    loss.backward()
    return loss


CHANGES = {
    "replaced": lambda module: setattr(module, "4", nn.Linear(8, 3)),
    "added": lambda module: module.append(nn.Linear(3, 3)),
    "parametrized": lambda module: torch.nn.utils.parametrizations.weight_norm(module[2]),
    "parameter": lambda module: module[2].register_parameter("scale", nn.Parameter(torch.ones(1))),
}


def changed_modules(context: RankContext, change: str) -> None:
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
        for _ in range(2):  # the second step compares nothing unless something was registered
            optimizer.zero_grad()
            loss_of(wrapper, context.rank).backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
        optimizer.zero_grad()
        CHANGES[change](wrapper.module)
        with pytest.raises(ValueError, match=r"' is trained now and was not when .*wrap the module again"):
            backward_of(wrapper)
            wrapper.finish_gradient_synchronization()


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changes_after_wrapping_is_refused_under_every_strategy(change):
    """Its new parameters would never be averaged, and the ranks would drift apart."""
    run(changed_modules, 2, change)


def unchanged_modules(context: RankContext) -> None:
    for wrapper, _ in averaging_and_its_optimizer(context):
        torch.nn.utils.spectral_norm(wrapper.module[2])  # the same parameter under another name
        wrapper.module.append(nn.Linear(3, 3).requires_grad_(False))
        backward_of(wrapper)
        wrapper.finish_gradient_synchronization()


def test_new_names_and_frozen_layers_are_no_change():
    run(unchanged_modules, 2)


def halve(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.5


EDITS = {
    "clipped": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
    "replaced": lambda parameters: [halve(parameter) for parameter in parameters],
    "one dropped": lambda parameters: setattr(parameters[-1], "grad", None),
    "in a hook": lambda parameters: [p.register_post_accumulate_grad_hook(halve) for p in parameters],
}


def early_edits(context: RankContext, edit: str) -> None:
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
        if isinstance(wrapper, FSDP) and edit in ("one dropped", "in a hook"):
            continue  # is right; has its own refusal
        parameters = list(wrapper.module.parameters())
        if edit == "in a hook":
            EDITS[edit](parameters)
        loss_of(wrapper, context.rank).backward()
        if edit != "in a hook":
            EDITS[edit](parameters)
        with unchanged(wrapper):
            with pytest.raises(RuntimeError, match=r"changed between backward and finish_gradient_sync.*after finish"):
                wrapper.finish_gradient_synchronization()
            with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
                optimizer.step()


@pytest.mark.parametrize("edit", EDITS)
def test_gradients_edited_before_finish_raise_under_every_strategy(edit):
    """Some are on their way already: half of an edit would be averaged, or none of it."""
    run(early_edits, 2, edit)


def only_no_sync(context: RankContext) -> None:
    for wrapper, optimizer in every_wrapper_and_its_optimizer(context):
        with wrapper.no_sync():
            loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        with unchanged(wrapper), pytest.raises(RuntimeError, match=r"call finish_grad.*under no_sync\(\) are sent by"):
            optimizer.step()
        wrapper.zero_grad()
        optimizer.step()  # nothing to step
        loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        assert_same_on_all_ranks([*wrapper.full_parameters().values()], context)


def test_a_step_after_backwards_under_no_sync_alone_raises_under_every_strategy():
    run(only_no_sync, 2)


class WithScalar(nn.Module):
    """A matrix, a vector and a number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


class Pair:
    """The same model under ZeRO, and in one process that sees all ranks' batches.

    Args:
        bucket_size_mb: None: one bucket, of which the first registered parameters are the last rank's.
    """

    def __init__(self, context: RankContext, cls=torch.optim.SGD, bucket_size_mb: float | None = None, **options):
        self.context = context
        torch.manual_seed(0)
        self.plain = WithScalar().to(context.device)
        self.wrapper = BucketedDDP(copy.deepcopy(self.plain), bucket_size_mb, process_group=context.group)
        self.zero = ZeroOptimizer(self.wrapper, cls, **options)
        self.reference = cls(self.plain.parameters(), **options)

    def loss(self, model: nn.Module, rank: int, number: int) -> Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))
        return model(x.to(self.context.device)).square().mean()

    def backward(self, *numbers: int, scale: float = 1.0) -> None:
        """Micro-batches of these numbers, all but the last under no_sync()."""
        for number in numbers[:-1]:
            with self.wrapper.no_sync():
                (self.loss(self.wrapper, self.context.rank, number) * scale).backward()
        (self.loss(self.wrapper, self.context.rank, numbers[-1]) * scale).backward()
        self.wrapper.finish_gradient_synchronization()
        for number in numbers:
            for rank in range(self.context.world_size):
                (self.loss(self.plain, rank, number) / self.context.world_size).backward()

    def zero_grad(self) -> None:
        self.zero.zero_grad()
        self.reference.zero_grad()

    def step(self) -> None:
        self.zero.step()
        self.reference.step()
        self.assert_alike()

    def assert_alike(self) -> None:
        for mine, expected in zip(self.wrapper.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
        assert_same_on_all_ranks([parameter.data for parameter in self.wrapper.parameters()], self.context)


def edits(context: RankContext) -> None:
    for bucket_size_mb in (None, 1e-5):
        pair = Pair(context, bucket_size_mb=bucket_size_mb, lr=0.5)

        def by_value(parameters: Iterator[nn.Parameter]) -> None:
            torch.nn.utils.clip_grad_value_(parameters, 0.01)

        def doubled(parameters: Iterator[nn.Parameter]) -> None:
            for parameter in parameters:
                parameter.grad *= 2

        def replaced(parameters: Iterator[nn.Parameter]) -> None:
            for parameter in parameters:
                parameter.grad = parameter.grad.sign()

        for number, edit in enumerate((by_value, doubled, replaced)):
            pair.zero_grad()
            pair.backward(number)
            with pair.zero.elementwise_gradient_edits():
                edit(pair.wrapper.parameters())
            edit(pair.plain.parameters())
            pair.step()  # reaches the rank that owns an element, whichever that is

        pair.zero_grad()
        pair.backward(5)
        torch.testing.assert_close(
            pair.zero.clip_grad_norm_(0.01), torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        )
        pair.step()

        for edit in (
            lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01),
            lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01, foreach=False),
            by_value,
            doubled,
            replaced,
        ):
            pair.zero_grad()
            pair.backward(6)
            edit(pair.wrapper.parameters())
            with unchanged(pair.wrapper):
                with pytest.raises(RuntimeError, match=r"ZeroOptimizer.clip_grad_norm_\(max_norm\).*elementwise_grad"):
                    pair.zero.step()
                with pytest.raises(RuntimeError, match="is not as finish"), pair.zero.elementwise_gradient_edits():
                    pass
            pair.zero_grad()
        pair.backward(7)
        pair.step()

        other = torch.optim.SGD(pair.wrapper.parameters(), lr=0.5)
        with unchanged(pair.wrapper), pytest.raises(RuntimeError, match=r"ZeroOptimizer that was made.*not with SGD"):
            other.step()


def test_edits_of_gradients_reach_the_step_or_stop_it():
    """Right element by element, inside the named context: as in one process; all else raises before anything steps."""
    run(edits, 2)
    run(edits, 3)


def zeroing(context: RankContext) -> None:
    pair = Pair(context, torch.optim.SGD, lr=0.1, momentum=0.9)
    pair.backward(0)
    pair.step()
    for number, set_to_none in ((1, True), (2, False), (3, True), (4, False)):
        pair.zero.zero_grad(set_to_none)
        pair.reference.zero_grad()
        pair.backward(*((number,) if number < 3 else (number, 10 + number, 20 + number)))
        pair.step()

    for zeroed in (pair.zero, pair.wrapper, pair.wrapper.module):  # between forward and backward
        loss = pair.loss(pair.wrapper, context.rank, 5)
        zeroed.zero_grad()
        loss.backward()
        pair.wrapper.finish_gradient_synchronization()
        pair.reference.zero_grad()
        for rank in range(context.world_size):
            (pair.loss(pair.plain, rank, 5) / context.world_size).backward()
        pair.step()

    match = r"the gradient of '(linear|scale).*zero_grad\(\) before every step's first backward.*no_sync\(\)"
    for forget in range(3):
        with unchanged(pair.wrapper), pytest.raises(RuntimeError, match=match):
            if forget == 0:
                pair.backward(6)
            elif forget == 1:
                with pair.wrapper.no_sync():
                    pair.loss(pair.wrapper, context.rank, 6).backward()
            else:  # a forward, and another finish
                pair.loss(pair.wrapper, context.rank, 6)
                pair.wrapper.finish_gradient_synchronization()
        pair.zero_grad()
        pair.backward(7 + forget)
        pair.step()

    pair.wrapper.module.scale.requires_grad_(False)  # its gradient stays, and would be sent again
    pair.wrapper.module.linear.zero_grad()
    with pytest.raises(RuntimeError, match=match.replace("linear|", "")):
        pair.backward(11)


def test_a_forgotten_zero_grad_raises_and_every_kind_of_zeroing_is_right():
    """Backward, finish, backward, finish would add means to leftovers."""
    run(zeroing, 2)


def scaled_steps(context: RankContext) -> None:
    """In an element that rank 1 owns, of rank 1's own gradient, an overflow: rank 0 would see nothing of it."""
    zero = BucketedDDP(build("plain", 0, context.device), process_group=context.group)
    fsdp = FSDP(build("plain", 0, context.device), process_group=context.group)
    optimizers = [
        (zero, ZeroOptimizer(zero, torch.optim.AdamW, lr=0.1)),
        *((fsdp, torch.optim.AdamW(fsdp.parameters(), lr=0.1, fused=fused)) for fused in (False, True)),
    ]
    factor = float("inf") if context.rank == 1 else 1.0
    for cls, (wrapper, optimizer) in product((torch.amp.GradScaler, ShardedGradScaler), optimizers):
        scaler = cls(context.device.type, init_scale=4.0)
        scaler.scale(loss_of(wrapper, context.rank) * factor).backward()
        wrapper.finish_gradient_synchronization()
        with unchanged(wrapper), pytest.raises(RuntimeError, match=f"{cls.__name__} decides .* use .*LossScaler"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        loss_of(wrapper, context.rank).backward()
        wrapper.finish_gradient_synchronization()
        cls(context.device.type, enabled=False).step(optimizer)
        optimizer.zero_grad()


def test_grad_scaler_is_refused_on_every_rank_where_gradients_are_sharded():
    """Else the rank that overflowed would skip a step that the others take."""
    run(scaled_steps, 2)
