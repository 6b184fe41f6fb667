"""How far each way of splitting a feed-forward block scales before communication bounds it.

The block multiplies B tokens (of all devices together) by `matrices` matrices of d × f: 2·m·B·d·f FLOPs forward, twice
that backward. C is what a device computes (FLOP/s), W what it sends in one direction (bytes/s), b bytes per element of
what is sent; (N−1)/N is taken as 1. With X devices in data and Y in tensor parallelism, N = X·Y, forward takes

    compute                 2·m·B·d·f / (N·C)
    FSDP: gather weights    b·m·d·f / (Y·W)             shared by Y, whatever X is
    TP: gather the input and scatter the output         2·b·B·d / (X·W)

and backward takes twice the compute, the gather of the weights again and the scatter of their gradients, and in TP
the same two collectives, or three if the gathered input was not kept. With the intensity a = b·C/(2·W), FLOPs per
byte over two,

    DP, FSDP    compute-bound while  B/X ≥ a           tokens per device; the width cancels
    TP forward  while                Y ≤ m·f/(2·a)      the batch cancels
    FSDP × TP   best X = √(2·B·N/(m·f)); compute-bound while B/N ≥ k·2·a²/(m·f), k = 1 if the axes have links of
                their own and overlap, 4 if they share them

For m = 2 and bf16 (b = 2) these are the rules B/X > C/W, Y < f·W/C and B/N > (C/W)²/f of Austin et al. 2025,
"How to Scale Your Model".
"""

import math
from dataclasses import dataclass, replace

from distlab.theory.model_shape import divisors


@dataclass(frozen=True)
class Block:
    """A feed-forward block on accelerators.

    Args:
        d_model, d_ff: d and f.
        flops_per_s: C of one device.
        bytes_per_s: W of one device in one direction.
        matrices: m, 2 for an MLP, 3 for SwiGLU.
        element_bytes: b.

    Raises:
        ValueError: something not positive.
    """

    d_model: int
    d_ff: int
    flops_per_s: float
    bytes_per_s: float
    matrices: int = 2
    element_bytes: float = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value}: must be positive")

    @property
    def intensity(self) -> float:
        """a = b·C/(2·W): tokens per device at which sending weights takes as long as using them, the least B/X of DP
        and FSDP alone. Forward and backward agree: twice the compute, twice the weights' passes.
        """
        return self.element_bytes * self.flops_per_s / (2 * self.bytes_per_s)


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one pass: of arithmetic, of moving weights (FSDP, DP) and of moving activations (TP)."""

    compute: float
    weights: float
    activations: float

    def communication(self, shared_links: bool) -> float:
        """Of both axes: one after the other on shared links, else together."""
        return self.weights + self.activations if shared_links else max(self.weights, self.activations)

    def is_compute_bound(self, shared_links: bool = False) -> bool:
        """Whether arithmetic takes at least as long as communication (up to rounding)."""
        return self.compute >= self.communication(shared_links) * (1 - 1e-12)


def block_time(
    block: Block,
    tokens: float,
    data: int,
    tensor: int,
    *,
    backward: bool = False,
    sharded: bool = True,
    keeps_input: bool = True,
) -> BlockTime:
    """Times of one forward or backward with `data` × `tensor` devices.

    Args:
        tokens: B, over all devices.
        data: X; with `sharded` (FSDP) weights are gathered forward and backward and gradients scattered, without
            (DP) gradients are all-reduced in backward.
        tensor: Y.
        keeps_input: whether TP's backward finds the gathered input, or gathers it again.

    Raises:
        ValueError: fewer than one device on an axis, or d_ff that `tensor` does not divide (with the nearest).
    """
    if data < 1 or tensor < 1:
        raise ValueError(f"data={data}, tensor={tensor}: at least one device on each axis")
    if block.d_ff % tensor:
        near = min(divisors(block.d_ff), key=lambda size: abs(size - tensor))
        raise ValueError(f"tensor={tensor} does not divide d_ff={block.d_ff}; the nearest that does is {near}")
    m, d, f, b = block.matrices, block.d_model, block.d_ff, block.element_bytes
    compute = (4 if backward else 2) * m * tokens * d * f / (data * tensor * block.flops_per_s)
    one_pass = b * m * d * f / (tensor * block.bytes_per_s)
    passes = 2 if backward else (1 if sharded else 0)
    weights = passes * one_pass if data > 1 else 0.0
    transfers = 3 if backward and not keeps_input else 2
    activations = transfers * b * tokens * d / (data * block.bytes_per_s) if tensor > 1 else 0.0
    return BlockTime(compute, weights, activations)


def largest_data_parallel(block: Block, tokens: float) -> int:
    """X up to which DP or FSDP stays compute-bound: B/a, at least 1."""
    return max(1, math.floor(tokens / block.intensity * (1 + 1e-12)))


def largest_tensor_parallel(block: Block, *, backward: bool = False, keeps_input: bool = True) -> int:
    """Y up to which TP alone stays compute-bound.

    Forward m·f/(2a), two transfers against 2·m·B·d·f FLOPs. Backward has twice the FLOPs for two transfers, 2·m·f/(2a),
    or three if the input is gathered again, 4/3·m·f/(2a).
    """
    limit = block.matrices * block.d_ff / (2 * block.intensity)
    factor = 1.0 if not backward else (2.0 if keeps_input else 4 / 3)
    return max(1, math.floor(limit * factor * (1 + 1e-12)))


def best_split(
    block: Block, tokens: float, devices: int, *, shared_links: bool = False
) -> tuple[int, int, BlockTime]:
    """The whole-numbered (X, Y) with X·Y = devices whose forward is shortest, and its times.

    Tries every divisor that also divides d_ff.

    Raises:
        ValueError: no devices or tokens, or fewer tokens than the data-parallel size would need to give each one.
    """
    if devices < 1 or not tokens > 0:
        raise ValueError(f"tokens={tokens}, devices={devices}: must be positive")
    splits = [
        (devices // tensor, tensor)
        for tensor in divisors(devices)
        if block.d_ff % tensor == 0 and tokens >= devices // tensor
    ]
    if not splits:
        raise ValueError(
            f"{tokens:g} tokens on {devices} devices with d_ff={block.d_ff}: no split gives every data-parallel rank a "
            f"token and divides d_ff; use at most {int(tokens)} × {block.d_ff} devices"
        )

    def seconds(split: tuple[int, int]) -> tuple[float, float]:
        time = block_time(block, tokens, *split)
        return max(time.compute, time.communication(shared_links)), time.communication(shared_links)

    data, tensor = min(splits, key=seconds)
    return data, tensor, block_time(block, tokens, data, tensor)


def least_tokens_per_device_mixed(block: Block, *, shared_links: bool = False) -> float:
    """B/N of FSDP × TP at its best split: 2a²/(m·f), four times that if both axes share the links."""
    return (4 if shared_links else 1) * 2 * block.intensity**2 / (block.matrices * block.d_ff)


def tricks(
    block: Block, *, accumulate: int = 4, quantized_bytes: float = 1, node: int = 8, node_speedup: float = 8
) -> dict[str, float]:
    """Least tokens per device and micro-batch that stay compute-bound, plain and with each known trick.

    - `gradient accumulation` (DP only): one all-reduce per `accumulate` micro-batches.
    - `quantized weights` (FSDP; Wang et al. 2023, ZeRO++): what is sent has `quantized_bytes` per element.
    - `hybrid sharding` (ZeRO++, HSDP): weights are gathered inside a node whose links are `node_speedup` times as
      fast; only the gradients' shards, 1/`node` of the volume but twice over the wire, cross the slow links.
    - `FSDP × TP`, each axis with links of its own, and on shared ones.
    """
    plain = block.intensity
    # Backward: gather and scatter inside the node, all-reduce of a shard across; twice the forward's FLOPs.
    hybrid = max(plain / node_speedup, (2 / node_speedup + 2 / node) * plain / 2)
    return {
        "DP or FSDP": plain,
        "DP with gradient accumulation": plain / accumulate,
        "FSDP with quantized weights": replace(block, element_bytes=quantized_bytes).intensity,
        "hybrid sharding": hybrid,
        "FSDP × TP": least_tokens_per_device_mixed(block),
        "FSDP × TP on shared links": least_tokens_per_device_mixed(block, shared_links=True),
    }
