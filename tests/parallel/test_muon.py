"""Muon steps shards as torch's steps whole matrices in one process, and sends what its placements' docstrings say."""

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
    ("naive", "all"), ("bucketed", "all"), ("sharded-optimizer", "owner"),
    ("zero1", "gather"), ("zero1", "exchange"), ("fsdp", "gather"), ("fsdp", "exchange"),
]  # fmt: skip


class Weighted(nn.Module):
    """Matrices of blocks, one of them transposed, a head and biases; the loss is linear in all of them."""

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
    """Whole numbers stay such in a mean over ranks of so many times the loss. Slices end inside of matrices."""
    options = OPTIONS if placement in ("all", "owner") else OPTIONS | {"placement": placement}
    model, optimizer = STRATEGIES[strategy].build(build(), context.group, Muon, options, bucket_size_mb=2e-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, context.rank, step, context.world_size)
        model.finish_gradient_synchronization()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.ranks
def test_every_placement_and_strategy_is_bit_for_bit_one_process(context, world_size):
    """Tall, wide, square and transposed matrices, cut within rows (ZeRO-1) and by rows (FSDP); some ranks have none."""
    expected = in_one_process(world_size)
    for strategy, placement in CELLS:
        model, _ = train(context, strategy, placement)
        for (name, mine), other in zip(model.full_parameters().items(), expected, strict=True):
            assert torch.equal(mine, other), f"{strategy} {placement} {name}: {(mine - other).abs().max()}"
        model.close(restore=False)


@on_two_ranks
def test_a_shard_that_was_stored_is_loaded_as_a_tensor_of_its_own(context):
    """By `torch.load` as it comes, which takes few classes, and no group of ranks."""
    file = io.BytesIO()
    torch.save(FSDP(nn.Linear(4, 4), process_group=context.group).module.weight, file)
    file.seek(0)
    assert spread_of(torch.load(file)) is None


@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}])
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
    """On a GPU the products of a batch may be summed in another order: by what bf16 rounds, in five iterations."""
    matrices = torch.randn(3, 96, 64, device="cuda")
    together, alone = (
        torch.cat([orthogonalize(some, (3.4445, -4.7750, 2.0315), 5, 1e-7) for some in matrices.split(number)])
        for number in (3, 1)
    )
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
    assert {*matrices["params"], *rest["params"]} == {*model.parameters()} and not rest["orthogonalize"]


@pytest.mark.parametrize(
    "message, options",
    [
        (r"shape \(3,\) is no matrix.*orthogonalize=False", {}),
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
