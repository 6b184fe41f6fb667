"""Predict the steps of ddp_bench from the calibration on one of its records."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distlab.model import ModelConfig, preset
from distlab.report import Record, View, commit, environment, read_json, reading
from distlab.report.table import Column
from distlab.simulate import SimulatedStep, replay
from distlab.simulate.calibrate import NEEDED, Calibration, MeasuredLinks, calibrate, measured_links
from distlab.simulate.training import simulate_training
from distlab.theory.memory.peak import step_memory
from distlab.theory.model_shape import ModelShape

from . import __doc__ as QUESTION

ROOT = Path(__file__).resolve().parents[2]
NAME = "predict_steps"
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


@dataclass(frozen=True)
class PredictConfig:
    """What to predict.

    Args:
        calibrate: a record of ddp_bench with local, naive, flat and overlap.
        collectives: records of allreduce_sweep on the same machine, whose fits then stand for the link.
        cases: (preset, sequences per rank).
        ranks: world sizes.
        rows: names among `ROWS`.
        memory: a record of ddp_bench with `local` of a model whose operators do less arithmetic per byte, from which
            their memory bandwidth is fitted too.

    Raises:
        ValueError: an unknown row, or nothing to predict.
    """

    calibrate: str
    cases: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = (2, 4)
    rows: tuple[str, ...] = tuple(ROWS)
    collectives: tuple[str, ...] = ()
    memory: str | None = None

    def __post_init__(self) -> None:
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not (self.cases and self.ranks and self.rows):
            raise ValueError(f"rows {unknown} are unknown; choose among {', '.join(ROWS)}, and give a case")


def fit(path: str, collectives: Sequence[str] = (), memory: str | None = None) -> tuple[Calibration, dict]:
    """The machine's constants from a record (the link's from those of allreduce_sweep, if given), and its settings.

    `memory` is as in `PredictConfig`.

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
        device = rows["local"].environment["device_name"]
        known = [record for file in collectives for record in read_json(file)]
        calibration = replace(calibration, link=measured_links(known, device))
    return calibration, settings


def _simulated(settings: dict, strategy: str) -> SimulatedStep:
    """The step that ddp_bench measured with these settings."""
    model = preset(settings["size"], context_length=settings["context"])
    ranks, dtype = settings["world_size"], settings["dtype"]
    return simulate_training(model, strategy, batch=settings["batch"], world_size=ranks, dtype=dtype)


def run(config: PredictConfig, progress: Callable[[str], None] = lambda text: None) -> list[Record]:
    """One record per case, number of ranks and row."""
    progress(f"calibrating on {config.calibrate}")
    with reading([config.calibrate, *([config.memory] if config.memory else [])]):
        calibration, settings = fit(config.calibrate, config.collectives, config.memory)
    facts = {"environment": environment("cpu"), "commit": commit(None)}
    records = []
    for size, batch in config.cases:
        model = preset(size, context_length=settings["context"])
        for ranks in config.ranks:
            for row in config.rows:
                progress(f"{size}:{batch} on {ranks} ranks: {row}")
                metrics = predict(model, row, batch, ranks, settings["dtype"], calibration)
                shared = {"size": size, "batch": batch, "context": model.context_length, "world_size": ranks}
                shared |= {
                    "dtype": settings["dtype"],
                    "calibrated_on": _calibrated_on(config),
                }
                records.append(Record(NAME, row, shared | _constants(calibration), metrics, **facts))
    return records


def _calibrated_on(config: PredictConfig) -> str:
    files = [config.calibrate] + ([config.memory] if config.memory else [])
    return " and ".join(str(file).removeprefix(f"{ROOT}/") for file in files)


def _constants(calibration: Calibration) -> dict:
    """The calibration for a record; measured fits are in the records that they came from."""
    link = calibration.link
    named = {"device": asdict(calibration.device), "contention": asdict(calibration.contention)}
    return named | {"link": "measured collectives" if isinstance(link, MeasuredLinks) else asdict(link)}


def predict(
    model: ModelConfig, row: str, batch: int, ranks: int, dtype: str, calibration: Calibration
) -> dict[str, float | int | str | None]:
    """The metrics of one row of ddp_bench."""
    strategy, bucket_size_mb = ROWS[row]
    step = simulate_training(
        model, strategy, batch=batch, world_size=ranks, dtype=dtype, bucket_size_mb=bucket_size_mb or 25.0
    )
    line = replay(step, calibration.device, calibration.link, calibration.contention)
    precision = {"fp32": "fp32", "bf16": "bf16" if strategy == "fsdp" else "bf16-autocast"}[dtype]
    memory = step_memory(
        ModelShape.of(model),
        batch=batch,
        context=model.context_length,
        strategy=strategy,
        world_size=ranks,
        precision=precision,
    )
    return {
        "predicted_step_ms": line.step_ms,
        "predicted_forward_backward_ms": line.step_ms - line.phases["optimizer"],
        "predicted_optimizer_ms": line.phases["optimizer"],
        "predicted_exposed_comm_ms": line.exposed_ms,
        "predicted_comm_ms": line.comm_ms,
        "predicted_overlap_pct": line.overlap_pct,
        "predicted_tokens_per_s": batch * model.context_length * ranks / line.step_ms * 1e3,
        "predicted_collectives_per_step": len(step.calls),
        "predicted_comm_bytes_per_step": step.comm_bytes,
        "predicted_peak_alloc_bytes": memory.peak.total,
        "predicted_peak_phase": memory.peak_phase,
        "simulated_peak_bytes": step.peak.total,
    }


COLUMNS = [
    Column("config.size", "model", align="left"),
    Column("config.batch", "batch"),
    Column("config.world_size", "ranks"),
    Column("variant", "strategy"),
    Column("metrics.predicted_step_ms", "step ms", ".1f"),
    Column("metrics.predicted_exposed_comm_ms", "exposed ms", ".1f"),
    Column("metrics.predicted_comm_ms", "comm ms", ".1f"),
    Column("metrics.predicted_overlap_pct", "overlap %", ".0f"),
    Column("metrics.predicted_collectives_per_step", "calls", "d"),
    Column("metrics.predicted_comm_bytes_per_step", "sent MB", ",.1f", scale=1e-6),
    Column("metrics.predicted_peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30),
]


def headline(records: Sequence[Record]) -> str:
    """One line for the table of `run`."""
    config = records[0].config
    sizes = ", ".join(dict.fromkeys(record.config["size"] for record in records))
    shape = f"{sizes}, context {config['context']}, {config['dtype']}"
    return f"Predicted: {shape}; constants from {config['calibrated_on']}"


HOW = (
    "Each strategy's own code runs on fake tensors; five constants of the machine, fitted to one record of ddp_bench, "
    "put times to what it did. Peaks are the closed form of distlab.theory.memory."
)
VIEW = View(
    name=NAME,
    question=QUESTION.splitlines()[0],
    columns=COLUMNS,
    headline=headline,
    reading="Written down before the measurement; --compare puts what was measured beside it.",
    prediction=HOW,
    noise="Nothing was measured here.",
)
