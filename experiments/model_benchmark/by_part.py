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
from distlab.experiment import Column, Records, View
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

from .trials import Rows, headline, ms_column, prefix

INSIDE, REST = "distlab:in ", "loss and rest"
# The first that is found decides; a user's own model keeps its names, with a star for every number.
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
DRAWN = {  # in the picture, the kinds of work; all but these are `other`
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
# one kernel each on a GPU, slower than their bytes
TORCHS_NORMS = ("_fused_rms_norm", "native_layer_norm")
OF_TIME = "of_kernel_time_pct"
Parts = Counter[tuple[str, str]]  # (phase, part) → ms, number or FLOPs


def part_of(name: str) -> str:
    """Return the part of the model that a range belongs to, forward or backward."""
    name = name.removesuffix(" backward")
    return next(
        (part for part, pattern in PARTS if re.search(pattern, name)), re.sub(r"\d+", "*", name)
    )


def trace_ranges(trial: Trial) -> Any:
    """Make every part of the model a range of the profiler's trace while it is open."""
    push, pop = emitter("profiler")
    return named_ranges(
        trial.model, Emitter(lambda name: push(INSIDE + name), pop), trial.optimizer
    )


def measured_parts(events: Sequence[Event]) -> tuple[Parts, Parts]:
    """Return (phase, part) → ms and number of kernels per step of a trace with `trace_ranges`."""
    windows = step_windows(events)
    ms, count, still_open = Counter(), Counter(), []
    for event in sorted(events, key=lambda e: (e.on_host_ms, e.kind != "range", -e.end_ms)):
        while still_open and still_open[-1].end_ms < event.on_host_ms:
            still_open.pop()
        if event.kind == "range":
            still_open.append(event)
        elif any(start <= event.start_ms and event.end_ms <= end for start, end in windows):
            names = [each.name for each in reversed(still_open) if event.on_host_ms <= each.end_ms]
            part = next(
                (part_of(name.removeprefix(INSIDE)) for name in names if name.startswith(INSIDE)),
                REST,
            )
            phase = next((phase for phase in PHASES if f"distlab:{phase}" in names), "forward")
            ms[phase, part] += (event.end_ms - event.start_ms) / len(windows)
            count[phase, part] += 1 / len(windows)
    return ms, count


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
        """Time of an operator that does its FLOPs as one kind and moves its bytes as another."""
        backward = " backward" * (operator.phase == "backward")
        doing = f"attention{backward}" if operator.is_attention else "matmul"
        kind = f"norm{backward}" if operator.name.startswith(TORCHS_NORMS) else kind
        return self.launch_s + max(
            operator.flops / self.flops_per_s[doing], operator.bytes / self.bytes_per_s[kind]
        )


def rates(trial: Trial) -> Rates | None:
    """Measured now; None for a user's model, of whose sizes nothing is known."""
    if trial.options.factory is not None:
        return None
    shape, options, device = trial.shape, trial.options, trial.context.device
    dtype, on_gpu = DTYPES[options.dtype] or torch.float32, device.type == "cuda"

    def seconds(call: Callable[[], Any]) -> float:
        call()
        times = (
            [busy_ms(call)[0]]
            if on_gpu
            else clock.measure(call, warmup=1, repeats=3, device=device)
        )
        return statistics.median(times) / 1e3

    def both(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        leaves = [each.detach().requires_grad_() for each in inputs]
        forward = seconds(partial(function, *leaves))
        upstream = torch.ones_like(function(*leaves))
        together = seconds(lambda: torch.autograd.grad(function(*leaves), leaves, upstream))
        return forward, max(together - forward, 0.1 * forward)

    tokens, d = options.batch * shape.context_length, shape.d_model
    x, w, stream = (
        torch.randn(sizes, device=device) for sizes in ((tokens, d), (d, shape.d_ff), (tokens, d))
    )
    x, w, gain = x.to(dtype), w.to(dtype), torch.ones(d, device=device)
    q = torch.randn(
        options.batch, shape.num_heads, shape.context_length, d // shape.num_heads, device=device
    ).to(dtype)
    norms = both(lambda s, g: F.rms_norm(s, (d,), g), stream, gain)
    attentions = both(sdpa, q, q.clone(), q.clone())
    big = torch.ones(2**14 if on_gpu else 2**8, 2**12, device=device)
    tiny, bytes_per_s = torch.ones(1, device=device), memory_traffic.rates(big, seconds)
    bytes_per_s |= {
        "norm": 2 * stream.nbytes / norms[0],
        "norm backward": 4 * stream.nbytes / norms[1],
    }
    # causal: half of 4·B·T²·d; backward five matmuls for two
    scores = 2 * q.numel() * shape.context_length
    flops_per_s = {
        "matmul": 2 * tokens * w.numel() / seconds(lambda: x @ w),
        "attention": scores / attentions[0],
        "attention backward": 2.5 * scores / attentions[1],
    }
    return Rates(flops_per_s, bytes_per_s, seconds(tiny.clone))


def counted_parts(
    plain: Trial, device: Rates | None
) -> tuple[Parts, Parts, dict[str, Counter[str]]]:
    """Return (phase, part) → predicted ms, and FLOPs of matmuls, of one eager step.

    The third result is phase → category → all FLOPs.
    """
    log, by_phase = TrafficLog(), {}
    with FlopsByCategory() as counted, log:

        def mark(phase: str) -> None:
            by_phase[phase], counted.flops = counted.flops, Counter()
            log.phase = "optimizer" if phase == "backward" else "backward"

        with named_ranges(plain.model, Emitter(log.open.append, log.open.pop), plain.optimizer):
            plain("step", mark)
    ms, flops = Counter(), Counter()
    for operator, (kind, place) in zip(log.items, log.places, strict=True):
        ms[operator.phase, part_of(place)] += (
            0.0 if device is None else 1e3 * device.seconds(operator, kind)
        )
        flops[operator.phase, part_of(place)] += operator.flops
    return ms, flops, by_phase


def part_rows(measured: tuple[Counter, Counter], predicted: Counter, flops: Counter) -> Rows:
    """A row for each part, those with the most time first."""
    (ms, kernels), rows = measured, []
    for part in dict.fromkeys(part for _, part in ms):
        part_ms = sum(ms[phase, part] for phase in PHASES)
        predicted_ms = sum(predicted[phase, part] for phase in PHASES)
        metrics = {
            "part_ms": part_ms,
            "predicted_part_ms": predicted_ms or None,
            "kernels": sum(kernels[phase, part] for phase in PHASES),
        }
        for phase in PHASES[:2]:
            metrics[f"{phase}_part_ms"] = ms[phase, part] or None
            metrics[f"predicted_{phase}_part_ms"] = predicted[phase, part] or None
        metrics |= {
            OF_TIME: 100 * part_ms / ms.total(),
            "of_flops_pct": 100
            * sum(flops[phase, part] for phase in PHASES)
            / (flops.total() or 1),
        }
        rows.append((part, metrics))
    return sorted(rows, key=lambda row: -row[1]["part_ms"])


def part_findings(records: Records) -> list[str]:
    """Compare the whole step's kernels with the prediction."""
    lines = []
    for label, rows in grouped(records, lambda r: r.config["label"]).items():
        total, said = (
            sum(r.metrics[name] or 0 for r in rows) for name in ("part_ms", "predicted_part_ms")
        )
        predicted = f", predicted {said:.2f} ms" if said else ""
        lines.append(f"{prefix(label)}kernels take {total:.2f} ms{predicted}.")
    return lines


def draw_parts(records: Records, path: Path) -> None:
    """Time by part of every combination, measured above predicted."""
    labels = list(dict.fromkeys(record.config["label"] for record in records))
    known = [
        metric
        for metric in ("part_ms", "predicted_part_ms")
        if any(r.metrics[metric] for r in records)
    ]
    bars = [(label, metric) for label in labels for metric in known]
    parts = {kind: [0.0] * len(bars) for kind in (*DRAWN, "other")}
    for record in records:
        label = record.config["label"]
        part = record.variant.removeprefix(prefix(label))
        kind = next((kind for kind, names in DRAWN.items() if part in names), "other")
        for place, (bar, metric) in enumerate(bars):
            parts[kind][place] += (record.metrics[metric] or 0.0) * (bar == label)
    parts = {kind: values for kind, values in parts.items() if any(values)}
    rows = [
        f"{label} {'measured' if metric == 'part_ms' else 'predicted'}".strip()
        for label, metric in bars
    ]
    stacked_bars(
        path, rows, parts, title=f"Where the time goes: {headline(records)}", unit="ms per step"
    )


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
    reading="Kernels by the part of the model in whose range the host launched them, forward or backward; without a "
    "GPU, operators. Naive attention has scores (their scale and mask included), softmax and values, a fused one is "
    "one part. Kernels in no range (a loss outside of the head, a gradient set to zero) are the rest.",
    prediction="Every operator of an eager step, counted at torch's dispatcher: the longer of its FLOPs at the rate of "
    "a matmul (or fused attention) of this model's size and its bytes at the rate of such operators (copies, "
    "broadcasts, reductions, widening casts, norms), and an empty kernel; all measured alone in this run.",
)
