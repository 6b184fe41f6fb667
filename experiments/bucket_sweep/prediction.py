"""The step that measured parts predict for a bucket size."""

import torch

from distlab.model.transformer import TransformerLM
from distlab.parallel.buckets import plan_buckets
from distlab.theory.step_time import pipeline

from .config import BucketSweepConfig
from .parts import Parts


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
