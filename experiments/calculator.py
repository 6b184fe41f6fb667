"""What does a kernel cost on a named GPU, by arithmetic alone?

    distlab run calculator gpus
    distlab run calculator kernel rms_norm 8192 4096 --dtype bf16
    distlab run calculator block --batch 8 --context 2048 --d-model 4096 --d-ff 11008 --heads 32
    distlab run calculator occupancy --threads 128 --registers 160
    distlab run calculator waves --blocks 160 --gpu B200

Each prints its answer in words and, with --json, as one line of JSON instead. What a warp's access
to memory costs is predicted and measured by `gpu_lessons`.
"""

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

from distlab import hardware
from distlab.model import config as model_config
from distlab.options import Options, add_options, config_from, option, parser_of
from distlab.theory import fusion, gpu
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
NAMED_AS_THEIR_MODULE = (
    "softmax",
    "swiglu",
    "rope",
    "weighted_sum",
    "dropout",
    "cross_entropy",
    "matmul",
    "linear_cross_entropy",
)
# Kernel's name → module that has its cost(), options of that.
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rms_norm": ("rmsnorm", {}),
    "rms_norm_backward": ("rmsnorm", {"backward": True}),
    "add_rms_norm": ("rmsnorm", {"residual": True}),
    "layer_norm": ("layernorm", {}),
    "layer_norm_backward": ("layernorm", {"backward": True}),
    "softmax_backward": ("softmax", {"backward": True}),
    "gelu": ("elementwise", {}),
    "swiglu_backward": ("swiglu", {"backward": True}),
    **{name: (name, {}) for name in NAMED_AS_THEIR_MODULE},
}

# Kernels that do not take a shape of any number of dimensions: how many they take, and which.
DIMENSIONS = {
    "rope": (range(2, 9), "two or more: …, tokens, width"),
    "matmul": ((3,), "three: M, K, N"),
    "cross_entropy": ((2,), "two: rows, vocabulary"),
    "linear_cross_entropy": ((3,), "three: rows, width, vocabulary"),
}
Answer = tuple[str, dict[str, Any]]  # in words, and in numbers


@dataclasses.dataclass(frozen=True)
class Question(Options):
    """Options of every calculation. Its own options are in CALCULATIONS."""

    gpu: str = option("H100", "name of a GPU", choices=tuple(GPUS))
    dtype: str = option("bf16", "dtype of the data", choices=tuple(DTYPES))
    json: bool = option(False, "print one line of JSON instead of words")

    @property
    def spec(self) -> hardware.GPUSpec:
        return GPUS[self.gpu]


def answer_roofline(cost: Cost, gpu: hardware.GPUSpec, dtype: str) -> Answer:
    """Floor of the time, what bounds it, and the rates that go with it."""
    roof = roofline(gpu, dtype)
    seconds, bound = roof.seconds(cost), roof.bound(cost)
    numbers = {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "intensity": cost.intensity,
        "ridge": roof.ridge,
        "bound": bound,
        "seconds": seconds,
    }
    words = (
        f"{cost.flops:.4g} FLOPs, {cost.bytes:.4g} bytes: {cost.intensity:.3g} FLOPs per byte, the ridge of "
        f"{gpu.name} ({dtype}) is at {roof.ridge:.0f}\n"
        f"{bound}-bound: at least {1e6 * seconds:.1f} µs, at "
        f"{cost.bytes / seconds / 1e9:,.0f} GB/s and {cost.flops / seconds / 1e12:,.1f} TFLOP/s"
    )
    return words, numbers


def run_gpus(args: Any) -> Answer:
    """The table of specifications."""
    rows = [
        {
            "GPU": spec.name,
            "SMs": spec.sms,
            "registers/SM": spec.registers_per_sm,
            "shared KiB/SM": spec.shared_memory_per_sm // 1024,
            "L1 KiB": spec.l1_bytes // 1024,
            "L2 MiB": spec.l2_bytes // 2**20,
            "HBM GB": spec.hbm_bytes // 10**9,
            "HBM GB/s": spec.hbm_bandwidth / 1e9,
            "shared TB/s": round(spec.shared_bandwidth / 1e12, 1),
            "L2 TB/s": None if spec.l2_bandwidth is None else round(spec.l2_bandwidth / 1e12, 1),
            "bf16 TFLOP/s": spec.peak["bf16"] / 1e12,
            "ridge": round(roofline(spec).ridge),
        }
        for spec in GPUS.values()
    ]
    sources = "\n".join(f"{spec.name}: {spec.source}" for spec in GPUS.values())
    return tabulate(rows, headers="keys", missingval="n/a") + "\n\n" + sources, {"gpus": rows}


def run_kernel(args: Any) -> Answer:
    module, options = KERNELS[args.name]
    dimensions, words = DIMENSIONS.get(args.name, ((len(args.shape),), ""))
    if len(args.shape) not in dimensions:
        raise ValueError(
            f"{args.name} has no shape of {len(args.shape)} dimension(s); give {words}"
        )
    cost = importlib.import_module(f"kernels.{module}").cost(
        tuple(args.shape), DTYPES[args.dtype], **options
    )
    return answer_roofline(cost, args.spec, args.dtype)


def run_block(args: Any) -> Answer:
    sizes = args.batch, args.context, args.d_model, args.d_ff, args.heads
    graph = fusion.transformer_block(
        *sizes, DTYPES[args.dtype].itemsize, autocast=args.dtype != "fp32"
    )
    plan = fusion.advise(graph, args.spec, args.dtype)
    counts = fusion.kernel_counts(graph, args.spec, args.dtype)
    saved = graph.unfused().bytes - sum(graph.fused(group).bytes for group in plan.groups)
    rows = [(d.operator, d.action, d.reason) for d in plan.decisions]
    words = tabulate(rows, headers=("operator", "answer", "reason"), maxcolwidths=[None, None, 80])
    words += (
        f"\n\nkernels per block, forward: {', '.join(f'{name} {n}' for name, n in counts.items())}"
    )
    words += f"\nthe advice saves {saved / 1e6:,.1f} of {graph.unfused().bytes / 1e6:,.1f} MB"
    return words, {
        "decisions": [dataclasses.asdict(d) for d in plan.decisions],
        "kernels": counts,
        "saved_bytes": saved,
    }


def run_occupancy(args: Any) -> Answer:
    found = gpu.occupancy(args.spec, args.threads, args.registers, args.shared_bytes)
    words = (
        f"{args.threads} threads × {args.registers} registers, {args.shared_bytes} bytes shared on "
        f"{args.spec.name}: {found.blocks} blocks of an SM, {found.warps} of {args.spec.max_warps_per_sm} warps, "
        f"{100 * found.fraction:.2f} %, limited by {found.limiter}"
    )
    return words, dataclasses.asdict(found)


def run_waves(args: Any) -> Answer:
    found = gpu.wave_quantisation(args.blocks, args.spec.sms, args.blocks_per_sm)
    words = (
        f"{args.blocks} blocks on {args.spec.sms} SMs × {args.blocks_per_sm}: {found.waves} waves, {found.last} "
        f"blocks in the last; {100 * found.efficiency:.1f} % of the places are used"
    )
    return words, dataclasses.asdict(found)


count = partial(option, help="", least=1)
# Name → function, type and option of each of its own options; one without a default must be given.
CALCULATIONS: dict[str, tuple[Callable[[Any], Answer], dict[str, tuple[Any, Any]]]] = {
    "gpus": (run_gpus, {}),
    "kernel": (
        run_kernel,
        {
            "name": (str, option(None, "", choices=tuple(KERNELS), positional=True)),
            "shape": (tuple[int, ...], count((), positional=True, metavar="shape")),
        },
    ),
    "block": (
        run_block,
        {
            "batch": (int, count(8)),
            "context": (int, count(2048)),
            "d_model": (int, count(4096)),
            "d_ff": (int, count(11008)),
            "heads": (int, count(32)),
        },
    ),
    "occupancy": (
        run_occupancy,
        {
            "threads": (int, count(None)),
            "registers": (int, count(None)),
            "shared_bytes": (int, count(0, least=0)),
        },
    ),
    "waves": (run_waves, {"blocks": (int, count(None)), "blocks_per_sm": (int, count(1))}),
}


QUESTIONS = {
    name: dataclasses.make_dataclass(
        name, [(each, *own[each]) for each in own], bases=(Question,), frozen=True
    )
    for name, (_, own) in CALCULATIONS.items()
}


def parser() -> argparse.ArgumentParser:
    """A sub-command for each calculation."""
    found = parser_of("distlab run calculator", __doc__)
    commands = found.add_subparsers(dest="command", required=True)
    for name, question in QUESTIONS.items():
        add_options(commands.add_parser(name), question)
    return found


def main(argv: Sequence[str]) -> int:
    """Answer one question.

    Raises:
        ValueError: an option is missing, or its value is impossible.
    """
    args = parser().parse_args(argv)
    question = config_from(QUESTIONS[args.command], args)
    run, own = CALCULATIONS[args.command]
    if missing := [name for name in own if getattr(question, name) in (None, ())]:
        raise ValueError(f"{args.command}: give {', '.join(missing)}")
    words, numbers = run(question)
    print(
        json.dumps({"experiment": "calculator", "command": args.command} | numbers)
        if question.json
        else words
    )
    return 0
