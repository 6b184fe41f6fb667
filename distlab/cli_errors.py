"""The end of a command: exit code 0, one line for an error the user can fix, or a stop on request.

    def main() -> int:
        # Returns work's exit code, or 128 + the number of the signal.
        return until_stopped("my_experiment", work)

A request to stop is not an error, whether it comes from Ctrl-C (SIGINT) or from a scheduler
(SIGTERM): one line says what was saved, and within two seconds the process is gone. The handler
raises `Stopped` in the main thread, so that files are closed and temporary ones removed. A main
thread that is inside a long call (a collective, a kernel, a compiler) does not see that before the
call ends. Then another thread, which the C-level handler wakes through a pipe, prints the line and
ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from distlab.text import for_terminal

# 2 is the code that argparse uses for a wrong command line.
USAGE_ERROR = 2
# Errors that the user can fix: print one line. Anything else is a bug: keep the traceback.
USER_ERRORS = (ValueError, OSError, MemoryError)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_S = 1.2  # time in which the main thread must see a signal, or end by itself
SAVING_S = 8.0  # further time for a main thread that saw it, to write files on a slow host
SHOWN = 6  # number of files that are named one by one
# Texts of plain RuntimeErrors about memory, of the host's allocator, CUDA's driver and runtime,
# cuDNN, cuBLAS and NCCL.
NO_MEMORY = re.compile(
    r"can't allocate memory|CUDA (driver )?error: out of memory"
    r"|(unhandled ?cuda ?error|cuda failure).*out of memory"
    r"|CUDNN_STATUS_\w*ALLOC\w*_FAILED|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublas(Lt)?Create",
    re.IGNORECASE | re.DOTALL,
)


def message_of(error: Exception) -> str | None:
    """Return the line for an error that the user can fix.

    None for any other error, which keeps its traceback.
    """
    line = _line_of(error)
    if line is None:
        return None
    return for_terminal(line)  # the line may quote a file that came from elsewhere


def _line_of(error: Exception) -> str | None:
    """Return the text of `message_of`, before it is made safe for a terminal."""
    if is_out_of_memory(error):
        said = str(error).strip()
        if type(error) is MemoryError and said:  # one of ours, which says what to do
            return said
        # The first line says how much was asked for. What follows is advice for torch's developers.
        first = f" ({said.splitlines()[0]})" if said else ""
        return f"out of memory{first}: a smaller --batch, --context or --size takes less"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        remedy = ""
        # The same command resumes the run, so nothing that was measured is lost.
        if error.errno == errno.ENOSPC:
            remedy = ": make room there, then give the same command again"
        return f"{error.filename}: {error.strerror}{remedy}"
    return str(error) if isinstance(error, USER_ERRORS) else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an allocator, of a GPU or of the host, had no memory left.

    This may be the error itself, or one in the chain of errors from which it was raised.
    """
    torch = sys.modules.get("torch")  # if it is not imported, no error is torch's
    kinds = MemoryError if torch is None else (MemoryError, torch.OutOfMemoryError)
    while error is not None:
        # Libraries raise out-of-memory errors of many classes, so texts are searched as well.
        if isinstance(error, kinds) or NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    return False


class _Stream(io.FileIO):
    """Standard stream that ignores a reader which has gone away."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(BrokenPipeError):
            # The number of bytes claims success, so the writer goes on.
            return super().write(data)
        return len(data)


def outlive_readers() -> None:
    """Drop what is printed into a closed pipe from here on, as in `distlab list | head`.

    The command goes on, so that a run is saved even if only its first lines were wanted.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_if_closed(number, name)
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        # The same file descriptor, so that output of C code still goes to the same place.
        buffer = io.BufferedWriter(_Stream(old.fileno(), "w", closefd=False))
        # A terminal shows each line at once, and a file is written in blocks.
        at_once = old.line_buffering or old.write_through
        text = io.TextIOWrapper(buffer, old.encoding, old.errors, line_buffering=at_once)
        setattr(sys, name, text)


def _open_if_closed(number: int, name: str) -> None:
    """Open the null device as a standard stream that was closed, as by `>&-`.

    Text that is printed there is dropped. The stream also gets its file descriptor back. Otherwise
    the next file that is opened would get it, with all that C code prints.
    """
    if getattr(sys, name) is not None:
        return
    # The null device is opened for reading and writing, because it serves all three streams.
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    # Child processes need the stream as well, and descriptors are not inherited by default.
    os.set_inheritable(number, True)
    setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


class Stopped(KeyboardInterrupt):
    """Signal `number`, which this process received. `except Exception` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def until_stopped(name: str, work: Callable[[], int], *, speaks: bool = True) -> int:
    """Call `work` and return its result, or 128 + the number of the signal that stops it.

    Args:
        name: name of the command, for the line on stderr.
        work: function that returns an exit code.
        speaks: True if this process prints that line. One rank does.

    Only the main thread gets signals. In another thread this is `work()`.
    """
    # Handlers can be installed in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return work()
    run = _Run(name, speaks)
    token = _current.set(run)
    try:
        with _watched(run):
            try:
                return work()
            except BaseException as error:
                # Stopped work may raise another error while it cleans up.
                if not run.asked and not isinstance(error, KeyboardInterrupt):
                    raise
                # A KeyboardInterrupt without a signal comes from code that raises it itself, such
                # as a debugger.
                run.asked = run.asked or signal.SIGINT
                run.say()
                _end_children()
                return 128 + run.asked
    finally:
        _current.reset(token)


def results_go_to(folder: Path) -> None:
    """Note the folder of the results, for the message of a stopped command.

    The first folder of a run counts.
    """
    run = _current.get()
    if run is not None:
        # A run may have parts in further folders, and the first folder contains them.
        run.folder = run.folder or folder


def how_to_continue(text: str) -> None:
    """Add advice to the line of a stopped command: `the same command with --name x continues`."""
    run = _current.get()
    if run is not None:
        run.continues = text


def hand_signals_over() -> None:
    """Leave signals to torchrun's agent from here on. It gives its ranks time to save.

    The thread that listens for signals ends, because the agent forks its ranks only in a process
    without other threads.
    """
    run = _current.get()
    if run is not None:
        # `_watched` then takes the command for ended, and does not kill it.
        run.ended.set()
    if run is not None and run.listener is not None:
        run.listener.end()


@contextlib.contextmanager
def ended_at_once(name: str, *, speaks: bool = True) -> Iterator[None]:
    """End the process after one line at each of `SIGNALS` while the block runs.

    Use it for the import of torch. There is nothing to save yet, and the import would swallow an
    exception out of a handler, or turn it into another error.
    """
    ending = threading.Lock()

    def end(number: int, frame: FrameType | None = None) -> None:
        # Two threads call this, or a second signal does. The first call speaks and ends them all.
        if not ending.acquire(blocking=False):
            return
        if speaks:
            line = f"{name}: stopped by {_sender(number)} while starting; nothing was saved\n"
            # os.write needs no lock. `print` could wait for one that the interrupted code holds.
            os.write(2, line.encode())
        # Not `sys.exit`: torch's import would swallow its exception.
        os._exit(128 + number)

    # In both threads: the main one may be inside a call that does not see the signal. It may also
    # have been about to start a call that sleeps, which a signal just before does not interrupt.
    with answered(end, hear=end):
        yield


class _Listener:
    """Thread that receives `SIGNALS` at once, while the main thread may be busy.

    Args:
        hear: function that is called with a signal's number in the thread.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self.hear = hear
        self.reader, self.writer = os.pipe()
        # The C-level handler must not block in a signal if the pipe is full.
        os.set_blocking(self.writer, False)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        self.outer = signal.set_wakeup_fd(self.writer)  # written by the C-level handler
        self.ended = False

    def _listen(self) -> None:
        while True:
            arrived = os.read(self.reader, 1)
            if not arrived:
                return  # the writer was closed
            if arrived[0] in SIGNALS:
                self.hear(arrived[0])

    def end(self) -> None:
        """End the thread. A second call does nothing."""
        if self.ended:
            return
        self.ended = True
        # The outer handler gets its wakeup descriptor back.
        signal.set_wakeup_fd(self.outer)
        # The thread reads the end of the pipe, and returns.
        os.close(self.writer)
        self.thread.join()
        os.close(self.reader)


@contextlib.contextmanager
def answered(
    handler: Callable[[int, FrameType | None], None],
    hear: Callable[[int], None],
) -> Iterator[_Listener | None]:
    """Call `handler` for `SIGNALS` in the block. Ignored signals stay ignored, as under nohup.

    Only the main thread gets signals. In other threads nothing happens.

    Args:
        handler: function `handler(number, frame)`, called in the main thread.
        hear: function `hear(number)`, called at once in a thread, while the main thread may be
            busy.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    listener = _Listener(hear)
    # A process under nohup ignores SIGHUP, and must go on after the terminal is closed.
    wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield listener
    finally:
        # None stands for a handler that Python did not install, which cannot be put back.
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        listener.end()


def _sender(number: int) -> str:
    """Return the name of a signal as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@dataclass
class _Run:
    """A command that a signal may stop.

    Attributes:
        name: name of the command.
        speaks: True if this process prints the line about the stop.
        folder: folder of the results.
        continues: advice on how to continue.
        asked: number of the signal that stopped it, or 0.
        is_lost: True if the exception was raised where none can leave.
        begin: time of the start, in seconds.
        ended: event that is set when no signal is awaited any more.
        listener: thread that receives signals.
        said: True if the line was printed.
    """

    name: str
    speaks: bool
    folder: Path | None = None
    continues: str = ""
    asked: int = 0
    is_lost: bool = False
    begin: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    listener: _Listener | None = None
    said: bool = False

    def say(self) -> None:
        """Print one line about the stop, once."""
        if self.said or not self.speaks:
            return
        self.said = True
        saved = what_is_saved(self.folder)
        # Advice on how to continue makes sense only if something was saved.
        more = f"; {self.continues}" if self.continues and not saved.startswith("nothing") else ""
        after = f"after {time.monotonic() - self.begin:.0f} s"
        print(
            f"{self.name}: stopped by {_sender(self.asked)} {after}; {saved}{more}",
            file=sys.stderr,
            flush=True,
        )


_current: ContextVar[_Run | None] = ContextVar("run that may be stopped", default=None)


def what_is_saved(folder: Path | None) -> str:
    """Describe what a folder of results holds. Remove an empty folder."""
    if folder is None:
        return "nothing was saved"
    names = []
    for path in sorted(folder.glob("*")):
        # Temporary files and the lock are not results.
        if not path.name.startswith((".tmp-", "run.lock")):
            names.append(path.name)
    if not names:
        # An empty folder would be listed as a run.
        with contextlib.suppress(OSError):
            folder.rmdir()
        return "nothing was saved"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return for_terminal(f"saved so far in {folder}: {', '.join(names[:SHOWN])}{more}")


@contextlib.contextmanager
def _watched(run: _Run) -> Iterator[None]:
    """Stop the block by `Stopped` at the first signal. End the process if it does not stop."""

    def raise_once(number: int, frame: FrameType | None) -> None:
        # A second signal must not interrupt the saving that the first one started.
        if not run.asked:
            run.asked = number
            raise Stopped(number)

    def ignore_stopped(failure: sys.UnraisableHookArgs) -> None:
        # It was raised where no exception can leave. `end_unless_ended` then ends the process.
        if issubclass(failure.exc_type, Stopped):
            run.is_lost = True
        else:
            shown(failure)

    def end_unless_ended(number: int) -> None:
        if run.ended.wait(GRACE_S):
            return
        # A main thread that saw the signal is on its way out. Another is in a call that does not
        # see it.
        is_ending = run.asked and not run.is_lost
        if is_ending and run.ended.wait(SAVING_S):
            return
        run.asked = number
        run.say()
        _end_children()
        sys.stdout.flush()
        # os._exit skips the cleanup that the main thread would have to take part in.
        os._exit(128 + number)

    shown = sys.unraisablehook
    sys.unraisablehook = ignore_stopped
    with answered(raise_once, end_unless_ended) as run.listener:
        try:
            yield
        finally:
            run.ended.set()
            sys.unraisablehook = shown


def _end_children() -> None:
    """End the processes of pools, which would otherwise outlive this one or delay its end."""
    for child in multiprocessing.active_children():
        child.kill()
