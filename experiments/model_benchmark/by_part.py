"""A step's time by part of the model, measured and predicted.

The parts are scores, softmax and values, norms, and feed-forward.

The trace of a step with named ranges (`measure.nvtx`) says inside which range the host launched
each kernel; on a CPU, inside which each operator ran. The same step, eager, is counted at torch's
dispatcher inside the same ranges: FLOPs and bytes of every operator, at the rates that such
operators reach by themselves in this run (`Rates`).
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.bench.trial import Trial
from distlab.experiment import Column, Metrics, Records, View
from distlab.measure import (
    Event,
    FlopsByCategory,
    busy_ms,
    clock,
    emitter,
    memory_traffic,
    named_ranges,
    step_windows,
)
from distlab.measure.nvtx import Emitter
from distlab.measure.trace.capture import PHASES
from distlab.model.ops import sdpa
from distlab.precision import DTYPES
from distlab.report import grouped, prediction_error, stacked_bars
from distlab.theory.operators import Compute
from experiments._traffic import TrafficLog

from .trials import Rows, headline, label_of, ms_column, prefix

# The prefix tells the model's ranges from those of phases in the same trace.
INSIDE, REST = "distlab:in ", "loss and rest"
# Part → pattern of its ranges. The first match decides. A user's own model keeps its names, with a
# star for every number.
PARTS = (
    ("scores", r"/scores$"),
    ("softmax", r"/softmax$"),
    ("values", r"/values$"),
    ("fused attention", r"/attention$"),
    ("norms", r"norm"),
    ("RoPE", r"/rope$"),
    ("SwiGLU", r"/swiglu$"),
    ("feed-forward matmuls", r"feed_forward"),
    ("projections", r"attention"),
    ("head and loss", r"^head|loss"),
    ("embedding", r"^embedding"),
    ("optimizer", r"^optimizer$"),
    ("residual additions", r"^blocks\.\d+$"),
    ("dropout", r"dropout$"),
    (REST, r"^(model)?$"),
)
DRAWN = {  # kind of work in the picture → its parts; the rest are `other`
    "matrix products": ("feed-forward matmuls", "projections"),
    "scores": ("scores",),
    "softmax": ("softmax",),
    "values": ("values",),
    "attention": ("fused attention",),
    "normalisation": ("norms",),
    "element-wise": ("RoPE", "SwiGLU", "residual additions", "dropout"),
    "loss": ("head and loss", REST),
    "optimizer": ("optimizer",),
}
# Norms of torch. Each is one kernel on a GPU, and takes longer than its bytes need.
TORCHS_NORMS = ("_fused_rms_norm", "native_layer_norm")
OF_TIME = "of_kernel_time_pct"
Parts = Counter[tuple[str, str]]  # (phase, part) → ms, number or FLOPs


def part_of(name: str) -> str:
    """Return the part of the model that a range belongs to, forward or backward."""
    # The range of a module's backward carries its name.
    name = name.removesuffix(" backward")
    for part, pattern in PARTS:
        if re.search(pattern, name):
            return part
    return re.sub(r"\d+", "*", name)


def trace_ranges(trial: Trial) -> Any:
    """Make every part of the model a range of the profiler's trace while it is open."""
    push, pop = emitter("profiler")

    def push_inside(name: str) -> Any:
        return push(INSIDE + name)

    return named_ranges(trial.model, Emitter(push_inside, pop), trial.optimizer)


def measured_parts(events: Sequence[Event]) -> tuple[Parts, Parts]:
    """Return (phase, part) → ms and number of kernels per step of a trace with `trace_ranges`."""
    windows = step_windows(events)
    ms, count, still_open = Counter(), Counter(), []
    for event in sorted(events, key=_outermost_first):
        # A stack of ranges: those that ended before this event was launched enclose nothing any
        # more.
        while still_open and still_open[-1].end_ms < event.on_host_ms:
            still_open.pop()
        if event.kind == "range":
            still_open.append(event)
        elif any(start <= event.start_ms and event.end_ms <= end for start, end in windows):
            # A kernel belongs to the range in which the host launched it. By the time it runs, the
            # host may be far ahead.
            names = [each.name for each in reversed(still_open) if event.on_host_ms <= each.end_ms]
            where = _phase_around(names), _part_around(names)
            # The mean over the traced steps.
            ms[where] += (event.end_ms - event.start_ms) / len(windows)
            count[where] += 1 / len(windows)
    return ms, count


def _outermost_first(event: Event) -> tuple[float, bool, float]:
    """Return a sort key: by begin on the host, ranges before the kernels and ranges inside them."""
    return event.on_host_ms, event.kind != "range", -event.end_ms


def _part_around(names: Sequence[str]) -> str:
    """Return the part of the innermost range of the model among `names`, innermost first."""
    for name in names:
        if name.startswith(INSIDE):
            return part_of(name.removeprefix(INSIDE))
    return REST


def _phase_around(names: Sequence[str]) -> str:
    """Return the phase whose range is among `names`."""
    for phase in PHASES:
        if f"distlab:{phase}" in names:
            return phase
    return "forward"


@dataclass(frozen=True)
class Rates:
    """Measured rates of this device, at the sizes of the model's own operators.

    Args:
        flops_per_s: FLOP/s of a matmul (`matmul`), of fused attention (`attention`) and of its
            backward.
        bytes_per_s: bytes per second of each of `measure.memory_traffic.KINDS`, and of torch's norm
            (`norm`) and its backward.
        launch_s: seconds of an empty kernel.
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: Mapping[str, float]
    launch_s: float

    def seconds(self, operator: Compute, kind: str) -> float:
        """Return the time of an operator: a launch, and the longer of its FLOPs and its bytes.

        Args:
            operator: operator as it was counted.
            kind: kind of traffic, one of `measure.memory_traffic.KINDS`.
        """
        # Only fused attention and norms have rates of their own for the backward.
        backward = " backward" if operator.phase == "backward" else ""
        arithmetic = f"attention{backward}" if operator.is_attention else "matmul"
        if operator.name.startswith(TORCHS_NORMS):
            kind = f"norm{backward}"
        # The roofline: arithmetic and memory traffic overlap, so the longer of the two decides.
        flops_s = operator.flops / self.flops_per_s[arithmetic]
        bytes_s = operator.bytes / self.bytes_per_s[kind]
        return self.launch_s + max(flops_s, bytes_s)


def rates(trial: Trial) -> Rates | None:
    """Measure the rates of this device. None for a user's model, whose sizes are unknown."""
    if trial.options.factory is not None:
        return None
    shape, options, device = trial.shape, trial.options, trial.context.device
    dtype = DTYPES[options.dtype] or torch.float32
    on_gpu = device.type == "cuda"

    def seconds(call: Callable[[], Any]) -> float:
        # Compiles and allocates, and is not timed.
        call()
        if on_gpu:
            # `busy_ms` asks the profiler, which leaves out the time between kernels.
            return busy_ms(call)[0] / 1e3
        return statistics.median(clock.measure(call, warmup=1, repeats=3, device=device)) / 1e3

    def both(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
        """Return seconds of forward and of backward."""
        # Inputs are copied without history, so that no graph reaches back to an earlier call.
        leaves = [each.detach().requires_grad_() for each in inputs]
        forward = seconds(partial(function, *leaves))
        # Ones have the output's shape and dtype, which is all that the time of a backward depends
        # on.
        upstream = torch.ones_like(function(*leaves))

        def step() -> Any:
            return torch.autograd.grad(function(*leaves), leaves, upstream)

        # The difference of two noisy times can be near 0, or below.
        return forward, max(seconds(step) - forward, 0.1 * forward)

    # The sizes of the model's own operators, because a rate depends on the size.
    tokens, d = options.batch * shape.context_length, shape.d_model
    x = torch.randn(tokens, d, device=device).to(dtype)
    w = torch.randn(d, shape.d_ff, device=device).to(dtype)
    # The residual stream and its norms are fp32 under autocast.
    stream = torch.randn(tokens, d, device=device)
    gain = torch.ones(d, device=device)
    q = torch.randn(
        options.batch, shape.num_heads, shape.context_length, d // shape.num_heads, device=device
    ).to(dtype)
    # 256 MiB in fp32 on a GPU, more than its L2 holds.
    big = torch.ones(2**14 if on_gpu else 2**8, 2**12, device=device)
    tiny = torch.ones(1, device=device)

    def norm(stream: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(stream, (d,), gain)

    norm_s, norm_backward_s = both(norm, stream, gain)
    attention_s, attention_backward_s = both(sdpa, q, q.clone(), q.clone())
    bytes_per_s = memory_traffic.rates(big, seconds)
    bytes_per_s |= {
        # The stream is read and written.
        "norm": 2 * stream.nbytes / norm_s,
        "norm backward": 4 * stream.nbytes / norm_backward_s,
    }
    # causal: half of 4·B·T²·d; backward five matmuls for two
    scores = 2 * q.numel() * shape.context_length
    flops_per_s = {
        # (T × d) · (d × d_ff) takes 2·T·d·d_ff FLOPs.
        "matmul": 2 * tokens * w.numel() / seconds(partial(torch.matmul, x, w)),
        "attention": scores / attention_s,
        "attention backward": 2.5 * scores / attention_backward_s,
    }
    return Rates(flops_per_s, bytes_per_s, launch_s=seconds(tiny.clone))


def counted_parts(
    plain: Trial, device: Rates | None
) -> tuple[Parts, Parts, dict[str, Counter[str]]]:
    """Return (phase, part) → predicted ms, and FLOPs of matmuls, of one eager step.

    The third result is phase → category → all FLOPs.
    """
    log, by_phase = TrafficLog(), {}
    with FlopsByCategory() as counted, log:

        def mark(phase: str) -> None:
            # The counter starts anew for each phase.
            by_phase[phase], counted.flops = counted.flops, Counter()
            # `phase` is the one that has ended. The operators after it are of the next.
            log.phase = "optimizer" if phase == "backward" else "backward"

        with named_ranges(plain.model, Emitter(log.open.append, log.open.pop), plain.optimizer):
            plain("step", mark)
    ms, flops = Counter(), Counter()
    for operator, (kind, range_name) in zip(log.items, log.places, strict=True):
        where = operator.phase, part_of(range_name)
        # FLOPs are counted in any case. Without rates there is no prediction in ms.
        ms[where] += 0.0 if device is None else 1e3 * device.seconds(operator, kind)
        flops[where] += operator.flops
    return ms, flops, by_phase


def part_rows(measured: tuple[Counter, Counter], predicted: Counter, flops: Counter) -> Rows:
    """Return a row for each part, those with the most time first."""
    ms, kernels = measured
    rows = []
    # The parts of the measured step decide the rows, and a predicted part without kernels has none.
    for part in dict.fromkeys(part for _, part in ms):
        part_ms = sum(ms[phase, part] for phase in PHASES)
        predicted_ms = sum(predicted[phase, part] for phase in PHASES)
        part_flops = sum(flops[phase, part] for phase in PHASES)
        metrics = {
            "part_ms": part_ms,
            # None instead of 0 leaves the column empty for a step without a prediction.
            "predicted_part_ms": predicted_ms or None,
            "kernels": sum(kernels[phase, part] for phase in PHASES),
        }
        for phase in ("forward", "backward"):
            metrics[f"{phase}_part_ms"] = ms[phase, part] or None
            metrics[f"predicted_{phase}_part_ms"] = predicted[phase, part] or None
        metrics |= {
            OF_TIME: 100 * part_ms / ms.total(),
            "of_flops_pct": 100 * part_flops / (flops.total() or 1),
        }
        rows.append((part, metrics))
    return sorted(rows, key=_ms_of, reverse=True)


def _ms_of(row: tuple[str, Metrics]) -> float:
    """Return the ms of a part's row."""
    _, metrics = row
    return metrics["part_ms"]


def part_findings(records: Records) -> list[str]:
    """Compare the whole step's kernels with the prediction."""
    lines = []
    for label, rows in grouped(records, label_of).items():
        total = sum(r.metrics["part_ms"] or 0 for r in rows)
        predicted_ms = sum(r.metrics["predicted_part_ms"] or 0 for r in rows)
        predicted = f", predicted {predicted_ms:.2f} ms" if predicted_ms else ""
        lines.append(f"{prefix(label)}kernels take {total:.2f} ms{predicted}.")
    return lines


def draw_parts(records: Records, path: Path) -> None:
    """Draw the time by part of every combination, measured above predicted."""
    labels = list(dict.fromkeys(map(label_of, records)))
    # A metric that no record has would only draw empty bars.
    known = [
        metric
        for metric in ("part_ms", "predicted_part_ms")
        if any(r.metrics[metric] for r in records)
    ]
    # Measured above predicted, for one combination after the other.
    bars = [(label, metric) for label in labels for metric in known]
    parts = {kind: [0.0] * len(bars) for kind in (*DRAWN, "other")}
    for record in records:
        label = label_of(record)
        kind = _kind_of(record.variant.removeprefix(prefix(label)))
        for place, (bar, metric) in enumerate(bars):
            if bar == label:
                parts[kind][place] += record.metrics[metric] or 0.0
    parts = {kind: values for kind, values in parts.items() if any(values)}
    rows = [
        f"{label} {'measured' if metric == 'part_ms' else 'predicted'}".strip()
        for label, metric in bars
    ]
    stacked_bars(
        path, rows, parts, title=f"Where the time goes: {headline(records)}", unit="ms per step"
    )


def _kind_of(part: str) -> str:
    """Return the kind of work, one of DRAWN or `other`, of a part."""
    for kind, names in DRAWN.items():
        if part in names:
            return kind
    return "other"


_ms = partial(ms_column, missing="")


PART_VIEW = View(
    name="model_parts",
    question="Which part of the model takes the time, and was it predicted?",
    columns=[
        Column("variant", "part"),
        _ms("part_ms", "ms per step"),
        _ms("predicted_part_ms", "predicted ms"),
        prediction_error("predicted_part_ms", "part_ms"),
        _ms("forward_part_ms", "forward ms"),
        _ms("predicted_forward_part_ms", "predicted forward ms"),
        _ms("backward_part_ms", "backward ms"),
        _ms("predicted_backward_part_ms", "predicted backward ms"),
        Column(f"metrics.{OF_TIME}", "of time %", ".1f"),
        Column("metrics.of_flops_pct", "of matmul FLOPs %", ".1f"),
        Column("metrics.kernels", "kernels", ",.0f"),
    ],
    headline=headline,
    terminal=(
        "part_ms",
        "predicted_part_ms",
        "forward_part_ms",
        "backward_part_ms",
        OF_TIME,
        "of_flops_pct",
    ),
    pictures={"parts.png": draw_parts},
    findings=part_findings,
    reading="Kernels by the part of the model in whose range the host launched them, forward or "
    "backward; without a GPU, operators. Naive attention has scores (their scale and mask "
    "included), softmax and values, a fused one is one part. Kernels in no range (a loss outside "
    "of the head, a gradient set to zero) are the rest.",
    prediction="Every operator of an eager step, counted at torch's dispatcher: the longer of its "
    "FLOPs at the rate of a matmul (or fused attention) of this model's size and its bytes at the "
    "rate of such operators (copies, broadcasts, reductions, widening casts, norms), and an empty "
    "kernel; all measured alone in this run.",
)
