"""Summary of a profile: time of each kernel, by phase and by kind of work.

It reads the events of a trace (`reader.load_trace`), so a summary can be made again from the file.
On a GPU the kernels are those of the device, by the phase in which the host launched them. Without
a GPU they are the operators.

`category` tells the kind of work by name. Names come from four sources:

- operators (``aten::mm``);
- nodes of autograd (``MmBackward0``);
- kernels of libraries (``nvjet_…``, ``cunn_SoftMaxForward``);
- kernels of Triton. Their own names say little (``forward_kernel``), so the operator that launched
  them decides.
"""

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.measure.trace.account import step_windows
from distlab.measure.trace.capture import PHASES
from distlab.measure.trace.intervals import intersect, total
from distlab.measure.trace.reader import Event

OUTSIDE = "outside"  # phase of work outside of the three phases, such as zeroing gradients
OTHER = "other"  # category of work that no pattern matches
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
    """Summary of a trace, as averages per step.

    Attributes:
        steps: number of recorded steps.
        step_ms: median ms of a step under the profiler.
        kernel_ms: ms of all kernels in sum. It is more than `busy_ms` if some run at once.
        busy_ms: ms in which at least one kernel ran.
        kernels: kernels, the one with the most time first.
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
    durations = defaultdict(list)  # (name, category, phase) → ms of each call
    busy = []
    for event in events:
        inside = any(start <= event.start_ms and event.end_ms <= end for start, end in windows)
        if event.kind == "range" or not inside:
            continue
        if event.kind == "communication":
            work = "communication"
        else:
            work = category(event.name, event.operator)
        phase = _phase_of(event, phases)
        durations[event.name, work, phase].append(event.end_ms - event.start_ms)
        busy.append((event.start_ms, event.end_ms))

    steps = len(windows)
    kernels = []
    for (name, work, phase), calls_ms in durations.items():
        kernel = Kernel(
            name=name,
            category=work,
            phase=phase,
            count=len(calls_ms) / steps,
            ms=sum(calls_ms) / steps,
        )
        kernels.append(kernel)
    return Profile(
        steps=steps,
        step_ms=statistics.median(end - start for start, end in windows),
        kernel_ms=sum(kernel.ms for kernel in kernels),
        busy_ms=total(intersect(busy, windows)) / steps,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.ms)),
    )


def _phase_of(event: Event, phases: Sequence[Event]) -> str:
    """Return the phase in which the host started or launched an event.

    Args:
        event: kernel, operator or copy.
        phases: ranges of all phases of all steps, by start.
    """
    for phase in phases:
        # The GPU may run the event later, when the host is already in the next phase.
        if phase.start_ms <= event.on_host_ms <= phase.end_ms:
            return phase.name.removeprefix("distlab:")
    return OUTSIDE


# (category, regular expression of names in lower case). They are tried in this order, and the first
# that is found decides. The order matters: `cunn_softmaxforward<… logsoftmaxforwardepilogue>` is a
# loss and not a softmax, and `fused_rms_norm_add` is a normalisation and not an addition.
# `(?<![a-z])` and `(?![a-z])` keep short words such as `mm` from being found in longer ones.
_PATTERNS = (
    ("communication", r"nccl|gloo|c10d"),
    ("optimizer", r"adam|sgd|multi_?tensor|foreach|clip_grad"),
    ("loss", r"log_?softmax|nll_?loss|cross_?entropy"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("softmax", r"softmax"),
    ("normalisation", r"(rms|layer|group|batch)_?norm|gammabeta|rmsnorm"),
    (
        "matrix products",
        # mm, bmm, addmm, baddbmm and addbmm
        r"(?<![a-z])(add)?b?a?(add)?b?mm(?![a-z])|(add|b)?mm_?backward"
        # Other operators, and the kernels of cuBLAS and CUTLASS
        r"|matmul|linear|gem[mv]|nvjet|cutlass|xmma|cublas|split_?k",
    ),
    (
        "element-wise",
        # Kernels that Inductor generates: pointwise, reduction, persistent reduction
        r"triton_(poi|red|per)"
        r"|swiglu|silu|gelu|sigmoid|rope"
        # Operators, alone or as a node of autograd
        r"|(?<![a-z])(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt|reciprocal|where|masked_?fill"
        r"|dropout|sum|mean|tanh|cos|sin|abs|maximum|minimum|ones_like|zeros_like|fill|zero)"
        r"_?(backward|(?![a-z]))",
    ),
    (
        "casts and copies",
        r"copy|::to$|clone|contiguous|mem(cpy|set)|catarray|::cat$|catbackward|split\w*backward"
        r"|roll|stack|unbind|reshape|::index_put",
    ),
    # ATen's generic kernels, after those of copies, which carry `elementwise` in their names
    ("element-wise", r"element_?wise|reduce_kernel"),
)
_COMPILED = [(name, re.compile(pattern)) for name, pattern in _PATTERNS]


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
        if not text:
            continue
        for work, pattern in _COMPILED:
            if pattern.search(text.lower()):
                return work
    return OTHER


def short_kernel_name(name: str) -> str:
    """Return a C++ kernel's name without its return type, parameters and template arguments.

    `void at::native::elementwise_kernel<128, 2, …>(int, …)` is `at::native::elementwise_kernel`.
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0].strip() or name


def readable(name: str) -> str:
    """Return an operator's name without autograd's prefix and the hash of a compiled graph."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return re.sub(r"## Call CompiledFxGraph \w+ ##", "compiled graph", name)
