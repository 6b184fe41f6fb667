"""Times of each mode of a combination: inference, forward, forward and backward, step.

`timed` is called by the experiment; `time_mode` times one mode and checks its clock, its work and
its speed. `verdict` compares a row's gradients with the tolerance.
"""

import gc
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from distlab.bench.trial import MODES, Trial
from distlab.comm import collectives
from distlab.experiment import Metrics, RankContext
from distlab.hardware import peak_of
from distlab.measure import (
    Pace,
    PhaseTimer,
    attempt,
    busy_ms,
    check_clock,
    check_speed,
    check_work,
    emitter,
    named_ranges,
    peak_memory,
    percentile_metrics,
    percentiles,
    slowest_rank,
)
from distlab.measure.trace.capture import PHASES
from distlab.theory.flops import forward_flops, mfu
from distlab.train.memory_budget import shortage

from .trials import BenchmarkConfig, TrialConfig, opened

OOM = "OOM"
# FLOPs of a mode, in units of a forward's
PASSES = {"inference": 1, "forward": 1, "forward_backward": 3, "step": 3}
# Allowed relative error of all gradients. Measured ones were 1e-6, 2e-2 and 3e-3.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.05}


def timed(
    config: BenchmarkConfig,
    trial: TrialConfig,
    context: RankContext,
    progress: Callable[[str], None],
) -> dict[tuple[str, int], Metrics]:
    """Return metrics of one combination by mode and warm-up. A failed one has only its status."""
    modes = [mode for mode in MODES if mode in config.modes]
    found = {}  # mode → its rows by warm-up, or their status

    def every_mode() -> Metrics:
        # One trial for all modes, so that it is built and compiled once.
        with opened(context, trial) as ready:
            for mode in modes:
                # The mode was planned not to fit, and has its status already.
                if mode in found:
                    continue
                label = f"{config.label(trial) or trial.factory or trial.size}: {mode}"
                progress(label)
                pace = Pace(max(config.warmups) + config.repeats, label, progress)
                found[mode] = agreed(partial(_rows_of, ready, mode, config, pace), context)
        return {}

    if config.factory is None:  # the memory of a user's model is not planned
        for mode in modes:
            planned = trial.planned(trial.strategy, mode)
            # A mode that cannot fit is not tried, so the smaller modes of this combination still
            # run.
            if shortage(planned, context.device, context) is not None:
                found[mode] = {"status": OOM}
    # the status of modes that are never reached, because the trial itself cannot be built
    failure = {} if len(found) == len(modes) else agreed(every_mode, context)
    rows = {}
    for mode, warmup in itertools.product(modes, config.warmups):
        # A mode without a result was not reached.
        result = found.get(mode, failure)
        # A mode that failed as a whole has one status for all of its warm-ups.
        measured = result.get("rows", result["status"])
        rows[mode, warmup] = {"status": measured} if isinstance(measured, str) else measured[warmup]
    return rows


def _rows_of(trial: Trial, mode: str, config: BenchmarkConfig, pace: Callable[[], None]) -> Metrics:
    """Return `time_mode` as metrics."""
    return {"rows": time_mode(trial, mode, config, pace)}


def agreed(measure: Callable[[], Metrics], context: RankContext) -> Metrics:
    """Call `attempt` with one status on all ranks: a failure on one rank counts for all."""
    found = attempt(measure)
    failed = [
        status
        # Every rank asks for the statuses, also one that failed.
        for status in collectives.gather_objects(found["status"], context.group)
        if status != "ok"
    ]
    if failed:  # memory that the failed call left behind must not fail the next combination
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"status": failed[0]} if failed else found


def verdict(checked: Metrics, trial: TrialConfig) -> str:
    """Return `ok`, or why the row is not valid."""
    if checked["status"] != "ok":
        return f"unchecked ({checked['status']})"
    # A user's model has no plainer form to be compared with. ddp_bench checks its gradients.
    if trial.factory is not None:
        return "ok"
    # "not <=", because a NaN is wrong too.
    if not checked["grad_rel_error"] <= TOLERANCE[trial.dtype]:
        return "wrong gradients"
    return "ok"


def time_mode(
    trial: Trial,
    mode: str,
    config: BenchmarkConfig,
    pace: Callable[[], None],
) -> dict[int, Metrics] | str:
    """Return metrics of one mode by number of warm-up calls.

    If the first call failed on some rank, return its status.

    Memory runs out in the first call or not at all, so the ranks agree on it there, before they go
    on together.

    Raises:
        Implausible: the clock misses part of the work, nothing was computed, or faster than the
            device can be.
    """
    context = trial.context
    timer = PhaseTimer(context.device)

    def call(times: int) -> Metrics:
        # Work that was queued before is not part of the wall time, and what this call queues is.
        timer.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            timer.start()
            trial(mode, timer.mark)
            pace()
        timer.synchronize()
        return {"wall_ms": (time.perf_counter() - begin) * 1e3}

    with ExitStack() as stack:
        memory = stack.enter_context(peak_memory(context.device))
        # NVTX ranges cost time even without Nsight, so they are an option.
        if config.nvtx:
            stack.enter_context(torch.cuda.nvtx.range(mode))
            stack.enter_context(named_ranges(trial.model, emitter("nvtx"), trial.optimizer))
        # Otherwise the first call would contain the wait for the last rank to be ready.
        dist.barrier(context.group)
        # One call, on whose status the ranks agree. After it they run without asking each other.
        first = agreed(partial(call, 1), context)
        if first["status"] != "ok":
            return first["status"]
        # One call was made above, so it is missing here.
        wall_ms = first["wall_ms"] + call(max(config.warmups) + config.repeats - 1)["wall_ms"]
    samples = timer.steps()
    slowest = partial(slowest_rank, group=context.group, device=context.device)
    # A step lasts until its slowest rank is done.
    phases = {name: slowest([sample[name] for sample in samples]) for name in samples[0]}
    # A CPU has no count of allocated memory, and its 0 becomes None below.
    peak = slowest([memory.peak_alloc_bytes or 0])[0]
    # After the timing, since the profiler slows the host.
    busy = busy_ms(partial(trial, mode))[0] if context.device.type == "cuda" else None
    compiled = trial.compiled_calls(mode) if trial.options.compile != "off" else None
    # From here on nothing is communicated, so a rank may raise.
    covered = check_clock([sample["step"] for sample in samples], wall_ms, context.device)
    has_gradients = mode in ("forward_backward", "step")
    check_work(trial.last_loss, trial.model.gradients().every() if has_gradients else None)
    shared = {"peak_alloc_bytes": int(peak) or None, "clock_covered_pct": 100 * covered}
    rows = {
        warmup: _metrics(trial, mode, phases, warmup, config.repeats) | shared
        for warmup in config.warmups
    }
    for row in rows.values():
        if busy is not None:
            # Times of the profiler and of the timer can differ, so the share is never negative.
            row["gpu_idle_pct"] = 100 * max(0.0, 1 - busy / row["step_p50_ms"])
        if compiled is not None:
            row.update(compiled.metrics())
            if row["ran_eager"]:
                row["status"] = f"ran eager ({compiled.calls} of {compiled.parts} parts compiled)"
    return rows


def _metrics(
    trial: Trial, mode: str, phases: dict[str, list[float]], warmup: int, repeats: int
) -> Metrics:
    """Return metrics of the calls after `warmup` calls, from all durations of each phase."""
    # Every warm-up is a cut of the same series, so all rows have `repeats` calls.
    kept = {name: times[warmup : warmup + repeats] for name, times in phases.items()}
    step = kept["step"]
    found = {"status": "ok", "first_ms": step[0]}
    found |= percentile_metrics("step", step)
    for phase in PHASES:
        found[f"{phase}_p50_ms"] = percentiles(kept[phase])["p50"] if phase in kept else None
    for phase, times in kept.items():
        found[f"{phase}_mean_ms"] = float(np.mean(times))
        # ddof=1 is the standard deviation of a sample.
        found[f"{phase}_std_ms"] = float(np.std(times, ddof=1))
    found["step_samples_ms"] = step
    p50 = found["step_p50_ms"]
    examples_per_s = trial.options.batch * trial.context.world_size / (p50 / 1e3)
    # The sizes of a user's model are not known, so its FLOPs cannot be counted.
    if trial.options.factory is not None:
        found["examples_per_s"] = examples_per_s
        return found
    peak = peak_of(trial.context.device, trial.options.dtype)
    # The guard counts the least that must be done: a causal kernel may skip half of the scores.
    check_speed(step_flops(trial.options, mode, causal=True), min(step), peak)
    # MFU counts attention in full, also where it is causal.
    flops = step_flops(trial.options, mode)
    found["tflops_per_s"] = flops / p50 / 1e9
    share = mfu(flops, p50 / 1e3, peak)
    found["mfu_pct"] = None if share is None else 100 * share
    found["tokens_per_s"] = trial.shape.context_length * examples_per_s
    return found


def step_flops(config: TrialConfig, mode: str, causal: bool = False) -> int:
    """Return the FLOPs of one call on one rank, without what checkpointing recomputes."""
    sizes = config.model().sizes(config.batch)
    # Backward multiplies twice for each matmul of the forward: for the input's gradient and the
    # weight's. So a step is three forwards.
    return forward_flops(**sizes, causal=causal).total * PASSES[mode]
