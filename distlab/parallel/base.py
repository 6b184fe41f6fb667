"""What every data-parallel wrapper shares: start alike, watch gradients, average them, say clearly what is wrong.

A strategy is a subclass that decides two things: what to do when a gradient is ready (`_gradient_ready`) and
what is left to do at the end (`_synchronize`). The life of one step:

    forward ─ backward ─────────────────────── finish_gradient_synchronization() ─ optimizer.step()
              │ hook per parameter                │
              └ _gradient_ready(index)            └ _synchronize()

Equality. Afterwards each trainable parameter's `.grad` is the mean over ranks of the local gradients, where a
missing gradient (None) counts as zero; a parameter that no rank used keeps `.grad = None`.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from distlab.comm import collectives


class DataParallel(nn.Module, ABC):
    """Base class of the four DDPs.

    Construction compares the model across ranks, then broadcasts parameters and buffers from rank 0.
    Buffers are not synchronised in forward: call `sync_buffers()` before evaluating or saving.

    Args:
        module: any `nn.Module` whose trainable parameters lie on one device.
        process_group: default: the default group.

    Raises:
        ValueError: nothing to train, parameters on several devices, a model that is wrapped already, or ranks
            that disagree on names, shapes, types, strides or `requires_grad` (then on every rank).
    """

    def __init__(self, module: nn.Module, *, process_group: ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = collectives.resolve_group(process_group)
        named = list(module.named_parameters())  # a tied parameter is listed once
        self.trainable_names = [name for name, parameter in named if parameter.requires_grad]
        self.trainable = [parameter for _, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        check_ranks_agree(module, self.process_group)
        self._check_trainable()
        self.device = self.trainable[0].device
        collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)

        self._synchronize_next_backward = True  # False inside no_sync()
        self._pending = False  # a synchronised forward or backward happened and was not finished
        self._in_backward = False
        self._ready = [False] * len(self.trainable)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_GradientHook(self, index))
            for index, parameter in enumerate(self.trainable)
        ]
        self._handles.append(module.register_load_state_dict_post_hook(refuse_assigned_parameters(self)))

    # -- what a subclass decides ---------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        """The gradient of `trainable[index]` is complete in this backward; communication may start."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Send what has not been sent, wait for all, leave the means in `.grad`."""

    # -- the public face -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        if torch.is_grad_enabled() and self._synchronize_next_backward:
            if self._in_backward:
                self._recover()
            self._pending = True
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally; the next one outside sends the sum."""
        before, self._synchronize_next_backward = self._synchronize_next_backward, False
        try:
            yield
        finally:
            self._synchronize_next_backward = before

    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over ranks. Call it on every rank after backward, before step.

        Without a synchronised forward or backward since the last call it does nothing.

        Raises:
            ValueError: a parameter that was frozen at construction now requires a gradient.
        """
        if not self._pending:
            return
        self._check_still_frozen()
        try:
            self._synchronize()
        finally:
            self._pending = self._in_backward = False
            self._ready = [False] * len(self.trainable)

    def sync_buffers(self) -> None:
        """Overwrite all buffers (BatchNorm statistics, say) by those of rank 0. Blocks."""
        collectives.broadcast_all(self.module.buffers(), self.process_group)

    def close(self) -> None:
        """Detach every hook; the module is as before (gradients may still be views of a bucket's memory)."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: hooks and the process group would be lost "
            "silently. Copy or save `.module` and wrap the copy again"
        )

    # -- checks and hooks ----------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        """Called by autograd after it has accumulated the gradient of `trainable[index]`."""
        gradient = self.trainable[index].grad
        if not self._synchronize_next_backward or gradient is None:
            return
        name = self.trainable_names[index]
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of '{name}' is sparse; data parallelism here averages dense gradients: "
                "build the embedding with sparse=False"
            )
        if self._ready[index]:
            raise RuntimeError(
                f"the gradient of '{name}' became ready twice: call finish_gradient_synchronization() after "
                "each synchronised backward, use no_sync() to accumulate, and checkpoint activations with "
                "use_reentrant=False where a parameter is used in several checkpointed blocks"
            )
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self._pending = True
        self._ready[index] = True
        self._gradient_ready(index)

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that raised nothing."""
        self._in_backward = False

    def _recover(self) -> None:
        """After a backward that raised: complete its collectives, so that all ranks have issued the same
        sequence again, and drop its gradients, which are worthless."""
        self.finish_gradient_synchronization()
        for parameter in self.trainable:
            parameter.grad = None

    def _check_trainable(self) -> None:
        if not self.trainable:
            raise ValueError(
                f"{type(self).__name__}: the module has no parameter that requires a gradient; nothing to average"
            )
        devices = {parameter.device for parameter in self.trainable}
        if len(devices) > 1:
            raise ValueError(
                f"{type(self).__name__}: trainable parameters lie on {sorted(map(str, devices))}; "
                "move the module to one device first"
            )
        for name, parameter in zip(self.trainable_names, self.trainable, strict=True):
            if not parameter.is_floating_point():
                raise ValueError(
                    f"'{name}' is {parameter.dtype}; only floating-point parameters are averaged"
                )
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            if any(isinstance(hook, _GradientHook) and hook.owner() is not None for hook in hooks.values()):
                raise ValueError(
                    f"'{name}' belongs to a module that is wrapped already: call close() on that wrapper first"
                )

    def _check_still_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"'{name}' was frozen when the module was wrapped and requires a gradient now, which would "
                    "not be averaged: close() this wrapper and wrap the module again"
                )


def check_ranks_agree(module: nn.Module, group: ProcessGroup) -> None:
    """Before anything is sent: every rank must hold the same parameters and buffers.

    Raises:
        ValueError: the same one on every rank; it names the first tensor that differs in name, shape, type,
            strides or `requires_grad`.
    """
    mine = [
        (name, tuple(t.shape), str(t.dtype), t.stride(), t.requires_grad)
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]
    theirs = collectives.gather_objects(mine, group)
    for rank, other in enumerate(theirs):
        if other == theirs[0]:
            continue
        length = min(len(other), len(theirs[0]))
        first = next((i for i in range(length) if other[i] != theirs[0][i]), length)
        raise ValueError(
            f"ranks hold different models: entry {first} is {_describe(theirs[0], first)} on rank 0 and "
            f"{_describe(other, first)} on rank {rank}; build the same model on every rank"
        )


def _describe(entries: list[tuple], index: int) -> str:
    if index >= len(entries):
        return f"missing ({len(entries)} tensors)"
    name, shape, dtype, stride, requires_grad = entries[index]
    return f"'{name}' {shape} {dtype} strides {stride} {'trainable' if requires_grad else 'not trainable'}"


class _GradientHook:
    """A parameter's hook; holds its wrapper weakly, so that dropping the wrapper ends its communication."""

    def __init__(self, owner: DataParallel, index: int):
        self.owner = weakref.ref(owner)
        self.index = index

    def __call__(self, _: nn.Parameter) -> None:
        owner = self.owner()
        if owner is not None:
            owner._on_gradient(self.index)


def refuse_assigned_parameters(wrapper: DataParallel) -> Any:
    """A hook for after load_state_dict: with assign=True it swaps parameters, and their hooks would be lost."""
    reference = weakref.ref(wrapper)

    def check(module: nn.Module, _: Any) -> None:
        owner = reference()
        if owner is None:
            return
        now = {id(parameter) for parameter in module.parameters()}
        for name, parameter in zip(owner.trainable_names, owner.trainable, strict=True):
            if id(parameter) not in now:
                raise RuntimeError(
                    f"load_state_dict replaced '{name}' (assign=True), so its gradient would no longer be "
                    "averaged: load before wrapping, or without assign"
                )

    return check
