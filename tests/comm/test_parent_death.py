"""Processes that end with the one that started them, wherever they are when it dies."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import ROOT, environment

# A parent that starts a child in a session of its own, as torchrun's agent does, says its number,
# and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""
# Computes without ever giving Python a chance, as a rank in a long kernel or in a collective does.
BUSY = "print('ready', flush=True); hash_all = sum(range(10**12))"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        # the latter where it ends between opening and reading
        return False


def ends_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def parent_and_child(code):
    """A parent, and the process id of its child, which runs this code and has said that it is
    ready.
    """
    command = [sys.executable, "-c", PARENT, code]
    pipe = subprocess.PIPE
    parent = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe, text=True
    )
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "ready\n"
    return parent, child


@pytest.mark.parametrize("function", ["end_with_parent", "end_with_agent"])
def test_a_child_ends_when_its_parent_is_killed(function):
    code = f"from distlab.comm.parent_death import {function}; {function}(); {BUSY}"
    parent, child = parent_and_child(code)
    assert is_alive(child)
    parent.kill()
    assert ends_within(child, 2)
    parent.wait()


def test_a_rank_whose_agent_died_before_it_could_ask_ends_itself(tmp_path):
    """The kernel reports a parent's death only from when it is asked to.

    Until then a rank imports torch.
    """
    go = tmp_path / "go"
    child_code = f"""
import os, time
print("ready", flush=True)
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
from distlab.comm.parent_death import end_with_agent
end_with_agent()
open({str(tmp_path / "trained")!r}, "w").close()
time.sleep(60)
"""
    parent, child = parent_and_child(child_code)
    parent.kill()
    parent.wait()
    go.touch()
    assert ends_within(child, 30)
    assert "the agent that started this rank is gone" in parent.stderr.read()
    assert not (tmp_path / "trained").exists()
