"""Fully sharded data parallelism: parameters, gradients and optimizer state cut by rows, a shard for each rank.

`flat_param.py` says what lies where and holds the memory, `runtime.py` decides when it is gathered, freed and sent and
keeps the ranks in step, `fsdp.py` is the class, `checks.py` what it refuses.
"""

from distlab.parallel.fsdp.fsdp import FSDP

__all__ = ["FSDP"]
