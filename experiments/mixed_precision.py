"""What does mixed precision compute in which dtype, and what breaks?

    distlab run mixed_precision            # this machine's device
    distlab run mixed_precision --quick    # smaller, seconds on a CPU

Five parts. *accumulation*: 1,000 × 0.01 in every combination of accumulator and addend, predicted
by rounding in integers. *types*: the dtype that each part of a small model computes in under
autocast. *norm*: layer normalisation with its statistics in a low precision, on inputs that are
large, or far from zero. *scaling*: gradients of a language model that fp16 rounds to zero, and the
window of loss scales between that and overflow; bf16 has fp32's range and needs none. *float8*:
losses of one training in bf16, and with the matmuls of its blocks in fp8.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from distlab.model import ModelConfig, TransformerLM, cross_entropy, preset
from distlab.model.transformer import Linear
from distlab.precision import autocast
from distlab.report import Panel, Series, lines, sparse_column, text_column
from distlab.theory.rounding import (
    FORMATS,
    overflow_share,
    repeated_sum,
    safe_loss_scales,
    stalls_at,
)
from distlab.train.data import SyntheticTokens
from distlab.train.memory_budget import PlannedStep, require
from kernels._dispatch import interpreted
from kernels.float8_linear import float8_linear

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# 0.01 has no exact binary form, so even the addend is rounded.
ADDEND, TIMES = 0.01, 1000
# name of an input of layer normalisation → its (deviation, mean)
INPUTS = {"deviation 1": (1.0, 0.0), "deviation 64": (64.0, 0.0), "mean 100": (1.0, 100.0)}
Rows = Iterator[tuple[str, str, Metrics]]  # variant, what it ran on, metrics
WIDTH = 768  # columns of layer normalisation's input


@dataclass(frozen=True)
class PrecisionConfig(Options):
    """Options of the experiment."""

    size: str = option("small", "model preset")
    layers: int | None = option(4, "number of blocks", minimum=1)
    context: int | None = option(512, "tokens per sequence", minimum=1)
    batch: int = option(8, "sequences of a micro-batch", minimum=1)
    micro_batches: int = option(
        8, "micro-batches of a step: the loss is divided by it, as accumulation does", minimum=1
    )
    log2_scales: tuple[int, ...] = option(
        (0, 4, 8, 12, 16, 20, 24, 28, 32, 36), "loss scales, as powers of two"
    )
    rows: int = option(8192, "rows of layer normalisation's input", minimum=1)
    steps: int = option(400, "steps of the trainings in bf16 and fp8", minimum=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        # An unknown preset should raise here, and not after the first part.
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, num_layers=self.layers, context_length=self.context)


def measure(config: PrecisionConfig, context: RankContext, run: Run) -> None:
    """Add the rows of every part.

    Raises:
        MemoryError: the model with this batch does not fit.
    """
    # The largest part is the backward of the language model, so only that one is planned.
    require([PlannedStep(config.model(), config.batch, mode="forward_backward")], context.device)
    for part in (accumulation, types, norm, scaling, float8):
        run.progress(part.__name__)
        for variant, where, metrics in part(config, context.device):
            run.add(variant, metrics, part=part.__name__, on=where)


def accumulation(config: PrecisionConfig, device: torch.device) -> Rows:
    """Yield sums of 1,000 × 0.01 by accumulator, their predictions, and distances from ten."""
    for accumulator in DTYPES:
        # An fp32 accumulator takes addends of all dtypes, a low one those of fp32 and of its own.
        for held_in in ("fp32", accumulator) if accumulator != "fp32" else DTYPES:
            total = torch.zeros((), dtype=DTYPES[accumulator], device=device)
            addend = torch.tensor(ADDEND, dtype=DTYPES[held_in], device=device)
            for _ in range(TIMES):
                # fp16 + fp32 gives fp32. Rounding to the accumulator after each addition is what
                # accumulating in it does.
                total = (total + addend).to(DTYPES[accumulator])
            yield (
                f"{accumulator} += {held_in}",
                f"{TIMES:,} × {ADDEND}",
                {
                    "sum": total.item(),
                    "predicted_sum": repeated_sum(
                        ADDEND, TIMES, FORMATS[accumulator], FORMATS[held_in]
                    ),
                    "relative_error": abs(total.item() / (ADDEND * TIMES) - 1),
                },
            )


def toy(device: torch.device) -> nn.Module:
    """Return two matmuls with an activation and a layer normalisation between them.

    The shapes are `(N, 8) -> (N, 4)`.
    """
    parts = {"fc1": nn.Linear(8, 16, bias=False), "relu": nn.ReLU(), "layer_norm": nn.LayerNorm(16)}
    return nn.Sequential(OrderedDict(parts, fc2=nn.Linear(16, 4, bias=False))).to(device)


def types(config: PrecisionConfig, device: torch.device) -> Rows:
    """Yield the dtypes of parameters, of each module's output under autocast, loss and gradients.

    Modules come in the order in which their forwards end: an outer module after its parts.
    """
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)
    language_model = replace(config.model(), num_layers=1, context_length=16)
    cases = {
        # Only dtypes are looked at, so a few numbers are enough.
        "toy": (partial(toy, device), torch.ones(2, 8, device=device)),
        "Transformer": (partial(TransformerLM, language_model, device=device), tokens),
    }
    for case, (build, inputs) in cases.items():
        # A new model for each, since hooks stay on a module.
        found = {low: types_of(build(), inputs, DTYPES[low]) for low in ("fp16", "bf16")}
        for part in found["fp16"]:
            yield part, case, {f"type_under_{low}": found[low][part] for low in found}


def types_of(model: nn.Module, inputs: Tensor, low: torch.dtype) -> dict[str, str]:
    """Return part → name of its dtype.

    The parameters come first, and the loss and the gradients last. Between them are the outputs of
    modules, in the order in which their forwards end: an outer module comes after its parts.
    """
    found = {"parameters": _name(next(model.parameters()))}
    for name, module in model.named_modules():
        # Lists of modules have no forward, and dropout passes its input on.
        if name and not isinstance(module, nn.ModuleList | nn.Dropout):
            label = name.removeprefix("blocks.0.") if name != "blocks.0" else "residual stream"
            module.register_forward_hook(partial(_note_type, found, label))
    with autocast(inputs.device, low):
        logits = model(inputs)
        loss = cross_entropy(
            logits, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=inputs.device)
        )
    loss.backward()
    return found | {"loss": _name(loss), "gradients": _name(next(model.parameters()).grad)}


def _note_type(found: dict[str, str], label: str, module: nn.Module, inputs: Any, out: Any) -> None:
    """Note the dtype of a module's output. With `found` and `label` bound, it is a forward hook."""
    found[label] = _name(out)


def _name(out: Tensor | tuple[Tensor, ...]) -> str:
    """Return the name of an output's dtype."""
    tensor = out[0] if isinstance(out, tuple) else out
    return next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)


def norm(config: PrecisionConfig, device: torch.device) -> Rows:
    """Yield errors of layer normalisation of inputs in a low precision, against float64.

    Its statistics are in that precision or in fp32.
    """
    generator = torch.Generator().manual_seed(0)
    # Drawn on the CPU, so that every device has the same numbers.
    drawn = torch.randn(config.rows, WIDTH, generator=generator).to(device)
    for where, (deviation, mean) in INPUTS.items():
        for low in ("fp16", "bf16"):
            x = (deviation * drawn + mean).to(DTYPES[low])
            exact = layer_norm(x.double())
            for statistics in ("fp32", low):
                # Both get the inputs rounded to the low precision, so only the statistics differ.
                y = layer_norm(x.to(DTYPES[statistics])).to(DTYPES[low]).double()
                # An infinite variance makes the whole row zero.
                lost = (y == 0).all(-1) | ~y.isfinite().all(-1)
                limit = FORMATS[statistics].largest ** 0.5  # a square beyond that is infinite
                yield (
                    f"{low}, statistics {statistics}",
                    where,
                    {
                        "relative_error": ((y - exact).norm() / exact.norm()).item(),
                        "lost_rows_pct": 100 * lost.double().mean().item(),
                        "predicted_lost_rows_pct": 100 * overflow_share(deviation, WIDTH, limit),
                    },
                )


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Return (x − mean)/√(variance + eps) over the last dimension, all in the dtype of `x`."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)


def model_and_data(
    config: PrecisionConfig, device: torch.device
) -> tuple[TransformerLM, SyntheticTokens]:
    """Return the language model and its batches, the same at every call."""
    shape = config.model()
    # Seed and rank are fixed, so every call has the same model and the same data.
    data = SyntheticTokens(
        shape.vocab_size, config.batch, shape.context_length, seed=0, rank=0, device=device
    )
    return TransformerLM(shape, device=device, seed=0), data


def scaling(config: PrecisionConfig, device: torch.device) -> Rows:
    """Yield gradients under autocast at each loss scale, against those of fp32."""
    logits, exact = gradients(config, device, None, 1.0)
    # log2 of zero is −inf, which has no place in the histogram.
    sizes = exact[exact != 0].abs().log2()
    # From below the smallest subnormal number of fp16, 2^-24, up to 1.
    exponents = torch.arange(-48, 1)
    # The share is of all gradients, also of those that are zero.
    share = (100 * torch.histc(sizes, len(exponents) - 1, -48, 0).cpu() / exact.numel()).tolist()
    where = f"loss / {config.micro_batches} micro-batches"
    yield (
        "fp32",
        where,
        {
            "histogram_log2": exponents.tolist(),
            "histogram_pct": share,
            "underflow_pct": 0.0,
            "nonfinite_pct": 0.0,
            "relative_error": 0.0,
        },
    )
    # bf16 needs no scale, so it has one row.
    for low, log2_scale in [("bf16", 0), *(("fp16", k) for k in config.log2_scales)]:
        scale = 2.0**log2_scale
        low_logits, found = gradients(config, device, DTYPES[low], scale)
        finite = found.isfinite()
        # One gradient that is not finite makes the whole error infinite.
        error = ((found - exact).norm() / exact.norm()).item() if finite.all() else math.inf
        # Zero is the number of the format that is nearest to these.
        lost = (logits * scale).abs() <= FORMATS[low].smallest / 2
        yield (
            low if log2_scale == 0 else f"{low} × 2^{log2_scale}",
            where,
            {
                "log2_scale": log2_scale,
                "underflow_pct": 100 * (low_logits == 0).double().mean().item(),
                "predicted_underflow_pct": 100 * lost.double().mean().item(),
                "nonfinite_pct": 100 * (~finite).double().mean().item(),
                "relative_error": error,
            },
        )


def gradients(
    config: PrecisionConfig, device: torch.device, low: torch.dtype | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return gradients of logits and of matrices, flat, in fp32.

    Those of the logits are at this scale. The scale is divided out of those of the matrices.

    They are those of one micro-batch. The embedding is left out, because no token looks up most of
    its rows.
    """
    model, data = model_and_data(config, device)
    tokens, targets = data.batch(0)
    with autocast(device, low):
        logits = model(tokens)
        # Logits are not a leaf, and autograd would drop their gradient.
        logits.retain_grad()
        # The loss of a step is the mean over its micro-batches, which makes gradients smaller
        # still.
        loss = cross_entropy(logits, targets) / config.micro_batches
    (loss * scale).backward()
    flat = [
        p.grad.flatten()
        for name, p in model.named_parameters()
        if p.ndim > 1 and name != "embedding.weight"
    ]
    return logits.grad.float().flatten(), torch.cat(flat).float() / scale


def float8(config: PrecisionConfig, device: torch.device) -> Rows:
    """Yield mean losses of each quarter of a training, its blocks' matmuls in bf16 and in fp8."""
    # Quarters hide the noise of single steps, and show whether the two drift apart.
    in_bf16 = training(config, device, in_fp8=False).view(4, -1).mean(-1)
    in_fp8 = training(config, device, in_fp8=True).view(4, -1).mean(-1)
    for quarter in range(4):
        losses = {"loss_bf16": in_bf16[quarter].item(), "loss_fp8": in_fp8[quarter].item()}
        yield f"quarter {quarter + 1}", f"{config.steps} steps", losses


def training(config: PrecisionConfig, device: torch.device, in_fp8: bool) -> Tensor:
    """Return the loss of each step. Their number is rounded down to a multiple of four."""
    model, data = model_and_data(config, device)
    for module in model.blocks.modules():
        if in_fp8 and isinstance(module, Linear):
            # The layers stay the same objects with the same weights, and only the product is
            # replaced.
            module.multiply = float8_linear
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(config.steps // 4 * 4):
        tokens, targets = data.batch(step)
        # Triton's interpreter refuses bf16.
        with autocast(device, None if interpreted() else torch.bfloat16):
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
        # The value is read at the end, because reading it waits for the device.
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


def blocks_of(records: Records) -> int | str:
    """Return the number of blocks that was given, or the word for the preset's own."""
    return records[0].config["layers"] or "its"


headline = headline_from(
    "{size} with {blocks} blocks, {batch} × {context} tokens in each of {micro_batches} "
    "micro-batches, {device_name}, torch {torch}",
    blocks=blocks_of,
)


def findings(records: Records) -> list[str]:
    """Return the conclusions from these rows."""
    config = PrecisionConfig.of(records[0].config)
    model = config.model()
    low, high = safe_loss_scales(
        model.vocab_size, config.batch * model.context_length * config.micro_batches
    )
    found = [
        f"A bf16 sum of {ADDEND} stalls at {stalls_at(ADDEND, FORMATS['bf16']):g}, an fp16 one at "
        f"{stalls_at(ADDEND, FORMATS['fp16']):g}: from there on half the distance to the next "
        "number is more.",
        "Loss scales that keep the logits' gradients in fp16, by closed form: "
        f"{low:.3g} to {high:.3g}. bf16 reaches down to {FORMATS['bf16'].smallest:.1e} and needs "
        "none.",
    ]
    scales = [r for r in records if r.config["part"] == "scaling" and r.variant.startswith("fp16")]
    # 0.2 % is above the rounding of fp16 and far below the effect of underflow.
    usable = [r.metrics["log2_scale"] for r in scales if r.metrics["relative_error"] < 2e-3]
    if usable:
        span = f"2^{min(usable)} to 2^{max(usable)}"
        found.append(f"Measured gradients are within 0.2 % of fp32's at loss scales from {span}.")
    return found


def draw(records: Records, path: Path) -> None:
    """Draw gradients over powers of two with fp16's range, and the effect of each loss scale."""
    rows = [r for r in records if r.config["part"] == "scaling"]
    exact = next((r.metrics for r in rows if r.variant == "fp32"), None)
    if exact is None:
        return
    fp16, low = FORMATS["fp16"], [r.metrics for r in rows if r.variant.startswith("fp16")]
    edges = [
        # Numbers below half of the smallest subnormal become zero.
        (math.log2(fp16.smallest / 2), "← zero"),
        (math.log2(fp16.smallest_normal), "← rounded more"),
    ]
    # A bin covers one power of two, and its point is drawn in the middle.
    middles = [left + 0.5 for left in exact["histogram_log2"][:-1]]
    sizes = Series("weight gradients in fp32", middles, exact["histogram_pct"], line="-")
    shares = {
        "logits' gradients zero": "underflow_pct",
        "predicted": "predicted_underflow_pct",
        "weights' gradients not finite": "nonfinite_pct",
    }
    scaled = [
        Series(
            name,
            [m["log2_scale"] for m in low],
            [m[metric] for m in low],
            # Predicted points have no line, so that they do not hide the measured one.
            line="" if name == "predicted" else "-",
            marked=True,
            hollow=name == "predicted",
        )
        for name, metric in shares.items()
    ]
    share = "share of the gradients (%)"
    panels = [
        Panel(
            "sizes", "log2 of a weight gradient's size", share, [sizes], log_x=None, events=edges
        ),
        Panel("loss scales", "log2 of the loss scale, fp16", share, scaled, log_x=None),
    ]
    lines(
        path, panels, title=f"Gradients in fp16, and the loss scales they need: {headline(records)}"
    )


VIEW = View(
    columns=[
        Column("variant", "variant"),
        text_column("config.on", "on"),
        text_column("metrics.type_under_fp16", "under fp16", missing=""),
        text_column("metrics.type_under_bf16", "under bf16", missing=""),
        sparse_column("metrics.sum", "sum", ".4f"),
        sparse_column("metrics.predicted_sum", "predicted sum", ".4f"),
        sparse_column("metrics.relative_error", "relative error", ".1e"),
        sparse_column("metrics.lost_rows_pct", "rows lost %", ".2f"),
        sparse_column("metrics.predicted_lost_rows_pct", "predicted rows lost %", ".2f"),
        sparse_column("metrics.underflow_pct", "logits' gradients zero %", ".2f"),
        sparse_column("metrics.predicted_underflow_pct", "predicted zero %", ".2f"),
        sparse_column("metrics.nonfinite_pct", "weights' not finite %", ".2f"),
        sparse_column("metrics.loss_bf16", "loss in bf16", ".4f"),
        sparse_column("metrics.loss_fp8", "in fp8", ".4f"),
    ],
    headline=headline,
    pictures={"gradients.png": draw},
    findings=findings,
    reading="accumulation: the error of `fp32 += fp16` is that of 0.01 itself in fp16, made once; "
    "a low-precision accumulator rounds a thousand times, and in the end each addend to zero. That "
    "is why matmuls accumulate in fp32.\n\n"
    "types: autocast casts where it is faster (matmuls) and leaves the rest to each operation; "
    "parameters, loss and gradients stay fp32.\n\n"
    "norm: the square of a centred value beyond 256 exceeds fp16's largest number, 65,504; the "
    "variance is then infinite and the whole row becomes zero. bf16 does not overflow, but with 8 "
    "bits a mean far from zero is wrong. With fp32 statistics both are as good as their inputs.\n\n"
    "scaling: without a scale fp16 rounds small gradients to zero (left of the first dotted line, "
    "and the logits' gradients in the table); multiplying the loss moves all of them up, until the "
    "largest overflow.\n\n"
    "float8: both trainings have the same weights, data and order; embedding, norms and head are "
    "alike.",
    prediction="Sums: every addition rounded in integer arithmetic. Underflow: fp32's own "
    "gradients below half of the smallest fp16 number. Rows lost: a normal distribution beyond the "
    "root of fp16's largest number.",
    noise="One seed, and each figure is exact for it: nothing here is timed.",
    parted_by="config.part",
)

SMALL = {
    "size": "tiny",
    "layers": None,
    "context": 64,
    "batch": 2,
    "micro_batches": 32,
    "rows": 2048,
    "steps": 40,
}
EXPERIMENT = Experiment(
    PrecisionConfig,
    measure,
    VIEW,
    presets={
        "cpu": SMALL,
        "quick": SMALL | {"layers": 2, "log2_scales": (0, 8, 16, 24, 32), "rows": 1024},
        "smoke": SMALL
        | {
            "layers": 1,
            "context": 16,
            "micro_batches": 256,
            "rows": 256,
            "log2_scales": (0, 12, 40),
            "steps": 4,
        },
    },
)
