"""One step of model, strategy and data, timed in parts or against other strategies in rounds.

A 3.4 B model with its optimizer does not fit a GPU once per strategy, and timing one strategy after
the other lets the machine's clocks drift between them. So rounds are interleaved: in each, every
variant is attached once. Attaching makes the model anew, from the same seed and directly on the
device (a second or less): strategies that shard parameters or optimizer state keep none of what
another left, and the peak of memory is each one's own. The same bench also answers what a timing
must not stand without: what was sent, and what the profiler saw. Whether the result is right is
`reference`'s to say.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.bench.task import (
    BATCHES,
    Task,
    examined,
    num_parameters,
    own_task,
    refusal,
)
from distlab.comm import RankContext, collectives
from distlab.measure import (
    CollectiveRecorder,
    PhaseTimer,
    is_out_of_memory,
    peak_memory,
    percentile_metrics,
    slowest_rank,
)
from distlab.measure.rounds import interleave, rotated
from distlab.measure.trace.capture import Phases, compiled_calls, profile_steps
from distlab.model.config import OPS_CHOICES, ModelConfig, ModelOptions, preset
from distlab.model.transformer import TransformerLM
from distlab.options import SEED, option
from distlab.parallel import Layout, Strategy, get_strategy
from distlab.parallel.layout import DATA_PARALLEL, Axes
from distlab.precision import DTYPES
from distlab.train.build import Training, build_training
from distlab.train.data import SyntheticTokens
from distlab.train.memory_budget import PlannedStep, require, settled
from distlab.train.scaler import LossScaler
from distlab.train.step import TrainStep, loss_function, loss_in_head, split, under_autocast

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]
Inspect = Callable[["Variant", "Trial"], None]
MODES = ("inference", "forward", "forward_backward", "step")
PHASES = ("forward", "backward", "forward_backward", "optimizer", "step")


@dataclass(frozen=True)
class Variant:
    """A strategy with its bucket size, as one row of a table.

    Args:
        name: name of the row: the strategy's, with the bucket size appended if there are several.
        strategy: strategy that wraps the model.
        bucket_size_mb: MiB per bucket. Ignored by strategies without buckets.
        shard_size: ranks in a shard group, or None for those of a host. Ignored by strategies
            without a mesh.
        options: options of the model, if they differ from the bench's.
        layout: sizes of the groups of ranks that share the model. Such ranks have the sequences of
            all of them.
        micro_batches: number of parts of a step's batch, for a pipeline.
        optimizer_cls, optimizer_options: class of the optimizer, and its keyword arguments.
    """

    name: str
    strategy: Strategy
    bucket_size_mb: float | None = 25.0
    shard_size: int | None = None
    options: BenchOptions | None = None
    layout: Layout = DATA_PARALLEL
    micro_batches: int = 1
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"fused": True})

    def build(
        self,
        source: ModelConfig | nn.Module,
        group: dist.ProcessGroup,
        *optimizer: Any,
        **more: Any,
    ) -> Training:
        """Call `build_training` with this row's strategy, bucket and shard sizes and layout."""
        return build_training(
            source,
            self.strategy,
            group,
            *optimizer,
            bucket_size_mb=self.bucket_size_mb,
            shard_size=self.shard_size,
            layout=self.layout,
            **more,
        )


def variants(
    strategies: Sequence[str],
    bucket_sizes_mb: Sequence[float | None],
    shard_size: int | None = None,
    layouts: Sequence[str] = (),
    micro_batches: int = 1,
) -> list[Variant]:
    """Return every strategy by name. One with buckets has a row per bucket size, as `bucketed-100`.

    After them comes each strategy that synchronizes, under each layout that it takes, as
    `fsdp-tp2`. A row with a pipeline has `micro_batches` micro-batches.

    Raises:
        ValueError: an unknown strategy.
    """
    rows = []
    for strategy in map(get_strategy, strategies):
        sizes = bucket_sizes_mb if strategy.has_buckets else bucket_sizes_mb[:1]
        for size in sizes:
            label = "unbounded" if size is None else f"{size:g}"
            name = f"{strategy.name}-{label}" if len(sizes) > 1 else strategy.name
            rows.append(Variant(name, strategy, size, shard_size))
    return rows + [
        replace(
            row,
            name=f"{row.name}-{layout}",
            layout=layout,
            micro_batches=micro_batches if layout.pipeline > 1 else 1,
        )
        for layout in map(Layout.parse, layouts)
        for row in rows
        if row.strategy.synchronizes and row.strategy.refusal(layout) is None
    ]


@dataclass(frozen=True)
class BenchOptions(ModelOptions):
    """The model and the data that a benchmark steps.

    Raises ValueError for a value that is not allowed.
    """

    factory: ClassVar[str | None] = None  # of a user's model, see `OwnModel`
    ops: str = option(
        "torch",
        "operations of the model: torch, or triton for this lab's kernels",
        choices=OPS_CHOICES,
    )
    batch: int = option(4, "sequences per rank", least=1)
    seed: int = option(0, "seed of parameters and data", **SEED)

    def task(self) -> Task:
        """Return the training task: the Transformer on synthetic tokens, or the user's model.

        Raises:
            ValueError: a factory that fails or returns something else, see `distlab.bench.task`.
        """
        if self.factory is not None:
            return own_task(self.factory, self.batch, self.seed)
        return synthetic_task(self.model(), self.batch, self.seed)

    def refusals(self, context: RankContext, rows: Sequence[Variant]) -> dict[str, str]:
        """Row → why its strategy refuses the user's model, in a sentence; call it on every rank."""
        if self.factory is None:
            return {}
        found, unused = {}, examined(self.factory, self.task(), context, self.seed)
        for row in rows:
            reason = refusal(row.strategy, unused)
            if reason is None:
                try:
                    with closing(Trial(context, self, row)) as trial:
                        trial()
                except Exception as error:
                    # alike on every rank: it is about the model's structure and dtypes
                    if not is_out_of_memory(error):
                        said = (str(error).splitlines() or [type(error).__name__])[0]
                        reason = f"{row.strategy.name} cannot train it: {said}"
            reason = next(filter(None, collectives.gather_objects(reason, context.group)), None)
            if reason is not None:
                found[row.name] = reason
        return found

    def planned(self, strategy: str = "local", mode: str = "step", **more: Any) -> PlannedStep:
        """Return the needs of a step under this strategy, or of a part of one.

        Args:
            more: fields to replace.
        """
        return replace(
            PlannedStep(
                self.model(),
                self.batch,
                strategy,
                self.dtype,
                checkpointing=self.checkpointing,
                compiled=self.compile != "off",
                mode=mode,
            ),
            **more,
        )

    def facts(self, context: RankContext) -> dict[str, Any]:
        """Return the facts about model and ranks that a record holds in addition to the options."""
        model = self.model()
        sizes = {"num_parameters": model.num_parameters, "context": model.context_length}
        if self.factory is not None:
            sizes = {
                "num_parameters": num_parameters(self.factory),
                "context": None,
                "size": self.factory,
            }
        return sizes | {"world_size": context.world_size, "backend": context.backend}

    def workbench(self, context: RankContext, rows: Sequence[Variant]) -> Workbench:
        """Return the workbench that times these rows. Call it on every rank.

        Raises:
            ValueError: a strategy that needs a GPU, without one.
            MemoryError: none of them fits a GPU, or one of them not this machine.
        """
        planned = [
            self.planned(
                row.strategy.name,
                shard_size=row.shard_size,
                batch=-(-(row.options or self).batch * row.layout.ranks // row.micro_batches),
                micro_batches=row.micro_batches,
                layout=row.layout,
            )
            for row in rows
        ]
        if self.factory is not None:
            # nobody knows what it takes
            planned = [replace(plan, model=preset("tiny"), batch=1) for plan in planned]
        require(planned, context.device, context, some=context.device.type == "cuda")
        return Workbench(context, self)


class CompiledRun(NamedTuple):
    """The compiled graphs of one step.

    Attributes:
        calls: number of compiled graphs that ran.
        parts: number that runs at least in a compiled step: compiled modules × micro-batches.
    """

    calls: int
    parts: int

    def metrics(self) -> dict[str, int | bool]:
        """Return the fields for a record. `ran_eager` is True if not all code was compiled."""
        return {
            "compiled_calls": self.calls,
            "compiled_parts": self.parts,
            "ran_eager": self.calls < self.parts,
        }


class Trial:
    """A model under a strategy with its optimizer and data, to time, to profile or to examine.

    It runs a training step, or parts of one, from a forward without gradients to the whole. It has
    no clock: the code that times it passes in `mark`.

    Args:
        context: context of this rank.
        options: options of the model, and the dtype of the computation with fp32 parameters.
        variant: strategy with its settings.
        scaled: True to scale the loss, for fp16.

    Attributes:
        module: model, neither compiled nor wrapped.
        model: model under its strategy.
        optimizer: optimizer of the variant. Its state exists after the first full step.
        last_loss: loss of the last call, 0-dim and detached.

    Raises:
        ValueError: operations that cannot run here (`distlab.model.get_ops`).
    """

    def __init__(
        self, context: RankContext, options: BenchOptions, variant: Variant, *, scaled: bool = False
    ) -> None:
        self.context, self.options, self.shape = context, options, options.model()
        self._name, self._parts = variant.name, variant.micro_batches
        task = options.task()
        # A small rate: hundreds of steps on the same few batches must not let the loss run away.
        self.module, self.model, self.optimizer = variant.build(
            self.shape if options.factory is None else task.build(options.seed, context.device),
            context.group,
            variant.optimizer_cls,
            {"lr": 1e-5, **variant.optimizer_options},
            seed=options.seed,
            device=context.device,
            compile=options.compile,
            checkpointing=settled(options.planned(variant.strategy.name), context),
            compute_dtype=DTYPES[options.dtype],
        )
        self._loss = (
            task.loss_fn
            if options.factory is not None
            else loss_function(self.shape, variant.layout)
        )
        # a user's inputs have a dtype of their own
        if options.factory is not None and self.model.casts_parameters:
            self._loss = under_autocast(task.loss_fn, context.device, DTYPES[options.dtype])
        self._scaler = LossScaler() if scaled else None
        self._train = TrainStep(
            self.model,
            self.optimizer,
            self._loss_of_step,
            scaler=self._scaler,
            context=context,
            mark=lambda phase: self._mark(phase.removeprefix("forward_")),
        )
        self._batches, self._calls = synthetic_batches(context, options, variant.layout), 0
        self._starved = False
        self.last_loss: Tensor | None = None

    def __call__(
        self, mode: str = "step", mark: Callable[[str], None] = lambda phase: None
    ) -> None:
        """Run one of `MODES` on the next batch.

        `mark` is called with `forward`, `backward` (with synchronisation) and `optimizer` as each
        ends. A pipeline alternates forward and backward, which then all count as backward.
        """
        self._mark = mark
        batch = self._batches[self._calls % len(self._batches)]
        self._calls += 1
        try:
            if mode == "step":
                self.last_loss = self._train(split(batch, self._parts))
            else:
                self._part(mode, batch)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                # Where others had room and a strategy has collectives left in backward, they wait
                # until the timeout.
                if not self._starved:
                    why = str(error).split(". ")[0]
                    print(
                        f"[rank {self.context.rank}] no memory left in a step of {self._name}: {why}",
                        file=sys.stderr,
                        flush=True,
                    )
                self._starved = True
                # complete what was begun: all ranks have sent the same
                self.model.finish_gradient_synchronization()
            raise

    def _part(self, mode: str, batch: Batch) -> None:
        """Any mode but the full step."""
        with torch.no_grad() if mode == "inference" else nullcontext():
            self.model.zero_grad(set_to_none=True)
            loss = self.forward(batch)
        self._mark("forward")
        if mode == "forward_backward":
            (loss if self._scaler is None else loss * self._scaler.scale).backward()
            self.model.finish_gradient_synchronization()
            self._mark("backward")
        self.last_loss = loss.detach()

    def forward(self, batch: Batch | None = None) -> Tensor:
        """Return the loss of a batch, by default the first."""
        with self.model.autocast():
            return self._loss(self.model, self._batches[0] if batch is None else batch)

    def _loss_of_step(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = self._loss(model, batch)
        if self.model.pipeline is None:
            self._mark("forward")
        return loss

    def record_collectives(self) -> CollectiveRecorder:
        """Record what one step sends.

        Three steps run before it, because torch DDP agrees on new buckets in its third.
        """
        for _ in range(3):
            self()
        with CollectiveRecorder() as recorder:
            self()
        return recorder

    def compiled_calls(self, mode: str = "step") -> CompiledRun:
        """Run one more call and count its compiled graphs.

        Returns the counts of the rank on which the fewest of its graphs ran.
        """
        modules = sum("_orig_mod" in module._modules for module in self.model.modules())
        seen = compiled_calls(partial(self, mode), self.settle)
        ran = seen.regions
        if self.options.compile == "blocks" and seen.lookups > seen.regions:
            # our blocks have no graph breaks, so a frame without a graph is a block that ran eager
            ran = 0
        runs = collectives.gather_objects(
            CompiledRun(ran, modules * self._parts), self.context.group
        )
        return min(runs, key=lambda run: run.calls / max(run.parts, 1))

    def profile(self, path: Path, steps: int, *, warmup: int = 1) -> None:
        """Write the profiler's trace of a few steps of this rank to `path`."""

        def marked_step() -> None:
            phases = Phases()
            with phases.step():
                self("step", phases.mark)

        profile_steps(
            marked_step,
            steps=steps,
            warmup=warmup,
            queued=True,
            operators=False,
            path=path,
            rank=self.context.rank,
            world_size=self.context.world_size,
            device=self.context.device,
            finish=self.settle,
        )

    def settle(self) -> None:
        """Wait on every rank for what the last step left in flight, for example parameters."""
        self.model.synchronize()
        dist.barrier(self.context.group)

    def close(self) -> None:
        """Unhook and free everything here.

        Hooks and wrappers form reference cycles, and the garbage collector must not run during the
        next measurement.
        """
        self.model.close(restore=False)
        del self.model, self.module, self.optimizer, self._train, self._batches
        gc.collect()


def synthetic_task(shape: ModelConfig, batch: int, seed: int = 0) -> Task:
    """Return the Transformer on synthetic tokens, with `batch` sequences per rank and step."""

    def batches(rank: int, step: int, device: torch.device) -> list[Batch]:
        sizes = (shape.vocab_size, batch, shape.context_length)
        return [SyntheticTokens(*sizes, seed=seed, rank=rank, device=device).batch(step)]

    return Task(
        lambda seed, device: TransformerLM(shape, device=device, seed=seed), batches, loss_in_head
    )


def synthetic_batches(
    context: RankContext, options: BenchOptions, layout: Layout = DATA_PARALLEL
) -> list[Batch]:
    """Return a few batches of this rank, on its device."""
    task, axes = options.task(), layout.axes(context.group)
    return [shared_batches(task, axes, context, step)[0] for step in range(BATCHES)]


def shared_batches(task: Task, axes: Axes, context: RankContext, step: int) -> list[Any]:
    """Return a rank's micro-batches of a step.

    Ranks that share a model have those of all of them, or parts of these.
    """
    ranks = axes.layout.ranks
    if ranks == 1:  # perhaps without a group
        return task.batches(context.rank, step, context.device)
    first = axes.batch_rank * ranks
    members = (task.batches(member, step, context.device) for member in range(first, first + ranks))
    return [
        axes.share(tuple(map(torch.cat, zip(*batches, strict=True))))
        for batches in zip(*members, strict=True)
    ]


@dataclass
class Timing:
    """Samples in ms, each that of the slowest rank, in the order in which they were taken.

    `phases` maps `forward`, `backward` (synchronisation included), both together as
    `forward_backward`, `optimizer` and `step` to equally long lists. `compiled` holds what ran
    compiled in each round, counted after its timing; it is empty for an eager model.
    """

    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    peak_alloc_bytes: int | None = None
    out_of_memory: bool = False
    compiled: list[CompiledRun] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        """Return percentiles of every phase, the peak of memory and the samples of the step.

        A variant that did not fit has `OOM`.
        """
        if self.out_of_memory:
            return {"step_p50_ms": "OOM"}
        times = {}
        for phase, samples in self.phases.items():
            times |= percentile_metrics(phase, samples)
        compiled = min(self.compiled).metrics() if self.compiled else {}
        times |= {
            "peak_alloc_bytes": self.peak_alloc_bytes,
            "step_samples_ms": [*self.phases["step"]],
        }
        return times | compiled


@dataclass(frozen=True)
class Workbench:
    """Variants of these options, attached one after the other with their data, and timed."""

    context: RankContext
    options: BenchOptions

    def attached(self, variant: Variant) -> AbstractContextManager[Trial]:
        """Build and wrap the model, make its optimizer, yield the trial and free it at the end."""
        return closing(Trial(self.context, variant.options or self.options, variant))

    def time_rounds(
        self,
        rows: Sequence[Variant],
        *,
        rounds: int,
        warmup: int,
        steps: int,
        inspect: Inspect,
        progress: Callable[[str], None] = lambda text: None,
        ended: Callable[[dict[str, Timing]], None] = lambda timings: None,
    ) -> dict[str, Timing]:
        """Time `rounds` × `steps` steps of every variant, interleaved.

        Sample i of all variants form a pair.

        A variant that does not fit in memory on some rank is marked so on all, and left out from
        then on. `inspect(variant, attached)` is called after each block of timed steps, on every
        rank, and `ended` after each round, with the times so far.
        """
        timings = {variant.name: Timing() for variant in rows}
        # Dynamo would compile a second shape of a block with dynamic sizes, and the ninth not at
        # all.
        shapes = {(row.options, row.layout, row.micro_batches) for row in rows}
        compiles_anew = len(shapes) > 1 and any(
            (row.options or self.options).compile != "off" for row in rows
        )
        calls = {}
        for variant in rows:
            timing = timings[variant.name]
            calls[variant.name] = partial(
                self._time_block, variant, warmup, steps, timing, inspect, compiles_anew
            )
        interleave(calls, rounds, order=rotated, progress=progress, ended=lambda: ended(timings))
        return timings

    def _time_block(
        self,
        variant: Variant,
        warmup: int,
        steps: int,
        timing: Timing,
        inspect: Inspect,
        compiles_anew: bool,
    ) -> None:
        if timing.out_of_memory:
            return
        if compiles_anew:
            torch.compiler.reset()
        timer = PhaseTimer(self.context.device)

        def timed(step: Trial) -> bool:
            timer.start()
            step("step", timer.mark)
            return True

        with ExitStack() as stack:
            timing.out_of_memory = True  # until it has passed
            with peak_memory(self.context.device) as memory:
                step = self._fits(lambda: stack.enter_context(self.attached(variant)))
                if step is None or not all(self._fits(partial(timed, step)) for _ in range(warmup)):
                    return  # the second is the first with the optimizer's state
                dist.barrier(self.context.group)
                timer.clear()
                if not self._fits(partial(timed, step), steps):
                    return
                samples = timer.steps()
                outside = step.model.bytes_outside_allocator  # symmetric memory, say
            if step.options.compile != "off":
                timing.compiled.append(step.compiled_calls())
            if not self._fits(lambda: inspect(variant, step) or True):
                return  # its memory is not the step's
            timing.out_of_memory = False
        if memory.peak_alloc_bytes is not None:
            timing.peak_alloc_bytes = max(
                memory.peak_alloc_bytes + outside, timing.peak_alloc_bytes or 0
            )
        self._add_samples(timing, samples)

    def _add_samples(self, timing: Timing, samples: list[dict[str, float]]) -> None:
        for sample in samples:
            sample["forward_backward"] = sample.setdefault("forward", 0.0) + sample["backward"]
        for phase in PHASES:
            mine = [sample[phase] for sample in samples]
            timing.phases[phase].extend(slowest_rank(mine, self.context.group, self.context.device))

    def profile(self, variant: Variant, path: Path, steps: int) -> bool:
        """Write the profiler's trace of a few steps of this rank to `path`.

        Returns False on every rank if memory runs out.
        """

        def traced() -> bool:
            with self.attached(variant) as step:
                step()
                step.profile(path, steps, warmup=2 if self.context.device.type == "cuda" else 1)
            return True

        return self._fits(traced) is not None

    def _fits(self, action: Callable[[], T], times: int = 1) -> T | None:
        return collectives.if_it_fits(action, self.context.device, self.context.group, times)
