"""One writer per run folder: a lock file that names its holder, and takeover from a dead holder.

    run.lock              made with O_EXCL, so that only one of two processes that try at the same
                          time makes it
    run.lock.after-3f2a…  made with O_EXCL by the one process that may succeed the dead holder whose
                          lock has this digest, and then renamed to run.lock

The holder touches its file every few seconds. A holder on this machine is looked up by process id
and start time, so that a restart does not have to wait. A holder on another machine is watched. If
its file is touched, it lives. If the file is not touched for `stale_s` seconds, it counts as dead.
Clocks of different machines are never compared. `flock` is not used, because shared file systems
may not carry it to other machines.

A holder that was suspended for so long counts as dead. It finds out in its next call of `check`,
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
REFRESH_S = 3.0  # time between two touches
STALE_S = 30.0  # time without a touch after which a holder counts as dead: ten missed touches
POLL_S = 0.5  # time between two reads of a lock of another machine


class FolderIsHeld(ValueError):
    """Another process writes to this folder. The message says which, since when, and what to do."""


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
        """Describe this process as the holder from now on."""
        pid = os.getpid()
        return Holder(
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            # The start time is needed because the system reuses process ids.
            started=_start_of(pid),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            token=uuid.uuid4().hex,
        )

    @staticmethod
    def parse(content: bytes) -> "Holder | None":
        """Parse the content of a lock file. None if it does not name a holder, or not yet."""
        try:
            holder = Holder(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(holder.pid, int) or holder.pid <= 0:
            return None
        return holder

    def is_alive(self) -> bool | None:
        """Return whether the process lives. None if that cannot be seen from this machine."""
        if self.machine != _machine():
            return None
        try:
            # Signal 0 is not sent. The call only checks that the process exists.
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # it exists, and belongs to another user
        started = _start_of(self.pid)
        if started is None or self.started is None:
            return None
        return started == self.started  # if they differ, another process has got the same id


class RunLock:
    """The lock of one folder, for one process.

    Args:
        folder: folder to lock. It must exist.
        refresh_s: seconds between two touches while it is held.
        stale_s: seconds without a touch after which a holder on another machine counts as dead.

    Attributes:
        path: path of the lock file.
    """

    def __init__(self, folder: Path, *, refresh_s: float = REFRESH_S, stale_s: float = STALE_S):
        self.folder = folder
        self.refresh_s = refresh_s
        self.stale_s = stale_s
        self.path = folder / NAME
        self._content = json.dumps(asdict(Holder.me())).encode()
        self._file: int | None = None  # descriptor while the lock is held
        self._stop = threading.Event()
        # Lock of another machine: content, time of its last touch, and time since when this process
        # has seen both unchanged.
        self._watched: tuple[bytes, int, float] | None = None

    def try_take(self) -> bool:
        """Take the lock if there is none, or if its holder is dead or counts as dead.

        Returns:
            True if this process has the lock. False if the holder may be dead but has not been
            watched for `stale_s` seconds, or another process takes the lock at this moment. The
            caller then asks again after `POLL_S` seconds.

        Raises:
            FolderIsHeld: a process that lives has the lock.
            OSError: the folder cannot be written.
        """
        # Follow the chain of dead holders to the file that the next holder must make.
        path = self.path
        found = _read(path)
        while found is not None:
            content, touched = found
            if not self._is_dead(content, touched):
                return False
            path = self._successor(content)
            found = _read(path)
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:  # another process was faster; the next call reads its lock
            return False
        taken = False
        try:
            os.write(file, self._content)
            # Flushed, so that other machines can read whom the lock names.
            os.fsync(file)
            # The lock that was read above may have been released and taken again meanwhile. Then
            # the chain does not lead to this file.
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
        """Check that this process still has the lock. Call it before writing.

        Raises:
            LockLost: another process has the lock, or it was removed.
        """
        if self._file is None or not self._is_mine():
            raise LockLost(
                f"{self.folder} is no longer this run's to write: its lock was removed, or was "
                "taken over by another run because this one had shown no sign of life for "
                f"{self.stale_s:g} s"
            )

    def release(self) -> None:
        """Release the lock. Does nothing if this process does not have it."""
        if self._file is None:
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self.path.unlink()
        os.close(self._file)
        self._file = None

    def _successor(self, content: bytes) -> Path:
        """Return the path of the one file that may follow a lock of this content.

        Contents are unique, because they have a token.
        """
        digest = hashlib.sha256(content).hexdigest()[:16]
        return self.folder / f"{NAME}.after-{digest}"

    def _is_mine(self) -> bool:
        """Return whether the chain from the lock file to its successors ends with this lock."""
        last = b""
        found = _read(self.path)
        while found is not None:
            last, _ = found
            found = _read(self._successor(last))
        return last == self._content

    def _is_dead(self, content: bytes, touched: int) -> bool:
        """Return whether the holder of a lock is dead, or is presumed dead.

        A holder whose process cannot be looked up from here is presumed dead after `stale_s`
        seconds in which no call has seen a new touch. Until then the answer is False.

        Args:
            content: bytes of the lock file that name the holder.
            touched: time of the file's last touch, in ns.

        Raises:
            FolderIsHeld: the holder lives: its process runs, or its file was touched again.
        """
        holder = Holder.parse(content)
        alive = None if holder is None else holder.is_alive()
        if alive is False:
            return True
        if alive is None:
            # It cannot be seen from here. A touch between two calls would prove that it lives.
            # Begin to count at the first look at this holder.
            if self._watched is None or self._watched[0] != content:
                self._watched = (content, touched, time.monotonic())
            _, first_touched, first_seen = self._watched
            if touched == first_touched:
                return time.monotonic() - first_seen >= self.stale_s
        shown = "another process"
        if holder is not None:
            shown = f"process {holder.pid} on {holder.host}, since {holder.since}"
        raise FolderIsHeld(
            f"{self.folder} is being written by another run ({shown}): wait until it ends, or end "
            "it, or give this run another --name"
        )

    def _refresh(self, file: int) -> None:
        """Touch the lock file until the lock is released. A thread runs this."""
        while not self._stop.wait(self.refresh_s):
            with contextlib.suppress(OSError):
                # By descriptor, so that it cannot be the file of a successor.
                os.utime(file)


@contextlib.contextmanager
def hold(
    folder: Path, context: RankContext, progress: Callable[[str], None]
) -> Iterator[RunLock | None]:
    """Hold a folder's lock on rank 0 inside the block. Yield it there, and None on other ranks.

    All ranks must enter. If a holder on another machine shows no sign of life, they wait for one
    for at most `STALE_S` seconds.

    Args:
        folder: folder to lock. It must exist.
        context: context of this rank.
        progress: function that gets a line if the ranks have to wait.

    Raises:
        FolderIsHeld, OSError: see `RunLock.try_take`. All ranks raise the same error.
    """
    lock = RunLock(folder) if context.is_main else None
    # Rank 0 decides, and all ranks leave the loop in the same round.
    for attempt in itertools.count():
        answer: bool | Exception = False
        if lock is not None:
            try:
                answer = lock.try_take()
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
    """Return a lock file's content and the time of its last touch in ns. None without the file."""
    try:
        # Opened, and not only looked up, because NFS asks the server only then.
        with open(path, "rb") as file:
            touched = os.fstat(file.fileno()).st_mtime_ns
            # A lock has some 300 bytes. The limit keeps a wrong file from filling the memory.
            return file.read(1 << 16), touched
    except FileNotFoundError:
        return None


def _machine() -> str:
    """Return host, boot and pid namespace of this process.

    The namespace is part of it, because containers may share their host's name, but not its process
    ids.
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
    # After the last bracket, because the name of the process may contain spaces and brackets.
    _, _, after_name = stat.rpartition(")")
    fields = after_name.split()
    state = fields[0]
    if state in "ZX":
        return -1
    return int(fields[19])  # `starttime` in proc_pid_stat(5)
