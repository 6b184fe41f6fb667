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

CHECKED_ROUNDS = 5  # after more of them every element is 2
EXACT = 1e-5  # of an effect's kernel, in fp32
# of a form's, over the largest value
ROUNDED = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Bench:
    """Device, options and run of all parts, with the functions that time them."""

    config: Any  # the experiment's
    run: Run
    device: torch.device

    def __post_init__(self) -> None:
        self.dtype = torch.float16 if interpreted() else torch.bfloat16
        self.spec = lookup(str(self.run.header.environment["device_name"]))
        self.sms = multiprocessors(self.device)

    def time(self, call: Callable[[], Any]) -> dict[str, float]:
        """Percentiles of the device's time."""
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
            factor: predicted time over that of the part's first row; None where no document says.
            call: launches the kernel for some rounds; None where this machine cannot.
            error: the largest of the call's result after CHECKED_ROUNDS.
            read_bytes: in each round; 0 where the rate does not matter.
        """

        def measured() -> dict[str, Any]:
            call(CHECKED_ROUNDS)
            return checked(error(), EXACT) | self.time(partial(call, self.config.rounds))

        metrics = attempt(measured) if call else {"status": "needs a GPU"}
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
    ) -> None:
        """Add a row of one way to compute something.

        Args:
            call: function that computes the result anew each time.
            exact: result in float64.
            factor: ratio of the bytes or multiplications to those of the part's first row. None if
                they are not counted.
        """

        def measured() -> dict[str, Any]:
            result = call().clone()
            error = (result.double() - exact).abs().max() / exact.abs().max()
            metrics = checked(error.item(), ROUNDED[result.dtype])
            metrics["same_bits"] = (
                "yes" if all(torch.equal(result, call()) for _ in range(3)) else "no"
            )
            if self.spec:
                with compile_only() as compiled:
                    call()
                used = [resources(kernel) for kernel in compiled]
                metrics |= {
                    name: max(each[name] for each in used)
                    for name in ("registers", "spill_bytes")
                    if used
                }
            return metrics | self.time(call)

        self.run.add(variant, {"predicted_factor": factor} | attempt(measured), part=part)


def checked(error: float, tolerance: float) -> dict[str, Any]:
    """An error, and what it says of the row."""
    return {"error": error, "status": "ok" if error <= tolerance else "WRONG"}
