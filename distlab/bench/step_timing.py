"""Steps of several variants, timed in interleaved rounds.

A 3.4 B model with its optimizer does not fit a GPU once per strategy, and timing one strategy after
the other lets the machine's clocks drift between them. So rounds are interleaved: in each, every
variant is built once, timed and freed. Building makes the model anew, from the same seed and
directly on the device, in a second or less. Strategies that shard parameters or optimizer state
keep nothing of what another left, and the peak of memory is each variant's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from distlab.bench.trial import CompiledRun, Trial
from distlab.bench.variant import BenchOptions, Variant
from distlab.comm import RankContext, collectives
from distlab.measure import PhaseTimer, peak_memory, percentile_metrics, slowest_rank
from distlab.measure.interleaved import interleave, rotated

T = TypeVar("T")
Inspect = Callable[[Variant, Trial], None]
PHASES = ("forward", "backward", "forward_backward", "optimizer", "step")


@dataclass
class Timing:
    """Samples of one variant.

    Attributes:
        phases: phase → ms of the slowest rank, in the order in which they were taken. Phases are
            `forward`, `backward` (with synchronisation), both together as `forward_backward`,
            `optimizer` and `step`, and all lists are equally long.
        peak_alloc_bytes: most that the allocator held, or None on a CPU.
        rounds: number of rounds in which it was timed. Each has equally many samples.
        out_of_memory: True if the variant did not fit on some rank.
        compiled: graphs that ran in a step after the timing of each round. Empty for an eager
            model.
    """

    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    peak_alloc_bytes: int | None = None
    rounds: int = 0
    out_of_memory: bool = False
    compiled: list[CompiledRun] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        """Return percentiles of every phase, the peak of memory and the samples of the step.

        A variant that did not fit has `OOM`.
        """
        if self.out_of_memory:
            return {"step_p50_ms": "OOM"}
        metrics: dict[str, Any] = {}
        for phase, samples in self.phases.items():
            metrics |= percentile_metrics(phase, samples)
        metrics["peak_alloc_bytes"] = self.peak_alloc_bytes
        metrics["step_samples_ms"] = list(self.phases["step"])
        metrics["rounds"] = self.rounds
        if self.compiled:
            metrics |= min(self.compiled).metrics()
        return metrics

    def add(self, samples: Sequence[dict[str, float]], context: RankContext) -> None:
        """Add the steps of one round on this rank. Call it on every rank."""
        self.rounds += 1
        for phase in PHASES:
            mine = []
            for sample in samples:
                forward = sample.get("forward", 0.0)  # a pipeline has none of its own
                # Of the same sample, and not of two medians, so that it is the time of one real
                # step.
                both = forward + sample["backward"]
                mine.append({**sample, "forward": forward, "forward_backward": both}[phase])
            self.phases[phase].extend(slowest_rank(mine, context.group, context.device))


def time_rounds(
    options: BenchOptions,
    rows: Sequence[Variant],
    context: RankContext,
    *,
    rounds: int,
    warmup: int,
    steps: int,
    inspect: Inspect,
    progress: Callable[[str], None] = lambda text: None,
    ended: Callable[[dict[str, Timing]], None] = lambda timings: None,
) -> dict[str, Timing]:
    """Time `rounds` × `steps` steps of every variant, interleaved. Call it on every rank.

    Sample i of all variants form a pair. A variant that does not fit in memory on some rank is
    marked so on all, and left out from then on.

    Args:
        options: model and data of variants that have none of their own.
        rounds: number of rounds.
        warmup: untimed steps of a variant in each round.
        steps: timed steps of a variant in each round.
        inspect: function (variant, trial), called after each block of timed steps.
        progress: function that is called with a line before each block.
        ended: function that is called after each round, with the times so far.

    Returns:
        row → its times.
    """
    timings = {row.name: Timing() for row in rows}
    # Dynamo would compile a second shape of a block with dynamic sizes, and the ninth not at all.
    # So rows of different shapes begin with empty caches.
    shapes = {(row.options, row.layout, row.micro_batches) for row in rows}
    is_compiled = any((row.options or options).compile != "off" for row in rows)
    reset_compiler = is_compiled and len(shapes) > 1
    calls = {}
    for row in rows:
        calls[row.name] = partial(
            _time_block,
            row.options or options,
            row,
            context,
            warmup=warmup,
            steps=steps,
            timing=timings[row.name],
            inspect=inspect,
            reset_compiler=reset_compiler,
        )
    interleave(calls, rounds, order=rotated, progress=progress, ended=lambda: ended(timings))
    return timings


def _time_block(
    options: BenchOptions,
    row: Variant,
    context: RankContext,
    *,
    warmup: int,
    steps: int,
    timing: Timing,
    inspect: Inspect,
    reset_compiler: bool,
) -> None:
    """Build a variant, time its steps of one round, add them to `timing` and free it."""
    if timing.out_of_memory:
        return
    if reset_compiler:
        torch.compiler.reset()
    timer = PhaseTimer(context.device)

    def timed_step() -> bool:
        timer.start()
        trial("step", timer.mark)
        return True

    def inspected() -> bool:
        inspect(row, trial)
        return True

    with ExitStack() as stack:
        timing.out_of_memory = True  # until everything has fitted
        # Building, warm-up and timing count for the peak. What `inspect` allocates later does not.
        with peak_memory(context.device) as memory:
            trial = _if_it_fits(
                lambda: stack.enter_context(closing(Trial(context, options, row))), context
            )
            if trial is None:
                return
            for _ in range(warmup):  # the second step is the first with the optimizer's state
                if not _if_it_fits(timed_step, context):
                    return
            # The timed steps begin together on all ranks.
            dist.barrier(context.group)
            timer.clear()
            if not _if_it_fits(timed_step, context, times=steps):
                return
            samples = timer.steps()
            outside = trial.model.bytes_outside_allocator  # for example symmetric memory
        # Counting compiled calls runs more steps. It comes last, because `inspect` may compare the
        # loss with that of rows that are not compiled.
        if not _if_it_fits(inspected, context):
            return
        if options.compile != "off":
            timing.compiled.append(trial.compiled_calls())
        timing.out_of_memory = False
    if memory.peak_alloc_bytes is not None:
        peak = memory.peak_alloc_bytes + outside
        timing.peak_alloc_bytes = max(peak, timing.peak_alloc_bytes or 0)
    timing.add(samples, context)


def profile(
    options: BenchOptions, row: Variant, context: RankContext, path: Path, steps: int
) -> bool:
    """Write the profiler's trace of a few steps of this rank to `path`.

    Returns False on every rank if memory runs out.
    """

    def traced() -> bool:
        with closing(Trial(context, row.options or options, row)) as trial:
            trial()
            trial.profile(path, steps, warmup=2 if context.device.type == "cuda" else 1)
        return True

    return _if_it_fits(traced, context) is not None


def _if_it_fits(action: Callable[[], T], context: RankContext, times: int = 1) -> T | None:
    """Return what `action` returns, or None on every rank if memory runs out on some rank."""
    return collectives.if_it_fits(action, context.device, context.group, times)
