"""Four kernels in CUDA C++ beside Triton's: what is counted and launched, and what is there without
a GPU.
"""

import ast
import inspect
import itertools
import re
import shutil
import subprocess
import textwrap
from types import SimpleNamespace

import pytest
import torch

from experiments.lessons import _lesson_attention
from experiments.lessons.gpu_lessons import cuda
from kernels import elementwise, matmul, softmax
from tests.commands import ROOT

FILE = ROOT / "experiments" / "lessons" / "_cuda_kernels.cu"


def code_lines(text):
    """Of CUDA C++ or of Python: those that are not empty and hold more than a comment."""
    return len(re.findall(r"(?m)^ *[^ /#\n]", text))


def cuda_lines(name):
    """Of a kernel in the .cu file, with what matmul and attention share."""
    names = [name] + ["tensor cores"] * (name in ("matmul", "attention"))
    return sum(
        code_lines(cuda.SOURCE.partition(f"// ==== {each} ====")[2].partition("// ====")[0])
        for each in names
    )


def triton_lines(kernel):
    """Count the statements of a Triton kernel and of all Triton functions that it calls.

    A statement is a line here, however the formatter breaks it. CUDA C++ is written like that.
    """
    found = [kernel]
    for each in found:  # grows meanwhile
        called = map(each.fn.__globals__.get, each.fn.__code__.co_names)
        found += [one for one in called if isinstance(one, type(kernel)) and one not in found]
    return sum(statements(each.fn) for each in found)


def statements(function):
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return len(ast.unparse(tree).splitlines())


def test_without_a_gpu_triton_is_right_and_cuda_has_its_lines(smoke):
    records, _ = smoke("gpu_lessons")
    rows = {}
    for record in records:
        if record.config["part"] in cuda.IN_CUDA:
            form = record.variant.partition(",")[0]
            rows[record.config["part"], form] = record
    assert [*rows] == [*itertools.product(cuda.IN_CUDA, ("Triton", "CUDA C++", "torch"))]
    for (_, form), row in rows.items():
        assert row.metrics["status"] == ("needs a GPU" if form == "CUDA C++" else "ok")
    assert rows["cuda-matmul", "CUDA C++"].variant == f"CUDA C++, {cuda_lines('matmul')} lines"


KERNELS = {
    "add": elementwise.add_kernel,
    "softmax": softmax.forward_kernel,
    "matmul": matmul.grouped_kernel,
    "attention": _lesson_attention.forward_kernel,
}


def test_lines_are_those_with_code():
    assert {
        name: (triton_lines(kernel), cuda_lines(name)) for name, kernel in KERNELS.items()
    } == cuda.LINES
    assert code_lines("// a\n\n  x();  // b\n    // c\n  *y = 1;\n") == 2


def test_each_line_of_cuda_belongs_to_a_kernel():
    """But for the name of bf16's bits; what matmul and attention share counts twice."""
    lines = {
        part.removeprefix("cuda-"): cuda_lines(part.removeprefix("cuda-")) for part in cuda.IN_CUDA
    }
    shared = code_lines(cuda.SOURCE.partition("cores ====")[2].partition("// ==== matmul")[0])
    assert shared > 20 and sum(lines.values()) - shared == code_lines(cuda.SOURCE) - 1
    assert re.findall(
        r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)', cuda.SOURCE
    ) == [*lines]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no CUDA compiler")
def test_the_kernels_compile_without_headers_and_spill_nothing(tmp_path):
    command = [
        "nvcc",
        "-arch=sm_90",
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        tmp_path / "kernels.cubin",
        FILE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert done.stderr.count("0 bytes spill stores") == len(cuda.IN_CUDA)
    assert "#include" not in cuda.SOURCE and cuda.SOURCE.isascii()


# What stands for each kernel on a CPU, which fills the tensor behind the inputs; its grid, block
# and sizes.
STAND_INS = {
    "add": (lambda x, y, z: z.copy_(x + y), (32, 1, 1), 256, []),
    "softmax": (lambda x, y: y.copy_(x.softmax(1)), (8, 1, 1), 256, []),
    "matmul": (lambda a, b, c, cols, depth: c.copy_(a @ b), (2, 2, 1), 256, [256, 256]),
    "attention": (
        lambda q, k, v, o, length: o.copy_(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ),
        (6, 3, 1),
        128,
        [384],
    ),
}
SIZES = {8192: 8, 4096: 256, 64: 3, 2048: 384}


@pytest.mark.parametrize("part", cuda.IN_CUDA)
def test_a_kernel_is_launched_as_its_comment_says(part, monkeypatch):
    name, found = part.removeprefix("cuda-"), {}
    stand_in, *expected = STAND_INS[name]

    def form(part, variant, call, exact):
        found[variant.partition(",")[0]] = call, exact

    def kernel(grid, block, args):
        assert block[1:] == (1, 1) and all(
            x.is_contiguous() for x in args if isinstance(x, torch.Tensor)
        )
        assert [grid, block[0], [x for x in args if isinstance(x, int)]] == expected
        stand_in(*args)

    monkeypatch.setattr(cuda, "size", lambda gpu, small: SIZES[gpu])
    monkeypatch.setattr(cuda, "in_cuda", lambda given: {name: kernel}[given])
    monkeypatch.setattr(
        cuda, "normal", lambda bench, *shape, dtype=torch.float32: torch.randn(shape)
    )
    cuda.IN_CUDA[part](SimpleNamespace(form=form, device=SimpleNamespace(type="cuda")))
    call, exact = found["CUDA C++"]
    torch.testing.assert_close(call(), exact.float(), atol=1e-4, rtol=1e-4)
