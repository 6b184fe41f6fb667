"""ZeRO stages 1 and 2: reduce-scatter the gradients, step a slice, all-gather the parameters.

    compute        │ forward │ backward ───────────────── │   │ step 1/N │            │ forward …
    communication  │         │  reduce-scatter b0 │ b1 │ … bn │          │ all-gather │

    reduce   during backward, each bucket as soon as it is full   `ReduceScatter`
    step     this rank's slice of every bucket                    `ZeroOptimizer.step`
    gather   all slices of all buckets                            `Slices.gather`

The optimizer's state, and the work of its step, are divided by the number of ranks N, and nothing
is sent twice: a reduce-scatter and an all-gather are the two halves of the all-reduce they replace
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sec. 5.1 and 7.1).

With `shard_gradients=True` (stage 2) a rank keeps its slice of the mean, and the gradients of a
bucket are freed when it has been sent (`ReduceScatterAndFree`):

    bucket 0   │ filled │ being sent │ freed
    bucket 1            │ filled     │ being sent │ freed
    bucket 2                         │ filled     │ …

With `overlap_gather=True` the all-gather runs under the next forward:

    compute        │ step 1/N │                    │ block 0     │ block 1 │ … │
    communication  │          │ ag outside of blocks │ ag block 0 │ ag block 1 │ … │

Parameters are stored in flat buffers laid out like the gradient buckets. A rank has the same slice
of both:

    bucket b    │ parameter 7 │ parameter 6        │ parameter 5 │ padding │
    slices      │ rank 0          │ rank 1          │ rank 2              │

Slices end inside parameters: rank 1 above has a shard of parameter 6 and nothing else, rank 2 the
rest of it and all of parameter 5. The local optimizer sees 1-D shards, which is why it must be
element-wise, or know what to do with shards (`muon.py`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distlab.comm import collectives
from distlab.comm.agreement import agree_on_call, collective
from distlab.comm.copy_engine import CopyEngineTensors
from distlab.parallel import checks
from distlab.parallel.bucketed import AllReduce, BucketedDDP, GradientBucket, Placement
from distlab.parallel.buckets import BucketPlan
from distlab.parallel.copy_engine import CopyEngineDDP
from distlab.parallel.ddp import send_unfinished
from distlab.parallel.local_optimizer import (
    LocalOptimizer,
    Params,
    load_shards,
    options_of,
    to_cpu,
    with_hooks_of_loading,
    with_hooks_of_saving,
)
from distlab.parallel.shard import Shard, plain_name, view_like
from distlab.parallel.state_dicts import own_state, refuse_other_shapes, refuse_shards


class ZeroOptimizer(LocalOptimizer):
    """An element-wise optimizer, or `distlab.optim.Muon`, over this rank's slices of a model.

    Gradients. After `finish_gradient_synchronization()` a `.grad` holds the mean in this rank's
    shard and leftovers elsewhere. So it must be zeroed before every step's first backward, the norm
    is clipped by `clip_grad_norm_` here, and other edits belong inside
    `elementwise_gradient_edits()`. Everything else raises.

    With `shard_gradients=True`, only the shards have the means after finish (`ddp.gradients()`). A
    tensor without memory stands for them in `.grad`: it can be zeroed, reads give NaN, and edits
    raise. A finish after each micro-batch adds to the means: each is sent, and no full gradient is
    kept. Inside `no_sync()` full gradients are kept as without it.

    Parameters. By default `step()` waits until they are whole. With `overlap_gather=True` it
    returns while they are being gathered. Then each child of an `nn.ModuleList` waits before its
    forward for every parameter in it, and the wrapper's forward waits for all other parameters
    before it begins. Without autograd, and where it runs code that was compiled or scripted other
    than by `torch.compile(block)`, it waits for all. `synchronize()`, and `state_dict()` and
    `load_state_dict()` of the module, also wait for all. Any other read of a parameter between
    `step()` and the next forward needs a call of `synchronize()` first. A forward that reads a
    block's parameter before it has called that block is not seen (`docs/learn/limits.md`).

    Args:
        ddp: wrapper whose buckets and parameters it takes over (`BucketedDDP.shard_for`). Copy
            engines move both if it is a `CopyEngineDDP`.
        optimizer_cls: class such as `torch.optim.AdamW`. If its body says `takes_shards = True`, it
            is given this rank's shards of all parameters, also empty ones, and finds in their
            attribute `spread` which ranks have the rest.
        params: parameters or groups of the wrapped module. Default: all that are trainable, in one
            group.
        elementwise: True if a class that is not torch's treats every element by itself. A class can
            also say so with `elementwise = True` in its body.
        overlap_gather: True gathers parameters under the next forward.
        shard_gradients: True frees each bucket of gradients when it is reduce-scattered (ZeRO-2).
        kwargs: keyword arguments of `optimizer_cls`.

    Raises:
        TypeError: `ddp` is not a `BucketedDDP`.
        ValueError: an optimizer that is not known to be element-wise, a wrapper on a mesh,
            `shard_gradients` of a wrapper of copy engines, a parameter that the wrapper does not
            train, one given twice, or an embedding with `max_norm`.
    """

    def __init__(
        self,
        ddp: BucketedDDP,
        optimizer_cls: type[Optimizer],
        *,
        params: Params | None = None,
        elementwise: bool = False,
        overlap_gather: bool = False,
        shard_gradients: bool = False,
        **kwargs: Any,
    ):
        _check_wrapper(ddp)
        checks.check_zero(ddp.module, optimizer_cls, elementwise)
        self._takes_shards = checks.takes_shards(optimizer_cls)
        self._ddp = ddp
        by_copy = isinstance(ddp, CopyEngineDDP)
        if by_copy and shard_gradients:
            raise ValueError(
                "copy engines need buckets that keep their memory: leave shard_gradients out, or "
                "give ZeroOptimizer a BucketedDDP"
            )
        if by_copy:
            self._exchange = ReduceScatterByCopy(ddp.process_group, ddp.device)
        elif shard_gradients:
            self._exchange = ReduceScatterAndFree(ddp)
        else:
            self._exchange = ReduceScatter(ddp.process_group, ddp.device)
        ddp.shard_for(self, self._exchange, lambda wrapper: Slices(wrapper, overlap_gather))
        self._slices: Slices = ddp.placement
        super().__init__(ddp.trainable if params is None else params, optimizer_cls, kwargs)

    @torch._disable_dynamo  # its checks read versions, which a compiled step would trace once
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's shards and all-gather the parameters.

        Args:
            closure: evaluated once, before the step, with gradients enabled; it must finish the
                synchronisation.
            kwargs: keyword arguments of the local optimizer's `step`.

        Returns:
            The closure's value, or None.

        Raises:
            RuntimeError: gradients were not finished, or edited since outside of
                `elementwise_gradient_edits()`, or the wrapper was closed.
        """
        checks.check_open(self._ddp.is_closed)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Again, although torch's hook has checked: a closure or a hook of this step has run since.
        self._ddp.check_step(self)
        self._copy_options_inwards()
        self._slices.point_gradients()
        # The slices are written through memory of their own, so autograd must be told which
        # parameters change: a graph that has saved one raises in its backward.
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        self.local.step(**kwargs)
        self._slices.gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of the parameters, and free what `shard_gradients` keeps of them."""
        super().zero_grad(set_to_none)
        self._ddp.free_zeroed()

    def elementwise_gradient_edits(self) -> AbstractContextManager[None]:
        """Return a context in which gradients may be edited element by element.

        Use it between `finish_gradient_synchronization()` and `step()`, for example for
        `torch.nn.utils.clip_grad_value_` or a multiplication. An edit that needs all of a gradient
        at once gets another answer on each rank, as only this rank's part is the mean. For the norm
        there is `clip_grad_norm_`.

        Raises:
            RuntimeError: a gradient was edited before.
        """
        return self._ddp.elementwise_gradient_edits()

    def synchronize(self) -> None:
        """Wait until all parameters are whole. Call it before reading them, see the class."""
        self._ddp.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients by their norm over all ranks; see the wrapper's `clip_grad_norm_`."""
        return self._ddp.clip_grad_norm_(max_norm, norm_type)

    @with_hooks_of_saving
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, unpadded and by parameter name.

        An unsharded optimizer over the same parameters can load it. A collective: call it on every
        rank. Every rank gets all of it, on the CPU.
        """
        call = "ZeroOptimizer.state_dict()"
        agree_on_call(self._ddp.process_group, call)
        self._copy_options_inwards()
        mine = {}
        for name, parameter in self._ddp.named:
            state = self.state.get(self._slices.shard_of[parameter].tensor)
            if state:  # a read before the first step leaves an empty one
                mine[name] = to_cpu(state)
        # Parts come in the order of ranks, which is that of the parameter's elements.
        parts: dict[str, list[dict[str, Any]]] = {}
        for states in collectives.gather_objects(mine, self._ddp.process_group, collective(call)):
            for name, state in states.items():
                parts.setdefault(name, []).append(state)
        whole = {}
        for name, parameter in self._ddp.named:
            if name in parts:
                whole[name] = _join(parts[name], parameter)
        return {"state": whole, "param_groups": self._groups_by_name()}

    @with_hooks_of_loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state that was saved at any world size.

        It is by name, or numbered as an unsharded optimizer's, which numbers its parameters in the
        order of its groups. That optimizer had the same groups as this one, or a single one of all
        parameters of the module, frozen ones among them.

        Raises:
            ValueError: groups that hold other parameters, or state in another shape than its
                parameter's.
        """
        refuse_shards(state_dict)
        saved, state_of = self._by_name(state_dict)
        checks.refuse_other_groups(saved, [group["params"] for group in self._groups_by_name()])
        state = {}
        for name, parameter in self._ddp.named:
            if name in state_of:
                refuse_other_shapes(state_of[name], name, parameter)
                tensor = self._slices.shard_of[parameter].tensor
                state[tensor] = own_state(state_of[name], tensor, f"'{name}'")
        load_shards(self, saved, state)

    def shards(self, held: Iterable[Shard]) -> list[Shard]:
        """Return the shards with elements, and parameters that have none on any rank.

        The optimizer counts steps of those as well.
        """
        return [shard for shard in held if shard.tensor.numel() > 0 or shard.shape.numel() == 0]

    def close(self) -> None:
        """Wait for the parameters and detach the hooks; the wrapper has its own `close()`."""
        self._slices.close()

    def _share_of(self, parameter: Tensor) -> Tensor | None:
        shards = self._slices.shard_of
        if parameter not in shards and any(parameter is each.tensor for each in shards.values()):
            return parameter
        shard = shards[parameter]
        return shard.tensor if self._takes_shards or self.shards([shard]) else None

    def _share(self, group: dict[str, Any]) -> dict[str, Any]:
        shard_of = self._slices.shard_of
        for number, parameter in enumerate(group["params"]):
            if parameter not in shard_of:
                raise ValueError(
                    f"parameter {number} of a group, of shape {tuple(parameter.shape)}, is not "
                    "among those that the wrapped module trains. If it was unfrozen or added "
                    "since, close() the wrapper, wrap the module again, and build the optimizer "
                    "over it"
                )
        held = [shard_of[parameter] for parameter in group["params"]]
        if not self._takes_shards:
            held = self.shards(held)
        return group | {"params": [shard.tensor for shard in held]}

    def _by_name(self, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the groups and the state of a state dict, with names in place of numbers.

        Raises:
            ValueError: other numbers of parameters than this optimizer's.
        """
        saved, state = state_dict["param_groups"], state_dict["state"]
        numbers = [group["params"] for group in saved]
        if any(isinstance(number, str) for group in numbers for number in group):
            return saved, state
        names = [group["params"] for group in self._groups_by_name()]
        everything = [name for name, _ in self._ddp.module.named_parameters()]
        sizes = [len(group) for group in numbers]
        name_of: dict[int, str] = {}
        if sizes == [len(group) for group in names]:
            for numbered, named in zip(numbers, names, strict=True):
                name_of |= dict(zip(numbered, named, strict=True))
        elif sizes == [len(everything)] and len(names) == 1:
            name_of = dict(zip(numbers[0], everything, strict=True))
        else:
            raise ValueError(
                f"the saved groups hold {sizes} parameters by number, and this optimizer's groups "
                f"{[len(group) for group in names]} of a module that has {len(everything)}: load a "
                "state whose optimizer had the same groups"
            )
        mine = {name for group in names for name in group}
        groups = []
        for group in saved:
            held = [name_of[number] for number in group["params"]]
            groups.append(group | {"params": [name for name in held if name in mine]})
        return groups, {name_of[number]: value for number, value in state.items()}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        name_of = {parameter: name for name, parameter in self._ddp.named}
        groups = []
        for group in self.param_groups:
            names = [name_of[parameter] for parameter in group["params"]]
            groups.append(options_of(group) | {"params": names})
        return groups


def _check_wrapper(ddp: Any) -> None:
    """Check that ZeRO stage 1 can take this wrapper over.

    Raises:
        TypeError: it is not a `BucketedDDP`.
        ValueError: it is on a mesh.
    """
    if not isinstance(ddp, BucketedDDP):
        raise TypeError(
            f"ZeroOptimizer takes over a BucketedDDP's buckets; got {type(ddp).__name__}"
        )
    if ddp.mesh is not None:
        raise ValueError(
            "ZeroOptimizer shards over all ranks, and this BucketedDDP has a mesh: leave its mesh "
            "out, or take FSDP(module, mesh=…), which shards inside a group"
        )


# -- reduce ----------------------------------------------------------------------------------------


class ReduceScatter(AllReduce):
    """Exchange of slices: each rank gets its slice of the mean, and sends that of the parameters.

    The rest of a bucket holds leftovers. The used flags are sent separately, because every rank
    needs all of them.
    """

    shards_gradients = True
    has_flags = False

    def __init__(self, group: ProcessGroup, device: torch.device):
        self._group, self._device = group, device
        self.slices = group.size()
        self._in_place = collectives.shards_in_place(device, group)
        # This rank's slice of each bucket, and where its mean arrives (on NCCL, in the slice).
        self._slices: dict[GradientBucket, tuple[Tensor, Tensor]] = {}

    def start(self, ddp: BucketedDDP, bucket: GradientBucket) -> Work:
        """See `AllReduce.start`."""
        if bucket not in self._slices:
            own = bucket.buffer[bucket.plan.slice_of(self._group.rank())]
            self._slices[bucket] = (own, own if self._in_place else torch.empty_like(own))
        _, arriving = self._slices[bucket]
        return collectives.reduce_scatter_mean(arriving, bucket.seal(), self._group)

    def finish(self, bucket: GradientBucket) -> None:
        """Put this rank's slice of the mean into the bucket."""
        own, arrived = self._slices[bucket]
        if arrived is not own:
            own.copy_(arrived)

    def mean_slice(self, bucket: GradientBucket) -> Tensor | None:
        """Return this rank's slice of a bucket's mean, `(slice_numel,)`; None before the first."""
        return self._slices[bucket][0] if bucket in self._slices else None

    def parameter_buffers(self, plans: Sequence[BucketPlan]) -> Sequence[Tensor | None]:
        """Return memory for the parameters of each bucket: zeros, or None for ordinary memory."""
        return [None] * len(plans)

    def gather(self, number: int, flat: Tensor, own: Tensor) -> Any:
        """Start to gather the slices of all ranks.

        Args:
            number: number of the bucket.
            flat: `(plan.numel,)`, its parameters.
            own: this rank's slice of them.

        Returns:
            Message in flight, for `collectives.wait`.
        """
        return collectives.all_gather(flat, own if self._in_place else own.clone(), self._group)


class ReduceScatterByCopy(ReduceScatter):
    """Exchange of slices by copy engines, which take no multiprocessor from the computation.

    Gradients and parameters are in memory that all ranks map.
    """

    def buffers(self, plans: Sequence[BucketPlan]) -> list[Tensor]:
        """Return mapped memory for gradients, and allocate that of parameters. A collective."""
        numels = [plan.numel for plan in plans]
        dtypes = [plan.dtype for plan in plans]
        # Tensor b has the gradients of bucket b, and tensor len(plans) + b its parameters.
        self._engine = CopyEngineTensors(numels * 2, dtypes * 2, self._device, self._group)
        self.bytes_outside_allocator = self._engine.num_bytes
        gradients = self._engine.tensors[: len(plans)]
        self._number_of = {id(buffer): number for number, buffer in enumerate(gradients)}
        return gradients

    def parameter_buffers(self, plans: Sequence[BucketPlan]) -> Sequence[Tensor | None]:
        """Return mapped memory for parameters, that of one bucket each."""
        return self._engine.tensors[len(plans) :]

    def start(self, ddp: BucketedDDP, bucket: GradientBucket) -> Any:
        """See `AllReduce.start`."""
        own = bucket.buffer[bucket.plan.slice_of(self._group.rank())]
        self._slices.setdefault(bucket, (own, own))
        return self._engine.reduce_scatter_mean(self._number_of[id(bucket.seal())])

    def gather(self, number: int, flat: Tensor, own: Tensor) -> Any:
        """See `ReduceScatter.gather`."""
        return self._engine.all_gather(len(self._number_of) + number)


class ReduceScatterAndFree(ReduceScatter):
    """Exchange that keeps this rank's slice of each mean, and frees the bucket: ZeRO-2.

    A bucket has memory from its first gradient until the bucket after it is sent. If gradients come
    in the order of the plan, these are two buckets at a time: one is filled, one is being sent.

    From then on, a tensor of NaN without memory stands in `.grad`. It can be dropped and zeroed.
    Every other change of it raises. Before the next backward adds to a gradient, a hook takes the
    stand-in away, and notes whether the user has zeroed it. Means that were not are added to.
    """

    frees_buckets = True

    def __init__(self, ddp: BucketedDDP):
        super().__init__(ddp.process_group, ddp.device)
        self._means: dict[GradientBucket, Tensor] = {}  # sums of the slices that have arrived
        self._arriving: dict[GradientBucket, Tensor] = {}
        self._last_sent: GradientBucket | None = None
        self._stand_ins: dict[nn.Parameter, Tensor] = {}
        self._finished: dict[nn.Parameter, checks.State] = {}  # their states after finish
        self._kept: set[nn.Parameter] = set()  # parameters whose mean the next one is added to
        # Parameters whose stand-in was there when the last backward reached them.
        self._stood: set[nn.Parameter] = set()
        self._hooks = []
        for parameter in ddp.trainable:
            element = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            stand_in = element.expand(parameter.shape)
            stand_in.stands_in = True
            self._stand_ins[parameter] = stand_in
            take_away = checks.Attached(partial(_take_away, weakref.ref(self), parameter))
            self._hooks.append(parameter.register_hook(take_away))

    def stand_in(self, parameter: nn.Parameter) -> Tensor:
        """Return what stands in `.grad` for this parameter's mean."""
        return self._stand_ins[parameter]

    def take_away(self, parameter: nn.Parameter) -> None:
        """Let `.grad` be None if the stand-in is there, and note whether the mean stays."""
        gradient, stand_in = parameter.grad, self._stand_ins[parameter]
        if gradient is None:
            self._kept.discard(parameter)
            self._stood.discard(parameter)
        elif gradient is stand_in:
            parameter.grad = None
            self._stood.add(parameter)
            if checks.state_of(stand_in) == self._finished.get(parameter):
                self._kept.add(parameter)
            else:  # by zero_grad(set_to_none=False)
                self._kept.discard(parameter)
                stand_in.fill_(torch.nan)

    def had_gradient(self, parameter: nn.Parameter) -> bool:
        """See `AllReduce.had_gradient`."""
        return parameter in self._stood

    def start(self, ddp: BucketedDDP, bucket: GradientBucket) -> Work:
        """See `AllReduce.start`."""
        held = []  # positions of parameters whose `.grad` has a value, by now or from before
        for position, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None:
                held.append(position)
            if parameter.grad is None or parameter.grad is self._stand_ins[parameter]:
                self.take_away(parameter)  # this backward has not reached it
        sent = bucket.seal()
        arriving = sent.new_empty(bucket.plan.slice_numel)
        work = collectives.reduce_scatter_mean(arriving, sent, self._group)
        self._arriving[bucket] = arriving
        for position in held:
            parameter = bucket.parameters[position]
            stand_in = self._stand_ins[parameter]
            parameter.grad = stand_in
            index = bucket.plan.indices[position]
            if index in ddp.step.ready:
                ddp.step.ready[index] = stand_in, checks.state_of(stand_in)
        # Wait for the bucket before, and only now: the computation stops until that one has
        # arrived, and meanwhile this one must be waiting to be sent.
        before, self._last_sent = self._last_sent, bucket
        if before is not None:
            ddp.receive(before)
        return work

    def finish(self, bucket: GradientBucket) -> None:
        """Free the bucket, and add its mean to what is kept of earlier ones."""
        bucket.free()
        arrived = self._arriving.pop(bucket)
        mean = self._means.get(bucket)
        if mean is None or self._kept.isdisjoint(bucket.parameters):
            self._means[bucket] = arrived
            return
        rank = self._group.rank()
        for position, parameter in enumerate(bucket.parameters):
            if parameter not in self._kept:
                mean[bucket.plan.place(position, rank)].zero_()
        mean += arrived

    def end_step(self) -> None:
        """See `AllReduce.end_step`."""
        self._last_sent = None
        self._kept.clear()
        self._stood.clear()
        for parameter, stand_in in self._stand_ins.items():
            self._finished[parameter] = checks.state_of(stand_in)

    def is_edited(self, parameter: nn.Parameter) -> bool:
        """Return whether `.grad` was given another value than its stand-in since finish."""
        gradient, stand_in = parameter.grad, self._stand_ins[parameter]
        if gradient is None:
            return False
        return gradient is not stand_in or checks.state_of(stand_in) != self._finished[parameter]

    def mean_slice(self, bucket: GradientBucket) -> Tensor | None:
        """See `ReduceScatter.mean_slice`."""
        return self._means.get(bucket)

    def free_zeroed(self) -> bool:
        """See `AllReduce.free_zeroed`."""
        zeroed = []
        for bucket in self._means:
            if all(parameter.grad is None for parameter in bucket.parameters):
                zeroed.append(bucket)
        for bucket in zeroed:
            del self._means[bucket]
        return bool(zeroed)

    def close(self) -> None:
        """See `AllReduce.close`."""
        for hook in self._hooks:
            hook.remove()
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = None


def _take_away(
    exchange: "weakref.ref[ReduceScatterAndFree]", parameter: nn.Parameter, gradient: Tensor
) -> None:
    """Autograd calls this before it adds a gradient to a parameter's `.grad`."""
    found = exchange()
    if found is not None:
        found.take_away(parameter)


# -- step and gather -------------------------------------------------------------------------------


class Slices(Placement):
    """Parameters moved into flat buffers laid out like the gradient buckets.

    A rank steps the same slice of both.

    Args:
        ddp: wrapper whose buckets are padded to equal slices.
        overlap: True gathers under the next forward; see `ZeroOptimizer`.

    Attributes:
        shard_of: this rank's shard of each parameter: 1-D (0-D of a scalar, as its optimizer's
            state must be), a view of the flat buffer, perhaps empty, and a parameter to the
            optimizer.
    """

    def __init__(self, ddp: BucketedDDP, overlap: bool):
        self._group = ddp.process_group
        self._exchange: ReduceScatter = ddp.exchange
        self.shard_of: dict[nn.Parameter, Shard] = {}
        # The shards that get a gradient, by bucket, and the slice of the mean of which their
        # gradients are views now.
        self._parts: dict[GradientBucket, list[_Part]] = {bucket: [] for bucket in ddp.buckets}
        self._viewed: dict[GradientBucket, Tensor | None] = {}
        names = {parameter: plain_name(name) for name, parameter in ddp.named}
        # Parameters of each bucket, `(plan.numel,)`, and this rank's slice of them.
        memory = self._exchange.parameter_buffers(ddp.plan)
        self._flat = []
        for bucket, flat in zip(ddp.buckets, memory, strict=True):
            self._flat.append(self._move(bucket, names, flat))
        self._placed = [(name, p, checks.place_of(p)) for name, p in ddp.named]
        self._works: dict[int, Work] = {}  # all-gathers in flight, by number of the bucket

        # The first layers' parameters are in the last bucket, and forward needs them first.
        self._order = list(reversed(range(len(ddp.buckets))))
        self._overlap = None
        if overlap:
            held = [bucket.parameters for bucket in ddp.buckets]
            self._overlap = GatherUnderForward(ddp, held, self._works, self.wait)
            # What the wrapper's forward waits for before it begins comes before the blocks.
            self._order.sort(key=lambda number: number not in self._overlap.outside_blocks)

    @torch.no_grad()
    def _move(
        self, bucket: GradientBucket, names: dict[nn.Parameter, str], flat: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Move the parameters of a bucket into one buffer, and note this rank's shards of them.

        Returns:
            The buffer, and this rank's slice of it.
        """
        plan = bucket.plan
        device = bucket.parameters[0].device
        if flat is None:
            flat = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
        own = flat[plan.slice_of(self._group.rank())]
        for position, view in enumerate(plan.views(flat, bucket.parameters)):
            parameter = bucket.parameters[position]
            parameter.data = view.copy_(parameter)
            self._note_shard(bucket, position, own, names[parameter])
        return flat, own

    def _note_shard(self, bucket: GradientBucket, position: int, own: Tensor, name: str) -> None:
        plan, parameter = bucket.plan, bucket.parameters[position]
        rank = self._group.rank()
        start, stop = plan.shard_range(position, rank)
        place = plan.place(position, rank)
        if parameter.ndim == 0 and start < stop:
            # The number of an element gives the view of a scalar, a slice that of a vector.
            place = place.start
        value = nn.Parameter(own[place])
        value.spread = plan.spread(position, parameter, self._group)
        # Muon also asks for the matrices of other ranks. A parameter without elements has a step to
        # count.
        if start < stop or parameter.ndim == 2 or parameter.numel() == 0:
            self._parts[bucket].append(_Part(parameter, value, place))
        first = start if parameter.is_contiguous() else None
        self.shard_of[parameter] = Shard(name, parameter.shape, first, value)

    def shards(self, whole: list[Shard]) -> list[Shard]:
        """Return this rank's shards of the trained parameters, and the others whole.

        Raises:
            RuntimeError: a parameter was given other memory.
        """
        checks.refuse_assigned(self._placed)
        return [self.shard_of.get(shard.tensor, shard) for shard in whole]

    def point_gradients(self) -> None:
        """Let each shard's `.grad` be its part of the mean, or None if no rank used the parameter.

        Waits for the parameters of the last step.

        Raises:
            RuntimeError: a parameter was given other memory.
        """
        if self._works:
            self.wait()
        checks.refuse_assigned(self._placed)
        for bucket, parts in self._parts.items():
            own = self._exchange.mean_slice(bucket)
            if own is not self._viewed.get(bucket):
                self._viewed[bucket] = own
                for part in parts:
                    part.mean = None if own is None else own[part.place]
            for part in parts:
                part.shard.grad = part.mean if part.parameter.grad is not None else None

    def drop_gradients(self) -> None:
        """Let the `.grad` of each shard be None, and let go of the memory."""
        self._viewed.clear()
        for parts in self._parts.values():
            for part in parts:
                part.shard.grad = part.mean = None

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the slices of all ranks. Wait for them, unless gathers overlap."""
        send_unfinished(self._group)  # another wrapper's messages come before ours on every rank
        for number in self._order:
            self._works[number] = self._exchange.gather(number, *self._flat[number])
        if self._overlap is None:
            self.wait()

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until the parameters of these buckets are whole. Default: those of all buckets."""
        for number in tuple(self._works) if numbers is None else numbers:
            work = self._works.get(number)
            if work is not None:
                collectives.wait(work, self._group, "gathering parameters")
                # Forgotten after the wait: another thread that reads meanwhile, or a reader after
                # an error, must find what to wait for.
                self._works.pop(number, None)

    def close(self) -> None:
        """Wait for the parameters and detach the hooks."""
        self.wait()
        if self._overlap is not None:
            self._overlap.close()


@dataclass
class _Part:
    """A shard that gets a gradient.

    Attributes:
        parameter: the whole parameter.
        shard: this rank's elements of it.
        place: index of these elements in this rank's slice of the bucket.
        mean: the shard's gradient, a view of the slice of the mean; None before the first.
    """

    parameter: nn.Parameter
    shard: nn.Parameter
    place: slice | int
    mean: Tensor | None = None


class GatherUnderForward:
    """Hooks that wait for all-gathers during the next forward, block by block.

    - A block is a child of an `nn.ModuleList`. It waits for the parameters in it.
    - The forward of the wrapped module waits for all other parameters before it begins.
    - Without autograd, each of these waits for all, because torch's modules then take shortcuts
      that read the parameters of their children.
    - The wrapper also waits for all before a forward that runs compiled code or TorchScript, whose
      graph has no hooks, and after every forward, because the code that follows may read anything.
      A block that is the result of `torch.compile(block)` is called from Python, so its own hook is
      enough.

    Args:
        ddp: the wrapper.
        buckets: parameters of each bucket.
        works: all-gathers in flight, by number of the bucket.
        wait: function that waits for the buckets of these numbers; None for all.

    Attributes:
        outside_blocks: numbers of the buckets with a parameter outside of all blocks.
    """

    def __init__(
        self,
        ddp: BucketedDDP,
        buckets: Sequence[Sequence[nn.Parameter]],
        works: dict[int, Work],
        wait: Callable[[Iterable[int] | None], None],
    ):
        self._works, self._wait = works, wait
        self._wait_outside_graph = torch.compiler.disable(wait)
        bucket_of = {}
        for number, parameters in enumerate(buckets):
            bucket_of |= dict.fromkeys(parameters, number)

        self._needed: dict[nn.Module, set[int]] = {}  # buckets that a module waits for
        for block in _blocks_of(ddp.module):
            held = [parameter for parameter in block.parameters() if parameter in bucket_of]
            self._needed[block] = {bucket_of[parameter] for parameter in held}
        # A weight that is tied to one in a block is also read outside of it.
        self.outside_blocks = set()
        for module in _modules_outside_blocks(ddp.module):
            for parameter in module._parameters.values():
                if parameter in bucket_of:
                    self.outside_blocks.add(bucket_of[parameter])
        self._needed[ddp.module] = self.outside_blocks
        self._compiled_blocks = {block for block in self._needed if "_orig_mod" in block._modules}
        if ddp.module in self._compiled_blocks:
            self._needed[ddp.module] = set(range(len(buckets)))
        self._handles = list(self._hook(ddp))

    def _hook(self, ddp: BucketedDDP) -> Iterator[RemovableHandle]:
        yield ddp.register_forward_pre_hook(self._before_wrapper)
        yield ddp.register_forward_hook(self._after_wrapper)
        # One object for all modules: Dynamo guards on a hook's constants, so different ones would
        # make it compile every block anew, and give up at the ninth. A copy of the module, which
        # takes its hooks along, has nothing to wait for.
        before_block = checks.Attached(self._before_block)
        for block in self._needed:
            yield block.register_forward_pre_hook(before_block)
        before_state_dict = checks.Attached(self._before_state_dict)
        for module in ddp.module.modules():
            yield module.register_state_dict_pre_hook(before_state_dict)
            yield module.register_load_state_dict_pre_hook(before_state_dict)

    def close(self) -> None:
        """Detach the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_block(self, block: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the wrapper has waited; and no graph may depend on what is in flight
        if self._works:
            self._wait(self._needed[block] if torch.is_grad_enabled() else None)

    def _before_wrapper(self, wrapper: BucketedDDP, args: Any) -> None:
        if torch.compiler.is_compiling():  # the wrapper itself is being compiled
            self._wait_outside_graph(None)
        elif self._works and self._runs_below_python(wrapper.module):
            self._wait(None)

    def _after_wrapper(self, wrapper: BucketedDDP, args: Any, output: Any) -> None:
        if self._works and not torch.compiler.is_compiling():
            self._wait(None)

    def _before_state_dict(self, *args: Any) -> None:
        if self._works:
            self._wait(None)

    def _runs_below_python(self, root: nn.Module) -> bool:
        """Return whether a module reads parameters without calling hooks.

        It may have been compiled since the last forward.
        """
        waiting: list[nn.Module | None] = [root]
        while waiting:
            module = waiting.pop()
            if module is None or module in self._compiled_blocks:
                continue
            if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                return True
            if isinstance(module, torch.jit.ScriptModule):
                return True
            waiting += module._modules.values()
        return False


def _blocks_of(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of every `nn.ModuleList`; of one that is inside a block, too."""
    for module in root.modules():
        if isinstance(module, nn.ModuleList):
            yield from module.children()


def _modules_outside_blocks(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module that can be reached without passing through an `nn.ModuleList`."""
    yield root
    if not isinstance(root, nn.ModuleList):
        for child in root.children():
            yield from _modules_outside_blocks(child)


# -- state of a parameter's shards -----------------------------------------------------------------


def _join(parts: list[dict[str, Any]], parameter: nn.Parameter) -> dict[str, Any]:
    """Join the optimizer states of a parameter's shards to the state of the whole."""
    joined = {}
    for key, value in parts[0].items():
        if isinstance(value, Tensor) and value.ndim > 0:
            value = view_like(torch.cat([state[key] for state in parts]), parameter)
        joined[key] = value
    return joined
