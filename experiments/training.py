"""Train a language model, on synthetic tokens or on a file, so that it survives what happens to long runs.

A run is a folder: `config.json`, `metrics.jsonl` (a line per step), `checkpoints/`, and at the end `loss.png` and
`records.json`. The same command given again continues it from its newest usable checkpoint, at whatever world size
and under whatever strategy.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distlab.comm import RankContext, collectives
from distlab.hardware import peak_flops
from distlab.measure.memory import peak_memory
from distlab.report import Column, OutputFolder, Record, View, commit, environment, write
from distlab.report.curves import curves
from distlab.theory.compute import mfu, step_flops
from distlab.train.config import DTYPES, TrainConfig
from distlab.train.journal import Journal, read_journal
from distlab.train.loop import Outcome, StepReport, Trainer
from distlab.train.tokens import Sequences, SyntheticSequences, TokenWindows, check_range, open_tokens

NAME = "train"
HELD_OUT = 20  # one token in so many, at the end of the file, is for validation


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    Args:
        path: `.bin`, `.npy`, or any other file, whose bytes are then the tokens; None for synthetic ones.
        validation: another such file; None holds out the end of `path`.
        token_dtype: of a `.bin`.
    """

    path: str | None = None
    validation: str | None = None
    token_dtype: str | None = None

    @property
    def is_bytes(self) -> bool:
        return self.path is not None and Path(self.path).suffix not in (".bin", ".npy")


def load(
    data: DataConfig, config: TrainConfig, context: RankContext
) -> tuple[Sequences, Sequences, dict[str, Any]]:
    """Training data, validation data, and what identifies the training data.

    Raises:
        OSError, ValueError: on every rank, for a file that cannot be used.
    """
    model = config.model()
    if data.path is None:
        seeds = (config.seed, config.seed + 1)
        train, validate = (SyntheticSequences(model.vocab_size, model.context_length, seed) for seed in seeds)
        return train, validate, {"kind": "synthetic"}
    tokens = open_tokens(data.path, data.token_dtype)
    identity = {
        "kind": "tokens",
        "count": len(tokens),
        "dtype": tokens.dtype.name,
        "sha256_of_start": _start(tokens),
    }
    if data.validation is None:
        cut = len(tokens) - max(len(tokens) // HELD_OUT, 2)
        tokens, held_out = tokens[:cut], tokens[cut:]
    else:
        held_out = open_tokens(data.validation, data.token_dtype)
    for path, part in ((data.path, tokens), (data.validation or data.path, held_out)):
        problem = check_range(part, model.vocab_size, context.rank, context.world_size)
        for found in collectives.gather_objects(problem, context.group):
            if found is not None:
                raise ValueError(f"{path}: {found}")
    train = TokenWindows(tokens, model.vocab_size, model.context_length)
    validate = TokenWindows(held_out, model.vocab_size, model.context_length, ragged=True)
    return train, validate, identity


def _start(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens[: 1 << 20]).tobytes()).hexdigest()


class Training:
    """One run in its folder.

    Args:
        config, data: what to train on what.
        context: this rank.
        folder: of the run; all ranks and machines see it.
        default_commit: for a machine without git.
        log_every: steps between progress lines.
        progress: called with a line now and then.

    Raises:
        ValueError, OSError: see `load` and `Trainer`.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: DataConfig,
        context: RankContext,
        folder: OutputFolder,
        *,
        default_commit: str | None = None,
        log_every: int = 10,
        progress: Callable[[str], None] = lambda text: None,
    ):
        self.config = replace(config, vocab=256) if data.is_bytes and config.vocab is None else config
        self.context, self.folder, self.progress = context, folder, progress
        self.log_every, self.default_commit = log_every, default_commit
        train, validate, identity = load(data, self.config, context)
        self.trainer = Trainer(
            self.config, context, train=train, validate=validate, data_identity=identity,
            folder=folder.path / "checkpoints", report=self._report, progress=progress,
        )  # fmt: skip
        self.journal: Journal | None = None
        self._times: list[float] = []

    def run(self) -> tuple[Outcome, Record | None]:
        """Resume if there is something to resume, train, and write the results; call it on every rank.

        Returns:
            How it ended, and the record (on the main rank).
        """
        if self.trainer.resume():
            self.progress(f"resumed from step {self.trainer.step}")
        if self.trainer.step >= self.config.steps:
            self.progress(
                f"this run is complete: {self.trainer.step} of {self.config.steps} steps done ({self.folder.path}). "
                "More --steps continue it; another --name, or --fresh, begins a new one"
            )
            return Outcome(self.trainer.step, self.trainer.step, None, []), None
        if self.context.is_main:
            self.folder.write_text("config.json", json.dumps(asdict(self.config), indent=2) + "\n")
            self.journal = Journal(self.folder.path / "metrics.jsonl", self.trainer.step + 1)
        with peak_memory(self.context.device) as memory:
            try:
                outcome = self.trainer.run()
            finally:
                if self.journal is not None:
                    self.journal.close()
        return outcome, self._record(outcome, memory.peak_alloc_bytes) if self.context.is_main else None

    def _report(self, step: StepReport) -> None:
        if self.journal is None:
            return
        rate, share = self._speed(step.step_ms)
        self._times.append(step.step_ms)
        self.journal.write({
            "step": step.step, "loss": step.loss, "loss_hex": step.loss.hex(), "lr": step.lr,
            "grad_norm": step.grad_norm, "step_ms": step.step_ms, "tokens_per_s": rate, "mfu_pct": share,
            "checkpoint_ms": step.checkpoint_ms,
        })  # fmt: skip
        if step.step % self.log_every == 0 or step.step == self.config.steps:
            shown = "n/a" if share is None else f"{share:.1f} %"
            self.progress(
                f"step {step.step}/{self.config.steps}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
                f"{rate:,.0f} tokens/s  MFU {shown}"
            )

    def _speed(self, step_ms: float) -> tuple[float, float | None]:
        """(tokens per second over all ranks, MFU in % or None)."""
        model = self.config.model()
        shape = {"context": model.context_length, "vocab_size": model.vocab_size, "d_model": model.d_model}
        shape |= {"d_ff": model.d_ff, "num_layers": model.num_layers}
        seconds = step_ms / 1e3
        peak = None
        if self.context.device.type == "cuda":
            name = torch.cuda.get_device_name(self.context.device)
            peak = peak_flops(name, DTYPES[self.config.dtype] or torch.float32)
        flops = step_flops(batch=self.config.batch, **shape) / self.context.world_size
        share = mfu(flops, seconds, peak)
        rate = self.config.batch * model.context_length / seconds
        return rate, None if share is None else 100 * share

    def _record(self, outcome: Outcome, peak_bytes: int | None) -> Record:
        lines = read_journal(self.folder.path / "metrics.jsonl")
        step_ms = statistics.median(self._times) if self._times else None
        rate, share = self._speed(step_ms) if step_ms else (None, None)
        metrics = {
            "steps": outcome.last_step,
            "final_loss": lines[-1]["loss"] if lines else None,
            "validation_loss": outcome.validation[-1][1] if outcome.validation else None,
            "step_p50_ms": step_ms,
            "tokens_per_s": rate,
            "mfu_pct": share,
            "peak_alloc_bytes": peak_bytes,
            "checkpoint_host_bytes": self.trainer.checkpoints.host_bytes,
        }
        facts = {"environment": environment(self.context.device), "commit": commit(self.default_commit)}
        shared = asdict(self.config) | {
            "world_size": self.context.world_size,
            "backend": self.context.backend,
        }
        record = Record(NAME, self.config.strategy, shared, metrics, **facts)
        series = {"training": ([line["step"] for line in lines], [line["loss"] for line in lines])}
        if outcome.validation:
            series["validation"] = tuple(zip(*outcome.validation, strict=True))
        title = f"{self.config.size}, {self.config.strategy}, {self.context.world_size} ranks"
        curves(
            self.folder.path / "loss.png",
            series,
            title=title,
            x_label="step",
            y_label="loss (nats per token)",
        )
        write(VIEW, [record], self.folder)
        return record


COLUMNS = [
    Column("variant", "strategy"),
    Column("metrics.steps", "steps", ",d"),
    Column("metrics.final_loss", "loss", ".4f"),
    Column("metrics.validation_loss", "validation loss", ".4f"),
    Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f"),
    Column("metrics.mfu_pct", "MFU %", ".1f"),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
]


def headline(records: Sequence[Record]) -> str:
    """One line that says what was trained on what."""
    config, env = records[0].config, records[0].environment
    return (
        f"{config['size']}, {config['steps']} steps of {config['batch']} sequences, {config['dtype']}, "
        f"{config['world_size']} × {env['device_name']} ({config['backend']}), torch {env['torch']}"
    )


VIEW = View(
    NAME,
    "How does this model train?",
    COLUMNS,
    headline,
    reading="The loss of every step is in metrics.jsonl, decimal and in hex; two runs of the same command, one of them "
    "killed and resumed, have the same hex. Times are those of whole steps, data and logging included.",
    noise="A single run: the loss of one step varies with its batch. Compare curves, not last values.",
)
