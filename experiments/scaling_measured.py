"""How well do the strategies scale on the ranks of this host?

    distlab run scaling_measured                             # one rank per GPU, or two on a CPU
    distlab run scaling_measured --nproc 8 --minutes 8 --name mine  # again: goes on

One launch, sub-groups of its first ranks. Predictions are written before anything is timed and kept as they are; after
every cell (one regime on one number of ranks) its rows are written, so that a run that was cut off goes on under its
`--name`. A cell interleaves all strategies. After each, parameters (and gradients, where whole ones exist) are compared
bit by bit across ranks. Each group size also gets a short sweep of collectives with its fit.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distlab.bench.timing import BenchOptions, Variant, variants
from distlab.comm import collectives
from distlab.comm.rank_process import on_main
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.experiment import (
    Column,
    Experiment,
    RankContext,
    Record,
    Run,
    TimingOptions,
    View,
    headline_from,
    option,
)
from distlab.hardware import by_alias, lookup
from distlab.measure import MIN_SAMPLES, time_collective
from distlab.options import SEED
from distlab.parallel import STRATEGIES as KNOWN
from distlab.report import (
    TIE,
    Panel,
    Series,
    commit,
    environment,
    grouped,
    lines,
    noise_of,
    read_json,
    tied,
    write_json,
)
from distlab.report.run import same_run
from distlab.simulate.estimate import estimate_step, machine_of
from distlab.theory.collective_time import fit_collective

# Predictions know our strategies; torch's peers are held against those that send the same.
PEER_OF = {"torch-ddp": "bucketed", "torch-zero": "sharded-optimizer", "fsdp2": "fsdp"}
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp", *PEER_OF)


@dataclass(frozen=True)
class Regime:
    """`weak`: `batch` sequences per rank; `strong`: `batch` sequences together."""

    kind: str
    model: str
    batch: int

    @classmethod
    def parse(cls, text: str) -> "Regime":
        """From `weak:xl:8`. Raises ValueError for another form."""
        kind, model, batch, *more = [*text.split(":"), "", ""]
        if kind not in ("weak", "strong") or not batch.isdigit() or int(batch) < 1 or any(more):
            raise ValueError(
                f"regime {text!r}: write KIND:MODEL:BATCH, such as weak:xl:8 or strong:medium:16; say weak or strong, "
                "and a batch from 1"
            )
        return cls(kind, model, int(batch))

    def per_rank(self, ranks: int) -> int | None:
        """Sequences of each rank; None where they cannot be shared out evenly."""
        if self.kind == "weak":
            return self.batch
        return self.batch // ranks if self.batch % ranks == 0 else None

    def __str__(self) -> str:
        return f"{self.kind}:{self.model}:{self.batch}"


@dataclass(frozen=True)
class MeasureConfig(TimingOptions):
    """What to measure. Raises ValueError for a value that is not allowed; the message says what is."""

    regimes: tuple[str, ...] = option(
        ("weak:xl:8", "weak:xl:2", "strong:medium:16"),
        "in order of importance; what the time does not suffice for is left for another run under the same --name",
        metavar="KIND:MODEL:BATCH",
    )
    strategies: tuple[str, ...] = option(STRATEGIES, "to time beside local", choices=tuple(KNOWN))
    ranks: tuple[int, ...] = option((), "numbers of ranks [1, 2, 4, … all]; on one rank local alone runs", least=1)
    context: int | None = option(None, "tokens per sequence [the preset's]", least=1)
    dtype: str = option("bf16", "fp32, or bf16 computation over fp32 parameters", choices=("fp32", "bf16"))
    bucket_size_mb: float = option(100.0, "MiB, of the strategies with buckets", above=0)
    steps: int = option(8, "timed steps per round", least=1)
    rounds: int = option(1, "interleaved rounds", least=1)
    sweep_bytes: tuple[int, ...] = option(
        tuple(65536 * 4**k for k in range(8)), "payloads of the collectives' sweep", least=1
    )
    minutes: float = option(8.0, "no cell is begun that would end later", above=0)
    predict_for: str | None = option(
        None, "predict for this device, such as h200 [the one here, if it is known]", flag="--device"
    )
    seed: int = option(0, "of parameters and data", **SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(f"steps={self.steps}, rounds={self.rounds}: time at least {MIN_SAMPLES} steps")
        for regime in map(Regime.parse, self.regimes):
            self.bench(regime)
        if self.predict_for is not None:
            by_alias(self.predict_for)

    def bench(self, regime: Regime, ranks: int = 1) -> BenchOptions:
        """The model and the data of a regime's cell."""
        batch = regime.per_rank(ranks) or regime.batch
        return BenchOptions(size=regime.model, context=self.context, dtype=self.dtype, batch=batch, seed=self.seed)

    def groups(self, world_size: int) -> tuple[int, ...]:
        """Numbers of ranks to measure on. Raises ValueError for one that there is not."""
        groups = self.ranks or doubling_sizes(world_size)
        if max(groups) > world_size:
            raise ValueError(f"ranks {groups}: between 1 and the {world_size} that were started (--nproc)")
        return tuple(sorted(groups))

    def cells(self, world_size: int) -> Iterator[tuple[Regime, int]]:
        """(regime, ranks), in the order in which they are measured."""
        for regime in map(Regime.parse, self.regimes):
            for ranks in self.groups(world_size):
                if regime.per_rank(ranks):
                    yield regime, ranks


def key(regime: Regime, ranks: int) -> dict[str, Any]:
    """The part of a record's config that says which cell it is of."""
    return {"regime": str(regime), "kind": regime.kind, "size": regime.model, "world_size": ranks}


def predictions(config: MeasureConfig, world_size: int, device_name: str) -> list[Record]:
    """A record per regime, number of ranks and strategy: constants of the datasheet at the shares of its peaks that
    two GPUs of a kind were calibrated to reach (`distlab.simulate.estimate`). Empty where the device is unknown.
    """
    spec = by_alias(config.predict_for) if config.predict_for else lookup(device_name)
    if spec is None:
        return []
    machine = machine_of(spec, dtype=config.dtype)
    facts = {"environment": environment("cpu"), "commit": commit()}
    records = []
    for regime, ranks in config.cells(world_size):
        model, shape = config.bench(regime).model(), {"dtype": config.dtype, "bucket_size_mb": config.bucket_size_mb}

        def step_ms(strategy: str, count: int, regime=regime, model=model, shape=shape) -> float:
            batch = regime.per_rank(count)
            return 1e3 * estimate_step(model, strategy, machine, batch=batch, ranks=count, **shape).step

        best = step_ms("local", 1) / (ranks if regime.kind == "strong" else 1)
        for strategy in ("local", *(config.strategies if ranks > 1 else ())):
            ms = step_ms(PEER_OF.get(strategy, strategy), ranks)
            metrics = {"predicted_step_ms": ms, "predicted_efficiency_pct": 100 * best / ms}
            where = key(regime, ranks) | {"device": spec.name}
            records.append(Record("scaling_measured", strategy, where, metrics, **facts))
    return records


PREDICTIONS = "predictions.json"
SHARDED_GRADIENTS = ("zero1", "fsdp", "fsdp2")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def measure(config: MeasureConfig, context: RankContext, run: Run) -> None:
    """Predict, then measure what has no rows yet; call it on every rank."""
    begin = time.monotonic()
    groups = config.groups(context.world_size)
    on_main(context, partial(_predict, config, run))
    lasted: dict[str, float] = {}
    cells = [(None, ranks) for ranks in groups if ranks > 1] + list(config.cells(context.world_size))
    with ExitStack() as stack:
        members = {ranks: stack.enter_context(first_ranks(context, ranks)) for ranks in groups}
        for number, (regime, ranks) in enumerate(cells):
            name = "collectives" if regime is None else str(regime)
            # Rows of a cell are written one by one: with the last all are there. Rank 0 has those of every cell.
            last = f"fit {COLLECTIVES[-1]}" if regime is None else _names(config, ranks)[-1]
            done = run.done(last, regime=name, world_size=ranks) is not None
            enough = 60 * config.minutes - (time.monotonic() - begin) > lasted.get(name, 0.0)
            done, enough = collectives.gather_objects((done, enough), context.group)[0]
            if done or not enough:
                if not done:
                    run.notice(f"{name} on {ranks} ranks: no time left; go on with --name {run.path.name}")
                    run.cut_off = True
                continue
            run.progress(f"{name} on {ranks} ranks")
            started = time.monotonic()
            group = members[ranks]
            if group is not None:
                sweep(config, group, run) if regime is None else time_cell(config, regime, group, run)
            rest(context, f"scaling-{number}", ranks)
            lasted[name] = time.monotonic() - started
            if context.is_main:
                _complete(run)


def _predict(config: MeasureConfig, run: Run) -> None:
    """Write the predictions, unless the run that was cut off has."""
    if not (run.path / PREDICTIONS).exists():
        found = predictions(config, run.header.world_size, str(run.header.environment["device_name"]))
        write_json(found, run.path / PREDICTIONS)


def _complete(run: Run) -> None:
    """Add to the rows their efficiency, and what had been predicted."""
    expected = {
        (r.config["regime"], r.config["world_size"], r.variant): r.metrics
        for r in read_json(run.path / PREDICTIONS)
    }
    alone = {
        r.config["regime"]: r.metrics["step_p50_ms"]
        for r in run.records
        if r.variant == "local" and r.config["world_size"] == 1 and r.metrics["step_p50_ms"] != "OOM"
    }
    for record in run.records:
        regime, ranks = record.config["regime"], record.config["world_size"]
        step = record.metrics.get("step_p50_ms")
        record.metrics.update(expected.get((regime, ranks, record.variant), {}))
        if isinstance(step, float) and regime in alone:
            share = ranks if record.config["kind"] == "strong" else 1
            record.metrics["efficiency_pct"] = 100 * alone[regime] / step / share
        if isinstance(step, float) and "predicted_step_ms" in record.metrics:
            record.metrics["error_pct"] = 100 * (record.metrics["predicted_step_ms"] / step - 1)
    run.save()


def _names(config: MeasureConfig, ranks: int) -> tuple[str, ...]:
    """The strategies of a cell."""
    return ("local", *(name for name in config.strategies if name != "local" and ranks > 1))


def sweep(config: MeasureConfig, context: RankContext, run: Run) -> None:
    """Bus bandwidths and the fit of each collective on one group, as `simulate.calibrate.measured_links` reads them."""
    for operation in COLLECTIVES:
        timed = [
            time_collective(context, operation, size, repeats=8, budget_s=0.3) for size in config.sweep_bytes
        ]
        sizes, seconds = [timing.num_bytes for timing in timed], [timing.p50_s for timing in timed]
        own = {"regime": "collectives", "kind": "collectives", "operation": operation, "sizes": sizes}
        own |= {"world_size": context.world_size, "backend": context.backend}
        metrics = fit_collective(sizes, seconds).metrics(sizes, seconds) | {
            "seconds": seconds,
            "algbw_gb_per_s": max(size / time for size, time in zip(sizes, seconds, strict=True)) / 1e9,
            "max_abs_error": max(timing.max_abs_error for timing in timed),
        }
        run.add(f"fit {operation}", metrics, **own)


def time_cell(config: MeasureConfig, regime: Regime, context: RankContext, run: Run) -> None:
    """All strategies of one regime on one group."""
    options = config.bench(regime, context.world_size)
    rows = variants(_names(config, context.world_size), [config.bucket_size_mb])
    bench = options.workbench(context, rows, some=True)
    identical: dict[str, dict[str, bool | None]] = {}

    def compare(variant: Variant, attached: Any) -> None:
        if variant.strategy.synchronizes and variant.name not in identical:
            identical[variant.name] = compare_ranks(context, variant, attached)

    timings = bench.time_rounds(
        rows,
        rounds=config.rounds,
        warmup=config.warmup,
        steps=config.steps,
        inspect=compare,
        progress=run.progress,
    )
    for row in rows:
        metrics = timings[row.name].metrics() | identical.get(row.name, {})
        metrics["noise_pct"] = noise_of(metrics)
        if metrics["step_p50_ms"] != "OOM":
            tokens = context.world_size * options.batch * bench.shape.context_length
            metrics["tokens_per_s"] = 1e3 * tokens / metrics["step_p50_ms"]
        run.add(row.name, metrics, **key(regime, context.world_size) | options.facts(context), batch=options.batch)


def compare_ranks(context: RankContext, variant: Variant, attached: Any) -> dict[str, bool | None]:
    """Whether parameters and gradients are bit for bit the same on all ranks. Every rank calls it.

    Gradients are None for strategies that leave each rank only its shard of them.
    """
    parameters = attached.model.full_parameters().values()
    same = _same_bits(context, parameters)
    gradients = None
    if variant.strategy.name not in SHARDED_GRADIENTS:
        gradients = _same_bits(context, [p.grad for p in parameters if p.grad is not None])
    return {"parameters_identical": same, "gradients_identical": gradients}


@torch.no_grad()
def _same_bits(context: RankContext, tensors: Any) -> bool:
    differs = torch.zeros((), dtype=torch.bool, device=context.device)
    for tensor in tensors:
        own = tensor.detach().contiguous()
        first = own.clone()
        collectives.broadcast(first, context.group).wait()
        differs |= (first.view(torch.uint8) != own.view(torch.uint8)).any()
    return collectives.all_ranks_agree(not differs.item(), context.device, context.group)


PREDICTED = {"efficiency_pct": "predicted_efficiency_pct", "step_p50_ms": "predicted_step_ms"}
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


headline = headline_from(
    "Scaling on up to {most} × {device_name}, {dtype}, torch {torch}",
    most=lambda records: max(record.config["world_size"] for record in records),
)


def draw_regime(number: int, records: Sequence[Record], path: Path) -> None:
    """Efficiency and step time of the regime of that number: points measured, lines predicted; torch's are hollow."""
    names = [n for n in dict.fromkeys(r.config["regime"] for r in records) if n != "collectives"]
    if number > len(names):
        return
    rows = [r for r in records if r.config["regime"] == names[number - 1]]
    rows = [r for r in rows if isinstance(r.metrics.get("step_p50_ms"), float)]
    alone = [r for r in rows if r.config["world_size"] == 1]  # where every line begins
    rows = [r for r in rows if r.variant != "local"]
    rows.sort(key=lambda r: r.config["world_size"])
    if not rows:
        return
    ticks = [(ranks, str(ranks)) for ranks in sorted({r.config["world_size"] for r in alone + rows})]
    series: dict[str, list[Series]] = {"efficiency_pct": [], "step_p50_ms": []}
    for strategy, mine in grouped(rows, lambda r: r.variant).items():
        own = OURS.get(strategy)
        places = [*STRATEGIES, strategy]  # side by side, not on top of each other
        shift = 0.88 + 0.24 * places.index(strategy) / len(STRATEGIES)
        for metric, predicted in PREDICTED.items():
            if not all(metric in r.metrics for r in mine):
                continue
            spread = [[_at(r, metric, f"step_{p}_ms") for r in mine] for p in ("p20", "p50", "p80")]
            low, middle, high = spread if metric == "step_p50_ms" else spread[::-1]  # the shorter the step, the higher
            points = [shift * r.config["world_size"] for r in mine]
            series[metric].append(Series(strategy, points, middle, low, high, hollow=own is not None, like=own))
            if own is None and all(predicted in r.metrics for r in mine):
                line = {r.config["world_size"]: r.metrics[predicted] for r in alone + mine if predicted in r.metrics}
                x, y = list(line), list(line.values())
                series[metric].append(Series(f"{strategy}, predicted", x, y, line="-", like=strategy))
    panels = [
        Panel(title, "ranks", unit, series[metric], x_ticks=ticks, from_zero=metric != "efficiency_pct")
        for title, unit, metric in (("efficiency", "%", "efficiency_pct"), ("step time", "ms", "step_p50_ms"))
        if series[metric]
    ]
    lines(path, panels, title=f"{names[number - 1]}: points measured, lines predicted. {headline(records)}")


def _at(record: Record, metric: str, end: str) -> float:
    """A row's metric, had its step taken as long as that percentile of it."""
    step, other = record.metrics["step_p50_ms"], record.metrics[end]
    return other if metric == "step_p50_ms" else record.metrics[metric] * step / other


VIEW = View(
    columns=[
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
    ],
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

ON_CPU = {
    "regimes": ("weak:tiny:2", "strong:tiny:4"), "context": 32, "dtype": "fp32", "bucket_size_mb": 4.0,
    "sweep_bytes": tuple(4096 * 8**k for k in range(4)),
}  # fmt: skip
QUICK = ON_CPU | {"strategies": ("bucketed", "torch-ddp"), "warmup": 1, "steps": 3}
SMOKE = {"regimes": ("weak:tiny:1",), "strategies": ("bucketed",), "context": 16, "sweep_bytes": (4096, 16384)}
EXPERIMENT = Experiment(
    MeasureConfig, measure, VIEW,
    presets={"cpu": ON_CPU, "quick": QUICK, "smoke": QUICK | SMOKE},
    ranks="many",
    wrong=wrong_rows,
    same_run=lambda before, now: [line for line in same_run(before, now) if not line.startswith("option minutes ")],
)  # fmt: skip
