"""How close is each fused kernel to what the hardware allows, and to what one could call instead?

    python -m experiments.kernel_roofline --stamp full          # all rows, some five minutes; again: resumes
    python -m experiments.kernel_roofline --quick               # the rows of most interest
    python -m experiments.kernel_roofline --only rms_norm --tune    # try launch parameters of one kernel
    python -m experiments.kernel_roofline --dump-ptx gelu       # the generated PTX; needs no GPU
    python -m experiments.kernel_roofline --smoke               # seconds, on a CPU

Each operation in each direction × (ours, naive: plain torch one kernel at a time, builtin: torch's own, compile: the
naive form through torch.compile, liger: Liger Kernel where it is installed). Median device time of a CUDA graph's
replays with the L2 flushed in between; GB/s of the *least* traffic and its share of the copy bandwidth of this run;
TFLOP/s and its share of cuBLAS in this run; launched kernels; registers and spills of ours; the largest error against
float64, relative to the largest value. Beside the measured speed-up over the naive form stands the predicted one: bytes
of the naive form's operations, counted at torch's dispatcher, over the least traffic.

Two rows lose on purpose: `spilling_add_rms_norm_silu`, a chain fused into too few threads' registers, and `add_gelu`,
which torch.compile makes one kernel and ours are two.
"""

import argparse
import contextlib
import dataclasses
import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.hardware import lookup
from distlab.measure.timing import measure, percentiles
from distlab.report import (
    Column,
    OutputFolder,
    Record,
    View,
    add_from_option,
    commit,
    environment,
    read_json,
    redraw,
    say,
    write,
    write_json,
)
from distlab.report.output import atomic_path
from kernels.cost import Cost

EXPERIMENT = "kernel_roofline"
VARIANTS = ("ours", "naive", "builtin", "compile", "liger")
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 4e-2}  # of the largest value: sums, then one rounding
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one size.

    Args:
        name: of the operation.
        shape: what the table shows, and what `inputs` and `cost` are called with.
        dtype: torch's name of it.
        directions: "fwd", "bwd" or "both".
        inputs: shape, dtype, device → tensors; those of floating point get gradients.
        variants: name → function of the inputs. "compile" is made from "naive" unless given.
        cost: direction → least FLOPs and bytes.
        compute: bound by arithmetic: the share of cuBLAS counts, not that of the copy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    directions: tuple[str, ...]
    inputs: Callable[[tuple[int, ...], torch.dtype, str], list[Tensor]]
    variants: dict[str, Function]
    cost: Callable[[str], Cost]
    compute: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {'×'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True)
class Config:
    """One run.

    Args:
        device: "cuda", or "cpu" for the smoke test, where times are the host's.
        small: sizes of the smoke test.
        only: names of operations; empty for all.
        variants: which to run.
        repeat_ms: device time per number.
    """

    device: str = "cuda"
    small: bool = False
    only: tuple[str, ...] = ()
    variants: tuple[str, ...] = VARIANTS
    repeat_ms: int = 60


QUICK = Config(only=("rms_norm", "layer_norm", "softmax", "swiglu", "cross_entropy", "matmul"))
SMOKE = Config(device="cpu", small=True, variants=("ours", "naive", "builtin"), repeat_ms=1)


def _draw(*shapes: tuple[int, ...]) -> Callable[..., list[Tensor]]:
    """Normal inputs of these shapes; on the meta device nothing is drawn."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        if device == "meta":
            return [torch.empty(size, dtype=dtype, device=device) for size in shapes]
        generator = torch.Generator(device).manual_seed(len(shape) + sum(shape))
        return [torch.randn(size, generator=generator, device=device).to(dtype) for size in shapes]

    return make


def cases(small: bool = False) -> list[Case]:
    """Every row of the table. Kernels are imported here: importing them decides how they run."""
    from kernels import (
        adamw,
        cross_entropy,
        dropout,
        elementwise,
        layernorm,
        linear_cross_entropy,
        matmul,
        reference,
        rmsnorm,
        rope,
        softmax,
        swiglu,
        weighted_sum,
    )
    from kernels._rows import Launch, forced

    rows: list[Case] = []

    def add(name: str, shape: tuple[int, ...], tiny: tuple[int, ...], dtype: str, inputs: Function, cost: Function,
            directions: tuple[str, ...] = ("fwd", "bwd"), compute: bool = False, **variants: Function) -> None:
        shape = tiny if small else shape
        if any((row.name, row.shape) == (name, shape) for row in rows):
            return  # two sizes that are one in the smoke test
        dtype = "float32" if small else dtype
        torch_dtype = getattr(torch, dtype)

        def of(direction: str) -> Cost:
            if direction == "both":
                return cost(shape, torch_dtype) + cost(shape, torch_dtype, backward=True)
            return cost(shape, torch_dtype, **({"backward": True} if direction == "bwd" else {}))

        rows.append(Case(name, shape, dtype, directions, inputs, variants, of, compute))

    def rows_and_weight(shape, dtype, device):
        x, w = _draw((shape[0], shape[1]), (shape[1],))(shape, dtype, device)
        return [x, 1 + 0.1 * w]

    def two(shape, dtype, device):
        return _draw(shape, shape)(shape, dtype, device)

    norm, tiny = (8192, 4096), (4, 64)
    add("add", (8192, 8192), tiny, "bfloat16", two, lambda s, d: elementwise.add_cost(s, d), ("fwd",),
        ours=elementwise.add, naive=reference.add)
    add("weighted_sum", norm, tiny, "bfloat16", rows_and_weight, weighted_sum.cost, ours=weighted_sum.weighted_sum,
        naive=reference.weighted_sum, builtin=lambda x, w: x @ w)
    add("gelu", (8192, 11008), tiny, "bfloat16", lambda *a: two(*a)[:1], elementwise.cost, ours=elementwise.gelu,
        naive=reference.gelu, builtin=lambda x: F.gelu(x, approximate="tanh"))
    for shape in ((8192, 4096), (32768, 1024), (1024, 32768), (256, 200000)):
        add("softmax", shape, (4, shape[1] // 16), "float32", lambda *a: two(*a)[:1], softmax.cost,
            ours=softmax.softmax, naive=reference.softmax, builtin=lambda x: F.softmax(x, -1), liger=_liger("softmax"))
    add("layer_norm", norm, tiny, "bfloat16", lambda *a: [*rows_and_weight(*a), 0.1 * rows_and_weight(*a)[1]],
        layernorm.cost, ours=layernorm.layer_norm, naive=reference.layer_norm,
        builtin=lambda x, w, b: F.layer_norm(x, w.shape, w, b), liger=_liger("layer_norm", 1e-5))
    add("rms_norm", norm, tiny, "bfloat16", rows_and_weight, rmsnorm.cost, ours=rmsnorm.rms_norm,
        naive=reference.rms_norm, builtin=lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), liger=_liger("rms_norm", 1e-5))

    def residual_inputs(shape, dtype, device):
        return [*two(shape, dtype, device), rows_and_weight(shape, dtype, device)[1]]

    for name, activation in (("add_rms_norm", None), ("add_rms_norm_silu", "silu")):
        add(name, norm, tiny, "bfloat16", residual_inputs,
            # what is timed backward is the gradient of y alone: none arrives for the sum
            lambda s, d, backward=False: rmsnorm.cost(s, d, residual=not backward, backward=backward),
            ours=lambda x, r, w, a=activation: rmsnorm.add_rms_norm(x, r, w, 1e-5, a),
            naive=lambda x, r, w, a=activation: reference.add_rms_norm(x, r, w, 1e-5, a))

    def spilling(x, r, w):
        with forced(rmsnorm=Launch(block=16384 if not small else 64, warps=2)):
            return rmsnorm.add_rms_norm(x, r, w, 1e-5, "silu")

    add("spilling_add_rms_norm_silu", (2048, 16384), tiny, "bfloat16", residual_inputs,
        lambda s, d: rmsnorm.cost(s, d, residual=True), ("fwd",), ours=spilling,
        naive=lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5, "silu"))
    add("add_gelu", (8192, 8192), tiny, "bfloat16", two, lambda s, d: elementwise.add_cost(s, d), ("fwd",),
        ours=lambda x, y: elementwise.gelu(elementwise.add(x, y)), naive=lambda x, y: reference.gelu(x + y),
        builtin=lambda x, y: F.gelu(x + y, approximate="tanh"))

    def rope_tables(shape, device):
        angles = torch.arange(shape[-2], device=device)[:, None] * torch.logspace(0, -4, shape[-1] // 2, device=device)
        return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)

    def with_tables(function):
        tables: dict = {}

        def run(x):
            if x.is_meta or x.device not in tables:
                tables[x.device] = rope_tables(x.shape, x.device)
            return function(x, *tables[x.device])

        return run

    add("rope", (4, 32, 4096, 128), (2, 2, 8, 16), "bfloat16", lambda *a: two(*a)[:1],
        lambda s, d, **_: rope.cost(s, d), ours=with_tables(rope.rope), naive=with_tables(reference.rope))
    add("swiglu", (8192, 11008), tiny, "bfloat16", two, swiglu.cost, ours=swiglu.swiglu, naive=reference.swiglu,
        builtin=lambda g, u: F.silu(g) * u, liger=_liger("swiglu"))
    add("dropout", (8192, 8192), tiny, "bfloat16", lambda *a: two(*a)[:1], dropout.cost,
        ours=lambda x: dropout.dropout(x, 0.1), builtin=lambda x: F.dropout(x, 0.1))

    def loss_inputs(shape, dtype, device):
        logits = _draw(shape)(shape, dtype, device)[0]
        return [logits, torch.arange(shape[0], device=device) * 7919 % shape[1]]

    add("cross_entropy", (2048, 151936), (8, 500), "bfloat16", loss_inputs, cross_entropy.cost, ("both",),
        ours=cross_entropy.cross_entropy, naive=reference.cross_entropy,
        builtin=lambda z, t: F.cross_entropy(z.float(), t), liger=_liger("cross_entropy"))

    def product_inputs(shape, dtype, device):
        m, k, n = shape
        return _draw((m, k), (k, n))(shape, dtype, device)

    for size in (4096, 8192):
        add("matmul", (size,) * 3, (40, 24, 33), "bfloat16", product_inputs, matmul.cost, ("fwd",), True,
            ours=matmul.matmul, builtin=torch.matmul)
        add("matmul_gelu", (size,) * 3, (40, 24, 33), "bfloat16", product_inputs, matmul.cost, ("fwd",), True,
            ours=lambda a, b: matmul.matmul(a, b, epilogue="gelu"), naive=lambda a, b: reference.gelu(a @ b),
            builtin=lambda a, b: F.gelu(a @ b, approximate="tanh"))

    def layer_inputs(shape, dtype, device):
        n, d, f = shape
        return _draw((n, d), (f, d), (f,))(shape, dtype, device)

    def layer_cost(shape, dtype, backward=False):
        n, _, f = shape
        return matmul.cost(shape, dtype, backward=backward) + dropout.cost((n, f), dtype, gelu=True, backward=backward)

    add("linear_gelu_dropout", (8192, 4096, 11008), (8, 16, 24), "bfloat16", layer_inputs, layer_cost, compute=True,
        ours=lambda x, w, b: dropout.linear_gelu_dropout(x, w, b, 0.1),
        builtin=lambda x, w, b: F.dropout(F.gelu(F.linear(x, w, b), approximate="tanh"), 0.1))

    def stepping(optimizer_class, **options):
        made: dict = {}

        def step(x):
            if x.device not in made:
                parameters = [piece.clone().requires_grad_() for piece in x.detach().chunk(64)]
                for p in parameters:
                    p.grad = torch.ones_like(p)
                made[x.device] = parameters, optimizer_class(parameters, **options)
            parameters, optimizer = made[x.device]
            optimizer.step()
            return parameters[0]

        return step

    add("adamw", (2**27,), (200,), "float32", lambda s, d, device: _draw(s)(s, d, device),
        lambda s, d: adamw.cost(s[0], d), ("fwd",), ours=stepping(adamw.AdamW),
        naive=stepping(torch.optim.AdamW, foreach=False), builtin=stepping(torch.optim.AdamW, fused=True))

    def linear_loss_inputs(shape, dtype, device):
        n, d, v = shape
        x, w = _draw((n, d), (v, d))(shape, dtype, device)
        return [x, w * 0.02, torch.arange(n, device=device) * 7919 % v]

    add("linear_cross_entropy", (8192, 4096, 151936), (8, 16, 100), "bfloat16", linear_loss_inputs,
        lambda s, d, backward=False: Cost(0, 0) if backward else linear_cross_entropy.cost(s, d), ("both",), True,
        ours=linear_cross_entropy.linear_cross_entropy, builtin=lambda x, w, t: F.cross_entropy((x @ w.T).float(), t),
        liger=_liger("fused_linear_cross_entropy"))
    return rows


def _liger(name: str, *options: Any) -> Function:
    """Liger's function of that name; imported when it is called, so that its absence is a row that says so."""

    def run(*tensors: Tensor) -> Any:
        from liger_kernel.transformers import functional

        result = getattr(functional, f"liger_{name}")(*tensors, *options)
        return result[0] if isinstance(result, tuple) else result

    return run


class TrafficCounter(TorchDispatchMode):
    """Bytes that each dispatched operation reads and writes, views and empty allocations left out."""

    FREE = ("view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute", "slice", "select", "detach",
            "alias", "empty", "t.", "as_strided", "split", "unbind", "chunk")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::")
        if not any(name.startswith(free) for free in self.FREE):
            flat = torch.utils._pytree.tree_leaves((args, kwargs, out))
            tensors = {id(t): t for t in flat if isinstance(t, Tensor)}
            self.bytes += sum(min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) * t.element_size()
                              for t in tensors.values())
        return out


def naive_bytes(case: Case, direction: str) -> int | None:
    """Traffic of the naive form one operation at a time, on the meta device; None where there is no naive form."""
    if "naive" not in case.variants or case.name == "adamw":  # adamw's tensors are not those of its call
        return None
    inputs = with_gradients(case.inputs(case.shape, getattr(torch, case.dtype), "meta"))
    counter = TrafficCounter()
    with counter if direction in ("fwd", "both") else contextlib.nullcontext():
        out = first(case.variants["naive"](*inputs))
    if direction in ("bwd", "both"):
        with counter:
            torch.autograd.grad(out, leaves(inputs), torch.empty_like(out))
    return counter.bytes


def with_gradients(inputs: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [t for t in inputs if t.requires_grad]


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def build(case: Case, variant: str) -> Function:
    """The function of a variant; compiled ones are compiled for this size, as their users do."""
    if variant != "compile":
        return case.variants[variant]
    torch._dynamo.reset()
    return torch.compile(case.variants.get("naive", case.variants.get("builtin")), dynamic=False)


def runner(function: Function, inputs: list[Tensor], direction: str, upstream: Tensor) -> Callable[[], Any]:
    """What is timed: the forward without gradients, or the backward of a forward made now, or both."""
    if direction == "fwd":
        plain = [t.detach() for t in inputs]
        return lambda: function(*plain)
    if direction == "both":
        return lambda: torch.autograd.grad(first(function(*inputs)), leaves(inputs), upstream)
    out = first(function(*inputs))
    return lambda: torch.autograd.grad(out, leaves(inputs), upstream, retain_graph=True)


def exact(case: Case, inputs: list[Tensor], direction: str, upstream: Tensor) -> list[Tensor] | None:
    """Results in float64; those of torch's own form where float64 is too large to hold; None where they are random."""
    too_large = case.name == "linear_cross_entropy" and math.prod(case.shape) > 10**9
    if case.name in ("dropout", "linear_gelu_dropout", "adamw"):
        return None
    function = case.variants.get("naive", case.variants.get("builtin"))
    wide = with_gradients([t.double() if t.is_floating_point() and not too_large else t for t in inputs])
    if direction == "fwd":
        with torch.no_grad():
            return [first(function(*wide))]
    out = first(function(*wide))
    return list(torch.autograd.grad(out, leaves(wide), upstream.to(out.dtype)))


def worst_error(results: Any, expected: list[Tensor] | None) -> float | None:
    """Largest difference of any result, over the largest value of that result."""
    if expected is None:
        return None
    results = results if isinstance(results, tuple | list) else [results]
    return max(((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-30)).item()
               for x, y in zip(results, expected, strict=False))


def can_be_captured(run: Callable[[], Any]) -> bool:
    """Whether one run asks nothing of the host; a failed capture would leave the device in doubt."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def device_ms(make: Callable[[], Callable[[], Any]], config: Config, capture: bool = True) -> dict[str, Any]:
    """p20, p50, p80 of one run. On CUDA a graph is replayed with the L2 flushed; where none can be captured (a peer
    that waits for the device, an optimizer) the calls themselves are timed, and `captured` says so.

    `make` is called on the stream that is captured, because a backward runs on the stream of its forward.
    """
    if config.device != "cuda":
        return {f"time_{p}_ms": ms for p, ms in percentiles(measure(make(), warmup=1, repeats=3, device="cpu")).items()}
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = make()
        for _ in range(2):
            run()
        capture = capture and can_be_captured(run)
    torch.cuda.synchronize()
    timed: Callable[[], Any] = run
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        timed = graph.replay
    times = do_bench(timed, warmup=max(10, config.repeat_ms // 3), rep=config.repeat_ms, quantiles=[0.2, 0.5, 0.8])
    return dict(zip(("time_p20_ms", "time_p50_ms", "time_p80_ms"), times, strict=True)) | {"captured": capture}


def launched(run: Callable[[], Any]) -> dict[str, Any]:
    """Names and number of the kernels of one run, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA
             and not e.name.startswith(("Memcpy", "Memset", "Activity", "Lazy"))]
    return {"kernels": len(names), "kernel_names": sorted({name[:60] for name in names})}


def spills(run: Callable[[], Any]) -> dict[str, int]:
    """Registers and spilled bytes of our kernels in one run: the most of any."""
    from kernels import _triton
    from kernels._compile import resources

    with _triton.compile_only() as compiled:
        run()
    found = [resources(kernel) for kernel in compiled]
    return {name: max((r[name] for r in found), default=0) for name in ("registers", "spill_bytes")}


def ceilings(config: Config) -> dict[str, float]:
    """Copy bandwidth and cuBLAS's rate, measured now."""
    elements = 2**28 if config.device == "cuda" else 2**16
    source = torch.randn(elements, device=config.device).bfloat16()
    target = torch.empty_like(source)
    copy = device_ms(lambda: lambda: target.copy_(source), config)["time_p50_ms"]
    size = 8192 if config.device == "cuda" else 64
    a, b = (torch.randn(size, size, device=config.device).bfloat16() for _ in range(2))
    product = device_ms(lambda: lambda: torch.mm(a, b), config)["time_p50_ms"]
    return {"copy_gb_per_s": 4 * elements / copy / 1e6, "cublas_tflop_per_s": 2 * size**3 / product / 1e9}


def measure_row(case: Case, variant: str, direction: str, config: Config, limits: dict[str, float],
                inputs: list[Tensor], upstream: Tensor, expected: list[Tensor] | None) -> dict[str, Any]:
    """All metrics of one row; the reason in `status` where there are none."""
    mine = with_gradients(inputs)  # a peer may overwrite what it is given
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = build(case, variant)
            if config.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            fresh = with_gradients(inputs)
            metrics: dict[str, Any] = {"status": "ok",
                                       "error": worst_error(runner(function, fresh, direction, upstream)(), expected)}
            del fresh
            if config.device == "cuda":
                metrics["peak_alloc_bytes"] = torch.cuda.max_memory_allocated()
            metrics |= device_ms(lambda: runner(function, mine, direction, upstream), config, case.name != "adamw")
            if config.device == "cuda":
                run = runner(function, mine, direction, upstream)
                metrics |= launched(run) | (spills(run) if variant == "ours" else {})
    except torch.OutOfMemoryError:
        return {"status": "OOM"}
    except Exception as error:  # a peer that is missing or refuses: a row that says so, not the end of the run
        return {"status": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:90]}"}
    cost, ms = case.cost(direction), metrics["time_p50_ms"]
    metrics |= {"min_bytes": cost.bytes, "flops": cost.flops, "gb_per_s": cost.bytes / ms / 1e6,
                "tflop_per_s": cost.flops / ms / 1e9, "compute_bound": case.compute, **limits}
    metrics["of_copy_pct"] = 100 * metrics["gb_per_s"] / limits["copy_gb_per_s"]
    metrics["of_cublas_pct"] = 100 * metrics["tflop_per_s"] / limits["cublas_tflop_per_s"] if case.compute else None
    if metrics["error"] is not None and not metrics["error"] <= TOLERANCE[case.dtype]:
        metrics["status"] = "WRONG"
    return metrics


def _upstream(out: Tensor, direction: str) -> Tensor:
    if direction == "both":
        return torch.ones_like(out)  # what loss.backward() passes
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)


def run(config: Config, path: Path | None = None, commit_id: str | None = None,
        progress: Callable[[str], None] = lambda text: None) -> list[Record]:
    """Measure every row that `path` does not hold yet; `path` is rewritten after each operation."""
    records = read_json(path) if path is not None and path.exists() else []
    done = {(r.config["label"], r.config["direction"], r.variant) for r in records}
    where, limits = environment(config.device), ceilings(config)
    for case in cases(config.small):
        if config.only and case.name not in config.only:
            continue
        for direction in case.directions:
            wanted = [v for v in config.variants if v in case.variants or (v == "compile" and case.name != "adamw")]
            missing = [v for v in wanted if (case.label, direction, v) not in done]
            if not missing:
                continue
            progress(f"{case.label} {direction}: {', '.join(missing)}")
            records += _rows_of(case, direction, missing, config, limits, where, commit_id)
            _compare_with_prediction(records, case, direction, limits)
            if config.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            if path is not None:
                write_json(records, path)
    return records


def _rows_of(case: Case, direction: str, variants: list[str], config: Config, limits: dict[str, float],
             where: dict[str, Any], commit_id: str | None) -> Iterator[Record]:
    inputs = case.inputs(case.shape, getattr(torch, case.dtype), config.device)
    upstream = _upstream(first(case.variants["ours"](*[t.detach() for t in inputs])), direction)
    try:
        expected = exact(case, inputs, direction, upstream)
    except torch.OutOfMemoryError:
        expected = None
    for variant in variants:
        row = {"label": case.label, "operation": case.name, "shape": list(case.shape), "dtype": case.dtype,
               "direction": direction}
        metrics = measure_row(case, variant, direction, config, limits, inputs, upstream, expected)
        yield Record(EXPERIMENT, variant, row, metrics, where, commit_id)


def _compare_with_prediction(records: list[Record], case: Case, direction: str, limits: dict[str, float]) -> None:
    """Speed-up over the naive form, measured and predicted from bytes alone, into our row."""
    rows = {r.variant: r.metrics for r in records if (r.config["label"], r.config["direction"]) ==
            (case.label, direction)}
    mine, naive = rows.get("ours", {}), rows.get("naive", {})
    if "time_p50_ms" not in mine or "time_p50_ms" not in naive:
        return
    mine["speed_up"] = naive["time_p50_ms"] / mine["time_p50_ms"]
    if not case.compute:
        mine["naive_bytes"] = naive_bytes(case, direction)
        if mine["naive_bytes"] is None:
            return
        mine["predicted_speed_up"] = mine["naive_bytes"] / mine["min_bytes"]
        mine["prediction_error_pct"] = 100 * (mine["predicted_speed_up"] / mine["speed_up"] - 1)


COLUMNS = [
    Column("config.label", "operation", align="left"), Column("config.direction", ""), Column("variant", "variant"),
    Column("metrics.time_p50_ms", "p50 µs", ".1f", scale=1000), Column("metrics.gb_per_s", "GB/s", ",.0f"),
    Column("metrics.of_copy_pct", "% of copy", ".0f"),
    Column("metrics.of_cublas_pct", "% of cuBLAS", ".0f", missing=""),
    Column("metrics.kernels", "kernels"), Column("metrics.registers", "registers", missing=""),
    Column("metrics.spill_bytes", "spilled", missing=""), Column("metrics.peak_alloc_bytes", "peak GiB", ".2f",
                                                                 scale=2**-30),
    Column("metrics.error", "error", ".1e"), Column("metrics.speed_up", "× naive", ".2f", missing=""),
    Column("metrics.predicted_speed_up", "predicted", ".2f", missing=""), Column("metrics.status", "status"),
]


def headline(records: list[Record]) -> str:
    """What was measured on, for the line above a table."""
    r = records[0]
    limits = next((x.metrics for x in records if "copy_gb_per_s" in x.metrics), {})
    return (f"{r.environment.get('device_name', 'CPU')}, torch {r.environment.get('torch', '?')}; copy "
            f"{limits.get('copy_gb_per_s', 0):,.0f} GB/s, cuBLAS {limits.get('cublas_tflop_per_s', 0):,.0f} TFLOP/s")


def verdicts(records: list[Record]) -> list[str]:
    """One line per operation and direction in which a peer is faster, or that there is none."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        if r.metrics.get("status") == "ok":
            groups.setdefault((r.config["label"], r.config["direction"]), {})[r.variant] = r.metrics["time_p50_ms"]
    lines = []
    for (label, direction), times in groups.items():
        mine = times.pop("ours", None)
        if mine is None or not times:
            continue
        best = min(times, key=times.get)
        if times[best] < mine:
            lines.append(f"{label} {direction}: {best} is faster, {1000 * times[best]:.1f} µs, ours {1000 * mine:.1f}")
    return lines or ["no peer is faster in any row"]


def plot_roofline(records: list[Record], path: Path) -> None:
    """Every kernel of ours as a point under the two measured ceilings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mine = [r for r in records if r.variant == "ours" and r.metrics.get("flops") and "tflop_per_s" in r.metrics]
    if not mine:
        return
    bandwidth, peak = (mine[0].metrics[name] for name in ("copy_gb_per_s", "cublas_tflop_per_s"))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = [(r.metrics["flops"] / r.metrics["min_bytes"], r.metrics["tflop_per_s"]) for r in mine]
    intensities = sorted([0.05, 1000 * peak / bandwidth, 20000.0])
    axes.plot(intensities, [min(peak, i * bandwidth / 1000) for i in intensities], color="#333333", linewidth=1.5,
              label=f"copy {bandwidth:,.0f} GB/s, cuBLAS {peak:,.0f} TFLOP/s, measured")
    spec = lookup(mine[0].environment.get("device_name") or "")
    if spec is not None:
        top = spec.peak["bf16"] / 1e12
        knee = sorted([0.05, spec.peak["bf16"] / spec.hbm_bandwidth, 20000.0])
        axes.plot(knee, [min(top, i * spec.hbm_bandwidth / 1e12) for i in knee], "--", color="#999999", linewidth=1,
                  label=f"datasheet of the {spec.name}")
    for direction, marker in (("fwd", "o"), ("bwd", "s"), ("both", "^")):
        chosen = [p for p, r in zip(points, mine, strict=True) if r.config["direction"] == direction]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), marker, markersize=5, linestyle="none",
                      label={"fwd": "forward", "bwd": "backward", "both": "forward and backward"}[direction])
    for number, (point, r) in enumerate(zip(points, mine, strict=True), 1):
        axes.annotate(str(number), point, fontsize=7, xytext=(4, 3), textcoords="offset points")
        axes.plot([], [], " ", label=f"{number} {r.config['label']} {r.config['direction']}")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of least traffic", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=1, handlelength=1.2)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)


def plot_bars(records: list[Record], path: Path) -> None:
    """Time of every variant over ours, one group of bars per operation and direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, float]] = {}
    for r in records:
        if r.metrics.get("time_p50_ms"):
            groups.setdefault(f"{r.config['label']} {r.config['direction']}", {})[r.variant] = r.metrics["time_p50_ms"]
    groups = {label: times for label, times in groups.items() if "ours" in times}
    if not groups:
        return
    figure = Figure(figsize=(9, 0.45 * len(groups) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    present = [v for v in VARIANTS if any(v in times for times in groups.values())]
    height = 0.8 / len(present)
    for place, variant in enumerate(present):
        at = [(row + (place - len(present) / 2 + 0.5) * height, times[variant] / times["ours"])
              for row, times in enumerate(groups.values()) if variant in times]
        axes.barh([y for y, _ in at], [x for _, x in at], height, label=variant)
    axes.set_yticks(range(len(groups)), groups, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="#333333", linewidth=0.8)
    longest = max(t / times["ours"] for times in groups.values() for t in times.values())
    axes.set(xlabel="time over ours (right of the line: ours is faster)", xlim=(0, min(6, 1.05 * longest)))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=130)


def tune(config: Config, kernel: str, progress: Callable[[str], None]) -> list[str]:
    """Time our rows of an operation under many launch parameters of its row kernel; best first."""
    from kernels._rows import Launch, forced, power_of_two

    lines = []
    for case in (c for c in cases(config.small) if c.name == kernel):
        for direction in (d for d in case.directions if d != "both"):
            name = {"rms_norm": "rmsnorm", "add_rms_norm": "rmsnorm", "layer_norm": "layernorm"}.get(kernel, kernel)
            name += "_backward" * (direction == "bwd")
            block, found = power_of_two(case.shape[-1]), []
            inputs = with_gradients(case.inputs(case.shape, getattr(torch, case.dtype), config.device))
            upstream = _upstream(first(case.variants["ours"](*inputs)), direction)
            for warps in (4, 8, 16, 32):
                for per_sm, stages in ((0, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1), (4, 2), (8, 1)):
                    launch = Launch(block, max(1, 2048 // block), warps, stages, per_sm)
                    with contextlib.suppress(Exception), forced(**{name: launch}):
                        run = runner(case.variants["ours"], inputs, direction, upstream)
                        ms = device_ms(lambda run=run: run, config)["time_p50_ms"]
                        found.append((ms, launch))
            found.sort(key=lambda pair: pair[0])
            lines += [f"{case.label} {direction}"] + [f"  {1000 * ms:8.1f} µs  {launch}" for ms, launch in found[:6]]
            progress(lines[-1])
    return lines


def dump_ptx(name: str) -> str:
    """The PTX of one of our kernels, compiled for Hopper without running."""
    from kernels import elementwise, rmsnorm, softmax, swiglu
    from kernels._compile import compile_for

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, w, r = empty(8192, 4096), empty(4096), empty(8192, dtype=torch.float32)
    launches: dict[str, Callable[[], None]] = {
        "add": lambda: elementwise.launch_flat(elementwise.add_kernel, "add", x, x, x),
        "gelu": lambda: elementwise.launch_flat(elementwise.gelu_forward_kernel, "gelu", x, x),
        "rms_norm": lambda: rmsnorm.launch_forward(x, None, w, x, x, r, 1e-5, False),
        "softmax": lambda: softmax.launch_forward(x, x),
        "swiglu": lambda: swiglu.launch(swiglu.forward_kernel, "swiglu", (x, x), (x,)),
    }
    if name not in launches:
        raise ValueError(f"--dump-ptx {name}: choose one of {', '.join(launches)}")
    with compile_for(90) as compiled:
        launches[name]()
    return compiled[0].asm["ptx"]


VIEW = View(
    EXPERIMENT,
    __doc__.splitlines()[0],
    COLUMNS,
    headline,
    pictures={"roofline.png": plot_roofline, "bars.png": plot_bars},
    findings=verdicts,
    reading="Of operations that are bound by memory, GB/s is the least traffic over the time, and its share of the "
    "copy's bandwidth in the same run says how far there is to go; products are held against cuBLAS. Errors are "
    "against float64, relative to the largest value; a row beyond the tolerance of its type says WRONG. In the "
    "roofline each number is one of our kernels, under the two ceilings measured in this run.",
    prediction="The speed-up over the naive form, from bytes alone: what the naive form's operators move, counted at "
    "torch's dispatcher, over the least traffic.",
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK.only)}; on a CPU as --smoke")
    parser.add_argument("--smoke", action="store_true", help="small sizes, seconds on a CPU")
    parser.add_argument("--only", nargs="+", help="these operations")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--repeat-ms", type=int, help="device time per number")
    parser.add_argument("--tune", action="store_true", help="launch parameters of the operations of --only instead")
    parser.add_argument("--dump-ptx", metavar="KERNEL", help="print the PTX of one kernel and stop")
    parser.add_argument("--out", default="outputs", help="folder of all results")
    parser.add_argument("--stamp", help="name of this run; a name that exists is resumed")
    parser.add_argument("--commit", help="recorded where the tree has no git")
    add_from_option(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.source:
        return redraw(VIEW, options.source, options.out)
    quick = QUICK if torch.cuda.is_available() else SMOKE
    config = SMOKE if options.smoke else quick if options.quick else Config()
    chosen = {name: tuple(getattr(options, name)) for name in ("only", "variants") if getattr(options, name)}
    config = dataclasses.replace(config, **chosen, repeat_ms=options.repeat_ms or config.repeat_ms)
    names = {case.name for case in cases(True)} if config.only else set()
    try:
        if options.dump_ptx:
            print(dump_ptx(options.dump_ptx))
            return 0
        if unknown := set(config.only) - names:
            raise ValueError(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(sorted(names))}")
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("the kernels are timed on a GPU and there is none (--smoke runs seconds on a CPU)")
        folder = OutputFolder(options.out, EXPERIMENT, options.stamp)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{EXPERIMENT}: error: {error}", file=sys.stderr)
        return 2

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if options.tune:
        print("\n".join(line for kernel in config.only for line in tune(config, kernel, progress)))
        return 0
    records = run(config, folder.path / "records.json", commit(options.commit), progress)
    say(VIEW, records, write(VIEW, records, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
