"""The training step: clipping, accumulation, the loss scale, and its phases."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distlab.bench.reference import parameter_difference
from distlab.bench.task import Task
from distlab.bench.variant import variants
from distlab.comm import collectives
from distlab.model import TransformerLM, preset
from distlab.parallel import Local, get_strategy
from distlab.train.data import SyntheticTokens
from distlab.train.scaler import LossScaler
from distlab.train.step import TrainStep
from tests.parallel.test_contract import on_two_ranks


def sum_loss(model, x):
    return model(x).sum()


@pytest.mark.parametrize(
    "micro_batches, limit, scale",
    [
        ([2.0, 4.0], 0.5, None),  # the mean gradient is 3
        ([3.0], 0.5, 1024.0),
        ([1e-6], 1e-6, None),  # a norm as small as the epsilon: half of it, as torch does
        ([1e-6], 1e-6, 4.0),
    ],
    ids=["mean", "scaled", "epsilon", "epsilon-scaled"],
)
def test_the_mean_gradient_is_clipped_by_its_own_norm(one_rank, micro_batches, limit, scale):
    """Under fp16's loss scale too: the norm is taken, and clipped, as if there were none."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=1.0),
        scale and LossScaler(scale=scale),
    )
    step = TrainStep(
        Local(model), optimizer, sum_loss, max_grad_norm=limit, scaler=scaler, context=one_rank
    )
    norm = sum(micro_batches) / len(micro_batches)
    assert step([torch.tensor([[x]]) for x in micro_batches]).item() == 0.0
    assert step.grad_norm.item() == pytest.approx(norm)
    expected = -limit * norm / (norm + 1e-6)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[expected]]), rtol=1e-5, atol=0)


class HostTensors(TorchDispatchMode):
    """Notes operators that read a tensor on the host, or return a value to it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        reads = func is torch.ops.aten._local_scalar_dense.default
        if reads or any(tensor.device.type == "cpu" for tensor in tensors):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def sum_and_count(model, x):
    return model(x).sum(), len(x)


@pytest.mark.parametrize("loss_fn", [sum_loss, sum_and_count])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_step_copies_nothing_from_the_host(loss_fn, micro_batches, limit):
    """On a GPU, such a copy waits for all kernels that are queued."""
    with torch.device("meta"):
        model = nn.Linear(4, 3)
        batches = [torch.empty(2, 4) for _ in range(micro_batches)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
    step = TrainStep(Local(model), optimizer, loss_fn, max_grad_norm=limit)
    with HostTensors() as seen:
        total = step(batches)
    assert seen.names == [] and total.device.type == "meta"


@pytest.mark.parametrize("strategy", ["torch-ddp", "torch-ddp-tuned", "torch-zero", "bucketed"])
@on_two_ranks
def test_peers_accumulate_as_one_process_does(context, strategy):
    """Two steps of three micro-batches, whose first backward of all is under no_sync.

    torch's static graph failed where its first backward did not synchronize.
    """
    config = preset(
        "tiny", num_layers=2, d_model=32, d_ff=48, num_heads=2, vocab_size=31, context_length=8
    )

    def thrice(rank, step, device):
        data = SyntheticTokens(
            config.vocab_size, 2, config.context_length, seed=0, rank=rank, device=device
        )
        return [data.batch(3 * step + number) for number in range(3)]

    task = Task(lambda seed, device: TransformerLM(config, device=device, seed=seed), thrice)
    (variant,) = variants([strategy], [0.02])
    assert parameter_difference(context, variant, steps=2, task=task) < 1e-6


COUNTS = [[1, 5, 2], [4, 1, 3]]  # examples of each micro-batch of each rank


def square_sum_and_count(model, x):
    return model(x).square().sum(), len(x)


@pytest.mark.parametrize(
    "limit, scale", [(None, None), (0.1, None), (0.1, 1024.0)], ids=["plain", "clipped", "scaled"]
)
@pytest.mark.parametrize("strategy", ["naive", "bucketed", "zero1", "zero2", "fsdp", "torch-ddp"])
@on_two_ranks
def test_a_sum_and_a_count_weigh_all_examples_of_all_ranks_alike(context, strategy, limit, scale):
    """Two steps of three micro-batches of different sizes, against one batch of all examples."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    model, optimizer = get_strategy(strategy).build(
        copy.deepcopy(alone), context.group, torch.optim.SGD, {"lr": 0.1}
    )
    train = TrainStep(
        model,
        optimizer,
        square_sum_and_count,
        max_grad_norm=limit,
        scaler=scale and LossScaler(scale=scale),
        context=context,
    )
    for _ in range(2):
        batches = []  # of each rank
        for counts in COUNTS:
            batches.append([torch.randn(count, 3) for count in counts])
        loss = train(batches[context.rank])
        examples = torch.cat([*itertools.chain.from_iterable(batches)])
        reference.zero_grad()
        expected = alone(examples).square().sum() / len(examples)
        expected.backward()
        if limit is not None:
            norm = nn.utils.clip_grad_norm_(alone.parameters(), limit)
            torch.testing.assert_close(train.grad_norm, norm)
        reference.step()
        losses = collectives.gather_objects(loss.item(), context.group)
        assert sum(losses) / 2 == pytest.approx(expected.item(), rel=1e-5)
    trained = model.full_state_dict()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-5, atol=1e-6)
