"""What our DDPs share: start alike, watch gradients, average them, say clearly what is wrong.

A strategy is a subclass that decides two things: what to do when a gradient is ready (`_gradient_ready`) and
what is left to do at the end (`_synchronize`). The life of one step:

    forward ─ backward ─────────────────────── finish_gradient_synchronization() ─ optimizer.step()
              │ hook per parameter                │
              └ _gradient_ready(index)            └ _synchronize()

Equality. Afterwards each trainable parameter's `.grad` is the mean over ranks of the local gradients, where a
missing gradient (None) counts as zero; a parameter that no rank used keeps `.grad = None`.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from distlab.comm import collectives
from distlab.comm.subgroups import resolve_mesh
from distlab.comm.two_level import Message, all_reduce_on
from distlab.parallel import step_guard
from distlab.parallel.base import ParallelModel
from distlab.parallel.shard import Shard, whole


class DataParallel(ParallelModel):
    """Base class of our DDPs.

    Construction compares the model across ranks, then broadcasts parameters and buffers from rank 0.
    Buffers are not synchronised in forward: call `sync_buffers()` before evaluating or saving.

    Args:
        module: any `nn.Module` whose trainable parameters lie on one device.
        mesh: (replicas, ranks of a shard group), such as hosts and their GPUs: gradients are averaged in two levels
            (`distlab.comm.two_level`); default: in one.
        process_group: all ranks; default: the default group.

    Raises:
        TypeError: a mesh that is no DeviceMesh.
        ValueError: a mesh of other dimensions or ranks (see `resolve_mesh`), nothing to train, parameters on several
            devices, an uninitialized parameter, two parameters that share memory, a model that is wrapped already, or
            ranks that disagree on names, shapes, dtypes, strides or `requires_grad` (then on every rank).
    """

    def __init__(
        self, module: nn.Module, *, mesh: DeviceMesh | None = None, process_group: ProcessGroup | None = None
    ):
        super().__init__()
        self.module = module
        groups = resolve_mesh(mesh, process_group)
        self.mesh, self.process_group, self._all_reduce = mesh, groups.world, all_reduce_on(groups)
        refuse_uninitialized(module)
        named = list(module.named_parameters())  # a tied parameter is listed once
        self.trainable_names = [name for name, parameter in named if parameter.requires_grad]
        self.trainable = [parameter for _, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        check_ranks_agree(module, self.process_group)
        refuse_shared_storage(module)
        self._check_trainable()
        collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)

        self._pending = False  # a synchronised forward was not finished
        # Gradients of synchronised backward passes that were not finished: the tensor, and its version then.
        self._ready: dict[int, tuple[Tensor, int]] = {}
        # What finish left in `.grad`, with versions, so that a second call finds nothing to do; forward lets go of it.
        self._averaged: list[tuple[Tensor, int]] = []
        self._unsent: set[int] = set()  # gradients of backward passes under no_sync() since the last finish
        self._in_backward = False  # stays True after a backward that raised
        self._sent_rest = False  # all that backward has not brought
        self._ahead: list[DataParallel] = []  # wrappers that this backward came to before, and which send first
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_call, weakref.ref(self), index))
            for index, parameter in enumerate(self.trainable)
        ]
        self._handles.append(module.register_load_state_dict_post_hook(refuse_assigned_parameters(self)))
        step_guard.guard(self.trainable, self)

    # -- what a subclass decides ---------------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        """The gradient of `trainable[index]` is complete in this backward; communication may start."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Send what has not been sent, wait for all, leave the means in `.grad`."""

    def _issue_next(self) -> None:
        """Send the next message of those that need not wait for the end."""

    def _all_sent(self) -> bool:
        """Whether `_issue_next` has sent all of this step."""
        return True

    def _may_send(self) -> bool:
        """Whether it is this wrapper's turn: those of a group send in the order in which backward comes to them, which
        ranks share, and not when their buckets fill, which they do not.
        """
        return not self._ahead or all(wrapper._all_sent() for wrapper in self._ahead)

    def _send_rest(self) -> None:
        """Send what backward did not bring, where messages need not wait for the end."""
        self._sent_rest |= not self._all_sent()
        while not self._all_sent():
            self._issue_next()

    def _wait(self, work: Work | Message) -> None:
        """Wait for a message of this step; an error names the ranks that did not come."""
        collectives.wait(work, self.process_group, "averaging gradients")

    # -- the public face -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        self._averaged.clear()
        if torch.is_grad_enabled():
            if (self._in_backward or self._dropped()) and torch._C._current_graph_task_id() == -1:  # not inside of it
                self._recover()
            if self._synchronizes:
                self._pending = True
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over ranks. Call it on every rank after backward, before step.

        Gradients that backward did not make (`parameter.grad = …`) are averaged too. Without any gradient, and without
        a synchronised forward, since the last call it does nothing.

        Raises:
            ValueError: the module trains a parameter now that was frozen, or not there, at construction.
            RuntimeError: a gradient was changed after backward, when it may have been sent.
        """
        self._check_still_frozen()
        step_guard.check_module(self)
        if not (self._pending or self._ready or self._has_assigned_gradients()):
            return
        self._check_unedited()
        try:
            with torch.no_grad():
                step_guard.send_begun(self.process_group, [self])
                self._synchronize()
            gradients = (parameter.grad for parameter in self.trainable)
            self._averaged[:] = [(gradient, gradient._version) for gradient in gradients if gradient is not None]
        finally:
            self._pending = self._in_backward = self._sent_rest = False
            self._ready.clear()
            self._unsent.clear()
            step_guard.end(self)

    def shards(self) -> list[Shard]:
        """All parameters, whole."""
        named = [*zip(self.trainable_names, self.trainable, strict=True), *self._frozen]
        return [whole(name, parameter) for name, parameter in named]

    def check_gradients(self) -> None:
        """Raise RuntimeError if gradients of a synchronised backward have not been finished."""
        if self._ready or any(self.trainable[index].grad is not None for index in self._unsent):
            raise RuntimeError(
                f"{type(self).__name__}: this step would use gradients that are not averaged over the ranks yet: "
                "call finish_gradient_synchronization() after backward, before optimizer.step(); backward passes under "
                "no_sync() are sent by the next one outside it"
            )

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook; the module is as before (gradients may still be views of a bucket's memory)."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        step_guard.end(self)
        step_guard.release(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DataParallel":
        """What `to()`, `half()`, `cuda()` and the like end in: nothing may change, as buckets and ranks rely on it."""
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            with torch.no_grad():
                after = fn(tensor)
            if after is not tensor:
                raise TypeError(
                    f"{type(self).__name__} cannot change '{name}' from {_kind_of(tensor)} to {_kind_of(after)}: "
                    "move or cast the module before wrapping it (to do so now, close() this wrapper, change its "
                    ".module and wrap that again); for the dtype of the computation use torch.autocast"
                )
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: hooks and the process group would be lost "
            "silently. Copy or save `.module` and wrap the copy again"
        )

    # -- checks and hooks ----------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        """Called by autograd after it has accumulated the gradient of `trainable[index]`."""
        gradient = self.trainable[index].grad
        if not self._synchronizes or gradient is None:
            self._unsent.add(index)
            return
        name = self.trainable_names[index]
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of '{name}' is sparse; data parallelism here averages dense gradients: "
                "build the embedding with sparse=False"
            )
        if not self._ready:
            self._averaged.clear()
            self._ahead[:] = step_guard.begin(self)
        if self._sent_rest:
            raise RuntimeError(
                f"the gradient of '{name}' came after its message had left, as another wrapper on these ranks has sent "
                "since, and ranks must send alike: call finish_gradient_synchronization() of all wrappers when the "
                "backward passes of all have ended, or wrap both modules as one"
            )
        if index in self._ready:
            raise RuntimeError(
                f"the gradient of '{name}' became ready twice: call finish_gradient_synchronization() after "
                "each synchronised backward (or, to skip the step, zero_grad(set_to_none=True)), use no_sync() to "
                "accumulate, and checkpoint activations with use_reentrant=False where a parameter is used in several "
                "checkpointed blocks"
            )
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of '{name}' has a graph of its own (create_graph=True), which averaging would cut "
                "off: compute a gradient penalty from torch.autograd.grad(..., create_graph=True), and call "
                "backward() once, on the loss plus the penalty"
            )
        if not self._in_backward:
            self._enter_backward()
        # What is noted is compared in finish. Assigning an attribute of an nn.Module would take microseconds.
        self._ready[index] = gradient, gradient._version
        self._gradient_ready(index)

    def _enter_backward(self, _: Any = None) -> None:
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that raised nothing; one inside of another (of a reentrant
        checkpoint) leaves it to what runs next in that one to say when that one ends.
        """
        around = torch._C._current_autograd_node()
        following = [node for node, _ in around.next_functions if node and node.next_functions] if around else []
        self._in_backward = bool(following)
        for node in following:
            node.register_prehook(self._enter_backward)

    def _has_assigned_gradients(self) -> bool:
        """Whether some were put into `.grad` by hand; those of passes under `no_sync()` wait for the one outside it."""
        if self._unsent or self._shards_gradients:
            return False
        averaged = {id(gradient): version for gradient, version in self._averaged}
        gradients = (parameter.grad for parameter in self.trainable)
        return any(g is not None and averaged.get(id(g)) != g._version for g in gradients)

    def _dropped(self) -> bool:
        """Whether `zero_grad()` has taken away what was to be finished, because the step is skipped."""
        return bool(self._ready) and all(self.trainable[index].grad is None for index in self._ready)

    def _recover(self) -> None:
        """After a backward that raised or was dropped, before anything new is accumulated: complete its collectives, so
        that all ranks have issued the same sequence again, and drop its gradients, which are worthless.
        """
        for parameter in self.trainable:
            parameter.grad = None
        self._pending = True
        self._ready.clear()
        self.finish_gradient_synchronization()
        for parameter in self.trainable:  # those that came from other ranks
            parameter.grad = None

    def _check_unedited(self) -> None:
        for index, (gradient, version) in self._ready.items():
            if self.trainable[index].grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of '{self.trainable_names[index]}' was changed between backward and "
                    "finish_gradient_synchronization(), when it may have been sent: clip and edit gradients after "
                    "finish, and register hooks before wrapping; zero_grad() drops this step's"
                )

    def _check_trainable(self) -> None:
        if not self.trainable:
            raise ValueError(
                f"{type(self).__name__}: the module has no parameter that requires a gradient; nothing to average"
            )
        self.device = the_device(self.trainable, type(self).__name__)
        for name, parameter in zip(self.trainable_names, self.trainable, strict=True):
            if not parameter.is_floating_point():
                raise ValueError(
                    f"'{name}' is {parameter.dtype}; only floating-point parameters are averaged"
                )
            if step_guard.is_guarded(parameter):
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


def the_device(parameters: Iterable[Tensor], strategy: str) -> torch.device:
    """The one device of all parameters; raises ValueError if there are several."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f"{strategy}: parameters lie on {sorted(map(str, devices))}; move the module to one device first"
        )
    return devices.pop()


def check_ranks_agree(module: nn.Module, group: ProcessGroup) -> None:
    """Before anything is sent: every rank must hold the same parameters and buffers.

    Raises:
        ValueError: the same one on every rank; it names the first tensor that differs in name, shape, dtype,
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


def refuse_uninitialized(module: nn.Module) -> None:
    """Lazy modules (`nn.LazyLinear`, …) know their shapes after their first forward only.

    Raises:
        ValueError: a parameter or buffer without a shape; names it.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' is uninitialized, a lazy module's: run one forward with an example batch before wrapping"
            )


def refuse_shared_storage(module: nn.Module) -> None:
    """Two different parameters on the same memory would be averaged, stepped and moved as two.

    Slices of one flat tensor that do not overlap are two parameters and allowed; interleaved columns are refused.

    Raises:
        ValueError: a trainable parameter overlaps another parameter; names both.
    """
    on_storage: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():  # a tied parameter is listed once
        if parameter.numel() > 0:
            entry = (*_byte_range(parameter), name, parameter)
            on_storage.setdefault(parameter.untyped_storage()._cdata, []).append(entry)
    for together in on_storage.values():
        for (start, stop, name, one), (first, last, other_name, other) in combinations(together, 2):
            if start < last and first < stop and (one.requires_grad or other.requires_grad):
                raise ValueError(
                    f"'{name}' and '{other_name}' are two parameters on the same memory: to tie them, assign "
                    "one Parameter object to both names; to keep them apart, clone one"
                )


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """First and one-past-last byte that a tensor (not empty) touches within its storage."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _kind_of(tensor: Tensor) -> str:
    strides = f", strides {tensor.stride()}" if tensor.dim() >= 4 else ""  # where memory formats differ
    return f"{tensor.dtype} on {tensor.device}{strides}"


def _describe(entries: list[tuple], index: int) -> str:
    if index >= len(entries):
        return f"missing ({len(entries)} tensors)"
    name, shape, dtype, stride, requires_grad = entries[index]
    return f"'{name}' {shape} {dtype} strides {stride} {'trainable' if requires_grad else 'not trainable'}"


def _call(owner: weakref.ref, index: int, _: nn.Parameter) -> None:
    """A parameter's hook; holds its wrapper weakly, so that dropping the wrapper ends its communication."""
    wrapper = owner()
    if wrapper is not None:
        wrapper._on_gradient(index)


class Attached:
    """A module's hook that stays behind when the module is copied, pickled or saved: there it does nothing.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any] | None = None):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __reduce__(self) -> Any:
        return Attached, ()


def refuse_assigned_parameters(wrapper: DataParallel) -> Attached:
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

    return Attached(check)
