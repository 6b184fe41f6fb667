"""A model of your own in the bench: what it is, where its data comes from, and what its loss is.

    distlab run ddp_bench --model examples.own_model:build --batch 32

trains it under every strategy of this lab and of torch. The three objects are described in
docs/learn/own_model.md.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, PIXELS = 10, 28 * 28
Batch = tuple[Tensor, Tensor]


def build() -> tuple[nn.Module, Callable[..., Batch], Callable[..., Tensor]]:
    """Return (module, batch, loss): what the bench asks of a model."""
    # On the CPU: the bench moves it to each rank's device, and seeds torch before, so that all
    # ranks build the same.
    module = nn.Sequential(nn.Linear(PIXELS, 512), nn.ReLU(), nn.Linear(512, CLASSES))

    def batch(size: int, generator: torch.Generator) -> Batch:
        # The generator is seeded by rank and step: each rank has its own data, and a run can be
        # repeated.
        images = torch.randn(size, PIXELS, generator=generator)
        return images, torch.randint(CLASSES, (size,), generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        # `model` is the module under a strategy. Called directly, the module would not synchronize
        # its gradients.
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    return module, batch, loss
