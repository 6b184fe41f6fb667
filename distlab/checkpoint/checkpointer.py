"""Save and resume training: asynchronously, at any world size, under any strategy.

    training   │ step 50 │ copy to the host │ step 51 │ step 52 │ …                          │ step 100 │ copy …
    writer                                  │ write files │ fsync │ marker │ rename │ prune │

`save()` queues copies into pinned host memory on the computing stream and returns; a thread waits for them and
writes, talking to the other ranks' threads in a gloo group of its own. Ranks that hold the same values write a
share each. The next `save()` first waits for the one before, and raises on every rank what went wrong on any.

Loading checks every file's checksum, falls back to the previous checkpoint with a message that names the damage,
and runs no code from the files. What the files say is checked against each other and against the model before
anything of the model is overwritten.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distlab.checkpoint import dcp, rng
from distlab.checkpoint.dcp import CheckpointError, Item
from distlab.checkpoint.files import (
    CheckpointFolder,
    Damaged,
    Stored,
    check_contents,
    check_sizes,
)
from distlab.checkpoint.lock import LockLost, RunLock
from distlab.checkpoint.staging import Staging
from distlab.comm import RankContext, collectives
from distlab.parallel.shard import Layout, Run

__all__ = ["CheckpointError", "Checkpointer", "Stored"]


class Checkpointer:
    """The checkpoints of one run; every method is called on every rank.

    Args:
        folder: where they are; on a file system that all machines share.
        context: this rank.
        keep: how many complete ones stay.
        asynchronous: write in a thread; False writes within `save()`.
        threads: that write and hash on each rank.
        lock: of the run's folder, on the rank that has it; asked before each write.
        progress: called with a line now and then.

    Raises:
        ValueError: `keep` or `threads` below one.
    """

    def __init__(
        self,
        folder: Path,
        context: RankContext,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        threads: int = 1,
        lock: RunLock | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ):
        if keep < 1 or threads < 1:
            raise ValueError(f"keep={keep}, threads={threads}: at least one each")
        self.folder = CheckpointFolder(folder)
        self.context = context
        self.keep = keep
        self.asynchronous = asynchronous
        self.threads = threads
        self.lock = lock
        self.progress = progress
        self.last_saved: int | None = None  # the newest step known to be complete
        self._known_good: set[int] = set()  # steps written or checked here
        self._group: dist.ProcessGroup | None = _gloo_group(context)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that asynchronous checkpoints hold on this rank; they need none on the GPU."""
        return self._staging.nbytes

    # -- saving --------------------------------------------------------------------------------------------

    def save(
        self, step: int, wrapper: nn.Module, optimizer: Optimizer, *, strategy: str, extra: Mapping[str, Any]
    ) -> None:
        """Begin to write what is true after `step` steps.

        Args:
            extra: JSON-serialisable, the same on every rank: configuration, loss scale.

        Raises:
            CheckpointError: the checkpoint before this one failed, on whatever rank.
        """
        self.wait()
        layout = Layout(wrapper, optimizer)
        layout.settle()
        rank, world_size = self.context.rank, self.context.world_size
        runs = [run.share(rank, world_size) for run in (*layout.model(), *layout.optimizer_state())]
        runs += [
            Run(f"rng/{rank}/{kind}", 0, state, tuple(state.shape)) for kind, state in rng.states().items()
        ]
        items, ready = self._staging.copy(runs, self.context.device)
        content = {
            "world_size": world_size,
            "strategy": strategy,
            "torch": torch.__version__,
            "optimizer": _optimizer_name(optimizer),
            "groups": layout.groups(),
            "extra": dict(extra),
        }
        shapes = {run.key: list(run.shape) for run in runs}
        if not self.asynchronous:
            ready()
            self._write(step, items, shapes, content)
            return
        self._thread = threading.Thread(
            target=self._write_behind, args=(step, items, shapes, content, ready), daemon=True
        )
        self._thread.start()

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
        """`finish`, and give back the group; nothing can be saved or loaded any more."""
        self.finish()
        if self._group is not None and (self._thread is None or not self._thread.is_alive()):
            dist.destroy_process_group(self._group)
            self._group = None

    def _write_behind(self, step: int, items: Any, shapes: Any, content: Any, ready: Callable) -> None:
        try:
            if self.context.device.type == "cuda":
                torch.cuda.set_device(self.context.device)  # per thread
            ready()
            self._write(step, items, shapes, content)
        except BaseException as error:  # DCP's own is no Exception; raised again by wait()
            self._failure = error

    def _write(self, step: int, items: list[Item], shapes: dict, content: dict[str, Any]) -> None:
        try:
            self._on_main(lambda: self._own_folder().begin(step))
            temporary = self.folder.temporary_path_of(step)
            self._together(lambda: _must_see(temporary))
            files = dcp.write(temporary, items, self._group, self.threads)
            parts = collectives.gather_objects((files, shapes), self._group)
            content["files"] = {name: entry for part, _ in parts for name, entry in part.items()}
            content["tensors"] = {key: shape for _, part in parts for key, shape in part.items()}
            self._on_main(lambda: self._own_folder().commit(step, content))
        except (CheckpointError, OSError) as error:
            if self.context.is_main:
                with contextlib.suppress(LockLost):  # then a folder of this name is another run's
                    self._own_folder().abandon(step)
            last = (
                "there is none before it" if self.last_saved is None else f"step {self.last_saved} is intact"
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
        """The newest checkpoint that is whole and unaltered; None if the folder has none at all.

        Newer ones that are not are put aside, so that they are neither read again nor counted as kept.

        Raises:
            CheckpointError: there are some, and none can be used.
            OtherFormat: the newest was written by another version.
        """
        removed = self._on_main(lambda: self._own_folder().clean())
        if removed:
            self.progress(f"removed what an interrupted write left: {', '.join(removed)}")
        steps = self._on_main(self.folder.steps)
        rejected: dict[int, str] = {}
        for step in steps:
            try:
                stored = self.check(self.folder.path_of(step))
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
                f"none of the {len(steps)} checkpoints in {self.folder.path} can be used: "
                f"{'; '.join(rejected.values())}. Pass --fresh to begin anew"
            )
        return None

    def check(self, path: Path) -> Stored:
        """Read a checkpoint's marker and check all of its files, each rank a share of them.

        Raises:
            Damaged, OtherFormat: the same on every rank.
        """

        def checked() -> Stored:
            stored = CheckpointFolder(path.parent).open(int(path.name.removeprefix("step_")))
            check_sizes(stored)
            check_contents(stored, self.context.rank, self.context.world_size)
            return stored

        stored = self._alike(checked)
        self.last_saved = stored.step
        self._known_good.add(stored.step)
        return stored

    def load(self, stored: Stored, wrapper: nn.Module, optimizer: Optimizer) -> None:
        """Overwrite the model, the optimizer's state and this rank's random generators.

        Raises:
            ValueError: a checkpoint of another model or optimizer; it lists the tensors that differ. Nothing is
                overwritten.
            CheckpointError: reading failed, on whatever rank; or what the files say does not fit together, and
                nothing is overwritten.
        """
        layout = Layout(wrapper, optimizer)
        layout.settle()
        shapes = {key: tuple(shape) for key, shape in stored.content["tensors"].items()}
        model = layout.model()
        optimizer_name = _optimizer_name(optimizer)

        def checked() -> tuple[Any, list[dict[str, Any]]]:
            refuse_other_model(stored, model, shapes)
            if stored.content["optimizer"] != optimizer_name:
                raise ValueError(
                    f"{stored.path} holds the state of {stored.content['optimizer']}, not of {optimizer_name}"
                )
            options = layout.options(stored.content["groups"])
            metadata = dcp.read_metadata(stored.path)
            sizes = {name: entry["bytes"] for name, entry in stored.content["files"].items()}
            dcp.check_metadata(stored.path, metadata, shapes, sizes)
            return metadata, options

        metadata, options = self._alike(checked)
        dtypes = dcp.stored_dtypes(metadata)
        tensors = {
            key: (shape, dtypes[key]) for key, shape in shapes.items() if key in dtypes
        }  # the others are empty
        state, wanted = layout.room_for_state(tensors)
        generators = {
            key: torch.empty(shape, dtype=dtype)
            for key, (shape, dtype) in tensors.items()
            if key.startswith(f"rng/{self.context.rank}/")
        }
        wanted += [Run(key, 0, value.view(-1), tuple(value.shape)) for key, value in generators.items()]
        runs = [*model, *wanted]
        items = [Item(run.key, run.start, run.numel, run.values) for run in runs]
        dcp.read(stored.path, metadata, items, self._group)
        layout.load_state(options, state)
        mine = {key.rsplit("/", 1)[1]: value for key, value in generators.items()}
        self._alike(lambda: rng.restore(mine))

    # -- ranks ---------------------------------------------------------------------------------------------

    def _alike(self, action: Callable[[], Any]) -> Any:
        """Do it on every rank; if it raises on any, raise the first rank's error on all."""
        result, problem = None, None
        try:
            result = action()
        except (OSError, ValueError) as error:
            problem = error
        for found in collectives.gather_objects(problem, self._group):
            if found is not None:
                raise found
        return result

    def _together(self, action: Callable[[], Any]) -> Any:
        """Do it on every rank; if it fails on any, raise the same on all, with the ranks that failed."""
        result, problem = None, None
        try:
            result = action()
        except OSError as error:
            problem = f"rank {self.context.rank}: {type(error).__name__}: {error}"
        problems = [p for p in collectives.gather_objects(problem, self._group) if p is not None]
        if problems:
            raise CheckpointError("; ".join(problems))
        return result

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """Do it on rank 0 and give every rank its result."""
        result = self._together(action if self.context.is_main else lambda: None)
        return collectives.gather_objects(_portable(result), self._group)[0]


def refuse_other_model(stored: Stored, model: Sequence[Run], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError with every parameter that is missing, left over, or of another shape."""
    mine = {run.key.removeprefix("model/"): run.shape for run in model}
    theirs = {key.removeprefix("model/"): shape for key, shape in shapes.items() if key.startswith("model/")}
    differences = [f"{name} is missing there" for name in mine if name not in theirs]
    differences += [f"{name} exists only there" for name in theirs if name not in mine]
    differences += [
        f"{name} has shape {theirs[name]} there and {mine[name]} here"
        for name in mine
        if name in theirs and theirs[name] != mine[name]
    ]
    if differences:
        shown = "; ".join(differences[:5])
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(f"{stored.path} is a checkpoint of another model: {shown}{more}")


def _gloo_group(context: RankContext) -> dist.ProcessGroup:
    """A group for the writer thread: no collective of training may come between its own."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=context.timeout_s))


def _optimizer_name(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "_inner", None) or optimizer).__name__


def _portable(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _must_see(path: Path) -> None:
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not visible here: put it on a file system that all machines share"
        )
