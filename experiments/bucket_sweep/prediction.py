"""What to sweep, and the step that parts, measured without any bucket, predict for a bucket size."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distlab.bench.timing import BenchOptions, Timing, Variant, synthetic_batches, variants
from distlab.experiment import RankContext, TimingOptions, option
from distlab.measure import (
    MIN_SAMPLES,
    disturb,
    gradient_ready_ms,
    percentiles,
    time_collective,
)
from distlab.measure.clock import measure, slowest_rank
from distlab.model import TransformerLM
from distlab.parallel.buckets import MIB, plan_buckets
from distlab.precision import DTYPES
from distlab.simulate.calibrate import MeasuredLinks
from distlab.theory.collective_time import CollectiveFit, fit_collective
from distlab.theory.step_time import pipeline
from distlab.train.step import next_token_loss

OURS, PEER, PARTS, OPTIMUM = "bucketed", "torch-ddp-tuned", "parts", "optimum"
LARGEST_MESSAGE = 2**30  # fits are extrapolated beyond


@dataclass(frozen=True)
class BucketSweepConfig(BenchOptions, TimingOptions):
    """What to sweep. Raises ValueError for a value that is not allowed; the message says what is."""

    bucket_sizes_mb: tuple[float | None, ...] = option(
        (1.0, 10.0, 25.0, 100.0, 400.0, 1000.0, None),
        "MiB per bucket; none for unbounded",
        above=0,
        words={"none": None},
        flag="--bucket-size-mb",
    )
    peer: bool = option(True, "sweep torch DDP too")
    fit: tuple[str, ...] = option((), "records of allreduce_sweep on this kind of machine [timed here]", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.bucket_sizes_mb) < 2:
            raise ValueError(f"bucket sizes {self.bucket_sizes_mb}: give two or more to compare")
        if self.steps * self.rounds < MIN_SAMPLES:
            raise ValueError(f"steps={self.steps}, rounds={self.rounds}: time at least {MIN_SAMPLES} steps")

    def rows(self) -> list[Variant]:
        """local, ours and torch's with every bucket size."""
        return variants(["local", OURS, *([PEER] if self.peer else [])], self.bucket_sizes_mb)


def measure_parts(
    config: BucketSweepConfig, context: RankContext, local: Timing, links: MeasuredLinks | None
) -> dict[str, Any]:
    """What predictions need, measured without any bucket, as metrics of a record. Every rank calls it.

    Returns:
        Per trainable parameter `ready_ms`, from the start of an undisturbed backward until its gradient is there, and
        `packed`, whether it is copied into the bucket (some layers write it there themselves); `backward_ms` of that
        backward; `forward_backward_ms` and `optimizer_ms` of the local step; how fast packing is; at which rates
        backward and an all-reduce run beside each other; and `pieces`, the fit of all-reduces.
    """
    ready_ms, packed, backward_ms, disturbance = _backward_alone_and_disturbed(config, context)
    gc.collect()  # hooks and graph form cycles; the next tensors need their memory
    return {
        **{f"{phase}_ms": percentiles(local.phases[phase])["p50"] for phase in ("forward_backward", "optimizer")},
        "backward_ms": backward_ms,
        "first_gradient_ms": min(ready_ms),
        "pack_gb_per_s": 1e-6 * _message(config) / _pack_ms(context, _message(config)),
        "packed_parameters": sum(packed),
        "compute_rate": disturbance["compute_rate"],
        "communication_rate": disturbance["communication_rate"],
        "pieces": _all_reduce_fit(context, 4 * config.model().num_parameters, links).to_list(),
        "ready_ms": ready_ms,
        "packed": packed,
    }


def _message(config: BucketSweepConfig) -> int:
    """Bytes of the all-reduces that run beside backward, and of the tensor whose packing is timed."""
    return min(4 * config.model().num_parameters, 100 * MIB)


def _backward_alone_and_disturbed(
    config: BucketSweepConfig, context: RankContext
) -> tuple[list[float], list[bool], float, dict[str, float]]:
    """Ready times of the gradients in ms, whose gradients must be packed, the length of backward in ms, and what a
    running all-reduce does to it.
    """
    shape, dtype = config.model(), DTYPES[config.dtype]
    model = TransformerLM(shape, device=context.device, seed=config.seed)
    tokens = synthetic_batches(context, shape, config.batch, config.seed)[0]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(context.device.type, dtype=dtype, enabled=dtype is not None):
            return next_token_loss(model, tokens)

    forward().backward()
    packed = [True] * len(parameters)
    if context.device.type == "cuda":  # elsewhere buckets offer no memory
        packed = _declined(parameters, lambda: forward().backward())
    ready_ms, end_ms = gradient_ready_ms(forward, parameters, context.device)
    kept = forward()

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        kept.backward(retain_graph=True)  # again and again, so that only backward runs beside the messages

    disturbance = disturb(context, backward, _message(config))
    times = slowest_rank([*ready_ms, end_ms], context.group, context.device)
    return times[:-1], packed, times[-1], disturbance


def _declined(parameters: Sequence[torch.nn.Parameter], backward: Callable[[], None]) -> list[bool]:
    """For each parameter, whether its gradient is not written into the bucket's buffer, so that it must be copied.

    All are offered the same memory: the gradients of this pass are not used.
    """
    scratch = torch.empty(max(p.numel() for p in parameters), device=parameters[0].device)
    for parameter in parameters:
        parameter.gradient_target = scratch[: parameter.numel()].view(parameter.shape)
    backward()
    return [parameter.__dict__.pop("gradient_target", None) is not None for parameter in parameters]


def _all_reduce_fit(context: RankContext, num_bytes: int, links: MeasuredLinks | None) -> CollectiveFit:
    largest = min(num_bytes, LARGEST_MESSAGE)
    sizes = sorted({max(4096, largest // 2**k) for k in range(13)})
    if links is not None:
        times = [links.seconds(size, context.world_size) for size in sizes]
    else:
        timed = [time_collective(context, "all_reduce", size, repeats=8, budget_s=0.3) for size in sizes]
        sizes, times = [timing.num_bytes for timing in timed], [timing.p50_s for timing in timed]
    return fit_collective(sizes, times)


def _pack_ms(context: RankContext, num_bytes: int) -> float:
    """To copy a gradient of so many bytes, as packing does."""
    source = torch.ones(num_bytes // 4, device=context.device)
    target = torch.empty_like(source)
    samples = measure(lambda: target.copy_(source), warmup=1, repeats=5, device=context.device)
    return percentiles(slowest_rank(samples, context.group, context.device))["p50"]


def predict(config: BucketSweepConfig, parts: Mapping[str, Any], bucket_size_mb: float | None) -> dict[str, float]:
    """The step with buckets of one size: when each is complete, what it costs, and how it disturbs backward."""
    model = TransformerLM(config.model(), device="meta")
    numels = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    # Packing is work of the computing stream: what is there was also copied, if it was not written in place.
    ready_ms, packed, copied = parts["ready_ms"], {}, 0.0
    for index in sorted(range(len(numels)), key=ready_ms.__getitem__):
        copied += 4e-6 * numels[index] / parts["pack_gb_per_s"] * parts["packed"][index]
        packed[index] = ready_ms[index] + copied
    ready = [max(packed[index] for index in bucket.indices) / 1e3 for bucket in buckets]
    messages = [CollectiveFit.from_list(parts["pieces"]).seconds(bucket.num_bytes) for bucket in buckets]
    rates = {name: parts[name] for name in ("compute_rate", "communication_rate")}
    together_s = pipeline(ready, messages, (parts["backward_ms"] + copied) / 1e3, **rates)
    exposed_ms = 1e3 * together_s - parts["backward_ms"]
    return {
        "predicted_step_ms": parts["forward_backward_ms"] + parts["optimizer_ms"] + exposed_ms,
        "predicted_exposed_comm_ms": exposed_ms,
        "predicted_comm_ms": 1e3 * sum(messages),
        "buckets": len(buckets),
    }
