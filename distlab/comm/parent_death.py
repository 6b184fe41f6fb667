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
    """Have this process ended by SIGKILL when its parent dies (on Linux the thread of it that started this process).

    SIGKILL, because a rank without its agent has no store and soon no peers, so that an orderly end
    is not to be had; what is on the disk is whole at every moment.

    Args:
        parent: its process number, which one that has died meanwhile does not show any more;
            default: as it is now.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died between the two calls
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent() -> None:
    """`end_with_parent` for a rank whose parent is torchrun's agent, which may have died before this call.

    The agent starts each rank in a session of its own. So a process that leads its session is the
    agent's own child and no script's in between, and if its parent is no Python, it is the one that
    inherited it from a dead agent.
    """
    if os.getsid(0) == os.getpid() and not _is_python(os.getppid()):
        print("the agent that started this rank is gone; ending now", file=sys.stderr, flush=True)
        os._exit(1)
    end_with_parent()


def _is_python(pid: int) -> bool:
    """Whether a process runs this Python or another; where that cannot be known, whether it is not `init`."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        return program == os.readlink("/proc/self/exe") or "python" in Path(program).name
    except OSError:
        return pid != 1


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
