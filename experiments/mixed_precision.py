"""What does mixed precision compute in which type, and what breaks without fp32 and without a loss scale?

    python experiments/mixed_precision.py            # this machine's device
    python experiments/mixed_precision.py --quick    # smaller, seconds on a CPU

Four parts. *accumulation*: 1,000 × 0.01 in every combination of accumulator and addend, predicted by rounding in
integers. *types*: what each part of a small model computes in under autocast. *norm*: layer normalisation with its
statistics in a low precision, on inputs that are large, or far from zero. *scaling*: gradients of a language model that
fp16 rounds to zero, and the window of loss scales between that and overflow; bf16 has fp32's range and needs none.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.model import ModelConfig, TransformerLM, cross_entropy, preset
from distlab.report import Record, View, Work, add_from_option, commit, environment, progress, run_command
from distlab.report.figure import OKABE_ITO, finish, new_figure, tidy
from distlab.report.table import Column
from distlab.theory.floating import FORMATS, overflow_share, repeated_sum, safe_loss_scales, stalls_at
from distlab.train.data import SyntheticTokens

NAME = "mixed_precision"
PARTS = ("accumulation", "types", "norm", "scaling")
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ADDEND, TIMES = 0.01, 1000
# Of a layer normalisation's input: (deviation, mean).
INPUTS = {"deviation 1": (1.0, 0.0), "deviation 64": (64.0, 0.0), "mean 100": (1.0, 100.0)}
Metrics = dict[str, Any]


@dataclass(frozen=True)
class PrecisionConfig:
    """What to run.

    Args:
        size, layers, context: of the model whose gradients are looked at; None leaves the preset's.
        batch: sequences of one micro-batch.
        micro_batches: how many make a step; the loss is divided by it, as gradient accumulation does.
        log2_scales: loss scales, as powers of two.
        rows, width: of layer normalisation's input.
        device: where to compute.
        seed: of parameters and data.

    Raises:
        ValueError: a size below one, or no scale.
    """

    size: str = "small"
    layers: int | None = 4
    context: int | None = 512
    batch: int = 8
    micro_batches: int = 8
    log2_scales: tuple[int, ...] = (0, 4, 8, 12, 16, 20, 24, 28, 32, 36)
    rows: int = 8192
    width: int = 768
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batches", "rows", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.log2_scales:
            raise ValueError("log2_scales is empty: give at least one loss scale")
        self.model()

    def model(self) -> ModelConfig:
        wanted = {"num_layers": self.layers, "context_length": self.context}
        return preset(self.size, **{name: value for name, value in wanted.items() if value is not None})


CPU = PrecisionConfig(
    size="tiny", layers=None, context=64, batch=2, micro_batches=32, rows=2048, device="cpu"
)
QUICK = replace(CPU, layers=2, log2_scales=(0, 8, 16, 24, 32), rows=1024)


def run(
    config: PrecisionConfig,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """One record per row of the table."""
    facts = {"environment": environment(config.device), "commit": commit(default_commit)}
    rows: dict[str, Callable[[PrecisionConfig], Iterator[tuple[str, str, Metrics]]]] = {
        "accumulation": accumulation, "types": types, "norm": norm, "scaling": scaling,
    }  # fmt: skip
    records = []
    for part in PARTS:
        progress(part)
        for variant, where, metrics in rows[part](config):
            records.append(
                Record(NAME, variant, asdict(config) | {"part": part, "on": where}, metrics, **facts)
            )
    return records


# -- accumulation ----------------------------------------------------------------------------------------------


def accumulation(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """1,000 × 0.01: the sum, by which format predicts it, and how far from ten it is."""
    for accumulator in TYPES:
        for held_in in ("fp32", accumulator) if accumulator != "fp32" else TYPES:
            total = torch.zeros((), dtype=TYPES[accumulator], device=config.device)
            addend = torch.tensor(ADDEND, dtype=TYPES[held_in], device=config.device)
            for _ in range(TIMES):
                total = (total + addend).to(TYPES[accumulator])
            value = total.item()
            predicted = repeated_sum(ADDEND, TIMES, FORMATS[accumulator], FORMATS[held_in])
            metrics = {
                "sum": value,
                "predicted_sum": predicted,
                "relative_error": abs(value / (ADDEND * TIMES) - 1),
            }
            yield f"{accumulator} += {held_in}", f"{TIMES:,} × {ADDEND}", metrics


# -- types -----------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Two products with an activation and a layer normalisation between them, `(N, 8) -> (N, 4)`."""

    def __init__(self, **factory: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16, bias=False, **factory)
        self.relu = nn.ReLU()
        self.layer_norm = nn.LayerNorm(16, **factory)
        self.fc2 = nn.Linear(16, 4, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.layer_norm(self.relu(self.fc1(x))))


def types(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """The type of each part's output under autocast, in the order of execution; then of the loss and the gradients."""
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=config.device)
    language_model = replace(config.model(), num_layers=1, context_length=16)
    cases = {
        "toy": (lambda: Toy(device=config.device), torch.ones(2, 8, device=config.device)),
        "Transformer": (lambda: TransformerLM(language_model, device=config.device), tokens),
    }
    for case, (build, inputs) in cases.items():
        found = {low: types_of(build(), inputs, TYPES[low], config.device) for low in ("fp16", "bf16")}
        for part in found["fp16"]:
            yield part, case, {f"type_under_{low}": found[low][part] for low in found}


def types_of(model: nn.Module, inputs: Tensor, low: torch.dtype, device: str) -> dict[str, str]:
    """Part → name of the type it is in."""
    found = {"parameters": _name(next(model.parameters()))}
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList | nn.Dropout):
            label = name.removeprefix("blocks.0.") if name != "blocks.0" else "residual stream"
            module.register_forward_hook(lambda _, __, out, label=label: found.__setitem__(label, _name(out)))
    with torch.autocast(device, dtype=low):
        logits = model(inputs)
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
        loss = cross_entropy(logits, target)
    loss.backward()
    return found | {"loss": _name(loss), "gradients": _name(next(model.parameters()).grad)}


def _name(out: Tensor | tuple[Tensor, ...]) -> str:
    tensor = out[0] if isinstance(out, tuple) else out
    return next(name for name, dtype in TYPES.items() if dtype == tensor.dtype)


# -- layer normalisation ---------------------------------------------------------------------------------------


def norm(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """Layer normalisation of inputs in a low precision, with statistics in it or in fp32, against float64."""
    generator = torch.Generator().manual_seed(config.seed)
    drawn = torch.randn(config.rows, config.width, generator=generator).to(config.device)
    for where, (deviation, mean) in INPUTS.items():
        for low in ("fp16", "bf16"):
            x = (deviation * drawn + mean).to(TYPES[low])
            exact = layer_norm(x.double())
            for statistics in ("fp32", low):
                y = layer_norm(x.to(TYPES[statistics])).to(TYPES[low]).double()
                lost = (y == 0).all(-1) | ~y.isfinite().all(
                    -1
                )  # an infinite variance makes the whole row zero
                limit = FORMATS[statistics].largest ** 0.5  # a square beyond that is infinite
                metrics = {
                    "relative_error": ((y - exact).norm() / exact.norm()).item(),
                    "lost_rows_pct": 100 * lost.double().mean().item(),
                    "predicted_lost_rows_pct": 100 * overflow_share(deviation, config.width, limit),
                }
                yield f"{low}, statistics {statistics}", where, metrics


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """(x − mean)/√(variance + eps) over the last dimension, every operation in the type of `x`, any shape."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)


# -- loss scaling ----------------------------------------------------------------------------------------------


def scaling(config: PrecisionConfig) -> Iterator[tuple[str, str, Metrics]]:
    """Gradients under autocast at each loss scale, against those of fp32."""
    logits, exact = gradients(config, None, 1.0)
    sizes = exact[exact != 0].abs().log2()
    exponents = torch.arange(-48, 1)
    counts = torch.histc(sizes, len(exponents) - 1, -48, 0).cpu()
    share = (100 * counts / exact.numel()).tolist()
    where = f"loss / {config.micro_batches} micro-batches"
    yield "fp32", where, {"histogram_log2": exponents.tolist(), "histogram_pct": share, "underflow_pct": 0.0,
                          "nonfinite_pct": 0.0, "relative_error": 0.0}  # fmt: skip
    for low, log2_scale in [("bf16", 0), *(("fp16", k) for k in config.log2_scales)]:
        scale, held = 2.0**log2_scale, FORMATS[low]
        low_logits, found = gradients(config, TYPES[low], scale)
        finite = found.isfinite()
        metrics = {
            "log2_scale": log2_scale,
            "underflow_pct": 100 * (low_logits == 0).double().mean().item(),
            "predicted_underflow_pct": 100
            * ((logits * scale).abs() <= held.smallest / 2).double().mean().item(),
            "nonfinite_pct": 100 * (~finite).double().mean().item(),
            "relative_error": ((found - exact).norm() / exact.norm()).item()
            if finite.all()
            else float("inf"),
        }
        yield low if log2_scale == 0 else f"{low} × 2^{log2_scale}", where, metrics


def gradients(config: PrecisionConfig, low: torch.dtype | None, scale: float) -> tuple[Tensor, Tensor]:
    """(the logits' gradients at this scale, the matrices' gradients with the scale divided out), flat, in fp32.

    Of one micro-batch; the embedding is left out, most of whose rows no token looked up.
    """
    shape = config.model()
    model = TransformerLM(shape, device=config.device, seed=config.seed)
    data = SyntheticTokens(shape.vocab_size, config.batch, shape.context_length, seed=config.seed, rank=0,
                           device=config.device)  # fmt: skip
    tokens, targets = data.batch(0)
    with torch.autocast(config.device, dtype=low or torch.bfloat16, enabled=low is not None):
        logits = model(tokens)
        logits.retain_grad()
        loss = cross_entropy(logits, targets) / config.micro_batches
    (loss * scale).backward()
    flat = [
        p.grad.flatten() for name, p in model.named_parameters() if p.ndim > 1 and name != "embedding.weight"
    ]
    return logits.grad.float().flatten(), torch.cat(flat).float() / scale


# -- what is shown ---------------------------------------------------------------------------------------------

COLUMNS = [
    Column("variant", "variant"),
    Column("config.on", "on", align="left"),
    Column("metrics.type_under_fp16", "under fp16", missing="", align="left"),
    Column("metrics.type_under_bf16", "under bf16", missing="", align="left"),
    Column("metrics.sum", "sum", ".4f", missing=""),
    Column("metrics.predicted_sum", "predicted", ".4f", missing=""),
    Column("metrics.relative_error", "relative error", ".1e", missing=""),
    Column("metrics.lost_rows_pct", "rows lost %", ".2f", missing=""),
    Column("metrics.predicted_lost_rows_pct", "predicted", ".2f", missing=""),
    Column("metrics.underflow_pct", "logits' gradients zero %", ".2f", missing=""),
    Column("metrics.predicted_underflow_pct", "predicted", ".2f", missing=""),
    Column("metrics.nonfinite_pct", "weights' not finite %", ".2f", missing=""),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    return (
        f"{config['size']} with {config['layers'] or 'its'} blocks, {config['batch']} × {config['context']} tokens in "
        f"each of {config['micro_batches']} micro-batches, {env['device_name']}, torch {env['torch']}"
    )


def findings(records: Sequence[Record]) -> list[str]:
    """What these rows say, in words."""
    rows = {(r.config["part"], r.variant, r.config["on"]): r.metrics for r in records}
    config = PrecisionConfig(
        **{name: records[0].config[name] for name in PrecisionConfig.__dataclass_fields__}
    )
    model = config.model()
    low, high = safe_loss_scales(model.vocab_size, config.batch * model.context_length * config.micro_batches)
    found = [
        f"A bf16 sum of {ADDEND} stalls at {stalls_at(ADDEND, FORMATS['bf16']):g}, an fp16 one at "
        f"{stalls_at(ADDEND, FORMATS['fp16']):g}: from there on half the distance to the next number is more.",
        f"Loss scales that keep the logits' gradients in fp16, by closed form: {low:.3g} to {high:.3g}. bf16 "
        f"reaches down to {FORMATS['bf16'].smallest:.1e} and needs none.",
    ]
    kept = rows.get(("types", "layer_norm", "toy"))
    if kept:
        found.append(f"torch's layer normalisation gives {kept['type_under_fp16']} under fp16 here, and "
                     f"{kept['type_under_bf16']} under bf16.")  # fmt: skip
    scales = [r for r in records if r.config["part"] == "scaling" and r.variant.startswith("fp16")]
    usable = [r.metrics["log2_scale"] for r in scales if r.metrics["relative_error"] < 2e-3]
    if usable:
        span = f"2^{min(usable)} to 2^{max(usable)}"
        found.append(f"Measured gradients are within 0.2 % of fp32's at loss scales from {span}.")
    return found


def draw(records: Sequence[Record], path: Path) -> None:
    """Left, how gradients are distributed over powers of two, and fp16's range; right, what each loss scale does."""
    rows = [r for r in records if r.config["part"] == "scaling"]
    exact = next((r.metrics for r in rows if r.variant == "fp32"), None)
    if exact is None:
        return
    fp16, low = FORMATS["fp16"], [r.metrics for r in rows if r.variant.startswith("fp16")]
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2)
    left.bar(exact["histogram_log2"][:-1], exact["histogram_pct"], 0.9, align="edge", color=OKABE_ITO["sky"])
    for name, edge in (("zero in fp16", fp16.smallest / 2), ("full precision", fp16.smallest_normal)):
        power = torch.tensor(edge).log2().item()
        left.axvline(power, color=OKABE_ITO["vermillion"], linewidth=1.2, linestyle="--")
        left.annotate(name, (power, 0.97), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                      rotation=90, va="top", fontsize=7.5)  # fmt: skip
    left.set_xlabel("log2 of a weight gradient's size, fp32")
    left.set_ylabel("share of the gradients (%)")
    x = [m["log2_scale"] for m in low]
    right.plot(
        x, [m["underflow_pct"] for m in low], "o-", color=OKABE_ITO["blue"], label="logits' gradients zero"
    )
    right.plot(
        x, [m["predicted_underflow_pct"] for m in low], "x", color=OKABE_ITO["black"], label="predicted"
    )
    right.plot(
        x, [m["nonfinite_pct"] for m in low], "s-", color=OKABE_ITO["vermillion"], label="weights' not finite"
    )
    right.set_xlabel("log2 of the loss scale, fp16")
    right.set_ylabel("share of the gradients (%)")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        tidy(axes)
    title = f"Gradients in fp16, and the loss scales they need: {headline(records)}"
    finish(figure, path, title)


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"gradients.png": draw},
    findings=findings,
    reading="accumulation: the error of `fp32 += fp16` is that of 0.01 itself in fp16, made once; a low-precision "
    "accumulator rounds a thousand times, and at last each addend to nothing. That is why products accumulate in fp32."
    "\n\n"
    "types: autocast casts where it pays (products) and leaves the rest to each operation; parameters, loss and "
    "gradients stay fp32.\n\n"
    "norm: the square of a centred value beyond 256 exceeds fp16's largest number, 65,504; the variance is then "
    "infinite and the whole row becomes zero. bf16 does not overflow, but with 8 bits a mean far from zero is wrong. "
    "With fp32 statistics both are as good as their inputs.\n\n"
    "scaling: without a scale fp16 rounds small gradients to zero (the bars left of the dashed line, and the logits' "
    "gradients in the table); multiplying the loss moves all of them up, until the largest overflow.",
    prediction="Sums: every addition rounded in integer arithmetic. Underflow: fp32's own gradients below half of the "
    "smallest fp16 number. Rows lost: a normal distribution beyond the root of fp16's largest number.",
    noise="One seed, and each figure is exact for it: nothing here is timed.",
    parted_by="config.part",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="a smaller model and fewer scales, on a CPU")
    p.add_argument("--size", help="model preset")
    p.add_argument("--batch", type=int, help="sequences of a micro-batch")
    p.add_argument("--micro-batches", type=int, help="micro-batches that make a step")
    p.add_argument("--device", choices=("cuda", "cpu"), help="[cuda where there is one]")
    p.add_argument("--out", default="outputs", help="folder for results [%(default)s]")
    p.add_argument("--commit", help="recorded where git is missing")
    add_from_option(p)
    return p


def config_from(args: argparse.Namespace) -> PrecisionConfig:
    """The options over the defaults of the device.

    Raises:
        ValueError: a value that is not allowed, or a GPU that is not there.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; leave it out, or give cpu")
    base = QUICK if args.quick else PrecisionConfig() if device == "cuda" else CPU
    options = {name: getattr(args, name) for name in ("size", "batch", "micro_batches")}
    asked = {name: value for name, value in options.items() if value is not None}
    return replace(base, device=device, **asked)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write the report."""
    args = parser().parse_args(argv)

    def prepare() -> Work:
        config = config_from(args)
        return lambda folder: run(config, default_commit=args.commit, progress=progress)

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
