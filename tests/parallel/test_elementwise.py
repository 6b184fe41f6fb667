"""Which optimizers may step parts of parameters: tried out, on classes and on optimizers that exist already."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.parallel import ShardedOptimizer
from distlab.parallel.elementwise import check_elementwise, is_elementwise
from distlab.testing import run_ranks
from kernels.adamw import AdamW as FusedAdamW

CPU = torch.device("cpu")


class OwnAdamW(Optimizer):
    """As written in a course: arguments that no group holds, and a step that takes no gradients as None."""

    def __init__(self, params, alpha, betas=(0.9, 0.999), *, decay, epsilon=1e-8):
        super().__init__(params, {"alpha": alpha, "betas": betas, "eps": epsilon})
        self.decay = decay

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["alpha"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1 - b1) * p.grad.data
                v = state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1 - b2) * p.grad.data**2
                rate = lr * (1 - b2**t) ** 0.5 / (1 - b1**t)
                p.data -= rate * m / (v.sqrt() + group["eps"])
                p.data -= lr * self.decay * p.data
        return loss


class OwnSGD(Optimizer):
    """Its constructor takes a model, and its rate decays with a counter of its own."""

    def __init__(self, model: nn.Module, rate: float):
        super().__init__(model.parameters(), {"rate": rate})
        self.count = 0

    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["rate"] / self.count**0.5 * p.grad.data


class MomentsInAList(Optimizer):
    """Keeps tensors outside of `state`: it cannot be copied, only constructed."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})
        self.moments = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, m in zip(parameters, self.moments, strict=True):
            m.mul_(0.9).add_(p.grad)
            p -= self.param_groups[0]["lr"] * m


class DecayOnMatrices(torch.optim.SGD):
    """Element by element, but differently on matrices: right on rows, wrong on flattened elements."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim >= 2:
                    p *= 0.9
        return super().step(closure)


class Scaled(torch.optim.SGD):
    """Divides gradients by a norm: of the tensor, of each row, of all tensors, or of none."""

    def __init__(self, params, lr=0.1, by="tensor"):
        super().__init__(params, lr=lr)
        self._by = by

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        together = torch.stack([g.norm() for g in gradients]).norm()
        for g in gradients:
            norms = {"tensor": g.norm(), "rows": g.norm(dim=-1, keepdim=True), "all": together, "none": 1.0}
            g.div_(norms[self._by])
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws numbers, which differ between ranks and between parts."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p += torch.randn_like(p)
        return super().step(closure)


class Muon(Optimizer):
    """Orthogonal updates where a group asks for them, as the reference implementation has it; SGD elsewhere."""

    def __init__(self, params):
        for group in params:
            assert "use_muon" in group
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                u, _, v = (
                    torch.linalg.svd(p.grad, full_matrices=False) if group["use_muon"] else (p.grad, 0, None)
                )
                p -= group["lr"] * (u @ v if v is not None else u)


ELEMENTWISE = [
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Rprop",
    "ASGD",
]
OTHERS = [name for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name)]


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4))]


def accepts(optimizer: Optimizer) -> bool:
    """Whether it is accepted, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            check_elementwise(optimizer)
        except ValueError as error:
            assert type(optimizer).__name__ in str(error)
            return False
    return True


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_elementwise_optimizers(name):
    cls = getattr(torch.optim, name)
    assert is_elementwise(cls, {"lr": 0.01}, CPU)
    assert accepts(cls(matrices(), lr=0.01))


@pytest.mark.parametrize("name", OTHERS)
def test_torchs_others(name):
    """Muon refuses vectors, which is no proof; Adafactor factors matrices only; L-BFGS wants a closure."""
    cls, parameters = getattr(torch.optim, name), [nn.Parameter(torch.randn(3, 4))]
    assert not is_elementwise(cls, {"lr": 0.01}, CPU)
    assert not accepts(cls(parameters, lr=0.01))
    assert not accepts(cls(parameters, lr=1e-9))  # hardly moves anything


@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"amsgrad": True, "maximize": True},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_options_and_a_rate_of_zero(options):
    """A warm-up begins at zero, where nothing would move and everything would look element-wise."""
    assert is_elementwise(torch.optim.AdamW, options, CPU) and accepts(
        torch.optim.AdamW(matrices(), **options)
    )
    assert not accepts(Scaled(matrices(), lr=0.0)) and not accepts(Scaled(matrices(), lr=torch.tensor(0.0)))


@pytest.mark.parametrize(
    "make",
    [
        partial(OwnAdamW, alpha=0.01, decay=0.1),
        lambda parameters: OwnSGD(nn.ParameterList(parameters), rate=0.1),
        partial(MomentsInAList, lr=0.1),
        FusedAdamW,
        DecayOnMatrices,
        partial(Scaled, by="none"),
        lambda parameters: Muon([{"params": parameters, "use_muon": False}]),
    ],
    ids=["AdamW", "SGD", "moments-in-a-list", "fused", "decay-on-matrices", "option", "muon-off"],
)
def test_peoples_own_elementwise_optimizers(make):
    assert accepts(make(matrices()))


@pytest.mark.parametrize("by", ["tensor", "rows", "all"])
def test_norms_inside_the_step(by):
    """Of rows: right on whole rows, refused all the same. Of all tensors: ranks would see different ones."""
    assert not accepts(Scaled(matrices(), by=by))
    assert not is_elementwise(Scaled, {"by": by}, CPU)


def test_an_optimizer_that_looks_at_dimensions():
    """Flattened elements have none; a rank's rows have."""
    assert not is_elementwise(DecayOnMatrices, {"lr": 0.1}, CPU)


def test_only_groups_with_matrices_count_and_new_groups_are_tried_out():
    weights, vector = matrices()[:2], matrices()[2:]
    optimizer = Muon([{"params": weights, "use_muon": False}, {"params": vector, "use_muon": True}])
    assert accepts(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(5, 5))], "use_muon": True})
    assert not accepts(optimizer)
    assert not accepts(optimizer)  # a refusal is no pass


def test_the_optimizer_itself_is_not_touched():
    """Neither its state, its parameters and counters, the step that a scheduler put in place, nor anybody's hooks."""
    parameters, calls = matrices(), []
    global_hook = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    optimizers = [
        torch.optim.AdamW(parameters, lr=0.1),
        FusedAdamW(parameters),
        OwnSGD(nn.ParameterList(parameters), rate=0.1),
        MomentsInAList(parameters, lr=0.1),
    ]
    generator = torch.get_rng_state()
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
        optimizer.step = lambda *_: calls.append("replaced")
        before = [parameter.clone() for parameter in parameters]
        attributes = {name: str(value) for name, value in vars(optimizer).items()}
        assert accepts(optimizer)
        assert attributes == {name: str(value) for name, value in vars(optimizer).items()}
        assert not optimizer.state and all(map(torch.equal, parameters, before)) and not calls
        assert all(parameter.grad is None for parameter in parameters)
    global_hook.remove()
    assert not accepts(Noisy(parameters, lr=0.1))
    assert torch.equal(torch.get_rng_state(), generator)


def test_it_is_tried_out_once(monkeypatch):
    optimizer = OwnSGD(nn.ParameterList(matrices()), rate=0.1)
    check_elementwise(optimizer)
    monkeypatch.setattr(OwnSGD, "step", None)
    check_elementwise(optimizer)


class Bound(torch.optim.SGD):
    """A function that is bound to this very optimizer: copies would step the original."""

    def __init__(self, model: nn.Module):
        super().__init__(model.parameters(), lr=0.1)
        self.update = lambda: self.param_groups[0]["params"][0].data.zero_()

    def step(self, closure=None):
        self.update()


def test_what_cannot_be_tried_out_is_left_to_the_user_with_a_warning():
    parameters = matrices()
    before = parameters[0].clone()
    with pytest.warns(
        UserWarning, match=r"Bound could not be tried out \(.*right only if it works element by"
    ):
        check_elementwise(Bound(nn.ParameterList(parameters)))
    assert torch.equal(parameters[0], before)
    with pytest.warns(UserWarning, match="SparseAdam could not be tried out"):
        check_elementwise(torch.optim.SparseAdam(parameters))


def sharded_twice(context) -> None:
    optimizer = ShardedOptimizer(matrices(), torch.optim.SGD, context.group, lr=0.1)
    with pytest.raises(ValueError, match=r"ShardedOptimizer divides whole parameters .* sharded already"):
        check_elementwise(optimizer)


def test_an_optimizer_that_shards_by_itself():
    """Its broadcasts would overwrite ranks' rows by those of the owner."""
    run_ranks(sharded_twice, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [torch.optim.AdamW, FusedAdamW, torch.optim.Adafactor])
def test_on_a_gpu(cls):
    parameters = [nn.Parameter(torch.randn(3, 4, device="cuda"))]
    state = torch.cuda.get_rng_state()
    elementwise = cls is not torch.optim.Adafactor
    assert is_elementwise(cls, {"lr": 0.01}, torch.device("cuda")) == elementwise
    assert accepts(cls(parameters, lr=0.01)) == elementwise
    assert torch.equal(torch.cuda.get_rng_state(), state)
