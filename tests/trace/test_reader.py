"""The streaming reader: chunks cut events anywhere, and damaged files are refused by name."""

import gzip
import json

import pytest

from distlab.measure.trace import stream
from distlab.measure.trace.names import gpu_pattern, operation_of
from distlab.measure.trace.reader import read_trace
from distlab.measure.trace.stream import entries

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
