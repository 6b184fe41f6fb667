"""FSDP's parameters keep their dimensions: what optimizers and modules see of them, and what is sent for it."""


import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.comm import RankContext
from distlab.parallel import ShardedOptimizer
from distlab.parallel.fsdp import FSDP
from tests.parallel.test_contract import BACKENDS, assert_same_on_all_ranks, run
from tests.parallel.test_fsdp import own_loss, own_model
from tests.parallel.test_zero1 import Said, Scaled


class Reads(nn.Module):
    """Reads a matrix that another module owns."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embedding(tokens)).to(self.embedding.weight.dtype)
        assert self.embedding.weight.shape == (11, 6)
        return F.linear(x, self.embedding.weight)


def reads(context: RankContext) -> None:
    refused = FSDP(Reads().to(context.device), torch.bfloat16, process_group=context.group)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"reads 'embedding.weight' while its unit 'embedding' is not gathered"):
            refused(torch.arange(8, device=context.device).view(2, 4))
        assert refused.module.embedding.weight is refused.get_parameter("module.embedding.weight")
    for module in (nn.ParameterList([torch.zeros(2, 2)]), nn.ParameterDict({"a": torch.zeros(2, 2)})):
        with pytest.raises(ValueError, match=r"has no forward.*wrap the module whose forward reads them"):
            FSDP(module, process_group=context.group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_read_that_cannot_be_served_is_an_error(backend):
    """Not a shard; random models have what is read where it is gathered."""
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
