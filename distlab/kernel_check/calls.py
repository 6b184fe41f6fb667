"""How a user's kernel is called: with the tensors, and with what else its signature asks for.

    def attention(q, k, v, causal, sm_scale)      attention(q, k, v, causal=True, sm_scale=1/√D)
    def rms_norm(x, weight, eps=1e-6)             rms_norm(x, weight, eps=1e-05)
    class Softmax(torch.autograd.Function)        Softmax.apply(x, -1)
        def forward(ctx, x, dim)

The names of such parameters differ from project to project, see `NAMES`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from distlab.kernel_check.operations import OfTensors, Operation

Function = Callable[..., Any]

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
# Name of an option or a constant → names that a kernel's parameter for it may have.
NAMES = {
    "is_causal": ("is_causal", "causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "eps": ("eps", "epsilon", "variance_epsilon"),
    "dim": ("dim", "axis"),
    "approximate": ("approximate",),
}


@dataclass(frozen=True)
class Call:
    """A kernel as a function of the operation's tensors alone.

    Attributes:
        function: function to call.
        by_position: arguments after the tensors.
        by_name: arguments by their name.
    """

    function: Function
    by_position: tuple[Any, ...] = ()
    by_name: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *tensors: Tensor) -> Any:
        """Call the kernel."""
        return self.for_sizes(tensors)(*tensors)

    def for_sizes(self, tensors: Sequence[Tensor]) -> Function:
        """Return the same call for tensors of these sizes, which can be timed.

        Without further arguments this is the kernel itself. Otherwise the arguments are found here,
        and not in the call.
        """

        def value_of(given: Any) -> Any:
            return given.value(tensors) if isinstance(given, OfTensors) else given

        more = [value_of(given) for given in self.by_position]
        named = {name: value_of(given) for name, given in self.by_name}
        if more:
            return lambda *tensors: self.function(*tensors, *more, **named)
        return partial(self.function, **named) if named else self.function

    def form(self, operation: Operation) -> str:
        """Return the arguments in words, for example `(q, k, v, is_causal=True)`."""
        words = [argument.name for argument in operation.arguments]
        words.extend(str(value) for value in self.by_position)
        words.extend(f"{name}={value}" for name, value in self.by_name)
        return f"({', '.join(words)})"


def call_of(function: Function, operation: Operation) -> Call:
    """Return a function of the operation's tensors alone.

    Options and constants of the operation are given to the parameters with their names. A function
    without a parameter for a constant has it built in. A function without one for an option gets
    the option only if it has one more parameter without a default, or does not tell its parameters.
    Any other does nothing else than this operation.
    """
    is_autograd = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    target = function.apply if is_autograd else function
    try:
        parameters = list(
            inspect.signature(function.forward if is_autograd else function).parameters.values()
        )
    except (TypeError, ValueError):  # for example built-in functions
        return Call(target, by_position=tuple(value for _, value in operation.options))
    has_setup = is_autograd and (
        function.setup_context is not torch.autograd.Function.setup_context
    )
    if is_autograd and not has_setup:
        parameters = parameters[1:]  # ctx
    takes_any_name = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    more = _after_the_tensors(parameters, len(operation.arguments))
    given: dict[str, Any] = {}
    for name, value in (*operation.options, *operation.constants):
        for each in more:
            if each.name in NAMES[name]:
                given[each.name] = value
                break
    for name, value in operation.options:
        if any(each in given for each in NAMES[name]):
            continue
        unnamed = [each for each in more if each.default is Parameter.empty]
        unnamed = [each for each in unnamed if each.name not in given and each.kind in POSITIONAL]
        if takes_any_name:
            given[name] = value
        elif unnamed:
            given[unnamed[0].name] = value
    if is_autograd:  # `apply` takes no names
        return Call(target, by_position=_in_order(more, given))
    return Call(target, by_name=tuple(given.items()))


def _after_the_tensors(parameters: list[Parameter], tensors: int) -> list[Parameter]:
    """Return the parameters that take one value each, without those of the tensors."""
    more = []
    for number, each in enumerate(parameters):
        takes_tensor = each.kind in POSITIONAL and number < tensors
        if not takes_tensor and each.kind in (*POSITIONAL, Parameter.KEYWORD_ONLY):
            more.append(each)
    return more


def _in_order(parameters: list[Parameter], given: dict[str, Any]) -> tuple[Any, ...]:
    """Return values by position, up to the last that is given. Others get their defaults.

    It ends before a parameter that has neither. The call then raises an error that names it.
    """
    values: list[Any] = []
    count = 0
    for each in parameters:
        if each.name in given:
            values.append(given[each.name])
            count = len(values)
        elif each.default is not Parameter.empty:
            values.append(each.default)
        else:
            break
    return tuple(values[:count])
