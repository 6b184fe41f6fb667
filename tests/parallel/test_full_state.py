"""The whole state of a model: one pair of functions on every wrapper, and an error where a state is
not whole.
"""

import copy
import io
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from distlab.parallel import FSDP, STRATEGIES, BucketedDDP, ShardedOptimizer, ZeroOptimizer
from distlab.testing import RanksFailed, run_ranks
from tests.parallel.test_contract import on_one_rank, on_two_ranks

OURS = (
    "local",
    "naive",
    "flat",
    "overlap",
    "bucketed",
    "sharded-optimizer",
    "zero1",
    "zero2",
    "fsdp",
    "hsdp",
)
PEERS = ("torch-ddp", "fsdp2")
OPTIONS = {"lr": 0.05}


class Root(nn.Module):
    """All that a state dict can hold: tied, frozen, empty, 0-dim and channels_last parameters, two
    kinds of buffers.
    """

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            [torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4)]
        )
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        image = torch.ones(1, 2, 2, 2, dtype=x.dtype)
        return (
            self.head(self.norm(x) * self.scale).square().sum()
            + self.conv(image).sum()
            + self.empty.sum()
        )


def whole_state(module):
    return {
        name.replace("_orig_mod.", ""): value.clone() for name, value in module.state_dict().items()
    }


def assert_equal_states(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0, msg=name)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(6)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()


def built(context, strategy, module):
    return STRATEGIES[strategy].build(module, context.group, torch.optim.SGD, dict(OPTIONS))


@pytest.mark.parametrize("strategy", OURS + PEERS)
@on_two_ranks
def test_every_wrapper_returns_and_takes_the_whole_state(context, strategy):
    if strategy == "fsdp2":  # of torch's, which refuses 0-dim parameters
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        other = copy.deepcopy(module)
        with torch.no_grad():
            other[0].weight.add_(1)
    else:
        module, other = Root(seed=context.rank), Root(seed=5)
    seeds = [whole_state(module)]
    if strategy != "local":
        torch.distributed.broadcast_object_list(seeds, group_src=0, group=context.group)
    model, optimizer = built(context, strategy, module)
    assert_equal_states(model.full_state_dict(), seeds[0])
    wanted = whole_state(other)
    prefixed = {f"module.{name}": value for name, value in other.state_dict().items()}
    for given in (wanted, prefixed):
        model.load_full_state_dict(seeds[0])
        model.load_full_state_dict(given)
        state = model.full_state_dict()
        assert_equal_states(state, wanted)
        other.load_state_dict(dict(zip(other.state_dict(), state.values(), strict=True)))
    if strategy == "fsdp2":
        return
    assert state["head.weight"] is state["embed.weight"] and "cache" not in state
    assert state["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    step(model, optimizer)
    assert_equal_states(state, wanted)  # a copy
    after = model.full_state_dict()
    assert not torch.equal(after["scale"], state["scale"])
    states = [None, None]
    torch.distributed.all_gather_object(states, after, context.group)
    assert_equal_states(*states)
    del after["head.weight"]  # of a tied tensor one name suffices
    model.load_full_state_dict(after)
    model.close()


@on_two_ranks
def test_masters_are_returned_for_a_module_in_bf16(context):
    module = Root(dtype=torch.bfloat16)
    before = whole_state(module)
    fsdp = FSDP(module, process_group=context.group)
    state = fsdp.full_state_dict()
    assert state["embed.weight"].dtype == state["scale"].dtype == torch.float32
    assert state["table"].dtype == torch.bfloat16
    assert_equal_states(
        {name: value.to(before[name].dtype) for name, value in state.items()}, before
    )
    state["embed.weight"] += 1e-5  # bf16 would lose it
    fsdp.load_full_state_dict(state)
    assert_equal_states(fsdp.full_state_dict(), state)


class Module(nn.Module):
    """A module whose own child is called `module`, and with a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.count = 3

    def forward(self, x):
        return self.module(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@on_two_ranks
def test_a_child_called_module_and_extra_state(context):
    for strategy in ("bucketed", "fsdp"):
        model, _ = built(context, strategy, Module())
        state = model.full_state_dict()
        assert list(state) == ["_extra_state", "module.weight", "module.bias"]
        state |= {"_extra_state": {"count": 4}, "module.bias": torch.full((4,), 2.0)}
        model.load_full_state_dict(state)
        assert model.module.count == 4 and (model.full_state_dict()["module.bias"] == 2).all()
        model.load_full_state_dict({f"module.{name}": value for name, value in state.items()})
        model.close()


@pytest.mark.parametrize("strategy", OURS)
@on_two_ranks
def test_a_state_that_is_not_the_models_is_refused_before_anything_is_loaded(context, strategy):
    model, _ = built(context, strategy, Root())
    before = model.full_state_dict()
    other = {name: value + 1 if torch.is_tensor(value) else value for name, value in before.items()}
    for change, message in (
        ({"table": None}, r"it lacks 'table'"),
        ({"new": torch.ones(1)}, r"the model has no 'new'"),
        ({"scale": torch.ones(1)}, r"'scale' has shape \(1,\) and the model's \(\)"),
        ({"embed.weight": other["embed.weight"][:4]}, r"'embed.weight' has shape \(4, 4\)"),
        ({"norm.running_mean": 1.0}, r"'norm.running_mean' is a float and not a tensor"),
    ):
        given = {name: value for name, value in (other | change).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            model.load_full_state_dict(given)
        assert_equal_states(model.full_state_dict(), before)
    with pytest.raises(ValueError, match=r"it lacks .* and \d+ more; the model has no 'a'"):
        model.load_full_state_dict({"a": torch.ones(1)})
    model.close()


@on_two_ranks
def test_shards_are_not_handed_out_under_the_names_of_whole_parameters(context, tmp_path):
    fsdp = FSDP(Root(), process_group=context.group)
    outer = nn.ModuleDict({"net": fsdp})
    for read in (
        fsdp.state_dict,
        fsdp.module.state_dict,
        fsdp.module.embed.state_dict,
        fsdp.module.blocks.state_dict,
        outer.state_dict,
        lambda: dcp.save({"model": fsdp.state_dict()}, checkpoint_id=tmp_path),
        lambda: torch.save(fsdp.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(RuntimeError, match=r"full_state_dict\(\) of the wrapper on every rank"):
            read()
    assert set(fsdp.module.norm.state_dict()) >= {"weight", "running_mean"}  # whole on every rank
    mine = dict(fsdp.module.named_parameters())
    full = fsdp.full_state_dict()
    for load in (fsdp.module.load_state_dict, fsdp.module.embed.load_state_dict):
        with pytest.raises(RuntimeError, match=r"load_full_state_dict\(\) of the wrapper"):
            load(mine)
    with pytest.raises(ValueError, match="sharded model is not its whole state"):
        fsdp.load_state_dict(
            full | {name.replace("_orig_mod.", ""): value for name, value in mine.items()}
        )
    for options in ({"strict": False}, {"assign": True}):
        with pytest.raises(ValueError, match="only a whole state can be loaded"):
            fsdp.load_state_dict(full, **options)
    assert_equal_states(fsdp.full_state_dict(), full)
    fsdp.load_state_dict({f"module.{name}": value for name, value in full.items()})
    module = fsdp.module
    fsdp.close()
    assert_equal_states(whole_state(module), full)
    module.load_state_dict(module.state_dict())


@on_one_rank
def test_shards_of_one_rank_are_no_exception(context):
    """What ends on two ranks should not begin on one."""
    fsdp = FSDP(nn.Linear(4, 4), process_group=context.group)
    with pytest.raises(RuntimeError, match="full_state_dict"):
        fsdp.state_dict()
    assert fsdp.full_state_dict().keys() == {"weight", "bias"}


def on_rank_0_alone(context, call):
    """Call one collective on rank 0, while the others go on with training."""
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    if call in (
        "gather_full_params",
        "fsdp.full_state_dict",
        "validation",
        "validation first",
        "skip",
    ):
        model = FSDP(module, process_group=context.group)
        optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    else:
        model = BucketedDDP(module, bucket_size_mb=0.01, process_group=context.group)
        kind = ShardedOptimizer if call == "ShardedOptimizer.state_dict" else ZeroOptimizer
        over = model.parameters() if kind is ShardedOptimizer else model
        optimizer = kind(over, torch.optim.SGD, **OPTIONS)
    for number in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).sum()
        if not (call == "skip" and context.rank == 0 and number == 1):
            loss.backward()
        model.finish_gradient_synchronization()
        if call.endswith("clip_grad_norm_") and context.rank == 0:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        if context.rank == 0 and (number == 1 or call == "validation first"):
            if call.startswith("validation"):
                with torch.no_grad():
                    model(torch.ones(2, 64))
            elif call.endswith("full_state_dict"):
                model.full_state_dict()
            elif call in ("gather_full_params", "sync_buffers"):
                getattr(model, call)()
            elif call.endswith(".state_dict"):
                optimizer.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "gather_full_params",
            r"in FSDP.gather_full_params\(\), a collective that every rank must call",
        ),
        ("fsdp.full_state_dict", r"in FSDP.full_state_dict\(\), a collective"),
        ("full_state_dict", r"in BucketedDDP.full_state_dict\(\), a collective"),
        ("ZeroOptimizer.state_dict", r"in ZeroOptimizer.state_dict\(\), a collective"),
        ("ShardedOptimizer.state_dict", r"in ShardedOptimizer.state_dict\(\), a collective"),
        ("sync_buffers", r"in BucketedDDP.sync_buffers\(\), a collective"),
        (
            "clip_grad_norm_",
            r"in clip_grad_norm_\(\) or grad_norm\(\) of BucketedDDP, a collective",
        ),
        ("validation", r"forward of FSDP\(Sequential\) in training mode, without gradients"),
        ("validation first", r"forward of FSDP\(Sequential\) in training mode, without gradients"),
        ("skip", r"backward of FSDP\(Sequential\)"),
    ],
)
def test_a_call_on_one_rank_alone_ends_in_a_sentence_on_it(call, message):
    """It aborted that rank's process in C++, or hung: messages of two sizes met."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(on_rank_0_alone, 2, call, group_timeout_s=2.0)
    assert failed.value.failures.keys() == {0, 1}
    assert not any("process died" in text for text in failed.value.failures.values())
    last = failed.value.failures[0].strip().splitlines()[-1]
    assert re.search(message, last), last
