"""Parameters on their way: the all-gathers of ZeRO-1's flat buffers, and who waits for them.

Between `start()` and `wait()` a parameter is in flight (`in_flight.py`): reading it in Python
waits. Hooks wait before that, module by module, so that the gathers of later layers run under the
forward of earlier ones:

- A module waits for its own parameters, or without autograd for all: torch's modules then take
  shortcuts that ask their children's parameters whether they are ordinary tensors.
- `torch.compile(module)` waits for all that lies in it, since its graph may have been made without
  hooks.
- The wrapper waits for all before a forward that runs other compiled code or TorchScript, and after
  every forward, as what follows (a compiled loss over `model.head.weight`) may be compiled.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.parallel.in_flight import in_flight_class


class Gathering:
    """What is in flight. A copy of the module, which takes its hooks along, has nothing in flight.

    Args:
        wrapper: with a `.module`, whose forwards wait; None for a copy.
        buffers: the parameters of each flat buffer.
        group: of the ranks that gather.

    Attributes:
        works: what is in flight, by the buffer's number.
        at_once: numbers of buffers with a parameter whose class cannot be replaced meanwhile.
    """

    def __init__(
        self,
        wrapper: nn.Module | None = None,
        buffers: Sequence[Sequence[nn.Parameter]] = (),
        group: ProcessGroup | None = None,
    ):
        self._group = group
        self.works: dict[int, Work] = {}
        self._buffer_of = {
            parameter: number for number, each in enumerate(buffers) for parameter in each
        }
        self._classes = [
            self._in_flight_classes(number, each) for number, each in enumerate(buffers)
        ]
        self.at_once = {
            n for n, classes in enumerate(self._classes) if any(c is None for _, _, c in classes)
        }
        self._wait_outside_graph = torch.compiler.disable(self.wait)
        self._compiled: set[nn.Module] = set()  # compiled modules that a hook waits for
        self._needed: dict[nn.Module, set[int]] = {}  # buffers that a module's hook waits for
        self._hooks = [] if wrapper is None else list(self._hook_forward(wrapper))

    def __reduce__(self) -> Any:
        return Gathering, ()

    def _in_flight_classes(
        self, number: int, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[nn.Parameter, type, type | None]]:
        """Return (parameter, its class, its class in flight) for the parameters of a buffer.

        Parameters of one class share their class in flight.
        """
        arrive = partial(self.wait, {number})
        one_of_each = {type(parameter): parameter for parameter in parameters}
        made = {kind: in_flight_class(parameter, arrive) for kind, parameter in one_of_each.items()}
        return [(parameter, type(parameter), made[type(parameter)]) for parameter in parameters]

    def start(self, number: int, work: Work) -> None:
        """Expect the values of this buffer's parameters when `work` is done."""
        self.works[number] = work
        for parameter, _, in_flight in self._classes[number]:
            if in_flight is not None:
                parameter.__class__ = in_flight

    def wait(self, buffers: set[int] | None = None) -> None:
        """Wait until the parameters of these buffers are whole; None waits for all."""
        for number in tuple(self.works) if buffers is None else buffers:
            work = self.works.get(number)
            if work is None:
                continue
            collectives.wait(work, self._group, "gathering parameters")
            for parameter, original, _ in self._classes[number]:
                parameter.__class__ = original
            # Last: another thread that reads meanwhile, or after an error, must find what to wait
            # for.
            self.works.pop(number, None)

    def close(self) -> None:
        """Wait for the parameters and detach the hooks."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- when forward waits --------------------------------------------------------------------------------

    def _hook_forward(self, wrapper: nn.Module) -> Iterator[RemovableHandle]:
        root = wrapper.module
        yield wrapper.register_forward_pre_hook(self._before_wrapper)
        yield wrapper.register_forward_hook(self._after_wrapper)
        for module in root.modules():
            is_compiled = "_orig_mod" in module._modules  # what torch.compile(module) returns
            if is_compiled:
                self._compiled.add(module)
            needed = {
                self._buffer_of[p] for p in module.parameters(is_compiled) if p in self._buffer_of
            }
            if needed or module is root:
                self._needed[module] = needed
                # The same function for every module. Dynamo guards on a hook's constant arguments,
                # so hooks with different ones would make it compile every block anew, and give up
                # at the ninth.
                yield module.register_forward_pre_hook(self._before_module)

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # first: a graph must not be guarded by what is in flight
            return
        if self.works:
            self.wait(self._needed[module] if torch.is_grad_enabled() else None)

    def _before_wrapper(self, wrapper: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the wrapper itself is being compiled
            self._wait_outside_graph()
        elif self.works and self._runs_below_python(wrapper.module):
            self.wait()

    def _after_wrapper(self, wrapper: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self.works:
            self.wait()

    def _runs_below_python(self, root: nn.Module) -> bool:
        """Whether a module, which may have been compiled since the last forward, reads parameters unseen by hooks."""
        script = torch.jit.ScriptModule
        modules: list[nn.Module | None] = [root]
        for module in modules:  # which grows meanwhile
            if module is None or module in self._compiled:
                continue
            children = module._modules
            if (
                module._compiled_call_impl is not None
                or "_orig_mod" in children
                or isinstance(module, script)
            ):
                return True
            modules += children.values()
        return False
