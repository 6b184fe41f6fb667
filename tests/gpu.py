"""Run every test that needs a GPU, on all GPUs of this machine: `python3 -m tests.gpu`.

It needs no installation. Arguments are options of pytest, such as `-k overlap`. Tests that time a
GPU or measure its memory have it for themselves, after the others. Those that time several GPUs
come last.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import torch

from distlab.report.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
ATTENTION = "tests/kernels/test_flash_attention_gpu.py::test"
LARGE = [
    f"{ATTENTION}_more_than_two_to_the_31_elements",
    f"{ATTENTION}_accuracy_of_long_calls_in_fp32_beside_sdpa",
]
ALONE = [
    "tests/measure",
    "tests/experiments/test_attention_sweep.py",
    "tests/comm/test_context.py",
    *LARGE,
]
HOPPER = "tests/kernels/test_hopper_attention_gpu.py"
BYTES_PER_PROCESS = 6.6e9  # 12 processes fit into 80 GB
MOST_PROCESSES = 20  # on one GPU, where more would only wait for it
TIMED_ON_SEVERAL = "tests/trace/test_injected_gpu.py"
SEVERAL = [
    "-m",
    "multigpu",
    "-n",
    f"{min(6, os.cpu_count())}",  # each has up to eight ranks
    f"--ignore={TIMED_ON_SEVERAL}",
]
NOTHING_SELECTED = 5
# Print the stacks after 90 s, for kernels that never end.
STUCK = ["-o", "faulthandler_timeout=90"]


def lanes(gpus: int, gpu_bytes: int, cores: int) -> list[list[list[str]]]:
    """Return for each GPU the arguments of pytest's runs on it, one after the other.

    Args:
        gpus: number of GPUs.
        gpu_bytes: bytes of memory of one GPU.
        cores: number of CPU cores, which the GPUs share.
    """
    processes = min(MOST_PROCESSES, int(gpu_bytes / BYTES_PER_PROCESS), cores // gpus)
    sharing = ["-m", "gpu and not multigpu", "-n", f"{max(1, processes)}"]
    sharing += [f"--deselect={each}" for each in ALONE]
    alone = ["-m", "gpu and not multigpu", *ALONE]
    if gpus == 1:
        return [[sharing, alone]]
    if gpus < 4:
        return [[sharing], [alone, SEVERAL]]
    return [[[*sharing, HOPPER]], [[*sharing, f"--deselect={HOPPER}"]], [alone, SEVERAL]]


def run(arguments: list[str], gpu: int | None) -> tuple[int, Counter[str]]:
    """Run pytest once on this GPU, or on all of them if it is None.

    Returns:
        Its exit code, and how many tests had which outcome.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu]
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        report = Path(folder) / "report.xml"
        options = [
            "-q",
            "-rsfE",
            "--durations=9",
            "--dist",
            "worksteal",
            f"--junitxml={report}",
            *STUCK,
            *arguments,
        ]
        command = [sys.executable, "-m", "pytest", *options]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        counts = ElementTree.parse(report).getroot()[0].attrib if report.exists() else {"errors": 1}
    outcomes = Counter()
    for name in ("tests", "failures", "errors", "skipped"):
        outcomes[name] = int(counts.get(name, 0))
    return code, outcomes


def main(options: list[str]) -> int:
    gpus = torch.cuda.device_count()
    if not gpus:
        print("no tests ran: they need an NVIDIA GPU, and torch finds none here")
        return 2
    begin = time.monotonic()
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    planned = lanes(gpus, gpu_bytes, os.cpu_count() or 1)

    def run_lane(gpu: int) -> list[tuple[int, Counter[str]]]:
        return [
            run([*arguments, *options], None if arguments is SEVERAL else gpu)
            for arguments in planned[gpu]
        ]

    with ThreadPoolExecutor(len(planned)) as pool:
        results = [result for lane in pool.map(run_lane, range(len(planned))) for result in lane]
    if gpus > 1:
        results.append(run([TIMED_ON_SEVERAL, *options], None))
    codes = {code for code, _ in results}
    total = sum((counts for _, counts in results), Counter())
    failed = total["failures"] + total["errors"]
    devices = Counter(torch.cuda.get_device_name(gpu) for gpu in range(gpus))
    print(
        ", ".join(f"{count} × {name}" for name, count in devices.items()),
        f"commit {commit('unknown')}",
        f"torch {torch.__version__}",
        f"{total['tests'] - failed - total['skipped']} passed, {failed} failed, {total['skipped']} "
        "skipped",
        f"{time.monotonic() - begin:.0f} s",
        sep="; ",
    )
    return 0 if {0} <= codes <= {0, NOTHING_SELECTED} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
