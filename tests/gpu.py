"""Run every test that this machine's GPUs can show something by: `python3 -m tests.gpu`, which needs no installation.

Arguments are options of pytest, such as `-k overlap`. What times a GPU or looks at its memory has it for itself, after
the others.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch

from distlab.report.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
ALONE = ["tests/measure", "tests/experiments", "tests/comm/test_context.py"]
NOTHING_SELECTED = 5


def passes(gpus: int) -> list[list[str]]:
    """The arguments of pytest's runs, one after the other: tests that share a GPU, use several, need one alone."""
    cores = os.cpu_count()
    sharing = ["-m", "gpu and not multigpu", "-n", f"{max(1, 3 * min(32, cores) // 4)}"]
    several = ["-m", "multigpu", "-n", f"{min(6, cores)}"]  # each has up to eight ranks
    return [sharing, *[several] * (gpus > 1), ["-m", "gpu or multigpu", *ALONE]]


def run(arguments: list[str]) -> tuple[int, Counter[str]]:
    """Run pytest once; its exit code, and how many tests had which outcome."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--dist", "worksteal", f"--junitxml={report}"]
        code = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode
        counts = ElementTree.parse(report).getroot()[0].attrib if report.exists() else {"errors": 1}
    return code, Counter({name: int(counts.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})


def main(options: list[str]) -> int:
    gpus = torch.cuda.device_count()
    if not gpus:
        print("no tests ran: they need an NVIDIA GPU, and torch finds none here")
        return 2
    begin, total, codes = time.monotonic(), Counter(), set()
    for arguments in passes(gpus):
        others = [f"--ignore={path}" for path in ALONE if path not in arguments]
        code, counts = run([*arguments, *others, *options])
        codes.add(code)
        total += counts
    failed = total["failures"] + total["errors"]
    devices = Counter(torch.cuda.get_device_name(gpu) for gpu in range(gpus))
    print(
        ", ".join(f"{count} × {name}" for name, count in devices.items()),
        f"commit {commit('unknown')}",
        f"torch {torch.__version__}",
        f"{total['tests'] - failed - total['skipped']} passed, {failed} failed, {total['skipped']} skipped",
        f"{time.monotonic() - begin:.0f} s",
        sep="; ",
    )
    return 0 if {0} <= codes <= {0, NOTHING_SELECTED} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
