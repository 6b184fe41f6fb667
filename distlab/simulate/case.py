"""A training run described in a file, and its step time, tokens per second and memory predicted.

    {"model": {"d_model": 4096, "d_ff": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
               "vocab_size": 128256, "context": 8192},
     "cluster": "grand-teton:8", "strategy": "fsdp2", "batch": 2, "recompute": "selective",
     "compiled": true}

`model` may be the name of a preset (`distlab.model.config`). Fields and defaults are those of
`Case`. docs/learn/scale.md explains what decides such a prediction, and where each constant comes
from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from distlab.hardware import ClusterSpec, by_alias, cluster
from distlab.model import ModelConfig, model_of, preset
from distlab.model.config import LOGITS_CHUNK, RECOMPUTATION
from distlab.parallel import Layout, get_strategy
from distlab.parallel.layout import DATA_PARALLEL
from distlab.simulate.estimate import USABLE, estimate_step, machine_on, read_object
from distlab.simulate.timeline import Machine
from distlab.theory.checks import at_least_one, one_of
from distlab.theory.flops import mfu, step_flops
from distlab.theory.memory.activations import FP32, Sharing, precision_of
from distlab.theory.memory.peak import Breakdown, devices_to_fit, step_memory
from distlab.theory.model_shape import ModelShape
from distlab.theory.operators import KERNELS
from distlab.theory.step_time import StepTime, sharding_group
from distlab.train.memory_budget import RankPart, rank_parts

FULL = "full"  # name in publications for `block`, where every block is recomputed


@dataclass(frozen=True)
class Case:
    """Description of a training run.

    Args:
        model: shape of the model.
        cluster: hardware, such as `grand-teton:8` or `dgx-h100:16x8`.
        strategy: name in the registry.
        batch: sequences at once on a GPU, or on all GPUs that share a model.
        micro_batches: number of micro-batches accumulated in a step.
        group: number of GPUs that share a copy of the parameters, with a mesh. None for those of a
            host.
        layout: sizes of the groups of GPUs that share a model, in JSON as in `--layouts`: `tp8`,
            `cp4`, `tp8,pp2`. In JSON, `stages` are the numbers of blocks of each stage of a
            pipeline, if they differ.
        recompute: recomputation: `none`, `selective` (all but attention and every other matmul,
            where q, k and v count as one, as in this lab's model), `full` or `block` (every block),
            or another of `distlab.model.config.RECOMPUTATION`.
        recompute_every: number n, of which one in n blocks is recomputed.
        compiled: True if torch.compile, or fused kernels, are used.
        kernels: `eager`, `composite` (RMSNorm in separate operators, torch before 2.8) or `fused`.
            None: by `compiled`.
        attention: `cudnn` or `flash` (FlashAttention-2, torch's choice on every GPU before 2.9).
        fused_loss: True if the logits are never in memory as a whole.
        dtype: `bf16` computation over fp32 parameters, or `fp32`.
        reduce: dtype in which gradients are sent, `fp32` or `bf16`.
        optimizer: `adamw`, or `muon` for the matrices of blocks.
        name, source, known, assumed, why: texts for a table.
        published: `step_ms`, `tokens_per_s_per_gpu`, `memory_gib` with `memory_is` `allocated` or
            `reserved`.

    Raises:
        ValueError: a value that is not allowed, or a group or a layout that does not divide the
            GPUs.
    """

    model: ModelConfig
    cluster: ClusterSpec
    strategy: str
    batch: int
    micro_batches: int = 1
    group: int | None = None
    layout: Layout = DATA_PARALLEL
    recompute: str = "none"
    recompute_every: int = 1
    compiled: bool = False
    kernels: str | None = None
    attention: str = "cudnn"
    fused_loss: bool = False
    dtype: str = "bf16"
    reduce: str = "fp32"
    optimizer: str = "adamw"
    name: str = "case"
    source: str = ""
    known: str = ""
    assumed: str = ""
    why: str = ""
    published: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        at_least_one(
            batch=self.batch, micro_batches=self.micro_batches, recompute_every=self.recompute_every
        )
        one_of("recompute", self.recompute, (*RECOMPUTATION, FULL))
        one_of("kernels", self.kernels or KERNELS[0], KERNELS)
        one_of("attention", self.attention, ("cudnn", "flash"))
        one_of("dtype", self.dtype, ("bf16", "fp32"))
        one_of("reduce", self.reduce, ("fp32", "bf16"))
        one_of("optimizer", self.optimizer, ("adamw", "muon"))
        if self.cluster.gpus % self.layout.ranks:
            raise ValueError(
                f"layout {self.layout}: {self.layout.ranks} do not divide {self.cluster.gpus} GPUs"
            )
        _ = self.shards  # raises for a group that does not divide the GPUs

    @property
    def shards(self) -> int:
        """Number of GPUs over which parameters, or a GPU's part of them, are divided."""
        host = self.cluster.gpus_per_host // self.layout.tensor
        return sharding_group(get_strategy(self.strategy), self.averaging, host, self.group)

    @property
    def averaging(self) -> int:
        """Number of GPUs over which a strategy averages: data × context."""
        return self.cluster.gpus // (self.layout.tensor * self.layout.pipeline)

    @property
    def tokens(self) -> float:
        """Number of tokens of a step per GPU."""
        return self.batch * self.micro_batches * self.model.context_length / self.layout.ranks

    @property
    def checkpointing(self) -> str:
        """Level of recomputation of each block, as in the option of that name."""
        level = "block" if self.recompute == FULL else self.recompute
        entries = []
        for block in range(self.model.num_layers):
            is_recomputed = block % self.recompute_every == 0
            entries.append(f"{level}:1" if is_recomputed else "none:1")
        return ",".join(entries)

    @cached_property
    def machine(self) -> Machine:
        """Cluster at the shares of its datasheets' peaks that a calibrated machine reaches."""
        return machine_on(
            self.cluster, dtype=self.dtype, attention=self.attention, head_dim=self.model.head_dim
        )


def from_json(known: Mapping[str, Any]) -> Case:
    """Return the case of a JSON object.

    Raises:
        ValueError: a field that is missing, unknown or not allowed. The message lists the fields.
    """
    names = [*(field.name for field in fields(Case)), "stages"]
    missing = [name for name in ("model", "cluster", "strategy", "batch") if name not in known]
    unknown = [name for name in known if name not in names]
    if missing or unknown:
        raise ValueError(
            f"a case lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}; fields: "
            f"{', '.join(names)}"
        )
    is_preset = isinstance(known["model"], str)
    values = dict(known)
    stages = values.pop("stages", ())
    values["model"] = preset(known["model"]) if is_preset else model_of(known["model"])
    values["layout"] = Layout.parse(known.get("layout", ""), stages)
    values["cluster"] = cluster_of(known["cluster"])
    return Case(**values)


def cluster_of(known: str | Mapping[str, Any]) -> ClusterSpec:
    """Return a cluster by its name, or from a mapping with the fields of `ClusterSpec`.

    `gpu` may be a short name such as `a100`.

    Raises:
        ValueError: an unknown name or field, a missing one, or links that contradict each other.
    """
    if isinstance(known, str):
        return cluster(known)
    try:
        values = {"name": "cluster", **known}
        values["gpu"] = by_alias(str(known.get("gpu")))
        return ClusterSpec(**values)
    except TypeError as wrong:
        names = ", ".join(field.name for field in fields(ClusterSpec))
        raise ValueError(f"a cluster takes {names}: {wrong}") from None


def read_case(path: str | Path) -> Case:
    """Return the case in a file.

    Raises:
        ValueError: the file is not a JSON object, or the object is not a case.
        OSError: a file that cannot be read.
    """
    try:
        return from_json({"name": Path(path).stem} | read_object(path))
    except (AttributeError, TypeError, ValueError) as wrong:
        # The first two are raised for a value of another kind, such as a list in place of a name.
        raise ValueError(
            f"{path}: {wrong}; a case is one JSON object, see docs/learn/scale.md"
        ) from None


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one rank.

    Args:
        time: time of a step.
        allocated: bytes at the peak, as torch's allocator counts tensors.
        reserved: bytes that the allocator then holds.
        phase: name of the moment of the peak.
        tokens_per_s: tokens per second of one GPU.
        mfu: share of the datasheet's peak. Attention is counted in full, recomputation not at all.
            None if there is no peak.
    """

    time: StepTime
    allocated: int
    reserved: int
    phase: str
    tokens_per_s: float
    mfu: float | None


def predict(case: Case) -> Prediction:
    """Return step time and memory of a case, and what follows from them."""
    time = step(case)
    allocated, phase = max((moment.total, phase) for phase, moment in peak(case))
    # The allocator caches the block of the largest temporary tensor: the logits in fp32, or with a
    # fused loss the matrices of a block in fp32. Tensors of forward are cut out of this block. The
    # temporary tensor of the next step then finds no block of its size and takes another.
    if case.fused_loss:
        largest = FP32 * ModelShape.of(case.model).block_matrices
    else:
        # Ranks that share a model divide its tokens or its words, so each has its part of the
        # logits.
        tokens = case.batch * case.model.context_length
        largest = FP32 * tokens * case.model.vocab_size // case.layout.ranks
    dtype_peak = case.cluster.gpu.peak[case.dtype]
    # The batch is that of all GPUs that share a model. MFU is that of one GPU.
    flops = step_flops(**case.model.sizes(case.batch * case.micro_batches)) / case.layout.ranks
    return Prediction(
        time=time,
        allocated=allocated,
        reserved=allocated + largest,
        phase=phase,
        tokens_per_s=case.tokens / time.step,
        mfu=mfu(flops, time.step, dtype_peak),
    )


def step(case: Case) -> StepTime:
    """Return the time of a step of the case."""
    default_kernels = "fused" if case.compiled else "eager"
    return estimate_step(
        case.model,
        case.strategy,
        case.machine,
        batch=case.batch,
        ranks=case.cluster.gpus,
        dtype=case.dtype,
        checkpointing=case.checkpointing,
        micro_batches=case.micro_batches,
        group=case.group,
        kernels=case.kernels or default_kernels,
        fused_loss=case.fused_loss,
        reduced_bytes=FP32 if case.reduce == "fp32" else 2,
        layout=case.layout,
        optimizer=case.optimizer,
    )


def peak(case: Case) -> list[tuple[str, Breakdown]]:
    """Return the moments of a step on the rank that needs most memory, as (phase, bytes)."""
    parts = rank_parts(case.model, case.layout, case.checkpointing, case.micro_batches)
    return max((_moments(case, part) for part in parts), key=_largest_total)


def _largest_total(moments: list[tuple[str, Breakdown]]) -> int:
    """Return the bytes of the moment that needs most memory."""
    return max(moment.total for _, moment in moments)


def _moments(case: Case, part: RankPart) -> list[tuple[str, Breakdown]]:
    """Return the moments of a step on a rank with this part of the model."""
    layout = case.layout
    strategy = get_strategy(case.strategy)
    shape = part.shape
    moments = step_memory(
        shape,
        batch=case.batch,
        context=case.model.context_length // layout.context,
        strategy=strategy,
        world_size=case.shards if strategy.takes_mesh else case.averaging,
        precision=precision_of(case.dtype, casts_parameters=strategy.casts_parameters),
        checkpointing=part.keeps,
        # Ranks that share the head compute the loss from all of their logits, without chunks.
        loss_chunk=LOGITS_CHUNK if case.fused_loss and layout.tensor == 1 else None,
        accumulates=part.accumulates,
        fused=case.compiled or case.kernels == "fused",
        compiled=case.compiled,
        sharing=Sharing(layout.context, layout.attention),
        micro_batches_held=part.held,
        optimizer="muon" if case.optimizer == "muon" else "adamw-fused",
    ).moments
    if not (strategy.is_peer and strategy.casts_parameters):
        return list(moments)
    # The root unit of torch's FSDP (embedding, norm, head) and its last block stay unsharded from
    # forward to backward.
    root = shape.vocabularies * shape.embedding_parameters
    itemsize = FP32 if case.dtype == "fp32" else 2
    unsharded = itemsize * (root + shape.block_parameters)
    moments_of_torch = []
    for phase, moment in moments:
        if "loss" in phase:
            moment = replace(moment, gathered=unsharded)
        moments_of_torch.append((phase, moment))
    return moments_of_torch


def shortage(case: Case) -> str | None:
    """Return by how much a case does not fit its GPUs, and what would fit. None if it fits."""
    usable = USABLE * case.cluster.gpu.hbm_bytes
    needed = _largest_total(peak(case))
    if needed <= usable:
        return None
    text = (
        f"{case.name} needs {needed / 2**30:.1f} GiB per GPU of {case.cluster.gpu.name}, "
        f"{usable / 2**30:.1f} are usable: {(needed - usable) / 2**30:.1f} too few. "
    )
    # Four values in fp32 per parameter: itself, its gradient and AdamW's two moments.
    states = 4 * FP32 * case.model.num_parameters
    # Then no choice below fits: none divides the states among more than all GPUs.
    if states / case.cluster.gpus > usable:
        fewest = devices_to_fit(states, usable)
        return text + f"The states alone, fully sharded, need {fewest} GPUs"
    changed_cases = {
        "fsdp": replace(case, strategy="fsdp", group=None),
        "recompute full": replace(case, recompute=FULL, recompute_every=1),
        "batch 1": replace(case, batch=1),
        "fsdp, recompute full, batch 1": replace(
            case, strategy="fsdp", group=None, recompute=FULL, batch=1
        ),
    }
    fitting = []
    for change, changed in changed_cases.items():
        if _largest_total(peak(changed)) <= usable:
            fitting.append(change)
    if not fitting:
        return text + "A shorter context, or more GPUs with fsdp"
    return text + f"What fits: {'; or '.join(fitting)}"
