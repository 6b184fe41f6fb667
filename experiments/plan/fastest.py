"""The plan: every choice of strategy, micro-batch, recomputation and layout, the fastest first.

Memory and time are closed forms. The search leaves out choices that cannot be the fastest. Options
are in `question.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush
from itertools import count

from distlab.experiment import Column, Metrics, Record, Records, Run, View, headline_from
from distlab.model import kept_levels
from distlab.parallel import Layout, get_strategy
from distlab.report import gib_column, text_column
from distlab.simulate.choices import (
    BUCKET_SIZES_MB,
    MOST_MICRO_BATCHES,
    Choice,
    choices,
    estimated,
    memory,
)
from distlab.simulate.estimate import host_time
from distlab.simulate.timeline import Machine, replay
from distlab.theory.flops import mfu, step_flops
from distlab.theory.memory.activations import FP32
from distlab.theory.memory.peak import devices_to_fit
from distlab.theory.memory.recompute import recomputed_flops
from distlab.theory.reliability import Failures
from experiments._own_model import simulated

from .question import PlanConfig, place_of

# Each strategy with its group and recomputation has rows for its 2 fastest micro-batches.
PER_STRATEGY = 2
# Micro-batches of a series that are timed: those of a pipeline, or the few largest, of which the
# fastest is one.
CANDIDATES = max(PER_STRATEGY, MOST_MICRO_BATCHES)
NOTHING_FITS = {"predicted_step_ms": None, "limited_by": "memory"}
# If the host takes more than this fraction of a step, a slower host would decide the step's time.
HOST_SHARE = 0.75
# Part of a step → its metric, without the unit.
PARTS = {
    "compute": "compute",
    "memory bandwidth": "memory_bandwidth",
    "overhead of communication": "communication",
    "waiting for the host": "host",
    "optimizer": "optimizer",
}
# Bytes of a checkpoint per parameter: the parameter and AdamW's two moments, in fp32.
STATE_BYTES = 12
NODE_WRITES = 2e9  # bytes of a checkpoint that a node writes per second
RESTART_S = 600.0  # time from a failure to the first new step


def measure_choices(config: PlanConfig, run: Run) -> None:
    """Add a row per choice, those that fit first, fastest first; of each layout its fastest."""
    machine = config.machine()
    gpu, ranks = config.fleet()
    own = {"num_parameters": config.num_parameters(), "world_size": ranks}
    layouts = config.offered()
    for number, layout in enumerate(layouts, 1):
        shared = layout if layout.ranks > 1 else "a model on every rank"
        run.progress(f"layout {number} of {len(layouts)}: {shared}")
        for choice, metrics in search(config, layout, machine):
            settings = vars(choice) | {"layout": str(choice.layout)}
            row = run.add(str(choice), metrics, **own, **settings)
            # No device was measured, so the record names the one that was asked for.
            row.environment["device_name"] = f"{gpu.name}, predicted"
    # Layouts were searched one after the other, and the answer is the fastest of all.
    run.records.sort(key=_order)
    run.save()


def _order(record: Record) -> tuple[bool, float]:
    """Sort rows that fit by their time, and after them the others by their memory."""
    metrics = record.metrics
    return not metrics["fits"], metrics["predicted_step_ms"] or peak_bytes(record)


def peak_bytes(record: Record) -> float:
    """Return the bytes that a rank of a row needs."""
    return record.metrics["predicted_peak_bytes"]


def search(config: PlanConfig, layout: Layout, machine: Machine) -> list[tuple[Choice, Metrics]]:
    """Return the choices of a layout that become rows, without trying all of them.

    Without a model that ranks share, those are the fastest micro-batches that fit of each way (a
    strategy with its group and recomputation), else the one fastest choice. A way of which nothing
    fits is shown by its least memory.
    """
    _, ranks = config.fleet()

    # Bisection and sorting ask for the memory of the same choice several times.
    @cache
    def memory_of(choice: Choice) -> Metrics:
        return _memory(config, choice, ranks)

    def needed(choice: Choice) -> Metrics:
        # The size of the buckets does not change the memory. One size for all lets the cache hit.
        return memory_of(replace(choice, bucket_size_mb=BUCKET_SIZES_MB[0]))

    def peak_of(choice: Choice) -> float:
        return needed(choice)["predicted_peak_bytes"]

    def step_ms(row: tuple[Choice, Metrics]) -> float:
        _, metrics = row
        return metrics["predicted_step_ms"]

    series = _series(config, layout, machine)
    ways: dict[tuple, list[list[Choice]]] = {}  # one series per size of buckets
    for choices_of_one in series:
        # All choices of a series share these three, so the first one stands for them.
        first = choices_of_one[0]
        ways.setdefault((first.strategy, first.group, first.recompute), []).append(choices_of_one)

    if layout.ranks > 1:
        found = _fastest(config, series, machine, needed)
        if found is None:  # show the way that comes closest
            # First by the parameters alone, which needs no search, then by the whole peak.
            least = min(least_bytes(config, each[0]) for each in series)
            closest = [each[-1] for each in series if least_bytes(config, each[0]) == least]
            last = min(closest, key=peak_of)
            return [(last, needed(last) | NOTHING_FITS)]
        return [(found, needed(found) | _time(config, found, machine))]

    rows = []
    for way in ways.values():
        fitting = [choice for each in way for choice in _largest_fitting(each, needed)]
        timed = [(choice, needed(choice) | _time(config, choice, machine)) for choice in fitting]
        # Series that differ only in the size of buckets compete for the same two rows.
        timed.sort(key=step_ms)
        # The smallest micro-batch of a series, and so its least memory.
        last = way[-1][-1]
        rows.extend(timed[:PER_STRATEGY] or [(last, needed(last) | NOTHING_FITS)])
    return rows


def least_bytes(config: PlanConfig, choice: Choice) -> float:
    """Return the bytes that a rank needs at least, without a search.

    If parameters are whole, these are parameters and their gradients in fp32.
    """
    # These strategies shard parameters and gradients, and have no such bound.
    if get_strategy(choice.strategy).sends == "units":
        return 0.0
    shares = choice.layout.tensor * choice.layout.pipeline
    # Parameters and gradients in fp32. Tensor and pipeline ranks hold a part each.
    return 2 * FP32 * config.num_parameters() / shares


def _series(config: PlanConfig, layout: Layout, machine: Machine) -> list[list[Choice]]:
    """Return the choices of a layout in lists that differ only in their micro-batch.

    The largest micro-batch comes first.
    """
    _, ranks = config.fleet()
    nodes = machine.network.devices_per_node
    recomputation = config.recomputation if config.factory is None else ("none",)
    strategies = [
        # A user's model is planned without a mesh, see `check_given`.
        name
        for name in config.strategies
        if config.factory is None or not get_strategy(name).takes_mesh
    ]
    found: dict[tuple, list[Choice]] = {}
    for choice in choices(
        ranks // (layout.tensor * layout.pipeline),
        # Ranks that share matrices are next to each other in a node, so fewer groups of them fit
        # into it.
        max(1, nodes // layout.tensor),
        # Sequences of a step for one group of ranks that share a model.
        config.batch * layout.ranks // ranks,
        strategies,
        recomputation,
        layout,
    ):
        way = (choice.strategy, choice.group, choice.recompute, choice.bucket_size_mb)
        found.setdefault(way, []).append(replace(choice, optimizer=config.optimizer))
    return list(found.values())


def _largest_fitting(series: Sequence[Choice], needed: Callable[[Choice], Metrics]) -> list[Choice]:
    """Return the largest micro-batches of a series that fit, the largest first.

    Their number is `CANDIDATES`, because others cannot be the fastest.

    Larger ones take more memory, so the largest that fits is found by bisection. The whole share at
    once is the exception: without accumulation, there are no sums of gradients in memory.
    """

    def fits(choice: Choice) -> bool:
        return needed(choice)["fits"]

    whole = [choice for choice in series if choice.micro_batches == 1 and fits(choice)]
    parts = [choice for choice in series if choice.micro_batches > 1]
    # `parts` has the largest first, so `fits` is False and then True.
    first = bisect_left(parts, True, key=fits)
    return [*whole, *parts[first : first + CANDIDATES]]


def _fastest(
    config: PlanConfig,
    series: Sequence[Sequence[Choice]],
    machine: Machine,
    needed: Callable[[Choice], Metrics],
) -> Choice | None:
    """Return the fastest choice that fits, or None.

    Choices are taken in order of their time, and only of these the memory is asked for. A smaller
    micro-batch is never faster, except in a pipeline, which it keeps busier: there all are timed at
    once.
    """
    shape, (_, ranks) = config.shape(), config.fleet()
    # Estimated seconds, a number that breaks ties, and the choices of a series that are left.
    waiting: list[tuple[float, int, Sequence[Choice]]] = []
    numbers = count()

    def wait(left: Sequence[Choice]) -> None:
        time = estimated(shape, left[0], machine, ranks, config.dtype, config.kernels())
        # The number keeps the heap from comparing choices of equal time.
        heappush(waiting, (time.step, next(numbers), left))

    for each in series:
        if least_bytes(config, each[0]) > config.usable_bytes():
            # A choice whose parameters alone do not fit need not be searched.
            continue
        if each[0].layout.pipeline > 1:
            for choice in each:
                wait([choice])
        else:
            wait(each)
    while waiting:
        _, _, left = heappop(waiting)
        # Everything still waiting is slower, so the first that fits is the fastest.
        if needed(left[0])["fits"]:
            return left[0]
        if smaller := _largest_fitting(left[1:], needed):
            wait(smaller)
    return None


def _memory(config: PlanConfig, choice: Choice, ranks: int) -> Metrics:
    """Return the memory of a rank. A user's model is stepped for it in the fake world."""
    if config.factory is not None:
        needed = simulated(config.factory, choice.strategy, choice.micro_batch, ranks, config.dtype)
    else:
        needed = memory(
            config.shape(), choice, ranks, config.dtype, compiled=config.compile != "off"
        )
    usable = config.usable_bytes()
    return {
        "fits": needed.peak.total <= usable,
        "predicted_peak_bytes": needed.peak.total,
        # A parameter takes four numbers of 4 bytes: itself, its gradient and AdamW's two moments.
        "devices_for_states": devices_to_fit(4 * 4 * config.num_parameters(), usable),
    }


def _time(config: PlanConfig, choice: Choice, machine: Machine) -> Metrics:
    _, ranks = config.fleet()
    if config.factory is not None:
        return _time_of_own(config, choice, machine)
    model = config.shape()
    time = estimated(model, choice, machine, ranks, config.dtype, config.kernels())
    # Of all ranks that share a model; each has an equal part.
    sizes, shared = model.sizes(config.batch * choice.layout.ranks // ranks), choice.layout.ranks
    again = recomputed_flops(kept_levels(choice.recompute, model.num_layers), causal=True, **sizes)
    # With recomputation, which takes time. The FLOPs of MFU below are without it.
    matmuls = (step_flops(causal=True, **sizes) + again) / shared / machine.device.flops_per_s
    parts = {
        "compute": min(matmuls, time.compute),
        # What compute takes longer than its FLOPs at the rate of matmuls is the time of operators
        # that wait for memory.
        "memory bandwidth": max(0.0, time.compute - matmuls),
        "communication": time.overhead,
        "optimizer": time.optimizer,
        "host": time.step - time.device,
    }
    tokens_per_s = config.batch * model.context_length / time.step
    nodes = -(-ranks // machine.network.devices_per_node)
    # Nodes write their parts of a checkpoint at the same time.
    saving = STATE_BYTES * model.num_parameters / nodes / NODE_WRITES
    failures = Failures.of_gpus(ranks, saving, RESTART_S)
    goodput = failures.goodput(failures.daly())
    flops = step_flops(**sizes) / shared
    return _step(config, time.step, time.overhead, time.host, parts, flops) | {
        "predicted_tokens_per_s": tokens_per_s,
        "predicted_goodput_pct": 100 * goodput,
        "checkpoint_interval_s": failures.daly(),
        # Goodput: the share of time that is not lost to failures and to checkpoints.
        "predicted_days": config.tokens / tokens_per_s / goodput / 86_400,
    }


def _time_of_own(config: PlanConfig, choice: Choice, machine: Machine) -> Metrics:
    """Return `_time` of a user's model, by replaying its operators and messages."""
    _, ranks = config.fleet()
    step = simulated(config.factory, choice.strategy, choice.micro_batch, ranks, config.dtype)
    # One micro-batch was simulated, and the step has several of them.
    once, steps = replay(step, machine), choice.micro_batches
    optimizer_s = sum(
        machine.device.seconds(op) for op in step.operators if op.phase == "optimizer"
    )
    # Seconds of forward and backward of one micro-batch.
    compute_s = sum(map(machine.device.seconds, step.operators)) - optimizer_s
    flops = sum(op.flops for op in step.operators) * steps
    # The rate of matmuls may be lower than that of the simulated operators, so the part is limited.
    matmuls = min(flops / machine.device.flops_per_s, steps * compute_s)
    # Only the last micro-batch communicates. The others compute.
    device_s = once.step_ms / 1e3 + (steps - 1) * compute_s
    host_s = host_time(steps * len(step.operators), len(step.calls))
    # Device and host work at the same time, so the slower of them decides.
    step_s = max(device_s, host_s)
    parts = {
        "compute": matmuls,
        "memory bandwidth": steps * compute_s - matmuls,
        "communication": max(0.0, once.overhead_ms / 1e3),
        "optimizer": optimizer_s,
        "host": step_s - device_s,
    }
    found = _step(config, step_s, once.overhead_ms / 1e3, host_s, parts, flops)
    return found | {"predicted_examples_per_s": config.batch / step_s}


def _step(
    config: PlanConfig,
    step: float,
    overhead: float,
    host: float,
    parts: dict[str, float],
    flops: float,
) -> Metrics:
    """Return the metrics of any model's step.

    Times of the step and its parts are in seconds, FLOPs are those of one rank.
    """
    # torch multiplies fp32 outside of the tensor cores, unless it is told to use TF32.
    peak = config.gpu().peak[config.dtype]
    return {
        "predicted_step_ms": 1e3 * step,
        "predicted_overhead_ms": 1e3 * overhead,
        "predicted_host_ms": 1e3 * host,
        **{f"{name.replace(' ', '_')}_ms": 1e3 * seconds for name, seconds in parts.items()},
        "predicted_mfu_pct": 100 * mfu(flops, step, peak),
        # Host and GPU work at the same time. If the host needs longer, it decides the step alone,
        # and each part of the GPU's time is shorter than the host's.
        "limited_by": "host" if parts["host"] > 0 else max(parts, key=parts.__getitem__),
    }


def examples_of(records: Records) -> str:
    """Return the unit of the batch."""
    shape = PlanConfig.of(records[0].config).shape()
    return "examples" if shape is None else f"sequences × {shape.context_length} tokens"


def _ms(value: float) -> str:
    # Large numbers get no decimals, and small ones three digits.
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _days(days: float) -> str:
    """Return a number of days for a table. Less than one has two digits."""
    return f"{days:,.1f}" if days >= 1 else f"{days:.2g}"


def _duration(days: float) -> str:
    """Return a duration in the unit in which it is at least 1, from minutes to days."""
    if days >= 1:
        return f"{days:,.1f} days"
    hours = 24 * days
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{60 * hours:.2g} minutes"


def _limit(metrics: Metrics) -> str:
    """Return what decides the time of a step, as a clause."""
    step_ms, name = metrics["predicted_step_ms"], metrics["limited_by"]
    if name == "host":
        gpu_ms = step_ms - metrics["host_ms"]
        return f"the host decides it, and the GPU alone would need {_ms(gpu_ms)} ms"
    part_ms = metrics[f"{name.replace(' ', '_')}_ms"]
    return f"the largest part of the step is {name} ({100 * part_ms / step_ms:.0f} %)"


def answer(records: Records) -> str:
    """Return the answer in words. `recomputed` means activation checkpointing of every block."""
    config = PlanConfig.of(records[0].config)
    _, ranks = config.fleet()
    usable = config.usable_bytes()
    fitting = [record for record in records if record.metrics["fits"]]
    if not fitting:
        least = min(records, key=peak_bytes)
        peak = peak_bytes(least)
        return (
            f"Nothing fits in {usable / 2**30:.0f} usable GiB. Closest: {least.variant}, "
            f"{peak / 2**30:.1f} GiB, {(peak - usable) / 2**30:.1f} too much. The states alone "
            "need "
            f"{least.metrics['devices_for_states']} devices: more devices with fsdp, a shorter "
            "--context, or a smaller "
            "model."
        )
    best = fitting[0]
    m = best.metrics
    if config.factory is None:
        rate = f"{m['predicted_tokens_per_s']:,.0f} tokens/s"
        total = (
            f", {config.tokens:.3g} tokens in {_duration(m['predicted_days'])} at a goodput of "
            f"{m['predicted_goodput_pct']:.1f} % (a checkpoint every "
            f"{m['checkpoint_interval_s'] / 60:,.0f} minutes)"
        )
    else:
        rate, total = f"{m['predicted_examples_per_s']:,.0f} examples/s", ""
    text = (
        f"Fastest: {best.variant}: {_ms(m['predicted_step_ms'])} ms per step, {rate}, "
        f"MFU {m['predicted_mfu_pct']:.0f} %{total}; {_limit(m)}. "
        f"Communication adds {_ms(m['predicted_overhead_ms'])} ms to the GPU's time."
    )
    if m["predicted_host_ms"] > HOST_SHARE * m["predicted_step_ms"]:
        host = _ms(m["predicted_host_ms"])
        text += f" The host needs about {host} ms of it: one that is slower or busy "
        text += "makes it longer." if m["limited_by"] == "host" else "decides."
    text += _reasons(best, records)
    fastest: dict[tuple, Record] = {}
    for record in fitting:
        # Records are sorted, so the first of a way is its fastest.
        fastest.setdefault(_way(record), record)
    for label, other in zip(("Next best", "Third"), list(fastest.values())[1:], strict=False):
        ratio = other.metrics["predicted_step_ms"] / m["predicted_step_ms"] - 1
        # The part of the step that grows most is why the other choice is slower.
        lost = {name: other.metrics[f"{part}_ms"] - m[f"{part}_ms"] for name, part in PARTS.items()}
        most = max(lost, key=lost.__getitem__)
        text += f" {label}: {other.variant}, {100 * ratio:.0f} % slower: "
        text += f"{_ms(lost[most])} ms more {most}."
    if config.days is not None and m.get("predicted_days", 0) > config.days:
        # As if more GPUs scaled perfectly, so it is a lower bound.
        enough = math.ceil(ranks * m["predicted_days"] / config.days)
        text += f" That is longer than {config.days:g} days: it takes about {enough:,} GPUs, "
        text += "or fewer tokens."
    return text


def findings(records: Records) -> list[str]:
    """Return the answer as the only finding."""
    return [answer(records)]


def _way(record: Record) -> tuple:
    """Return a choice without its micro-batch and recomputation."""
    return record.config["strategy"], record.config.get("group"), record.config.get("layout", "")


def _reasons(best: Record, records: Records) -> str:
    """Return a sentence about the memory of a simpler choice that does not fit, or nothing.

    It is about less recomputation with the same strategy and layout. If that fits or was not tried,
    it is about whole parameters on every GPU, for a best choice that shards them.
    """
    same = [
        r
        for r in records
        if _way(r) == _way(best) and r.config["recompute"] != best.config["recompute"]
    ]
    # A row that does not fit has the smallest micro-batch. So it needs more memory than `best`
    # because it recomputes less.
    lighter = [r for r in same if not r.metrics["fits"]]
    if lighter:
        needed = min(map(peak_bytes, lighter))
        return f" Less recomputation takes {needed / 2**30:.0f} GiB and does not fit."
    whole = [
        r
        for r in records
        if get_strategy(r.config["strategy"]).sends != "units" and not r.metrics["fits"]
    ]
    if whole and get_strategy(best.config["strategy"]).sends == "units":
        needed = min(map(peak_bytes, whole))
        return f" Whole parameters on every GPU take {needed / 2**30:.0f} GiB."
    return ""


VIEW = View(
    columns=[
        Column("variant", "strategy × micro-batch"),
        text_column("metrics.fits", "fits"),
        gib_column("metrics.predicted_peak_bytes", "peak GiB", ".1f"),
        Column("metrics.predicted_step_ms", "step ms", _ms),
        Column("metrics.predicted_overhead_ms", "overhead ms", _ms),
        Column("metrics.predicted_tokens_per_s", "tokens/s", ",.0f", optional=True),
        Column("metrics.predicted_examples_per_s", "examples/s", ",.0f", optional=True),
        Column("metrics.predicted_mfu_pct", "MFU %", ".1f"),
        Column("metrics.predicted_goodput_pct", "goodput %", ".1f", optional=True),
        Column("metrics.predicted_days", "days", _days, optional=True),
        text_column("metrics.limited_by", "largest part"),
    ],
    headline=headline_from(
        "{model} ({num_parameters:N} parameters), {batch} {examples} per step on {world_size} × "
        "{gpu}, {dtype}; predicted",
        gpu=place_of,
        examples=examples_of,
    ),
    terminal=(
        "variant",
        "fits",
        "predicted_peak_bytes",
        "predicted_step_ms",
        "predicted_tokens_per_s",
        "predicted_mfu_pct",
        "predicted_days",
        "limited_by",
    ),
    findings=findings,
    reading="A row per strategy and micro-batch, the fastest first. `recomputed` means activation "
    "checkpointing of every block, `selective` of all but attention and every other matmul. "
    "`in 8s` is the group that shares a copy of the parameters. Where nothing fits, the answer "
    "says how many devices the states alone need.",
    prediction="Everything here is predicted: memory and operators in closed form, at the shares "
    "of the datasheets' peaks that a calibrated machine reached. How good they were: "
    "docs/learn/theory/simulation.md.",
    noise="Nothing was measured.",
)
