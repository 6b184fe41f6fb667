"""How well do the strategies scale on this host? Weak and strong scaling measured on 1, 2, 4, … of its ranks at once.

    python -m experiments.scaling --measure                       one rank per GPU, or two on a CPU
    torchrun --standalone --nproc_per_node=8 launch/scaling.py

One launch, sub-groups of its first ranks. Predictions are written before anything is timed and kept as they are; after
every cell (one regime on one number of ranks) the records are written, so that a run that was cut off goes on with
`--resume FOLDER`. A cell interleaves all strategies. After each, parameters (and gradients, where whole ones exist) are
compared bit by bit across ranks. Each group size also gets a short sweep of collectives with its fit.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import doubling_sizes, first_ranks, rest
from distlab.hardware import by_alias, lookup
from distlab.measure.bandwidth import time_collective
from distlab.measure.timing import MIN_SAMPLES, percentiles
from distlab.model.config import ModelConfig, preset
from distlab.parallel import get_strategy
from distlab.report.record import OutputFolder, Record, commit, environment, read_json, write_json
from distlab.report.sweeps import Panel, Series, curves
from distlab.report.table import Column
from distlab.report.view import View
from distlab.simulate.estimate import estimate_step, machine_of
from distlab.theory.collective_fit import fit_collective, relative_errors
from distlab.train.workbench import Variant, Workbench, full_parameters

NAME = "scaling_measured"
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
# Predictions know our strategies; torch's peers are held against those that send the same.
PEER_OF = {"torch-ddp": "bucketed", "torch-zero": "sharded-optimizer", "fsdp2": "fsdp"}
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp", *PEER_OF)
GRADIENTS_IN_PIECES = ("zero1", "fsdp", "fsdp2")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
PREDICTIONS = "predictions.json"


@dataclass(frozen=True)
class Regime:
    """`weak`: `batch` sequences per rank; `strong`: `batch` sequences together. Raises ValueError for others."""

    kind: str
    model: str
    batch: int

    def __post_init__(self) -> None:
        if self.kind not in ("weak", "strong") or self.batch < 1:
            raise ValueError(
                f"regime {self.kind}:{self.model}:{self.batch}: say weak or strong, and a batch from 1"
            )

    @classmethod
    def parse(cls, text: str) -> "Regime":
        """From `weak:xl:8`."""
        kind, _, rest = text.partition(":")
        model, _, batch = rest.partition(":")
        if not batch.isdigit():
            raise ValueError(
                f"regime {text!r}: write KIND:MODEL:BATCH, such as weak:xl:8 or strong:medium:16"
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
class MeasureConfig:
    """What to measure.

    Args:
        regimes: in order of importance; what the time does not suffice for is left for `--resume`.
        strategies: names; `local` is always timed too.
        ranks: numbers of ranks; () for 1, 2, 4, … and all. On one rank `local` alone runs.
        context: tokens per sequence; None for the preset's.
        dtype: fp32 or bf16 over fp32 parameters.
        bucket_size_mb: MiB, of the strategies with buckets.
        warmup, steps, rounds: untimed and timed steps per round, and interleaved rounds.
        sweep_bytes: payloads of the collectives' sweep; () leaves it out.
        minutes: no cell is begun that would end later.
        device: short name of the device to predict for; None: this one, and no predictions if it is unknown.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    regimes: tuple[Regime, ...] = (
        Regime("weak", "xl", 8),
        Regime("weak", "xl", 2),
        Regime("strong", "medium", 16),
    )
    strategies: tuple[str, ...] = STRATEGIES
    ranks: tuple[int, ...] = ()
    context: int | None = None
    dtype: str = "bf16"
    bucket_size_mb: float | None = 100.0
    warmup: int = 2
    steps: int = 8
    rounds: int = 1
    sweep_bytes: tuple[int, ...] = tuple(65536 * 4**k for k in range(8))
    minutes: float = 8.0
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
        if not self.regimes or not self.strategies:
            raise ValueError("give at least one regime and one strategy")
        if (
            min(self.warmup, self.rounds) < 1
            or self.steps * self.rounds < MIN_SAMPLES
            or not self.minutes > 0
        ):
            raise ValueError(
                f"warmup={self.warmup}, steps={self.steps}, rounds={self.rounds}, minutes={self.minutes}: at least "
                f"one each, {MIN_SAMPLES} timed steps, and some time"
            )
        for strategy in self.strategies:
            get_strategy(strategy)
        for regime in self.regimes:
            self.model(regime)
        if self.device is not None:
            by_alias(self.device)

    def model(self, regime: Regime) -> ModelConfig:
        return preset(regime.model, **({} if self.context is None else {"context_length": self.context}))

    def groups(self, world_size: int) -> tuple[int, ...]:
        """Numbers of ranks to measure on. Raises ValueError for one that there is not."""
        groups = self.ranks or doubling_sizes(world_size)
        if min(groups) < 1 or max(groups) > world_size:
            raise ValueError(f"ranks {groups}: between 1 and the {world_size} that were started (--nproc)")
        return tuple(sorted(groups))

    def cells(self, world_size: int) -> Iterator[tuple[Regime, int]]:
        """(regime, ranks), in the order in which they are measured."""
        for regime in self.regimes:
            for ranks in self.groups(world_size):
                if regime.per_rank(ranks):
                    yield regime, ranks


def predictions(config: MeasureConfig, world_size: int, device_name: str) -> list[Record]:
    """A record per regime, number of ranks and strategy: constants of the datasheet at the shares of its peaks that
    two GPUs of a kind were calibrated to reach (`distlab.simulate.estimate`). Empty where the device is unknown.

    Simulates, so it needs a process without a process group.
    """
    spec = by_alias(config.device) if config.device else lookup(device_name)
    if spec is None:
        return []
    machine, facts = (
        machine_of(spec, dtype=config.dtype),
        {"environment": environment("cpu"), "commit": commit()},
    )
    records = []
    for regime, ranks in config.cells(world_size):
        alone = _estimate(config, regime, machine, "local", 1)
        for strategy in ("local", *(config.strategies if ranks > 1 else ())):
            step_ms = _estimate(config, regime, machine, PEER_OF.get(strategy, strategy), ranks)
            metrics = {"predicted_step_ms": step_ms, "predicted_efficiency_pct": 100 * alone / step_ms}
            if regime.kind == "strong":
                metrics["predicted_efficiency_pct"] /= ranks
            records.append(
                Record(NAME, strategy, _key(regime, ranks) | {"device": spec.name}, metrics, **facts)
            )
    return records


def _estimate(config: MeasureConfig, regime: Regime, machine: Any, strategy: str, ranks: int) -> float:
    time = estimate_step(
        config.model(regime),
        strategy,
        machine,
        batch=regime.per_rank(ranks),
        ranks=ranks,
        dtype=config.dtype,
        bucket_size_mb=config.bucket_size_mb,
    )
    return 1e3 * time.step


def _key(regime: Regime, ranks: int) -> dict[str, Any]:
    return {"regime": str(regime), "kind": regime.kind, "size": regime.model, "world_size": ranks}


def run(
    config: MeasureConfig,
    context: RankContext,
    folder: OutputFolder,
    *,
    default_commit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Predict, then measure what the folder does not hold yet; call it on every rank. All get the same records.

    Raises:
        ValueError: the folder holds records of another machine.
    """
    begin = time.monotonic()
    facts = {"environment": environment(context.device), "commit": commit(default_commit)}
    groups = config.groups(context.world_size)
    records = _resume(config, context, folder, facts["environment"])
    lasted: dict[str, float] = {}
    with ExitStack() as stack:
        members = {ranks: stack.enter_context(first_ranks(context, ranks)) for ranks in groups}
        for number, (regime, ranks) in enumerate(
            [(None, n) for n in groups] + [*config.cells(context.world_size)]
        ):
            known = {(r.config["regime"], r.config["world_size"]) for r in records}
            name = "collectives" if regime is None else str(regime)
            if (name, ranks) in known or (regime is None and (ranks == 1 or not config.sweep_bytes)):
                continue
            left = 60 * config.minutes - (time.monotonic() - begin)
            enough = collectives.gather_objects(left > lasted.get(name, 0.0), context.group)[0]
            if not enough:
                progress(f"{name} on {ranks} ranks: no time left; go on with --resume {folder.path}")
                continue
            progress(f"{name} on {ranks} ranks")
            started, mine = time.monotonic(), []
            if members[ranks] is not None:
                measured = _sweep(config, members[ranks]) if regime is None else None
                for variant, own, metrics in measured or _cell(config, regime, members[ranks], progress):
                    mine.append(Record(NAME, variant, asdict(config) | own, metrics, **facts))
            rest(context, f"scaling-{number}", ranks)
            lasted[name] = time.monotonic() - started
            records += collectives.gather_objects(mine, context.group)[0]
            if context.is_main:
                write_json(_complete(records, folder), folder.path / "records.json")
    return collectives.gather_objects(_complete(records, folder) if context.is_main else None, context.group)[
        0
    ]


def _resume(
    config: MeasureConfig, context: RankContext, folder: OutputFolder, here: dict[str, Any]
) -> list[Record]:
    """What the folder holds, and its predictions, written now if they are not there."""
    found: list[Record] | Exception = []
    if context.is_main:
        try:
            path = folder.path / "records.json"
            found = read_json(path) if path.exists() else []
            others = {r.environment["device_name"] for r in found} - {here["device_name"]}
            if others:
                raise ValueError(
                    f"{path} holds records of {', '.join(others)}, this is {here['device_name']}"
                )
            if not (folder.path / PREDICTIONS).exists():
                arguments = config, context.world_size, str(here["device_name"])
                write_json(_in_own_process(predictions, *arguments), folder.path / PREDICTIONS)
        except (ValueError, OSError) as error:
            found = error
    found = collectives.gather_objects(found, context.group)[0]
    if isinstance(found, Exception):
        raise found
    return found


def _in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a fresh interpreter. Raises RuntimeError with what it wrote to stderr if it fails."""
    code = "import pickle, sys; f, a = pickle.load(sys.stdin.buffer); pickle.dump(f(*a), sys.stdout.buffer)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((function, arguments)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise RuntimeError(f"predictions failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return pickle.loads(done.stdout)


def _sweep(config: MeasureConfig, context: RankContext) -> list[tuple[str, dict, dict]]:
    """Bus bandwidths and the fit of each collective on one group, as `simulate.calibrate.measured_links` reads them."""
    rows = []
    for operation in COLLECTIVES:
        timed = [
            time_collective(context, operation, size, repeats=8, budget_s=0.3) for size in config.sweep_bytes
        ]
        sizes = [timing.num_bytes for timing in timed]
        seconds = [percentiles(timing.samples_ms)["p50"] / 1e3 for timing in timed]
        fit = fit_collective(sizes, seconds)
        errors = [100 * error for error in relative_errors(fit, sizes, seconds)]
        own = {"regime": "collectives", "kind": "collectives", "operation": operation, "sizes": sizes}
        own |= {"world_size": context.world_size, "backend": context.backend}
        metrics = {
            "pieces": fit.to_list(),
            "seconds": seconds,
            "fit_error_max_pct": max(map(abs, errors)),
            "algbw_gb_per_s": max(size / time for size, time in zip(sizes, seconds, strict=True)) / 1e9,
            "max_abs_error": max(timing.max_abs_error for timing in timed),
        }
        rows.append((f"fit {operation}", own, metrics))
    return rows


def _cell(
    config: MeasureConfig, regime: Regime, context: RankContext, progress: Callable[[str], None]
) -> list[tuple[str, dict, dict]]:
    """All strategies of one regime on one group."""
    model, batch = config.model(regime), regime.per_rank(context.world_size)
    bench = Workbench(context, model, batch_size=batch, compute_dtype=DTYPES[config.dtype], seed=config.seed)
    names = ("local", *(config.strategies if context.world_size > 1 else ()))
    rows = [Variant(name, get_strategy(name), config.bucket_size_mb) for name in names]
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
        progress=progress,
    )
    found = []
    for row in rows:
        timing, metrics = timings[row.name], {"step_p50_ms": "OOM"}
        if not timing.out_of_memory:
            metrics = {f"step_{p}_ms": value for p, value in percentiles(timing.phases["step"]).items()}
            tokens = context.world_size * batch * model.context_length
            metrics["tokens_per_s"] = 1e3 * tokens / metrics["step_p50_ms"]
            metrics["peak_alloc_bytes"] = timing.peak_alloc_bytes
        own = _key(regime, context.world_size) | {"batch": batch, "backend": context.backend}
        own |= {"context": model.context_length, "num_parameters": model.num_parameters}
        found.append((row.name, own, metrics | identical.get(row.name, {})))
    return found


def compare_ranks(context: RankContext, variant: Variant, attached: Any) -> dict[str, bool | None]:
    """Whether parameters and gradients are bit for bit the same on all ranks. Every rank calls it.

    Gradients are None for strategies that leave each rank only its piece of them.
    """
    parameters = full_parameters(attached.model, attached.optimizer).values()
    same = _same_bits(context, parameters)
    gradients = None
    if variant.strategy.name not in GRADIENTS_IN_PIECES:
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


def _complete(records: Sequence[Record], folder: OutputFolder) -> list[Record]:
    """The records with efficiency, and with what had been predicted."""
    expected = {
        (r.config["regime"], r.config["world_size"], r.variant): r.metrics
        for r in read_json(folder.path / PREDICTIONS)
    }
    alone = {
        r.config["regime"]: r.metrics["step_p50_ms"]
        for r in records
        if r.variant == "local" and r.config["world_size"] == 1 and r.metrics["step_p50_ms"] != "OOM"
    }
    for record in records:
        regime, ranks, step = (
            record.config["regime"],
            record.config["world_size"],
            record.metrics.get("step_p50_ms"),
        )
        record.metrics.update(expected.get((regime, ranks, record.variant), {}))
        if isinstance(step, float) and regime in alone:
            share = ranks if record.config["kind"] == "strong" else 1
            record.metrics["efficiency_pct"] = 100 * alone[regime] / step / share
        if isinstance(step, float) and "predicted_step_ms" in record.metrics:
            record.metrics["error_pct"] = 100 * (record.metrics["predicted_step_ms"] / step - 1)
    return list(records)


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
    for regime in dict.fromkeys(r.config["regime"] for r in timed):
        mine = [r for r in timed if r.config["regime"] == regime]
        most = max(r.config["world_size"] for r in mine)
        at_most = {r.variant: r.metrics["efficiency_pct"] for r in mine if r.config["world_size"] == most}
        pairs = (("bucketed", "torch-ddp"), ("zero1", "torch-zero"), ("fsdp", "fsdp2"))
        compared = [
            f"{ours} {at_most[ours]:.1f} % beside {peer} {at_most[peer]:.1f} %"
            for ours, peer in pairs
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


def headline(records: Sequence[Record]) -> str:
    """One line that says what was measured."""
    env, config = records[0].environment, records[0].config
    most = max(record.config["world_size"] for record in records)
    return f"Scaling on up to {most} × {env['device_name']}, {config['dtype']}, torch {env['torch']}"


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
            from_zero = metric != "efficiency_pct"
            panels.append(Panel(title, "ranks", unit, series, x_ticks=ticks, from_zero=from_zero))
    curves(path, panels, title=f"{names[number - 1]}: points measured, lines predicted. {headline(records)}")


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
    own = {"torch-ddp": "bucketed", "torch-zero": "zero1", "fsdp2": "fsdp"}.get(strategy)
    places = [*STRATEGIES, strategy]  # side by side, not on top of each other
    shift = 0.88 + 0.24 * places.index(strategy) / len(STRATEGIES)
    series = [Series(strategy, [shift * n for n in x], y, *spread, dashed=own is not None, like=own)]
    name = {"step_p50_ms": "predicted_step_ms", "efficiency_pct": "predicted_efficiency_pct"}[metric]
    if own is None and all(name in r.metrics for r in rows):
        predicted = [r.metrics[name] for r in rows]
        series.append(Series(f"{strategy}, predicted", x, predicted, line=True, like=strategy))
    return series


VIEW = View(
    NAME,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={f"regime{number}.png": partial(draw_regime, number) for number in range(1, 6)},
    findings=findings,
    reading="Efficiency is the step on one rank without communication over the step here; for strong scaling, where "
    "the batch is shared out, over the step times the ranks. Filled points are ours, hollow ones torch's. Parameters "
    "and gradients were compared bit by bit across ranks after the timed steps.",
    prediction="In closed form from the datasheet, at the shares of its peaks that two GPUs were calibrated to reach; "
    "written to predictions.json before the first measurement. torch's rows stand beside the prediction for the "
    "strategy that sends the same.",
    noise="Error bars reach from p20 to p80 of the steps.",
)
