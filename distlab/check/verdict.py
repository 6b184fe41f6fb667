"""The result of a check: the tensors that differ, and the text and exit code that follow."""

from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from distlab.check.jobs import STEPS
from distlab.check.parts import Part
from distlab.check.signatures import FROZEN

ROWS = 20  # most rows of a verdict's table
VISIBLE_PCT = 1.0  # error of a gradient from which on a right verdict says that it would be hidden
NORM = "(the norm)"  # in the place of a tensor's name


@dataclass(frozen=True)
class Finding:
    """A tensor that differs.

    Attributes:
        tensor: name in the module.
        what: kind of value that differs: `initial value`, `gradient`, `value` (after a step),
            `buffer`, `norm` (of the whole gradient), or `state` and its kind, such as
            `state exp_avg` (of the optimizer, after a step).
        step: number from 1 on, or 0 before the first step.
        error: largest |Δ| over ranks and elements, relative to the largest element in one process
            (not relative where all of these are zero).
        signature: mistake that gives these values.
        part: elements that have this mistake, if the others are right. None if all are wrong.
    """

    tensor: str
    what: str
    step: int
    error: float
    signature: str
    part: Part | None = None


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a check.

    Attributes:
        ranks: number of ranks that trained.
        micro_batches: number of micro-batches per rank and step.
        tensors: number of trainable parameters that were compared.
        findings: tensors that differ. Empty for a wrapper that is right with one micro-batch per
            step and does not claim to accumulate gradients, see `accumulation`.
        loss: mean over ranks of the loss of the last step.
        expected_loss: the same loss in one process.
        finish: name of the function that was called after the last backward of each step.
        accumulation: tensors that differ with several micro-batches per step, if the wrapper has no
            `no_sync()` and is right with one. `micro_batches` is then 1.
        right_with_one: True if a wrong wrapper is right with one micro-batch per step. None if that
            was not tried.
        warning: sentence about a mean of means, of which a check cannot say whether it is meant.
            Empty if there is none. It does not make a verdict wrong.
        optimizer: name of its class.
        states: number of tensors of its state that were compared after each step.
        where: sentence about the first module that differs, if that was asked for.
        together: sentences about ranges of a flat buffer in which several tensors are wrong.
        unseen_tensor: parameter in whose gradient the largest error counts as right, because
            rounding could have made it. Empty if there is none.
        unseen_pct: this error, in % of the gradient, as root mean squares.
    """

    ranks: int
    micro_batches: int
    tensors: int
    findings: tuple[Finding, ...]
    loss: float
    expected_loss: float
    finish: str = ""
    accumulation: tuple[Finding, ...] = ()
    right_with_one: bool | None = None
    warning: str = ""
    optimizer: str = "SGD"
    states: int = 0
    where: str = ""
    together: tuple[str, ...] = ()
    unseen_tensor: str = ""
    unseen_pct: float = 0.0

    @property
    def right(self) -> bool:
        """Return whether nothing differs."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `right`, for JSON."""
        return asdict(self) | {"right": self.right}

    def __repr__(self) -> str:
        return str(self)  # pytest shows the repr of what an assertion holds

    def __str__(self) -> str:
        parts = [
            f"{self._headline()} ({self.ranks} ranks × {self._micro_batches()}, {STEPS} steps)"
        ]
        shown = self.findings or self.accumulation
        if self.accumulation:
            parts.append("With several micro-batches per step these differ:")
        if shown:
            rows = [
                (each.tensor, each.what, each.step, f"{each.error:.1e}", each.signature)
                for each in shown[:ROWS]
            ]
            titles = ("tensor", "differs in", "step", "relative |Δ|", "signature")
            has_parts = any(each.part is not None for each in shown)
            if has_parts:
                titles = (*titles, "wrong part")
                parts_shown = [str(each.part or "") for each in shown[:ROWS]]
                rows = [(*row, part) for row, part in zip(rows, parts_shown, strict=True)]
            more = f"\nand {len(shown) - ROWS} more" if len(shown) > ROWS else ""
            parts.append(tabulate(rows, titles, disable_numparse=True) + more)
            if has_parts:
                notes = [
                    "Where a wrong part is given, the rest of the tensor is right.",
                    *self.together,
                ]
                parts.append("\n".join(notes))
        if self.findings and self.right_with_one:
            parts.append(
                "With one micro-batch per step it is right: look at no_sync() and at what "
                "accumulates."
            )
        parts.append(
            f"loss of step {STEPS}: {self.loss:.6g}, in one process {self.expected_loss:.6g}"
            + (f"\nfinish that was called: {self.finish}" if self.finish else "")
        )
        if self.states:
            parts[-1] += f"\nstate of {self.optimizer}: {self.states} tensors compared"
        if self.where:
            parts[-1] += f"\nwhere: {self.where}"
        if self.warning:
            parts.append(f"warning: {self.warning}")
        if self.right and self.unseen_pct >= VISIBLE_PCT:
            parts.append(
                f"An error of less than {self.unseen_pct:.0f} % could not be told from rounding "
                f"(in '{self.unseen_tensor}', and less in others whose gradient is not noise "
                "alone). Check in fp32 as well: the code of the wrapper is the same."
            )
        return "\n\n".join(parts)

    def _headline(self) -> str:
        if self.accumulation:
            return (
                "right with one backward per step; does not support accumulation: "
                f"{self.tensors} of {self.tensors} tensors as in one process"
            )
        if self.right:
            return f"right: {self.tensors} of {self.tensors} tensors as in one process"
        if self.findings[0].tensor == NORM:
            return (
                f"WRONG: {self.tensors} of {self.tensors} tensors as in one process, "
                "the norm of the gradient is not"
            )
        trainable = {each.tensor for each in self.findings if not _is_other(each)}
        others = {each.tensor for each in self.findings} - trainable
        counted = []
        if trainable:
            counted.append(f"{len(trainable)} of {self.tensors} tensors")
        if others:
            counted.append(f"{len(others)} buffers or frozen parameters")
        # The verb agrees with the whole phrase.
        several = len(trainable) + len(others) > 1 or self.tensors > 1
        return (
            f"WRONG: {' and '.join(counted)} {'differ' if several else 'differs'} from one process"
        )

    def _micro_batches(self) -> str:
        return f"{self.micro_batches} micro-batch{'' if self.micro_batches == 1 else 'es'}"


def _is_other(finding: Finding) -> bool:
    """Return whether the tensor is a buffer or frozen, which `Verdict.tensors` does not count."""
    return finding.what == "buffer" or finding.signature == FROZEN
