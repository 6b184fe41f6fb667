"""The examination of a kernel: many cases, the smallest input for each mistake, one report."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from distlab.kernel_check.calls import Function
from distlab.kernel_check.hostile import Case, cases, simpler
from distlab.kernel_check.judge import BREAKS_GPU, Outcome, judge, reads_outside, works
from distlab.kernel_check.large import judge_large, large_case
from distlab.kernel_check.operations import Operation, operation_of

MOST_KINDS = 6  # mistakes whose input is reduced and shown
MOST_REDUCTIONS = 80  # cases that are tried to make one input smaller
# What Triton says of tensors on a CPU: without a GPU, and with one.
NEEDS_INTERPRETER = ("0 active drivers", "cannot be accessed from Triton (cpu tensor?)")


@dataclass(frozen=True)
class Finding:
    """A mistake of a kernel.

    Attributes:
        kind: what is wrong, in two or three words.
        smallest: smallest input that shows it, in words.
        detail: sentence with numbers.
    """

    kind: str
    smallest: str
    detail: str


@dataclass
class Report:
    """Result of an examination.

    Attributes:
        operation: name of the operation.
        right, refused: numbers of cases.
        wrong: numbers of cases by what is wrong.
        findings: mistakes, by what is wrong.
        refusals: first lines of errors → number of cases.
        differs: largest difference between two runs on equal inputs.
        has_backward: True if gradients were compared.
        left: number of cases that were not tried because the time was over.
        too_large: reason why the large input was not tried. Empty if it was, and on a CPU.
        called: arguments that the kernel was called with, see `Outcome`.
    """

    operation: str
    right: int = 0
    refused: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    differs: float = 0.0
    has_backward: bool = False
    left: int = 0
    too_large: str = ""
    called: str = ""

    @property
    def is_right(self) -> bool:
        """True if the plain case ran and no case is wrong."""
        return self.right > 0 and not self.wrong

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.add_counts(
            outcome.status,
            outcome.kind,
            outcome.detail,
            outcome.differs,
            outcome.has_backward,
            outcome.called,
        )

    def add_counts(
        self,
        status: str,
        kind: str,
        detail: str,
        differs: float,
        has_backward: bool,
        called: str = "",
    ) -> None:
        """Count an outcome, given by the attributes of `Outcome`."""
        self.called = called or self.called
        self.has_backward = self.has_backward or has_backward
        self.differs = max(self.differs, differs)
        if status == "right":
            self.right += 1
        elif status == "refused":
            self.refused += 1
            self.refusals[detail] = self.refusals.get(detail, 0) + 1
        elif status == "not tried":
            self.too_large = detail
        else:
            self.wrong[kind] = self.wrong.get(kind, 0) + 1

    def add_finding(self, finding: Finding) -> None:
        """Keep a mistake with its smallest input, the first of its kind.

        A process that goes on after another has broken finds the same mistakes again.
        """
        self.findings.setdefault(finding.kind, finding)

    def leave(self, count: int) -> None:
        """Note how many cases were not tried."""
        self.left = count

    def __str__(self) -> str:
        tried = self.right + self.refused + sum(self.wrong.values())
        verdict = "right" if self.is_right else "WRONG"
        if self.is_right and self.left:
            # What was not tried may be wrong.
            verdict = (
                f"nothing wrong in {tried} of {tried + self.left} inputs, the others not tried"
            )
        backward = "forward and backward" if self.has_backward else "forward"
        lines = [
            f"{verdict}: as {self.operation}, {backward}: {self.right} of {tried} inputs are "
            f"right, {self.refused} refused, {sum(self.wrong.values())} wrong"
        ]
        if self.called:
            lines.append(f"  called with {self.called}")
        if self.wrong:
            # The user may have meant another form of it, such as GeLU without the approximation.
            lines.append(f"  expected: {operation_of(self.operation).about}")
        for kind, finding in self.findings.items():
            inputs = "1 input" if self.wrong[kind] == 1 else f"{self.wrong[kind]} inputs"
            lines.append(f"  {kind} ({inputs}). The smallest: {finding.smallest}")
            lines.append(f"    {finding.detail}")
        others = sum(count for kind, count in self.wrong.items() if kind not in self.findings)
        if others:
            lines.append(f"  {others} more inputs are wrong in other ways")
        for error, count in list(self.refusals.items())[:3]:
            lines.append(f"  refused {count} inputs: {error}")
        if self.differs:
            lines.append(
                f"  not deterministic: two runs on one input differ by up to {self.differs:.1e}"
            )
        if self.left:
            # A kernel that breaks the GPU also ends the examination, and more time does not help.
            reason = "" if BREAKS_GPU in self.wrong else ", because the time was over"
            remedy = "" if self.wrong else ": give more seconds"
            inputs = "1 input was" if self.left == 1 else f"{self.left} inputs were"
            lines.append(f"  {inputs} not tried{reason}{remedy}")
        if self.too_large:
            lines.append(f"  not tried: {self.too_large}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        findings = []
        for kind, finding in self.findings.items():
            findings.append({**asdict(finding), "inputs": self.wrong[kind]})
        return {
            "operation": self.operation,
            "is_right": self.is_right,
            "has_backward": self.has_backward,
            "right": self.right,
            "refused": self.refused,
            "wrong": sum(self.wrong.values()),
            "findings": findings,
            "refusals": self.refusals,
            "differs": self.differs,
            "not_tried": self.left,
            "too_large": self.too_large,
            "called": self.called,
        }


def check_kernel(
    function: Function,
    operation: str,
    *,
    backward: bool = True,
    count: int = 40,
    seed: int = 0,
    seconds: float = 60.0,
    device: torch.device | str | None = None,
) -> Report:
    """Examine a function on hostile inputs, in this process.

    On a GPU with 24 to 40 GiB of free memory, the last input has more than 2³¹ elements.

    Args:
        function: function of the operation's tensors, or a subclass of `torch.autograd.Function`.
        operation: name of the operation that it claims to be, see `OPERATIONS`.
        backward: False to examine the forward alone.
        count: number of random inputs, in addition to the chosen ones.
        seed: integer that fixes which random inputs are drawn.
        seconds: time after which no further input is tried.
        device: device to run on. Default: `cuda` if there is a GPU.

    Returns:
        The report. `report.is_right` says whether every input was right or refused.

    Raises:
        ValueError: an unknown operation.
        RuntimeError: a Triton kernel on a CPU, without Triton's interpreter.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    report = Report(operation)

    def ignore(number: int, case: Case) -> None:
        """Begin a case without telling."""

    examine(
        function,
        operation_of(operation),
        torch.device(device),
        backward=backward,
        count=count,
        seed=seed,
        seconds=seconds,
        begin=ignore,
        end=report.add,
        found=report.add_finding,
        rest=report.leave,
    )
    return report


def examine(
    function: Function,
    operation: Operation,
    device: torch.device,
    *,
    backward: bool,
    count: int,
    seed: int,
    seconds: float,
    begin: Callable[[int, Case], None],
    end: Callable[[Outcome], None],
    found: Callable[[Finding], None],
    rest: Callable[[int], None],
    skipped: int = 0,
) -> None:
    """Run a kernel on every case, and at the end on a large one if there is a GPU.

    Args:
        backward, count, seed, seconds: as in `check_kernel`.
        begin: function that is called with the number of a case and with each input, before it
            runs. Inputs that are tried to make one smaller have the number of that case.
        end: function that is called with each outcome.
        found: function that is called with each mistake and its smallest input.
        rest: function that is called with the number of cases that are left when the time is over.
        skipped: number of first cases to leave out.
    """
    started = time.monotonic()
    kinds = set()
    planned = list(cases(operation, dtypes_on(device), backward=backward, count=count, seed=seed))
    for number, case in enumerate(planned):
        if number < skipped:
            continue
        if time.monotonic() - started > seconds:
            rest(len(planned) - number)
            return
        begin(number, case)
        outcome = judge(function, operation, case, device)
        is_on_cpu = device.type == "cpu"
        if is_on_cpu and any(said in outcome.detail for said in NEEDS_INTERPRETER):
            # An error of the machine, for which the kernel is not to blame.
            raise RuntimeError(
                "Triton cannot run on a CPU, and its interpreter is off: set TRITON_INTERPRET=1 "
                "before triton is imported, for example `TRITON_INTERPRET=1 pytest`"
            )
        if outcome.status == "refused" and number == 0:
            # A kernel may refuse much, but not the input that every test has.
            outcome = replace(outcome, status="wrong")
        end(outcome)
        if outcome.kind == BREAKS_GPU:
            found(Finding(outcome.kind, str(case), outcome.detail))
            rest(len(planned) - number - 1)
            return
        if outcome.status == "wrong" and outcome.kind not in kinds and len(kinds) < MOST_KINDS:
            kinds.add(outcome.kind)
            found(reduced(function, operation, outcome, device, partial(begin, number), end, found))
            if not works(device):  # a smaller input broke it
                rest(len(planned) - number - 1)
                return
    if device.type != "cuda" or skipped > len(planned):
        return
    case = large_case(operation, backward=backward)
    begin(len(planned), case)
    outcome = judge_large(function, operation, case, device)
    end(outcome)
    if works(device):
        torch.cuda.empty_cache()  # tens of GiB, which the process of a test would keep
    if outcome.status == "wrong":  # smaller inputs have been tried
        found(Finding(outcome.kind, str(case), outcome.detail))


def dtypes_on(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes to try. Triton's interpreter computes bf16 wrongly."""
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return ("fp32", "fp16") if is_interpreted else ("fp32", "fp16", "bf16")


def reduced(
    function: Function,
    operation: Operation,
    outcome: Outcome,
    device: torch.device,
    begin: Callable[[Case], None],
    end: Callable[[Outcome], None],
    found: Callable[[Finding], None],
) -> Finding:
    """Return a mistake with the smallest input that shows it.

    Args:
        begin: function that is called with each smaller input, before it runs.
        end, found: as in `examine`. They are told of a smaller input that breaks the GPU.
    """
    tries = 0
    smallest = outcome
    is_smaller = True
    while is_smaller and tries < MOST_REDUCTIONS:
        is_smaller = False
        for case in simpler(smallest.case, operation):
            tries += 1
            begin(case)
            candidate = judge(function, operation, case, device)
            if candidate.kind == BREAKS_GPU:
                end(candidate)
                found(Finding(candidate.kind, str(case), candidate.detail))
                return Finding(outcome.kind, str(smallest.case), smallest.detail)
            if candidate.status == "wrong" and candidate.kind == outcome.kind:
                smallest = candidate
                is_smaller = True
                break
            if tries >= MOST_REDUCTIONS:
                break
    detail = smallest.detail
    if "NaN" in outcome.kind and reads_outside(function, operation, smallest.case, device):
        detail += ". With zeros next to its inputs it returns none, so it reads outside of them"
    return Finding(outcome.kind, str(smallest.case), detail)
