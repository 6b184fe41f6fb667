"""The optimizer of a check: its class, its state on the ranks, and its steps in one process.

The ranks read their optimizer's state after each step, and gather it when the training has ended.
Rank 0 gives the ranks' gradients, which are known to be right, to an optimizer of the same class in
one process. So the noise of forward and backward is in both, and only the optimizer's own rounding
is left to allow for. `judge.py` compares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distlab.bench.task import blamed, factory_of
from distlab.bench.wrappers import UserWrapper, whole_tensor
from distlab.check.expected import Right
from distlab.check.jobs import Jobs
from distlab.check.messages import exchange
from distlab.check.tensors import SLACK, Tensors, parameters_of, plain, wide
from distlab.comm import RankContext
from distlab.parallel import ParallelModel, stepped
from distlab.parallel.shard import Shard

States = dict[str, Tensors]  # parameter → kind of state, such as exp_avg → tensor
Taken = list[tuple[Shard, Tensors]]  # shard of a parameter, and this rank's state of it


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of `torch.optim` with this name, in any case, or a user's.

    Args:
        name: such as `adamw`, or `package.module:Class`.

    Raises:
        ValueError: there is no such class.
    """
    if ":" in name:
        found = factory_of(name, "--optimizer")
        if not isinstance(found, type) or not issubclass(found, Optimizer):
            raise ValueError(f"--optimizer {name}: give a class derived from torch.optim.Optimizer")
        return found
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    for each in classes:
        if issubclass(each, Optimizer) and each.__name__.lower() == name.lower():
            return each
    raise ValueError(
        f"--optimizer {name}: torch.optim has no such class; give one of its classes, such as "
        "adamw, or your own as package.module:Class"
    )


# -- on the ranks ----------------------------------------------------------------------------------


def state_here(model: ParallelModel, optimizer: Optimizer) -> Taken:
    """Return copies of this rank's state of each parameter. Nothing is sent."""
    held: dict[Tensor, Mapping[str, Any]] = {}
    # An optimizer that shards its state often keeps it in another one, such as `optim` of torch's
    # ZeroRedundancyOptimizer.
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    # The state of the inner optimizer has precedence, because it is the one that is used.
    for each in (optimizer, *inner):
        held.update(each.state)
    taken = []
    for shard in stepped(model, optimizer):
        state = {}
        for kind, value in held.get(shard.tensor, {}).items():
            # A count may be a number or a tensor of one element, and is compared as a tensor.
            if isinstance(value, Tensor):
                state[kind] = value.detach().clone()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                state[kind] = torch.tensor(float(value))
        taken.append((shard, state))
    return taken


@torch.no_grad()
def whole_state(model: ParallelModel, taken: Taken, own: RankContext) -> States:
    """Return the whole of each state that this rank has a part of. A collective."""
    whole: States = {}
    to_gather: dict[tuple[str, str], Tensor] = {}
    parts = {}  # (parameter, kind) → (first element, values), of a shard that this rank alone has
    shapes = {}
    for shard, state in taken:
        name = plain(shard.name)
        shapes[name] = shard.shape
        # A DTensor knows how to gather itself, so it is not put together by hand.
        is_part = not shard.replicated and not hasattr(shard.tensor, "full_tensor")
        for kind, value in state.items():
            # A state without the shape of the parameter, such as a count, is whole on every rank.
            per_element = value.shape == shard.tensor.shape
            is_cut = isinstance(model, UserWrapper) and model.is_cut(shard.name, shard.tensor)
            if hasattr(value, "full_tensor") or (per_element and is_cut):
                to_gather[shard.name, kind] = value
            elif per_element and is_part:
                parts[name, kind] = (shard.start, value.flatten().cpu())
            else:
                whole.setdefault(name, {})[kind] = value.cpu()
    everyone = exchange(own, (set(to_gather), parts))
    # Gathering is a collective, so only what every rank has a part of is gathered.
    for name, kind in sorted(set.intersection(*(keys for keys, _ in everyone))):
        value = to_gather[name, kind]
        gathered = model.whole(name, value) if isinstance(model, UserWrapper) else None
        gathered = whole_tensor(value) if gathered is None else gathered
        whole.setdefault(plain(name), {})[kind] = gathered.cpu().clone()
    for _, of_rank in everyone:
        for (name, kind), (start, values) in of_rank.items():
            if name not in shapes:
                continue
            state = whole.setdefault(name, {})
            if kind not in state:
                # NaN marks elements that no rank has, and fails every comparison.
                state[kind] = torch.full(shapes[name], math.nan, dtype=values.dtype)
            state[kind].view(-1)[start : start + len(values)] = values
    return whole


# -- in one process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stepped:
    """Result of steps in one process.

    Attributes:
        states: for each step, the optimizer's state after it.
        updates: for each step, by how much it changes each parameter, in fp64.
    """

    states: list[States]
    updates: list[Tensors]


@torch.no_grad()
def step_alone(
    jobs: Jobs,
    starts: Sequence[Tensors],
    gradients: Sequence[Tensors],
    *,
    exact: bool = True,
    moved: bool = False,
) -> Stepped:
    """Step an optimizer in one process.

    Args:
        starts: for each step, parameters before it.
        gradients: for each step, gradients by parameter. One that is missing is None.
        exact: True to compute in fp64, False in the dtypes of the parameters.
        moved: True to move each gradient by its last bit, up or down at random.
    """
    # The CPU is enough for two steps of an optimizer, and has fp64 at full speed.
    module = jobs.task.build(jobs.seed, torch.device("cpu"))
    named = parameters_of(module)
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    if exact:
        module.double()
    cls = jobs.optimizer
    # A class that does not treat all parameters alike has groups of its own.
    params = cls.split(module) if hasattr(cls, "split") else list(module.parameters())
    generator = torch.Generator().manual_seed(0)
    states, updates = [], []
    with blamed(cls.__name__, "its step in one process", "--optimizer"):
        optimizer = cls(params, lr=jobs.task.lr)
        for start, of_step in zip(starts, gradients, strict=True):
            before = {}
            for name, parameter in named.items():
                parameter.copy_(start[name])
                before[name] = wide(parameter).clone()
                parameter.grad = None
                # The optimizer skips a parameter whose gradient is None.
                if name in of_step:
                    gradient = of_step[name].to(parameter.dtype)
                    if moved:
                        # The random sign is ±1 for each element.
                        up = torch.randint(0, 2, gradient.shape, generator=generator) * 2 - 1
                        gradient = gradient * (1 + up * torch.finfo(dtypes[name]).eps)
                    parameter.grad = gradient.clone()
            optimizer.step()
            now: States = {}
            after = {}
            for name, parameter in named.items():
                after[name] = wide(parameter) - before[name]
                now[name] = {}
                for kind, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                        now[name][kind] = wide(torch.as_tensor(value)).clone()
            states.append(now)
            updates.append(after)
    return Stepped(states, updates)


class Alone:
    """An optimizer in one process, given one rank's gradients, and the error that it may have.

    Args:
        gradients: for each step, as in `step_alone`.
    """

    def __init__(self, jobs: Jobs, starts: Sequence[Tensors], gradients: Sequence[Tensors]):
        self._exact = step_alone(jobs, starts, gradients)
        self._others = [
            # The first differs by the rounding of the parameters' dtype, the second by that of the
            # gradients.
            step_alone(jobs, starts, gradients, exact=False),
            step_alone(jobs, starts, gradients, moved=True),
        ]

    def state(self, step: int, name: str, dtype: torch.dtype) -> dict[str, Right]:
        """Return the right state of a parameter after a step, from 1 on.

        Kinds that are not finite in the parameter's dtype are left out: in fp16 a square can be
        too small.
        """
        found = {}
        for kind, value in self._exact.states[step - 1][name].items():
            others = [each.states[step - 1][name].get(kind) for each in self._others]
            right = _allowed(value, others, dtype)
            if right is not None:
                found[kind] = right
        return found

    def update(self, step: int, name: str, dtype: torch.dtype) -> Right | None:
        """Return the change of a parameter in a step. None if it is not finite in its dtype."""
        others = [each.updates[step - 1][name] for each in self._others]
        return _allowed(self._exact.updates[step - 1][name], others, dtype)


def _allowed(value: Tensor, others: Sequence[Tensor | None], dtype: torch.dtype) -> Right | None:
    """Return a value and the error that rounding may cause in it, None if one is not finite.

    The noise is measured: `others` are the same value, computed in the parameters' dtype and from
    gradients that were moved by their last bit. It is measured once, so as in `Expected` an element
    may be off by six times the largest, and the root mean square by four times its own.
    """
    noise = torch.zeros_like(value)
    for other in others:
        if other is None or not other.isfinite().all() or not value.isfinite().all():
            return None
        noise = torch.maximum(noise, (other - value).abs())
    if not value.numel():
        return None
    info = torch.finfo(dtype)
    # An optimizer may keep its state in fp32 although the parameters are in half precision.
    eps = min(info.eps, torch.finfo(torch.float32).eps)
    floor = SLACK * eps * value.abs().max().item() + info.smallest_normal
    few = 1 + 2 / math.sqrt(value.numel())
    return Right(
        value,
        torch.full_like(value, floor + 6 * noise.max().item()),
        floor + 4 * few * noise.square().mean().sqrt().item(),
    )
