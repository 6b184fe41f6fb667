"""How close is each fused kernel to what the hardware allows?

    distlab run kernel_roofline --quick                     # rows of most interest; small on a CPU
    distlab run kernel_roofline --name full                 # all rows, two minutes; again: resumes
    distlab run kernel_roofline --preset chains             # chains of operations as one kernel
    distlab run kernel_roofline --chain bias gelu multiply  # one of your own
    distlab run kernel_roofline --only add --shrink 1 8 64  # the same at smaller sizes
    distlab run kernel_roofline --preset sizes              # three operations along their size
    distlab run kernel_roofline --only rms_norm --yours my_kernels:rms_norm

Each operation in each direction × (ours, naive: plain torch one kernel at a time, builtin: torch's
own, compile: the naive form through torch.compile, template: of matmuls, the best of Inductor's
Triton templates with cuBLAS left out, max-autotune: two operations by torch.compile in this mode,
liger and torchao: Liger Kernel's, and of the linear layer in fp8 torchao's, where they are
installed; quack and cce, QuACK's norms and losses and Apple's Cut
Cross-Entropy, have rows only where they are installed). Wall: the time of a call in a loop, as a
model calls it, and the host's part of it. Device: the time of a CUDA graph's replay with the L2
flushed before it;
GB/s of the *least* traffic and its share of the copy bandwidth of this run; TFLOP/s and its share
of cuBLAS in this run; launched kernels; registers, spills and occupancy of ours
and of yours; the largest error against
float64, relative to the largest value (none where results are random, and of the optimizer). The
predicted ratio to the naive form is next to the measured one.

Two rows lose on purpose: `spilling_add_rms_norm_silu`, a chain fused into too few threads'
registers, and `add_gelu`, which torch.compile makes one kernel and ours are two. Chains
(`add+rms_norm+silu`, in `chains`) are also rows, each with an account of its traffic.

All variants of a row are timed in interleaved rounds, because clocks drift with the GPU's power and
temperature.

The rows are in `cases`, clocks and ceilings in `device_times`, the prediction in `prediction`.
"""

import dataclasses
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.bench.task import check_name, factory_of
from distlab.experiment import Experiment, Options, RankContext, Run, option
from distlab.kernel_check.calls import call_of
from distlab.kernel_check.operations import OPERATIONS
from distlab.measure import allocated_bytes, attempt, call_ms, launched, peak_memory, sample_rounds
from distlab.options import Values

from . import cases as table
from .cases import (
    OPTIONAL,
    VARIANTS,
    Case,
    Function,
    first,
    is_installed,
    leaves,
    runner,
    upstream_of,
    with_gradients,
)
from .chains import CHAINS, STEPS, TRAFFIC, accounts, chain_case
from .device_times import (
    Prepared,
    calls_within,
    ceilings,
    device_ms,
    fits,
    of_our_kernels,
    of_triton_kernels,
    prepare,
)
from .prediction import predicted
from .tables import COMPARISON, VIEW, beside_peers, compare

# Inductor's matmuls by its own Triton templates, the best of those it tries; without this it takes
# cuBLAS's.
TEMPLATES = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "triton.enable_persistent_tma_matmul": True,
}
# Beginnings of names that the profiler lists for the device, and that are not kernels.
NO_KERNELS = ("Memcpy", "Memset", "Activity", "Lazy", "Optimizer.")
# Dtype → largest error, relative to the largest value: that of sums, then of one rounding.
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2}


@dataclasses.dataclass(frozen=True)
class RooflineConfig(Options):
    """Options of a run, which has a row per operation, direction and variant."""

    only: tuple[str, ...] = option((), "operations to time [all]")
    chain: tuple[str, ...] = option(
        (),
        "operations to apply one after the other to one tensor instead",
        choices=tuple(STEPS),
    )
    yours: str | None = option(
        None, "your own kernel, my_kernels:rms_norm, as one more form of the operation of --only"
    )
    forward: bool = option(False, "time the forward alone, of losses as well")
    variants: tuple[str, ...] = option(VARIANTS[:-1], "forms to time", choices=VARIANTS[:-1])
    repeat_ms: int = option(60, "ms of device time per number", minimum=1)
    rounds: int = option(
        10, "interleaved rounds; even: equally many forwards and in reverse", minimum=3
    )
    small: bool = option(False, "use small sizes, in fp32")
    shrink: tuple[int, ...] = option(
        (1,), "numbers to divide first dimensions by, one after another", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A chain is given by its steps, and `only` names rows of the table.
        if self.only and self.chain:
            raise ValueError("--only and --chain: give one of them")
        if self.yours is not None:
            check_name(self.yours, "--yours")
            # A user's kernel claims to be one operation, so the row must be named.
            if len(self.only) != 1:
                raise ValueError(f"--yours {self.yours}: name its operation, --only rms_norm")
        names = (
            # Names are the same at small sizes, and those are quick to list.
            {case.name for case in table.cases(True) + list(map(chain_case, CHAINS))}
            if self.only
            else set()
        )
        if unknown := set(self.only) - names:
            raise ValueError(
                f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}"
            )

    @classmethod
    def check_given(cls, given: Values) -> None:
        """Raise ValueError for a peer that is asked for and is not installed."""
        for variant in given.get("variants", ()):
            if variant in OPTIONAL and not is_installed(variant):
                raise ValueError(
                    f"--variants {variant}: it is not installed; pip install '{OPTIONAL[variant]}'"
                )

    def check_effect(self, given: Values) -> None:
        """Raise ValueError for forms that no operation of the run has."""
        super().check_effect(given)
        operations = [case.operation for case in self.cases()]
        existing = [form for form in VARIANTS if any(each.has(form) for each in operations)]
        # Some of the forms may be missing: `--variants all` means those that exist.
        if "variants" in given and not set(self.variants) & set(existing):
            raise ValueError(
                f"--variants {' '.join(self.variants)}: there is no such form of "
                f"{' '.join(self.only or self.chain)}; choose among {', '.join(existing)}"
            )

    def forms(self) -> list[str]:
        """Return the forms to time, a user's kernel also where a preset does not name it.

        Optional peers that are not installed are left out.
        """
        wanted = [*self.variants, *(["yours"] if self.yours else [])]
        return [
            form for form in dict.fromkeys(wanted) if form not in OPTIONAL or is_installed(form)
        ]

    def directions(self, case: Case) -> tuple[str, ...]:
        """Return what is timed of an operation: "fwd", "bwd" or "both", the two in one call."""
        return ("fwd",) if self.forward else case.operation.directions

    def cases(self) -> list[Case]:
        """Return the operations and chains of the run, in each of their sizes."""
        # `__post_init__` refuses a user's kernel without the name of its operation.
        yours = None if self.yours is None else kernel_of(self.yours, self.only[0])
        found = [] if self.chain else table.cases(self.small)
        found += [
            chain_case(chain).sized(self.small)
            for chain in ([self.chain] if self.chain else CHAINS)
        ]
        return [
            # Only the first dimension shrinks: rows keep their length, which decides how a kernel
            # works.
            dataclasses.replace(
                case, shape=(max(1, case.shape[0] // divisor), *case.shape[1:]), yours=yours
            )
            for case in found
            if not self.only or case.name in self.only
            for divisor in self.shrink
        ]


def kernel_of(name: str, operation: str) -> Function:
    """Return a user's kernel as a function of the operation's tensors.

    Args:
        name: `module:function`. Of an autograd Function, its `apply` is called.
        operation: name of a row of the table.

    Raises:
        ValueError: it cannot be imported.
    """
    found = factory_of(name, "--yours")
    if operation in OPERATIONS:
        # It may take more than the tensors, such as `eps`.
        return call_of(found, OPERATIONS[operation])
    if isinstance(found, type) and issubclass(found, torch.autograd.Function):
        return found.apply
    return found


SMALL = {"small": True, "variants": ("ours", "naive", "builtin"), "repeat_ms": 1, "rounds": 6}
PRESETS = {
    "quick": {"only": ("rms_norm", "layer_norm", "softmax", "swiglu", "cross_entropy", "matmul")},
    "quick-cpu": SMALL | {"only": ()},
    "sizes": {"only": ("add", "softmax", "matmul"), "shrink": (1, 8, 64, 512)},
    "sizes-cpu": SMALL | {"only": ("add", "softmax", "matmul"), "shrink": (1, 2, 4)},
    "chains": {"only": tuple("+".join(chain) for chain in CHAINS)},
    "chains-cpu": {"small": True, "repeat_ms": 1, "variants": SMALL["variants"]},
    "smoke": SMALL | {"only": ("add", "rms_norm", "matmul", "+".join(CHAINS[0]))},
}


def measure(config: RooflineConfig, context: RankContext, run: Run) -> None:
    """Add a row per operation, direction and variant, and then compare ours with all others."""
    device = context.device.type
    # Ceilings are measured in this process, because clocks differ from run to run.
    limits = ceilings(device, config.repeat_ms)
    for case, direction in [
        (each, way) for each in config.cases() for way in config.directions(each)
    ]:
        known = {"label": case.label, "direction": direction}
        # Only what an interrupted run of this name has not measured yet.
        missing = [v for v in config.forms() if case.operation.has(v) and not run.done(v, **known)]
        if not missing:
            continue
        run.progress(f"{case.label} {direction}: {', '.join(missing)}")
        shown = known | {"operation": case.name, "shape": list(case.shape), "dtype": case.dtype}
        if case.chain:
            shown["chain"] = list(case.chain)
        for variant, metrics in Row(case, direction, missing, config, device).measure().items():
            # Rates are derived now, so that each row is compared with the ceilings of its own
            # process.
            metrics |= _rates(case, direction, metrics, limits)
            run.add(
                variant,
                metrics | (predicted(case, direction, limits) if variant == "ours" else {}),
                **shown,
            )
        if device == "cuda":
            gc.collect()
            # The graphs of the next row have a pool of their own, and cannot use blocks cached
            # outside of it.
            torch.cuda.empty_cache()
    # The parts are made anew from all rows, also those of an earlier run of this name.
    compared = compare(run.records)
    run.part(COMPARISON.name).records[:] = beside_peers(compared)
    run.part(TRAFFIC.name).records[:] = accounts(compared)


class Row:
    """One operation in one direction: the input of all its variants, and the results of each.

    Args:
        case, direction: operation and direction of the row.
        variants: names of the forms to measure.
        config: options of the experiment.
        device: `cuda` or `cpu`.
    """

    def __init__(
        self, case: Case, direction: str, variants: list[str], config: RooflineConfig, device: str
    ):
        self.case, self.direction, self.config, self.device = case, direction, config, device
        self.inputs = case.inputs(device)
        # The shape of the result is needed before any variant runs.
        result = first(case.operation.main(*[t.detach() for t in self.inputs]))
        # One upstream gradient for all variants, so that their gradients can be compared with those
        # of `exact`.
        self.upstream = upstream_of(result, direction)
        self.found: dict[str, dict[str, Any]] = {variant: {"status": "ok"} for variant in variants}
        self.functions: dict[str, Function] = {}  # only of variants whose results were right
        self.captures = not case.operation.stateful  # an optimizer's steps are not captured

    def measure(self) -> dict[str, dict[str, Any]]:
        """Check and time all variants. Return variant → metrics."""
        # After a number of recompilations Dynamo runs a function eager, which a list of sizes would
        # reach. The user's own kernel may be compiled, too.
        if "torch._dynamo" in sys.modules:
            # Reset once, and not between variants: captured graphs launch kernels that earlier
            # variants compiled.
            torch.compiler.reset()
        try:
            expected = exact(self.case, self.inputs, self.direction, self.upstream)
        # Rows that fill the device have no room for float64. They are timed without an error.
        except torch.OutOfMemoryError:
            expected = None
        for variant in self.found:
            self._add(variant, partial(self._check, variant, expected))
        # Before the timing, whose graphs need the memory.
        del expected
        self._time()
        # After the timing, since a function that returns results of an earlier call would be right
        # until then.
        if "yours" in self.functions and self.found["yours"]["status"] == "ok":
            self._add("yours", self._check_again)
        return self.found

    def _time(self) -> None:
        """Time all variants in interleaved rounds, on the device and in a loop as in a model.

        Graphs are captured once if all can be held at once, otherwise again in every round.
        """
        device, held = (
            self.device,
            [metrics.get("peak_alloc_bytes", 0) for metrics in self.found.values()],
        )
        # On a CPU there are no graphs, so nothing is held.
        together = device == "cpu" or fits(sum(held))
        kept: dict[str, Prepared] = {}
        counts: dict[str, int] = {}

        def ready(variant: str) -> Prepared:
            return kept.get(variant) or prepare(
                self._maker(self.functions[variant]), device, self.captures
            )

        def begin(variant: str) -> dict[str, Any]:  # compiles, so that no round does
            prepared = ready(variant)
            # `repeat_ms` is the device time of a number, and a number is the median over all
            # rounds.
            counts[variant] = calls_within(
                self.config.repeat_ms / self.config.rounds, prepared.call, device
            )
            if together:
                kept[variant] = prepared
            return {"captured": prepared.captured}

        def once(variant: str) -> dict[str, list[float]]:
            prepared = ready(variant)
            found = {"time": [device_ms(prepared.call, counts[variant], device)]}
            del prepared  # frees its graph, if the graphs do not all fit
            return found | (
                call_ms(self._maker(self.functions[variant])(), 1) if device == "cuda" else {}
            )

        for variant in self.functions:
            self._add(variant, partial(begin, variant))
        calls = {variant: partial(once, variant) for variant in counts}
        for variant, metrics in sample_rounds(calls, self.config.rounds).items():
            self.found[variant] |= metrics

    def _add(self, variant: str, work: Callable[[], dict[str, Any]]) -> None:
        """Add what `work` measures. A peer that fails or is missing has a `status` that says so."""
        metrics = attempt(work).items()
        # A status of ok must not overwrite WRONG, which an earlier check of the same variant has
        # set.
        self.found[variant] |= {
            name: value for name, value in metrics if (name, value) != ("status", "ok")
        }

    def _maker(self, function: Function) -> Callable[[], Callable[[], Any]]:
        """Return a function that makes the run on inputs of its own: a peer may overwrite them."""
        mine = with_gradients(self.inputs)
        return partial(runner, function, mine, self.direction, self.upstream)

    def _check(self, variant: str, expected: list[Tensor] | None) -> dict[str, Any]:
        """Return error, memory and launches of one variant, which runs alone on the device."""
        # Inputs are copied, since an operation may work in place.
        function, fresh = build(self.case, variant), with_gradients(self.inputs)
        # After the inputs were copied and the form was built, so that the difference is that of the
        # call.
        before = allocated_bytes(self.device)
        with peak_memory(self.device) as memory:
            results = runner(function, fresh, self.direction, self.upstream)()
        metrics: dict[str, Any] = {"error": worst_error(results, expected)}
        # Inputs, results and temporaries of this call, without memory that was in use before.
        if before is not None:
            metrics["peak_alloc_bytes"] = (
                # The inputs are part of what a call needs, although they existed before it.
                memory.peak_alloc_bytes - before + sum(t.nbytes for t in fresh)
            )
            del fresh, results
            # Kernels are counted in a second call: the first may compile, and launch kernels to
            # tune itself.
            again = self._maker(function)()
            kernels = {
                name: count
                for name, count in launched(again).items()
                if not name.startswith(NO_KERNELS)
            }
            metrics["kernels"] = sum(kernels.values())
            metrics["kernel_names"] = sorted(kernels)
            if variant == "ours":
                metrics |= of_our_kernels(again)
            elif variant == "yours":
                metrics |= of_triton_kernels(again)
        if not self._is_right(metrics["error"]):
            metrics["status"] = "WRONG"
        self.functions[variant] = function  # timed only if this has succeeded
        return metrics

    def _is_right(self, error: float | None) -> bool:
        """Return whether an error is within the tolerance. An unknown one is."""
        # An operation may have a tolerance of its own: fp8 rounds more than any dtype of the
        # inputs.
        allowed = self.case.operation.tolerance or TOLERANCE[self.case.dtype]
        return error is None or error <= allowed

    def _check_again(self) -> dict[str, Any]:
        """Check a user's kernel again after its timing: it may have kept results of earlier calls.

        Its inputs are now others, of the same sizes.
        """
        others = []
        for tensor in self.inputs:
            # Flipping keeps the distribution of the values. Integer inputs stay as they are.
            others.append(tensor.flip(0) if tensor.is_floating_point() else tensor)
        try:
            expected = exact(self.case, others, self.direction, self.upstream)
        except torch.OutOfMemoryError:
            return {}
        fresh = with_gradients(others)
        results = runner(self.functions["yours"], fresh, self.direction, self.upstream)()
        error = worst_error(results, expected)
        return {} if self._is_right(error) else {"error": error, "status": "WRONG after timing"}


def exact(
    case: Case, inputs: list[Tensor], direction: str, upstream: Tensor
) -> list[Tensor] | None:
    """Return the results in `exact_dtype`. None if they are random or the operation is stateful."""
    operation = case.operation
    if operation.random or operation.stateful:
        return None
    function, dtype = operation.plain, operation.exact_dtype
    # Integer inputs such as class indices have no wider dtype.
    wide = with_gradients([t.to(dtype) if t.is_floating_point() else t for t in inputs])
    if direction == "fwd":
        # The wide inputs require gradients, which a forward alone does not need.
        with torch.no_grad():
            return [first(function(*wide))]
    out = first(function(*wide))
    return list(torch.autograd.grad(out, leaves(wide), upstream.to(out.dtype)))


def build(case: Case, variant: str) -> Function:
    """Return the function of a variant. Compiled ones are compiled for this size, as in use."""
    variants = case.operation.variants
    if variant in variants:
        return variants[variant]
    if variant == "max-autotune":
        # Every form is captured in a CUDA graph of ours, so Inductor must not make its own.
        mode = "max-autotune-no-cudagraphs"
        return torch.compile(case.operation.plain, dynamic=False, mode=mode)
    options = TEMPLATES if variant == "template" else None
    return torch.compile(case.operation.plain, dynamic=False, options=options)


def worst_error(results: Any, expected: list[Tensor] | None) -> float | None:
    """Return the largest difference of any result, over the largest value of that result."""
    if expected is None:
        return None
    # A form may return one tensor or several.
    results = results if isinstance(results, tuple | list) else [results]
    return max(
        # 1e-30 keeps a result of zeros from dividing by zero.
        ((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-30)).item()
        for x, y in zip(results, expected, strict=False)
    )


def _rates(
    case: Case, direction: str, metrics: dict[str, Any], limits: dict[str, float]
) -> dict[str, Any]:
    """Return bandwidth and arithmetic rate of a row, and their shares of the ceilings."""
    # A variant that failed has no time.
    if "time_p50_ms" not in metrics:
        return {}
    operation = case.operation
    cost, ms = operation.cost(direction), metrics["time_p50_ms"]
    rates = {
        "min_bytes": cost.bytes,
        "flops": cost.flops,
        # Of the least bytes: a form that moves more is not rewarded for it.
        "gb_per_s": cost.bytes / ms / 1e6,
        "tflop_per_s": cost.flops / ms / 1e9,
        **limits,
    }
    rates["of_copy_pct"] = None
    rates["of_cublas_pct"] = None
    # The roof over an operation is the one that bounds it, so only that share is shown.
    if operation.compute_bound:
        rates["of_cublas_pct"] = 100 * rates["tflop_per_s"] / limits["cublas_tflop_per_s"]
    else:
        rates["of_copy_pct"] = 100 * rates["gb_per_s"] / limits["copy_gb_per_s"]
    return rates


EXPERIMENT = Experiment(
    RooflineConfig, measure, VIEW, presets=PRESETS, gpus=1, parts=(COMPARISON, TRAFFIC)
)
