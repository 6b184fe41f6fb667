"""Options of optimizers and `extra`: given back in their type, or refused on every rank before
anything is written.
"""

import collections
import enum
import os
import pathlib
import threading

import numpy as np
import pytest
import torch
from torch import nn

from distlab.checkpoint import tensors, train_state
from distlab.checkpoint.checkpointer import Checkpointer, CheckpointError
from distlab.checkpoint.files import CheckpointFolder
from distlab.parallel import BucketedDDP, ShardedOptimizer, ZeroOptimizer
from tests.parallel.test_contract import on_two_ranks


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


Pair = collections.namedtuple("Pair", "first second")


def wrapped(context):
    torch.manual_seed(0)
    return BucketedDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), process_group=context.group)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()


def save(saver, model, optimizer, extra=None):
    saver.save(1, model, optimizer, strategy="bucketed", extra=extra or {})
    saver.wait()


def same(one, other):
    """Whether two options have one type, dtype and value."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


TYPED = {
    "a tensor": {"lr": torch.tensor(0.1)},
    "a tensor of fp64": {
        "lr": torch.tensor(0.1, dtype=torch.float64),
        "weight_decay": np.float64(0.1),
    },
    "NumPy's numbers": {"lr": np.float32(0.1), "eps": np.float64(1e-7)},
    "tensors in a tuple": {
        "lr": torch.tensor(0.1),
        "betas": (torch.tensor(0.5), torch.tensor(0.75)),
    },
    "classes of their own": {
        "level": Level.HIGH,
        "pair": Pair(np.int64(3), 4.0),
        "name": np.str_("x"),
    },
    "nested": {
        "table": {"a": [1, (2.0, None)], "b": {"c": torch.tensor(3)}},
        "flag": np.bool_(True),
    },
}


@on_two_ranks
def test_options_come_back_in_their_type(context, tmp_path):
    for number, (case, options) in enumerate(TYPED.items()):
        given = {
            name: value
            for name, value in options.items()
            if name in ("lr", "eps", "weight_decay", "betas")
        }
        own = {
            name: value for name, value in options.items() if name not in given
        }  # another optimizer's
        for kind in ("whole", "sharded", "zero"):
            if kind != "whole" and "betas" in given:
                continue  # torch refuses tensors for betas with foreach, which is the default
            saver = Checkpointer(tmp_path / f"{number}-{kind}", context)
            model, optimizer = build(context, kind, given | {"foreach": False, "capturable": False})
            optimizer.param_groups[0].update(own)
            step(model, optimizer)
            save(saver, model, optimizer)
            again, other = build(context, kind, given | {"foreach": False, "capturable": False})
            other.param_groups[0].update(own)
            if isinstance(other.param_groups[0]["lr"], torch.Tensor):
                other.param_groups[0]["lr"] = torch.zeros_like(other.param_groups[0]["lr"])
            saver.load(saver.newest(), again, other)
            for name, value in options.items():
                assert same(other.param_groups[0][name], value), f"{case}: {name}"
            step(model, optimizer)
            step(again, other)
            for one, two in zip(model.parameters(), again.parameters(), strict=True):
                assert torch.equal(one, two), case
            model.close()
            again.close()


def build(context, kind, options):
    model = wrapped(context)
    if kind == "zero":
        return model, ZeroOptimizer(model, torch.optim.AdamW, **options)
    if kind == "sharded":
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return model, torch.optim.AdamW(model.parameters(), **options)


@on_two_ranks
def test_a_number_may_be_stored_as_one_type_and_loaded_as_another(context, tmp_path):
    """A tensor for the rate in one run and a number in the next.

    Half a step does not become none.
    """
    saver = Checkpointer(tmp_path, context)
    model, optimizer = build(context, "whole", {"lr": torch.tensor(0.5), "foreach": False})
    step(model, optimizer)
    save(saver, model, optimizer)
    for lr, expected in (
        (0.1, 0.5),
        (np.float32(0.1), np.float32(0.5)),
        (np.int64(1), 0.5),
        (1, 0.5),
    ):
        again, other = build(context, "whole", {"lr": lr})
        saver.load(saver.newest(), again, other)
        assert same(other.param_groups[0]["lr"], expected)
        again.close()


REFUSED = {  # an option of the first group
    "is_what": {1, 2},
    "dtype": torch.float32,
    "rates": torch.ones(2),
    "phase": torch.tensor(1j),
    "call": print,
    "place": pathlib.Path("x"),
    "turned": 1j,
    "turned_numpy": np.complex64(1j),
    "array": np.ones(2),
    "bytes": b"x",
    "keys": {1: 2},
    "deep": [(1, {"a": [object()]})],
}


@on_two_ranks
def test_options_that_cannot_be_stored_are_refused_by_name_on_every_rank(context, tmp_path):
    saver, model = Checkpointer(tmp_path, context), wrapped(context)
    for name, value in REFUSED.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.param_groups[0][name] = value
        with pytest.raises(
            ValueError, match=f"option '{name}' of the optimizer's parameter group 0 has a value of"
        ):
            save(saver, model, optimizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for extra, message in (
        ({"a": (1, 2)}, r"extra\['a'\] has a value of type tuple"),
        ({"a": [{"b": torch.ones(1)}]}, r"extra\['a'\]\[0\]\['b'\] has a value of type Tensor"),
        ({"a": {1: 2}}, r"extra\['a'\] has the key 1 of type int"),
        ({1: 2}, "extra has the key 1 of type int"),
        ({"a": np.float64(1)}, r"extra\['a'\] has a value of type float64"),
        ({"a": pathlib.Path("x")}, "PosixPath"),
        ({"a": {1, 2}}, "type set"),
        ({"a": Level.LOW}, "type Level"),
    ):
        with pytest.raises(ValueError, match=message):
            save(saver, model, optimizer, extra)
    assert list(tmp_path.iterdir()) == []
    save(saver, model, optimizer, {"a": [1, None, {"b": float("inf")}]})
    assert saver.newest().content["extra"] == {"a": [1, None, {"b": float("inf")}]}


@on_two_ranks
def test_state_that_one_rank_cannot_store_is_refused_on_every_rank(context, tmp_path):
    """Under `ShardedOptimizer` a rank has state that no other has."""
    saver, model = Checkpointer(tmp_path, context), wrapped(context)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    step(model, optimizer)
    state = optimizer.state.get(model.module[0].weight)
    assert torch.distributed.get_world_size() == 2
    for value, message in (
        (3, "optimizer/step/0.weight is a int; only tensors are stored"),
        (torch.ones(2), r"optimizer/step/0.weight has shape \(2,\), and its parameter \(4, 4\)"),
        (
            torch.tensor(1j),
            "'optimizer/step/0.weight' has dtype complex64, which checkpoints do not hold",
        ),
    ):
        if state:
            state["step"] = value
        with pytest.raises(ValueError, match=message):
            save(saver, model, optimizer)
    assert list(tmp_path.iterdir()) == []


@on_two_ranks
def test_what_is_saved_is_what_was_given(context, tmp_path, monkeypatch):
    """The thread writes behind the caller, who goes on to change its own dictionaries."""
    saver, model = Checkpointer(tmp_path, context), wrapped(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    begin, changed = CheckpointFolder.begin, threading.Event()
    monkeypatch.setattr(
        CheckpointFolder, "begin", lambda folder, step: changed.wait(10) and begin(folder, step)
    )
    extra = {"a": [1]}
    saver.save(1, model, optimizer, strategy="bucketed", extra=extra)
    extra["a"].append(print)
    optimizer.param_groups[0]["lr"] = 0.2
    changed.set()
    saver.wait()
    content = saver.newest().content
    assert content["extra"] == {"a": [1]} and content["groups"][0]["lr"] == 0.1


class Odd(Exception):
    """Of no class that writing files raises; it cannot be unpickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


class OddValue(Odd, ValueError):
    """Likewise."""


FAILURES = {  # where the writer fails → (rank, what raises)
    "the marker": (0, lambda: (CheckpointFolder, "commit")),
    "the folder": (0, lambda: (CheckpointFolder, "begin")),
    "the index": (0, lambda: (tensors, "merged")),
    "a file of rank 0": (0, lambda: (tensors, "write")),
    "a file of rank 1": (1, lambda: (tensors, "write")),
}


@on_two_ranks
def test_whatever_fails_in_a_writer_reaches_every_rank_and_leaves_nothing(
    context, tmp_path, monkeypatch
):
    saver, model = Checkpointer(tmp_path, context), wrapped(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    errors = (
        TypeError("odd"),
        KeyError("odd"),
        AssertionError("odd"),
        RecursionError("odd"),
        Odd("odd", 1),
        OddValue("odd", 1),
    )
    for place, (rank, where) in FAILURES.items():
        for error in errors:
            with monkeypatch.context() as patch:

                def fail(*args, error=error):
                    raise error

                if context.rank == rank:
                    patch.setattr(*where(), fail)
                saver.save(1, model, optimizer, strategy="bucketed", extra={})
                with pytest.raises(
                    CheckpointError, match=f"rank {rank}: {type(error).__name__}: .*odd"
                ):
                    saver.wait()
            torch.distributed.barrier()
            assert list(tmp_path.iterdir()) == [], place
    save(saver, model, optimizer)
    assert os.listdir(tmp_path) == ["step_00000001"]


@on_two_ranks
def test_a_snapshot_that_fails_on_one_rank_is_an_error_on_all(context, tmp_path, monkeypatch):
    """No host memory for the copy, a generator that cannot be read, a copy that the GPU did not
    make, no thread.
    """
    saver, model = Checkpointer(tmp_path, context), wrapped(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def fail(*args, **kwargs):
        raise RuntimeError("odd")

    for owner, name in ((Checkpointer, "_stage"), (train_state, "generators")):
        with monkeypatch.context() as patch:
            if context.rank == 1:
                patch.setattr(owner, name, fail)
            with pytest.raises(CheckpointError, match="rank 1: RuntimeError: odd"):
                save(saver, model, optimizer)
    with monkeypatch.context() as patch:
        stage = Checkpointer._stage
        if context.rank == 1:
            patch.setattr(Checkpointer, "_stage", lambda *args: (stage(*args)[0], fail))
        with pytest.raises(CheckpointError, match="rank 1: RuntimeError: odd"):
            save(saver, model, optimizer)
    with monkeypatch.context() as patch:
        if context.rank == 1:
            patch.setattr(threading.Thread, "start", fail)  # also of the threads that write files
        with pytest.raises(CheckpointError, match="rank 1: RuntimeError: odd"):
            save(saver, model, optimizer)
    save(saver, model, optimizer)
    assert saver.newest().step == 1
