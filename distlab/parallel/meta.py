"""Models built on meta, without memory: made on a device as a whole, or one matrix at a time (FSDP).

`initialize_in_turn` runs the module's own initialisation on stand-ins: parameters of the right
shape whose memory is allocated when an operator first touches them, and which are cut into shards
and freed when the operator of another parameter comes. So a model larger than one device can be
initialised by the code that would initialise it whole, and draws the same numbers.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# name, what the module finds, what keeps its values
StandIn = tuple[str, nn.Parameter, Callable[[Tensor], None]]


def materialize(module: nn.Module, device: torch.device, init: Callable[[nn.Module], Any]) -> None:
    """Give everything on meta memory on `device`, and let `init(module)` write it.

    Tied parameters stay tied.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    full = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(full, parameter.requires_grad)
                owner._parameters[name] = made[parameter]
    materialize_buffers(module, device)
    init(module)


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Give buffers on meta memory on `device`; their values are for the initialisation to write."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)


def reset_parameters(module: nn.Module) -> None:
    """Call `reset_parameters()` of the outermost modules that have it.

    Raises:
        ValueError: a module that owns parameters or buffers has none.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    if any(
        tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())
    ):
        raise ValueError(
            f"{type(module).__name__} owns parameters or buffers and has no reset_parameters(): give init=… to write "
            "their values"
        )
    for child in module.children():
        reset_parameters(child)


def initialize_in_turn(
    module: nn.Module,
    stand_ins: Iterable[StandIn],
    init_fn: Callable[[nn.Module], Any],
) -> None:
    """Call `init_fn(module)` with every stand-in in full, one at a time.

    Every rank draws everything and keeps its shards, so ranks must draw alike (equal seeds).
    Buffers and replicated parameters are ordinary memory all along, uninitialised when `init_fn`
    begins.

    Args:
        stand_ins: each is made when it is asked for, and freed at once.

    Raises:
        RuntimeError: `init_fn` returns to a parameter after it has gone on to another, uses two in
            one operator, or leaves one untouched.
    """
    mode = _InTurn(stand_ins)
    with _compiled_code_runs_eager(), mode:
        init_fn(module)
    mode.finish()


def _compiled_code_runs_eager() -> AbstractContextManager[Any]:
    """Let compiled functions run eager in a `with` block, and compiled again afterwards.

    The mode must see every operator. Dynamo would run compiled code eager under a dispatch mode
    anyway, but would then remember that for the rest of the process.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class _InTurn(TorchDispatchMode):
    """Allocates a stand-in's memory at its first operator, and keeps and frees it at the next parameter's."""

    def __init__(self, stand_ins: Iterable[StandIn]) -> None:
        super().__init__()
        self._waiting: dict[int, StandIn] = {}
        for stand_in in stand_ins:
            storage = stand_in[1].untyped_storage()
            self._waiting[storage._cdata] = stand_in
            storage.resize_(0)
        self._current: int | None = None  # by the address of the storage object, as above
        self._done: set[int] = set()

    def finish(self) -> None:
        """Keep the last one, and see that none was left out."""
        self._keep_current()
        missing = [
            name for storage, (name, *_) in self._waiting.items() if storage not in self._done
        ]
        if missing:
            raise RuntimeError(
                f"init_fn left {missing} uninitialised: it must write every parameter"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        touched = {tensor.untyped_storage()._cdata for tensor in tensors} & self._waiting.keys()
        if len(touched) > 1:
            names = sorted(self._waiting[storage][0] for storage in touched)
            raise RuntimeError(
                f"init_fn uses {names} in one operator ({func}); only one exists at a time"
            )
        for storage in touched - {self._current}:
            self._turn_to(storage)
        return func(*args, **kwargs)

    def _turn_to(self, storage: int) -> None:
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
        if self._current is not None:
            _, parameter, keep = self._waiting[self._current]
            keep(parameter.detach())
            parameter.untyped_storage().resize_(0)
            self._done.add(self._current)
            self._current = None
