"""A submission's wrappers in the form of `distlab run ddp_bench --wrap`, to time them.

`distlab grade --time` starts that benchmark in processes of its own, with the folder of the copy in
the environment. Only those processes import the submission.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from distlab.grade.child import KEPT
from distlab.grade.hooks import PARTS, Part, function_of, load

FOLDER = "DISTLAB_SUBMISSION"
ADAPTERS_OF = "DISTLAB_SUBMISSION_ADAPTERS"
BUCKET_SIZE_MB = 4.0
MOST_S = 300.0


def _wrap(part: Part, module: nn.Module, group: Any) -> tuple[Any, Callable[[], None]]:
    """Wrap a module by the hook of a part."""
    hooks = load(Path(os.environ[FOLDER]), os.environ.get(ADAPTERS_OF, ""))
    arguments = [module, BUCKET_SIZE_MB] if part.before else [module]
    model = function_of(hooks, part.hook)(*arguments)

    def finish() -> None:
        function_of(hooks, part.after)(model, None)

    return model, finish


def _part(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


ddp = partial(_wrap, _part("ddp"))
ddp_individual = partial(_wrap, _part("ddp-individual"))
ddp_bucketed = partial(_wrap, _part("ddp-bucketed"))


def timed(folder: Path, adapters: str, parts: list[str]) -> str:
    """Time the wrappers of a submission next to the lab's and torch's.

    Args:
        folder: copy of the submission.
        adapters: module of the hooks; empty for `tests/adapters.py`.
        parts: names of the parts to time.

    Returns:
        The benchmark's table, or a sentence that says why there is none.
    """
    if not parts:
        return "not timed: no data-parallel wrapper was handed in"
    command = [sys.executable, "-m", "launch", "run", "ddp_bench", "--quick", "--backend", "gloo"]
    command += ["--strategies", "local", "naive", "overlap", "bucketed", "torch-ddp", "--wrap"]
    command += [f"distlab.grade.as_wrapper:{part.replace('-', '_')}" for part in parts]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {FOLDER: str(folder), ADAPTERS_OF: adapters}
    # The benchmark runs in another folder, and must find the lab and what the submission imports.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            command,
            cwd=folder.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MOST_S,
        )
    except subprocess.TimeoutExpired:
        return f"not timed: the benchmark did not end within {MOST_S:g} s"
    # 1 stands for a row that is wrong. The table then says which.
    if done.returncode not in (0, 1) or not done.stdout.strip():
        lines = done.stderr.strip().splitlines() or ["no output"]
        return f"not timed: {lines[-1]}"
    lines = []
    for line in done.stdout.splitlines():
        # The benchmark's page is in the copy of the submission, which is removed.
        if not line.startswith("report:") and not line.endswith("in the page"):
            lines.append(line)
    return "\n".join(lines).strip()
