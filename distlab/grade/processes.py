"""Run an experiment on a submission in child processes, with limits, and return what they saved.

The limits are guards against accidents: an endless loop, a fork bomb, memory without end. They are
no security boundary (docs/learn/grade.md says how to have one).
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distlab.grade import child
from distlab.grade.job import Job

MEMORY_BYTES = 3 * 2**30  # most resident memory of a child and all processes that it starts
# The children of an experiment may print this number of bytes together.
PRINTED_BYTES = 20 * 2**20
PROCESSES = 24  # most processes of each child; Triton's compiler starts some
# The interval of the checks is short compared with the time in which a loop fills memory.
POLL_S = 0.05
INTERPRETED = "TRITON_INTERPRET"
RAISES = "it raises"  # beginning of the sentence about an error of the submission's own
DEAD_S = 30.0  # time in which processes that were killed are dead, also on a busy host
LEFT_S = 3.0  # time after the failure of a rank in which the other ranks can report theirs
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # imported by the first optimizer of a process
    "distlab.grade.kernels",
]


@dataclass
class Observed:
    """Result of one experiment: what its children saved, or why they did not.

    Attributes:
        ranks: what each rank noted; empty if the experiment failed.
        failure: what happened instead, as a sentence.
        missing: what is not handed in, as a sentence.
        printed: end of what the children printed.
    """

    ranks: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    missing: str = ""
    printed: str = ""


def observe(job: Job) -> Observed:
    """Run an experiment.

    Args:
        job: experiment, with the folder of the copy.

    Returns:
        What it noted, or why it noted nothing.
    """
    # A fork server has imported torch once. Each child is a fork of it, in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder = Path(tempfile.mkdtemp(prefix="distlab-grade-"))
    children = []
    try:
        for rank in range(job.processes):
            process = context.Process(target=child.main, args=(job, rank, str(folder)))
            # The child inherits this environment at its start. Later changes do not reach it.
            with _environment_of(job.is_interpreted):
                process.start()
            children.append(process)
        # All children are started before: ranks wait for each other.
        failure = _wait(job, children, folder)
        return _collected(job, children, folder, failure)
    finally:
        # The children are also ended where this process is interrupted.
        for process in children:
            _end(process.pid)
            process.join()
        child.remove(folder)


@contextlib.contextmanager
def _environment_of(is_interpreted: bool) -> Iterator[None]:
    """Have Triton's kernels interpreted, or compiled.

    Triton reads the variable where it is imported. The fork server, which the first start of a
    process starts, imports it. So a process of the lab should examine on one device only.
    """
    before = os.environ.get(INTERPRETED)
    if is_interpreted:
        os.environ[INTERPRETED] = "1"
    try:
        yield
    # The examining process's own kernels must not change their mode.
    finally:
        if before is None:
            os.environ.pop(INTERPRETED, None)
        else:
            os.environ[INTERPRETED] = before


def _wait(job: Job, children: list[Any], folder: Path) -> str:
    """Wait for the children to end. Return why they were ended, if they were."""
    deadline = time.monotonic() + job.seconds
    while any(process.is_alive() for process in children):
        now = time.monotonic()
        if now > deadline:
            return f"no result within {job.seconds:g} s"
        # An exit code is None while a process runs and 0 after success. All other codes are
        # failures.
        if any(process.exitcode for process in children):  # others may wait for it in vain
            deadline = min(deadline, now + LEFT_S)
        for process in children:
            breach = _breach(process.pid, folder)
            if breach:
                return breach
        time.sleep(POLL_S)
    return ""


def _breach(pid: int, folder: Path) -> str:
    """Return which limit a child and its own children exceed, as a sentence; empty if none."""
    processes, resident = _usage(pid)
    if processes > PROCESSES:
        return f"it started more than {PROCESSES} processes"
    if resident > MEMORY_BYTES:
        return f"it took more than {MEMORY_BYTES / 2**30:.2g} GiB of memory"
    printed = sum(file.stat().st_size for file in folder.glob("printed*"))
    if printed > PRINTED_BYTES:
        return f"it printed more than {PRINTED_BYTES >> 20} MiB"
    return ""


def _usage(session: int) -> tuple[int, int]:
    """Return the number of processes of a session, and their resident bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    count, resident = 0, 0
    # A child is the leader of its session, so its pid is the session's number.
    for pid in _members(session):
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:  # it has ended
            continue
        count += 1
        # Without pages of files and of memory that is shared with the fork server's.
        resident += (int(fields[1]) - int(fields[2])) * page
    # The exact sum is computed only if the rough one, which is never smaller, exceeds the limit.
    if resident > MEMORY_BYTES:
        # Forked processes share pages. This sum has them once for each; the exact one takes longer.
        resident = sum(_proportional_bytes(pid) for pid in _members(session))
    return count, resident


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, in which a page that n processes share counts 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    found = 0
    for line in lines:
        if line.startswith("Pss:"):
            found = int(line.split()[1]) * 1024
    return found


def _members(session: int) -> list[int]:
    """Return the processes of a session. Empty on systems without /proc."""
    found = []
    # Without /proc the limits on processes and memory are not checked.
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def _end(pid: int | None) -> None:
    """End a child and all processes of its session."""
    if pid is None:
        return
    # The child's own pid comes first, because it may have failed before it called setsid.
    living = [pid]
    deadline = time.monotonic() + DEAD_S
    # Again, until all are dead: one that was forked while the others were killed is not in the
    # list. It would keep the fork server alive, which ends when nothing holds its pipes.
    while living and time.monotonic() < deadline:
        # Its process group at once, also one that forks and ends faster than a list is made.
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(pid, signal.SIGKILL)
        for each in living:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        living = [each for each in _members(pid) if not _is_dead(each)]


def _is_dead(pid: int) -> bool:
    """Return whether a process has ended. Its parent may not have asked for its exit code yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    # The state follows the name, which is in brackets and may hold any character.
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def _collected(job: Job, children: list[Any], folder: Path, failure: str) -> Observed:
    """Return what the children saved, once they have ended or are to be ended."""
    observed = Observed(printed=_printed(folder))
    found: list[dict[str, Any] | None] = []
    for rank in range(job.processes):
        file = folder / f"rank{rank}.pt"
        # Only tensors and plain containers can be read; anything else is refused by torch.
        found.append(torch.load(file, weights_only=True) if file.exists() else None)
    for saved in found:
        # Before errors: a rank without the hook makes the others wait in vain.
        if saved and "missing" in saved:
            observed.missing = saved["missing"]
            return observed
    own = [rank for rank, saved in enumerate(found) if saved and "raised" in saved]
    # A rank whose collective failed is the victim of another one, if that has an error of its own.
    own.sort(key=lambda rank: found[rank]["is_lost"])
    for rank in own[:1]:
        # One error is reported: the first of a rank that failed by its own mistake.
        error, place = found[rank]["raised"], found[rank]["place"]
        if found[rank]["is_lost"]:
            observed.failure = (
                f"ranks do not make the same calls: a collective of rank {rank}{place} fails"
            )
        elif job.ranks > 1:
            observed.failure = f"{RAISES} on rank {rank}{place}: {error}"
        else:
            observed.failure = f"{RAISES}{place}: {error}"
    # An error that a rank reported explains more than the limit that was then exceeded.
    if failure and not observed.failure:
        observed.failure = failure + _waiting_at(job, folder)
    for rank, process in enumerate(children):
        # A child without a file crashed, unless a limit ended it.
        if found[rank] is None and not observed.failure:
            observed.failure = _how_it_ended(process, rank, job)
    if not observed.failure:
        observed.ranks = [saved["noted"] for saved in found if saved is not None]
    return observed


def _how_it_ended(process: Any, rank: int, job: Job) -> str:
    """Return how a child ended that saved nothing."""
    process.join(1)
    # The exit code may arrive a moment after the child's last message.
    code = process.exitcode
    which = f"rank {rank}" if job.ranks > 1 else "the process"
    if code is None:
        return f"{which} did not end"
    # Python reports death by signal n as the exit code -n.
    if code < 0:
        return f"{which} ended with {signal.Signals(-code).name}"
    return f"{which} ended with exit code {code} before it had finished"


def _waiting_at(job: Job, folder: Path) -> str:
    """Return which line of the submission each rank was in when the time was over."""
    places = []
    for rank in range(job.processes):
        file = folder / f"stack{rank}"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        for line in lines:  # the innermost frame comes first
            # A line of faulthandler is `  File "PATH", line N in FUNCTION`.
            _, quote, rest = line.partition('File "')
            path, _, position = rest.partition('", line ')
            # Frames of torch and of the lab are above the line of the submission that called them.
            if quote and path.startswith(job.folder):
                inside = os.path.relpath(path, job.folder)
                places.append(f"rank {rank} is at {inside}:{position.split()[0]}")
                break
    return f" ({', '.join(places)})" if places else ""


def _printed(folder: Path) -> str:
    """Return the end of what the children printed."""
    texts = []
    for file in sorted(folder.glob("printed*")):
        with open(file, "rb") as opened:
            # The end says most: tracebacks end with the error. 2,000 bytes are about 25 lines.
            opened.seek(max(0, file.stat().st_size - 2000))
            texts.append(opened.read().decode(errors="replace"))
    return "".join(texts)
