"""Names of communication in traces: which kernels and ranges communicate, and by what operation.

To teach the reader another library, pass further regular expressions (`distlab trace
--communication PATTERN`).
"""

import re
from collections.abc import Sequence

# Library → regular expression of the names of its kernels and copies on a GPU.
GPU_LIBRARIES = {
    "NCCL, RCCL": r"nccl|rccl",
    "MSCCL": r"msccl",
    "copies between GPUs": r"PtoP|Memcpy P2P",
    "symmetric memory": r"barrier_kernel|multimem_|(one|two)_shot_all|symm_?mem",
    "NVSHMEM": r"nvshmem",
    "DeepEP": r"deep_ep|(intra|inter)node(_ll)?::",
    "Transformer Engine": r"userbuffers",
    "vLLM, TensorRT-LLM": r"cross_device_reduce|lamport",
}
# Prefixes of the ranges that c10d's backends without a GPU write.
CPU_BACKENDS = ("gloo:", "mpi:", "ucc:")
POINT_TO_POINT = "send_recv"  # operation of a send, a receive and of both

# Operation → regular expression of its spellings, of which `_` and `-` are removed. The first that
# is found decides: `allreduce` contains `reduce`.
_OPERATIONS = {
    "all_reduce": r"allreduce|reduceall|crossdevicereduce|oneshotall|twoshotall",
    "reduce_scatter": r"reducescatter",
    "all_gather": r"allgather",
    "all_to_all": r"alltoall|dispatch|combine",
    "broadcast": r"broadcast",
    "barrier": r"barrier",
    POINT_TO_POINT: r"send|recv",
    "scatter": r"scatter",
    "gather": r"gather",
    "reduce": r"reduce",
    "copy": r"memcpy",
}


def gpu_pattern(more: Sequence[str] = ()) -> re.Pattern[str]:
    """Return the expression for communication on a GPU.

    Args:
        more: further regular expressions.

    Raises:
        ValueError: an expression that is not a regular expression.
    """
    for pattern in more:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return re.compile("|".join([*GPU_LIBRARIES.values(), *more]), re.IGNORECASE)


def operation_of(name: str) -> str:
    """Return the operation that a name of a kernel, range or collective means, else `other`."""
    plain = name.lower().replace("_", "").replace("-", "")
    for operation, pattern in _OPERATIONS.items():
        if re.search(pattern, plain):
            return operation
    return "other"


# Bytes of one element of c10d's types, as Kineto writes them.
ITEM_BYTES = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
}
