"""Sentences for arguments of torch's wrappers that the strategies here do not take.

`docs/learn/from_torch.md` has the whole table, with what to write instead.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch.distributed import ProcessGroup

MOVE_FIRST = "move the module to this rank's device before you wrap it"
LEAVE_OUT = "leave it out"
INSTEAD = {
    # DistributedDataParallel
    "bucket_cap_mb": "give bucket_size_mb, in MiB, to BucketedDDP or CopyEngineDDP",
    "device_ids": MOVE_FIRST,
    "output_device": MOVE_FIRST,
    "broadcast_buffers": "buffers are broadcast when you wrap; sync_buffers() does it again",
    "init_sync": f"{LEAVE_OUT}; parameters and buffers are always broadcast from rank 0",
    "find_unused_parameters": f"{LEAVE_OUT}; parameters that a rank did not use are always found",
    "gradient_as_bucket_view": f"{LEAVE_OUT}; where there are buckets, gradients are views of them",
    "static_graph": f"{LEAVE_OUT}; the graph may change from step to step",
    "mixed_precision": "give compute_dtype to FSDP, or use torch.autocast with the other strategies",
    # FullyShardedDataParallel and fully_shard
    "device_mesh": "give mesh",
    "mp_policy": "give compute_dtype; gradients are reduced in the dtype of the fp32 masters",
    "reshard_after_forward": "keep_gathered=True is reshard_after_forward=False",
    "sharding_strategy": "give a two-dimensional mesh for hybrid sharding; otherwise all is sharded",
    "auto_wrap_policy": f"{LEAVE_OUT}; units are the children of ModuleLists, and other layers",
    "cpu_offload": "there is no offloading; use more ranks",
    "offload_policy": "there is no offloading; use more ranks",
    "device_id": MOVE_FIRST,
    "param_init_fn": "give init_fn and device, for a module built on meta",
    "sync_module_states": f"{LEAVE_OUT}; construction always takes rank 0's parameters",
    "use_orig_params": f"{LEAVE_OUT}; parameters always have the module's own names",
    "ignored_states": "there is no such argument; wrap a module that does not hold them",
    "ignored_params": "there is no such argument; wrap a module that does not hold them",
    # ZeroRedundancyOptimizer
    "optimizer_class": "give optimizer_cls",
    "parameters_as_bucket_view": LEAVE_OUT,
    "overlap_with_ddp": f"{LEAVE_OUT}; ZeroOptimizer(ddp, optimizer_cls) overlaps",
}


class AnswersTorchNames:
    """A base class that answers arguments of torch's classes by those of the class that is constructed.

    Python itself would only say that a keyword is unexpected, or count positional arguments.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # help() and editors show the arguments of __init__, not those of __new__ below.
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Raise TypeError for an argument of torch's that this class does not take."""
        check_arguments(cls, given, named)
        return super().__new__(cls)


def check_arguments(cls: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse arguments that torch's classes take and `cls` does not, with what to give instead.

    Args:
        cls: the class that is being constructed.
        given: its positional arguments.
        named: its keyword arguments.

    Raises:
        TypeError: a keyword of torch's, a process group or a list of devices by position.
    """
    accepted = inspect.signature(cls).parameters
    for name in named:
        if name in INSTEAD and name not in accepted:
            raise TypeError(f"{cls.__name__} does not take torch's {name}: {INSTEAD[name]}")
    # The first argument is the module, the parameters or the wrapper.
    names = [name for name in accepted if accepted[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    for value, name in itertools.zip_longest(given[1:], names[1 : len(given)]):
        if isinstance(value, ProcessGroup) and name != "process_group":
            raise TypeError(
                f"{cls.__name__} got a process group by position: give it by name, process_group=..."
            )
        if isinstance(value, list):
            raise TypeError(
                f"{cls.__name__} got a list by position, as torch's device_ids: {MOVE_FIRST}"
            )
