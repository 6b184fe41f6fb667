"""The process in which a submission's code runs."""

import contextlib
import faulthandler
import gc
import os
import resource
import shutil
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm.parent_death import end_with_parent
from distlab.comm.rank_process import is_lost_peer
from distlab.grade.hooks import NotHandedIn, is_left_out, load
from distlab.grade.job import Job

# Environment variables that a submission gets. Others may hold keys and passwords.
KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "LD_LIBRARY_PATH",
)
MOST_WRITTEN = 64 * 2**20  # bytes of one file that it writes; what it prints is one


def main(job: Job, rank: int, folder: str) -> None:
    """Run an experiment on one rank and save what it notes.

    Args:
        job: what to run.
        rank: position of this process.
        folder: folder for results; the submission's working directory is another one.
    """
    os.setsid()  # so that this process can be ended with all that it starts
    end_with_parent()  # the fork server, which ends when the examining process has been killed
    results = Path(folder)
    _redirect(results / f"printed{rank}")
    # A file that would exceed this ends with an error in the process that writes it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
    # A crash would otherwise write a file as large as the process.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The copy is made first, because clearing the environment also removes these variables.
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    # Functions under torch.compile run eager, with the same results. Compiling takes seconds for
    # each shape, so that right solutions would exceed the limit of time.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Relative paths of a submission are meant from its own folder.
    os.chdir(job.folder)
    sys.dont_write_bytecode = True
    # With one thread for each rank, 2 or 3 ranks do not compete for the machine's cores.
    torch.set_num_threads(1)
    gc.freeze()  # objects of torch, of which there are so many that looking through them takes long
    stacks = (results / f"stack{rank}").open("w")  # written to when the time is over
    # A second before the parent ends this process, which could not say where it was.
    faulthandler.dump_traceback_later(job.seconds - 1, file=stacks)
    found: dict[str, Any]
    try:
        found = {"noted": _run(job, rank, results)}
    except NotHandedIn as missing:
        found = {"missing": str(missing)}
    except BaseException as error:  # SystemExit too, because any end of a submission is a result
        # A function that was left as the handout's stub is not a wrong one.
        if isinstance(error, NotImplementedError) and is_left_out(error, Path(job.folder)):
            found = {"missing": "its function raises NotImplementedError"}
        else:
            found = _raised(error, Path(job.folder))
    torch.save(found, results / f"partial{rank}")
    # A rename is atomic, so the parent never reads half a file.
    os.rename(results / f"partial{rank}", results / f"rank{rank}.pt")
    with contextlib.suppress(ValueError, OSError):  # the submission may have closed it
        sys.stdout.flush()
    # Without waiting for threads that the submission left behind.
    os._exit(1 if "raised" in found else 0)


def _run(job: Job, rank: int, results: Path) -> Any:
    """Load the submission, form the group of ranks, and run the experiment."""
    from distlab.grade import experiments, kernels

    device = torch.device("cpu")
    if job.device == "cuda":
        # Over gloo all ranks share GPU 0, because the machine may have only one.
        device = torch.device("cuda", rank if job.backend == "nccl" else 0)
        torch.cuda.set_device(device)
    # The submission is imported before the group is formed: a missing module then fails at once.
    module = load(Path(job.folder), job.adapters)
    if job.ranks > 0:
        dist.init_process_group(
            job.backend,
            # A file needs no free port, so several submissions can be examined at the same time.
            init_method=f"file://{results}/store",
            rank=rank,
            world_size=job.ranks,
            # Before the limit of the experiment, so that a rank that waits in vain can say so.
            timeout=timedelta(seconds=max(5.0, job.seconds - 5)),
            device_id=device if job.backend == "nccl" else None,
        )
    # Jobs are sent to processes as data, so an experiment is found by its name.
    function = getattr(experiments, job.experiment, None) or getattr(kernels, job.experiment)
    folder = Path(job.folder)
    place = experiments.Place(module, folder, job.part, rank, max(job.ranks, 1), device)
    noted = function(place, **job.settings)
    if job.ranks > 0:
        with contextlib.suppress(RuntimeError):  # another rank may have ended already
            # A rank that ends early closes its connections, and a slower rank's collective would
            # then fail.
            dist.barrier()
    return noted


def _redirect(file: Path) -> None:
    """Write what this process and its children print into a file, and give it nothing to read."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    # stderr follows stdout into the same file, in the order of printing.
    os.dup2(opened, 2)
    # A submission that waits for input gets its end instead of hanging.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)


def _raised(error: BaseException, folder: Path) -> dict[str, Any]:
    """Return what is saved of an error, and print its traceback."""
    with contextlib.suppress(ValueError, OSError):  # stderr is closed, or its file is full
        traceback.print_exception(error)
    return {
        "raised": _described(error),
        "place": _place_of(error, folder),
        # Errors of gloo have no class of their own, so their text is searched.
        "is_lost": is_lost_peer(error) or "gloo" in str(error),
    }


def _described(error: BaseException) -> str:
    """Return an error in one line."""
    # Messages of torch may hold a C++ stack, whose first line says what happened.
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}".rstrip(": ")


def _place_of(error: BaseException, folder: Path) -> str:
    """Return the innermost line of the submission that an error passed; empty if there is none."""
    place = ""
    # Frames go from the outermost to the innermost, so the last match stays.
    for frame in traceback.extract_tb(error.__traceback__):
        # `<frozen importlib._bootstrap>` would count as a file of the current folder.
        if frame.filename.startswith("<"):
            continue
        with contextlib.suppress(ValueError):
            inside = Path(frame.filename).resolve().relative_to(folder.resolve())
            place = f" at {inside}:{frame.lineno}"
    return place


def remove(folder: Path) -> None:
    """Remove a folder whose files a submission may have made unreadable."""
    shutil.rmtree(folder, ignore_errors=True)
