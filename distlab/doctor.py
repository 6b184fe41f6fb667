"""Report what this machine has, what of the lab runs on it and why the rest does not.

The report ends with the first command to try.

    distlab doctor            # a report for people
    distlab doctor --json     # the same as one line of JSON

It starts two gloo ranks, because that is what most machines that fail fail at. Exit code 0 if the
main job will run, 1 if it will not. Nothing here imports torch before it has looked whether there
is one.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass

from distlab import foreign_kernels
from distlab.cli_errors import until_stopped
from distlab.options import Parser

OK, LIMITED, MISSING = "ok", "limited", "missing"
SIGNS = {OK: "+", LIMITED: "~", MISSING: "-"}
PYTHON_LEAST, TORCH_LEAST, TRITON_LEAST = (3, 11), (2, 11), (3, 6)
SHM = "/dev/shm"
INSTALL = "pip install -e '.[test]'"


@dataclass(frozen=True)
class Finding:
    """One fact about the machine.

    Attributes:
        name: subject, such as `GPUs`.
        state: `ok`, `limited` or `missing`.
        found: value found, in words.
        advice: why it matters and what to do. Empty if nothing.
    """

    name: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Ability:
    """One use of the lab.

    Attributes:
        what: description.
        runs: True if it works on this machine.
        why: reason if it does not, or a difference to expect. Empty if neither.
        command: command line that runs it.
    """

    what: str
    runs: bool
    why: str
    command: str


def checked(name: str, fine: bool, found: str, advice: str, otherwise: str = LIMITED) -> Finding:
    """Return a finding that is ok, or one with the state `otherwise` and the advice."""
    return Finding(name, OK, found) if fine else Finding(name, otherwise, found, advice)


def version_tuple(text: str) -> tuple[int, int]:
    """Return major and minor of a version such as `2.13.0+cpu`, or (0, 0) for other text."""
    parts = text.split("+")[0].split(".")[:2]
    return (
        (int(parts[0]), int(parts[1]))
        if len(parts) == 2 and all(p.isdigit() for p in parts)
        else (0, 0)
    )


def package(name: str, least: tuple[int, int], advice: str) -> Finding:
    """Check that a distribution is installed, can be imported and is new enough.

    Args:
        name: import name, which is also that of its distribution.
        least: lowest major and minor version that works.
        advice: consequence of not having it.
    """
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(sys.modules.get(name), "__version__", "0.0"))
    except Exception as error:  # an import may fail in any way: a missing library, a broken wheel
        return Finding(
            name, MISSING, f"cannot be imported ({type(error).__name__}: {error})", advice
        )
    needed = ".".join(map(str, least))
    return checked(
        name, version_tuple(version) >= least, version, f"older than {needed}: {INSTALL}"
    )


def find_host() -> list[Finding]:
    """Check the interpreter, cores, memory and /dev/shm, which NCCL uses within a host."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    python = checked(
        "Python", sys.version_info[:2] >= PYTHON_LEAST, found, "needs 3.11 or newer", MISSING
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    found = f"{cores} cores"
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found += (
            f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory"
        )
    cpu = checked("CPU", cores >= 2, found, "two ranks share a core: timings say little")
    if not os.path.exists(SHM):
        return [
            python,
            cpu,
            Finding(
                "shared memory", LIMITED, f"no {SHM}", "NCCL between GPUs of one host needs it"
            ),
        ]
    free = shutil.disk_usage(SHM).free
    found, advice = (
        f"{free / 2**20:,.0f} MiB free in {SHM}",
        "NCCL may fail: start the container with --shm-size=1g",
    )
    return [python, cpu, checked("shared memory", free >= 2**28, found, advice)]


def find_gpus() -> list[Finding]:
    """Check the GPUs, whether their peaks are known, and how they are linked."""
    import torch

    from distlab.hardware import lookup

    count = torch.cuda.device_count()
    if not count:
        why = (
            "torch is built without CUDA"
            if torch.version.cuda is None
            else "torch sees no NVIDIA GPU"
        )
        return [
            Finding(
                "GPUs",
                LIMITED,
                f"none ({why})",
                "everything runs on CPU ranks, kernels in plain torch",
            )
        ]
    findings = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        name = torch.cuda.get_device_name(index)
        memory_gib = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        found = f"{name}, {memory_gib:.0f} GiB, compute {capability}"
        advice = "its peaks are not in distlab/hardware.py: MFU and roofline say n/a"
        findings.append(checked(f"GPU {index}", lookup(name) is not None, found, advice))
    if count > 1:
        peers = all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))
        links = "direct access between GPUs" if peers else "no direct access between GPUs"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["nvidia-smi", "topo", "-m"]
            topology = subprocess.run(
                asked, capture_output=True, text=True, timeout=20, check=True
            ).stdout
            links = parse_topology(topology) or links
        advice = "collectives go through host memory: expect a tenth of NVLink's bandwidth"
        findings.append(checked("links", peers, links, advice))
    return findings


def parse_topology(matrix: str) -> str | None:
    """Return the link between GPUs 0 and 1 (NV18, PIX, …) from `nvidia-smi topo -m`, or None."""
    found = re.search(r"^\s*GPU0\s+X\s+(\S+)", matrix, re.MULTILINE)
    if found is None:
        return None
    kind = "NVLink" if found[1].startswith("NV") else "PCIe or the host's bus"
    return f"GPU 0 – GPU 1: {found[1]} ({kind})"


def find_backends() -> list[Finding]:
    """Check that torch was built with gloo and NCCL."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        advice = "this torch has no distributed package: install one from its own index"
        return [Finding("gloo", MISSING, "no torch.distributed", advice)]
    has_gloo, has_nccl = dist.is_gloo_available(), dist.is_nccl_available()
    version = torch.cuda.nccl.version() if has_nccl else "not in this torch"
    found = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return [
        checked(
            "gloo",
            has_gloo,
            f"{'' if has_gloo else 'not '}in this torch",
            "CPU ranks cannot talk",
            MISSING,
        ),
        checked("NCCL", has_nccl, found, "GPUs cannot talk to each other; CPU ranks can"),
    ]


def sum_of_ranks(context) -> float:
    """All-reduce rank + 1 on the two trial ranks, which gives 3.0 on both."""
    import torch

    from distlab.comm import collectives

    value = torch.tensor([context.rank + 1.0], device=context.device)
    return collectives.sum_tensor(value, context.group).item()


def find_ranks() -> Finding:
    """Start two gloo ranks and check that they add their numbers."""
    from distlab import testing

    try:
        sums = testing.run_ranks(sum_of_ranks, 2, deadline_s=120.0)
    except Exception as error:  # whatever stops ranks here is the finding
        first = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        advice = "check the firewall on the loopback interface, and GLOO_SOCKET_IFNAME"
        return Finding("two ranks", MISSING, f"failed: {first}", advice)
    finally:
        testing.shut_down()
    right = sums == [3.0, 3.0]
    found = "started, and agree that 1 + 2 = 3" if right else f"1 + 2 gave {sums}"
    return checked("two ranks", right, found, "gloo is broken here: do not trust results", MISSING)


def find_triton() -> list[Finding]:
    """Check Triton, and say how its kernels would run."""
    advice = "kernels run as plain torch; it exists for Linux only"
    triton = package("triton", TRITON_LEAST, advice)
    if triton.state == MISSING:
        return [Finding("triton", LIMITED, triton.found, advice)]
    if another := foreign_kernels():
        return [triton, Finding("kernels", MISSING, another, "ops=triton and attention=flash fail")]
    import torch

    from kernels._dispatch import interpreted
    from kernels.flash_attention import hopper

    how = (LIMITED, "plain torch on the CPU", "TRITON_INTERPRET=1 runs the Triton code, slowly")
    if interpreted():
        how = (LIMITED, "interpreted (TRITON_INTERPRET=1)", "correct in fp32 and fp16, not fast")
    elif torch.cuda.device_count():
        why = hopper.unavailable(None)
        attention = (
            f"those for Hopper ({hopper.SERVED})" if why is None else f"in plain Triton, as {why}"
        )
        how = (OK, f"compiled for the GPU; attention's: {attention}", "")
    return [triton, Finding("kernels", *how)]


def examine() -> list[Finding]:
    """Check everything. It takes about ten seconds, most of it to start two ranks."""
    needed = (
        ("torch", TORCH_LEAST, "nothing runs without it"),
        ("matplotlib", (0, 0), "no pictures"),
        ("tabulate", (0, 0), "no tables"),
    )
    packages = [package(name, least, f"{advice}: {INSTALL}") for name, least, advice in needed]
    findings = [*find_host(), *packages]
    if packages[0].state == MISSING:
        return findings
    findings += [*find_triton(), *find_gpus(), *find_backends()]
    if all(f.state == OK for f in findings if f.name == "gloo"):
        findings.append(find_ranks())
    return findings


def abilities(findings: list[Finding]) -> list[Ability]:
    """List what runs on a machine with these findings, and why the rest does not."""
    state = {finding.name: finding.state for finding in findings}
    reason = {finding.name: f"{finding.name}: {finding.found}" for finding in findings}
    gpus = sum(name.startswith("GPU ") for name in state)
    needed = ("Python", "torch", "matplotlib", "tabulate", "gloo", "two ranks")
    old = f"torch is too old: {INSTALL}" if state.get("torch") == LIMITED else ""
    stop = next((reason[name] for name in needed if state.get(name) == MISSING), old)
    there = f"found {gpus}" if gpus else "there is none"
    one, two = (
        "" if gpus >= n else f"needs {n} NVIDIA GPU{'s' * (n > 1)}, {there}" for n in (1, 2)
    )
    silent = "" if state.get("NCCL") == OK else reason.get("NCCL", "no NCCL")
    rows = [  # what, why not, note, command
        ("strategies on two CPU ranks", stop, "", "distlab run ddp_bench --nproc 2 --backend gloo"),
        ("strategies on all GPUs", stop or two or silent, "", "distlab run ddp_bench"),
        ("kernels, tested in plain torch or interpreted", stop, "", "pytest tests/kernels"),
        ("kernels, timed", stop or one, "", "distlab run attention_sweep --preset twelve"),
        ("mistakes, and the checks that catch them", stop, "", "distlab run sabotage"),
        ("all tests", stop, "" if gpus > 1 else "tests that need GPUs skip", "make test"),
    ]
    return [Ability(what, not why, why or note, command) for what, why, note, command in rows]


def first_command(able: list[Ability]) -> str:
    """Return the command to try first: the main job on the best hardware, or the installation."""
    return next((a.command for a in (able[1], able[0]) if a.runs), INSTALL)


def report(findings: list[Finding], able: list[Ability]) -> str:
    """Return the report as text."""
    width = max(len(f.name) for f in findings)
    lines = ["This machine"]
    lines += [
        f"  {SIGNS[f.state]} {f.name:<{width}}  {f.found}" + (f"; {f.advice}" if f.advice else "")
        for f in findings
    ]
    lines += ["", "What runs here"]
    for a in able:
        lines.append(
            f"  {'yes' if a.runs else 'no ':<3}  {a.what}" + (f" ({a.why})" if a.why else "")
        )
        lines += [f"         {a.command}"] if a.runs else []
    return "\n".join([*lines, "", f"Try first:  {first_command(able)}"])


def main(argv: list[str] | None = None) -> int:
    """Print the report. Return 0 if the main job will run here, else 1."""
    parser = Parser("distlab.doctor", description="What this machine has and what runs on it.")
    parser.add_argument(
        "--json", action="store_true", help="one line of JSON instead of the report"
    )
    args = parser.parse_args(argv)

    def examine_and_report() -> int:
        findings = examine()
        able = abilities(findings)
        body = {"findings": [asdict(f) for f in findings], "abilities": [asdict(a) for a in able]}
        line = json.dumps(body | {"first_command": first_command(able)})
        print(line if args.json else report(findings, able))
        return 0 if able[0].runs else 1

    return until_stopped("distlab.doctor", examine_and_report)


if __name__ == "__main__":
    sys.exit(main())
