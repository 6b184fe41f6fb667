"""One step of a model under a strategy, ready to be timed, profiled or examined.

A `Trial` has no clock. `step_timing.py` times several of them in interleaved rounds, and
`reference.py` says whether results are right.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.bench.task import BATCHES, examined, refusal, shared_batches
from distlab.bench.variant import BenchOptions, Variant
from distlab.comm import RankContext, collectives
from distlab.measure import CollectiveRecorder, is_out_of_memory
from distlab.measure.trace.capture import Phases, compiled_calls, profile_steps
from distlab.parallel import Layout
from distlab.parallel.layout import DATA_PARALLEL
from distlab.precision import DTYPES
from distlab.train.build import build_training
from distlab.train.memory_budget import settled
from distlab.train.scaler import LossScaler
from distlab.train.step import (
    Loss,
    TrainStep,
    loss_function,
    mean_loss,
    split,
    under_autocast,
)

Batch = tuple[Tensor, Tensor]
Mark = Callable[[str], None]
MODES = ("inference", "forward", "forward_backward", "step")
# Small, because hundreds of steps on the same few batches must not let the loss run away.
LEARNING_RATE = 1e-5


class CompiledRun(NamedTuple):
    """The compiled graphs of one step.

    Attributes:
        calls: number of compiled graphs that ran.
        parts: smallest number that runs in a compiled step: compiled modules × micro-batches.
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
    """A model under a strategy with its optimizer and data.

    It runs a training step, or parts of one, from a forward without gradients to the whole. The
    code that times it passes in `mark`.

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
        self.context = context
        self.options = options
        self.shape = options.model()
        self._name = variant.name
        self._parts = variant.micro_batches
        task = options.task()
        is_users_model = options.factory is not None
        if is_users_model:
            source = task.build(options.seed, context.device)
        else:
            source = self.shape
        self.module, self.model, self.optimizer = build_training(
            source,
            variant.strategy,
            context.group,
            variant.optimizer_cls,
            {"lr": LEARNING_RATE, **variant.optimizer_options},
            seed=options.seed,
            device=context.device,
            compile=options.compile,
            checkpointing=settled(options.planned(variant.strategy.name), context),
            compute_dtype=DTYPES[options.dtype],
            bucket_size_mb=variant.bucket_size_mb,
            shard_size=variant.shard_size,
            layout=variant.layout,
        )
        if not is_users_model:
            self._loss = loss_function(self.shape, variant.layout)
        elif self.model.casts_parameters:
            # The strategy casts parameters, and a user's inputs have a dtype of their own.
            self._loss = under_autocast(task.loss_fn, context.device, DTYPES[options.dtype])
        else:
            self._loss = task.loss_fn
        self._scaler = LossScaler() if scaled else None
        self._train = TrainStep(
            self.model,
            self.optimizer,
            self._loss_of_step,
            scaler=self._scaler,
            context=context,
            mark=self._mark_of_step,
        )
        # On the device before anything is timed, so that a step contains no copy of data.
        self._batches = synthetic_batches(context, options, variant.layout)
        self._calls = 0
        self._has_run_out_of_memory = False
        self._mark: Mark = _no_mark
        self.last_loss: Tensor | None = None

    def __call__(self, mode: str = "step", mark: Mark | None = None) -> None:
        """Run one of `MODES` on the next batch.

        `mark` is called with `forward`, `backward` (with synchronisation) and `optimizer` as each
        ends. A pipeline alternates forward and backward, which then all count as backward.
        """
        self._mark = mark or _no_mark
        # The same few batches in turn: their content does not change the time, and new ones would
        # have to be copied.
        batch = self._batches[self._calls % len(self._batches)]
        self._calls += 1
        try:
            if mode == "step":
                self.last_loss = self._train(split(batch, self._parts))
            else:
                self._run_part(mode, batch)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._finish_without_memory(error)
            raise

    def _finish_without_memory(self, error: BaseException) -> None:
        """Complete the collectives of a step in which this rank ran out of memory.

        Ranks that had room wait in backward for the collectives of this one, until the timeout.
        """
        if not self._has_run_out_of_memory:
            why = str(error).split(". ")[0]
            print(
                f"[rank {self.context.rank}] no memory left in a step of {self._name}: {why}",
                file=sys.stderr,
                flush=True,
            )
        self._has_run_out_of_memory = True
        # Sends zeros for the gradients that this rank does not have, which the other ranks wait
        # for.
        self.model.finish_gradient_synchronization()

    def _run_part(self, mode: str, batch: Batch) -> None:
        """Run any mode but the full step."""
        with torch.no_grad() if mode == "inference" else nullcontext():
            self.model.zero_grad(set_to_none=True)
            loss = self.forward(batch)
        self._mark("forward")
        if mode == "forward_backward":
            # Scaling is part of what fp16 costs, and keeps small gradients from becoming 0.
            scaled = loss if self._scaler is None else loss * self._scaler.scale
            scaled.backward()
            self.model.finish_gradient_synchronization()
            self._mark("backward")
        self.last_loss = loss.detach()

    def forward(self, batch: Batch | None = None) -> Tensor:
        """Return the loss of a batch, by default the first."""
        with self.model.autocast():
            loss = self._loss(self.model, self._batches[0] if batch is None else batch)
        return mean_loss(loss)

    def _loss_of_step(self, model: nn.Module, batch: Batch) -> Loss:
        loss = self._loss(model, batch)
        if self.model.pipeline is None:
            self._mark("forward")
        return loss

    def _mark_of_step(self, phase: str) -> None:
        # `TrainStep` says `forward_backward`, of which `_loss_of_step` has marked the forward.
        self._mark(phase.removeprefix("forward_"))

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
        modules = 0
        for module in self.model.modules():
            modules += "_orig_mod" in module._modules  # torch.compile's wrapper of a module
        seen = compiled_calls(partial(self, mode), self.settle)
        ran = seen.regions
        if self.options.compile == "blocks" and seen.lookups > seen.regions:
            # Our blocks have no graph breaks, so a frame without a graph is a block that ran eager.
            ran = 0
        runs = collectives.gather_objects(
            CompiledRun(ran, modules * self._parts), self.context.group
        )
        # A rank that ran eager makes the others wait, so the worst rank says what was measured.
        return min(runs, key=lambda run: run.calls / max(run.parts, 1))

    def profile(self, path: Path, steps: int, *, warmup: int = 1) -> None:
        """Write the profiler's trace of a few steps of this rank to `path`."""

        def marked_step() -> None:
            # A new object for each step: it opens the named ranges by which the trace is divided.
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
        # Ranks leave here together, so that the next measurement does not contain the wait for a
        # slow one.
        dist.barrier(self.context.group)

    def close(self) -> None:
        """Unhook and free everything here.

        Hooks and wrappers form reference cycles, and the garbage collector must not run during the
        next measurement.
        """
        self.model.close(restore=False)
        # The references first, then the collector: cycles of hooks would keep the memory until it
        # runs by chance.
        del self.model, self.module, self.optimizer, self._train, self._batches
        gc.collect()


def _no_mark(phase: str) -> None:
    """Ignore the end of a phase."""


def synthetic_batches(
    context: RankContext, options: BenchOptions, layout: Layout = DATA_PARALLEL
) -> list[Any]:
    """Return a few batches of this rank, on its device."""
    task = options.task()
    axes = layout.axes(context.group)
    return [shared_batches(task, axes, context, step)[0] for step in range(BATCHES)]


def refusals(
    options: BenchOptions, rows: Sequence[Variant], context: RankContext
) -> dict[str, str]:
    """Return row → why its strategy cannot train the user's model, in a sentence.

    It tries one step of each row. Call it on every rank. Rows of the lab's Transformer are not
    refused.
    """
    if options.factory is None:
        return {}
    unused = examined(options.factory, options.task(), context, options.seed)
    found = {}
    for row in rows:
        reason = refusal(row.strategy, unused)
        if reason is None:
            reason = _failure_of_a_step(options, row, context)
        # All ranks must leave out the same rows, or their collectives would not match.
        reasons = collectives.gather_objects(reason, context.group)
        given = [each for each in reasons if each is not None]
        if given:
            found[row.name] = given[0]
    return found


def _failure_of_a_step(options: BenchOptions, row: Variant, context: RankContext) -> str | None:
    """Return the first line of what a step raises. None if it works or is out of memory.

    What it says is the same on every rank: it is about the model's structure and dtypes.
    """
    try:
        with closing(Trial(context, options, row)) as trial:
            trial()
    except Exception as error:
        if is_out_of_memory(error):
            return None
        lines = str(error).splitlines() or [type(error).__name__]
        return f"{row.strategy.name} cannot train it: {lines[0]}"
    return None
