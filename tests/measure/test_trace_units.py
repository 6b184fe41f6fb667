"""Units of a step: which modules they are, where the marks cut the step, and that the parts add up to it."""

import pytest
import torch
from torch import nn

from distlab.measure.trace.account import median_step
from distlab.measure.trace.capture import NEXT, OPTIMIZER, STEP, Event, load_trace, profile_steps
from distlab.measure.trace.units import UNIT, annotate_units, unit_times, units
from distlab.model import TransformerLM, preset
from distlab.train.step import compiled

SMALL = preset("tiny", num_layers=2, context_length=16)


def host(name, start, end=None):
    return Event(name, "range", "thread 1", start, start if end is None else end)


def kernel(kind, start, end, launched, lane="stream 7"):
    return Event("gemm", kind, lane, start, end, launched)


def test_a_compiled_block_is_a_unit_like_another():
    names = ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    for how in ("off", "blocks"):
        assert [name for name, _ in units(nn.Sequential(compiled(TransformerLM(SMALL), how)))] == [
            f"0.{name}" for name in names
        ]
    assert list(units(compiled(TransformerLM(SMALL), "model"))) == []


def test_on_a_gpu_a_unit_lasts_until_the_next_ones_first_kernel():
    events = [
        host(STEP, 0, 5), host(UNIT + "forward a", 1), host(UNIT + "forward b", 2), host(UNIT + "backward b", 3),
        host(UNIT + "backward a", 4), host(OPTIMIZER, 4.5, 4.9), host(NEXT, 5, 6),
        kernel("compute", 10, 14, 0.5), kernel("compute", 14, 20, 1.5), kernel("compute", 22, 30, 2.5),
        kernel("communication", 19, 23, 2.2, "stream 20"), kernel("compute", 30, 40, 3.5),
        kernel("copy", 40, 41, 3.6), kernel("compute", 41, 50, 4.2), kernel("compute", 53, 55, 4.6),
        kernel("compute", 56, 99, 5.6),
    ]  # fmt: skip
    assert median_step(events) == (10, 56)
    found = unit_times(events)
    assert found["a"] == dict(forward_ms=10, exposed_ms=2, copy_ms=0, idle_ms=3, backward_ms=9)
    assert found["b"] == dict(forward_ms=8, exposed_ms=0, copy_ms=1, idle_ms=0, backward_ms=10)
    assert found["optimizer"] == dict(optimizer_ms=2, exposed_ms=0, copy_ms=0, idle_ms=1)


def test_a_recomputed_block_is_marked_once(tmp_path):
    model = TransformerLM(SMALL, checkpoint_blocks="every-2")
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    handles = annotate_units(model)

    def step() -> None:
        model(tokens).sum().backward()

    path = tmp_path / "trace.json"
    profile_steps(step, steps=1, path=path, rank=0, world_size=1, device="cpu")
    events = load_trace(path)
    begin, end = median_step(events)
    marks = [e.name.removeprefix(UNIT) for e in events if e.name.startswith(UNIT) and begin <= e.start_ms < end]
    names = ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    assert marks[:5] == [f"forward {name}" for name in names]
    assert sorted(marks[5:]) == sorted(f"backward {name}" for name in names)
    spent = sum(sum(times.values()) for times in unit_times(events).values())
    assert spent == pytest.approx(end - begin)
    for handle in handles:
        handle.remove()
    profile_steps(step, steps=1, path=path, rank=0, world_size=1, device="cpu")
    with pytest.raises(ValueError, match="call annotate_units before"):
        unit_times(load_trace(path))
