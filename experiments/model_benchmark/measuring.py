"""Time every configuration, mode and warm-up, and take each configuration's step apart."""

import gc
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distlab.bench.reference import errors_against_reference
from distlab.bench.timing import MODES, Subject, TrialConfig, opened
from distlab.comm import collectives
from distlab.experiment import RankContext, Run
from distlab.hardware import peak_flops
from distlab.measure import (
    Pace,
    PhaseTimer,
    attempt,
    check_clock,
    check_speed,
    check_work,
    emitter,
    named_ranges,
    nsys_command,
    own_noise_floor,
    peak_memory,
    percentiles,
    slowest_rank,
)
from distlab.measure.trace.capture import PHASES
from distlab.report import noise_of
from distlab.theory.flops import forward_flops, mfu
from distlab.train.requirements import require, shortage

from .config import BenchmarkConfig
from .memory import memory
from .saved import saved
from .view import Rows, prefix
from .work import profile

OOM = "OOM"
PASSES = {"inference": 1, "forward": 1, "forward_backward": 3, "step": 3}  # in units of a forward's FLOPs
TOLERANCE = {
    "fp32": 1e-3,
    "bf16": 0.1,
    "fp16": 0.05,
}  # relative error of all gradients; seen: 1e-6, 2e-2, 3e-3


def measure(config: BenchmarkConfig, context: RankContext, run: Run) -> None:
    """Time every combination, then take its step apart; call it on every rank. What fails is a row that says why.

    With `nvtx`, cudaProfilerStart is called before and cudaProfilerStop after the timed calls, for Nsight Systems.

    Raises:
        ValueError: a strategy that needs a GPU, or a rank to be profiled that does not exist.
        MemoryError: no combination fits.
    """
    config.check_ranks(context.world_size)
    modes = [mode for mode in MODES if mode in config.modes]
    planned = [trial.planned(trial.strategy, mode) for trial in config.trials() for mode in modes]
    require(planned, context.device, context, some=True)
    if config.nvtx:
        torch.cuda.profiler.start()
    for trial in config.trials():
        names = {}
        for mode, warmup in itertools.product(modes, config.warmups):
            parts = [config.label(trial), mode, f"warm-up {warmup}" if len(config.warmups) > 1 else ""]
            names[mode, warmup] = ", ".join(filter(None, parts))
        if all(map(run.done, names.values())):
            continue
        rows = timed(config, trial, context, run.progress)  # first, while the process is cold
        # By rank 0: the check needs no other rank, and those would only take its memory and cores.
        checked = agreed(partial(errors_against_reference, context, trial) if context.is_main else dict, context)
        checked = collectives.gather_objects(checked, context.group)[0]
        for (mode, warmup), metrics in rows.items():
            metrics |= {name: checked.get(name) for name in ("loss_rel_error", "grad_rel_error")}
            if metrics["status"] == "ok":
                metrics["status"] = verdict(checked, trial)
            run.add(names[mode, warmup], metrics, **trial.recorded(context), mode=mode, warmup=warmup)
    if config.nvtx:
        torch.cuda.profiler.stop()
    for trial in config.trials():
        take_apart(config, trial, context, run)
    # A rank's own command line has no --nproc.
    command = nsys_command("-m", ["launch", *sys.argv[1:], "--nvtx"], context.world_size, str(run.path / "nsys"))
    if command is not None and not config.nvtx:
        run.progress(f"under Nsight Systems: {command}")


def take_apart(config: BenchmarkConfig, trial: TrialConfig, context: RankContext, run: Run) -> None:
    """Rows of what is wanted of one combination's full step, in the parts of the run; call it on every rank.

    Traces, pictures and the allocator's history are written to the run's folder. What fails is reported, and has no
    rows.
    """
    label = config.label(trial)
    name = label or trial.size
    slug = name.replace(", ", "-").replace(" ", "-")
    parts: dict[str, Callable[[], dict[str, Rows]]] = {}
    if config.profile:
        parts["profiling"] = partial(profile, context, trial, config, run.path, slug)
    if config.memory:
        parts["recording the memory of"] = partial(memory, context, trial, run.path, slug)
    if config.saved:
        parts["listing what is saved for backward by"] = partial(saved, context, trial)
    for what, part in parts.items():
        run.progress(f"{what} {name}")
        found = attempt(part)
        if (status := found.pop("status")) != "ok":
            run.progress(f"{what} {name}: {status}")
        for view, rows in found.items():
            for row, (variant, metrics) in enumerate(rows):  # of one kernel there may be several
                where = trial.recorded(context) | {"label": label, "row": row}
                run.part(view).add(f"{prefix(label)}{variant}", metrics, **where)


def timed(
    config: BenchmarkConfig,
    trial: TrialConfig,
    context: RankContext,
    progress: Callable[[str], None],
) -> dict[tuple[str, int], dict[str, Any]]:
    """Metrics by mode and warm-up of one combination; what fails has its status alone."""
    modes = [mode for mode in MODES if mode in config.modes]
    found: dict[str, dict[str, Any]] = {}

    def every_mode() -> dict[str, Any]:
        with opened(context, trial) as ready:
            for mode in modes:
                if mode in found:
                    continue
                label = f"{config.label(trial) or trial.size}: {mode}"
                progress(label)
                pace = Pace(max(config.warmups) + config.repeats, label, progress)
                found[mode] = agreed(
                    lambda mode=mode, pace=pace: {"rows": time_mode(ready, mode, config, pace)}, context
                )
        return {}

    for mode in modes:
        if shortage(trial.planned(trial.strategy, mode), context.device, context) is not None:
            found[mode] = {"status": OOM}
    failure = {} if len(found) == len(modes) else agreed(every_mode, context)
    rows = {}
    for mode, warmup in itertools.product(modes, config.warmups):
        of_mode = found.get(mode, failure)
        measured = of_mode.get("rows", of_mode["status"])
        rows[mode, warmup] = {"status": measured} if isinstance(measured, str) else measured[warmup]
    return rows


def agreed(measure: Callable[[], dict[str, Any]], context: RankContext) -> dict[str, Any]:
    """`attempt`, with one status on all ranks: a combination fails everywhere if it fails anywhere."""
    found = attempt(measure)
    failed = [status for status in collectives.gather_objects(found["status"], context.group) if status != "ok"]
    if failed:  # what lay on the way to the failure must not make the next combination fail
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"status": failed[0]} if failed else found


def verdict(checked: dict[str, Any], trial: TrialConfig) -> str:
    """`ok`, or why the row must not be believed."""
    if checked["status"] != "ok":
        return f"unchecked ({checked['status']})"
    if not checked["grad_rel_error"] <= TOLERANCE[trial.dtype]:
        return "wrong gradients"
    return "ok"


def time_mode(
    trial: Subject,
    mode: str,
    config: BenchmarkConfig,
    pace: Callable[[], None] = lambda: None,
) -> dict[int, dict[str, Any]] | str:
    """Metrics of one mode, by number of warm-up calls; the status of the first call if it failed on some rank.

    Memory runs out in the first call or not at all, so the ranks agree on it there, before they go on together.

    Raises:
        Implausible: the clock misses part of the work, nothing was computed, or faster than the device can be.
    """
    context = trial.context
    timer = PhaseTimer(context.device)

    def call(times: int) -> dict[str, Any]:
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
        if config.nvtx:
            stack.enter_context(torch.cuda.nvtx.range(mode))
            stack.enter_context(named_ranges(trial.model, emitter("nvtx"), trial.optimizer))
        dist.barrier(context.group)
        first = agreed(lambda: call(1), context)
        if first["status"] != "ok":
            return first["status"]
        wall_ms = first["wall_ms"] + call(max(config.warmups) + config.repeats - 1)["wall_ms"]
    samples = timer.steps()
    slowest = partial(slowest_rank, group=context.group, device=context.device)
    phases = {name: slowest([sample[name] for sample in samples]) for name in samples[0]}
    peak = slowest([memory.peak_alloc_bytes or 0])[0]
    # From here on nothing is communicated, so a rank may raise.
    covered = check_clock([sample["step"] for sample in samples], wall_ms, context.device)
    check_work(trial.last_loss, trial.gradients() if mode in ("forward_backward", "step") else None)
    shared = {"peak_alloc_bytes": int(peak) or None, "clock_covered_pct": 100 * covered}
    return {
        warmup: _metrics(trial, mode, phases, warmup, config.repeats) | shared for warmup in config.warmups
    }


def _metrics(
    trial: Subject, mode: str, phases: dict[str, list[float]], warmup: int, repeats: int
) -> dict[str, Any]:
    kept = {name: times[warmup : warmup + repeats] for name, times in phases.items()}
    step = kept["step"]
    found: dict[str, Any] = {"status": "ok", "first_ms": step[0]}
    found |= {"step_mean_ms": float(np.mean(step)), "step_std_ms": float(np.std(step, ddof=1))}
    found |= {f"step_{name}_ms": value for name, value in percentiles(step).items()}
    for phase in PHASES:
        found[f"{phase}_p50_ms"] = percentiles(kept[phase])["p50"] if phase in kept else None
    found["noise_floor_pct"] = own_noise_floor(step)
    found["noise_pct"] = noise_of(found)
    peak, p50 = _peak_flops(trial), found["step_p50_ms"]
    # The guard counts the least that must be done: a causal kernel may skip half of the scores.
    check_speed(step_flops(trial.options, mode, causal=True), min(step), peak)
    flops = step_flops(trial.options, mode)
    found["tflops_per_s"] = flops / p50 / 1e9
    share = mfu(flops, p50 / 1e3, peak)
    found["mfu_pct"] = None if share is None else 100 * share
    found["tokens_per_s"] = (trial.options.batch * trial.shape.context_length * trial.context.world_size) / (p50 / 1e3)
    found["series_ms"] = phases["step"] if warmup == 0 else None
    return found


def step_flops(config: TrialConfig, mode: str, causal: bool = False) -> int:
    """FLOPs of one call on one rank, without what checkpointing recomputes."""
    return forward_flops(**config.model().sizes(config.batch), causal=causal).total * PASSES[mode]


def _peak_flops(trial: Subject) -> float | None:
    device = trial.context.device
    if device.type != "cuda":
        return None
    dtype = trial.options.dtype
    if dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        dtype = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), dtype)
