"""Muon: momentum whose update is made orthogonal, for the matrices of a model's blocks.

By Jordan et al., 2024.

    buffer ← β·buffer + (1 − β)·gradient
    update ← β·buffer + (1 − β)·gradient            once more, by Nesterov
    matrix ← (1 − lr·decay)·matrix − lr·factor·orthogonalize(update)

Momentum is computed element by element. Orthogonalization, which makes about U·Vᵀ of U·S·Vᵀ, takes
a whole matrix. `Muon` steps whole matrices under every data-parallel strategy, and shards of them
under ZeRO-1, ZeRO-2 and FSDP. `distlab.parallel.muon` says which rank orthogonalizes a sharded
matrix, and what that sends. https://kellerjordan.github.io/posts/muon/
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from distlab.parallel.muon import PLACEMENTS, batches
from distlab.parallel.shard import local_part, spread_of, whole_shape
from distlab.parallel.state_dicts import own_part, watch_states


def _original_factor(rows: int, columns: int) -> float:
    # Tall matrices get a larger step, since their update has a smaller root mean square.
    return math.sqrt(max(1, rows / columns))


def _factor_of_adamws_rms(rows: int, columns: int) -> float:
    """Return the factor with which an update has about the root mean square of AdamW's."""
    # 0.2 is about the root mean square of AdamW's updates in training.
    return 0.2 * math.sqrt(max(rows, columns))


# Factor of the learning rate by the value of `adjust_lr_fn`, for the shape of a matrix.
LR_FACTORS = {
    "original": _original_factor,
    "match_rms_adamw": _factor_of_adamws_rms,
}

# Options of a group of `torch.optim.Muon`.
OPTIONS_OF_TORCH = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)
STATE_OF_MATRICES = ("momentum_buffer",)
STATE_OF_ELEMENTS = ("step", "exp_avg", "exp_avg_sq")

Group = dict[str, Any]  # `params` and their options


class Muon(Optimizer):
    """Optimizer `torch.optim.Muon`, also for shards. Groups with `orthogonalize=False` use AdamW.

        optimizer = Muon(Muon.split(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")

    Args:
        params: matrices, or groups. `Muon.split(model)` makes two groups.
        lr, weight_decay: options of both kinds of groups.
        momentum, nesterov: options of groups of matrices.
        ns_coefficients, eps, ns_steps: options of `orthogonalize`.
        adjust_lr_fn: name in `LR_FACTORS`. None: the original factor. With `match_rms_adamw` an
            update is as large as AdamW's, so that one learning rate serves both kinds of groups.
        betas, adamw_eps: options of AdamW.
        placement: method for sharded matrices, one of `distlab.parallel.muon.PLACEMENTS`.

    Raises:
        ValueError: a number that is out of its range, an unknown name, or, in a group of matrices,
            a parameter that is not 2-D, is complex or is a DTensor. `add_param_group` and
            `load_state_dict` raise alike.
    """

    # Tells ZeRO-1 and FSDP to pass shards. A shard's attribute `spread` says which ranks have the
    # other elements of its parameter.
    takes_shards = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        placement: str = "exchange",
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "placement": placement,
            "orthogonalize": True,
        }
        super().__init__(params, defaults)
        # Wrappers load and save states through hooks, which must know this optimizer.
        watch_states(self)

    @staticmethod
    def split(model: nn.Module) -> list[Group]:
        """Return two groups of trainable parameters: matrices of blocks, and the rest, for AdamW.

        Blocks are the children of an `nn.ModuleList`, as for FSDP. The embedding and the head are
        in the second group, and so is a matrix of a block that is tied to one of them. For a model
        under FSDP the groups hold the shards.

        Raises:
            ValueError: no block has a matrix.
        """
        # Tied parameters have several names, and each of them matters here.
        modules = model.named_modules(remove_duplicate=False)
        lists = [name for name, module in modules if isinstance(module, nn.ModuleList)]
        # The names of parameters in blocks begin with one of these.
        prefixes = tuple(f"{name}." for name in lists)
        # All names of a parameter count: a matrix of a block that also has a name outside of blocks
        # is tied to the embedding or the head.
        others = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            in_block = name.startswith(prefixes)
            is_matrix = len(whole_shape(parameter)) == 2
            if not in_block or not is_matrix:
                others.add(parameter)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter not in others]
        if not matrices:
            raise ValueError(
                "Muon.split: no child of an nn.ModuleList has a matrix: make the groups yourself"
            )
        rest = [parameter for parameter in trained if parameter in others]
        return [{"params": matrices}, {"params": rest, "orthogonalize": False}]

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, of matrices or with `orthogonalize=False`.

        Raises:
            ValueError: see the constructor. The group is then not added.
        """
        super().add_param_group(param_group)
        try:
            # torch adds the group first, so a refused one must be removed again.
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()  # a caller that catches the error can go on with the others
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.optim.Muon`, which has the same momentum buffer.

        Options that torch's groups do not have, such as `betas`, get their defaults.

        Raises:
            ValueError: another optimizer's state, options that the constructor refuses, another
                rank's shards, or state of another shape. Nothing is loaded then.
        """
        state_dict = own_part(self, state_dict)
        groups = []
        state = dict(state_dict["state"])
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            missing = [name for name in OPTIONS_OF_TORCH if name not in saved]
            if missing:
                raise ValueError(
                    f"Muon.load_state_dict: a saved group has no option {missing[0]!r}, so this is "
                    "the state of another optimizer: load a state of Muon or of torch.optim.Muon"
                )
            filled = self.defaults | saved
            _check(filled | {"params": group["params"]})
            for number, parameter in zip(saved["params"], group["params"], strict=False):
                _check_state(state.get(number, {}), parameter, number, filled)
                saved_by_torch = "orthogonalize" not in saved
                if saved_by_torch and number in state:
                    # torch shares loaded tensors. Two optimizers of one model would both step them.
                    copies = {}
                    for key, value in state[number].items():
                        copies[key] = torch.clone(value)
                    state[number] = copies
            groups.append(filled)
        # If the numbers of groups or parameters differ, torch raises its own error below.
        if len(groups) == len(state_dict["param_groups"]):
            state_dict = state_dict | {"state": state, "param_groups": groups}
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        With sharded matrices it is a collective: call it on every rank.

        Args:
            closure: evaluated once, before the step, with gradients enabled.

        Returns:
            The closure's value, or None.
        """
        loss = None
        if closure is not None:
            # `step` runs without gradients, and a closure calls backward.
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if any(parameter.grad.is_sparse for parameter in stepped):
                raise RuntimeError(
                    "Muon does not support sparse gradients: leave sparse=True out of the embedding"
                )
            if group["orthogonalize"]:
                self._step_matrices(stepped, group)
            else:
                self._step_elements(stepped, group)
        return loss

    def _step_matrices(self, matrices: Sequence[Tensor], group: Group) -> None:
        # Process group that shares the matrices → matrices. The key of whole matrices is None.
        by_ranks: dict[ProcessGroup | None, list[Tensor]] = {}
        for matrix in matrices:
            # A matrix without elements has no direction.
            if whole_shape(matrix).numel() == 0:
                continue  # no rank has an element to step
            spread = spread_of(matrix)
            ranks = None if spread is None else spread.group
            by_ranks.setdefault(ranks, []).append(matrix)
        for ranks, some in by_ranks.items():
            if ranks is not None:
                self._step_shards(some, group)
                continue
            # One batch after the other, so that updates of only one batch are in memory.
            for indices in batches([matrix.shape for matrix in some]):
                self._step_whole([some[index] for index in indices], group)

    def _step_whole(self, matrices: Sequence[Tensor], group: Group) -> None:
        """Step whole matrices of one shape."""
        apply = _orthogonalize_with_options_of(group)
        # Without a name for the updates, which would keep them in memory until the end.
        directions = apply(torch.stack(self._updates(matrices, group)))
        self._move(matrices, directions, group)

    def _step_shards(self, matrices: Sequence[Tensor], group: Group) -> None:
        """Step this rank's shards of matrices that one process group shares. A collective."""
        place = PLACEMENTS[group["placement"]]
        spreads = [matrix.spread for matrix in matrices]
        apply = _orthogonalize_with_options_of(group)
        # Without a name for the updates, for the reason given in `_step_whole`.
        directions = place(self._updates(matrices, group), spreads, apply)
        self._move(matrices, directions, group)

    def _updates(self, matrices: Sequence[Tensor], group: Group) -> list[Tensor]:
        """Update the momentum and return the matrices to orthogonalize, in bf16.

        They are the momentum of this step, or with Nesterov an estimate of the next step's.
        """
        gradients = [matrix.grad for matrix in matrices]
        for matrix, gradient in zip(matrices, gradients, strict=True):
            # The state is made at the first step, as torch's optimizers do.
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        # buffer ← β·buffer + (1 − β)·gradient
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = buffers
        if group["nesterov"]:
            # (1 − β)·gradient + β·buffer, with the buffer of this step
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
        # What is gathered or exchanged takes half the bytes, and the iterations compute in bf16
        # anyway.
        return [update.bfloat16() for update in updates]

    def _move(self, matrices: Sequence[Tensor], directions: Iterable[Tensor], group: Group) -> None:
        """Decay the matrices and subtract their directions, times the learning rate."""
        lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
        # Decay is separate from the gradient, as in AdamW.
        kept = 1 - lr * group["weight_decay"]
        if matrices[0].device.type == "cpu":
            # On a CPU `_foreach_mul_` rounds the number to the matrices' dtype: 0.998 would be
            # 0.99609 in bf16.
            for matrix in matrices:
                matrix.mul_(kept)
        else:
            torch._foreach_mul_(matrices, kept)
        factor_of = LR_FACTORS[group["adjust_lr_fn"] or "original"]
        for matrix, direction in zip(matrices, directions, strict=True):
            rows, columns = whole_shape(matrix)
            # Of the whole matrix, also where this rank steps a shard of it.
            factor = factor_of(rows, columns)
            matrix.add_(direction, alpha=-lr * factor)

    def _step_elements(self, parameters: Sequence[Tensor], group: Group) -> None:
        """Step parameters by AdamW."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(
                    step=torch.zeros(()),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            params=list(parameters),
            grads=[parameter.grad for parameter in parameters],
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
            has_complex=any(parameter.is_complex() for parameter in parameters),
        )


def _orthogonalize_with_options_of(group: Group) -> Callable[[Tensor], Tensor]:
    return partial(
        orthogonalize,
        coefficients=group["ns_coefficients"],
        steps=group["ns_steps"],
        eps=group["eps"],
    )


def orthogonalize(
    matrices: Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> Tensor:
    """Bring all singular values of each matrix near 1, by Newton–Schulz iterations.

    The singular vectors stay as they are.

    An iteration makes a·s + b·s³ + c·s⁵ of each singular value s. The default coefficients have a
    large slope at 0. They do not converge: five iterations bring values of at least 0.002 to
    between 0.68 and 1.21. So bf16 is exact enough.

    Args:
        matrices: `(number, rows, columns)`, of any dtype.
        coefficients: numbers a, b, c.
        steps: number of iterations.
        eps: minimum of the norm by which each matrix is divided.

    Returns:
        `(number, rows, columns)`, bf16. Each matrix is in row-major order, or in column-major order
        if it has more rows than columns.
    """
    if matrices.size(1) > matrices.size(2):
        # The products below then have the size of the shorter side.
        return orthogonalize(matrices.mT, coefficients, steps, eps).mT
    x = matrices.bfloat16()
    # Divided by the norm, because a singular value above 1 could grow without limit.
    norms = x.flatten(1).norm(dim=1)
    x = x / norms.clamp(min=eps)[:, None, None]
    if x.device.type == "cpu":
        # A CPU multiplies batches of bf16 matrices ten times slower than single ones.
        return torch.stack([_iterate(matrix, torch.addmm, coefficients, steps) for matrix in x])
    return _iterate(x, torch.baddbmm, coefficients, steps)


def _iterate(
    x: Tensor, add_product: Callable[..., Tensor], coefficients: Sequence[float], steps: int
) -> Tensor:
    """Return the result of the iterations on one matrix, or on several.

    Args:
        x: matrix, or a batch of them, with at least as many columns as rows.
        add_product: `torch.addmm` for one matrix, `torch.baddbmm` for a batch.
        coefficients: numbers a, b, c.
        steps: number of iterations.
    """
    a, b, c = coefficients
    for _ in range(steps):
        # Of the shorter side, which `orthogonalize` has made the rows.
        squares = x @ x.mT
        # b·XXᵀ + c·(XXᵀ)²
        polynomial = add_product(squares, squares, squares, beta=b, alpha=c)
        # a·X + b·XXᵀX + c·(XXᵀ)²X
        x = add_product(x, polynomial, x, beta=a)
    return x


def _check(group: Group) -> None:
    """Raise ValueError for a group that `Muon` cannot step."""
    for name in ("lr", "weight_decay", "momentum", "eps", "adamw_eps"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"Muon: {name} is a tensor of {value.numel()} numbers: give one number"
            )
        if not value >= 0:  # also true of NaN
            raise ValueError(f"Muon: {name}={value}: give a number of 0 or more")
    betas = group["betas"]
    # A beta of 1 would never forget, and divide by zero in the bias correction.
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"Muon: betas={betas}: give two numbers of at least 0 and below 1")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"Muon: ns_coefficients={group['ns_coefficients']}: give three numbers")
    steps = group["ns_steps"]
    # True is an int to Python, and would count as one iteration.
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"Muon: ns_steps={steps!r}: give a whole number")
    if steps < 1:
        raise ValueError(f"Muon: ns_steps={steps}: nothing would be orthogonalised; give 1 or more")
    if steps >= 100:
        raise ValueError(f"Muon: ns_steps={steps}: give fewer than 100, of which 5 are usual")
    allowed_names = {"adjust_lr_fn": [None, *LR_FACTORS], "placement": list(PLACEMENTS)}
    for name, allowed in allowed_names.items():
        if group[name] not in allowed:
            shown = ", ".join(str(each) for each in allowed)
            raise ValueError(f"Muon: {name}={group[name]!r}: give one of {shown}")
    # Groups for AdamW take parameters of any shape.
    if not group["orthogonalize"]:
        return
    for parameter in group["params"]:
        shape = tuple(whole_shape(parameter))
        if len(shape) != 2:
            raise ValueError(
                f"Muon: a parameter of shape {shape} is not a matrix: give it in a group with "
                "orthogonalize=False, as Muon.split(model) does"
            )
        if parameter.is_complex():
            raise ValueError(
                "Muon: a matrix of complex numbers cannot be orthogonalised here: give it in a "
                "group with orthogonalize=False"
            )
        if local_part(parameter) is not parameter:
            raise ValueError(
                "Muon takes shards of distlab's FSDP and ZeRO-1, and this is a DTensor, such as "
                "fsdp2's"
            )


def _check_state(state: dict[str, Any], parameter: Tensor, number: int, group: Group) -> None:
    """Raise ValueError for saved state that does not fit this parameter in its group.

    Args:
        state: saved state of the parameter. It is empty before the parameter's first step.
        parameter: tensor that this optimizer steps. It can be a shard.
        number: number of the parameter in the saved groups.
        group: options with which it will be stepped.
    """
    # The two kinds of groups keep different state.
    needed = STATE_OF_MATRICES if group["orthogonalize"] else STATE_OF_ELEMENTS
    if state and not set(needed) <= state.keys():
        raise ValueError(
            f"Muon.load_state_dict: the saved state of parameter {number} has {', '.join(state)}, "
            f"and a group with orthogonalize={group['orthogonalize']} needs {', '.join(needed)}"
        )
    for name, value in state.items():
        if name not in needed or name == "step":  # the step is one number
            continue
        saved_shape = tuple(value.shape)
        shape = tuple(parameter.shape)
        if saved_shape != shape:
            raise ValueError(
                f"Muon.load_state_dict: {name} of parameter {number} has shape {saved_shape}, and "
                f"the parameter has {shape} on this rank: load the state of the same parameters, "
                "of the same rank and world size"
            )
