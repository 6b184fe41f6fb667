"""The adapters as a course's suite uses them: two gloo ranks as `mp.spawn` starts them, on CPUs or
sharing a GPU, people's own layers, warnings as errors.

Behaviour, not any suite's text: every form is driven through its one-line adapter module, against
one process that trains on all data.
"""

import multiprocessing
import os
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distlab import course
from distlab.parallel import FSDP
from distlab.testing import PRELOADED
from kernels import reference
from kernels.flash_attention import FlashAttention2, FlashAttention2PyTorch
from kernels.rmsnorm import RMSNorm, RMSNormPyTorch
from tests.course_adapters import form_2024, form_2025, form_2026
from tests.parallel.test_fsdp import own_loss, own_model

WORLD_SIZE, STEPS = 2, 3
FORMS = {"2024": form_2024, "2025": form_2025, "2026": form_2026}
# What each year's suite imports.
ASKED = {
    "2024": """
        get_rmsnorm_autograd_function_pytorch get_rmsnorm_autograd_function_triton
        rmsnorm_backward_g_pytorch rmsnorm_backward_x_pytorch get_ddp_individual_parameters
        ddp_individual_parameters_on_after_backward get_ddp_bucketed
        ddp_bucketed_on_after_backward ddp_bucketed_on_train_batch_start
        get_sharded_optimizer
    """,
    "2025": """
        get_flashattention_autograd_function_pytorch
        get_flashattention_autograd_function_triton get_ddp_individual_parameters
        ddp_individual_parameters_on_after_backward get_ddp_bucketed
        ddp_bucketed_on_after_backward ddp_bucketed_on_train_batch_start
        get_sharded_optimizer
    """,
    "2026": """
        get_flashattention_autograd_function_pytorch
        get_flashattention_autograd_function_triton get_ddp ddp_on_after_backward get_fsdp
        fsdp_on_after_backward fsdp_gather_full_params get_sharded_optimizer
    """,
}


@pytest.mark.parametrize("year", FORMS)
def test_one_import_line_answers_a_whole_suite(year):
    for name in ASKED[year].split():
        assert callable(getattr(FORMS[year], name)), name
    lines = [line for line in Path(FORMS[year].__file__).read_text().splitlines() if line]
    assert len(lines) == 1 and set(course.__all__) >= set(ASKED[year].split())


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])

# -- two processes, as suites start them -----------------------------------------------------------


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


WRAPPERS = [  # wraps a module; is called after backward
    (
        form_2025.get_ddp_individual_parameters,
        form_2025.ddp_individual_parameters_on_after_backward,
    ),
    (form_2026.get_ddp, form_2026.ddp_on_after_backward),
    (
        lambda module: form_2024.get_ddp_bucketed(module, 0.0001),
        form_2024.ddp_bucketed_on_after_backward,
    ),
    (
        lambda module: form_2025.get_ddp_bucketed(module, None),
        form_2025.ddp_bucketed_on_after_backward,
    ),
    (form_2026.get_fsdp, form_2026.fsdp_on_after_backward),
    (
        lambda module: form_2026.get_fsdp(module, compute_dtype=torch.float16),
        form_2026.fsdp_on_after_backward,
    ),
]
FROZEN = {"frozen": ("blocks.0.up.weight", "blocks.1.bias", "norm.weight")}
# AdamW's ε is so large that a rounding of a gradient near zero makes no step of the rate
TRAINED = [
    ({"tied": True}, torch.optim.SGD, {"lr": 0.1}),
    (
        FROZEN,
        torch.optim.AdamW,
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.1},
    ),
]


def wrapped(rank, device):
    """All wrappers, step by step beside one process that trains on both ranks' tokens."""
    for (wrap, after), (changes, optimizer_cls, options) in product(WRAPPERS, TRAINED):
        base = own_model(0, device, **changes)
        model = wrap(own_model(rank, device, **changes))  # rank 1 starts elsewhere
        is_fsdp = isinstance(model, FSDP)
        tolerance = {"rtol": 1e-5, "atol": 1e-6}  # sums over tokens in two orders
        if is_fsdp:
            held = sum(parameter.numel() for parameter in model.parameters())
            whole = sum(parameter.numel() for parameter in base.parameters())
            assert held < whole
            if model.compute_dtype is torch.float16:
                # a ReLU near zero may differ; test_fsdp_models.py is exact
                tolerance = {"rtol": 0.01, "atol": 0.03}
        whole_optimizer = optimizer_cls(base.parameters(), **options)
        make = (
            optimizer_cls
            if is_fsdp
            else partial(course.get_sharded_optimizer, optimizer_cls=optimizer_cls)
        )
        optimizer = make(model.parameters(), **options)
        for step in range(STEPS):
            full = (
                course.fsdp_gather_full_params(model)
                if is_fsdp
                else dict(model.module.named_parameters())
            )
            for name, whole in base.named_parameters():
                torch.testing.assert_close(full[name], whole, **tolerance)
            optimizer.zero_grad()
            whole_optimizer.zero_grad()
            for each in range(WORLD_SIZE):
                (own_loss(base, each, step, device) / WORLD_SIZE).backward()
            form_2025.ddp_bucketed_on_train_batch_start(model, optimizer)
            own_loss(model, rank, step, device).backward()
            after(model, optimizer)
            for parameter in model.parameters():
                assert parameter.dtype == torch.float32
                assert (parameter.grad is not None) == parameter.requires_grad
            optimizer.step()
            whole_optimizer.step()
        assert optimizer.param_groups[0]["lr"] == options["lr"]
        assert is_fsdp or not optimizer.state or len(optimizer.state) < len([*base.parameters()])


@DEVICES
def test_wrappers_follow_one_process(device):
    """Compare the wrappers of the course with one process, in fp32 and in fp16."""
    spawn(wrapped, torch.device(device))


# -- kernels ---------------------------------------------------------------------------------------


def test_attention_is_the_one_that_kernels_have():
    assert form_2025.get_flashattention_autograd_function_pytorch() is FlashAttention2PyTorch
    assert form_2026.get_flashattention_autograd_function_triton() is FlashAttention2


def test_rmsnorm_is_the_one_that_kernels_have_and_its_backward_by_hand():
    assert form_2024.get_rmsnorm_autograd_function_pytorch() is RMSNormPyTorch
    assert form_2024.get_rmsnorm_autograd_function_triton() is RMSNorm
    x = torch.randn(4, 7, 20)
    g = torch.randn(20)
    dy = torch.randn(4, 7, 20)
    for leaf in (x, g):
        leaf.requires_grad_()
    expected = torch.autograd.grad(reference.rms_norm(x, g, 1e-5), (x, g), dy)
    with torch.no_grad():  # as a student's own backward calls them
        for function, theirs in zip(
            (form_2024.rmsnorm_backward_x_pytorch, form_2024.rmsnorm_backward_g_pytorch),
            expected,
            strict=True,
        ):
            torch.testing.assert_close(function(dy, x, g), theirs, rtol=1e-4, atol=1e-5)
