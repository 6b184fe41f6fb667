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

from distlab.checkpoint.lock import hold
from distlab.comm import RankContext, collectives
from distlab.hardware import peak_flops
from distlab.measure.memory import peak_memory
from distlab.model.config import ModelConfig
from distlab.report import Column, OutputFolder, Record, View, commit, environment, read_json, write
from distlab.report.charts import Panel, overlaid
from distlab.theory.flops import mfu, step_flops
from distlab.train.config import DTYPES, TrainConfig
from distlab.train.journal import Journal
from distlab.train.loop import Outcome, StepReport, Trainer
from distlab.train.requirements import require, training_step
from distlab.train.tokens import Sequences, SyntheticSequences, TokenWindows, examine, open_tokens

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

    def __post_init__(self) -> None:
        if self.validation is not None and self.path is None:
            raise ValueError(
                f"--val-data {self.validation} needs --data: synthetic tokens have their own validation"
            )
        files = [Path(path) for path in (self.path, self.validation) if path is not None]
        if self.token_dtype is not None and not any(file.suffix == ".bin" for file in files):
            raise ValueError(
                f"--token-dtype {self.token_dtype} is of a .bin: a .npy says its own, and a text's tokens are its bytes"
            )

    @property
    def is_bytes(self) -> bool:
        return self.path is not None and Path(self.path).suffix not in (".bin", ".npy")


def load(
    data: DataConfig, config: TrainConfig, context: RankContext
) -> tuple[Sequences, Sequences, dict[str, Any]]:
    """Training data, validation data, and what identifies both: a run that is resumed must find them as they were.

    Every token is read once before training, each rank reading a share: ids are compared with the vocabulary, and the
    same pass hashes all of both files. So no byte can change unseen, at the price of the hash alone.

    Raises:
        OSError, ValueError: on every rank, for a file that cannot be used.
    """
    model = config.model()
    if data.path is None:
        seeds = (config.seed, config.seed + 1)
        train, validate = (SyntheticSequences(model.vocab_size, model.context_length, seed) for seed in seeds)
        return train, validate, {"kind": "synthetic"}
    tokens = open_tokens(data.path, data.token_dtype)
    cut = len(tokens)
    identity = {
        "kind": "tokens",
        "count": len(tokens),
        "dtype": tokens.dtype.name,
        "sha256": _digest(data.path, tokens, model.vocab_size, context),
    }
    if data.validation is None:
        cut = max(0, cut - max(cut // HELD_OUT, 2))
        held_out = tokens[cut:]
        identity |= {"validation": f"the last {len(held_out)} tokens"}
    else:
        held_out = open_tokens(data.validation, data.token_dtype)
        digest = _digest(data.validation, held_out, model.vocab_size, context)
        identity |= {"validation": f"{len(held_out)} tokens of a file", "validation_sha256": digest}
    identity |= {"trained_on": cut}
    train = _windows(f"{data.path} ({len(tokens)} tokens, {cut} of them to train on)", tokens[:cut], model)
    validate = _windows(f"{data.validation or data.path} (for validation)", held_out, model, ragged=True)
    return train, validate, identity


def _digest(path: str, tokens: np.ndarray, vocab_size: int, context: RankContext) -> str:
    """SHA-256 over those of all blocks; raises ValueError on every rank for an id that is out of range."""
    shares = collectives.gather_objects(
        examine(tokens, vocab_size, context.rank, context.world_size), context.group
    )
    for _, problem in shares:
        if problem is not None:
            raise ValueError(f"{path}: {problem}")
    blocks = [digest for digests, _ in shares for digest in digests]
    return hashlib.sha256("".join(blocks).encode()).hexdigest()


def _windows(source: str, tokens: np.ndarray, model: ModelConfig, *, ragged: bool = False) -> TokenWindows:
    try:
        return TokenWindows(tokens, model.vocab_size, model.context_length, ragged=ragged)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


class Training:
    """One run in its folder, which is its own from here until `run` or `close` ends.

    Args:
        config, data: what to train on what.
        context: this rank.
        folder: of the run; all ranks and machines see it.
        default_commit: for a machine without git.
        log_every: steps between progress lines.
        progress: called with a line now and then.

    Raises:
        FolderIsHeld: another run writes to the folder.
        ValueError, OSError: see `load` and `Trainer`.
        MemoryError: the model with its batch does not fit, see `distlab.train.requirements`.
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
        require([training_step(self.config, context.world_size)], context.device, context)
        self.journal: Journal | None = None
        self._times: list[float] = []
        self._last_loss: float | None = None
        self.lock = hold(folder.path, context, progress)
        try:
            train, validate, identity = load(data, self.config, context)
            self.trainer = Trainer(
                self.config, context, train=train, validate=validate, data_identity=identity,
                folder=folder.path / "checkpoints", lock=self.lock, report=self._report, progress=progress,
            )  # fmt: skip
        except BaseException:
            self._release()
            raise

    def run(self) -> tuple[Outcome, Record | None]:
        """Resume if there is something to resume, train, and write the results; call it on every rank.

        Returns:
            How it ended, and the record (on the main rank; None if the run was complete, with its record, before).
        """
        try:
            return self._run()
        finally:
            if self.journal is not None:
                self.journal.close()
            self._release()

    def close(self) -> None:
        """Give back the folder, the model's hooks and the groups."""
        self._release()
        self.trainer.close()

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _run(self) -> tuple[Outcome, Record | None]:
        if self.trainer.resume():
            self.progress(f"resumed from step {self.trainer.step}")
        complete = self.trainer.step >= self.config.steps
        if complete and collectives.gather_objects(self._has_record(), self.context.group)[0]:
            self.progress(
                f"this run is complete: {self.trainer.step} of {self.config.steps} steps done ({self.folder.path}). "
                "More --steps continue it; another --name, or --fresh, begins a new one"
            )
            return Outcome(self.trainer.step, self.trainer.step, None, []), None
        if self.context.is_main:
            self.folder.write_text("config.json", json.dumps(asdict(self.config), indent=2) + "\n")
            self.journal = Journal(self.folder.path / "metrics.jsonl", self.trainer.step + 1)
        if complete:
            outcome, peak_bytes = self._late_outcome(), None
        else:
            with peak_memory(self.context.device) as memory:
                outcome = self.trainer.run()
            peak_bytes = memory.peak_alloc_bytes
        return outcome, self._record(outcome, peak_bytes) if self.context.is_main else None

    def _has_record(self) -> bool:
        """Whether the results of the steps that are done were written, to the last file."""
        records, page = self.folder.path / "records.json", self.folder.path / "report.html"
        try:
            steps = read_json(records)[0].metrics["steps"]
            return steps == self.trainer.step and page.stat().st_mtime_ns >= records.stat().st_mtime_ns
        except (OSError, ValueError, LookupError):
            return False

    def _late_outcome(self) -> Outcome:
        """How a run ended that died between its last checkpoint and its record: from its journal and its model."""
        step = self.trainer.step
        self.progress(f"step {step} is the last and is done, but has no record: writing it")
        for line in self.journal.lines if self.journal is not None else ():
            self._times += [line["step_ms"]] if "step_ms" in line else []
            self._last_loss = line["loss"] if line["step"] == step else None
        return Outcome(step, step, None, [(step, self.trainer.validation_loss())])

    def _report(self, step: StepReport) -> None:
        if self.journal is None:
            return
        rate, share = self._speed(step.step_ms)
        self._times.append(step.step_ms)
        self._last_loss = step.loss
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
        if self.lock is not None:
            self.lock.check()
        lines = self.journal.lines
        step_ms = statistics.median(self._times) if self._times else None
        rate, share = self._speed(step_ms) if step_ms else (None, None)
        metrics = {
            "steps": outcome.last_step,
            "final_loss": self._last_loss,
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
        panel = Panel("", "step", "loss (nats per token)", overlaid(series), log_x=None, from_zero=False)
        lines(self.folder.path / "loss.png", [panel], title=title)
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
    name=NAME,
    question="How does this model train?",
    columns=COLUMNS,
    headline=headline,
    reading="The loss of every step is in metrics.jsonl, decimal and in hex; two runs of the same command, one of them "
    "killed and resumed, have the same hex. Times are those of whole steps, data and logging included.",
    noise="A single run: the loss of one step varies with its batch. Compare curves, not last values.",
)
