"""Parameters whose new values have not arrived yet: reading one in Python waits for it first.

While the values of a parameter are being gathered, its class is a special subclass that overrides
`__torch_function__`. So every operator that gets the parameter, and every method and property of
it, passes through here, wherever it is called from: `F.linear(x, other.weight)`, `parameter.data`,
`detach()`, `copy_()`, `item()`, `deepcopy`, pickle. It waits, restores the parameter's class, and
goes on. What reads no values (`grad`, `shape`, `requires_grad`, …) does not wait, so that
`zero_grad()` between a step and the next forward costs no overlap.

Compiled code is safe too: Dynamo's graphs are guarded by the classes of the parameters they read,
and do not run while these are others. What reads a parameter's memory below Python is not seen: an
alias (`parameter.data`, a view) taken before the step, functorch's transforms over parameters,
TorchScript, replayed CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

_no_torch_function = torch._C._disabled_torch_function_impl

# Of a tensor: what reads none of its values.
_PROPERTIES = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_sparse",
    "layout",
    "ndim",
    "requires_grad",
    "retains_grad",
    "shape",
)
_METHODS = (
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)
_READ_NO_VALUES = {getattr(Tensor, name) for name in _METHODS} | {
    function
    for name in _PROPERTIES
    for accessor in ("__get__", "__set__", "__delete__")
    if (function := getattr(getattr(Tensor, name), accessor, None)) is not None
}


class InFlight:
    """What a parameter is while its values are on their way; see `in_flight_class`."""

    # waits for the values, and gives every parameter that came with them its class back
    arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        if function in _READ_NO_VALUES:
            return _no_torch_function(function, types, args, kwargs or {})
        return _read(function, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self).arrive()
        return self.__deepcopy__(memo)  # that of its class

    def __reduce_ex__(self, protocol: int) -> Any:
        type(self).arrive()
        return self.__reduce_ex__(protocol)


@torch._disable_dynamo  # which ends a graph here
def _read(
    function: Callable[..., Any], types: tuple[type, ...], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call a function that reads values, when they have arrived."""
    if TracingContext.try_get() is not None:
        # Dynamo looks at a parameter while it makes a graph, whose guards must know it as it is: in
        # flight.
        return _no_torch_function(function, types, args, kwargs)
    for kind in types:
        if issubclass(kind, InFlight):
            kind.arrive()
    return function(*args, **kwargs)


def in_flight_class(parameter: Tensor, arrive: Callable[[], None]) -> type | None:
    """Return the class that `parameter` takes on while its values are on their way.

    Args:
        arrive: see `InFlight`.

    Returns:
        None for a parameter whose class does something with operators itself: wait for such a one
            at once.
    """
    original = type(parameter)
    if original.__torch_function__ is not _no_torch_function:
        return None
    members = {"arrive": staticmethod(arrive)}
    subclass = type(original)(f"InFlight{original.__name__}", (InFlight, original), members)
    try:
        parameter.__class__ = subclass
        parameter.__class__ = original
    except TypeError:  # its objects are laid out in another way
        return None
    return subclass
