"""Ranks end when the process that started them does.

An agent that is killed with SIGKILL (by a person, or for memory) cannot end its ranks. They would
train on, out of reach, and collide with the next run of the same name. Here the kernel ends them:
on Linux it sends a process the signal that the process has asked for as soon as its parent dies,
whatever the process is doing. Elsewhere a thread looks once a second.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """Have this process ended by SIGKILL when its parent dies.

    On Linux the parent is the thread that started this process.

    It is SIGKILL because a rank without its agent has no store and soon no peers, so it cannot end
    in an orderly way. Files on disk are complete at every moment.

    Args:
        parent: process number of the parent, for one that may have died already. Default: the
            current parent.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died between the two calls
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent() -> None:
    """Call `end_with_parent` for a rank of torchrun's agent, which may be dead before this call.

    The agent starts each rank in its own session. So a process that leads its session is a child of
    the agent, without a script between them. If its parent does not run Python, that parent has
    inherited it from a dead agent.
    """
    if os.getsid(0) == os.getpid() and not _is_python(os.getppid()):
        print("the agent that started this rank is gone; ending now", file=sys.stderr, flush=True)
        os._exit(1)
    end_with_parent()


def _is_python(pid: int) -> bool:
    """Return whether a process runs Python. If unknown, return whether it is not `init`."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        return program == os.readlink("/proc/self/exe") or "python" in Path(program).name
    except OSError:
        return pid != 1


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
