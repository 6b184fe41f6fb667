"""Initialization of models that were built on the meta device, where tensors have no memory.

`materialize` gives a whole model memory on a device. `initialize_in_turn` gives memory to one
sharded parameter at a time, for models larger than a device. It runs the module's own
initialization on stand-ins. A stand-in is a parameter of the full shape. Its memory is allocated
when an operator first touches it. When an operator touches the next parameter, the stand-in is cut
into shards and freed. The same code initializes small and large models and draws the same numbers.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The parameter's name, the full-size parameter that the module has during the initialization, and
# the function that keeps its values.
StandIn = tuple[str, nn.Parameter, Callable[[Tensor], None]]


def materialize(module: nn.Module, device: torch.device, init: Callable[[nn.Module], Any]) -> None:
    """Give all meta tensors of a module memory on `device`, and call `init(module)` to fill it.

    Tied parameters stay tied.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                full = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(full, parameter.requires_grad)
            owner._parameters[name] = made[parameter]
    materialize_buffers(module, device)
    init(module)


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Give meta buffers memory on `device`. The initialization must write their values."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)


def reset_parameters(module: nn.Module) -> None:
    """Call `reset_parameters()` of the outermost modules that have this method.

    Raises:
        ValueError: a module that owns parameters or buffers does not have it, and neither does a
            module around it.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    own_tensors = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None for tensor in own_tensors):
        raise ValueError(
            f"{type(module).__name__} owns parameters or buffers and has no reset_parameters(): "
            "give init=… to write their values"
        )
    for child in module.children():
        reset_parameters(child)


def initialize_in_turn(
    module: nn.Module,
    stand_ins: Iterable[StandIn],
    init_fn: Callable[[nn.Module], Any],
) -> None:
    """Call `init_fn(module)` while only one stand-in at a time has memory.

    Every rank draws all values and keeps its shards. So all ranks must draw the same numbers (equal
    seeds). Buffers and replicated parameters have ordinary memory all the time. It is uninitialized
    when `init_fn` begins.

    Args:
        stand_ins: one (name, full-size parameter, function that keeps its values) per sharded
            parameter. Each is freed before the iterable makes the next one.

    Raises:
        RuntimeError: `init_fn` returns to a parameter after it has touched another one, uses two
            parameters in one operator, or leaves one untouched.
    """
    mode = _InTurn(stand_ins)
    with compiled_code_runs_eager(), mode:
        init_fn(module)
    mode.finish()


def compiled_code_runs_eager() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly inside a `with` block.

    A dispatch mode must see every operator. Under a dispatch mode, Dynamo would also run compiled
    code eagerly, but it would keep doing so for the rest of the process. On fake tensors, compiled
    code would read memory that they do not have.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class _InTurn(TorchDispatchMode):
    """Dispatch mode that gives a stand-in memory at its first operator.

    It keeps the values and frees the memory when an operator touches another stand-in.
    """

    def __init__(self, stand_ins: Iterable[StandIn]) -> None:
        super().__init__()
        # By the address of the storage object: views of a parameter share it, and it stays the same
        # when the storage is resized.
        self._waiting: dict[int, StandIn] = {}
        for stand_in in stand_ins:
            _, parameter, _ = stand_in
            storage = parameter.untyped_storage()
            self._waiting[storage._cdata] = stand_in
            storage.resize_(0)
        self._current: int | None = None
        self._done: set[int] = set()

    def finish(self) -> None:
        """Keep the values of the last stand-in, and check that none was left out."""
        self._keep_current()
        missing = []
        for storage, (name, _, _) in self._waiting.items():
            if storage not in self._done:
                missing.append(name)
        if missing:
            raise RuntimeError(
                f"init_fn left {missing} uninitialised: it must write every parameter"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched: set[int] = set()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()._cdata
                if storage in self._waiting:
                    touched.add(storage)
        if len(touched) > 1:
            names = sorted(self._waiting[storage][0] for storage in touched)
            raise RuntimeError(
                f"init_fn uses {names} in one operator ({func}); only one exists at a time"
            )
        for storage in touched:
            if storage != self._current:
                self._turn_to(storage)
        return func(*args, **kwargs)

    def _turn_to(self, storage: int) -> None:
        """Free the present stand-in and allocate this one."""
        self._keep_current()
        name, parameter, _ = self._waiting[storage]
        if storage in self._done:
            raise RuntimeError(
                f"init_fn returns to '{name}' after another parameter: only one is held at a time; "
                "finish each before the next"
            )
        parameter.untyped_storage().resize_(parameter.nbytes)
        self._current = storage

    def _keep_current(self) -> None:
        """Hand the present stand-in's values over, and free its memory."""
        if self._current is None:
            return
        _, parameter, keep = self._waiting[self._current]
        keep(parameter.detach())
        parameter.untyped_storage().resize_(0)
        self._done.add(self._current)
        self._current = None
