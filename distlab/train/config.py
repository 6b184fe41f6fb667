"""Options of a training run, checked once, and the ones that a resumed run must repeat."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distlab.model.config import ModelConfig, ModelOptions
from distlab.options import SEED, Options, did_you_mean, option
from distlab.parallel import STRATEGIES, Layout, check_buckets, check_reshard, check_shard_size
from distlab.train.build import check_layout, check_shared_model
from distlab.train.schedule import WarmupCosine
from distlab.train.step import OPTIMIZERS
from distlab.train.token_files import kind_of

TRAINABLE = tuple(name for name, strategy in STRATEGIES.items() if strategy.trains)
# Options that decide the sequence of losses, in addition to the model and the data.
LASTING = (
    "batch",
    "seed",
    "lr",
    "lr_floor",
    "warmup",
    "weight_decay",
    "beta2",
    "clip",
    "dtype",
    "dropout",
)


@dataclass(frozen=True)
class DataConfig(Options):
    """Source of the tokens.

    Raises:
        ValueError: validation data without training data, or a token dtype without a .bin file.
    """

    data: str | None = option(
        None, ".bin or .npy tokens, or a text file (its bytes); default: synthetic tokens"
    )
    val_data: str | None = option(None, "validation file (default: the last twentieth of --data)")
    token_dtype: str | None = option(None, "dtype of a .bin file: uint16 (default) or uint32")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_data is not None and self.data is None:
            raise ValueError(
                f"--val-data {self.val_data} needs --data: synthetic tokens have their own "
                "validation"
            )
        given = [path for path in (self.data, self.val_data) if path is not None]
        has_bin = any(Path(path).suffix.lower() == ".bin" for path in given)
        if self.token_dtype is not None and not has_bin:
            raise ValueError(
                f"--token-dtype {self.token_dtype} is of a .bin: a .npy says its own, and a text's "
                "tokens are its bytes"
            )

    @property
    def is_bytes(self) -> bool:
        """True if the bytes of the file are the tokens.

        Raises:
            OSError, ValueError: as in `kind_of`.
        """
        return self.data is not None and kind_of(self.data) == "text"

    def check_files(self) -> None:
        """Raise OSError or ValueError for files that hold no tokens, see `kind_of`."""
        for path in (self.data, self.val_data):
            if path is not None:
                kind_of(path)


@dataclass(frozen=True)
class TrainConfig(ModelOptions):
    """Options of one run. The batch counts the sequences of all ranks.

    So a run means the same at every world size.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    dropout: float = option(0.0, "probability of dropping an element", minimum=0)
    strategy: str = option("bucketed", f"strategy, one of {', '.join(TRAINABLE)}")
    bucket_size_mb: float = option(25.0, "MiB per bucket, for strategies with buckets")
    shard_size: int | None = option(
        None, "ranks that share a model, for strategies with a mesh [a host's]", minimum=1
    )
    reshard: str = option(
        "unit",
        "time at which gathered parameters are given back: after each use, or once a step",
        choices=("unit", "step"),
    )
    layout: str = option(
        "",
        "ranks that share a model: tp2 (matrices), cp2 or cp2-ring (sequences), pp2 (blocks), "
        "tp2,cp2 [none]",
    )
    stages: tuple[int, ...] = option(
        (), "blocks of each stage of --layout pp2 [equally many]", minimum=1, kind=int
    )
    batch: int = option(8, "sequences per step over all ranks", minimum=1)
    accumulate: int = option(
        1, "micro-batches per step; gradients are synchronised once", minimum=1
    )
    steps: int = option(100, "optimizer steps", minimum=1)
    lr: float = option(1e-3, "largest learning rate", above=0)
    lr_floor: float = option(0.1, "last learning rate as a fraction of --lr", minimum=0, maximum=1)
    warmup: int = option(10, "steps until the largest learning rate", minimum=0)
    optimizer: str = option(
        "adamw",
        "adamw, or muon for matrices of blocks and AdamW for the rest",
        choices=tuple(OPTIMIZERS),
    )
    weight_decay: float = option(0.1, "weight decay of the optimizer", minimum=0)
    beta2: float = option(0.95, "beta2 of AdamW", minimum=0)
    clip: float = option(1.0, "largest gradient norm, 0 for none", minimum=0)
    seed: int = option(0, "seed of parameters, data order and dropout", **SEED)
    validate_every: int = option(0, "steps between validations, 0 for one at the end", minimum=0)
    validate_sequences: int = option(64, "sequences per validation", minimum=1, maximum=10**6)
    checkpoint_every: int = option(50, "steps between checkpoints, 0 for one at the end", minimum=0)
    keep: int = option(2, "number of complete checkpoints to keep", minimum=1)
    synchronous_checkpoints: bool = option(False, "write checkpoints within the step, not after it")

    def __post_init__(self) -> None:
        if self.strategy not in TRAINABLE:
            allowed = []
            for name in TRAINABLE:
                allowed.append(f"{name} (GPUs only)" if STRATEGIES[name].needs_gpu else name)
            hint = did_you_mean(self.strategy, TRAINABLE)
            raise ValueError(
                f"strategy {self.strategy!r} cannot train{hint}; allowed: {', '.join(allowed)}"
            )
        super().__post_init__()
        check_shard_size(self.shard_size, [self.strategy])
        check_reshard(self.reshard, self.strategy)
        layout = self.ranks_of_model
        refusal = self._refusal(layout)
        if refusal is not None:
            raise ValueError(refusal)
        check_layout(layout, self.compile, self.accumulate)
        check_shared_model(self.model(), layout)
        if layout.tensor > 1 and self.optimizer == "muon":
            raise ValueError(
                f"--optimizer muon steps whole matrices, and with layout {layout} ranks have parts "
                "of them: take adamw, or a layout without tp"
            )
        if not self.beta2 < 1:
            raise ValueError(f"beta2={self.beta2}: must be at least 0 and below 1")

    @classmethod
    def check_given(cls, given: dict[str, Any]) -> None:
        """Raise ValueError for a bucket size given with a strategy without buckets."""
        check_buckets(given, [given.get("strategy", cls.strategy)])

    def _refusal(self, layout: Layout) -> str | None:
        """Return why the strategy cannot train in this layout, in a sentence. None if it can."""
        strategy = STRATEGIES[self.strategy]
        refusal = strategy.refusal(layout)
        if refusal is None and strategy.is_peer and layout.tensor > 1:
            # torch cuts a matrix for tensor parallelism and again for its shards, along the same
            # dimension. Our checkpoints hold one cut of a parameter, and the run would be lost at
            # its first.
            return (
                f"{self.strategy} with layout {layout} can be timed (distlab run ddp_bench) and "
                "not trained: checkpoints cannot hold its parameters. Take fsdp, or leave the "
                "layout out"
            )
        return refusal

    @property
    def ranks_of_model(self) -> Layout:
        """Sizes of the groups of ranks that share the model."""
        return Layout.parse(self.layout, self.stages)

    def model(self) -> ModelConfig:
        """Return the preset with this run's overrides."""
        return replace(super().model(), dropout=self.dropout)

    def schedule(self) -> WarmupCosine:
        """Return the learning rate over the steps of this run."""
        return WarmupCosine(self.lr, self.steps, min(self.warmup, self.steps), self.lr_floor)

    def identity(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the facts that a checkpoint must share with the run that continues it."""
        # Strategy, ranks and accumulation are not in it: they change the speed and not the sequence
        # of losses but for rounding.
        lasting = {name: getattr(self, name) for name in LASTING}
        model = {name: value for name, value in asdict(self.model()).items() if value is not None}
        return {"model": model, "data": data, **lasting}


def refuse_other_run(saved: Any, mine: dict[str, Any], where: str) -> None:
    """Raise ValueError with every option that differs.

    Args:
        saved: identity in the checkpoint, as `TrainConfig.identity` made it.
        mine: identity of this run.
        where: path of the checkpoint, for the message.
    """
    if not isinstance(saved, dict):
        raise ValueError(f"{where} does not say which run it belongs to")
    there = _texts(saved)
    here = _texts(mine)
    differences = []
    for name in sorted(there.keys() | here.keys()):
        theirs = there.get(name, "missing")
        ours = here.get(name, "missing")
        if theirs != ours:
            differences.append(f"{name} is {theirs} there and {ours} here")
    if differences:
        raise ValueError(
            f"{where} belongs to another run: {'; '.join(differences)}. Repeat its options, or "
            "pass another --name, or --fresh to start over"
        )


def _texts(identity: dict[str, Any]) -> dict[str, str]:
    """Return dotted name → value as text. JSON keeps floats exact, and a bool is not a number."""
    texts = {}
    for name, value in identity.items():
        if isinstance(value, dict) and value:
            for key, entry in value.items():
                # `repr` tells 1 from 1.0 and from True.
                texts[f"{name}.{key}"] = repr(entry)
        else:
            texts[name] = repr(value)
    return texts
