"""Models that are not our transformer: every strategy resumes what every other has written.

Each case trains an odd model under every strategy, saves it after one step, and resumes the
checkpoints under other strategies. The losses of the next two steps must be those of the run that
went on: the second one depends on all of the optimizer's state.
"""

import hashlib
import itertools
import json

import pytest
import torch
from torch import nn

from distlab.checkpoint.checkpointer import Checkpointer
from distlab.checkpoint.files import MARKER, CheckpointFolder, digest_of
from distlab.optim import Muon
from distlab.parallel import Wrapping, get_strategy
from distlab.parallel.local_optimizer import stepped
from distlab.testing import RanksFailed, run_ranks
from distlab.train import loop
from tests.parallel.test_contract import on_two_ranks
from tests.train.cases import Run

NAMES = ["naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "zero2", "fsdp"]


class Odd(nn.Module):
    """Two linear layers, one of which an argument makes odd."""

    def __init__(
        self,
        *,
        frozen=(),
        empty=False,
        tied=False,
        scalar=False,
        row=False,
        buffers=False,
        dtypes=(),
    ):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        if tied:
            self.second.weight = self.first.weight
        if empty:
            self.no_rows = nn.Parameter(torch.empty(0, 4))
            self.no_elements = nn.Parameter(torch.empty(0))
        if scalar:
            self.scale = nn.Parameter(torch.tensor(0.5))
        if row:
            self.row = nn.Parameter(torch.randn(1, 4))
        if buffers:
            for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
                self.register_buffer(f"of_{dtype}".replace(".", "_"), torch.ones(3, dtype=dtype))
            self.register_buffer("count", torch.zeros((), dtype=torch.int32))
            self.register_buffer("none", torch.empty(0, 2))
            self.register_buffer("passing", torch.zeros(2, dtype=torch.complex64), persistent=False)
        for name, dtype in dtypes:
            self.get_submodule(name).to(dtype)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x):
        x = self.first(x.to(self.first.weight.dtype))
        x = self.second(x.to(self.second.weight.dtype))
        x = x + self.blocks[0](x.to(self.blocks[0].weight.dtype))
        if hasattr(self, "no_rows"):
            x = x + self.no_rows.sum() + self.no_elements.sum()
        if hasattr(self, "scale"):
            x = x * self.scale
        if hasattr(self, "row"):
            x = x + self.row
        if hasattr(self, "count"):
            self.count += 1
            x = x * self.count
        return x


def step(model, optimizer, number):
    """Train one step on data that depends on its number and the rank; returns the loss exactly."""
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(100 * number + torch.distributed.get_rank())
    loss = model(torch.randn(2, 4, generator=generator)).float().square().mean()
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return loss.item()


def built(context, name, optimizer_cls, module, options=None):
    return get_strategy(name).build(module, context.group, optimizer_cls, options or {"lr": 0.05})


def wrapped_by(name, module, context):
    return get_strategy(name).wrap(module, Wrapping(process_group=context.group))


def run_pairs(context, folder, optimizer_cls, odd, pairs):
    """Return the pairs whose losses differ.

    Args:
        pairs: strategy that saves → strategies that resume from it.
    """
    different = []
    for written, readers in pairs.items():
        model, optimizer = built(context, written, optimizer_cls, Odd(**odd))
        saver = Checkpointer(folder / written, context)
        step(model, optimizer, 1)
        saver.save(1, model, optimizer, strategy=written, extra={})
        saver.wait()
        stored = saver.newest()
        went_on = [step(model, optimizer, 2), step(model, optimizer, 3)]
        model.close(restore=False)
        for name in readers:
            again, other = built(context, name, optimizer_cls, Odd(**odd))
            saver.load(stored, again, other)
            for shard in stepped(again, other):
                kinds = other.local.state if hasattr(other, "local") else other.state
                assert kinds.get(shard.tensor), (
                    f"{shard.name} has lost its state: {written} → {name}"
                )
            resumed = [step(again, other, 2), step(again, other, 3)]
            if resumed != went_on:
                different.append((written, name, went_on, resumed))
            again.close(restore=False)
        saver.close()
    return different


ODD = {
    "frozen": (torch.optim.AdamW, {"frozen": ["first"]}),
    "frozen and Muon": (Muon, {"frozen": ["second"]}),
    "no elements, AdamW": (torch.optim.AdamW, {"empty": True}),
    "no elements, Adagrad": (torch.optim.Adagrad, {"empty": True}),
    "no elements, NAdam": (torch.optim.NAdam, {"empty": True}),
    "no elements, ASGD": (torch.optim.ASGD, {"empty": True}),
    "no elements, Rprop": (torch.optim.Rprop, {"empty": True}),
    "tied, scalar and one row": (torch.optim.AdamW, {"tied": True, "scalar": True, "row": True}),
    "buffers": (torch.optim.AdamW, {"buffers": True, "frozen": ["blocks"]}),
    "all": (
        torch.optim.AdamW,
        {
            "frozen": ["blocks"],
            "empty": True,
            "tied": True,
            "scalar": True,
            "row": True,
            "buffers": True,
        },
    ),
}
# naive, flat and overlap store what bucketed stores. One model that has everything tries all.
OTHER_FORMS = NAMES[3:]
HALF = (("first", torch.bfloat16), ("second", torch.bfloat16), ("blocks", torch.bfloat16))
MIXED = (("first", torch.float64), ("second", torch.bfloat16))


def all_pairs(names):
    return {name: names for name in names}


def each_after_another(names):
    """Return pairs in which each strategy writes once and reads once."""
    return {name: [names[number - 1]] for number, name in enumerate(names)}


# A reader takes tensors by name from an index that does not depend on who wrote them. So a mistake
# is one of a writer or of a reader, and each strategy is both with every model. All pairs are tried
# with the model that has everything.
PAIRS = [(case, each_after_another(OTHER_FORMS)) for case in ODD if case != "all"]
PAIRS += [
    ("all", all_pairs(NAMES)),
    *(
        pytest.param(case, all_pairs(OTHER_FORMS), marks=pytest.mark.commands)
        for case in ODD
        if case != "all"
    ),
]


@pytest.mark.parametrize("case, pairs", PAIRS)
def test_every_strategy_resumes_what_every_other_has_written(tmp_path, case, pairs):
    optimizer_cls, odd = ODD[case]
    assert run_ranks(run_pairs, 2, tmp_path, optimizer_cls, odd, pairs)[0] == []


@pytest.mark.parametrize("dtypes", [HALF, MIXED], ids=["bf16", "fp64, bf16 and fp32"])
def test_strategies_that_keep_a_models_dtypes_resume_one_another(tmp_path, dtypes):
    """FSDP keeps fp32 masters of bf16 parameters: other numbers, which the refusal lists by
    name.
    """
    odd = {"dtypes": dtypes, "empty": True, "scalar": True}
    kept = [name for name in OTHER_FORMS if name != "fsdp"]
    alone = all_pairs(kept) | {"fsdp": ["fsdp"]}
    assert run_ranks(run_pairs, 2, tmp_path, torch.optim.AdamW, odd, alone)[0] == []
    mixed = {"bucketed": ["fsdp"]}
    with pytest.raises(
        RanksFailed, match=r"second\.weight has torch\.bfloat16 there and torch\.float32 here"
    ):
        run_ranks(run_pairs, 2, tmp_path / "both", torch.optim.AdamW, odd, mixed)


def save_one(context, folder, names, odd):
    for name in names:
        model, optimizer = built(context, name, torch.optim.AdamW, Odd(**odd))
        step(model, optimizer, 1)
        saver = Checkpointer(folder / name, context)
        saver.save(1, model, optimizer, strategy=name, extra={})
        saver.wait()


def steps_after_load(context, folder, pairs, odd):
    """Return the steps that AdamW has counted for each parameter, after every pair of (strategy
    that wrote, strategy that reads).
    """
    found = set()
    for written, name in pairs:
        model, optimizer = built(context, name, torch.optim.AdamW, Odd(**odd))
        saver = Checkpointer(folder / written, context)
        saver.load(saver.newest(), model, optimizer)
        state = optimizer.local.state if hasattr(optimizer, "local") else optimizer.state
        found |= {state[shard.tensor]["step"].item() for shard in stepped(model, optimizer)}
        step(model, optimizer, 2)
        model.close(restore=False)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_odd_models_are_resumed_on_other_numbers_of_ranks(tmp_path, ranks):
    odd = {"frozen": ["first"], "empty": True, "scalar": True, "row": True}
    names = ["bucketed", "sharded-optimizer", "zero1", "zero2", "fsdp"]
    run_ranks(save_one, 2, tmp_path, names, odd)
    pairs = itertools.pairwise([*names, names[0]])
    for found in run_ranks(steps_after_load, ranks, tmp_path, [*pairs], odd):
        assert found == {1.0}


# -- groups of the optimizer -----------------------------------------------------------------------


def groups_of(model, *names):
    """Return a parameter group for each of `names`, a part of the parameters' names."""
    groups = []
    for part in names:
        parameters = [p for name, p in model.module.named_parameters() if part in name]
        groups.append({"params": parameters})
    return groups


def save_groups(model, context, folder, *names, options=None):
    optimizer = torch.optim.AdamW(groups_of(model, *names), **(options or {"lr": 0.05}))
    step(model, optimizer, 1)
    saver = Checkpointer(folder, context)
    saver.save(1, model, optimizer, strategy="bucketed", extra={})
    saver.wait()
    return saver


@on_two_ranks
def test_groups_of_other_parameters_are_named_with_the_cause(context, tmp_path):
    def wrapped(frozen=()):
        return wrapped_by("bucketed", Odd(frozen=frozen), context)

    model = wrapped(frozen=["first"])
    saver = save_groups(model, context, tmp_path, "second", "blocks")
    stored = saver.newest()
    for frozen, names, message in (
        (
            (),
            ("second", "blocks", "first"),
            "do not hold 'first.bias', which this optimizer steps: .* was frozen",
        ),
        (("first",), ("second",), "hold 'blocks.0.weight', and this optimizer's do not, though"),
        (
            ("first",),
            ("blocks", "second"),
            "'blocks.0.weight' is in parameter group 1 of the stored optimizer, and in "
            "group 0 of this one",
        ),
    ):
        other = wrapped(frozen)
        with pytest.raises(ValueError, match=message):
            saver.load(stored, other, torch.optim.AdamW(groups_of(other, *names), lr=0.05))
        other.close()
    for names in (
        ("second", "blocks"),
        ("first", "second", "blocks"),
        ("second", "first", "blocks"),
    ):
        other = wrapped(frozen=["first"])
        optimizer = torch.optim.AdamW(groups_of(other, *names), lr=0.5)
        saver.load(stored, other, optimizer)
        rates = {
            name: group["lr"] for name, group in zip(names, optimizer.param_groups, strict=True)
        }
        # A group of frozen parameters that the checkpoint lacks keeps what it was given.
        assert rates == {name: 0.5 if name == "first" else 0.05 for name in names}
        other.close()


@on_two_ranks
def test_a_tensor_of_no_module_cannot_be_stored_and_is_refused_on_every_rank(context, tmp_path):
    model = wrapped_by("bucketed", Odd(), context)
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.05)
    with pytest.raises(
        ValueError, match="group 0 of the optimizer holds a tensor that is not a parameter of"
    ):
        Checkpointer(tmp_path, context).save(1, model, optimizer, strategy="bucketed", extra={})


# -- a checkpoint of before ------------------------------------------------------------------------


def write_by_hand(folder, groups, parameters):
    """Write a checkpoint of one rank as this format has always been: raw bytes in a file, and an
    index.
    """
    data, tensors = b"", {}
    for key, value in parameters.items():
        parts = [[0, value.numel(), "rank_0_0.bin", len(data)]] if value.numel() else []
        tensors[key] = {"shape": list(value.shape), "dtype": str(value.dtype)[6:], "parts": parts}
        data += value.numpy().tobytes()
    path = CheckpointFolder(folder).path_of(1)
    path.mkdir(parents=True)
    (path / "rank_0_0.bin").write_bytes(data)
    options = {
        "lr": 0.25,
        "betas": [0.9, 0.999],
        "eps": 1e-08,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": True,
    }
    body = {
        "format": 3,
        "step": 1,
        "world_size": 1,
        "strategy": "bucketed",
        "torch": "2.11.0",
        "optimizer": "AdamW",
        "groups": [options | {"params": names} for names in groups],
        "extra": {},
        "files": {"rank_0_0.bin": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}},
        "tensors": tensors,
    }
    (path / MARKER).write_text(json.dumps(body | {"digest": digest_of(body)}))


@pytest.mark.parametrize(
    "frozen_in_group", [True, False], ids=["all in the group", "the trained in the group"]
)
def test_checkpoints_of_before_resume(one_rank, tmp_path, frozen_in_group):
    """With frozen parameters in the group or not, and without the step of a parameter that has no
    elements.
    """
    odd = {"frozen": ["first", "second"], "empty": True}
    module = Odd(**odd)
    named = dict(module.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    parameters = {f"model/{name}": parameter.detach() + 1 for name, parameter in named.items()}
    for name in trained:
        parameters[f"optimizer/exp_avg/{name}"] = torch.full_like(named[name].detach(), 2)
        parameters[f"optimizer/exp_avg_sq/{name}"] = torch.full_like(named[name].detach(), 3)
        if named[name].numel():
            parameters[f"optimizer/step/{name}"] = torch.tensor(7.0)
    parameters["rng/0/of_another_machine"] = torch.zeros(4, dtype=torch.uint8)
    write_by_hand(tmp_path, [list(named) if frozen_in_group else trained], parameters)
    for name in ("bucketed", "zero1", "zero2", "sharded-optimizer", "fsdp"):
        model, optimizer = built(one_rank, name, torch.optim.AdamW, Odd(**odd))
        saver = Checkpointer(tmp_path, one_rank)
        saver.load(saver.newest(), model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["betas"] == (
            0.9,
            0.999,
        )
        for key, value in model.full_parameters().items():
            assert torch.equal(value, parameters[f"model/{key}"])
        state = optimizer.local.state if hasattr(optimizer, "local") else optimizer.state
        (block,) = (shard for shard in stepped(model, optimizer) if shard.name == "blocks.0.weight")
        assert state[block.tensor]["step"] == 7 and (state[block.tensor]["exp_avg_sq"] == 3).all()
        step(model, optimizer, 2)
        model.close()


# -- what no checkpoint holds ----------------------------------------------------------------------

OTHER_DTYPES = [
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint16",
    "uint32",
    "uint64",
]


@pytest.mark.parametrize("name", ["naive", "zero1", "fsdp"])
def test_a_buffer_or_parameter_that_cannot_be_stored_is_refused_at_the_start(
    one_rank, tmp_path, name
):
    """Not after the first fifty steps; a buffer that is not stored may be of any dtype."""
    for dtype in OTHER_DTYPES:
        odd = Odd()
        model = wrapped_by(name, odd, one_rank)
        # Only now: gloo does not broadcast all of these, and NCCL does.
        odd.blocks[0].register_buffer("freqs", torch.zeros(3, dtype=getattr(torch, dtype)))
        with pytest.raises(
            ValueError, match=rf"'blocks\.0\.freqs' has dtype {dtype}, which .* persistent=False"
        ):
            Checkpointer(tmp_path, one_rank, model=model)
        model.close()
    for view in (torch.zeros(3, 2).t(), torch.zeros(3).expand(2, 3), torch.zeros(8)[::2]):
        odd = Odd()
        model = wrapped_by(name, odd, one_rank)
        odd.register_buffer("view", view)
        with pytest.raises(ValueError, match="'model/view' is not contiguous in memory"):
            Checkpointer(tmp_path, one_rank, model=model)
        model.close()
    odd = Odd()
    odd.first.register_parameter(
        "turn", nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False)
    )
    model = wrapped_by(name, odd, one_rank)
    with pytest.raises(ValueError, match=r"'first\.turn' has dtype complex64"):
        Checkpointer(tmp_path, one_rank, model=model)
    model.close()
    model = wrapped_by(name, Odd(buffers=True), one_rank)
    Checkpointer(tmp_path, one_rank, model=model)


def test_the_trainer_refuses_such_a_model_before_its_first_step(one_rank, tmp_path, monkeypatch):
    build = loop.build_training

    def with_a_complex_buffer(*args, **options):
        model, wrapper, optimizer = build(*args, **options)
        model.register_buffer("freqs", torch.zeros(3, dtype=torch.complex64))
        return model, wrapper, optimizer

    monkeypatch.setattr(loop, "build_training", with_a_complex_buffer)
    Run(one_rank)  # without a folder it may train
    with pytest.raises(ValueError, match="'freqs' has dtype complex64"):
        Run(one_rank, tmp_path)


@pytest.mark.ranks(4)
def test_the_trainer_refuses_shards_that_no_index_describes_before_its_first_step(
    context, tmp_path
):
    """FSDP2 over matrices that ranks share trained up to the first checkpoint, and saved
    nothing.
    """
    message = (
        "fsdp2 with layout tp2 can be timed .* and not trained: checkpoints cannot hold its "
        "parameters"
    )
    with pytest.raises(ValueError, match=message):
        Run(context, tmp_path, strategy="fsdp2", layout="tp2", vocab=32, heads=4, batch=16)
