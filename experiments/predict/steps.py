"""Step times and memory of `ddp_bench`, predicted by simulated steps and calibrated constants."""

from dataclasses import asdict
from typing import Any

from distlab.experiment import Record, Records, Run
from distlab.model import ModelConfig, preset
from distlab.model.config import ModelOptions
from distlab.report import is_number, read_json, reading
from distlab.simulate import Machine, SimulatedStep, replay
from distlab.simulate.calibrate import NEEDED, calibrate
from distlab.simulate.step import simulate_training
from distlab.train.memory_budget import PlannedStep

from .published import ROOT

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


def add_steps(config: Any, run: Run) -> None:
    """Add a row per case, number of ranks and row of ddp_bench, as in the options."""
    run.progress(f"calibrating on {config.calibrate}")
    # The files are named in the message of an error.
    files = [config.calibrate] + ([config.memory] if config.memory else [])
    with reading(files):
        calibration, settings = fit(config.calibrate, config.memory)
    calibrated_on = " and ".join(file.removeprefix(f"{ROOT}/") for file in files)
    own = {"calibrated_on": calibrated_on, "dtype": settings["dtype"]} | asdict(calibration)
    for size, batch in config.models:
        model = preset(size, context_length=settings["context"])
        own |= {"size": size, "batch": batch, "context": model.context_length}
        for ranks in config.ranks:
            for row in config.rows:
                run.progress(f"{size}:{batch} on {ranks} ranks: {row}")
                metrics = predict(model, row, batch, ranks, settings["dtype"], calibration)
                run.add(row, metrics, world_size=ranks, **own)


def fit(path: str, memory: str | None = None) -> tuple[Machine, dict]:
    """Return the machine's constants from a record, and the settings of that record.

    Args:
        path: record of ddp_bench.
        memory: record with local of another model, from which the memory's bandwidth comes.

    Raises:
        ValueError, OSError: the record cannot be read or lacks a row.
    """
    rows = {record.variant: record for record in read_json(path)}
    # All rows of a record have the same settings but for the strategy.
    settings = next(iter(rows.values())).config
    steps = {name: _simulated(settings, name) for name in NEEDED}
    second = None
    # A second model gives a second equation, for the bandwidth that the first cannot tell apart.
    if memory is not None:
        local = next((record for record in read_json(memory) if record.variant == "local"), None)
        if local is None:
            raise ValueError(
                f"{memory} has no row of local, from which to fit the memory's bandwidth"
            )
        second = _simulated(local.config, "local"), local.metrics["forward_backward_p50_ms"] / 1e3
    calibration = calibrate({name: record.metrics for name, record in rows.items()}, steps, second)
    return calibration, settings


def _simulated(settings: dict, strategy: str) -> SimulatedStep:
    """Simulate the step that ddp_bench measured with these settings."""
    options = ModelOptions.of(settings)
    ranks, keeps = settings["world_size"], options.checkpointing
    # The simulation runs eager code, and `auto` depends on the memory of the machine that measured.
    if options.compile != "off" or keeps == "auto":
        raise ValueError(
            f"a record of compile={options.compile!r}, checkpointing={keeps!r} cannot be "
            "simulated: give one of an eager model that says what it recomputes"
        )
    return simulate_training(
        options.model(),
        strategy,
        batch=settings["batch"],
        world_size=ranks,
        dtype=options.dtype,
        checkpointing=keeps,
    )


def predict(
    model: ModelConfig, row: str, batch: int, ranks: int, dtype: str, calibration: Machine
) -> dict[str, float | int | None]:
    """Return the predicted metrics of one row of ddp_bench."""
    strategy, bucket_size_mb = ROWS[row]
    step = simulate_training(
        model,
        strategy,
        batch=batch,
        world_size=ranks,
        dtype=dtype,
        # A strategy without buckets ignores the size, so any number does.
        bucket_size_mb=bucket_size_mb or 25.0,
    )
    line = replay(step, calibration)
    memory = PlannedStep(model, batch, strategy, dtype).memory(ranks)
    return {
        "predicted_step_ms": line.step_ms,
        "predicted_overhead_ms": line.overhead_ms,
        "predicted_comm_ms": line.comm_ms,
        "predicted_overlap_pct": line.overlap_pct,
        "predicted_collectives_per_step": len(step.calls),
        "predicted_comm_bytes_per_step": step.comm_bytes,
        "predicted_peak_alloc_bytes": memory.peak.total,
    }


def _case_of(record: Record) -> tuple[Any, ...]:
    """Return the settings of a row, without its strategy."""
    return tuple(record.config.get(name) for name in CASE)


COMPARISON = "prediction"
CASE = ("size", "batch", "context", "world_size", "dtype")
COMPARED = (
    "step_p50_ms",
    "overhead_ms",
    "peak_alloc_bytes",
    "collectives_per_step",
    "comm_bytes_per_step",
)


def compare(predictions: Records, measured: Records) -> list[Record]:
    """Return a record for every measured and predicted row: both figures and the error in %.

    Raises:
        ValueError: nothing of what was measured had been predicted.
    """
    # A prediction is found by its case and by the name of its row.
    known = {(*_case_of(record), record.variant): record for record in predictions}
    records = []
    for row in measured:
        name = row.variant
        bucket = row.config.get("bucket_size_mb")
        # A run with one bucket size has rows without it in their names. Predictions name it always.
        if bucket is not None and "-" not in name:
            name = f"{name}-{bucket:g}"
        predicted = known.get((*_case_of(row), name))
        local = known.get((*_case_of(row), "local"))
        # Rows that were not predicted, or that ran out of memory, are not compared.
        if predicted is None or not is_number(row.metrics.get("step_p50_ms")):
            continue
        # A row with other dimensions than its preset's was not predicted.
        if row.config.get("num_parameters") != preset(row.config["size"]).num_parameters:
            continue
        metrics = {
            name: value
            for name, value in predicted.metrics.items()
            if name.startswith("predicted_")
        }
        if local is not None:  # the bench's overhead is what a step takes longer than local's
            without = local.metrics["predicted_step_ms"]
            metrics["predicted_overhead_ms"] = metrics["predicted_step_ms"] - without
        metrics |= {f"measured_{name}": row.metrics.get(name) for name in COMPARED}
        step, peak = row.metrics["step_p50_ms"], row.metrics.get("peak_alloc_bytes")
        metrics["step_error_pct"] = 100 * (metrics["predicted_step_ms"] / step - 1)
        metrics["peak_error_pct"] = None
        if peak:
            metrics["peak_error_pct"] = 100 * (metrics["predicted_peak_alloc_bytes"] / peak - 1)
        calls = row.metrics.get("collectives_per_step")
        sent = row.metrics.get("comm_bytes_per_step")
        # Both must agree exactly, since neither depends on time.
        metrics["volume_as_predicted"] = (
            metrics["predicted_collectives_per_step"] == calls
            and metrics["predicted_comm_bytes_per_step"] == sent
        )
        config = {name: row.config[name] for name in CASE}
        config["calibrated_on"] = predicted.config["calibrated_on"]
        records.append(Record(COMPARISON, name, config, metrics, row.environment, row.commit))
    if not records:
        raise ValueError(
            "none of the measured rows was predicted: compare the model, batch, context and ranks"
        )
    return records
