"""From a few measured figures of one machine to the cost model that predicts the others.

Five numbers are fitted, each to one measurement, in this order:

    bytes per second     the optimizer's phase of `local`: a pass over parameters, gradients and states
    FLOP per second      forward and backward of `local`
    latency, bandwidth   communication time of `naive` (many messages) and of `flat` (one), which nothing disturbs
    contention           communication time and step of `overlap`, where nearly all communication is covered

Everything else is then a prediction: other strategies, bucket sizes, batches, models and numbers of ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distlab.simulate.costs import Contention, DeviceModel, LinkModel
from distlab.simulate.events import Compute
from distlab.simulate.run import SimulatedStep
from distlab.simulate.timeline import replay

NEEDED = ("local", "naive", "flat", "overlap")
# Assumed, not fitted: the host's time to launch an operator of an eager model, and a ring's latency per further rank.
LAUNCH_S, HOP_S = 10e-6, 3e-6


@dataclass(frozen=True)
class Calibration:
    """A machine's cost model."""

    device: DeviceModel
    link: LinkModel
    contention: Contention


def calibrate(
    measured: Mapping[str, Mapping[str, float]],
    steps: Mapping[str, SimulatedStep],
    *,
    launch_s: float = LAUNCH_S,
    hop_s: float = HOP_S,
) -> Calibration:
    """Fit the cost model.

    Args:
        measured: per strategy `forward_backward_p50_ms`, `optimizer_p50_ms`, `step_p50_ms` and `comm_ms`, as
            ddp_bench records them; `local`, `naive`, `flat` and `overlap` are read.
        steps: the same steps simulated, on the same number of ranks, two or more.

    Raises:
        ValueError: a strategy or a figure is missing, or the figures contradict the model (more messages took
            no longer than one).
    """
    for name in NEEDED:
        missing = name not in steps or any(
            not isinstance(measured.get(name, {}).get(metric), int | float)
            for metric in ("forward_backward_p50_ms", "optimizer_p50_ms", "step_p50_ms", "comm_ms")
        )
        if missing:
            raise ValueError(f"calibration needs the measured and the simulated step of {name!r}")
    local = steps["local"]
    optimizer_s = measured["local"]["optimizer_p50_ms"] / 1e3
    device = DeviceModel(1e15, _moved(local, "optimizer") / optimizer_s, launch_s)
    device = _fit_flops(device, local, measured["local"]["forward_backward_p50_ms"] / 1e3)
    link = _fit_link(steps, {name: measured[name]["comm_ms"] / 1e3 for name in ("naive", "flat")}, hop_s)
    overlap, seen = steps["overlap"], measured["overlap"]
    alone_ms = 1e3 * sum(link.seconds(call, overlap.world_size) for call in overlap.calls)
    slowed = min(1.0, alone_ms / seen["comm_ms"])
    exposed_ms = seen["step_p50_ms"] - measured["local"]["step_p50_ms"]

    def too_fast(rate: float) -> bool:
        return replay(overlap, device, link, Contention(rate, slowed)).exposed_ms < exposed_ms

    rate = _bisect(lambda rate: not too_fast(rate), 0.05, 1.0)
    return Calibration(device, link, Contention(rate, slowed))


def _moved(step: SimulatedStep, phase: str) -> int:
    operators = (item for item in step.items[step.boundary :] if isinstance(item, Compute))
    return sum(item.bytes for item in operators if item.phase == phase)


def _fit_flops(device: DeviceModel, local: SimulatedStep, seconds: float) -> DeviceModel:
    operators = [
        item
        for item in local.items[local.boundary :]
        if isinstance(item, Compute) and item.phase != "optimizer"
    ]

    def takes_longer(flops_per_s: float) -> bool:
        fitted = replace(device, flops_per_s=flops_per_s)
        return sum(fitted.seconds(item) for item in operators) > seconds

    return replace(device, flops_per_s=_bisect(takes_longer, 1e9, 1e17))


def _fit_link(steps: Mapping[str, SimulatedStep], seconds: Mapping[str, float], hop_s: float) -> LinkModel:
    """α and W from two equations: calls·α + volume/W = time, for many messages and for one."""
    unit = LinkModel(1.0)  # seconds at one byte per second: the volume per link
    calls = {name: len(steps[name].calls) for name in seconds}
    volume = {
        name: sum(unit.seconds(call, steps[name].world_size) for call in steps[name].calls)
        for name in seconds
    }
    determinant = calls["naive"] * volume["flat"] - calls["flat"] * volume["naive"]
    latency = (seconds["naive"] * volume["flat"] - seconds["flat"] * volume["naive"]) / determinant
    per_byte = (calls["naive"] * seconds["flat"] - calls["flat"] * seconds["naive"]) / determinant
    if latency < 0 or per_byte <= 0:
        raise ValueError(
            f"naive took {seconds['naive']:.4f} s for {calls['naive']} messages and flat {seconds['flat']:.4f} s for "
            f"{calls['flat']}: no latency and bandwidth explain both; measure again"
        )
    ranks = steps["naive"].world_size
    return LinkModel(1 / per_byte, max(0.0, latency - hop_s * (ranks - 2)), hop_s)


def _bisect(above: Callable[[float], bool], low: float, high: float) -> float:
    """Where `above` turns from true to false, searched on a logarithmic scale."""
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if above(middle) else (low, middle)
    return (low * high) ** 0.5
