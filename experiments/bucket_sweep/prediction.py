"""The step that measured parts predict for a bucket size; the parts are measured without any bucket."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distlab.bench.subject import Timing
from distlab.comm import RankContext
from distlab.measure.bandwidth import Disturbance, disturb, time_collective
from distlab.measure.clock import measure, slowest_rank
from distlab.measure.gradient_times import GradientReadyTimes
from distlab.measure.statistics import percentiles
from distlab.model.transformer import TransformerLM
from distlab.parallel.buckets import MIB, plan_buckets
from distlab.simulate.calibrate import MeasuredLinks
from distlab.theory.collective_time import CollectiveFit, fit_collective
from distlab.theory.step_time import pipeline
from distlab.train.data import SyntheticTokens
from distlab.train.step import next_token_loss

from .config import DTYPES, BucketSweepConfig

LARGEST_MESSAGE = 2**30  # fits are extrapolated beyond


@dataclass(frozen=True)
class Parts:
    """What a prediction is made of; times in ms.

    Args:
        ready_ms: per trainable parameter, from the start of an undisturbed backward until its gradient is there.
        packed: per parameter, whether its gradient is copied into the bucket: some layers write it there themselves.
        backward_ms: of that backward.
        compute_ms: forward and backward of the local step; optimizer_ms: its optimizer.
        pack_ms_per_byte: to copy a gradient into its bucket.
        disturbance: of backward and all-reduces.
        fit: of all-reduces.
    """

    ready_ms: list[float]
    packed: list[bool]
    backward_ms: float
    compute_ms: float
    optimizer_ms: float
    pack_ms_per_byte: float
    disturbance: Disturbance
    fit: CollectiveFit

    def describe(self) -> dict[str, Any]:
        """The metrics of a record of them."""
        return {
            "forward_backward_ms": self.compute_ms,
            "backward_ms": self.backward_ms,
            "optimizer_ms": self.optimizer_ms,
            "first_gradient_ms": min(self.ready_ms),
            "pack_gb_per_s": 1e-6 / self.pack_ms_per_byte,
            "packed_parameters": sum(self.packed),
            "compute_rate": self.disturbance.compute_rate,
            "communication_rate": self.disturbance.communication_rate,
            "pieces": self.fit.to_list(),
            "ready_ms": self.ready_ms,
        }


def measure_parts(
    config: BucketSweepConfig, context: RankContext, local: Timing, links: MeasuredLinks | None
) -> Parts:
    """What predictions need, measured without any bucket. Every rank calls it."""
    ready_ms, packed, backward_ms, disturbance = _backward_alone_and_disturbed(config, context)
    gc.collect()  # hooks and graph form cycles; the next tensors need their memory
    num_bytes = 4 * config.model().num_parameters
    p50 = {phase: percentiles(samples)["p50"] for phase, samples in local.phases.items()}
    return Parts(
        ready_ms=ready_ms,
        packed=packed,
        backward_ms=backward_ms,
        compute_ms=p50["forward_backward"],
        optimizer_ms=p50["optimizer"],
        pack_ms_per_byte=_pack_ms(context, _message(config)) / _message(config),
        disturbance=disturbance,
        fit=_all_reduce_fit(context, num_bytes, links),
    )


def _message(config: BucketSweepConfig) -> int:
    """Bytes of the all-reduces that run beside backward, and of the tensor whose packing is timed."""
    return min(4 * config.model().num_parameters, 100 * MIB)


def _backward_alone_and_disturbed(
    config: BucketSweepConfig, context: RankContext
) -> tuple[list[float], list[bool], float, Disturbance]:
    """Ready times of the gradients in ms, whose gradients must be packed, the length of backward in ms, and what a
    running all-reduce does to it.
    """
    shape, dtype = config.model(), DTYPES[config.dtype]
    model = TransformerLM(shape, device=context.device, seed=config.seed)
    tokens = SyntheticTokens(
        shape.vocab_size,
        config.batch,
        shape.context_length,
        seed=config.seed,
        rank=context.rank,
        device=context.device,
    ).batch(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ready = GradientReadyTimes(parameters, context.device)

    def forward() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(context.device.type, dtype=dtype, enabled=dtype is not None):
            return next_token_loss(model, tokens)

    forward().backward()
    packed = [True] * len(parameters)
    if context.device.type == "cuda":  # elsewhere buckets offer no memory
        packed = _declined(parameters, lambda: forward().backward())
    with ready.recording():
        for _ in range(5):
            loss = forward()
            ready.start()
            loss.backward()
            ready.stop()
    kept = forward()

    def backward() -> None:
        model.zero_grad(set_to_none=True)
        kept.backward(retain_graph=True)  # again and again, so that nothing but backward meets the messages

    disturbance = disturb(context, backward, _message(config))
    times = slowest_rank([*ready.times_ms(), ready.backward_ms()], context.group, context.device)
    return times[:-1], packed, times[-1], disturbance


def _declined(parameters: Sequence[torch.nn.Parameter], backward: Callable[[], None]) -> list[bool]:
    """Of which parameters the gradient is not written where a bucket offers its memory, so that it must be copied.

    All are offered one and the same memory: the gradients of this pass are good for nothing.
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
        times = [links.time("all_reduce", size, context.world_size) for size in sizes]
    else:
        timed = [time_collective(context, "all_reduce", size, repeats=8, budget_s=0.3) for size in sizes]
        sizes = [timing.num_bytes for timing in timed]
        times = [percentiles(timing.samples_ms)["p50"] / 1e3 for timing in timed]
    return fit_collective(sizes, times)


def _pack_ms(context: RankContext, num_bytes: int) -> float:
    """To copy a gradient of so many bytes, as packing does."""
    source = torch.ones(num_bytes // 4, device=context.device)
    target = torch.empty_like(source)
    samples = measure(lambda: target.copy_(source), warmup=1, repeats=5, device=context.device)
    return percentiles(slowest_rank(samples, context.group, context.device))["p50"]


def predict(config: BucketSweepConfig, parts: Parts, bucket_size_mb: float | None) -> dict[str, float]:
    """The step with buckets of one size: when each is complete, what it costs, and how it disturbs backward."""
    model = TransformerLM(config.model(), device="meta")
    numels = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    buckets = plan_buckets(numels, [torch.float32] * len(numels), bucket_size_mb)
    rates = parts.disturbance
    # Packing is work of the computing stream: what is there was also copied, if it was not written in place.
    order = sorted(range(len(numels)), key=lambda index: parts.ready_ms[index])
    packed, copied = {}, 0.0
    for index in order:
        copied += 4 * numels[index] * parts.pack_ms_per_byte * parts.packed[index]
        packed[index] = parts.ready_ms[index] + copied
    ready = [max(packed[index] for index in bucket.indices) / 1e3 for bucket in buckets]
    messages = [parts.fit.seconds(bucket.num_bytes) for bucket in buckets]
    alone_s = (parts.backward_ms + copied) / 1e3
    together_s = pipeline(
        ready,
        messages,
        alone_s,
        compute_rate=rates.compute_rate,
        communication_rate=rates.communication_rate,
    )
    exposed_ms = 1e3 * together_s - parts.backward_ms
    return {
        "predicted_step_ms": parts.compute_ms + parts.optimizer_ms + exposed_ms,
        "predicted_exposed_comm_ms": exposed_ms,
        "predicted_comm_ms": 1e3 * sum(messages),
        "buckets": len(buckets),
    }
