"""One writer per run folder: a lock file that names its holder, and takeover from a dead one.

    run.lock              made with O_EXCL, so that one of two processes that try at once makes it
    run.lock.after-3f2a…  made with O_EXCL by the one process that may succeed the dead holder with that digest,
                          then renamed over run.lock

The holder touches its file every few seconds. A holder on this machine is looked up by process id
and start time, so that a restart need not wait. A holder on another machine is watched: a file that
is touched has a living holder, one that is not touched for `stale_s` a dead one. Clocks of
different machines are never compared, and no `flock` is needed, which shared file systems may not
carry to other machines.

A holder that was only suspended (and so taken for dead) finds out when it next calls `check`,
before it writes.
"""

import contextlib
import hashlib
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from distlab.comm import RankContext, collectives

NAME = "run.lock"
REFRESH_S = 3.0  # between touches
STALE_S = 30.0  # without a touch: ten were missed
POLL_S = 0.5  # between looks at a lock of another machine


class FolderIsHeld(ValueError):
    """Another process writes to this folder; the message says which, since when, and what to do."""


class LockLost(OSError):
    """The folder has another writer, or is gone. This process must no longer write to it."""


@dataclass(frozen=True)
class Holder:
    """The process that writes to a folder.

    Attributes:
        host: name of the host, for messages.
        machine: host, boot and pid namespace, within which `pid` has a meaning.
        pid: process id.
        started: start time of the process in clock ticks since boot. None if it is not known.
        since: time in UTC at which it took the lock.
        token: text that differs from that of any other holder.
    """

    host: str
    machine: str
    pid: int
    started: int | None
    since: str
    token: str

    @staticmethod
    def me() -> "Holder":
        """Describe this process, now."""
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        pid = os.getpid()
        return Holder(
            socket.gethostname(), _machine(), pid, _start_of(pid), since, uuid.uuid4().hex
        )

    @staticmethod
    def parse(content: bytes) -> "Holder | None":
        """Parse the holder that a lock file names. None if the file does not name one (yet)."""
        try:
            holder = Holder(**json.loads(content))
            return holder if isinstance(holder.pid, int) and holder.pid > 0 else None
        except (ValueError, TypeError, RecursionError):
            return None

    def is_alive(self) -> bool | None:
        """Return whether the process lives. None if this machine cannot see it."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # another user's
        started = _start_of(self.pid)
        return None if started is None or self.started is None else started == self.started


class RunLock:
    """The lock of one folder, for one process.

    Args:
        folder: folder, which must exist.
        refresh_s: seconds between two touches while it is held.
        stale_s: seconds without a touch after which a holder on another machine counts as dead.

    Attributes:
        path: path of the lock file.
    """

    def __init__(self, folder: Path, *, refresh_s: float = REFRESH_S, stale_s: float = STALE_S):
        self.folder, self.refresh_s, self.stale_s = folder, refresh_s, stale_s
        self.path = folder / NAME
        self._content = json.dumps(asdict(Holder.me())).encode()
        self._file: int | None = None  # descriptor, while the lock is held
        self._stop = threading.Event()
        self._watched: tuple[bytes, int, float] | None = None  # content, touched, first seen so at

    def try_take(self) -> bool:
        """Take the lock. Return False if its holder on another machine may be dead.

        The caller then asks again after `POLL_S`.

        Raises:
            FolderIsHeld: by a process that lives.
            OSError: the folder cannot be written.
        """
        path, found = self.path, _read(self.path)
        while found is not None:
            if not self._is_dead(*found):
                return False
            path = self._successor(found[0])
            found = _read(path)
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:  # somebody was faster; who, the next look will say
            return False
        taken = False
        try:
            os.write(file, self._content)
            os.fsync(file)
            # The lock read above may have been released and taken again meanwhile: then this file
            # follows nothing.
            taken = self._is_mine()
        finally:
            if not taken:
                os.close(file)
                path.unlink(missing_ok=True)
        if not taken:
            return False
        if path != self.path:
            os.rename(path, self.path)
        for left in self.folder.glob(f"{NAME}.after-*"):
            left.unlink(missing_ok=True)
        self._file = file
        threading.Thread(target=self._refresh, args=(file,), daemon=True).start()
        return True

    def check(self) -> None:
        """Call it before writing.

        Raises:
            LockLost: the lock is another's by now.
        """
        if self._file is None or not self._is_mine():
            raise LockLost(
                f"{self.folder} is no longer this run's to write: its lock was removed, or was taken over by another "
                f"run because this one had shown no sign of life for {self.stale_s:g} s"
            )

    def release(self) -> None:
        """Give the folder free; does nothing where the lock is not held (any more)."""
        if self._file is None:
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self.path.unlink()
        os.close(self._file)
        self._file = None

    def _successor(self, content: bytes) -> Path:
        """The one file that may follow a lock of this content; tokens make contents unique."""
        return self.folder / f"{NAME}.after-{hashlib.sha256(content).hexdigest()[:16]}"

    def _is_mine(self) -> bool:
        """Return whether the chain from the lock file to its successors ends with this one."""
        found, last = _read(self.path), b""
        while found is not None:
            last = found[0]
            found = _read(self._successor(last))
        return last == self._content

    def _is_dead(self, content: bytes, touched: int) -> bool:
        """Return whether the holder is dead for certain. Raise FolderIsHeld if it lives."""
        holder = Holder.parse(content)
        alive = holder.is_alive() if holder else None
        if alive is False:
            return True
        if alive is None:
            if self._watched is None or self._watched[0] != content:
                self._watched = (content, touched, time.monotonic())
            if touched == self._watched[1]:
                return time.monotonic() - self._watched[2] >= self.stale_s
        who = (
            f"process {holder.pid} on {holder.host}, since {holder.since}"
            if holder
            else "another process"
        )
        raise FolderIsHeld(
            f"{self.folder} is being written by another run ({who}): wait until it ends, or end it, or give this run "
            "another --name"
        )

    def _refresh(self, file: int) -> None:
        while not self._stop.wait(self.refresh_s):
            with contextlib.suppress(OSError):
                os.utime(file)  # by descriptor: never the file of a successor


@contextlib.contextmanager
def hold(
    folder: Path, context: RankContext, progress: Callable[[str], None]
) -> Iterator[RunLock | None]:
    """Hold a folder's lock on rank 0 until the end. Yield it there, and None on the other ranks.

    All ranks must enter, and all raise the same error.

    A holder on another machine that shows no sign of life is waited for, at most `STALE_S`.

    Raises:
        FolderIsHeld, OSError: as in `RunLock.try_take`.
    """
    lock = RunLock(folder) if context.is_main else None
    for attempt in itertools.count():
        answer: bool | Exception = False
        try:
            answer = lock is not None and lock.try_take()
        except (FolderIsHeld, OSError) as error:
            answer = error
        if context.group is not None:
            answer = collectives.gather_objects(answer, context.group)[0]
        if isinstance(answer, Exception):
            raise answer
        if answer:
            break
        if attempt == 0:
            progress(
                f"{folder} has the lock of a run on another machine: waiting for a sign of life"
            )
        time.sleep(POLL_S)
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()


def _read(path: Path) -> tuple[bytes, int] | None:
    """Return a lock file's content and the time of its last touch.

    It is opened, because NFS asks the server only then.
    """
    try:
        with open(path, "rb") as file:
            touched = os.fstat(file.fileno()).st_mtime_ns
            return file.read(1 << 16), touched
    except FileNotFoundError:
        return None


def _machine() -> str:
    """Return host, boot and pid namespace.

    Containers may share their host's name, but not its process ids.
    """
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        known.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(known)


def _start_of(pid: int) -> int | None:
    """Return the start of a process in ticks since boot.

    It is −1 for a zombie, and None if there is no such process or it is hidden.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name before it may hold spaces and brackets
    state, *rest = stat.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(rest[18])
