"""End a rank when the process that started it ends.

An agent that is killed with SIGKILL, by a person or because memory ran out, cannot end its ranks.
They would go on training and write to the same folder as the next run of this name. On Linux the
kernel ends them: it sends a process a signal of its choice as soon as its parent dies. On other
systems a thread checks once a second whether the parent is still there.
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

    The signal is SIGKILL because a rank without its agent has no store, and soon no peers, and so
    cannot end in an orderly way. Files on disk are complete at every moment.

    Args:
        parent: process id of the parent, which may have died already. Default: the current parent.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel or the thread watched it
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent() -> None:
    """Call `end_with_parent` for a rank of torchrun's agent, which may be dead before this call."""
    # The agent starts each rank in its own session. So a process that leads its session is a child
    # of the agent, without a script between them. If its parent does not run Python, that parent
    # has inherited it from a dead agent.
    leads_its_session = os.getsid(0) == os.getpid()
    if leads_its_session and not _is_python(os.getppid()):
        print("the agent that started this rank is gone; ending now", file=sys.stderr, flush=True)
        os._exit(1)
    end_with_parent()


def _is_python(pid: int) -> bool:
    """Return whether a process runs Python. If that is not known, assume it of all but `init`."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        own_program = os.readlink("/proc/self/exe")
    except OSError:
        return pid != 1
    return program == own_program or "python" in Path(program).name


def _watch(parent: int) -> None:
    """End this process by SIGKILL when it has another parent."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
