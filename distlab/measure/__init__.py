"""Instruments that observe any strategy from outside: clocks, memory, collectives and traces."""

from distlab.measure.bandwidth import (
    BY_HAND,
    OPERATIONS,
    computations,
    disturb,
    time_collective,
    traffic,
)
from distlab.measure.clock import (
    PhaseTimer,
    call_ms,
    device_percentiles,
    slowest_rank,
)
from distlab.measure.collectives import CollectiveRecorder
from distlab.measure.flops import FlopsByCategory
from distlab.measure.interleaved import (
    MIN_PAIRS,
    MIN_SAMPLES,
    interleave,
    percentile_metrics,
    percentiles,
)
from distlab.measure.memory import (
    allocated_bytes,
    free_bytes,
    gradient_bytes,
    parameters_of,
    peak_memory,
    saved_for_backward,
    tensor_bytes,
)
from distlab.measure.nvtx import emitter, named_ranges
from distlab.measure.pace import Pace
from distlab.measure.rounds import sample_rounds
from distlab.measure.trace.account import (
    StepAccount,
    account,
    closes,
    explain,
    lanes,
    step_windows,
)
from distlab.measure.trace.capture import busy_ms, launched
from distlab.measure.trace.reader import Event, load_trace
from distlab.measure.validity import attempt, check_clock, check_speed, check_work, is_out_of_memory

__all__ = [
    "BY_HAND",
    "MIN_PAIRS",
    "MIN_SAMPLES",
    "OPERATIONS",
    "CollectiveRecorder",
    "Event",
    "FlopsByCategory",
    "Pace",
    "PhaseTimer",
    "StepAccount",
    "account",
    "allocated_bytes",
    "attempt",
    "busy_ms",
    "call_ms",
    "check_clock",
    "check_speed",
    "check_work",
    "closes",
    "computations",
    "device_percentiles",
    "disturb",
    "emitter",
    "explain",
    "free_bytes",
    "gradient_bytes",
    "interleave",
    "is_out_of_memory",
    "lanes",
    "launched",
    "load_trace",
    "named_ranges",
    "parameters_of",
    "peak_memory",
    "percentile_metrics",
    "percentiles",
    "sample_rounds",
    "saved_for_backward",
    "slowest_rank",
    "step_windows",
    "tensor_bytes",
    "time_collective",
    "traffic",
]
