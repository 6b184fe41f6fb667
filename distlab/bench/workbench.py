"""Time strategies against each other: attach, warm up, time, detach, in rounds.

A 3.4 B model with its optimizer does not fit a GPU once per strategy, and timing one strategy after the other
lets the machine's drift decide. So in each round every variant is attached in turn. Attaching makes the model
anew, from the same seed and directly on the device (a second or less): strategies that shard parameters or
optimizer state keep none of what another left, and the peak of memory is each one's own. The same bench also
answers what a timing must not stand without: what was sent, and what the profiler saw. Whether the result is right is
`reference`'s to say.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import RankContext, collectives
from distlab.measure.clock import PhaseTimer, slowest_rank
from distlab.measure.collectives import CollectiveRecorder
from distlab.measure.memory import peak_memory
from distlab.measure.trace.capture import OptimizerRange, annotate_forward, profile_steps
from distlab.measure.validity import is_out_of_memory
from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.parallel import ParallelModel, Strategy, get_strategy
from distlab.train.data import SyntheticTokens
from distlab.train.step import TrainStep, loss_function

T = TypeVar("T")
PHASES = ("forward_backward", "optimizer", "step")


@dataclass(frozen=True)
class Variant:
    """A strategy with its bucket size, as one row of a table.

    Args:
        name: of the row; the strategy's, with the bucket size appended where several are compared.
        strategy: how the model is wrapped.
        bucket_size_mb: MiB; ignored by strategies without buckets.
    """

    name: str
    strategy: Strategy
    bucket_size_mb: float | None = 25.0

    def build(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        optimizer_cls: type[torch.optim.Optimizer],
        optimizer_options: Mapping[str, Any] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> tuple[ParallelModel, torch.optim.Optimizer]:
        """The strategy's model and optimizer, with this row's bucket size."""
        return self.strategy.build(
            module,
            group,
            optimizer_cls,
            optimizer_options,
            compute_dtype=compute_dtype,
            bucket_size_mb=self.bucket_size_mb,
        )


def variants(strategies: Sequence[str], bucket_sizes_mb: Sequence[float | None]) -> list[Variant]:
    """Every strategy by name, those with buckets once per bucket size (`bucketed-100` where several are given).

    Raises:
        ValueError: an unknown strategy.
    """
    rows = []
    for strategy in map(get_strategy, strategies):
        sizes = bucket_sizes_mb if strategy.has_buckets else bucket_sizes_mb[:1]
        for size in sizes:
            label = "unbounded" if size is None else f"{size:g}"
            name = f"{strategy.name}-{label}" if len(sizes) > 1 else strategy.name
            rows.append(Variant(name, strategy, size))
    return rows


@dataclass
class Timing:
    """Samples in ms, each that of the slowest rank, in the order in which they were taken.

    `phases` maps `forward_backward` (synchronisation included), `optimizer` and `step` to equally long lists.
    """

    phases: dict[str, list[float]]
    peak_alloc_bytes: int | None = None
    out_of_memory: bool = False

    @staticmethod
    def empty() -> "Timing":
        """No samples yet, in every phase."""
        return Timing({phase: [] for phase in PHASES})


class Workbench:
    """One kind of model, AdamW, synthetic data, and the variants that are attached in turn.

    Args:
        context: this rank.
        config: the model.
        batch_size: sequences per rank.
        compute_dtype: type of the computation over fp32 parameters, by autocast, or by the wrapper where it casts
            the parameters itself; None for fp32.
        seed: of parameters and data.
    """

    def __init__(
        self,
        context: RankContext,
        config: ModelConfig,
        *,
        batch_size: int,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
    ):
        self.context = context
        self.config = config
        self.compute_dtype = compute_dtype
        self.seed = seed
        data = SyntheticTokens(
            config.vocab_size,
            batch_size,
            config.context_length,
            seed=seed,
            rank=context.rank,
            device=context.device,
        )
        self._batches = [data.batch(step) for step in range(4)]

    @contextmanager
    def attached(self, variant: Variant, mark: Callable[[str], None] | None = None) -> Iterator["_Attached"]:
        """Build, wrap and optimize the model; yields a function that trains one step; frees it all at the end."""
        model = TransformerLM(self.config, device=self.context.device, seed=self.seed)
        # A small rate: hundreds of steps on the same few batches must not let the loss run away.
        options = {"lr": 1e-5, "fused": True}
        wrapper, optimizer = variant.build(
            model, self.context.group, torch.optim.AdamW, options, self.compute_dtype
        )
        train = TrainStep(wrapper, optimizer, loss_function(self.config.ops), mark=mark)
        del model, wrapper, optimizer
        attached = _Attached(train, self._batches, self.context.group)
        del train
        try:
            yield attached
        finally:
            attached.detach()

    def time_rounds(
        self,
        rows: Sequence[Variant],
        *,
        rounds: int,
        warmup: int,
        steps: int,
        progress: Callable[[str], None] = lambda text: None,
        inspect: Callable[[Variant, "_Attached"], None] | None = None,
    ) -> dict[str, Timing]:
        """Time `rounds` × `steps` steps of every variant, interleaved; sample i of all variants form a pair.

        A variant that does not fit in memory on some rank is marked so on all, and left out from then on.
        `inspect(variant, attached)` is called after each block of timed steps, on every rank.
        """
        timings = {variant.name: Timing.empty() for variant in rows}
        for round_number in range(rounds):
            shift = round_number % len(rows)  # nobody always runs first after a pause
            for variant in [*rows[shift:], *rows[:shift]]:
                if not timings[variant.name].out_of_memory:
                    progress(f"round {round_number + 1}/{rounds}: {variant.name}")
                    self._time_block(variant, warmup, steps, timings[variant.name], inspect)
        return timings

    def time_in_turn(
        self,
        rows: Sequence[Variant],
        *,
        warmup: int,
        steps: int,
        progress: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Timing]:
        """Keep all variants attached at once and let them step in turn, one step each: the finest interleaving.

        Drift then hits two variants within one step's time of each other. Needs the memory of all of them
        together, so it suits small models; `peak_alloc_bytes` is not any one's and stays None.
        """
        timings = {variant.name: Timing.empty() for variant in rows}
        with ExitStack() as stack:
            timers = {variant.name: PhaseTimer(self.context.device) for variant in rows}
            attached = {
                variant.name: stack.enter_context(self.attached(variant, mark=timers[variant.name].mark))
                for variant in rows
            }
            for number in range(warmup + steps):
                progress(f"step {number + 1}/{warmup + steps} of each variant in turn")
                if number == warmup:
                    for timer in timers.values():
                        timer.clear()
                for name, step in attached.items():
                    dist.barrier(self.context.group)
                    timers[name].start()
                    step()
            for name, timer in timers.items():
                self._add_samples(timings[name], timer.steps())
        return timings

    def _time_block(
        self,
        variant: Variant,
        warmup: int,
        steps: int,
        timing: Timing,
        inspect: Callable[[Variant, "_Attached"], None] | None = None,
    ) -> None:
        timer = PhaseTimer(self.context.device)
        with ExitStack() as stack:
            with peak_memory(self.context.device) as memory:
                step = self._if_it_fits(lambda: stack.enter_context(self.attached(variant, mark=timer.mark)))
                timer.start()
                if step is None or self._if_it_fits(lambda: step() or True) is None:
                    timing.out_of_memory = True
                    return
                for number in range(1, warmup + steps):
                    if number == warmup:
                        dist.barrier(self.context.group)
                        timer.clear()
                    timer.start()
                    step()
                samples = timer.steps()
                outside = step.model.bytes_outside_allocator  # symmetric memory, say
            if inspect is not None:  # its memory is not the step's
                inspect(variant, step)
        if memory.peak_alloc_bytes is not None:
            timing.peak_alloc_bytes = _largest(memory.peak_alloc_bytes + outside, timing.peak_alloc_bytes)
        self._add_samples(timing, samples)

    def _add_samples(self, timing: Timing, samples: list[dict[str, float]]) -> None:
        for phase in PHASES:
            mine = [sample[phase] for sample in samples]
            timing.phases[phase].extend(slowest_rank(mine, self.context.group, self.context.device))

    def _if_it_fits(self, action: Callable[[], T]) -> T | None:
        """The action's result, or None on every rank if some rank ran out of memory in it."""
        result, fits = None, True
        try:
            result = action()
            if self.context.device.type == "cuda":
                torch.cuda.synchronize(self.context.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        return result if collectives.all_ranks_agree(fits, self.context.device, self.context.group) else None

    def record_collectives(self, variant: Variant) -> CollectiveRecorder:
        """What one step sends, once the strategy has settled (torch DDP agrees on new buckets in its third)."""
        with self.attached(variant) as step:
            for _ in range(3):
                step()
            with CollectiveRecorder() as recorder:
                step()
        return recorder

    def profile(self, variant: Variant, path: Path, steps: int) -> None:
        """Write the profiler's trace of a few steps of this rank to `path`."""
        optimizer = OptimizerRange()
        with self.attached(variant, mark=optimizer.mark) as step:
            step()
            annotate_forward(step.model)
            profile_steps(
                step,
                steps=steps,
                warmup=2 if self.context.device.type == "cuda" else 1,
                queued=True,
                path=path,
                rank=self.context.rank,
                world_size=self.context.world_size,
                device=self.context.device,
                finish=step.settle,
            )


class _Attached:
    """A variant's model, wrapper and optimizer: calling it trains one step on the next of a few batches."""

    def __init__(
        self,
        train: TrainStep,
        batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        group: dist.ProcessGroup,
    ):
        self._train: TrainStep | None = train
        self._group = group
        self._batches = batches
        self._steps_done = 0

    def __call__(self) -> None:
        try:
            self._train([self._batches[self._steps_done % len(self._batches)]])
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):  # complete what was begun, so that all ranks have sent the same
                self._train.model.finish_gradient_synchronization()
            raise
        self._steps_done += 1

    @property
    def model(self) -> ParallelModel:
        """The wrapper."""
        return self._train.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._train.optimizer

    def settle(self) -> None:
        """Wait for what the last step left in flight, on every rank (parameters on their way, say)."""
        self._train.model.synchronize()
        dist.barrier(self._group)

    def detach(self) -> None:
        """Unhook and free everything here: hooks and wrappers form reference cycles, and the collector must not
        come for them in the middle of somebody else's measurement."""
        self._train.model.close(restore=False)
        self._train = None
        gc.collect()


def _largest(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
