"""Run a training in its folder: check memory, lock, load, build, resume, train, write results.

The folder holds `config.json`, `metrics.jsonl` (a line per step), `checkpoints/`, and at the end
the results that the caller writes. The same run started again continues from its newest usable
checkpoint, at any world size and under any strategy.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distlab.checkpoint.lock import hold
from distlab.comm import RankContext, collectives
from distlab.files import write_whole
from distlab.hardware import peak_of
from distlab.measure.memory import peak_memory
from distlab.model.config import ModelOptions
from distlab.parallel import Strategy
from distlab.theory.flops import mfu, step_flops
from distlab.train.config import DataConfig, TrainConfig
from distlab.train.data import load
from distlab.train.loop import Outcome, Trainer
from distlab.train.memory_budget import require, training_step
from distlab.train.metrics import Journal, Lines, StepMetrics

Results = Callable[[TrainConfig, Outcome, dict[str, Any], Lines], None]


def train(
    config: TrainConfig,
    data: DataConfig,
    context: RankContext,
    folder: Path,
    *,
    strategy: Strategy | None = None,
    write_results: Results = lambda config, outcome, metrics, lines: None,
    has_results: Callable[[int], bool] = lambda steps: False,
    log_every: int = 10,
    progress: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train, or continue, up to the last step or a signal. Call it on every rank.

    Args:
        config: options of the run.
        data: options that say which data to train on.
        context: context of this rank.
        folder: folder of the run. All ranks and machines see it, and no other run has it until the
            end.
        strategy: strategy in place of the one that `config` names, whose memory is then planned.
        write_results: function that is called on the main rank while the folder is still held, with
            the configuration as it was run, the outcome, its metrics, and the lines of
            `metrics.jsonl`. It is not called for a run that had its results.
        has_results: function that returns on the main rank whether the results after a number of
            steps were written, up to the last file.
        log_every: number of steps between progress lines.
        progress: function that is called with a line now and then.

    Raises:
        FolderIsHeld: another run writes to the folder.
        ValueError, OSError: as in `load` and `Trainer`.
        MemoryError: the model with its batch does not fit, see `distlab.train.memory_budget`.
    """
    if data.is_bytes and config.vocab is None:
        config = replace(config, vocab=256)  # the tokens of a text are its bytes
    require([training_step(config, context.world_size)], context.device, context)
    strategy_name = config.strategy if strategy is None else strategy.name
    journal: Journal | None = None

    def report(step: StepMetrics) -> None:
        """Write a line of the journal, on the main rank."""
        if journal is None:
            return
        rates = speed(config, config.batch, context, step.step_ms)
        more = {
            "loss_hex": step.loss.hex(),  # exact, so that two runs can be compared to the bit
            "strategy": strategy_name,
            "ranks": context.world_size,
        }
        journal.write(asdict(step) | rates | more)
        if step.step % log_every == 0 or step.step == config.steps:
            mfu_pct = rates["mfu_pct"]
            shown = "" if mfu_pct is None else f"  MFU {mfu_pct:.1f} %"
            progress(
                f"step {step.step}/{config.steps}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
                f"{rates['tokens_per_s']:,.0f} tokens/s{shown}"
            )

    with hold(folder, context, progress) as lock:
        # Load.
        training, validation, identity = load(data, config, context)

        # Build.
        trainer = Trainer(
            config,
            context,
            strategy=strategy,
            train=training,
            validate=validation,
            data_identity=identity,
            folder=folder / "checkpoints",
            lock=lock,
            report=report,
            progress=progress,
        )
        if trainer.resume():
            progress(f"resumed from step {trainer.step}")
        first = trainer.step
        is_complete = first >= config.steps
        if is_complete and _main_has_results(has_results, first, context):
            progress(
                f"this run is complete: {first} of {config.steps} steps done ({folder}). More "
                "--steps continue it; another --name, or --fresh, begins a new one"
            )
            return Outcome(first, first, None, [])

        # Train and evaluate.
        if context.is_main:
            written = asdict(config) | {"strategy": strategy_name}
            write_whole(folder / "config.json", json.dumps(written, indent=2) + "\n")
            # Steps are counted from 1 there, and the checkpoint has done `first` of them.
            journal = Journal(folder / "metrics.jsonl", first + 1)
        with peak_memory(context.device) as memory:
            if is_complete:  # the run died between its last checkpoint and its results
                progress(f"step {first} is the last and is done, but has no record: writing it")
                outcome = Outcome(first, first, None, [(first, trainer.validation_loss())])
            else:
                outcome = trainer.run()

        # Save the results.
        if journal is not None:
            journal.close()
            if lock is not None:
                # Another process may have taken a lock that seemed dead. Its results must not be
                # overwritten.
                lock.check()
            metrics = metrics_of(config, context, outcome, journal.lines)
            metrics["peak_alloc_bytes"] = None if is_complete else memory.peak_alloc_bytes
            metrics["checkpoint_host_bytes"] = trainer.checkpoints.host_bytes
            write_results(config, outcome, metrics, journal.lines)
        return outcome


def _main_has_results(has_results: Callable[[int], bool], steps: int, context: RankContext) -> bool:
    """Return on every rank what `has_results` returns on the main rank."""
    answer = context.is_main and has_results(steps)
    return collectives.gather_objects(answer, context.group)[0]


def metrics_of(
    config: TrainConfig, context: RankContext, outcome: Outcome, lines: Lines
) -> dict[str, Any]:
    """Return the results in numbers.

    Times are those of this process's steps, or of all steps if it made none.
    """
    all_timed = [line for line in lines if "step_ms" in line]
    # Steps before a resume may be of other ranks or another strategy.
    timed = [line for line in all_timed if line["step"] > outcome.first_step]
    if not timed:
        timed = all_timed
    # The median, because the first steps also compile and allocate.
    step_ms = statistics.median(line["step_ms"] for line in timed) if timed else None
    rates = speed(config, config.batch, context, step_ms) if step_ms else {}
    final_loss = None
    # A journal that ends earlier has lost its last line, and an older loss is not the final one.
    if lines and lines[-1]["step"] == outcome.last_step:
        final_loss = lines[-1]["loss"]
    return {
        "steps": outcome.last_step,
        "final_loss": final_loss,
        "validation_loss": outcome.validation[-1][1] if outcome.validation else None,
        "step_p50_ms": step_ms,
        "tokens_per_s": rates.get("tokens_per_s"),
        "mfu_pct": rates.get("mfu_pct"),
    }


def speed(
    config: ModelOptions, batch: int, context: RankContext, step_ms: float
) -> dict[str, float | None]:
    """Return `tokens_per_s` of all ranks and `mfu_pct` for a step of `batch` sequences.

    `mfu_pct` is None if the device is not known.
    """
    model = config.model()
    peak = peak_of(context.device, config.dtype)
    flops_per_rank = step_flops(**model.sizes(batch)) / context.world_size
    share = mfu(flops_per_rank, step_ms / 1e3, peak)
    return {
        "tokens_per_s": 1e3 * batch * model.context_length / step_ms,
        "mfu_pct": None if share is None else 100 * share,
    }
