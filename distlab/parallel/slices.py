"""Parameters in flat buffers laid out like gradient buckets, of which each rank owns a slice (ZeRO stage 1).

    bucket b    │ parameter 7 │ parameter 6        │ parameter 5 │ padding │
    slices      │ rank 0          │ rank 1          │ rank 2              │

A slice cuts through parameters: rank 1 above owns a piece of parameter 6 and nothing else, rank 2 the rest of it and
all of parameter 5.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.in_flight import in_flight_class


class Piece:
    """The part of one parameter that this rank owns.

    Args:
        parameter: its values, 1-D (a scalar parameter's 0-D, as its optimizer state must be), a view of the flat
            buffer, and a parameter to the optimizer.
        gradient: where its part of the mean gradient arrives, of the same shape.
        start: its first element within the flattened whole parameter.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor, start: int):
        self.parameter = parameter
        self.gradient = gradient
        self.start = start

    def cut(self, value: Any, numel: int) -> Any:
        """This piece of a whole parameter's state; what is not one number per element is kept as it is."""
        if isinstance(value, Tensor) and value.ndim > 0 and value.numel() == numel:
            return value.flatten()[self.start : self.start + self.parameter.numel()]
        return value


class SlicedParameters:
    """Makes a wrapper's parameters views of flat buffers, and gathers the buffers when slices have changed.

    Between `start_gathering()` and `wait()` a parameter is in flight (`in_flight.py`): reading it in Python waits.
    The hooks of `hook_forward` wait before that, module by module.

    Args:
        ddp: reduce-scatters from now on (`BucketedDDP.shard_gradients`).
    """

    def __init__(self, ddp: BucketedDDP):
        ddp.shard_gradients()
        self._group = ddp.process_group
        self._plan = ddp.plan
        self._gathering: dict[int, Work] = {}
        self.pieces: dict[nn.Parameter, list[Piece]] = {parameter: [] for parameter in ddp.trainable}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._flat = [self._move(number, ddp) for number in range(len(ddp.plan))]
        self._classes = [self._in_flight_classes(number) for number in range(len(self._flat))]
        self._wait_outside_graph = torch.compiler.disable(self.wait)
        self._compiled: set[nn.Module] = set()  # compiled modules that a hook waits for

    @torch.no_grad()
    def _move(self, number: int, ddp: BucketedDDP) -> Tensor:
        """Move the parameters of a bucket into one buffer; note this rank's pieces."""
        plan, rank = self._plan[number], self._group.rank()
        parameters = [ddp.trainable[slot.index] for slot in plan.slots]
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=ddp.device)
        for parameter, view in zip(parameters, plan.views(flat, parameters), strict=True):
            parameter.data = view.copy_(parameter)
            self._bucket_of[parameter] = number
        low, _ = plan.shard_range(rank)
        for slot, start, stop in plan.segments(rank):
            whole = ddp.trainable[slot.index]
            shape = whole.shape if whole.ndim == 0 else (-1,)
            values = nn.Parameter(flat[slot.offset + start : slot.offset + stop].view(shape))
            first = slot.offset + start - low
            gradient = ddp.gradient_shards[number][first : first + stop - start].view(shape)
            self.pieces[whole].append(Piece(values, gradient, start))
        return flat

    def _in_flight_classes(self, number: int) -> list[tuple[nn.Parameter, type, type | None]]:
        """Of a bucket: (parameter, its class, its class in flight). All of one class share their class in flight."""
        arrive = partial(self.wait, {number})
        made: dict[type, type | None] = {}
        for parameter in (p for p, bucket in self._bucket_of.items() if bucket == number):
            if type(parameter) not in made:
                made[type(parameter)] = in_flight_class(parameter, arrive)
        return [(p, type(p), made[type(p)]) for p, bucket in self._bucket_of.items() if bucket == number]

    def all_pieces(self) -> list[Piece]:
        """This rank's pieces of all parameters."""
        return [piece for pieces in self.pieces.values() for piece in pieces]

    def point_gradients(self) -> None:
        """Let each piece's `.grad` be its part of the mean, or None where no rank used the parameter."""
        for parameter, pieces in self.pieces.items():
            for piece in pieces:
                piece.parameter.grad = None if parameter.grad is None else piece.gradient

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Send this rank's slices on their way, the first layers' first (they lie in the last bucket)."""
        in_place = collectives.shards_in_place(self._flat[0].device, self._group)
        for number in reversed(range(len(self._flat))):
            flat = self._flat[number]
            own = flat[slice(*self._plan[number].shard_range(self._group.rank()))]
            self._gathering[number] = collectives.all_gather(
                flat, own if in_place else own.clone(), self._group
            )
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

    # -- when forward waits --------------------------------------------------------------------------------

    def hook_forward(self, wrapper: nn.Module) -> Iterator[RemovableHandle]:
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
                # A function, which deepcopy(module) takes over as it is: a bound method's object it would copy.
                yield module.register_forward_pre_hook(lambda *_, needed=needed: self._before_module(needed))

    def _buckets_of(self, module: nn.Module, recurse: bool) -> set[int]:
        return {self._bucket_of[p] for p in module.parameters(recurse) if p in self._bucket_of}

    def _before_module(self, needed: set[int]) -> None:
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


def _is_compiled_form(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` returns."""
    return "_orig_mod" in module._modules


def join(pieces: list[tuple[int, dict[str, Any]]], shape: torch.Size) -> dict[str, Any]:
    """Put the optimizer states of a parameter's pieces, (first element, state), together to that of the whole."""
    in_order = [state for _, state in sorted(pieces, key=lambda piece: piece[0])]
    return {
        key: torch.cat([state[key] for state in in_order]).view(shape)
        if isinstance(value, Tensor) and value.ndim > 0
        else value
        for key, value in in_order[0].items()
    }
