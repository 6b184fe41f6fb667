"""How fast is a kernel of anyone's? The rows of `kernel_roofline` or of `attention_sweep` with it.

`distlab kernel` runs the experiment as `distlab run` does, in a process of its own with a time
limit: a kernel that is right on small inputs may hang on large ones.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distlab.report import Record, Records, View, read_json
from experiments.kernel_roofline.cases import OPTIONAL, is_installed
from launch.registry import load

MOST_S = 300.0
# Variants that are timed. Those of `OPTIONAL` that are installed are added.
PEERS = ("ours", "naive", "builtin", "compile", "liger")
# BATCHxHEADSxLENGTHxHEAD DIM: short, usual and long sequences
SHAPES = ("4x32x1024x64", "2x32x2048x128", "1x32x8192x128")
ATTENTION_PEERS = ("sdpa-flash", "sdpa-cudnn", "ours")


@dataclass(frozen=True)
class Timing:
    """Result of timing a kernel.

    Attributes:
        records: rows of the experiment, with what its view derives.
        view: view of these rows. None if there are none.
        problem: sentence that says why there are none.
        page: page of the experiment's run.
    """

    records: Records = field(default_factory=list)
    view: View | None = None
    problem: str = ""
    page: Path | None = None

    @property
    def is_wrong(self) -> bool:
        """True if the kernel's results were wrong at a timed size."""
        statuses = [str(row.metrics.get("status")) for row in self.yours]
        return any("WRONG" in text for text in [*statuses, *self.sentences])

    @property
    def yours(self) -> list[Record]:
        """Rows of the user's kernel."""
        return [row for row in self.records if row.variant == "yours"]

    @property
    def sentences(self) -> list[str]:
        """Findings of the experiment about the user's kernel, or why it was not timed."""
        if self.view is None:
            return [self.problem] if self.problem else []
        found = self.view.findings_of(self.records)
        return [line for line in found if line.startswith(("Yours", "WRONG: yours"))]


def timed(
    kernel: str, operation: str, device: str, out: str, name: str, *, forward: bool = False
) -> Timing:
    """Time a kernel next to ours and to its peers, in a run of its own.

    Args:
        kernel: kernel, as `package.module:function`.
        operation: name of the operation that it claims to be.
        device: `cuda` or `cpu`, which takes small sizes.
        out: folder of all results.
        name: name of the run.
        forward: True to time the forward alone.
    """
    experiment, options = options_for(operation, device)
    # -P: a launch.py in the user's folder must not be taken for ours.
    command = [sys.executable, "-P", "-m", "launch", "run", experiment, *options]
    command += ["--yours", kernel, "--device", device, "--out", out, "--name", name]
    command += ["--fresh", "--json"]
    if forward:
        command.append("--forward")
    # The experiment must find the user's kernel wherever this process did.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if device == "cpu":
        # A CPU runs Triton's kernels only in the interpreter.
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            command,
            # A kernel that reads from the terminal ends instead of waiting.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=MOST_S,
        )
    except subprocess.TimeoutExpired:
        return Timing(problem=f"not timed: {experiment} took longer than {MOST_S:g} s")
    folder = Path(out, experiment, name)
    page = folder / "report.html"
    if not page.is_file():  # it is written last
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Timing(problem=f"not timed: {experiment} failed ({lines[-1]})")
    view = load(experiment).EXPERIMENT.view
    # Records hold what was measured. Ratios and verdicts are derived when they are shown.
    records = view.derived(read_json(folder / "records.json"))
    return Timing(records=records, view=view, page=page)


def options_for(operation: str, device: str) -> tuple[str, Sequence[str]]:
    """Return the experiment that times an operation, and its options."""
    if operation.endswith("attention"):
        mask = "/full" if operation == "attention" else ""
        if device == "cpu":
            small = ["--quick", "--shapes", f"1x2x32x16{mask}", "--variants", "sdpa", "ours"]
            return "attention_sweep", small
        shapes = [f"{shape}{mask}" for shape in SHAPES]
        return "attention_sweep", ["--shapes", *shapes, "--variants", *ATTENTION_PEERS]
    if device == "cpu":
        return "kernel_roofline", ["--quick", "--only", operation]
    peers = [*PEERS, *(peer for peer in OPTIONAL if is_installed(peer))]
    return "kernel_roofline", ["--only", operation, "--variants", *peers]
