"""The options of a plan and of its modes, and the layouts in which GPUs can share a model."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from distlab.bench.task import check_name, num_parameters
from distlab.experiment import Records, option
from distlab.hardware import GPUSpec, by_alias, cluster
from distlab.model import ModelConfig, TransformerLM, kept_levels
from distlab.model.config import PRESETS, ModelChanges
from distlab.model.config import RECOMPUTATION as KNOWN
from distlab.options import declared_options, unknown
from distlab.parallel import Layout, check_buckets, check_shard_size, get_strategy
from distlab.simulate.choices import RECOMPUTATION, STRATEGIES
from distlab.simulate.estimate import USABLE, MachineOptions
from distlab.theory.step_time import sharding_group
from distlab.train.memory_budget import stages_of
from distlab.train.step import OPTIMIZERS

WIDEST = 8  # largest number of ranks along an axis of a layout that was not asked for
# Largest number of simulated ranks. With more, the lists of a group's ranks take seconds and
# gigabytes.
MOST_RANKS = 2**20

# The three modes, by the words of their commands.
PLAN, SWEEP, TIMELINE = "plan", "plan --sweep", "plan --timeline"

# Mode → values of the options that are left out.
DEFAULTS = {
    PLAN: {
        "model": "xl",
        "device": "h100:64",
        "batch": 512,
        "strategies": STRATEGIES,
        "recomputation": RECOMPUTATION,
    },
    SWEEP: {
        "model": "xl",
        "device": "h200",
        "batch": 4096,
        "per_rank": 8,
        "strategies": ("naive", "flat", "overlap", "bucketed", "zero1", "fsdp", "hsdp"),
        "recomputation": ("none",),
    },
    TIMELINE: {
        "model": "10B",
        "device": "h100:1024",
        "per_rank": 2,
        "strategies": ("bucketed", "zero1", "fsdp"),
        "recomputation": ("none",),
    },
}

# Option → the modes that it applies to. Options that are not here apply to all three.
APPLIES_TO = {
    "batch": (PLAN, SWEEP),
    "tokens": (PLAN,),
    "days": (PLAN,),
    "optimizer": (PLAN,),
    "layouts": (PLAN,),
    "per_rank": (SWEEP, TIMELINE),
    "shard_group": (SWEEP, TIMELINE),
    "ranks": (SWEEP,),
    "records": (SWEEP,),
    "bucket_mb": (TIMELINE,),
}


def mode_of(sweep: bool, timeline: bool) -> str:
    """Return the mode that the two flags choose.

    Raises:
        ValueError: both are given.
    """
    if sweep and timeline:
        raise ValueError("--sweep and --timeline: give one of them")
    if sweep:
        return SWEEP
    return TIMELINE if timeline else PLAN


@dataclass(frozen=True)
class PlanConfig(MachineOptions):
    """The question: options of the plan and of its modes `--sweep` and `--timeline`.

    An option that is None or () gets its mode's entry in `DEFAULTS`.

    Raises ValueError for values that the mode cannot take, such as a batch that the devices cannot
    divide, with the nearest that they can.
    """

    sweep: bool = option(False, "find where each strategy stops scaling instead")
    timeline: bool = option(False, "simulate one rank's step under each strategy instead")
    model: str | None = option(
        None,
        f"model preset, one of {', '.join(PRESETS)}, or a JSON file of a model's sizes "
        "[xl; --timeline: 10B]",
    )
    device: str | None = option(
        None,
        "name and number of GPUs [h100:64; --timeline: h100:1024], --sweep: only a name [h200]",
        flag="--devices",
    )
    batch: int | None = option(
        None,
        "sequences per step, over all devices [512]; --sweep: in strong scaling [4096]",
        minimum=1,
    )
    tokens: float = option(1e11, "tokens to train on", above=0)
    days: float | None = option(None, "days that training may take", above=0)
    strategies: tuple[str, ...] = option(
        (),
        "strategies to consider [all; --sweep: without sharded-optimizer; "
        "--timeline: bucketed zero1 fsdp]",
    )
    optimizer: str = option(
        "adamw", "adamw, or muon for matrices of blocks", choices=tuple(OPTIMIZERS)
    )
    recomputation: tuple[str, ...] = option(
        (),
        f"ways of recomputation to consider [{' '.join(RECOMPUTATION)}]; --sweep, --timeline: one "
        "way, as distlab train --checkpointing [none]",
    )
    layouts: tuple[str, ...] = option(
        (), "layouts to consider, such as tp2 or tp8,cp2 with + for the comma [all that fit]"
    )
    ranks: tuple[int, ...] = option(
        tuple(2**k for k in range(13)), "--sweep: world sizes", minimum=1
    )
    records: tuple[str, ...] = option((), "--sweep: records of ddp_bench to draw as points")
    # Each row of a plan holds the `micro_batch`, `group` and `bucket_size_mb` of its choice. So the
    # options of these names are fields of other names.
    per_rank: int | None = option(
        None,
        "--sweep: sequences per rank (weak), at most at once (strong scaling) [8]; "
        "--timeline: per rank [2]",
        minimum=1,
        flag="--micro-batch",
    )
    shard_group: int | None = option(
        None,
        "--sweep, --timeline: ranks in a shard group, for strategies with a mesh [a node]",
        minimum=1,
        flag="--group",
    )
    bucket_mb: float = option(100.0, "--timeline: MiB per bucket", above=0, flag="--bucket-size-mb")

    def __post_init__(self) -> None:
        for name, value in DEFAULTS[self.mode].items():
            if getattr(self, name) in (None, ()):
                # A frozen dataclass has no other way, and nothing has read the value yet.
                object.__setattr__(self, name, value)
        super().__post_init__()
        # The other modes have no choice among layouts and optimizers.
        if self.mode == PLAN:
            self._check_plan()
            return
        if self.factory is not None:
            raise ValueError(
                f"--model {self.model}: {self.mode} is of the lab's Transformer: give a preset, or "
                "a file of sizes"
            )
        # An unknown way of recomputation raises here.
        kept_levels(self.checkpointing, self.shape().num_layers)
        if self.mode == SWEEP:
            self._check_sweep()
        else:
            self._check_timeline()
        check_shard_size(self.shard_group, self.strategies, "--group")

    def _check_plan(self) -> None:
        """Raise ValueError for a plan without a choice."""
        self._check_closed_forms()
        for way in self.recomputation:
            if way not in KNOWN:
                raise ValueError(f"recomputation: {unknown(way, KNOWN)}")
        _, count = self.fleet()
        if self.layouts and self.factory is not None:
            raise ValueError(
                "--layouts: ranks share the lab's Transformer; with a model of your own leave "
                "them out"
            )
        if self.optimizer != "adamw" and self.factory is not None:
            raise ValueError(
                f"--optimizer {self.optimizer}: a model of your own is planned with AdamW: leave "
                "it out"
            )
        for text in self.layouts:
            if reason := mismatch(self, Layout.parse(text)):
                raise ValueError(f"layout {text or 'of one rank'}: {reason}")
        # The devices can share the batch in some layout, so there is a plan.
        if self.offered():
            return
        if self.batch < count:
            raise ValueError(
                f"a batch of {self.batch} sequences leaves some of {count} devices without one; "
                "the nearest choices: "
                f"--batch {count}, or {max(1, self.batch)} devices"
            )
        # The nearest batch is a multiple of the number of devices, and never 0.
        near = max(1, round(self.batch / count)) * count
        raise ValueError(
            f"{count} devices do not divide a batch of {self.batch}; the nearest is --batch {near}"
        )

    def _check_sweep(self) -> None:
        """Raise ValueError for what cannot be swept."""
        self._check_closed_forms()
        name, colon, _ = self.device.partition(":")
        if colon:
            raise ValueError(
                f"devices {self.device!r}: {SWEEP} takes the numbers from --ranks: give --devices "
                f"{name}"
            )
        # In strong scaling the smallest number of ranks needs a sequence each.
        if self.batch < min(self.ranks):
            raise ValueError(
                f"batch={self.batch} is smaller than the data-parallel size {min(self.ranks)}; the "
                f"nearest choice is {min(self.ranks)}"
            )

    def _check_timeline(self) -> None:
        """Raise ValueError for what cannot be simulated."""
        if self.compile != "off":
            raise ValueError(
                f"compile={self.compile!r}: no compiler runs on tensors without values; leave it "
                "out, or predict the "
                f"step in closed form: distlab run plan --compile {self.compile}"
            )
        _, count = self.fleet()
        if count > MOST_RANKS:
            raise ValueError(f"{count:,} devices: {TIMELINE} simulates at most {MOST_RANKS:,}")
        for name in self.strategies:
            # This call is made for its error: a group that does not divide the ranks.
            self.shard_size(name)
            if get_strategy(name).is_peer:
                raise ValueError(
                    f"strategy {name!r} is torch's, whose C++ cannot run on fake tensors; choose "
                    "ours"
                )

    def _check_closed_forms(self) -> None:
        """Raise ValueError for strategies whose time has no closed form."""
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ValueError(f"strategies: {unknown(name, STRATEGIES)}")

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for options that do not go together.

        These are options of another mode, what a cluster decides, and what a model of one's own has
        not.
        """
        super().check_given(given)
        mode = mode_of(given.get("sweep", False), given.get("timeline", False))
        for each in declared_options(cls):
            # Options that every mode takes are not in the table.
            modes = APPLIES_TO.get(each.name, (mode,))
            if each.name in given and mode not in modes:
                raise ValueError(
                    f"{each.flag} applies to {' and '.join(modes)}, and not to {mode}: leave it out"
                )
        # Buckets apply only to some strategies, also where those are the mode's own.
        if "bucket_mb" in given:
            strategies = given.get("strategies", DEFAULTS[mode]["strategies"])
            check_buckets({"bucket_size_mb": given["bucket_mb"]}, strategies)
        # A name with a colon is a user's factory. All others are presets or files.
        if ":" not in given.get("model", ""):
            return
        if "recomputation" in given:
            raise ValueError(
                f"--recomputation is of the lab's Transformer, and --model {given['model']} "
                "decides it itself: leave "
                "it out"
            )
        meshes = [name for name in given.get("strategies", ()) if get_strategy(name).takes_mesh]
        if meshes:
            raise ValueError(
                f"--strategies {meshes[0]}: a model of your own is planned without a mesh: choose "
                "among "
                f"{', '.join(name for name in STRATEGIES if not get_strategy(name).takes_mesh)}"
            )

    @property
    def mode(self) -> str:
        """The mode: `PLAN`, `SWEEP` or `TIMELINE`."""
        return mode_of(self.sweep, self.timeline)

    @property
    def checkpointing(self) -> str:
        """The one way of recomputation of a sweep or a timeline, see `kept_levels`."""
        # The command line splits at commas, which also separate `qkv:25,gate-up:9`.
        return ",".join(self.recomputation)

    def shard_size(self, strategy: str) -> int | None:
        """Return the number of ranks of a shard group, for a strategy on a mesh, else None.

        Raises:
            ValueError: a group that does not divide the ranks.
        """
        entry = get_strategy(strategy)
        if not entry.takes_mesh:
            return None
        _, ranks = self.fleet()
        devices_per_node = self.machine().network.devices_per_node
        return sharding_group(entry, ranks, devices_per_node, self.shard_group)

    def offered(self) -> list[Layout]:
        """Return the layouts that were asked for, else all that model, batch and cluster can take.

        The latter have 1, 2, 4 or 8 ranks along each axis. A user's model is not shared among
        ranks: it has 1 rank along each.
        """
        if self.layouts:
            return [Layout.parse(text) for text in self.layouts]
        # 1, 2, 4, 8
        powers = [2**k for k in range(WIDEST.bit_length())] if self.factory is None else [1]
        # Without a pipeline the schedule does not matter, so there is one entry for it.
        pipelines = [(1, "1f1b"), *product(powers[1:], ("1f1b", "interleaved"))]
        layouts = [
            Layout(ranks, context, tensor, schedule=schedule)
            for (ranks, schedule), context, tensor in product(pipelines, powers, powers)
        ]
        return [layout for layout in layouts if mismatch(self, layout) is None]

    @property
    def factory(self) -> str | None:
        """The name of a user's factory, if the model is one."""
        return self.model if ":" in self.model else None

    def shape(self) -> ModelConfig | None:
        """Return the preset with its context replaced, or None for a user's model.

        Raises:
            ValueError: an unknown preset, a name of another form, or a context for a user's model.
        """
        if self.factory is None:
            return super().shape()
        check_name(self.factory)
        idle = [
            each.name for each in fields(ModelChanges) if getattr(self, each.name) != each.default
        ]
        if idle:
            raise ValueError(
                f"--{idle[0].replace('_', '-')} is of the lab's Transformer, and --model "
                f"{self.model} decides it itself"
            )
        return None

    def num_parameters(self) -> int:
        """Return the number of trainable parameters."""
        shape = self.shape()
        return num_parameters(self.factory) if shape is None else shape.num_parameters

    def fleet(self) -> tuple[GPUSpec, int]:
        """Return the device, and the number of them."""
        if self.cluster is not None:
            hosts = cluster(self.cluster)
            return hosts.gpu, hosts.gpus
        name, _, count = self.device.partition(":")
        # 0 devices are a mistake, and isdigit would accept them.
        if (count and not count.isdigit()) or count == "0":
            raise ValueError(f"devices {self.device!r}: give a name and a number, such as h100:64")
        return by_alias(name), int(count or 1)

    def gpu(self) -> GPUSpec:
        """Return the device's datasheet."""
        return self.fleet()[0]

    def usable_bytes(self) -> float:
        """Return the bytes of a GPU's memory that a plan may use."""
        return USABLE * self.gpu().hbm_bytes

    def place(self) -> str:
        """Return GPU and links, or the cluster, in words."""
        if self.cluster is not None:
            return self.cluster
        nodes = f"{self.between} between nodes of {self.devices_per_node}"
        return f"{self.gpu().name} ({self.link}, {nodes})"


def mismatch(config: PlanConfig, layout: Layout) -> str | None:
    """Return why the devices cannot share this model and batch in this layout. None if they can."""
    _, count = config.fleet()
    nodes = config.machine().network.devices_per_node
    # The batch is shared among groups of ranks, each of which holds one model.
    if count % layout.ranks or config.batch % (count // layout.ranks):
        return (
            f"{count} devices, {layout.ranks} to a model, do not divide a batch of {config.batch}"
        )
    if layout.ranks == 1:
        # One rank per model has nothing to share, so all further conditions hold.
        return None
    if layout.tensor > 1 and config.optimizer == "muon":
        return "Muon steps whole matrices, and ranks that share them have parts"
    if layout.pipeline > 1 and count // layout.pipeline < nodes:
        return f"{layout.pipeline} stages of {count} devices are less than a node of {nodes} each"
    if layout.tensor > min(nodes, count):
        return f"{layout.tensor} ranks that share matrices do not fit a node of {nodes} devices"
    shape = config.shape()
    if layout.pipeline > 1 and shape.tie_embeddings:
        return "the head shares the embedding's matrix, which is on another stage"
    if shape.num_layers % stages_of(layout):
        return f"{shape.num_layers} blocks cannot be split into {stages_of(layout)} equal stages"
    # A pipeline takes sequences in equal micro-batches, a multiple of its ranks.
    if config.batch // (count // layout.ranks) % layout.pipeline:
        sequences = config.batch * layout.ranks // count
        return f"{sequences} sequences are not a multiple of {layout.pipeline} ranks"
    # One layer on the meta device has all kinds of splits, and costs no memory.
    for split in TransformerLM(replace(shape, num_layers=1), device="meta").splits().values():
        uneven = [size for size in split.sizes if size % layout.tensor]
        if uneven:
            return f"{layout.tensor} ranks cannot share {uneven[0]} {split.what} evenly"
    # Ranks that share a sequence take its chunks in pairs, from both ends.
    chunks = 2 * layout.context if layout.context > 1 else 1
    # Each rank's chunks are again split among the ranks that share its matrices.
    shares = chunks * layout.tensor
    if shape.context_length % shares:
        return f"sequences of {shape.context_length} tokens are not a multiple of {shares}"
    heads = shape.kv_heads // layout.tensor
    if layout.attention == "ulysses" and heads % layout.context:
        return f"{layout.context} ranks cannot share {heads} heads of keys evenly"
    return None


def place_of(records: Records) -> str:
    """Return GPU and links, or the cluster, of some rows in words."""
    return PlanConfig.of(records[0].config).place()
