"""Which step times and how much memory will ddp_bench measure?

    distlab run predict_steps --quick
    distlab run predict_steps --calibrate records/ddp_bench/h200x2-xl-batch8.json --cases xl:2 xl:8

and afterwards, beside what was measured:

    distlab run predict_steps --predictions records/predict_steps/cpu-h200.json \
        --compare records/ddp_bench/h200x[24]-*-batch[28].json

Five constants of the machine come from one record of ddp_bench (its local, naive, flat and overlap rows), and the
memory bandwidth of operators from `local` of another (see `distlab.simulate.calibrate`); all other numbers are
predictions from the simulated steps.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Record,
    Run,
    View,
    headline_from,
    option,
)
from distlab.model import ModelConfig, preset
from distlab.model.config import PRESETS as MODELS
from distlab.model.config import ModelOptions
from distlab.report import is_number, read_json, reading
from distlab.simulate import Machine, SimulatedStep, replay
from distlab.simulate.calibrate import NEEDED, calibrate, measured_links
from distlab.simulate.step import simulate_training
from distlab.train.memory_budget import PlannedStep

ROOT = Path(__file__).resolve().parents[1]
# Name of the row in ddp_bench → (strategy, bucket size in MiB).
ROWS = {
    "local": ("local", None),
    "naive": ("naive", None),
    "flat": ("flat", None),
    "overlap": ("overlap", None),
    "bucketed-25": ("bucketed", 25.0),
    "bucketed-100": ("bucketed", 100.0),
    "bucketed-400": ("bucketed", 400.0),
    "zero1-25": ("zero1", 25.0),
    "zero1-100": ("zero1", 100.0),
    "zero1-400": ("zero1", 400.0),
    "fsdp": ("fsdp", None),
}


def _case(text: str) -> tuple[str, int]:
    size, _, batch = text.partition(":")
    if not batch.isdigit() or size not in MODELS or int(batch) < 1:
        known = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(f"{text!r}: give PRESET:BATCH, such as xl:8, with a preset of {known}")
    return size, int(batch)


@dataclass(frozen=True)
class PredictConfig(Options):
    """What to predict, or where that stands, and what to compare it with."""

    calibrate: str | None = option(None, "a record of ddp_bench on the machine, with local, naive, flat and overlap")
    cases: tuple[tuple[str, int], ...] = option((), "model and sequences per rank", kind=_case, metavar="PRESET:BATCH")
    ranks: tuple[int, ...] = option((2, 4), "world sizes", least=2)
    rows: tuple[str, ...] = option(tuple(ROWS), "of ddp_bench", choices=tuple(ROWS))
    collectives: tuple[str, ...] = option((), "records of allreduce_sweep, whose fits then stand for the link")
    memory: str | None = option(None, "a record with local of a model that does less arithmetic per byte")
    predictions: str | None = option(None, "what was predicted before, instead of predicting")
    compare: tuple[str, ...] = option((), "records of ddp_bench to compare with", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.compare and self.predictions) and not (self.calibrate and self.cases):
            raise ValueError("give --calibrate and --cases, or --compare and --predictions")


def measure(config: PredictConfig, context: RankContext, run: Run) -> None:
    """One row per case, number of ranks and row of ddp_bench; what was measured beside them, in a part of its own."""
    if config.predictions:
        run.records[:] = read_json(config.predictions)
    else:
        predict_all(config, run)
    if config.compare:
        measured = [record for path in config.compare for record in read_json(path)]
        with reading(list(filter(None, [config.predictions, *config.compare]))):
            run.part(COMPARISON).records[:] = compare(run.records, measured)


def predict_all(config: PredictConfig, run: Run) -> None:
    """A row per case, number of ranks and row of ddp_bench."""
    run.progress(f"calibrating on {config.calibrate}")
    files = [config.calibrate] + ([config.memory] if config.memory else [])
    with reading(files):
        calibration, settings = fit(config.calibrate, config.collectives, config.memory)
    calibrated_on = " and ".join(file.removeprefix(f"{ROOT}/") for file in files)
    own = {"calibrated_on": calibrated_on, "dtype": settings["dtype"]} | asdict(calibration)
    if config.collectives:  # measured fits are in the records that they came from
        own["network"] = "measured collectives"
    for size, batch in config.cases:
        model = preset(size, context_length=settings["context"])
        own |= {"size": size, "batch": batch, "context": model.context_length}
        for ranks in config.ranks:
            for row in config.rows:
                run.progress(f"{size}:{batch} on {ranks} ranks: {row}")
                metrics = predict(model, row, batch, ranks, settings["dtype"], calibration)
                run.add(row, metrics, world_size=ranks, **own)


def fit(path: str, collectives: Sequence[str] = (), memory: str | None = None) -> tuple[Machine, dict]:
    """The machine's constants from a record, and its settings; `collectives` and `memory` as in `PredictConfig`.

    Raises:
        ValueError, OSError: the record cannot be read or lacks a row.
    """
    rows = {record.variant: record for record in read_json(path)}
    settings = next(iter(rows.values())).config
    steps = {name: _simulated(settings, name) for name in NEEDED}
    second = None
    if memory is not None:
        local = next((record for record in read_json(memory) if record.variant == "local"), None)
        if local is None:
            raise ValueError(f"{memory} has no row of local, from which to fit the memory's bandwidth")
        second = _simulated(local.config, "local"), local.metrics["forward_backward_p50_ms"] / 1e3
    calibration = calibrate({name: record.metrics for name, record in rows.items()}, steps, second)
    if collectives:
        known = [record for file in collectives for record in read_json(file)]
        network = measured_links(known, rows["local"].environment["device_name"])
        calibration = replace(calibration, network=network)
    return calibration, settings


def _simulated(settings: dict, strategy: str) -> SimulatedStep:
    """The step that ddp_bench measured with these settings."""
    options = ModelOptions.of(settings)
    ranks, keeps = settings["world_size"], options.checkpointing
    if options.compile != "off" or keeps == "auto":
        raise ValueError(
            f"a record of compile={options.compile!r}, checkpointing={keeps!r} cannot be simulated: give one of an "
            "eager model that says what it recomputes"
        )
    return simulate_training(
        options.model(), strategy, batch=settings["batch"], world_size=ranks, dtype=options.dtype, checkpointing=keeps
    )


def predict(
    model: ModelConfig, row: str, batch: int, ranks: int, dtype: str, calibration: Machine
) -> dict[str, float | int | str | None]:
    """The metrics of one row of ddp_bench."""
    strategy, bucket_size_mb = ROWS[row]
    step = simulate_training(
        model, strategy, batch=batch, world_size=ranks, dtype=dtype, bucket_size_mb=bucket_size_mb or 25.0
    )
    line = replay(step, calibration)
    memory = PlannedStep(model, batch, strategy, dtype).memory(ranks)
    return {
        "predicted_step_ms": line.step_ms,
        "predicted_forward_backward_ms": line.step_ms - line.phases["optimizer"],
        "predicted_optimizer_ms": line.phases["optimizer"],
        "predicted_overhead_ms": line.overhead_ms,
        "predicted_comm_ms": line.comm_ms,
        "predicted_overlap_pct": line.overlap_pct,
        "predicted_tokens_per_s": batch * model.context_length * ranks / line.step_ms * 1e3,
        "predicted_collectives_per_step": len(step.calls),
        "predicted_comm_bytes_per_step": step.comm_bytes,
        "predicted_peak_alloc_bytes": memory.peak.total,
        "predicted_peak_phase": memory.peak_phase,
        "simulated_peak_bytes": step.peak.total,
    }


COMPARISON = "prediction"
CASE = ("size", "batch", "context", "world_size", "dtype")
COMPARED = (
    "step_p20_ms",
    "step_p50_ms",
    "step_p80_ms",
    "overhead_ms",
    "peak_alloc_bytes",
    "collectives_per_step",
    "comm_bytes_per_step",
)


def compare(predictions: Sequence[Record], measured: Sequence[Record]) -> list[Record]:
    """A record for every measured row of ddp_bench that was predicted: both figures and the error in %.

    Raises:
        ValueError: nothing of what was measured had been predicted.
    """
    known = {(*(r.config[name] for name in CASE), r.variant): r for r in predictions}
    records = []
    for row in measured:
        case, bucket = [row.config.get(name) for name in CASE], row.config.get("bucket_size_mb")
        name = row.variant if bucket is None or "-" in row.variant else f"{row.variant}-{bucket:g}"
        predicted, local = (known.get((*case, variant)) for variant in (name, "local"))
        if predicted is None or not is_number(row.metrics.get("step_p50_ms")):
            continue
        if row.config.get("num_parameters") != preset(row.config["size"]).num_parameters:  # of other dimensions
            continue
        metrics = {name: value for name, value in predicted.metrics.items() if name.startswith("predicted_")}
        if local is not None:  # the bench's overhead is what a step takes longer than local's
            without = local.metrics["predicted_step_ms"]
            metrics["predicted_overhead_ms"] = metrics["predicted_step_ms"] - without
        metrics |= {f"measured_{name}": row.metrics.get(name) for name in COMPARED}
        step, peak = row.metrics["step_p50_ms"], row.metrics.get("peak_alloc_bytes")
        metrics["step_error_pct"] = 100 * (metrics["predicted_step_ms"] / step - 1)
        metrics["peak_error_pct"] = 100 * (metrics["predicted_peak_alloc_bytes"] / peak - 1) if peak else None
        volume = ("collectives_per_step", "comm_bytes_per_step")
        metrics["volume_as_predicted"] = all(metrics[f"predicted_{n}"] == row.metrics.get(n) for n in volume)
        config = {name: row.config[name] for name in CASE}
        config |= {"predicted_at": predicted.commit, "measured_at": row.commit}
        config["calibrated_on"] = predicted.config["calibrated_on"]
        records.append(Record(COMPARISON, name, config, metrics, row.environment, row.commit))
    if not records:
        raise ValueError(
            "none of the measured rows was predicted: compare the model, batch, context and ranks"
        )
    return records


comparison_headline = headline_from(
    "Predicted beside measured: {sizes} on {device_name}; largest error of a step {worst:.1f} %; constants from "
    "{calibrated_on}",
    sizes=lambda records: ", ".join(dict.fromkeys(record.config["size"] for record in records)),
    worst=lambda records: max(abs(record.metrics["step_error_pct"]) for record in records),
)


HOW = (
    "Each strategy's own code runs on fake tensors; five constants of the machine, fitted to one record of ddp_bench, "
    "put times to what it did. Peaks are the closed form of distlab.theory.memory."
)
STEP = (
    Column("config.size", "model", align="left"),
    Column("config.batch", "batch"),
    Column("config.world_size", "ranks"),
    Column("variant", "strategy"),
)
VIEW = View(
    columns=[
        *STEP,
        Column("metrics.predicted_step_ms", "step ms", ".1f"),
        Column("metrics.predicted_overhead_ms", "overhead ms", ".1f"),
        Column("metrics.predicted_comm_ms", "comm ms", ".1f"),
        Column("metrics.predicted_overlap_pct", "overlap %", ".0f"),
        Column("metrics.predicted_collectives_per_step", "calls", "d"),
        Column("metrics.predicted_comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6),
        Column("metrics.predicted_peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
    ],
    headline=headline_from(
        "Predicted: {sizes}, context {context}, {dtype}; constants from {calibrated_on}",
        sizes=lambda records: ", ".join(dict.fromkeys(record.config["size"] for record in records)),
    ),
    terminal=(
        *("size", "batch", "world_size", "variant", "predicted_step_ms", "predicted_overhead_ms"),
        *("predicted_collectives_per_step", "predicted_comm_bytes_per_step", "predicted_peak_alloc_bytes"),
    ),
    reading="Written down before the measurement; --compare adds the measured values.",
    prediction=HOW,
    noise="Nothing was measured here.",
)
COMPARISON_VIEW = View(
    name=COMPARISON,
    question="How good were the predictions?",
    columns=[
        *STEP,
        Column("metrics.predicted_step_ms", "predicted step ms", ".1f"),
        Column("metrics.measured_step_p50_ms", "measured p50", ".1f"),
        Column("metrics.step_error_pct", "error %", "+.1f"),
        Column("metrics.predicted_overhead_ms", "predicted overhead ms", ".1f"),
        Column("metrics.measured_overhead_ms", "measured", ".1f"),
        Column("metrics.predicted_peak_alloc_bytes", "predicted peak GiB", ".1f", scale=2**-30),
        Column("metrics.measured_peak_alloc_bytes", "measured", ".1f", scale=2**-30),
        Column("metrics.volume_as_predicted", "calls and bytes as predicted", align="left"),
    ],
    headline=comparison_headline,
    terminal=(
        *("size", "batch", "world_size", "variant"),
        *("predicted_step_ms", "measured_step_p50_ms", "step_error_pct"),
    ),
    reading="The record that the constants were fitted to is among the rows, so its own errors say little; all other "
    "rows were predicted without having been measured. Calls and bytes must agree exactly.",
    prediction=HOW,
    noise="The noise of the measured rows is in their own records.",
)

RECORDS = ROOT / "records"
EXPERIMENT = Experiment(
    PredictConfig, measure, VIEW,
    presets={
        "quick": {
            "calibrate": str(RECORDS / "ddp_bench" / "h200x2-xl-batch8.json"),
            "cases": (("medium", 8),),
            "ranks": (2,),
            "rows": ("local", "flat", "bucketed-100", "fsdp"),
        },
        "smoke": {
            "predictions": str(RECORDS / "predict_steps" / "cpu-h200.json"),
            "compare": (str(RECORDS / "ddp_bench" / "h200x2-xl-batch2.json"),),
        },
    },
    ranks="none",
    parts=(COMPARISON_VIEW,),
)
