"""Run a command of this repository as a user would, from the checkout."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """This process's environment with the checkout importable, and without the marks of an outer torchrun."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in outer}
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(
    *arguments: str | os.PathLike, timeout: float = 120, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """`python arguments…`, in the repository's root, which is importable; raises if it outlasts `timeout` seconds."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd,
        env=environment() | {"PYTHONPATH": str(cwd)},
    )


def torchrun(*arguments: str | os.PathLike, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone arguments…` in the repository's root."""
    return python("-m", "torch.distributed.run", "--standalone", *arguments, timeout=timeout)


def on_terminal(*command: str | os.PathLike) -> tuple[subprocess.Popen, TextIO]:
    """A command in the background whose stderr is a terminal, which shows what is done now; that terminal's lines."""
    ours, its = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=its, text=True)
    os.close(its)
    return process, open(ours, encoding="utf-8", newline=None)


def shown(terminal: Iterable[str]) -> Iterator[str]:
    """The lines of a terminal, until nobody writes there any more; one that is rewritten comes when the next does."""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        for line in terminal:
            yield line.removesuffix("\n").removeprefix("\x1b[K")
