"""What FSDP refuses before it touches the module."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distlab.parallel.fsdp.units import Entry


def find_device(
    entries: list[Entry], init_fn: Callable[[nn.Module], Any] | None, device: torch.device | str | None
) -> torch.device:
    """The one device of all parameters, or `device` for a module on meta.

    Raises:
        ValueError: several devices, a module on meta without `init_fn` and `device`, or these for another.
    """
    devices = {entry.parameter.device for entry in entries}
    if len(devices) > 1:
        raise ValueError(
            f"FSDP: parameters lie on {sorted(map(str, devices))}; move the module to one device first"
        )
    found = devices.pop()
    if found.type == "meta":
        if init_fn is None or device is None:
            raise ValueError(
                "FSDP: the module lies on meta and has no values: give init_fn=… to make them, and device=…"
            )
        return torch.device(device)
    if init_fn is not None or device is not None:
        raise ValueError("FSDP: init_fn and device are for a module built on meta; this one has its values")
    return found


def refuse_older_optimizer(entries: list[Entry]) -> None:
    """An optimizer made before wrapping would step full parameters that are in use no more, without an error.

    It is found among the objects that Python's garbage collector tracks; one that is garbage does not count.

    Raises:
        ValueError: there is one.
    """
    mine = {id(entry.parameter) for entry in entries}
    for attempt in range(2):
        older = any(
            id(parameter) in mine
            for thing in gc.get_objects()
            if issubclass(type(thing), torch.optim.Optimizer)
            for group in getattr(thing, "param_groups", ())
            for parameter in group["params"]
        )
        if not older:
            return
        if attempt == 0:
            gc.collect()
    raise ValueError(
        "FSDP: an optimizer already holds this module's parameters, which wrapping replaces by pieces: "
        "wrap first, then build the optimizer over fsdp.parameters()"
    )
