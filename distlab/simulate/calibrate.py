"""Cost model of a machine from a few measured figures, which predicts the others.

Five numbers are fitted, each to one measurement, in this order:

    bytes per second     the optimizer's phase of `local`: a pass over parameters, gradients and states
    FLOP per second      forward and backward of `local`; with those of a second model, whose operators do less
                         arithmetic per byte, also the bytes per second of the operators of forward
                         and backward
    latency, bandwidth   communication time of `naive` (many messages) and of `flat` (one), which nothing disturbs
    contention           communication time and step of `overlap`, where nearly all communication is covered

Everything else is then a prediction: other strategies, bucket sizes, batches, models and numbers of
ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from distlab.simulate.events import Compute
from distlab.simulate.step import SimulatedStep
from distlab.simulate.timeline import DeviceModel, Machine, replay
from distlab.theory.collective_time import link_share
from distlab.theory.step_time import Network

NEEDED = ("local", "naive", "flat", "overlap")
# Assumed, not fitted: what every operator takes beside its work, and a ring's latency per further
# rank.
LAUNCH_S, HOP_S = 3e-6, 3e-6


def calibrate(
    measured: Mapping[str, Mapping[str, float]],
    steps: Mapping[str, SimulatedStep],
    second: tuple[SimulatedStep, float] | None = None,
    *,
    launch_s: float = LAUNCH_S,
    hop_s: float = HOP_S,
) -> Machine:
    """Fit the cost model.

    Args:
        measured: per strategy `forward_backward_p50_ms`, `optimizer_p50_ms`, `step_p50_ms` and
            `comm_ms`, as ddp_bench records them; `local`, `naive`, `flat` and `overlap` are read.
        steps: the same steps simulated, on the same number of ranks, two or more.
        second: `local` of another model or batch simulated, and the measured seconds of its forward
            and backward.

    ValueError: a strategy or a figure is missing, or the figures contradict the model. That is so
        if more messages took no longer than one, or if no memory bandwidth explains both `local`
        steps.
    """
    for name in NEEDED:
        missing = name not in steps or any(
            not isinstance(measured.get(name, {}).get(metric), int | float)
            for metric in ("forward_backward_p50_ms", "optimizer_p50_ms", "step_p50_ms", "comm_ms")
        )
        if missing:
            raise ValueError(f"calibration needs the measured and the simulated step of {name!r}")
    local = steps["local"]
    update = _operators(local, update=True)
    optimizer_s = measured["local"]["optimizer_p50_ms"] / 1e3 - len(update) * launch_s
    device = DeviceModel(1e15, sum(item.bytes for item in update) / optimizer_s, launch_s)
    seconds = measured["local"]["forward_backward_p50_ms"] / 1e3
    first = (_operators(local, update=False), seconds)
    if second is None:
        device = _fit_flops(device, *first)
    else:
        device = _fit_both(device, first, (_operators(second[0], update=False), second[1]))
    network = _fit_network(
        steps, {name: measured[name]["comm_ms"] / 1e3 for name in ("naive", "flat")}, hop_s
    )
    overlap, seen = steps["overlap"], measured["overlap"]
    alone_ms = 1e3 * sum(
        network.seconds(c.bytes, overlap.world_size, operation=c.op) for c in overlap.calls
    )
    slowed = min(1.0, alone_ms / seen["comm_ms"])
    overhead_ms = seen["step_p50_ms"] - measured["local"]["step_p50_ms"]

    def slow_enough(rate: float) -> bool:
        return replay(overlap, Machine(device, network, (rate, slowed))).overhead_ms >= overhead_ms

    return Machine(device, network, (_bisect(slow_enough, 0.05, 1.0), slowed))


def _operators(step: SimulatedStep, *, update: bool) -> list[Compute]:
    """Return the operators of the optimizer with `update`, else those of forward and backward."""
    return [item for item in step.operators if (item.phase == "optimizer") is update]


def _fit_flops(device: DeviceModel, operators: list[Compute], seconds: float) -> DeviceModel:
    def takes_longer(flops_per_s: float) -> bool:
        return sum(map(replace(device, flops_per_s=flops_per_s).seconds, operators)) > seconds

    return replace(device, flops_per_s=_bisect(takes_longer, 1e9, 1e17))


def _fit_both(
    device: DeviceModel, first: tuple[list[Compute], float], second: tuple[list[Compute], float]
) -> DeviceModel:
    """FLOP and bytes per second that explain both; the optimizer keeps the rate of `device`."""

    def fitted(bytes_per_s: float) -> DeviceModel:
        both = replace(device, bytes_per_s=bytes_per_s, update_bytes_per_s=device.bytes_per_s)
        return _fit_flops(both, *first)

    def takes_longer(bytes_per_s: float) -> bool:
        return sum(map(fitted(bytes_per_s).seconds, second[0])) > second[1]

    low, high = device.bytes_per_s / 4, device.bytes_per_s * 4
    if not takes_longer(low) or takes_longer(high):
        raise ValueError(
            f"no memory bandwidth between {low:.3g} and {high:.3g} B/s explains both forward and backward of `local`, "
            f"{first[1]:.4f} s and {second[1]:.4f} s: take a second model whose operators do less arithmetic per byte"
        )
    return fitted(_bisect(takes_longer, low, high))


def _fit_network(
    steps: Mapping[str, SimulatedStep], seconds: Mapping[str, float], hop_s: float
) -> Network:
    """Fit one node: α and W from two equations, for many messages and for one.

    The equation is calls·α + volume/W = time.
    """
    calls = {name: len(steps[name].calls) for name in seconds}
    ranks = steps["naive"].world_size
    volume = {
        name: sum(link_share(c.op, ranks) * c.bytes for c in steps[name].calls) for name in seconds
    }
    determinant = calls["naive"] * volume["flat"] - calls["flat"] * volume["naive"]
    latency = (seconds["naive"] * volume["flat"] - seconds["flat"] * volume["naive"]) / determinant
    per_byte = (calls["naive"] * seconds["flat"] - calls["flat"] * seconds["naive"]) / determinant
    if latency < 0 or per_byte <= 0:
        raise ValueError(
            f"naive took {seconds['naive']:.4f} s for {calls['naive']} messages and flat {seconds['flat']:.4f} s for "
            f"{calls['flat']}: no latency and bandwidth explain both; measure again"
        )
    return Network(
        1 / per_byte, 1 / per_byte, ranks, max(0.0, latency - hop_s * (ranks - 2)), hop_s
    )


def _bisect(above: Callable[[float], bool], low: float, high: float) -> float:
    """Return the point where `above` turns from true to false, searched on a logarithmic scale."""
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if above(middle) else (low, middle)
    return (low * high) ** 0.5
