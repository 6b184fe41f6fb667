"""Muon steps shards as torch's steps whole matrices in one process, and sends what its placements' docstrings say."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from distlab.comm import RankContext
from distlab.measure.collectives import CollectiveRecorder
from distlab.optim import Muon
from distlab.parallel import STRATEGIES, Layout, ParallelModel
from distlab.parallel.muon import owners
from distlab.parallel.shard import Spread
from tests.parallel.test_contract import run

STEPS = 5
SMALL = 2e-4  # MiB: 209 bytes, so that buckets and their slices end inside of matrices
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
CELLS = [
    ("naive", "all"), ("bucketed", "all"), ("sharded-optimizer", "owner"),
    ("zero1", "gather"), ("zero1", "exchange"), ("fsdp", "gather"), ("fsdp", "exchange"),
]  # fmt: skip


class Weighted(nn.Module):
    """Matrices of blocks, beside an embedding, a head and biases; what it sums up is linear in all of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(*sizes) for sizes in ((4, 7), (7, 3), (6, 6), (2, 9)))
        transposed = nn.Linear(5, 8)
        transposed.weight = nn.Parameter(torch.randn(5, 8).t())
        self.blocks.append(transposed)
        self.head = nn.Linear(4, 5)

    def forward(self, generator: torch.Generator, times: int) -> Tensor:
        """A loss whose gradients are whole numbers, so that their sums over ranks are exact in any order."""

        def numbers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).float()

        loss = (self.embedding(torch.arange(5)) * numbers(5, 4) * times).sum()
        for layer in [*self.blocks, self.head]:
            rows, columns = layer.out_features, layer.in_features
            loss = loss + (layer(numbers(3, columns)) * numbers(3, rows) * times).sum()
        return loss


def build() -> Weighted:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Weighted()


def loss_of(model: nn.Module, rank: int, step: int, ranks: int) -> Tensor:
    """A rank's, times the ranks: the mean over ranks divides by their number, exactly."""
    return model(torch.Generator().manual_seed(100 * step + rank), ranks)


def in_one_process(ranks: int) -> list[Tensor]:
    """Parameters after five steps of torch's own optimizers, on gradients added up over the ranks' data."""
    model = build()
    matrices = [layer.weight for layer in model.blocks]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, **OPTIONS), torch.optim.AdamW(rest, **OPTIONS)]
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(ranks):
            loss_of(model, rank, step, 1).backward()
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


def make(context: RankContext, strategy: str, placement: str) -> tuple[ParallelModel, torch.optim.Optimizer]:
    options = OPTIONS if placement in ("all", "owner") else OPTIONS | {"placement": placement}
    return STRATEGIES[strategy].build(build(), context.group, Muon, options, bucket_size_mb=SMALL)


def differences(context: RankContext) -> dict[str, float]:
    expected = in_one_process(context.world_size)
    found = {}
    for strategy, placement in CELLS:
        model, optimizer = make(context, strategy, placement)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, context.rank, step, context.world_size).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        for (name, mine), other in zip(model.full_parameters().items(), expected, strict=True):
            found[f"{strategy} {placement} {name}"] = (mine - other).abs().max().item()
        model.close(restore=False)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_placement_and_strategy_is_bit_for_bit_one_process(world_size):
    """Tall, wide, square and transposed matrices, cut within rows (ZeRO-1) and by rows (FSDP); some ranks have none."""
    for found in run(differences, world_size):
        assert not {where: difference for where, difference in found.items() if difference}


def sent(context: RankContext) -> None:
    ranks = range(context.world_size)
    for strategy, placement in CELLS:
        model, optimizer = make(context, strategy, placement)
        loss_of(model, context.rank, 0, context.world_size).backward()
        model.finish_gradient_synchronization()
        with CollectiveRecorder() as recorder:
            optimizer.step()
        held = optimizer.local if strategy == "zero1" else optimizer
        expected = []
        if placement == "owner":
            total = 4 * sum(parameter.numel() for parameter in model.parameters())
            assert sum(call.bytes for call in recorder.calls) == total and recorder.count == context.world_size
            recorder.calls.clear()
        elif placement != "all":
            spreads = [matrix.spread for matrix in held.param_groups[0]["params"]]
            wholes = [spread.like.numel() for spread in spreads]
            of_rank = [sum(spread.counts[rank] for spread in spreads) for rank in ranks]
            assert sum(of_rank) == sum(wholes)
            owner = owners(spreads, context.world_size)
            owned = sum(whole for whole, rank in zip(wholes, owner, strict=True) if rank == context.rank)
            expected = {
                "gather": [("all_gather", 2 * context.world_size * max(of_rank))],
                "exchange": [("all_to_all", 2 * of_rank[context.rank]), ("all_to_all", 2 * owned)],
            }[placement]
        gathers = strategy == "zero1"  # its parameters, too
        calls = [(call.op, call.bytes) for call in recorder.calls if not (gathers and call.dtype == torch.float32)]
        assert calls == expected, (strategy, placement)
        model.close(restore=False)


def test_what_a_step_sends_is_the_closed_form():
    run(sent, 3)


def spread(rows: int, columns: int) -> Spread:
    return Spread(torch.empty(rows, columns, device="meta"), None, 0, None)


def test_work_is_divided_evenly():
    """The largest alone, the others together: 8·8·8 beside three of 4·4·8."""
    assert owners([spread(4, 8), spread(8, 8), spread(4, 8), spread(8, 4)], 2) == [1, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"ns_steps": 3, "momentum": 0.5}], ids=str
)
def test_one_process_is_bit_for_bit_torch(options, dtype):
    """But torch divides a bf16 momentum by its norm, without Nesterov, so that it is right for one step there."""
    matrices = [torch.randn(shape).to(dtype) for shape in ((8, 6), (6, 9), (5, 5), (1, 4))]
    others = [matrix.clone() for matrix in matrices]
    mine, reference = Muon(matrices, **OPTIONS, **options), torch.optim.Muon(others, **OPTIONS, **options)
    steps = 1 if options == {"nesterov": False} and dtype == torch.bfloat16 else STEPS
    for _ in range(steps):
        for matrix, other in zip(matrices, others, strict=True):
            matrix.grad = torch.randn(matrix.shape).to(dtype)
            other.grad = matrix.grad.clone()
        mine.step()
        reference.step()
    assert all(map(torch.equal, matrices, others))


def test_momentum_is_left_alone_by_what_is_orthogonalised():
    matrix = torch.ones(2, 2, dtype=torch.bfloat16)
    matrix.grad = torch.full((2, 2), 4.0, dtype=torch.bfloat16)
    optimizer = Muon([matrix], momentum=0.5, nesterov=False)
    optimizer.step()
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], torch.full_like(matrix, 2.0))


def test_blocks_are_split_from_the_rest():
    model = Weighted()
    model.blocks.append(nn.Linear(4, 5))
    model.blocks[-1].weight = model.head.weight  # tied: it is the head's
    model.blocks[0].weight.requires_grad_(False)
    matrices, rest = Muon.split(model)
    assert set(matrices["params"]) == {layer.weight for layer in model.blocks[1:5]}
    assert not rest["orthogonalize"]
    assert len(matrices["params"]) + len(rest["params"]) + 1 == len(list(model.parameters()))


def test_mistakes_are_refused():
    vector, matrix = torch.ones(3), torch.ones(3, 3)
    refused = {
        r"shape \(3,\) is no matrix.*orthogonalize=False": partial(Muon, [vector]),
        "ns_steps=0": partial(Muon, [matrix], ns_steps=0),
        "momentum=-1": partial(Muon, [matrix], momentum=-1),
        "adjust_lr_fn='none': give one of": partial(Muon, [matrix], adjust_lr_fn="none"),
        "placement='all': give one of 'gather'": partial(Muon, [matrix], placement="all"),
        "no child of an nn.ModuleList": partial(Muon.split, nn.Linear(2, 2)),
        "Muon is not known to be element-wise.*layout tp": partial(
            STRATEGIES["naive"].build, Weighted(), None, Muon, layout=Layout(tensor=2)
        ),
    }
    for message, mistake in refused.items():
        with pytest.raises(ValueError, match=message):
            mistake()
    optimizer = Muon([matrix])
    with pytest.raises(ValueError, match="is no matrix"):
        optimizer.add_param_group({"params": [vector]})
