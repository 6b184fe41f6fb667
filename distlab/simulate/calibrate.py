"""Cost model of a machine from a few measured figures, which predicts the others.

`calibrate` fits six numbers to measurements of one model, and a seventh to one of a second model,
in this order:

    bytes per second     phase of the optimizer in `local`: a pass over parameters, gradients and
                         states
    FLOP per second      forward and backward of `local`. With those of a second model, whose
                         operators do less arithmetic per byte, also the bytes per second of the
                         operators of forward and backward
    latency, bandwidth   communication times of `naive` (one message per parameter) and of `flat`
                         (one message), while no computation runs
    contention           communication time and step of `overlap`, where nearly all communication is
                         covered

Everything else is then a prediction: other strategies, bucket sizes, batches, models and numbers of
ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from distlab.simulate.events import Compute
from distlab.simulate.step import SimulatedStep
from distlab.simulate.timeline import DeviceModel, Machine, replay
from distlab.theory.collective_time import further_hops, link_share
from distlab.theory.step_time import Network

NEEDED = ("local", "naive", "flat", "overlap")
# These two are assumed, not fitted.
LAUNCH_S = 3e-6  # seconds of every operator in addition to its work
HOP_S = 3e-6  # seconds of latency of each hop of a collective after the first
# Figures of each strategy that are read.
_METRICS = ("forward_backward_p50_ms", "optimizer_p50_ms", "step_p50_ms", "comm_ms")


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
        launch_s: seconds that every operator takes in addition to its work.
        hop_s: seconds of latency of each hop of a collective after the first.

    Raises:
        ValueError: a strategy or a figure is missing, or the figures contradict the model. That is
            so if more messages took no longer than one, or if no memory bandwidth explains both
            `local` steps.
    """
    _check_complete(measured, steps)
    local = steps["local"]
    update = _operators(local, update=True)
    # Seconds without the launches, which the model adds to every operator again.
    update_s = measured["local"]["optimizer_p50_ms"] / 1e3 - len(update) * launch_s
    update_bytes = sum(operator.bytes for operator in update)
    # So many FLOP per second that only bytes count, until they are fitted.
    device = DeviceModel(1e15, update_bytes / update_s, launch_s)
    forward_backward = _operators(local, update=False)
    forward_backward_s = measured["local"]["forward_backward_p50_ms"] / 1e3
    if second is None:
        device = _fit_flops(device, forward_backward, forward_backward_s)
    else:
        second_step, second_s = second
        device = _fit_both(
            device,
            (forward_backward, forward_backward_s),
            (_operators(second_step, update=False), second_s),
        )
    comm_s = {name: measured[name]["comm_ms"] / 1e3 for name in ("naive", "flat")}
    network = _fit_network(steps, comm_s, hop_s)
    contention = _fit_contention(
        steps["overlap"],
        device,
        network,
        comm_ms=measured["overlap"]["comm_ms"],
        overhead_ms=measured["overlap"]["step_p50_ms"] - measured["local"]["step_p50_ms"],
    )
    return Machine(device, network, contention)


def _check_complete(
    measured: Mapping[str, Mapping[str, float]], steps: Mapping[str, SimulatedStep]
) -> None:
    """Raise ValueError if a strategy or a figure is missing."""
    for name in NEEDED:
        figures = measured.get(name, {})
        has_figures = all(isinstance(figures.get(metric), int | float) for metric in _METRICS)
        if name not in steps or not has_figures:
            raise ValueError(f"calibration needs the measured and the simulated step of {name!r}")


def _operators(step: SimulatedStep, *, update: bool) -> list[Compute]:
    """Return the operators of the optimizer with `update`, else those of forward and backward."""
    return [item for item in step.operators if (item.phase == "optimizer") is update]


def _fit_flops(device: DeviceModel, operators: list[Compute], seconds: float) -> DeviceModel:
    """Return the device with the FLOP per second at which these operators take `seconds`."""

    def takes_longer(flops_per_s: float) -> bool:
        tried = replace(device, flops_per_s=flops_per_s)
        return _total_seconds(tried, operators) > seconds

    return replace(device, flops_per_s=_bisect(takes_longer, 1e9, 1e17))


def _fit_both(
    device: DeviceModel, first: tuple[list[Compute], float], second: tuple[list[Compute], float]
) -> DeviceModel:
    """Return the device with the FLOP and bytes per second that explain both measurements.

    Every bandwidth has its FLOP per second that explain the first. Of these pairs, one also
    explains the second. The optimizer keeps the bandwidth of `device`.

    Args:
        device: device with the optimizer's bandwidth.
        first, second: operators of forward and backward, and the seconds that they took.
    """
    first_operators, first_s = first
    second_operators, second_s = second

    def fitted(bytes_per_s: float) -> DeviceModel:
        tried = replace(device, bytes_per_s=bytes_per_s, update_bytes_per_s=device.bytes_per_s)
        return _fit_flops(tried, first_operators, first_s)

    def takes_longer(bytes_per_s: float) -> bool:
        return _total_seconds(fitted(bytes_per_s), second_operators) > second_s

    # Operators of forward and backward reach more or less of the memory's bandwidth than the
    # optimizer's long pass, but not by a factor of four.
    low = device.bytes_per_s / 4
    high = device.bytes_per_s * 4
    if not takes_longer(low) or takes_longer(high):
        raise ValueError(
            f"no memory bandwidth between {low:.3g} and {high:.3g} B/s explains both forward and "
            f"backward of `local`, {first_s:.4f} s and {second_s:.4f} s: take a second model whose "
            "operators do less arithmetic per byte"
        )
    return fitted(_bisect(takes_longer, low, high))


def _total_seconds(device: DeviceModel, operators: list[Compute]) -> float:
    """Return the seconds that a device takes for these operators, one after the other."""
    return sum(map(device.seconds, operators))


def _fit_network(
    steps: Mapping[str, SimulatedStep], seconds: Mapping[str, float], hop_s: float
) -> Network:
    """Return the network of one node, from the communication times of `naive` and of `flat`.

    With latency α and bandwidth W, calls·α + volume/W = seconds (the α-β model of
    `distlab.theory.collective_time`). The two strategies give two linear equations for α and 1/W,
    which Cramer's rule solves.

    Args:
        steps: simulated steps, by strategy.
        seconds: measured seconds of communication, by strategy.
        hop_s: seconds of latency of each hop of a collective after the first.
    """
    naive = steps["naive"]
    flat = steps["flat"]
    ranks = naive.world_size
    naive_s = seconds["naive"]
    flat_s = seconds["flat"]
    naive_calls = len(naive.calls)
    flat_calls = len(flat.calls)
    naive_volume = _volume(naive, ranks)
    flat_volume = _volume(flat, ranks)
    determinant = naive_calls * flat_volume - flat_calls * naive_volume
    # The determinant is not 0: naive has more calls than flat for nearly the same volume.
    latency = (naive_s * flat_volume - flat_s * naive_volume) / determinant
    per_byte = (naive_calls * flat_s - flat_calls * naive_s) / determinant
    if latency < 0 or per_byte <= 0:
        raise ValueError(
            f"naive took {naive_s:.4f} s for {naive_calls} messages and flat {flat_s:.4f} s for "
            f"{flat_calls}: no latency and bandwidth explain both; measure again"
        )
    return Network(
        # All ranks of a calibration are on one node, so both bandwidths are that of the links
        # inside.
        inside_bytes_per_s=1 / per_byte,
        between_bytes_per_s=1 / per_byte,
        devices_per_node=ranks,
        # `Network` adds these hops to the latency of each all-reduce, of which naive's and flat's
        # messages are.
        latency_s=max(0.0, latency - hop_s * further_hops(ranks, all_reduce=True)),
        hop_s=hop_s,
    )


def _volume(step: SimulatedStep, ranks: int) -> float:
    """Return the bytes that each link carries in a step."""
    return sum(link_share(call.op, ranks) * call.bytes for call in step.calls)


def _fit_contention(
    step: SimulatedStep,
    device: DeviceModel,
    network: Network,
    *,
    comm_ms: float,
    overhead_ms: float,
) -> tuple[float, float]:
    """Return the rates of computation and of communication while both run.

    The rate of communication is its time alone divided by `comm_ms`. The rate of computation is the
    one at which the replayed step has the measured overhead.

    Args:
        step: simulated step of `overlap`, where nearly all communication is covered.
        device: model of the device.
        network: model of the network.
        comm_ms: measured ms of communication.
        overhead_ms: ms that the measured step takes longer than `local`.
    """
    alone_s = sum(
        network.seconds(call.bytes, step.world_size, operation=call.op) for call in step.calls
    )
    # Communication under backward cannot be faster than alone. Noise can make it look so.
    comm_rate = min(1.0, 1e3 * alone_s / comm_ms)

    def slow_enough(compute_rate: float) -> bool:
        tried = Machine(device, network, (compute_rate, comm_rate))
        return replay(step, tried).overhead_ms >= overhead_ms

    # A slower computation adds more overhead, so `slow_enough` turns from true to false once.
    return _bisect(slow_enough, 0.05, 1.0), comm_rate


def _bisect(above: Callable[[float], bool], low: float, high: float) -> float:
    """Return the point where `above` turns from true to false, searched on a logarithmic scale."""
    # 60 halvings of the widest interval, 1e9 to 1e17, leave less than a double's precision.
    for _ in range(60):
        middle = (low * high) ** 0.5
        if above(middle):
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
