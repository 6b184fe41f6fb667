"""What does recomputing activations save in memory and cost in time?

    distlab run activation_checkpointing                   # this machine's device
    distlab run activation_checkpointing --size gpt2-xl --groups none block every-4
    distlab run activation_checkpointing --quick           # seconds on a CPU

Forward and backward of one model, without an optimizer, for each way to group its blocks: none recomputed, each by
itself, every k together. The peak is the allocator's where it keeps a count; beside it stand
that of the same step on fake tensors, and the closed form. Times are taken in interleaved rounds.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distlab.bench.timing import BenchOptions, synthetic_batches
from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Record,
    Run,
    TimingOptions,
    View,
    headline_from,
    lone_context,
    option,
)
from distlab.measure import (
    MIN_PAIRS,
    PhaseTimer,
    attempt,
    interleave,
    peak_memory,
    percentiles,
)
from distlab.model import TransformerLM, checkpoint_group, checkpoint_plan, cross_entropy
from distlab.parallel import get_strategy
from distlab.precision import DTYPES, autocast
from distlab.report import NOISE, Ratio, prediction_error, row_of, stacked_bars
from distlab.simulate.step import simulate_step
from distlab.theory.flops import forward_flops
from distlab.theory.memory.peak import CUBLAS_WORKSPACES, StepMemory, step_memory
from distlab.theory.memory.recompute import blocks_run_again, recomputed_flops
from distlab.theory.model_shape import ModelShape
from distlab.train.memory_budget import require

BASE = "none"  # what the others are held against
OVER_NONE = Ratio("step_over_none", row_of(BASE))
CHOICES = (BASE, "block", "every-2", "every-4", "every-8", "every-16")
PRECISION = {"fp32": "fp32", "bf16": "bf16-autocast"}


@dataclass(frozen=True)
class CheckpointingConfig(BenchOptions, TimingOptions):
    """What to run; `bf16` is autocast over fp32 parameters."""

    compile: str = "off"
    checkpointing: str = "none"  # see `groups`
    dtype: str = option("fp32", "of the computation", choices=tuple(PRECISION))
    groups: tuple[str, ...] = option(
        (*CHOICES, "every-32"),
        "none, block, every-K, or what blocks keep, as --checkpointing of distlab train; several of them",
    )
    count: bool = option(False, "count peaks on fake tensors too, seconds to a quarter of a minute each")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps * self.rounds < MIN_PAIRS:
            raise ValueError(f"steps × rounds = {self.steps * self.rounds}: time at least {MIN_PAIRS} steps")
        for choice in self.groups:
            checkpoint_plan(choice, self.model().num_layers)

    def choices(self) -> tuple[str, ...]:
        """The ways to group, the base first."""
        return tuple(dict.fromkeys([BASE, *self.groups]))


def measure(config: CheckpointingConfig, context: RankContext, run: Run) -> None:
    """One row per way to group the blocks; one that runs out of memory says so, and the others go on.

    Raises:
        MemoryError: on a CPU a way that does not fit, on a GPU all of them.
    """
    plain = config.planned(mode="forward_backward")
    planned = [replace(plain, checkpointing=choice) for choice in config.choices()]
    require(planned, context.device, some=context.device.type == "cuda")
    bench = Bench(config, context.device)
    interleave({name: partial(bench.time, name) for name in config.choices()}, config.rounds, progress=run.progress)
    model = config.model()
    for choice in config.choices():
        metrics = bench.metrics(choice) | bench.predicted(choice)
        if config.count:
            run.progress(f"counting {choice} on fake tensors")
            metrics["counted_peak_bytes"] = counted_peak(config, choice)
        run.add(choice, metrics, num_layers=model.num_layers, num_parameters=model.num_parameters)


def one_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gradients of one batch, from none; returns the loss."""
    model.zero_grad(set_to_none=True)
    with autocast(tokens.device, DTYPES[dtype]):
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss


class Bench:
    """One model whose blocks are regrouped for each measurement."""

    def __init__(self, config: CheckpointingConfig, device: torch.device):
        shape = config.model()
        self.config, self.device, self.shape = config, device, shape
        # Of libraries in the allocator; fake tensors have none.
        self.workspace_bytes = CUBLAS_WORKSPACES if device.type == "cuda" else 0
        self.model = TransformerLM(shape, device=device, seed=config.seed)
        self.batch = synthetic_batches(lone_context(device), config)[0]
        self.times: dict[str, dict[str, list[float]]] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.norms: torch.Tensor | None = None  # of each gradient, without checkpointing

    def time(self, choice: str) -> None:
        """A round of one way: warm up, then time forward and backward of each step."""
        if self.found.get(choice, {}).get("status", "ok") != "ok":
            return
        self.model.checkpoint_blocks = choice
        found = attempt(lambda: self._round(choice))
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.found[choice] = self.found.get(choice, {}) | found

    def _round(self, choice: str) -> dict[str, Any]:
        timer = PhaseTimer(self.device)
        handle = self.model.head.register_forward_hook(lambda *_: timer.mark("forward"))
        try:
            with peak_memory(self.device) as memory:
                for _ in timer.each(self.config.steps, self.config.warmup):
                    one_step(self.model, *self.batch, self.config.dtype)
                    timer.mark("backward")
                samples = timer.steps()
        finally:
            handle.remove()
        mine = self.times.setdefault(choice, {"forward": [], "step": []})
        for phase, times in mine.items():
            times.extend(sample[phase] for sample in samples)
        norms = torch.stack([p.grad.float().norm() for p in self.model.parameters()])
        if choice == BASE and self.norms is None:
            self.norms = norms
        apart = None if self.norms is None else ((norms - self.norms).abs() / self.norms).max().item()
        return {"peak_alloc_bytes": memory.peak_alloc_bytes, "max_rel_grad_norm_diff": apart}

    def metrics(self, choice: str) -> dict[str, Any]:
        """Times and memory of one way."""
        found = dict(self.found[choice])
        times = self.times.get(choice)
        if found["status"] != "ok" or times is None:
            return found
        found |= {f"step_{p}_ms": ms for p, ms in percentiles(times["step"]).items()}
        found["step_samples_ms"] = times["step"]
        return found

    def predicted(self, choice: str) -> dict[str, float | int | str]:
        """The closed forms; the time from the measured step without checkpointing, if that one ran."""
        model, base = self.shape, self.times.get(BASE)
        plan = checkpoint_plan(choice, model.num_layers)
        memory = self.closed_form(plan)
        found: dict[str, float | int | str] = {
            "predicted_peak_bytes": memory.peak.total,
            "predicted_counted_peak_bytes": memory.peak.total - self.workspace_bytes,
            "predicted_peak_phase": memory.peak_phase,
            "blocks_run_again": blocks_run_again(model.num_layers, checkpoint_group(choice))[0],
        }
        if base is not None:
            sizes = model.sizes(self.config.batch)
            again = recomputed_flops(plan, causal=True, **sizes) / forward_flops(causal=True, **sizes).total
            forward, step = (percentiles(base[phase])["p50"] for phase in ("forward", "step"))
            found["predicted_step_ms"] = step + again * forward
        return found

    def closed_form(self, plan: int | tuple[str, ...]) -> StepMemory:
        """Memory of a step without an optimizer."""
        return step_memory(
            ModelShape.of(self.shape),
            batch=self.config.batch,
            context=self.shape.context_length,
            strategy=get_strategy("local"),
            precision=PRECISION[self.config.dtype],
            attention=self.shape.attention,
            checkpointing=plan,
            optimizer="sgd",
            workspace_bytes=self.workspace_bytes,
        )


def counted_peak(config: CheckpointingConfig, choice: str) -> int:
    """The peak of the same step on fake tensors, counted storage by storage."""
    model = config.model()

    def make_step(wrapper: nn.Module, optimizer: torch.optim.Optimizer, mark: Callable[[str], None]):
        tokens = torch.zeros(config.batch, model.context_length, dtype=torch.int64)
        return lambda: one_step(wrapper, tokens, tokens, config.dtype)

    build = partial(TransformerLM, model, device="cpu", checkpoint_blocks=choice)
    options = {"optimizer_cls": torch.optim.SGD, "optimizer_options": {"lr": 0.0}}
    return simulate_step("local", build, make_step, world_size=1, **options).peak.total


headline = headline_from(
    "{size} with {num_layers} blocks ({num_parameters:M} parameters), batch {batch} × context {context}, {dtype}, "
    "forward and backward, {device_name}, torch {torch}"
)


def findings(records: Sequence[Record]) -> list[str]:
    """The best group size, by the allocator's count and on fake tensors."""
    found = []
    for metric, words in (("peak_alloc_bytes", "Measured"), ("counted_peak_bytes", "On fake tensors")):
        single = {r.variant: r.metrics[metric] for r in records
                  if r.metrics.get(metric) is not None and re.fullmatch(r"block|every-\d+", r.variant)}  # fmt: skip
        if single:
            best = min(single, key=single.__getitem__)
            found.append(
                f"{words}, the least peak of groups is that of {best}, {single[best] / 2**30:.3f} GiB."
            )
    return found


def draw(records: Sequence[Record], path: Path) -> None:
    """The peak of each way, by the allocator or, where none counts, on fake tensors; below it the predicted one."""
    allocated = any(r.metrics.get("peak_alloc_bytes") is not None for r in records)
    metrics = {
        "measured": "peak_alloc_bytes" if allocated else "counted_peak_bytes", "predicted": "predicted_peak_bytes",
    }  # fmt: skip
    labels = [f"{r.variant}, {how}" for r in records for how in metrics]
    parts = {
        part: [r.metrics.get(metric) if how == part else None for r in records for how, metric in metrics.items()]
        for part in metrics
    }
    gib = {part: [value and value / 2**30 for value in values] for part, values in parts.items()}
    title = f"Recomputing blocks{'' if allocated else ' on fake tensors'}: {headline(records)}"
    stacked_bars(path, labels, gib, title=title, unit="GiB at the peak")


VIEW = View(
    columns=[
        Column("variant", "recomputed"),
        Column("metrics.step_p20_ms", "step p20 ms", ".1f"),
        Column("metrics.step_p50_ms", "p50", ".1f"),
        Column("metrics.step_p80_ms", "p80", ".1f"),
        NOISE,
        Column("metrics.predicted_step_ms", "predicted ms", ".1f"),
        prediction_error("predicted_step_ms", "step_p50_ms"),
        OVER_NONE.column("÷ none", ".2f"),
        Column("metrics.blocks_run_again", "blocks run again", "d"),
        Column("metrics.peak_alloc_bytes", "peak GiB", ".3f", scale=2**-30),
        Column("metrics.predicted_peak_bytes", "predicted GiB", ".3f", scale=2**-30),
        prediction_error("predicted_peak_bytes", "peak_alloc_bytes"),
        Column("metrics.counted_peak_bytes", "fake tensors GiB", ".3f", scale=2**-30),
        Column("metrics.predicted_peak_phase", "peak in", align="left"),
        Column("metrics.max_rel_grad_norm_diff", "max |Δ‖grad‖|", ".1e"),
        Column("metrics.status", "status", align="left"),
    ],
    headline=headline,
    derive=OVER_NONE.add,
    terminal=(
        *("variant", "step_p50_ms", "noise_pct", "predicted_step_ms", "step_over_none"),
        *("peak_alloc_bytes", "predicted_peak_bytes", "counted_peak_bytes", "status"),
    ),
    pictures={"checkpointing.png": draw},
    findings=findings,
    reading="`block` keeps each block's input and recomputes the rest. `every-k` keeps the input of k blocks, and "
    "while a group runs backward it holds the activations of all k: larger groups save inputs, which are small, and "
    "hold more blocks, which are large. Gradients grow while activations shrink, so the fullest "
    "moment is the backward of the first group, unless it is that of the loss.",
    prediction="Memory in closed form (distlab.theory.memory). Time: the measured step without recomputation, and its "
    "forward times the share of FLOPs that run again, which torch's own count confirms exactly "
    "(distlab.theory.memory): a recomputation ends before the last matmul of a group.",
)

TINY = {"size": "tiny", "context": 128, "vocab": 256, "dtype": "fp32", "count": True}
SHORT = {"rounds": 1, "steps": 5}
EXPERIMENT = Experiment(
    CheckpointingConfig, measure, VIEW,
    presets={
        "gpu": {"size": "xl", "context": 1024, "dtype": "bf16"},
        "cpu": TINY | {"layers": 16, "steps": 4, "groups": CHOICES},
        "quick": TINY | SHORT | {"layers": 8, "groups": (BASE, "block", "every-2", "every-4")},
        "smoke": TINY | SHORT | {"layers": 4, "context": 32, "vocab": 32, "groups": ("block",)},
    },
)
