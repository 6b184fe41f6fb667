"""The training loop: resume, step, report one step late, validate, checkpoint, stop when asked.

    set the rate ─ batch ─ TrainStep ─ gathered metrics (of the step before) ─ checkpoint? ─
    validate? ─ stop?

Before a checkpoint the loop waits for the loss of the step itself. So no checkpoint holds weights
that a NaN has reached.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoint import train_state
from distlab.checkpoint.checkpointer import Checkpointer, Stored
from distlab.checkpoint.files import MARKER, Damaged
from distlab.checkpoint.lock import RunLock
from distlab.comm import RankContext, collectives
from distlab.parallel import Strategy, get_strategy
from distlab.precision import DTYPES
from distlab.train.build import build_training
from distlab.train.config import TrainConfig, refuse_other_run
from distlab.train.data import DataChanged, GlobalOrder, Sequences, is_unchanged, to_batch
from distlab.train.evaluate import validation_loss
from distlab.train.memory_budget import settled, training_step
from distlab.train.metrics import GatheredMetrics, NonFiniteLoss, StepMetrics
from distlab.train.scaler import LossScaler
from distlab.train.signals import StopSignals
from distlab.train.step import OPTIMIZERS, TrainStep, loss_function


@dataclass
class Outcome:
    """Result of a run.

    Attributes:
        first_step: number of steps that a checkpoint had done already.
        last_step: number of steps done now.
        stopped_by: number of the signal that ended it early, or None.
        validation: (steps done, loss in nats per token) of each validation.
    """

    first_step: int
    last_step: int
    stopped_by: int | None
    validation: list[tuple[int, float]]


class Trainer:
    """A run of training: model, strategy, optimizer, data order and checkpoints. Call `run()`.

    Args:
        config: options of the run.
        context: context of this rank.
        strategy: strategy in place of the one that `config` names.
        train: sequences to train on.
        validate: sequences to validate on. None for no validation.
        data_identity: data for JSON that a resumed run must find unchanged.
        folder: folder of checkpoints, None for none.
        lock: lock of the run's folder, on the rank that has it, see `Checkpointer`.
        report: function that is called on every rank with each finished step, one step late.
        progress: function that is called with a line now and then.

    Raises:
        ValueError: a batch that cannot be divided, or too little data for it.
    """

    def __init__(
        self,
        config: TrainConfig,
        context: RankContext,
        *,
        strategy: Strategy | None = None,
        train: Sequences,
        validate: Sequences | None = None,
        data_identity: dict[str, Any] | None = None,
        folder: Path | None = None,
        lock: RunLock | None = None,
        report: Callable[[StepMetrics], None] = lambda metrics: None,
        progress: Callable[[str], None] = lambda text: None,
    ):
        self.config = config
        self.context = context
        self.train = train
        self.validate = validate
        self.progress = progress
        self.strategy = strategy or get_strategy(config.strategy)

        # -- data ----------------------------------------------------------------------------------
        layout = config.ranks_of_model
        self.axes = layout.axes(context.group)
        self.order = GlobalOrder(
            train.count,
            batch=config.batch,
            rank=self.axes.batch_rank,
            # Ranks that share a model read the same sequences, so only the groups of them count.
            world_size=self.axes.batch_ranks,
            micro_batches=config.accumulate,
            seed=config.seed,
        )
        self.identity = config.identity(data_identity or {})

        # -- model, strategy, optimizer ------------------------------------------------------------
        self.schedule = config.schedule()
        self.scaler = LossScaler() if config.dtype == "fp16" else None
        # Dropout differs by rank. Parameters have a generator of their own.
        train_state.seed_rank(config.seed, context.rank)
        keeps = settled(training_step(config, context.world_size), context)
        if config.checkpointing == "auto":
            progress(f"checkpointing auto: blocks keep {keeps}")
        optimizer_cls, options = OPTIMIZERS[config.optimizer](config.ops)
        options |= {
            "lr": config.lr,
            "betas": (0.9, config.beta2),
            "weight_decay": config.weight_decay,
        }
        _, self.wrapper, self.optimizer = build_training(
            config.model(),
            self.strategy,
            context.group,
            optimizer_cls,
            options,
            seed=config.seed,
            device=context.device,
            checkpointing=keeps,
            compile=config.compile,
            compute_dtype=DTYPES[config.dtype],
            bucket_size_mb=config.bucket_size_mb,
            shard_size=config.shard_size,
            keep_gathered=config.reshard == "step",
            layout=layout,
        )
        self.train_step = TrainStep(
            self.wrapper,
            self.optimizer,
            loss_function(config.model(), layout),
            # Without clipping the norm is still computed: it shows a NaN one step before the loss.
            max_grad_norm=config.clip or float("inf"),
            scaler=self.scaler,
            context=context,
        )

        # -- metrics, checkpoints ------------------------------------------------------------------
        self.stop = StopSignals(answers=context.is_main)
        self.metrics = GatheredMetrics(context, self.stop, report)
        self.checkpoints = None
        if folder is not None:
            self.checkpoints = Checkpointer(
                folder,
                context,
                model=self.wrapper,
                keep=config.keep,
                asynchronous=not config.synchronous_checkpoints,
                # With a GPU the host has idle cores. Without one they compute the next step.
                threads=4 if context.device.type == "cuda" else 1,
                lock=lock,
                progress=progress,
            )
        self.step = 0  # number of optimizer steps done
        self._saving_ms = 0.0  # time of the last save, which the next step reports

    # -- resuming ----------------------------------------------------------------------------------

    def resume(self, stored: Stored | None = None) -> bool:
        """Continue from the newest usable checkpoint, or from this one.

        Returns:
            False if there is no checkpoint.

        Raises:
            ValueError: the checkpoint belongs to another run, model or format.
            CheckpointError: no checkpoint can be used.
        """
        if stored is None and self.checkpoints is not None:
            stored = self.checkpoints.newest()
        if stored is None:
            return False
        extra = stored.content["extra"]
        refuse_other_run(extra.get("identity"), self.identity, str(stored.path))
        has_steps = type(extra.get("steps")) is int and extra["steps"] > 0
        scaler_type = dict if self.scaler is not None else type(None)
        has_scaler = "scaler" in extra and isinstance(extra["scaler"], scaler_type)
        if not (has_steps and has_scaler):
            raise Damaged(
                f"{stored.path / MARKER} is not a marker of this program: 'steps' or 'scaler' is "
                "none"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(extra["scaler"])
        # After all checks: a checkpoint of another run must not have changed anything.
        self.checkpoints.load(stored, self.wrapper, self.optimizer)
        if stored.content["world_size"] <= self.context.rank:
            # The run had fewer ranks, so no generator was saved for this one. The step in the seed
            # keeps dropout from repeating what it drew at the beginning of the run.
            train_state.seed_rank(self.config.seed + stored.step, self.context.rank)
        self.step = stored.step
        if extra["steps"] != self.config.steps:
            self.progress(
                f"the run had {extra['steps']} steps and has {self.config.steps} now: the learning "
                "rate's schedule changes from here on"
            )
        return True

    # -- training ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train up to the last step, or until a signal stops the run. Then write a checkpoint.

        Raises:
            NonFiniteLoss: on every rank, with the step and rank. The last checkpoint is from before
                it.
            DataChanged: on every rank. The last checkpoint is of the last step that read the file
                as it was.
            CheckpointError: a checkpoint could not be written.
        """
        config = self.config
        outcome = Outcome(self.step, self.step, None, [])
        stores = self.checkpoints is not None
        try:
            with self.stop.caught():
                # Building and resuming are not part of the first step's time.
                self.metrics.restart_clock()
                while self.step < config.steps and outcome.stopped_by is None:
                    self.one_step()
                    is_last = self.step == config.steps
                    validates = is_last or _due(self.step, config.validate_every)
                    validates = validates and self.validate is not None
                    saves = is_last or _due(self.step, config.checkpoint_every)
                    saves = saves and stores
                    if validates or saves or is_last:
                        # A NaN of this step must be known before its weights are written.
                        self.metrics.settle()
                    if self.metrics.stopped_by is not None and not is_last:
                        outcome.stopped_by = self.metrics.stopped_by
                        self.metrics.settle()
                        saves = stores
                    if saves:  # saved before a validation, because that may fail
                        self.save()
                    if validates:
                        outcome.validation.append((self.step, self.validation_loss()))
                outcome.last_step = self.step
                if stores:
                    # A checkpoint is written while steps go on. The run is complete when the last
                    # one is on disk.
                    self.checkpoints.wait()
        except NonFiniteLoss as error:
            raise NonFiniteLoss(
                f"{error}; training stopped. {self._last_good()}. A smaller --lr, a longer "
                "--warmup or --clip may help"
            ) from None
        except DataChanged as error:
            self.metrics.settle()
            # Without a step of this process the checkpoint exists already.
            if stores and outcome.first_step < self.step:
                self.save()
            raise DataChanged(
                f"{error}; training stopped. {self._last_good()}. With the file as it was, the "
                "same command continues"
            ) from None
        finally:
            if stores:
                self.checkpoints.finish()
        return outcome

    def one_step(self) -> None:
        """Train one step, and report the one before.

        Raises:
            NonFiniteLoss: the step before had a loss that is not finite. Raised on every rank.
        """
        rate = self.schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        micro_batches = self._read_step()
        loss = self.train_step(micro_batches)
        # The metrics count steps done, the schedule counts from 0.
        self.step += 1
        # The norm of a skipped step is infinite. The loss scaler has dealt with it.
        skipped = self.train_step.last_step_skipped
        norm = None if skipped else self.train_step.grad_norm
        saving_ms = self._saving_ms
        self._saving_ms = 0.0
        self.metrics.note(self.step, loss, norm, lr=rate, checkpoint_ms=saving_ms)

    def _read_step(self) -> list[tuple[Tensor, Tensor]]:
        """Read this rank's micro-batches of the next step.

        Raises:
            DataChanged: the file has changed on some rank. Raised on every rank.
        """
        # Reading past the end of a file that became shorter kills the process by SIGBUS.
        is_whole = is_unchanged(self.train)
        rows = []
        if is_whole:
            for numbers in self.order.numbers(self.step):
                rows.append(self.train.rows(numbers))
        # On all ranks, before any of them goes into the step's collectives without data.
        self._refuse_changed(self.train, is_whole)
        return [self.axes.share(to_batch(each, self.context.device)) for each in rows]

    def save(self) -> None:
        """Begin a checkpoint of this step, whose loss must have been settled."""
        begin = time.perf_counter()
        extra = {
            "identity": self.identity,
            "steps": self.config.steps,
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }
        self.checkpoints.save(
            self.step, self.wrapper, self.optimizer, strategy=self.strategy.name, extra=extra
        )
        self._saving_ms = 1e3 * (time.perf_counter() - begin)

    def validation_loss(self) -> float:
        """Return the loss of the model in nats per token. Call it on every rank."""
        self._refuse_changed(self.validate)
        loss = validation_loss(
            self.wrapper,
            self.validate,
            self.context,
            axes=self.axes,
            sequences=self.config.validate_sequences,
            # As many sequences as a micro-batch of training, which is known to fit in memory.
            batch=max(1, self.config.batch // self.axes.batch_ranks // self.config.accumulate),
        )
        # Again: the file may have changed while it was read.
        self._refuse_changed(self.validate)
        self.metrics.restart_clock()
        return loss

    def _refuse_changed(self, data: Sequences, was_whole: bool = True) -> None:
        """Raise DataChanged on every rank if the file of `data` changed on any of them."""
        if data.file is None:
            return
        whole = was_whole and is_unchanged(data)
        if not collectives.all_ranks_agree(whole, torch.device("cpu"), self.metrics.group):
            raise DataChanged(f"{data.file[0]} was changed while this run read it")

    def _last_good(self) -> str:
        """Return a sentence about the last checkpoint, without a full stop."""
        if self.checkpoints is None:
            return "There is no checkpoint"
        self.checkpoints.wait()
        step = self.checkpoints.last_saved
        folder = self.checkpoints.folder.path
        if step is None:
            return f"No checkpoint was written before ({folder})"
        return f"The checkpoint of step {step} is good ({folder})"

    def close(self) -> None:
        """Detach the strategy's hooks, so that its memory can be freed, and free the groups."""
        self.metrics.close()
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.wrapper.close(restore=False)


def _due(step: int, every: int) -> bool:
    """Return True if an action that is repeated `every` steps follows this step. 0: never."""
    return every > 0 and step % every == 0
