"""How commands end: one line for what a person can mend, and an answer to Ctrl-C and SIGTERM
whatever is running.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from distlab.cli_errors import (
    hand_signals_over,
    is_out_of_memory,
    message_of,
    until_stopped,
    what_is_saved,
)
from distlab.files import atomic_path
from distlab.runs import make_folder
from launch import __main__ as command
from launch import ranks
from tests.commands import ROOT, be_python, environment, forked, on_terminal, shown


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("--size 0: at least one"), "--size 0: at least one"),
        (
            FileNotFoundError(2, "No such file or directory", "nope.json"),
            "nope.json: No such file or directory",
        ),
        (MemoryError("batch 4 does not fit"), "batch 4 does not fit"),
        (
            OSError(28, "No space", "a.txt"),
            "a.txt: No space: make room there, then give the same command again",
        ),
        (KeyError("ours"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_what_a_person_can_mend_is_a_line(error, line):
    assert message_of(error) == line


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried …\nmore")]
)
def test_memory_that_runs_out_is_said_with_what_helps(error):
    line = message_of(error)
    assert line.startswith("out of memory") and "--batch" in line and "\n" not in line


NCCL_SAID = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
    "error:\n"
)


@pytest.mark.parametrize(
    "said, fits",
    [
        ("CUDA driver error: out of memory", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", False),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", False),
        (f"{NCCL_SAID}Cuda failure 'out of memory'", False),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", False),
        (f"{NCCL_SAID}Cuda failure 700 'an illegal memory access was encountered'", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("the parameters are out of order", True),
    ],
)
def test_what_libraries_say_of_missing_memory(said, fits):
    assert is_out_of_memory(RuntimeError(said)) is not fits
    assert is_out_of_memory(torch.AcceleratorError(said)) is not fits


@pytest.mark.parametrize(
    "link, hidden, fits",
    [("__cause__", True, False), ("__context__", False, False), ("__context__", True, True)],
)
def test_an_error_around_one_about_memory_is_one(link, hidden, fits):
    """Raised `from` it, while it was handled, or `from None`."""
    error = RuntimeError("rank 1 was averaging gradients")
    setattr(error, link, torch.OutOfMemoryError("CUDA out of memory"))
    error.__suppress_context__ = hidden
    assert is_out_of_memory(error) is not fits


NAMES = {number: number.name for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}


@pytest.mark.parametrize("number, by", [*NAMES.items(), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_is_answered_with_what_was_saved(tmp_path, capsys, number, by):
    folder = make_folder(tmp_path, "bench", "now")

    def saves():
        joined = make_folder(tmp_path, "bench", "now")
        (joined / "records.json").write_text("[]")
        with atomic_path(joined / "half.json") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), number)
        raise AssertionError("goes on")

    before = signal.signal(number, signal.default_int_handler)
    try:
        assert until_stopped("bench", saves) == 128 + number
    finally:
        signal.signal(number, before)
    line = capsys.readouterr().err
    assert line == f"bench: stopped by {by} after 0 s; saved so far in {folder}: records.json\n"
    assert [path.name for path in folder.iterdir()] == ["records.json"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_answers_before_it_is_in_its_group_and_one_of_them_speaks(monkeypatch, capsys, rank):
    """Experiments import for seconds, and only then is there a context that knows the rank."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("ROLE_RANK", rank)

    def imports():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("goes on")

    assert command._to_end("bench", imports) == 143
    assert capsys.readouterr().err == "bench: stopped by SIGTERM after 0 s; nothing was saved\n" * (
        rank == "0"
    )


def test_a_signal_before_the_agent_listens_is_answered(monkeypatch, capsys):
    monkeypatch.setattr(
        ranks, "elastic_launch", lambda *_: lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    monkeypatch.setattr(ranks, "hand_signals_over", lambda: None)
    assert until_stopped("bench", lambda: ranks.start_ranks(["list"], 2, "gloo")) == 143
    assert re.fullmatch(
        r"bench: stopped by SIGTERM after \d+ s; nothing was saved\n", capsys.readouterr().err
    )


def be_command_that_starts_no_rank(command):
    """Be `python COMMAND…` on a machine without a GPU, and print how its ranks would be started."""

    def elastic_launch(config, entrypoint):
        print(config.start_method, [thread.name for thread in threading.enumerate()], flush=True)
        return lambda arguments: None

    torch.cuda.is_available = lambda: False
    ranks.elastic_launch = elastic_launch
    be_python(command)


@pytest.mark.parametrize("name", ["ddp_bench", "train", "check"])
def test_a_command_has_one_thread_when_its_ranks_start_and_forks_them(tmp_path, name):
    """A thread of our own would make every rank import torch again, which takes seconds."""
    commands = {
        "ddp_bench": ["run", "ddp_bench"],
        "train": ["train"],
        "check": ["check", "tests.test_check:mlp", "--strategy=flat"],
    }
    said = tmp_path / "said"
    process = forked(
        ["-m", "launch", *commands[name], "--nproc=2", "--backend=gloo"],
        said,
        said,
        be_command_that_starts_no_rank,
    )
    process.join(60)
    assert "fork ['MainThread']\n" in said.read_text()


def test_signals_that_were_handed_over_are_heard_by_no_thread():
    before = threading.active_count(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])

    def hands_over():
        hand_signals_over()
        hand_signals_over()
        assert (threading.active_count(), signal.set_wakeup_fd(-1)) == before
        return 0

    assert until_stopped("bench", hands_over) == 0
    assert (threading.active_count(), signal.set_wakeup_fd(before[1])) == before


def test_a_folder_in_which_nothing_was_saved_goes(tmp_path):
    folder = make_folder(tmp_path, "bench")
    assert what_is_saved(folder) == "nothing was saved" and not folder.exists()


def test_the_handlers_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert until_stopped("bench", lambda: 7) == 7
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(KeyError):
        until_stopped("bench", lambda: {}["missing"])
    assert not any("listen" in thread.name for thread in threading.enumerate())


STUCK = """
import hashlib, sys, weakref
from distlab.cli_errors import until_stopped

class Swallows:
    pass

def in_one_call() -> int:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # minutes in C, without Python's lock
    return 0

def in_a_callback() -> int:
    def called(reference):
        print("ready", flush=True)
        while True:  # an exception that is raised here goes nowhere
            pass
    watched = Swallows()
    reference = weakref.ref(watched, called)
    del watched
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)
    return 0

sys.exit(until_stopped("bench", {"call": in_one_call, "callback": in_a_callback}[sys.argv[1]]))
"""


# Two seconds on a quiet machine. What is ended would go on for 30 seconds and more.
SOON_S = 8.0


def ready(*code):
    """Start `python -c` of this, and return the process when it is ready for a signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", *code],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def sent_a_signal(number, *code):
    """What `python -c` of this says when it is ready and gets a signal, which ends it within two
    seconds.
    """
    process = ready(*code)
    begin = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < SOON_S and process.returncode == 128 + number
    return errors


@pytest.mark.parametrize("where, number", [("call", signal.SIGTERM), ("callback", signal.SIGINT)])
def test_a_main_thread_that_does_not_see_the_signal_is_ended_within_two_seconds(where, number):
    errors = sent_a_signal(number, STUCK, where)
    assert errors.startswith("bench: stopped by") and "Traceback" not in errors


SAVING = """
import sys, time
from distlab.cli_errors import until_stopped

def saves():
    try:
        print("ready", flush=True)
        time.sleep(30)
    finally:
        time.sleep(1.6)  # writes files, on a slow host
        print("saved", flush=True)

sys.exit(until_stopped("bench", saves))
"""


def test_a_main_thread_that_saw_the_signal_can_save():
    process = ready(SAVING)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=30)
    assert printed == "saved\n" and process.returncode == 143
    assert errors.startswith("bench: stopped by SIGTERM")


IMPORTING = """
import hashlib, sys, time
from distlab.cli_errors import ended_at_once

def swallows_exceptions():
    try:
        time.sleep(30)
    except BaseException:  # as an import does that tries something else instead
        time.sleep(30)

def sees_no_signal():
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)

with ended_at_once("bench"):
    print("ready", flush=True)
    {"exceptions": swallows_exceptions, "call": sees_no_signal}[sys.argv[1]]()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["exceptions", "call"])
def test_a_signal_during_the_imports_ends_the_process_with_one_line(number, where):
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert (
        sent_a_signal(number, IMPORTING, where)
        == f"bench: stopped by {by} while starting; nothing was saved\n"
    )


def test_ranks_answer_a_signal_within_two_seconds_and_one_of_them_speaks(tmp_path):
    """Sent to the command alone, as a scheduler does.

    Its ranks hear of it from torchrun's agent.
    """
    command = ["launch/ddp_bench.py", "--nproc=2", "--backend=gloo", f"--out={tmp_path / 'out'}"]
    command += ["--rounds=1000", "--check-steps=0", "--strategies=naive,flat"]
    process, terminal = on_terminal(command, tmp_path / "stdout")
    lines = shown(terminal)
    assert any("round 1/1000: naive" in line for line in lines)
    begin = time.monotonic()
    process.terminate()
    process.join(60)
    assert time.monotonic() - begin < SOON_S
    assert process.exitcode == 143 and (tmp_path / "stdout").read_text() == ""
    (said,) = [line for line in lines if line and "round" not in line]
    assert said.startswith("distlab run ddp_bench: stopped by SIGTERM after") and said.endswith(
        "; nothing was saved"
    )
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["ddp_bench"]


def be_command_with_closed_streams(command):
    """Be `python COMMAND…` after the shell closed the streams that `command[0]` lists."""
    closed, *command = command
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if name in closed.split(","):
            os.close(number)
            setattr(sys, name, None)  # as an interpreter does that finds it closed
    be_python(command)


def run_into(folder):
    return ["-m", "launch", "train", "--nproc=1", "--steps=1", "--name=a", f"--out={folder}"]


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_loses_no_run_and_ends_in_no_traceback(tmp_path, closed):
    said = tmp_path / "said"
    command = [closed, *run_into(tmp_path)]
    process = forked(command, said, said, be_command_with_closed_streams)
    process.join(60)
    assert process.exitcode == 0 and "Traceback" not in said.read_text(), said.read_text()
    assert (tmp_path / "train" / "a" / "report.html").is_file()


def test_streams_that_are_all_closed_lose_no_run(tmp_path):
    """In an interpreter that a shell starts: it finds the streams closed by itself."""
    command = " ".join([sys.executable, *run_into(tmp_path), "<&- >&- 2>&-"])
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment(), timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "train" / "a" / "report.html").is_file()
