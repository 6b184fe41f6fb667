"""The buckets of a `BucketedDDP` under ZeRO stage 1: gradients reduce-scattered, parameters gathered.

    bucket b    │ parameter 7 │ parameter 6        │ parameter 5 │ padding │
    slices      │ rank 0          │ rank 1          │ rank 2              │

Parameters are moved into flat buffers laid out like the gradient buckets, and a rank has the same slice of both. Slices
end inside parameters: rank 1 above has a shard of parameter 6 and nothing else, rank 2 the rest of it and all of
parameter 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.parallel import step_guard
from distlab.parallel.buckets import GradientBucket, adopt_foreign_gradients, write_used_flags
from distlab.parallel.data_parallel import Attached
from distlab.parallel.in_flight import in_flight_class
from distlab.parallel.shard import Shard, place_of, plain_name, refuse_assigned

if TYPE_CHECKING:
    from distlab.parallel.bucketed import BucketedDDP


class ShardedBuckets:
    """A rank's shards of a wrapper's buckets: how they are made, reduced and gathered.

    Between `start_gathering()` and `wait()` a parameter is in flight (`in_flight.py`): reading it in Python waits.
    Hooks wait before that, module by module.

    After a reduce-scatter a parameter's `.grad` holds the mean in this rank's shard, and leftovers elsewhere.
    Element-wise edits do no harm. A function of the whole gradient (`torch.nn.utils.clip_grad_norm_`) gives another
    result on each rank, and a backward that adds to it mixes means with leftovers. Both are noticed, see `step_guard`:
    each gradient here has its own version counter, and `.grad` is the very view of its bucket once it is averaged.

    Args:
        ddp: the wrapper; its plan is padded to equal slices and has no flags, which are sent separately.
        buckets: of its gradients.

    Attributes:
        named: the trainable parameters and their names.
        shards: by parameter, this rank's shard: 1-D (0-D of a scalar, as its optimizer's state must be), a
            view of the flat buffer, perhaps empty, and a parameter to the optimizer.
        starts: by parameter, its shard's first element, counted in the order of the parameter's memory.
        received: where this rank's slice of each bucket's mean arrives.
        optimizer: which alone knows what part of the gradients to use.
    """

    def __init__(self, ddp: BucketedDDP, buckets: Sequence[GradientBucket]):
        self._group = ddp.process_group
        self._rank = self._group.rank()
        self._buckets = buckets
        self.named = list(zip(ddp.trainable_names, ddp.trainable, strict=True))
        self._views = {p: view for bucket in buckets for p, view in zip(bucket.parameters, bucket.views, strict=True)}
        self.optimizer: weakref.ref[Optimizer] | None = None
        self._gathering: dict[int, Work] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._owned: list[tuple[nn.Parameter, nn.Parameter, Tensor]] = []  # with a shard that is not empty, its mean
        self.starts: dict[nn.Parameter, int] = {}
        values: dict[nn.Parameter, nn.Parameter] = {}
        self._flat = [self._move(number, bucket, values) for number, bucket in enumerate(buckets)]
        self.shards = {
            p: Shard(plain_name(name), p.shape, self.starts[p] if p.is_contiguous() else None, values[p])
            for name, p in self.named
        }
        self._means_in_buckets = [bucket.buffer[bucket.plan.slice_of(self._rank)] for bucket in buckets]
        self._in_place = collectives.shards_in_place(ddp.device, self._group)
        self.received = [
            mean if self._in_place else torch.empty_like(mean) for mean in self._means_in_buckets
        ]
        self._placed = [(name, parameter, place_of(parameter)) for name, parameter in self.named]
        self._flags = torch.empty(len(ddp.trainable), device=ddp.device)
        self._classes = [self._in_flight_classes(number) for number in range(len(self._flat))]
        self._wait_outside_graph = torch.compiler.disable(self.wait)
        self._compiled: set[nn.Module] = set()  # compiled modules that a hook waits for
        self._hooks = list(self._hook_forward(ddp))

    @torch.no_grad()
    def _move(
        self, number: int, bucket: GradientBucket, values: dict[nn.Parameter, nn.Parameter]
    ) -> Tensor:
        """Move the parameters of a bucket into one buffer; note this rank's shards of them, and where means lie."""
        plan = bucket.plan
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=bucket.buffer.device)
        for position, view in enumerate(plan.views(flat, bucket.parameters)):
            parameter = bucket.parameters[position]
            parameter.data = view.copy_(parameter)
            start, stop = plan.shard_range(position, self._rank)
            here = slice(plan.offsets[position] + start, plan.offsets[position] + stop)
            shape = parameter.shape if parameter.ndim == 0 and start < stop else (-1,)
            values[parameter] = nn.Parameter(flat[here].view(shape))
            if start < stop:
                self._owned.append((parameter, values[parameter], bucket.buffer[here].view(shape)))
            self._bucket_of[parameter], self.starts[parameter] = number, start
        return flat

    def _in_flight_classes(self, number: int) -> list[tuple[nn.Parameter, type, type | None]]:
        """Of a bucket: (parameter, its class, its class in flight). All of one class share their class in flight."""
        arrive, parameters = partial(self.wait, {number}), self._buckets[number].parameters
        one_of_each = {type(parameter): parameter for parameter in parameters}
        made = {kind: in_flight_class(parameter, arrive) for kind, parameter in one_of_each.items()}
        return [(parameter, type(parameter), made[type(parameter)]) for parameter in parameters]

    def take_means(self) -> None:
        """After the reduce-scatters: put what arrived into place, and adopt gradients that only other ranks have."""
        for mean, received in zip(self._means_in_buckets, self.received, strict=True):
            if received is not mean:
                mean.copy_(received)
        parameters, views = [*self._views], [*self._views.values()]
        write_used_flags(self._flags, parameters)
        work = collectives.all_reduce_mean(self._flags, self._group)
        collectives.wait(work, self._group, "averaging gradients")
        adopt_foreign_gradients(self._flags, parameters, views)
        self.note_gradients()

    def point_gradients(self) -> None:
        """Let each shard's `.grad` be its part of the mean, or None where no rank used the parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # no parameter in flight was assigned
            refuse_assigned(self._placed)
        for parameter, tensor, mean in self._owned:
            tensor.grad = None if parameter.grad is None else mean

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Send this rank's slices on their way, the first layers' first (they lie in the last bucket)."""
        step_guard.send_begun(self._group)
        for number in reversed(range(len(self._flat))):
            flat = self._flat[number]
            own = flat[self._buckets[number].plan.slice_of(self._rank)]
            own = own if self._in_place else own.clone()
            self._gathering[number] = collectives.all_gather(flat, own, self._group)
            for parameter, _, in_flight in self._classes[number]:
                if in_flight is not None:
                    parameter.__class__ = in_flight
        self.wait({n for n, classes in enumerate(self._classes) if any(c is None for _, _, c in classes)})

    def wait(self, buckets: set[int] | None = None) -> None:
        """Wait until the parameters of these buckets are whole; None waits for all."""
        for number in tuple(self._gathering) if buckets is None else buckets:
            work = self._gathering.get(number)
            if work is None:
                continue
            collectives.wait(work, self._group, "gathering parameters")
            for parameter, original, _ in self._classes[number]:
                parameter.__class__ = original
            # Last: another thread that reads meanwhile, or after an error, must find what to wait for.
            self._gathering.pop(number, None)

    def close(self) -> None:
        """Wait for the parameters and detach the hooks."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- gradients that are means in this rank's shard only ------------------------------------------------

    def note_gradients(self) -> None:
        """The gradients are as they should be now."""
        step_guard.note_gradients(self._views)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if another one is about to use them."""
        if self.optimizer is not None and self.optimizer() is not optimizer:
            raise RuntimeError(
                "these gradients are reduce-scattered, and each rank has the mean of a part only: step with the "
                f"ZeroOptimizer that was made last for this wrapper, not with {type(optimizer).__name__}; for "
                "another optimizer close() the wrapper and wrap the module again"
            )

    def check_added(self, index: int) -> None:
        """Called when a backward has added to the gradient of parameter `index`.

        Raises:
            RuntimeError: to one that was averaged before and not zeroed since: the addition is the only change.
        """
        name, parameter = self.named[index]
        if step_guard.changes_since(parameter.grad) == 1:
            raise _not_zeroed(name)

    def check_sent_again(self, reached: Container[int]) -> None:
        """Called before all gradients are sent, those too that backward has not `reached`.

        Raises:
            RuntimeError: one of these was averaged before and not zeroed since.
        """
        for index, (name, parameter) in enumerate(self.named):
            if index not in reached and step_guard.changes_since(parameter.grad) == 0:
                raise _not_zeroed(name)

    def check_unedited(self) -> None:
        """Called before a step.

        Raises:
            RuntimeError: a gradient was edited or replaced since it was averaged.
        """
        name = step_guard.find_edited(self.named)
        if name is not None:
            raise RuntimeError(
                f"the gradient of '{name}' is not as finish_gradient_synchronization() left it; only this "
                "rank's part of it is the mean, so that torch.nn.utils.clip_grad_norm_ and the like see a part "
                "of the whole: clip by ZeroOptimizer.clip_grad_norm_(max_norm), and make edits that are right "
                "element by element inside `with optimizer.elementwise_gradient_edits():`"
            )

    @contextmanager
    def elementwise_edits(self) -> Iterator[None]:
        """Changes inside are right element by element. A gradient that was replaced is copied to its place.

        Raises:
            RuntimeError: a gradient was edited before.
        """
        self.check_unedited()
        yield
        with torch.no_grad():
            for parameter, view in self._views.items():
                if parameter.grad is not None and parameter.grad is not view:
                    parameter.grad = view.copy_(parameter.grad)
        self.note_gradients()

    # -- when forward waits --------------------------------------------------------------------------------

    def _hook_forward(self, wrapper: nn.Module) -> Iterator[RemovableHandle]:
        """Let modules wait for what they need, before their forward and not in front of everybody's.

        - A module waits for its own parameters, or without autograd for all: torch's modules then take shortcuts
          that ask their children's parameters whether they are ordinary tensors.
        - `torch.compile(module)` waits for all that lies in it, since its graph may have been made without hooks.
        - The wrapper waits for all before a forward that runs other compiled code or TorchScript, and after every
          forward, as what follows (a compiled loss over `model.head.weight`) may be compiled.
        """
        root = wrapper.module
        yield wrapper.register_forward_pre_hook(self._before_wrapper)
        yield wrapper.register_forward_hook(self._after_wrapper)
        for module in root.modules():
            is_compiled = _is_compiled_form(module)
            if is_compiled:
                self._compiled.add(module)
            needed = self._buckets_of(module, recurse=is_compiled)
            if needed or module is root:
                yield module.register_forward_pre_hook(Attached(partial(self._before_module, needed)))

    def _buckets_of(self, module: nn.Module, recurse: bool) -> set[int]:
        return {self._bucket_of[p] for p in module.parameters(recurse) if p in self._bucket_of}

    def _before_module(self, needed: set[int], *_: Any) -> None:
        if self._gathering and not torch.compiler.is_compiling():
            self.wait(needed if torch.is_grad_enabled() else None)

    def _before_wrapper(self, wrapper: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the wrapper itself is being compiled
            self._wait_outside_graph()
        elif self._gathering and self._runs_below_python(wrapper.module):
            self.wait()

    def _after_wrapper(self, wrapper: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.wait()

    def _runs_below_python(self, root: nn.Module) -> bool:
        """Whether a module, which may have been compiled since the last forward, reads parameters unseen by hooks."""
        script = torch.jit.ScriptModule
        modules: list[nn.Module | None] = [root]
        for module in modules:  # which grows meanwhile
            if module is None or module in self._compiled:
                continue
            children = module._modules
            if module._compiled_call_impl is not None or "_orig_mod" in children or isinstance(module, script):
                return True
            modules += children.values()
        return False


def _not_zeroed(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of '{name}' was not zeroed since the last finish_gradient_synchronization(), "
        "and the mean that it holds is that of this rank's part only, which cannot be added to: call zero_grad() "
        "before every step's first backward, and use no_sync() for all but the last backward of a step to "
        "accumulate"
    )


def _is_compiled_form(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` returns."""
    return "_orig_mod" in module._modules
