"""How much memory does attention hold before and during its backward, and when does it run out?

    python experiments/attention_memory.py --stamp memory        # the same command resumes a cut-off run

Batch 8, no heads, causal, every length × head dim × type: memory in use before the backward and at its peak, measured
and predicted, over 100 forward and 100 backward passes. A size that does not fit says OOM with its prediction beside
it, which is the account of what would have been needed.
"""

import argparse
import dataclasses
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from distlab.measure.pace import Pace
from distlab.measure.validity import attempt
from distlab.report import (
    Column,
    Record,
    View,
    Work,
    add_output_options,
    commit,
    environment,
    progress,
    read_json,
    run_command,
    write_json,
)
from distlab.report.charts import metric_over_length
from distlab.report.options import whole
from kernels.flash_attention.peers import VARIANTS, Attention, build

EXPERIMENT = "attention_memory"


@dataclasses.dataclass(frozen=True)
class Config:
    """One run: lengths × head_dims × dtypes × variants rows.

    Args:
        passes: forward and backward passes of each row.
        device: "cuda", or "cpu" for the smoke test, which only predicts.
    """

    lengths: tuple[int, ...] = tuple(2**n for n in range(8, 16))
    head_dims: tuple[int, ...] = (16, 32, 64, 128)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    variants: tuple[str, ...] = ("naive", "sdpa", "ours")
    batch: int = 8
    passes: int = 100
    device: str = "cuda"


QUICK = Config(lengths=(4096, 16384), head_dims=(64,), passes=10)
SMOKE = Config(lengths=(32,), head_dims=(16,), dtypes=("float32",), passes=2, device="cpu")


def predicted_memory(variant: str, batch: int, length: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes in use before the backward, bytes at its peak) in closed form, the inputs and do included.

    A tensor is T·D per sequence, a matrix T². Naive attention saves P and the shared boolean mask beside q, k, v, o;
    its backward holds dP, the softmax's gradient and the masked one beside P. Flash attention saves q, k, v, o and the
    log-sum-exp; its backward adds dq, dk, dv and, as fp32, two rows of statistics. torch's own fused kernels are
    predicted alike, with a sum of dq in fp32 besides. The shares of a split call, up to 4,096 rows, are left out.
    """
    tensor = batch * length * head_dim * dtype.itemsize
    matrix = batch * length * length * dtype.itemsize
    statistics = 4 * batch * length
    if variant == "naive":
        return 5 * tensor + matrix + length * length, 6 * tensor + 4 * matrix + length * length
    summed = 0 if variant.startswith("ours") else 4 * batch * length * head_dim
    return 5 * tensor + statistics, 8 * tensor + 3 * statistics + summed


def pass_once(fn: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> dict[str, float]:
    """Times of one forward and one backward, and on a GPU the bytes in use between them and at the backward's peak."""
    on_gpu = q.is_cuda
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    synchronize()
    begin = time.perf_counter()
    o = fn(q, k, v)
    synchronize()
    middle = time.perf_counter()
    found: dict[str, float] = {"fwd_ms": 1e3 * (middle - begin)}
    if on_gpu:
        found["before_bwd_alloc_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(o, (q, k, v), do)
    synchronize()
    found["bwd_ms"] = 1e3 * (time.perf_counter() - middle)
    if on_gpu:
        found["peak_alloc_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _held_by_libraries(device: str) -> int:
    """Bytes in use after a small product and its gradient: cuBLAS keeps a workspace for each thread that calls it."""
    if device != "cuda":
        return 0
    x, w = (torch.ones(16, 16, device=device, requires_grad=True) for _ in range(2))
    (x @ w).sum().backward()
    del x, w
    return torch.cuda.memory_allocated()


def memory(config: Config, length: int, head_dim: int, dtype: str, variant: str) -> dict[str, object]:
    """Metrics of one row: medians of the times, the last pass's bytes without what was there before the row."""
    gc.collect()  # what an earlier row or error left must not go away in the middle of this one
    if config.device == "cuda":
        torch.cuda.empty_cache()
    held = _held_by_libraries(config.device)
    shape = (config.batch, length, head_dim)
    torch.manual_seed(length + head_dim)
    q, k, v, do = (torch.randn(shape, device=config.device).to(getattr(torch, dtype)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    fn = build(variant, length, config.device)
    pace = Pace(config.passes, f"{variant} {dtype} d={head_dim} length {length}", progress)
    passes = []
    for _ in range(config.passes):
        passes.append(pass_once(fn, q, k, v, do))
        pace()
    metrics: dict[str, object] = {name: x - held for name, x in passes[-1].items() if name.endswith("bytes")}
    for name in ("fwd", "bwd"):
        metrics[f"{name}_p50_ms"] = sorted(p[f"{name}_ms"] for p in passes)[len(passes) // 2]
    return metrics


def run(config: Config, path: Path | None = None, commit_id: str | None = None) -> list[Record]:
    """Measure every row that `path` does not hold yet; `path` is rewritten after each row."""
    records = read_json(path) if path is not None and path.exists() else []
    done = {(r.variant, r.config["length"], r.config["head_dim"], r.config["dtype"]) for r in records}
    where = environment(config.device)
    for dtype, head_dim, length, variant in itertools.product(
            config.dtypes, config.head_dims, config.lengths, config.variants):
        if (variant, length, head_dim, dtype) in done:
            continue
        before, peak = predicted_memory(variant, config.batch, length, head_dim, getattr(torch, dtype))
        predicted = {"predicted_before_bwd_bytes": before, "predicted_peak_bytes": peak}
        row = {"batch": config.batch, "length": length, "head_dim": head_dim, "dtype": dtype, "causal": True,
               "passes": config.passes}
        metrics = attempt(lambda row=(length, head_dim, dtype, variant): memory(config, *row)) | predicted
        records.append(Record(EXPERIMENT, variant, row, metrics, where, commit_id))
        if path is not None:
            write_json(records, path)
    return records


COLUMNS = [
    Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
    Column("variant", "variant"), Column("metrics.fwd_p50_ms", "fwd ms", ".3f"),
    Column("metrics.bwd_p50_ms", "bwd ms", ".3f"),
    Column("metrics.before_bwd_alloc_bytes", "before bwd MiB", ".1f", scale=2**-20),
    Column("metrics.predicted_before_bwd_bytes", "predicted", ".1f", scale=2**-20),
    Column("metrics.peak_alloc_bytes", "peak MiB", ".1f", scale=2**-20),
    Column("metrics.predicted_peak_bytes", "predicted", ".1f", scale=2**-20), Column("metrics.status", "status"),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    where = f"{env['device_name']}, torch {env['torch']}"
    return f"Batch {config['batch']}, no heads, causal, {config['passes']} passes, {where}"


def draw(records: Sequence[Record], path: Path) -> None:
    """Peak bytes over length."""
    if any(r.metrics.get("peak_alloc_bytes") is not None for r in records):
        metric_over_length(records, path, "peak_alloc_bytes", "peak bytes")


VIEW = View(
    name=EXPERIMENT,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"memory.png": draw},
    reading="Naive attention keeps the weights of all pairs, so its memory grows with the square of the length; the "
    "others keep the log-sum-exp of each row. A row that says OOM did not fit; its prediction says what it wanted.",
    prediction="Tensors counted by hand, in closed form: inputs, outputs, what is saved, and temporaries.",
    noise="The bytes are the allocator's count, which does not vary. Times are medians over the passes.",
)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(EXPERIMENT, description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="two lengths, one head dim; on a CPU as --smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds on a CPU")
    parser.add_argument("--lengths", type=whole(), nargs="+")
    parser.add_argument("--head-dims", type=whole(), nargs="+")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    add_output_options(parser, resumes=True)
    args = parser.parse_args(argv)

    def prepare() -> Work:
        chosen = {name: tuple(getattr(args, name)) for name in ("lengths", "head_dims", "dtypes", "variants")
                  if getattr(args, name)}
        quick = QUICK if torch.cuda.is_available() else SMOKE
        config = dataclasses.replace(SMOKE if args.smoke else quick if args.quick else Config(), **chosen)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("the memory study needs a GPU (--smoke runs a few seconds on a CPU)")
        return lambda folder: run(config, folder / "records.json", commit(args.commit))

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
