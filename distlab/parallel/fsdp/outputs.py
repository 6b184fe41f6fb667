"""What a unit's forward returns: the tensors in it, also in dicts, dataclasses and other objects."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import isroutine
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any, unit: str) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, dataclasses and other objects.

    Raises TypeError for a function or an iterator, which may compute with the parameters later.
    """
    seen: dict[int, Any] = {}  # objects may refer to each other

    def walk(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        if isinstance(value, Tensor | nn.Module | type) or id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, Iterator | partial) or isroutine(value):
            raise TypeError(
                f"FSDP: unit '{unit}' returns a {type(value).__name__}, which may use its parameters when they are "
                "freed: return tensors, alone or in lists, tuples, dicts or objects"
            )
        if isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            inside = value
        elif is_dataclass(value):
            inside = [getattr(value, each.name, None) for each in fields(value)]
        else:
            inside = getattr(value, "__dict__", {}).values()
        for item in inside:
            yield from walk(item)

    return walk(value)


def copied(unit: str, output: Any) -> Tensor:
    """Copy what a unit returns of its own memory; raises RuntimeError where it lies among other things."""
    if isinstance(output, Tensor):
        return output.clone()
    raise RuntimeError(
        f"FSDP: unit '{unit}' returns one of its parameters, or a view of one, among its outputs, and its memory "
        "is freed when its forward ends: return parameter.clone()"
    )
