"""Report what this machine has, what of the lab runs on it and why the rest does not.

The report ends with the first command to try.

    distlab doctor            # a report for people
    distlab doctor --json     # the same as one line of JSON

It starts two gloo ranks, because most failures show there. The exit code is 0 if the main job will
run, and 1 if it will not. Nothing here imports torch before it has checked that there is one.
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
from dataclasses import asdict, dataclass, replace

from distlab import foreign_kernels
from distlab.cli_errors import until_stopped
from distlab.options import Parser

OK = "ok"
LIMITED = "limited"
MISSING = "missing"
SIGNS = {OK: "+", LIMITED: "~", MISSING: "-"}
# Older versions were not tried, so they are reported and not supported.
MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_TRITON = (3, 6)
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
    if fine:
        return Finding(name, OK, found)
    return Finding(name, otherwise, found, advice)


def version_tuple(text: str) -> tuple[int, int]:
    """Return major and minor of a version such as `2.13.0+cpu`, or (0, 0) for other text."""
    parts = text.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return (0, 0)
    return (int(parts[0]), int(parts[1]))


def package(name: str, least: tuple[int, int], advice: str) -> Finding:
    """Check that a distribution is installed, can be imported and is new enough.

    Args:
        name: import name, which is also that of its distribution.
        least: lowest major and minor version that works.
        advice: consequence of not having it.
    """
    try:
        # A distribution may be installed and still fail to import, so both are tried.
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A package from source has a version of its own, and no distribution.
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
        "Python", sys.version_info[:2] >= MIN_PYTHON, found, "needs 3.11 or newer", MISSING
    )
    if hasattr(os, "sched_getaffinity"):
        # The cores that this process may use, which may be fewer than the machine's.
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    found = f"{cores} cores"
    # These names exist on Linux and most Unix systems. Elsewhere the memory is left out.
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found += f", {memory_bytes / 2**30:.0f} GiB memory"
    cpu = checked("CPU", cores >= 2, found, "two ranks share a core: timings say little")
    if os.path.exists(SHM):
        free = shutil.disk_usage(SHM).free
        found = f"{free / 2**20:,.0f} MiB free in {SHM}"
        advice = "NCCL may fail: start the container with --shm-size=1g"
        shared = checked("shared memory", free >= 2**28, found, advice)
    else:
        advice = "NCCL between GPUs of one host needs it"
        shared = Finding("shared memory", LIMITED, f"no {SHM}", advice)
    return [python, cpu, shared]


def find_gpus() -> list[Finding]:
    """Check the GPUs, whether their peaks are known, and how they are linked."""
    import torch

    from distlab.hardware import lookup

    count = torch.cuda.device_count()
    if not count:
        why = "torch sees no NVIDIA GPU"
        if torch.version.cuda is None:
            why = "torch is built without CUDA"
        advice = "everything runs on CPU ranks, kernels in plain torch"
        return [Finding("GPUs", LIMITED, f"none ({why})", advice)]
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
        # GPU 0 stands for all, because hosts link their GPUs alike.
        peers = all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))
        links = "direct access between GPUs" if peers else "no direct access between GPUs"
        # `nvidia-smi` may be missing in a container. What torch says is then enough.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(
                ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True
            )
            links = parse_topology(answer.stdout) or links
        advice = "collectives go through host memory: expect a tenth of NVLink's bandwidth"
        findings.append(checked("links", peers, links, advice))
    return findings


def parse_topology(matrix: str) -> str | None:
    """Return the link between GPUs 0 and 1 (NV18, PIX, …) from `nvidia-smi topo -m`, or None."""
    # The first row of the matrix is GPU 0. The column after X is GPU 1.
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
    has_gloo = dist.is_gloo_available()
    found = "in this torch" if has_gloo else "not in this torch"
    gloo = checked("gloo", has_gloo, found, "CPU ranks cannot communicate", MISSING)
    has_nccl = dist.is_nccl_available()
    found = "not in this torch"
    if has_nccl:
        version = torch.cuda.nccl.version()  # a tuple, or one number in older versions
        found = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    nccl = checked("NCCL", has_nccl, found, "GPUs cannot communicate; CPU ranks can")
    return [gloo, nccl]


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
        # Two ranks that only start would not show a blocked network. A sum goes through it.
        sums = testing.run_ranks(sum_of_ranks, 2, deadline_s=120.0)
    except Exception as error:  # any error that stops the ranks is the finding
        lines = str(error).strip().splitlines()
        last = lines[-1] if lines else type(error).__name__
        advice = "check the firewall on the loopback interface, and GLOO_SOCKET_IFNAME"
        return Finding("two ranks", MISSING, f"failed: {last}", advice)
    finally:
        testing.shut_down()
    right = sums == [3.0, 3.0]
    found = "started, and agree that 1 + 2 = 3" if right else f"1 + 2 gave {sums}"
    return checked("two ranks", right, found, "gloo is broken here: do not trust results", MISSING)


def find_triton() -> list[Finding]:
    """Check Triton, and say how its kernels would run."""
    advice = "kernels run as plain torch; it exists for Linux only"
    triton = package("triton", MIN_TRITON, advice)
    if triton.state == MISSING:
        return [Finding("triton", LIMITED, triton.found, advice)]
    another = foreign_kernels()
    if another:
        return [triton, Finding("kernels", MISSING, another, "ops=triton and attention=flash fail")]
    import torch

    from kernels._dispatch import interpreted
    from kernels.flash_attention import hopper

    # The interpreter is asked for by a variable, so it is reported before the GPU.
    if interpreted():
        found = "interpreted (TRITON_INTERPRET=1)"
        kernels = Finding("kernels", LIMITED, found, "correct in fp32 and fp16, not fast")
    elif torch.cuda.device_count():
        # None asks about this machine's GPU in general, without a problem's sizes.
        why = hopper.unavailable(None)
        attention = f"those for Hopper ({hopper.SERVED})"
        if why is not None:
            attention = f"in plain Triton, as {why}"
        kernels = Finding("kernels", OK, f"compiled for the GPU; attention's: {attention}")
    else:
        advice = "TRITON_INTERPRET=1 runs the Triton code, slowly"
        kernels = Finding("kernels", LIMITED, "plain torch on the CPU", advice)
    return [triton, kernels]


def examine() -> list[Finding]:
    """Check everything. It takes about ten seconds, most of it to start two ranks."""
    torch = package("torch", MIN_TORCH, f"nothing runs without it: {INSTALL}")
    findings = find_host()
    findings.append(torch)
    findings.append(package("matplotlib", (0, 0), f"no pictures: {INSTALL}"))
    findings.append(package("tabulate", (0, 0), f"no tables: {INSTALL}"))
    # Without torch nothing else can be imported.
    if torch.state == MISSING:
        return findings
    findings += find_triton()
    findings += find_gpus()
    backends = find_backends()
    findings += backends
    gloo = backends[0]
    if gloo.state == OK:
        findings.append(find_ranks())
    return findings


def abilities(findings: list[Finding]) -> list[Ability]:
    """List what runs on a machine with these findings, and why the rest does not."""
    state = {finding.name: finding.state for finding in findings}
    reason = {finding.name: f"{finding.name}: {finding.found}" for finding in findings}
    gpus = sum(name.startswith("GPU ") for name in state)
    needed = ("Python", "torch", "matplotlib", "tabulate", "gloo", "two ranks")

    # Reasons why something does not run, empty if it does.
    stop = ""
    if state.get("torch") == LIMITED:
        stop = f"torch is too old: {INSTALL}"
    # Each finding overwrites the one before, so the first of `needed` is named.
    for name in reversed(needed):
        if state.get(name) == MISSING:
            stop = reason[name]  # the first of `needed` in the end
    there = f"found {gpus}" if gpus else "there is none"
    no_gpu = "" if gpus >= 1 else f"needs 1 NVIDIA GPU, {there}"
    no_two_gpus = "" if gpus >= 2 else f"needs 2 NVIDIA GPUs, {there}"
    no_nccl = "" if state.get("NCCL") == OK else reason.get("NCCL", "no NCCL")
    on_gpus = stop or no_two_gpus or no_nccl

    # The first two abilities are the main job, which `first_command` chooses between.
    bench = "distlab run ddp_bench"
    able = [
        _ability("strategies on two CPU ranks", stop, f"{bench} --nproc 2 --backend gloo"),
        _ability("strategies on all GPUs", on_gpus, bench),
        _ability("kernels, tested in plain torch or interpreted", stop, "pytest tests/kernels"),
        _ability("kernels, timed", stop or no_gpu, "distlab run attention_sweep --preset twelve"),
        _ability("mistakes, and the checks that catch them", stop, "distlab run sabotage"),
        _ability("all tests", stop, "make test"),
    ]
    # A machine with fewer than two GPUs runs the suite, and skips a part of it.
    if not stop and gpus < 2:
        able[-1] = replace(able[-1], why="tests that need GPUs skip")
    return able


def _ability(what: str, why_not: str, command: str) -> Ability:
    """Return an ability that runs if there is no reason why not."""
    return Ability(what, not why_not, why_not, command)


def first_command(able: list[Ability]) -> str:
    """Return the command to try first: the main job on the best hardware, or the installation."""
    on_cpu, on_gpus = able[:2]
    if on_gpus.runs:
        return on_gpus.command
    return on_cpu.command if on_cpu.runs else INSTALL


def report(findings: list[Finding], able: list[Ability]) -> str:
    """Return the report as text."""
    width = max(len(finding.name) for finding in findings)
    lines = ["This machine"]
    for finding in findings:
        advice = f"; {finding.advice}" if finding.advice else ""
        sign = SIGNS[finding.state]
        # The sign comes first, so that problems can be seen at a glance.
        lines.append(f"  {sign} {finding.name:<{width}}  {finding.found}{advice}")
    lines += ["", "What runs here"]
    for ability in able:
        answer = "yes" if ability.runs else "no "
        why = f" ({ability.why})" if ability.why else ""
        lines.append(f"  {answer}  {ability.what}{why}")
        if ability.runs:
            lines.append(f"         {ability.command}")
    lines += ["", f"Try first:  {first_command(able)}"]
    return "\n".join(lines)


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
