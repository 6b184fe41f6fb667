"""Measure every choice in turn."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from distlab.measure.clock import PhaseTimer
from distlab.measure.memory import peak_memory
from distlab.measure.rounds import interleave
from distlab.measure.statistics import MIN_PAIRS, own_noise_floor, paired_ratio, percentiles
from distlab.measure.validity import attempt
from distlab.model import TransformerLM, checkpoint_groups
from distlab.report import Record, commit, environment
from distlab.report.noise import interval_ties, noise_of, tied
from distlab.theory.memory.activations import PRECISIONS, activations
from distlab.theory.memory.recompute import best_group_size, best_group_size_estimate
from distlab.theory.model_shape import ModelShape
from distlab.train.data import SyntheticTokens
from distlab.train.requirements import PlannedStep, require
from experiments.activation_checkpointing_pieces.config import BASE, NAME, CheckpointingConfig
from experiments.activation_checkpointing_pieces.prediction import (
    closed_form,
    counted_peak,
    one_step,
    predicted,
)


def run(
    config: CheckpointingConfig,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """One record per way to group the blocks; one that runs out of memory says so, and the others go on.

    Raises:
        MemoryError: on a CPU a way that does not fit, on a GPU all of them.
    """
    plain = PlannedStep(config.model(), config.batch, dtype=config.dtype, mode="forward_backward")
    planned = [replace(plain, checkpointing=checkpoint_groups(choice)) for choice in config.choices()]
    require(planned, config.device, some=config.device == "cuda")
    facts = {"environment": environment(config.device), "commit": commit(default_commit)}
    bench = Bench(config)
    calls = {choice: partial(bench.time, choice) for choice in config.choices()}
    interleave(calls, config.rounds, progress=progress)
    records = []
    for choice in config.choices():
        metrics = bench.metrics(choice) | predicted(config, choice, bench.times.get(BASE))
        if config.count:
            progress(f"counting {choice} on fake tensors")
            metrics["counted_peak_bytes"] = counted_peak(config, choice)
        records.append(Record(NAME, choice, asdict(config) | _facts_of(config), metrics, **facts))
    return records


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
            found["step_over_none_is_tie"] = choice != BASE and self._ties(times["step"], base["step"])
        found["noise_floor_pct"] = own_noise_floor(times["step"])
        found["noise_pct"] = noise_of(found)
        return found


    @staticmethod
    def _ties(mine: list[float], base: list[float]) -> bool:
        """Whether the paired steps' interval contains 1; with too few for one, whether noise covers the difference."""
        if len(mine) == len(base) >= MIN_PAIRS:
            return interval_ties(*paired_ratio(mine, base)[1:])
        rows = ({f"step_{p}_ms": ms for p, ms in percentiles(times).items()} for times in (mine, base))
        return tied(*rows)


def _facts_of(config: CheckpointingConfig) -> dict[str, Any]:
    """What the closed form says of the best single-level group size."""
    model = config.model()
    precision = PRECISIONS[{"fp32": "fp32", "bf16": "bf16-autocast"}[config.dtype]]
    kept = activations(ModelShape.of(model), config.batch, model.context_length, precision, model.attention)
    arguments = (model.num_layers, kept.block, kept.checkpoint)
    peaks = {size: closed_form(config, (size,)).peak.total for size in range(1, model.num_layers + 1)}
    return {
        "num_layers": model.num_layers,
        "num_parameters": model.num_parameters,
        "block_activation_bytes": kept.block,
        "block_input_bytes": kept.checkpoint,
        "best_group_size": best_group_size(*arguments),
        "best_group_size_of_peak": min(peaks, key=peaks.__getitem__),
        "best_group_size_estimate": best_group_size_estimate(*arguments),
    }
