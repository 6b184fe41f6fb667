"""The gradients of one data-parallel wrapper, from backward over finish to the optimizer's step.

    forward ─ backward ───────────────── finish_gradient_synchronization() ─ optimizer.step()
    before_forward │ accept, per gradient │ begin_finish … end_finish        │ check_step

Edits are noticed at no cost in memory traffic: torch counts a tensor's in-place changes in its
`_version`, which is compared with what it was. What a parameter gets that only some ranks used is
in `distlab.parallel.buckets.UsedFlags`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distlab.parallel import order
from distlab.parallel.guards import hooks
from distlab.parallel.guards.module import Guard, Named

if TYPE_CHECKING:
    from distlab.parallel.data_parallel import DataParallel

Version = tuple[Tensor, int]  # a gradient, and how often it had been changed in place


class GradientGuard(Guard):
    """Asked by a wrapper once per event; knows what is still to be finished.

    Args:
        wrapper: which holds its guard and is not held by it.

    Attributes:
        shards_gradients: whether finish leaves the mean in this rank's part of each gradient, and
            leftovers elsewhere (`watch_parts`). Element-wise edits do no harm then. A function of
            the whole gradient (`torch.nn.utils.clip_grad_norm_`) gives another result on each rank,
            and a backward that adds to it mixes means with leftovers.
        sent_early: whether the wrapper has sent, before its finish, what backward had not brought
            (`order.send_begun`).
    """

    def __init__(self, wrapper: DataParallel):
        super().__init__(wrapper, wrapper.named)
        self._trainable, self._frozen = wrapper.trainable, wrapper.frozen
        self._optimizer: weakref.ref[Optimizer] | None = None  # which alone knows the parts
        self.sent_early = False
        self._pending = False  # a synchronised forward was not finished
        # gradients of synchronised backward passes that were not finished
        self._ready: dict[int, Version] = {}
        # gradients of backward passes under no_sync() since the last finish
        self._unsent: set[int] = set()
        self._in_backward = False  # stays True after a backward that raised

    # -- forward and backward ------------------------------------------------------------------------------

    def before_forward(self, synchronizes: bool) -> None:
        """Called before a forward with gradients; recovers from a backward that raised, or that was dropped."""
        dropped = self._ready and all(self._trainable[index].grad is None for index in self._ready)
        # not inside of it
        if (self._in_backward or dropped) and torch._C._current_graph_task_id() == -1:
            self._recover()
        self._pending |= synchronizes

    def accept(self, index: int, synchronizes: bool) -> bool:
        """Called when backward has made the gradient of `trainable[index]`; returns whether it is to be averaged now.

        Raises:
            TypeError: a sparse gradient.
            RuntimeError: one that came twice, too late, on top of a mean, or with a graph of its
                own.
        """
        gradient, name = self._trainable[index].grad, self.named[index][0]
        noted = getattr(gradient, "synchronized_version", None)
        if self.shards_gradients and noted is not None and gradient._version == noted + 1:
            raise _not_zeroed(name)  # the addition is the only change
        if not synchronizes or gradient is None:
            self._unsent.add(index)
            return False
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of '{name}' is sparse; data parallelism here averages dense gradients: "
                "build the embedding with sparse=False"
            )
        if self.sent_early:
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
            self._in_backward = True
            order.begun[self._wrapper()] = None
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self._ready[index] = gradient, gradient._version
        return True

    def may_send(self, index: int) -> bool:
        """Note the gradient that is about to be sent; returns whether the wrappers ahead have sent all of theirs."""
        # a view of a bucket, where the strategy has packed it
        gradient = self._trainable[index].grad
        self._ready[index] = gradient, gradient._version
        return len(order.begun) == 1 or order.may_send(self._wrapper())

    def _backward_ended(self) -> None:
        """Autograd calls this when a backward ends.

        If it was nested (in a reentrant checkpoint), wait for the outer one: what runs next there
        says when that one ends.
        """
        around = torch._C._current_autograd_node()
        following = (
            [node for node, _ in around.next_functions if node and node.next_functions]
            if around
            else []
        )
        self._in_backward = bool(following)
        for node in following:
            node.register_prehook(self._enter_outer_backward)

    def _enter_outer_backward(self, _: Any) -> None:
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _recover(self) -> None:
        """After a backward that raised or was dropped, before anything new is accumulated: complete its collectives, so
        that all ranks have issued the same sequence again, and drop its gradients, which are
        worthless.
        """
        for parameter in self._trainable:
            parameter.grad = None
        self._pending = True
        self._ready.clear()
        self._wrapper().finish_gradient_synchronization()
        for parameter in self._trainable:  # those that came from other ranks
            parameter.grad = None

    # -- finish --------------------------------------------------------------------------------------------

    def begin_finish(self) -> bool:
        """Return whether there is anything to finish.

        Raises:
            ValueError: the module trains a parameter now that was frozen, or not there, at
                construction.
            RuntimeError: a gradient was changed after backward, when it may have been sent.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"'{name}' was frozen when the module was wrapped and requires a gradient now, which would "
                    "not be averaged: close() this wrapper and wrap the module again"
                )
        if self._registrations != hooks.registrations:
            self.check_unchanged()
        # Gradients may have been put into `.grad` by hand; those of passes under `no_sync()` wait
        # for the one outside.
        by_hand = not (self._unsent or self.shards_gradients)
        if not (self._pending or self._ready or (by_hand and find_edited(self.named))):
            return False
        for index, (gradient, version) in self._ready.items():
            if self._trainable[index].grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of '{self.named[index][0]}' was changed between backward and "
                    "finish_gradient_synchronization(), when it may have been sent: clip and edit gradients after "
                    "finish, and register hooks before wrapping; zero_grad() drops this step's"
                )
        if len(order.begun) > 1:
            order.send_begun(self.process_group)
        if len(self._ready) < len(self._trainable):
            self.refuse_sending_again()
        return True

    def end_finish(self) -> None:
        """Note that the wrapper has finished, or has failed to."""
        for parameter in self._trainable:
            if parameter.grad is not None:
                # operations in place count it up
                parameter.grad.synchronized_version = parameter.grad._version
        self._pending = self._in_backward = self.sent_early = False
        self._ready.clear()
        self._unsent.clear()
        order.begun.pop(self._wrapper(), None)

    # -- step ----------------------------------------------------------------------------------------------

    def check_step(self, optimizer: Optimizer | None = None) -> None:
        """Raise RuntimeError for gradients that are not finished, or what takes a part for the whole: another
        optimizer, or an edit since finish.
        """
        if self._ready or any(self._trainable[index].grad is not None for index in self._unsent):
            raise RuntimeError(
                f"{type(self._wrapper()).__name__}: this step would use gradients that are not averaged over the ranks "
                "yet: call finish_gradient_synchronization() after backward, before optimizer.step(); backward passes "
                "under no_sync() are sent by the next one outside it"
            )
        if (
            self._optimizer is not None
            and optimizer is not None
            and self._optimizer() is not optimizer
        ):
            raise RuntimeError(
                "these gradients are reduce-scattered, and each rank has the mean of a part only: step with the "
                f"ZeroOptimizer that was made last for this wrapper, not with {type(optimizer).__name__}; for "
                "another optimizer close() the wrapper and wrap the module again"
            )
        name = find_edited(self.named) if self.shards_gradients and not self._editing else None
        if name is not None:
            raise RuntimeError(
                f"the gradient of '{name}' is not as finish_gradient_synchronization() left it; only this "
                "rank's part of it is the mean, so that torch.nn.utils.clip_grad_norm_ and the like see a part "
                "of the whole: clip by ZeroOptimizer.clip_grad_norm_(max_norm), and make edits that are right "
                "element by element inside `with optimizer.elementwise_gradient_edits():`"
            )

    # -- gradients of which only this rank's part is the mean ------------------------------------------------

    def watch_parts(self, optimizer: Optimizer) -> None:
        """From now on only this rank's part of each gradient is a mean, which this optimizer alone may use."""
        self.shards_gradients, self._optimizer = True, weakref.ref(optimizer)

    def note(self) -> None:
        """Take edited gradients for the means; one that was replaced is copied to its place."""
        if self.shards_gradients:
            self._wrapper().adopt_gradients()
            self.end_finish()

    def refuse_sending_again(self) -> None:
        """Raise RuntimeError for a gradient that backward has not reached, and that was averaged and not zeroed."""
        for index, (name, parameter) in enumerate(self.named if self.shards_gradients else ()):
            noted = getattr(parameter.grad, "synchronized_version", None)
            if index not in self._ready and noted is not None and parameter.grad._version == noted:
                raise _not_zeroed(name)


def _not_zeroed(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of '{name}' was not zeroed since the last finish_gradient_synchronization(), "
        "and the mean that it holds is that of this rank's part only, which cannot be added to: call zero_grad() "
        "before every step's first backward, and use no_sync() for all but the last backward of a step to "
        "accumulate"
    )


def find_edited(named: Named) -> str | None:
    """Name a parameter whose gradient was changed or replaced since finish, or None; to drop one is no edit."""
    for name, parameter in named:
        gradient = parameter.grad
        if (
            gradient is not None
            and getattr(gradient, "synchronized_version", None) != gradient._version
        ):
            return name
    return None
