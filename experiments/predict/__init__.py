"""What will a run take: steps of ddp_bench, and published ones?

    distlab run predict                                      # published runs
    distlab run predict --case docs/learn/case_example.json  # a run of your own
    distlab run predict --preset ddp_bench                   # steps of ddp_bench on two H200s

Each published run says where the figure comes from, what is known and what was assumed. No constant
is fitted to a published figure: constants come from this lab's one-host records and from
datasheets. A case file is described in docs/learn/scale.md, an example is
docs/learn/case_example.json.

Steps of ddp_bench are simulated: each strategy's own code on fake tensors. Five constants of the
machine come from one record of ddp_bench (its local, naive, flat and overlap rows), and the memory
bandwidth of operators from `local` of another (see `distlab.simulate.calibrate`). Afterwards they
are compared with measurements:

    distlab run predict --calibrate records/ddp_bench/h200x2-xl-batch8.json --models xl:2 xl:8
    distlab run predict --predictions records/predict/cpu-h200.json \\
        --compare records/ddp_bench/h200x[24]-*-batch[28].json
"""

import argparse
from dataclasses import dataclass
from typing import Any

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Records,
    Run,
    View,
    headline_from,
    option,
)
from distlab.model.config import PRESETS as MODELS
from distlab.report import gib_column, read_json, reading, sparse_column, text_column
from distlab.simulate.case import read_case

from .published import ROOT, add, add_published, findings
from .steps import COMPARISON, ROWS, add_steps, compare

RECORDS = ROOT / "records"


def _case(text: str) -> tuple[str, int]:
    """Parse PRESET:BATCH."""
    size, _, batch = text.partition(":")
    # A batch of 0 is refused here, where the message can name the form.
    if not batch.isdigit() or size not in MODELS or int(batch) < 1:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(
            f"{text!r}: give PRESET:BATCH, such as xl:8, with a preset of {known}"
        )
    return size, int(batch)


@dataclass(frozen=True)
class PredictConfig(Options):
    """Runs to predict, or a file of predictions, and the records to compare them with."""

    case: tuple[str, ...] = option(
        (), "files of runs to predict instead of the published ones", metavar="FILE"
    )
    calibrate: str | None = option(
        None, "record of ddp_bench on the machine, with local, naive, flat and overlap"
    )
    models: tuple[tuple[str, int], ...] = option(
        (), "model and sequences per rank", kind=_case, metavar="PRESET:BATCH"
    )
    ranks: tuple[int, ...] = option((2, 4), "world sizes", minimum=2)
    rows: tuple[str, ...] = option(tuple(ROWS), "rows of ddp_bench", choices=tuple(ROWS))
    memory: str | None = option(
        None, "record with local of a model that does less arithmetic per byte"
    )
    predictions: str | None = option(None, "file of earlier predictions, in place of new ones")
    compare: tuple[str, ...] = option((), "records of ddp_bench to compare with", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without these options the run predicts published figures, which need none.
        of_steps = any((self.calibrate, self.models, self.predictions, self.compare))
        compares = self.compare and self.predictions
        predicts = self.calibrate and self.models
        if of_steps and not compares and not predicts:
            raise ValueError("give --calibrate and --models, or --compare and --predictions")

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for options of one kind of prediction given with another kind."""
        of_steps = ("calibrate", "models", "ranks", "rows", "memory")
        # An idle option would change nothing, and its user should know.
        if not {"calibrate", "models", "predictions", "case"} & given.keys():
            for name in of_steps:
                if name in given:
                    raise ValueError(
                        f"--{name} has no effect without --calibrate and --models: give these, or "
                        "leave it out"
                    )
        for kind, idle in (("predictions", ("case", *of_steps)), ("case", of_steps)):
            useless = [name for name in idle if name in given]
            if kind in given and useless:
                raise ValueError(
                    f"--{useless[0]} has no effect with --{kind}: leave one of them out"
                )


def measure(config: PredictConfig, context: RankContext, run: Run) -> None:
    """Add a row per published run, or per case, number of ranks and row of ddp_bench.

    The comparison with measurements has a part of its own.
    """
    if config.predictions:
        run.records[:] = read_json(config.predictions)
    elif config.models:
        add_steps(config, run)
    elif config.case:
        for path in config.case:
            add(run, read_case(path))
    else:
        add_published(run)
    if config.compare:
        measured: list[Record] = []
        for path in config.compare:
            measured += read_json(path)
        # An error in the comparison names the files that were read.
        with reading(list(filter(None, [config.predictions, *config.compare]))):
            run.part(COMPARISON).records[:] = compare(run.records, measured)


def sizes(records: Records) -> str:
    """Return the models of some rows."""
    return ", ".join(dict.fromkeys(record.config["size"] for record in records))


def gpus_of(record: Record) -> int:
    """Return the number of GPUs of a row of ddp_bench, which calls them ranks."""
    return record.config["world_size"]


def worst_step_error(records: Records) -> float:
    """Return the largest error of a step, in %."""
    return max(abs(record.metrics["step_error_pct"]) for record in records)


of_published = headline_from(
    "{count} runs, predicted from datasheets and this lab's one-host records", count=len
)
of_steps = headline_from(
    "Predicted: {sizes}, context {context}, {dtype}; constants from {calibrated_on}", sizes=sizes
)


def headline(records: Records) -> str:
    """Return the headline of steps of ddp_bench, or of published runs."""
    # Steps of ddp_bench have a size, and published runs a model of their own.
    return of_steps(records) if "size" in records[0].config else of_published(records)


def predicted_column(name: str, title: str, form: str) -> Column:
    """Return a column that only steps of ddp_bench, or only published runs, have."""
    return sparse_column(f"metrics.{name}", title, form, optional=True)


FIT = (
    "Each strategy's own code runs on fake tensors; five constants of the machine, fitted to one "
    "record of ddp_bench, put times to what it did. Peaks are the closed form of "
    "distlab.theory.memory."
)
CASE = (
    text_column("config.size", "model", optional=True),
    Column("config.batch", "batch", optional=True),
)
VIEW = View(
    columns=[
        *CASE,
        Column("config.gpus", "GPUs", derived=gpus_of),
        Column("variant", "run"),
        sparse_column("metrics.predicted_step_ms", "step ms", ",.0f"),
        predicted_column("published_step_ms", "published step ms", ",.0f"),
        predicted_column("step_ms_error_pct", "step error %", "+.1f"),
        predicted_column("predicted_tokens_per_s_per_gpu", "tokens/s/GPU", ",.0f"),
        predicted_column("published_tokens_per_s_per_gpu", "published tokens/s/GPU", ",.0f"),
        predicted_column("predicted_memory_gib", "memory GiB", ",.1f"),
        predicted_column("published_memory_gib", "published memory GiB", ",.1f"),
        predicted_column("memory_gib_error_pct", "memory error %", "+.1f"),
        predicted_column("predicted_states_gb", "states GB", ",.1f"),
        predicted_column("published_states_gb", "published states GB", ",.1f"),
        text_column("config.memory_is", "memory is", optional=True),
        gib_column(
            "metrics.predicted_reserved_bytes", "reserved GiB", ",.1f", missing="", optional=True
        ),
        predicted_column("predicted_overhead_ms", "overhead ms", ",.1f"),
        predicted_column("predicted_comm_ms", "comm ms", ",.1f"),
        predicted_column("predicted_overlap_pct", "overlap %", ".0f"),
        predicted_column("predicted_collectives_per_step", "calls", "d"),
        predicted_column("predicted_mfu_pct", "MFU %", ".0f"),
        Column(
            "metrics.predicted_comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6, optional=True
        ),
        gib_column("metrics.predicted_peak_alloc_bytes", "peak GiB", ".1f", optional=True),
        text_column("config.source", "source", optional=True),
        text_column("config.known", "known", optional=True),
        text_column("config.assumed", "assumed", optional=True),
    ],
    headline=headline,
    terminal=(
        "size",
        "batch",
        "gpus",
        "predicted_step_ms",
        "step_ms_error_pct",
        "predicted_tokens_per_s_per_gpu",
        "predicted_memory_gib",
        "memory_gib_error_pct",
        "predicted_reserved_bytes",
        "predicted_overhead_ms",
        "predicted_collectives_per_step",
        "predicted_comm_bytes_per_step",
        "predicted_peak_alloc_bytes",
    ),
    findings=findings,
    reading="A row per run. Of published ones `allocated` is the peak of tensors; `reserved` what "
    "torch's allocator holds, the larger. Errors are predicted over published. Steps of ddp_bench "
    "are written down before the measurement; --compare adds the measured values.",
    prediction="Published runs: operators, collectives and memory in closed form; constants from "
    "one-host records and datasheets. Steps: " + FIT,
    noise="Nothing was measured here. Published rows of one configuration differ by up to 9 % "
    "among themselves.",
)
COMPARISON_VIEW = View(
    name=COMPARISON,
    question="How good were the predictions?",
    columns=[
        *CASE,
        Column("config.world_size", "ranks"),
        Column("variant", "strategy"),
        Column("metrics.predicted_step_ms", "predicted step ms", ".1f"),
        Column("metrics.measured_step_p50_ms", "measured step ms", ".1f"),
        Column("metrics.step_error_pct", "error %", "+.1f"),
        Column("metrics.predicted_overhead_ms", "predicted overhead ms", ".1f"),
        Column("metrics.measured_overhead_ms", "measured overhead ms", ".1f"),
        gib_column("metrics.predicted_peak_alloc_bytes", "predicted peak GiB", ".1f"),
        gib_column("metrics.measured_peak_alloc_bytes", "measured peak GiB", ".1f"),
        text_column("metrics.volume_as_predicted", "calls and bytes as predicted"),
    ],
    headline=headline_from(
        "Predicted and measured: {sizes} on {device_name}; largest error of a step {worst:.1f} %; "
        "constants from {calibrated_on}",
        sizes=sizes,
        worst=worst_step_error,
    ),
    terminal=(
        "size",
        "batch",
        "world_size",
        "variant",
        "predicted_step_ms",
        "measured_step_p50_ms",
        "step_error_pct",
    ),
    reading="The record that the constants were fitted to is among the rows, so its own errors say "
    "little; all other rows were predicted without having been measured. Calls and bytes must "
    "agree exactly.",
    prediction=FIT,
    noise="The noise of the measured rows is in their own records.",
)

EXPERIMENT = Experiment(
    PredictConfig,
    measure,
    VIEW,
    presets={
        "published": {},
        "ddp_bench": {
            "calibrate": str(RECORDS / "ddp_bench" / "h200x2-xl-batch8.json"),
            "models": (("medium", 8),),
            "ranks": (2,),
            "rows": ("local", "flat", "bucketed-100", "fsdp"),
        },
        "smoke": {
            "predictions": str(RECORDS / "predict" / "cpu-h200.json"),
            "compare": (str(RECORDS / "ddp_bench" / "h200x2-xl-batch2.json"),),
        },
    },
    ranks="none",
    parts=(COMPARISON_VIEW,),
)
