"""What a reader gets: table, findings, and a picture per regime."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from distlab.experiment import Column, Record, View, headline_from
from distlab.report import TIE, Panel, Series, grouped, lines, tied

from .prediction import STRATEGIES

# What each of torch's is shown beside.
OURS = {"torch-ddp": "bucketed", "torch-zero": "zero1", "fsdp2": "fsdp"}


def wrong_rows(records: Sequence[Record]) -> list[str]:
    """Strategies after which ranks hold different bits, and collectives with a wrong result, one line each."""
    wrong = []
    for record in records:
        where = f"{record.variant}, {record.config['regime']} on {record.config['world_size']} ranks"
        for what in ("parameters", "gradients"):
            if record.metrics.get(f"{what}_identical") is False:
                wrong.append(f"{where}: {what} differ between ranks")
        if record.metrics.get("max_abs_error", 0.0) > 1e-4:
            wrong.append(f"{where}: off by {record.metrics['max_abs_error']:g}")
    return wrong


def findings(records: Sequence[Record]) -> list[str]:
    """Efficiency of ours beside torch's at the largest number of ranks, and the largest miss of a prediction."""
    lines = [f"WRONG: {problem}" for problem in wrong_rows(records)]
    for record in records:
        if record.config["regime"] == "collectives":
            m, operation = record.metrics, record.config["operation"]
            lines.append(
                f"{operation} on {record.config['world_size']} ranks: algbw up to {m['algbw_gb_per_s']:.3g} GB/s; "
                f"α–β fit in {len(m['pieces'])} piece(s), largest error {m['fit_error_max_pct']:.1f} %."
            )
    timed = [r for r in records if isinstance(r.metrics.get("efficiency_pct"), float)]
    for regime, mine in grouped(timed, lambda r: r.config["regime"]).items():
        most = max(r.config["world_size"] for r in mine)
        at_most = {r.variant: r.metrics for r in mine if r.config["world_size"] == most}
        compared = [
            f"{ours} {at_most[ours]['efficiency_pct']:.1f} % beside {peer} {at_most[peer]['efficiency_pct']:.1f} %"
            + TIE * tied(at_most[ours], at_most[peer])
            for peer, ours in OURS.items()
            if {ours, peer} <= set(at_most)
        ]
        if compared:
            lines.append(f"{regime}, efficiency on {most} ranks: {', '.join(compared)}.")
        misses = [r for r in mine if "error_pct" in r.metrics]
        if misses:
            worst = max(misses, key=lambda r: abs(r.metrics["error_pct"]))
            lines.append(
                f"{regime}, largest error of a prediction: {worst.metrics['error_pct']:+.1f} % ({worst.variant} on "
                f"{worst.config['world_size']} ranks)."
            )
    return lines


COLUMNS = [
    Column("config.regime", "regime", align="left"),
    Column("config.world_size", "ranks"),
    Column("variant", "strategy"),
    Column("metrics.step_p20_ms", "step p20 ms", ".1f", missing=""),
    Column("metrics.step_p50_ms", "p50", ".1f", missing=""),
    Column("metrics.step_p80_ms", "p80", ".1f", missing=""),
    Column("metrics.predicted_step_ms", "predicted ms", ".1f", missing=""),
    Column("metrics.error_pct", "error %", "+.1f", missing=""),
    Column("metrics.efficiency_pct", "efficiency %", ".1f", missing=""),
    Column("metrics.predicted_efficiency_pct", "predicted %", ".1f", missing=""),
    Column("metrics.tokens_per_s", "tokens/s", ",.0f", missing=""),
    Column("metrics.peak_alloc_bytes", "peak GiB", ".1f", scale=2**-30, missing=""),
    Column("metrics.parameters_identical", "same parameters", align="left", missing=""),
    Column("metrics.gradients_identical", "same gradients", align="left", missing=""),
]


headline = headline_from(
    "Scaling on up to {most} × {device_name}, {dtype}, torch {torch}",
    most=lambda records: max(record.config["world_size"] for record in records),
)


def draw_regime(number: int, records: Sequence[Record], path: Path) -> None:
    """Efficiency and step time of the regime of that number: points measured, lines predicted; torch's are hollow."""
    names = [n for n in dict.fromkeys(r.config["regime"] for r in records) if n != "collectives"]
    if number > len(names):
        return
    rows = [r for r in records if r.config["regime"] == names[number - 1] and r.variant != "local"]
    rows = [r for r in rows if isinstance(r.metrics.get("step_p50_ms"), float)]
    if not rows:
        return
    ticks = [(ranks, str(ranks)) for ranks in sorted({r.config["world_size"] for r in rows})]
    panels = []
    for title, unit, metric in (("efficiency", "%", "efficiency_pct"), ("step time", "ms", "step_p50_ms")):
        series = []
        for strategy in dict.fromkeys(r.variant for r in rows):
            series += _series(strategy, sorted(
                (r for r in rows if r.variant == strategy and metric in r.metrics),
                key=lambda r: r.config["world_size"],
            ), metric)  # fmt: skip
        if series:
            panels.append(Panel(title, "ranks", unit, series, x_ticks=ticks, from_zero=metric != "efficiency_pct"))
    lines(path, panels, title=f"{names[number - 1]}: points measured, lines predicted. {headline(records)}")


def _series(strategy: str, rows: Sequence[Record], metric: str) -> list[Series]:
    if not rows:
        return []
    x = [r.config["world_size"] for r in rows]
    y = [r.metrics[metric] for r in rows]
    spread = [[r.metrics[f"step_{p}_ms"] for r in rows] for p in ("p20", "p80")]
    if metric == "efficiency_pct":  # the shorter the step, the higher
        steps = [r.metrics["step_p50_ms"] for r in rows]
        spread = [
            [value * step / end for value, step, end in zip(y, steps, ends, strict=True)]
            for ends in spread[::-1]
        ]
    own = OURS.get(strategy)
    places = [*STRATEGIES, strategy]  # side by side, not on top of each other
    shift = 0.88 + 0.24 * places.index(strategy) / len(STRATEGIES)
    series = [Series(strategy, [shift * n for n in x], y, *spread, hollow=own is not None, like=own)]
    name = {"step_p50_ms": "predicted_step_ms", "efficiency_pct": "predicted_efficiency_pct"}[metric]
    if own is None and all(name in r.metrics for r in rows):
        predicted = [r.metrics[name] for r in rows]
        series.append(Series(f"{strategy}, predicted", x, predicted, line="-", like=strategy))
    return series


VIEW = View(
    columns=COLUMNS,
    headline=headline,
    terminal=(
        *("regime", "world_size", "variant", "step_p50_ms", "error_pct", "efficiency_pct", "peak_alloc_bytes"),
    ),
    pictures={f"regime{number}.png": partial(draw_regime, number) for number in range(1, 6)},
    findings=findings,
    reading="Efficiency is the step on one rank without communication over the step here; for strong scaling, where "
    "the batch is divided among ranks, over the step times the ranks. Filled points are ours, hollow ones torch's. "
    "Parameters "
    "and gradients were compared bit by bit across ranks after the timed steps.",
    prediction="In closed form from the datasheet, at the shares of its peaks that two GPUs reached in the "
    "calibration; "
    "written to predictions.json before the first measurement. torch's rows stand beside the prediction for the "
    "strategy that sends the same.",
    noise="Error bars reach from p20 to p80 of the steps.",
)
