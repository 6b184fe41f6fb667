"""The shell commands of the pages, run as a person would run them (`make test-commands`).

Commands run in a copy of the checkout, in the order of their page, so that what one leaves (a
checkpoint, say) the next finds. An experiment runs in its `smoke` preset, without the page's
options, whose names `test_pages` checks; other commands are shortened by `QUICK`, options added at
their end, where the last one wins.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, environment
from tests.pages import commands_of, pages
from tests.test_pages import answers_in_words, arguments_of, filled_in

QUICK = {
    r"^make bench$": "ARGS='--preset smoke'",
    r"^make test$": "ARGS=tests/test_hardware.py",
    r"^make nightly$": "--dry-run",
    r"^make test-(commands|gpu)$": "ARGS=--collect-only",
    r"train .*--name speaks-gpu": "--size tiny --steps 4 --log-every 1 --batch 4 --dtype fp32",
    r"--name eight": "--size tiny --layers 2 --context 64 --dtype fp32 --ops torch --log-every 1",
    # the default name is the run's before
    r"train --ops triton": "--name triton --size tiny --steps 4 --log-every 1",
    r"(distlab|launch|launch/train\.py) train|launch/train\.py": (
        "--size tiny --steps 4 --log-every 1"
    ),
    r"examples/train\.py": "--steps 4 --log-every 1",
    r"distlab records": "--list",
    r"distlab sample|launch/sample\.py": "--tokens 5",
    r"-m tests\.kill_runs": "--moments 1",
    r"-m tests\.fuzz": "--seeds 3",
    r"-m tests\.mutations": "--list",
    r"^pytest -n auto": "tests/test_hardware.py",
    r"^(pytest|\.venv/bin/python -m pytest|TRITON_INTERPRET)": "-x",
}
CANNOT = {
    r"^pip install|^export|submission": "changes the environment",
    r"--nnodes 2|machine0|^sbatch": "needs several machines",
    r"distlab compare|(show|sample) RUN|^PYTHONPATH=mine|distlab grade|distlab memory": (
        "needs the reader's own runs, or files"
    ),
    r"distlab trace (rank0|new/|outputs/|traces/)": "needs the reader's own traces",
    r"distlab kernel my_kernels": "needs the reader's own kernel",
    r"distlab kernel examples\.faulty_kernels": "exits with 1, because the kernel is wrong",
    r"^make docs": "installs mkdocs; test_site.py builds the site where it is",
    r"^compute-sanitizer|flash_attention\.tune": "needs a GPU",
    r"^make (size|quick)": "asks git, and this copy has no .git",
}
TIMEOUT_S = 420


def runnable():
    """Command as it is run → page that it stands on.

    An experiment once, however often pages name it.
    """
    found: dict[str, str] = {}
    for page in pages():
        for command in commands_of(page):
            text = filled_in(command.text)
            words = shlex.split(text)
            ours = arguments_of(words)
            if ours in (["show"], ["check"], ["kernel"], ["records"], ["trace"], ["memory"]):
                continue  # named on a page; it needs arguments
            if ours[:1] == ["run"] and not answers_in_words(ours):
                restarts = "--max-restarts 1 --name page " if "--max-restarts" in words else ""
                text = f"python -m launch run {ours[1]} {restarts}--preset smoke"
            else:
                text += " " + next(
                    (added for pattern, added in QUICK.items() if re.search(pattern, text)), ""
                )
            found.setdefault(text.strip(), command.page)
    return found


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of the working tree with this interpreter as its virtual environment, and a reader's
    text and code.
    """
    copy = tmp_path_factory.mktemp("checkout") / "distlab"
    ignored = shutil.ignore_patterns(".venv", ".git", "outputs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / ".venv/bin").mkdir(parents=True)
    for program in ("python", "ruff", "distlab"):
        found = Path(sys.executable).with_name(program)
        # a wrapper: a link would lose the environment that the interpreter belongs to
        if found.exists():
            wrapper = copy / ".venv/bin" / program
            wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(found))} "$@"\n')
            wrapper.chmod(0o755)
    (copy / ".venv/.installed").touch()
    (copy / "my.txt").write_text((ROOT / "README.md").read_text() * 3)
    shutil.copy(ROOT / "examples/own_model.py", copy / "my_model.py")
    own = re.search(
        r"```python\n(def parallelize.*?)```", (ROOT / "docs/learn/check.md").read_text(), re.DOTALL
    )
    (copy / "my_code.py").write_text(
        "# ruff: noqa\nimport torch.distributed as dist\n\n\n" + own.group(1)
    )
    return copy


@pytest.mark.commands
@pytest.mark.parametrize("command", runnable())
def test_the_command_runs(command, checkout):
    reason = next(
        (reason for pattern, reason in CANNOT.items() if re.search(pattern, command)), None
    )
    if reason:
        pytest.skip(reason)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    variables = environment() | {"PYTHONPATH": str(checkout), "PATH": path}
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    nothing_selected = (
        result.returncode in (2, 5)
        and not torch.cuda.is_available()
        and "no tests" in result.stdout
    )
    assert result.returncode == 0 or nothing_selected, (
        f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    )
