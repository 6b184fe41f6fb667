"""What does recomputing activations save in memory and cost in time, and how large should a group of blocks be?

    python experiments/activation_checkpointing.py                                   # this machine's device
    python experiments/activation_checkpointing.py --size gpt2-xl --groups none block every-4 every-8-2
    python experiments/activation_checkpointing.py --quick                           # seconds on a CPU

Forward and backward of one model, without an optimizer, for each way to group its blocks: none recomputed, each by
itself, every k together, and groups inside groups. The peak is the allocator's where it keeps a count; beside it stand
that of the same step on fake tensors, and the closed form. Times are taken in rounds, each way in turn.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from distlab.model import checkpoint_groups
from distlab.report import (
    Record,
    View,
    Work,
    add_device_option,
    add_output_options,
    device_of,
    progress,
    run_command,
)
from distlab.report.noise import NOISE, TIE
from distlab.report.options import whole
from distlab.report.style import OKABE_ITO, horizontal, picture
from distlab.report.table import Column
from experiments.activation_checkpointing_pieces.config import CPU, NAME, QUICK, CheckpointingConfig
from experiments.activation_checkpointing_pieces.measuring import run


def _tie(record: Record) -> str:
    return TIE if record.metrics.get("step_over_none_is_tie") else ""


COLUMNS = [
    Column("variant", "recomputed"),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f"),
    Column("metrics.step_p50_ms", "p50", ".1f"),
    Column("metrics.step_p80_ms", "p80", ".1f"),
    NOISE,
    Column("metrics.predicted_step_ms", "predicted ms", ".1f"),
    Column("metrics.step_over_none", "× none", ".2f", note=_tie),
    Column("metrics.blocks_run_again", "blocks run again", "d"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".3f", scale=2**-30),
    Column("metrics.predicted_peak_bytes", "predicted GiB", ".3f", scale=2**-30),
    Column("metrics.counted_peak_bytes", "fake tensors GiB", ".3f", scale=2**-30),
    Column("metrics.predicted_peak_phase", "peak in", align="left"),
    Column("metrics.max_rel_grad_norm_diff", "max |Δ‖grad‖|", ".1e"),
    Column("metrics.status", "status", align="left"),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what the table below it was measured on."""
    config, env = records[0].config, records[0].environment
    return (
        f"{config['size']} with {config['num_layers']} blocks ({config['num_parameters'] / 1e6:,.1f} M parameters), "
        f"batch {config['batch']} × context {config['context']}, {config['dtype']}, forward and backward, "
        f"{env['device_name']}, torch {env['torch']}"
    )


def findings(records: Sequence[Record]) -> list[str]:
    """The best single-level size, by closed form and by measurement, and the cheapest way of all."""
    config = records[0].config
    b, c = config["block_activation_bytes"], config["block_input_bytes"]
    found = [
        f"A block keeps {b / 2**20:,.1f} MiB and its input is {c / 2**20:,.1f} MiB: on a single level groups of "
        f"{config['best_group_size']} keep fewest activations (√(L·c/b) = {config['best_group_size_estimate']:.2f}); "
        "the peak of the whole step, gradients included, is least with groups of "
        f"{config['best_group_size_of_peak']}. Both in closed form."
    ]
    for metric, words in (("peak_alloc_bytes", "Measured"), ("counted_peak_bytes", "On fake tensors")):
        single = {r.variant: r.metrics[metric] for r in records
                  if r.metrics.get(metric) is not None and len(checkpoint_groups(r.variant)) == 1}  # fmt: skip
        if single:
            best = min(single, key=single.__getitem__)
            found.append(
                f"{words}, the least peak of a single level is that of {best}, {single[best] / 2**30:.3f} GiB."
            )
    return found


def draw(records: Sequence[Record], path: Path) -> None:
    """Peak and time of each way, measured above predicted."""
    measured = any(r.metrics.get("peak_alloc_bytes") is not None for r in records)
    peak = "peak_alloc_bytes" if measured else "counted_peak_bytes"
    panels = (
        ("peak, GiB", 2**-30, peak, "predicted_peak_bytes", "allocator" if measured else "fake tensors"),
        ("forward and backward, ms", 1.0, "step_p50_ms", "predicted_step_ms", "measured, p50"),
    )
    title = f"Recomputing blocks: {headline(records)}"
    with picture(path, title, 1.6 + 0.42 * len(records)) as figure:
        for axes, (label, scale, name, closed, how) in zip(
            figure.subplots(1, 2, sharey=True), panels, strict=True
        ):
            for offset, metric, colour, legend in (
                (-0.2, name, "blue", how),
                (0.2, closed, "orange", "predicted"),
            ):
                values = [scale * (r.metrics.get(metric) or 0) for r in records]
                places = [row + offset for row in range(len(records))]
                bars = axes.barh(places, values, 0.38, color=OKABE_ITO[colour], label=legend)
                axes.bar_label(
                    bars, [f"{value:.3g}" if value else "n/a" for value in values], fontsize=7, padding=2
                )
            axes.set_xlabel(label)
            axes.margins(x=0.16)
            horizontal(axes)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        axes.set_yticks(range(len(records)), [r.variant for r in records])
        axes.invert_yaxis()


VIEW = View(
    name=NAME,
    question=__doc__.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    pictures={"checkpointing.png": draw},
    findings=findings,
    reading="`block` keeps each block's input and recomputes the rest. `every-k` keeps the input of k blocks, and "
    "while a group runs backward it holds the activations of all k: larger groups save inputs, which are small, and "
    "hold more blocks, which are not. `every-8-2` recomputes groups of eight which then keep the inputs of groups of "
    "two, at the price of running most blocks once more. Gradients grow while activations shrink, so the fullest "
    "moment is the backward of the first group, unless it is that of the loss.",
    prediction="Memory in closed form (distlab.theory.memory). Time: the measured step without recomputation, and its "
    "forward times the share of FLOPs that run again, which torch's own count confirms exactly "
    "(distlab.theory.memory): a recomputation ends before the last product of a group.",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="the tiny preset with eight blocks, on a CPU")
    p.add_argument("--size", help="model preset")
    p.add_argument("--layers", type=whole(), help="blocks [the preset's]")
    p.add_argument("--context", type=whole(), help="tokens per sequence")
    p.add_argument("--batch", type=whole(), help="sequences")
    p.add_argument("--dtype", help="fp32, or bf16 autocast")
    p.add_argument(
        "--groups", nargs="+", metavar="GROUPS", help="none, block, every-K or every-K-J, several of them"
    )
    p.add_argument("--steps", type=whole(), help="timed steps per round")
    p.add_argument("--rounds", type=whole(), help="interleaved rounds")
    p.add_argument(
        "--count", action="store_true", default=None, help="count peaks on fake tensors too [on a CPU]"
    )
    add_device_option(p)
    add_output_options(p)
    return p


def config_from(args: argparse.Namespace) -> CheckpointingConfig:
    """The options over the defaults of the device.

    Raises:
        ValueError: a value that is not allowed, or a GPU that is not there.
    """
    device = device_of(args)
    base = QUICK if args.quick else CheckpointingConfig() if device == "cuda" else CPU
    given = {field.name: getattr(args, field.name, None) for field in fields(CheckpointingConfig)}
    given |= {"device": device, "groups": tuple(args.groups) if args.groups else None}
    return CheckpointingConfig(
        **asdict(base) | {name: value for name, value in given.items() if value is not None}
    )


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write the report."""
    args = parser().parse_args(argv)
    if args.quick:  # on cores that are shared, two threads wait for each other far longer than they compute
        torch.set_num_threads(1)

    def prepare() -> Work:
        config = config_from(args)
        return lambda folder: run(config, default_commit=args.commit, progress=progress)

    return run_command(VIEW, args, prepare)


if __name__ == "__main__":
    sys.exit(main())
