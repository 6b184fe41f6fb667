"""Examine a submission: run each part's experiments, and judge its invariants."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distlab.grade import attention, data_parallel, fsdp, sharded_optimizer
from distlab.grade.as_wrapper import timed
from distlab.grade.child import remove
from distlab.grade.hooks import ADAPTERS, PARTS, Part, chosen
from distlab.grade.invariant import Absent, Broken, Invariant, Refused, Skipped
from distlab.grade.job import Job
from distlab.grade.processes import RAISES, Observed, observe
from distlab.grade.report import (
    BROKEN,
    HOLDS,
    NOT_EXAMINED,
    NOT_HANDED_IN,
    REFUSED,
    Report,
    Row,
)

# What a copy of a submission leaves out: it is large, and no hook needs it.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "node_modules", "wandb")
MOST_BYTES = 500 * 2**20  # largest size of a submission
SECONDS = 25.0  # time limit of one experiment


def grade(
    folder: str | Path,
    *,
    only: Iterable[str] = (),
    year: int | None = None,
    adapters: str = "",
    device: str = "cpu",
    backend: str = "gloo",
    seconds: float = SECONDS,
    is_timed: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Examine a submission.

    Args:
        folder: folder of the submission. It is copied, and only the copy is used.
        only: names of parts; empty for all.
        year: year of the suite; None for all years.
        adapters: module of the hooks; empty for `tests/adapters.py`.
        device: `cpu` or `cuda`.
        backend: `gloo`, or `nccl` with as many GPUs as ranks.
        seconds: limit for one experiment.
        is_timed: True to time data-parallel wrappers that were handed in, see `as_wrapper.py`.
        progress: function that is called with a line before each experiment.

    Raises:
        ValueError: no such folder, part or module of hooks, or a folder that is too large.
    """
    source = Path(folder)
    _require(source, adapters)
    report = Report(str(folder))
    begin = time.monotonic()
    copy = _Copy(source)
    try:
        most_ranks = torch.cuda.device_count() if backend == "nccl" else 3
        for part in chosen(tuple(only), year):
            examination = _Part(part, copy, adapters, device, backend, seconds, progress)
            if not report.rows:
                # Once, because every part needs the same module.
                failure = examination.import_failure()
                if failure:
                    report.failure = f"{adapters or ADAPTERS} cannot be imported: {failure}"
                    break
            report.rows += examination.rows(most_ranks)
        if is_timed and not report.failure:
            progress("timing the wrappers")
            report.timing = timed(copy.folder, adapters, _wrappers(report))
    finally:
        copy.remove()
    report.seconds = time.monotonic() - begin
    return report


def _wrappers(report: Report) -> list[str]:
    """Return the data-parallel parts that were handed in."""
    kinds = {part.name: part.kind for part in PARTS}
    found = []
    for part in report.parts():
        is_missing = report.of_part(part)[0].status == NOT_HANDED_IN
        if kinds[part] == "ddp" and not is_missing:
            found.append(part)
    return found


def _require(source: Path, adapters: str) -> None:
    """Raise ValueError for a folder that cannot be examined."""
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the folder of the submission")
    if not adapters and not (source / ADAPTERS).is_file():
        raise ValueError(
            f"{source} has no {ADAPTERS}; name the module with the hook functions: "
            "--adapters package.module"
        )
    # Links are not followed and ignored folders not entered, as in the copy.
    total = 0
    for place, folders, files in os.walk(source):
        ignored = LEFT_OUT(place, [*folders, *files])
        # os.walk enters only the folders that are left in this list.
        folders[:] = [each for each in folders if each not in ignored]
        for file in files:
            if file not in ignored and not os.path.islink(os.path.join(place, file)):
                total += os.path.getsize(os.path.join(place, file))
    if total > MOST_BYTES:
        raise ValueError(
            f"{source} has {total / 2**20:.0f} MiB; move data and checkpoints out of the submission"
        )


class _Copy:
    """A copy of the submission, made again where an experiment changed it.

    Attributes:
        folder: path of the copy, in a temporary folder.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.parent = Path(tempfile.mkdtemp(prefix="distlab-submission-"))
        self.folder = self.parent / source.resolve().name
        self._make()

    def _make(self) -> None:
        # Links are copied as links: what they lead to is not part of the submission.
        shutil.copytree(self.source, self.folder, ignore=LEFT_OUT, symlinks=True)
        self.listing = self._list()

    def _list(self) -> list[tuple[str, int, float]]:
        """Return path, size and time of change of every file."""
        found = []
        for file in sorted(self.folder.rglob("*")):
            # Python writes __pycache__ itself. Anything else that has changed was changed by the
            # submission's code.
            if file.is_file() and "__pycache__" not in file.parts:
                status = file.stat()
                found.append((str(file), status.st_size, status.st_mtime))
        return found

    def restore(self) -> None:
        """Copy the submission again, if the copy is no longer what it was."""
        if not self.folder.is_dir() or self._list() != self.listing:
            remove(self.folder)
            self._make()

    def remove(self) -> None:
        """Remove the copy."""
        remove(self.parent)


class _Part:
    """The examination of one part."""

    def __init__(
        self,
        part: Part,
        copy: _Copy,
        adapters: str,
        device: str,
        backend: str,
        seconds: float,
        progress: Callable[[str], None],
    ) -> None:
        self.part = part
        self.copy = copy
        self.adapters = adapters
        self.device = device
        self.backend = backend
        self.seconds = seconds
        self.progress = progress
        self.observed: dict[Any, Observed] = {}
        # Failure of each experiment, in order. Empty for an experiment that came to its end.
        self.failures: list[str] = []
        self.named: set[str] = set()  # mistakes that rows have shown

    def invariants(self) -> list[Invariant]:
        """Return what must hold of this part."""
        if self.part.kind == "ddp":
            return data_parallel.invariants(self.part)
        if self.part.kind == "optimizer":
            return sharded_optimizer.invariants(self.part)
        if self.part.kind == "fsdp":
            return fsdp.invariants(self.part)
        # Triton's interpreter computes bf16 wrongly.
        is_interpreted = self.device == "cpu" and self.part.name.endswith("triton")
        dtypes = ("fp16",) if is_interpreted else ("fp16", "bf16")
        return attention.invariants(self.part, dtypes)

    def import_failure(self) -> str:
        """Return why the module of hooks cannot be imported, as a sentence; empty if it can."""
        observed = self._run("import_hooks", {}, 0, self.seconds)
        return observed.failure or observed.missing

    def rows(self, most_ranks: int) -> list[Row]:
        """Return a row for each invariant, or one row if the part is not handed in.

        Args:
            most_ranks: largest number of ranks to examine.
        """
        found = []
        for invariant in self.invariants():
            ranks = [number for number in invariant.ranks if number <= most_ranks]
            row = self._examined(invariant, ranks)
            if row is None:  # it does not apply
                continue
            found.append(row)
            # Without the hook every further row would say the same.
            if row.status == NOT_HANDED_IN and len(found) == 1:
                return found
        if self.part.name == "rmsnorm-pytorch":
            for _, invariant in attention.rmsnorm_backwards():
                row = self._examined(invariant, [0])
                if row is not None:
                    found.append(row)
        return found

    def _examined(self, invariant: Invariant, ranks: list[int]) -> Row | None:
        """Return the row of an invariant; None if it does not apply."""
        # No number of ranks is within this machine's GPUs.
        if not ranks:
            return None
        if invariant.settings.get("in_subgroup") and not self._takes_group():
            return None
        row = Row(
            self.part.name,
            invariant.title,
            HOLDS,
            "" if ranks == [0] else f"{' and '.join(map(str, ranks))} ranks",
            invariant.input,
            is_beyond=invariant.is_beyond,
        )
        for number in ranks:
            observed, is_first = self._observed(invariant, number)
            # The row of a failure names the one number of ranks on which it failed.
            here = replace(row, ranks="" if number == 0 else f"{number} ranks")
            if observed.missing:
                return replace(here, status=NOT_HANDED_IN, seen=observed.missing)
            if observed.failure:
                # The experiment of several invariants has one failure, and one row says what it is.
                if not is_first:
                    return replace(here, status=NOT_EXAMINED, seen=f"as above: {observed.failure}")
                if observed.failure.startswith(RAISES):
                    return _refused(here, invariant, observed.failure)
                return replace(here, status=BROKEN, expected="a result", seen=observed.failure)
            try:
                invariant.judge(observed.ranks)
            except Absent as absent:
                return replace(here, status=NOT_HANDED_IN, seen=str(absent))
            except Refused as refused:
                return _refused(here, invariant, str(refused))
            except Skipped as skipped:
                return replace(here, status=NOT_EXAMINED, seen=str(skipped))
            except Broken as broken:
                if broken.is_named and broken.seen in self.named:
                    return replace(here, status=NOT_EXAMINED, seen=f"as above: {broken.seen}")
                self.named.add(broken.seen)
                return replace(here, status=BROKEN, expected=broken.expected, seen=broken.seen)
            except Exception as error:  # noted values of another form than any experiment's
                seen = f"values that cannot be read ({type(error).__name__}: {error})"
                return replace(here, status=BROKEN, expected="tensors of the model", seen=seen)
        return row

    def _run(
        self, experiment: str, settings: dict[str, Any], ranks: int, seconds: float
    ) -> Observed:
        """Run an experiment in child processes, with the copy as it was."""
        # Every experiment finds the files as they were handed in, whatever the one before did to
        # them.
        self.copy.restore()
        device = self.device
        if ranks > 0 and self.backend == "gloo":
            device = "cpu"  # several ranks on one GPU show nothing more, and start slowly
        job = Job(
            experiment,
            self.part,
            ranks,
            settings,
            str(self.copy.folder),
            self.adapters,
            device,
            self.device == "cpu",
            self.backend if ranks > 1 else "gloo",
            seconds,
        )
        return observe(job)

    def _run_families(self, invariant: Invariant) -> None:
        """Run all families of a kernel in one process, and keep what each noted.

        On a GPU, to start a process takes longer than to run a family. If the process does not come
        to its end, nothing is kept, and each family gets a process of its own.
        """
        settings = {key: each for key, each in invariant.settings.items() if key != "family"}
        if ("run_families", settings["is_causal"]) in self.observed:
            return  # it has failed
        observed = self._run("run_families", settings, 0, 12 * self.seconds)
        self.observed[("run_families", settings["is_causal"])] = observed
        if observed.missing or observed.failure:
            return
        for family, noted in observed.ranks[0].items():
            key = _key("run_family", {**settings, "family": family}, 0)
            self.observed[key] = Observed(ranks=[noted])

    def _takes_group(self) -> bool:
        """Return whether the part's function takes a process group."""
        probe = Invariant("", "takes_group", judge=print, input="")
        observed, _ = self._observed(probe, 0)
        return bool(observed.ranks) and observed.ranks[0]["takes_group"]

    def _observed(self, invariant: Invariant, ranks: int) -> tuple[Observed, bool]:
        """Run the experiment of an invariant, or return it if it has run.

        Returns:
            What it noted, and whether it ran for the first time.
        """
        key = _key(invariant.experiment, invariant.settings, ranks)
        if key in self.observed:
            return self.observed[key], False
        if len(self.failures) >= 2 and self.failures[-1] and self.failures[-1] == self.failures[-2]:
            # It hangs or fails before anything is examined. Each further run would take as long.
            self.observed[key] = Observed(failure=self.failures[-1])
            return self.observed[key], False
        self.progress(f"{self.part.name}: {invariant.title}")
        if self.device == "cuda" and invariant.experiment == "run_family":
            self._run_families(invariant)
            if key in self.observed:
                return self.observed[key], True
        observed = self._run(invariant.experiment, dict(invariant.settings), ranks, self.seconds)
        self.failures.append(observed.failure)
        self.observed[key] = observed
        return observed, True


def _refused(row: Row, invariant: Invariant, seen: str) -> Row:
    """Return the row of a submission that raised an error of its own instead of a result."""
    if invariant.may_refuse:
        return replace(row, status=REFUSED, seen=seen)
    return replace(row, status=BROKEN, expected="a result", seen=seen)


def _key(experiment: str, settings: dict[str, Any], ranks: int) -> tuple[Any, ...]:
    """Return what tells experiments apart."""
    return experiment, tuple(sorted(settings.items())), ranks
