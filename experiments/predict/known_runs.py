"""Published runs, each with its source, what is known of it and what had to be assumed.

Only data-parallel runs that are described well enough to be computed; figures whose wording left a
doubt say so under `assumed`. None of them was used to choose a constant.
"""

from typing import Any

from distlab.model import preset

TORCHTITAN = "torchtitan, performance page, December 2024"
PAPER = "Liang et al. 2024, TorchTitan (arXiv 2410.06511)"
LLAMA = {
    "model": "llama-8B",
    "strategy": "fsdp2",
    "batch": 2,
    "recompute": "selective",
    "attention": "flash",
}
KNOWN = (
    "Llama 3.1 8B, context 8,192, local batch 2, selective recomputation (op), FSDP2 in bf16, "
    "Grand Teton"
)
ASSUMED = (
    "FlashAttention-2 (torch of that time preferred it), fp32 reduction, memory is the allocator's "
    "reserved"
)
OLD_NORM = "; RMSNorm in separate operators"


def _llama(
    name: str,
    source: str,
    gpus: int,
    compiled: bool,
    kernels: str | None,
    rate: int,
    gib: float,
    why: str,
) -> dict[str, Any]:
    """Return a run of torchtitan's Llama 3.1 8B.

    Args:
        name: text that names the row in the table.
        source: publication.
        gpus: number of GPUs.
        compiled: True if blocks were compiled.
        kernels: "composite" if RMSNorm ran in separate operators.
        rate: published tokens per second and GPU.
        gib: GiB that the allocator had reserved.
        why: reason for what the prediction misses.
    """
    assumed = ASSUMED
    if kernels == "composite":
        assumed += OLD_NORM
    elif not compiled:
        assumed += "; a fused RMSNorm"
    published = {"tokens_per_s_per_gpu": rate, "memory_gib": gib, "memory_is": "reserved"}
    return LLAMA | {
        "name": name,
        "source": source,
        "cluster": f"grand-teton:{gpus}",
        "compiled": compiled,
        "kernels": kernels,
        "known": f"{KNOWN}, {gpus} GPUs",
        "assumed": assumed,
        "published": published,
        "why": why,
    }


POWER = "500 W: the rate of matmuls there is a rule, not a measurement"


def _gpt3(gpus: int, batch: int, teraflops: float, why: int) -> dict[str, Any]:
    """Return a row of Megatron's ZeRO-3 table.

    Its FLOPs are 96·B·s·l·h²·(1 + s/6h + V/16lh), recomputation included.
    """
    # These are the sizes of GPT-3 175B, as the source states them.
    layers, width, context, vocabulary = 96, 12_288, 2048, 51_200
    # B is the batch of all GPUs.
    flops = 96 * gpus * batch * context * layers * width**2
    flops *= 1 + context / (6 * width) + vocabulary / (16 * layers * width)
    return {
        "name": f"GPT-3 175B, ZeRO-3, {gpus} A100",
        "model": "gpt3-175B",
        "cluster": f"dgx-a100:{gpus}",
        "strategy": "fsdp",
        "batch": batch,
        "recompute": "full",
        "attention": "flash",
        "source": "Narayanan et al. 2021, Efficient Large-Scale Language Model Training, table 2",
        "known": f"174.6 B, context 2,048, batch 1,536, micro-batch {batch}, {teraflops:g} TFLOP/s "
        "by its formula",
        "assumed": "full recomputation, attention that keeps no scores, fp32 reduction; SwiGLU of "
        "equal FLOPs for GeLU",
        # The source states TFLOP/s per GPU. With its own formula for the FLOPs, that gives the
        # step.
        "published": {"step_ms": 1e3 * flops / gpus / teraflops / 1e12},
        "why": f"Less the predicted compute, the published step leaves {why} GB/s per host to the "
        "1.05 TB that ZeRO-3 sends, were none of it hidden: one or two of the eight cards. The "
        "prediction assumes rings through all of them (158 GB/s) behind compute",
    }


PUBLISHED: list[dict[str, Any]] = [
    _llama(
        "Llama 3.1 8B, 8 GPUs",
        source=TORCHTITAN,
        gpus=8,
        compiled=False,
        kernels="composite",
        rate=5762,
        gib=82.4,
        why=POWER,
    ),
    _llama(
        "Llama 3.1 8B, 8 GPUs, compiled",
        source=TORCHTITAN,
        gpus=8,
        compiled=True,
        kernels=None,
        rate=6667,
        gib=77.0,
        why=POWER,
    ),
    _llama(
        "Llama 3.1 8B, 8 GPUs, paper",
        source=PAPER,
        gpus=8,
        compiled=False,
        kernels=None,
        rate=6258,
        gib=81.9,
        why=POWER,
    ),
    _llama(
        "Llama 3.1 8B, 128 GPUs, paper",
        source=PAPER,
        gpus=128,
        compiled=False,
        kernels=None,
        rate=5645,
        gib=67.0,
        why="10 % slower than its row of 8 GPUs: "
        "jitter of 128 GPUs, and eager kernels that wait for the host, are not in the closed form",
    ),
    _llama(
        "Llama 3.1 8B, 128 GPUs, compiled, paper",
        source=PAPER,
        gpus=128,
        compiled=True,
        kernels=None,
        rate=6482,
        gib=62.1,
        why=POWER,
    ),
    _gpt3(gpus=384, batch=4, teraflops=144, why=42),
    _gpt3(gpus=768, batch=2, teraflops=88, why=28),
    _gpt3(gpus=1536, batch=1, teraflops=44, why=20),
]

SHARED = (
    "Less all else that is predicted, {} s of messages too, the published step leaves attention {} "
    "times its predicted time, which with one and two GPUs to a sequence is 1.05 times: the source "
    "gives no cause"
)


def _long(context_ranks: int, rate: int, gib: float, why: str = "") -> dict[str, Any]:
    """Return a row of torchtitan's table 2: 8 GPUs, `context_ranks` of which share a sequence.

    Each has 32,768 tokens.
    """
    context = 32_768 * context_ranks
    fsdp = f"FSDP {8 // context_ranks}, CP {context_ranks}"
    return LLAMA | {
        "name": f"Llama 3.1 8B, {context:,} tokens, {fsdp}",
        "source": f"{TORCHTITAN}, table 2",
        "model": vars(preset("llama-8B")) | {"context_length": context},
        "cluster": "grand-teton:8",
        "batch": 1,
        "recompute": "full",
        "compiled": True,
        "layout": f"cp{context_ranks}" if context_ranks > 1 else "",
        "known": f"{fsdp}, context {context:,}, local batch 1, full recomputation, compiled, "
        "Float8 linear layers",
        "assumed": "matmuls in bf16 (Float8 is not in the closed form), keys and values gathered; "
        f"{ASSUMED}",
        "published": {"tokens_per_s_per_gpu": rate, "memory_gib": gib, "memory_is": "reserved"},
        "why": why,
    }


PUBLISHED += [
    _long(1, rate=3890, gib=83.9),
    _long(2, rate=2540, gib=84.2),
    _long(4, rate=1071, gib=84.0, why=SHARED.format(0.3, 1.6)),
    _long(8, rate=548, gib=84.5, why=SHARED.format(0.5, 1.7)),
]

UNCOVERED = (
    "Tensor parallelism's messages, which AsyncTP covers in part, are {} s of the step, and "
    "matmuls count in bf16 where Float8 ran: without the former it is {:+} %. Interleaved is "
    "predicted 1.43 times as fast as 1F1B, and 1.28 were published: with as many micro-batches in "
    "both (the source does not say) it would be 1.17. Memory lacks what torchtitan keeps unsharded "
    "between the micro-batches of a pipeline, 12 GiB of parameters"
)


def _pipelined(
    schedule: str, stages: tuple[int, ...], rate: int, gib: float, why: str
) -> dict[str, Any]:
    """Return a row of torchtitan's table 5: 512 GPUs, in groups of 64 that share a model.

    A group has 32 sequences, and a micro-batch per stage.
    """
    return {
        "name": f"Llama 3.1 405B, {schedule}",
        "source": f"{TORCHTITAN}, table 5",
        "model": "llama-405B",
        "cluster": "grand-teton:512",
        "strategy": "fsdp2",
        "batch": 32 // len(stages),
        "micro_batches": len(stages),
        "layout": f"{schedule},tp8",
        "stages": stages,
        "recompute": "full",
        "compiled": True,
        "attention": "flash",
        "known": "FSDP 8, TP 8, PP 8, context 8,192, local batch 32, full recomputation, compiled, "
        "Float8, AsyncTP",
        "assumed": f"{len(stages)} micro-batches, torchtitan's default, and its cut of the blocks; "
        "matmuls in bf16 and nothing beside tensor parallelism's messages (no Float8, no AsyncTP "
        f"in the closed form); {ASSUMED}",
        "published": {"tokens_per_s_per_gpu": rate, "memory_gib": gib, "memory_is": "reserved"},
        "why": why,
    }


PUBLISHED += [
    _pipelined("pp8", stages=(15, *[16] * 6, 15), rate=100, gib=82.5, why=UNCOVERED.format(11, 26)),
    _pipelined(
        "pp8-interleaved", stages=(7, *[8] * 14, 7), rate=128, gib=72.7, why=UNCOVERED.format(7, 15)
    ),
]

# Rajbhandari et al. 2020, ZeRO, figure 1: 7.5 B parameters on 64 GPUs, K = 12; model states, GB of
# 10⁹.
ZERO_TABLE = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}

# This lab's own runs: record → the rows taken; FSDP, and one process without communication.
OWN = (
    ("ddp_bench/h200x2-xl-batch8.json", ("local", "fsdp")),
    ("ddp_bench/h200x2-xl-batch2.json", ("local", "fsdp")),
    ("ddp_bench/h200x4-xl-batch2.json", ("fsdp",)),
    ("ddp_bench/h200x2-medium-batch8.json", ("local", "fsdp")),
    ("ddp_bench/h200x4-medium-batch8.json", ("fsdp",)),
)
LONG_RUN = {
    "model": {
        "d_model": 4096,
        "d_ff": 11008,
        "num_layers": 34,
        "num_heads": 32,
        "vocab_size": 151_936,
        "context": 32768,
    },
    "cluster": "dgx-h200:2",
    "batch": 1,
    "recompute": "full",
    "compiled": True,
    "source": "measured by this lab, two H200s, torch 2.11",
    "assumed": "one sequence of 32,768 tokens per GPU",
}
PUBLISHED += [
    LONG_RUN
    | {
        "name": "8 B, FSDP of this lab, 2 H200",
        "strategy": "fsdp",
        "fused_loss": True,
        "known": "32,768 tokens per GPU, every block recomputed, Triton operators, SDPA",
        "published": {"step_ms": 5684.0, "memory_gib": 68.4, "memory_is": "allocated"},
        "why": "memory: the fused loss keeps chunks of logits and the head's fp32 gradient",
    },
    LONG_RUN
    | {
        "name": "8 B, FSDP2 compiled, 2 H200",
        "strategy": "fsdp2",
        "known": "32,768 tokens per GPU, every block recomputed, compiled blocks, SDPA",
        "published": {"step_ms": 5818.0, "memory_gib": 113.3, "memory_is": "allocated"},
    },
]
MUON_RUN = {
    "model": vars(preset("xl")) | {"context_length": 512},
    "cluster": "dgx-h200:2",
    "strategy": "zero1",
    "batch": 4,
    "micro_batches": 32,
    "source": "measured by this lab, two H200s, torch 2.11 (muon_placements)",
    "known": "3.4 B parameters, 65,536 tokens per GPU and step, bf16, eager",
}
PUBLISHED += [
    MUON_RUN
    | {
        "name": "3.4 B, ZeRO-1 with AdamW, 2 H200",
        "published": {"step_ms": 3817.5, "memory_gib": 53.6, "memory_is": "allocated"},
    },
    MUON_RUN
    | {
        "name": "3.4 B, ZeRO-1 with Muon, exchanged, 2 H200",
        "optimizer": "muon",
        "published": {"step_ms": 3977.4, "memory_gib": 47.3, "memory_is": "allocated"},
        "why": "orthogonalising runs at 450 TFLOP/s, and is predicted at the rate of larger "
        "matmuls",
    },
]
