"""ZeRO stage 1: gradients are reduce-scattered, each rank steps its share, parameters are gathered again.

    compute        │ forward ─────── │ backward ───────────────── │   │ step 1/N │ forward ─────── …
    communication  │                 │  reduce-scatter b0 │ b1 │ … bn │          │ all-gather bn │ … │ b0 │

The optimizer's state, and the work of its step, are divided by the number of ranks N, and nothing is sent twice:
a reduce-scatter and an all-gather are the two halves of the all-reduce they replace (Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sec. 5.1 and 7.1). The all-gather of the
updated parameters runs under the next forward, in the order in which forward needs them.

Parameters live in flat buffers laid out like the gradient buckets; a rank owns the same slice of both. Its
optimizer sees 1-D views of the pieces of parameters in its slices, which is why it must be element-wise.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm import collectives
from distlab.parallel.bucketed import BucketedDDP
from distlab.parallel.mirror import MirroredOptimizer, is_elementwise, options_of, to_cpu
from distlab.parallel.ownership import Owned
from distlab.parallel.slices import SlicedParameters, join


class ZeroOptimizer(MirroredOptimizer):
    """An element-wise optimizer over this rank's slices of a `BucketedDDP`'s parameters.

    Gradients must be zeroed before every step's first backward: outside the owned slices `.grad` holds leftovers.

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
        super().__init__(ddp.trainable if params is None else params, optimizer_cls, kwargs)
        self._hooks = [
            module.register_forward_pre_hook(lambda *_, needed=needed: self._slices.wait(needed))
            for module in ddp.module.modules()
            if (needed := self._slices.buckets_of(module))
        ]
        self._hooks.append(ddp.module.register_state_dict_pre_hook(lambda *_: self.synchronize()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's slices and send the results on their way; the next forward waits for what it needs.

        Args:
            closure: evaluated once, before the step, with gradients enabled; it must finish the synchronisation.
            kwargs: for the inner optimizer's `step`.

        Returns:
            The closure's value, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ddp.finish_gradient_synchronization()
        self.synchronize()
        self._slices.point_gradients()
        self._copy_options_inwards()
        self._inner.step(**kwargs)
        self._slices.start_gathering()
        return loss

    def synchronize(self) -> None:
        """Wait until all parameters are whole: before reading them outside of the module's forward."""
        self._slices.wait()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients so that their L2 norm over all ranks is at most `max_norm`.

        Call it after `finish_gradient_synchronization()`, on every rank. Returns the norm before, a scalar, as
        `torch.nn.utils.clip_grad_norm_` does on whole gradients (up to rounding).
        """
        self._slices.point_gradients()
        pieces = [piece.parameter for piece in self._slices.all_pieces()]
        gradients = [piece.grad for piece in pieces if piece.grad is not None]
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
