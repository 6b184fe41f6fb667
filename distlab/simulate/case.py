"""A training run described in a file, and its step time, tokens per second and memory predicted.

    {"model": {"d_model": 4096, "d_ff": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
               "vocab_size": 128256, "context": 8192},
     "cluster": "grand-teton:8", "strategy": "fsdp2", "batch": 2, "recompute": "selective",
     "compiled": true}

`model` may be the name of a preset (`distlab.model.config`); fields and defaults are those of
`Case`. What decides such a prediction, and where each constant comes from: docs/learn/scale.md.
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
from distlab.theory.memory.activations import FP32, Sharing
from distlab.theory.memory.peak import Breakdown, step_memory
from distlab.theory.model_shape import ModelShape
from distlab.theory.operators import KERNELS
from distlab.theory.step_time import StepTime, sharding_group
from distlab.train.memory_budget import RankPart, rank_parts

FULL = "full"  # what publications call it where every block is recomputed: `block`


@dataclass(frozen=True)
class Case:
    """Description of a run.

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
        _ = self.shards

    @property
    def shards(self) -> int:
        """GPUs over which parameters, or a GPU's part of them, are divided."""
        host = self.cluster.gpus_per_host // self.layout.tensor
        return sharding_group(get_strategy(self.strategy), self.averaging, host, self.group)

    @property
    def averaging(self) -> int:
        """GPUs over which a strategy averages: data × context."""
        return self.cluster.gpus // (self.layout.tensor * self.layout.pipeline)

    @property
    def tokens(self) -> float:
        """Tokens of a step per GPU."""
        return self.batch * self.micro_batches * self.model.context_length / self.layout.ranks

    @property
    def checkpointing(self) -> str:
        """Entries of what each block keeps, as in the option of that name."""
        level, every = "block" if self.recompute == FULL else self.recompute, self.recompute_every
        return ",".join(
            f"{'none' if block % every else level}:1" for block in range(self.model.num_layers)
        )

    @cached_property
    def machine(self) -> Machine:
        """The cluster at the shares of its datasheets' peaks that a calibrated machine reaches."""
        return machine_on(
            self.cluster, dtype=self.dtype, attention=self.attention, head_dim=self.model.head_dim
        )


def from_json(known: Mapping[str, Any]) -> Case:
    """The case of a JSON object.

    Raises:
        ValueError: a field that is missing, unknown or not allowed, with what is.
    """
    names = [*(field.name for field in fields(Case)), "stages"]
    missing = [name for name in ("model", "cluster", "strategy", "batch") if name not in known]
    unknown = [name for name in known if name not in names]
    if missing or unknown:
        raise ValueError(
            f"a case lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}; fields: "
            f"{', '.join(names)}"
        )
    named = isinstance(known["model"], str)
    model = preset(known["model"]) if named else model_of(known["model"])
    layout = Layout.parse(known.get("layout", ""), known.get("stages", ()))
    known = {name: value for name, value in known.items() if name != "stages"}
    return Case(
        **{**known, "model": model, "cluster": cluster_of(known["cluster"]), "layout": layout}
    )


def cluster_of(known: str | Mapping[str, Any]) -> ClusterSpec:
    """Return a cluster by its name, or from a mapping with the fields of `ClusterSpec`.

    `gpu` may be a short name such as `a100`.

    Raises:
        ValueError: an unknown name or field, a missing one, or links that contradict each other.
    """
    if isinstance(known, str):
        return cluster(known)
    try:
        return ClusterSpec(**{"name": "cluster", **known, "gpu": by_alias(str(known.get("gpu")))})
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
        # of a value of another kind, such as a list for a name
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
    """Step time, memory and what follows from them."""
    time = step(case)
    memory = peak(case)
    allocated, phase = max((moment.total, phase) for phase, moment in memory)
    # The allocator's cache: forward's tensors are cut out of the block that the largest temporary
    # one left, so the next step's finds none of its size and takes another.
    largest = (
        FP32 * case.batch * case.model.context_length * case.model.vocab_size // case.layout.ranks
    )
    if case.fused_loss:
        largest = FP32 * ModelShape.of(case.model).block_matrices
    dtype_peak = case.cluster.gpu.peak["tf32" if case.dtype == "fp32" else case.dtype]
    flops = step_flops(**case.model.sizes(case.batch * case.micro_batches)) / case.layout.ranks
    share = mfu(flops, time.step, dtype_peak)
    return Prediction(time, allocated, allocated + largest, phase, case.tokens / time.step, share)


def step(case: Case) -> StepTime:
    """Return the time of the case."""
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
        kernels=case.kernels or ("fused" if case.compiled else "eager"),
        fused_loss=case.fused_loss,
        reduced_bytes=FP32 if case.reduce == "fp32" else 2,
        layout=case.layout,
        optimizer=case.optimizer,
    )


def peak(case: Case) -> list[tuple[str, Breakdown]]:
    """The moments of a step on the fullest rank, (phase, bytes)."""
    parts = rank_parts(case.model, case.layout, case.checkpointing, case.micro_batches)
    return max(
        (_moments(case, part) for part in parts),
        key=lambda moments: max(each.total for _, each in moments),
    )


def _moments(case: Case, part: RankPart) -> list[tuple[str, Breakdown]]:
    layout, strategy, shape = case.layout, get_strategy(case.strategy), part.shape
    moments = step_memory(
        shape,
        batch=case.batch,
        context=case.model.context_length // layout.context,
        strategy=strategy,
        world_size=case.shards if strategy.takes_mesh else case.averaging,
        precision="fp32"
        if case.dtype == "fp32"
        else "bf16"
        if strategy.casts_parameters
        else "bf16-autocast",
        checkpointing=part.keeps,
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
    # torch's FSDP: its root unit (embedding, norm, head) and its last block stay unsharded from
    # forward to backward.
    ends = shape.vocabularies * shape.embedding_parameters
    unsharded = (FP32 if case.dtype == "fp32" else 2) * (ends + shape.block_parameters)
    return [
        (phase, replace(moment, gathered=unsharded) if "loss" in phase else moment)
        for phase, moment in moments
    ]


def shortage(case: Case) -> str | None:
    """Return by how much a case does not fit its GPUs, and what would. None if it does."""
    usable = USABLE * case.cluster.gpu.hbm_bytes
    needed = max(moment.total for _, moment in peak(case))
    if needed <= usable:
        return None
    states = 16 * case.model.num_parameters / case.cluster.gpus
    text = (
        f"{case.name} needs {needed / 2**30:.1f} GiB per GPU of {case.cluster.gpu.name}, {usable / 2**30:.1f} are "
        f"usable: {(needed - usable) / 2**30:.1f} too few. "
    )
    if states > usable:
        fewest = -(-16 * case.model.num_parameters // int(usable))
        return text + f"The states alone, fully sharded, need {fewest} GPUs"
    options = {
        "fsdp": replace(case, strategy="fsdp", group=None),
        "recompute full": replace(case, recompute=FULL, recompute_every=1),
        "batch 1": replace(case, batch=1),
        "fsdp, recompute full, batch 1": replace(
            case, strategy="fsdp", group=None, recompute=FULL, batch=1
        ),
    }
    helps = [
        what for what, other in options.items() if max(m.total for _, m in peak(other)) <= usable
    ]
    return text + (
        f"What fits: {'; or '.join(helps)}"
        if helps
        else "A shorter context, or more GPUs with fsdp"
    )
