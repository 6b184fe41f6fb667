"""How fast is attention at each length, next to everything else one could call, and when does memory run out?

    python experiments/attention_sweep.py --quick                        # two minutes
    python experiments/attention_sweep.py --stamp full                   # all; the same command resumes a cut-off run
    python experiments/attention_sweep.py --memory --stamp memory        # the memory study

The length sweep: causal attention, batch 1, one head, every length × head dim × type. For each variant: device time of
forward and of forward+backward as replays of a CUDA graph (backward is their difference), host time to issue one
forward+backward, peak memory, TFLOP/s by convention (causal pairs only, backward 2.5 × forward), and the largest
error of output and gradients against float64. fp32 peers multiply in torch's default, IEEE fp32; ours in
"tf32x3", three TF32 products on the tensor cores that are as accurate (see the error columns), "ours-ieee" like them.
The L2 is warm in graph replays; shapes up to a length of about 65,536 fit in it for every variant alike.

The memory study: batch 8, no heads. Memory in use before the backward and at the peak, measured and predicted, over
100 forward and 100 backward passes.

A variant that refuses a type says so, one that runs out of memory says OOM, and the sweep goes on.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from distlab.measure.timing import percentiles
from distlab.report import (
    Column,
    OutputFolder,
    Record,
    commit,
    environment,
    json_line,
    read_json,
    render,
    write_csv,
    write_json,
)
from kernels.flash_attention import FlashAttention2, FlashAttention2CompiledBackward, cost

EXPERIMENT = "attention_sweep"
GRAPH_MS, MAX_CALLS = 2.0, 10  # of calls in one timed graph; short ones take 0.2 to 0.5 ms when the host issues them
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (1, 1, T, D) or (B, T, D) each → the same shape


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Lengths × head_dims × dtypes × variants rows, or the memory study.

    Args:
        batch: 1 in the length sweep, 8 in the memory study; there are no separate heads.
        repeats: timed graph replays per number.
        passes: forward and backward passes of the memory study.
        device: "cuda", or "cpu" for the smoke test, where there is host time only.
    """

    lengths: tuple[int, ...] = tuple(2**n for n in range(7, 17))
    head_dims: tuple[int, ...] = (16, 32, 64, 128)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    variants: tuple[str, ...] = ("naive", "compiled", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex",
                                 "ours-compiled-backward", "ours-ieee", "ours")
    batch: int = 1
    repeats: int = 10
    passes: int = 100
    memory: bool = False
    device: str = "cuda"


QUICK = Config(lengths=(1024, 4096, 16384), head_dims=(64,), dtypes=("bfloat16",),
               variants=("naive", "sdpa-flash", "sdpa-cudnn", "flex", "ours"), repeats=5)
SMOKE = Config(lengths=(32,), head_dims=(16,), dtypes=("float32",), variants=("naive", "sdpa", "ours"), repeats=3,
               passes=2, device="cpu")
MEMORY = Config(lengths=tuple(2**n for n in range(8, 16)), variants=("naive", "sdpa", "ours"), batch=8, memory=True)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: the whole score matrix in memory."""
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _sdpa(backend: SDPBackend | None) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if x.dim() == 4 else x.unsqueeze(1) for x in (q, k, v))
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return lambda q, k, v: run(q, k, v).view(q.shape)


def _flex(length: int, device: str) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def build(variant: str, length: int, device: str) -> Attention:
    """The function of a variant; compiled ones are compiled for this length, as their users do."""
    torch._dynamo.reset()
    if variant == "flex":
        return _flex(length, device)
    backends = {"sdpa": None, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
                "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION}
    if variant in backends:
        return _sdpa(backends[variant])
    return {
        "naive": naive,
        "compiled": torch.compile(naive, dynamic=False),
        "ours": lambda q, k, v: FlashAttention2.apply(q, k, v, True),
        "ours-ieee": lambda q, k, v: FlashAttention2.apply(q, k, v, True, None, None, "top-left", "ieee"),
        "ours-compiled-backward": lambda q, k, v: FlashAttention2CompiledBackward.apply(q, k, v, True),
    }[variant]


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: int = 2048) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv) in float64, `rows` queries at a time, so that long sequences fit."""
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for start in range(0, q.shape[-2], rows):
        stop = min(start + rows, q.shape[-2])
        here, keys = slice(start, stop), slice(0, stop)
        scores = q[..., here, :] @ k[..., keys, :].mT * scale
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(1 + start)
        p = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
        o[..., here, :] = p @ v[..., keys, :]
        dv[..., keys, :] += p.mT @ do[..., here, :]
        dp = do[..., here, :] @ v[..., keys, :].mT
        ds = p.mul_(dp - (do[..., here, :] * o[..., here, :]).sum(-1, keepdim=True))
        dq[..., here, :] = ds @ k[..., keys, :] * scale
        dk[..., keys, :] += ds.mT @ q[..., here, :] * scale
    return o, dq, dk, dv


class Case:
    """Fresh random inputs of one row and the float64 results to compare with."""

    def __init__(self, config: Config, length: int, head_dim: int, dtype: str, judged: bool = True):
        shape = (1, 1, length, head_dim) if config.batch == 1 else (config.batch, length, head_dim)
        torch.manual_seed(length + head_dim)
        self.q, self.k, self.v, self.do = (
            torch.randn(shape, device=config.device).to(getattr(torch, dtype)) for _ in range(4))
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
        o, *grads = ((x.double() - y).abs().max().item() for x, y in zip(self.both(fn), self.exact, strict=True))
        return {"max_abs_error": o, "max_abs_grad_error": max(grads)}


def replay_ms(run: Callable[[], object], repeats: int) -> list[float]:
    """Device time in ms of `run` in `repeats` replays of a CUDA graph, captured after two warm-ups.

    The graph holds as many calls of a short `run` as make starting it negligible.
    """
    torch.cuda.empty_cache()  # what earlier calls cached is of no use to the graph's own pool
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        run()
        begin.record()
        run()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    end.synchronize()
    calls = max(1, min(MAX_CALLS, int(GRAPH_MS / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    del graph
    torch.cuda.empty_cache()
    return [a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks)]


def host_ms(run: Callable[[], object], repeats: int) -> list[float]:
    """Time the host needs to issue `run` once, the device left to follow."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times


def speed(case: Case, fn: Attention, config: Config) -> dict[str, object]:
    """All metrics of one row of the length sweep."""
    metrics: dict[str, object] = case.errors(fn)
    if config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        case.both(fn)
        metrics["peak_alloc_bytes"] = torch.cuda.max_memory_allocated()
    metrics |= {f"host_{p}_ms": ms for p, ms in percentiles(host_ms(lambda: case.both(fn), config.repeats)).items()}
    if config.device != "cuda":
        return metrics
    forward = percentiles(replay_ms(lambda: case.forward(fn), config.repeats))
    both = percentiles(replay_ms(lambda: case.both(fn), config.repeats))
    metrics |= {f"fwd_device_{p}_ms": ms for p, ms in forward.items()}
    metrics |= {f"fwd_bwd_device_{p}_ms": ms for p, ms in both.items()}
    metrics["bwd_device_p50_ms"] = both["p50"] - forward["p50"]
    flops = cost(case.q.shape, case.k.shape, case.q.dtype, causal=True).flops
    for name, times in (("fwd", 1.0), ("bwd", 2.5), ("fwd_bwd", 3.5)):
        metrics[f"{name}_tflop_per_s"] = times * flops / metrics[f"{name}_device_p50_ms"] / 1e9
    return metrics


def predicted_memory(variant: str, batch: int, length: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes in use before the backward, bytes at its peak) in closed form, the inputs and do included.

    A tensor is T·D per sequence, a matrix T². Naive attention saves P and the shared boolean mask beside q, k, v, o;
    its backward holds dP and dS beside P. Flash attention saves q, k, v, o and the log-sum-exp; its backward adds dq,
    dk, dv and, as fp32, two rows of statistics. torch's own fused kernels are predicted alike.
    """
    tensor = batch * length * head_dim * dtype.itemsize
    matrix = batch * length * length * dtype.itemsize
    statistics = 4 * batch * length
    if variant == "naive":
        return 5 * tensor + matrix + length * length, 6 * tensor + 3 * matrix + length * length
    return 5 * tensor + statistics, 8 * tensor + 3 * statistics


def memory(case: Case, fn: Attention, config: Config, variant: str) -> dict[str, object]:
    """All metrics of one row of the memory study; on a CPU only the predictions."""
    length, head_dim = case.q.shape[-2:]
    before, peak = predicted_memory(variant, config.batch, length, head_dim, case.q.dtype)
    metrics: dict[str, object] = {"predicted_before_bwd_bytes": before, "predicted_peak_bytes": peak}
    forward_ms, backward_ms = [], []
    for _ in range(config.passes):
        if config.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        o = case.forward(fn)
        if config.device == "cuda":
            torch.cuda.synchronize()
            metrics["before_bwd_alloc_bytes"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        middle = time.perf_counter()
        torch.autograd.grad(o, (case.q, case.k, case.v), case.do)
        if config.device == "cuda":
            torch.cuda.synchronize()
            metrics["peak_alloc_bytes"] = torch.cuda.max_memory_allocated()
        forward_ms.append(1e3 * (middle - begin))
        backward_ms.append(1e3 * (time.perf_counter() - middle))
        del o
    return metrics | {
        "fwd_p50_ms": sorted(forward_ms)[len(forward_ms) // 2],
        "bwd_p50_ms": sorted(backward_ms)[len(backward_ms) // 2],
    }


def measure_row(config: Config, case: Case, variant: str) -> dict[str, object]:
    """Metrics of one row; "OOM" or the reason in `status` where there are none."""
    predicted = {}
    if config.memory:
        sizes = predicted_memory(variant, config.batch, *case.q.shape[-2:], case.q.dtype)
        predicted = dict(zip(("predicted_before_bwd_bytes", "predicted_peak_bytes"), sizes, strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that refuses explains itself in a warning per reason
            fn = build(variant, case.q.shape[-2], config.device)
            metrics = memory(case, fn, config, variant) if config.memory else speed(case, fn, config)
        return {"status": "ok"} | metrics
    except torch.OutOfMemoryError:
        return {"status": "OOM"} | predicted
    except Exception as error:  # a refused type, or a peer that fails: a row that says so, not the end of the sweep
        reason = str(error).strip().splitlines()
        return {"status": f"{type(error).__name__}: {reason[0][:100] if reason else ''}"} | predicted


def run(config: Config, path: Path | None = None, commit_id: str | None = None) -> list[Record]:
    """Measure every row that `path` does not hold yet; `path` is rewritten after each shape."""
    records = read_json(path) if path is not None and path.exists() else []
    done = {(r.variant, r.config["length"], r.config["head_dim"], r.config["dtype"]) for r in records}
    where = environment(config.device)
    for dtype in config.dtypes:
        for head_dim in config.head_dims:
            for length in config.lengths:
                asked = [v for v in config.variants if v != "ours-ieee" or dtype == "float32"]
                missing = [v for v in asked if (v, length, head_dim, dtype) not in done]
                if not missing:
                    continue
                case = Case(config, length, head_dim, dtype, judged=not config.memory)
                for variant in missing:
                    row = {"batch": config.batch, "length": length, "head_dim": head_dim, "dtype": dtype,
                           "causal": True, "repeats": config.passes if config.memory else config.repeats}
                    metrics = measure_row(config, case, variant)
                    records.append(Record(EXPERIMENT, variant, row, metrics, where, commit_id))
                    gc.collect()
                    if config.device == "cuda":
                        torch.cuda.empty_cache()
                del case
                if path is not None:
                    write_json(records, path)
    return records


def warm_one(job: tuple[Config, int, int, str, str]) -> None:
    """Compile what one row needs, into the caches on disk; failures show when the row is measured."""
    config, length, head_dim, dtype, variant = job
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(config, length, head_dim, dtype, judged=False)
        case.both(build(variant, length, config.device))
        case.forward(build(variant, length, config.device))


def warm(config: Config, workers: int) -> None:
    """Compile the compiled variants of all rows in parallel processes, before anything is timed."""
    variants = [v for v in config.variants if v in ("compiled", "flex", "ours-compiled-backward", "ours")]
    jobs = [(config, *row) for row in itertools.product(config.lengths, config.head_dims, config.dtypes, variants)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm_one, jobs))


def crossovers(records: list[Record]) -> list[str]:
    """Per head dim and type: the peers' best by length, and where ours is the fastest of all."""
    lines = []
    shapes = {(r.config["dtype"], r.config["head_dim"]) for r in records}
    for dtype, head_dim in sorted(shapes):
        behind, compared = [], 0
        for length in sorted({r.config["length"] for r in records}):
            times = {r.variant: r.metrics.get("fwd_bwd_device_p50_ms") for r in records
                     if (r.config["dtype"], r.config["head_dim"], r.config["length"]) == (dtype, head_dim, length)}
            mine = times.pop("ours", None)
            peers = {v: ms for v, ms in times.items() if ms is not None and not v.startswith("ours")}
            if mine is None or not peers:
                continue
            compared += 1
            best = min(peers, key=peers.get)
            if peers[best] < mine:
                behind.append(f"{length} ({best} {peers[best]:.4f} ms, ours {mine:.4f})")
        verdict = "a peer is faster at " + ", ".join(behind) if behind else "ours is the fastest at every length"
        lines.append(f"{dtype} d={head_dim}: {verdict if compared else 'no device times to compare'}")
    return lines


SPEED_COLUMNS = [
    Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
    Column("variant", "variant"), Column("metrics.fwd_device_p50_ms", "fwd ms", ".4f"),
    Column("metrics.bwd_device_p50_ms", "bwd ms", ".4f"), Column("metrics.fwd_bwd_device_p50_ms", "f+b ms", ".4f"),
    Column("metrics.fwd_bwd_tflop_per_s", "TFLOP/s", ".1f"), Column("metrics.host_p50_ms", "host ms", ".3f"),
    Column("metrics.peak_alloc_bytes", "peak MiB", ".1f", scale=2**-20),
    Column("metrics.max_abs_error", "max |Δo|", ".1e"), Column("metrics.max_abs_grad_error", "max |Δgrad|", ".1e"),
    Column("metrics.status", "status"),
]
MEMORY_COLUMNS = [
    Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
    Column("variant", "variant"), Column("metrics.fwd_p50_ms", "fwd ms", ".3f"),
    Column("metrics.bwd_p50_ms", "bwd ms", ".3f"),
    Column("metrics.before_bwd_alloc_bytes", "before bwd MiB", ".1f", scale=2**-20),
    Column("metrics.predicted_before_bwd_bytes", "predicted", ".1f", scale=2**-20),
    Column("metrics.peak_alloc_bytes", "peak MiB", ".1f", scale=2**-20),
    Column("metrics.predicted_peak_bytes", "predicted", ".1f", scale=2**-20), Column("metrics.status", "status"),
]


def plot(records: list[Record], path: Path, metric: str, label: str) -> None:
    """One panel per type and head dim: `metric` against length, both logarithmic, one line per variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = sorted({(r.config["dtype"], r.config["head_dim"]) for r in records})
    columns = min(len(shapes), 4)
    figure = Figure(figsize=(4 * columns, 3.4 * -(-len(shapes) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (dtype, head_dim) in enumerate(shapes):
        axes = figure.add_subplot(-(-len(shapes) // columns), columns, place + 1)
        for variant in dict.fromkeys(r.variant for r in records):
            points = sorted((r.config["length"], r.metrics[metric]) for r in records
                            if r.variant == variant and (r.config["dtype"], r.config["head_dim"]) == (dtype, head_dim)
                            and r.metrics.get(metric) is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=variant,
                          linewidth=2.2 if variant == "ours" else 1)
        axes.set(title=f"{dtype}, d = {head_dim}", xlabel="length", ylabel=label, xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def report(records: list[Record], folder: OutputFolder, is_memory: bool) -> None:
    """Table to stdout and file, CSV and pictures into the folder."""
    table = render(records, MEMORY_COLUMNS if is_memory else SPEED_COLUMNS)
    print(table)
    folder.write_text("table.txt", table + "\n")
    write_csv(records, folder.path / "records.csv")
    pictures = {"memory": ("peak_alloc_bytes", "peak bytes")}
    if not is_memory:
        pictures |= {"time": ("fwd_bwd_device_p50_ms", "forward + backward, ms"),
                     "tflops": ("fwd_bwd_tflop_per_s", "TFLOP/s")}
        print("\n".join(crossovers(records)))
    for name, (metric, label) in pictures.items():
        if any(r.metrics.get(metric) is not None for r in records):
            with folder.path_for(f"{name}.png") as temporary:
                plot(records, temporary, metric, label)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three lengths, one head dim, bf16: two minutes")
    parser.add_argument("--smoke", action="store_true", help="a few seconds on a CPU")
    parser.add_argument("--memory", action="store_true", help="the memory study instead of the length sweep")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--head-dims", type=int, nargs="+")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--variants", nargs="+", choices=Config().variants)
    parser.add_argument("--warm", type=int, default=0, help="processes that compile everything before the timing")
    parser.add_argument("--out", default="outputs", help="folder of all results")
    parser.add_argument("--stamp", help="name of this run; a name that exists is resumed")
    parser.add_argument("--commit", help="recorded where the tree has no git")
    return parser.parse_args(argv)


def configure(options: argparse.Namespace) -> Config:
    config = SMOKE if options.smoke else QUICK if options.quick else MEMORY if options.memory else Config()
    config = dataclasses.replace(config, memory=options.memory, batch=8 if options.memory else 1)
    chosen = {name: tuple(getattr(options, name)) for name in ("lengths", "head_dims", "dtypes", "variants")
              if getattr(options, name)}
    return dataclasses.replace(config, **chosen)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    config = configure(options)
    if config.device == "cuda" and not torch.cuda.is_available():
        print("the attention sweep needs a GPU (--smoke runs a few seconds on a CPU)", file=sys.stderr)
        return 1
    folder = OutputFolder(options.out, EXPERIMENT, options.stamp)
    if options.warm:
        warm(config, options.warm)
    records = run(config, folder.path / "records.json", commit(options.commit))
    report(records, folder, config.memory)
    print(json_line(EXPERIMENT, records, folder.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
