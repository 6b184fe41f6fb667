"""Strategies of data parallelism, and tensor, context and pipeline parallelism under them.

    naive.py flat.py overlap.py bucketed.py    one strategy each, from the simplest to the fastest
    zero.py sharded_optimizer.py fsdp/         sharded optimizer state, gradients and parameters
    tensor_parallel.py context_parallel.py     ranks that share a model, see layout.py
    pipeline.py
    build.py                                   a model, its layout, strategy and optimizer, in order
    registry.py                                the table of strategies

Read naive.py and ddp.py first, then bucketed.py. docs/learn/ddp.md follows one gradient.

A name below is imported when it is first used: `import distlab.parallel.naive` loads that strategy
and what it runs on, and no other strategy.
"""

import importlib
from typing import Any

# Public name → module that defines it. Editors read the same table from `__init__.pyi`.
_DEFINED_IN = {
    "FSDP": "distlab.parallel.fsdp.fsdp",
    "STRATEGIES": "distlab.parallel.registry",
    "BucketedDDP": "distlab.parallel.bucketed",
    "CopyEngineDDP": "distlab.parallel.copy_engine",
    "DataParallel": "distlab.parallel.ddp",
    "FlatDDP": "distlab.parallel.flat",
    "Layout": "distlab.parallel.layout",
    "Local": "distlab.parallel.local",
    "LocalOptimizer": "distlab.parallel.local_optimizer",
    "NaiveDDP": "distlab.parallel.naive",
    "OverlapDDP": "distlab.parallel.overlap",
    "ParallelModel": "distlab.parallel.model",
    "ShardedOptimizer": "distlab.parallel.sharded_optimizer",
    "Strategy": "distlab.parallel.build",
    "TorchDDP": "distlab.parallel.torch_peers",
    "TorchFSDP2": "distlab.parallel.torch_peers",
    "Wrapping": "distlab.parallel.build",
    "ZeroOptimizer": "distlab.parallel.zero",
    "check_buckets": "distlab.parallel.registry",
    "check_reshard": "distlab.parallel.registry",
    "check_shard_size": "distlab.parallel.registry",
    "get_strategy": "distlab.parallel.registry",
    "stepped": "distlab.parallel.local_optimizer",
    "strategies_on": "distlab.parallel.registry",
}

__all__ = list(_DEFINED_IN)


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562). Python asks here once per name.

    Raises:
        AttributeError: the package has no such name. An import of a submodule also asks here, and
            goes on to look for its file.
    """
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    globals()[name] = value  # the next use finds it here, without this function
    return value


def __dir__() -> list[str]:
    """List the public names also before they are imported."""
    return sorted({*globals(), *_DEFINED_IN})
