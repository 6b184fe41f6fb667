"""How fast is attention at the shapes that people train with?

    distlab run attention_sweep --quick           # one head, three lengths; on a CPU one
    distlab run attention_sweep --preset twelve   # twelve shapes of which models train
    distlab run attention_sweep --preset memory   # bytes, with a count of tensors by hand
    distlab run attention_sweep --name shapes     # the record; again: resumes
    distlab run attention_sweep --shapes 2x32x2048x128 --yours my_kernels:attention

A shape is BATCHxHEADS[:KEY HEADS]xQUERIES[:KEYS]xHEAD DIM, causal unless it ends in /full,
/window=W or /documents=N. For each variant: time of forward + backward called in a loop, as a model
calls it (wall, and the host's part); device time of forward and of forward + backward as replays of
a CUDA graph (backward is their difference); memory with the inputs, in use before the backward and
at the peak of both; TFLOP/s by convention (visible pairs only, backward 2.5 × forward); and the
largest error of output and gradients of one head against float64. All variants of a shape are timed
in interleaved rounds. fp32 peers multiply in torch's default, IEEE fp32; ours in "emulated", three
TF32 matmuls or six of bf16 on the tensor cores that are as accurate (see the error columns),
"ours-ieee" like them; "ours-deterministic" sums dQ in a pass of its own. The L2 is warm in graph
replays.

A variant that refuses a call says so. One that runs out of memory next to all graphs says OOM, with
the memory that it would have needed, and the sweep goes on. The timed functions are in
`_attention.py`.
"""

import gc
import itertools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from distlab.bench.task import check_name, factory_of
from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.kernel_check import OPERATIONS
from distlab.kernel_check.calls import call_of
from distlab.measure import Pace, allocated_bytes, attempt, call_ms, peak_memory, sample_rounds
from distlab.measure.clock import replayed
from distlab.report import (
    SLOWER,
    UNCLEAR,
    Panel,
    Series,
    fastest,
    furthest_behind,
    grouped,
    host_bound,
    interval_of,
    lines,
    prediction_error,
    ratio_metrics,
    row_named,
    sparse_column,
    text_column,
    verdict_of,
    why_unclear,
    with_interval,
)
from experiments._attention import (
    VARIANTS,
    Attention,
    Shape,
    build,
    errors,
    exact,
    inputs,
    last_head,
    rates,
    suits,
)
from kernels.flash_attention import hopper
from kernels.flash_attention.options import Problem

TWELVE = (
    "4x32x1024x64",
    "8x16x2048x64",
    "4x32x4096x64",
    "1x16x16384x64",
    "2x32x2048x128",
    "4x32x4096x128",
    "1x32x8192x128",
    "1x16x16384x128",
    "1x32x32768x128",
    "4x32x4096x128/full",
    "1x16x16384x64/full",
    "1x16x16384x128/full",
)
MORE = (
    "4x32x512x80",
    "4x32x2048x80",
    "4x32x2048x96",
    "2x16x4096x256",
    "4x32:8x4096x128",
    "1x32:8x32768x128",
    "1x32x32768x128/window=1024",
    "1x32x32768x128/documents=16",
    "1x32x4096:65536x128/full",
    "16x32x1:4096x128/full",
)
# These lengths are powers of two from 128 to 65,536, of one head each, for the pictures over
# length.
LENGTHS = tuple(f"1x1x{2**n}x{head_dim}" for head_dim in (16, 32, 64, 128) for n in range(7, 17))
# A batch of eight makes small allocations of libraries small next to the tensors.
MEMORY = tuple(f"8x1x{2**n}x{head_dim}" for head_dim in (16, 32, 64, 128) for n in range(8, 16))
# Only these need compilation, which the option `warm` does in parallel before the timing.
COMPILED = ("compiled", "flex", "ours")
# Name of a ratio → clock whose times it compares. The ratio is ours over another row.
COMPARED = {
    "ours_over_wall": "wall",
    "ours_over_device": "fwd_bwd_device",
    "ours_over_fwd": "fwd_device",
}


@dataclass(frozen=True)
class AttentionSweepConfig(Options):
    """Options of a run: a row per shape, dtype and variant that is defined there."""

    shapes: tuple[str, ...] = option(
        TWELVE + MORE, "shapes, BATCHxHEADS[:KEY HEADS]xQUERIES[:KEYS]xHEAD DIM[/MASK]"
    )
    dtypes: tuple[str, ...] = option(
        ("bfloat16",), "dtypes of the inputs", choices=("bfloat16", "float16", "float32")
    )
    variants: tuple[str, ...] = option(
        ("sdpa", "sdpa-cudnn", "sdpa-flash", "flex", "ours"), "functions to time", choices=VARIANTS
    )
    yours: str | None = option(
        None, "your own function of (q, k, v[, is_causal]), my_kernels:attention, as one more row"
    )
    forward: bool = option(False, "time the forward alone of your own function", needs="yours")
    rounds: int = option(7, "interleaved rounds", minimum=3)
    warm: int = option(0, "processes that compile everything before the timing", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A typing error should be reported before the first of many shapes is measured.
        for text in self.shapes:
            Shape.parse(text)
        if self.yours is not None:
            check_name(self.yours, "--yours")

    def rows(self, shape: Shape, dtype: str) -> list[str]:
        """Return the variants that are defined for a shape and dtype."""
        found = [variant for variant in self.variants if suits(variant, shape, dtype)]
        # A user's function takes no mask, and as many key heads as heads.
        if self.yours and shape.is_plain and shape.heads == shape.kv_heads:
            found.append("yours")
        return found

    def function(self, variant: str, shape: Shape, device: str) -> Attention:
        """Return the function of a variant at a shape."""
        if variant != "yours":
            return build(variant, shape, device)
        # The operation adapts the user's signature, such as a missing dimension of heads.
        operation = OPERATIONS["causal_attention" if shape.causal else "attention"]
        call = call_of(factory_of(self.yours, "--yours"), operation)
        # The user's function itself is timed, and not what finds its arguments.
        sizes = (shape.batch, shape.heads, shape.queries, shape.head_dim)
        call = call.for_sizes([torch.empty(sizes, device="meta")])
        # Without gradients it is a function that has no backward.
        return torch.no_grad()(call) if self.forward else call


def both(fn: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """Return (o, dq, dk, dv)."""
    o = fn(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), do)


def predicted_memory(variant: str, shape: Shape, dtype: str) -> dict[str, int]:
    """Return bytes in use before the backward and at its peak, in closed form.

    The inputs and do are included. {} for other variants, masks and lengths, which were not
    counted.

    A tensor is T·D per head, a matrix T². Naive attention saves P and the shared boolean mask in
    addition to q, k, v, o. Its backward holds dP, the softmax's gradient and the masked one,
    together with P. Flash attention saves q, k, v, o and the log-sum-exp. Its backward adds dq, dk,
    dv and, as fp32, two rows of statistics. torch's own fused kernels are predicted in the same
    way, with an additional sum of dq in fp32, which our kernels for Hopper with one pass also keep.
    """
    # Queries and keys must be alike, because the closed form has one T and one number of heads.
    alike = (shape.heads, shape.queries) == (shape.kv_heads, shape.keys)
    if variant not in ("naive", "sdpa", "ours") or not (alike and shape.causal and shape.is_plain):
        return {}
    # A tensor without memory, whose `nbytes` is T·D of all heads in the inputs' dtype.
    heads, length = shape.batch * shape.heads, shape.queries
    q = torch.empty(heads, 1, length, shape.head_dim, dtype=getattr(torch, dtype), device="meta")
    tensor = q.nbytes
    if variant == "naive":
        # P has the inputs' dtype, and the boolean mask is one byte per pair, of one head.
        matrix = heads * length**2 * q.itemsize
        mask = length**2
        # Five tensors: q, k, v, o and do.
        before = 5 * tensor + matrix + mask
        # The sixth is dv: the backward of P·V gives it together with dP, before dq and dk are
        # there.
        peak = 6 * tensor + 4 * matrix + mask
    else:
        # fp32: one number per row.
        statistics = 4 * heads * length
        one_pass = (
            torch.cuda.is_available()
            and hopper.adds_in_any_order(q)
            and hopper.serves("backward", q, q, q, Problem((None, 0), 1.0))
        )
        # Only a kernel that adds to dq from several programs keeps an fp32 sum of it, 4 bytes per
        # element.
        summed = 0 if variant == "ours" and not one_pass else 4 * q.numel()
        before = 5 * tensor + statistics
        # Eight: the five and dq, dk, dv. Three statistics: the log-sum-exp, and the two of the
        # backward.
        peak = 8 * tensor + 3 * statistics + summed
    return {"predicted_before_bwd_bytes": before, "predicted_peak_bytes": peak}


def of_shape(
    shape: Shape,
    dtype: str,
    variants: list[str],
    rounds: int,
    device: str,
    function: Callable[[str, Shape, str], Attention] = build,
) -> dict[str, dict[str, Any]]:
    """Return variant → its metrics, or a `status` that says what it refuses.

    Times on a CPU are wall times only.

    Args:
        function: function of variant, shape and device that returns what to time.
    """
    case = inputs(shape, dtype, device)
    # Before any variant runs, so that float64's temporaries are not in the memory of a row.
    expected = exact(shape, *case)
    clocks: dict[str, Callable[[], dict[str, list[float]]]] = {}
    # All graphs share one pool, which then has the size of the largest and not of their sum.
    last: torch.cuda.CUDAGraph | None = None

    def prepare(variant: str) -> dict[str, Any]:
        nonlocal last
        fn = function(variant, shape, device)
        # If a user's function has no backward, its output requires no gradient.
        if variant == "yours" and not fn(*case[:3]).requires_grad:
            return prepare_forward(variant, fn)
        whole = partial(both, fn, *case)
        # Autograd's own thread would drop gradients a little later, so they would be counted.
        with torch.autograd.set_multithreading_enabled(False):
            # The first call compiles kernels and functions.
            metrics: dict[str, Any] = errors(whole(), expected, shape)
            # Libraries keep workspaces, which are far larger than the tensors of a short call.
            others = allocated_bytes(device)
            with peak_memory(device) as memory:
                o = fn(*case[:3])
                before = allocated_bytes(device)
                torch.autograd.grad(o, case[:3], case[3])
        # The result keeps autograd's nodes of the inputs alive, and these keep the stream on which
        # they were made. A graph could not be captured on another one.
        del o
        graphs = {}
        if others is not None:
            # What was held before the call is not the variant's. The inputs are counted again,
            # because every model holds them.
            own = sum(x.nbytes for x in case) - others
            metrics |= {
                "before_bwd_alloc_bytes": before + own,
                "peak_alloc_bytes": memory.peak_alloc_bytes + own,
            }
            runs = {"fwd_device": partial(fn, *case[:3]), "fwd_bwd_device": whole}
            graphs = {name: replayed(run, beside=last) for name, run in runs.items()}
            last = graphs["fwd_bwd_device"].graph
        # Only at the end: a variant that fails above has no clock, and so is not timed.
        clocks[variant] = partial(sample_once, whole, graphs)
        return metrics

    def prepare_forward(variant: str, fn: Attention) -> dict[str, Any]:
        """Prepare a user's function that has no backward."""
        forward = partial(fn, *case[:3])
        error = (last_head(forward(), shape) - expected[0]).abs().max().item()
        metrics = {"max_abs_error": error}
        # A user's forward can be captured as well. On a CPU there are no graphs.
        graphs = {} if device == "cpu" else {"fwd_device": replayed(forward, beside=last)}
        clocks[variant] = partial(sample_once, forward, graphs, prefix="fwd_")
        return metrics

    found = {variant: attempt(partial(prepare, variant)) for variant in variants}
    for variant, metrics in sample_rounds(clocks, rounds).items():
        # This status can be OOM although the first call succeeded: now the graphs take memory too.
        found[variant] |= metrics
    for variant, metrics in found.items():
        # A row without graphs has only wall times, so it has no rates.
        if "fwd_bwd_device_p50_ms" in metrics:
            fwd_ms, fwd_bwd_ms = metrics["fwd_device_p50_ms"], metrics["fwd_bwd_device_p50_ms"]
            bwd_ms = fwd_bwd_ms - fwd_ms
            metrics["bwd_device_p50_ms"] = bwd_ms
            metrics |= rates(shape, fwd_ms, bwd_ms, fwd_bwd_ms)
        metrics |= predicted_memory(variant, shape, dtype)
    if "yours" in clocks:
        # A function may keep the results of its first call. So it is checked again, on other
        # inputs.
        after = attempt(partial(error_after, function("yours", shape, device), case, shape))
        if after["status"] != "ok":
            found["yours"]["status"] = after["status"]
        # 0.05: outputs are means of values of deviation 1, and rounded to bf16
        elif not after["error"] <= 0.05:
            found["yours"]["status"] = f"WRONG after timing: error {after['error']:.1e}"
    return found


def error_after(fn: Attention, case: Sequence[Tensor], shape: Shape) -> dict[str, float]:
    """Return the error of a user's function on other inputs: it may remember earlier results."""
    # Flipping keeps the shapes and the distribution, and changes every value.
    q, k, v, do = [x.detach().flip(0, 2) for x in case]
    o, *_ = exact(shape, q, k, v, do)
    # Only the output: a user's function may have no backward.
    return {"error": (last_head(fn(q, k, v), shape) - o).abs().max().item()}


def sample_once(
    run: Callable[[], Any],
    graphs: Mapping[str, Callable[[int], list[float]]],
    prefix: str = "",
) -> dict[str, list[float]]:
    """Return ms of one round: by the wall and the host, and of two replays of each graph.

    Args:
        run: function to call.
        graphs: name of the samples → timer of a graph.
        prefix: beginning of the names of the samples by the wall and the host.
    """
    samples = {f"{prefix}{name}": ms for name, ms in call_ms(run, 1).items()}
    for name, replay in graphs.items():
        samples[name] = replay(2)
    return samples


def compare(records: Sequence[Record]) -> list[Record]:
    """Return the rows: each peer with ours over it, and ours with the fastest peer of its shape."""
    groups = grouped(records, case_of)
    found = []
    for record in records:
        # Rows are compared within their own shape and dtype only.
        rows = groups[case_of(record)]
        ours = row_named("ours", rows)
        if ours is record:
            metrics = against_fastest(ours, rows)
        elif ours is not None:
            metrics = ours_over(ours, record)
        else:
            metrics = {}
        found.append(record.with_metrics(metrics))
    return found


def case_of(record: Record) -> tuple[str, str]:
    """Return the dtype and the shape of a row."""
    return record.config["dtype"], record.config["shape"]


def ours_over(ours: Record, peer: Record) -> dict[str, float]:
    """Return the ratios of ours to another row, by each clock."""
    metrics = {}
    for name, clock in COMPARED.items():
        metrics |= ratio_metrics(name, ours, peer, clock)
    return metrics


def is_peer(record: Record) -> bool:
    """Return whether a row is neither ours nor a user's."""
    return record.variant != "yours" and not record.variant.startswith("ours")


def against_fastest(ours: Record, rows: Sequence[Record]) -> dict[str, Any]:
    """Return the fastest peer of a shape, its time in ms and ours over it."""
    # A user's function could be the fastest, but it is not what a user would otherwise pick.
    peers = [row for row in rows if is_peer(row)]
    peer = fastest(peers, "fwd_bwd_device_p50_ms")
    if peer is None:
        return {}
    ratios = ours_over(ours, peer)
    # Without samples on both sides there is no ratio, and a fastest peer alone says nothing.
    if "ours_over_device" not in ratios:
        return {}
    return {
        "peer": peer.variant,
        "peer_ms": peer.metrics["fwd_bwd_device_p50_ms"],
        "ours_over_peer": ratios["ours_over_device"],
    }


def measure(config: AttentionSweepConfig, context: RankContext, run: Run) -> None:
    """Add a row per shape, dtype and variant, with the reason in `status` if it fails."""
    device = context.device.type
    if config.yours is not None:
        factory_of(config.yours, "--yours")  # before anything is measured
    if config.warm:
        warm(config, device)
    cases = list(itertools.product(config.dtypes, config.shapes))
    pace = Pace(len(cases), "shapes", run.progress)
    for dtype, text in cases:
        shape = Shape.parse(text)
        variants = config.rows(shape, dtype)
        # A shape is measured as a whole, since all of its variants share rounds.
        if not all(run.done(variant, shape=text, dtype=dtype) for variant in variants):
            measured = of_shape(shape, dtype, variants, config.rounds, device, config.function)
            for variant, metrics in measured.items():
                run.add(
                    variant,
                    metrics,
                    shape=text,
                    dtype=dtype,
                    batch=shape.batch,
                    heads=shape.heads,
                    length=shape.queries,
                    head_dim=shape.head_dim,
                    causal=shape.causal,
                )
            gc.collect()  # graphs and compiled functions are kept by cycles of Python objects
            torch.cuda.empty_cache()
        pace()


def compiled(text: str, dtype: str, variant: str, device: str) -> dict[str, object]:
    """Compile what one row needs, into the caches on disk."""
    shape = Shape.parse(text)
    # With the backward, which is compiled when it is first called.
    both(build(variant, shape, device), *inputs(shape, dtype, device))
    return {}


def warm(config: AttentionSweepConfig, device: str) -> None:
    """Compile the compiled variants of all rows in parallel processes.

    Failures show when a row is measured.
    """
    jobs = []
    for dtype, text in itertools.product(config.dtypes, config.shapes):
        for variant in config.rows(Shape.parse(text), dtype):
            if variant in COMPILED:
                jobs.append(partial(compiled, text, dtype, variant, device))
    # CUDA cannot be used in a process that was forked.
    with ProcessPoolExecutor(config.warm, multiprocessing.get_context("spawn")) as pool:
        # `attempt` keeps an error of one job from ending the pool.
        list(pool.map(attempt, jobs))


def crossovers(records: list[Record]) -> list[str]:
    """Count the peers that are faster than ours by wall time and the undecided ones. Name some."""
    compared = [r for r in records if is_peer(r) and "ours_over_wall" in r.metrics]
    slower = [record for record in compared if verdict_of(record, "ours_over_wall") == SLOWER]
    unclear = [record for record in compared if verdict_of(record, "ours_over_wall") == UNCLEAR]
    found = []
    if slower:
        slower_by = []  # ratio and name of each
        for record in slower:
            where = f"{record.config['shape']} {record.config['dtype']}"
            measured = with_interval(record, "ours_over_wall")
            name = f"{where} ({record.variant}, ours / it {measured})"
            slower_by.append((record.metrics["ours_over_wall"], name))
        found.append(
            f"By the wall, a peer is faster in {len(slower)} of {len(compared)} rows of peers"
            f"{furthest_behind(slower_by)}."
        )
    if unclear:
        found.append(
            f"This run cannot tell which is faster in {len(unclear)} of {len(compared)} rows of "
            f"peers, by the wall. {why_unclear(unclear, 'ours_over_wall')}"
        )
    return found


def findings(records: Sequence[Record]) -> list[str]:
    """Say how a user's function compares, then which peers are faster than ours."""
    return yours(records) + crossovers(records)


def yours(records: Sequence[Record]) -> list[str]:
    """Compare a user's function with ours at each shape, by the best clock that there is."""
    found = []
    for record in records:
        if record.variant != "yours":
            continue
        where = f"Yours at {record.config['shape']}"
        if record.metrics["status"] != "ok":
            found.append(f"{where}: {record.metrics['status']}.")
            continue
        for name, what in (
            ("ours_over_device", "forward and backward, on the device"),
            ("ours_over_fwd", "forward, on the device"),
            ("ours_over_wall", "forward and backward, called in a loop"),
        ):
            if name in record.metrics:
                ratio = with_interval(record, name)
                found.append(f"{where}: the lab's kernel takes {ratio} of its time ({what}).")
                # The first clock that both rows have is the best one. Later ones would repeat it.
                break
    return found


def geometric_means(records: Sequence[Record]) -> str:
    """Return the end of the headline: ours over SDPA's default, at all shapes."""
    rows = [r for r in records if r.variant == "sdpa"]
    on_device = [r for r in rows if "ours_over_device" in r.metrics]
    if not on_device:
        return ""
    device = _mean_ratio(on_device, "ours_over_device")
    wall = _mean_ratio([r for r in rows if "ours_over_wall" in r.metrics], "ours_over_wall")
    return (
        f"; ours ÷ SDPA's default {device} on the device, {wall} by the "
        f"wall: geometric means of {len(on_device)} shapes"
    )


def _mean_ratio(records: Sequence[Record], name: str) -> str:
    """Return the geometric mean of a ratio and, if every row has an interval, means of their ends.

    The means of the ends are wider apart than the interval of the mean is if the noise of different
    shapes is independent.
    """
    mean = f"{geometric_mean(r.metrics[name] for r in records):.3f}"
    # A logarithm needs positive numbers: one interval that reaches 0 leaves no mean of the ends.
    intervals = [interval_of(record, name) for record in records]
    if any(each is None or each.low <= 0 for each in intervals):
        return mean
    low = geometric_mean(each.low for each in intervals)
    high = geometric_mean(each.high for each in intervals)
    return f"{mean} (95 %: {low:.3f} to {high:.3f})"


def wrong(records: list[Record]) -> list[str]:
    """Name the rows whose error is above three times the largest of the shape's peers."""
    found = []
    for (dtype, shape), rows in grouped(records, case_of).items():
        for name in ("max_abs_error", "max_abs_grad_error"):
            # A row that failed has no error, and its status is shown anyway.
            with_error = [row for row in rows if name in row.metrics]
            found += _above_peers(f"{dtype} {shape}", name, with_error)
    return found


def _above_peers(case: str, name: str, rows: Sequence[Record]) -> list[str]:
    """Name the rows whose error `name` is above three times the largest of the peers among them."""
    peers = [row.metrics[name] for row in rows if is_peer(row)]
    if not peers:
        return []
    # Peers round in another order, so their errors differ by a small factor. 1e-5 keeps peers that
    # are nearly exact from setting a limit near 0.
    limit = 3 * max(peers) + 1e-5
    # "not <=" instead of ">", because NaN is an error
    above = [row for row in rows if not row.metrics[name] <= limit]
    return [f"{row.variant} at {case}: {name} {row.metrics[name]:.1e}" for row in above]


def behind(name: str) -> Callable[[Record], str]:
    """Return a column's note: it marks peers that are faster than ours by the whole interval."""

    def mark(record: Record) -> str:
        return " behind" if verdict_of(record, f"ours_over_{name}") == SLOWER else ""

    return mark


def draw(records: Sequence[Record], path: Path, *, metric: str, label: str, unit: int = 1) -> None:
    """Draw a metric of one head over its length.

    There is a panel per dtype and head dimension, and a line per variant, ours thick.

    Args:
        metric: name of the metric.
        label: what the metric is, with its unit.
        unit: what the metric is divided by, such as the bytes of a MiB.
    """
    # Lengths are compared at one head, because more heads only multiply the time.
    rows = [r for r in records if r.metrics.get(metric) is not None and r.config["heads"] == 1]
    panels = []
    for (dtype, head_dim), panel_rows in grouped(rows, _panel_of).items():
        series = []
        for variant, line in grouped(sorted(panel_rows, key=_ours_first), _variant_of).items():
            series.append(
                Series(
                    variant,
                    [r.config["length"] for r in line],
                    [r.metrics[metric] / unit for r in line],
                    line="-",
                    marked=True,
                    width=2.2 if variant == "ours" else 1,
                )
            )
        panels.append(Panel(f"{dtype}, head dim {head_dim}", "tokens", label, series, log_y=True))
    if panels:
        lines(path, panels, title=f"{label}, over the number of tokens")


def _panel_of(record: Record) -> tuple[str, int]:
    """Return the dtype and the head dimension of a row."""
    return record.config["dtype"], record.config["head_dim"]


def _ours_first(record: Record) -> tuple[bool, int]:
    """Return a sort key: our rows first, by length."""
    return record.variant != "ours", record.config["length"]


def _variant_of(record: Record) -> str:
    """Return the variant of a row."""
    return record.variant


_device_headline = headline_from(
    "Attention, forward + backward, {device_name}, torch {torch}, triton {triton}"
)


def headline(records: Sequence[Record]) -> str:
    """Return the device and the geometric means, or that there are no device times."""
    if not records[0].environment.get("cuda"):
        return "A CPU: no device times"
    return _device_headline(records) + geometric_means(records)


# A column that shows bytes in MiB.
mib_column = partial(Column, format=",.1f", scale=2**-20, optional=True)
VIEW = View(
    columns=[
        text_column("config.shape", "shape"),
        Column("config.dtype", "type"),
        Column("variant", "variant"),
        Column("metrics.wall_p50_ms", "wall ms", ".4f", optional=True, note=host_bound),
        Column(
            "metrics.ours_over_wall",
            "ours ÷ it, wall",
            ".2f",
            missing="",
            optional=True,
            note=behind("wall"),
        ),
        Column("metrics.fwd_bwd_device_p50_ms", "forward + backward ms", ".4f", optional=True),
        Column(
            "metrics.ours_over_device",
            "ours ÷ it, forward + backward",
            ".2f",
            missing="",
            optional=True,
            note=behind("device"),
        ),
        Column("metrics.fwd_device_p50_ms", "forward ms", ".4f", optional=True),
        Column(
            "metrics.ours_over_fwd",
            "ours ÷ it, forward",
            ".2f",
            missing="",
            optional=True,
            note=behind("fwd"),
        ),
        Column("metrics.bwd_device_p50_ms", "backward ms", ".4f", optional=True),
        Column("metrics.fwd_bwd_tflop_per_s", "TFLOP/s", ".1f", optional=True),
        sparse_column("metrics.peer", "fastest peer", optional=True),
        sparse_column("metrics.peer_ms", "fastest peer ms", ".4f", optional=True),
        sparse_column("metrics.ours_over_peer", "ours ÷ fastest peer", ".2f", optional=True),
        Column("metrics.host_p50_ms", "host ms", ".3f", optional=True),
        mib_column("metrics.before_bwd_alloc_bytes", "before backward MiB"),
        mib_column("metrics.predicted_before_bwd_bytes", "predicted before backward", missing=""),
        prediction_error(
            "predicted_before_bwd_bytes", "before_bwd_alloc_bytes", "off % before backward"
        ),
        mib_column("metrics.peak_alloc_bytes", "peak MiB"),
        mib_column("metrics.predicted_peak_bytes", "predicted peak", missing=""),
        prediction_error("predicted_peak_bytes", "peak_alloc_bytes", "off % at the peak"),
        Column("metrics.max_abs_error", "max |Δo|", ".1e", optional=True),
        Column("metrics.max_abs_grad_error", "max |Δgrad|", ".1e", optional=True),
        Column("metrics.status", "status"),
    ],
    headline=headline,
    terminal=(
        "shape",
        "variant",
        "wall_p50_ms",
        "ours_over_wall",
        "fwd_bwd_device_p50_ms",
        "ours_over_device",
        "ours_over_fwd",
        "peak_alloc_bytes",
        "predicted_peak_bytes",
        "status",
    ),
    pictures={
        "time.png": partial(draw, metric="fwd_bwd_device_p50_ms", label="Forward + backward, ms"),
        "memory.png": partial(
            draw, metric="peak_alloc_bytes", label="Peak memory, MiB", unit=2**20
        ),
    },
    derive=compare,
    findings=findings,
    reading="Wall is one forward and backward of many in a loop; host is until Python has issued "
    "it, and decides where it exceeds the device's: such rows are marked. Device times are replays "
    "of a CUDA graph with a warm L2; backward is forward + backward minus forward. Ours / it is "
    "ours over that row in the column before; behind: ours is slower. Pictures are of one head; in "
    "that of the memory naive attention, which keeps the weights of all pairs, grows with the "
    "square of the length, all others, which keep the log-sum-exp of each row, with the length. "
    "The prediction of a row that says OOM is what it needs.",
    prediction="Of the memory: inputs, outputs, what is saved, and temporaries, counted by hand in "
    "closed form.",
    noise="Medians over interleaved rounds, in each of which every variant of a shape is timed; "
    "ratios are paired by round, and ours is behind a row only where the whole 95 % interval of "
    "their ratio is above 1. A record without intervals has no such mark.",
)
SMOKE = {
    # The second shape has grouped heads and documents, so the smoke test runs their masks as well.
    "shapes": ("1x1x32x16", "1x2:1x16x16/documents=2"),
    "dtypes": ("float32",),
    "variants": ("naive", "sdpa", "ours"),
    "rounds": 3,
}
EXPERIMENT = Experiment(
    AttentionSweepConfig,
    measure,
    VIEW,
    presets={
        "twelve": {"shapes": TWELVE},
        "lengths": {
            "shapes": LENGTHS,
            "dtypes": ("bfloat16", "float32"),
            "variants": (
                "naive",
                "compiled",
                "sdpa",
                "sdpa-cudnn",
                "sdpa-flash",
                "sdpa-efficient",
                "flex",
                "ours",
            ),
            "rounds": 5,
        },
        "memory": {
            "shapes": MEMORY,
            "dtypes": ("bfloat16", "float32"),
            "rounds": 3,
            "variants": ("naive", "sdpa", "ours"),
        },
        "memory-cpu": SMOKE,
        "quick": {
            "shapes": ("1x1x1024x64", "1x1x4096x64", "1x1x16384x64"),
            "rounds": 3,
            "variants": ("naive", "sdpa-flash", "sdpa-cudnn", "flex", "ours"),
        },
        "quick-cpu": SMOKE,
        "smoke": SMOKE,
    },
    gpus=1,
    wrong=wrong,
)
