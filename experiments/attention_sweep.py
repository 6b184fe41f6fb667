"""How fast is attention at each length, next to everything else one could call?

    python experiments/attention_sweep.py --quick                        # two minutes
    python experiments/attention_sweep.py --stamp full                   # all; the same command resumes a cut-off run

Causal attention, batch 1, one head, every length × head dim × type. For each variant: device time of forward and of
forward+backward as replays of a CUDA graph (backward is their difference), host time to issue one forward+backward,
peak memory of such a call with its inputs, TFLOP/s by convention (causal pairs only, backward 2.5 × forward), and the
largest error of output and gradients against float64. fp32 peers multiply in torch's default, IEEE fp32; ours in
"emulated", three TF32 products or six of bf16 on the tensor cores that are as accurate (see the error columns),
"ours-ieee" like them. The L2 is warm in graph replays; shapes up to a length of about 65,536 fit in it for every
variant alike.

A variant that refuses a type says so, one that runs out of memory says OOM, and the sweep goes on.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from distlab.measure.clock import host_ms, replay_ms
from distlab.measure.pace import Pace
from distlab.measure.statistics import percentiles
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
from experiments.attention_sweep_pieces.comparison import (  # noqa: F401
    COMPARISON_VIEW,
    beside_best_peer,
    crossovers,
    headline,
)
from kernels.flash_attention import cost
from kernels.flash_attention.peers import VARIANTS, Attention, build, exact

EXPERIMENT = "attention_sweep"


@dataclasses.dataclass(frozen=True)
class Config:
    """One run: lengths × head_dims × dtypes × variants rows of batch 1 and one head.

    Args:
        repeats: timed graph replays per number.
        device: "cuda", or "cpu" for the smoke test, where there is host time only.
    """

    lengths: tuple[int, ...] = tuple(2**n for n in range(7, 17))
    head_dims: tuple[int, ...] = (16, 32, 64, 128)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    variants: tuple[str, ...] = VARIANTS
    repeats: int = 10
    device: str = "cuda"


QUICK = Config(lengths=(1024, 4096, 16384), head_dims=(64,), dtypes=("bfloat16",),
               variants=("naive", "sdpa-flash", "sdpa-cudnn", "flex", "ours"), repeats=5)
SMOKE = Config(lengths=(32,), head_dims=(16,), dtypes=("float32",), variants=("naive", "sdpa", "ours"), repeats=3,
               device="cpu")


class Case:
    """Fresh random inputs of one row and the float64 results to compare with."""

    def __init__(self, length: int, head_dim: int, dtype: str, device: str, judged: bool = True):
        torch.manual_seed(length + head_dim)
        self.q, self.k, self.v, self.do = (
            torch.randn(1, 1, length, head_dim, device=device).to(getattr(torch, dtype)) for _ in range(4))
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.exact = exact(self.q, self.k, self.v, self.do) if judged else None

    def forward(self, fn: Attention) -> Tensor:
        return fn(self.q, self.k, self.v)

    def both(self, fn: Attention) -> tuple[Tensor, ...]:
        o = self.forward(fn)
        return o, *torch.autograd.grad(o, (self.q, self.k, self.v), self.do)

    def errors(self, fn: Attention) -> dict[str, float]:
        """Largest absolute error of the output and of the worst gradient."""
        found = [(x.double() - y).abs().max() for x, y in zip(self.both(fn), self.exact, strict=True)]
        o, *grads = torch.stack(found).tolist()  # one wait for the device, not four
        return {"max_abs_error": o, "max_abs_grad_error": max(grads)}

    def input_bytes(self) -> int:
        """Bytes of q, k, v and the output's gradient."""
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.do))


def speed(case: Case, fn: Attention, config: Config) -> dict[str, object]:
    """All metrics of one row of the length sweep."""
    metrics: dict[str, object] = case.errors(fn)  # the first call, which compiles what has to be
    before = 0
    if config.device == "cuda":
        before = torch.cuda.memory_allocated()  # libraries keep workspaces, far larger than a short call's tensors
        torch.cuda.reset_peak_memory_stats()
    metrics |= {f"host_{p}_ms": ms for p, ms in percentiles(host_ms(lambda: case.both(fn), config.repeats)).items()}
    if config.device != "cuda":
        return metrics
    metrics["peak_bytes"] = torch.cuda.max_memory_allocated() - before + case.input_bytes()
    forward = percentiles(replay_ms(lambda: case.forward(fn), config.repeats))
    both = percentiles(replay_ms(lambda: case.both(fn), config.repeats))
    metrics |= {f"fwd_device_{p}_ms": ms for p, ms in forward.items()}
    metrics |= {f"fwd_bwd_device_{p}_ms": ms for p, ms in both.items()}
    metrics["bwd_device_p50_ms"] = both["p50"] - forward["p50"]
    flops = cost(case.q.shape, case.k.shape, case.q.dtype, causal=True).flops
    for name, times in (("fwd", 1.0), ("bwd", 2.5), ("fwd_bwd", 3.5)):
        metrics[f"{name}_tflop_per_s"] = times * flops / metrics[f"{name}_device_p50_ms"] / 1e9
    return metrics


def measure_row(config: Config, case: Case, variant: str) -> dict[str, object]:
    """Metrics of one row; why there are none in `status`."""
    return attempt(lambda: speed(case, build(variant, case.q.shape[-2], config.device), config))


def release(held: int) -> int:
    """Give back what a row has left on the GPU, where `held` bytes were in use before it; the bytes in use now.

    Only memory that is still in use can lie in cycles of Python objects: looking for those takes longer than timing
    a short row, some 0.3 s with a compiler loaded.
    """
    if torch.cuda.memory_allocated() > held:
        gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def run(config: Config, path: Path | None = None, commit_id: str | None = None) -> list[Record]:
    """Measure every row that `path` does not hold yet; `path` is rewritten after each shape."""
    records = read_json(path) if path is not None and path.exists() else []
    done = {(r.variant, r.config["length"], r.config["head_dim"], r.config["dtype"]) for r in records}
    where = environment(config.device)
    shapes = list(itertools.product(config.dtypes, config.head_dims, config.lengths))
    pace = Pace(len(shapes), "shapes", progress)
    for dtype, head_dim, length in shapes:
        asked = [v for v in config.variants if v != "ours-ieee" or dtype == "float32"]
        missing = [v for v in asked if (v, length, head_dim, dtype) not in done]
        if not missing:
            continue
        case = Case(length, head_dim, dtype, config.device)
        held = torch.cuda.memory_allocated() if config.device == "cuda" else 0
        for variant in missing:
            row = {"batch": 1, "length": length, "head_dim": head_dim, "dtype": dtype, "causal": True,
                   "repeats": config.repeats}
            records.append(Record(EXPERIMENT, variant, row, measure_row(config, case, variant), where, commit_id))
            if config.device == "cuda":
                held = release(held)
        del case
        if path is not None:
            write_json(records, path)
        pace()
    return records


def warm_one(job: tuple[Config, int, int, str, str]) -> None:
    """Compile what one row needs, into the caches on disk; failures show when the row is measured."""
    config, length, head_dim, dtype, variant = job
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(length, head_dim, dtype, config.device, judged=False)
        case.both(build(variant, length, config.device))
        case.forward(build(variant, length, config.device))


def warm(config: Config, workers: int) -> None:
    """Compile the compiled variants of all rows in parallel processes, before anything is timed."""
    variants = [v for v in config.variants if v in ("compiled", "flex", "ours-compiled-backward", "ours")]
    jobs = [(config, *row) for row in itertools.product(config.lengths, config.head_dims, config.dtypes, variants)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm_one, jobs))


COLUMNS = [
    Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
    Column("variant", "variant"), Column("metrics.fwd_device_p50_ms", "fwd ms", ".4f"),
    Column("metrics.bwd_device_p50_ms", "bwd ms", ".4f"), Column("metrics.fwd_bwd_device_p50_ms", "f+b ms", ".4f"),
    Column("metrics.fwd_bwd_tflop_per_s", "TFLOP/s", ".1f"), Column("metrics.host_p50_ms", "host ms", ".3f"),
    Column("metrics.peak_bytes", "peak MiB", ".1f", scale=2**-20),
    Column("metrics.max_abs_error", "max |Δo|", ".1e"), Column("metrics.max_abs_grad_error", "max |Δgrad|", ".1e"),
    Column("metrics.status", "status"),
]


PICTURES = [
    ("time", "fwd_bwd_device_p50_ms", "forward + backward, ms"),
    ("tflops", "fwd_bwd_tflop_per_s", "TFLOP/s"),
    ("memory", "peak_bytes", "peak bytes"),
]


def _picture(metric: str, label: str) -> Callable[[Sequence[Record], Path], None]:
    def draw(records: Sequence[Record], path: Path) -> None:
        if any(r.metrics.get(metric) is not None for r in records):
            metric_over_length(records, path, metric, label)

    return draw


VIEW = View(
    name=EXPERIMENT,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=lambda records: headline(records) if records[0].environment.get("cuda") else "A CPU: host time only",
    pictures={f"{name}.png": _picture(metric, label) for name, metric, label in PICTURES},
    findings=crossovers,
    reading="Device times are replays of a CUDA graph with a warm L2; backward is forward + backward minus forward. "
    "Host time is what issuing one forward and backward costs Python, and below some length it decides. In the memory "
    "picture naive attention grows with the square of the length, all others with the length.",
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(EXPERIMENT, description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="three lengths, one head dim; on a CPU as --smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds on a CPU")
    parser.add_argument("--lengths", type=whole(), nargs="+")
    parser.add_argument("--head-dims", type=whole(), nargs="+")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--warm", type=whole(0), default=0, help="processes that compile everything before the timing")
    add_output_options(parser, resumes=True)
    return parser.parse_args(argv)


def configure(options: argparse.Namespace) -> Config:
    quick = QUICK if torch.cuda.is_available() else SMOKE
    config = SMOKE if options.smoke else quick if options.quick else Config()
    chosen = {name: tuple(getattr(options, name)) for name in ("lengths", "head_dims", "dtypes", "variants")
              if getattr(options, name)}
    return dataclasses.replace(config, **chosen)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def prepare() -> Work:
        config = configure(args)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("the attention sweep needs a GPU (--smoke runs a few seconds on a CPU)")

        def work(folder: Path) -> list[Record]:
            if args.warm:
                warm(config, args.warm)
            records = run(config, folder / "records.json", commit(args.commit))
            write_json(beside_best_peer(records), folder / "comparison.json")
            return records

        return work

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
