"""Two training steps on the ranks, under the strategy or the user's wrapper."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.bench.task import blamed
from distlab.bench.wrappers import UserWrapper, whole_tensor
from distlab.check.jobs import STEPS, Jobs
from distlab.check.messages import exchange
from distlab.check.norm import Norm
from distlab.check.optimizer import States, state_here, whole_state
from distlab.check.tensors import Tensors, copies, plain, wide
from distlab.check.where import Calls, Trace
from distlab.comm import RankContext
from distlab.comm.rank_process import is_lost_peer
from distlab.parallel import ParallelModel, stepped
from distlab.parallel.shard import local_part
from distlab.train.step import Loss, TrainStep


@dataclass(frozen=True)
class Trained:
    """Tensors of one rank by name. Sharded ones are gathered from all ranks."""

    initial: Tensors  # parameters and buffers
    gradients: list[Tensors]  # for each step, the gradients
    norms: list[Norm]  # for each step, the gradient norm
    values: Tensors  # parameters in the second step, after its backward
    final: Tensors  # parameters and buffers
    loss: float
    finish: str
    can_accumulate: bool
    # name → (first element, number) that only this rank's optimizer steps
    owned: dict[str, list[tuple[int, int]]]
    absent: list[set[str]]  # for each step, the parameters without a gradient
    states: list[States]  # for each step, the optimizer's state after it
    calls: Calls  # results of each module; empty if nothing was recorded
    # pairs of names that were one tied parameter before the module was wrapped, and are two now
    untied: list[tuple[str, str]]


def train(own: RankContext, group: ProcessGroup, jobs: Jobs, micro_batches: int) -> Trained:
    """Train two steps under the strategy.

    Raises:
        ValueError, TimeoutError: as in `check`.
    """
    task, strategy = jobs.candidate, jobs.strategy
    with _explained(strategy.name, own.timeout_s):
        # Each rank draws other weights, so a missing broadcast shows.
        module = task.build(jobs.seed + own.rank, own.device)
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        size_mb = num_bytes / 2**20 / 4  # at least four buckets
        tied = _tied(module)
        trace = Trace(module)  # with the names that modules have before they are wrapped
        model, optimizer = strategy.build(
            module, group, jobs.optimizer, {"lr": jobs.task.lr}, bucket_size_mb=size_mb
        )
        untied = _untied(tied, module)
        initial = copies(model.full_parameters(), module)
        gradients, absent, norms, values, taken = [], [], [], {}, []

        def keep(phase: str) -> None:
            # The step calls this at the end of each phase, and the optimizer's phase comes last.
            if phase == "optimizer":
                taken.append(state_here(model, optimizer))
                return
            whole, without = _whole_gradients(model, own)
            gradients.append(whole)
            absent.append(without)
            norms.append(_norm_of(model))
            if len(gradients) == STEPS:
                # Not right after the first step: reading them there would wait for messages that
                # the next forward may have forgotten to wait for.
                values.update(copies(model.full_parameters()))

        numbers = count(0)  # numbers the micro-batches of all steps

        def loss_fn(model: nn.Module, batch: Any) -> Loss:
            # The batches are those of the running step, from the loop below.
            step, micro_batch = divmod(next(numbers), len(batches))
            trace.begin(step + 1, micro_batch + 1)
            return task.loss_fn(model, batch)

        train_step = TrainStep(model, optimizer, loss_fn, mark=keep)
        losses = []
        with trace.hooked() if jobs.where else nullcontext():
            for step in range(STEPS):
                batches = jobs.batches(task, own.rank, step, micro_batches, own.device)
                losses.append(train_step(batches))
        final = copies(model.full_parameters(), module)
        owned = _owned(model, optimizer)
        states = [whole_state(model, each, own) for each in taken]
        # The module stays wrapped, because no code uses it afterwards.
        model.close(restore=False)
    # A strategy of the lab has no function to finish, and can accumulate.
    finish = getattr(model, "finish", "")
    can_accumulate = getattr(model, "can_accumulate", True)
    return Trained(
        initial,
        gradients,
        norms,
        values,
        final,
        losses[-1].item(),
        finish,
        can_accumulate,
        owned,
        absent,
        states,
        trace.calls,
        untied,
    )


def _tied(module: nn.Module) -> list[tuple[str, str]]:
    """Return for each further name of a tied parameter its first name and this one."""
    first_names: dict[nn.Parameter, str] = {}
    pairs = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if first != name:
            pairs.append((plain(first), plain(name)))
    return pairs


def _untied(pairs: list[tuple[str, str]], module: nn.Module) -> list[tuple[str, str]]:
    """Return the pairs of names that the module now has for two parameters."""
    now = {plain(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    found = []
    for first, second in pairs:
        # A wrapper may rename a parameter, and then there is nothing to compare.
        both_there = first in now and second in now
        if both_there and now[first] is not now[second]:
            found.append((first, second))
    return found


@torch.no_grad()
def _whole_gradients(model: ParallelModel, own: RankContext) -> tuple[Tensors, set[str]]:
    """Return the gradient of every trainable parameter on this rank; sharded ones are gathered.

    Returns:
        The gradients, and the names of the parameters that have none, for which they are zero.
    """
    model.gradients()  # under ZeRO-1, lets shards have their gradients
    whole, trained = {}, set()
    parts = {}  # name → (first element, values); a rank may have no element of a parameter
    for shard in model.shards():
        tensor, name = shard.tensor, plain(shard.name)
        if not tensor.requires_grad:
            continue
        # Zeros stand for a missing gradient, so that all ranks gather tensors of one shape.
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if shard.replicated or hasattr(tensor, "full_tensor"):
            whole[name] = _whole(model, name, gradient).cpu().clone()
        else:
            whole[name] = torch.zeros(shard.shape, dtype=gradient.dtype)
            parts[name] = (shard.start, shard.like(name, gradient).values.cpu().clone())
        if tensor.grad is not None:
            trained.add(name)
    everyone = exchange(own, (trained, parts))
    if not any(trained for trained, _ in everyone):
        raise ValueError(
            "no parameter of the module got a gradient: a wrapper must train the module it is given"
        )
    for of_rank, their_parts in everyone:
        for name, (start, values) in their_parts.items():
            # Each rank's part is copied to its place in the whole tensor.
            whole[name].view(-1)[start : start + len(values)] = values
        # A parameter counts as trained if any rank with a part of it has a gradient.
        trained |= of_rank & their_parts.keys()
    return whole, whole.keys() - trained


def _whole(model: ParallelModel, name: str, tensor: Tensor) -> Tensor:
    """Return the whole of a parameter, or of a tensor that is cut like it. A collective."""
    if isinstance(model, UserWrapper):
        return model.whole(name, tensor)
    return whole_tensor(tensor)


@torch.no_grad()
def _norm_of(model: ParallelModel) -> Norm:
    """Return the norm that the wrapper gives, and the sizes of this rank's shards."""
    value, before_factor = None, False
    if isinstance(model, UserWrapper):
        value, before_factor = model.own_norm()
    shards: dict[str, float] = {}
    for shard in model.shards():
        placements = getattr(shard.tensor, "placements", ())
        is_sharded = not shard.replicated or any(each.is_shard() for each in placements)
        if isinstance(model, UserWrapper):
            is_sharded = is_sharded or model.is_cut(shard.name, shard.tensor)
        # The norm is of gradients, so a shard without one adds nothing.
        if is_sharded and shard.tensor.grad is not None:
            local = wide(local_part(shard.tensor.grad))
            shards[plain(shard.name)] = local.square().sum().item()
    return Norm(value, before_factor, shards)


def _owned(
    model: ParallelModel, optimizer: torch.optim.Optimizer
) -> dict[str, list[tuple[int, int]]]:
    """Return the parts of parameters that this rank's optimizer steps and others do not."""
    found: dict[str, list[tuple[int, int]]] = {}
    for shard in stepped(model, optimizer):
        if not shard.replicated and not hasattr(shard.tensor, "full_tensor"):
            found.setdefault(plain(shard.name), []).append((shard.start, shard.tensor.numel()))
    return found


@contextmanager
def _explained(name: str, timeout_s: float) -> Iterator[None]:
    """Turn an error on this rank into one sentence."""
    try:
        with blamed(name, "the training step", "under"):
            yield
    except ValueError as error:
        if error.__cause__ is None or not is_lost_peer(error.__cause__):
            # Only a rank that waited in vain needs another sentence.
            raise
        raise TimeoutError(
            f"under {name}, a rank waited {timeout_s:g} s (--timeout) in a collective that the "
            "others did not join: "
            "every rank must make the same calls in the same order"
        ) from error
