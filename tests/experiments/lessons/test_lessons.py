"""The studies of kernels without a GPU: lesson kernels that are right or called wrong, what is
refused.
"""

import ast
import itertools
from functools import partial

import pytest
import torch

from distlab.experiment import lone_context
from distlab.hardware import H100_SXM
from distlab.theory.gpu import tile_order
from experiments._attention import Shape, inputs
from experiments.lessons import _lesson_attention as lesson
from experiments.lessons import attention_steps, gpu_lessons, ir
from experiments.lessons._lesson_kernels import reread_kernel
from experiments.lessons.gpu_lessons.kernel_forms import FORMS
from kernels import _dispatch
from kernels._dispatch import tl, triton
from kernels.matmul import grouped_tile
from tests.commands import ROOT, python
from tests.experiments.frame import measured

ON_CPU = pytest.mark.skipif(
    not _dispatch.interpreted(), reason="compiled here: for a GPU these run in full"
)


def errors_of(step, shape):
    tensors = inputs(shape, "float32", "cpu")
    calls = attention_steps.calls_of(step.name, shape, tensors, {step.name: step})
    return attention_steps.check(calls, shape, tensors)


@ON_CPU
@pytest.mark.parametrize("number", range(7))
def test_every_step_is_attention_across_several_tiles(number):
    """Longer than a tile in both directions, so that full, cut and skipped tiles all occur."""
    step = attention_steps.staircase(16)[number]
    found = errors_of(step, Shape(1, 1, 1, 128, 128, 16))
    # fp32 sums
    assert "status" not in found and found["error"] < 1e-5 and found["grad_error"] < 1e-5, found


@ON_CPU
@pytest.mark.parametrize("m, n, split, fused", [(16, 32, False, True), (32, 16, True, False)])
def test_tiles_need_not_be_square(m, n, split, fused):
    tile = lesson.Tile(m, n)
    step = lesson.Step("step", tile, tile, tile, skip=True, split=split, tma=True, fused=fused)
    found = errors_of(step, Shape(1, 1, 1, 64, 64, 16))
    assert found["error"] < 1e-5 and found["grad_error"] < 1e-5, found


@ON_CPU
def test_the_compiled_backward_has_the_gradients_of_attention(monkeypatch):
    """Traced as one graph. Inductor compiles it in the tests for a GPU."""
    traced = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", traced)
    last = attention_steps.staircase(16)[-1]
    shape = Shape(1, 2, 2, 128, 128, 16)
    tensors = inputs(shape, "float32", "cpu")
    steps = {last.name: last}
    calls = attention_steps.calls_of(attention_steps.COMPILED, shape, tensors, steps)
    found = attention_steps.check(calls, shape, tensors)
    # fp32 sums
    assert "status" not in found and found["error"] < 1e-5 and found["grad_error"] < 1e-5, found


@ON_CPU
def test_several_lengths_have_rows_of_their_own(tmp_path, monkeypatch):
    last = attention_steps.staircase(16)[-1]  # all steps at 128: see above
    monkeypatch.setattr(attention_steps, "staircase", lambda head_dim: [last])
    records = measured(attention_steps.EXPERIMENT, tmp_path, lengths=(64, 128))
    lengths = [record.config["length"] for record in records]
    assert lengths == [64] * (len(records) // 2) + [128] * (len(records) // 2)
    assert {record.metrics["status"] for record in records} == {"ok"}
    assert attention_steps.headline(records).startswith("1 × 64 or 128 × d")


@ON_CPU
def test_a_step_that_is_wrong_is_called_wrong(tmp_path, monkeypatch):
    real, last = lesson.backward, attention_steps.staircase(16)[-1]
    monkeypatch.setattr(attention_steps, "staircase", lambda head_dim: [last])
    monkeypatch.setattr(attention_steps, "backward", lambda *x: tuple(2 * g for g in real(*x)))
    records = measured(attention_steps.EXPERIMENT, tmp_path)
    assert {r.variant: r.metrics["status"] for r in records} == {
        last.name: "WRONG",
        attention_steps.NAIVE: "ok",
    }
    assert attention_steps.EXPERIMENT.wrong(records) == [f"{last.name} is wrong"]


@pytest.mark.parametrize("m, n", [(64, 32), (32, 64)])
def test_visited_tiles_are_those_with_something_to_see(m, n):
    tile = lesson.Tile(m, n)
    step = lesson.Step("", tile, tile, tile, skip=True)
    length = 256
    seen = set()
    for query in range(length):
        for key in range(query + 1):
            seen.add((query // m, key // n))
    assert step.visited("forward", length) == step.visited("dkdv", length) == len(seen) * m * n


def test_gains_are_of_the_same_round():
    steps = attention_steps.staircase(64)[1:3]
    slowing = {steps[0].name: [2.0, 4.0], steps[1].name: [1.0, 2.0]}  # a clock that slows down
    found = {}
    for name, ms in slowing.items():
        found[name] = {f"{way}_samples_ms": ms for way in attention_steps.PASSES}
    attention_steps.gains(found, steps, 4096)
    assert "fwd_gain" not in found[steps[0].name] and found[steps[1].name]["fwd_gain"] == 2.0
    assert found[steps[1].name]["fwd_predicted_gain"] == pytest.approx(1.97, abs=0.01)


def test_without_a_gpu_and_an_interpreter_the_remedy_is_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="begin the command with TRITON_INTERPRET=1"):
        _dispatch.check_runs(torch.device("cpu"))


def test_effects_are_predicted_from_theory(smoke):
    records, _ = smoke("gpu_lessons")
    factors = {"strides": [], "banks": [], "divergence": []}
    for record in records:
        if record.config["part"] in factors:
            factors[record.config["part"]].append(record.metrics["predicted_factor"])
    # 1 to 16 times the bytes read, once written
    assert factors["strides"][:6] == [1, 1.5, 2.5, 4.5, 8.5, 8.5]
    assert factors["banks"] == [1, 1.5, 2.5, 4.5, 8.5, 16.5]  # one round to write, 1 to 32 to read
    assert factors["divergence"] == [1, 1, 2, 2, 4]


@ON_CPU
def test_every_form_of_a_computation_is_right(smoke):
    rows = {
        (r.config["part"], r.variant): r.metrics
        for r in smoke("gpu_lessons")[0]
        if r.config["part"] in FORMS
    }
    assert {part for part, _ in rows} == set(FORMS)
    assert {case: m["status"] for case, m in rows.items() if m["status"] != "ok"} == {}
    assert rows["variance", "squares"]["error"] > 30 * rows["variance", "Welford"]["error"]


def test_loads_of_tiles_are_predicted_from_theory(smoke):
    records, _ = smoke("gpu_lessons")
    rows = [r.metrics for r in records if r.config["part"] == "tiles"]
    # 64³ in fp16: 16 × 16 tiles read 1/16 + 1/16 values for each product, 32 × 32 half of that
    assert [m.get("read_gb") for m in rows] == [65536e-9, 32768e-9, None]
    assert [m["predicted_factor"] for m in rows] == [1, 0.5, None]
    orders = [r.metrics for r in records if r.config["part"] == "tile-order"]
    assert len(orders) == 6 and all(0 < m["hit_pct"] < 100 for m in orders)


@triton.jit
def numbered_kernel(out_ptr, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Write each program's number into its tile."""
    row, col = grouped_tile(tl.program_id(0), row_tiles, col_tiles, GROUP)
    tl.store(out_ptr + row * col_tiles + col, tl.program_id(0))


@ON_CPU
def test_theorys_order_of_tiles_is_the_kernels():
    out = torch.full((5, 3), -1, dtype=torch.int32)
    numbered_kernel[(15,)](out, 5, 3, GROUP=2)
    assert [out[place].item() for place in tile_order(5, 3, 2)] == list(range(15))


def test_a_form_that_is_wrong_or_changes_is_called_so(tmp_path, monkeypatch):
    def forms(bench):
        counts = itertools.count(1.0)
        bench.form("sums", "right", lambda: torch.ones(3), torch.ones(3).double())
        bench.form("sums", "wrong", lambda: torch.full((3,), 2.0), torch.ones(3).double())
        bench.form(
            "sums",
            "changing",
            lambda: torch.full((3,), 1 + 1e-6 * next(counts)),
            torch.ones(3).double(),
        )

    monkeypatch.setitem(gpu_lessons.PARTS, "sums", forms)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = {
        r.variant: r.metrics for r in measured(gpu_lessons.EXPERIMENT, tmp_path, parts=("sums",))
    }
    assert [rows[name]["status"] for name in ("right", "wrong", "changing")] == [
        "ok",
        "WRONG",
        "ok",
    ]
    assert [rows[name]["same_bits"] for name in ("right", "wrong", "changing")] == [
        "yes",
        "yes",
        "no",
    ]


@ON_CPU
def test_levels_of_memory_are_slower_by_what_documents_say(tmp_path, monkeypatch):
    """Registers read 512 bytes per SM and clock, shared memory 64 beside as many written.

    No document has H100's L2.
    """
    monkeypatch.setattr(gpu_lessons.lesson_bench, "lookup", lambda name: H100_SXM)
    rows = [r.metrics for r in measured(gpu_lessons.EXPERIMENT, tmp_path, parts=("levels",))]
    assert [m["predicted_factor"] for m in rows] == [
        1,
        pytest.approx(8),
        None,
        pytest.approx(40, rel=0.01),
    ]
    assert [m["status"] for m in rows if "gb_per_s" in m] == ["ok"] * 3  # Gluon needs a GPU
    # Each of three programs takes turns between two of eight blocks, which no other one reads.
    x, y = torch.randn(8, 64), torch.empty(3, 64)
    _dispatch.launch(reread_kernel, (3,), x, y, 7, SPAN=512, BLOCK=64)
    torch.testing.assert_close(y, 4 * x[0:6:2] + 3 * x[1:6:2])


def test_the_catalogue_has_every_kernel():
    """Every function `…_kernel` that is decorated in kernels/ and in the lessons is compiled by a
    module's entry.
    """
    files = [
        *(ROOT / "kernels").rglob("*.py"),
        *(ROOT / "experiments" / "lessons").glob("_lesson_*.py"),
    ]
    there = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            is_decorated = isinstance(node, ast.FunctionDef) and len(node.decorator_list) > 0
            if not is_decorated or not node.name.endswith("_kernel"):
                continue
            if "jit" in ast.unparse(node.decorator_list[0]):
                there.add(node.name)
    done = python("-c", LAUNCHED, timeout=200, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    missing = there - set(done.stdout.split())
    assert not missing, (
        f"add a launch of {', '.join(missing)} to experiments/lessons/ir/catalogue.py"
    )


LAUNCHED = """
import triton
from experiments._attention import Shape, inputs
from experiments.lessons.ir.catalogue import MODULES
from kernels._compile import compile_for
def print_name(kernel, *args, **options):  # in place of compiling it
    print(kernel.fn.__name__)
triton.runtime.jit.JITFunction.warmup = print_name
with compile_for(90):
    for launches in MODULES.values():
        launches()
"""


def test_ir_writes_every_stage(smoke):
    records, run = smoke("ir")
    (average,) = [r for r in records if r.variant == "average.average_kernel"]
    assert average.metrics["registers"] > 0 and average.metrics["spill_bytes"] == 0
    folder = run / "stages"
    assert all((folder / f"average.average_kernel.{stage}").stat().st_size for stage in ir.STAGES)
    assert not (folder / "lesson_banks.transpose_kernel.ttir").exists()  # Gluon begins with layouts
    plain, swizzled = (r for r in records if r.config["module"] == "lesson_banks")
    assert (plain.config["constants"], swizzled.config["constants"]) == ("PHASES=1", "PHASES=32")


ON_GPU = {
    attention_steps: {"heads": 2, "lengths": (512,), "rounds": 3, "calls": 2},
    gpu_lessons: {"elements": 2**20, "rounds": 200, "repeats": 3},
}


@pytest.mark.gpu
@pytest.mark.parametrize("module", ON_GPU, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_study_runs_on_a_gpu_and_all_of_it_is_right(module, tmp_path):
    context = lone_context("cuda")
    config = module.EXPERIMENT.config(**ON_GPU[module])
    run = module.EXPERIMENT.open(config, context, tmp_path)
    module.measure(config, context, run)
    assert [
        (r.variant, r.metrics["status"]) for r in run.records if r.metrics["status"] != "ok"
    ] == []
    assert all("time_p50_ms" in r.metrics or "fwd_p50_ms" in r.metrics for r in run.records)
    assert module.EXPERIMENT.finish(run, json_only=True) == 0
