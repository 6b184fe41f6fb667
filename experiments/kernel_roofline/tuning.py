"""Launch parameters tried on the GPU, and the generated code without one."""

import contextlib
import itertools
from collections.abc import Sequence

import torch

from distlab.experiment import Run

from .cases import Case, first, runner, upstream_of, with_gradients
from .timing import device_ms

# Operation → the name by which `kernels._rows.forced` knows its kernel, "_backward" added. Matmuls are not among them:
# their tiles are chosen for a GPU generation, and depend on more than a row.
TUNED = {
    "rms_norm": "rmsnorm", "add_rms_norm": "rmsnorm", "add_rms_norm_silu": "rmsnorm", "layer_norm": "layernorm",
    "softmax": "softmax", "weighted_sum": "weighted_sum",
}  # fmt: skip
GRIDS = ((0, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1), (4, 2), (8, 1))  # (programs per SM, stages)
SHOWN = 6


def tune(cases: Sequence[Case], device: str, repeat_ms: int, run: Run) -> None:
    """Time our form of each case under many launch parameters of its row kernel: a row for each of the best."""
    from kernels._rows import Launch, forced, power_of_two

    for case, direction in [(each, way) for each in cases for way in each.directions]:
        name = TUNED[case.name] + "_backward" * (direction == "bwd")
        block, found = power_of_two(case.shape[-1]), []
        inputs = with_gradients(case.inputs(device))
        upstream = upstream_of(first(case.variants["ours"](*inputs)), direction)
        for warps, (per_sm, stages) in itertools.product((4, 8, 16, 32), GRIDS):
            launch = Launch(block, max(1, 2048 // block), warps, stages, per_sm)
            with contextlib.suppress(Exception), forced(**{name: launch}):
                call = runner(case.variants["ours"], inputs, direction, upstream)
                found.append((launch, device_ms(lambda call=call: call, device, repeat_ms)))
        for launch, times in sorted(found, key=lambda pair: pair[1]["time_p50_ms"])[:SHOWN]:
            what = f"{launch.warps} warps, {launch.stages} stages, {launch.per_sm or 'all'} per SM"
            run.add(what, times | {"status": "ok"}, label=case.label, operation=case.name, direction=direction,
                    shape=list(case.shape), dtype=case.dtype)  # fmt: skip
        run.progress(f"{case.label} {direction}: {len(found)} launches timed")


# Kernel → its launch, given the package `kernels`, x (8192, 4096) and w (4096) in bf16 and r (8192) in fp32.
LAUNCHES = {
    "add": lambda k, x, w, r: k.elementwise.launch_flat(k.elementwise.add_kernel, "add", x, x, x),
    "gelu": lambda k, x, w, r: k.elementwise.launch_flat(k.elementwise.gelu_forward_kernel, "gelu", x, x),
    "rms_norm": lambda k, x, w, r: k.rmsnorm.launch_forward(x, None, w, x, x, r, 1e-5, False),
    "softmax": lambda k, x, w, r: k.softmax.launch_forward(x, x),
    "swiglu": lambda k, x, w, r: k.swiglu.launch(k.swiglu.forward_kernel, "swiglu", (x, x), (x,)),
}


def compile_kernel(name: str):
    """One of our kernels, compiled for Hopper without running; `asm["ptx"]` is its PTX."""
    import kernels
    from kernels import elementwise, rmsnorm, softmax, swiglu  # noqa: F401  # attributes of kernels, once imported
    from kernels._compile import compile_for

    sizes = (((8192, 4096), torch.bfloat16), ((4096,), torch.bfloat16), ((8192,), torch.float32))
    with compile_for(90) as compiled:
        LAUNCHES[name](kernels, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in sizes))
    return compiled[0]


def dump_ptx(name: str, run: Run) -> None:
    """Write `NAME.ptx` of a kernel into the run's folder, and a row of what it uses."""
    from kernels._compile import resources

    compiled, path = compile_kernel(name), run.path / f"{name}.ptx"
    path.write_text(compiled.asm["ptx"], encoding="utf-8")
    used = resources(compiled)
    run.add("ours", used | {"status": "ok"}, label=name, operation=name, direction="fwd")
    run.progress(f"{used['registers']} registers, {used['spill_bytes']} bytes spilled; PTX: {path}")
