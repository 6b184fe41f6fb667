"""Initialise a module that was built on meta, without ever holding more than one of its matrices.

`initialize_in_turn` runs the module's own initialisation on stand-ins: parameters of the right shape whose
memory is allocated when an operator first touches them, and which are cut into pieces and freed when the
operator of another parameter comes. So a model larger than one device can be initialised by the code that
would initialise it whole, and draws the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distlab.parallel.fsdp.shards import FlatShard


def initialize_in_turn(
    module: nn.Module, shards: Sequence[FlatShard], init_fn: Callable[[nn.Module], Any]
) -> None:
    """Call `init_fn(module)` with every sharded parameter in full, one at a time.

    Every rank draws everything and keeps its pieces, so ranks must draw alike (equal seeds). Buffers and
    replicated parameters are ordinary memory all along, uninitialised when `init_fn` begins.

    Raises:
        RuntimeError: `init_fn` returns to a parameter after it has gone on to another, uses two in one
            operator, or leaves one untouched.
    """
    mode = _InTurn()
    for shard in shards:
        for index, entry in enumerate(shard.entries):
            like = entry.parameter
            full = torch.empty_like(like, device=shard.master.device)
            stand_in = nn.Parameter(full, like.requires_grad)
            entry.register(stand_in)
            mode.add(entry.name, stand_in, lambda full, shard=shard, index=index: shard.load(index, full))
    with mode:
        init_fn(module)
    mode.finish()


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Give buffers on meta memory on `device`; their values are for `init_fn` to write."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)


class _Waiting:
    """A stand-in whose memory is allocated only between its first operator and the next parameter's."""

    def __init__(self, name: str, parameter: nn.Parameter, keep: Callable[[Tensor], None]):
        self.name, self.parameter, self.keep = name, parameter, keep
        self.storage = parameter.untyped_storage()
        self.size = self.storage.nbytes()
        self.storage.resize_(0)
        self.done = False


class _InTurn(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, _Waiting] = {}  # by the address of the storage object
        self._current: _Waiting | None = None

    def add(self, name: str, parameter: nn.Parameter, keep: Callable[[Tensor], None]) -> None:
        waiting = _Waiting(name, parameter, keep)
        self._waiting[waiting.storage._cdata] = waiting

    def finish(self) -> None:
        """Keep the last one, and see that none was left out."""
        self._keep_current()
        missing = [waiting.name for waiting in self._waiting.values() if not waiting.done]
        if missing:
            raise RuntimeError(f"init_fn left {missing} uninitialised: it must write every parameter")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._waiting
        }
        if len(touched) > 1:
            names = sorted(self._waiting[storage].name for storage in touched)
            raise RuntimeError(f"init_fn uses {names} in one operator ({func}); only one exists at a time")
        for storage in touched:
            self._turn_to(self._waiting[storage])
        return func(*args, **kwargs)

    def _turn_to(self, waiting: _Waiting) -> None:
        if waiting is self._current:
            return
        self._keep_current()
        if waiting.done:
            raise RuntimeError(
                f"init_fn returns to '{waiting.name}' after another parameter: only one is held at a time; "
                "finish each before the next"
            )
        waiting.storage.resize_(waiting.size)
        self._current = waiting

    def _keep_current(self) -> None:
        if self._current is not None:
            self._current.keep(self._current.parameter.detach())
            self._current.storage.resize_(0)
            self._current.done, self._current = True, None
