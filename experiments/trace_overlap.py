"""How much communication does each step of a trace hide?

    distlab run trace_overlap tests/measure/traces           # a folder of traces
    distlab run trace_overlap tests/measure/traces/trace_bucketed_rank0.json.gz

Reads what torch.profiler wrote (ddp_bench does, with --profile-steps), on GPUs and CPUs. Every step of every trace is
a row. With a trace of the same step without communication (`local`, or --local) the overhead is explained by cause.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distlab.experiment import (
    Column,
    Experiment,
    Options,
    RankContext,
    Run,
    View,
    headline_from,
    option,
)
from distlab.measure import (
    Event,
    StepAccount,
    account,
    explain,
    load_trace_and_origin,
    median_step,
    step_windows,
    streams,
)
from distlab.report import stream_lanes

_OURS = re.compile(r"trace_(?P<variant>.+)_rank(?P<rank>\d+)")
RECORDED = Path(__file__).resolve().parents[1] / "tests" / "measure" / "traces"


@dataclass(frozen=True)
class TraceConfig(Options):
    """Which traces."""

    traces: tuple[str, ...] = option((), "files of torch.profiler, or folders of ddp_bench", positional=True)
    local: str | None = option(None, "trace of the same step without communication [the one named local among them]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.traces:
            raise ValueError("name a trace, or a folder of traces")
        self.files()

    def files(self) -> list[Path]:
        """The traces: files as they are, and of folders the traces of their lowest rank.

        Raises:
            ValueError: a folder without traces, or nothing there.
        """
        files: list[Path] = []
        for path in map(Path, self.traces):
            inside = sorted(path.glob("trace_*.json*")) if path.is_dir() else [path]
            if not inside or not path.exists():
                raise ValueError(f"{path}: no trace there; ddp_bench writes trace_<strategy>_rank<rank>.json.gz")
            if len(inside) > 1:
                ranks = {file: int(match["rank"]) for file in inside if (match := _OURS.match(file.name))}
                inside = [file for file, rank in ranks.items() if rank == min(ranks.values())]
            files += inside
        return files


def variant_of(file: Path) -> str:
    """The strategy by the file's name, or the name."""
    match = _OURS.match(file.name)
    return match["variant"] if match else file.name.split(".")[0]


def measure(config: TraceConfig, context: RankContext, run: Run) -> None:
    """A row per step of each trace, and a picture of each trace's median step.

    Raises:
        OSError, ValueError: a file cannot be read, is truncated, is another tool's, or has no steps; names the file.
    """
    files = config.files()
    local = config.local or next((file for file in files if variant_of(file) == "local"), None)
    base = None if local is None else account(_load(Path(local))[0])
    lanes = {}
    for file in files:
        events, origin = _load(file)
        variant = variant_of(file)
        lanes[variant] = streams(events)
        middle = median_step(events)
        whose = {"file": file.name, "rank": None, "world_size": None} | origin
        for number, window in enumerate(step_windows(events)):
            run.add(variant, _metrics(events, window, base), step=number, is_median=window == middle, **whose)
    stream_lanes(run.path / "streams.png", lanes, title=headline(run.records))


def _load(file: Path) -> tuple[list[Event], dict]:
    events, origin = load_trace_and_origin(file)
    try:
        step_windows(events)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return events, origin


def _metrics(
    events: Sequence[Event], window: tuple[float, float], base: StepAccount | None
) -> dict[str, float | None]:
    seen = account(events, window)
    metrics = asdict(seen)
    del metrics["kernels"]
    if base is not None:
        found = explain(seen, base)
        metrics |= found | {"overhead_ms": sum(found.values())}
    return metrics


headline = headline_from(
    "Steps of {names} under the profiler, {worlds} ranks",
    names=lambda records: ", ".join(dict.fromkeys(record.variant for record in records)),
    worlds=lambda records: ", ".join(sorted({str(r.config.get("world_size") or "?") for r in records})),
)


VIEW = View(
    columns=[
        Column("variant", "trace"),
        Column("config.rank", "rank", missing="?"),
        Column("config.world_size", "of", missing="?"),
        Column("config.step", "step"),
        Column("metrics.step_ms", "step ms", ".1f"),
        Column("metrics.compute_ms", "compute ms", ".1f"),
        Column("metrics.comm_ms", "comm ms", ".1f"),
        Column("metrics.exposed_ms", "exposed", ".1f"),
        Column("metrics.overlap_pct", "overlap %", ".0f"),
        Column("metrics.copy_ms", "copies ms", ".1f"),
        Column("metrics.idle_ms", "idle ms", ".1f"),
        Column("metrics.longest_idle_ms", "longest gap", ".2f"),
        Column("metrics.overhead_ms", "overhead ms", "+.1f", optional=True),
        Column("metrics.overhead_exposed_ms", "of it exposed", "+.1f", optional=True),
        Column("metrics.overhead_slowdown_ms", "slower compute", "+.1f", optional=True),
        Column("metrics.overhead_copies_ms", "copies", "+.1f", optional=True),
        Column("metrics.overhead_optimizer_ms", "optimizer", "+.1f", optional=True),
        Column("metrics.overhead_idle_ms", "idle", "+.1f", optional=True),
    ],
    headline=headline,
    terminal=(
        *("variant", "rank", "step", "step_ms", "comm_ms", "exposed_ms", "overlap_pct", "idle_ms"),
        "overhead_ms",
    ),
    reading="A step is divided among compute, exposed communication, which no compute covers, copies beside neither, "
    "and idle time; intervals are united first, so that concurrent streams do not count twice. Overhead is the time of "
    "a step minus the median step without communication; the columns after it are its causes and sum to it. "
    "Slower compute is the extra time of the kernels that both steps run; kernels that only one of them runs count "
    "as copies.\n\n"
    "The picture shows the streams (on a CPU, threads) of each trace's median step.",
    prediction="None: this is a measurement.",
    noise="Rows are single steps; those of one trace show how much steps differ.",
)

EXPERIMENT = Experiment(
    TraceConfig, measure, VIEW,
    presets={"smoke": {"traces": (str(RECORDED),)}},
    ranks="none",
)
