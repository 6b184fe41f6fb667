"""What does each step towards a fast attention kernel bring?

    distlab run attention_steps                                  # 64 heads of 4,096 tokens
    distlab run attention_steps --head-dims 64 128    # of two widths
    TRITON_INTERPRET=1 distlab run attention_steps --quick       # without a GPU: are they right?

Seven kernels in Triton, each the one before with one thing changed (read `_lesson_attention.py`
next to this table): 16 × 16 tiles; full tiles, which the tensor cores of a Hopper GPU want; masked
tiles skipped; the diagonal in a loop of its own; tuned tiles; tensor descriptors; the backward in
one pass. Around them, in the same rounds: attention as in the formula, a `torch.compile`d backward
behind a Triton forward, the shipped kernels, torch's own, and the shipped kernels in fp32, with
exact fp32 multiplications and with emulated ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import (
    Column,
    Experiment,
    Metrics,
    Options,
    RankContext,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import attempt, clock, sample_rounds
from distlab.report import noise_of, prediction_error, sparse_column, stacked_bars
from experiments._attention import Shape, build, exact, inputs
from experiments.lessons._lesson_attention import Step, Tile, backward, forward
from kernels._dispatch import check_runs

FULL = Tile(64, 64)
# By head dim; 16 is for the interpreter, where every tile costs milliseconds.
TUNED = {16: {"forward": Tile(32, 64), "dkdv": Tile(32, 32), "dq": Tile(32, 64)},
         64: {"forward": Tile(64, 128), "dkdv": FULL, "dq": Tile(64, 128)},
         128: {"forward": Tile(128, 64, 8), "dkdv": Tile(32, 64), "dq": Tile(128, 64, 8)}}  # fmt: skip
ONE_PASS = {16: Tile(32, 32), 64: FULL, 128: Tile(64, 64, 8)}
NAIVE = "as in the formula"
OTHERS = {NAIVE: "naive", "shipped": "ours", "sdpa-flash": "sdpa-flash", "sdpa-cudnn": "sdpa-cudnn"}
# of the largest value; a GPU's fp32 steps are TF32
TOLERANCE = {"float32": 4e-3, "float16": 4e-3, "bfloat16": 4e-2}
PASSES = ("fwd", "bwd", "fwd_bwd")
Calls = Mapping[str, Callable[[], Any]]  # "fwd" and "bwd" of a variant → its call


@dataclass(frozen=True)
class Config(Options):
    """One run: a row per head dim and variant."""

    head_dims: tuple[int, ...] = option((64,), "widths of a head", choices=tuple(TUNED))
    heads: int = option(64, "number of heads, batch × heads", least=1)
    length: int = option(4096, "tokens, a multiple of every tile", least=1)
    dtype: str = option("bfloat16", "dtype of the steps", choices=tuple(TOLERANCE))
    rounds: int = option(6, "interleaved rounds", least=3)
    calls: int = option(10, "timed calls in a round", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        tiles = [t for d in self.head_dims for s in staircase(d) for t in (s.forward, s.dkdv, s.dq)]
        if self.length % (most := max(max(tile.m, tile.n) for tile in tiles)):
            raise ValueError(
                f"length={self.length}: these kernels have no ragged tiles; give a multiple of {most}"
            )


def staircase(head_dim: int) -> list[Step]:
    """The steps, each the one before and one thing more."""
    tuned, one_pass = TUNED[head_dim], ONE_PASS[head_dim]
    full = dict.fromkeys(tuned, Tile(32, 32) if head_dim == 16 else FULL)
    descriptors = Step("tensor descriptors", **tuned, skip=True, split=True, tma=True)
    return [
        Step("16 × 16 tiles", *[Tile(16, 16)] * 3),
        Step("full tiles", **full),
        Step("masked tiles skipped", **full, skip=True),
        Step("diagonal apart", **full, skip=True, split=True),
        Step("tuned tiles", **tuned, skip=True, split=True),
        descriptors,
        replace(descriptors, name="one backward pass", fused=True, dkdv=one_pass),
    ]


def calls_of(
    name: str, shape: Shape, tensors: Sequence[Tensor], steps: Mapping[str, Step]
) -> Calls:
    """Return `fwd` → o and `bwd` → (dq, dk, dv) of one variant.

    They take q, k, v, dO of (1, H, T, D), and each can be called alone.
    """
    q, k, v, do = tensors
    if step := steps.get(name):  # of (H, T, D)
        q, k, v, do = (x.detach()[0] for x in tensors)
        saved = forward(step, q, k, v)
        return {
            "fwd": lambda: forward(step, q, k, v)[0],
            "bwd": lambda: backward(step, q, k, v, *saved, do),
        }
    attention = build(OTHERS[name], shape, q.device.type)
    o = attention(q, k, v)
    return {
        "fwd": lambda: attention(q, k, v),
        "bwd": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
    }


def check(calls: Calls, shape: Shape, tensors: Sequence[Tensor]) -> Metrics:
    """Return the largest error of o and of a gradient on the last head.

    Each is divided by the largest exact value.
    """
    found = [x.flatten(0, -3)[-1:] for x in (calls["fwd"](), *calls["bwd"]())]
    expected = exact(shape, *tensors)
    apart = [
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(found, expected, strict=True)
    ]
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    metrics = {"error": apart[0], "grad_error": max(apart[1:])}
    if not max(apart) <= TOLERANCE[dtype]:
        metrics["status"] = "WRONG"
    return metrics


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per head dim and variant; those of one head dim are timed in the same rounds."""
    check_runs(context.device)
    on_gpu = context.device.type == "cuda"
    for head_dim in config.head_dims:
        steps = {step.name: step for step in staircase(head_dim)}
        names = [*steps, *(OTHERS if on_gpu else (NAIVE,))]
        if not all(run.done(name, head_dim=head_dim) for name in names):
            shape = Shape(1, config.heads, config.heads, config.length, config.length, head_dim)
            tensors = inputs(shape, config.dtype, context.device.type)
            found, calls = {}, {}  # variant → its metrics; variant → its calls
            for name in names:
                run.progress(f"{name}, head dim {head_dim}")
                found[name] = attempt(partial(ready, calls, name, shape, tensors, steps))
            timed = {
                name: partial(once, mine, config.calls, context.device)
                for name, mine in calls.items()
            }
            for name, metrics in sample_rounds(timed, config.rounds).items():
                found[name] |= metrics
            gains(found, [*steps.values()], config.length)
            for name, metrics in found.items():
                if "fwd_p50_ms" in metrics:
                    # by convention: visible pairs, backward 2.5 × forward
                    work = shape.flops() / 1e9
                    metrics |= {
                        f"{way}_tflop_per_s": times * work / metrics[f"{way}_p50_ms"]
                        for way, times in (("fwd", 1.0), ("bwd", 2.5), ("fwd_bwd", 3.5))
                    }
                kind = "steps" if name in steps else "others"
                run.add(name, metrics, head_dim=head_dim, kind=kind)


def ready(
    calls: dict[str, Calls],
    name: str,
    shape: Shape,
    tensors: Sequence[Tensor],
    steps: Mapping[str, Step],
) -> Metrics:
    """Put the calls of a variant among `calls` once they have run; gives its errors."""
    mine = calls_of(name, shape, tensors, steps)
    metrics = check(mine, shape, tensors)
    calls[name] = mine
    return metrics


def once(calls: Calls, repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return ms of forward and of backward, timed in one round, and their sums as both."""
    warmup = int(device.type == "cuda")
    times = {
        way: clock.measure(call, warmup=warmup, repeats=repeats, device=device)
        for way, call in calls.items()
    }
    return times | {"fwd_bwd": [sum(pair) for pair in zip(*times.values(), strict=True)]}


def gains(found: dict[str, Metrics], steps: Sequence[Step], length: int) -> None:
    """Write the measured and predicted gain of each timed step over the one before.

    The measured gain is taken round by round. The predicted one, for a step that changes what is
    computed, is the matmuls of the tiles visited before over those visited now.
    """
    for before, now in pairwise(steps):
        work = [step.matmul_flops(length) for step in (before, now)]
        for way in PASSES:
            samples = [found[step.name].get(f"{way}_samples_ms", ()) for step in (before, now)]
            if all(samples):
                metrics = found[now.name]
                metrics[f"{way}_gain"] = median(a / b for a, b in zip(*samples, strict=True))
                old, new = ((sum(w.values()) if way == "fwd_bwd" else w[way]) for w in work)
                if (now.skip, now.fused) != (before.skip, before.fused) and old != new:
                    metrics[f"{way}_predicted_gain"] = old / new


def draw(records: Records, path: Path) -> None:
    """Draw forward and backward of each step, and of the peers, as one bar.

    Rows that take several times longer stay in the table.
    """
    records = [r for r in records if r.variant != NAIVE]
    several = len({r.config["head_dim"] for r in records}) > 1
    labels = [f"{r.variant}, d = {r.config['head_dim']}" if several else r.variant for r in records]
    parts = {
        text: [
            r.metrics.get(
                f"{way}_p50_ms", None if r.metrics["status"] == "ok" else r.metrics["status"]
            )
            for r in records
        ]
        for way, text in (("fwd", "forward"), ("bwd", "backward"))
    }
    stacked_bars(path, labels, parts, title=headline(records), unit="ms")


headline = headline_from(
    "{heads} × {length:,} × d, {dtype}, causal, {device_name}, torch {torch}, triton {triton}"
)
VIEW = View(
    columns=[
        Column("config.head_dim", "d"),
        Column("variant", "step"),
        *(
            Column(f"metrics.{way}_p50_ms", f"{text} ms", ".3f")
            for way, text in zip(PASSES, ("forward", "backward", "forward + backward"), strict=True)
        ),
        Column(
            "metrics.noise_pct",
            "noise ± %",
            ".1f",
            derived=lambda record: noise_of(record.metrics, "fwd_bwd"),
        ),
        *(
            column
            for way, text in zip(PASSES, ("forward", "backward", "both"), strict=True)
            for column in (
                sparse_column(f"metrics.{way}_gain", f"{text} gain", ".2f"),
                sparse_column(
                    f"metrics.{way}_predicted_gain", f"{text} predicted", ".2f", optional=True
                ),
                prediction_error(f"{way}_predicted_gain", f"{way}_gain", f"{text} off %"),
            )
        ),
        Column("metrics.fwd_tflop_per_s", "forward TFLOP/s", ".0f"),
        Column("metrics.bwd_tflop_per_s", "backward TFLOP/s", ".0f"),
        Column("metrics.error", "error", ".0e"),
        Column("metrics.grad_error", "gradient error", ".0e"),
        Column("metrics.status", "status", optional=True),
    ],
    headline=headline,
    reading="Gain is the time of the step before over this one's, the median over interleaved rounds. "
    "The first step has none, and neither have the rows before and after the steps. Predicted "
    "is the same ratio of multiplications in the tiles that are visited, for the two steps that "
    "compute less: skipped tiles (nearly half of all), and one backward pass (five matmuls per "
    "tile instead of seven). The other steps do the same work in another way: full tiles are "
    "multiplied by wgmma, which reads operands from shared memory, where 16 rows leave most of "
    "a tensor core idle and load K and V once per 16 queries; a diagonal apart takes "
    "comparisons out of the loop; tuned tiles keep more programs resident; descriptors take "
    "addresses out of registers. Between two prediction and measurement stand the softmax, "
    "which no matmul hides, and programs of unequal length. Errors are over the largest exact "
    "value, of the first head. TFLOP/s count causal pairs only, backward as 2.5 forwards. In "
    "Triton's interpreter times say nothing.",
    terminal=(
        "fwd_p50_ms",
        "bwd_p50_ms",
        "fwd_bwd_p50_ms",
        "fwd_gain",
        "fwd_predicted_gain",
        "bwd_gain",
        "bwd_predicted_gain",
        "fwd_bwd_gain",
        "grad_error",
    ),
    pictures={"steps.png": draw},
    findings=lambda records: (
        []
        if records[0].environment.get("cuda")
        else ["Interpreted: the errors count, and no time does."]
    ),
    prediction="From the tiles that a step visits, where a step changes their number or what is done in each.",
)
SMALL = {"head_dims": (16,), "heads": 1, "length": 64, "dtype": "float32", "rounds": 3, "calls": 1}
EXPERIMENT = Experiment(
    Config,
    measure,
    VIEW,
    presets={"quick": {"rounds": 3}, "quick-cpu": SMALL, "smoke": SMALL},
    gpus=1,
    wrong=lambda records: [
        f"{r.variant} is wrong" for r in records if r.metrics["status"] == "WRONG"
    ],
)
