"""What FSDP refuses, each with one message that says what to do."""

import copy
import pickle

import pytest
import torch
from torch import nn

from distlab.comm import RankContext
from distlab.parallel import BucketedDDP
from distlab.parallel.fsdp import FSDP
from tests.parallel.test_contract import run


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def wrap_what_cannot_be_wrapped(context: RankContext) -> None:
    group = context.group
    with pytest.raises(ValueError, match="no parameters"):
        FSDP(nn.ReLU(), process_group=group)
    for bad in (torch.int32, "bfloat16", 16, torch.complex64):
        with pytest.raises(ValueError, match=r"compute_dtype=.*give a floating-point torch.dtype"):
            FSDP(linear(), bad, process_group=group)
    with pytest.raises(ValueError, match="lies on meta and has no values: give init_fn"):
        FSDP(linear().to("meta"), process_group=group)
    with pytest.raises(ValueError, match="for a module built on meta"):
        FSDP(linear(), init_fn=print, process_group=group)
    half_on_meta = linear()
    half_on_meta[0].to("meta")
    with pytest.raises(ValueError, match="move the module to one device first"):
        FSDP(half_on_meta, process_group=group)
    with pytest.raises(ValueError, match="recurrent module"):
        FSDP(nn.LSTM(2, 2), process_group=group)

    module = linear()
    ddp = BucketedDDP(module, process_group=group)
    with pytest.raises(ValueError, match=r"'0.weight' carries a gradient hook .* close\(\) that wrapper"):
        FSDP(module, process_group=group)
    ddp.close()
    fsdp = FSDP(module, process_group=group)
    with pytest.raises(ValueError, match=r"'0\.weight' is wrapped already"):
        FSDP(module, process_group=group)
    fsdp.close()
    FSDP(module, process_group=group)


def test_modules_that_cannot_be_wrapped():
    """Issue 4's bad input: no parameters, a compute type that is no float, wrapped twice."""
    run(wrap_what_cannot_be_wrapped, 1)


def compiled(context: RankContext) -> None:
    in_place = linear()
    in_place[2].compile(backend="aot_eager")
    for module in (torch.compile(linear(), backend="aot_eager"), in_place):
        with pytest.raises(ValueError, match=r"inside the compiled module .* compile the children"):
            FSDP(module, process_group=context.group)


def test_units_inside_a_compiled_graph():
    """The contract's "With the rest": compiled blocks work, a graph around units is refused."""
    run(compiled, 1)


def older_optimizer(context: RankContext) -> None:
    module = linear()
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # makes a reference cycle with the optimizer
    with pytest.raises(ValueError, match="wrap first, then build the optimizer"):
        FSDP(module, process_group=context.group)
    del optimizer, scheduler
    FSDP(module, process_group=context.group)  # garbage holds nothing


def test_an_optimizer_built_before_wrapping():
    """Issue 4: it would step parameters that are in use no more."""
    run(older_optimizer, 1)


def disagree(context: RankContext) -> str:
    module = nn.Linear(4, 3 + context.rank)
    with pytest.raises(ValueError, match="ranks hold different models") as caught:
        FSDP(module, process_group=context.group)
    assert module.weight.shape == (3 + context.rank, 4)  # untouched
    return str(caught.value)


def test_ranks_with_different_models():
    """RELIABILITY 3: before anything is sent, the same message on every rank."""
    first, second = run(disagree, 2)
    assert first == second and "'weight' (3, 4)" in first and "'weight' (4, 4)" in first


def misuse(context: RankContext) -> None:
    fsdp = FSDP(linear(), process_group=context.group)
    for change in (fsdp.half, fsdp.double, lambda: fsdp.to("meta")):
        with pytest.raises(TypeError, match="move the module before wrapping it"):
            change()
    assert fsdp.to("cpu").float() is fsdp
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(fsdp)
    state = {name.removeprefix("module."): value for name, value in fsdp.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"replaced '0\.weight'"):
        fsdp.module.load_state_dict(state, assign=True)

    fsdp = FSDP(linear(), process_group=context.group)
    full = fsdp.gather_full_params()
    with pytest.raises(ValueError, match=r"'0.bias' is missing"):
        fsdp.load_full_params({"0.weight": full["0.weight"], "2.weight": full["2.weight"]})
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(4, 4\); the model's has shape \(3, 4\)"):
        fsdp.load_full_params({**full, "0.weight": torch.zeros(4, 4)})

    next(fsdp.parameters()).requires_grad_(False)
    fsdp(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"requires_grad of '0\.weight' changed"):
        fsdp.finish_gradient_synchronization()

    sparse = FSDP(nn.Embedding(4, 3, sparse=True), process_group=context.group)
    with pytest.raises(TypeError, match="gradient of 'weight' is sparse"):
        sparse(torch.tensor([1])).sum().backward()


def test_what_a_wrapped_module_refuses():
    """Moving, copying, replacing, unfreezing; RELIABILITY 13 for sparse gradients."""
    run(misuse, 1)
