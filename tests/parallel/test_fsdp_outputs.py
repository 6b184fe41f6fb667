"""Backward is announced by what units return: parts of one operation, views, calls inside calls.

Random models (`tests/fuzz.py`) have the rest: units that return their input, nested ones, ties, objects.

Each model is trained beside one process, bit for bit at two ranks, as it is and with parts of it frozen.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distlab.comm import RankContext
from distlab.parallel.fsdp import FSDP
from distlab.parallel.fsdp.unit import State
from tests.parallel.test_contract import BACKENDS, run
from tests.parallel.test_fsdp import OneProcess, full_gradients

WIDTH = 6


class InPlaceOnAView(nn.Module):
    """On three dimensions a linear layer with bias returns a view, which is then overwritten."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        for layer in self.layers:
            x = F.leaky_relu_(layer(x), 0.1)
        return x


class Halves(nn.Module):
    """Two outputs of one operation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x).chunk(2, -1)


class OneHalf(nn.Module):
    """The root returns one of two outputs of an operation that a unit has made, and uses the other."""

    def __init__(self, which: int):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.units = nn.ModuleList([Halves(), nn.Linear(WIDTH, WIDTH)])
        self.which = which

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        halves = self.units[0](x @ self.gate)
        return halves[self.which], self.units[1](halves[1 - self.which])


class CallsAnother(nn.Module):
    """A unit that runs another unit, which is not below it, in the middle of its own forward."""

    def __init__(self, other: nn.Module):
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.other[0](torch.tanh(self.layer(x))))


class CallsInsideCalls(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        second = CallsAnother(first)
        self.units = nn.ModuleList([first, second, CallsAnother(second)])

    def forward(self, x: Tensor) -> Tensor:
        return self.units[2](torch.tanh(self.units[0](x)))


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.layer(x))
        return self.layer(self(x, depth - 1)) if depth else x


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(WIDTH, WIDTH), CallsItself()])

    def forward(self, x: Tensor) -> Tensor:
        return self.units[1](self.units[0](x))


class Table(nn.Module):
    """Returns a part of its parameter, as learned positions do."""

    def __init__(self, rows: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, rows: int) -> Tensor:
        return self.weight[:rows]


class LearnedPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = Table(9), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.tanh(x * self.table(len(x)))) + self.table(len(x))


class Checkpointed(nn.Module):
    """Recomputes another model, whole, and between two layers of its own."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.before, self.body, self.after = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.after(torch.tanh(checkpoint(self.body, x, use_reentrant=False)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    # name: (how to build it, prefixes of what is frozen the second time)
    "in place on a view": (InPlaceOnAView, ("layers.0", "layers.1.bias")),
    "first half": (lambda: OneHalf(0), ("gate", "units.1")),
    "second half": (lambda: OneHalf(1), ("gate", "units.0")),
    "calls inside calls": (CallsInsideCalls, ("units.1",)),
    "recursion": (Recursive, ("units.0",)),
    "a part of a parameter": (LearnedPositions, ("table",)),
    "checkpointed positions": (lambda: Checkpointed(LearnedPositions()), ("before", "body.table")),
    "checkpointed calls": (lambda: Checkpointed(CallsInsideCalls()), ("before", "body.units.0")),
}


def beside_one_process(context: RankContext, name: str, frozen: tuple[str, ...]) -> Iterator[str]:
    """Three steps; yields what differs."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[name][0]()
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(not parameter_name.startswith(frozen or "-"))
        return model.to(context.device)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))
        out = model(x.to(context.device))
        return sum(t.square().mean() for t in (out if isinstance(out, tuple) else (out,)))

    fsdp, one = FSDP(make(), process_group=context.group), OneProcess(make, 2, torch.optim.SGD, lr=0.1)
    optimizer = torch.optim.SGD([p for p in fsdp.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        one.zero_grad()
        loss(fsdp, context.rank, step).backward()
        fsdp.finish_gradient_synchronization()
        one.backward(lambda model, rank, step=step: loss(model, rank, step))
        for parameter_name, gradient in full_gradients(fsdp, context).items():
            expected = one.model.get_parameter(parameter_name).grad
            if expected is None:  # unused in a unit that ran: zero
                expected = gradient if gradient is None else torch.zeros_like(gradient)
            if not (gradient is expected or (gradient is not None and torch.equal(gradient, expected))):
                yield f"{name}, frozen {frozen}: {parameter_name} in step {step}"
        optimizer.step()
        one.optimizer.step()
    if any(unit.state is not State.SHARDED for unit in fsdp._units):
        yield f"{name}, frozen {frozen}: units stay gathered"


def differences(context: RankContext, names: list[str]) -> list[str]:
    return [
        text
        for name in names
        for frozen in ((), MODELS[name][1])
        for text in beside_one_process(context, name, frozen)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_whatever_units_return_gradients_equal_one_process(checkpointed, backend):
    """Parts of one operation, views that are overwritten, calls inside calls, each with frozen parts: bit for bit."""
    names = [name for name in MODELS if name.startswith("checkpointed") == checkpointed]
    assert run(differences, 2, names, backend=backend) == [[], []]
