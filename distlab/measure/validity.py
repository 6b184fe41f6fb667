"""Checks of a timing: a clock that covers the work, work that computes, and a possible speed.

Two mistakes are the usual ways to publish a wrong benchmark. One is a timer that reads the clock
while the GPU still computes. The other is a model that computes nothing: zeros from a forgotten
initialisation, NaNs, a graph that was optimised away.

A measurement that fails becomes a row that says so (`attempt`), and does not end the sweep.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from distlab.cli_errors import is_out_of_memory as is_out_of_memory

# Share of the wall clock that samples must add up to. On a GPU, less means that the timer does not
# wait for the device. A CPU has done its work when a call returns, so less only means that other
# processes ran in between. All three bounds are our choice.
LEAST_COVERED = {"cuda": 0.90, "cpu": 0.10}
MOST_COVERED = 1.05
# Share of the peak that is possible. The peak of a datasheet is at the boost clock, and a cool GPU
# runs a little above it.
MOST_OF_PEAK = 1.02


class Implausible(ValueError):
    """Error for a measurement that cannot be right."""


def check_clock(
    samples_ms: Sequence[float], wall_ms: float, device: torch.device | str = "cuda"
) -> float:
    """Return the share of the wall clock that the samples add up to, 1 for all of it.

    Args:
        samples_ms: ms of every repetition, without exception.
        wall_ms: ms of all repetitions by another clock, between two synchronisations of the device.
        device: device that was timed.

    Raises:
        Implausible: less than 90 % on a GPU or 10 % on a CPU (a timer that does not wait for the
            device), or more than 105 % (a timer that counts something twice).
    """
    covered = sum(samples_ms) / wall_ms if wall_ms > 0 else math.inf
    min_covered = LEAST_COVERED[torch.device(device).type]
    if not min_covered <= covered <= MOST_COVERED:
        raise Implausible(
            f"the timer accounts for {100 * covered:.0f} % of the wall clock: it must wait for the "
            "device before it reads its clock, and time all of the work once"
        )
    return covered


def check_work(loss: Tensor, gradients: Iterable[Tensor | None] | None = None) -> None:
    """Check that a step computed something.

    The loss must be finite, and gradients finite and not all zero.

    Args:
        loss: loss of the step.
        gradients: gradients after backward, None if there was no backward.

    Raises:
        Implausible: the check failed. The message says why.
    """
    if not bool(loss.detach().isfinite().all()):
        raise Implausible(
            f"the loss is {loss.item()}: timing NaNs says nothing about a model that trains"
        )
    if gradients is None:
        return
    # In fp32, where the squares of fp16 gradients neither overflow nor vanish.
    norms = [torch.linalg.vector_norm(g.detach().float()) for g in gradients if g is not None]
    total = math.sqrt(sum(float(norm) ** 2 for norm in norms))
    if not norms or total == 0:
        raise Implausible(
            "all gradients are zero: this times zeros, which switch fewer transistors and run "
            "faster; initialise the model and feed it varied data"
        )
    if not math.isfinite(total):
        raise Implausible(
            f"the gradient's norm is {total}: timing NaNs says nothing about a model that trains"
        )


def check_speed(flops: float, ms: float, peak: float | None) -> float | None:
    """Return the share of the device's peak that was reached. None if the peak is not known.

    Args:
        flops: minimum number of operations that the work takes.
        ms: ms that it took.
        peak: FLOP/s of the device, from `distlab.hardware.peak_flops`. None if it is not known.

    Raises:
        Implausible: faster than the device can be.
    """
    if peak is None:
        return None
    share = flops / (ms / 1e3) / peak
    if share > MOST_OF_PEAK:
        raise Implausible(
            f"{flops:.3g} FLOPs in {ms:.4g} ms are {100 * share:.0f} % of the device's peak: the "
            "clock did not wait for the device, or the work was not done"
        )
    return share


def attempt(measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Return the metrics of `measure()` with `status` "ok".

    If it raises, return only a status: "OOM" or the first line of the error, up to 100 characters.
    """
    try:
        with warnings.catch_warnings():
            # A torch backend that refuses a call warns once for each of its reasons.
            warnings.simplefilter("ignore")
            return {"status": "ok"} | measure()
    except Exception as error:
        if is_out_of_memory(error):
            return {"status": "OOM"}
        lines = str(error).strip().splitlines()
        first_line = lines[0][:100] if lines else ""
        return {"status": f"{type(error).__name__}: {first_line}"}
