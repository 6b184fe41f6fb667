"""What does each step towards a fast attention kernel bring?

    distlab run attention_steps                                  # 64 heads of 4,096 tokens
    distlab run attention_steps --head-dims 64 128               # of two widths
    distlab run attention_steps --preset lengths                 # 512 to 65,536 tokens
    distlab run attention_steps --preset fp32                    # four widths in fp32
    TRITON_INTERPRET=1 distlab run attention_steps --quick       # without a GPU: are they right?

Seven kernels in Triton, each the one before with one thing changed (read `_lesson_attention.py`
next to this table): 16 × 16 tiles; full tiles, which the tensor cores of a Hopper GPU want; masked
tiles skipped; the diagonal in a loop of its own; tuned tiles; tensor descriptors; the backward in
one pass. Around them, in the same rounds: attention as in the formula, the shipped kernels,
torch's own, and the last step's forward with the formula's backward under `torch.compile`.
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
    Record,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import attempt, clock, sample_rounds
from distlab.report import noise_of, prediction_error, sparse_column, stacked_bars
from experiments._attention import Shape, build, exact, inputs, rates
from experiments.lessons._lesson_attention import (
    Step,
    Tile,
    backward,
    forward,
    whole_matrix_backward,
)
from kernels._dispatch import check_runs

# With 64 queries a warpgroup of 128 threads can use wgmma, whose smallest tile has 64 rows.
FULL = Tile(64, 64)


def _tuned(forward: Tile, dkdv: Tile, dq: Tile) -> Step:
    """Return the step with tuned tiles."""
    return Step("tuned tiles", forward=forward, dkdv=dkdv, dq=dq, skip=True, split=True)


# By head dim; 16 is for the interpreter, where every tile costs milliseconds, and 32 has the tiles
# of 64.
TUNED = {
    16: _tuned(forward=Tile(32, 64), dkdv=Tile(32, 32), dq=Tile(32, 64)),
    32: _tuned(forward=Tile(64, 128), dkdv=FULL, dq=Tile(64, 128)),
    64: _tuned(forward=Tile(64, 128), dkdv=FULL, dq=Tile(64, 128)),
    128: _tuned(forward=Tile(128, 64, 8), dkdv=Tile(32, 64), dq=Tile(128, 64, 8)),
}
# Head dim → tile of the backward in one pass.
ONE_PASS = {16: Tile(32, 32), 32: FULL, 64: FULL, 128: Tile(64, 64, 8)}
NAIVE = "as in the formula"
COMPILED = "compiled backward"
OTHERS = {NAIVE: "naive", "shipped": "ours", "sdpa-flash": "sdpa-flash", "sdpa-cudnn": "sdpa-cudnn"}
# Allowed error as a fraction of the largest value. On a GPU the fp32 steps compute in TF32.
TOLERANCE = {"float32": 4e-3, "float16": 4e-3, "bfloat16": 4e-2}
PASSES = ("fwd", "bwd", "fwd_bwd")
Calls = Mapping[str, Callable[[], Any]]  # "fwd" and "bwd" of a variant → its call


@dataclass(frozen=True)
class AttentionStepsConfig(Options):
    """Options of a run: a row per head dim, length and variant."""

    head_dims: tuple[int, ...] = option((64,), "widths of a head", choices=tuple(TUNED))
    heads: int = option(64, "number of heads, batch × heads", minimum=1)
    lengths: tuple[int, ...] = option(
        (4096,), "tokens, one or several, multiples of every tile", minimum=1, flag="--length"
    )
    dtype: str = option("bfloat16", "dtype of the steps", choices=tuple(TOLERANCE))
    rounds: int = option(6, "interleaved rounds", minimum=3)
    calls: int = option(10, "timed calls in a round", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = 1  # side of a tile; all are powers of two
        for head_dim in self.head_dims:
            for step in staircase(head_dim):
                for tile in (step.forward, step.dkdv, step.dq):
                    largest = max(largest, tile.m, tile.n)
        for length in self.lengths:
            if length % largest:
                raise ValueError(
                    f"length={length}: these kernels have no ragged tiles; give a multiple of "
                    f"{largest}"
                )


def staircase(head_dim: int) -> list[Step]:
    """Return the steps, each the one before with one thing changed."""
    small = Tile(16, 16)
    full = Tile(32, 32) if head_dim == 16 else FULL
    small_tiles = Step("16 × 16 tiles", forward=small, dkdv=small, dq=small)
    full_tiles = Step("full tiles", forward=full, dkdv=full, dq=full)
    skipped = replace(full_tiles, name="masked tiles skipped", skip=True)
    diagonal = replace(skipped, name="diagonal apart", split=True)
    tuned = TUNED[head_dim]
    descriptors = replace(tuned, name="tensor descriptors", tma=True)
    one_pass = replace(descriptors, name="one backward pass", fused=True, dkdv=ONE_PASS[head_dim])
    return [small_tiles, full_tiles, skipped, diagonal, tuned, descriptors, one_pass]


def calls_of(
    name: str, shape: Shape, tensors: Sequence[Tensor], steps: Mapping[str, Step]
) -> Calls:
    """Return `fwd` → o and `bwd` → (dq, dk, dv) of one variant.

    They take q, k, v, dO of (1, H, T, D), and each can be called alone.
    """
    if name in steps:
        step = steps[name]
        return _calls_of_step(step, tensors, partial(backward, step))
    if name == COMPILED:
        # The forward is that of the last step, so only the backward of this row differs from it.
        last_step = [*steps.values()][-1]
        by_formula = torch.compile(whole_matrix_backward, dynamic=False)
        return _calls_of_step(last_step, tensors, by_formula)
    q, k, v, do = tensors
    attention = build(OTHERS[name], shape, q.device.type)
    o = attention(q, k, v)
    return {
        "fwd": partial(attention, q, k, v),
        # The graph is kept, because the same backward is called again in every round.
        "bwd": partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True),
    }


def _calls_of_step(
    step: Step, tensors: Sequence[Tensor], backward_of_step: Callable[..., tuple[Tensor, ...]]
) -> Calls:
    """Return `calls_of` a step, whose kernels take (H, T, D) and no graph of autograd.

    Args:
        step: step whose forward is called.
        tensors: q, k, v, dO of (1, H, T, D).
        backward_of_step: function (q, k, v, o, lse2, dO) → (dq, dk, dv).
    """
    # (1, H, T, D) → (H, T, D)
    q, k, v, do = (x.detach()[0] for x in tensors)
    # The backward is timed alone, so it gets the results of a forward made now.
    o, lse2 = forward(step, q, k, v)

    def output() -> Tensor:
        return forward(step, q, k, v)[0]

    return {"fwd": output, "bwd": partial(backward_of_step, q, k, v, o, lse2, do)}


def check(calls: Calls, shape: Shape, tensors: Sequence[Tensor]) -> Metrics:
    """Return the largest error of o and of a gradient on the last head.

    Each is divided by the largest exact value.
    """
    results = calls["fwd"](), *calls["bwd"]()
    apart = []
    for result, expected in zip(results, exact(shape, *tensors), strict=True):
        # The exact result is computed for one head only, in float64. The last one is furthest from
        # the start of memory, so wrong offsets between heads show there.
        # The result is (H, T, D) or (1, H, T, D).
        last_head = result.flatten(0, -3)[-1:]
        difference = (last_head.double() - expected).abs().max()
        apart.append((difference / expected.abs().max()).item())
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    metrics = {"error": apart[0], "grad_error": max(apart[1:])}
    if not max(apart) <= TOLERANCE[dtype]:  # also if it is NaN
        metrics["status"] = "WRONG"
    return metrics


def measure(config: AttentionStepsConfig, context: RankContext, run: Run) -> None:
    """Add a row per head dim, length and variant.

    Variants of one head dim and length are timed in the same rounds.
    """
    # An interpreter that is missing should be reported before the first row.
    check_runs(context.device)
    for head_dim in config.head_dims:
        for length in config.lengths:
            # In a function of its own, so that its tensors are freed before the next ones are made.
            _measure_shape(config, context, run, head_dim, length)


def _measure_shape(
    config: AttentionStepsConfig, context: RankContext, run: Run, head_dim: int, length: int
) -> None:
    """Add the rows of one head dim and length, unless all are there."""
    # The compiled row is the last: `build` of the others resets the compiler.
    others = (*OTHERS, COMPILED) if context.device.type == "cuda" else (NAIVE,)
    steps = {step.name: step for step in staircase(head_dim)}
    names = [*steps, *others]
    if all(run.done(name, head_dim=head_dim, length=length) for name in names):
        return
    shape = Shape(
        batch=1,
        heads=config.heads,
        kv_heads=config.heads,
        queries=length,
        keys=length,
        head_dim=head_dim,
    )
    tensors = inputs(shape, config.dtype, context.device.type)
    found: dict[str, Metrics] = {}
    calls: dict[str, Calls] = {}
    for name in names:
        run.progress(f"{name}, head dim {head_dim}, {length:,} tokens")
        # Each variant runs once before any is timed. One that fails keeps the reason in its row and
        # is not timed.
        found[name] = attempt(partial(ready, calls, name, shape, tensors, steps))
    timed = {
        name: partial(once, calls_of_variant, config.calls, context.device)
        for name, calls_of_variant in calls.items()
    }
    for name, metrics in sample_rounds(timed, config.rounds).items():
        found[name] |= metrics
    gains(found, [*steps.values()], length)
    for name, metrics in found.items():
        if "fwd_p50_ms" in metrics:
            metrics |= rates(
                shape, metrics["fwd_p50_ms"], metrics["bwd_p50_ms"], metrics["fwd_bwd_p50_ms"]
            )
        # The page shows the steps as a sequence, and the other rows apart from it.
        kind = "steps" if name in steps else "others"
        run.add(name, metrics, head_dim=head_dim, length=length, kind=kind)


def ready(
    calls: dict[str, Calls],
    name: str,
    shape: Shape,
    tensors: Sequence[Tensor],
    steps: Mapping[str, Step],
) -> Metrics:
    """Put the calls of a variant into `calls` once they have run, and return its errors."""
    made = calls_of(name, shape, tensors, steps)
    # An error here leaves the variant out of `calls`, so it is not timed.
    metrics = check(made, shape, tensors)
    calls[name] = made
    return metrics


def once(calls: Calls, repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return ms of forward and of backward, timed in one round, and their sums as both."""
    # Without a GPU nothing is compiled, and an interpreted call takes long.
    warmup = 1 if device.type == "cuda" else 0
    fwd_ms = clock.measure(calls["fwd"], warmup=warmup, repeats=repeats, device=device)
    bwd_ms = clock.measure(calls["bwd"], warmup=warmup, repeats=repeats, device=device)
    # The two passes are timed apart, so their sum stands for a call of both.
    both_ms = [fwd + bwd for fwd, bwd in zip(fwd_ms, bwd_ms, strict=True)]
    return {"fwd": fwd_ms, "bwd": bwd_ms, "fwd_bwd": both_ms}


def gains(found: dict[str, Metrics], steps: Sequence[Step], length: int) -> None:
    """Write the measured and predicted gain of each timed step over the one before.

    The measured gain is taken round by round. The predicted one, for a step that changes what is
    computed, is the matmuls of the tiles visited before over those visited now.
    """
    for before, now in pairwise(steps):
        # Only these two options change what is computed. All others change how.
        computes_less = (now.skip, now.fused) != (before.skip, before.fused)
        for way in PASSES:
            old_ms = found[before.name].get(f"{way}_samples_ms")
            new_ms = found[now.name].get(f"{way}_samples_ms")
            if not old_ms or not new_ms:
                continue
            metrics = found[now.name]
            # Times of one round were taken close together, so a drift of the clock cancels in their
            # ratio.
            metrics[f"{way}_gain"] = median(
                old / new for old, new in zip(old_ms, new_ms, strict=True)
            )
            old_work, new_work = _work(before, way, length), _work(now, way, length)
            # Other steps compute the same, only faster. Counting FLOPs predicts nothing for them.
            if computes_less and old_work != new_work:
                metrics[f"{way}_predicted_gain"] = old_work / new_work


def _work(step: Step, way: str, length: int) -> int:
    """Return the matmul FLOPs over 2 · head dim of one of PASSES."""
    flops = step.matmul_flops(length)
    return flops["fwd"] + flops["bwd"] if way == "fwd_bwd" else flops[way]


def draw(records: Records, path: Path) -> None:
    """Draw forward and backward of each step, and of the peers, as one bar.

    Rows that take several times longer stay in the table.
    """
    # The formula's bar would be so long that the steps could not be told apart.
    records = [r for r in records if r.variant != NAIVE]
    several_widths = len({r.config["head_dim"] for r in records}) > 1
    several_lengths = len({r.config["length"] for r in records}) > 1
    labels = []
    for record in records:
        label = record.variant
        if several_widths:
            label += f", d = {record.config['head_dim']}"
        if several_lengths:
            label += f", {record.config['length']:,} tokens"
        labels.append(label)
    parts = {
        "forward": [_bar(r.metrics, "fwd_p50_ms") for r in records],
        "backward": [_bar(r.metrics, "bwd_p50_ms") for r in records],
    }
    stacked_bars(path, labels, parts, title=headline(records), unit="ms")


def _bar(metrics: Metrics, name: str) -> float | str | None:
    """Return the ms of a bar, or why there are none."""
    if name in metrics:
        return metrics[name]
    return None if metrics["status"] == "ok" else metrics["status"]


def noise_of_both(record: Record) -> float | None:
    """Return the noise of forward + backward, in %, for a record that was written without it."""
    return noise_of(record.metrics, "fwd_bwd")


def findings(records: Records) -> list[str]:
    """Say of an interpreted run what its numbers are worth."""
    if records[0].environment.get("cuda"):
        return []
    return ["Interpreted: the errors count, and no time does."]


def wrong(records: Records) -> list[str]:
    """Name the variants whose error is above the tolerance."""
    return [f"{r.variant} is wrong" for r in records if r.metrics["status"] == "WRONG"]


def gain_columns(way: str, title: str) -> tuple[Column, Column, Column]:
    """Return the columns of one pass's gain, its prediction, and the prediction's error."""
    return (
        sparse_column(f"metrics.{way}_gain", f"{title} gain", ".2f"),
        sparse_column(f"metrics.{way}_predicted_gain", f"{title} predicted", ".2f", optional=True),
        prediction_error(f"{way}_predicted_gain", f"{way}_gain", f"{title} off %"),
    )


def tokens(records: Records) -> str:
    """Return the lengths of the records, for the headline."""
    lengths = sorted({record.config["length"] for record in records})
    return " or ".join(f"{length:,}" for length in lengths)


headline = headline_from(
    "{heads} × {tokens} × d, {dtype}, causal, {device_name}, torch {torch}, triton {triton}",
    tokens=tokens,
)
VIEW = View(
    columns=[
        Column("config.head_dim", "d"),
        Column("config.length", "tokens", ",d"),
        Column("variant", "step"),
        Column("metrics.fwd_p50_ms", "forward ms", ".3f"),
        Column("metrics.bwd_p50_ms", "backward ms", ".3f"),
        Column("metrics.fwd_bwd_p50_ms", "forward + backward ms", ".3f"),
        Column("metrics.noise_pct", "noise ± %", ".1f", derived=noise_of_both),
        *gain_columns("fwd", "forward"),
        *gain_columns("bwd", "backward"),
        *gain_columns("fwd_bwd", "both"),
        Column("metrics.fwd_tflop_per_s", "forward TFLOP/s", ".0f"),
        Column("metrics.bwd_tflop_per_s", "backward TFLOP/s", ".0f"),
        Column("metrics.error", "error", ".0e"),
        Column("metrics.grad_error", "gradient error", ".0e"),
        Column("metrics.status", "status", optional=True),
    ],
    headline=headline,
    reading="Gain is the time of the step before over this one's, the median over interleaved "
    "rounds. The first step has none, and neither have the rows before and after the steps. "
    "Predicted is the same ratio of multiplications in the tiles that are visited, for the two "
    "steps that compute less: skipped tiles (nearly half of all), and one backward pass (five "
    "matmuls per tile instead of seven). The other steps do the same work in another way: full "
    "tiles are multiplied by wgmma, which reads operands from shared memory, where 16 rows leave "
    "most of a tensor core idle and load K and V once per 16 queries; a diagonal apart takes "
    "comparisons out of the loop; tuned tiles keep more programs resident; descriptors take "
    "addresses out of registers. Between two prediction and measurement stand the softmax, which "
    "no matmul hides, and programs of unequal length. Errors are over the largest exact value, of "
    "the first head. TFLOP/s count causal pairs only, backward as 2.5 forwards. In Triton's "
    "interpreter times say nothing.",
    terminal=(
        "head_dim",
        "length",
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
    findings=findings,
    prediction="From the tiles that a step visits, where a step changes their number or what is "
    "done in each.",
)
SMALL = {
    "head_dims": (16,),
    "heads": 1,
    "lengths": (64,),
    "dtype": "float32",
    "rounds": 3,
    "calls": 1,
}
# From lengths at which no tile can be skipped to those at which nearly half of all are.
LENGTHS = {"lengths": (512, 1024, 4096, 16384, 65536), "heads": 8, "rounds": 3, "calls": 3}
FP32 = {
    "head_dims": (16, 32, 64, 128),
    "lengths": (16384,),
    "heads": 1,
    "dtype": "float32",
    "rounds": 3,
    "calls": 3,
}
EXPERIMENT = Experiment(
    AttentionStepsConfig,
    measure,
    VIEW,
    presets={
        "lengths": LENGTHS,
        "lengths-cpu": SMALL | {"lengths": (64, 128)},
        "fp32": FP32,
        "fp32-cpu": SMALL,
        "quick": {"rounds": 3},
        "quick-cpu": SMALL,
        "smoke": SMALL,
    },
    gpus=1,
    wrong=wrong,
)
