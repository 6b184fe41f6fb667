"""Mixed precision: the dtype of the computation, with parameters and optimizer state in fp32.

Matmuls run in that dtype and norms, softmax and losses in fp32, as `torch.autocast` decides
operation by operation. A strategy that casts the parameters itself (FSDP, under `compute_dtype`)
needs no autocast.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Name on the command line and in records → dtype of the computation. None: the parameters' dtype.
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context in which forward and loss compute in `dtype`. None changes nothing."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
