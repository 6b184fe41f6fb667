"""The arithmetic of kernels on a named GPU, without one.

    python -m experiments.calculator gpus
    python -m experiments.calculator roofline --flops 4e9 --bytes 134e6 --gpu H100
    python -m experiments.calculator kernel rms_norm 8192 4096 --dtype bf16
    python -m experiments.calculator chain --operations 4 --elements 33554432
    python -m experiments.calculator block --batch 8 --context 2048 --d-model 4096 --d-ff 11008 --heads 32
    python -m experiments.calculator occupancy --threads 128 --registers 160
    python -m experiments.calculator waves --blocks 160 --gpu B200
    python -m experiments.calculator coalescing --stride 32 --itemsize 4
    python -m experiments.calculator banks
    python -m experiments.calculator divergence --lanes 1 --cycles 100 10

Each prints its answer in words and, with --json, as one line of JSON instead.
"""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

from distlab import hardware
from distlab.model import config as model_config
from distlab.report import run_to_end
from distlab.report.options import real, whole
from distlab.theory import fusion, gpu, warp_access
from distlab.theory.gpu import roofline
from kernels.cost import Cost

GPUS = {
    "A100-40GB": hardware.A100_SXM_40GB,
    "A100": hardware.A100_SXM_80GB,
    "H100": hardware.H100_SXM,
    "H100-PCIe": hardware.H100_PCIE,
    "H200": hardware.H200_SXM,
    "B200": hardware.B200,
}
DTYPES = {name: dtype or torch.float32 for name, dtype in model_config.DTYPES.items()}
# Kernel's name → module that has its cost(), options of that.
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rms_norm": ("rmsnorm", {}),
    "rms_norm_backward": ("rmsnorm", {"backward": True}),
    "add_rms_norm": ("rmsnorm", {"residual": True}),
    "layer_norm": ("layernorm", {}),
    "layer_norm_backward": ("layernorm", {"backward": True}),
    "softmax": ("softmax", {}),
    "softmax_backward": ("softmax", {"backward": True}),
    "gelu": ("elementwise", {}),
    "swiglu": ("swiglu", {}),
    "swiglu_backward": ("swiglu", {"backward": True}),
    "rope": ("rope", {}),
    "weighted_sum": ("weighted_sum", {}),
    "dropout": ("dropout", {}),
    "cross_entropy": ("cross_entropy", {}),
    "matmul": ("matmul", {}),
    "linear_cross_entropy": ("linear_cross_entropy", {}),
}

MOST = {"lanes": 32}
ITEM_SIZES = (1, 2, 4, 8, 16)  # bytes that a lane can read at once
# Kernels that do not take a shape of any number of dimensions: how many they take, and which.
DIMENSIONS = {
    "rope": (range(2, 9), "two or more: …, tokens, width"),
    "matmul": ((3,), "three: M, K, N"),
    "cross_entropy": ((2,), "two: rows, vocabulary"),
    "linear_cross_entropy": ((3,), "three: rows, width, vocabulary"),
}
NONE_AT_ALL = ("shared_bytes", "offset", "stride", "lanes")  # options of which 0 says something
Answer = tuple[str, dict[str, Any]]  # in words, and in numbers


def answer_roofline(cost: Cost, gpu: hardware.GPUSpec, dtype: str) -> Answer:
    """Floor of the time, what bounds it, and the rates that go with it."""
    roof = roofline(gpu, dtype)
    seconds, bound = roof.seconds(cost), roof.bound(cost)
    numbers = {"flops": cost.flops, "bytes": cost.bytes, "intensity": cost.intensity, "ridge": roof.ridge,
               "bound": bound, "seconds": seconds}
    words = (f"{cost.flops:.4g} FLOPs, {cost.bytes:.4g} bytes: {cost.intensity:.3g} FLOPs per byte, the ridge of "
             f"{gpu.name} ({dtype}) is at {roof.ridge:.0f}\n"
             f"{bound}-bound: at least {1e6 * seconds:.1f} µs, at "
             f"{cost.bytes / seconds / 1e9:,.0f} GB/s and {cost.flops / seconds / 1e12:,.1f} TFLOP/s")
    return words, numbers


def run_gpus(args: argparse.Namespace) -> Answer:
    """The table of specifications."""
    rows = [{"GPU": spec.name, "SMs": spec.sms, "registers/SM": spec.registers_per_sm,
             "shared KiB/SM": spec.shared_memory_per_sm // 1024, "L1 KiB": spec.l1_bytes // 1024,
             "L2 MiB": spec.l2_bytes // 2**20, "HBM GB": spec.hbm_bytes // 10**9,
             "HBM GB/s": spec.hbm_bandwidth / 1e9, "shared TB/s": round(spec.shared_bandwidth / 1e12, 1),
             "L2 TB/s": None if spec.l2_bandwidth is None else round(spec.l2_bandwidth / 1e12, 1),
             "bf16 TFLOP/s": spec.peak["bf16"] / 1e12,
             "ridge": round(roofline(spec).ridge)} for spec in GPUS.values()]
    sources = "\n".join(f"{spec.name}: {spec.source}" for spec in GPUS.values())
    return tabulate(rows, headers="keys", missingval="n/a") + "\n\n" + sources, {"gpus": rows}


def run_roofline(args: argparse.Namespace) -> Answer:
    return answer_roofline(Cost(args.flops, args.bytes), args.gpu, args.dtype)


def run_kernel(args: argparse.Namespace) -> Answer:
    module, options = KERNELS[args.name]
    dimensions, words = DIMENSIONS.get(args.name, ((len(args.shape),), ""))
    if len(args.shape) not in dimensions:
        raise ValueError(f"{args.name} has no shape of {len(args.shape)} dimension(s); give {words}")
    cost = importlib.import_module(f"kernels.{module}").cost(tuple(args.shape), DTYPES[args.dtype], **options)
    return answer_roofline(cost, args.gpu, args.dtype)


def run_chain(args: argparse.Namespace) -> Answer:
    itemsize = DTYPES[args.dtype].itemsize
    graph = fusion.pointwise_chain(args.operations, args.elements, itemsize)
    roof = roofline(args.gpu, args.dtype)
    apart, fused = graph.unfused(), graph.fused()
    numbers = {"unfused_bytes": apart.bytes, "fused_bytes": fused.bytes, "unfused_s": roof.seconds(apart),
               "fused_s": roof.seconds(fused), "speed_up": graph.speed_up(roof)}
    fast = numbers["speed_up"]
    words = (f"{args.operations} element-wise operations on {args.elements:,} elements of {itemsize} bytes\n"
             f"one by one: {apart.bytes / 1e6:,.1f} MB, {1e6 * numbers['unfused_s']:.1f} µs\n"
             f"fused:      {fused.bytes / 1e6:,.1f} MB, {1e6 * numbers['fused_s']:.1f} µs: {fast:.2f} ×")
    return words, numbers


def run_block(args: argparse.Namespace) -> Answer:
    graph = fusion.transformer_block(args.batch, args.context, args.d_model, args.d_ff, args.heads)
    plan = fusion.advise(graph, args.gpu, args.dtype)
    counts = fusion.kernel_counts(graph, args.gpu, args.dtype)
    saved = graph.unfused().bytes - sum(graph.fused(group).bytes for group in plan.groups)
    rows = [(d.operator, d.action, d.reason) for d in plan.decisions]
    words = tabulate(rows, headers=("operator", "answer", "reason"), maxcolwidths=[None, None, 80])
    words += f"\n\nkernels per block, forward: {', '.join(f'{name} {n}' for name, n in counts.items())}"
    words += f"\nthe advice saves {saved / 1e6:,.1f} of {graph.unfused().bytes / 1e6:,.1f} MB"
    return words, {"decisions": [dataclasses.asdict(d) for d in plan.decisions], "kernels": counts,
                   "saved_bytes": saved}


def run_occupancy(args: argparse.Namespace) -> Answer:
    found = gpu.occupancy(args.gpu, args.threads, args.registers, args.shared_bytes)
    words = (f"{args.threads} threads × {args.registers} registers, {args.shared_bytes} bytes shared on "
             f"{args.gpu.name}: {found.blocks} blocks of an SM, {found.warps} of {args.gpu.max_warps_per_sm} warps, "
             f"{100 * found.fraction:.2f} %, limited by {found.limiter}")
    return words, dataclasses.asdict(found)


def run_waves(args: argparse.Namespace) -> Answer:
    found = gpu.wave_quantisation(args.blocks, args.gpu.sms, args.blocks_per_sm)
    words = (f"{args.blocks} blocks on {args.gpu.sms} SMs × {args.blocks_per_sm}: {found.waves} waves, {found.last} "
             f"blocks in the last; {100 * found.efficiency:.1f} % of the places are used")
    return words, dataclasses.asdict(found)


def run_coalescing(args: argparse.Namespace) -> Answer:
    if args.itemsize not in ITEM_SIZES:
        raise ValueError(f"itemsize={args.itemsize}: a lane reads {', '.join(map(str, ITEM_SIZES))} bytes")
    found = warp_access.strided_access(args.stride, args.itemsize, args.offset)
    words = (f"a warp reading {args.itemsize} bytes per lane, {args.stride} elements apart, from byte {args.offset}: "
             f"{found.sectors} sectors of 32 bytes in {found.lines} lines, {100 * found.efficiency:.1f} % of it wanted")
    return words, dataclasses.asdict(found)


def run_banks(args: argparse.Namespace) -> Answer:
    numbers = {"plain": warp_access.column_conflicts(args.columns),
               "padded": warp_access.column_conflicts(args.columns, padding=1),
               "swizzled": warp_access.column_conflicts(args.columns, swizzled=True)}
    words = (f"a warp reading one column of a 32 × {args.columns} tile of 4-byte words takes {numbers['plain']} "
             f"rounds; {numbers['padded']} with a word of padding per row, {numbers['swizzled']} with columns kept at "
             "row xor column")
    return words, numbers


def run_divergence(args: argparse.Namespace) -> Answer:
    lanes = [1] * args.lanes + [0] * (32 - args.lanes)
    found = warp_access.warp_divergence(lanes, (args.cycles[1], args.cycles[0]))
    words = (f"{args.lanes} of 32 lanes take a branch of {args.cycles[0]:g} cycles, the others one of "
             f"{args.cycles[1]:g}: the warp takes {found.cycles:g}, {100 * found.efficiency:.1f} % of it useful")
    return words, dataclasses.asdict(found)


def gpu_by_name(name: str) -> hardware.GPUSpec:
    if name not in GPUS:
        raise argparse.ArgumentTypeError(f"unknown GPU {name!r}; choose one of {', '.join(GPUS)}")
    return GPUS[name]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("calculator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], Answer], **options: Any) -> None:
        """A sub-command; an option's value is its default, or its type where it must be given.

        Whole numbers count something: at least one, or none where `NONE_AT_ALL` says so.
        """
        c = commands.add_parser(name, help=(run.__doc__ or "").strip() or None)
        c.set_defaults(run=run)
        c.add_argument("--gpu", type=gpu_by_name, default="H100", help=f"{', '.join(GPUS)} [H100]")
        c.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
        c.add_argument("--json", action="store_true", help="one line of JSON instead of words")
        for option, value in options.items():
            flag = f"--{option.replace('_', '-')}"
            count = whole(0 if option in NONE_AT_ALL else 1, MOST.get(option))
            if isinstance(value, type):
                c.add_argument(flag, type=count if value is int else real(above=0), required=True)
            elif isinstance(value, tuple):
                c.add_argument(flag, type=real(least=0), nargs=len(value), default=value)
            else:
                c.add_argument(flag, type=count, default=value)
        if name == "kernel":
            c.add_argument("name", choices=tuple(KERNELS))
            c.add_argument("shape", type=whole(), nargs="+")

    command("gpus", run_gpus)
    command("roofline", run_roofline, flops=float, bytes=float)
    command("kernel", run_kernel)
    command("chain", run_chain, operations=4, elements=2**25)
    command("block", run_block, batch=8, context=2048, d_model=4096, d_ff=11008, heads=32)
    command("occupancy", run_occupancy, threads=int, registers=int, shared_bytes=0)
    command("waves", run_waves, blocks=int, blocks_per_sm=1)
    command("coalescing", run_coalescing, stride=1, itemsize=4, offset=0)
    command("banks", run_banks, columns=32)
    command("divergence", run_divergence, lanes=1, cycles=(100.0, 10.0))
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)

    def answer() -> int:
        words, numbers = args.run(args)
        print(json.dumps({"experiment": "calculator", "command": args.command} | numbers) if args.json else words)
        return 0

    return run_to_end("calculator", answer)


if __name__ == "__main__":
    sys.exit(main())
