"""Save and resume training: asynchronously, at any world size, under any strategy.

    training   │ step 50 │ copy to the host │ step 51 │ step 52 │ …                          │ step 100 │ copy …
    writer                                  │ write files │ fsync │ marker │ rename │ prune │

`save()` queues copies into pinned host memory on the compute stream and returns. A thread waits for
them and writes; it communicates with the other ranks' threads in a separate gloo group. Ranks that
hold the same values write one part each. The next `save()` first waits for the previous one, and
raises on every rank if any rank failed.

Loading checks every file's checksum, and falls back to the previous checkpoint with a message that
names the damage. What the files say is checked against each other and against the model before
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

# Classes of errors that say what is wrong in a sentence, and that other ranks can unpickle.
TOGETHER = (ValueError, CheckpointError, Damaged, OtherFormat)


class Checkpointer:
    """The checkpoints of one run. Every method must be called on every rank.

    Args:
        folder: folder of the checkpoints, on a file system that all machines share.
        context: context of this rank.
        keep: number of complete checkpoints to keep.
        asynchronous: True to write in a thread, False to write within `save()`.
        threads: number of threads that write and hash on each rank.
        lock: lock of the run's folder, on the rank that has it. It is checked before each write.
        progress: function that is called with a line now and then.
        model: model that will be saved, to check it now and not at the first `save()`.

    Raises:
        ValueError: the model has a parameter or a buffer that a checkpoint cannot hold; raised on
            every rank.
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
        self.folder, self.context, self.lock, self.progress = (
            CheckpointFolder(folder),
            context,
            lock,
            progress,
        )
        self.keep, self.asynchronous, self.threads = keep, asynchronous, threads
        self.last_saved: int | None = None  # the newest step known to be complete
        self._known_good: set[int] = set()  # steps written or checked here
        # No collective of training may come between the writer thread's own.
        timeout = timedelta(seconds=context.timeout_s)
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        # snapshots go through it; kept from one to the next
        self._host = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if model is not None:
            self._alike(lambda: train_state.refuse_unstorable_model(model))

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory that asynchronous checkpoints hold on this rank.

        They need none on the GPU.
        """
        return self._host.nbytes

    # -- saving --------------------------------------------------------------------------------------------

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
            extra: data that JSON gives back as it is, the same on every rank: configuration, loss
                scale.

        Raises:
            ValueError: a tensor, an option of the optimizer or something in `extra` that cannot be
                stored. Raised on every rank before anything is written; the message names it.
            CheckpointError: the checkpoint before this one failed, on whatever rank; or this one,
                if not asynchronous.
        """
        self.wait()
        model.sync_buffers()  # of which each rank writes a part
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
            # The thread reads it while training goes on, and the caller may change what it has
            # given.
            content = copy.deepcopy(content)
            staged, ready = self._stage(self._portions(model, optimizer))
            return staged, content, ready

        # What cannot be stored is an error on all ranks, now, and not of one rank's thread that
        # others wait for.
        staged, content, ready = self._alike(prepare)
        self._thread = threading.Thread(
            target=self._write_behind, args=(step, staged, content, ready), daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            # The system gives this process no more threads, and the other ranks wait for its part.
            self._thread = None
            self._write_behind(step, staged, content, ready)
        if not self.asynchronous:
            self.wait()

    def _portions(self, model: ParallelModel, optimizer: Optimizer) -> list[Shard]:
        """Return this rank's shards of the model, the optimizer and the random generators."""
        rank, world_size = self.context.rank, self.context.world_size
        held = (*train_state.model_state(model), *train_state.optimizer_state(model, optimizer))
        train_state.refuse_dtypes(held)
        shards = [shard.portion(rank, world_size) for shard in held]
        for kind, state in train_state.generators().items():
            shards.append(whole(f"rng/{rank}/{kind}", state))
        return shards

    def _stage(self, shards: Sequence[Shard]) -> tuple[list[Shard], Callable[[], None]]:
        """Queue copies of all shards to the host.

        Returns the copies, and a function that waits until they are filled.
        """
        device = self.context.device
        sources = [shard.values for shard in shards]
        sizes = [-(-values.nbytes // 8) * 8 for values in sources]  # whole elements of every dtype
        if self._host.numel() < sum(sizes):
            self._host = host_memory(sum(sizes), pinned=device.type == "cuda")
        staged = []
        for shard, values, place in zip(
            shards, sources, self._host[: sum(sizes)].split(sizes), strict=True
        ):
            copy = place[: values.nbytes].view(values.dtype).copy_(values, non_blocking=True)
            staged.append(replace(shard, tensor=copy))
        if device.type != "cuda":
            return staged, lambda: None
        event = torch.cuda.Event()
        event.record()
        return staged, event.synchronize

    def wait(self) -> None:
        """Wait until the last `save()` is complete.

        Raises:
            CheckpointError: it failed, on whatever rank; earlier checkpoints are as they were.
            RuntimeError: another rank died meanwhile.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Let a write end, whatever comes of it."""
        if self._thread is not None:
            self._thread.join(self.context.timeout_s)

    def close(self) -> None:
        """Call `finish` and free the group. Nothing can be saved or loaded any more."""
        self.finish()
        if self._group is not None and (self._thread is None or not self._thread.is_alive()):
            dist.destroy_process_group(self._group)
            self._group = None

    def _write_behind(
        self, step: int, shards: list[Shard], content: dict[str, Any], ready: Callable
    ) -> None:
        try:
            self._write(step, shards, content, ready)
        except BaseException as error:  # raised again by wait()
            self._failure = error

    def _write(
        self, step: int, shards: list[Shard], content: dict[str, Any], ready: Callable
    ) -> None:
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
            content["files"] = {
                name: entry for files, _ in written for name, entry in files.items()
            }
            content["tensors"] = tensors.merged([index for _, index in written])
            self._own_folder().commit(step, content)

        try:
            self._on_main(lambda: self._own_folder().begin(step))
            mine = self._alike(write_mine)
            written = collectives.gather_objects(mine, self._group)
            self._on_main(complete)
        except Exception as error:
            if self.context.is_main:
                with contextlib.suppress(LockLost):  # then a folder of this name is another run's
                    shutil.rmtree(self._own_folder().temporary_path_of(step), ignore_errors=True)
            if not isinstance(error, (OSError, ValueError)):  # of a collective: another rank died
                raise
            last = (
                "there is none before it"
                if self.last_saved is None
                else f"step {self.last_saved} is intact"
            )
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written ({error}); {last}"
            ) from None
        self.last_saved = step
        self._known_good.add(step)
        self._on_main(lambda: self._own_folder().prune(self.keep, self._known_good))

    def _own_folder(self) -> CheckpointFolder:
        """The folder, to be written; raises LockLost if another run has taken it."""
        if self.lock is not None:
            self.lock.check()
        return self.folder

    # -- loading -------------------------------------------------------------------------------------------

    def newest(self) -> Stored | None:
        """Return the newest checkpoint that is whole and unaltered. None if the folder has none.

        Newer ones that are not are put aside, so that they are neither read again nor counted as
        kept.

        Raises:
            CheckpointError: there are some, and none can be used.
            OtherFormat: the newest was written by another version.
        """
        removed = self._on_main(lambda: self._own_folder().clean())
        if removed:
            self.progress(f"removed what an interrupted write left: {', '.join(removed)}")
        rejected = {}  # step → what is wrong with it
        for step in self._on_main(self.folder.steps):
            try:
                stored = self.check(step)
            except Damaged as error:
                rejected[step] = str(error)
                continue
            # Only now: if none can be used, the next start must find them and end the same way.
            for bad, problem in rejected.items():
                aside = self._on_main(lambda bad=bad: self._own_folder().set_aside(bad))
                self.progress(
                    f"checkpoint of step {bad} is not used: {problem}; it is put aside as {Path(aside).name}"
                )
            return stored
        if rejected:
            raise CheckpointError(
                f"none of the {len(rejected)} checkpoints in {self.folder.path} can be used: "
                f"{'; '.join(rejected.values())}. Pass --fresh to start over"
            )
        return None

    def check(self, step: int) -> Stored:
        """Read a checkpoint's marker and check all of its files, each rank a share of them.

        Raises:
            Damaged, OtherFormat: the same on every rank.
        """

        def checked() -> Stored:
            stored = self.folder.open(step)
            check_files(stored, self.context.rank, self.context.world_size)
            return stored

        stored = self._alike(checked)
        self.last_saved = step
        self._known_good.add(step)
        return stored

    def load(self, stored: Stored, model: ParallelModel, optimizer: Optimizer) -> None:
        """Overwrite the model, the optimizer's state and this rank's random generators.

        Raises:
            ValueError: a checkpoint of another model or optimizer; it lists the tensors that
                differ. Nothing is overwritten.
            CheckpointError: reading failed, on whatever rank; or what the files say does not fit
                together, and nothing is overwritten.
        """
        model.synchronize()
        model.sync_buffers()
        held, name = train_state.model_state(model), optimizer_name(optimizer)
        everything = model.of_all_stages(tensors.kinds_of(held))
        groups = self._alike(lambda: train_state.group_options(model, optimizer))
        frozen = train_state.frozen_names(model)

        def checked() -> list[dict[str, Any]]:
            tensors.refuse_other_model(stored, everything)
            if stored.content["optimizer"] != name:
                raise ValueError(
                    f"{stored.path} holds the state of {stored.content['optimizer']}, not of {name}"
                )
            return train_state.stored_options(stored.content["groups"], groups, frozen)

        options = self._alike(checked)
        found = tensors.shapes_and_dtypes(stored)
        state, wanted = train_state.empty_optimizer_state(model, optimizer, found)
        prefix = f"rng/{self.context.rank}/"
        generators = {
            key.removeprefix(prefix): torch.empty(shape, dtype=dtype)
            for key, (shape, dtype) in found.items()
            if key.startswith(prefix)
        }
        wanted += [whole(prefix + kind, value) for kind, value in generators.items()]
        self._alike(lambda: tensors.read(stored, [*held, *wanted]))
        load_shards(optimizer, options, state)
        model.shards_changed()
        self._alike(lambda: train_state.restore_generators(generators))

    # -- ranks ---------------------------------------------------------------------------------------------

    def _alike(self, action: Callable[[], Any]) -> Any:
        """Do it on every rank; if it raises on any, raise on all.

        What ranks find wrong together, a ValueError or CheckpointError, is raised as it is.
        Anything else is the trouble of single ranks, and raised as a CheckpointError that names
        them. Every Exception counts: a rank that left by one of an unforeseen class would let the
        others wait until the group's timeout.
        """
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            if type(error) in TOGETHER:
                problem = error
            else:
                first_line = next(iter(str(error).splitlines()), "")
                problem = f"rank {self.context.rank}: {type(error).__name__}: {first_line}"
        problems = [p for p in collectives.gather_objects(problem, self._group) if p is not None]
        if problems:
            raise next((p for p in problems if isinstance(p, Exception)), None) or CheckpointError(
                "; ".join(problems)
            )
        return result

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """Do it on rank 0 and give every rank its result."""
        result = self._alike(action if self.context.is_main else lambda: None)
        return collectives.gather_objects(result, self._group)[0]


def host_memory(count: int, *, pinned: bool) -> Tensor:
    """Return bytes on the host, pinned exactly.

    torch's own pinned allocator rounds up to a power of two.
    """
    memory = torch.empty(count, dtype=torch.uint8)
    if pinned and count:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory
