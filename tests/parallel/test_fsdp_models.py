"""FSDP trains whatever people wrap as one process does: shapes, units that run several times or
return views, dtypes.

Random models (`tests/fuzz.py`) have the rest, in fp32: units that return their input, nested ones,
ties, objects, units that run several times, matrices that some ranks use or nobody.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel.fsdp import FSDP
from distlab.parallel.fsdp import layout as planning
from distlab.parallel.fsdp.unit import State
from tests.parallel.cases import OneProcess, by_op, drawn
from tests.parallel.test_contract import (
    BACKENDS,
    assert_same_on_all_ranks,
    every_row,
    full_gradients,
    run,
)
from tests.parallel.test_fsdp import OwnModel, own_loss

WIDTH = 6


def in_place_on_a_view():
    """On three dimensions a linear layer with bias returns a view, which is then overwritten."""
    layers = ((nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1, inplace=True)) for _ in range(3))
    return nn.Sequential(nn.Unflatten(0, (1, 4)), *chain(*layers))


class CallsAnother(nn.Module):
    """A unit that runs another unit, which is not below it, in the middle of its own forward."""

    def __init__(self, other):
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x):
        return self.layer(self.other[0](torch.tanh(self.layer(x))))


class CallsInsideCalls(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        second = CallsAnother(first)
        self.units = nn.ModuleList([first, second, CallsAnother(second)])

    def forward(self, x):
        return self.units[2](torch.tanh(self.units[0](x)))


class Table(nn.Module):
    """Returns a part of its parameter, as learned positions do."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, rows):
        return self.weight[:rows]


class LearnedPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = Table(9), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.body(torch.tanh(x * self.table(len(x)))) + self.table(len(x))


class Shapes(nn.Module):
    """Parameters of shapes that random models have not: no elements, one row or column, fewer rows
    than ranks, 4-D.
    """

    def __init__(self):
        super().__init__()
        self.no_rows = nn.Parameter(torch.empty(0, 8))
        self.no_columns = nn.Parameter(torch.empty(4, 0))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.pair = nn.Parameter(torch.randn(1, 2))
        self.few = nn.Parameter(torch.randn(2, 6))
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        x = x * self.row + x @ self.column
        image = self.conv(x[:, :2, None, None].expand(-1, 2, 4, 4)).mean((2, 3))
        nothing = x[:, :4] @ self.no_columns
        joined = torch.cat([image, nothing, x @ self.few.T, x[:, :1], x[:, :2] * self.pair], dim=1)
        return self.head(torch.cat([joined, self.no_rows]))


def numbers_loss(model, rank, step, device):
    return model(drawn(10 * rank + step, 4, WIDTH).to(device)).square().mean()


@dataclass(frozen=True)
class Row:
    """A model and a rank's loss.

    Attributes:
        frozen: prefixes of parameters that are not trained.
        dtype: the compute dtype.
        worth: the padding, in elements, below which rows of several lengths share a buffer.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int, torch.device], Tensor] = numbers_loss
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    worth: int = planning.WORTH_A_BUFFER


OWN = {
    "own classes": (OwnModel, ()),
    "tied": (partial(OwnModel, tied=True), ()),
    "frozen unit": (OwnModel, ("blocks.1.up.weight", "blocks.1.down.weight", "blocks.1.bias")),
    "frozen parts": (OwnModel, ("blocks.0.up.weight", "blocks.2.norm.weight", "embedding.weight")),
}
FROZEN = {  # name: how to build it, prefixes of what is frozen the second time
    "in place on a view": (in_place_on_a_view, ("1", "3.bias")),
    "calls inside calls": (CallsInsideCalls, ("units.1",)),
    "a part of a parameter": (LearnedPositions, ("table",)),
}
ROWS = {
    "shapes": Row(Shapes),
    "shapes, a buffer for each row length": Row(Shapes, worth=0),
}
for _name, (_make, _frozen) in OWN.items():
    ROWS[_name] = Row(_make, own_loss, _frozen, torch.float16)
for _name, (_make, _second) in FROZEN.items():
    for _frozen in ((), _second):
        ROWS[f"{_name}, frozen {_frozen}"] = Row(_make, frozen=_frozen)


def trains_as_one_process(context, name):
    """Three steps: gradients and parameters bit for bit at two ranks, no message too many, nothing
    left gathered.
    """
    row = ROWS[name]

    def make(seed):
        torch.manual_seed(seed)
        model = row.make()
        for label, parameter in model.named_parameters():
            parameter.requires_grad_(not label.startswith(row.frozen or "-"))
        return model.to(context.device)

    ulps = 0 if context.world_size == 2 else 1e-5  # a ring adds in another order
    close = partial(torch.testing.assert_close, rtol=ulps, atol=ulps / 10)
    with mock.patch.object(planning, "WORTH_A_BUFFER", row.worth):
        fsdp = FSDP(make(context.rank), row.dtype, process_group=context.group)
    one = OneProcess(partial(make, 0), context.world_size, torch.optim.SGD, row.dtype, lr=0.1)
    optimizer = torch.optim.SGD([p for p in fsdp.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        one.zero_grad()
        with CollectiveRecorder() as recorder, warnings.catch_warnings():
            warnings.simplefilter("error")
            row.loss(fsdp, context.rank, step, context.device).backward()
            fsdp.finish_gradient_synchronization()
        one.backward(lambda model, rank, step=step: row.loss(model, rank, step, context.device))
        for label, gradient in full_gradients(fsdp, context).items():
            expected = one.model.get_parameter(label).grad
            close(gradient, expected, msg=lambda text, label=label: f"{label}: {text}")
        optimizer.step()
        one.optimizer.step()
    calls = {op: calls for op, (calls, _) in by_op(recorder).items()}
    assert calls["reduce_scatter"] <= len(fsdp.flat_params)  # one for a unit, not one for each use
    # recomputing gathers no more
    assert row.loss is not own_loss or calls["all_gather"] <= 2 * len(fsdp.flat_params)
    assert all(unit.state is State.SHARDED for unit in fsdp._units)
    full = fsdp.gather_full_params()
    assert list(full) == [label for label, _ in one.model.named_parameters(remove_duplicate=False)]
    for label, expected in one.model.named_parameters():
        assert full[label].dtype == torch.float32
        close(full[label], expected, msg=label)
    assert_same_on_all_ranks([*full.values()], context)
    if row.dtype is None:
        with torch.inference_mode():
            close(
                *(row.loss(model, context.rank, 0, context.device) for model in (fsdp, one.model))
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_one_process(world_size, backend):
    """Compare weights and gradients with one process: tied, frozen and uneven parameters.

    Masters and gradients are fp32 in any compute dtype. Row counts are 7, 11 and 13, which no
    world size divides, and a rank may hold no part of a parameter.
    """
    names = [name for name in ROWS if world_size == 2 or name.startswith("shapes")]
    run(every_row, world_size, trains_as_one_process, [(name,) for name in names], backend=backend)
