"""Four kernels in CUDA C++ beside Triton's: what is counted and launched, and what is there without a GPU."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from distlab.experiment import lone_context
from experiments.lessons import cuda_cpp
from kernels import elementwise, matmul
from tests.commands import ROOT
from tests.experiments.frame import measured, refused
from tests.experiments.lessons.test_lessons import ON_CPU

EXPERIMENT = cuda_cpp.EXPERIMENT
FILE = ROOT / "experiments" / "lessons" / "_cuda_kernels.cu"


def test_without_a_gpu_triton_is_right_and_cuda_has_its_lines(smoke):
    records, _ = smoke("cuda_cpp")
    rows = {(r.config["operation"], r.variant): r.metrics for r in records}
    assert [*rows] == [(operation, form) for operation in cuda_cpp.OPERATIONS for form in cuda_cpp.FORMS]
    for (_, form), metrics in rows.items():
        assert metrics["status"] == ("needs a GPU" if form == cuda_cpp.CUDA else "ok")
        assert ("lines" not in metrics) == (form == cuda_cpp.TORCH)
        assert ("over_triton" in metrics) == (form == cuda_cpp.TORCH)
    assert rows["matmul", cuda_cpp.CUDA]["lines"] > rows["matmul", cuda_cpp.TRITON]["lines"]


@ON_CPU
def test_a_kernel_that_is_wrong_is_called_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_cpp.softmax, "launch_forward", lambda x, y: y.zero_())
    records = measured(EXPERIMENT, tmp_path)
    assert EXPERIMENT.wrong(records) == ["softmax by Triton is wrong"]
    assert not any("over_triton" in r.metrics for r in records if r.config["operation"] == "softmax")


@pytest.mark.parametrize(
    "command, reason",
    [("--quick --size 200", "size=200: these kernels have no ragged tiles; give a multiple of 128"),
     ("--quick --length 64", "length=64: these kernels have no ragged tiles; give a multiple of 128")],
)  # fmt: skip
def test_ragged_sizes_are_refused(command, reason, capsys):
    assert reason in refused(capsys, "cuda_cpp", *command.split())


def test_lines_are_those_with_code():
    assert cuda_cpp.code_lines("// a\n\n  x();  // b\n    // c\n  *y = 1;\n") == 2
    assert cuda_cpp.triton_lines(elementwise.add_kernel) == 7
    alone = cuda_cpp.triton_lines(matmul.grouped_tile)
    assert alone == 6 and cuda_cpp.triton_lines(matmul.grouped_kernel) > alone + cuda_cpp.triton_lines(matmul._finish)


def test_each_line_of_cuda_belongs_to_a_kernel():
    """But for the name of bf16's bits; what matmul and attention share counts twice."""
    lines = {operation: cuda_cpp.cuda_lines(operation) for operation in cuda_cpp.OPERATIONS}
    shared = cuda_cpp.code_lines(cuda_cpp.SOURCE.partition("cores ====")[2].partition("// ==== matmul")[0])
    assert shared > 20 and sum(lines.values()) - shared == cuda_cpp.code_lines(cuda_cpp.SOURCE) - 1
    assert re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)', cuda_cpp.SOURCE) == [*lines]
    assert f"SOFTMAX_COLS = {cuda_cpp.COLS}," in cuda_cpp.SOURCE


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no CUDA compiler")
def test_the_kernels_compile_without_headers_and_spill_nothing(tmp_path):
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "kernels.cubin", FILE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert done.stderr.count("0 bytes spill stores") == len(cuda_cpp.OPERATIONS)
    assert "#include" not in cuda_cpp.SOURCE and cuda_cpp.SOURCE.isascii()


# What stands for each kernel on a CPU: it fills the tensor behind the inputs.
STAND_INS = {
    "add": lambda x, y, z: z.copy_(x + y),
    "softmax": lambda x, y: y.copy_(x.softmax(1)),
    "matmul": lambda a, b, c, cols, depth: c.copy_(a @ b),
    "attention": lambda q, k, v, o, length: o.copy_(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
}  # fmt: skip
LAUNCHES = {"add": ((32, 1, 1), 256, []), "softmax": ((8, 1, 1), 256, []),
            "matmul": ((2, 2, 1), 256, [256, 256]), "attention": ((6, 3, 1), 128, [384])}  # fmt: skip


@pytest.mark.parametrize("operation", cuda_cpp.OPERATIONS)
def test_a_kernel_is_launched_as_its_comment_says(operation, monkeypatch):
    launches = []

    def kernel(grid, block, args):
        launches.append((grid, block[0], [x for x in args if isinstance(x, int)]))
        assert block[1:] == (1, 1) and all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
        STAND_INS[operation](*args)

    def attribute(place, number, function):
        place._obj.value = 40
        return 0

    kernel.func = None
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda source, name: kernel)
    driver = SimpleNamespace(cuFuncGetAttribute=attribute)
    monkeypatch.setattr(torch.cuda._utils, "_get_gpu_runtime_library", lambda: driver)
    case = cuda_cpp.case_of(operation, cuda_cpp.Config(8, 256, 3, 384), torch.device("cpu"))
    function, registers = cuda_cpp.in_cuda(operation, case)
    assert torch.equal(function(*case.inputs), case.torch(*case.inputs))
    assert launches == [LAUNCHES[operation]] and registers == 40


@pytest.mark.gpu
def test_cuda_cpp_is_right_on_a_gpu(tmp_path):
    config, context = cuda_cpp.Config(100, 384, 3, 384, rounds=5), lone_context("cuda")
    run = EXPERIMENT.open(config, context, tmp_path)
    cuda_cpp.measure(config, context, run)
    assert [(r.config["operation"], r.variant, r.metrics["status"]) for r in run.records
            if r.metrics["status"] != "ok"] == []  # fmt: skip
    assert all(r.metrics["registers"] for r in run.records if r.variant != cuda_cpp.TORCH)
    assert all("time_p50_ms" in r.metrics for r in run.records)
    assert EXPERIMENT.finish(run, json_only=True) == 0
