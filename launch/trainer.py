"""Train a language model under any strategy; given again, the same command continues the run.

    distlab train                                        synthetic tokens
    distlab train --data my.txt --size tiny --steps 300  the bytes of a text
    distlab train --name my-run --strategy zero1         continue that run
    distlab train --wrap my_code:parallelize             under your wrapper
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 launch/train.py

Without options a run has all GPUs, or two CPU ranks. Any strategy continues a run of the same name.
`distlab sample FOLDER` continues a text by a trained model. A wrapper of your own is explained in
docs/start/your_code.md.

Every run writes its steps, its checkpoints and a page into one folder.
"""

import argparse
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distlab.bench.task import check_name
from distlab.bench.wrappers import trained_by
from distlab.comm import RankContext
from distlab.comm.rank_process import Progress
from distlab.experiment import FrameOptions, RankOptions, headline_from, run_folder
from distlab.options import config_from, given, option, parser_of
from distlab.report import (
    Column,
    Metrics,
    Panel,
    Record,
    Records,
    Series,
    View,
    commit,
    environment,
    gib_column,
    json_line,
    lines,
    read_json,
    write,
)
from distlab.report.terminal import stdout_is_file
from distlab.runs import check_names
from distlab.simulate.plan import plan_steps
from distlab.train import run
from distlab.train.config import DataConfig, TrainConfig
from distlab.train.loop import Outcome
from distlab.train.memory_budget import require, training_step
from distlab.train.metrics import Lines
from launch.ranks import run_on_ranks
from launch.runs import refresh_index

NAME = "train"
# The preset must end within seconds on a CPU, where a first user tries it.
QUICK = {"size": "tiny", "steps": 10}


@dataclass(frozen=True)
class RunOptions(FrameOptions):
    """Options of the command other than those of model and data.

    The default name of a run is DATA-SIZE-STRATEGY.
    """

    wrap: str | None = option(
        None,
        "your own wrapper in place of --strategy, my_code:parallelize; it leaves whole parameters "
        "on every rank",
    )
    log_every: int = option(10, "steps between progress lines", minimum=1)
    quick: bool = option(False, "train ten steps of the tiny preset")
    plan: bool = option(False, "print the memory and time of a step, and train nothing")


OPTIONS = (TrainConfig, DataConfig, RunOptions, RankOptions)


def parser() -> argparse.ArgumentParser:
    return parser_of("distlab train", __doc__, *OPTIONS)


def train(context: RankContext, config: TrainConfig, data: DataConfig, args: RunOptions) -> int:
    progress = Progress(context).keep
    if args.plan:
        step = training_step(config, context.world_size)
        (plan,) = plan_steps([step], context, config.accumulate)
        if context.is_main:
            print(plan, flush=True)
        # After the plan is printed, so that one that does not fit is also seen.
        require([step], context.device, context)
        return 0
    name = run_name(args, data, config)
    strategy = None if args.wrap is None else trained_by(args.wrap, config.accumulate)

    def write_results(
        config: TrainConfig, outcome: Outcome, metrics: Metrics, journal: Lines
    ) -> None:
        # Metrics of runs are compared by these keys, so they name how many ranks trained and over
        # what.
        shared = asdict(config) | {"world_size": context.world_size, "backend": context.backend}
        # The `config.strategy` of a run with a wrapper is the stand-in `naive` that `main` sets.
        shared["strategy"] = args.wrap or config.strategy
        shared["trained_by"] = who_trained(journal)
        if data.is_bytes and metrics["validation_loss"] is not None:
            # nats to bits. A token is a byte here.
            metrics["validation_bits_per_byte"] = metrics["validation_loss"] / math.log(2)
        record = Record(
            NAME,
            shared["strategy"],
            shared,
            metrics,
            environment(context.device),
            commit(args.commit),
        )
        series = [
            Series(
                "training",
                [line["step"] for line in journal],
                [line["loss"] for line in journal],
                line="-",
            )
        ]
        if outcome.validation:
            series.append(
                Series("validation", *zip(*outcome.validation, strict=True), line="-", marked=True)
            )
        panel = Panel("", "step", "loss (nats per token)", series, log_x=None, from_zero=False)
        # The picture is drawn before `write`, so that the page, which is written last, can show it.
        lines(folder / "loss.png", [panel], title=f"{config.size}, {shared['trained_by']}")
        write(VIEW, [record], folder)
        refresh_index(args.out)
        # A run that a signal stopped continues later, and reports its results then.
        if outcome.stopped_by is None:
            for step, loss in outcome.validation:
                bits = f" ({loss / math.log(2):.2f} bits per byte)" if data.is_bytes else ""
                progress(f"validation loss after step {step}: {loss:.4f} nats per token{bits}")
            progress(
                f"done: {outcome.last_step} steps; checkpoints, metrics and loss.png in {folder}"
            )

    # With --fresh an older run of this name is moved away here. Otherwise `run.train` continues it.
    with run_folder(context, args.out, NAME, name, fresh=args.fresh) as folder:
        outcome = run.train(
            config,
            data,
            context,
            folder,
            strategy=strategy,
            write_results=write_results,
            has_results=lambda steps: has_record(folder, steps),
            log_every=args.log_every,
            progress=progress,
        )
    if outcome.stopped_by is None:
        # A terminal shows lines of progress. A program gets one line of JSON, also of a run that
        # was complete before.
        if context.is_main and (args.json or stdout_is_file()):
            print(json_line(NAME, read_json(folder / "records.json"), folder), flush=True)
        return 0
    progress(
        f"stopped by signal {outcome.stopped_by} after step {outcome.last_step} of {config.steps}; "
        f"a checkpoint is written ({folder}). The same command continues the run"
    )
    # Shells report a process that signal n ended as 128 + n.
    return 128 + outcome.stopped_by


def who_trained(journal: Lines) -> str:
    """List strategy, ranks and last step: `bucketed × 2 to step 50, fsdp × 4 to step 90`."""
    # Only neighbouring lines are joined: a strategy that comes back later is listed twice.
    by = itertools.groupby(
        journal, lambda line: f"{line.get('strategy', '?')} × {line.get('ranks', '?')}"
    )
    return ", ".join(f"{who} to step {[*lines][-1]['step']}" for who, lines in by)


def has_record(folder: Path, steps: int) -> bool:
    """Return whether the results after this number of steps were written, up to the last file."""
    records, page = folder / "records.json", folder / "report.html"
    try:
        same = read_json(records)[0].metrics["steps"] == steps
        # The page is written last. An older one is of a run before, whose successor died in
        # between.
        return same and page.stat().st_mtime_ns >= records.stat().st_mtime_ns
    # A file that is missing or was cut short means that the results must be written again.
    except (OSError, ValueError, LookupError):
        return False


def what_it_reached(records: Records) -> list[str]:
    """List the losses of the last step and of validation."""
    metrics = records[0].metrics
    held_out = metrics.get("validation_loss")
    validation = "" if held_out is None else f", that of the held-out data {held_out:.2f}"
    return [
        f"After {metrics['steps']:,} steps the loss is {metrics['final_loss']:.2f} nats per "
        f"token{validation}."
    ]


VIEW = View(
    [
        Column("variant", "strategy"),
        Column("metrics.steps", "steps", ",d"),
        Column(
            "metrics.final_loss", "loss", ".4f", about="nats per token of the last step's batch"
        ),
        Column(
            "metrics.validation_loss",
            "validation loss",
            ".4f",
            about="nats per token of the held-out data",
        ),
        Column(
            "metrics.validation_bits_per_byte",
            "bits per byte",
            ".3f",
            optional=True,
            about="the same in bits",
        ),
        Column(
            "metrics.step_p50_ms",
            "step p50 ms",
            ".1f",
            about="median time of a step, data and logging included",
        ),
        Column("metrics.tokens_per_s", "tokens/s", ",.0f", about="of all ranks"),
        Column(
            "metrics.mfu_pct",
            "MFU %",
            ".1f",
            optional=True,
            about="FLOPs of the model over the device's peak",
        ),
        gib_column(
            "metrics.peak_alloc_bytes", "peak GiB", ".1f", optional=True, about="most allocated"
        ),
    ],
    headline_from(
        "{size}, {steps} steps of {batch} sequences ({trained_by}), {dtype}, {world_size} × "
        "{device_name} ({backend}), "
        "torch {torch}",
        trained_by=lambda records: records[0].config.get("trained_by", records[0].variant),
    ),
    name=NAME,
    question="How does this model train?",
    reading="The loss of every step is in metrics.jsonl, decimal and in hex; two runs of the same "
    "command, one of them killed and resumed, have the same hex.",
    findings=what_it_reached,
    noise="A single run: the loss of one step varies with its batch. Compare curves, not last "
    "values.",
)


def run_name(options: RunOptions, data: DataConfig, config: TrainConfig) -> str:
    """Return the name of a run's folder. Raise ValueError for one outside the folder of results."""
    # The name becomes a folder, so characters with a meaning for shells or paths are replaced.
    stem = re.sub(r"[^\w.-]+", "-", Path(data.data).stem) if data.data else "synthetic"
    strategy = config.strategy if options.wrap is None else options.wrap.replace(":", "-")
    name = f"{stem}-{config.size}-{strategy}" if options.name is None else options.name
    check_names("outputs", name)
    return name


def refuse_with_wrap(wrap: str, given_options: Mapping[str, object]) -> None:
    """Raise ValueError for a wrapper's name of another form, or an option that it leaves idle."""
    check_name(wrap, "--wrap")
    # These options choose or shape a strategy of the lab, and the wrapper takes its place.
    for name in ("strategy", "bucket_size_mb", "shard_size", "reshard", "layout", "stages"):
        if name in given_options:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--wrap {wrap}: your wrapper decides what each rank holds and sends, so leave "
                f"--{flag} out"
            )


def main(argv: list[str]) -> int:
    """Run `distlab train` and return its exit code."""
    args = parser().parse_args(argv)
    # The parser of one command fills four classes. `TrainConfig` follows, because its defaults
    # depend on --quick.
    data, mine, ranks = (config_from(options, args) for options in OPTIONS[1:])
    TrainConfig.check_given(given(TrainConfig, args))
    config = config_from(TrainConfig, args, QUICK if mine.quick else None)
    if mine.wrap is not None:
        refuse_with_wrap(mine.wrap, given(TrainConfig, args))
        # For the prediction of memory. A rank of it has all parameters and gradients as well.
        config = replace(config, strategy="naive")
    run_name(mine, data, config)  # refused before ranks are started
    # A missing text is reported here by one process, not by each rank after its start.
    data.check_files()
    return run_on_ranks(
        lambda context: train(context, config, data, mine), ["train", *argv], ranks, None, "train"
    )
