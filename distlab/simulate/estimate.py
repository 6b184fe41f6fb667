"""The step of a model on a machine in milliseconds: operators and two streams, in closed form.

The operators are those of `distlab.theory.operators`, which a test compares with those that the
simulated model runs. Their times are those of `timeline.DeviceModel`, and
`distlab.theory.step_time` says which of them run at the same time.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distlab.hardware import NETWORK_LINKS, ClusterSpec, GPUSpec, by_alias, cluster
from distlab.model import PRESETS, ModelConfig, model_of, preset
from distlab.model.config import Checkpointing, ModelChanges
from distlab.options import declared_options, option
from distlab.parallel import Layout, get_strategy
from distlab.parallel.buckets import plan_buckets
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.schedules import SCHEDULES, Action, Schedule, simulate
from distlab.precision import DTYPES
from distlab.simulate.calibrate import HOP_S, LAUNCH_S
from distlab.simulate.timeline import DeviceModel, Machine
from distlab.theory.axes import context_volume, pipeline_volume, tensor_volume
from distlab.theory.memory.activations import PRECISIONS, Precision
from distlab.theory.model_shape import ModelShape
from distlab.theory.muon import BF16
from distlab.theory.operators import Workload
from distlab.theory.step_time import (
    ComputeTime,
    Messages,
    Network,
    StepTime,
    sharding_group,
    step_time,
)
from distlab.theory.volume import padded_parameters, sharded_buffers
from distlab.train.memory_budget import rank_parts, stages_of

FP32 = 4
CACHED = 4096  # entries of the caches below; a plan asks the same of many choices
# of the datasheet's memory: the driver's context, NCCL's buffers and fragmentation take the rest
USABLE = 0.94
# Shares of the datasheet's peaks that one calibrated machine reaches: two H200s training the 3.4 B
# and the 0.4 B preset in bf16 (records/ddp_bench/h200x2-xl-batch8.json and
# h200x2-medium-batch8.json; rules in `distlab.simulate.calibrate`). MEMORY of operators, UPDATE of
# the optimizer. Other machines are assumed alike.
FLOPS_SHARE, MEMORY_SHARE, UPDATE_SHARE, LINK_SHARE = 0.68, 0.56, 0.78, 0.79
LATENCY_S, CONTENTION = 58e-6, (0.64, 0.73)
# Of the host: until it has started an operator with all Python around it, and a collective with its
# hook. The most that a quiet host can have taken (records/ddp_bench/h200x2-medium-batch8.json:
# `local`, then `overlap`); a busy one took 37 and more (h200x2-host.json, where next to nothing is
# computed).
HOST_OPERATOR_S, HOST_CALL_S = 30e-6, 39e-6


# Of the bf16 peak that fused attention reaches, by backend and head width, forward and backward
# together, causal, one head of 65,536 tokens (records/attention_sweep/h200-lengths.json): cuDNN's
# kernels, and FlashAttention-2's, which do not use Hopper's own instructions; on other devices
# these reach what cuDNN's do on Hopper.
ATTENTION_SHARE = {"cudnn": {64: 0.43, 128: 0.53}, "flash": {64: 0.27, 128: 0.31}}
# A matmul is limited by power: of a chip below its full limit the rate falls as the square root of
# what is left for switching, between a voltage that follows the clock (power ~ clock³) and one that
# is at its floor (power ~ clock); a seventh of the full limit is assumed for leakage and memory.
STATIC_POWER_SHARE, POWER_EXPONENT = 1 / 7, 0.5


class Stage(NamedTuple):
    """Seconds of one micro-batch in a stage of a pipeline, or in the whole model.

    Args:
        compute: seconds without communication. The optimizer's are those of a step.
        operators: number of operators.
        sent, returned: seconds of the messages between ranks that share a model, forward and
            backward.
        calls: number of these messages.
    """

    compute: ComputeTime
    operators: int
    sent: float
    returned: float
    calls: int

    def seconds(self, action: Action, splits: bool) -> float:
        """Return the seconds of an action. With `splits`, W is half of backward's computation."""
        if action.kind == "F":
            return self.compute.forward + self.sent
        backward = self.compute.backward / (2 if splits else 1)
        return backward + (self.returned if action.kind == "B" else 0.0)


def stage_time(
    work: Workload, levels: Sequence[str], machine: Machine, layout: Layout, dtype: str
) -> Stage:
    """The time of a stage's part of a model.

    Attention is torch's, whatever the model names.

    Args:
        work: workload of its shape.
        levels: for each of its blocks, what it keeps.
    """
    shape, device = work.shape, machine.device
    spent, count = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}, 0
    some = [(replace(work, keep=keep).block(), times) for keep, times in Counter(levels).items()]
    for operators, times in ((work.outside(), 1), *some):
        for operator in operators:
            spent[operator.phase] += times * device.seconds(operator)
            count += times
    copied = shape.num_parameters
    # linear layers write theirs into the buffers (`model.ops.linear`)
    if DTYPES[dtype] is not None:
        head = (shape.has_head and not shape.tie_embeddings) * shape.embedding_parameters
        copied -= shape.num_layers * shape.block_matrices + head
    compute = ComputeTime(**spent, pack=2 * FP32 * copied / device.bytes_per_s)  # read and written
    inside, calls = _inside_blocks(work, layout, machine)
    recomputes = any(level != "none" for level in levels)
    return Stage(compute, count, inside / 2, inside / 2 * (2 if recomputes else 1), calls)


def estimate_step(
    config: ModelConfig,
    name: str,
    machine: Machine,
    *,
    batch: int,
    ranks: int,
    dtype: str = "bf16",
    bucket_size_mb: float | None = 25.0,
    checkpointing: Checkpointing = False,
    micro_batches: int = 1,
    group: int | None = None,
    kernels: str | None = None,
    fused_loss: bool | None = None,
    reduced_bytes: int = FP32,
    layout: Layout = DATA_PARALLEL,
    optimizer: str = "adamw",
) -> StepTime:
    """Return the time of a step, on the slowest rank of a pipeline.

    Attention is torch's, whatever the model names.

    Args:
        name: name of a strategy.
        batch: sequences per micro-batch of a rank, or of all ranks that share a model.
        ranks: number of all ranks. The strategy has data × context of them.
        checkpointing: recomputation of blocks, see `model.kept_levels`.
        micro_batches: number of micro-batches accumulated in a step.
        group: number of ranks that share a copy of the parameters, with a mesh. Default: a node.
        kernels, fused_loss: settings of `distlab.theory.operators.Workload`. None: by the model's
            own `ops`.
        reduced_bytes: bytes per element of the gradients that are sent.
        layout: sizes of the groups of ranks that share a model.
        optimizer: `adamw`, or `muon`, which sends parts of sharded matrices to their owners and
            back.

    Raises:
        ValueError: an unknown strategy or dtype, a size below one, a group that does not divide the
            ranks, or a number of micro-batches that the schedule does not take.
    """
    strategy, averaging = get_strategy(name), ranks // (layout.tensor * layout.pipeline)
    network = machine.network.across(layout.tensor) if layout.tensor > 1 else machine.network
    inner = sharding_group(strategy, averaging, network.devices_per_node, group)
    fused_loss = config.loss_in_head if fused_loss is None else fused_loss
    precision = PRECISIONS[
        "fp32" if dtype == "fp32" else "bf16" if strategy.casts_parameters else "bf16-autocast"
    ]
    stages, activation = _stages(
        config,
        layout,
        checkpointing,
        batch=batch,
        precision=precision,
        kernels=kernels or ("eager" if config.ops == "torch" else "fused"),
        fused_loss=fused_loss and layout.tensor == 1,
        shards=inner if strategy.casts_parameters else None,
        optimizer=optimizer,
        machine=machine,
        dtype=dtype,
    )
    message = machine.network.across(ranks // layout.pipeline).seconds(
        activation, 2, 1, "broadcast"
    )
    own = _stages_of_ranks(layout.pipeline, stages)
    ends = _ends(layout, stages, micro_batches, message)
    parts = rank_parts(config, layout, checkpointing, micro_batches)
    times = []
    for mine, end, part in zip(own, ends, parts, strict=True):
        once = mine.compute
        compute = replace(
            once, forward=once.forward * micro_batches, backward=once.backward * micro_batches
        )
        sent = messages(part.shape, dtype, bucket_size_mb, inner, reduced_bytes)
        time = step_time(
            strategy,
            compute,
            sent,
            network,
            averaging,
            contention=machine.contention,
            micro_batches=micro_batches,
            group=group,
        )
        if optimizer == "muon" and strategy.updates == "slices":
            holders = inner if strategy.casts_parameters else averaging
            parts_sent = 2 * BF16 * part.shape.num_layers * part.shape.block_matrices / holders
            exchanged = network.seconds(parts_sent, holders, 2, "all_to_all")
            time = replace(
                time,
                overhead=time.overhead + exchanged,
                communication=time.communication + exchanged,
                calls=time.calls + 2,
            )
        inside = micro_batches * (mine.sent + mine.returned)
        waited = inside if end is None else end - compute.forward - compute.backward
        between = pipeline_volume(
            part.shape,
            batch=batch,
            context=config.context_length // layout.context,
            micro_batches=micro_batches,
        )
        calls = time.calls + micro_batches * mine.calls + between.collectives
        host = host_time(micro_batches * mine.operators, calls)
        overhead, communication = time.overhead + waited, time.communication + inside
        times.append(
            replace(time, overhead=overhead, communication=communication, calls=calls, host=host)
        )
    return max(times, key=lambda time: time.step)


@lru_cache(maxsize=CACHED)
def _stages(
    config: ModelConfig,
    layout: Layout,
    checkpointing: Checkpointing,
    *,
    batch: int,
    precision: Precision,
    kernels: str,
    fused_loss: bool,
    shards: int | None,
    optimizer: str,
    machine: Machine,
    dtype: str,
) -> tuple[tuple[Stage, ...], float]:
    """Return the time of each stage, and the bytes of the activations that a stage hands on.

    Strategies that compute alike share an entry of the cache: a plan asks for a stage a hundred
    times.
    """
    stages = []
    every_stage = replace(layout, pipeline=stages_of(layout), schedule="1f1b")
    for part in rank_parts(config, every_stage, checkpointing):
        work = Workload(
            part.shape,
            batch,
            config.context_length // layout.context,
            precision,
            kernels,
            fused_loss=fused_loss,
            shards=shards,
            sharing=layout.context,
            optimizer=optimizer,
        )
        levels = part.keeps if isinstance(part.keeps, tuple) else ("block",) * part.shape.num_layers
        stages.append(stage_time(work, levels, machine, layout, dtype))
    return tuple(stages), precision.residual * work.residual


@lru_cache(maxsize=CACHED)
def _stages_of_ranks(pipeline: int, stages: tuple[Stage, ...]) -> list[Stage]:
    """Return what each rank of a pipeline does of a micro-batch: its stages together."""
    found = []
    for rank in range(pipeline):
        mine = stages[rank::pipeline]
        found.append(
            Stage(
                compute=sum((stage.compute for stage in mine), ComputeTime(0.0, 0.0, 0.0)),
                operators=sum(stage.operators for stage in mine),
                sent=sum(stage.sent for stage in mine),
                returned=sum(stage.returned for stage in mine),
                calls=sum(stage.calls for stage in mine),
            )
        )
    return found


@lru_cache(maxsize=CACHED)
def _ends(
    layout: Layout, stages: tuple[Stage, ...], micro_batches: int, message: float
) -> Sequence[float | None]:
    """Return the seconds at which each rank of a pipeline ends its last action.

    None for a single rank, which never waits.
    """
    if layout.pipeline == 1:
        return [None]  # and there may be 10^12 micro-batches, too many for a list of actions
    schedule = _schedule(layout.schedule, layout.pipeline, micro_batches)
    splits = any(action.kind == "W" for actions in schedule for action in actions)
    seconds = [
        {kind: stage.seconds(Action(kind, 0, 0), splits) for kind in "FBW"} for stage in stages
    ]
    timeline = simulate(schedule, lambda action: seconds[action.stage][action.kind], message)
    return [steps[-1].end for steps in timeline]


@lru_cache(maxsize=CACHED)
def _schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    return SCHEDULES[name](ranks, micro_batches)


def _inside_blocks(work: Workload, layout: Layout, machine: Machine) -> tuple[float, int]:
    """Return seconds and number of messages between ranks that share matrices or sequences.

    They are those of forward and backward of a micro-batch.

    Compute waits for each, and copies it once. A recomputed block repeats those of its forward,
    half of them.
    """
    sizes = {"batch": work.batch, "itemsize": work.precision.compute}
    tensor = tensor_volume(work.shape, context=work.context, **sizes)
    sequences = context_volume(
        work.shape,
        context=work.context * layout.context,
        ranks=layout.context,
        how=layout.attention,
        **sizes,
    )
    both, network = tensor + sequences, machine.network
    seconds = network.seconds(tensor.bytes, layout.tensor, tensor.collectives, "all_gather")
    seconds += network.across(layout.tensor).seconds(
        sequences.bytes, layout.context, sequences.collectives, "all_gather"
    )
    return seconds + 2 * both.bytes / machine.device.bytes_per_s, both.collectives


def host_time(operators: int, calls: int) -> float:
    """Return the seconds that a host takes to start this many operators and collectives."""
    return HOST_OPERATOR_S * operators + HOST_CALL_S * calls


@lru_cache(maxsize=CACHED)
def messages(
    shape: ModelShape,
    dtype: str,
    bucket_size_mb: float | None,
    shards: int = 1,
    reduced_bytes: int = FP32,
) -> Messages:
    """Return the messages of a step: gradients, and parameters as FSDP gathers them.

    Gradients are in fp32 by default, parameters in the dtype of the computation.

    Args:
        shards: number of ranks among which FSDP shards a parameter. Above one, messages are padded
            to whole rows.
    """
    compute, numels = DTYPES[dtype], shape.parameter_numels()
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    total, units = sum(numels), shape.num_layers + shape.vocabularies
    if shards > 1:
        total = padded_parameters(shape, shards)
        units = (
            shape.num_layers * len(sharded_buffers(shape.matrix_shapes_per_block, shards))
            + shape.vocabularies
        )
    gathered = total * (FP32 if compute is None else compute.itemsize)
    return Messages(reduced_bytes * total, gathered, len(numels) + 1, len(buckets), units)


def machine_of(
    spec: GPUSpec,
    *,
    link: str = "nvlink",
    between: str = "ib-ndr",
    devices_per_node: int = 8,
    dtype: str = "bf16",
    head_dim: int = 128,
) -> Machine:
    """A machine of a device's datasheet, at the shares of its peaks that a calibrated one reaches.

    Args:
        link: link inside a node, `nvlink` or `pcie`.
        between: name in `distlab.hardware.NETWORK_LINKS`, one such link per device.
        head_dim: width of a head. Attention is slower below 128.

    Raises:
        ValueError: an unknown link, or a dtype without a peak. The message lists what is known.
    """
    inside = {"nvlink": spec.nvlink_bandwidth, "pcie": spec.pcie_bandwidth}
    for what, value, known in (("link", link, inside), ("between", between, NETWORK_LINKS)):
        if value not in known:
            raise ValueError(
                f"{what} {value!r} is unknown for {spec.name}; choose one of {', '.join(known)}"
            )
    network = Network(
        inside[link] * LINK_SHARE,
        NETWORK_LINKS[between] * LINK_SHARE,
        devices_per_node,
        LATENCY_S,
        HOP_S,
    )
    return Machine(_device(spec, dtype, "cudnn", head_dim), network, CONTENTION)


def machine_on(
    hosts: ClusterSpec, *, dtype: str = "bf16", attention: str = "cudnn", head_dim: int = 128
) -> Machine:
    """A machine of a cluster's datasheets, at the same shares, with the latencies of its links.

    Args:
        attention: kernels of attention, `cudnn` or `flash` (FlashAttention-2).
        head_dim: width of a head. Attention is slower below 128.

    Raises:
        ValueError: unknown attention, or a dtype without a peak.
    """
    network = Network(
        hosts.inside * LINK_SHARE,
        hosts.between * LINK_SHARE,
        hosts.gpus_per_host,
        LATENCY_S,
        hosts.inside_hop_s,
        hosts.between_hop_s,
    )
    return Machine(_device(hosts.gpu, dtype, attention, head_dim), network, CONTENTION)


def power_share(spec: GPUSpec) -> float:
    """Return the share of the rate of matmuls that remains under a lower power limit."""
    if spec.full_watts is None or spec.watts is None:
        return 1.0
    static = STATIC_POWER_SHARE * spec.full_watts
    return ((spec.watts - static) / (spec.full_watts - static)) ** POWER_EXPONENT


def _device(spec: GPUSpec, dtype: str, attention: str, head_dim: int) -> DeviceModel:
    peak_dtype = {"fp32": "tf32"}.get(dtype, dtype)
    for what, value, known in (
        ("attention", attention, ATTENTION_SHARE),
        ("dtype", peak_dtype, spec.peak),
    ):
        if value not in known:
            raise ValueError(
                f"{what} {value!r} is unknown for {spec.name}; choose one of {', '.join(known)}"
            )
    hopper = spec.shared_memory_per_sm >= 228 * 1024
    share = ATTENTION_SHARE[attention if hopper else "cudnn"][128 if head_dim >= 128 else 64]
    peak, bandwidth = spec.peak[peak_dtype], spec.hbm_bandwidth
    matmuls = peak * FLOPS_SHARE * power_share(spec)
    return DeviceModel(
        matmuls, bandwidth * MEMORY_SHARE, LAUNCH_S, bandwidth * UPDATE_SHARE, peak * share
    )


def read_object(path: str | Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: it cannot be read. ValueError: it holds anything else; the message says what.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
        raise ValueError("it is not a regular file")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as wrong:  # covers broken UTF-8 and deep nesting
        raise ValueError(f"it is not JSON: {wrong}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {type(found).__name__}, not one object {{…}}")
    return found


@dataclass(frozen=True)
class MachineOptions(ModelChanges):
    """A model in one dtype on one kind of device, as options.

    Raises ValueError for an unknown name of any of them, and for sizes that do not go together.
    """

    model: str = option(
        "xl", f"model preset, one of {', '.join(PRESETS)}, or a JSON file of a model's sizes"
    )
    device: str = option("h200", "kind of GPU, such as h100")
    link: str = option("nvlink", "link inside a node, nvlink or pcie")
    between: str = option("ib-ndr", "link between nodes, per device")
    devices_per_node: int = option(8, "GPUs that share a node", least=1)
    dtype: str = option("bf16", "dtype of the computation", choices=("bf16", "fp32"))
    cluster: str | None = option(
        None, "cluster NAME:HOSTSxGPUS such as dgx-h100:16x8, instead of GPU and links"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape(), self.machine()

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for GPUs and links given together with a cluster, which has its own."""
        if given.get("cluster") is None:
            return
        replaced = ("device", "link", "between", "devices_per_node")
        for each in declared_options(cls):
            if each.name in replaced and each.name in given:
                raise ValueError(
                    f"{each.flag} {given[each.name]}: --cluster {given['cluster']} has its own GPUs "
                    "and links: leave one of the two out"
                )

    def shape(self) -> ModelConfig:
        """The preset or the model of a file, with what other options replace."""
        if not self.model.endswith(".json"):
            return self.changed(preset(self.model))
        try:
            known = model_of(read_object(self.model))
        except (OSError, TypeError, ValueError) as wrong:
            raise ValueError(
                f"model {self.model!r}: {wrong}; give a file with a model's sizes"
            ) from wrong
        return self.changed(known)

    def kernels(self) -> str | None:
        """Name of the kernels in `Workload`. None: those of the model's `ops`.

        Raises:
            ValueError: attention whose time has no closed form.
        """
        if self.attention == "naive":
            raise ValueError(
                "attention='naive': its time has no closed form; choose sdpa, flash or auto, or run its operators: "
                "distlab run plan --timeline --attention naive"
            )
        return "fused" if self.compile != "off" else None

    def hosts(self) -> ClusterSpec | None:
        """The cluster, where one was named."""
        return None if self.cluster is None else cluster(self.cluster)

    def gpu(self) -> GPUSpec:
        """The device's datasheet."""
        return by_alias(self.device) if self.cluster is None else cluster(self.cluster).gpu

    def place(self) -> str:
        """GPU and links, or the cluster, in words."""
        return self.cluster or f"{self.gpu().name} ({self.link}, {self.between})"

    def machine(self) -> Machine:
        """Return the machine, by `machine_of`, or by `machine_on` if a cluster was named."""
        shape = self.shape()  # None: a user's own model
        computes = {"dtype": self.dtype} | ({} if shape is None else {"head_dim": shape.head_dim})
        if self.cluster is not None:
            return machine_on(cluster(self.cluster), **computes)
        known = {
            "link": self.link,
            "between": self.between,
            "devices_per_node": self.devices_per_node,
        }
        return machine_of(self.gpu(), **computes, **known)
