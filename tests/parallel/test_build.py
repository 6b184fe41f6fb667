"""`Strategy.build` and what every strategy offers: models on meta, the norm of the whole gradient,
shards.
"""

import inspect
from dataclasses import fields

import pytest
import torch
from torch import nn

from distlab.model.config import preset
from distlab.model.transformer import TransformerLM
from distlab.parallel import (
    STRATEGIES,
    LocalOptimizer,
    Strategy,
    Wrapping,
    get_strategy,
    registry,
    stepped,
    strategies_on,
)
from distlab.parallel.build import BUCKET_SIZE_MB
from distlab.parallel.model import square_sum
from distlab.parallel.shard import Shard, whole
from distlab.simulate.events import EventLog
from distlab.testing import run_ranks
from tests.parallel.cases import CASES, Reference, build
from tests.parallel.test_contract import BACKENDS, on_two_ranks, run

ON_A_MESH = tuple(name for name, strategy in STRATEGIES.items() if strategy.takes_mesh)
CONFIG = preset(
    "tiny", num_layers=2, d_model=16, d_ff=24, num_heads=2, vocab_size=23, tie_embeddings=True
)


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3, bias=False))


def from_meta(context, names):
    for name in names:
        expected = TransformerLM(CONFIG, seed=3)
        module = TransformerLM(CONFIG, device="meta")
        assert all(parameter.is_meta for parameter in module.parameters())
        model, _ = get_strategy(name).build(
            module,
            context.group,
            torch.optim.SGD,
            init=lambda m: m.reset_parameters(3),
            device="cpu",
            shard_size=2,
        )
        made = model.full_parameters()
        assert made.keys() == dict(expected.named_parameters(remove_duplicate=False)).keys(), name
        for label, parameter in expected.named_parameters(remove_duplicate=False):
            assert torch.equal(made[label], parameter), (name, label)
        torch.manual_seed(5)
        expected = layers()
        with torch.device("meta"):
            module = layers()
        torch.manual_seed(5)
        model, _ = get_strategy(name).build(
            module, context.group, torch.optim.SGD, device="cpu", shard_size=2
        )
        made = model.full_parameters()
        for label, parameter in expected.named_parameters():
            assert torch.equal(made[label], parameter), (name, label)
        for label, buffer in expected.named_buffers():
            assert torch.equal(module.get_buffer(label), buffer), (name, label)


def test_a_model_on_meta_gets_the_values_of_one_built_on_the_device():
    """Bit for bit under every strategy, tied weights included.

    By `init`, or by the modules' own reset_parameters.
    """
    run_ranks(from_meta, 2, strategies_on("cpu"))


def test_a_model_on_meta_is_made_on_a_mesh():
    run_ranks(from_meta, 4, ON_A_MESH)


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))


def test_a_model_without_values_is_refused_unless_it_is_said_how_to_make_them(one_rank):
    strategy = get_strategy("bucketed")
    with torch.device("meta"):
        empty, unknown = layers(), nn.Sequential(NoReset())
    with pytest.raises(ValueError, match="give device="):
        strategy.build(empty, one_rank.group, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"NoReset owns parameters .* no reset_parameters"):
        strategy.build(unknown, one_rank.group, torch.optim.SGD, device="cpu")
    with pytest.raises(ValueError, match="has its values"):
        strategy.build(layers(), one_rank.group, torch.optim.SGD, device="cpu")


def norms(context, case, names):
    """The whole gradient's norm, and a clipped step, beside one process.

    Ranks see different data.
    """
    for name in names:
        if not STRATEGIES[name].synchronizes:
            continue
        reference = Reference(case, context.world_size, context.device)
        model, optimizer = get_strategy(name).build(
            build(case, 0, context.device),
            context.group,
            torch.optim.SGD,
            {"lr": 0.1},
            shard_size=2,
        )
        CASES[case].loss(model, context.rank, 0, context.device).backward()
        model.finish_gradient_synchronization()
        reference.backward(0)
        expected = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
        torch.testing.assert_close(model.grad_norm(), expected, rtol=1e-5, atol=0, msg=name)
        torch.testing.assert_close(
            model.clip_grad_norm_(0.05), expected, rtol=1e-5, atol=0, msg=name
        )
        optimizer.step()
        reference.step()
        made = model.full_parameters()
        for label, parameter in reference.model.named_parameters():
            torch.testing.assert_close(
                made[label], parameter, rtol=1e-5, atol=1e-7, msg=f"{name}: {label}"
            )
        elements = sum(shard.tensor.numel() for shard in stepped(model, optimizer))
        assert isinstance(optimizer, LocalOptimizer) <= (
            elements < sum(p.numel() for p in made.values())
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["tied", "frozen"])
def test_every_strategy_clips_by_the_norm_of_the_whole_gradient(case, backend):
    run(norms, 2, case, strategies_on("cpu"), backend=backend)


def test_on_a_mesh_the_norm_counts_each_element_once():
    run_ranks(norms, 4, "plain", ON_A_MESH)


def test_ranks_write_portions_of_what_they_all_hold_and_all_of_what_they_alone_hold():
    tensor = torch.arange(7.0)
    portions = [whole("blocks.0._orig_mod.weight", tensor).portion(rank, 3) for rank in range(3)]
    assert [portion.name for portion in portions] == ["blocks.0.weight"] * 3
    assert [portion.start for portion in portions] == [0, 2, 4]
    assert torch.equal(torch.cat([portion.values for portion in portions]), tensor)
    mine = Shard("weight", torch.Size([7]), 3, tensor[3:])
    assert mine.portion(1, 3) is mine and mine.like("state", tensor[3:] + 1).values.tolist() == [
        4,
        5,
        6,
        7,
    ]
    with pytest.raises(ValueError, match="row-major"):
        _ = whole("transposed", torch.ones(2, 3).t()).values


@on_two_ranks
def test_construction_takes_no_more_than_training(context):
    """Nothing is ever whole under FSDP, and twice under none.

    Peaks of live bytes while each strategy makes a model from meta, counted storage by storage.
    """
    config = preset("tiny", num_layers=8, vocab_size=64)
    parameters = 4 * config.num_parameters
    for name, state in (
        ("fsdp", 4 * parameters / 2),
        ("bucketed", 4 * parameters),
        ("zero1", 3 * parameters),
    ):
        module, log = TransformerLM(config, device="meta"), EventLog()
        unit = 4 * sum(p.numel() for p in module.blocks[0].parameters())
        with log.recording():
            model, optimizer = get_strategy(name).build(
                module,
                context.group,
                torch.optim.AdamW,
                init=lambda m: m.reset_parameters(0),
                device="cpu",
            )
        peak = max(moment.total for moment in log.memory)
        # Of training: parameters, gradients and AdamW's two moments of what a rank holds; and a few
        # flags.
        assert peak < 1.001 * state, name
        if name == "fsdp":  # its shards, and at most one unit in full
            assert parameters / 2 < peak < 1.02 * parameters / 2 + unit
        model.close(restore=False)
        del model, optimizer


def test_half_precision_gradients_are_in_the_norm_and_unrounded():
    gradients = [torch.full((3,), 300.0, dtype=torch.float16), torch.tensor([4.0])]
    assert square_sum(gradients, torch.device("cpu")).item() == pytest.approx(
        3 * 300.0**2 + 4**2, rel=1e-6
    )


def test_wrap_gives_its_class_every_argument_that_the_class_takes(monkeypatch):
    """By name and each its own: no field of `Wrapping` is forgotten or confused with another."""
    given = Wrapping(**{field.name: object() for field in fields(Wrapping)})
    received = []

    def recorder(signature):
        def record(*args, **kwargs):
            received.append(signature.bind(*args, **kwargs).arguments)

        return record

    used = set()
    for strategy in STRATEGIES.values():
        used.update(strategy.wrap.__code__.co_names)
    for name in used & vars(registry).keys():
        monkeypatch.setattr(registry, name, recorder(inspect.signature(getattr(registry, name))))
    for name, strategy in STRATEGIES.items():
        received.clear()
        strategy.wrap("module", given)
        (arguments,) = received
        assert arguments.pop("module") == "module", name
        for argument, value in arguments.items():
            assert value is getattr(given, argument), (name, argument)
        assert "process_group" in arguments or not strategy.synchronizes, name
        assert "bucket_size_mb" in arguments or not strategy.has_buckets, name
        assert "mesh" in arguments or not strategy.takes_mesh, name
        assert "compute_dtype" in arguments or not strategy.casts_parameters, name
        assert {"init_fn", "device"} <= arguments.keys() or not strategy.materializes, name
        assert "keep_gathered" in arguments or not strategy.may_keep_gathered, name
        torch_axes = {"data_mesh", "moved", "contexts"} <= arguments.keys()
        assert torch_axes == (strategy.is_peer and strategy.casts_parameters), name


def test_the_default_bucket_size_is_that_of_every_class():
    classes = (registry.BucketedDDP, registry.CopyEngineDDP, registry.tuned_torch_ddp)
    for each in (*classes, Strategy.build, Wrapping):
        default = inspect.signature(each).parameters["bucket_size_mb"].default
        assert default == BUCKET_SIZE_MB, each


def test_build_takes_no_option_that_is_not_written_out(one_rank):
    kinds = {argument.kind for argument in inspect.signature(Strategy.build).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        get_strategy("naive").build(layers(), one_rank.group, torch.optim.SGD, bucket_cap_mb=1.0)


def train_with_every_option(context, names):
    """One step, with options of which each strategy takes some."""
    for name in names:
        model, optimizer = get_strategy(name).build(
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
            context.group,
            torch.optim.SGD,
            {"lr": 0.1},
            bucket_size_mb=1e-4,
            shard_size=2,
            keep_gathered=True,
            compute_dtype=torch.bfloat16,
        )
        with model.autocast():
            loss = model(torch.randn(8, 4)).float().square().mean()
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        model.close(restore=False)
        if STRATEGIES[name].has_buckets and hasattr(model, "buckets"):
            assert len(model.buckets) > 1, name


def test_a_strategy_ignores_options_that_it_does_not_take():
    run_ranks(train_with_every_option, 2, strategies_on("cpu"))
