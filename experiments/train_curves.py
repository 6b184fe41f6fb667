"""Do all strategies train alike?

    distlab run train_curves --quick
    distlab run train_curves --nproc 2 --max-restarts 1      # also through a killed run

Trains a model on bytes of text (by default this repository's own sources and pages) under every
strategy, with one data order and one seed, and once by Muon, whose curve is another. Then the last
rank of another such run kills itself in the middle; all ranks are started again (that is what
`--max-restarts` allows), and the run resumes from its checkpoint. What has a row under this
`--name` is not run again, so the same command with it continues where it was cut off; torchrun's
own `--max-restarts` needs a `--name`. Wrong rows are printed as wrong, and the exit code stays 0:
another would make the ranks start all over.
"""

import gc
import hashlib
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distlab.comm import RankEnvironment
from distlab.comm.rank_process import on_main
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
from distlab.measure import peak_memory
from distlab.options import Values
from distlab.parallel import STRATEGIES, strategies_on
from distlab.report import PEAK, Panel, lines, overlaid
from distlab.train.config import TrainConfig
from distlab.train.data import GlobalOrder, TokenWindows, open_tokens
from distlab.train.loop import Trainer
from distlab.train.memory_budget import require, training_step
from distlab.train.metrics import StepMetrics

REFERENCE = "bucketed"
ROUNDING, KILLED, MUON = "bucketed, 2 micro-batches", "bucketed, killed", "bucketed, Muon"
# A mean over 20 steps hides the noise of single batches.
LAST = 20  # steps whose mean loss is compared
PARTS = ("curves", "muon", "kill")
FOLDERS = ("distlab", "kernels", "experiments", "launch", "tests", "docs")
ROOT = Path(__file__).resolve().parents[1]


def compared_on(device_type: str) -> tuple[str, ...]:
    """Return the strategies to compare on `cuda` or `cpu`: all that train there, one torch DDP."""
    compared = []
    for name in strategies_on(device_type, meshes=False):
        strategy = STRATEGIES[name]
        if strategy.trains and not (strategy.is_peer and strategy.has_buckets):
            # Tuned options of torch's DDP change its speed and not its curve, so one row of it is
            # enough.
            compared.append(name)
    return tuple(compared)


def kill_at(steps: int) -> int:
    """Return the step after which the last rank kills itself.

    It is between the second and the third checkpoint.
    """
    # Checkpoints come after every 11/40 of the steps, so two are written before the kill.
    return 11 * steps // 20


@dataclass(frozen=True)
class CurvesConfig(Options):
    """Options of the experiment.

    Raises ValueError for a value that is not allowed; `TrainConfig` checks what it takes.
    """

    size: str = option("tiny", "model preset")
    context: int | None = option(None, "tokens per sequence [the preset's]")
    dtype: str = option("fp32", "dtype of the computation")
    steps: int = option(200, "steps of each curve", minimum=4)
    batch: int = option(16, "sequences of all ranks")
    lr: float = option(3e-4, "learning rate")
    strategies: tuple[str, ...] = option(
        compared_on("cpu"), "strategies to train with, in addition to the reference"
    )
    parts: tuple[str, ...] = option(
        PARTS, "parts to run; kill needs --max-restarts 1", choices=PARTS
    )
    text_file: str | None = option(
        None, "text file to train on [this repository's sources and pages]", flag="--text"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A wrong option of a strategy should raise here, and not after the curves before it.
        for strategy in self.strategies:
            self.training(strategy)

    def check_effect(self, given: Values) -> None:
        """Raise ValueError for strategies without the part that trains with them."""
        super().check_effect(given)
        if "strategies" in given and "curves" not in self.parts:
            raise ValueError(
                "--strategies has no effect without the part curves: add it to --parts, or leave "
                "--strategies out"
            )

    def compared(self) -> list[str]:
        """Return the strategies of the curves, the reference first."""
        return list(dict.fromkeys([REFERENCE, *self.strategies]))

    def training(
        self,
        strategy: str,
        accumulate: int = TrainConfig.accumulate,
        optimizer: str = TrainConfig.optimizer,
        checkpoint_every: int = 0,
    ) -> TrainConfig:
        """Return the options of a training run with a strategy."""
        return TrainConfig(
            size=self.size,
            context=self.context,
            # Tokens are bytes.
            vocab=256,
            strategy=strategy,
            batch=self.batch,
            steps=self.steps,
            lr=self.lr,
            # A tenth of the steps is enough for a curve of any length.
            warmup=max(1, self.steps // 10),
            dtype=self.dtype,
            accumulate=accumulate,
            optimizer=optimizer,
            checkpoint_every=checkpoint_every,
        )


def distance(mine: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Return the mean |Δloss| over the steps that both ran, or None if one has no curve.

    A mean over few steps would depend on the batches of these steps.
    """
    if not mine.get("loss") or not reference.get("loss"):
        return None
    # A resumed run has losses only from its checkpoint on.
    late = reference["loss"][mine["first_step"] :]
    return statistics.fmean(abs(a - b) for a, b in zip(mine["loss"], late, strict=True))


def measure(config: CurvesConfig, context: RankContext, run: Run) -> None:
    """Run all parts, and add a row per run. Call it on every rank.

    Raises:
        OSError, ValueError: on every rank, for a text that cannot be used, or that differs from
            that of earlier rows, and for a rank that would kill itself without being started again.
        MemoryError: a strategy with this model and batch does not fit.
    """
    place = RankEnvironment.read()
    # A kill without a restart would end the experiment with the run.
    check_restarts(config.parts, place.max_restarts)
    # Deterministic kernels: two runs are equal bit for bit.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Operations without a deterministic form only warn, since few of them matter here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # cuDNN's backward adds in any order; the flash kernel's does not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Deterministic mode fills every `torch.empty` with NaN, which costs time and changes no result
    # of correct code.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # One rank reads, because somebody may be editing these files.
    tokens = on_main(context, partial(read_text, config.text_file))
    curves = Curves(config, context, run, tokens)
    parts = {}  # row → what trains it
    if "curves" in config.parts:
        parts |= {name: partial(curves.curve, config.training(name)) for name in config.compared()}
        # The same mathematics in another order of sums shows how far rounding alone leads.
        parts[ROUNDING] = partial(curves.curve, config.training(REFERENCE, accumulate=2))
    if "muon" in config.parts:
        parts[MUON] = partial(curves.curve, config.training(REFERENCE, optimizer="muon"))
    if "kill" in config.parts:
        parts[KILLED] = partial(curves.killed_curve, place.restarts)
    for variant, part in parts.items():
        # A restarted job comes here again, and trains only what has no row.
        if run.done(variant):
            run.notice(f"{variant}: has its record")
            continue
        run.progress(variant)
        metrics = part()
        reference = run.done(REFERENCE)
        # Muon's curve is another on purpose, so its distance means nothing.
        if reference and variant != MUON:
            metrics["mean_abs_loss_diff"] = distance(metrics, reference.metrics)
        run.add(variant, metrics, **curves.shared)
        # No rank begins the next run, which may kill a rank, before rank 0 has saved this row.
        dist.barrier(context.group)


def check_restarts(parts: Sequence[str], max_restarts: int) -> None:
    """Raise ValueError if a rank will kill itself and will not be started again."""
    if "kill" in parts and max_restarts < 1:
        raise ValueError(
            "the part 'kill' ends a rank, which must be started again: give --max-restarts 1, or "
            "leave it out with --parts curves"
        )


def read_text(file: str | None) -> np.ndarray:
    """Return the bytes of a text file, or of this repository, in memory."""
    return np.array(text_of_repository(ROOT) if file is None else open_tokens(file))


def text_of_repository(root: Path) -> np.ndarray:
    """Return the bytes of this repository's Python files and pages, in the order of their names."""
    files: list[Path] = []
    for folder in FOLDERS:
        files += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".md")]
    # Sorted, because a directory's own order differs between file systems, and runs must see one
    # text.
    return np.frombuffer(b"".join(path.read_bytes() for path in sorted(files)), dtype=np.uint8)


class Curves:
    """Training runs that the parts need.

    Args:
        config: options of the experiment.
        context: context of this rank.
        run: rows and checkpoints. All ranks see its folder.
        tokens: bytes of the text.
    """

    def __init__(self, config: CurvesConfig, context: RankContext, run: Run, tokens: np.ndarray):
        self.config, self.context, self.run = config, context, run
        model, ranks = config.training(REFERENCE).model(), context.world_size
        self.data = TokenWindows(tokens, 256, model.context_length)
        # Both of these raise errors now, instead of after hours of training.
        GlobalOrder(
            self.data.count,
            batch=config.batch,
            micro_batches=2,
            rank=context.rank,
            world_size=ranks,
        )
        require(
            [training_step(config.training(name), ranks) for name in config.compared()],
            context.device,
            context,
        )
        # Resumed rows are comparable only if they saw the same bytes.
        self.text = {"bytes": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
        self.shared = {
            "backend": context.backend,
            "text": self.text,
            "num_parameters": model.num_parameters,
        }
        if any(record.config["text"] != self.text for record in run.records):
            raise ValueError(
                f"the text has changed since the rows in {run.path} were made: give another --name"
            )

    def curve(
        self,
        config: TrainConfig,
        folder: Path | None = None,
        after: Callable[[StepMetrics], None] | None = None,
    ) -> Metrics:
        """Train, and return the loss of every step with times and memory.

        Args:
            config: options of the training.
            folder: folder of checkpoints, from which it resumes. None for no checkpoints.
            after: function that is called after each step. None for no call.
        """
        reports = []

        def report(step: StepMetrics) -> None:
            reports.append(step)
            if after is not None:
                after(step)

        with peak_memory(self.context.device) as memory:
            trainer = Trainer(
                config,
                self.context,
                train=self.data,
                data_identity=self.text,
                folder=folder,
                report=report,
                progress=self.run.progress,
            )
            if folder is not None:
                trainer.resume()
            first = trainer.step
            trainer.run()
            trainer.close()
        # The name keeps the model alive.
        del trainer
        # Wrappers and hooks form reference cycles, and the next strategy needs their memory.
        gc.collect()
        # The first quarter contains compilation and warm-up.
        steady = [r.step_ms for r in reports[len(reports) // 4 :]]
        losses = [r.loss for r in reports]
        return {
            "first_step": first,
            "loss": losses,
            # A single step's loss depends on its batch.
            "final_loss": statistics.mean(losses[-LAST:]),
            "step_p50_ms": statistics.median(steady),
            "peak_alloc_bytes": memory.peak_alloc_bytes,
        }

    def killed_curve(self, attempt: int) -> Metrics:
        """Train the reference once more.

        In the first attempt the last rank dies by SIGKILL; the next one resumes.
        """
        config = self.config.training(REFERENCE, checkpoint_every=kill_at(self.config.steps) // 2)
        # Only in the first attempt: the restarted run must pass this step. The last rank, because
        # rank 0 writes the records.
        victim = self.context.rank == self.context.world_size - 1 and attempt == 0

        def die(report: StepMetrics) -> None:
            if victim and report.step == kill_at(self.config.steps):
                print(f"rank {self.context.rank} kills itself", file=sys.stderr, flush=True)
                # SIGKILL cannot be handled, as when a machine fails: nothing is flushed, saved or
                # closed.
                os.kill(os.getpid(), signal.SIGKILL)

        return self.curve(config, self.run.path / "killed" / "checkpoints", die)


def verdicts(records: Records) -> list[str]:
    """Return the problems, or nothing if all is well."""
    by_name = {record.variant: record.metrics for record in records}
    problems = []
    limit = tolerance(records)
    reference = by_name.get(REFERENCE, {})
    for name, metrics in by_name.items():
        apart = None if name in (REFERENCE, MUON) else distance(metrics, reference)
        if limit and apart is not None and not apart <= limit:  # also if it is NaN
            problems.append(
                f"{name}: {apart:.4f} nats from {REFERENCE}'s curve, noise is {limit:.4f}"
            )
        if "loss" in metrics and metrics["first_step"] == 0:
            # A resumed run began with a model that was trained already.
            first, last = metrics["loss"][0], metrics["loss"][-1]
            if not last < first:
                problems.append(f"{name}: the loss did not fall ({first:.3f} → {last:.3f})")
    killed = by_name.get(KILLED)
    # Without a checkpoint the second attempt would train from the start, and its curve would look
    # right.
    if killed and killed["first_step"] == 0:
        problems.append(f"{KILLED}: was not resumed from a checkpoint")
    return problems


def tolerance(records: Records) -> float | None:
    """Return the allowed distance of curves: twice that of rounding, and at least 0.01 nats.

    That of rounding comes from the same mathematics in two micro-batches.
    """
    by_name = {record.variant: record.metrics for record in records}
    if REFERENCE not in by_name or ROUNDING not in by_name:
        return None
    # Another strategy sums in another order, as two micro-batches do. Twice, because two such
    # differences may add.
    return max(0.01, 2 * distance(by_name[ROUNDING], by_name[REFERENCE]))


def noise_of_curves(records: Records) -> str:
    """Return the end of the headline: the allowed distance of curves, if it is known."""
    limit = tolerance(records)
    return "" if limit is None else f"; noise {limit:.3f} nats"


def findings(records: Records) -> list[str]:
    """Return the problems as findings, which are red on a terminal."""
    return [f"WRONG: {problem}" for problem in verdicts(records)]


headline = headline_from(
    "{size} ({num_parameters:M} parameters), bytes, batch {batch}, {steps} steps, {dtype}, "
    "{world_size} × {device_name} ({backend}), torch {torch}{noise}",
    noise=noise_of_curves,
)


def draw(records: Records, path: Path) -> None:
    """Draw all loss curves in one picture, and where one run was killed."""
    series, events = {}, []
    for record in records:
        if "loss" in record.metrics:
            first = record.metrics["first_step"]
            losses = record.metrics["loss"]
            series[record.variant] = (range(first + 1, first + len(losses) + 1), losses)
        if record.variant == KILLED:
            events = [
                (kill_at(record.config["steps"]), "killed"),
                (record.metrics["first_step"], "resumed from"),
            ]
    if series:
        label = "training loss (nats per byte)"
        panel = Panel(
            "", "step", label, overlaid(series), log_x=None, from_zero=False, events=events
        )
        lines(path, [panel], title=f"Loss of every strategy: {headline(records)}")


VIEW = View(
    columns=[
        Column("variant", "run"),
        Column("metrics.first_step", "from step", "d"),
        Column("metrics.final_loss", f"loss, last {LAST}", ".4f"),
        Column("metrics.mean_abs_loss_diff", "mean |Δloss|", ".4f"),
        Column("metrics.step_p50_ms", "step p50 ms", ".1f"),
        PEAK,
    ],
    headline=headline,
    terminal=("variant", "final_loss", "mean_abs_loss_diff", "step_p50_ms"),
    pictures={"loss.png": draw},
    findings=findings,
    reading="All runs have one data order and one seed, so their curves may differ by rounding "
    "only, but Muon's; the reference in two micro-batches shows how much that is. The killed run "
    "continues from its checkpoint: its first step is the one after that.",
    noise="The headline has the noise of the curves: the difference that two micro-batches make to "
    "the same mathematics.",
)
EXPERIMENT = Experiment(
    CurvesConfig,
    measure,
    VIEW,
    presets={
        "gpu": {
            "size": "medium",
            "context": 512,
            "dtype": "bf16",
            "strategies": compared_on("cuda"),
        },
        "cpu": {"steps": 60},
        "quick": {
            "size": "tiny",
            "context": None,
            "dtype": "fp32",
            "steps": 12,
            "strategies": ("naive", "flat"),
        },
        "smoke": {
            "size": "tiny",
            "context": 16,
            "dtype": "fp32",
            "steps": 4,
            "batch": 4,
            "strategies": ("flat",),
            "parts": ("curves",),
        },
    },
    ranks="many",
)
