"""The question of a plan: a model, a batch and GPUs, and the layouts in which they can share it."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from distlab.bench.task import check_name, num_parameters
from distlab.experiment import option
from distlab.hardware import GPUSpec, by_alias, cluster
from distlab.model import ModelConfig, TransformerLM
from distlab.model.config import RECOMPUTATION as KNOWN
from distlab.model.config import ModelChanges
from distlab.parallel import Layout, get_strategy
from distlab.simulate.choices import RECOMPUTATION, STRATEGIES
from distlab.simulate.estimate import USABLE, MachineOptions
from distlab.train.memory_budget import stages_of
from distlab.train.step import OPTIMIZERS

WIDEST = 8  # ranks along an axis that is offered


@dataclass(frozen=True)
class PlanConfig(MachineOptions):
    """The question.

    Raises ValueError for a batch that the devices cannot divide, with the nearest that they can.
    """

    batch: int = option(512, "sequences per step, over all devices", least=1)
    device: str = option("h100:64", "name and number of GPUs, such as h100:64", flag="--devices")
    tokens: float = option(1e11, "tokens to train on", above=0)
    days: float | None = option(None, "days that training may take", above=0)
    strategies: tuple[str, ...] = option(STRATEGIES, "strategies to consider", choices=STRATEGIES)
    optimizer: str = option(
        "adamw", "adamw, or muon for matrices of blocks", choices=tuple(OPTIMIZERS)
    )
    recomputation: tuple[str, ...] = option(
        RECOMPUTATION, "recomputation to consider", choices=KNOWN
    )
    layouts: tuple[str, ...] = option(
        (), "layouts to consider, such as tp2 or tp8,cp2 with + for the comma [all that fit]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _, count = self.fleet()
        if self.layouts and self.factory is not None:
            raise ValueError(
                "--layouts: ranks share the lab's Transformer; with a model of your own leave them out"
            )
        if self.optimizer != "adamw" and self.factory is not None:
            raise ValueError(
                f"--optimizer {self.optimizer}: a model of your own is planned with AdamW: leave it out"
            )
        for text in self.layouts:
            if reason := mismatch(self, Layout.parse(text)):
                raise ValueError(f"layout {text or 'of one rank'}: {reason}")
        if self.offered():
            return
        if self.batch < count:
            raise ValueError(
                f"a batch of {self.batch} sequences leaves some of {count} devices without one; the nearest choices: "
                f"--batch {count}, or {max(1, self.batch)} devices"
            )
        near = max(1, round(self.batch / count)) * count
        raise ValueError(
            f"{count} devices do not divide a batch of {self.batch}; the nearest is --batch {near}"
        )

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for what a cluster decides, and what a model of one's own has not."""
        super().check_given(given)
        if ":" not in given.get("model", ""):
            return
        if "recomputation" in given:
            raise ValueError(
                f"--recomputation is of the lab's Transformer, and --model {given['model']} decides it itself: leave "
                "it out"
            )
        meshes = [name for name in given.get("strategies", ()) if get_strategy(name).takes_mesh]
        if meshes:
            raise ValueError(
                f"--strategies {meshes[0]}: a model of your own is planned without a mesh: choose among "
                f"{', '.join(name for name in STRATEGIES if not get_strategy(name).takes_mesh)}"
            )

    def offered(self) -> list[Layout]:
        """Return the layouts that were asked for, or those that model, batch and cluster can take.

        Their axes are powers of two. A further axis is one more factor here.
        """
        if self.layouts:
            return [Layout.parse(text) for text in self.layouts]
        powers = [2**k for k in range(WIDEST.bit_length())] if self.factory is None else [1]
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
        """The preset, with its context replaced; None for a user's model.

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
                f"--{idle[0].replace('_', '-')} is of the lab's Transformer, and --model {self.model} decides it itself"
            )
        return None

    def num_parameters(self) -> int:
        """Trainable ones."""
        shape = self.shape()
        return num_parameters(self.factory) if shape is None else shape.num_parameters

    def fleet(self) -> tuple[GPUSpec, int]:
        """The device and how many."""
        if self.cluster is not None:
            hosts = cluster(self.cluster)
            return hosts.gpu, hosts.gpus
        name, _, count = self.device.partition(":")
        if (count and not count.isdigit()) or count == "0":
            raise ValueError(f"devices {self.device!r}: give a name and a number, such as h100:64")
        return by_alias(name), int(count or 1)

    def gpu(self) -> GPUSpec:
        """The device's datasheet."""
        return self.fleet()[0]

    def usable_bytes(self) -> float:
        """Bytes of a GPU's memory that a plan may use."""
        return USABLE * self.gpu().hbm_bytes

    def place(self) -> str:
        """GPU and links, or the cluster, in words."""
        links = f"{self.gpu().name} ({self.link}, {self.between} between nodes of {self.devices_per_node})"
        return self.cluster or links


def mismatch(config: PlanConfig, layout: Layout) -> str | None:
    """Return why the devices cannot share this model and batch in this layout. None if they can."""
    _, count = config.fleet()
    nodes = config.machine().network.devices_per_node
    if count % layout.ranks or config.batch % (count // layout.ranks):
        return (
            f"{count} devices, {layout.ranks} to a model, do not divide a batch of {config.batch}"
        )
    if layout.ranks == 1:
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
    if config.batch // (count // layout.ranks) % layout.pipeline:
        return f"{config.batch * layout.ranks // count} sequences are not a multiple of {layout.pipeline} ranks"
    for split in TransformerLM(replace(shape, num_layers=1), device="meta").splits().values():
        uneven = [size for size in split.sizes if size % layout.tensor]
        if uneven:
            return f"{layout.tensor} ranks cannot share {uneven[0]} {split.what} evenly"
    chunks = 2 * layout.context if layout.context > 1 else 1
    if shape.context_length % (chunks * layout.tensor):
        return f"sequences of {shape.context_length} tokens are not a multiple of {chunks * layout.tensor}"
    if layout.attention == "ulysses" and (shape.kv_heads // layout.tensor) % layout.context:
        return f"{layout.context} ranks cannot share {shape.kv_heads // layout.tensor} heads of keys evenly"
    return None
