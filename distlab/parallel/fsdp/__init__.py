"""Fully sharded data parallelism: parameters, gradients and optimizer state cut by rows, a slice for each rank.

`units.py` plans (what is gathered together, what lies where), `shards.py` holds the memory and talks to the
collectives, `not_gathered.py` is what is found where nothing is gathered, `order.py` keeps the ranks in step,
`wrapper.py` decides when.
"""

from distlab.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
