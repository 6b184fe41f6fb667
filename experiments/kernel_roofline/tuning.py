"""Launch parameters tried on the GPU, and the generated code without one."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from .cases import cases, first, runner, upstream_of, with_gradients
from .rows import Config
from .timing import device_ms


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
            upstream = upstream_of(first(case.variants["ours"](*inputs)), direction)
            for warps in (4, 8, 16, 32):
                for per_sm, stages in ((0, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1), (4, 2), (8, 1)):
                    launch = Launch(block, max(1, 2048 // block), warps, stages, per_sm)
                    with contextlib.suppress(Exception), forced(**{name: launch}):
                        run = runner(case.variants["ours"], inputs, direction, upstream)
                        ms = device_ms(lambda run=run: run, config.device, config.repeat_ms)["time_p50_ms"]
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
