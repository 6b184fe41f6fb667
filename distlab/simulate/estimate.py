"""The step of a model on a machine in a fraction of a second: compute by two simulated layers, the rest in closed form.

Operators take their time one after the other, so a model's time is linear in its number of layers: simulating one
layer and two gives it for any number, exactly.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from distlab.hardware import NETWORK_LINKS, GPUSpec, by_alias
from distlab.model import ModelConfig, kept_levels, preset
from distlab.options import Options, option
from distlab.parallel.buckets import plan_buckets
from distlab.precision import DTYPES
from distlab.simulate.calibrate import HOP_S, LAUNCH_S
from distlab.simulate.events import Compute
from distlab.simulate.run import simulate_training
from distlab.simulate.timeline import DeviceModel, Machine
from distlab.theory.model_shape import ModelShape
from distlab.theory.step_time import ComputeTime, Messages, Network, StepTime, step_time
from distlab.theory.volume import padded_parameters, sharded_buffers

FP32 = 4
# Shares of the datasheet's peaks that one calibrated machine reaches: two H200s training the 3.4 B and the 0.4 B preset
# in bf16 (records/ddp_bench/h200x2_xl_batch8.json and h200x2_medium_batch8.json; rules in
# `distlab.simulate.calibrate`). MEMORY of operators, UPDATE of the optimizer. Other machines are assumed alike.
FLOPS_SHARE, MEMORY_SHARE, UPDATE_SHARE, LINK_SHARE = 0.68, 0.56, 0.78, 0.79
LATENCY_S, CONTENTION = 58e-6, (0.64, 0.73)


@lru_cache(maxsize=64)
def _operators(
    config: ModelConfig, batch: int, dtype: str, keep: str, casts_parameters: bool
) -> tuple[Compute, ...]:
    strategy = "fsdp" if casts_parameters else "local"
    return simulate_training(
        config, strategy, batch=batch, world_size=1, dtype=dtype, checkpointing=keep
    ).operators


def compute_time(
    config: ModelConfig,
    batch: int,
    device: DeviceModel,
    *,
    dtype: str = "bf16",
    checkpointing: bool | str = False,
    casts_parameters: bool = False,
) -> ComputeTime:
    """Forward, backward and optimizer of one micro-batch without communication.

    Attention is torch's, whichever the model names.

    Args:
        checkpointing: whether blocks are recomputed, or what they keep, see `model.kept_levels`.
        casts_parameters: the strategy hands the model parameters in `dtype` (FSDP), so that nothing is cast.
    """
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    blocks = Counter(kept_levels(checkpointing, config.num_layers))
    for keep, count in blocks.items():
        one, two = (dict.fromkeys(seconds, 0.0) for _ in range(2))
        for layers, spent in ((1, one), (2, two)):
            smaller = replace(config, num_layers=layers, attention="sdpa")
            for operator in _operators(smaller, batch, dtype, keep, casts_parameters):
                spent[operator.phase] += device.seconds(operator)
        for phase in seconds:
            block = two[phase] - one[phase]
            seconds[phase] += count * block + (one[phase] - block) / len(blocks)  # the rest of the model, once
    copied = config.num_parameters
    if DTYPES[dtype] is not None:  # linear layers write theirs into the buffers (`model.ops.linear`)
        shape = ModelShape.of(config)
        head = 0 if config.tie_embeddings else shape.embedding_parameters
        copied -= config.num_layers * sum(shape.matrices_per_block) + head
    return ComputeTime(**seconds, pack=2 * FP32 * copied / device.bytes_per_s)  # read and written


def estimate_step(
    config: ModelConfig,
    strategy: str,
    machine: Machine,
    *,
    batch: int,
    ranks: int,
    dtype: str = "bf16",
    bucket_size_mb: float | None = 25.0,
    checkpointing: bool | str = False,
    micro_batches: int = 1,
) -> StepTime:
    """The time of a step.

    Args:
        batch: sequences per rank and micro-batch.
        ranks: data-parallel size.
        checkpointing: see `compute_time`.
        micro_batches: accumulated in a step.

    Raises:
        ValueError: an unknown strategy or dtype, or a size below one.
    """
    once = compute_time(
        config,
        batch,
        machine.device,
        dtype=dtype,
        checkpointing=checkpointing,
        casts_parameters=strategy in ("fsdp", "hsdp"),
    )
    inner = min(ranks, machine.network.devices_per_node) if strategy == "hsdp" else ranks
    shards = inner if strategy in ("fsdp", "hsdp") else 1
    compute = replace(once, forward=once.forward * micro_batches, backward=once.backward * micro_batches)
    return step_time(
        strategy,
        compute,
        messages(config, dtype, bucket_size_mb, shards),
        machine.network,
        ranks,
        contention=machine.contention,
        micro_batches=micro_batches,
    )


def messages(config: ModelConfig, dtype: str, bucket_size_mb: float | None, shards: int = 1) -> Messages:
    """What a step sends: gradients in fp32, parameters as FSDP gathers them in the dtype of the computation.

    Args:
        shards: ranks that FSDP cuts a parameter for; above one, what it sends is padded to whole rows.
    """
    shape, compute = ModelShape.of(config), DTYPES[dtype]
    numels = shape.parameter_numels()
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    total, units = sum(numels), config.num_layers + 2
    if shards > 1:
        total = padded_parameters(shape, shards)
        units = config.num_layers * len(sharded_buffers(shape.matrix_shapes_per_block, shards)) + 2
    gathered = total * (FP32 if compute is None else compute.itemsize)
    return Messages(FP32 * total, gathered, len(numels) + 1, len(buckets), units)


def machine_of(
    spec: GPUSpec,
    *,
    link: str = "nvlink",
    between: str = "ib-ndr",
    devices_per_node: int = 8,
    dtype: str = "bf16",
) -> Machine:
    """A machine of a device's datasheet, at the shares of its peaks that a calibrated one reaches.

    Args:
        link: inside a node, `nvlink` or `pcie`.
        between: a name of `distlab.hardware.NETWORK_LINKS`, per device.

    Raises:
        ValueError: an unknown link, or a dtype without a peak; the message lists what is known.
    """
    inside = {"nvlink": spec.nvlink_bandwidth, "pcie": spec.pcie_bandwidth}
    peak = {"fp32": "tf32"}.get(dtype, dtype)
    for what, value, known in (
        ("link", link, inside),
        ("between", between, NETWORK_LINKS),
        ("dtype", peak, spec.peak),
    ):
        if value not in known:
            raise ValueError(f"{what} {value!r} is unknown for {spec.name}; choose one of {', '.join(known)}")
    network = Network(
        inside[link] * LINK_SHARE, NETWORK_LINKS[between] * LINK_SHARE, devices_per_node, LATENCY_S, HOP_S
    )
    bandwidth = spec.hbm_bandwidth
    device = DeviceModel(
        spec.peak[peak] * FLOPS_SHARE, bandwidth * MEMORY_SHARE, LAUNCH_S, bandwidth * UPDATE_SHARE
    )
    return Machine(device, network, CONTENTION)


@dataclass(frozen=True)
class MachineOptions(Options):
    """A model in one dtype on one kind of device, as options. Raises ValueError for an unknown name of any of them."""

    model: str = option("xl", "a preset")
    context: int | None = option(None, "tokens per sequence [the preset's]", least=1)
    device: str = option("h200", "kind of GPU, such as h100")
    link: str = option("nvlink", "inside a node, nvlink or pcie")
    between: str = option("ib-ndr", "link between nodes, per device")
    devices_per_node: int = option(8, "GPUs that share a node", least=1)
    dtype: str = option("bf16", "of the computation", choices=("bf16", "fp32"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape(), self.machine()

    def shape(self) -> ModelConfig:
        """The preset, with its context replaced."""
        return preset(self.model, context_length=self.context)

    def gpu(self) -> GPUSpec:
        """The device's datasheet."""
        return by_alias(self.device)

    def machine(self) -> Machine:
        """See `machine_of`."""
        known = {"link": self.link, "between": self.between, "devices_per_node": self.devices_per_node}
        return machine_of(self.gpu(), dtype=self.dtype, **known)
