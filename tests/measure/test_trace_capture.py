"""Traces: what profile_steps writes is told apart by rank, and each kind of event is what it is
called.
"""

import gzip
import json

import pytest
import torch
from torch.profiler import record_function

from distlab.measure.memory_timeline import record_memory
from distlab.measure.trace import capture
from distlab.measure.trace.capture import profile_steps
from distlab.measure.trace.reader import load_trace


def span(category, name, start_us, duration_us, tid=1, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": tid,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def written(path, *spans):
    path.write_text(
        json.dumps(
            {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *spans]}
        )
    )
    return load_trace(path)


def test_gpu_events_are_classified_by_what_ran_on_the_gpu(tmp_path):
    events = written(
        tmp_path / "trace.json",
        span("user_annotation", "distlab:step", 0, 5000),
        span("cpu_op", "aten::mm", 100, 500),
        span("cuda_runtime", "cudaLaunchKernel", 1000, 10, correlation=5),
        span("kernel", "sm90_xmma_gemm", 2000, 1000, tid=7, correlation=5),
        span("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2500, 1000, tid=20),
        span("gpu_memcpy", "Memcpy DtoD", 4000, 100, tid=7),
        span("gpu_user_annotation", "nccl:all_reduce", 2500, 1000, tid=20),
    )
    assert [(e.name, e.kind, e.lane, e.start_ms, e.end_ms, e.launched_ms) for e in events] == [
        ("distlab:step", "range", "thread 1", 0, 5, None),
        ("sm90_xmma_gemm", "compute", "stream 7", 2, 3, 1),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication", "stream 20", 2.5, 3.5, None),
        ("Memcpy DtoD", "copy", "stream 7", 4, 4.1, None),
    ]


def test_on_a_cpu_operators_compute_and_waiting_does_not(tmp_path):
    hook = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events = written(
        tmp_path / "trace.json",
        span("user_annotation", "DistributedDataParallel.forward", 0, 900),
        span("cpu_op", "aten::addmm", 1000, 500),
        span("cpu_op", "aten::copy_", 1100, 50),  # inside addmm
        span("cpu_op", "AddmmBackward0", 2000, 300),
        span("cpu_op", hook, 3000, 3000),  # a Python hook waits in here
        span("cpu_op", "c10d::allreduce_", 3100, 200),
        span("cpu_op", "aten::empty", 3150, 10),  # inside the c10d operator
        span("cpu_op", "aten::mul_", 3400, 100),  # the hook's own work
        span("user_annotation", "gloo:all_reduce", 3200, 2000, tid=9),
        span("cpu_op", "aten::div_", 5000, 100, tid=9),  # gloo's AVG, on its thread
    )
    assert [(e.name, e.kind, e.start_ms, e.end_ms) for e in events] == [
        ("aten::addmm", "compute", 1.0, 1.5),
        ("AddmmBackward0", "compute", 2.0, 2.3),
        ("gloo:all_reduce", "communication", 3.2, 5.2),
        ("aten::mul_", "compute", 3.4, 3.5),
    ]


def test_a_send_on_the_threads_own_time_does_not_hide_its_operators(tmp_path):
    """gloo's send and receive are on the thread that calls them, unlike its collectives."""
    events = written(
        tmp_path / "trace.json",
        span("cpu_op", "aten::mm", 1000, 500),
        span("user_annotation", "gloo:send", 2000, 900),  # until the caller waits for it
        span("cpu_op", "aten::addmm", 2100, 700),
        span("user_annotation", "gloo:all_reduce", 3000, 500, tid=9),
        span("cpu_op", "aten::div_", 3400, 50, tid=9),
        # A backend that records collectives on the caller's thread
        span("user_annotation", "mpi:all_reduce", 4000, 500),
        span("cpu_op", "aten::add", 4100, 100),
    )
    names = [event.name for event in events if event.kind == "compute"]
    assert names == ["aten::mm", "aten::addmm", "aten::add"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "ca',
        gzip.compress(b'{"schemaVersion": 1}' * 50, mtime=0)[:-12],
        b'{"traceEvents": []}',  # another tool's
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel"}]}',
    ],
    ids=["empty", "cut-json", "cut-gzip", "no-schema", "no-times"],
)
def test_a_truncated_or_foreign_file_is_refused_by_name(tmp_path, data):
    path = tmp_path / "broken.json.gz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"broken\.json\.gz"):
        load_trace(path)


def test_a_step_that_fails_leaves_no_trace(tmp_path):
    def broken():
        raise RuntimeError("in the step")

    settings = {"path": tmp_path / "t.json", "rank": 0, "world_size": 1, "device": "cpu"}
    with pytest.raises(RuntimeError, match="in the step"):
        profile_steps(broken, steps=1, **settings)
    with pytest.raises(ValueError, match="steps >= 1"):
        profile_steps(broken, steps=0, **settings)
    assert not list(tmp_path.iterdir())


def test_a_trace_is_written_without_parsing_its_events(tmp_path, monkeypatch):
    """Parsing takes longer than the steps, and the file does not need it."""

    def refuse(*_, **options):
        raise AssertionError("parsed")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", refuse)
    path = tmp_path / "trace.json"
    profile_steps(lambda: torch.ones(2) + 1, steps=1, path=path, rank=0, world_size=1, device="cpu")
    assert any(event.name == "aten::add" for event in load_trace(path))
    model = torch.nn.Linear(2, 2)
    record_memory(
        lambda mark: model(torch.ones(1, 2)),
        model,
        torch.optim.SGD(model.parameters()),
        path,
        "cpu",
    )
    assert path.stat().st_size > 0


def test_ranks_of_two_hosts_with_one_process_id_stay_apart():
    files = []
    for rank in range(2):
        raw = {
            "host_name": "h",
            "traceName": "/x",
            "traceEvents": [{"ph": "X", "pid": 7}, {"ph": "X", "pid": "Spans"}],
        }
        files.append(capture._with_rank(raw, rank, 2, "nccl"))
        assert files[rank]["distributedInfo"] == {"backend": "nccl", "rank": rank, "world_size": 2}
    first = {entry["pid"] for entry in files[0]["traceEvents"]}
    second = {entry["pid"] for entry in files[1]["traceEvents"]}
    assert not first & second and set(files[0]) == {"traceEvents", "distributedInfo"}


def test_without_operators_ranges_are_recorded_also_on_autograds_thread(tmp_path):
    w = torch.ones(3, requires_grad=True)

    def mark(_):
        with record_function("distlab:hook"):
            pass

    w.register_post_accumulate_grad_hook(mark)
    with capture._RangesOnly(use_kineto=True) as profiler, record_function(capture.STEP):
        (w * 2).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {s["name"] for s in spans if s.get("cat") in ("user_annotation", "cpu_op")} == {
        capture.STEP,
        "distlab:hook",
    }
