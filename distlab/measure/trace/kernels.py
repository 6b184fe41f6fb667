"""Summary of a profile: time of each kernel, by phase and by kind of work.

Reads the events of a trace (`capture.load_trace`), so a summary can be made again from the file. On
a GPU the kernels are those of the device, by the phase in which the host launched them; without
one, the operators.

The kind of work of an operator or a kernel is told by its name.

The names come from four worlds: operators (``aten::mm``), nodes of autograd (``MmBackward0``),
kernels of libraries (``nvjet_…``, ``cunn_SoftMaxForward``) and kernels of Triton, whose own names
say little (``forward_kernel``): those are told by the operator that launched them.
"""

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.measure.trace.account import step_windows
from distlab.measure.trace.capture import PHASES, Event
from distlab.measure.trace.intervals import intersect, total

OUTSIDE = "outside"  # of the three, such as zeroing gradients


@dataclass(frozen=True)
class Kernel:
    """One kernel (or operator) in one phase.

    Attributes:
        name: name in the trace.
        category: kind of work, see `category`.
        phase: forward, backward, optimizer or outside.
        count: number of calls per step.
        ms: ms per step, the sum over its calls.
    """

    name: str
    category: str
    phase: str
    count: float
    ms: float


@dataclass(frozen=True)
class Profile:
    """A trace in figures, each per step.

    Attributes:
        steps: recorded.
        step_ms: median length of a step under the profiler.
        kernel_ms: sum of all kernels' times; more than `busy_ms` where some run at once.
        busy_ms: time in which at least one kernel ran.
        kernels: the one with the most time first.
    """

    steps: int
    step_ms: float
    kernel_ms: float
    busy_ms: float
    kernels: tuple[Kernel, ...]

    def top(self, phase: str, count: int) -> list[Kernel]:
        """Return the kernels of a phase with the most time."""
        return [kernel for kernel in self.kernels if kernel.phase == phase][:count]


def summarise(events: Sequence[Event]) -> Profile:
    """Summarise all recorded steps.

    Raises:
        ValueError: no ``distlab:step`` in the trace (see `capture.profile_steps`).
    """
    windows = step_windows(events)
    phases = [e for e in events if e.kind == "range" and e.name.removeprefix("distlab:") in PHASES]
    phases.sort(key=lambda event: event.start_ms)
    times = defaultdict(list)  # (name, category, phase) → ms of each call
    busy = []
    for event in events:
        inside = any(start <= event.start_ms and event.end_ms <= end for start, end in windows)
        if event.kind == "range" or not inside:
            continue
        kind = (
            "communication"
            if event.kind == "communication"
            else category(event.name, event.operator)
        )
        names = (
            p.name.removeprefix("distlab:")
            for p in phases
            if p.start_ms <= event.on_host_ms <= p.end_ms
        )
        times[event.name, kind, next(names, OUTSIDE)].append(event.end_ms - event.start_ms)
        busy.append((event.start_ms, event.end_ms))
    steps = len(windows)
    kernels = [Kernel(*key, len(spent) / steps, sum(spent) / steps) for key, spent in times.items()]
    return Profile(
        steps=steps,
        step_ms=statistics.median(end - start for start, end in windows),
        kernel_ms=sum(kernel.ms for kernel in kernels),
        busy_ms=total(intersect(busy, windows)) / steps,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.ms)),
    )


# In this order; the first pattern that is found decides. `mm` must not be found inside a longer
# word.
_PATTERNS = (
    ("communication", r"nccl|gloo|c10d"),
    ("optimizer", r"adam|sgd|multi_?tensor|foreach|clip_grad"),
    ("loss", r"log_?softmax|nll_?loss|cross_?entropy"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("softmax", r"softmax"),
    ("normalisation", r"(rms|layer|group|batch)_?norm|gammabeta|rmsnorm"),
    (
        "matrix products",
        r"(?<![a-z])(add)?b?a?(add)?b?mm(?![a-z])|(add|b)?mm_?backward|matmul|linear|gem[mv]|nvjet"
        r"|cutlass|xmma|cublas|split_?k",
    ),
    (
        "element-wise",
        r"triton_(poi|red|per)|swiglu|silu|gelu|sigmoid|rope|"
        r"(?<![a-z])(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt|reciprocal|where|masked_?fill|dropout|sum|"
        r"mean|tanh|cos|sin|abs|maximum|minimum|ones_like|zeros_like|fill|zero)_?(backward|(?![a-z]))",
    ),
    (
        "casts and copies",
        r"copy|::to$|clone|contiguous|mem(cpy|set)|catarray|::cat$|catbackward|split\w*backward|"
        r"roll|stack|unbind|reshape|::index_put",
    ),
    ("element-wise", r"element_?wise|reduce_kernel"),
)
_COMPILED = [(name, re.compile(pattern)) for name, pattern in _PATTERNS]
OTHER = "other"
CATEGORIES = (
    "matrix products",
    "attention",
    "softmax",
    "normalisation",
    "element-wise",
    "loss",
    "casts and copies",
    "communication",
    "optimizer",
    OTHER,
)


@functools.lru_cache(maxsize=4096)
def category(name: str, operator: str | None = None) -> str:
    """Return one of `CATEGORIES`.

    ``attention`` is a fused attention. Naive attention is matmuls and ``softmax``. Embeddings,
    views and unknown operations are ``other``.

    Args:
        name: name of the operator, node or kernel.
        operator: name of the operator that launched a kernel. It decides if it is informative.
    """
    for text in (operator, name):
        for kind, pattern in _COMPILED if text else ():
            if pattern.search(text.lower()):
                return kind
    return OTHER


def readable(name: str) -> str:
    """Return an operator's name without autograd's prefix and the hash of a compiled graph."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return re.sub(r"## Call CompiledFxGraph \w+ ##", "compiled graph", name)
