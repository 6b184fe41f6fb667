"""Which part of each parameter a rank steps: what a checkpoint must know to store state without gathering it."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Owned:
    """A contiguous run of elements of one parameter, flattened, that this rank's optimizer steps.

    Attributes:
        name: of the parameter in the wrapped model.
        shape: of the whole parameter.
        parameter: what the optimizer holds: the whole parameter or a part of it, perhaps empty, of any number of
            dimensions; its own elements, flattened, are the run.
        start: first element of `parameter` within the flattened whole.
        replicated: every rank holds and steps the very same elements.
    """

    name: str
    shape: torch.Size
    parameter: nn.Parameter
    start: int = 0
    replicated: bool = False
