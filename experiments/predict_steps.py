"""What will the bench measure? Step time, exposed communication, volume and peak memory, written down beforehand.

    python -m experiments.predict_steps --calibrate records/ddp_bench/h200x2_xl_batch8.json \
        --cases xl:2 xl:8 medium:8 --ranks 2 4 --out records/predictions/h200.json

and afterwards, beside what was measured:

    python -m experiments.predict_steps --compare records/ddp_bench/h200x[24]_*.json \
        --predictions records/predictions/h200.json --out records/predictions/h200_compared.json

Five constants of the machine come from one record of ddp_bench (its local, naive, flat and overlap rows; see
`distlab.simulate.calibrate`); all other numbers are predictions from the simulated steps.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distlab.model import ModelConfig, preset
from distlab.report import (
    OutputFolder,
    Record,
    View,
    add_from_option,
    commit,
    environment,
    read_json,
    redraw,
    say,
    write,
    write_json,
)
from distlab.report.table import Column
from distlab.simulate import replay
from distlab.simulate.calibrate import NEEDED, Calibration, MeasuredLinks, calibrate, measured_links
from distlab.simulate.training import simulate_training
from distlab.theory.memory import step_memory
from distlab.theory.shape import ModelShape

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


ROOT = Path(__file__).resolve().parents[1]
QUICK = str(ROOT / "records" / "ddp_bench" / "h200x2_xl_batch8.json")


@dataclass(frozen=True)
class PredictConfig:
    """What to predict.

    Args:
        calibrate: a record of ddp_bench with local, naive, flat and overlap.
        collectives: records of allreduce_sweep on the same machine, whose fits then stand for the link.
        cases: (preset, sequences per rank).
        ranks: world sizes.
        rows: names among `ROWS`.

    Raises:
        ValueError: an unknown row, or nothing to predict.
    """

    calibrate: str
    cases: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = (2, 4)
    rows: tuple[str, ...] = tuple(ROWS)
    collectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not (self.cases and self.ranks and self.rows):
            raise ValueError(f"rows {unknown} are unknown; choose among {', '.join(ROWS)}, and give a case")


def fit(path: str, collectives: Sequence[str] = ()) -> tuple[Calibration, dict]:
    """The machine's constants from a record (the link's from those of allreduce_sweep, if given), and its settings.

    Raises:
        ValueError, OSError: the record cannot be read or lacks a row.
    """
    rows = {record.variant: record for record in read_json(path)}
    settings = next(iter(rows.values())).config
    model = preset(settings["size"], context_length=settings["context"])
    steps = {
        name: simulate_training(
            model, name, batch=settings["batch"], world_size=settings["world_size"], dtype=settings["dtype"]
        )
        for name in NEEDED
    }
    calibration = calibrate({name: record.metrics for name, record in rows.items()}, steps)
    if collectives:
        device = rows["local"].environment["device_name"]
        known = [record for file in collectives for record in read_json(file)]
        calibration = replace(calibration, link=measured_links(known, device))
    return calibration, settings


def run(config: PredictConfig) -> list[Record]:
    """One record per case, number of ranks and row."""
    calibration, settings = fit(config.calibrate, config.collectives)
    facts = {"environment": environment("cpu"), "commit": commit(None)}
    records = []
    for size, batch in config.cases:
        model = preset(size, context_length=settings["context"])
        for ranks in config.ranks:
            for row in config.rows:
                metrics = predict(model, row, batch, ranks, settings["dtype"], calibration)
                shared = {"size": size, "batch": batch, "context": model.context_length, "world_size": ranks}
                shared |= {
                    "dtype": settings["dtype"],
                    "calibrated_on": str(config.calibrate).removeprefix(f"{ROOT}/"),
                }
                records.append(Record(NAME, row, shared | _constants(calibration), metrics, **facts))
    return records


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


def compare(predictions: Sequence[Record], measured: Sequence[Record]) -> list[Record]:
    """A record for every measured row of ddp_bench that was predicted: both figures and the error in %.

    Raises:
        ValueError: nothing of what was measured had been predicted.
    """
    known = {(*(r.config[name] for name in CASE), r.variant): r for r in predictions}
    records = []
    for row in measured:
        strategy, bucket = row.variant.split("-")[0], row.config.get("bucket_size_mb")
        name = row.variant if bucket is None or "-" in row.variant else f"{strategy}-{bucket:g}"
        predicted = known.get((*(row.config.get(name) for name in CASE), name))
        step = row.metrics.get("step_p50_ms")
        if predicted is None or not isinstance(step, int | float):
            continue
        metrics = {
            name: predicted.metrics[name] for name in predicted.metrics if name.startswith("predicted_")
        }
        local = known.get((*(row.config.get(name) for name in CASE), "local"))
        if local is not None:  # the bench counts as exposed what a step takes longer than local's
            metrics["predicted_exposed_comm_ms"] = (
                metrics["predicted_step_ms"] - local.metrics["predicted_step_ms"]
            )
        metrics |= {f"measured_{name}": row.metrics.get(name) for name in COMPARED}
        metrics["step_error_pct"] = 100 * (metrics["predicted_step_ms"] / step - 1)
        peak = row.metrics.get("peak_alloc_bytes")
        metrics["peak_error_pct"] = 100 * (metrics["predicted_peak_alloc_bytes"] / peak - 1) if peak else None
        metrics["volume_as_predicted"] = all(
            metrics[f"predicted_{name}"] == metrics[f"measured_{name}"]
            for name in ("collectives_per_step", "comm_bytes_per_step")
        )
        facts = {"predicted_at": predicted.commit, "measured_at": row.commit}
        config = {name: row.config[name] for name in CASE} | facts
        config["calibrated_on"] = predicted.config["calibrated_on"]
        records.append(Record(COMPARISON, name, config, metrics, row.environment, row.commit))
    if not records:
        raise ValueError(
            "none of the measured rows was predicted: compare the model, batch, context and ranks"
        )
    return records


def comparison_headline(records: Sequence[Record]) -> str:
    """One line for the table of `compare`."""
    worst = max(abs(record.metrics["step_error_pct"]) for record in records)
    sizes = ", ".join(dict.fromkeys(record.config["size"] for record in records))
    return (
        f"Predicted beside measured: {sizes} on {records[0].environment['device_name']}; largest error of a step "
        f"{worst:.1f} %; constants from {records[0].config['calibrated_on']}"
    )


COMPARISON = "prediction"
CASE = ("size", "batch", "context", "world_size", "dtype")
COMPARED = (
    "step_p20_ms",
    "step_p50_ms",
    "step_p80_ms",
    "exposed_comm_ms",
    "peak_alloc_bytes",
    "collectives_per_step",
    "comm_bytes_per_step",
)

COMPARISON_COLUMNS = [
    Column("config.size", "model", align="left"),
    Column("config.batch", "batch"),
    Column("config.world_size", "ranks"),
    Column("variant", "strategy"),
    Column("metrics.predicted_step_ms", "predicted step ms", ".1f"),
    Column("metrics.measured_step_p50_ms", "measured p50", ".1f"),
    Column("metrics.step_error_pct", "error %", "+.1f"),
    Column("metrics.predicted_exposed_comm_ms", "predicted exposed ms", ".1f"),
    Column("metrics.measured_exposed_comm_ms", "measured", ".1f"),
    Column("metrics.predicted_peak_alloc_bytes", "predicted peak GiB", ".1f", scale=2**-30),
    Column("metrics.measured_peak_alloc_bytes", "measured", ".1f", scale=2**-30),
    Column("metrics.volume_as_predicted", "calls and bytes as predicted", align="left"),
]

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
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    reading="Written down before the measurement; --compare puts what was measured beside it.",
    prediction=HOW,
    noise="Nothing was measured here.",
)
COMPARISON_VIEW = View(
    COMPARISON,
    "How good were the predictions?",
    COMPARISON_COLUMNS,
    comparison_headline,
    reading="The record that the constants were fitted to is among the rows, so its own errors say little; all other "
    "rows were predicted without having been measured. Calls and bytes must agree exactly.",
    prediction=HOW,
    noise="That of the measured rows: see their own records.",
)


def _case(text: str) -> tuple[str, int]:
    size, _, batch = text.partition(":")
    if not batch.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give PRESET:BATCH, such as xl:8")
    return size, int(batch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", help="a record of ddp_bench on the machine")
    parser.add_argument(
        "--collectives", nargs="+", default=[], help="records of allreduce_sweep on the machine"
    )
    parser.add_argument("--cases", type=_case, nargs="+", metavar="PRESET:BATCH")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--compare", nargs="+", metavar="FILE", help="records of ddp_bench to compare with")
    parser.add_argument("--predictions", help="what was predicted, for --compare")
    parser.add_argument(
        "--quick", action="store_true", help="calibrate on the committed record, predict medium:8"
    )
    parser.add_argument("--out", type=Path, help="file for the records, or a folder for the whole report")
    add_from_option(parser)
    options = parser.parse_args(arguments)
    view = COMPARISON_VIEW if options.compare else VIEW
    if options.source:
        return redraw(_view_of(options.source[0]), options.source, options.out or "outputs")
    if options.quick:
        options.calibrate, options.cases, options.ranks = QUICK, [("medium", 8)], [2]
        options.rows = ["local", "flat", "bucketed-100", "fsdp"]
    if not (options.compare and options.predictions) and not (options.calibrate and options.cases):
        parser.error("give --calibrate and --cases, or --compare and --predictions")
    try:
        if options.compare:
            measured = [record for path in options.compare for record in read_json(path)]
            records = compare(read_json(options.predictions), measured)
        else:
            cases, ranks, rows = tuple(options.cases), tuple(options.ranks), tuple(options.rows)
            records = run(PredictConfig(options.calibrate, cases, ranks, rows, tuple(options.collectives)))
        page = write(view, records, OutputFolder(_folder_of(options.out), view.name))
        if options.out is not None and options.out.suffix == ".json":
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(records, options.out)
    except (ValueError, OSError) as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return 2
    say(view, records, page)
    return 0


def _folder_of(out: Path | None) -> Path:
    """Where the report goes: `--out`, unless that names a file for the records alone."""
    return Path("outputs") if out is None or out.suffix == ".json" else out


def _view_of(source: str) -> View:
    try:
        return COMPARISON_VIEW if read_json(source)[0].experiment == COMPARISON else VIEW
    except (ValueError, OSError, IndexError):
        return VIEW  # redrawing says what is wrong with the file


if __name__ == "__main__":
    sys.exit(main())
