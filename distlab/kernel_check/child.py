"""Examination of a kernel in a process of its own, which may hang, crash or print.

The parent calls `examined`. The child runs `main`, and writes a line of JSON into a pipe before and
after each input, so that the parent knows on which input it hangs or dies.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

import torch

from distlab.bench.task import factory_of
from distlab.kernel_check.hostile import Case
from distlab.kernel_check.judge import Outcome, has_compiled, works
from distlab.kernel_check.operations import operation_of
from distlab.kernel_check.report import Finding, Report, examine

MOST_RESTARTS = 5  # times that a child is started again after it hung or died
MOST_OUTPUT = 20 * 2**20  # bytes that a child may print
START_S = 60.0  # seconds until the first input begins (imports), or until its result (compilation)
POLL_S = 0.2


@dataclass(frozen=True)
class Examination:
    """Work for a child.

    Attributes:
        function: kernel, as `package.module:function`.
        operation: name of the operation that it claims to be.
        backward, count, seed, seconds: as in `check_kernel`.
        device: `cuda` or `cpu`.
        skipped: number of first cases to leave out.
    """

    function: str
    operation: str
    backward: bool
    count: int
    seed: int
    seconds: float
    device: str
    skipped: int = 0


class _Watched:
    """Knowledge of the parent about a child, from its messages.

    Attributes:
        number: number of the case that runs.
        case: input that runs, in words.
        error: sentence of a child that could not begin.
    """

    def __init__(self, report: Report, progress: Callable[[str], None]) -> None:
        self.report = report
        self.progress = progress
        self.number = -1
        self.case = ""
        self.error = ""

    def hear(self, message: dict[str, Any]) -> None:
        """Take a message."""
        if "begin" in message:
            self.number = message["begin"]
            self.case = message["case"]
            self.progress(f"input {self.number + 1}: {self.case}")
        elif "outcome" in message:
            self.report.add_counts(**message["outcome"])
        elif "finding" in message:
            self.report.add_finding(Finding(**message["finding"]))
        elif "left" in message:
            self.report.leave(message["left"])
        elif "error" in message:
            self.error = message["error"]

    def blame(self, kind: str, detail: str) -> None:
        """Add a mistake that the child cannot report itself, on the input that ran."""
        self.report.add_counts("wrong", kind, detail, 0.0, False)
        self.report.add_finding(Finding(kind, self.case or "(before the first)", detail))


def examined(
    work: Examination, *, case_s: float, progress: Callable[[str], None] = lambda text: None
) -> tuple[Report, str]:
    """Examine a kernel in child processes.

    Args:
        work: what to examine.
        case_s: seconds for one input. A child that takes longer is ended, and another one goes on
            with the next input. An input that may compile, the first of a child or any input of a
            kernel under `torch.compile`, has more: `START_S`, or `work.seconds` if that is less.
        progress: function that is called with a line before each input.

    Returns:
        The report, and what the kernel printed.

    Raises:
        ValueError: the function cannot be imported.
    """
    report = Report(work.operation)
    watched = _Watched(report, progress)
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        skipped = work.skipped
        for _ in range(MOST_RESTARTS + 1):
            report.leave(0)  # what the child before left, this one tries
            # Without time left, a child tries nothing and says how many inputs are left.
            seconds = max(work.seconds - (time.monotonic() - started), 0.0)
            ended = _run_child(
                replace(work, skipped=skipped, seconds=seconds),
                watched,
                output,
                case_s,
                first_s=max(case_s, min(START_S, work.seconds)),
            )
            if watched.error:
                raise ValueError(watched.error)
            if ended:
                break
            # After the input that ran. At least one further, so that a child that dies before its
            # first input is not started forever.
            skipped = max(watched.number + 1, skipped + 1)
        output.seek(0)
        printed = output.read(MOST_OUTPUT).decode(errors="replace")
    return report, printed


def _run_child(
    work: Examination,
    watched: _Watched,
    output: IO[bytes],
    case_s: float,
    first_s: float,
) -> bool:
    """Run one child. Return whether it came to its end, and need not be started again."""
    reader, writer = os.pipe()
    environment = dict(os.environ)
    if work.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    child = subprocess.Popen(
        [
            sys.executable,
            "-P",
            *("-W", "ignore::RuntimeWarning"),  # Triton's interpreter raises them
            "-m",
            "distlab.kernel_check.child",
            json.dumps(asdict(work)),
            str(writer),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[writer],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # so that it can be ended with all that it starts
    )
    # This process must not keep the pipe open: its end tells that the child is gone.
    os.close(writer)
    try:
        return _listen(child, reader, watched, output, case_s, first_s)
    finally:
        _end(child)
        os.close(reader)


def _listen(
    child: subprocess.Popen,
    reader: int,
    watched: _Watched,
    output: IO[bytes],
    case_s: float,
    first_s: float,
) -> bool:
    """Take the messages of a child until it ends. Return whether it came to its end."""
    buffered = b""
    limit_s = START_S  # until the first input begins
    has_result = False
    deadline = time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([reader], [], [], POLL_S)
        if os.fstat(output.fileno()).st_size > MOST_OUTPUT:
            watched.blame("prints", f"it printed more than {MOST_OUTPUT >> 20} MiB")
            return True
        if not ready:
            if time.monotonic() > deadline:
                watched.blame("does not end", f"there is no result after {limit_s:g} s")
                return False
            continue
        received = os.read(reader, 2**16)
        if not received:  # the child is gone
            return _why_gone(child, watched)
        # A read may end within a line. The rest of it comes with the next one.
        *lines, buffered = (buffered + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            watched.hear(message)
            if "begin" in message:
                # After the first result Triton's compilation is behind. Dynamo compiles anew for
                # other kinds of inputs.
                limit_s = case_s if has_result and not message["compiles"] else first_s
            elif "outcome" in message:
                has_result = True
            if "done" in message:
                return True
            if "again" in message:
                return False
        # A message is a sign of life.
        deadline = time.monotonic() + limit_s


def _why_gone(child: subprocess.Popen, watched: _Watched) -> bool:
    """Note how a child ended that did not say so. Return False: another one may go on."""
    try:
        code = child.wait(5)
    except subprocess.TimeoutExpired:  # it closed the pipe
        code = 0
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    if not watched.error:
        watched.blame("ends the process", f"the process ended ({how})")
    return False


def _end(child: subprocess.Popen) -> None:
    """End a child and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):  # it may have ended already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main(settings: str, descriptor: str) -> None:
    """Examine a kernel in this process, and write messages into a pipe."""
    work = Examination(**json.loads(settings))
    pipe = os.fdopen(int(descriptor), "w")
    torch.set_num_threads(1)

    def tell(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def begin(number: int, case: Case) -> None:
        tell({"begin": number, "case": str(case), "compiles": has_compiled()})

    def end(outcome: Outcome) -> None:
        counts = asdict(outcome)
        del counts["case"]
        tell({"outcome": counts})

    def found(finding: Finding) -> None:
        tell({"finding": asdict(finding)})

    def rest(count: int) -> None:
        tell({"left": count})

    try:
        function = factory_of(work.function, "distlab kernel")
    except ValueError as error:
        tell({"error": str(error)})
        return
    examine(
        function,
        operation_of(work.operation),
        torch.device(work.device),
        backward=work.backward,
        count=work.count,
        seed=work.seed,
        seconds=work.seconds,
        begin=begin,
        end=end,
        found=found,
        rest=rest,
        skipped=work.skipped,
    )
    if works(torch.device(work.device)):
        tell({"done": True})
    else:  # another process goes on with the next input
        tell({"again": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
