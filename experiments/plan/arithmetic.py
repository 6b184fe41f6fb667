"""What does a kernel cost on a named GPU, by arithmetic alone?

    distlab run plan gpus
    distlab run plan kernel rms_norm 8192 4096 --dtype bf16
    distlab run plan block --batch 8 --context 2048 --d-model 4096 --d-ff 11008 --heads 32
    distlab run plan occupancy --threads 128 --registers 160
    distlab run plan waves --blocks 160 --gpu B200

Each prints its answer in words and, with --json, as one line of JSON instead. Nothing is measured,
so none of them leaves records. `gpu_lessons` predicts and measures what a warp's access to memory
costs.
"""

import argparse
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

from distlab import hardware
from distlab.model import config as model_config
from distlab.options import Options, Values, add_options, config_from, option, parser_of
from distlab.theory import fusion, gpu
from distlab.theory.gpu import roofline
from kernels import (
    cross_entropy,
    dropout,
    elementwise,
    layernorm,
    linear_cross_entropy,
    matmul,
    rmsnorm,
    rope,
    softmax,
    swiglu,
    weighted_sum,
)
from kernels.cost import Cost

GPUS = {
    "A100-40GB": hardware.A100_SXM_40GB,
    "A100": hardware.A100_SXM_80GB,
    "H100": hardware.H100_SXM,
    "H100-PCIe": hardware.H100_PCIE,
    "H200": hardware.H200_SXM,
    "B200": hardware.B200,
}
# A config names fp32 by None, which has no number of bytes.
DTYPES = {name: dtype or torch.float32 for name, dtype in model_config.DTYPES.items()}

# Kernel → function from shape and dtype to its least work.
KERNELS: dict[str, Callable[..., Cost]] = {
    "rms_norm": rmsnorm.cost,
    "rms_norm_backward": partial(rmsnorm.cost, backward=True),
    "add_rms_norm": partial(rmsnorm.cost, residual=True),
    "layer_norm": layernorm.cost,
    "layer_norm_backward": partial(layernorm.cost, backward=True),
    "softmax_backward": partial(softmax.cost, backward=True),
    "gelu": elementwise.cost,
    "swiglu_backward": partial(swiglu.cost, backward=True),
    "softmax": softmax.cost,
    "swiglu": swiglu.cost,
    "rope": rope.cost,
    "weighted_sum": weighted_sum.cost,
    "dropout": dropout.cost,
    "cross_entropy": cross_entropy.cost,
    "matmul": matmul.cost,
    "linear_cross_entropy": linear_cross_entropy.cost,
}

# Kernels that do not take a shape of any number of dimensions: how many they take, and which.
DIMENSIONS = {
    "rope": (range(2, 9), "two or more: …, tokens, width"),
    "matmul": ((3,), "three: M, K, N"),
    "cross_entropy": ((2,), "two: rows, vocabulary"),
    "linear_cross_entropy": ((3,), "three: rows, width, vocabulary"),
}
Answer = tuple[str, dict[str, Any]]  # in words, and in numbers


@dataclass(frozen=True)
class Calculation(Options, ABC):
    """Options of every calculation. An option that is None or () must be given."""

    gpu: str = option("H100", "name of a GPU", choices=tuple(GPUS))
    dtype: str = option("bf16", "dtype of the data", choices=tuple(DTYPES))
    json: bool = option(False, "print one line of JSON instead of words")

    @property
    def spec(self) -> hardware.GPUSpec:
        """Datasheet of the named GPU."""
        return GPUS[self.gpu]

    @abstractmethod
    def answer(self) -> Answer:
        """Return the answer in words and in numbers."""


@dataclass(frozen=True)
class Specifications(Calculation):
    """What are the peaks and limits of each GPU?"""

    gpu: str = option("all", "name of a GPU, or all", choices=("all", *GPUS))

    def check_effect(self, given: Values) -> None:
        """Raise ValueError for a dtype. The table has the peak of bf16."""
        super().check_effect(given)
        if "dtype" in given:
            raise ValueError("gpus: --dtype has no effect, the table has bf16's peak: leave it out")

    def answer(self) -> Answer:
        """Return the table of the GPUs."""
        rows = []
        specs = list(GPUS.values()) if self.gpu == "all" else [self.spec]
        for spec in specs:
            # Not every datasheet gives the L2's bandwidth.
            l2_bandwidth = spec.l2_bandwidth
            row = {
                "GPU": spec.name,
                "SMs": spec.sms,
                "registers/SM": spec.registers_per_sm,
                "shared KiB/SM": spec.shared_memory_per_sm // 1024,
                "L1 KiB": spec.l1_bytes // 1024,
                "L2 MiB": spec.l2_bytes // 2**20,
                "HBM GB": spec.hbm_bytes // 10**9,
                "HBM GB/s": spec.hbm_bandwidth / 1e9,
                "register TB/s": round(spec.register_bandwidth / 1e12, 1),
                "shared TB/s": round(spec.shared_bandwidth / 1e12, 1),
                "L2 TB/s": None if l2_bandwidth is None else round(l2_bandwidth / 1e12, 1),
                "bf16 TFLOP/s": spec.peak["bf16"] / 1e12,
                "ridge": round(roofline(spec).ridge),
            }
            rows.append(row)
        table = tabulate(rows, headers="keys", missingval="n/a")
        sources = "\n".join(f"{spec.name}: {spec.source}" for spec in specs)
        return f"{table}\n\n{sources}", {"gpus": rows}


@dataclass(frozen=True)
class KernelFloor(Calculation):
    """How fast can a kernel be, and what bounds it?"""

    name: str | None = option(None, "name of a kernel", choices=tuple(KERNELS), positional=True)
    shape: tuple[int, ...] = option(
        (), "dimensions that the kernel works on", minimum=1, positional=True, metavar="shape"
    )

    def answer(self) -> Answer:
        """Return the floor of the kernel's time.

        Raises:
            ValueError: the kernel does not take so many dimensions.
        """
        # A kernel that is not in DIMENSIONS takes any number of them.
        dimensions = len(self.shape)
        allowed, words = DIMENSIONS.get(self.name, ((dimensions,), ""))
        if dimensions not in allowed:
            raise ValueError(f"{self.name} has no shape of {dimensions} dimension(s); give {words}")
        cost = KERNELS[self.name](self.shape, DTYPES[self.dtype])
        return floor(cost, self.spec, self.dtype)


def floor(cost: Cost, spec: hardware.GPUSpec, dtype: str) -> Answer:
    """Return the shortest time of some work on a GPU, what bounds it, and the rates it implies."""
    roof = roofline(spec, dtype)
    seconds = roof.seconds(cost)
    bound = roof.bound(cost)
    gb_per_s = cost.bytes / seconds / 1e9
    tflop_per_s = cost.flops / seconds / 1e12
    words = (
        f"{cost.flops:.4g} FLOPs, {cost.bytes:.4g} bytes: {cost.intensity:.3g} FLOPs per byte, "
        f"the ridge of {spec.name} ({dtype}) is at {roof.ridge:.0f}\n"
        f"{bound}-bound: at least {1e6 * seconds:.1f} µs, at {gb_per_s:,.0f} GB/s and "
        f"{tflop_per_s:,.1f} TFLOP/s"
    )
    numbers = {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "intensity": cost.intensity,
        "ridge": roof.ridge,
        "bound": bound,
        "seconds": seconds,
    }
    return words, numbers


@dataclass(frozen=True)
class BlockAdvice(Calculation):
    """Which operations of a Transformer's block belong in one kernel?"""

    batch: int = option(8, "number of sequences", minimum=1)
    context: int = option(2048, "tokens of a sequence", minimum=1)
    d_model: int = option(4096, "width of the model", minimum=1)
    d_ff: int = option(11008, "width of the feed-forward layer", minimum=1)
    heads: int = option(32, "number of attention heads", minimum=1)

    def answer(self) -> Answer:
        """Return a decision per operator, the kernels of four forms, and the bytes saved."""
        graph = fusion.transformer_block(
            self.batch,
            self.context,
            self.d_model,
            self.d_ff,
            self.heads,
            DTYPES[self.dtype].itemsize,
            # Under autocast operators also read and write casts of the weights.
            autocast=self.dtype != "fp32",
        )
        plan = fusion.advise(graph, self.spec, self.dtype)
        counts = fusion.kernel_counts(graph, self.spec, self.dtype)
        one_by_one = graph.unfused().bytes
        # Tensors between two operators of a group stay on chip, and are neither written nor read.
        saved = one_by_one - sum(graph.fused(group).bytes for group in plan.groups)
        rows = [(each.operator, each.action, each.reason) for each in plan.decisions]
        table = tabulate(
            rows, headers=("operator", "answer", "reason"), maxcolwidths=[None, None, 80]
        )
        launches = ", ".join(f"{form} {count}" for form, count in counts.items())
        words = (
            f"{table}\n\n"
            f"kernels per block, forward: {launches}\n"
            f"the advice saves {saved / 1e6:,.1f} of {one_by_one / 1e6:,.1f} MB"
        )
        numbers = {
            "decisions": [dataclasses.asdict(each) for each in plan.decisions],
            "kernels": counts,
            "saved_bytes": saved,
        }
        return words, numbers


@dataclass(frozen=True)
class BlocksPerSM(Calculation):
    """How many blocks does a multiprocessor hold, and what limits them?"""

    threads: int | None = option(None, "threads of a block", minimum=1)
    registers: int | None = option(None, "registers of a thread", minimum=1)
    shared_bytes: int = option(0, "bytes of shared memory of a block", minimum=0)

    def answer(self) -> Answer:
        """Return the occupancy.

        Raises:
            ValueError: no GPU runs such a block.
        """
        found = gpu.occupancy(self.spec, self.threads, self.registers, self.shared_bytes)
        words = (
            f"{self.threads} threads × {self.registers} registers, {self.shared_bytes} bytes "
            f"shared on {self.spec.name}: {found.blocks} blocks of an SM, {found.warps} of "
            f"{self.spec.max_warps_per_sm} warps, {100 * found.fraction:.2f} %, limited by "
            f"{found.limiter}"
        )
        return words, dataclasses.asdict(found)


@dataclass(frozen=True)
class WavesOfGrid(Calculation):
    """In how many waves does a grid of blocks run, and how full is the last?"""

    blocks: int | None = option(None, "blocks of the grid", minimum=1)
    blocks_per_sm: int = option(1, "blocks that a multiprocessor holds", minimum=1)

    def answer(self) -> Answer:
        """Return the waves and the share of the places that they use."""
        found = gpu.wave_quantisation(self.blocks, self.spec.sms, self.blocks_per_sm)
        words = (
            f"{self.blocks} blocks on {self.spec.sms} SMs × {self.blocks_per_sm}: {found.waves} "
            f"waves, {found.last} blocks in the last; {100 * found.efficiency:.1f} % of the places "
            "are used"
        )
        return words, dataclasses.asdict(found)


CALCULATIONS: dict[str, type[Calculation]] = {
    "gpus": Specifications,
    "kernel": KernelFloor,
    "block": BlockAdvice,
    "occupancy": BlocksPerSM,
    "waves": WavesOfGrid,
}


def parser() -> argparse.ArgumentParser:
    """Return a parser with a sub-command for each entry of `CALCULATIONS`."""
    found = parser_of("distlab run plan", __doc__)
    commands = found.add_subparsers(dest="command", required=True)
    for name, calculation in CALCULATIONS.items():
        add_options(commands.add_parser(name), calculation)
    return found


def calculate(argv: Sequence[str]) -> int:
    """Answer the question of the arguments, of which the first is an entry of `CALCULATIONS`.

    Raises:
        ValueError: an option is missing, or its value is impossible.
    """
    args = parser().parse_args(argv)
    calculation = config_from(CALCULATIONS[args.command], args)
    options = dataclasses.fields(calculation)
    # Required options have None or () as their default, because a dataclass with defaults needs
    # one.
    missing = [each.name for each in options if getattr(calculation, each.name) in (None, ())]
    if missing:
        raise ValueError(f"{args.command}: give {', '.join(missing)}")
    words, numbers = calculation.answer()
    if calculation.json:
        words = json.dumps({"experiment": "plan", "command": args.command} | numbers)
    print(words)
    return 0
