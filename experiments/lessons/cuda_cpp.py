"""What does Triton spare beside CUDA C++?

    distlab run cuda_cpp                              # on a GPU
    TRITON_INTERPRET=1 distlab run cuda_cpp --quick   # without one: lines, and Triton's errors

An element-wise addition, a softmax of rows, a matmul and causal attention, each in CUDA C++ (`_cuda_kernels.cu`, to be
read beside this table; NVRTC compiles it when the experiment runs), in Triton and by torch, timed in the same rounds.
Triton's kernels are the lab's plain ones: `add_kernel` of `kernels/elementwise.py`, `forward_kernel` of
`kernels/softmax.py`, `grouped_kernel` of `kernels/matmul.py`, and the tuned step of `_lesson_attention.py`. Those in
CUDA C++ follow the same plans, without what only a Hopper GPU has, and only for sizes without ragged ends.
"""

import ctypes
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.experiment import Column, Experiment, Options, RankContext, Run, View, headline_from, option
from distlab.measure import attempt, clock, sample_rounds
from distlab.report import Ratio, noise_of, row_of
from experiments.lessons import _lesson_attention as lesson
from experiments.lessons.attention_steps import TUNED
from kernels import elementwise, matmul, softmax
from kernels._compile import resources
from kernels._dispatch import check_runs, compile_only, interpreted

Function = Callable[..., Any]  # of tensors
SOURCE = Path(__file__).with_name("_cuda_kernels.cu").read_text(encoding="utf-8")
COLS, TILE, HEAD_DIM = 4096, 128, 64  # of softmax; a multiple of all tiles; of attention
STEP = lesson.Step("tuned tiles", **TUNED[HEAD_DIM], skip=True, split=True)
OPERATIONS = ("add", "softmax", "matmul", "attention")


@dataclass(frozen=True)
class Config(Options):
    """Sizes of the operations."""

    rows: int = option(8192, "of 4,096 fp32 elements, for add and softmax", least=1)
    size: int = option(4096, "of the square matrices, a multiple of 128", least=1)
    heads: int = option(64, "batch × heads of attention", least=1)
    length: int = option(2048, "tokens of attention, a multiple of 128", least=1)
    rounds: int = option(10, "interleaved rounds", least=5)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "length"):
            if (given := getattr(self, name)) % TILE:
                raise ValueError(f"{name}={given}: these kernels have no ragged tiles; give a multiple of {TILE}")


@dataclass(frozen=True)
class Case:
    """An operation on its inputs, which are as large as the result.

    Args:
        inputs: one after the other, in one tensor.
        torch: the operation by torch, of tensors of any dtype.
        kernel, launch: the kernel in Triton; what launches it for the inputs and returns the result.
        grid, block, sizes: of the launch in CUDA C++, whose arguments are inputs, result and sizes.
    """

    inputs: Tensor
    torch: Function
    kernel: Any
    launch: Function
    grid: tuple[int, int]
    block: int
    sizes: tuple[int, ...] = ()


def filling(launch: Function) -> Function:
    """`launch(*inputs, y)` as a function that returns y."""

    def call(*inputs: Tensor) -> Tensor:
        launch(*inputs, y := torch.empty_like(inputs[0]))
        return y

    return call


def case_of(operation: str, config: Config, device: torch.device) -> Case:
    """An operation of the configuration's sizes, on random inputs."""
    torch.manual_seed(0)
    rows, n, heads, length = config.rows, config.size, config.heads, config.length
    wide = partial(torch.randn, device=device)
    half = partial(wide, dtype=torch.float16 if interpreted() else torch.bfloat16)
    if operation == "add":
        launch = filling(partial(elementwise.launch_flat, elementwise.add_kernel, "add"))
        return Case(wide(2, rows, COLS), torch.add, elementwise.add_kernel, launch, (rows * COLS // 1024, 1), 256)
    if operation == "softmax":
        return Case(wide(1, rows, COLS), partial(torch.softmax, dim=1), softmax.forward_kernel,
                    filling(softmax.launch_forward), (rows, 1), 256)  # fmt: skip
    if operation == "matmul":
        launch = filling(lambda a, b, y: matmul.launch_pointers(a, b, None, y, None, "tf32x3"))
        return Case(half(2, n, n), torch.matmul, matmul.grouped_kernel, launch, (n // 128, n // 128), 256, (n, n))
    return Case(half(3, 1, heads, length, HEAD_DIM), partial(F.scaled_dot_product_attention, is_causal=True),
                lesson.forward_kernel, lambda *qkv: lesson.forward(STEP, *(x[0] for x in qkv))[0],
                (length // 64, heads), 128, (length,))  # fmt: skip


def in_cuda(operation: str, case: Case) -> tuple[Function, int]:
    """The kernel of SOURCE, compiled for this GPU, as a function of the inputs, and its registers."""
    from torch.utils import cpp_extension

    with patch.object(cpp_extension, "CUDA_HOME", "none"):  # torch asks for one, for headers that SOURCE does not need
        kernel = torch.cuda._compile_kernel(SOURCE, operation)
    driver, used = torch.cuda._utils._get_gpu_runtime_library(), ctypes.c_int()
    driver.cuFuncGetAttribute(ctypes.byref(used), 4, kernel.func)  # 4: CU_FUNC_ATTRIBUTE_NUM_REGS
    return filling(lambda *tensors: kernel((*case.grid, 1), (case.block, 1, 1), [*tensors, *case.sizes])), used.value


def in_triton(operation: str, case: Case) -> tuple[Function, int | None]:
    """The lab's kernel as a function of the inputs, and its registers where it is compiled."""
    with compile_only() as kernels:
        case.launch(*case.inputs)
    return case.launch, None if interpreted() else resources(kernels[0])["registers"]


FORMS = {"CUDA C++": in_cuda, "Triton": in_triton, "torch": lambda operation, case: (case.torch, None)}
CUDA, TRITON, TORCH = FORMS


def code_lines(text: str) -> int:
    """Lines of CUDA C++ or of Python that are not empty and hold more than a comment."""
    return len(re.findall(r"(?m)^ *[^ /#\n]", text))


def cuda_lines(operation: str) -> int:
    """Lines of code of an operation in SOURCE, with what matmul and attention share."""
    names = [operation] + ["tensor cores"] * (operation in ("matmul", "attention"))
    sections = [SOURCE.partition(f"// ==== {name} ====")[2].partition("// ====")[0] for name in names]
    return sum(map(code_lines, sections))


def triton_lines(kernel: Any) -> int:
    """Lines of code of a kernel in Triton and of all functions in Triton that it calls, without docstrings."""
    found = [kernel]
    for each in found:  # grows meanwhile
        called = map(each.fn.__globals__.get, each.fn.__code__.co_names)
        found += [one for one in called if isinstance(one, type(kernel)) and one not in found]
    return sum(code_lines(re.sub(r'(?s)""".*?"""', "", inspect.getsource(each.fn))) for each in found)


def compared(operation: str, config: Config, device: torch.device) -> dict[str, Any]:
    """Form → metrics of an operation; the forms are timed in the same rounds."""
    case, on_gpu = case_of(operation, config, device), device.type == "cuda"
    expected = case.torch(*case.inputs.double())
    clocks = {}

    def ready(form: str) -> dict[str, Any]:
        if form == CUDA and not on_gpu:
            return {"status": "needs a GPU"}
        function, registers = FORMS[form](operation, case)
        call = partial(function, *case.inputs)
        error = ((call() - expected).abs().max() / expected.abs().max()).item()
        once = (partial(clock.replayed(call, calls=(10, 20)), repeats=5) if on_gpu
                else partial(clock.measure, call, warmup=0, repeats=1, device=device))  # fmt: skip
        clocks[form] = lambda: {"time": once()}
        right = error <= (1e-5 if case.inputs.dtype == torch.float32 else 1e-2)
        return {"error": error, "registers": registers, "status": "ok" if right else "WRONG"}

    found = {form: attempt(partial(ready, form)) for form in FORMS}
    for form, metrics in sample_rounds(clocks, config.rounds).items():
        found[form] |= metrics
    found[CUDA]["lines"], found[TRITON]["lines"] = cuda_lines(operation), triton_lines(case.kernel)
    return found


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per operation and form."""
    check_runs(context.device)
    for operation in OPERATIONS:
        if not run.done(TORCH, operation=operation):  # the last of an operation's rows
            run.progress(operation)
            for form, metrics in compared(operation, config, context.device).items():
                run.add(form, metrics, operation=operation)


OVER_TRITON = Ratio("over_triton", row_of(TRITON), "time")
VIEW = View(
    columns=[
        Column("config.operation", "operation", align="left"), Column("variant", "form"),
        Column("metrics.lines", "lines", missing=""),
        Column("metrics.time_p50_ms", "µs", ",.1f", scale=1000),
        Column("metrics.noise_pct", "± %", ".1f", derived=lambda record: noise_of(record.metrics, "time")),
        OVER_TRITON.column("× Triton", ".2f", missing=""), Column("metrics.registers", "registers", missing=""),
        Column("metrics.error", "error", ".0e"), Column("metrics.status", "status"),
    ],
    headline=headline_from("{device_name}, torch {torch}, triton {triton}"),
    derive=lambda records: OVER_TRITON.add_within(
        lambda record: record.config["operation"], [r for r in records if r.metrics["status"] == "ok"]),
    reading="Lines are those of a kernel and of the functions that it calls, without comments, docstrings and empty "
    "lines. What matmul and attention share in CUDA C++ counts in both; in Triton all but attention have masks for any "
    "size, and the matmul has bias and epilogues too. × Triton is a row's time over Triton's, the median over "
    "interleaved rounds. Registers are a thread's. Errors are against float64, over the largest exact value.\n\n"
    "An addition and a softmax wait for memory, which a few lines keep busy in either language; Triton spares the "
    "shuffles of a reduction. In matmul and attention `tl.load` and `tl.dot` stand for what CUDA C++ spells out: which "
    "lane holds which element, copies that run ahead, padding against bank conflicts. From the same source Triton "
    "makes wgmma on Hopper; the mma.sync of the file, which every GPU since Ampere has, leaves a part of Hopper's "
    "tensor cores idle. In Triton's interpreter times say nothing.",
)  # fmt: skip
SMALL = {"rows": 8, "size": 128, "heads": 1, "length": 128, "rounds": 5}
EXPERIMENT = Experiment(
    Config, measure, VIEW, presets={"quick": {"rounds": 5}, "quick-cpu": SMALL, "smoke": SMALL}, gpus=1,
    wrong=lambda records: [f"{r.config['operation']} by {r.variant} is wrong" for r in records
                           if r.metrics["status"] == "WRONG"],
)  # fmt: skip
