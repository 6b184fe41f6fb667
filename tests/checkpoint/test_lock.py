"""One writer per run folder: who is refused, whose lock is taken over, and that nobody
shares it.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distlab.checkpoint import lock as lock_module
from distlab.checkpoint.lock import NAME, FolderIsHeld, Holder, LockLost, RunLock


def write(folder, holder):
    (folder / NAME).write_text(json.dumps(asdict(holder)))
    return folder / NAME


def elsewhere():
    return replace(Holder.me(), host="other-host", machine="other-host another boot")


def test_the_second_is_refused_and_told_who_holds_the_folder_since_when_and_what_to_do(tmp_path):
    first = RunLock(tmp_path)
    assert first.try_take()
    with pytest.raises(
        FolderIsHeld, match=rf"process {os.getpid()} on \S+, since 20\d\d-\d\d-\d\d .* UTC"
    ) as caught:
        RunLock(tmp_path).try_take()
    assert "another --name" in str(caught.value) and "\n" not in str(caught.value)
    first.check()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second = RunLock(tmp_path)
    assert second.try_take()
    second.release()


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path):
    ended = subprocess.Popen(["true"])  # not waited for yet: a zombie
    while Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    me = Holder.me()
    reused = replace(me, started=me.started - 1)  # an older process that had this one's number
    for holder in (replace(me, pid=ended.pid), reused):
        write(tmp_path, holder)
        lock = RunLock(tmp_path)
        assert lock.try_take()
        lock.release()
        assert list(tmp_path.iterdir()) == []
    ended.wait()
    write(tmp_path, replace(me, pid=ended.pid))
    assert RunLock(tmp_path).try_take()


def test_a_lock_of_another_machine_is_refused_while_it_is_touched_and_taken_over_when_it_is_not(
    tmp_path,
):
    path = write(tmp_path, elsewhere())
    os.utime(path, (1, 1))  # clocks differ: only changes count
    lock = RunLock(tmp_path, stale_s=0.2)
    assert not lock.try_take()  # no telling yet
    os.utime(path, (2, 2))
    with pytest.raises(FolderIsHeld, match="on other-host"):
        lock.try_take()
    lock, begin = RunLock(tmp_path, stale_s=0.2), time.monotonic()
    while not lock.try_take():
        time.sleep(0.01)
    assert time.monotonic() - begin >= 0.2
    assert [file.name for file in tmp_path.iterdir()] == [
        NAME
    ]  # under the first name again, and nothing beside it
    lock.check()


def test_a_holder_touches_its_file(tmp_path, monkeypatch):
    holder = RunLock(tmp_path, refresh_s=0.02)
    assert holder.try_take()
    monkeypatch.setattr(Holder, "is_alive", lambda self: None)  # as another machine sees it
    other = RunLock(tmp_path, stale_s=60)
    with pytest.raises(FolderIsHeld):
        while not other.try_take():
            time.sleep(0.01)
    holder.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[[1]]", b'{"pid": 1}', b"[" * 100_000])
def test_a_lock_that_says_nothing_is_waited_for_and_taken_over(tmp_path, content):
    """A process that died between making the file and writing to it."""
    (tmp_path / NAME).write_bytes(content)
    lock = RunLock(tmp_path, stale_s=0.1)
    assert not lock.try_take()
    time.sleep(0.11)
    assert lock.try_take()


def test_of_many_that_find_a_dead_lock_at_once_one_gets_it(tmp_path):
    dead = replace(Holder.me(), started=1)
    for round_number in range(20):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        write(folder, dead)
        taken: list[RunLock] = []
        start = threading.Barrier(8)

        def contend(folder=folder, taken=taken, start=start):
            lock = RunLock(folder)
            start.wait()
            try:
                while not lock.try_take():
                    pass
                taken.append(lock)
            except FolderIsHeld:
                pass

        threads = [threading.Thread(target=contend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = taken
        winner.check()
        winner.release()
        assert list(folder.iterdir()) == []


def test_who_was_suspended_and_taken_for_dead_finds_out_and_leaves_the_successor_alone(
    tmp_path, monkeypatch
):
    suspended = RunLock(tmp_path)
    assert suspended.try_take()
    with monkeypatch.context() as patch:
        patch.setattr(Holder, "is_alive", lambda self: False)
        successor = RunLock(tmp_path)
        assert successor.try_take()
    with pytest.raises(LockLost, match="no longer this run's to write"):
        suspended.check()
    suspended.release()
    successor.check()
    shutil.rmtree(tmp_path)
    with pytest.raises(LockLost):
        successor.check()
    successor.release()


def test_where_the_lock_cannot_be_written_nothing_is_left(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock_module.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            RunLock(tmp_path).try_take()
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_saw_no_lock_one_gets_it(tmp_path, monkeypatch):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    assert first.try_take()
    looks, read = iter([None]), lock_module._read
    monkeypatch.setattr(lock_module, "_read", lambda path: next(looks, read(path)))
    assert not second.try_take()
    first.check()
    first.release()
