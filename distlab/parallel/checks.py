"""Every refusal of our strategies: functions that read state and raise.

They are called at five events, and are listed here in that order, first for the DDPs and ZeRO-1,
then for FSDP:

    wrap        a module that cannot be averaged, or ranks with different models
    forward     FSDP only: an attribute that is another parameter now
    gradient    one that came twice, too late, sparse, or with a graph of its own
    finish      gradients that were edited since backward, parameters that joined after wrapping
    step        gradients that finish has not averaged, or that changed since

No function here decides what a strategy does next, or keeps state of its own. The only thing that
has to be installed is a hook of torch's that says when any optimizer steps (`watch`), because an
optimizer does not know the wrapper whose gradients it applies.
"""

import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.parallel.shard import NOTED_RANK

Named = Sequence[tuple[str, nn.Parameter]]
State = tuple[int, int]  # of a gradient, as `state_of` returns it

# -- wrap: what cannot be wrapped ------------------------------------------------------------------


def check_module(module: nn.Module, strategy: str, group: ProcessGroup) -> None:
    """Check that a data-parallel strategy can wrap `module`. A collective.

    Args:
        strategy: name of the wrapper's class, for messages.

    Raises:
        ValueError: nothing to train, parameters on several devices, an uninitialized parameter, two
            that share memory, one that is wrapped already, a layer that rewrites its rows in
            forward, or ranks that disagree (then on every rank).
    """
    refuse_uninitialized(module)
    check_ranks_agree(module, group)
    refuse_shared_memory(module)
    if group.size() > 1:
        refuse_renormalising(module, strategy)
    trainable = [
        (n, parameter) for n, parameter in module.named_parameters() if parameter.requires_grad
    ]
    if not trainable:
        raise ValueError(
            f"{strategy}: the module has no parameter that requires a gradient; nothing to average"
        )
    device = the_device([parameter for _, parameter in trainable], strategy)
    if device.type == "meta":
        raise ValueError(
            f"{strategy}: the parameters are on meta and have no values: give them values before "
            "wrapping (module.to_empty(device=…) and its own initialization), or take FSDP with "
            "init_fn and device"
        )
    for name, parameter in trainable:
        if not parameter.is_floating_point():
            raise ValueError(
                f"'{name}' is {parameter.dtype}; only floating-point parameters are averaged"
            )
        if parameter.dtype not in collectives.SENDABLE:
            raise ValueError(
                f"'{name}' is {parameter.dtype}, in which gradients cannot be averaged: freeze it "
                "(requires_grad=False), or train it in another floating-point dtype"
            )
        if wrappers_of([parameter]):
            raise ValueError(
                f"'{name}' belongs to a module that is wrapped already: call close() on that "
                "wrapper first"
            )


def the_device(parameters: Iterable[Tensor], strategy: str) -> torch.device:
    """Return the one device of all parameters.

    Raises:
        ValueError: there are several.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f"{strategy}: parameters lie on {sorted(map(str, devices))}; move the module to one "
            "device first"
        )
    return devices.pop()


def check_ranks_agree(module: nn.Module, group: ProcessGroup) -> None:
    """Check, before anything is sent, that every rank has the same parameters and buffers.

    Raises:
        ValueError: the same one on every rank. It names the first tensor that differs in name,
            shape, dtype, strides or `requires_grad`.
    """
    mine = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        trained = "trainable" if tensor.requires_grad else "not trainable"
        shape = tuple(tensor.shape)
        mine.append(f"'{name}' {shape} {tensor.dtype} strides {tensor.stride()} {trained}")
    of_all_ranks = collectives.gather_objects(mine, group)
    of_rank_0 = of_all_ranks[0]
    for rank, other in enumerate(of_all_ranks):
        for index, (first, here) in enumerate(itertools.zip_longest(of_rank_0, other)):
            if first != here:
                raise ValueError(
                    f"ranks hold different models: entry {index} is {first or 'missing'} on rank "
                    f"0, of {len(of_rank_0)} tensors, and {here or 'missing'} on rank {rank}, of "
                    f"{len(other)}; build the same model on every rank"
                )


def refuse_uninitialized(module: nn.Module) -> None:
    """Check that every tensor has a shape.

    Those of lazy modules such as `nn.LazyLinear` get it in their first forward.

    Raises:
        ValueError: a parameter or buffer without a shape. It is named.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' is uninitialized, a lazy module's: run one forward with an example "
                "batch before wrapping"
            )


def refuse_shared_memory(module: nn.Module) -> None:
    """Check that no trainable parameter overlaps another one in memory.

    They would be averaged, stepped and moved as two. Slices of one flat tensor that do not overlap
    are two parameters and allowed. Interleaved columns are refused.

    Raises:
        ValueError: two parameters overlap. They are named.
    """
    on_storage: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():  # lists a tied parameter once
        if parameter.numel() == 0:
            continue
        last = parameter.storage_offset()
        for size, stride in zip(parameter.shape, parameter.stride(), strict=True):
            last += (size - 1) * stride
        start = parameter.storage_offset() * parameter.element_size()
        stop = (last + 1) * parameter.element_size()
        storage = parameter.untyped_storage()._cdata
        on_storage.setdefault(storage, []).append((start, stop, name, parameter))
    for together in on_storage.values():
        for one, other in itertools.combinations(together, 2):
            start, stop, name, parameter = one
            other_start, other_stop, other_name, other_parameter = other
            overlap = other_start < stop and start < other_stop
            if overlap and (parameter.requires_grad or other_parameter.requires_grad):
                raise ValueError(
                    f"'{name}' and '{other_name}' are two parameters on the same memory: to tie "
                    "them, assign one Parameter object to both names; to keep them apart, clone one"
                )


# -- wrap: arguments of torch's classes ------------------------------------------------------------

_MOVE_FIRST = "move the module to this rank's device before you wrap it"
_LEAVE_OUT = "leave it out"
# `docs/learn/from_torch.md` has the whole table.
INSTEAD = {
    # DistributedDataParallel
    "bucket_cap_mb": "give bucket_size_mb, in MiB, to BucketedDDP or CopyEngineDDP",
    "device_ids": _MOVE_FIRST,
    "output_device": _MOVE_FIRST,
    "broadcast_buffers": "buffers are broadcast when you wrap; sync_buffers() does it again",
    "init_sync": f"{_LEAVE_OUT}; parameters and buffers are always broadcast from rank 0",
    "find_unused_parameters": f"{_LEAVE_OUT}; parameters that a rank did not use are always found",
    "gradient_as_bucket_view": f"{_LEAVE_OUT}; gradients are views of the buckets, where there are",
    "static_graph": f"{_LEAVE_OUT}; the graph may change from step to step",
    "mixed_precision": "give compute_dtype to FSDP, or use torch.autocast with other strategies",
    # FullyShardedDataParallel and fully_shard
    "device_mesh": "give mesh",
    "mp_policy": "give compute_dtype; gradients are reduced in the dtype of the fp32 masters",
    "reshard_after_forward": "keep_gathered=True is reshard_after_forward=False",
    "sharding_strategy": "give a two-dimensional mesh for hybrid sharding; else all is sharded",
    "auto_wrap_policy": f"{_LEAVE_OUT}; units are the children of ModuleLists, and other layers",
    "cpu_offload": "there is no offloading; use more ranks",
    "offload_policy": "there is no offloading; use more ranks",
    "device_id": _MOVE_FIRST,
    "param_init_fn": "give init_fn and device, for a module built on meta",
    "sync_module_states": f"{_LEAVE_OUT}; construction always takes rank 0's parameters",
    "use_orig_params": f"{_LEAVE_OUT}; parameters always have the module's own names",
    "ignored_states": "there is no such argument; wrap a module that does not hold them",
    "ignored_params": "there is no such argument; wrap a module that does not hold them",
    # ZeroRedundancyOptimizer
    "optimizer_class": "give optimizer_cls",
    "parameters_as_bucket_view": _LEAVE_OUT,
    "overlap_with_ddp": f"{_LEAVE_OUT}; ZeroOptimizer(ddp, optimizer_cls, overlap_gather=True)",
}


class AnswersTorchNames:
    """A base class that answers arguments of torch's classes with those of the class being built.

    Python alone would only say that a keyword is unexpected, or count positional arguments.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # help() and editors show the arguments of __init__, not those of __new__ below.
        signature = inspect.signature(cls.__init__)
        without_self = list(signature.parameters.values())[1:]
        cls.__signature__ = signature.replace(parameters=without_self)

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Raise TypeError for an argument of torch's that this class does not take."""
        check_arguments(cls, given, named)
        return super().__new__(cls)


def check_arguments(cls: type, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse arguments that torch's classes take and `cls` does not, and say what to give instead.

    Args:
        cls: class that is being constructed.
        given: its positional arguments.
        named: its keyword arguments.

    Raises:
        TypeError: a keyword of torch's, or a process group or a list of devices by position.
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
                f"{cls.__name__} got a process group by position: give it by name, "
                "process_group=..."
            )
        if isinstance(value, list):
            raise TypeError(
                f"{cls.__name__} got a list by position, as torch's device_ids: {_MOVE_FIRST}"
            )


# -- after wrap: what must stay as it is -----------------------------------------------------------


class StaysAsWrapped(AnswersTorchNames):
    """A base class of wrappers, which cannot be cast, moved, copied or pickled."""

    module: nn.Module
    casts_parameters: bool
    _accumulates: bool

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Raise TypeError for a change by `to()`, `half()`, `cuda()` and others.

        All of them end here. Buckets and the other ranks rely on dtype and device.
        """
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            with torch.no_grad():
                after = fn(tensor)
            if after is not tensor:
                computes = "give compute_dtype" if self.casts_parameters else "use torch.autocast"
                raise TypeError(
                    f"{type(self).__name__} cannot change '{name}' from {_kind_of(tensor)} to "
                    f"{_kind_of(after)}: move or cast the module before wrapping it (to do so now, "
                    "close() this wrapper, change its .module, wrap that again and build the "
                    f"optimizer anew); for the dtype of the computation {computes}"
                )
        return self

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside `no_sync()`, as torch's DDP says it. Setting it raises TypeError."""
        return not self._accumulates

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        raise TypeError(
            f"{type(self).__name__} does not take require_backward_grad_sync: run the backward "
            "passes that are not the last of a step inside `with wrapper.no_sync():`"
        )

    def __getstate__(self) -> NoReturn:
        """Raise TypeError, because the wrapper is being copied or pickled."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: hooks and the process group would "
            "be lost silently. Copy or save `.module` and wrap the copy again"
        )


def _kind_of(tensor: Tensor) -> str:
    # Memory formats differ in four dimensions and more.
    strides = f", strides {tensor.stride()}" if tensor.dim() >= 4 else ""
    return f"{tensor.dtype} on {tensor.device}{strides}"


class Attached:
    """A module's hook that stays behind when the module is copied, pickled or saved.

    In the copy it does nothing.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any] = lambda *args: None):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return Attached, ()


def check_loads(
    module: nn.Module, named: Named, handles: Collection[RemovableHandle]
) -> RemovableHandle:
    """Let a `load_state_dict` raise after which parameters no longer carry our hooks.

    `assign=True` replaces them. `torch.__future__.set_swap_module_params_on_conversion` lets it
    exchange what they hold.

    Args:
        named: parameters of a wrapper.
        handles: our hooks of their gradients. Empty for a wrapper that has none.
    """

    def check(module: nn.Module, _: Any) -> None:
        now = {id(parameter) for parameter in module.parameters()}
        for name, parameter in named:
            if id(parameter) not in now:
                raise RuntimeError(
                    f"load_state_dict replaced '{name}' (assign=True), so its gradient would no "
                    "longer be averaged: load before wrapping, or without assign"
                )
        # Python still shows the hooks on the parameter, but the exchange has detached them.
        if handles and torch.__future__.get_swap_module_params_on_conversion():
            raise RuntimeError(
                "load_state_dict exchanged the parameters' tensors "
                "(set_swap_module_params_on_conversion), so their gradients would no longer be "
                "averaged during backward: load before wrapping, or without that setting"
            )

    return module.register_load_state_dict_post_hook(Attached(check))


# -- gradient --------------------------------------------------------------------------------------


def check_not_taken(name: str, gradient: Tensor | None) -> None:
    """Check that no hook of the user's has taken a gradient away before it could be averaged.

    Raises:
        RuntimeError: one has.
    """
    if gradient is None:
        raise RuntimeError(
            f"the gradient of '{name}' was dropped by a hook that was registered before wrapping, "
            "before it could be averaged over the ranks (an optimizer inside backward does so): "
            "step after finish_gradient_synchronization(), or use no_sync() for gradients of this "
            "rank alone"
        )


def check_gradient(name: str, gradient: Tensor, *, is_ready: bool, has_left: bool) -> None:
    """Check a gradient that backward has just made and that is to be averaged.

    Args:
        name: name of its parameter.
        is_ready: True if a backward since the last finish has made it before.
        has_left: True if its message has been sent without it.

    Raises:
        TypeError: it is sparse.
        RuntimeError: it came twice or too late, or has a graph of its own.
    """
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"the gradient of '{name}' is sparse; data parallelism here averages dense gradients: "
            "build the embedding with sparse=False"
        )
    if has_left:
        raise RuntimeError(
            f"the gradient of '{name}' came after its message had left, as another wrapper on "
            "these ranks has sent since, and ranks must send alike: call "
            "finish_gradient_synchronization() of all wrappers when the backward passes of all "
            "have ended, or wrap both modules as one"
        )
    if is_ready:
        raise RuntimeError(
            f"the gradient of '{name}' became ready twice: call finish_gradient_synchronization() "
            "after each synchronised backward (or, to skip the step, zero_grad(set_to_none=True) "
            "before the next backward), "
            "use no_sync() to accumulate, and checkpoint activations with use_reentrant=False "
            "where a parameter is used in several checkpointed blocks"
        )
    if gradient.requires_grad:
        raise RuntimeError(
            f"the gradient of '{name}' has a graph of its own (create_graph=True), which averaging "
            "would cut off: compute a gradient penalty from torch.autograd.grad(..., "
            "create_graph=True), and call backward() once, on the loss plus the penalty"
        )


def check_same_kind(gradient: Tensor, place: Tensor) -> None:
    """Check a gradient that is about to be copied to its place in a bucket.

    Raises:
        TypeError: it has another dtype or device than its parameter had at construction.
    """
    if gradient.dtype != place.dtype or gradient.device != place.device:
        raise TypeError(
            f"a gradient of shape {tuple(gradient.shape)} is {_kind_of(gradient)}, and was "
            f"{_kind_of(place)} when the module was wrapped: move or cast the module before "
            "wrapping it (to do so now, close() the wrapper, change its .module, wrap that again "
            "and build the optimizer anew); for the dtype of the computation use torch.autocast"
        )


def check_not_accumulated(name: str, gradient: Tensor | None, model: str) -> None:
    """Check a sharded gradient, of which this rank's part is the mean, after a backward.

    Args:
        model: class of the wrapped module, for the message.

    Raises:
        RuntimeError: backward added to the gradient that the last finish left.
    """
    finished = getattr(gradient, "finished_state", None)
    # The addition is the only change since finish.
    if finished is not None and gradient._version == finished[0] + 1:
        raise _not_zeroed(name, model)


# -- finish ----------------------------------------------------------------------------------------


def check_nothing_joined(module: nn.Module, watched: set[int], frozen: Named) -> None:
    """Check that the module trains no parameter that it did not train when it was wrapped.

    Args:
        watched: ids of the parameters that it trained then.
        frozen: the other parameters that it had.

    Raises:
        ValueError: a layer was replaced, added, parametrized or unfrozen.
    """
    # A walk of our own, which takes a fifth of the time of `module.named_parameters()`: it runs in
    # every step.
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        for parameter in each._parameters.values():
            if id(parameter) not in watched and parameter is not None and parameter.requires_grad:
                raise _joined(module, parameter, frozen)
        waiting += each._modules.values()


def _joined(module: nn.Module, joined: nn.Parameter, frozen: Named) -> ValueError:
    name = next(name for name, parameter in module.named_parameters() if parameter is joined)
    if any(joined is parameter for _, parameter in frozen):
        return ValueError(
            f"'{name}' was frozen when the module was wrapped and requires a gradient now, which "
            "would not be averaged: close() this wrapper, wrap the module again, and build the "
            "optimizer anew"
        )
    return ValueError(
        f"'{name}' is trained now and was not when the module was wrapped (a layer was replaced, "
        "added, parametrized or unfrozen), so its gradient would not be averaged: close() this "
        "wrapper, wrap the module again, and build the optimizer over the new wrapper's parameters"
    )


def check_unedited(named: Named, ready: Mapping[int, tuple[Tensor, State]]) -> None:
    """Check that gradients are those that backward has made, as their messages may have left.

    Args:
        ready: gradients that backward has made, by position in `named`.

    Raises:
        RuntimeError: one was changed or replaced.
    """
    for index, (gradient, state) in ready.items():
        name, parameter = named[index]
        if parameter.grad is not gradient or state_of(gradient) != state:
            raise RuntimeError(
                f"the gradient of '{name}' was changed between backward and "
                "finish_gradient_synchronization(), when it may have been sent: clip and edit "
                "gradients after finish, and register hooks before wrapping; zero_grad() drops "
                "this step's"
            )


def check_zeroed(named: Named, ready: Mapping[int, tuple[Tensor, State]], model: str) -> None:
    """Check gradients of which only this rank's part is the mean, before they are sent.

    Args:
        model: class of the wrapped module, for the message.
        ready: gradients that backward has made, by position in `named`.

    Raises:
        RuntimeError: backward has not reached one, and it is what the last finish left.
    """
    for index, (name, parameter) in enumerate(named):
        finished = getattr(parameter.grad, "finished_state", None)
        if index not in ready and finished is not None and parameter.grad._version == finished[0]:
            raise _not_zeroed(name, model)


def _not_zeroed(name: str, model: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of '{name}' of {model} was not zeroed since the last "
        "finish_gradient_synchronization(), and the mean that it holds is that of this rank's part "
        "only, which cannot be added to: call zero_grad() of this model before every step's first "
        "backward that reaches it (or freeze it, if the backward only passes through), and use "
        "no_sync() for all but the last backward of a step to accumulate"
    )


def check_not_set(named: Named) -> None:
    """Check gradients that would be reduce-scattered, at a finish without a forward before it.

    Raises:
        RuntimeError: one was set or changed since the last finish.
    """
    name = find_edited(named)
    if name is not None:
        raise RuntimeError(
            f"the gradient of '{name}' was set or changed, and the wrapper's forward has not run "
            "since the last finish_gradient_synchronization(), so it is not averaged under "
            "ZeroOptimizer: call the wrapper's forward before you set gradients yourself; edits of "
            "means go inside `with optimizer.elementwise_gradient_edits():`"
        )


# -- step ------------------------------------------------------------------------------------------


def check_finished(strategy: str, has_unfinished: bool) -> None:
    """Check that no gradient waits for finish.

    Args:
        has_unfinished: True if there are gradients of a backward since the last finish.

    Raises:
        RuntimeError: there are.
    """
    if has_unfinished:
        raise RuntimeError(
            f"{strategy}: this step would use gradients that are not averaged over the ranks yet: "
            "call finish_gradient_synchronization() after backward, before optimizer.step() and "
            "before GradScaler.unscale_(); "
            "backward passes under no_sync() are sent by the next one outside it"
        )


def check_optimizer_of_parts(optimizer: Optimizer | None, expected: Optimizer | None) -> None:
    """Check which optimizer steps gradients of which only this rank's part is the mean.

    Args:
        optimizer: optimizer that is about to step; None if none is.
        expected: the `ZeroOptimizer`.

    Raises:
        RuntimeError: it is another one.
    """
    if optimizer is not None and optimizer is not expected:
        raise RuntimeError(
            "these gradients are reduce-scattered, and each rank has the mean of a part only: step "
            "with the ZeroOptimizer that was made last for this wrapper, not with "
            f"{type(optimizer).__name__}; for another optimizer close() the wrapper and wrap the "
            "module again"
        )


def check_open(is_closed: bool) -> None:
    """Check that the wrapper whose slices an optimizer steps is not closed.

    Raises:
        RuntimeError: it is. Its buckets have the gradients of an earlier step.
    """
    if is_closed:
        raise RuntimeError(
            "the wrapper of this ZeroOptimizer was closed, so no gradients arrive in its buckets: "
            "build another ZeroOptimizer over the wrapper that you train now"
        )


def check_parts_unedited(named: Named) -> None:
    """Check gradients of which only this rank's part is the mean, before they are used.

    Raises:
        RuntimeError: one was changed since finish.
    """
    name = find_edited(named)
    if name is not None:
        raise RuntimeError(
            f"the gradient of '{name}' is not as finish_gradient_synchronization() left it; only "
            "this rank's part of it is the mean, so that torch.nn.utils.clip_grad_norm_ and the "
            "like see a part of the whole: clip by ZeroOptimizer.clip_grad_norm_(max_norm), and "
            "make edits that are right element by element inside "
            "`with optimizer.elementwise_gradient_edits():` (under shard_gradients=True those of "
            "`ddp.gradients().every()`)"
        )


def check_stand_ins(named: Named, is_edited: Callable[[nn.Parameter], bool]) -> None:
    """Check that edits of means left alone what stands for them in `.grad`.

    Raises:
        RuntimeError: they did not. The edit would be left out.
    """
    for name, parameter in named:
        if is_edited(parameter):
            raise RuntimeError(
                f"the gradient of '{name}' was set or zeroed, and under shard_gradients=True only "
                "a tensor without memory stands there: edit those of `ddp.gradients().every()`"
            )


def state_of(gradient: Tensor) -> State:
    """Return what shows later that a gradient was changed, without reading its values.

    torch counts a tensor's in-place changes in its `_version`. It does not count
    `parameter.grad.data = …`, which gives the tensor other memory.

    Returns:
        Count of in-place changes, and torch's number of the memory.
    """
    return gradient._version, gradient.untyped_storage()._cdata


def find_edited(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of a parameter whose gradient was changed or replaced since finish, or None.

    A gradient that was dropped (set to None) does not count.
    """
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None:
            continue
        finished = getattr(gradient, "finished_state", None)
        if finished is None or finished != state_of(gradient):
            return name
    return None


def mark_finished(named: Named) -> None:
    """Note the gradients as they are now, so that `find_edited` sees later changes."""
    for _, parameter in named:
        gradient = parameter.grad
        if gradient is not None:
            gradient.finished_state = state_of(gradient)


# -- step: when any optimizer steps ----------------------------------------------------------------


class _Watched(NamedTuple):
    """One wrapper that lives: ids of its parameters, and what ends the watching."""

    ids: set[int]
    stop: weakref.finalize


# Module state, as torch has one set of hooks per process.
_watched: "weakref.WeakKeyDictionary[nn.Module, _Watched]" = weakref.WeakKeyDictionary()
_uninstall: list[Callable[[], None]] = []  # empty while nothing is installed


def watch(wrapper: nn.Module, handles: Collection[RemovableHandle] = ()) -> set[int]:
    """Call `wrapper.check_step(optimizer)` before any optimizer of its parameters steps.

    The parameters are those of `wrapper.named`.

    The first wrapper installs the hooks in torch, and the last one that is closed or dropped
    removes them.

    Args:
        wrapper: wrapper of a strategy.
        handles: hooks of its gradients, to remove when it is closed or dropped. A list may be
            filled later.

    Returns:
        Ids of the parameters.
    """
    if not _uninstall:
        _install()
    loads = check_loads(wrapper.module, wrapper.named, handles)
    # Also for a wrapper that is dropped and not closed.
    stop = weakref.finalize(wrapper, _stop, loads, handles)
    stop.atexit = False
    ids = {id(parameter) for _, parameter in wrapper.named}
    _watched[wrapper] = _Watched(ids, stop)
    return ids


def release(wrapper: nn.Module) -> None:
    """Undo `watch`. A second call does nothing."""
    entry = _watched.pop(wrapper, None)
    if entry is not None:
        entry.stop()


def wrappers_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the wrappers that train one of these parameters."""
    ids = {id(parameter) for parameter in parameters}
    found = []
    for wrapper, watched in list(_watched.items()):
        if not ids.isdisjoint(watched.ids):
            found.append(wrapper)
    return found


# A compiled step runs the checks each time, and not only when it is traced.
@torch._disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, "replaced") for parameter in held):
        raise RuntimeError(
            f"this {type(optimizer).__name__} holds parameters that FSDP has replaced by shards: "
            "wrap first, then build the optimizer over fsdp.parameters()"
        )
    if any(hasattr(parameter, "shard_of_closed") for parameter in held):
        refuse_closed(optimizer)
    if any(NOTED_RANK in group for group in optimizer.param_groups):
        from distlab.parallel.state_dicts import check_loaded

        check_loaded(optimizer)
    for wrapper, watched in list(_watched.items()):
        if any(id(parameter) in watched.ids for parameter in held):
            wrapper.check_step(optimizer)


def mark_closed(shards: Iterable[nn.Parameter]) -> None:
    """Mark shards that no module reads any more, so that no optimizer steps them silently."""
    for shard in shards:
        shard.shard_of_closed = True


def refuse_closed(optimizer: Optimizer, *args: Any) -> NoReturn:
    """Raise RuntimeError for an optimizer that is about to step shards of a closed wrapper."""
    raise RuntimeError(
        f"this {type(optimizer).__name__} holds shards of an FSDP wrapper that was closed, and no "
        "module reads them any more: build another optimizer, over the parameters of the module or "
        "of the new wrapper"
    )


def _install() -> None:
    _uninstall.append(register_optimizer_step_pre_hook(_before_step).remove)
    _uninstall.append(_patch_grad_scaler())


def _stop(loads: RemovableHandle, handles: Iterable[RemovableHandle]) -> None:
    loads.remove()
    for handle in handles:
        handle.remove()
    if len(list(_watched)) == 0:
        while _uninstall:
            _uninstall.pop()()


def _patch_grad_scaler() -> Callable[[], None]:
    """Let `GradScaler` raise where it would skip or unscale wrongly, and return the undoing.

    The one class of torch's whose methods are replaced, as nothing else sees these mistakes.
    Unscaling leaves no trace in the gradients' versions. And a rank whose shards overflow skips
    `optimizer.step()`, so no hook runs there.
    """
    before = {name: getattr(GradScaler, name) for name in ("unscale_", "step")}

    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def check_first(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                _check_scaler(scaler, optimizer)
            return method(scaler, optimizer, *args, **kwargs)

        return check_first

    replaced = {name: checked(method) for name, method in before.items()}

    def undo() -> None:
        for name, method in replaced.items():
            # If other code has wrapped it again, it stays, and checks nothing without a wrapper.
            if getattr(GradScaler, name) is method:
                setattr(GradScaler, name, before[name])

    for name, method in replaced.items():
        setattr(GradScaler, name, method)
    return undo


def _check_scaler(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Check the gradients that a scaler is about to unscale.

    Raises:
        RuntimeError: they are shards, or may have been sent and wait for finish, which would put
            back scaled ones.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for wrapper in wrappers_of(held):
        if wrapper.shards_gradients:
            raise RuntimeError(
                f"{type(scaler).__name__} decides by the gradients of this rank, and these are "
                "shards, so ranks could skip different steps: use distlab.train.scaler.LossScaler "
                "with distlab.train.step.TrainStep"
            )
        wrapper.check_step(optimizer)


# -- sharded optimizers ----------------------------------------------------------------------------

# Optimizers of torch that update every element by its own gradients and state alone.
_NAMES = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD"
ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES.split()}


def is_elementwise(optimizer_cls: type[Optimizer]) -> bool:
    """Return whether an optimizer's update of an element depends on that element alone.

    So do those of `ELEMENTWISE`, and those whose own class body (not a base's) says
    `elementwise = True`.
    """
    return optimizer_cls in ELEMENTWISE or vars(optimizer_cls).get("elementwise") is True


def takes_shards(optimizer_cls: type[Optimizer]) -> bool:
    """Return whether an optimizer fetches what it needs from other ranks' shards itself.

    Then its own class body says `takes_shards = True`.
    """
    return vars(optimizer_cls).get("takes_shards") is True


def check_zero(module: nn.Module, optimizer_cls: type[Optimizer], elementwise: bool) -> None:
    """Check that ZeRO stage 1 can step parts of this module's parameters with this optimizer.

    Args:
        elementwise: True if the user says that the optimizer is element-wise.

    Raises:
        ValueError: an optimizer that is not known to be element-wise, or a layer that rewrites its
            rows in forward, which the next step would lose.
    """
    if not (elementwise or is_elementwise(optimizer_cls) or takes_shards(optimizer_cls)):
        raise ValueError(
            f"{optimizer_cls.__name__} is not known to be element-wise, and here it sees parts of "
            "parameters: give elementwise=True if every element's update depends on that element "
            "alone, else use ShardedOptimizer, which keeps parameters whole (for L-BFGS, all of "
            "them: a data-parallel wrapper alone)"
        )
    refuse_renormalising(module, "ZeroOptimizer")


def refuse_renormalising(module: nn.Module, strategy: str) -> None:
    """Check that no layer rewrites its rows in forward, each rank those of its own batch.

    Raises:
        ValueError: one does. The ranks' weights would differ from then on.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "max_norm", None) is not None:
            raise ValueError(
                f"{strategy}: '{name}' renormalises its rows in forward (max_norm), each rank "
                "those of its own batch, so the ranks' weights would differ: leave max_norm out, "
                "and renormalise after optimizer.step()"
            )


def refuse_cut_matrices(optimizer_cls: type[Optimizer]) -> None:
    """Check an optimizer that steps a part of every matrix on each rank (tensor parallelism).

    Raises:
        ValueError: it is not known to be element-wise.
    """
    if not is_elementwise(optimizer_cls):
        raise ValueError(
            f"{optimizer_cls.__name__} is not known to be element-wise, and ranks that share "
            "matrices (layout tp) would each step a part as if it were the whole: take AdamW, or a "
            "layout without tp"
        )


def refuse_lbfgs(optimizer_cls: type[Optimizer]) -> None:
    """Check an optimizer of which each rank steps some parameters.

    Raises:
        ValueError: it is L-BFGS, which steps all parameters together.
    """
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise ValueError(
            "ShardedOptimizer: L-BFGS steps all parameters together, and here a rank steps a share "
            "of them: use it without ShardedOptimizer, over the parameters of a data-parallel "
            "wrapper"
        )


def check_group(group: ProcessGroup, parameters: Iterable[nn.Parameter]) -> None:
    """Check that a `ShardedOptimizer` has the ranks of the wrapper that trains its parameters.

    Raises:
        ValueError: it has others.
    """
    ours = dist.get_process_group_ranks(group)
    for wrapper in wrappers_of(parameters):
        others = dist.get_process_group_ranks(wrapper.process_group)
        if others != ours:
            raise ValueError(
                f"ShardedOptimizer: the parameters belong to a wrapper on ranks {others}, and this "
                f"would share their updates among ranks {ours}: leave process_group out, or build "
                "an optimizer for each wrapper"
            )


def refuse_other_groups(saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> None:
    """Check that the groups of a saved state hold these parameters.

    Raises:
        ValueError: they hold others, or in another order.
    """
    if [list(group["params"]) for group in saved] != [list(group) for group in names]:
        raise ValueError(
            "the saved groups hold other parameters, or in another order, than this optimizer's"
        )


# -- FSDP: wrap ------------------------------------------------------------------------------------


def check_compute_dtype(dtype: Any) -> None:
    """Check that a compute dtype is None or a floating-point `torch.dtype`.

    Raises:
        ValueError: it is neither.
    """
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ValueError(
            f"compute_dtype={dtype!r}: give a floating-point torch.dtype such as torch.bfloat16, "
            "or None"
        )


def check_meta(on_meta: bool, init_fn: Any, device: Any) -> None:
    """Check that a module on meta comes with `init_fn` and `device`, and no other module does.

    Raises:
        ValueError: they are missing, or given for a module that has its values.
    """
    if on_meta and (init_fn is None or device is None):
        raise ValueError(
            "FSDP: the module lies on meta and has no values: give init_fn=… to make them, and "
            "device=…"
        )
    if not on_meta and (init_fn is not None or device is not None):
        raise ValueError(
            "FSDP: init_fn and device are for a module built on meta; this one has its values"
        )


def check_callable(module: nn.Module, is_called: bool) -> None:
    """Check that the wrapped module has a forward, in which parameters can be gathered.

    Raises:
        ValueError: it has none, such as an `nn.ParameterList`.
    """
    if not is_called:
        raise ValueError(
            f"FSDP: {type(module).__name__} has no forward, in which its parameters could be "
            "gathered: wrap the module whose forward reads them"
        )


def check_replaceable(name: str, parameter: nn.Parameter, owners: Iterable[nn.Module]) -> None:
    """Check that nothing is silently lost when a parameter is replaced by its shard.

    Raises:
        ValueError: it is a shard already, carries a hook, or a recurrent module keeps it in a list
            of its own.
    """
    if getattr(parameter, "made_by_fsdp", False):
        raise ValueError(
            f"FSDP: '{name}' is wrapped already: call close() on that wrapper first (if it was "
            "deleted without close(), this module has shards only: build the module anew)"
        )
    if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
        raise ValueError(
            f"FSDP: '{name}' carries a gradient hook (of a data-parallel wrapper, perhaps), which "
            "would never fire again: remove it, or close() that wrapper, first"
        )
    if any(isinstance(owner, nn.RNNBase) for owner in owners):
        raise ValueError(
            f"FSDP: '{name}' belongs to a torch.nn recurrent module, which computes with a list of "
            "parameters of its own; FSDP serves modules that use their attributes"
        )


def refuse_compiled(module: nn.Module, units: Iterable[tuple[str, nn.Module]]) -> None:
    """Check that no unit is inside a compiled graph, which would trace its hooks only once.

    A unit that is itself the result of `torch.compile` is allowed.

    Args:
        units: names and modules of the units.

    Raises:
        ValueError: a unit is inside a compiled module, or was compiled in place. It is named.
    """
    what_works = (
        "compile each child of the nn.ModuleList as model.blocks[i] = "
        "torch.compile(model.blocks[i]), and wrap then"
    )
    for name, unit in units:
        if unit._compiled_call_impl is not None:
            raise ValueError(
                f"FSDP: unit '{name}' was compiled in place by its compile(), whose graph would "
                f"contain FSDP's hooks: {what_works}"
            )
        for path, outer in module.named_modules():
            compiled = "_orig_mod" in outer._modules or outer._compiled_call_impl is not None
            contains = outer is not unit and any(inner is unit for inner in outer.modules())
            if compiled and contains:
                raise ValueError(
                    f"FSDP: unit '{name}' lies inside the compiled module '{path}': {what_works}"
                )


def refuse_state_dicts(module: nn.Module, owners: set[nn.Module]) -> list[RemovableHandle]:
    """Let state dicts of every module that contains shards raise, at reading and at loading.

    They would hold one rank's rows under the names of whole matrices, which `torch.save` on rank 0
    and `torch.distributed.checkpoint` take for the whole.

    Args:
        owners: modules that own a shard.
    """
    handles = []
    for part in module.modules():
        if not owners.isdisjoint(part.modules()):
            handles.append(part.register_state_dict_pre_hook(Attached(_refuse_reading)))
            handles.append(part.register_load_state_dict_pre_hook(Attached(_refuse_loading)))
    return handles


def _refuse_reading(*args: Any) -> NoReturn:
    raise RuntimeError(
        "FSDP: state_dict() would hold this rank's shards under the names of the whole parameters: "
        "call full_state_dict() of the wrapper on every rank and save it on one, or use distlab's "
        "Checkpointer"
    )


def _refuse_loading(*args: Any) -> NoReturn:
    raise RuntimeError(
        "FSDP: load_state_dict() of the wrapped module would overwrite this rank's shards: call "
        "load_full_state_dict() of the wrapper with a whole state dict, or use distlab's "
        "Checkpointer"
    )


# -- FSDP: forward ---------------------------------------------------------------------------------


def check_owned(owned: Iterable[tuple[str, nn.Module, str, nn.Parameter]]) -> None:
    """Check that modules still have the parameters that FSDP gave them.

    Args:
        owned: name, module, attribute and parameter.

    Raises:
        RuntimeError: an attribute is another parameter now.
    """
    for name, module, attribute, parameter in owned:
        if module._parameters.get(attribute) is not parameter:
            raise RuntimeError(
                f"FSDP: '{name}' is another parameter than when the module was wrapped "
                "(functional_call, a layer tied or replaced), and forward would not compute with "
                "it: close() this wrapper, change the module, wrap it again and build the "
                "optimizer anew; "
                "load_full_state_dict() takes other values"
            )


# -- FSDP: gradient and finish ---------------------------------------------------------------------


def check_kept_unedited(named: Named) -> None:
    """Check gradients that backward has made and finish has not averaged.

    Raises:
        RuntimeError: one was changed or replaced.
    """
    name = find_edited(named)
    if name is not None:
        raise RuntimeError(
            f"FSDP: the gradient of '{name}' was changed between backward and "
            "finish_gradient_synchronization(), when it is not the mean yet: clip and edit "
            "gradients after finish; zero_grad(set_to_none=True) drops them"
        )


def check_still_trained(trained: Iterable[tuple[str, nn.Parameter, bool]]) -> None:
    """Check that no shard was frozen or unfrozen after wrapping.

    Args:
        trained: name, shard, and whether it was trained when the module was wrapped.

    Raises:
        ValueError: `requires_grad` of one has changed.
    """
    for name, shard, was_trained in trained:
        if shard.requires_grad != was_trained:
            raise ValueError(
                f"requires_grad of '{name}' changed after wrapping, which would not reach its "
                "unit: close() this wrapper, change it, wrap the module again, and build the "
                "optimizer anew"
            )


def check_no_hooks(named: Named) -> None:
    """Check that no parameter that forward does not read carries a gradient hook.

    Raises:
        ValueError: one does.
    """
    for name, parameter in named:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"FSDP: a gradient hook on '{name}' never fires, as forward reads what is gathered "
                "of it: remove it, and see its `.grad` after finish_gradient_synchronization()"
            )


# -- FSDP: step ------------------------------------------------------------------------------------


def check_shards_finished(has_unfinished: bool) -> None:
    """Check that no gradient waits for finish.

    Args:
        has_unfinished: True if there are gradients of a backward since the last finish.

    Raises:
        RuntimeError: there are.
    """
    if has_unfinished:
        raise RuntimeError(
            "FSDP: call finish_gradient_synchronization() after backward, before optimizer.step(); "
            "backward passes under no_sync() are sent by the next one outside it"
        )


def check_shards_unedited(named: Named) -> None:
    """Check the gradients of shards and vectors since finish.

    Raises:
        RuntimeError: one was changed or replaced.
    """
    name = find_edited(named)
    if name is not None:
        raise RuntimeError(
            f"FSDP: the gradient of '{name}' was edited or replaced after "
            "finish_gradient_synchronization(), by what this rank alone sees: clip by "
            "fsdp.clip_grad_norm_(max_norm); edits that treat each element by itself "
            "(clip_grad_value_) go inside `with fsdp.elementwise_gradient_edits():`"
        )


def check_optimizer_of_rows(optimizer: Optimizer) -> None:
    """Check an optimizer that sees this rank's rows of matrices.

    Raises:
        ValueError: it has matrices, and is neither known to be element-wise nor takes shards.
    """
    if is_elementwise(type(optimizer)) or takes_shards(type(optimizer)):
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.ndim >= 2 for parameter in held):
        raise ValueError(
            f"{type(optimizer).__name__} is not known to be element-wise, and here it sees this "
            "rank's rows of matrices: write `elementwise = True` into its class if every element's "
            "update depends on that element alone, else keep parameters whole: a data-parallel "
            "wrapper with ShardedOptimizer"
        )


# -- parameters in a flat buffer -------------------------------------------------------------------


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's memory, and the tensor's first element there."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def refuse_assigned(placed: Iterable[tuple[str, Tensor, tuple[int, int]]]) -> None:
    """Check that parameters still have their place in the flat buffer that is sent and stepped.

    Args:
        placed: name, parameter and its place.

    Raises:
        RuntimeError: one has other memory since. Copying it into its place would overwrite a
            `p.data` that the user keeps in order to assign it again.
    """
    for name, parameter, place in placed:
        if place_of(parameter) != place:
            raise RuntimeError(
                f"'{name}' is sharded and was given other memory (p.data = …, "
                "vector_to_parameters, swap_tensors): write values in place, p.data.copy_(values), "
                "and keep copies, p.detach().clone(), to restore"
            )
