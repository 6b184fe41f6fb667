"""The adapters as a course's suite uses them: two gloo ranks as `mp.spawn` starts them, on CPUs or sharing a GPU,
people's own layers, warnings as errors.

Behaviour, not any suite's text: every form is driven through its one-line adapter module, against one process that
trains on all data.
"""

import copy
import importlib
import multiprocessing
import os
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from distlab import course
from distlab.testing import PRELOADED
from kernels import reference
from tests.course_adapters import form_2024, form_2025, form_2026

WORLD_SIZE, STEPS = 2, 4
FORMS = {"2024": form_2024, "2025": form_2025, "2026": form_2026}
# What each year's suite imports.
ASKED = {
    "2024": """get_rmsnorm_autograd_function_pytorch get_rmsnorm_autograd_function_triton rmsnorm_backward_g_pytorch
        rmsnorm_backward_x_pytorch get_ddp_individual_parameters ddp_individual_parameters_on_after_backward
        get_ddp_bucketed ddp_bucketed_on_after_backward ddp_bucketed_on_train_batch_start get_sharded_optimizer""",
    "2025": """get_flashattention_autograd_function_pytorch get_flashattention_autograd_function_triton
        get_ddp_individual_parameters ddp_individual_parameters_on_after_backward get_ddp_bucketed
        ddp_bucketed_on_after_backward ddp_bucketed_on_train_batch_start get_sharded_optimizer""",
    "2026": """get_flashattention_autograd_function_pytorch get_flashattention_autograd_function_triton get_ddp
        ddp_on_after_backward get_fsdp fsdp_on_after_backward fsdp_gather_full_params get_sharded_optimizer""",
}


@pytest.mark.parametrize("year", FORMS)
def test_one_import_line_answers_a_whole_suite(year):
    for name in ASKED[year].split():
        assert callable(getattr(FORMS[year], name)), name
    lines = [line for line in Path(FORMS[year].__file__).read_text().splitlines() if line]
    assert len(lines) == 1 and set(course.__all__) >= set(ASKED[year].split())


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])

# -- models as students write them -----------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) * d_in**-0.5)

    def forward(self, x):
        return x @ self.weight.T


class Embedding(nn.Module):
    def __init__(self, rows: int, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, d))

    def forward(self, tokens):
        return self.weight[tokens]


class RMSNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


class OwnLM(nn.Module):
    """Embedding, three blocks and a head, none of torch's layers; rows that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.embedding = Embedding(13, 6)
        blocks = [nn.Sequential(RMSNorm(6), Linear(6, 9), nn.ReLU(), Linear(9, 6)) for _ in range(3)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(6)
        self.head = Linear(6, 13)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class Frozen(nn.Module):
    """A frozen vector that takes part in forward, biases, a ReLU."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(7, 12, bias=False)
        self.two = nn.Linear(12, 5)
        self.fixed = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)

    def forward(self, x):
        return torch.relu(self.two(torch.relu(self.one(x)))) * self.fixed


class Tied(nn.Module):
    """Two layers that share one matrix."""

    def __init__(self):
        super().__init__()
        self.into, self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 9, bias=False), nn.Linear(9, 5)
        self.again = nn.Linear(9, 9, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.again(torch.tanh(self.first(self.into(x))))))


MODELS = {"frozen": Frozen, "tied": Tied}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
}

# -- two processes, as suites start them -----------------------------------------------------------------------


def spawn(fn, *args):
    """`fn(rank, *args)` on two gloo ranks; a warning on either is an error.

    Suites call `mp.spawn`, whose processes import torch anew; those of the fork server have it.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.path.join(folder, "store"), fn, args)
        mp.start_processes(_rank, args=arguments, nprocs=WORLD_SIZE, start_method="forkserver")


def _rank(rank, store, fn, args):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=20)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=timeout
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(rank, *args)
    dist.destroy_process_group()


def build(cls, seed, device):
    torch.manual_seed(seed)
    return cls().to(device)


def vectors(step, device):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(20, d, generator=generator).to(device) for d in (7, 5)]


def words(step, rows, device):
    return torch.randint(13, (rows, 5), generator=torch.Generator().manual_seed(step)).to(device)


def mine(rank, *tensors):
    return [tensor.chunk(WORLD_SIZE)[rank] for tensor in tensors]


# What a sum over 20 rows in one order and in another may differ by, in fp32 and after some steps. AdamW divides by
# √v: there a rounding error of a gradient near zero is as large as the gradient, times the rate.
TOLERANCE = {"sgd": {"rtol": 1e-5, "atol": 1e-6}, "adamw": {"rtol": 1e-4, "atol": 1e-4}}


def ddp(rank, device):
    """All wrappers of all forms × models × optimizers, step by step beside one process."""
    wrappers = {
        "individual": (
            form_2025.get_ddp_individual_parameters,
            form_2025.ddp_individual_parameters_on_after_backward,
        ),
        "2026": (form_2026.get_ddp, form_2026.ddp_on_after_backward),
    }
    for size in (0.0016, 0.0001, 0.01, None):
        wrappers[f"bucketed {size}"] = (
            lambda module, size=size: form_2024.get_ddp_bucketed(module, size),
            form_2024.ddp_bucketed_on_after_backward,
        )
    for wrap, after in wrappers.values():
        for cls in MODELS.values():
            for name, (optimizer_cls, options) in OPTIMIZERS.items():
                train_ddp(rank, device, wrap, after, cls, optimizer_cls, options, TOLERANCE[name])


def train_ddp(rank, device, wrap, after, cls, optimizer_cls, options, tolerance):
    base, local = build(cls, 0, device), build(cls, rank, device)  # rank 1 starts elsewhere
    model = wrap(copy.deepcopy(local))
    assert model.module is not None
    for (name, whole), wrapped in zip(base.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(whole, wrapped), name
    if rank == 1:
        assert not torch.equal([*local.parameters()][-1], [*model.parameters()][-1])
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len([*base.named_parameters()])  # tied stays tied
    optimizer, whole_optimizer = (optimizer_cls(m.parameters(), **options) for m in (model, base))
    for step in range(STEPS):
        optimizer.zero_grad()
        whole_optimizer.zero_grad()
        x, y = vectors(step, device)
        nn.functional.mse_loss(base(x), y).backward()
        form_2025.ddp_bucketed_on_train_batch_start(ddp_model=model, optimizer=optimizer)
        x, y = mine(rank, x, y)
        nn.functional.mse_loss(model(x), y).backward()
        after(ddp_model=model, optimizer=optimizer)
        for parameter in model.parameters():
            assert parameter.requires_grad or parameter.grad is None
        whole_optimizer.step()
        optimizer.step()
        for whole, parameter in zip(base.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(parameter, whole, **tolerance)


@DEVICES
def test_ddp_follows_one_process(device):
    spawn(ddp, device)


def sharded_optimizer(rank, device):
    for cls in (Frozen, Tied, OwnLM):
        for optimizer_cls, options in OPTIMIZERS.values():
            model, plain = build(cls, 3, device), build(cls, 3, device)
            optimizer = course.get_sharded_optimizer(model.parameters(), optimizer_cls, **options)
            whole = optimizer_cls(plain.parameters(), **options)
            for step in range(STEPS):
                for net, stepper in ((model, optimizer), (plain, whole)):
                    stepper.zero_grad()
                    out = net(words(step, 4, device) if cls is OwnLM else vectors(step, device)[0])
                    out.square().mean().backward()
                    stepper.step()
            for sharded, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(sharded, expected)  # the same arithmetic on whole parameters
            assert len(optimizer.state) < len(plain.state_dict())
            assert optimizer.param_groups[0]["lr"] == options["lr"]


@DEVICES
def test_the_sharded_optimizer_equals_the_plain_one(device):
    spawn(sharded_optimizer, device)


def fsdp(rank, device):
    for compute_dtype, name in (
        (None, "sgd"),
        (torch.float32, "adamw"),
        (torch.float16, "sgd"),
        (torch.float16, "adamw"),
    ):
        train_fsdp(rank, device, compute_dtype, *OPTIMIZERS[name], name)


def train_fsdp(rank, device, compute_dtype, optimizer_cls, options, name):
    base = build(OwnLM, 0, device)
    shapes = {n: p.shape for n, p in base.named_parameters()}
    model = course.get_fsdp(build(OwnLM, rank, device), compute_dtype=compute_dtype)
    optimizer, whole_optimizer = (optimizer_cls(m.parameters(), **options) for m in (model, base))
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held < 0.7 * sum(parameter.numel() for parameter in base.parameters())
    for step in range(STEPS):
        tokens = words(step, 8, device)
        optimizer.zero_grad()
        whole_optimizer.zero_grad()
        token_loss(base, tokens).backward()
        (share,) = mine(rank, tokens)
        with torch.no_grad():
            assert model(share).dtype == (compute_dtype or torch.float32)
        token_loss(model, share).backward()
        course.fsdp_on_after_backward(fsdp_model=model, optimizer=optimizer)
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32 and parameter.grad.dtype == torch.float32
            assert parameter.grad.shape == parameter.shape
        optimizer.step()
        whole_optimizer.step()
        full = course.fsdp_gather_full_params(model)
        assert {n: p.shape for n, p in full.items()} == shapes
        if compute_dtype is torch.float16:
            # fp16 forward against fp32: 2⁻¹¹ relative per operation; AdamW makes a rounding near zero a step of the
            # rate, 0.01, so only what all steps together can be is certain there.
            tolerance = {"rtol": 0.01, "atol": 2.1 * 0.01 * STEPS if name == "adamw" else 2e-3}
        else:
            tolerance = TOLERANCE[name]
        for parameter_name, expected in base.named_parameters():
            torch.testing.assert_close(full[parameter_name], expected.detach(), **tolerance)


def token_loss(model, tokens):
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


@DEVICES
def test_fsdp_shards_peoples_own_layers(device):
    """RELIABILITY 28, 29, 31."""
    spawn(fsdp, device)


# -- kernels ---------------------------------------------------------------------------------------------------


def draw(device, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def naive_attention(q, k, v, is_causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@DEVICES
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("form", [form_2025, form_2026])
@pytest.mark.parametrize("which", ["pytorch", "triton"])
def test_attention_saves_one_number_per_row(which, form, is_causal, device):
    apply = getattr(form, f"get_flashattention_autograd_function_{which}")().apply
    q, k, v, do = draw(device, *[(2, 48, 16)] * 4)
    for x in (q, k, v):
        x.requires_grad_()
    o = apply(q, k, v, is_causal)
    expected, lse = naive_attention(q, k, v, is_causal)
    saved = [t for t in o.grad_fn.saved_tensors if t.shape == q.shape[:-1]]
    assert len(saved) == 1
    # A sum of 48 products in fp32, in tiles instead of whole; on a GPU of parts in TF32.
    torch.testing.assert_close(saved[0], lse, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(o, expected, rtol=2e-5, atol=2e-5)
    ours = torch.autograd.grad(o, (q, k, v), do)
    for gradient, theirs in zip(ours, torch.autograd.grad(expected, (q, k, v), do), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-5)


@DEVICES
@pytest.mark.parametrize("which", ["pytorch", "triton"])
def test_rmsnorm_and_its_backward_by_hand(which, device):
    x, g, dy = draw(device, (4, 7, 20), (20,), (4, 7, 20))
    for leaf in (x, g):
        leaf.requires_grad_()
    y = getattr(form_2024, f"get_rmsnorm_autograd_function_{which}")().apply(x, g)
    expected = reference.rms_norm(x, g, 1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    dx, dg = torch.autograd.grad(expected, (x, g), dy)
    y.backward(dy)
    with torch.no_grad():  # as a student's own backward calls them
        by_hand = [
            f(dy, x, g) for f in (form_2024.rmsnorm_backward_x_pytorch, form_2024.rmsnorm_backward_g_pytorch)
        ]
    for ours, alone, theirs in zip((x.grad, g.grad), by_hand, (dx, dg), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone, theirs, rtol=1e-4, atol=1e-5)
        assert not alone.requires_grad


def test_importing_the_adapters_warns_of_nothing_and_prints_nothing(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(course)
    assert capfd.readouterr() == ("", "")
