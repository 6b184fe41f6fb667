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
from dataclasses import asdict, replace
from pathlib import Path

import torch

from distlab.report import (
    Record,
    View,
    Work,
    add_device_option,
    add_output_options,
    commit,
    device_of,
    environment,
    progress,
    run_command,
)
from distlab.report.options import whole
from distlab.report.style import OKABE_ITO, picture
from distlab.report.table import Column
from distlab.theory.rounding import FORMATS, safe_loss_scales, stalls_at
from distlab.train.requirements import PlannedStep, require
from experiments.mixed_precision_pieces.config import CPU, NAME, PARTS, QUICK, PrecisionConfig
from experiments.mixed_precision_pieces.parts import ADDEND, Metrics, accumulation, norm, scaling, types


def run(
    config: PrecisionConfig,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """One record per row of the table.

    Raises:
        MemoryError: the model with this batch does not fit.
    """
    require([PlannedStep(config.model(), config.batch, mode="forward_backward")], config.device)
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
    title = f"Gradients in fp16, and the loss scales they need: {headline(records)}"
    with picture(path, title, 3.6) as figure:
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
        right.legend()


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
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
    p.add_argument("--batch", type=whole(), help="sequences of a micro-batch")
    p.add_argument("--micro-batches", type=whole(), help="micro-batches that make a step")
    add_device_option(p)
    add_output_options(p)
    return p


def config_from(args: argparse.Namespace) -> PrecisionConfig:
    """The options over the defaults of the device.

    Raises:
        ValueError: a value that is not allowed, or a GPU that is not there.
    """
    device = device_of(args)
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
