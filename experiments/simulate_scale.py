"""What does a step on a thousand ranks look like, simulated here?

    distlab run simulate_scale --quick
    distlab run simulate_scale --model 10B --ranks 1024 --strategies bucketed,zero1,fsdp

Each strategy runs on fake ranks and fake tensors: its collectives and its memory are what the code
does, not what a formula says. The timeline puts times to them, of a machine at the shares of its
peaks that a calibrated one reaches.
"""

from dataclasses import dataclass
from typing import Any

from distlab.experiment import Column, Experiment, RankContext, Run, View, headline_from, option
from distlab.model import kept_levels
from distlab.parallel import check_buckets, check_shard_size, get_strategy
from distlab.report import gib_column, text_column, timeline
from distlab.simulate import replay
from distlab.simulate.estimate import USABLE, MachineOptions
from distlab.simulate.step import simulate_training
from distlab.theory.flops import mfu, step_flops
from distlab.theory.step_time import sharding_group

MOST_RANKS = 2**20  # the lists of a group's ranks take seconds and gigabytes beyond them


@dataclass(frozen=True)
class ScaleConfig(MachineOptions):
    """Options of the simulation."""

    model: str = option("10B", "model preset")
    device: str = option("h100", "kind of GPU, such as h100")
    ranks: int = option(1024, "world size", least=1, most=MOST_RANKS)
    batch: int = option(2, "sequences per rank", least=1)
    strategies: tuple[str, ...] = option(
        ("bucketed", "zero1", "fsdp"), "strategies of this lab to simulate"
    )
    bucket_size_mb: float = option(100.0, "MiB per bucket", above=0)
    checkpointing: str = option("none", "recomputation in backward, as for distlab train")
    group: int | None = option(
        None, "ranks in a shard group, for strategies with a mesh [a node]", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kept_levels(self.checkpointing, self.shape().num_layers)
        if self.compile != "off":
            raise ValueError(
                f"compile={self.compile!r}: no compiler runs on tensors without values; leave it out, or predict the "
                f"step in closed form: distlab run plan --compile {self.compile}"
            )
        hosts = self.hosts()
        if hosts is not None and self.ranks != hosts.gpus:
            raise ValueError(
                f"ranks={self.ranks}: {self.cluster} has {hosts.gpus}; give --ranks {hosts.gpus}"
            )
        for name in self.strategies:
            self.shard_size(name)
            if get_strategy(name).is_peer:
                raise ValueError(
                    f"strategy {name!r} is torch's, whose C++ cannot run on fake tensors; choose ours"
                )
        check_shard_size(self.group, self.strategies, "--group")

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for options that a cluster decides, or unused bucket sizes."""
        super().check_given(given)
        check_buckets(given, given.get("strategies", cls.strategies))

    def shard_size(self, strategy: str) -> int | None:
        """Ranks of a shard group, for a strategy on a mesh.

        Raises:
            ValueError: a group that does not divide the ranks.
        """
        entry = get_strategy(strategy)
        if not entry.takes_mesh:
            return None
        return sharding_group(
            entry, self.ranks, self.machine().network.devices_per_node, self.group
        )


def measure(config: ScaleConfig, context: RankContext, run: Run) -> None:
    """One row per strategy, and the timeline of all."""
    model, machine, gpu = config.shape(), config.machine(), config.gpu()
    peak = gpu.peak["tf32" if config.dtype == "fp32" else config.dtype]
    lanes = {}
    for strategy in config.strategies:
        run.progress(f"simulating {strategy} on {config.ranks} ranks")
        step = simulate_training(
            model,
            strategy,
            batch=config.batch,
            world_size=config.ranks,
            shard_size=config.shard_size(strategy),
            dtype=config.dtype,
            bucket_size_mb=config.bucket_size_mb,
            checkpointing=config.checkpointing,
        )
        line = replay(step, machine)
        lanes[strategy] = line.lanes
        metrics = {
            "predicted_step_ms": line.step_ms,
            "predicted_overhead_ms": line.overhead_ms,
            "predicted_comm_ms": line.comm_ms,
            "predicted_overlap_pct": line.overlap_pct,
            "predicted_mfu_pct": 100
            * mfu(step_flops(**model.sizes(config.batch)), line.step_ms / 1e3, peak),
            "collectives_per_step": len(step.calls),
            "comm_bytes_per_step": step.comm_bytes,
            "simulated_peak_bytes": step.peak.total,
            "fits": step.peak.total <= USABLE * gpu.hbm_bytes,
        }
        run.add(
            strategy, metrics, num_parameters=model.num_parameters, context=model.context_length
        )
    timeline(run.path / "timeline.png", lanes, title=headline(run.records))


headline = headline_from(
    "{model} ({num_parameters:B} parameters), {batch} × {context} tokens per rank on {ranks:,} × {gpu}, {dtype}; "
    "one rank simulated",
    gpu=lambda records: ScaleConfig.of(records[0].config).place(),
)


VIEW = View(
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
    reading="One rank ran the strategies' own code on fake tensors: collectives, bytes and memory are counted, not "
    "estimated. Times assume the shares of a machine's peaks that a calibrated machine reached. In the timeline "
    "compute is above and communication below; what compute does not hide is orange.",
    prediction="Every time here is predicted. How good such predictions were: docs/learn/theory/simulation.md.",
    noise="Nothing was measured.",
)

EXPERIMENT = Experiment(
    ScaleConfig,
    measure,
    VIEW,
    presets={
        "quick": {"model": "small", "ranks": 64},
        "smoke": {"model": "tiny", "ranks": 4, "batch": 1, "strategies": ("zero1",)},
    },
    ranks="none",
)
