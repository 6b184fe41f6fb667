"""Device and code of a record. No host names, no paths: records are committed and
published.
"""

import argparse
import contextlib
import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from distlab import __version__


def environment(device: torch.device | str) -> dict[str, str | int | None]:
    """Versions and hardware, the same keys on every machine; what does not exist here is None.

    Args:
        device: the device that the measurements ran on; its type decides ``device_name`` and
            ``device_count``.
    """
    device = torch.device(device)
    # Without CUDA in use its versions would claim something that the run did not depend on.
    on_cuda = device.type == "cuda"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "distlab": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda if on_cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        "device_name": torch.cuda.get_device_name(device) if on_cuda else _cpu_model(),
        "device_count": torch.cuda.device_count() if on_cuda else 1,
        "cpu_model": _cpu_model(),
        # Cores that this process may use. A container or taskset may allow fewer than there are.
        "cpu_cores": cores,
        "cpu_threads_per_rank": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """Return a command that repeats this run.

    It is `distlab …`, or the script that was started, under torchrun if it runs on ranks.

    Paths inside the checkout become relative to it, and of other absolute paths only the last part
    is kept.
    """
    root = Path(__file__).resolve().parents[2]
    # torchrun adds -u, and the user did not type it.
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    if words[:1] == ["-c"]:  # a worker of a process pool: its command is not the user's
        return "python -c …"
    # Absolute paths name the user's folders, and records are published.
    words = [
        re.sub(r"(^|=)(/.*)", lambda found: found[1] + _without_folders(found[2], root), w)
        for w in words
    ]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments = _of_distlab(words)
    if arguments is not None:
        # The number of ranks is written out, since the default depends on the machine.
        return shlex.join(["distlab", *arguments, *([f"--nproc={ranks}"] if ranks > 1 else [])])
    starter = ["torchrun", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else ["python"]
    return shlex.join([*starter, *words])


def _of_distlab(words: Sequence[str]) -> list[str] | None:
    """Return the arguments of `distlab` without `--nproc N`. None if another script was started."""
    # The command may be given as a module, as a script or as the installed name.
    if words[:2] == ["-m", "launch"]:
        given = words[2:]
    elif words and (Path(words[0]).name == "distlab" or words[0].endswith("launch/__main__.py")):
        given = words[1:]
    else:
        return None
    # Abbreviations stay as they were typed, so the parser must not take them for its own.
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--nproc")
    return own.parse_known_args(given)[1]


def _without_folders(path: str, root: Path) -> str:
    found = Path(path)
    return str(found.relative_to(root)) if found.is_relative_to(root) else f"…/{found.name}"


def commit(default: str | None = None) -> str | None:
    """Return the git commit of this file's checkout, with ``-dirty`` if files differ from it.

    Dirty means: a tracked file outside of records/ changed, or the tree has an untracked ``.py``
    file. Results and notes do not make a measurement irreproducible, and neither do records that
    were measured before it.

    Args:
        default: text to return if git or the checkout is missing, as in a copied tree
            (``--commit``).
    """
    here = Path(__file__).resolve().parent
    # An installed copy may lie inside somebody else's repository: only a tracked file tells that
    # this one is ours.
    tracked = git(here, "ls-files", "--error-unmatch", Path(__file__).name)
    head = git(here, "rev-parse", "HEAD")
    if tracked is None or head is None:
        return default
    return f"{head}-dirty" if _is_changed(here, ":(top,exclude)records") else head


def commit_of(file: str | Path) -> str | None:
    """Return the commit of the repository that tracks a file, with ``-dirty`` as `commit` does.

    None if no repository tracks the file: then no commit says what is in it.
    """
    path = Path(file).resolve()
    # Ignored and untracked files are in no commit.
    if git(path.parent, "ls-files", "--error-unmatch", path.name) is None:
        return None
    head = git(path.parent, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}-dirty" if _is_changed(path.parent) else head


def _is_changed(folder: Path, *left_out: str) -> bool:
    """Return whether a repository has changed tracked files, or untracked ``.py`` files."""
    # `:(top)` makes the status that of the whole repository, although git runs in one folder.
    paths = (":(top)", *left_out)
    status = git(folder, "status", "--porcelain", "--untracked-files=all", "--", *paths) or ""
    return any(not line.startswith("??") or line.endswith(".py") for line in status.splitlines())


def date_of_commit(commit: str) -> str | None:
    """Return the time of a commit of this checkout, ISO 8601 in UTC. None if it is not known here.

    Args:
        commit: text of a record, which may come from anywhere. Only the digits of a hash are handed
            to git, because git would take `--output=FILE` for an option and write that file.
    """
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return None
    # `log` shows what a tag points to, where `show` would print the tag as well.
    options = ("-1", "--format=%ct", "--no-show-signature", "--end-of-options")
    seconds = git(Path(__file__).parent, "log", *options, commit, "--")
    return (
        datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="seconds") if seconds else None
    )


def git(folder: Path, *arguments: str) -> str | None:
    """Output of one git command in ``folder``, None if git is missing or refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            # The limit keeps a network drive that hangs from stopping a benchmark.
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _triton_version() -> str | None:
    try:
        return importlib.import_module("triton").__version__
    except Exception:  # a broken installation is not importable either; it must not end a benchmark
        return None


def _cpu_model() -> str | None:
    # /proc exists on Linux only. Other systems have the name from the platform module.
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or None
