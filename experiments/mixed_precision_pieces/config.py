"""What to run."""

from dataclasses import dataclass, replace

import torch

from distlab.model import ModelConfig, preset
from distlab.model.config import DTYPES

NAME = "mixed_precision"
PARTS = ("accumulation", "types", "norm", "scaling")
TYPES = {name: DTYPES[name] or torch.float32 for name in ("fp32", "fp16", "bf16")}
# Of a layer normalisation's input: (deviation, mean).
INPUTS = {"deviation 1": (1.0, 0.0), "deviation 64": (64.0, 0.0), "mean 100": (1.0, 100.0)}


@dataclass(frozen=True)
class PrecisionConfig:
    """What to run.

    Args:
        size, layers, context: of the model whose gradients are looked at; None leaves the preset's.
        batch: sequences of one micro-batch.
        micro_batches: how many make a step; the loss is divided by it, as gradient accumulation does.
        log2_scales: loss scales, as powers of two.
        rows, width: of layer normalisation's input.
        device: where to compute.
        seed: of parameters and data.

    Raises:
        ValueError: a size below one, or no scale.
    """

    size: str = "small"
    layers: int | None = 4
    context: int | None = 512
    batch: int = 8
    micro_batches: int = 8
    log2_scales: tuple[int, ...] = (0, 4, 8, 12, 16, 20, 24, 28, 32, 36)
    rows: int = 8192
    width: int = 768
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batches", "rows", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.log2_scales:
            raise ValueError("log2_scales is empty: give at least one loss scale")
        self.model()

    def model(self) -> ModelConfig:
        return preset(self.size, num_layers=self.layers, context_length=self.context)


CPU = PrecisionConfig(
    size="tiny", layers=None, context=64, batch=2, micro_batches=32, rows=2048, device="cpu"
)
QUICK = replace(CPU, layers=2, log2_scales=(0, 8, 16, 24, 32), rows=1024)
