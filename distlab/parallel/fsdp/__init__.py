"""Fully sharded data parallelism.

Parameters, gradients and optimizer state are cut by rows. Each rank holds one shard of each.

    entry.py       the parameters before they are wrapped
    casts.py       which dtypes a module computes in
    units.py       which parameters are gathered together
    layout.py      what lies where in a flat buffer
    unit.py        the memory: gathering, accumulating, reducing; what a module's attributes find meanwhile
    replicated.py  the vectors, whole on every rank
    order.py       the order of units, which ranks must share
    outputs.py     what a unit returns, and what announces its backward
    runtime.py     when all of this happens
    fsdp.py        the class

Read fsdp.py first.
"""

from distlab.parallel.fsdp.fsdp import FSDP

__all__ = ["FSDP"]
