"""Run a command of this repository as a user would, from the checkout."""

import contextlib
import gc
import multiprocessing
import os
import pty
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from distlab.testing import PRELOADED

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Return this process's environment with the checkout importable, without torchrun's names."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in outer}
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(
    *arguments: str | os.PathLike, timeout: float = 120, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python arguments…` and return its exit code and output.

    In the repository's root the process is `forked`. In another folder, or for code (`-c`), it is a
    new interpreter, with `variables` added to its environment.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout` seconds.
    """
    command = [*map(str, arguments)]
    if cwd != ROOT or command[0] == "-c":
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=cwd,
            env=environment() | {"PYTHONPATH": str(cwd)} | variables,
        )
    with tempfile.TemporaryDirectory() as folder:
        stdout = Path(folder, "stdout")
        stderr = Path(folder, "stderr")
        process = forked(command, stdout, stderr)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(
                command, timeout, stdout.read_bytes(), stderr.read_bytes()
            )
        return subprocess.CompletedProcess(
            command, process.exitcode, stdout.read_text(), stderr.read_text()
        )


def be_python(command: Sequence[str]) -> None:
    """Run `python COMMAND…` in this process."""
    is_module = command[0] == "-m"
    sys.argv = list(command[1:] if is_module else command)
    sys.path[0] = str(ROOT)
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def forked(
    command: Sequence[str],
    stdout: Path,
    stderr: Path,
    be: Callable[[Sequence[str]], None] = be_python,
) -> multiprocessing.Process:
    """Start a process in the repository's root that calls `be(command)`.

    It is forked from the server that forks the ranks of tests, which has imported torch.

    Args:
        command: arguments of python.
        stdout: file for its output.
        stderr: file for its errors, which may be the same.
        be: function that the process calls.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_be, args=(be, command, environment(), stdout, stderr))
    process.start()
    return process


def _be(
    be: Callable[[Sequence[str]], None],
    command: Sequence[str],
    variables: dict[str, str],
    stdout: Path,
    stderr: Path,
) -> None:
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    gc.freeze()  # objects of torch, whose pages a garbage collection would copy from the server
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    multiprocessing.set_start_method(None, force=True)  # a script's default
    be(command)


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children, oldest first."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def on_terminal(command: Sequence[str], stdout: Path) -> tuple[multiprocessing.Process, TextIO]:
    """Start a command in the background whose stderr is a terminal, where it shows its progress.

    It is `forked`, and its output goes into a file.

    Returns:
        The process, and the text of the terminal.
    """
    ours, its = pty.openpty()
    opened, open_now = multiprocessing.Pipe(duplex=False)
    process = forked(command, stdout, Path(os.ttyname(its)), partial(_say_and_be, open_now))
    open_now.close()
    opened.recv_bytes()
    os.close(its)  # the command has opened it, and the text ends with the last such process
    return process, open(ours, encoding="utf-8", newline=None)


def _say_and_be(stderr_is_open: Connection, command: Sequence[str]) -> None:
    stderr_is_open.send_bytes(b"open")
    stderr_is_open.close()
    be_python(command)


def shown(terminal: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a terminal, until no process writes there any more.

    A line that is rewritten comes when the next does.
    """
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        for line in terminal:
            yield line.removesuffix("\n").removeprefix("\x1b[K")
