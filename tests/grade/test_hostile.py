"""`distlab grade` on submissions that harm: a verdict, an unchanged folder and no process left."""

import hashlib
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from distlab.grade import examination, grade, processes
from distlab.grade.report import BROKEN, HOLDS, NOT_EXAMINED

# The hostile function is that of one part. The other one is right, and must be graded.
SUBMISSION = """
import torch


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, eps=1e-5):
        with torch.enable_grad():
            ctx.leaves = x.detach().requires_grad_(), g.detach().requires_grad_()
            ctx.y = torch.nn.functional.rms_norm(ctx.leaves[0], g.shape, ctx.leaves[1], eps)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, upstream):
        return *torch.autograd.grad(ctx.y, ctx.leaves, upstream), None


def get_rmsnorm_autograd_function_triton():
    return Norm


def rmsnorm_backward_x_pytorch(upstream, x, g):
    return upstream


def rmsnorm_backward_g_pytorch(upstream, x, g):
    return upstream


def get_rmsnorm_autograd_function_pytorch():
"""

IMPORT_S = 3.0  # limit for an import that never ends, and has to begin
LOOP_S = 2.0  # limit for a part that never ends; a part that ends by itself has a minute
LOOP = """
    while True:
        pass
"""
FORK_BOMB = """
    import os
    import time
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)
"""
EXITS = """
    import os
    os._exit(0)
"""
ALLOCATES = """
    return torch.ones(10 * 2**30, dtype=torch.uint8)
"""
DELETES = """
    import os
    import shutil
    shutil.rmtree(os.getcwd())
    raise ValueError("it is gone")
"""
PRINTS = """
    for _ in range(100):
        print("x" * 2**20, flush=True)
    return Norm
"""
LIES = """
    torch.allclose = torch.equal = lambda *args, **options: True
    torch.Tensor.sum = lambda tensor, *args, **options: torch.zeros(())

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, g, eps=1e-5):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream, None, None

    return Nothing
"""
THREAD = """
    import threading
    import time
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return Norm
"""
STREAMS = """
    import os
    import sys
    try:
        os.write(0, b"x")
    except OSError:
        pass
    sys.stdout.close()
    return Norm
"""
SYSTEM_EXIT = """
    raise SystemExit(0)
"""
CHANGES_FILES = """
    import pathlib
    pathlib.Path(__file__).write_text("x = 1")
    return Norm
"""


def write(parent, body):
    """Write a submission whose function for RMSNorm in torch is hostile, and return its folder."""
    # With a name of its own: other tests that run now also have copies of submissions.
    folder = parent / uuid4().hex
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "adapters.py").write_text(SUBMISSION + body)
    (folder / "notes.txt").write_text("mine")
    return folder


def contents(folder):
    """Return path → hash of every file of a folder."""
    found = {}
    for file in sorted(folder.rglob("*")):
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        found[str(file.relative_to(folder))] = digest
    return found


def left_behind(name):
    """Return the processes whose working directory is a copy of a submission of this name."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            folder = os.readlink(entry / "cwd")
        except OSError:  # it has ended
            continue
        if f"/{name}" in folder:
            found.append(entry.name)
    return found


def observed_for_a_moment(job):
    """Run an experiment. The hostile part gets `LOOP_S`, and the right one all of its time."""
    is_hostile = job.part.name == "rmsnorm-pytorch"
    return processes.observe(replace(job, seconds=LOOP_S) if is_hostile else job)


def examine(folder):
    """Grade both parts, and check that nothing is changed and no process is left."""
    before = contents(folder)
    # What ends by itself has time for a machine that is busy with other work.
    report = grade(folder, only=["rmsnorm"], seconds=60)
    assert contents(folder) == before
    deadline = time.monotonic() + 10  # killed processes need a moment to end
    while left_behind(folder.name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind(folder.name) == []
    return report


@pytest.mark.parametrize(
    "body, said",
    [
        pytest.param(LOOP, f"no result within {LOOP_S:g} s", id="infinite loop"),
        pytest.param(FORK_BOMB, "it started more than 24 processes", id="fork bomb"),
        pytest.param(EXITS, "ended with exit code 0 before it had finished", id="os._exit"),
        pytest.param(ALLOCATES, "it took more than 0.7 GiB of memory", id="10 GB"),
        pytest.param(DELETES, "ValueError: it is gone", id="deletes its working directory"),
        # The limit on what is printed, or that on the size of a file, whichever comes first.
        pytest.param(PRINTS, "it printed more than 20 MiB|File too large", id="prints 100 MB"),
        pytest.param(LIES, "elements are wrong", id="patches torch"),
        pytest.param(SYSTEM_EXIT, "SystemExit", id="SystemExit"),
    ],
)
def test_harm_gets_a_verdict_and_the_rest_is_graded(body, said, tmp_path, monkeypatch):
    if body == ALLOCATES:  # less than 3 GiB, which not every machine has to spare
        monkeypatch.setattr(processes, "MEMORY_BYTES", int(0.7 * 2**30))
    if body == LOOP:
        monkeypatch.setattr(examination, "observe", observed_for_a_moment)
    report = examine(write(tmp_path, body))
    hostile = report.of_part("rmsnorm-pytorch")
    first = next(row for row in hostile if row.status == BROKEN)
    assert re.search(said, first.seen), report
    assert all(row.status in (BROKEN, NOT_EXAMINED) for row in hostile), report
    assert all(row.status == HOLDS for row in report.of_part("rmsnorm-triton")), report


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(THREAD, id="a thread that never ends"),
        pytest.param(STREAMS, id="closes stdout"),
        pytest.param(CHANGES_FILES, id="overwrites its file"),
    ],
)
def test_what_does_no_harm_to_results_is_graded_as_usual(body, tmp_path):
    report = examine(write(tmp_path, body))
    hands = [row for row in report.rows if not row.invariant.startswith("the gradient of")]
    assert all(row.status == HOLDS for row in hands), report
    # The functions for one gradient of the submission above are wrong.
    assert report.counts()[BROKEN] == 2


def test_a_module_that_never_ends_its_import_is_one_sentence(tmp_path):
    folder = write(tmp_path, "    return Norm\n\n\nwhile True:\n    pass\n")
    report = grade(folder, only=["rmsnorm"], seconds=IMPORT_S)
    begin = f"tests/adapters.py cannot be imported: no result within {IMPORT_S:g} s (rank 0 is at "
    assert report.failure.startswith(f"{begin}tests/adapt") and report.rows == []


# Ends as soon as it has forked itself, and so has another number each time that processes are
# listed. The first of them ends as well.
FORKS_AND_ENDS = """
import os, time
end = time.time() + 20
while time.time() < end:
    if os.fork():
        os._exit(0)
"""


# Regression: processes were listed once and killed, and one that was forked meanwhile stayed. It
# kept the fork server alive, for which the command waits at its end.
def test_no_process_of_a_session_outlives_its_end():
    for _ in range(20):
        leader = subprocess.Popen([sys.executable, "-c", FORKS_AND_ENDS], start_new_session=True)
        assert leader.wait(10) == 0
        processes._end(leader.pid)
        left = [pid for pid in processes._members(leader.pid) if not processes._is_dead(pid)]
        assert not left
