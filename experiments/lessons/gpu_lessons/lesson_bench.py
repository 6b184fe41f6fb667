"""Bench that the parts of `gpu_lessons` measure with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.experiment import Run
from distlab.hardware import lookup
from distlab.measure import attempt, device_percentiles
from kernels._compile import resources
from kernels._dispatch import compile_only, interpreted, multiprocessors

CHECKED_ROUNDS = 5  # with many more rounds every element is 2, whatever the kernel does
EXACT = 1e-5  # tolerance of an effect's kernel, in fp32
# Allowed error of a form of a kernel, relative to the largest value.
ROUNDED = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Bench:
    """Device, options and run of all parts, with the functions that time them."""

    config: Any  # the experiment's
    run: Run
    device: torch.device

    def __post_init__(self) -> None:
        # The interpreter does not compute bf16 correctly.
        self.dtype = torch.float16 if interpreted() else torch.bfloat16
        self.spec = lookup(str(self.run.header.environment["device_name"]))
        self.sms = multiprocessors(self.device)

    def time(self, call: Callable[[], Any]) -> dict[str, float]:
        """Return percentiles of the device's time of a call."""
        return device_percentiles(call, self.device, self.config.repeats)

    def effect(
        self,
        part: str,
        variant: str,
        factor: float | None,
        call: Callable[[int], Any] | None,
        error: Callable[[], float],
        read_bytes: int = 0,
    ) -> None:
        """Add a row of a hardware's effect.

        Args:
            part: name of the part, as in `PARTS`.
            variant: name of the row.
            factor: predicted time over that of the part's first row. None if no document says it.
            call: function that launches the kernel for a number of rounds. None if this machine
                cannot launch it.
            error: function that returns the largest error of the call's result after
                CHECKED_ROUNDS.
            read_bytes: bytes read in each round. 0 if the rate does not matter.
        """

        def measured() -> dict[str, Any]:
            # With few rounds, while elements still differ. After many, a kernel that skipped rounds
            # would be right too.
            call(CHECKED_ROUNDS)
            return checked(error(), EXACT) | self.time(partial(call, self.config.rounds))

        metrics = attempt(measured) if call else {"status": "needs a GPU"}
        # Only rows about bandwidth have this number.
        if read_bytes and "time_p50_ms" in metrics:
            metrics["gb_per_s"] = read_bytes * self.config.rounds / metrics["time_p50_ms"] / 1e6
        self.run.add(variant, {"predicted_factor": factor} | metrics, part=part)

    def form(
        self,
        part: str,
        variant: str,
        call: Callable[[], Tensor],
        exact: Tensor,
        factor: float | None = None,
        counted: dict[str, float] | None = None,
    ) -> None:
        """Add a row of one way to compute something.

        Args:
            part: name of the part, as in `PARTS`.
            variant: name of the row.
            call: function that computes the result anew each time.
            exact: result in float64.
            factor: ratio of the bytes or multiplications to those of the part's first row. None if
                they are not counted.
            counted: further metrics of the row that theory counts.
        """

        def measured() -> dict[str, Any]:
            # The next call writes into the same tensor.
            result = call().clone()
            error = (result.double() - exact).abs().max() / exact.abs().max()
            metrics = checked(error.item(), ROUNDED[result.dtype])
            # Atomic additions come in any order, and may round differently.
            repeated = [torch.equal(result, call()) for _ in range(3)]
            metrics["same_bits"] = "yes" if all(repeated) else "no"
            # Without a datasheet there is no GPU whose registers could be counted.
            if self.spec:
                with compile_only() as compiled:
                    call()
                used = [resources(kernel) for kernel in compiled]
                if used:  # torch's own forms launch no kernel of Triton
                    metrics["registers"] = max(each["registers"] for each in used)
                    metrics["spill_bytes"] = max(each["spill_bytes"] for each in used)
            return metrics | self.time(call)

        known = {"predicted_factor": factor} | (counted or {})
        self.run.add(variant, known | attempt(measured), part=part)


def checked(error: float, tolerance: float) -> dict[str, Any]:
    """Return the error, and as the row's status whether it is within the tolerance."""
    return {"error": error, "status": "ok" if error <= tolerance else "WRONG"}
