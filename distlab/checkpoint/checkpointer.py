"""Save and resume training: asynchronously, at any world size, under any strategy.

    training   │ step 50 │ copy to the host │ step 51 │ step 52 │ …                │ step 100 │ …
    writer                                  │ files │ fsync │ marker │ rename │ prune │

`save()` queues copies into pinned host memory on the compute stream and returns. A thread waits for
them and writes. It communicates with the other ranks' threads in a separate gloo group. Ranks that
hold the same values write one part each. The next `save()` first waits for the previous one, and
raises on every rank if any rank failed.

Loading checks every file's checksum, and falls back to the previous checkpoint with a message that
names the damage. The contents of the files must agree with each other and with the model before
anything of the model is overwritten.
"""

import contextlib
import copy
import operator
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distlab.checkpoint import tensors, train_state
from distlab.checkpoint.files import (
    CheckpointError,
    CheckpointFolder,
    Damaged,
    OtherFormat,
    Stored,
    check_files,
)
from distlab.checkpoint.lock import LockLost, RunLock
from distlab.comm import RankContext, collectives
from distlab.parallel.local_optimizer import load_shards, optimizer_name
from distlab.parallel.model import ParallelModel
from distlab.parallel.shard import Shard, whole

__all__ = ["CheckpointError", "Checkpointer", "Stored"]

# Classes of errors that explain themselves in a sentence, and that other ranks can unpickle.
TOGETHER = (ValueError, CheckpointError, Damaged, OtherFormat)


class Checkpointer:
    """The checkpoints of one run. Every method must be called on every rank.

    Args:
        folder: folder of the checkpoints, on a file system that all machines share.
        context: context of this rank.
        keep: number of complete checkpoints to keep, at least one.
        asynchronous: True to write in a thread, False to write within `save()`.
        threads: number of threads that write and hash on each rank.
        lock: lock of the run's folder, on the rank that has it. It is checked before each write.
        progress: function that gets lines about checkpoints that are removed or not used.
        model: model that will be saved. If it is given, it is checked now and not at the first
            `save()`.

    Raises:
        ValueError: `keep` below one; or the model has a parameter or a buffer that a checkpoint
            cannot hold. All ranks raise it.
    """

    def __init__(
        self,
        folder: Path,
        context: RankContext,
        *,
        model: ParallelModel | None = None,
        keep: int = 2,
        asynchronous: bool = True,
        threads: int = 1,
        lock: RunLock | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must stay")
        self.folder = CheckpointFolder(folder)
        self.context = context
        self.lock = lock
        self.progress = progress
        self.keep = keep
        self.asynchronous = asynchronous
        self.threads = threads
        self.last_saved: int | None = None  # newest step whose checkpoint is known to be complete
        self._known_good: set[int] = set()  # steps whose checkpoints were written or checked here
        # A separate group, because collectives of training must not come between those of the
        # writer thread.
        timeout = timedelta(seconds=context.timeout_s)
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        # Memory of the copies, used again for each checkpoint.
        self._host = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if model is not None:
            self._on_all_ranks(lambda: train_state.refuse_unstorable_model(model))

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory that asynchronous checkpoints hold on this rank."""
        return self._host.nbytes

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: ParallelModel,
        optimizer: Optimizer,
        *,
        strategy: str,
        extra: Mapping[str, Any],
    ) -> None:
        """Begin to write the state after `step` steps.

        Args:
            step: number of optimizer steps done.
            model: wrapped model.
            optimizer: optimizer of its parameters.
            strategy: name of the strategy.
            extra: data that JSON gives back as it is, the same on every rank, such as the
                configuration and the loss scale.

        Raises:
            ValueError: a tensor, an option of the optimizer or a value in `extra` cannot be stored.
                The message names it. All ranks raise it before anything is written.
            CheckpointError: the previous checkpoint failed, on any rank. If not asynchronous, also
                if this one failed.
        """
        self.wait()
        model.sync_buffers()  # makes them equal on all ranks, because each rank writes a part
        step = operator.index(step)

        def prepare() -> tuple[list[Shard], dict[str, Any], Callable[[], None]]:
            groups = train_state.group_options(model, optimizer)
            content = {
                "world_size": self.context.world_size,
                "strategy": strategy,
                "torch": torch.__version__,
                "optimizer": optimizer_name(optimizer),
                "groups": train_state.storable_groups(groups),
                "extra": dict(extra),
            }
            train_state.refuse_unstorable(content["extra"])
            # A copy, because the thread reads it while training goes on, and the caller may change
            # `extra` meanwhile.
            content = copy.deepcopy(content)
            staged, ready = self._stage(self._portions(model, optimizer))
            return staged, content, ready

        # A value that cannot be stored raises here, on all ranks. If the thread of one rank raised
        # it, the threads of the other ranks would wait for that rank.
        staged, content, ready = self._on_all_ranks(prepare)
        self._thread = threading.Thread(
            target=self._write_behind, args=(step, staged, content, ready), daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            # The system refuses another thread. The other ranks wait for this rank's part, so write
            # it here.
            self._thread = None
            self._write_behind(step, staged, content, ready)
        if not self.asynchronous:
            self.wait()

    def _portions(self, model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
        """Return this rank's shards of the model, the optimizer and the random generators."""
        rank = self.context.rank
        held = train_state.model_state(model) + train_state.optimizer_state(model, optimizer)
        train_state.refuse_dtypes(held)
        shards = [shard.portion(rank, self.context.world_size) for shard in held]
        for kind, state in train_state.generators().items():
            shards.append(whole(f"rng/{rank}/{kind}", state))
        return shards

    def _stage(self, shards: Sequence[Shard]) -> tuple[list[Shard], Callable[[], None]]:
        """Queue copies of all shards to the host.

        Returns:
            The copies, and a function that waits until they are filled.
        """
        device = self.context.device
        sources = [shard.values for shard in shards]
        # Rounded up to 8 bytes, so that each copy begins at a whole element of any dtype.
        sizes = [-(-values.nbytes // 8) * 8 for values in sources]
        total = sum(sizes)
        if self._host.numel() < total:
            # Only pinned memory is copied to while the host goes on.
            self._host = host_memory(total, pinned=device.type == "cuda")
        places = self._host[:total].split(sizes)
        staged = []
        for shard, values, place in zip(shards, sources, places, strict=True):
            target = place[: values.nbytes].view(values.dtype)
            target.copy_(values, non_blocking=True)
            staged.append(replace(shard, tensor=target))
        if device.type != "cuda":
            return staged, lambda: None
        event = torch.cuda.Event()
        # Behind the copies on the compute stream. Kernels of the next step, which change the
        # parameters, come after them in that stream.
        event.record()
        return staged, event.synchronize

    def wait(self) -> None:
        """Wait until the last `save()` is complete.

        Raises:
            CheckpointError: it failed, on any rank. Earlier checkpoints are as they were.
            RuntimeError: another rank died meanwhile.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            raise failure

    def finish(self) -> None:
        """Wait for a write to end. Ignore whether it succeeds."""
        if self._thread is not None:
            self._thread.join(self.context.timeout_s)

    def close(self) -> None:
        """Call `finish` and free the group. After it nothing can be saved or loaded."""
        self.finish()
        still_writes = self._thread is not None and self._thread.is_alive()
        if self._group is not None and not still_writes:
            dist.destroy_process_group(self._group)
            self._group = None

    def _write_behind(
        self, step: int, shards: list[Shard], content: dict[str, Any], ready: Callable
    ) -> None:
        """Call `_write`, and keep its error for `wait()`. The thread runs this."""
        try:
            self._write(step, shards, content, ready)
        except BaseException as error:
            self._failure = error

    def _write(
        self, step: int, shards: list[Shard], content: dict[str, Any], ready: Callable
    ) -> None:
        """Write a checkpoint together with the other ranks, and delete old ones.

        Args:
            step: number of optimizer steps done.
            shards: copies of this rank's shards, on the host.
            content: fields of the marker, without the files and the tensors.
            ready: function that waits until the copies are filled.
        """
        folder = self.folder.temporary_path_of(step)

        def write_mine() -> tuple[dict[str, dict[str, Any]], tensors.Index]:
            if self.context.device.type == "cuda":
                torch.cuda.set_device(self.context.device)  # per thread
            ready()
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"{folder} is not visible here: use a file system that all machines share"
                )
            return tensors.write(folder, self.context.rank, shards, self.threads)

        def complete() -> None:
            content["files"] = {}
            for files, _ in written:
                content["files"] |= files
            content["tensors"] = tensors.merged([index for _, index in written])
            self._own_folder().commit(step, content)

        try:
            self._on_main(lambda: self._own_folder().begin(step))
            mine = self._on_all_ranks(write_mine)
            # Rank 0 needs the hashes of all files for the marker.
            written = collectives.gather_objects(mine, self._group)
            self._on_main(complete)
        except Exception as error:
            if self.context.is_main:
                # If the lock is lost, the temporary folder belongs to another run.
                with contextlib.suppress(LockLost):
                    shutil.rmtree(self._own_folder().temporary_path_of(step), ignore_errors=True)
            if not isinstance(error, (OSError, ValueError)):
                raise  # the error of a collective: another rank died
            last = "there is none before it"
            if self.last_saved is not None:
                last = f"step {self.last_saved} is intact"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written ({error}); {last}"
            ) from None
        self.last_saved = step
        self._known_good.add(step)
        # Only after the new checkpoint is complete, so that there is always one to resume from.
        self._on_main(lambda: self._own_folder().prune(self.keep, self._known_good))

    def _own_folder(self) -> CheckpointFolder:
        """Return the folder for writing.

        Raises:
            LockLost: another run has taken the folder.
        """
        if self.lock is not None:
            self.lock.check()
        return self.folder

    # -- loading -----------------------------------------------------------------------------------

    def newest(self) -> Stored | None:
        """Return the newest checkpoint that is whole and unaltered. None if the folder is empty.

        Newer checkpoints that are damaged are renamed, so that they are neither read again nor
        counted among the kept ones.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
            OtherFormat: another version of this program wrote the newest.
        """
        # Before any checkpoint is read: what is left under a temporary name is never one.
        removed = self._on_main(lambda: self._own_folder().clean())
        if removed:
            self.progress(f"removed what an interrupted write left: {', '.join(removed)}")
        rejected = {}  # step → its damage
        for step in self._on_main(self.folder.steps):
            try:
                stored = self.check(step)
            except Damaged as error:
                rejected[step] = str(error)
                continue
            # Renamed only now. If no checkpoint can be used, all keep their names, so that the next
            # start finds them and ends in the same way.
            for bad, problem in rejected.items():
                self._set_aside(bad, problem)
            return stored
        if rejected:
            raise CheckpointError(
                f"none of the {len(rejected)} checkpoints in {self.folder.path} can be used: "
                f"{'; '.join(rejected.values())}. Pass --fresh to start over"
            )
        return None

    def _set_aside(self, step: int, problem: str) -> None:
        aside = self._on_main(lambda: self._own_folder().set_aside(step))
        self.progress(
            f"checkpoint of step {step} is not used: {problem}; it is put aside as "
            f"{Path(aside).name}"
        )

    def check(self, step: int) -> Stored:
        """Read a checkpoint's marker and check all of its files. Each rank checks a share of them.

        Raises:
            Damaged, OtherFormat: see `CheckpointFolder.open`. All ranks raise the same error.
        """

        def checked() -> Stored:
            stored = self.folder.open(step)
            check_files(stored, self.context.rank, self.context.world_size)
            return stored

        stored = self._on_all_ranks(checked)
        self.last_saved = step
        self._known_good.add(step)
        return stored

    def load(self, stored: Stored, model: ParallelModel, optimizer: Optimizer) -> None:
        """Overwrite the model, the optimizer's state and this rank's random generators.

        Raises:
            ValueError: a checkpoint of another model or optimizer. The message lists the tensors
                that differ. Nothing is overwritten.
            Damaged: a NaN in the stored model. The model may be overwritten in part then.
            CheckpointError: reading failed, on any rank, or the files do not fit together. In the
                second case nothing is overwritten.
        """
        model.synchronize()
        model.sync_buffers()
        held = train_state.model_state(model)
        name = optimizer_name(optimizer)
        everything = model.of_all_stages(tensors.kinds_of(held))
        groups = self._on_all_ranks(lambda: train_state.group_options(model, optimizer))
        frozen = train_state.frozen_names(model)

        def checked() -> list[dict[str, Any]]:
            tensors.refuse_other_model(stored, everything)
            if stored.content["optimizer"] != name:
                raise ValueError(
                    f"{stored.path} holds the state of {stored.content['optimizer']}, not of {name}"
                )
            return train_state.stored_options(
                stored.content["groups"], groups, frozen, optimizer.defaults.keys()
            )

        options = self._on_all_ranks(checked)
        found = tensors.shapes_and_dtypes(stored)
        state, wanted = train_state.empty_optimizer_state(model, optimizer, found)
        # A rank that the checkpoint does not know finds no generators and keeps its own.
        prefix = f"rng/{self.context.rank}/"
        generators = {}
        for key, (shape, dtype) in found.items():
            if key.startswith(prefix):
                value = torch.empty(shape, dtype=dtype)
                generators[key.removeprefix(prefix)] = value
                wanted.append(whole(key, value))
        self._on_all_ranks(lambda: tensors.read(stored, [*held, *wanted]))
        load_shards(optimizer, options, state)
        model.shards_changed()
        self._on_all_ranks(lambda: train_state.restore_generators(generators))

    # -- ranks -------------------------------------------------------------------------------------

    def _on_all_ranks(self, action: Callable[[], Any]) -> Any:
        """Run `action` and return its result on this rank. If it raises on any rank, raise on all.

        An error of a class in `TOGETHER` is raised as it is. Any other error is raised as a
        CheckpointError that names the ranks on which it occurred.
        """
        result = None
        problem: Exception | str | None = None
        try:
            result = action()
        except Exception as error:
            # Every class of error is caught. A rank that left by an unforeseen one would let the
            # others wait until the group's timeout.
            if type(error) in TOGETHER:
                problem = error
            else:
                lines = str(error).splitlines()
                first_line = lines[0] if lines else ""
                problem = f"rank {self.context.rank}: {type(error).__name__}: {first_line}"
        gathered = collectives.gather_objects(problem, self._group)
        texts = []
        for problem in gathered:
            if isinstance(problem, Exception):
                raise problem
            if problem is not None:
                texts.append(problem)
        if texts:
            raise CheckpointError("; ".join(texts))
        return result

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 and return its result on every rank."""

        def on_this_rank() -> Any:
            return action() if self.context.is_main else None

        result = self._on_all_ranks(on_this_rank)
        return collectives.gather_objects(result, self._group)[0]


def host_memory(count: int, *, pinned: bool) -> Tensor:
    """Return `count` bytes on the host.

    Args:
        count: number of bytes.
        pinned: True to pin exactly these bytes. torch's own allocator of pinned memory rounds up to
            a power of two.
    """
    memory = torch.empty(count, dtype=torch.uint8)
    if pinned and count > 0:
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        torch.cuda.check_error(int(status))
        # Pages that stay registered cannot be pinned again at the same address.
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory
