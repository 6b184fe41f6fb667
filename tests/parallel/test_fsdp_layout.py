"""FSDP's parameters keep their dimensions: what optimizers and modules see of them, and what is sent for it."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.comm import RankContext
from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel import ShardedOptimizer
from distlab.parallel.fsdp import FSDP
from distlab.parallel.fsdp import layout as planning
from distlab.theory import volume as closed_form
from tests.parallel.test_contract import BACKENDS, assert_same_on_all_ranks, run
from tests.parallel.test_fsdp import OneProcess, full_gradients, own_loss, own_model
from tests.parallel.test_zero1 import Said, Scaled

ONE_BUFFER, ONE_PER_ROW_LENGTH = planning.WORTH_A_BUFFER, 0


def inputs(rank: int, step: int, device: torch.device) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step)).to(device)


class Shapes(nn.Module):
    """Parameters of all shapes: no elements, a scalar, one row, fewer rows than ranks, 3-D, 4-D, transposed."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.no_rows = nn.Parameter(torch.empty(0, 5))
        self.no_columns = nn.Parameter(torch.empty(4, 0))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.few = nn.Parameter(torch.randn(2, 6))
        self.experts = nn.Parameter(torch.randn(2, 6, 5) * 0.4)
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(13, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.row + x @ self.column
        mixed = torch.cat([torch.einsum("bi,eij->bj", x, self.experts), self.no_rows])
        image = self.conv((x @ self.transposed)[:, :2, None, None].expand(-1, 2, 4, 4)).mean((2, 3))
        nothing = x[:, :4] @ self.no_columns
        return self.head(torch.cat([mixed, image, nothing, x @ self.few.T, x[:, :3]], dim=1)) * self.scalar


def with_decay_on_matrices(parameters) -> torch.optim.Optimizer:
    """As everybody writes it."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.dim() < 2]},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def train_shapes(context: RankContext, worth: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Shapes().to(context.device)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step, context.device)).square().mean()

    with mock.patch.object(planning, "WORTH_A_BUFFER", worth):
        fsdp = FSDP(make(), process_group=context.group)
    one = OneProcess(make, context.world_size, torch.optim.SGD)
    one.optimizer = with_decay_on_matrices(one.model.parameters())
    optimizer = with_decay_on_matrices(fsdp.parameters())
    for step in range(4):
        optimizer.zero_grad()
        one.zero_grad()
        loss(fsdp, context.rank, step).backward()
        fsdp.finish_gradient_synchronization()
        one.backward(lambda model, rank, step=step: loss(model, rank, step))
        norm, expected_norm = (
            fsdp.clip_grad_norm_(0.5),
            nn.utils.clip_grad_norm_(one.model.parameters(), 0.5),
        )
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
        optimizer.step()
        one.optimizer.step()
        full = fsdp.gather_full_params()
        for (name, shard), whole in zip(fsdp.module.named_parameters(), one.model.parameters(), strict=True):
            assert shard.ndim == whole.ndim and shard.grad.shape == shard.shape, name
            assert shard.ndim < 2 or shard.shape[0] <= whole.shape[0] or whole.numel() == 0, name
            if whole.ndim >= 2 and whole.shape[0] >= context.world_size and whole.is_contiguous():
                assert shard.shape[1:] == whole.shape[1:], name
            # Clipping multiplies by a norm that was summed in another order.
            torch.testing.assert_close(full[name], whole, rtol=1e-5, atol=1e-6)
        fsdp.load_full_params(dict(one.model.named_parameters()))
    assert_same_on_all_ranks(list(full.values()), context)
    state = {name: value.clone() for name, value in fsdp.state_dict().items()}
    with torch.no_grad():
        for parameter in fsdp.parameters():
            parameter.zero_()
    fsdp.load_state_dict(state)
    for name, whole in one.model.named_parameters():
        assert torch.equal(fsdp.gather_full_params()[name], whole), name


def shapes(context: RankContext) -> None:
    for worth in (ONE_BUFFER, ONE_PER_ROW_LENGTH):
        train_shapes(context, worth)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_shape_keeps_its_dimensions_and_trains(world_size, backend):
    """RELIABILITY 29: weight decay on `p.dim() >= 2` decays what it does unsharded, clipping, state."""
    run(shapes, world_size, backend=backend)


class Reads(nn.Module):
    """Reads what it does not own, or what is owned by a module that is never called."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.embedding, self.body = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.loose = nn.ParameterList([torch.randn(6, 6), torch.randn(6)])
        self.named = nn.ParameterDict({"scale": torch.randn(1, 6)})
        self.head = nn.Linear(6, 11, bias=False)
        if how == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embedding(tokens)).to(self.head.weight.dtype)
        assert self.head.weight.shape == (11, 6)
        x = (x @ self.loose[0] + self.loose[1]) * self.named["scale"]
        if self.how == "read":
            return F.linear(x, self.embedding.weight)
        return torch.tanh(self.head(x))


def reads(context: RankContext) -> None:
    def make(how: str) -> nn.Module:
        torch.manual_seed(0)
        return Reads(how).to(context.device)

    tokens = torch.arange(8, device=context.device).view(2, 4) + context.rank
    refused = FSDP(make("read"), torch.bfloat16, process_group=context.group)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"reads 'embedding.weight' while its unit 'embedding' is not gathered"
        ):
            refused(tokens)
        assert refused.module.embedding.weight is refused.get_parameter("module.embedding.weight")
    for how in ("call", "tied"):
        fsdp = FSDP(make(how), process_group=context.group)
        one = OneProcess(lambda how=how: make(how), context.world_size, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            fsdp.zero_grad()
            one.zero_grad()
            fsdp(tokens).square().mean().backward()
            fsdp.finish_gradient_synchronization()
            one.backward(lambda model, rank: model(tokens - context.rank + rank).square().mean())
            for name, gradient in full_gradients(fsdp, context).items():
                assert torch.equal(gradient, one.model.get_parameter(name).grad), name
    for module in (nn.ParameterList([torch.zeros(2, 2)]), nn.ParameterDict({"a": torch.zeros(2, 2)})):
        with pytest.raises(ValueError, match=r"has no forward.*wrap the module whose forward reads them"):
            FSDP(module, process_group=context.group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_another_module_reads(backend):
    """Those of a `ParameterList` are gathered for its reader; a read that cannot be served is an error, not a shard."""
    run(reads, 2, backend=backend)


def try_optimizers(context: RankContext) -> None:
    fsdp = FSDP(own_model(0, context.device), process_group=context.group)
    matrices = [p for p in fsdp.parameters() if p.dim() >= 2]
    before = fsdp.gather_full_params()
    own_loss(fsdp, context.rank, 0, context.device).backward()
    fsdp.finish_gradient_synchronization()
    refused = {
        "Adafactor": torch.optim.Adafactor(fsdp.parameters(), lr=0.1),
        "LBFGS": torch.optim.LBFGS(fsdp.parameters()),
        "Scaled": Scaled(fsdp.parameters(), lr=0.1),
        "ShardedOptimizer": ShardedOptimizer(fsdp.parameters(), torch.optim.SGD, context.group, lr=0.1),
    }
    if hasattr(torch.optim, "Muon"):
        refused["Muon"] = torch.optim.Muon(matrices, lr=0.1)
    for name, optimizer in refused.items():
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{name} "):
                optimizer.step(lambda: 0.0)
    for name, parameter in fsdp.gather_full_params().items():
        assert torch.equal(parameter, before[name]), name
    # Vectors are whole on every rank: what steps them alone may do as it likes.
    groups = [{"params": matrices}, {"params": [p for p in fsdp.parameters() if p.dim() < 2]}]
    Said(groups, lr=0.1).step()
    torch.optim.Adafactor(groups[1]["params"], lr=0.1).step()
    after = fsdp.gather_full_params()
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert_same_on_all_ranks(list(after.values()), context)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_elementwise_is_refused_before_its_first_step(backend):
    """FSDP never sees the optimizer's construction; nothing is stepped, and people's own are."""
    run(try_optimizers, 2, backend=backend)


def volume(context: RankContext, worth: int) -> None:
    model = own_model(0, context.device)
    named = [(name.split(".")[:2], parameter) for name, parameter in model.named_parameters()]
    with (
        mock.patch.object(planning, "WORTH_A_BUFFER", worth),
        mock.patch.object(closed_form, "FSDP_WORTH_A_BUFFER", worth),
    ):
        expected = closed_form.fsdp(
            [parameter.numel() for _, parameter in named],
            [4] * len(named),
            [".".join(path) if parameter.ndim > 1 else None for path, parameter in named],
            shapes=[parameter.shape for _, parameter in named],
            world_size=context.world_size,
            compute_itemsize=2,
        )
        fsdp = FSDP(model, torch.float16, process_group=context.group)
    for step in range(2):  # the first one also compares the order of units
        with CollectiveRecorder() as recorder:
            own_loss(fsdp, context.rank, step, context.device).backward()
            fsdp.finish_gradient_synchronization()
    assert (recorder.count, recorder.total_bytes) == (expected.collectives, expected.bytes)
    # Embedding, three blocks of two row lengths, head; norms and biases together.
    assert recorder.count == 3 * (5 if worth else 8) + 1


def volumes(context: RankContext) -> None:
    for worth in (ONE_BUFFER, ONE_PER_ROW_LENGTH):
        volume(context, worth)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_sent_are_the_closed_form(world_size):
    """RELIABILITY 33: the padding to whole rows included, one buffer for a unit or one for each row length."""
    run(volumes, world_size)
