"""How much memory does attention hold, and when does it run out?

    distlab run attention_memory --quick             # two lengths, one head dim
    distlab run attention_memory --name memory       # on a GPU; again: resumes

Batch 8, no heads, causal, every length × head dim × dtype: memory in use before the backward and at its peak, measured
and predicted, over 100 forward and 100 backward passes. A size that does not fit says OOM with its prediction beside
it, which is the account of what would have been needed.
"""

import gc
import itertools
import time
from dataclasses import dataclass
from functools import partial
from statistics import median_high

import torch
from torch import Tensor

from distlab.experiment import Column, Experiment, Options, RankContext, Run, View, headline_from, option
from distlab.measure import Pace, PhaseTimer, allocated_bytes, attempt, peak_memory
from distlab.report import metric_over_length, prediction_error
from experiments._attention import VARIANTS, Attention, Shape, build, inputs
from kernels.flash_attention import hopper
from kernels.flash_attention.options import Problem


@dataclass(frozen=True)
class Config(Options):
    """One run: lengths × head_dims × dtypes × variants rows."""

    head_dims: tuple[int, ...] = option((16, 32, 64, 128), "head dims", least=1)
    dtypes: tuple[str, ...] = option(
        ("bfloat16", "float32"), "dtypes", choices=("bfloat16", "float16", "float32")
    )
    lengths: tuple[int, ...] = option(tuple(2**n for n in range(8, 16)), "tokens", least=1)
    variants: tuple[str, ...] = option(("naive", "sdpa", "ours"), "what to measure", choices=VARIANTS)
    batch: int = option(8, "sequences", least=1)
    passes: int = option(100, "forward and backward passes of each row", least=1)


def predicted_memory(variant: str, batch: int, length: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes in use before the backward, bytes at its peak) in closed form, the inputs and do included.

    A tensor is T·D per sequence, a matrix T². Naive attention saves P and the shared boolean mask beside q, k, v, o;
    its backward holds dP, the softmax's gradient and the masked one beside P. Flash attention saves q, k, v, o and the
    log-sum-exp; its backward adds dq, dk, dv and, as fp32, two rows of statistics. torch's own fused kernels are
    predicted alike, with a sum of dq in fp32 besides, which ours too keep where Hopper's kernels run.
    """
    tensor = batch * length * head_dim * dtype.itemsize
    matrix = batch * length * length * dtype.itemsize
    statistics = 4 * batch * length
    if variant == "naive":
        return 5 * tensor + matrix + length * length, 6 * tensor + 4 * matrix + length * length
    q = torch.empty(batch, 1, length, head_dim, dtype=dtype, device="meta")
    two_passes = variant.startswith("ours") and not (
        torch.cuda.is_available() and hopper.serves("backward", q, q, q, Problem((None, 0), 1.0)))
    summed = 0 if two_passes else 4 * batch * length * head_dim
    return 5 * tensor + statistics, 8 * tensor + 3 * statistics + summed


def pass_once(fn: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, float | None]:
    """Times of one forward and one backward, and on a GPU the bytes in use between them and at the backward's peak."""
    synchronize = PhaseTimer(q.device).synchronize
    synchronize()
    begin = time.perf_counter()
    o = fn(q, k, v)
    synchronize()
    middle = time.perf_counter()
    before = allocated_bytes(q.device)
    with peak_memory(q.device) as backward:
        torch.autograd.grad(o, (q, k, v), do)
        synchronize()
        end = time.perf_counter()
    times = {"fwd_ms": 1e3 * (middle - begin), "bwd_ms": 1e3 * (end - middle)}
    return times | {"before_bwd_alloc_bytes": before, "peak_alloc_bytes": backward.peak_alloc_bytes}


def _held_by_libraries(on_gpu: bool) -> int:
    """Bytes in use after a small matmul and its gradient: cuBLAS keeps a workspace for each thread that calls it."""
    if not on_gpu:
        return 0
    x, w = (torch.ones(16, 16, device="cuda", requires_grad=True) for _ in range(2))
    (x @ w).sum().backward()
    del x, w
    return torch.cuda.memory_allocated()


def memory(config: Config, run: Run, device: str, length: int, head_dim: int, dtype: str,
           variant: str) -> dict[str, object]:
    """Metrics of one row: medians of the times, the last pass's bytes without what was there before the row."""
    gc.collect()  # what an earlier row or error left must not go away in the middle of this one
    if device == "cuda":
        torch.cuda.empty_cache()
    held = _held_by_libraries(device == "cuda")
    shape = Shape(config.batch, 1, 1, length, length, head_dim)
    q, k, v, do = inputs(shape, dtype, device)
    fn = build(variant, shape, device)
    pace = Pace(config.passes, f"{variant} {dtype} d={head_dim} length {length}", run.progress)
    passes = []
    for _ in range(config.passes):
        passes.append(pass_once(fn, q, k, v, do))
        pace()
    last = {name: value - held for name, value in passes[-1].items() if name.endswith("bytes") and value is not None}
    return last | {f"{name}_p50_ms": median_high(p[f"{name}_ms"] for p in passes) for name in ("fwd", "bwd")}


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per dtype, head dim, length and variant; why one was not measured in `status`."""
    for dtype, head_dim, length, variant in itertools.product(
        config.dtypes, config.head_dims, config.lengths, config.variants
    ):
        row = {"length": length, "head_dim": head_dim, "dtype": dtype}
        if not run.done(variant, **row):
            bytes_ = predicted_memory(variant, config.batch, length, head_dim, getattr(torch, dtype))
            metrics = attempt(partial(memory, config, run, context.device.type, **row, variant=variant))
            metrics |= zip(("predicted_before_bwd_bytes", "predicted_peak_bytes"), bytes_, strict=True)
            run.add(variant, metrics, **row, causal=True)


VIEW = View(
    columns=[
        Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
        Column("variant", "variant"), Column("metrics.fwd_p50_ms", "fwd ms", ".3f"),
        Column("metrics.bwd_p50_ms", "bwd ms", ".3f"),
        Column("metrics.before_bwd_alloc_bytes", "before bwd MiB", ".1f", scale=2**-20),
        Column("metrics.predicted_before_bwd_bytes", "predicted", ".1f", scale=2**-20),
        prediction_error("predicted_before_bwd_bytes", "before_bwd_alloc_bytes"),
        Column("metrics.peak_alloc_bytes", "peak MiB", ".1f", scale=2**-20),
        Column("metrics.predicted_peak_bytes", "predicted", ".1f", scale=2**-20),
        prediction_error("predicted_peak_bytes", "peak_alloc_bytes"), Column("metrics.status", "status"),
    ],
    headline=headline_from("Batch {batch}, no heads, causal, {passes} passes, {device_name}, torch {torch}"),
    terminal=("dtype", "head_dim", "length", "variant", "before_bwd_alloc_bytes", "peak_alloc_bytes",
              "predicted_peak_bytes", "status"),
    pictures={"memory.png": partial(metric_over_length, metric="peak_alloc_bytes", label="peak bytes")},
    reading="Naive attention keeps the weights of all pairs, so its memory grows with the square of the length; the "
    "others keep the log-sum-exp of each row. A row that says OOM did not fit; its prediction says how much it needs.",
    prediction="Tensors counted by hand, in closed form: inputs, outputs, what is saved, and temporaries.",
    noise="The bytes are the allocator's count, which does not vary. Times are medians over the passes.",
)
SMOKE = {"lengths": (32,), "head_dims": (16,), "dtypes": ("float32",), "passes": 2}
EXPERIMENT = Experiment(
    Config, measure, VIEW,
    presets={"quick": {"lengths": (4096, 16384), "head_dims": (64,), "passes": 10}, "quick-cpu": SMOKE, "smoke": SMOKE},
    gpus=1,
)
