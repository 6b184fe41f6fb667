"""Time of a training step on a machine, in closed form: `estimate_step`.

The estimate has four parts:

- Computation: the operators of `distlab.theory.operators`, each with its time on
  `timeline.DeviceModel` (`stage_time`). A test compares these operators with those that the
  simulated model runs.
- Messages between ranks that share a model: tensor and context parallelism (`_inside_blocks`), and
  the schedule of a pipeline (`_ends`).
- Messages of the strategy (`messages`). `distlab.theory.step_time` says which of them run at the
  same time as the computation.
- The host, which must start every operator and every collective (`host_time`).

The machine comes from datasheets (`machine_of`, `machine_on`), scaled by the constants below. This
file runs no step: `distlab.simulate.step` does, on fake tensors.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distlab.hardware import NETWORK_LINKS, ClusterSpec, GPUSpec, by_alias, cluster
from distlab.model import PRESETS, ModelConfig, model_of, preset
from distlab.model.config import Checkpointing, ModelChanges
from distlab.options import declared_options, option
from distlab.parallel import Layout, Strategy, get_strategy
from distlab.parallel.buckets import plan_buckets
from distlab.parallel.fsdp.layout import RowLayout, plan_buffers
from distlab.parallel.layout import DATA_PARALLEL
from distlab.parallel.schedules import SCHEDULES, Action, Schedule, simulate
from distlab.precision import DTYPES
from distlab.simulate.calibrate import HOP_S, LAUNCH_S
from distlab.simulate.timeline import DeviceModel, Machine
from distlab.theory.axes import micro_batch_volumes, pipeline_volume
from distlab.theory.forms import reductions_per_step
from distlab.theory.memory.activations import FP32, Precision, precision_of
from distlab.theory.memory.recompute import Segments
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
from distlab.theory.volume import step_volume
from distlab.train.memory_budget import rank_parts, stages_of

CACHED = 4096  # entries of the caches below; a plan asks the same of many choices
# Share of the datasheet's memory that tensors may take. The driver's context, NCCL's buffers and
# fragmentation take the rest.
USABLE = 0.94
# Shares of the datasheet's peaks that one calibrated machine reaches: two H200s that train the
# 3.4 B and the 0.4 B preset in bf16 (records/ddp_bench/h200x2-xl-batch8.json and
# h200x2-medium-batch8.json; rules in `distlab.simulate.calibrate`). Today's records of these runs
# give 0.67, 0.57, 0.81, 0.76, 58 µs, 0.66 and 0.72. Other machines are assumed to reach the same
# shares.
FLOPS_SHARE = 0.68  # matmuls
MEMORY_SHARE = 0.56  # memory-bound operators of forward and backward
UPDATE_SHARE = 0.78  # the optimizer's pass
LINK_SHARE = 0.79
LATENCY_S = 58e-6  # seconds of latency of each collective
CONTENTION = (0.64, 0.73)  # rates of computation and communication while both run
# Seconds of the host until it has started an operator with all Python around it, and a collective
# with its hook. They are the most that a quiet host can have taken
# (records/ddp_bench/h200x2-medium-batch8.json: `local`, then `overlap`). A busy host took 37 µs and
# more per operator (h200x2-host.json, where next to nothing is computed).
HOST_OPERATOR_S = 30e-6
HOST_CALL_S = 39e-6
# Share of the bf16 peak that fused attention reaches, by backend and width of a head: forward and
# backward together, causal, one head of 65,536 tokens (records/attention_sweep/h200-lengths.json).
# cuDNN's kernels use Hopper's own instructions, and FlashAttention-2's do not. On other devices
# FlashAttention-2 is assumed to reach what cuDNN reaches on Hopper.
ATTENTION_SHARE = {"cudnn": {64: 0.43, 128: 0.53}, "flash": {64: 0.27, 128: 0.31}}
# Matmuls are limited by power. Leakage and memory are assumed to take this share of the full limit.
STATIC_POWER_SHARE = 1 / 7
# The rate of matmuls falls with this power of what is left for switching. The exponent lies between
# 1/3, where the voltage follows the clock (power ~ clock³), and 1, where the voltage is at its
# floor (power ~ clock).
POWER_EXPONENT = 0.5


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
        config: shape of the model.
        name: name of a strategy.
        machine: devices and their network.
        batch: sequences per micro-batch of a rank, or of all ranks that share a model.
        ranks: number of all ranks. The strategy has data × context of them.
        dtype: `bf16` or `fp32`.
        bucket_size_mb: MiB per bucket, for strategies with buckets.
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
    strategy = get_strategy(name)
    # Ranks that share sequences hold the same parameters, and average their gradients with the
    # others.
    averaging = ranks // (layout.tensor * layout.pipeline)
    # Ranks of tensor parallelism are neighbours. The strategy's groups stride over them.
    network = machine.network.across(layout.tensor) if layout.tensor > 1 else machine.network
    shards = sharding_group(strategy, averaging, network.devices_per_node, group)
    default_kernels = "eager" if config.ops == "torch" else "fused"
    if fused_loss is None:
        fused_loss = config.loss_in_head
    stages, activation_bytes = _stages(
        config,
        layout,
        checkpointing,
        batch=batch,
        precision=precision_of(dtype, casts_parameters=strategy.casts_parameters),
        kernels=kernels or default_kernels,
        # Ranks that share the head combine numbers of all logits, so these are whole there.
        fused_loss=fused_loss and layout.tensor == 1,
        shards=shards if strategy.casts_parameters else None,
        optimizer=optimizer,
        machine=machine,
        dtype=dtype,
    )
    # Ranks of neighbouring stages are this many ranks apart.
    between_stages = machine.network.across(ranks // layout.pipeline)
    # Two ranks and one message. The link carries it once, as it carries a broadcast.
    message_s = between_stages.seconds(activation_bytes, 2, 1, "broadcast")
    own = _stages_of_ranks(layout.pipeline, stages)
    ends = _ends(layout, stages, micro_batches, message_s)
    parts = rank_parts(config, layout, checkpointing, micro_batches)
    # In a pipeline all micro-batches but the last accumulate locally, under ZeRO-2 also.
    sends_once = strategy.frees_gradients and layout.pipeline > 1
    times = []
    for mine, end, part in zip(own, ends, parts, strict=True):
        once = mine.compute
        # The stage's seconds are of one micro-batch. The optimizer steps once for all of them.
        compute = replace(
            once, forward=once.forward * micro_batches, backward=once.backward * micro_batches
        )
        time = step_time(
            strategy,
            compute,
            messages(
                strategy,
                part.shape,
                averaging,
                dtype,
                bucket_size_mb,
                shards,
                reduced_bytes,
                1 if sends_once else micro_batches,
            ),
            network,
            averaging,
            contention=machine.contention,
            micro_batches=micro_batches,
            group=group,
        )
        if optimizer == "muon" and strategy.updates == "slices":
            # FSDP holds slices within a shard group, ZeRO-1 over all ranks that average.
            holders = shards if strategy.casts_parameters else averaging
            time = _with_muon_exchange(time, part.shape, holders, network)
        inside = micro_batches * (mine.sent + mine.returned)
        # In a pipeline, all seconds until the last action that are not computation are waiting:
        # for messages inside of blocks, and for other stages.
        waited = inside if end is None else end - compute.forward - compute.backward
        between = pipeline_volume(
            part.shape,
            batch=batch,
            context=config.context_length // layout.context,
            micro_batches=micro_batches,
        )
        calls = time.calls + micro_batches * mine.calls + between.collectives
        times.append(
            replace(
                time,
                overhead=time.overhead + waited,
                communication=time.communication + inside,
                calls=calls,
                host=host_time(micro_batches * mine.operators, calls),
            )
        )
    # All ranks wait for the slowest in the next step's messages.
    return max(times, key=lambda time: time.step)


def _with_muon_exchange(
    time: StepTime, shape: ModelShape, holders: int, network: Network
) -> StepTime:
    """Return the time with Muon's two all-to-alls: matrices to their owners, and updates back.

    Args:
        holders: number of ranks that each hold a slice of every matrix.
    """
    matrices = shape.num_layers * shape.block_matrices
    # On average a rank sends its N-th of the matrices to owners, and as many elements of updates
    # back.
    bytes_of_both = 2 * BF16 * matrices / holders
    exchanged = network.seconds(bytes_of_both, holders, 2, "all_to_all")
    return replace(
        time,
        overhead=time.overhead + exchanged,
        communication=time.communication + exchanged,
        calls=time.calls + 2,
    )


# -- computation -----------------------------------------------------------------------------------


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
        """Return the seconds of an action.

        Args:
            action: forward `F`, backward `B`, or the weights' part of a backward, `W`.
            splits: True if the schedule splits backward. Then each part has half of the
                computation, and `B` has the messages.
        """
        if action.kind == "F":
            return self.compute.forward + self.sent
        backward = self.compute.backward / (2 if splits else 1)
        # The gradient of a weight, `W`, needs no message: its inputs are on the rank already.
        return backward + (self.returned if action.kind == "B" else 0.0)


def stage_time(
    work: Workload,
    keeps: int | Segments | tuple[str, ...],
    machine: Machine,
    layout: Layout,
    dtype: str,
) -> Stage:
    """Return the time of a stage's part of a model.

    Attention is torch's, whatever the model names.

    Args:
        work: workload of its shape.
        keeps: for each of its blocks, what it keeps, or the number of blocks that are recomputed
            together.
        machine: devices and their network.
        layout: sizes of the groups of ranks that share a model.
        dtype: `bf16` or `fp32`.
    """
    shape = work.shape
    device = machine.device
    # A number says how many blocks are recomputed together, which includes every block.
    levels = keeps if isinstance(keeps, tuple) else ("block",) * shape.num_layers
    # Operators outside of the blocks run once. Those of equal blocks are counted together.
    parts = [(work.outside(), 1)]
    for keep, blocks in Counter(levels).items():
        parts.append((replace(work, keep=keep).block(), blocks))
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    count = 0
    for operators, times in parts:
        for operator in operators:
            seconds[operator.phase] += times * device.seconds(operator)
            count += times
    # Gradients that a strategy copies into its buffers.
    copied = shape.num_parameters
    if DTYPES[dtype] is not None:
        # Linear layers write their gradients into the buffers themselves (`model.ops.linear`).
        has_own_head = shape.has_head and not shape.tie_embeddings
        head = has_own_head * shape.embedding_parameters
        copied -= shape.num_layers * shape.block_matrices + head
    compute = ComputeTime(
        forward=seconds["forward"],
        backward=seconds["backward"],
        optimizer=seconds["optimizer"],
        pack=2 * FP32 * copied / device.bytes_per_s,  # read and written
    )
    nothing_recomputed, _ = _inside_blocks(work, 0, layout, machine)
    inside, calls = _inside_blocks(work, keeps, layout, machine)
    # Half of the messages without recomputation are the forward's. All others are in backward.
    sent = nothing_recomputed / 2
    return Stage(
        compute=compute,
        operators=count,
        sent=sent,
        returned=inside - sent,
        calls=calls,
    )


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

    Strategies that compute alike share an entry of the cache. A plan asks for a stage a hundred
    times.
    """
    stages = []
    # A rank of an interleaved schedule has several stages. Here each stage has a rank of its own.
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
        stages.append(stage_time(work, part.keeps, machine, layout, dtype))
    return tuple(stages), precision.residual * work.residual


@lru_cache(maxsize=CACHED)
def _stages_of_ranks(pipeline: int, stages: tuple[Stage, ...]) -> list[Stage]:
    """Return the work of each rank of a pipeline in a micro-batch: the sum of its stages."""
    # Stage s runs on rank s mod `pipeline`, as in `ModelShape.of_pipeline`.
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


# -- messages and the host -------------------------------------------------------------------------


@lru_cache(maxsize=CACHED)
def _ends(
    layout: Layout, stages: tuple[Stage, ...], micro_batches: int, message: float
) -> Sequence[float | None]:
    """Return the seconds at which each rank of a pipeline ends its last action.

    None for a single rank, which never waits.

    Args:
        message: seconds of a message between two stages.
    """
    if layout.pipeline == 1:
        # Returned before a list of actions is made, because there may be 10^12 micro-batches.
        return [None]
    schedule = _schedule(layout.schedule, layout.pipeline, micro_batches)
    # Only zero-bubble schedules have actions of their own for the weights' gradients.
    splits = any(action.kind == "W" for actions in schedule for action in actions)
    # A table, because a schedule has many more actions than kinds of them.
    seconds_of_stage = []
    for stage in stages:
        seconds_of_kind = {}
        for kind in ("F", "B", "W"):
            seconds_of_kind[kind] = stage.seconds(Action(kind, 0, 0), splits)
        seconds_of_stage.append(seconds_of_kind)

    def seconds(action: Action) -> float:
        return seconds_of_stage[action.stage][action.kind]

    timeline = simulate(schedule, seconds, message)
    return [steps[-1].end for steps in timeline]


@lru_cache(maxsize=CACHED)
def _schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    return SCHEDULES[name](ranks, micro_batches)


def _inside_blocks(
    work: Workload, keeps: int | Segments | tuple[str, ...], layout: Layout, machine: Machine
) -> tuple[float, int]:
    """Return seconds and number of messages between ranks that share matrices or sequences.

    They are those of forward and backward of a micro-batch. The computation waits for each, and
    copies it once.

    Args:
        keeps: recomputation, as in `stage_time`. 0 for none.
    """
    tensor, sequences = micro_batch_volumes(
        work.shape,
        batch=work.batch,
        context=work.context * layout.context,
        sharing=layout.context,
        how=layout.attention,
        precision=work.precision,
        keeps=keeps,
    )
    network = machine.network
    seconds = network.seconds(tensor.bytes, layout.tensor, tensor.collectives, "all_gather")
    # Ranks that share sequences are a tensor group apart, and share their node's links with its
    # other members.
    seconds += network.across(layout.tensor).seconds(
        sequences.bytes, layout.context, sequences.collectives, "all_gather"
    )
    both = tensor + sequences
    copies = 2 * both.bytes / machine.device.bytes_per_s  # read and written
    return seconds + copies, both.collectives


def host_time(operators: int, calls: int) -> float:
    """Return the seconds that a host takes to start this many operators and collectives."""
    return HOST_OPERATOR_S * operators + HOST_CALL_S * calls


@lru_cache(maxsize=CACHED)
def messages(
    strategy: Strategy,
    shape: ModelShape,
    ranks: int,
    dtype: str,
    bucket_size_mb: float | None,
    shards: int = 1,
    reduced_bytes: int = FP32,
    micro_batches: int = 1,
) -> Messages:
    """Return the messages of a step: gradients, and parameters as FSDP gathers them.

    Buckets and buffers are those of the strategies' own plans. Gradients are in fp32 by default,
    parameters in the dtype of the computation.

    Args:
        strategy: entry of the strategy.
        shape: shape of a rank's part of the model.
        ranks: number of ranks over which the strategy averages.
        dtype: `bf16` or `fp32`.
        bucket_size_mb: MiB per bucket, for strategies with buckets.
        shards: number of ranks among which FSDP shards a parameter. Above one, messages are padded
            to whole rows.
        reduced_bytes: bytes per element of the gradients that are sent.
        micro_batches: number of micro-batches that communicate in a step, see `step_volume`.
    """
    numels = shape.parameter_numels()
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    total = sum(numels)
    # Without sharding a unit is one message of its own elements.
    buffers_of_block = 1
    if shards > 1:
        of_block = _buffers_of_unit(shape.matrix_shapes_per_block, shards)
        of_embedding = _buffers_of_unit([(shape.words, shape.d_model)], shards)
        buffers_of_block = len(of_block)
        total = shape.norms * shape.d_model  # norms are not sharded, so they have no padding
        total += shape.num_layers * sum(of_block) + shape.vocabularies * sum(of_embedding)
    compute_dtype = DTYPES[dtype]
    # The calls of torch's FSDP have no closed form. They count as those of ours, as its time does.
    counted = replace(strategy, is_peer=False) if strategy.sends == "units" else strategy
    volume = step_volume(
        counted,
        numels,
        [FP32] * len(numels),
        bucket_size_mb=bucket_size_mb,
        world_size=ranks,
        shard_size=shards,
        units=shape.parameter_units(),
        shapes=shape.parameter_shapes(),
        micro_batches=micro_batches,
    )
    return Messages(
        gradient_bytes=reduced_bytes * total,
        parameter_bytes=total * (FP32 if compute_dtype is None else compute_dtype.itemsize),
        calls=volume.collectives,
        buckets=len(buckets),
        units=shape.num_layers * buffers_of_block + shape.vocabularies,
        reductions=reductions_per_step(strategy, micro_batches),
    )


def _buffers_of_unit(matrices: Sequence[tuple[int, int]], shards: int) -> list[int]:
    """Return the elements of each flat buffer in which FSDP gathers a unit, by its own plan.

    Args:
        matrices: shapes of the unit's matrices, in registration order.
        shards: number of ranks among which a buffer is divided.
    """
    numels = []
    for indices in plan_buffers(matrices, shards):
        layout = RowLayout([matrices[index] for index in indices], shards)
        numels.append(layout.numel)
    return numels


# -- machines --------------------------------------------------------------------------------------


def machine_of(
    spec: GPUSpec,
    *,
    link: str = "nvlink",
    between: str = "ib-ndr",
    devices_per_node: int = 8,
    dtype: str = "bf16",
    head_dim: int = 128,
) -> Machine:
    """Return a machine by a device's datasheet, at the shares that a calibrated one reaches.

    Args:
        spec: datasheet of the device.
        link: link inside a node, `nvlink` or `pcie`.
        between: name in `distlab.hardware.NETWORK_LINKS`, one such link per device.
        devices_per_node: number of devices that share a node.
        dtype: `bf16` or `fp32`.
        head_dim: width of a head. Attention is slower below 128.

    Raises:
        ValueError: an unknown link, or a dtype without a peak. The message lists what is known.
    """
    inside = {"nvlink": spec.nvlink_bandwidth, "pcie": spec.pcie_bandwidth}
    _check_known("link", link, inside, spec)
    _check_known("between", between, NETWORK_LINKS, spec)
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
    """Return a machine by a cluster's datasheets, at the same shares, with its links' latencies.

    Args:
        hosts: hardware of the cluster.
        dtype: `bf16` or `fp32`.
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
    """Return the share of the rate of matmuls that remains under a lower power limit.

    With limit P, full limit F and static power S: ((P − S) / (F − S))^`POWER_EXPONENT`.
    """
    if spec.full_watts is None or spec.watts is None:
        return 1.0
    static = STATIC_POWER_SHARE * spec.full_watts
    left_for_switching = (spec.watts - static) / (spec.full_watts - static)
    return left_for_switching**POWER_EXPONENT


def _device(spec: GPUSpec, dtype: str, attention: str, head_dim: int) -> DeviceModel:
    """Return the model of a device: its datasheet's peaks times the shares above."""
    _check_known("attention", attention, ATTENTION_SHARE, spec)
    _check_known("dtype", dtype, spec.peak, spec)
    # The datasheet has no architecture. Hopper is the first with 228 KiB of shared memory per SM.
    is_hopper = spec.shared_memory_per_sm >= 228 * 1024
    shares = ATTENTION_SHARE[attention if is_hopper else "cudnn"]
    attention_share = shares[128 if head_dim >= 128 else 64]
    # That of fp32 is of the cores for fp32: torch uses TF32 only if it is told to.
    peak = spec.peak[dtype]
    return DeviceModel(
        flops_per_s=peak * FLOPS_SHARE * power_share(spec),
        bytes_per_s=spec.hbm_bandwidth * MEMORY_SHARE,
        launch_s=LAUNCH_S,
        update_bytes_per_s=spec.hbm_bandwidth * UPDATE_SHARE,
        attention_flops_per_s=peak * attention_share,
    )


def _check_known(what: str, value: str, known: Collection[str], spec: GPUSpec) -> None:
    """Raise ValueError for a value that is not among the known ones."""
    if value not in known:
        raise ValueError(
            f"{what} {value!r} is unknown for {spec.name}; choose one of {', '.join(known)}"
        )


# -- options ---------------------------------------------------------------------------------------


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
    devices_per_node: int = option(8, "GPUs that share a node", minimum=1)
    dtype: str = option("bf16", "dtype of the computation", choices=("bf16", "fp32"))
    cluster: str | None = option(
        None, "cluster NAME:HOSTSxGPUS such as dgx-h100:16x8, instead of GPU and links"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both raise for values that are not allowed.
        self.shape()
        self.machine()

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for GPUs and links given together with a cluster, which has its own."""
        if given.get("cluster") is None:
            return
        replaced = ("device", "link", "between", "devices_per_node")
        for each in declared_options(cls):
            if each.name in replaced and each.name in given:
                raise ValueError(
                    f"{each.flag} {given[each.name]}: --cluster {given['cluster']} has its own "
                    "GPUs and links: leave one of the two out"
                )

    def shape(self) -> ModelConfig:
        """Return the preset, or the model of a file, with the sizes that other options replace."""
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
        """Return the name of the kernels in `Workload`. None: those of the model's `ops`.

        Raises:
            ValueError: attention whose time has no closed form.
        """
        if self.attention == "naive":
            raise ValueError(
                "attention='naive': its time has no closed form; choose sdpa, flash or auto, or "
                "run its operators: distlab run plan --timeline --attention naive"
            )
        return "fused" if self.compile != "off" else None

    def hosts(self) -> ClusterSpec | None:
        """Return the cluster that was named, or None."""
        return None if self.cluster is None else cluster(self.cluster)

    def gpu(self) -> GPUSpec:
        """Return the device's datasheet."""
        return by_alias(self.device) if self.cluster is None else cluster(self.cluster).gpu

    def place(self) -> str:
        """Return GPU and links, or the cluster, in words."""
        return self.cluster or f"{self.gpu().name} ({self.link}, {self.between})"

    def machine(self) -> Machine:
        """Return the machine, by `machine_of`, or by `machine_on` if a cluster was named."""
        shape = self.shape()
        head_dim = 128 if shape is None else shape.head_dim  # None: a user's own model
        if self.cluster is not None:
            return machine_on(cluster(self.cluster), dtype=self.dtype, head_dim=head_dim)
        return machine_of(
            self.gpu(),
            link=self.link,
            between=self.between,
            devices_per_node=self.devices_per_node,
            dtype=self.dtype,
            head_dim=head_dim,
        )
