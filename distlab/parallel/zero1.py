"""ZeRO stage 1: gradients are reduce-scattered, each rank steps its share, parameters are gathered again.

    compute        │ forward ─────── │ backward ───────────────── │   │ step 1/N │ forward ─────── …
    communication  │                 │  reduce-scatter b0 │ b1 │ … bn │          │ all-gather bn │ … │ b0 │

The optimizer's state, and the work of its step, are divided by the number of ranks N, and nothing is sent twice:
a reduce-scatter and an all-gather are the two halves of the all-reduce they replace (Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sec. 5.1 and 7.1). The all-gather of the
updated parameters runs under the next forward, in the order in which forward needs them; see `slices.py`.

Parameters live in flat buffers laid out like the gradient buckets; a rank owns the same slice of both. Its
optimizer sees 1-D views of the pieces of parameters in its slices, which is why it must be element-wise.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.elementwise import is_elementwise
from distlab.parallel.mirror import MirroredOptimizer, options_of, to_cpu
from distlab.parallel.ownership import Owned
from distlab.parallel.slices import SlicedParameters, join


class ZeroOptimizer(MirroredOptimizer):
    """An element-wise optimizer over this rank's slices of a `BucketedDDP`'s parameters.

    Gradients. After `finish_gradient_synchronization()` a `.grad` holds the mean in the part that this rank owns and
    leftovers elsewhere. So it must be zeroed before every step's first backward, the norm is clipped by
    `clip_grad_norm_` here, and other edits belong into `elementwise_gradient_edits()`; all else raises.

    Parameters. `step()` returns while they are being gathered, and the next forward waits module by module. Nothing
    reads one before it has arrived: whoever does so in Python, anywhere, waits for it (`in_flight.py`), and code
    compiled by `torch.compile` runs when all that it may read has arrived. To keep the overlap, compile blocks
    (`torch.compile(block)`) before building this optimizer; after `block.compile()`, the wrapper's forward waits for
    all parameters at once. Call `synchronize()` before parameters are read below Python: through an alias
    (`parameter.data`, a view) taken before the step, by `torch.func` transforms over parameters, by TorchScript
    functions of your own, by replayed CUDA graphs.

    Args:
        ddp: its bucket plan is taken over; from now on it reduce-scatters.
        optimizer_cls: such as `torch.optim.AdamW`.
        params: parameters or groups of the wrapped module; default: all that are trainable, in one group.
        kwargs: for `optimizer_cls`.

    Raises:
        TypeError: `ddp` is no `BucketedDDP`.
        ValueError: an optimizer that is not element-wise, a parameter that the wrapper does not train, or one
            given twice.
    """

    def __init__(
        self,
        ddp: BucketedDDP,
        optimizer_cls: type[Optimizer],
        *,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        **kwargs: Any,
    ):
        if not isinstance(ddp, BucketedDDP):
            raise TypeError(f"ZeroOptimizer takes over a BucketedDDP's buckets; got {type(ddp).__name__}")
        if not is_elementwise(optimizer_cls, kwargs, ddp.device):
            raise ValueError(
                f"{optimizer_cls.__name__} is not element-wise: it would see pieces of parameters and give another "
                "result than on whole ones; use ShardedOptimizer, which keeps parameters whole"
            )
        self._ddp = ddp
        self._group = ddp.process_group
        self._slices = SlicedParameters(ddp)
        self._gradients = ddp.partial_gradients
        self._gradients.belong_to(self)
        super().__init__(ddp.trainable if params is None else params, optimizer_cls, kwargs)
        self._hooks = list(self._slices.hook_forward(ddp))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's slices and send the results on their way; whoever reads a parameter waits for it.

        Args:
            closure: evaluated once, before the step, with gradients enabled; it must finish the synchronisation.
            kwargs: for the inner optimizer's `step`.

        Returns:
            The closure's value, or None.

        Raises:
            RuntimeError: gradients were not finished, or edited since outside of `elementwise_gradient_edits()`;
                or a `GradScaler` found an overflow on some ranks only (then on every rank).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._ddp.check_step(self)  # what the check before the closure could not know
        self.synchronize()
        if "found_inf" in self.__dict__ and self._overflowed():  # inside of GradScaler.step()
            return loss
        self._gradients.check_unedited()
        self._slices.point_gradients()
        if self.__dict__.get("grad_scale") is not None:
            for gradient in self._own_gradients():
                gradient.div_(self.grad_scale)
        self._copy_options_inwards()
        self._inner.step(**kwargs)
        self._slices.start_gathering()
        return loss

    # GradScaler then calls step() on every rank, and leaves its findings in `found_inf` and `grad_scale`.
    _step_supports_amp_scaling = True

    def _overflowed(self) -> bool:
        """Whether this step is to be skipped; raises RuntimeError unless all ranks say the same."""
        finite = collectives.sum_over_ranks(float(self.found_inf.item() == 0), self._ddp.device, self._group)
        if 0 < finite < self._group.size():
            del self.found_inf, self.grad_scale  # GradScaler takes them away only after a step
            raise RuntimeError(
                f"gradients overflowed on {self._group.size() - round(finite)} of {self._group.size()} ranks, as each "
                "rank sees the mean of its own part only, and GradScaler would now choose another scale on each: use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=...) and call its "
                "unscale_(optimizer) before step(optimizer), or distlab.train.scaler.LossScaler with TrainStep"
            )
        return finite == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer; gradients alone are touched, so nothing waits."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters in flight: a microsecond for each access else
            super().zero_grad(set_to_none)

    def elementwise_gradient_edits(self) -> AbstractContextManager[None]:
        """Inside, between `finish_gradient_synchronization()` and `step()`, gradients may be edited element by element.

        For example `torch.nn.utils.clip_grad_value_` or a multiplication. What needs all of a gradient at once gets
        another answer on each rank, as only this rank's part is the mean: for the norm there is `clip_grad_norm_`.

        Raises:
            RuntimeError: a gradient was edited before.
        """
        return self._gradients.elementwise_edits()

    def synchronize(self) -> None:
        """Wait until all parameters are whole; for what reads their memory below Python (see the class)."""
        self._slices.wait()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients so that their L2 norm over all ranks is at most `max_norm`.

        Call it after `finish_gradient_synchronization()`, on every rank. Returns the norm before, a scalar, as
        `torch.nn.utils.clip_grad_norm_` does on whole gradients (up to rounding).

        Raises:
            RuntimeError: gradients of a synchronised backward have not been finished.
        """
        self._ddp.check_step(self)
        self._slices.point_gradients()
        gradients = self._own_gradients()
        norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self._ddp.device)
        norm = collectives.sum_tensor(square, self._group).sqrt()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The whole state, unpadded and by parameter name; an unsharded optimizer over them can load it.

        A collective: call it on every rank; every rank gets all of it, on the CPU.
        """
        self._copy_options_inwards()
        mine = [
            (name, piece.start, to_cpu(self.state[piece.parameter]))
            for name, parameter in self._named()
            for piece in self._slices.pieces[parameter]
            if piece.parameter in self.state
        ]
        parts: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for name, start, state in (
            entry for rank in collectives.gather_objects(mine, self._group) for entry in rank
        ):
            parts.setdefault(name, []).append((start, state))
        shapes = {name: parameter.shape for name, parameter in self._named()}
        state = {name: join(pieces, shapes[name]) for name, pieces in parts.items()}
        return {"state": state, "param_groups": self._groups_by_name()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state saved by name at any world size.

        Raises:
            ValueError: groups that hold other parameters.
        """
        saved, names = state_dict["param_groups"], [group["params"] for group in self._groups_by_name()]
        if [list(group["params"]) for group in saved] != names:
            raise ValueError(
                "the saved groups hold other parameters, or in another order, than this optimizer's"
            )
        state = {
            piece.parameter: {key: piece.cut(value, parameter.numel()) for key, value in whole.items()}
            for name, parameter in self._named()
            if (whole := state_dict["state"].get(name)) is not None
            for piece in self._slices.pieces[parameter]
        }
        self._load_inner(saved, state)

    def owned(self) -> list[Owned]:
        """The pieces of parameters that this rank steps; `state` has its entries by `Owned.parameter`."""
        return [
            Owned(name, parameter.shape, piece.parameter, piece.start)
            for name, parameter in self._named()
            for piece in self._slices.pieces[parameter]
        ]

    def close(self) -> None:
        """Wait for the parameters and detach the hooks; the wrapper has its own `close()`."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _own_gradients(self) -> list[Tensor]:
        pieces = (piece.parameter for piece in self._slices.all_pieces())
        return [piece.grad for piece in pieces if piece.grad is not None]

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        for parameter in group["params"]:
            if parameter not in self._slices.pieces:
                raise ValueError("a parameter is not among those that the wrapped module trains")
        return group | {
            "params": [piece.parameter for p in group["params"] for piece in self._slices.pieces[p]]
        }

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._ddp.trainable_names, self._ddp.trainable, strict=True))

    def _groups_by_name(self) -> list[dict[str, Any]]:
        name_of = {parameter: name for name, parameter in self._named()}
        return [
            options_of(group) | {"params": [name_of[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
