"""Muon steps shards as torch's steps whole matrices in one process, and sends what its placements'
docstrings say.
"""

import io

import pytest
import torch
from torch import nn

from distlab.optim import Muon, orthogonalize
from distlab.parallel import FSDP, STRATEGIES, Layout
from distlab.parallel.shard import spread_of
from tests.parallel.test_contract import on_two_ranks

STEPS = 5
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
CELLS = [
    ("naive", "all"),
    ("bucketed", "all"),
    ("sharded-optimizer", "owner"),
    ("zero1", "gather"),
    ("zero1", "exchange"),
    ("zero2", "exchange"),
    ("fsdp", "gather"),
    ("fsdp", "exchange"),
]


class Weighted(nn.Module):
    """Matrices of blocks, one of them transposed, a head and biases.

    The loss is linear in all of them.
    """

    def __init__(self):
        super().__init__()
        sizes = (4, 7), (7, 3), (6, 6), (2, 9), (5, 8)
        self.blocks = nn.ModuleList(nn.Linear(*each) for each in sizes)
        self.blocks[4].weight = nn.Parameter(self.blocks[4].weight.detach().t().contiguous().t())
        self.head = nn.Linear(4, 5)

    def forward(self, generator):
        """The gradients are whole numbers, so that their sums over ranks are exact in any order."""
        loss = torch.zeros(())
        for layer in [*self.blocks, self.head]:
            x, factors = (
                torch.randint(-3, 4, (3, width), generator=generator).float()
                for width in (layer.in_features, layer.out_features)
            )
            loss = loss + (layer(x) * factors).sum()
        return loss


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Weighted()


def backward(model, rank, step, times=1):
    (times * model(torch.Generator().manual_seed(100 * step + rank))).backward()


def in_one_process(ranks):
    """Parameters after torch's own optimizers have stepped, on the sum over the ranks' data."""
    model = build()
    matrices = [layer.weight for layer in model.blocks]
    rest = [*(layer.bias for layer in model.blocks), *model.head.parameters()]
    optimizers = [torch.optim.Muon(matrices, **OPTIONS), torch.optim.AdamW(rest, **OPTIONS)]
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(ranks):
            backward(model, rank, step)
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


def train(context, strategy, placement):
    """Whole numbers stay such in a mean over ranks of so many times the loss.

    Slices end inside of matrices.
    """
    options = OPTIONS if placement in ("all", "owner") else OPTIONS | {"placement": placement}
    model, optimizer = STRATEGIES[strategy].build(
        build(), context.group, Muon, options, bucket_size_mb=2e-4
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, context.rank, step, context.world_size)
        model.finish_gradient_synchronization()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.ranks
def test_every_placement_and_strategy_is_bit_for_bit_one_process(context, world_size):
    """Tall, wide, square and transposed matrices, cut within rows (ZeRO-1) and by rows (FSDP).

    Some ranks have none.
    """
    expected = in_one_process(world_size)
    for strategy, placement in CELLS:
        model, _ = train(context, strategy, placement)
        for (name, mine), other in zip(model.full_parameters().items(), expected, strict=True):
            assert torch.equal(mine, other), (
                f"{strategy} {placement} {name}: {(mine - other).abs().max()}"
            )
        model.close(restore=False)


@on_two_ranks
def test_a_shard_that_was_stored_is_loaded_as_a_tensor_of_its_own(context):
    """By `torch.load` as it comes, which takes few classes, and no group of ranks."""
    file = io.BytesIO()
    torch.save(FSDP(nn.Linear(4, 4), process_group=context.group).module.weight, file)
    file.seek(0)
    assert spread_of(torch.load(file)) is None


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]
)
def test_one_process_is_bit_for_bit_torch(options):
    matrices = [torch.randn(shape) for shape in ((8, 6), (6, 9), (1, 4), (8, 6))]
    others = [matrix.clone() for matrix in matrices]
    for matrix, other in zip(matrices, others, strict=True):
        matrix.grad = other.grad = torch.randn(matrix.shape)
    for optimizer in (Muon(matrices, **options), torch.optim.Muon(others, **options)):
        for _ in range(STEPS):
            optimizer.step()
    assert all(map(torch.equal, matrices, others))


@pytest.mark.gpu
def test_a_batch_of_matrices_is_orthogonalised_as_one_by_one():
    """On a GPU the products of a batch may be summed in another order: by what bf16 rounds, in five
    iterations.
    """
    matrices = torch.randn(3, 96, 64, device="cuda")
    options = ((3.4445, -4.7750, 2.0315), 5, 1e-7)  # coefficients, iterations, eps
    together = orthogonalize(matrices, *options)
    alone = torch.cat([orthogonalize(matrix, *options) for matrix in matrices.split(1)])
    exact = torch.linalg.svdvals(together.float())
    assert exact.min() > 0.5 and exact.max() < 1.3
    torch.testing.assert_close(together, alone, rtol=0, atol=0.02)


def test_orthogonalising_leaves_momentum_alone():
    """torch's, of bf16 parameters and without Nesterov, is divided by its norm."""
    matrix = torch.ones(2, 2, dtype=torch.bfloat16)
    matrix.grad = 4 * matrix
    optimizer = Muon([matrix], momentum=0.5, nesterov=False)
    optimizer.step()
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], matrix.grad / 2)


def test_a_matrix_tied_to_the_head_is_the_heads():
    model = Weighted()
    model.blocks[0] = model.head
    matrices, rest = Muon.split(model)
    assert set(matrices["params"]) == {layer.weight for layer in model.blocks[1:]}
    assert {*matrices["params"], *rest["params"]} == {*model.parameters()} and not rest[
        "orthogonalize"
    ]


@pytest.mark.parametrize(
    "message, options",
    [
        (r"shape \(3,\) is not a matrix.*orthogonalize=False", {}),
        ("ns_steps=0", {"ns_steps": 0}),
        ("adjust_lr_fn='none': give one of None, original", {"adjust_lr_fn": "none"}),
        ("placement='all': give one of gather", {"placement": "all"}),
    ],
)
def test_mistakes_are_refused(message, options):
    with pytest.raises(ValueError, match=message):
        Muon([torch.ones(3)], **options)


@on_two_ranks
def test_where_no_rank_could_put_matrices_together_is_refused(context):
    model = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(ValueError, match=r"not known to be element-wise.*layout tp"):
        STRATEGIES["naive"].build(model, context.group, Muon, layout=Layout(tensor=2))
    with pytest.raises(ValueError, match="DTensor"):
        STRATEGIES["fsdp2"].build(nn.Sequential(model), context.group, Muon)
    with pytest.raises(ValueError, match="has a matrix"):
        Muon.split(nn.Linear(2, 2))


# -- arguments and states, as torch's optimizers have them -----------------------------------------

NAN = float("nan")
# option → values that torch refuses
REFUSED_VALUES = {
    "lr": [-1e-9, NAN, torch.ones(2), torch.tensor(NAN), torch.tensor(-1.0)],
    "weight_decay": [-1e-9, NAN],
    "momentum": [-1e-9, NAN],
    "eps": [-1e-9, NAN],
    "adamw_eps": [-1e-9, NAN],
    "betas": [(0.9, 1.0), (1.5, 0.9), (-0.1, 0.9), (NAN, 0.9), (0.9, NAN), (0.9,)],
    "ns_steps": [0, -1, 100, 2.5, True],
    "ns_coefficients": [(1.0, 2.0)],
}
REFUSED = []
for _name, _values in REFUSED_VALUES.items():
    REFUSED += [(_name, _value) for _value in _values]


@pytest.mark.parametrize("name, value", REFUSED)
def test_what_torch_refuses_is_refused_wherever_a_group_comes_from(name, value):
    """In the constructor, for all groups or for one; by a group that arrives later; by a state."""

    def matrix():
        return nn.Parameter(torch.ones(2, 3))

    with pytest.raises(ValueError, match=f"Muon: {name}"):
        Muon([matrix()], **{name: value})
    with pytest.raises(ValueError, match=f"Muon: {name}"):
        Muon([{"params": [matrix()]}, {"params": [matrix()], name: value, "orthogonalize": False}])
    optimizer = Muon([matrix()])
    with pytest.raises(ValueError, match=f"Muon: {name}"):
        optimizer.add_param_group({"params": [matrix()], name: value})
    assert len(optimizer.param_groups) == 1
    before = optimizer.state_dict()
    state = optimizer.state_dict()
    state["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=f"Muon: {name}"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict() == before


def test_complex_matrices_and_sparse_gradients_are_refused():
    matrix = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="Muon: a matrix of complex numbers"):
        Muon([matrix])
    optimizer = Muon([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(ValueError, match="Muon: a matrix of complex numbers"):
        optimizer.add_param_group({"params": [matrix]})
    for matrices in (True, False):
        table = nn.Embedding(4, 3, sparse=True)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
            Muon([{"params": list(table.parameters()), "orthogonalize": matrices}]).step()


def test_complex_vectors_are_stepped_as_by_adamw():
    vectors = [torch.randn(3, dtype=torch.complex64) for _ in range(2)]
    others = [vector.clone() for vector in vectors]
    for vector, other in zip(vectors, others, strict=True):
        vector.grad = other.grad = torch.randn(3, dtype=torch.complex64)
    ours = Muon([{"params": vectors, "orthogonalize": False}], **OPTIONS)
    for optimizer in (ours, torch.optim.AdamW(others, **OPTIONS)):
        for _ in range(STEPS):
            optimizer.step()
    assert all(map(torch.equal, vectors, others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rate", [0.02, torch.tensor(0.02), torch.tensor([0.02])], ids=str)
def test_every_dtype_decays_as_torchs(dtype, rate):
    """A CPU rounded 0.998, by which bf16 matrices are multiplied, to bf16 first."""
    matrices = [torch.randn(shape).to(dtype) for shape in ((8, 6), (6, 9), (8, 6))]
    others = [matrix.clone() for matrix in matrices]
    for matrix, other in zip(matrices, others, strict=True):
        matrix.grad = other.grad = torch.randn(matrix.shape).to(dtype)
    for optimizer in (Muon(matrices, lr=rate), torch.optim.Muon(others, lr=rate)):
        for _ in range(STEPS):
            optimizer.step()
    assert all(map(torch.equal, matrices, others))


class WithEmptyMatrices(nn.Module):
    """Matrices without rows, without columns or without both, among others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = (0, 4), (4, 4), (4, 0), (0, 0)
        self.blocks = nn.ModuleList(nn.ParameterList([torch.randn(shape)]) for shape in shapes)

    def forward(self):
        return sum(block[0].square().sum() for block in self.blocks)


@on_two_ranks
def test_matrices_without_elements_are_left_alone(context):
    for strategy, placement in CELLS:
        found = []
        for module in (WithEmptyMatrices(), nn.ParameterList([WithEmptyMatrices().blocks[1][0]])):
            if isinstance(module, nn.ParameterList):
                optimizer = torch.optim.Muon(module.parameters(), **OPTIONS)
                module[0].square().sum().backward()
                optimizer.step()
                found.append(module[0])
                continue
            options = (
                OPTIONS if placement in ("all", "owner") else OPTIONS | {"placement": placement}
            )
            model, optimizer = STRATEGIES[strategy].build(module, context.group, Muon, options)
            model().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            found.append(model.full_parameters()["blocks.1.0"])
            model.close()
        assert torch.equal(*found), strategy
    only = nn.Parameter(torch.empty(3, 0))
    only.grad = torch.empty(3, 0)
    Muon([only]).step()


def pair():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 3))]


def step_both(optimizers, number):
    torch.manual_seed(number)
    gradients = [torch.randn(4, 6), torch.randn(6, 3)]
    for optimizer in optimizers:
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_a_state_of_torchs_muon_is_continued_and_torchs_continues_ours():
    theirs, ours = torch.optim.Muon(pair(), **OPTIONS), Muon(pair(), lr=0.5)
    step_both([theirs], 1)
    for mine, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        mine.data.copy_(other.data)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == OPTIONS["lr"] and ours.param_groups[0]["orthogonalize"]
    again = Muon(pair(), lr=0.5)
    step_both([theirs, ours], 2)
    step_both([theirs, ours], 3)
    assert all(map(torch.equal, ours.param_groups[0]["params"], theirs.param_groups[0]["params"]))
    again.load_state_dict(ours.state_dict())
    torch.optim.Muon(pair()).load_state_dict(ours.state_dict())


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_state_of_another_optimizer_is_refused_at_load(other):
    theirs = other(pair(), lr=0.1)
    step_both([theirs], 1)
    with pytest.raises(ValueError, match=r"Muon\.load_state_dict: a saved group has no option"):
        Muon(pair()).load_state_dict(theirs.state_dict())


def test_a_state_that_does_not_fit_is_refused_at_load():
    ours = Muon(pair(), **OPTIONS)
    step_both([ours], 1)
    state = ours.state_dict()
    swapped = Muon(pair()[::-1])
    with pytest.raises(
        ValueError,
        match=r"momentum_buffer of parameter 0 has shape \(4, 6\), and the parameter has",
    ):
        swapped.load_state_dict(state)
    state["param_groups"][0]["orthogonalize"] = False
    with pytest.raises(
        ValueError,
        match="parameter 0 has momentum_buffer, and a group with orthogonalize=False needs",
    ):
        Muon(pair()).load_state_dict(state)
    with pytest.raises(ValueError, match="parameter group"):
        Muon([pair()[0]]).load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        Muon([{"params": [each]} for each in pair()]).load_state_dict(ours.state_dict())


class Scaled(nn.Module):
    """A matrix of a block, and a scalar, of which one rank has no element."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.blocks[0](x) * self.scale


# Regression: the rank without an element of the scalar refused its own state.
@on_two_ranks
def test_a_state_of_a_scalar_is_loaded_on_the_rank_that_has_no_element_of_it(context):
    x = torch.arange(8.0).view(2, 4)
    for name in ("zero1", "zero2", "fsdp"):
        found = []
        for resumes in (False, True):
            torch.manual_seed(0)
            wrapper, optimizer = STRATEGIES[name].build(
                Scaled(), context.group, Muon, {"lr": 0.02, "weight_decay": 0.1}
            )
            for step in range(3):
                wrapper(x).square().sum().backward()
                wrapper.finish_gradient_synchronization()
                optimizer.step()
                optimizer.zero_grad()
                if resumes and step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
            found.append(wrapper.full_parameters())
            wrapper.close()
        for key, value in found[0].items():
            assert torch.equal(value, found[1][key])
