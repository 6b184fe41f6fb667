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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distlab.measure.attempt import attempt
from distlab.measure.memory import peak_memory
from distlab.measure.timing import MIN_PAIRS, PhaseTimer, noise_floor, percentiles
from distlab.model import ModelConfig, TransformerLM, checkpoint_groups, cross_entropy, preset
from distlab.report import Record, View, Work, add_from_option, commit, environment, progress, run_command
from distlab.report.figure import OKABE_ITO, finish, new_figure, tidy
from distlab.report.table import Column
from distlab.simulate.run import simulate_step
from distlab.theory.activations import PRECISIONS, activations
from distlab.theory.compute import forward_flops
from distlab.theory.memory import CUBLAS_WORKSPACES, StepMemory, step_memory
from distlab.theory.recompute import (
    best_group_size,
    best_group_size_estimate,
    blocks_run_again,
    recomputed_flops,
)
from distlab.theory.shape import ModelShape
from distlab.train.data import SyntheticTokens

NAME = "activation_checkpointing"
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
BASE = "none"  # what the others are held against


@dataclass(frozen=True)
class CheckpointingConfig:
    """What to run.

    Args:
        size, layers, context, vocab: the model; None leaves the preset's.
        batch: sequences.
        dtype: `fp32`, or `bf16` autocast over fp32 parameters.
        groups: ways to group blocks, see `distlab.model.checkpoint_groups`; `none` is added where it is missing.
        warmup, steps, rounds: untimed and timed steps of each way per round, and rounds.
        count: count the peak on fake tensors too (seconds to a quarter of a minute each).
        device: where to compute.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "xl"
    layers: int | None = None
    context: int | None = 1024
    vocab: int | None = None
    batch: int = 4
    dtype: str = "bf16"
    groups: tuple[str, ...] = (
        BASE, "block", "every-2", "every-4", "every-8", "every-16", "every-32", "every-8-2", "every-8-1",
    )  # fmt: skip
    warmup: int = 1
    steps: int = 5
    rounds: int = 2
    count: bool = False
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        for name, least in (("batch", 1), ("warmup", 1), ("steps", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.steps * self.rounds < 3:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least 3 steps")
        for choice in self.groups:
            checkpoint_groups(choice)
        self.model()

    def model(self) -> ModelConfig:
        wanted = {"num_layers": self.layers, "context_length": self.context, "vocab_size": self.vocab}
        return preset(self.size, **{name: value for name, value in wanted.items() if value is not None})

    def choices(self) -> tuple[str, ...]:
        """The ways to group, the base first."""
        return tuple(dict.fromkeys([BASE, *self.groups]))


CPU = CheckpointingConfig(
    size="tiny", layers=16, context=128, vocab=256, dtype="fp32", count=True, device="cpu", steps=4,
    groups=(BASE, "block", "every-2", "every-4", "every-8", "every-16", "every-4-2", "every-8-2"),
)  # fmt: skip
QUICK = CheckpointingConfig(
    size="tiny", layers=8, context=128, vocab=256, dtype="fp32", count=True, device="cpu", steps=3, rounds=1,
    groups=(BASE, "block", "every-2", "every-4", "every-4-2"),
)  # fmt: skip


def run(
    config: CheckpointingConfig,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """One record per way to group the blocks; one that runs out of memory says so, and the others go on."""
    facts = {"environment": environment(config.device), "commit": commit(default_commit)}
    bench = Bench(config)
    for number in range(config.rounds):
        for choice in config.choices():
            progress(f"round {number + 1}/{config.rounds}: {choice}")
            bench.time(choice)
    records = []
    for choice in config.choices():
        metrics = bench.metrics(choice) | predicted(config, choice, bench.times.get(BASE))
        if config.count:
            progress(f"counting {choice} on fake tensors")
            metrics["counted_peak_bytes"] = counted_peak(config, choice)
        records.append(Record(NAME, choice, asdict(config) | _facts_of(config), metrics, **facts))
    return records


def one_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gradients of one batch, from none; returns the loss."""
    low = DTYPES[dtype]
    model.zero_grad(set_to_none=True)
    with torch.autocast(tokens.device.type, dtype=low or torch.bfloat16, enabled=low is not None):
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss


class Bench:
    """One model whose blocks are grouped anew for each measurement."""

    def __init__(self, config: CheckpointingConfig):
        shape = config.model()
        self.config, self.device = config, torch.device(config.device)
        self.model = TransformerLM(shape, device=config.device, seed=config.seed)
        data = SyntheticTokens(shape.vocab_size, config.batch, shape.context_length, seed=config.seed, rank=0,
                               device=config.device)  # fmt: skip
        self.batch = data.batch(0)
        self.times: dict[str, dict[str, list[float]]] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.norms: torch.Tensor | None = None  # of each gradient, without checkpointing

    def time(self, choice: str) -> None:
        """A round of one way: warm up, then time forward and backward of each step."""
        if self.found.get(choice, {}).get("status", "ok") != "ok":
            return
        self.model.checkpoint_blocks = checkpoint_groups(choice) or False
        found = attempt(lambda: self._round(choice))
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.found[choice] = self.found.get(choice, {}) | found

    def _round(self, choice: str) -> dict[str, Any]:
        timer = PhaseTimer(self.device)
        with peak_memory(self.device) as memory:
            for number in range(self.config.warmup + self.config.steps):
                if number == self.config.warmup:
                    timer.clear()
                timer.start()
                self._timed_step(timer)
            samples = timer.steps()
        mine = self.times.setdefault(choice, {"forward": [], "step": []})
        for phase, times in mine.items():
            times.extend(sample[phase] for sample in samples)
        norms = torch.stack([p.grad.float().norm() for p in self.model.parameters()])
        if choice == BASE and self.norms is None:
            self.norms = norms
        apart = None if self.norms is None else ((norms - self.norms).abs() / self.norms).max().item()
        return {"peak_alloc_bytes": memory.peak_alloc_bytes, "max_rel_grad_norm_diff": apart}

    def _timed_step(self, timer: PhaseTimer) -> None:
        handle = self.model.head.register_forward_hook(lambda *_: timer.mark("forward"))
        try:
            one_step(self.model, *self.batch, self.config.dtype)
        finally:
            handle.remove()
        timer.mark("backward")

    def metrics(self, choice: str) -> dict[str, Any]:
        """Times and memory of one way."""
        found = dict(self.found[choice])
        times = self.times.get(choice)
        if found["status"] != "ok" or times is None:
            return found
        found |= {f"step_{p}_ms": ms for p, ms in percentiles(times["step"]).items()}
        base = self.times.get(BASE)
        if base is not None:
            found["step_over_none"] = found["step_p50_ms"] / percentiles(base["step"])["p50"]
        if len(times["step"]) >= 2 * MIN_PAIRS:
            half = len(times["step"]) // 2
            found["noise_floor_pct"] = noise_floor(times["step"][0::2][:half], times["step"][1::2][:half])
        return found


def predicted(
    config: CheckpointingConfig, choice: str, base: dict[str, list[float]] | None
) -> dict[str, float | int | str]:
    """The closed forms; the time from the measured step without checkpointing, if that one ran."""
    groups, model = checkpoint_groups(choice), config.model()
    memory = _closed_form(config, groups)
    found: dict[str, float | int | str] = {
        "predicted_peak_bytes": memory.peak.total,
        "predicted_counted_peak_bytes": memory.peak.total - _workspaces(config),
        "predicted_peak_phase": memory.peak_phase,
        "blocks_run_again": blocks_run_again(model.num_layers, groups)[0],
    }
    if base is not None:
        sizes = {"batch": config.batch, "context": model.context_length, "d_model": model.d_model}
        sizes |= {"d_ff": model.d_ff, "num_layers": model.num_layers, "vocab_size": model.vocab_size}
        again = recomputed_flops(groups, causal=True, **sizes) / forward_flops(causal=True, **sizes).total
        forward, step = (percentiles(base[phase])["p50"] for phase in ("forward", "step"))
        found["predicted_step_ms"] = step + again * forward
    return found


def _closed_form(config: CheckpointingConfig, groups: tuple[int, ...]) -> StepMemory:
    model = config.model()
    return step_memory(
        ModelShape.of(model),
        batch=config.batch,
        context=model.context_length,
        precision={"fp32": "fp32", "bf16": "bf16-autocast"}[config.dtype],
        attention=model.attention,
        checkpointing=groups,
        optimizer="sgd",
        workspace_bytes=_workspaces(config),
    )


def _workspaces(config: CheckpointingConfig) -> int:
    """Bytes of libraries in the allocator, of which fake tensors have none."""
    return CUBLAS_WORKSPACES if config.device == "cuda" else 0


def counted_peak(config: CheckpointingConfig, choice: str) -> int:
    """The peak of the same step on fake tensors, counted storage by storage."""
    model = config.model()

    def build() -> TransformerLM:
        return TransformerLM(model, device="cpu", checkpoint_blocks=checkpoint_groups(choice) or False)

    def make_step(wrapper: nn.Module, optimizer: torch.optim.Optimizer, mark: Callable[[str], None]):
        tokens = torch.zeros(config.batch, model.context_length, dtype=torch.int64)
        return lambda: one_step(wrapper, tokens, tokens, config.dtype)

    options = {"optimizer_cls": torch.optim.SGD, "optimizer_options": {"lr": 0.0}}
    return simulate_step("local", build, make_step, world_size=1, **options).peak.total


def _facts_of(config: CheckpointingConfig) -> dict[str, Any]:
    """What the closed form says of the best single-level group size."""
    model = config.model()
    precision = PRECISIONS[{"fp32": "fp32", "bf16": "bf16-autocast"}[config.dtype]]
    kept = activations(ModelShape.of(model), config.batch, model.context_length, precision, model.attention)
    arguments = (model.num_layers, kept.block, kept.checkpoint)
    peaks = {size: _closed_form(config, (size,)).peak.total for size in range(1, model.num_layers + 1)}
    return {
        "num_layers": model.num_layers,
        "num_parameters": model.num_parameters,
        "block_activation_bytes": kept.block,
        "block_input_bytes": kept.checkpoint,
        "best_group_size": best_group_size(*arguments),
        "best_group_size_of_peak": min(peaks, key=peaks.__getitem__),
        "best_group_size_estimate": best_group_size_estimate(*arguments),
    }


# -- what is shown ---------------------------------------------------------------------------------------------

COLUMNS = [
    Column("variant", "recomputed"),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f"),
    Column("metrics.step_p50_ms", "p50", ".1f"),
    Column("metrics.step_p80_ms", "p80", ".1f"),
    Column("metrics.predicted_step_ms", "predicted ms", ".1f"),
    Column("metrics.step_over_none", "× none", ".2f"),
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
    figure = new_figure(1.6 + 0.42 * len(records))
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
        tidy(axes)
        axes.grid(visible=False, axis="y")
        axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    axes.set_yticks(range(len(records)), [r.variant for r in records])
    axes.invert_yaxis()
    title = f"Recomputing blocks: {headline(records)}"
    finish(figure, path, title)


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"checkpointing.png": draw},
    findings=findings,
    reading="`block` keeps each block's input and recomputes the rest. `every-k` keeps the input of k blocks, and "
    "while a group runs backward it holds the activations of all k: larger groups save inputs, which are small, and "
    "hold more blocks, which are not. `every-8-2` recomputes groups of eight which then keep the inputs of groups of "
    "two, at the price of running most blocks once more. Gradients grow while activations shrink, so the fullest "
    "moment is the backward of the first group, unless it is that of the loss.",
    prediction="Memory in closed form (distlab.theory.memory). Time: the measured step without recomputation, and its "
    "forward times the share of FLOPs that run again, which torch's own count confirms exactly "
    "(distlab.theory.recompute): a recomputation ends before the last product of a group.",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    p = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="the tiny preset with eight blocks, on a CPU")
    p.add_argument("--size", help="model preset")
    p.add_argument("--layers", type=int, help="blocks [the preset's]")
    p.add_argument("--context", type=int, help="tokens per sequence")
    p.add_argument("--batch", type=int, help="sequences")
    p.add_argument("--dtype", help="fp32, or bf16 autocast")
    p.add_argument(
        "--groups", nargs="+", metavar="GROUPS", help="none, block, every-K or every-K-J, several of them"
    )
    p.add_argument("--steps", type=int, help="timed steps per round")
    p.add_argument("--rounds", type=int, help="interleaved rounds")
    p.add_argument(
        "--count", action="store_true", default=None, help="count peaks on fake tensors too [on a CPU]"
    )
    p.add_argument("--device", choices=("cuda", "cpu"), help="[cuda where there is one]")
    p.add_argument("--out", default="outputs", help="folder for results [%(default)s]")
    p.add_argument("--commit", help="recorded where git is missing")
    add_from_option(p)
    return p


def config_from(args: argparse.Namespace) -> CheckpointingConfig:
    """The options over the defaults of the device.

    Raises:
        ValueError: a value that is not allowed, or a GPU that is not there.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; leave it out, or give cpu")
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
