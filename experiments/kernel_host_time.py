"""What does a call of a kernel cost the host, stage by stage, beside torch's own operation?

    distlab run kernel_host_time                  # on a GPU
    distlab run kernel_host_time --quick          # some calls each; on a CPU with Triton's interpreter or plain torch

A model's step is made of hundreds of calls. While the host is ahead of the device, a call costs the device's time; once
it falls behind, the host's. Every number is µs until the host is free again, of calls in a loop: the minimum over
rounds in which ours and torch's take turns. Beside them what the device takes, in a replayed CUDA graph. All runs as in
a model under autocast: activations in bf16, weights in fp32, torch's side as `distlab.model` writes it.

Stages of ours: the forward's operator, called with its tensors; what the autograd Function adds; the backward's
operator, stamped inside autograd's own thread; and the way into that thread and back.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.experiment import Column, Experiment, Options, RankContext, Run, View, headline_from, option
from distlab.measure import attempt, replay_ms
from distlab.model import ops as plain
from distlab.model.ops import get_ops


@dataclass(frozen=True)
class Config(Options):
    """One run."""

    only: tuple[str, ...] = option((), "operations whose name begins so [all]")
    calls: int = option(100, "calls in a row", least=1)
    rounds: int = option(5, "of ours and torch's in turn", least=1)
    small: bool = option(False, "small sizes, in fp32")


@dataclass(frozen=True)
class Case:
    """One operation at one size: ours, torch's, the inputs' shapes, and the module whose operators ours calls."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., Tensor]
    torch: Callable[..., Tensor]
    module: Any
    forward_op: str = "forward_op"
    backward_op: str = "backward_op"
    fixed: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = lambda inputs: ()


def cases(small: bool) -> Iterator[Case]:
    """The rows; kernels are imported here, because importing them decides how they run."""
    from kernels import cross_entropy, layernorm, matmul, rmsnorm, rope, softmax, swiglu
    from kernels.flash_attention import flash_attention, ops

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True)

    def matrix(rows: int, cols: int) -> tuple[int, int]:
        return (4, 64) if small else (rows, cols)

    for batch, heads, length, dim in ((4, 32, 1024, 64), (2, 32, 2048, 128), (4, 32, 512, 80), (1, 8, 128, 64)):
        shape = (1, 2, 32, 16) if small else (batch, heads, length, dim)
        yield Case("attention", (shape,) * 3, attention, get_ops("sdpa").attention, ops)
    x, w = matrix(2048, 2560), matrix(2048, 2560)[1:]
    yield Case("rms_norm", (x, w), rmsnorm.rms_norm, lambda x, w: plain.rms_norm(x, w, 1e-5), rmsnorm)
    yield Case("layer_norm", (x, w, w), layernorm.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), layernorm)
    yield Case("softmax", (x,), softmax.softmax, lambda x: F.softmax(x, -1), softmax)
    yield Case("swiglu", (matrix(2048, 10240),) * 2, swiglu.swiglu, plain.swiglu, swiglu)
    yield Case("cross_entropy", (matrix(8192, 50257),), cross_entropy.cross_entropy, plain.cross_entropy, cross_entropy,
               "both_op", "scale_", lambda inputs: (torch.arange(len(inputs[0]), device=inputs[0].device) % 60,))
    heads = (1, 2, 32, 16) if small else (4, 32, 1024, 64)
    yield Case("rope", (heads,), rope.rope, plain.rope, rope, "rope_op", "rope_op",
               lambda inputs: plain.rope_tables(*inputs[0].shape[-2:], 1e4, inputs[0].device))
    yield Case("matmul", ((2048, 2560), (2560, 2560)) if not small else ((8, 16), (16, 8)), matmul.matmul, torch.matmul,
               matmul, "matmul_op", "matmul_op")


def host_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds per call of a loop, the device's queue empty when it begins."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls


@contextmanager
def stamped(module: Any, names: set[str]) -> Iterator[list[float]]:
    """Within, the µs of every call of these functions of a module, in whichever thread it is called."""
    taken: list[float] = []

    def timed(function: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        taken.append(1e6 * (time.perf_counter() - begin))
        return result

    with patch.multiple(module, **{name: partial(timed, getattr(module, name)) for name in names}):
        yield taken


def host_times(case: Case, config: Config, device: str) -> dict[str, float]:
    """Metrics of one row, in µs."""
    dtype = torch.float32 if config.small else torch.bfloat16
    inputs = [torch.randn(shape, device=device, dtype=torch.float32 if len(shape) == 1 else dtype, requires_grad=True)
              for shape in case.shapes]
    fixed = case.fixed(inputs)
    upstream = torch.randn_like(case.torch(*inputs, *fixed))

    def forward(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*inputs, *fixed)

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*inputs, *fixed), inputs, upstream)

    measured = {
        f"{who}_{what}_us": partial(run, function)
        for who, function in (("ours", case.ours), ("torch", case.torch))
        for what, run in (("forward", forward), ("both", both))
    }
    for call in measured.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(config.rounds):
        for name, call in measured.items():
            times[name].append(host_us(call, config.calls))
    found = {name: min(taken) for name, taken in times.items()}
    found |= stages(case, config, partial(both, case.ours))
    found["ratio"] = found["ours_both_us"] / found["torch_both_us"]
    ours, theirs = (torch.cat([g.double().flatten() for g in both(f)]) for f in (case.ours, case.torch))
    found["difference"] = ((ours - theirs).norm() / theirs.norm()).item()
    if device == "cuda":
        for who, function in (("ours", case.ours), ("torch", case.torch)):
            found[f"{who}_device_us"] = 1e3 * min(replay_ms(partial(both, function), 50))
    return found


def stages(case: Case, config: Config, both: Callable[[], object]) -> dict[str, float]:
    """What the operators take of a forward and backward: the first that is called, and the last."""
    taken = []
    with stamped(case.module, {case.forward_op, case.backward_op}) as calls:
        for _ in range(config.calls):
            calls.clear()
            both()
            taken.append((calls[0], calls[-1]))
    return dict(zip(("forward_op_us", "backward_op_us"), map(min, zip(*taken, strict=True)), strict=True))


def measure(config: Config, context: RankContext, run: Run) -> None:
    """A row per operation and size."""
    for case in cases(config.small):
        row = {"operation": case.name, "shape": list(case.shapes[0])}
        if (not config.only or case.name.startswith(config.only)) and not run.done("ours", **row):
            run.progress(f"{case.name} {'×'.join(map(str, case.shapes[0]))}")
            with torch.autocast(context.device.type, torch.bfloat16, enabled=not config.small):
                run.add("ours", attempt(partial(host_times, case, config, context.device.type)), **row)
            if context.device.type == "cuda":
                torch.cuda.synchronize()


COLUMNS = [
    Column("config.operation", "operation"), Column("config.shape", "shape"),
    Column("metrics.ours_both_us", "ours µs", ".0f"), Column("metrics.torch_both_us", "torch µs", ".0f"),
    Column("metrics.ratio", "ratio", ".2f"), Column("metrics.ours_device_us", "ours device", ".0f"),
    Column("metrics.torch_device_us", "torch device", ".0f"), Column("metrics.ours_forward_us", "ours fwd", ".0f"),
    Column("metrics.torch_forward_us", "torch fwd", ".0f"), Column("metrics.forward_op_us", "fwd operator", ".0f"),
    Column("metrics.backward_op_us", "bwd operator", ".0f"), Column("metrics.difference", "difference", ".1e"),
    Column("metrics.status", "status"),
]  # fmt: skip
VIEW = View(
    columns=COLUMNS,
    headline=headline_from("Host µs of forward + backward, {calls} calls in a row, {device_name}, torch {torch}"),
    terminal=("operation", "shape", "ours_both_us", "torch_both_us", "ratio", "ours_device_us", "forward_op_us",
              "backward_op_us", "difference", "status"),
    reading="Where the host's µs exceed the device's, the device waits: the row is host-bound. The operators are what "
    "allocates and launches; the rest of ours is autograd's way to them and back.",
    noise="Minima over rounds; what other programs do on the same cores only adds.",
)  # fmt: skip
SMOKE = {"small": True, "calls": 2, "rounds": 1}
PRESETS = {"quick": {"only": ("rms_norm", "attention"), "rounds": 2}, "quick-cpu": SMOKE, "smoke": SMOKE}
EXPERIMENT = Experiment(Config, measure, VIEW, presets=PRESETS, gpus=1)
