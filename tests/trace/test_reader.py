"""The streaming reader: chunks cut events anywhere, and damaged files are refused by name."""

import gzip
import json

import pytest

from distlab.measure.trace import stream
from distlab.measure.trace.names import gpu_pattern, operation_of
from distlab.measure.trace.reader import read_trace
from distlab.measure.trace.stream import entries
from distlab.trace.steps import find_steps
from tests.trace.handmade import Writer

EVENTS = [
    {"ph": "X", "name": f"é{n}", "ts": n + 0.25, "args": {"a": [1, {"b": "]}"}]}} for n in range(9)
]
TRACE = {"schemaVersion": 1, "traceEvents": EVENTS, "displayTimeUnit": "ms", "n": 12}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 3, 17, 1000])
def test_chunks_may_end_anywhere(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr(stream, "CHUNK_BYTES", chunk)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(TRACE, indent=indent, ensure_ascii=False), encoding="utf-8")
    about, said = {}, []
    assert list(entries(path, said.append, about)) == EVENTS
    assert about == {**TRACE, "traceEvents": True}
    assert said[-1].startswith("reading trace.json: ")


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_file_that_ends_early_is_refused(tmp_path, cut):
    path = tmp_path / "cut.json.gz"
    data = json.dumps(TRACE).encode()
    assert cut < len(data)
    packed = gzip.compress(data)
    half = packed[: cut * len(packed) // len(data)]
    for content in (data[:cut], gzip.compress(data[:cut]), half):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.json\.gz is truncated or is not a trace"):
            list(entries(path))


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "{}", '{"schemaVersion": 1}'])
def test_other_json_is_not_a_trace(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"was not written by torch\.profiler"):
        read_trace(path)


@pytest.mark.parametrize("ms, is_stray", [(9.0, False), (0.05, True)])
def test_a_second_gpu_is_refused_unless_its_work_is_a_stray_kernel(tmp_path, ms, is_stray):
    writer = Writer()
    writer.compute(0.5, 1, 10)
    writer.compute(0.6, 2, 2 + ms)
    writer.events[-1]["pid"] = 1  # the same stream of another GPU
    path = writer.write(tmp_path / "two.json")
    if is_stray:
        trace = read_trace(path)
        assert [event.end_ms - 10 for event in trace.events] == [pytest.approx(-0.499)]
        assert trace.notes == ["kernels on other GPUs than 0 are left out (GPU 1: 0.05 ms)"]
        return
    with pytest.raises(ValueError, match=r"two\.json has kernels of several GPUs \(GPU 0: 9\.0 ms"):
        read_trace(path)


def test_a_file_of_several_processes_is_refused(tmp_path):
    writer = Writer()
    for process in (100, 200):
        writer.compute(0.5, 1, 10)
        writer.events[-3]["pid"] = process
    with pytest.raises(ValueError, match=r"several processes \(100, 200\): give one file per"):
        read_trace(writer.write(tmp_path / "merged.json"))


@pytest.mark.parametrize(
    "category, name", [("user_annotation", "nccl:all_reduce"), ("cuda_runtime", "cudaLaunchKernel")]
)
def test_a_trace_of_a_gpu_without_its_kernels_is_refused(tmp_path, category, name):
    writer = Writer()
    writer.span("cpu_op", "aten::mm", 1, 9)
    # A profiler of the CPU alone also waits for the device at its end.
    writer.span("cuda_runtime", "cudaDeviceSynchronize", 10, 11)
    assert len(read_trace(writer.write(tmp_path / "cpu.json")).events) == 1
    writer.span(category, name, 9, 10)
    with pytest.raises(ValueError, match=r"gpu\.json has calls of CUDA or NCCL, but no kernels"):
        read_trace(writer.write(tmp_path / "gpu.json"))


def with_event(path, **changes):
    """Write a trace of one kernel, with some values changed."""
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 5}
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event | changes]}))
    return path


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ts": float("nan")}, "has an event at nan µs"),
        ({"dur": float("inf")}, "has an event of inf µs"),
        ({"dur": 10**320}, "holds an event that torch.profiler does not write"),
        ({"dur": -4}, "none of its work takes any time"),
        ({"cat": "Kernel"}, "has the category 'Kernel', which only old versions of torch write"),
    ],
)
def test_odd_values_are_refused_by_the_name_of_the_file(tmp_path, changes, message):
    path = with_event(tmp_path / "odd.json", **changes)
    with pytest.raises(ValueError, match=rf"odd\.json:? {message}"):
        find_steps(read_trace(path))


def test_ids_without_a_sign_and_a_rank_in_digits_are_read(tmp_path):
    path = with_event(tmp_path / "odd.json", args={"External id": 2**64 - 1, "correlation": 2**63})
    trace = json.loads(path.read_text())
    path.write_text(json.dumps(trace | {"distributedInfo": {"rank": "3"}}))
    found = read_trace(path)
    assert (found.rank, len(found.events)) == (3, 1)


def test_a_compiled_graph_does_not_compute_while_it_waits_inside(tmp_path):
    writer = Writer()
    writer.span("cpu_op", "## Call CompiledFxGraph fabc ##", 1, 99)
    writer.span("cpu_op", "aten::mm", 2, 22)
    writer.span("cpu_op", "_c10d_functional::wait_tensor", 22, 92)
    writer.span("user_annotation", "gloo:all_reduce", 22, 92, tid=5)
    events = read_trace(writer.write(tmp_path / "compiled.json")).events
    assert [(event.kind, event.start_ms, event.end_ms) for event in events] == [
        ("compute", 0, 21),
        ("communication", 21, 91),
        ("compute", 91, 98),
    ]


def test_communication_of_every_library_is_known():
    pattern = gpu_pattern()
    for name in (
        "ncclDevKernel_AllGather_RING_LL",
        "void deep_ep::internode_ll::dispatch<false>",
        "nvshmemi_transfer",
        "multimem_all_reduce_kernel",
        "two_shot_all_reduce_kernel",
        "Memcpy PtoP (Device -> Device)",
        "void vllm::cross_device_reduce_1stage",
    ):
        assert pattern.search(name), name
    for name in ("sm90_xmma_gemm", "void at::native::reduce_kernel", "Memcpy DtoD"):
        assert not pattern.search(name), name
    names = ("ncclDevKernel_ReduceScatter_Sum", "gloo:all_reduce", "c10d::_allgather_base_")
    assert [operation_of(name) for name in names] == ["reduce_scatter", "all_reduce", "all_gather"]
