"""Predictions beside what was measured."""

from collections.abc import Sequence

from distlab.report import Record, View
from distlab.report.table import Column

from .prediction import HOW

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
COMPARISON_VIEW = View(
    name=COMPARISON,
    question="How good were the predictions?",
    columns=COMPARISON_COLUMNS,
    headline=comparison_headline,
    reading="The record that the constants were fitted to is among the rows, so its own errors say little; all other "
    "rows were predicted without having been measured. Calls and bytes must agree exactly.",
    prediction=HOW,
    noise="That of the measured rows: see their own records.",
)
