"""Is the plan's first choice the fastest? Random models on random clusters, every choice simulated by events.

    distlab run plan_check --pairs 20

The first choice by the fast estimate is simulated like all others that fit; its time over the fastest's is what
following the estimate costs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

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
from distlab.hardware import CLUSTERS, cluster
from distlab.model import ModelConfig
from distlab.options import SEED
from distlab.simulate.choices import STRATEGIES, choices, estimated, memory, simulated
from distlab.simulate.estimate import USABLE, machine_on

BAR = 3.0  # per cent


@dataclass(frozen=True)
class CheckConfig(Options):
    """How many, and of which strategies."""

    pairs: int = option(20, "random pairs of model and cluster", least=1)
    layers: int = option(3, "most blocks of a model", least=2)
    sequences: int = option(2, "most sequences per rank, a power of two", least=1)
    strategies: tuple[str, ...] = option(STRATEGIES, "to consider", choices=STRATEGIES)
    seed: int = option(0, "of the pairs", **SEED)


def random_pair(draw: random.Random, layers: int, sequences: int) -> tuple[ModelConfig, str, int]:
    """A model, a cluster, and sequences per rank."""
    width = draw.choice((1024, 2048, 4096, 6144))
    model = ModelConfig(
        width,
        draw.choice((2, 3, 4)) * width,
        draw.randint(2, layers),
        width // draw.choice((64, 128)),
        vocab_size=draw.choice((32_000, 50_304, 128_256)),
        context_length=draw.choice((512, 1024, 2048, 4096)),
        tie_embeddings=draw.random() < 0.3,
    )
    hosts = draw.choice((1, 1, 2, 4, 8))
    name = draw.choice([name for name in CLUSTERS if not name.startswith("hgx")])
    return model, f"{name}:{hosts}x8", 2 ** draw.randrange(sequences.bit_length())


def measure(config: CheckConfig, context: RankContext, run: Run) -> None:
    """A row per pair."""
    draw = random.Random(config.seed)
    for number in range(config.pairs):
        model, name, per_rank = random_pair(draw, config.layers, config.sequences)
        hosts = cluster(name)
        machine = machine_on(hosts, head_dim=model.head_dim)
        usable = USABLE * hosts.gpu.hbm_bytes
        some = [
            choice
            for choice in choices(hosts.gpus, hosts.gpus_per_host, per_rank, config.strategies)
            if memory(model, choice, hosts.gpus).peak.total <= usable
        ]
        label = f"{number + 1}"
        if run.done(label) or not some:
            continue
        run.progress(f"pair {number + 1}: {len(some)} choices of {model.num_parameters / 1e9:.2f} B on {name}")
        first = min(some, key=lambda choice: estimated(model, choice, machine, hosts.gpus).step)
        seconds = {choice: simulated(model, choice, machine, hosts.gpus) for choice in some}
        fastest = min(seconds, key=seconds.__getitem__)
        metrics = {
            "predicted_step_ms": 1e3 * estimated(model, first, machine, hosts.gpus).step,
            "first_step_ms": 1e3 * seconds[first],
            "fastest_step_ms": 1e3 * seconds[fastest],
            "slower_pct": 100 * (seconds[first] / seconds[fastest] - 1),
            "choices": len(some),
        }
        run.add(
            label, metrics, cluster=name, num_parameters=model.num_parameters, per_rank=per_rank,
            context=model.context_length, first=str(first), fastest=str(fastest),
        )  # fmt: skip


def wrong(records: Sequence[Record]) -> list[str]:
    """Pairs whose first choice is slower than allowed."""
    return [
        f"pair {record.variant}: {record.config['first']} is {record.metrics['slower_pct']:.1f} % slower than "
        f"{record.config['fastest']}"
        for record in records
        if record.metrics["slower_pct"] > BAR
    ]


def findings(records: Sequence[Record]) -> list[str]:
    """How many pairs the estimate decided right."""
    missed = wrong(records)
    return [f"{len(records) - len(missed)} of {len(records)} first choices within {BAR:g} % of the fastest.", *missed]


VIEW = View(
    columns=[
        Column("variant", "pair"),
        Column("config.cluster", "cluster", align="left"),
        Column("config.num_parameters", "B", ".2f", scale=1e-9),
        Column("config.per_rank", "sequences per rank"),
        Column("config.first", "first by estimate", align="left"),
        Column("config.fastest", "fastest simulated", align="left"),
        Column("metrics.predicted_step_ms", "estimated ms", ",.1f"),
        Column("metrics.first_step_ms", "simulated ms", ",.1f"),
        Column("metrics.fastest_step_ms", "fastest ms", ",.1f"),
        Column("metrics.slower_pct", "slower %", ".1f"),
        Column("metrics.choices", "choices", "d"),
    ],
    headline=headline_from("{count} pairs of model and cluster", count=len),
    terminal=("cluster", "first", "fastest", "first_step_ms", "slower_pct", "choices"),
    findings=findings,
    reading="A row per pair. `slower` is the simulated time of the choice that the fast estimate puts first, over that "
    "of the fastest of all choices that fit.",
    prediction="Both times are predicted: in closed form, and from the events of the strategies' own code.",
    noise="Both are deterministic.",
)

EXPERIMENT = Experiment(
    CheckConfig, measure, VIEW,
    presets={"smoke": {"pairs": 1, "layers": 2, "sequences": 1, "strategies": ("fsdp",), "seed": 7}},
    ranks="none",
    wrong=wrong,
)
