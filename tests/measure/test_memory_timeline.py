"""Every byte of a step has a category and an origin: against sizes that are known, and on the CPU's
own events.
"""

import json

import pytest
import torch

from distlab.measure.memory_timeline import (
    CATEGORIES,
    Allocation,
    Holdings,
    allocator_history,
    memory_timeline,
    record_memory,
)
from distlab.measure.nvtx import emitter, named_ranges
from distlab.model import TransformerLM, cross_entropy, preset


def recorded(model, step, optimizer, tmp_path, device="cpu"):
    with named_ranges(model, emitter("profiler"), optimizer):
        held = record_memory(step, model, optimizer, tmp_path / "memory.json", device)
    return memory_timeline(tmp_path / "memory.json", held, device)


def trainer(device="cpu", **options):
    config = preset("tiny", num_layers=2, context_length=32, **options)
    model = TransformerLM(config, device=device)
    tokens = torch.arange(64, device=device).reshape(2, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(mark=lambda phase: None):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), tokens)
        mark("forward")
        loss.backward()
        del loss
        mark("backward")
        optimizer.step()
        mark("optimizer")

    step()
    optimizer.zero_grad()
    return model, step, optimizer


def test_a_training_step_is_accounted_for(tmp_path):
    model, step, optimizer = trainer(attention="naive")
    timeline = recorded(model, step, optimizer, tmp_path)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    of = {name: [] for name in CATEGORIES}
    for block in timeline.allocations:
        of[block.category].append(block)
    assert sum(b.bytes for b in of["parameters"]) == size
    assert sum(b.bytes for b in of["gradients"]) == size
    # Activations: at least what the blocks must keep, and all of it gone when backward ends.
    forward_end, backward_end = timeline.phases["forward"][1], timeline.phases["backward"][1]
    assert all(
        b.phase == "forward" and forward_end < b.end_ms <= backward_end for b in of["activations"]
    )
    scores = [
        b for b in of["activations"] if b.bytes == 2 * 4 * 32 * 32 * 4 and "softmax" in b.origin
    ]
    assert len(scores) == 2 and scores[0].origin.startswith(
        "blocks.0.attention/attention/softmax: aten::"
    )
    # What the step leaves: parameters, state, gradients.
    _, curves = timeline.curves()
    assert (
        curves["activations"][-1] == curves["temporary"][-1] == 0
        and curves["gradients"][-1] == size
    )
    at, peak = timeline.peak()
    assert sum(peak.values()) == max(map(sum, zip(*curves.values(), strict=True))) > 4 * size
    largest = timeline.largest(3)
    assert (
        largest == sorted(largest, key=lambda b: -b.bytes)
        and largest[0].bytes >= 2 * 32 * 10_000 * 4
    )
    assert all(b.start_ms <= at < b.end_ms for b in largest)


def memory_event(ts, size, address, total, kind=1):
    args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": kind}
    return {"ph": "i", "name": "[memory]", "ts": ts, "tid": 1, "args": args}


def span(name, start, duration, cat="user_annotation"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "tid": 1}


def test_blocks_of_before_buckets_and_reused_addresses(tmp_path):
    """As CUDA's allocator tells it: the total includes what nobody here knows by address."""
    events = [
        span("distlab:step", 0, 1000), span("distlab:forward", 0, 300),
        span("distlab:backward", 300, 400), span("distlab:optimizer", 700, 300),
        span("aten::mm", 5, 100, "cpu_op"), span("aten::empty", 8, 4, "cpu_op"),
        memory_event(10, 100, 0xA, 1700), memory_event(10, 50, 0xC, 50, kind=0),
        memory_event(100, -300, 0xB, 1400),  # held before, by nobody known
        memory_event(350, -100, 0xA, 1300), memory_event(400, 80, 0xA, 1380),
        memory_event(500, -80, 0xA, 1300),
    ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    held = Holdings(
        start={0x1: (600, "parameters")},
        after_backward={0x2: (400, "gradients"), 0xA: (80, "gradients")},
    )
    timeline = memory_timeline(path, held, "cuda")
    assert sorted((b.bytes, b.category, b.start_ms, b.end_ms) for b in timeline.allocations) == [
        (80, "temporary", 0.4, 0.5), (100, "activations", 0.01, 0.35), (300, "before", 0, 0.1),
        (300, "before", 0, 1), (400, "gradients", 0, 1), (600, "parameters", 0, 1),
    ]  # fmt: skip
    assert timeline.peak()[1] == {
        "before": 600,
        "parameters": 600,
        "optimizer state": 0,
        "gradients": 400,
        "activations": 100,
        "temporary": 0,
    }
    assert timeline.largest(1) == [
        Allocation(100, 0.01, 0.35, "activations", "forward", "aten::mm")
    ]
    with pytest.raises(ValueError, match="no memory events"):
        path.write_text(json.dumps({"traceEvents": events[:3]}))
        memory_timeline(path, held, "cuda")


@pytest.mark.gpu
def test_the_account_is_the_allocators_and_the_pickle_is_bounded(tmp_path):
    import pickle

    model, step, optimizer = trainer("cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    timeline = recorded(model, step, optimizer, tmp_path, "cuda")
    # The allocator rounds each block up to 512 bytes, in its events too.
    assert sum(timeline.peak()[1].values()) == pytest.approx(
        torch.cuda.max_memory_allocated(), rel=0.01
    )
    with allocator_history(tmp_path / "m.pickle", max_entries=50):
        step()
    traces = pickle.loads((tmp_path / "m.pickle").read_bytes())["device_traces"]
    assert 0 < max(map(len, traces)) <= 50
