"""Start the ranks of a command, and report which of them failed and how."""

import argparse
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from distlab.cli_errors import SIGNALS, USAGE_ERROR, hand_signals_over
from distlab.comm import RankContext, RankEnvironment
from distlab.comm.context import choose_device
from distlab.comm.rank_process import run_rank
from distlab.measure.memory import free_bytes

WRONG = 1  # exit code of a command that did its work and found something wrong
# Environment variable with the path of a file to which rank 0 writes the exit code of its work.
VERDICT_FILE = "DISTLAB_VERDICT_FILE"
COMMAND = Path(__file__).with_name("__main__.py")
HINTS = {
    signal.SIGKILL: "; unless another process sent it, the kernel did, because memory ran out",
    signal.SIGBUS: (
        "; a file that it had mapped became shorter, for example the data, or shared memory ran out"
    ),
}
# Resident memory of a process that has imported torch and done nothing else.
RANK_BYTES = 300 * 2**20


def start_ranks(
    arguments: Sequence[str], ranks: int, backend: str | None, max_restarts: int = 0
) -> int:
    """Run `ranks` processes under torchrun's agent, in this process, and wait for them.

    Args:
        arguments: arguments of the command `distlab`, for every rank.
        max_restarts: number of times to restart all ranks after one failed.

    Returns:
        0, or the exit code of the rank that failed first, after a line that says which rank and how
            it ended. 128 + n if this process was stopped by signal n.

    Raises:
        ValueError: more NCCL ranks than GPUs, or more ranks than this machine's memory holds.
    """
    # This call is made for its error only: rank 0's device is checked before any process starts.
    choose_device(backend, 0, ranks)
    free = free_bytes("cpu")
    # Two ranks are always allowed, because the figure of free memory is an estimate.
    if free is not None and ranks > max(2, free // RANK_BYTES):
        raise ValueError(
            f"--nproc {ranks}: a rank's process takes {RANK_BYTES / 2**30:.1f} GiB before it does "
            f"anything, and {free / 2**30:.1f} GiB are free; start at most "
            f"{max(2, free // RANK_BYTES)} here"
        )
    # One thread per rank is torchrun's default. Set here, torchrun prints no warning about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = [f"--nproc_per_node={ranks}", f"--max_restarts={max_restarts}"]
    # Signals that this process ignores, for example under nohup, must not end the ranks.
    heard = [number.name for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    options += ["--signals-to-handle", ",".join(heard)]
    # The agent logs signals and exit codes. This function and the ranks report them in short.
    # A user who sets LOGLEVEL wants to see the agent's messages.
    if "LOGLEVEL" not in os.environ:
        for module in (
            "torch.distributed.elastic.agent.server.api",
            "torch.distributed.elastic.multiprocessing.api",
            "torch.multiprocessing.spawn",
        ):
            logging.getLogger(module).setLevel(logging.CRITICAL)
    hand_signals_over()
    try:
        # As a file: of `-m launch` Python would take a launch.py in the user's folder for ours.
        command = [*options, str(COMMAND), *_without_own(arguments)]
        # CUDA's runtime does not survive a fork, so torchrun starts new processes.
        if torch.cuda.is_available():
            torchrun.run(torchrun.parse_args(["--standalone", *command]))
        else:
            # The first optimizer of a process imports it. Forked ranks then have it already.
            importlib.import_module("torch._dynamo")
            alone = [
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0",
                f"--rdzv-id={uuid.uuid4()}",
            ]
            # A fork has only the thread that forked: a lock that another thread holds stays locked
            # in the child, which then hangs. A spawned process starts anew, which takes seconds
            # longer.
            method = "fork" if threading.active_count() == 1 else "spawn"
            config, *_ = torchrun.config_from_args(
                torchrun.parse_args([*alone, f"--start-method={method}", *command])
            )
            elastic_launch(config, _forked)(_without_own(arguments))
    except SignalException as stopped:
        # The agent forwarded the signal to the ranks and has waited for them.
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USAGE_ERROR:  # a usage error has had its message
            print(f"rank {rank} {_how_it_ended(failure.exitcode)}", file=sys.stderr)
        # A negative code is a signal's number. An exit code must be positive, so it becomes 1.
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def run_on_ranks(
    work: Callable[[RankContext], int],
    arguments: Sequence[str],
    options: Any,
    ranks: int | None,
    name: str,
    verdict: Path | None = None,
) -> int:
    """Run `work` if this process is a rank. Otherwise start the ranks of `distlab ARGUMENTS`.

    Args:
        options: options with `nproc`, `backend`, `timeout` and `max_restarts`, see
            `distlab.experiment.RankOptions`.
        ranks: number of ranks if `nproc` is None. None: one per GPU, or two on a machine without.
        name: name of the command, for messages.
        verdict: file for the exit code that `work` returns on rank 0; by default a temporary one.

    Returns:
        The exit code: that of `work` on rank 0, or that of a rank that failed.
    """
    # torchrun started this process, so it must do the work and start nothing.
    if RankEnvironment.read().launched:
        return run_rank(
            lambda context: _leave_verdict(work(context), context),
            backend=options.backend,
            timeout_s=options.timeout,
            name=name,
        )
    # With gloo the number of GPUs does not matter.
    gpus = torch.cuda.device_count() if options.backend != "gloo" else 0
    ranks = options.nproc or ranks or gpus or 2
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        verdict = Path(folder) / "exit_code" if verdict is None else verdict
        # Ranks inherit the environment. An exit code of theirs would look like a crash, see
        # `_leave_verdict`.
        os.environ[VERDICT_FILE] = str(verdict)
        try:
            code = start_ranks(arguments, ranks, options.backend, options.max_restarts)
        finally:
            del os.environ[VERDICT_FILE]
        # A code of a rank that failed is worth more than a verdict that was written before.
        return int(verdict.read_text()) if code == 0 and verdict.exists() else code


def _leave_verdict(code: int, context: RankContext) -> int:
    """Write a rank's exit code into the file that the launching process reads, and return 0.

    A rank that ends with another code than 0 makes torchrun stop the others, with messages as after
    a crash. A wrong result is not a crash. Under a torchrun that the user started there is no such
    file, and the code is returned.
    """
    path = os.environ.get(VERDICT_FILE)
    if path is None or code not in (0, WRONG):
        # 128 + n of a rank that signal n stopped: the agent waits for ranks that end by it
        return code
    if context.is_main:
        Path(path).write_text(str(code))
    return 0


def _forked(arguments: Sequence[str]) -> None:
    """Run a rank of `distlab ARGUMENTS` in a fork of the agent's process."""
    from launch.__main__ import main

    try:
        code = main(arguments)
    except Exception:
        # Printed here, because otherwise only the agent's log would get it.
        traceback.print_exc()
        code = 1
    # A rank that returns normally counts as ended well. Only an exit reports another code.
    if code:
        sys.exit(code)


def _how_it_ended(code: int) -> str:
    """Describe a rank's exit code. 128 + n means that it answered signal n."""
    number = -code if code < 0 else code - 128
    # Exit codes above 128 that fit no signal are a program's own.
    if number not in list(signal.Signals):
        return f"ended with an error (exit code {code})"
    verb = "ended with" if code < 0 else "was stopped by"
    return f"{verb} signal {signal.Signals(number).name} (exit code {code}){HINTS.get(-code, '')}"


def _without_own(arguments: Sequence[str]) -> list[str]:
    """Remove `--nproc N` and `--max-restarts N`, which torchrun would take for its own options."""
    # Abbreviations such as --np must stay, because they may belong to the experiment's options.
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--nproc")
    own.add_argument("--max-restarts")
    return own.parse_known_args(arguments)[1]
