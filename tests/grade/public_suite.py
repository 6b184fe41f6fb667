"""A suite in the form of the public ones, written from the handout's description.

It compares wrappers with one process on two ranks with equal shares of a batch, the sharded
optimizer with AdamW, FSDP's parameters with those of one process, and kernels with torch at one
shape. `test_faults.py` counts which of the planted faults it finds.
"""

import importlib
import sys
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

NEAR = {"rtol": 1e-5, "atol": 1e-6}
ATTENTION = {"rtol": 1e-2, "atol": 1e-2}


class Toy(nn.Module):
    """Three layers and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 50, bias=False)
        self.third = nn.Linear(50, 5, bias=False)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class TiedToy(nn.Module):
    """Layers of which two share a weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 50, bias=False)
        self.second = nn.Linear(50, 10, bias=False)
        self.third = nn.Linear(10, 50, bias=False)
        self.fourth = nn.Linear(50, 5, bias=False)
        self.third.weight = self.first.weight

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.fourth(torch.relu(self.third(x)))


def load(folder, style):
    """Import a submission in this process, which belongs to the tests."""
    for name in ("classes", "closures", "flat_buffers"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(style)
    finally:
        sys.path.remove(folder)


def passes(context, folder, style, part):
    """Return whether a part of a submission passes the suite on this rank."""
    hooks = load(folder, style)
    try:
        if part == "sharded-optimizer":
            sharded_optimizer(hooks)
        elif part == "fsdp":
            fsdp(hooks, context.rank)
        elif part.startswith("attention"):
            attention(hooks)
        elif part.startswith("rmsnorm"):
            rmsnorm(hooks)
        else:
            data_parallel(hooks, part, context.rank)
    except Exception as error:  # an assertion, or an error of the submission
        print(f"rank {context.rank}: {type(error).__name__}: {error}"[:300])
        return False
    return True


def data_parallel(hooks, part, rank):
    """Compare a wrapper with one process over five steps. Ranks have different seeds."""
    for model_class in (Toy, TiedToy):
        for size_mb in (0.0016, 0.0001, 0.01) if part == "ddp-bucketed" else (None,):
            torch.manual_seed(rank)
            alone = model_class()
            module = deepcopy(alone)
            before_batch = None
            if part == "ddp-bucketed":
                model = hooks.get_ddp_bucketed(module, size_mb)
                after_backward = hooks.ddp_bucketed_on_after_backward
                before_batch = hooks.ddp_bucketed_on_train_batch_start
            elif part == "ddp":
                model = hooks.get_ddp(module)
                after_backward = hooks.ddp_on_after_backward
            else:
                model = hooks.get_ddp_individual_parameters(module)
                after_backward = hooks.ddp_individual_parameters_on_after_backward
            for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
                is_as_built = torch.allclose(mine, theirs)
                assert is_as_built == (rank == 0 or not mine.requires_grad)
            five_steps(model, module, alone, rank, before_batch, after_backward)


def five_steps(model, module, alone, rank, before_batch, after_backward):
    """Train both, one of them on the whole batch, and compare them on rank 0."""
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (
        torch.randn(20, 10, generator=generator),
        torch.randn(20, 5, generator=generator),
    )
    mine = slice(10 * rank, 10 * rank + 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        optimizer_alone.zero_grad()
        F.mse_loss(alone(inputs), targets).backward()
        optimizer_alone.step()
        if before_batch is not None:
            before_batch(model, optimizer)
        F.mse_loss(model(inputs[mine]), targets[mine]).backward()
        after_backward(model, optimizer)
        optimizer.step()
        if rank == 0:
            for seen, expected in zip(module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(seen, expected, **NEAR)


def sharded_optimizer(hooks):
    """Compare ten steps with AdamW's. Ranks have equal seeds."""
    torch.manual_seed(42)
    alone = Toy()
    model = deepcopy(alone)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizer = hooks.get_sharded_optimizer(model.parameters(), torch.optim.AdamW, **options)
    optimizer_alone = torch.optim.AdamW(alone.parameters(), **options)
    for _ in range(10):
        inputs, targets = torch.rand(32, 10), torch.rand(32, 5)
        for each, its_optimizer in ((model, optimizer), (alone, optimizer_alone)):
            its_optimizer.zero_grad()
            F.mse_loss(each(inputs), targets).backward()
            its_optimizer.step()
    for seen, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(seen, expected, **NEAR)


def fsdp(hooks, rank):
    """Compare gathered parameters with one process over three steps. Ranks have equal seeds."""
    for dtype, near in ((None, NEAR), (torch.float16, {"rtol": 2e-2, "atol": 2e-3})):
        torch.manual_seed(42)
        alone = Toy()
        del alone.fixed
        module = deepcopy(alone)
        model = hooks.get_fsdp(module) if dtype is None else hooks.get_fsdp(module, dtype)
        inputs, targets = torch.randn(20, 10), torch.randn(20, 5)
        mine = slice(10 * rank, 10 * rank + 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer_alone.zero_grad()
            F.mse_loss(alone(inputs), targets).backward()
            optimizer_alone.step()
            outputs = model(inputs[mine].to(dtype or torch.float32))
            F.mse_loss(outputs.float(), targets[mine]).backward()
            hooks.fsdp_on_after_backward(model, optimizer)
            optimizer.step()
        full = hooks.fsdp_gather_full_params(model)
        for name, expected in alone.named_parameters():
            torch.testing.assert_close(full[name].float(), expected, **near)


def attention(hooks):
    """Compare attention at one shape with torch's, with and without a causal mask."""
    function = hooks.get_flashattention_autograd_function_pytorch()
    for is_causal in (False, True):
        torch.manual_seed(0)
        inputs = [torch.randn(4, 128, 64, requires_grad=True) for _ in range(3)]
        upstream = torch.randn(4, 128, 64)
        expected = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
        expected_gradients = torch.autograd.grad(expected, inputs, upstream)
        seen = function.apply(*inputs, is_causal)
        shapes = [each.shape for each in seen.grad_fn.saved_tensors]
        assert torch.Size((4, 128)) in shapes
        torch.testing.assert_close(seen, expected, **ATTENTION)
        gradients = torch.autograd.grad(seen, inputs, upstream)
        for mine, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(mine, theirs, **ATTENTION)


def rmsnorm(hooks):
    """Compare RMSNorm at one shape with torch's."""
    torch.manual_seed(0)
    x = torch.randn(8, 128, 64, requires_grad=True)
    g = torch.randn(64, requires_grad=True)
    upstream = torch.randn(8, 128, 64)
    expected = F.rms_norm(x, (64,), g, 1e-5)
    expected_gradients = torch.autograd.grad(expected, (x, g), upstream)
    seen = hooks.get_rmsnorm_autograd_function_pytorch().apply(x, g)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(seen, (x, g), upstream)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
