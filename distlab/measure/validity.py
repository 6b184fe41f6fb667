"""Checks of a timing: a clock that covers the work, work that computes, and a possible speed.

The usual ways to publish a wrong benchmark are a timer that reads the clock while the GPU still
computes, and a model that computes nothing: zeros from a forgotten initialisation, NaNs, a graph
that was optimised away.

A measurement that fails is a row that says so, and not the end of the sweep.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from distlab.cli_errors import is_out_of_memory as is_out_of_memory

# A GPU works on while the host does not wait. A CPU has done its work when a call returns, and what
# its samples miss is the time of other processes.
LEAST_COVERED = {"cuda": 0.90, "cpu": 0.10}
MOST_COVERED = 1.05
MOST_OF_PEAK = 1.02  # the peak is at the boost clock; a cool GPU stays a little above its datasheet


class Implausible(ValueError):
    """A measurement that cannot be what it claims to be."""


def check_clock(
    samples_ms: Sequence[float], wall_ms: float, device: torch.device | str = "cuda"
) -> float:
    """Return the share of the wall clock that the samples add up to.

    Args:
        samples_ms: ms of every repetition, without exception.
        wall_ms: ms of all of them by another clock, between two synchronisations of the device.
        device: device that was timed.

    Raises:
        Implausible: less than 90 % on a GPU or 10 % on a CPU (a timer that does not wait for the
            device), or more than 105 % (one that counts something twice).
    """
    covered = sum(samples_ms) / wall_ms if wall_ms > 0 else math.inf
    if not LEAST_COVERED[torch.device(device).type] <= covered <= MOST_COVERED:
        raise Implausible(
            f"the timer accounts for {100 * covered:.0f} % of the wall clock: it must wait for the device before it "
            "reads its clock, and time all of the work once"
        )
    return covered


def check_work(loss: Tensor, gradients: Iterable[Tensor | None] | None = None) -> None:
    """Check that a step computed something.

    The loss must be finite, and gradients finite and not all zero.

    Args:
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
    norms = [torch.linalg.vector_norm(g.detach().float()) for g in gradients if g is not None]
    total = math.sqrt(sum(float(norm) ** 2 for norm in norms))
    if not norms or total == 0:
        raise Implausible(
            "all gradients are zero: this times zeros, which switch fewer transistors and run faster; initialise "
            "the model and feed it varied data"
        )
    if not math.isfinite(total):
        raise Implausible(
            f"the gradient's norm is {total}: timing NaNs says nothing about a model that trains"
        )


def check_speed(flops: float, ms: float, peak: float | None) -> float | None:
    """Return the share of the device's peak that was reached; None without a known peak.

    Args:
        flops: least number of operations that the work takes.
        peak: FLOP/s, from `distlab.hardware.peak_flops`.

    Raises:
        Implausible: faster than the device can be.
    """
    if peak is None:
        return None
    share = flops / (ms / 1e3) / peak
    if share > MOST_OF_PEAK:
        raise Implausible(
            f"{flops:.3g} FLOPs in {ms:.4g} ms are {100 * share:.0f} % of the device's peak: the clock did not wait "
            "for the device, or the work was not done"
        )
    return share


def attempt(measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Return the metrics of `measure()` with `status` "ok".

    If it raises, return only a status: "OOM" or the first line of the error.

    Warnings are silenced: a torch backend that refuses a call warns once for every reason it has.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"status": "ok"} | measure()
    except Exception as error:
        if is_out_of_memory(error):
            return {"status": "OOM"}
        reason = str(error).strip().splitlines()
        return {"status": f"{type(error).__name__}: {reason[0][:100] if reason else ''}"}
