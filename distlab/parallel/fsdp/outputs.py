"""What a unit's forward returns: the tensors in it, and the operations of autograd that made them.

Backward is announced by these operations: they are found in dicts and dataclasses, too, and without grad-requiring
inputs, where `full_backward_pre_hook` does not fire.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: Any, unit: str) -> Iterator[Tensor]:
    """The tensors in nested containers, dataclasses and other objects.

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


def made_by(tensor: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The operations of autograd through which alone a gradient of `tensor` reaches what it was computed from.

    That of a view and that of its base: writing to the view in place later (`relu_`) leaves the view's out.
    """
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    if tensor._is_view() and tensor._base.grad_fn is not None:
        yield tensor._base.grad_fn


def lead_to(operations: Iterable[torch.autograd.graph.Node], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a gradient of what these operations made reaches one of the parameters."""
    ends = {torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters}
    found, following = set(), list(operations)
    while following:
        node = following.pop()
        if node in ends:
            return True
        if node not in found:
            found.add(node)
            following += [before for before, _ in node.next_functions if before is not None]
    return False


def copied(unit: str, output: Any) -> Tensor:
    """Copy what a unit returns of its own memory; raises RuntimeError where it lies among other things."""
    if isinstance(output, Tensor):
        return output.clone()
    raise RuntimeError(
        f"FSDP: unit '{unit}' returns one of its parameters, or a view of one, among its outputs, and its memory "
        "is freed when its forward ends: return parameter.clone()"
    )
