"""How fast is attention at each length, next to everything else one could call?

    distlab run attention_sweep --quick              # two minutes on a GPU; on a CPU one short length
    distlab run attention_sweep --name full          # all; the same command resumes a cut-off run

Causal attention, batch 1, one head, every length × head dim × dtype. For each variant: time of a forward+backward
called in a loop, as a model calls it (wall, and the host's part); device time of forward and of forward+backward as
replays of a CUDA graph (backward is their difference); peak memory of such a call with its inputs; TFLOP/s by
convention (causal pairs only, backward 2.5 × forward); and the largest error of output and gradients against
float64. fp32 peers multiply in torch's default, IEEE fp32; ours in
"emulated", three TF32 matmuls or six of bf16 on the tensor cores that are as accurate (see the error columns),
"ours-ieee" like them. The L2 is warm in graph replays; shapes up to a length of about 65,536 fit in it for every
variant alike.

A variant that refuses a dtype says so, one that runs out of memory says OOM, and the sweep goes on.
"""

import contextlib
import gc
import itertools
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import Column, Experiment, RankContext, Record, Run, View, headline_from, option
from distlab.measure import Pace, allocated_bytes, attempt, call_ms, peak_memory, percentiles, replay_ms
from distlab.report import TIE, grouped, host_bound, tied
from experiments._attention import (
    VARIANTS,
    Attention,
    ShapeOptions,
    build,
    errors,
    exact,
    inputs,
    lines_over_length,
    tflop_per_s,
)

COMPILED = ("compiled", "flex", "ours-compiled-backward", "ours")


@dataclass(frozen=True)
class Config(ShapeOptions):
    """One run: lengths × head_dims × dtypes × variants rows of batch 1 and one head."""

    lengths: tuple[int, ...] = option(tuple(2**n for n in range(7, 17)), "tokens", least=1)
    variants: tuple[str, ...] = option(VARIANTS, "what to time", choices=VARIANTS)
    repeats: int = option(10, "timed graph replays per number", least=1)
    warm: int = option(0, "processes that compile everything before the timing", least=0)


def both(fn: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv)"""
    o = fn(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), do)


def speed(case: list[Tensor], expected: tuple[Tensor, ...], variant: str, repeats: int, device: str) -> dict[str, Any]:
    """All metrics of one row of the length sweep; without a GPU only errors and the times of calls.

    Args:
        case: [q, k, v, dO], of (1, 1, T, D).
        expected: (o, dq, dk, dv) in float64.
    """
    fn = build(variant, case[0].shape[-2], device)
    metrics: dict[str, Any] = errors(both(fn, *case), expected)  # the first call, which compiles what has to be
    before = allocated_bytes(device)  # libraries keep workspaces, far larger than a short call's tensors
    with peak_memory(device) as memory:
        for clock, times in call_ms(lambda: both(fn, *case), repeats).items():
            metrics |= {f"{clock}_{p}_ms": ms for p, ms in percentiles(times).items()}
    if before is None:
        return metrics
    metrics["peak_bytes"] = memory.peak_alloc_bytes - before + sum(x.nbytes for x in case)
    forward = percentiles(replay_ms(lambda: fn(*case[:3]), repeats))
    whole = percentiles(replay_ms(lambda: both(fn, *case), repeats))
    metrics |= {f"fwd_device_{p}_ms": ms for p, ms in forward.items()}
    metrics |= {f"fwd_bwd_device_{p}_ms": ms for p, ms in whole.items()}
    metrics["bwd_device_p50_ms"] = whole["p50"] - forward["p50"]
    return metrics | tflop_per_s(case[0], forward["p50"], whole["p50"])


def release(held: int) -> int:
    """Give back what a row has left on the GPU, where `held` bytes were in use before it; the bytes in use now.

    Only memory that is still in use can lie in cycles of Python objects: looking for those takes longer than timing
    a short row, some 0.3 s with a compiler loaded.
    """
    if torch.cuda.memory_allocated() > held:
        gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per dtype, head dim, length and variant, with the reason in `status` if it fails; ours beside the best."""
    device = context.device.type
    if config.warm:
        warm(config, device)
    shapes = list(itertools.product(config.dtypes, config.head_dims, config.lengths))
    pace = Pace(len(shapes), "shapes", run.progress)
    for dtype, head_dim, length in shapes:
        row = {"length": length, "head_dim": head_dim, "dtype": dtype}
        asked = [v for v in config.variants if v != "ours-ieee" or dtype == "float32"]
        missing = [v for v in asked if not run.done(v, **row)]
        if missing:
            case = inputs((1, 1, length, head_dim), dtype, device)
            expected = exact(*case)
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        for variant in missing:
            metrics = attempt(partial(speed, case, expected, variant, config.repeats, device))
            run.add(variant, metrics, **row, batch=1, causal=True)
            if device == "cuda":
                held = release(held)
        pace()
    run.part(COMPARISON.name).records[:] = beside_best_peer(run.records)


def warm_one(job: tuple[int, int, str, str, str]) -> None:
    """Compile what one row needs, into the caches on disk; failures show when the row is measured."""
    length, head_dim, dtype, device, variant = job
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = inputs((1, 1, length, head_dim), dtype, device)
        both(build(variant, length, device), *case)
        build(variant, length, device)(*case[:3])


def warm(config: Config, device: str) -> None:
    """Compile the compiled variants of all rows in parallel processes, before anything is timed."""
    variants = [v for v in config.variants if v in COMPILED]
    jobs = list(itertools.product(config.lengths, config.head_dims, config.dtypes, [device], variants))
    with ProcessPoolExecutor(config.warm, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm_one, jobs))


def beside_best_peer(records: list[Record]) -> list[Record]:
    """One record per dtype, head dim and length: forward+backward of ours and of the fastest other variant.

    By the wall's time; by the device's in records that hold no other. `code` is the commit at which that shape was
    measured: a file may hold shapes of several runs.
    """
    found = []
    timed = [r for r in records if r.metrics.get("fwd_bwd_device_p50_ms") is not None]
    quantity = "wall" if all("wall_p50_ms" in r.metrics for r in timed) else "fwd_bwd_device"
    median = f"{quantity}_p50_ms"
    for shape, rows in sorted(grouped(timed, shape_of).items()):
        ours = next((r for r in rows if r.variant == "ours"), None)
        peers = [r for r in rows if not r.variant.startswith("ours")]
        if ours is None or not peers:
            continue
        best = min(peers, key=lambda r: r.metrics[median])
        ms, peer_ms = (r.metrics[median] for r in (ours, best))
        config = dict(zip(("dtype", "head_dim", "length"), shape, strict=True))
        config["code"] = (ours.commit or "unknown")[:7]
        metrics = {"ours_ms": ms, "peer": best.variant, "peer_ms": peer_ms, "ours_over_peer": ms / peer_ms}
        metrics["device_ratio"] = ours.metrics["fwd_bwd_device_p50_ms"] / best.metrics["fwd_bwd_device_p50_ms"]
        if tied(ours.metrics, best.metrics, quantity):
            metrics["is_tie"] = True
        found.append(Record(COMPARISON.name, "ours", config, metrics, ours.environment, ours.commit))
    return found


def shape_of(record: Record) -> tuple[str, int, int]:
    """(dtype, head dim, length)"""
    return record.config["dtype"], record.config["head_dim"], record.config["length"]


def crossovers(records: list[Record]) -> list[str]:
    """Per dtype and head dim, the lengths at which a peer is faster."""
    lines = []
    beside = grouped(beside_best_peer(records), lambda r: shape_of(r)[:2])
    for dtype, head_dim in sorted({shape_of(r)[:2] for r in records}):
        mine = beside.get((dtype, head_dim), [])
        slower = [r for r in mine if r.metrics["ours_over_peer"] > 1 and not r.metrics.get("is_tie")]
        behind = [f"{r.config['length']} ({r.metrics['peer']} {r.metrics['peer_ms']:.4f} ms, ours "
                  f"{r.metrics['ours_ms']:.4f})" for r in slower]
        ties = [str(r.config["length"]) for r in mine if r.metrics.get("is_tie")]
        verdict = "a peer is faster at " + ", ".join(behind) if behind else "ours is the fastest at every length"
        if ties:
            verdict = f"{verdict if behind else 'no peer is faster'}; a tie at {', '.join(ties)}"
        lines.append(f"{dtype} d={head_dim}: {verdict if mine else 'no device times to compare'}")
    return lines


headline = headline_from(
    "Batch 1, one head, causal, forward + backward, {device_name}, torch {torch}, triton {triton}"
)


COMPARISON = View(
    name="attention_comparison",
    question="Ours beside the fastest other variant of each shape",
    columns=[
        Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
        Column("metrics.ours_ms", "ours ms", ".4f"), Column("metrics.peer", "fastest peer"),
        Column("metrics.peer_ms", "its ms", ".4f"),
        Column("metrics.ours_over_peer", "ours / peer", ".2f", note=lambda r: TIE if r.metrics.get("is_tie") else ""),
        Column("metrics.device_ratio", "on the device", ".2f", missing="", optional=True),
        Column("config.code", "code"),
    ],
    headline=lambda records: headline(records) + "; each shape by the code in the last column",
    reading="Above 1 the peer is faster.",
)  # fmt: skip
VIEW = View(
    columns=[
        Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
        Column("variant", "variant"),
        Column("metrics.wall_p50_ms", "wall ms", ".4f", optional=True, note=host_bound),
        Column("metrics.fwd_device_p50_ms", "fwd ms", ".4f"), Column("metrics.bwd_device_p50_ms", "bwd ms", ".4f"),
        Column("metrics.fwd_bwd_device_p50_ms", "f+b ms", ".4f"),
        Column("metrics.fwd_bwd_tflop_per_s", "TFLOP/s", ".1f"), Column("metrics.host_p50_ms", "host ms", ".3f"),
        Column("metrics.peak_bytes", "peak MiB", ".1f", scale=2**-20),
        Column("metrics.max_abs_error", "max |Δo|", ".1e"), Column("metrics.max_abs_grad_error", "max |Δgrad|", ".1e"),
        Column("metrics.status", "status"),
    ],
    headline=lambda records: headline(records) if records[0].environment.get("cuda") else "A CPU: no device times",
    terminal=("dtype", "head_dim", "length", "variant", "wall_p50_ms", "fwd_bwd_device_p50_ms", "host_p50_ms",
              "fwd_bwd_tflop_per_s", "status"),
    pictures={
        "time.png": lines_over_length("fwd_bwd_device_p50_ms", "forward + backward, ms"),
        "tflops.png": lines_over_length("fwd_bwd_tflop_per_s", "TFLOP/s"),
        "memory.png": lines_over_length("peak_bytes", "peak bytes"),
    },
    findings=crossovers,
    reading="Wall is one forward and backward of many in a loop; host is until Python has issued it, and decides where "
    "it exceeds the device's: such rows are marked. Device times are replays of a CUDA graph with a warm L2; backward "
    "is forward + backward minus forward. In the memory picture naive attention grows with the square of the length, "
    "all others with the length.",
)
SMOKE = {"lengths": (32,), "head_dims": (16,), "dtypes": ("float32",), "variants": ("naive", "sdpa", "ours"),
         "repeats": 3}  # fmt: skip
EXPERIMENT = Experiment(
    Config, measure, VIEW,
    presets={
        "quick": {"lengths": (1024, 4096, 16384), "head_dims": (64,), "dtypes": ("bfloat16",), "repeats": 5,
                  "variants": ("naive", "sdpa-flash", "sdpa-cudnn", "flex", "ours")},
        "quick-cpu": SMOKE, "smoke": SMOKE,
    },
    gpus=1,
    parts=(COMPARISON,),
)  # fmt: skip
