"""One model in one configuration, ready to be stepped: what benchmarks time, profile and take apart.

A trial knows how to run each part of a training step, from a forward without gradients to the full step, and how far
its numbers are from the plainest model of the same weights. It holds no clock: whoever times it hands in `mark`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import RankContext
from distlab.measure.validity import is_out_of_memory
from distlab.model.config import COMPILE_CHOICES as COMPILE
from distlab.model.config import DTYPES, ModelConfig, checkpoint_groups, preset
from distlab.model.transformer import TransformerLM
from distlab.parallel import get_strategy
from distlab.parallel.shard import local_part
from distlab.train.data import SyntheticTokens
from distlab.train.scaler import LossScaler
from distlab.train.step import TrainStep, compiled, loss_function, next_token_loss

MODES = ("inference", "forward", "forward_backward", "step")
BATCHES = 4  # different ones, used in turn


@dataclass(frozen=True)
class TrialConfig:
    """What is run.

    Args:
        size: model preset.
        batch: sequences per rank.
        context: tokens per sequence; None for the preset's.
        dtype: `fp32`, or `bf16` or `fp16` computation over fp32 parameters; fp16 with a scaled loss.
        compile: `off`, the whole `model` as one graph, or the `blocks` one by one.
        attention: `naive`, `sdpa` or `flash`.
        ops: `torch` or `triton`.
        checkpointing: `none`, `block` or `every-K`.
        strategy: a name of the registry.
        bucket_size_mb: MiB, for strategies with buckets.
        seed: of parameters and data.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    size: str = "tiny"
    batch: int = 4
    context: int | None = None
    dtype: str = "fp32"
    compile: str = "off"
    attention: str = "sdpa"
    ops: str = "torch"
    checkpointing: str = "none"
    strategy: str = "local"
    bucket_size_mb: float = 25.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", tuple(DTYPES)), ("compile", COMPILE)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for name in ("batch", "bucket_size_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        checkpoint_groups(self.checkpointing)
        get_strategy(self.strategy)
        self.model()

    def model(self) -> ModelConfig:
        """The model's shape and operations."""
        return preset(self.size, context_length=self.context, attention=self.attention, ops=self.ops)

    def recorded(self, context: RankContext) -> dict[str, Any]:
        """What a record's configuration holds of it, on these ranks."""
        model = self.model()
        known = {"context": model.context_length, "num_parameters": model.num_parameters}
        return asdict(self) | known | {"world_size": context.world_size, "backend": context.backend}


class Trial:
    """A model, wrapped by its strategy, with its optimizer and data.

    Attributes:
        module: the model, neither compiled nor wrapped.
        model: the wrapper.
        optimizer: AdamW; its state comes with the first full step.

    Raises:
        ValueError: operations that cannot run here (`distlab.model.get_ops`).
    """

    def __init__(self, context: RankContext, config: TrialConfig) -> None:
        self.context, self.config = context, config
        self.shape = config.model()
        device = context.device
        self.module = TransformerLM(
            self.shape, device=device, seed=config.seed, checkpoint_blocks=config.checkpointing
        )
        data = SyntheticTokens(
            self.shape.vocab_size, config.batch, self.shape.context_length,
            seed=config.seed, rank=context.rank, device=device,
        )  # fmt: skip
        self._batches = [data.batch(step) for step in range(BATCHES)]
        self._calls = 0
        self._loss = loss_function(config.ops)
        self.compiled = compiled(self.module, config.compile)
        # A small rate: hundreds of steps on the same few batches must not let the loss run away.
        self.model, self.optimizer = get_strategy(config.strategy).build(
            self.compiled, context.group, torch.optim.AdamW, {"lr": 1e-5, "fused": True},
            compute_dtype=DTYPES[config.dtype], bucket_size_mb=config.bucket_size_mb,
        )  # fmt: skip
        self._scaler = LossScaler() if config.dtype == "fp16" else None
        self.last_loss: Tensor | None = None  # 0-dim, detached

    def __call__(self, mode: str, mark: Callable[[str], None] = lambda phase: None) -> None:
        """Run one of `MODES` on the next batch; `mark` is told `forward`, `backward`, `optimizer` as each ends."""
        batch = self._batches[self._calls % BATCHES]
        self._calls += 1
        try:
            (self._full_step if mode == "step" else partial(self._part, mode))(batch, mark)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):  # complete what was begun, so that all ranks have sent the same
                self.model.finish_gradient_synchronization()
            raise

    def _part(self, mode: str, batch: tuple[Tensor, Tensor], mark: Callable[[str], None]) -> None:
        """Any mode but the full step."""
        with torch.no_grad() if mode == "inference" else nullcontext():
            self.model.zero_grad(set_to_none=True)
            loss = self.forward(batch)
        mark("forward")
        if mode == "forward_backward":
            (loss if self._scaler is None else loss * self._scaler.scale).backward()
            self.model.finish_gradient_synchronization()
            mark("backward")
        self.last_loss = loss.detach()

    def forward(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The loss of a batch, by default the first."""
        with self.model.autocast():
            return self._loss(self.model, self._batches[0] if batch is None else batch)

    def _full_step(self, batch: tuple[Tensor, Tensor], mark: Callable[[str], None]) -> None:
        """`TrainStep`, whose phase of forward and backward is told apart where the loss is known."""

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = self._loss(model, batch)
            mark("forward")
            return loss

        train = TrainStep(
            self.model, self.optimizer, loss_fn,
            scaler=self._scaler, context=self.context,
            mark=lambda phase: mark("backward" if phase == "forward_backward" else phase),
        )  # fmt: skip
        self.last_loss = train([batch])

    def gradients(self) -> Iterator[Tensor]:
        """What this rank holds of them."""
        held = (shard.tensor.grad for shard in self.model.shards())
        yield from (local_part(gradient) for gradient in held if gradient is not None)

    def close(self) -> None:
        """Unhook and free everything."""
        self.model.close(restore=False)
        del self.model, self.module, self.compiled, self.optimizer, self._batches
        gc.collect()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def opened(context: RankContext, config: TrialConfig) -> Iterator[Trial]:
    """A trial that is closed at the end."""
    trial = Trial(context, config)
    try:
        yield trial
    finally:
        trial.close()


def errors_against_reference(context: RankContext, config: TrialConfig) -> dict[str, float]:
    """How far loss and gradients are from the plainest model: fp32, naive attention, torch's operations, eager.

    Same weights, same batch, in one process, before any strategy. The reference recomputes its blocks, so that naive
    attention needs the memory of one.

    Returns:
        `loss_rel_error` and `grad_rel_error`, ‖g − g_ref‖ / ‖g_ref‖ over all parameters.
    """
    shape = config.model()
    data = SyntheticTokens(
        shape.vocab_size, config.batch, shape.context_length,
        seed=config.seed, rank=context.rank, device=context.device,
    )  # fmt: skip
    batch = data.batch(0)
    plain = replace(shape, attention="naive", ops="torch")
    reference = TransformerLM(plain, device=context.device, seed=config.seed, checkpoint_blocks="block")
    suspect = TransformerLM(
        shape, device=context.device, seed=config.seed, checkpoint_blocks=config.checkpointing
    )
    expected = next_token_loss(reference, batch)
    expected.backward()
    scale = LossScaler().scale if config.dtype == "fp16" else 1.0
    dtype = DTYPES[config.dtype]
    with nullcontext() if dtype is None else torch.autocast(context.device.type, dtype=dtype):
        found = loss_function(config.ops)(compiled(suspect, config.compile), batch)
    (found * scale).backward()
    difference = norm = 0.0
    for mine, theirs in zip(suspect.parameters(), reference.parameters(), strict=True):
        difference += float(torch.linalg.vector_norm(mine.grad.double() / scale - theirs.grad.double())) ** 2
        norm += float(torch.linalg.vector_norm(theirs.grad.double())) ** 2
    return {
        "loss_rel_error": abs(found.item() - expected.item()) / abs(expected.item()),
        "grad_rel_error": (difference / norm) ** 0.5 if norm else float("nan"),
    }


def described(configs: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> str:
    """One line that says what several trials have in common, of their configurations as records hold them."""
    shared = {k: v for k, v in configs[0].items() if all(config.get(k) == v for config in configs)}
    parts = [str(shared.get("size", "several sizes"))]
    if "num_parameters" in shared:
        parts[0] += f" ({shared['num_parameters'] / 1e6:,.1f} M parameters)"
    parts += [f"{name} {shared[name]}" for name in ("batch", "context") if name in shared]
    parts += [str(shared[name]) for name in ("dtype", "strategy") if name in shared]
    parts += [
        f"{name} {shared[name]}"
        for name in ("attention", "ops", "compile", "checkpointing")
        if name in shared
    ]
    where = f"{shared.get('world_size', 1)} × {environment['device_name']}, torch {environment['torch']}"
    return f"{', '.join(parts)}; {where}"
