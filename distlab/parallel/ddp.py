"""The life of one training step under data parallelism, shared by all our DDPs.

    forward ─ backward ─────────────────────── finish_gradient_synchronization() ─ optimizer.step()
              │ hook per parameter                │
              │  └ _gradient_ready(index)         └ _synchronize()
              └ messages leave in plan order

    IDLE ──► FORWARD ──► BACKWARD ──► ENDED ──► IDLE        print(ddp.step) says where a step is

Equality. Afterwards each trainable parameter's `.grad` is the mean over ranks of the local
gradients. A missing gradient (None) counts as zero. A parameter that no rank used keeps
`.grad = None`.

Order. All ranks send the same messages in one order, that of the plan, whatever order their hooks
fire in (`DataParallel._send_complete`).

A strategy is a subclass. `naive.py` is the shortest one. `checks.py` has the refusals.
"""

import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distlab.comm import agreement, collectives
from distlab.parallel import checks
from distlab.parallel.model import ParallelModel
from distlab.parallel.shard import Shard, whole

NO_BACKWARD = -1  # torch's number of the running backward, if none is running


class Phase(Enum):
    """Phase of a step."""

    IDLE = "idle"  # nothing to average
    FORWARD = "forward"  # a synchronised forward has run, so every rank will average
    BACKWARD = "backward"  # autograd is running, or has raised
    ENDED = "backward ended"  # messages that were complete have left; finish sends the rest


@dataclass
class Step:
    """State of one wrapper's step; one gradient or message is named by its place in the plan.

    Attributes:
        phase: phase of the step.
        ready: gradients that backward has made since the last finish, by parameter index, each with
            its state at that moment.
        accumulated: indices of the parameters that a backward inside no_sync() has reached since
            the last finish.
        unsent: messages that may leave before finish and have not left, in plan order. Finish sends
            them, and then fills it with those of the next step.
        sent_early: True if messages have left before their gradients arrived, because another
            wrapper on the same ranks had to send (`send_unfinished`).
    """

    phase: Phase = Phase.IDLE
    ready: dict[int, tuple[Tensor, checks.State]] = field(default_factory=dict)
    accumulated: set[int] = field(default_factory=set)
    unsent: deque[Any] = field(default_factory=deque)
    sent_early: bool = False

    def __repr__(self) -> str:
        return (
            f"Step({self.phase.value}: {len(self.ready)} gradients ready, {len(self.unsent)} "
            f"messages unsent, {len(self.accumulated)} gradients accumulated inside no_sync())"
        )


class DataParallel(checks.StaysAsWrapped, ParallelModel):
    """Base class of our DDPs.

    Construction compares the model across ranks, then broadcasts parameters and buffers from rank
    0. Buffers are not synchronised in forward: call `sync_buffers()` before evaluating or saving.

    Args:
        module: any `nn.Module` whose trainable parameters are on one device.
        mesh: (replicas, ranks of a shard group), such as hosts and their GPUs: gradients are
            averaged in two levels (`distlab.comm.two_level`). Default: in one.
        process_group: all ranks. Default: the default group.

    Attributes:
        named: trainable parameters with names, in registration order; a tied one once.
        trainable: the same parameters without names. Their positions are the indices of the plan.
        frozen: the other parameters, with names.
        step: state of the step.
        is_closed: True after `close()`.

    Raises:
        TypeError: a mesh that is not a DeviceMesh.
        ValueError: a mesh of other dimensions or ranks (see `resolve_mesh`), nothing to train,
            parameters on several devices, an uninitialized parameter, two parameters that share
            memory, a trainable one that is no real floating-point number, an embedding with
            `max_norm` on several ranks, a model that is wrapped already, or ranks that disagree on
            names, shapes, dtypes, strides or `requires_grad` (then on every rank).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.module, self.mesh = module, mesh
        self.is_closed = False
        self._two_level = None
        if mesh is None:
            self.process_group = collectives.resolve_group(process_group)
        else:
            from distlab.comm.subgroups import resolve_mesh
            from distlab.comm.two_level import TwoLevelAllReduce

            groups = resolve_mesh(mesh, process_group)
            self.process_group = groups.world
            if groups.replicate is not None and groups.shard.size() > 1:
                self._two_level = TwoLevelAllReduce(groups)
        agreement.prepare(self.process_group)
        checks.check_module(module, type(self).__name__, self.process_group)
        self.named: list[tuple[str, nn.Parameter]] = []
        self.frozen: list[tuple[str, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self.named.append((name, parameter))
            else:
                self.frozen.append((name, parameter))
        self.trainable = [parameter for _, parameter in self.named]
        self.device = self.trainable[0].device
        collectives.broadcast_all([*module.parameters(), *module.buffers()], self.process_group)

        self.step = Step()
        # None if the flags are part of the messages
        self._used: UsedFlags | None = self._separate_flags()
        # The mean of each gradient, until finish; also of those that this rank does not have.
        self._means: dict[int, Tensor] = {}
        self._zero: weakref.ref[Optimizer] | None = None  # set by `BucketedDDP.shard_for`
        # Hooks hold the wrapper weakly, so that dropping the wrapper ends its communication.
        reference = weakref.ref(self)
        self._handles: list[RemovableHandle] = []
        self._trained_ids = checks.watch(self, self._handles)
        for index, parameter in enumerate(self.trainable):
            hook = partial(self._on_gradient, reference, index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    # -- what a strategy decides -------------------------------------------------------------------

    def _gradient_ready(self, index: int) -> None:
        """Take the gradient of `trainable[index]`, which is complete in this backward."""

    def _is_complete(self, message: Any) -> bool:
        """Return whether all gradients of a message of `step.unsent` are ready."""
        return False

    def _send(self, message: Any) -> None:
        """Send a message of `step.unsent`; a gradient that is missing here counts as zero."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Wait for all messages of this step, so that the means are in `.grad`.

        A strategy that sends nothing during backward sends here. One that does has sent everything
        by now, and puts the messages of the next step into `step.unsent`.
        """

    # -- forward and backward ----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; any arguments, any result."""
        if torch.is_grad_enabled():
            if self.step.phase is not Phase.IDLE and self._backward_was_lost():
                self._recover()
            if self.step.phase is Phase.IDLE and not self._accumulates:
                self.step.phase = Phase.FORWARD
        return self.module(*args, **kwargs)

    @staticmethod
    def _on_gradient(
        reference: "weakref.ref[DataParallel]", index: int, parameter: nn.Parameter
    ) -> None:
        """Autograd calls this as soon as the gradient of `trainable[index]` is complete."""
        ddp = reference()
        if ddp is None:
            return  # the wrapper was dropped
        step, name = ddp.step, ddp.named[index][0]
        if step.phase is Phase.ENDED and ddp._was_dropped(reached=index):
            # The step before was skipped, and its gradients were dropped after this forward.
            gradient = parameter.grad
            ddp._recover()
            parameter.grad = gradient
        if ddp.shards_gradients:
            checks.check_not_accumulated(name, parameter.grad, type(ddp.module).__name__)
        if ddp._accumulates:
            step.accumulated.add(index)
            return  # inside no_sync(): the next backward outside it sends the sum
        checks.check_not_taken(name, parameter.grad)
        checks.check_gradient(
            name, parameter.grad, is_ready=index in step.ready, has_left=step.sent_early
        )
        if step.phase is not Phase.BACKWARD:
            step.phase = Phase.BACKWARD
            _unfinished[ddp] = None
            torch.autograd.Variable._execution_engine.queue_callback(ddp._backward_ended)
        ddp._gradient_ready(index)  # from here on, `.grad` may be a view of a bucket
        step.ready[index] = parameter.grad, checks.state_of(parameter.grad)
        ddp._send_complete()

    def _send_complete(self) -> None:
        """Send the next messages of the plan, as far as their gradients are ready."""
        if len(_unfinished) > 1 and self._waits_for_another():
            return
        # In plan order and not in hook order: NCCL and gloo match collectives by position, so two
        # ranks whose hooks fire in different orders would otherwise average different parameters
        # with each other. A message that is complete waits here until those before it have left.
        unsent = self.step.unsent
        while unsent and self._is_complete(unsent[0]):
            self._send(unsent.popleft())

    def _backward_ended(self) -> None:
        """Autograd calls this when a backward ends, unless it raises."""
        self.step.phase = Phase.ENDED
        # A reentrant checkpoint runs a backward inside the backward. Then the outer one goes on,
        # and the operation that it runs next brings us back into its phase.
        outer = torch._C._current_autograd_node()
        if outer is None:
            return
        for node, _ in outer.next_functions:
            if node is not None and node.next_functions:
                self.step.phase = Phase.BACKWARD
                node.register_prehook(self._enter_outer_backward)

    def _enter_outer_backward(self, _: Any) -> None:
        self.step.phase = Phase.BACKWARD
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_was_lost(self) -> bool:
        """Return whether a backward has raised, or its gradients were dropped to skip a step."""
        lost = self.step.phase is Phase.BACKWARD
        if self.step.phase is Phase.ENDED:
            lost = self._was_dropped()
        # A forward inside of a backward recomputes activations.
        return lost and torch._C._current_graph_task_id() == NO_BACKWARD

    def _was_dropped(self, reached: int | None = None) -> bool:
        """Return whether no `.grad` is left of those that the last backward has made.

        Args:
            reached: index of the parameter that the next backward has already given a gradient.
        """
        for index, (gradient, _) in self.step.ready.items():
            now = self.trainable[index].grad
            # A gradient that the user has exchanged for another one is not dropped.
            if now is gradient or (now is not None and index != reached):
                return False
            if index == reached and self._had_gradient(index):
                return False
        return bool(self.step.ready)

    def _had_gradient(self, index: int) -> bool:
        """Return whether backward has replaced a gradient of `trainable[index]` that was there.

        Usually it adds to the tensor in `.grad`, which then stays the same.
        """
        return False

    def _has_gradients(self) -> bool:
        """Return whether there is a `.grad`, of whatever origin."""
        return any(parameter.grad is not None for parameter in self.trainable)

    def _recover(self) -> None:
        """Complete the collectives of a lost backward and drop its gradients.

        All ranks have then issued the same messages again.
        """
        for parameter in self.trainable:
            parameter.grad = None
        self.step.ready.clear()
        self.finish_gradient_synchronization()
        for parameter in self.trainable:  # those of other ranks have arrived
            parameter.grad = None

    # -- finish and step ---------------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over ranks.

        Call it on every rank after backward, before step. Gradients that backward did not make
        (`parameter.grad = …`) are averaged as well. Without any gradient, and without a
        synchronised forward, since the last call it does nothing.

        Raises:
            ValueError: the module trains a parameter now that was frozen, or not there, at
                construction.
            RuntimeError: a gradient was changed after backward, when it may have been sent.
        """
        step = self.step
        checks.check_nothing_joined(self.module, self._trained_ids, self.frozen)
        if step.phase is Phase.IDLE and not self._gradients_were_set():
            if self.shards_gradients and not step.accumulated:
                checks.check_not_set(self.named)
            return
        if step.phase is Phase.ENDED and self._was_dropped() and not self._has_gradients():
            self._recover()  # zero_grad() after backward skips the step, on every rank
            return
        checks.check_unedited(self.named, step.ready)
        if len(_unfinished) > 1:
            send_unfinished(self.process_group)
        is_partial = self.shards_gradients and not self.accumulates_shards
        if is_partial and len(step.ready) < len(self.trainable):
            checks.check_zeroed(self.named, step.ready, type(self.module).__name__)
        try:
            with torch.no_grad():
                while step.unsent:  # in plan order, what backward has not completed
                    self._send(step.unsent.popleft())
                flags = None
                if self._used is not None:
                    flags = self.all_reduce_mean(self._used.write())
                self._synchronize()
                if flags is not None:
                    collectives.wait(flags, self.process_group, "averaging used flags")
                    for index in self._used.used_elsewhere():
                        self._adopt(index)
        finally:
            self._means.clear()
            self._end_step()

    def _adopt(self, index: int) -> None:
        """Give `trainable[index]` the mean of its gradient, which only other ranks have made."""
        self.trainable[index].grad = self.mean_of(index)

    def _gradients_were_set(self) -> bool:
        """Return whether there are gradients that no backward has made.

        Those of passes inside no_sync() wait for a backward outside it.
        """
        if self.step.accumulated or self.shards_gradients:
            return False
        return checks.find_edited(self.named) is not None

    def _end_step(self) -> None:
        step = self.step
        checks.mark_finished(self.named)
        step.phase, step.sent_early = Phase.IDLE, False
        step.ready.clear()
        step.accumulated.clear()
        _unfinished.pop(self, None)

    def check_step(self, optimizer: Optimizer | None = None) -> None:
        """Check the gradients before they are used.

        Args:
            optimizer: optimizer that is about to step.

        Raises:
            RuntimeError: gradients that are not finished. Under ZeRO, also another optimizer, or an
                edit since finish.
        """
        step = self.step
        unsent = any(self.trainable[index].grad is not None for index in step.accumulated)
        checks.check_finished(type(self).__name__, bool(step.ready) or unsent)
        if self.shards_gradients:
            checks.check_optimizer_of_parts(optimizer, self._zero())
            if not self._editing:
                checks.check_parts_unedited(self.named)

    # -- messages ----------------------------------------------------------------------------------

    def all_reduce_mean(self, tensor: Tensor) -> Any:
        """Start to replace a contiguous tensor by its mean over the ranks.

        Returns:
            Message in flight, for `collectives.wait`.
        """
        if self._two_level is not None:
            return self._two_level.start(tensor)
        return collectives.all_reduce_mean(tensor, self.process_group)

    def average(self, index: int) -> Callable[[], None]:
        """Start to replace the gradient of `trainable[index]` by its mean over the ranks.

        A gradient that is missing here counts as zeros.

        Returns:
            Function that waits for the mean.
        """
        parameter = self.trainable[index]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._means[index] = gradient
        sent = gradient.contiguous()  # a copy only of a gradient that has holes in memory
        work = self.all_reduce_mean(sent)

        def wait_for_mean() -> None:
            collectives.wait(work, self.process_group, "averaging gradients")
            if sent is not gradient:
                gradient.copy_(sent)

        return wait_for_mean

    def mean_of(self, index: int) -> Tensor:
        """Return where the mean of the gradient of `trainable[index]` arrives.

        Also for a gradient that only other ranks have.
        """
        return self._means[index]

    def _separate_flags(self) -> "UsedFlags":
        """Return used flags that have a message of their own."""
        return UsedFlags(self.trainable, torch.empty(len(self.trainable), device=self.device))

    # -- several wrappers on the same ranks --------------------------------------------------------

    def _waits_for_another(self) -> bool:
        """Return whether a wrapper that backward reached earlier still has messages to send.

        Another rank, which used all parameters of that wrapper, has sent them already.
        """
        for earlier in _unfinished:
            if earlier is self:
                return False
            if earlier.process_group is self.process_group and earlier.step.unsent:
                return True
        return False

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole state; see `ParallelModel.full_state_dict`."""
        send_unfinished(self.process_group)
        return super().full_state_dict()

    # -- the rest of the interface -----------------------------------------------------------------

    def _take_edited(self) -> None:
        self._end_step()

    def shards(self) -> list[Shard]:
        """Return all parameters, whole."""
        return [whole(name, parameter) for name, parameter in (*self.named, *self.frozen)]

    def close(self, *, restore: bool = True) -> None:
        """Detach every hook.

        The module is as before, except that gradients may still be views of a bucket's memory.
        """
        self.is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _unfinished.pop(self, None)
        checks.release(self)


# Wrappers that backward has reached and that have not finished, in this order (a dictionary used as
# an ordered set). It is module state, as one backward runs through any number of wrappers.
_unfinished: "weakref.WeakKeyDictionary[DataParallel, None]" = weakref.WeakKeyDictionary()


def send_unfinished(group: ProcessGroup) -> None:
    """Let every wrapper of these ranks that backward has reached send all of its step.

    Call it before a collective of another kind on the same ranks. A rank that used all parameters
    has sent these messages during backward, so they come first on all ranks.

    Raises:
        RuntimeError: a sharded gradient was not zeroed since the last finish.
    """
    for wrapper in list(_unfinished):
        if wrapper.process_group is not group:
            continue
        step = wrapper.step
        if wrapper.shards_gradients:
            checks.check_zeroed(wrapper.named, step.ready, type(wrapper.module).__name__)
        step.sent_early = step.sent_early or bool(step.unsent)
        with torch.no_grad():
            while step.unsent:
                wrapper._send(step.unsent.popleft())


class UsedFlags:
    """One flag per parameter, averaged along with the gradients: whether any rank has used it.

    A parameter that this rank did not use is sent as zeros. After the mean, its flag is above zero
    if another rank used it. Then it has a gradient here as well. One that no rank used keeps
    `.grad = None`, and optimizers leave it alone.

    Args:
        parameters: P of them.
        flags: `(P,)`, of any floating-point dtype.

    Attributes:
        unused: positions of the parameters that this rank did not use in this step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flags: Tensor):
        self.flags = flags
        self.unused: list[int] = []
        self._parameters = parameters

    def write(self) -> Tensor:
        """Write 1 for every parameter that has a gradient here, else 0.

        Returns:
            The flags, to be averaged.
        """
        self.unused = []
        self.flags.fill_(1.0)
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self.unused.append(index)
                self.flags[index] = 0
        return self.flags

    def used_elsewhere(self) -> Iterator[int]:
        """Yield positions of parameters that only other ranks used, after the mean has arrived.

        The host reads a flag only on a rank with an unused parameter, so the usual step does not
        block.
        """
        for index in self.unused:
            if self.flags[index].item() > 0:
                yield index
