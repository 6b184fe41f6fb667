"""The timeline: one rank's step under each strategy, simulated on fake ranks and fake tensors.

The strategies' own code runs, so collectives and memory are counted. The timeline puts times to
them, of a machine at the shares of its peaks that a calibrated one reaches. Options are in
`question.py`.
"""

from distlab.experiment import Column, Run, View, headline_from
from distlab.report import gib_column, text_column, timeline
from distlab.simulate import replay
from distlab.simulate.step import simulate_training
from distlab.theory.flops import mfu, step_flops

from .question import PlanConfig, place_of


def measure_timeline(config: PlanConfig, run: Run) -> None:
    """Add a row per strategy, and draw the timelines of all."""
    model, machine = config.shape(), config.machine()
    gpu, ranks = config.fleet()
    flops = step_flops(**model.sizes(config.per_rank))
    peak = gpu.peak[config.dtype]
    lanes = {}
    for strategy in config.strategies:
        run.progress(f"simulating {strategy} on {ranks} ranks")
        # Every rank does the same under data parallelism, so one of them is enough.
        step = simulate_training(
            model,
            strategy,
            batch=config.per_rank,
            world_size=ranks,
            shard_size=config.shard_size(strategy),
            dtype=config.dtype,
            bucket_size_mb=config.bucket_mb,
            checkpointing=config.checkpointing,
        )
        line = replay(step, machine)
        lanes[strategy] = line.lanes
        metrics = {
            "predicted_step_ms": line.step_ms,
            "predicted_overhead_ms": line.overhead_ms,
            "predicted_comm_ms": line.comm_ms,
            "predicted_overlap_pct": line.overlap_pct,
            "predicted_mfu_pct": 100 * mfu(flops, line.step_ms / 1e3, peak),
            # Counted while the strategy's code ran, and not from a formula.
            "collectives_per_step": len(step.calls),
            "comm_bytes_per_step": step.comm_bytes,
            "simulated_peak_bytes": step.peak.total,
            "fits": step.peak.total <= config.usable_bytes(),
        }
        row = run.add(
            strategy,
            metrics,
            num_parameters=model.num_parameters,
            context=model.context_length,
            world_size=ranks,
        )
        row.environment["device_name"] = f"{gpu.name}, predicted"
    timeline(run.path / "timeline.png", lanes, title=headline(run.records))


headline = headline_from(
    "{model} ({num_parameters:B} parameters), {per_rank} × {context} tokens per rank on "
    "{world_size:,} × {gpu}, {dtype}; one rank simulated",
    gpu=place_of,
)

TIMELINE_VIEW = View(
    name="plan_timeline",
    question="What does a step on a thousand ranks look like?",
    columns=[
        Column("variant", "strategy"),
        Column("metrics.predicted_step_ms", "step ms", ",.1f"),
        Column("metrics.predicted_overhead_ms", "overhead ms", ",.1f"),
        Column("metrics.predicted_comm_ms", "comm ms", ",.1f"),
        Column("metrics.predicted_overlap_pct", "overlap %", ".0f"),
        Column("metrics.predicted_mfu_pct", "MFU %", ".1f"),
        Column("metrics.collectives_per_step", "calls", "d"),
        Column("metrics.comm_bytes_per_step", "sent GB", ",.1f", scale=1e-9),
        gib_column("metrics.simulated_peak_bytes", "peak GiB", ".1f"),
        text_column("metrics.fits", "fits"),
    ],
    headline=headline,
    terminal=(
        *("variant", "predicted_step_ms", "predicted_overhead_ms", "predicted_mfu_pct"),
        *("comm_bytes_per_step", "simulated_peak_bytes", "fits"),
    ),
    reading="One rank ran the strategies' own code on fake tensors: collectives, bytes and memory "
    "are counted, not estimated. Times assume the shares of a machine's peaks that a calibrated "
    "machine reached. In the timeline compute is above and communication below. Communication that "
    "compute does not hide is orange.",
    prediction="Every time here is predicted. How good such predictions were: "
    "docs/learn/theory/simulation.md.",
    noise="Nothing was measured.",
)
