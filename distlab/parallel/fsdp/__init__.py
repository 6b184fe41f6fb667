"""Fully sharded data parallelism. Read fsdp.py first, then runtime.py."""

from distlab.parallel.fsdp.fsdp import FSDP

__all__ = ["FSDP"]
