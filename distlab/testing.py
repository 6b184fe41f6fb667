"""Run any function on N ranks inside pytest.

    from distlab.testing import run_ranks
    import torch, torch.distributed as dist

    def sum_of_ranks(context):
        value = torch.tensor([float(context.rank)])
        dist.all_reduce(value, group=context.group)
        return value.item()

    def test_sum():
        assert run_ranks(sum_of_ranks, 3) == [3.0, 3.0, 3.0]

The function must be importable (defined at the top of a module, not in a notebook), takes the
rank's `RankContext` first, and its return value must be picklable. A script calls `run_ranks` under
`if __name__ == "__main__":`, because rank processes import the script. Rank processes are started
once and reused by later calls, each with a fresh process group, until an imported file changes.

A rank's exception is raised in the test with the rank's own traceback. A call that outlasts its
deadline ends with the stacks of the ranks that hang. Ranks that raised also serve the next call. If
a rank died or hangs, all are killed, and the next call starts new ones.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distlab.comm import RankContext, rank_context
from distlab.comm.parent_death import end_with_parent
from distlab.comm.rank_process import is_lost_peer

if TYPE_CHECKING:
    from distlab.check import Verdict

# Modules that the processes are forked with. A process's first optimizer imports torch._dynamo,
# which takes as long as the import of torch.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo"]
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
GRACE_S = 2.0  # time after the first failure in which the other ranks can report theirs
MEMORY_POLL_S = 0.05  # time between two looks at the memory of ranks that have a limit

# Kinds of failure, see `RanksFailed`.
RAISED = "raised"
DIED = "died"
TOO_LARGE = "too large"
NO_ANSWER = "no answer"
LOST_PEER = "lost peer"


class RanksFailed(RuntimeError):
    """One or more ranks raised, died or hung.

    Attributes:
        failures: rank → its traceback or fate. The rank that failed first comes first, and ranks
            whose error is only that another rank is gone come last.
        cause: the error or fate of the first of them, in one line.
        kind: kind of its failure. It `RAISED`, its process `DIED`, it took more memory than it may
            (`TOO_LARGE`), gave `NO_ANSWER`, or lost another rank (`LOST_PEER`).
    """

    def __init__(self, failures: dict[int, str], cause: str = "", kind: str = RAISED):
        first = next(iter(failures))
        self.failures = failures
        self.kind = kind
        # The first failure is the cause of all others.
        self.cause = cause or failures[first].strip().splitlines()[-1]
        sections = [f"--- rank {rank} ---\n{text}" for rank, text in failures.items()]
        super().__init__("\n".join([f"rank {first}: {self.cause}", *sections]))

    def __reduce__(self) -> Any:
        """Return how to unpickle this error. Python's default would use the message alone."""
        return RanksFailed, (self.failures, self.cause, self.kind)


@dataclass(frozen=True)
class _Failure:
    """Failure of one rank.

    Attributes:
        text: traceback, or the way the process ended.
        summary: one line of it.
        seconds: time of `time.monotonic()`, which is the same clock in all processes of a host.
        kind: see `RanksFailed`.
    """

    text: str
    summary: str
    seconds: float
    kind: str

    def place(self) -> tuple[int, float]:
        """Return the key that sorts causes before consequences.

        A rank that gave no answer can be the cause of a lost peer. It is not the cause of another
        rank's own error.
        """
        if self.kind == LOST_PEER:
            return 2, self.seconds
        if self.kind == NO_ANSWER:
            return 1, self.seconds
        return 0, self.seconds


class Interrupted(KeyboardInterrupt):
    """Interruption of `run_ranks`. A notebook shows its one line."""

    def _render_traceback_(self) -> list[str]:  # for IPython
        return [str(self)]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    device: str | None = None,
    deadline_s: float = 60.0,
    group_timeout_s: float = 20.0,
    memory_bytes: int | None = None,
) -> list[Any]:
    """Call `fn(context, *args)` on `world_size` ranks of one host.

    Returns the results in rank order.

    Args:
        fn: function that other processes can import.
        world_size: number of processes, one thread each.
        args: arguments that can be pickled. Every rank gets a copy.
        backend: `gloo` (on `device`) or `nccl` (rank r computes on `cuda:r`).
        device: device of gloo ranks, `cpu` (default) or a GPU that they share, such as `cuda:0`.
        deadline_s: seconds after which the whole call fails and its processes are killed.
        group_timeout_s: seconds, timeout of the process group, see `rank_context`.
        memory_bytes: bytes of memory that a rank's process may have resident, without pages of
            files, or None for no limit. Systems other than Linux do not tell.

    Raises:
        ValueError: `world_size` below one.
        TypeError: `fn` or an argument cannot be pickled, or `fn` is of a notebook or a prompt.
        RuntimeError: called while a script is imported, so that the rank processes cannot be
            started.
        RanksFailed: a rank raised, could not import `fn`, died, outlasted the deadline or took more
            memory than it may.
        KeyboardInterrupt: the caller was interrupted; the ranks are ended.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test that called this function
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: at least one rank")
    # multiprocessing sets this mark while a new process imports the main module.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A rank process imports an unguarded script. The script's own call says what to do.
        sys.exit(1)
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":
        del main.__file__  # with `python -`, new processes would look for a script of that name
    if not hasattr(main, "__file__") and getattr(fn, "__module__", None) == "__main__":
        raise TypeError(
            f"run_ranks starts new processes, and they cannot import {getattr(fn, '__name__', fn)} "
            "from a notebook or a prompt: write it to a file (in a notebook, `%%writefile "
            "on_ranks.py` as a cell's first line), and import it from there"
        )
    try:
        # Here, so that a function that cannot be pickled raises before any process is started.
        job = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            f"run_ranks needs an importable function and picklable arguments: {error}"
        ) from None
    _end_if_edited()
    try:
        ranks = _started_ranks(world_size, deadline_s)
        with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
            settings = (os.path.join(folder, "store"), world_size, backend, device, group_timeout_s)
            for rank, process in enumerate(ranks):
                # A pickled job is sent to each rank with its number and the settings of the group.
                process.pipe.send_bytes(pickle.dumps((rank, settings, job)))
            # From here, since starting the processes may take long, and is not the job's time.
            deadline = time.monotonic() + deadline_s
            results, failures = _collect(ranks, deadline, deadline_s, memory_bytes)
    except KeyboardInterrupt:
        shut_down()  # otherwise late answers would be taken for those of the next call
        raise Interrupted(
            f"run_ranks was interrupted, and its {world_size} ranks are ended"
        ) from None
    if failures:
        # Causes come first, because a reader looks at the first failure only.
        ordered = sorted(failures, key=lambda rank: failures[rank].place())
        first = failures[ordered[0]]
        texts = {rank: failures[rank].text for rank in ordered}
        raise RanksFailed(texts, first.summary, first.kind)
    return [results[rank] for rank in range(world_size)]


def check_gradients(
    model: Callable[[], Any] | str,
    wrap: Callable[..., Any] | str,
    ranks: int = 2,
    *,
    batch: int = 4,
    same_batch: bool = False,
    micro_batches: int | None = None,
    timeout_s: float = 20.0,
    optimizer: str = "sgd",
    where: bool = False,
) -> "Verdict":
    """Train two steps of a model on several ranks and in one process, and compare the gradients.

        verdict = check_gradients(build, parallelize)
        assert verdict.right, verdict

    Args:
        model: factory (`distlab.bench.task`) at the top level of a module, or its name
            `package.module:function`.
        wrap: function `wrap(module, group)` that returns a callable module, (callable module,
            finish), or (callable module, finish, make_optimizer), see `distlab.bench.wrappers`. Its
            name, or that of a strategy, is also allowed.
        ranks: number of ranks.
        batch: number of examples per micro-batch.
        same_batch: True to give all ranks the same batches, as for ranks that share a model's
            layers or a sequence.
        micro_batches: number of micro-batches per rank and step. Default: ranks + 1 (see
            `distlab.check.check`).
        timeout_s: seconds that a collective may take.
        optimizer: name of a class in `torch.optim`, such as `adamw`, or of one of your own,
            `package.module:Class`. Its state is compared as well.
        where: True to name the first module whose output, or its gradient, differs.

    Raises:
        ValueError, TimeoutError: as in `distlab.check.check`.
        RanksFailed: a rank's process died, or raised an error that the check does not expect.
    """
    __tracebackhide__ = True
    from distlab.check import on_rank

    options = {
        "batch": batch,
        "same_batch": same_batch,
        "micro_batches": micro_batches,
        "optimizer": optimizer,
        "where": where,
    }
    try:
        # The function and its arguments go by name, since rank processes import them.
        answers = run_ranks(
            _answer,
            ranks,
            on_rank,
            _name_of(model),
            _name_of(wrap),
            options,
            group_timeout_s=timeout_s,
            # The check trains twice and judges, which takes minutes for a large model.
            deadline_s=600.0,
        )
    except RanksFailed as failed:
        cause = (
            f"{failed.cause}. So nothing was compared with one process, and the model may be right "
            "or wrong"
        )
        raise RanksFailed(failed.failures, cause, failed.kind) from None
    # An error that the check expects is the same on all ranks.
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _name_of(function: Callable[..., Any] | str) -> str:
    """Return `package.module:function`."""
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{function.__name__}"


def _answer(
    context: RankContext,
    on_rank: Callable[..., Any],
    model: str,
    wrap: str,
    options: dict[str, Any],
) -> Any:
    """Return the result of `on_rank`, or the error meant for the user, without a traceback."""
    try:
        return on_rank(context, model, wrap, **options)
    except (ValueError, OSError) as error:
        return error


class _Rank:
    """A reusable rank process and the pipe to it."""

    def __init__(self) -> None:
        # A fork server has torch imported, and no threads that a fork could break.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self.stacks = tempfile.NamedTemporaryFile(prefix="distlab-stacks-", mode="r")  # noqa: SIM115
        arguments = (theirs, list(sys.path), self.stacks.name)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        # The child has the other end. An open copy here would hide that the child has ended.
        theirs.close()

    def dump_stack(self) -> str:
        """Return the Python stacks of the process's threads at this moment."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            # The signal's handler writes the stack within a moment.
            time.sleep(0.2)
        return self.stacks.read()

    def fate(self) -> _Failure:
        """Return how the process ended, with the stacks that a crash in native code left."""
        self.process.join()
        code = self.process.exitcode
        fate = f"the process died, exit code {code}"
        if -code in list(signal.Signals):
            fate += f" ({signal.Signals(-code).name})"
        # The message of gloo is on stderr alone, and does not say what it means.
        if code == -signal.SIGABRT:
            fate += (
                ", as gloo ends a process that receives a longer message than it expects: ranks "
                "are in different collectives, or their tensors differ in size"
            )
        text = "\n".join([fate, *self.stacks.read().splitlines()])
        return _Failure(text, fate, time.monotonic(), DIED)

    def resident_bytes(self) -> int:
        """Return the memory that the process has resident. 0 where the system does not say.

        Pages of files, such as torch's libraries, are not counted: the ranks share them.
        """
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        except OSError:  # not Linux, or the process has ended
            return 0
        _, resident, of_files, *_ = map(int, pages)
        return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """Kill the process, and its process group if it leads one. Close the pipe to it."""
        # A process leads a group only after os.setsid, which a job may call.
        with contextlib.suppress(ProcessLookupError):  # there is no such group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.stacks.close()


_ranks: list[_Rank] = []  # this process's rank processes, kept between calls
# File of an imported module → time at which it was written, as the rank processes know it.
_sources: dict[str, float] = {}


def _end_if_edited() -> None:
    """End rank processes that may have imported a file of the user's before it was edited."""
    now = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        # Installed packages and Python's library do not change while tests run.
        if file and "site-packages" not in file and not file.startswith(STANDARD_LIBRARY):
            with contextlib.suppress(OSError):  # a module whose file is gone stays imported
                now[file] = os.stat(file).st_mtime
    if any(_sources.get(file, written) != written for file, written in now.items()):
        shut_down()
    _sources.update(now)


def _started_ranks(world_size: int, deadline_s: float) -> list[_Rank]:
    """Return rank processes that are ready, some of them from earlier calls."""
    __tracebackhide__ = True
    # One that is gone leaves the others in a job that cannot end.
    if any(not rank.process.is_alive() for rank in _ranks):
        shut_down()
    # All are started before any is waited for, so that they import at the same time.
    new = [_Rank() for _ in range(world_size - len(_ranks))]
    _ranks.extend(new)
    for rank in new:
        try:
            # The process imports the main module before it answers.
            if not rank.pipe.poll(deadline_s):
                raise EOFError
            rank.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            shut_down()
            script = getattr(sys.modules["__main__"], "__file__", "the main module")
            raise RuntimeError(
                f"the rank processes did not get past importing {script}, as each new process "
                "does: put what the script runs, also its call of run_ranks, under "
                '`if __name__ == "__main__":`'
            ) from None
    return _ranks[:world_size]


def shut_down() -> None:
    """Kill the rank processes. The next `run_ranks` starts new ones."""
    while _ranks:
        _ranks.pop().kill()


atexit.register(shut_down)


def _collect(
    ranks: list[_Rank], deadline: float, allowed_s: float, memory_bytes: int | None
) -> tuple[dict[int, Any], dict[int, _Failure]]:
    """Wait for every rank's answer. After a failure, wait only `GRACE_S` more.

    If a rank gives no answer, all ranks are ended, also if one takes more than `memory_bytes`.

    Returns:
        (rank → result, rank → failure).
    """
    results = {}
    failures = {}
    waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
    lost = False
    while waiting:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        if memory_bytes is not None:
            # A wait of at most this long ends between two looks at the memory.
            remaining = min(remaining, MEMORY_POLL_S)
            for pipe, number in list(waiting.items()):
                if ranks[number].resident_bytes() > memory_bytes:
                    ranks[number].process.kill()  # at once, before the machine has no memory left
                    del waiting[pipe]
                    lost = True
                    fate = f"the process took more than {memory_bytes / 2**30:.1f} GiB"
                    failures[number] = _Failure(fate, fate, time.monotonic(), TOO_LARGE)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        # `wait` returns the pipes that have an answer or were closed.
        for pipe in wait(list(waiting), timeout=remaining):
            number = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                lost = True
                succeeded, value = False, ranks[number].fate()
            if succeeded:
                results[number] = value
            else:
                failures[number] = value
                # The other ranks may fail by themselves, with a message of their own.
                deadline = min(deadline, time.monotonic() + GRACE_S)
    reason = f"no answer within {allowed_s:g} s"
    if any(failure.kind != LOST_PEER for failure in failures.values()):
        reason = "stopped after another rank's failure"
    elif failures:
        reason = "no answer, while other ranks waited for this one in vain"
    for number in waiting.values():
        # Before the processes are ended: afterwards there is no stack.
        text = f"{reason}; its stack was:\n{ranks[number].dump_stack()}"
        failures[number] = _Failure(text, reason, time.monotonic(), NO_ANSWER)
    # A rank that is still in a job would answer it in place of the next one.
    if waiting or lost:
        shut_down()
    return results, failures


def _serve(pipe: Connection, path: list[str], stacks: str) -> None:
    """Run one job after another in a rank process, until the pipe closes."""
    # The rank must find the same modules as its caller, in the same order.
    sys.path[:] = path
    # A terminal's Ctrl-C is for the caller, which ends this process.
    signal.signal(signal.SIGINT, lambda *_: None)
    # A job may start processes, such as a DataLoader's. They are forked, as in a script, and end
    # with this process. A fork server and its children would keep each other alive. The caller
    # notices the end of this process by the pipe.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    forking = []

    def end_with_me() -> None:
        pipe.close()
        end_with_parent(forking[-1])

    os.register_at_fork(before=lambda: forking.append(os.getpid()), after_in_child=end_with_me)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    # Ranks share the cores. With a pool of threads each they would wait for each other.
    torch.set_num_threads(1)
    with open(stacks, "w") as stack_file:
        faulthandler.enable(stack_file)  # a crash in native code leaves the stacks of all threads
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            try:
                # Results are pickled here, so that one that cannot be pickled becomes this rank's
                # failure.
                answer = pickle.dumps((True, _run_job(message)))
            except BaseException as error:
                answer = pickle.dumps((False, _raised(error)))
            pipe.send_bytes(answer)


def _raised(error: BaseException) -> _Failure:
    """Return the failure of a rank that raised, without the frames of this file."""
    frames = error.__traceback__
    # The user's error begins with the user's function.
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # A SyntaxError begins with its place.
    messages = [line for line in lines if not line.startswith(" ")]
    summary = messages[0] if messages else lines[0]
    kind = LOST_PEER if is_lost_peer(_first_of_chain(error)) else RAISED
    return _Failure(text, summary, time.monotonic(), kind)


def _first_of_chain(error: BaseException) -> BaseException:
    """Return the first error of a chain of errors that were raised while handling others."""
    before = error.__cause__
    if before is None and not error.__suppress_context__:
        before = error.__context__
    return error if before is None else _first_of_chain(before)


def _end_with_caller() -> None:
    """End this process when the one that called `run_ranks` is gone.

    Its parent is the fork server, which lives on.
    """
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run_job(message: bytes) -> Any:
    """Unpickle a job and run it in a process group of its own."""
    rank, (path, world_size, backend, device, timeout_s), job = pickle.loads(message)
    try:
        fn, args = pickle.loads(job)
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"a rank process cannot import the function or an argument ({error}): define it at the "
            "top of a module"
        ) from None
    # A job ends with a garbage collection, which need not search torch and the other imports.
    gc.freeze()
    # A file needs no port, so calls of several test processes do not collide.
    store = dist.FileStore(path, world_size)
    with rank_context(
        backend=backend,
        device=device,
        timeout_s=timeout_s,
        store=store,
        rank=rank,
        world_size=world_size,
    ) as context:
        return fn(context, *args)
