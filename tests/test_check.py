"""`distlab check`: every known mistake gets its name, and what is right gets none.

`python -m tests.check_matrix` runs many more wrappers, in three dtypes and at more ranks.
"""

import json
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distlab.bench.task import own_task
from distlab.check import check, messages, on_rank, signatures
from distlab.check.reference import step_size
from distlab.testing import check_gradients, run_ranks
from experiments.sabotage.faults import replaced
from experiments.sabotage.mistakes import MISTAKES
from tests import check_matrix
from tests.commands import python

HERE = __name__
# mistake → signature of the tensors that differ; a message of the strategy's own where it raises
NAMED = {
    "no broadcast": signatures.NOT_BROADCAST,
    "sum, not mean": signatures.SUMMED,
    "last bucket not sent": signatures.OWN,
    "reduces the parameter": signatures.OWN,
    "missing wait": signatures.OWN,
    "tied weight twice": signatures.TIED,
    "same data everywhere": signatures.ONE_RANK,
    "hook order": signatures.OTHER_TENSOR,
    "shard not exchanged": signatures.NOT_SENT,
    "softmax without maximum": signatures.NOT_A_NUMBER,
    "mask off by one": signatures.UNKNOWN,
    "stale accumulation": signatures.FIRST,
    "means not zeroed": signatures.ADDED,
    "read elsewhere": signatures.STALE,
    "finish forgotten": "finish_gradient_synchronization",
    "torch's clipping": "clip",
}
SLOW = "sent every micro-batch"


def names_of_mistakes(context, names):
    found = {}
    for name in names:
        mistake = MISTAKES[name]
        made = replaced(*mistake.replaced) if mistake.replaced else nullcontext()
        try:
            with made:
                verdict = check(
                    context, mistake.task, mistake.strategy, candidate=mistake.candidate
                )
            found[name] = {finding.signature for finding in verdict.findings}
        except ValueError as error:
            found[name] = {str(error)}
    return found


def test_every_mistake_gets_its_name():
    found = run_ranks(names_of_mistakes, 2, list(NAMED), deadline_s=120)[0]
    wrong = {}
    for name, right in NAMED.items():
        if not all(right in text for text in found[name]):
            wrong[name] = found[name]
    # each rank has a whole model
    alone = {name for name, mistake in MISTAKES.items() if mistake.layout.ranks == 1}
    assert NAMED.keys() == alone - {SLOW} and not wrong and all(found.values())


class Branches(nn.Module):
    """Two layers of one shape, each of which some batches do not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.first(x) if x.sum() > 0 else self.second(x))


def branches():
    return classified(Branches())


def drops_what_one_rank_lacks(module, group):
    """Average the gradients that all ranks have, and drop the others."""
    _, average = by_hand(module, group)

    def finish():
        unused = torch.tensor([float(each.grad is None) for each in module.parameters()])
        dist.all_reduce(unused, group=group)
        for parameter, count in zip(module.parameters(), unused, strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average()
        for parameter, count in zip(module.parameters(), unused, strict=True):
            if count:
                parameter.grad = None

    return module, finish


def name_of_dropped(context):
    # With this seed, the batches of the two ranks take different branches.
    names = f"{HERE}:branches", f"{HERE}:drops_what_one_rank_lacks"
    verdict = on_rank(context, *names, micro_batches=1, seed=3)
    return {(each.tensor, each.signature) for each in verdict.findings if each.step == 1}


def test_gradients_that_no_rank_has_are_not_called_another_tensors():
    """On each of two ranks one branch is used. The shares of the other branch are zero."""
    found = run_ranks(name_of_dropped, 2, deadline_s=120)[0]
    branches_of = {f"{name}.{part}" for name in ("first", "second") for part in ("weight", "bias")}
    assert found == {(name, signatures.ABSENT) for name in branches_of}


def test_what_costs_messages_alone_gets_no_name():
    assert run_ranks(names_of_mistakes, 2, [SLOW], deadline_s=120)[0] == {SLOW: set()}


# -- models
# ------------------------------------------------------------------------------------------------


def classified(module):
    def batch(size, generator):
        return torch.randn(size, 6, generator=generator), torch.randint(
            5, (size,), generator=generator
        )

    return module, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def mlp():
    return classified(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5)))


def compiled():
    module, *rest = mlp()
    return torch.compile(module, backend="eager"), *rest


def compiled_layers():
    module, *rest = with_statistics()
    for number in (0, 1):
        module[number] = torch.compile(module[number], backend="eager")
    return module, *rest


def with_statistics():
    return classified(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5))
    )


def tied():
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return classified(nn.Sequential(first, nn.GELU(), last))


def tokens():
    module = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11))

    def batch(size, generator):
        return torch.randint(11, (size, 13), generator=generator)

    return (
        module,
        batch,
        lambda model, batch: F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:]),
    )


# -- wrappers
# ----------------------------------------------------------------------------------------------


def ddp(module, group):
    return DistributedDataParallel(module, process_group=group)


def fsdp2(module, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(module[0], mesh=mesh)
    return fully_shard(module, mesh=mesh)


def reduced(reduce):
    """A wrapper of ten lines, whose finish reduces one gradient after the other."""

    def wrap(module, group):
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0, group)

        def finish():
            for name, parameter in module.named_parameters():
                reduce(name, parameter.grad, group)

        return module, finish

    return wrap


def mean(name, gradient, group):
    dist.all_reduce(gradient, group=group)
    gradient /= group.size()


by_hand = reduced(mean)


@reduced
def in_bf16(name, gradient, group):
    sent = gradient.bfloat16()
    mean(name, sent, group)
    gradient.copy_(sent)


@reduced
def divided_twice(name, gradient, group):
    mean(name, gradient, group)
    gradient /= group.size()


@reduced
def without_micro_batches(name, gradient, group):
    mean(name, gradient, group)
    gradient *= group.size() + 1


@reduced
def never_summed(name, gradient, group):
    gradient /= group.size()


def a_step_late(module, group):
    late: dict[str, Tensor] = {}

    @reduced
    def keep(name, gradient, group):
        mean(name, gradient, group)
        fresh = gradient.clone()
        gradient.copy_(late.get(name, torch.zeros_like(fresh)))
        late[name] = fresh

    return keep(module, group)


@reduced
def scaled_by_rank(name, gradient, group):
    mean(name, gradient, group)
    gradient *= 1.7 + group.rank()


def moves_a_buffer(module, group):
    module, finish = by_hand(module, group)

    def and_move():
        finish()
        module[1].running_mean.add_(1)

    return module, and_move


class FlatShards(nn.Module):
    """FSDP by hand: between forward and backward a rank has only its part of each parameter, flat.

    Args:
        ranks: number by which the reduce-scatter divides.
    """

    def __init__(self, module, group, ranks):
        super().__init__()
        self.module = module
        self.group = group
        self.ranks = ranks
        self.shapes = {}
        for name, parameter in module.named_parameters():
            dist.broadcast(parameter.data, 0, group)
            self.shapes[name] = parameter.shape
            parameter.register_post_accumulate_grad_hook(self.reduce_scatter)
        self.sums = {}  # parameter → mean gradient of this rank's part, over backwards so far
        for parameter in module.parameters():
            parameter.data = self.part(parameter.data)

    def part(self, whole):
        size = -(-whole.numel() // self.group.size())
        padded = F.pad(whole.flatten(), (0, size * self.group.size() - whole.numel()))
        return padded.chunk(self.group.size())[self.group.rank()].clone()

    def gather(self, name, local):
        parts = [torch.empty_like(local) for _ in range(self.group.size())]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        shape = self.shapes[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def forward(self, *args):
        for name, parameter in self.module.named_parameters():
            parameter.grad = None
            parameter.data = self.gather(name, parameter.data)
        return self.module(*args)

    def reduce_scatter(self, parameter):
        whole = parameter.grad
        dist.all_reduce(whole, group=self.group)
        parameter.data = self.part(parameter.data)
        parameter.grad = None
        part = self.part(whole / self.ranks)
        self.sums[parameter] = self.sums[parameter] + part if parameter in self.sums else part

    def finish_gradient_synchronization(self):
        for parameter, part in self.sums.items():
            parameter.grad = part
        self.sums = {}


def flat_shards(module, group):
    return FlatShards(module, group, group.size())


def flat_shards_summed(module, group):
    return FlatShards(module, group, 1)


def flat_shards_alone(module, group):
    """The same without a way to gather them."""
    wrapped = flat_shards(module, group)
    return wrapped.forward, wrapped.finish_gradient_synchronization


def gathers_a_part(module, group):
    wrapped = flat_shards(module, group)
    wrapped.gather = lambda name, local: local
    return wrapped


# -- optimizers
# --------------------------------------------------------------------------------------------


class Mistaken(torch.optim.AdamW):
    """AdamW that makes the mistake noted at its parameters, so none in the check's own copy."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            mistake = getattr(parameter, "mistake", "")
            if mistake == "own gradient":
                parameter.grad = parameter.own_gradient
            elif mistake == "reset":
                self.state.pop(parameter, None)
            elif mistake == "counted twice" and parameter in self.state:
                self.state[parameter]["step"] += 1
            elif mistake == "scaled" and parameter in self.state:
                self.state[parameter]["exp_avg_sq"] *= 1.5
        super().step()


def making(mistake):
    """Return `by_hand` for an optimizer that makes a mistake."""

    def wrap(module, group):
        module, finish = by_hand(module, group)
        for parameter in module.parameters():
            parameter.mistake = mistake

        def keep_own():
            for parameter in module.parameters():
                parameter.own_gradient = parameter.grad.clone()
            finish()

        return module, keep_own

    return wrap


own_moments = making("own gradient")
reset = making("reset")
counted_twice = making("counted twice")
scaled_moments = making("scaled")
STATES = {  # wrapper → signature, step, kinds of state
    "own_moments": (signatures.STATE_OWN, 1, {"state exp_avg", "state exp_avg_sq"}),
    "reset": (signatures.STATE_RESET, 2, {"state exp_avg", "state exp_avg_sq", "state step"}),
    "counted_twice": (signatures.STATE_COUNT, 2, {"state step"}),
    "scaled_moments": (signatures.STATE_UNKNOWN, 2, {"state exp_avg_sq"}),
}
# They keep states on all ranks, divided by parameter, in slices, and as DTensors.
KEEPS_STATE = [
    "bucketed",
    "zero1",
    "fsdp",
    "sharded-optimizer",
    "torch-zero",
    "flat_shards",
    "fsdp2",
]
# They keep it as one of the others does: as `bucketed`, `zero1` or `fsdp2`.
KEEPS_IT_ALIKE = ["naive", "flat", "overlap", "torch-ddp", "by_hand", "zero2", "fsdp2-of-ours"]


def with_optimizer(context, cases):
    return [
        on_rank(context, named(model), named(wrap), optimizer=optimizer)
        for model, wrap, optimizer in cases
    ]


# Three ranks divide unevenly, and take every path that two take. `make test-commands` runs both.
BOTH_NUMBERS = pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.commands), 3])


@pytest.mark.parametrize(
    "ranks, wraps",
    [
        (3, KEEPS_STATE),
        pytest.param(3, KEEPS_IT_ALIKE, marks=pytest.mark.commands),
        pytest.param(2, KEEPS_STATE + KEEPS_IT_ALIKE, marks=pytest.mark.commands),
    ],
    ids=["3", "3, alike", "2"],
)
def test_the_state_of_the_optimizer_is_compared(ranks, wraps):
    cases = [("with_statistics", wrap, "adamw") for wrap in wraps]
    cases += [("tied", "zero1", "rmsprop"), ("mlp", "fsdp", "NAdam"), ("mlp", "bucketed", "asgd")]
    found = run_ranks(with_optimizer, ranks, cases, deadline_s=200)[0]
    kinds = {"adamw": 3, "rmsprop": 2, "NAdam": 4, "asgd": 4}  # of state, for each parameter
    for (model, wrap, optimizer), verdict in zip(cases, found, strict=True):
        row = f"{model} under {wrap}, {optimizer}: {verdict}"
        assert verdict.right, row
        assert verdict.states == kinds[optimizer] * verdict.tensors, row


@BOTH_NUMBERS
def test_mistakes_in_the_state_get_their_names(ranks):
    cases = [("mlp", wrap, f"{HERE}:Mistaken") for wrap in ("by_hand", *STATES)]
    right, *found = run_ranks(with_optimizer, ranks, cases, deadline_s=200)[0]
    assert right.right and right.states == 18
    for wrap, verdict in zip(STATES, found, strict=True):
        signature, step, kinds = STATES[wrap]
        seen = {(each.signature, each.step) for each in verdict.findings}
        assert seen == {(signature, step)}, f"{wrap}: {verdict}"
        assert {each.what for each in verdict.findings} == kinds, f"{wrap}: {verdict}"
        assert len({each.tensor for each in verdict.findings}) == 6, f"{wrap}: {verdict}"


@pytest.mark.parametrize(
    "name, message",
    [
        ("adamv", "torch.optim has no such class"),
        (f"{HERE}:mlp", "give a class derived from torch.optim.Optimizer"),
        ("lbfgs", "closure"),
    ],
)
def test_other_optimizers_are_one_sentence(name, message):
    with pytest.raises(ValueError, match=message) as raised:
        check_gradients(mlp, "flat", optimizer=name)
    assert "\n" not in str(raised.value)


# -- the first module that differs
# -------------------------------------------------------------------------


def corrupts_weights(module, group):
    """Rank 1 has other weights in its last layer from the second step on."""
    module, finish = by_hand(module, group)

    def finish_and_corrupt():
        finish()
        finish_and_corrupt.steps += 1

    def corrupt(*_):
        if finish_and_corrupt.steps == 1 and group.rank() == 1:
            module[3].weight.data *= 1.001
            handle.remove()

    finish_and_corrupt.steps = 0
    handle = module.register_forward_pre_hook(corrupt)
    return module, finish_and_corrupt


def patches_forward(module, group):
    module, finish = by_hand(module, group)
    forward = module[1].forward
    module[1].forward = lambda x: forward(x) * 1.0001
    return module, finish


def patches_backward(module, group):
    """The backward of a layer is another one on rank 1."""
    module, finish = by_hand(module, group)
    if group.rank() == 1:
        module[2].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 1.5,))
    return module, finish


def scales_the_loss(module, group):
    """Each rank divides before backward, and the gradients are added: right."""

    class Divided(nn.Module):
        def forward(self, *args):
            out = module(*args).clone()
            out.register_hook(divide)
            return out

    def divide(gradient):
        return gradient / group.size()

    @reduced
    def add(name, gradient, group):
        dist.all_reduce(gradient, group=group)

    _, finish = add(module, group)
    return Divided(), finish


def checkpointed():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x):
            return self.second(checkpoint(self.first, x, use_reentrant=False).relu())

    return classified(Blocks())


SAME = "no module differs"
WHERE = [  # model, wrapper, sentence
    (
        "mlp",
        "corrupts_weights",
        r"first, the output of 3 \(Linear\) .* rank 1, in step 2, .* 1, by",
    ),
    (
        "mlp",
        "patches_forward",
        r"the output of 1 \(LayerNorm\) .* ranks 0, 1, in step 1, .* by 1.0e-04",
    ),
    (
        "mlp",
        "patches_backward",
        r"the gradient of the output of 1 \(LayerNorm\) .* rank 1, in step 1",
    ),
    ("mlp", "divided_twice", SAME),  # a mistake outside of the modules
    ("mlp", "scales_the_loss", SAME),
    *((model, "ddp", SAME) for model in ("with_statistics", "tied", "tokens", "checkpointed")),
    # One strategy of each way to wrap a module, and of each way to keep its parameters.
    *(("tokens", wrap, SAME) for wrap in ("bucketed", "zero1", "fsdp", "torch-ddp", "fsdp2")),
    ("mlp", "flat_shards", SAME),
]


def with_where(context, cases):
    return [on_rank(context, named(model), named(wrap), where=True) for model, wrap, _ in cases]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WHERE, id="one of each kind"),
        pytest.param(
            [
                ("tokens", wrap, SAME)
                for wrap in KEEPS_STATE + KEEPS_IT_ALIKE
                if wrap != "flat_shards"
            ],
            id="every wrapper",
            marks=pytest.mark.commands,
        ),
    ],
)
def test_the_first_module_that_differs_is_named(cases):
    found = run_ranks(with_where, 2, cases, deadline_s=200)[0]
    for (model, wrap, sentence), verdict in zip(cases, found, strict=True):
        assert re.match(".*" + sentence, verdict.where), f"{model} under {wrap}: {verdict}"
        assert f"where: {verdict.where}" in str(verdict)


# -- four reports, rebuilt; one is `divided_twice`
# -----------------------------------------------------------


@reduced
def experts_doubled(name, gradient, group):
    """pytorch 160285: an expert sees the tokens of all ranks, and its gradient is not divided."""
    mean(name, gradient, group)
    if name.startswith("3."):
        gradient *= group.size()


class CutSequence(nn.Module):
    """Each rank computes a part of the sequence; what comes out is gathered."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group

    def forward(self, tokens):
        part = tokens.chunk(self.group.size(), 1)[self.group.rank()]
        out = self.module(part)
        parts = [torch.zeros_like(out) for _ in range(self.group.size())]
        dist.all_gather(parts, out.detach().contiguous(), group=self.group)
        parts[self.group.rank()] = out
        return torch.cat(parts, 1)


def norms_of_a_part(module, group):
    """Megatron-LM 7452, finding 11: a replicated norm sees a part of the sequence, never summed."""

    @reduced
    def matrices_only(name, gradient, group):
        if not name.startswith("1."):
            dist.all_reduce(gradient, group=group)

    _, finish = matrices_only(module, group)
    return CutSequence(module, group), finish


def computes_in_bf16(module, group):
    """Run forward and backward under autocast, and average as it should."""
    _, finish = by_hand(module, group)

    def forward(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(*inputs).float()

    return forward, finish


def computes_in_fp16(module, group):
    """The same in fp16."""
    _, finish = by_hand(module, group)

    def forward(*inputs):
        with torch.autocast("cpu", dtype=torch.float16):
            return module(*inputs).float()

    return forward, finish


def none_on_the_last(module, group):
    """Average, and then lose the gradients of the last rank."""
    _, average = by_hand(module, group)

    def finish():
        average()
        if group.rank() == group.size() - 1:
            for parameter in module.parameters():
                parameter.grad = None

    return module, finish


def counts_of_all(module, group):
    """Megatron-LM 7452, finding 10: a count that scales a router's loss is summed in place."""
    count = torch.ones(())
    dist.all_reduce(count, group=group)
    module[3].weight.register_hook(lambda gradient: gradient * count)
    return by_hand(module, group)


RIGHT = [  # model, wrapper or strategy
    ("mlp", "by_hand"),
    ("mlp", "ddp"),
    ("tokens", "fsdp2"),
    ("with_statistics", "ddp"),
    ("tied", "by_hand"),
    ("mlp", "flat_shards"),
    ("mlp", "naive"),
    ("tied", "flat"),
    ("with_statistics", "overlap"),
    ("tokens", "bucketed"),
    ("mlp", "zero1"),
    ("tied", "zero2"),
    ("tied", "sharded-optimizer"),
    ("tokens", "fsdp"),
    ("mlp", "torch-ddp-tuned"),
    ("mlp", "fsdp2-of-ours"),
    ("compiled", "ddp"),
    ("compiled", "zero1"),
    ("compiled_layers", "bucketed"),
    ("compiled_layers", "fsdp"),
]
WRONG = {  # wrapper → model, signature, tensors that have it
    "in_bf16": ("mlp", signatures.ROUNDED, None),
    "computes_in_bf16": ("mlp", signatures.LIKE_BF16, None),
    "computes_in_fp16": ("mlp", signatures.LIKE_FP16, None),
    "none_on_the_last": ("mlp", signatures.ABSENT, None),
    "scaled_by_rank": ("mlp", signatures.APART, None),
    "moves_a_buffer": ("with_statistics", signatures.BUFFER, {"1.running_mean"}),
    "divided_twice": ("mlp", signatures.DIVIDED, None),
    "without_micro_batches": ("mlp", signatures.MICRO_SUMMED, None),
    "flat_shards_summed": ("mlp", signatures.SUMMED, None),
    "never_summed": ("mlp", signatures.OWN_DIVIDED, None),
    "a_step_late": ("mlp", signatures.PREVIOUS, None),
    "experts_doubled": ("mlp", signatures.SUMMED, {"3.weight", "3.bias"}),
    "counts_of_all": ("mlp", signatures.SUMMED, {"3.weight"}),
    "norms_of_a_part": ("tokens", signatures.PART + signatures.SEQUENCE, {"1.weight", "1.bias"}),
}
WRONG_CASES = [(model, wrap) for wrap, (model, _, _) in WRONG.items()]


def named(name):
    """Of a function in this file; a strategy's is its own."""
    return f"{HERE}:{name}" if name in globals() else name.removesuffix("-of-ours")


def verdicts(context, cases, same):
    return [
        on_rank(context, named(model), named(wrap), same_batch=wrap in same)
        for model, wrap in cases
    ]


@pytest.mark.parametrize(
    "ranks, cases",
    [
        pytest.param(2, RIGHT, id="right, 2 ranks"),
        pytest.param(3, WRONG_CASES, id="wrong, 3 ranks"),
        # At two ranks the sums are those of the mistakes of experiments/sabotage, tested above.
        pytest.param(2, WRONG_CASES, id="wrong, 2 ranks", marks=pytest.mark.commands),
    ],
)
def test_right_models_get_no_name_and_wrong_wrappers_theirs(ranks, cases):
    found = run_ranks(verdicts, ranks, cases, {"norms_of_a_part"}, deadline_s=200)[0]
    for (model, wrap), verdict in zip(cases, found, strict=True):
        differing = {finding.tensor for finding in verdict.findings}
        if wrap not in WRONG:
            assert verdict.right and not verdict.warning, f"{model} under {wrap}: {verdict}"
            continue
        _, signature, tensors = WRONG[wrap]
        assert {finding.signature for finding in verdict.findings} == {signature}, (
            f"{wrap}: {verdict}"
        )
        assert differing == tensors or (tensors is None and len(differing) == verdict.tensors), (
            f"{wrap}: {verdict}"
        )
        assert not verdict.warning
        assert abs(verdict.loss / verdict.expected_loss - 1) < 0.03  # which nobody would notice


# -- mistakes whose name depends on the ranks
# ----------------------------------------------------------------------------------


def weighing(first):
    """Return a wrapper in which rank 0 weighs 1/P + `first` and the others share the rest."""

    @reduced
    def reduce(name, gradient, group):
        ranks = group.size()
        gradient *= 1 / ranks + (first if group.rank() == 0 else -first / (ranks - 1))
        dist.all_reduce(gradient, group=group)

    return reduce


weighs_a_little = weighing(0.002)
weighs_more = weighing(0.01)
weighs_much = weighing(0.1)


def weighs_by_tokens(module, group):
    """Weigh each rank by its share of the targets in the step."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0, group)
    count = torch.zeros(())

    def forward(inputs, targets):
        count.add_((targets != -100).sum())
        return module(inputs, targets)

    def finish():
        total = count.clone()
        dist.all_reduce(total, group=group)
        for parameter in module.parameters():
            parameter.grad *= count / total
            dist.all_reduce(parameter.grad, group=group)
        count.zero_()

    return forward, finish


def first_micro_batch_weighs_more(module, group):
    """Weigh the first micro-batch of a step by 1.004. No name is known for that."""
    _, average = by_hand(module, group)
    calls = 0

    def forward(*inputs):
        nonlocal calls
        calls += 1
        output = module(*inputs)
        if calls == 1:
            output.register_hook(lambda gradient: 1.004 * gradient)
        return output

    def finish():
        nonlocal calls
        calls = 0
        average()

    return forward, finish


@reduced
def noisy(name, gradient, group):
    """Add noise of the size of a rounding in bf16, the same on all ranks."""
    mean(name, gradient, group)
    generator = torch.Generator().manual_seed(gradient.numel())
    noise = torch.randn(gradient.shape, generator=generator)
    gradient += 0.002 * gradient.square().mean().sqrt() * noise


def lr_times_ranks(module, group):
    """Scale the learning rate by the number of ranks."""
    module, finish = by_hand(module, group)

    def make_optimizer(parameters, cls, lr, **options):
        return cls(parameters, lr=group.size() * lr, **options)

    return module, finish, make_optimizer


def updates_twice(module, group):
    """Make each update twice."""
    module, finish = by_hand(module, group)

    def make_optimizer(parameters, cls, **options):
        optimizer = cls(parameters, **options)
        optimizer.register_step_post_hook(again)
        return optimizer

    def again(optimizer, args, options):
        for parameter in module.parameters():
            parameter.data -= optimizer.param_groups[0]["lr"] * parameter.grad

    return module, finish, make_optimizer


BY_RANKS = [  # model, wrapper, signature at 2 ranks, at 3 ranks
    *(
        (
            model,
            "weighs_a_little",
            "ranks weigh 0.502 and 0.498 instead of 1/2 each",
            "ranks weigh 0.335, 0.332 and 0.332 instead of 1/3 each",
        )
        for model in ("mlp", "tokens", "sum_of_targets")
    ),
    (
        "mlp",
        "weighs_more",
        "ranks weigh 0.51 and 0.49 instead of 1/2 each",
        "ranks weigh 0.343, 0.328 and 0.328 instead of 1/3 each",
    ),
    (
        "tokens",
        "weighs_much",
        "ranks weigh 0.6 and 0.4 instead of 1/2 each",
        "ranks weigh 0.433, 0.283 and 0.283 instead of 1/3 each",
    ),
    *(
        (
            model,
            "weighs_by_tokens",
            "ranks weigh 0.618 and 0.382 instead of 1/2 each: by their shares of the tokens",
            "ranks weigh 0.365, 0.326 and 0.309 instead of 1/3 each: by their shares of the tokens",
        )
        for model in ("sum_of_targets", "mean_over_targets")
    ),
    ("tokens", "first_micro_batch_weighs_more", signatures.UNKNOWN, signatures.UNKNOWN),
    ("mlp", "noisy", signatures.UNKNOWN, signatures.UNKNOWN),
    ("mlp", "lr_times_ranks", signatures.STEPPED_TWICE_OR_LR, signatures.STEPPED_P_TIMES),
    ("mlp", "updates_twice", signatures.STEPPED_TWICE_OR_LR, signatures.STEPPED_TWICE),
]


# Three ranks run all. Two run a case of each name that they have of their own. Their other cases
# differ only in the model or in the size of the weights, which three ranks show.
ONCE_AT_TWO = ("weighs_more", "weighs_by_tokens", "lr_times_ranks", "updates_twice")
AT_TWO = {}  # wrapper → its last row
for row in BY_RANKS:
    if row[1] in ONCE_AT_TWO:
        AT_TWO[row[1]] = row


@pytest.mark.parametrize(
    "ranks, rows",
    [
        pytest.param(2, [*AT_TWO.values()], id="2"),
        pytest.param(2, BY_RANKS, id="2, all", marks=pytest.mark.commands),
        pytest.param(3, BY_RANKS, id="3"),
    ],
)
def test_names_that_depend_on_the_ranks(ranks, rows):
    cases = [(model, wrap) for model, wrap, *_ in rows]
    found = run_ranks(verdicts, ranks, cases, (), deadline_s=200)[0]
    for (model, wrap, *names), verdict in zip(rows, found, strict=True):
        row = f"{model} under {wrap}: {verdict}"
        # Every tensor is wrong as a whole.
        assert {(each.signature, each.part) for each in verdict.findings} == {
            (names[ranks - 2], None)
        }, row
        assert len(verdict.findings) == verdict.tensors, row


# -- kinds, a few cases of each in `tests/check_matrix.py`
# ------------------------------------------------------

HALF_WRONG = [  # where what is right may differ by a few percent
    "summed",
    "divided twice",
    "unreduced",
    "zeroed",
    "of rank 0",
    "one missing",
    "one missing, groups",
    "one bias missing",
    "first micro-batch",
    "stepped twice",
    "decay",
]
HALF_RIGHT = [
    "by hand, attention",
    "divided first",
    "added backwards",
    "added in fp32",
    "torch DDP, convolution",
    "fsdp, mlp",
    "zero1, attention",
    "FSDP2, groups",
]
# Each mistake in one of the two dtypes: `check` compares both alike, apart from the rounding that
# it allows. What is right could be accused because of that rounding, so both have all of it.
HALF = {"bf16": HALF_WRONG[0::2] + HALF_RIGHT, "fp16": HALF_WRONG[1::2] + HALF_RIGHT}
KINDS = {
    "an exact gradient of zero": [
        "by hand, convolution",
        "torch DDP, groups",
        "FSDP2, attention",
        "bucketed, convolution",
        "garbage, convolution",
        "garbage, attention",
    ],
    "one backward per step": ["overlapped", "overlapped, convolution", "overlapped, own method"],
    "losses of (sum, count)": [
        "by hand, counted",
        "FSDP2, counted",
        "naive, counted",
        "bucketed, counted",
        "zero1, counted",
        "zero2, counted",
        "fsdp, counted",
        "summed, counted",
        "mean of micro-batches",
        "mean of ranks",
    ],
    "norms": [
        "norm of DDP, counted",
        "norm of FSDP2",
        "norm of bucketed, counted",
        "norm of a method",
        "norm of all shards",
        "norm times P",
        "norm of mixed shards",
        "norm before averaging",
        "norm before averaging, counted",
        "norm of own shard",
        "norm without a shard",
        "norm by roots",
    ],
    "names that are computed": [
        "a step late",
        "stale after",
        "not reset",
        "averaged over steps",
        "stepped twice",
        "not stepped",
        "not sent",
        "decay",
        "exchanged",
        "one bias missing",
        "last micro-batch",
        "scaled",
        "noisy",
        "one element",
    ],
    "buffers that forward reads": [
        "by hand, running",
        "torch DDP, running",
        "buffers of rank 0 in finish",
        "buffers of rank 0 in forward",
    ],
    "changed besides the training": [
        "frozen changed",
        "buffers damaged",
        "by hand, frozen",
        "torch DDP, frozen",
    ],
    "some parameters in bf16": [
        "summed, mixed",
        "divided twice, mixed",
        "unreduced, mixed",
        "zeroed, mixed",
        "torch DDP, mixed",
    ],
}


# Their paths are those of other cases: the same wrapper on another model with such a gradient, a
# strategy that counts as `bucketed` does, or a mistake that a test above has in another wrapper.
ALIKE = {
    "torch DDP, groups",
    "bucketed, convolution",
    "garbage, convolution",
    "overlapped, convolution",
    "naive, counted",
    "zero1, counted",
    "zero2, counted",
    "a step late",
    "stepped twice",
    "noisy",
    "torch DDP, running",
    "torch DDP, frozen",
    "divided twice, mixed",
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind):
    expect(2, "fp32", [name for name in KINDS[kind] if name not in ALIKE])


@pytest.mark.commands
def test_what_takes_the_path_of_another_case():
    expect(2, "fp32", sorted(ALIKE))


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype):
    expect(2, dtype, HALF[dtype])


def expect(ranks, dtype, names):
    verdicts = run_ranks(check_matrix.judge, ranks, names, dtype, deadline_s=200)[0]
    for name, verdict in zip(names, verdicts, strict=True):
        said, _ = check_matrix.outcome(check_matrix.CASES[name], dtype, verdict)
        assert said in ("right", "found"), f"{name}: {said}\n{verdict}"
        assert not verdict.warning, f"{name}: {verdict}"


# -- means over different numbers of targets
# -------------------------------------------------------------------


def mean_over_targets():
    """A loss that is a mean over those targets that are not -100."""
    module = check_matrix.Counted()

    def loss(model, batch):
        return model(*batch) / (batch[1] != -100).sum()

    return module, check_matrix.batch_with_ignored, loss


def sum_of_targets():
    return check_matrix.counted(torch.float32)


def norms_over_targets():
    """Return the relative difference of norms in the first step, of 2 ranks × 3 micro-batches."""
    means = {}  # name → sum of the micro-batches' mean gradients
    total = {}  # name → sum of the gradients over all targets
    count = 0  # targets
    for rank in range(2):
        task = own_task(f"{HERE}:sum_of_targets", 4)
        for number in range(3):
            module = task.build(0, torch.device("cpu"))
            (batch,) = task.batches(rank, number, torch.device("cpu"))
            loss, counted = task.loss_fn(module, batch)
            loss.backward()
            count += counted
            for name, parameter in module.named_parameters():
                total[name] = total.get(name, 0) + parameter.grad
                means[name] = means.get(name, 0) + parameter.grad / counted / 6
    norm_of_means = torch.cat([each.flatten() for each in means.values()]).norm()
    norm = torch.cat([(each / count).flatten() for each in total.values()]).norm()
    return abs(norm_of_means / norm - 1).item()


def test_a_mean_over_different_numbers_of_targets_is_a_warning():
    verdict = check_gradients(mean_over_targets, named("by_hand"))
    assert verdict.right and verdict.warning.startswith(signatures.MEANS)
    assert f"differs by {norms_over_targets():.1%} from" in verdict.warning
    assert f"warning: {verdict.warning}" in str(verdict)
    done = checked("--strategy", "fsdp", model="mean_over_targets")
    assert done.returncode == 0 and "warning: mean of means" in done.stdout, done.stderr


def every_target():
    """The same loss, where no target is ignored."""
    module, _, loss = mean_over_targets()

    def batch(size, generator):
        inputs, targets = check_matrix.batch_with_ignored(size, generator)
        return inputs, targets.clamp(min=0)

    return module, batch, loss


def same_number_of_targets():
    """The same loss, where each batch ignores the first target of each sequence."""
    module, _, loss = mean_over_targets()

    def batch(size, generator):
        inputs, targets = check_matrix.batch_with_ignored(size, generator)
        targets = targets.clamp(min=0)
        targets[:, 0] = -100
        return inputs, targets

    return module, batch, loss


@pytest.mark.parametrize("model", [every_target, same_number_of_targets, sum_of_targets])
def test_equal_numbers_of_targets_and_counts_are_no_warning(model):
    verdict = check_gradients(model, "bucketed")
    assert verdict.right and not verdict.warning


# -- messages between ranks
# ----------------------------------------------------------------------------------


SENT_DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", SENT_DTYPES, ids=str)
def test_a_tensor_arrives_as_it_was_sent(dtype):
    values = torch.tensor([[-1.5, 0.0, 2.0], [1.0, 4.0, 0.5]]).to(dtype)
    before = values.tolist()
    sent = {
        "plain": values,
        "transposed": values.T,
        "expanded": values[:1].expand(4, 3),
        "scalar": values[0, 0],
        "one element": values[:1, 1],
        "empty": values[:, :0],
        "no elements": values[:0, 0],
    }
    received = messages.unpacked(messages.packed(sent))
    for name, tensor in sent.items():
        assert received[name].dtype == dtype and received[name].shape == tensor.shape, name
        assert received[name].tolist() == tensor.tolist(), name
        received[name].zero_()  # memory of its own
    assert values.tolist() == before


def test_other_tensors_and_errors_arrive_as_they_were_sent():
    trained = nn.Parameter(torch.arange(3.0))
    wide = torch.arange(3.0, requires_grad=True)
    sent = [trained, wide, torch.eye(3).to_sparse(), TimeoutError("waited 2 s")]
    received = messages.unpacked(messages.packed(sent))
    assert isinstance(received[0], nn.Parameter) and received[1].requires_grad
    assert torch.equal(received[0], trained) and torch.equal(received[1], wide)
    assert torch.equal(received[2].to_dense(), torch.eye(3))
    assert repr(received[3]) == repr(sent[3])


# -- bad input
# ---------------------------------------------------------------------------------------------


def no_module():
    return None, None, None


def random_in_forward():
    module, batch, loss = mlp()
    return module, batch, lambda model, batch: loss(model, batch) * (1 + time.perf_counter() % 1)


class Counting(nn.Module):
    """A module whose output, or its gradient, grows with the calls of forward."""

    def __init__(self, module, in_buffer=False, in_gradient=False):
        super().__init__()
        self.module, self.in_gradient = module, in_gradient
        if in_buffer:
            self.register_buffer("calls", torch.tensor(0))
        else:
            self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        outputs = self.module(inputs)
        scaled = outputs * (1 + int(self.calls))
        return outputs.detach() + scaled - scaled.detach() if self.in_gradient else scaled


def counts_calls():
    module, batch, loss = mlp()
    return Counting(module), batch, loss


def counts_in_gradient():
    module, batch, loss = mlp()
    return Counting(module, in_gradient=True), batch, loss


def counts_in_loss():
    module, batch, loss = mlp()
    counting = Counting(nn.Identity())
    return module, batch, lambda model, batch: counting(loss(model, batch))


def counts_in_buffer():
    module, batch, loss = with_statistics()
    return Counting(module, in_buffer=True), batch, loss


def no_messages(module, group):
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, 0, group)
    return module, lambda: None


def another_batch():
    """A batch that does not draw from its generator."""
    module, batch, loss = mlp()
    return module, lambda size, generator: batch(size, None), loss


def first_step_size(model):
    device = torch.device("cpu")
    task = own_task(f"{HERE}:{model.__name__}", 4)
    return step_size(task, task.batches(0, 0, device)[0], 0, device)


@pytest.mark.parametrize(
    "model, message",
    [
        (counts_calls, "the forward depends on how often it was called: .* gave the loss"),
        (counts_in_gradient, "the forward depends on how often it was called: .* gave gradients"),
        (counts_in_loss, "forward or loss is random, or depends on how often it was called"),
    ],
)
def test_a_model_that_counts_its_calls_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        first_step_size(model)


def test_a_count_in_a_buffer_is_checked():
    assert first_step_size(counts_in_buffer) > 0
    verdict = check_gradients(counts_in_buffer, no_messages)
    assert {each.signature for each in verdict.findings} >= {signatures.OWN}


def no_numbers():
    module, batch, loss = mlp()
    return module, batch, lambda model, batch: loss(model, batch) * float("nan")


def no_gradient():
    module, batch, loss = mlp()
    return module, batch, lambda model, batch: loss(model, batch) * 0


def four_things(module, group):
    return module, lambda: None, None, group


def other_order(module, group):
    """Rank 1 sends its gradients from the last to the first."""
    module, _ = by_hand(module, group)

    def finish():
        parameters = list(module.parameters())
        for parameter in parameters[::-1] if group.rank() else parameters:
            dist.all_reduce(parameter.grad, group=group)

    return module, finish


def deadlock(module, group):
    return module, lambda: dist.barrier(group) if group.rank() else None


def raises(module, group):
    raise KeyError("no such layer")


def a_copy(module, group):
    return mlp()[0]


def static_ddp(module, group):
    """torch refuses no_sync() in the first step, and the check accumulates there."""
    return DistributedDataParallel(module, process_group=group, static_graph=True)


@pytest.mark.parametrize(
    "model, wrap, message",
    [
        (no_module, ddp, "it returned NoneType"),
        (random_in_forward, "flat", r"forward or loss is random, .*call random.seed"),
        (another_batch, "flat", r"different batches for one seed: draw with generator=generator"),
        (no_numbers, "flat", "not a number in one process either"),
        (mlp, deadlock, r"waited 2 s \(--timeout\) in a collective that the others did not join"),
        (mlp, raises, r"failed at test_check.py:\d+ \(KeyError: 'no such layer'"),
        (
            no_gradient,
            "flat",
            "every gradient is exactly zero in one process .* nothing to compare",
        ),
        (
            mlp,
            four_things,
            r"must return a callable module, \(callable module, finish\), or .*; "
            r"it returned 4 things",
        ),
        (mlp, a_copy, "must train the module it is given"),
        (mlp, static_ddp, r"With one micro-batch per step it is right: try --micro-batches 1"),
        (mlp, flat_shards_alone, r"0.weight has shape \(24,\) .* a method gather\(name, local\)"),
        (mlp, gathers_a_part, r"gather\('0.weight', local\) returned \(24,\) .* shape \(8, 6\)"),
        (mlp, "bucketted", "did you mean bucketed"),
        (mlp, f"{HERE}:nothing", r"--wrap .* has no function 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence(model, wrap, message):
    with pytest.raises((ValueError, TimeoutError), match=message) as raised:
        check_gradients(model, wrap, timeout_s=2.0)
    assert "\n" not in str(raised.value)


def test_one_rank_is_refused():
    with pytest.raises(ValueError, match="--nproc 2"):
        check_gradients(mlp, "flat", ranks=1)


# -- what is shown
# -----------------------------------------------------------------------------------------


def test_the_table():
    verdict = check_gradients(mlp, named("divided_twice"))
    assert str(verdict).startswith("WRONG: 6 of 6 tensors differ from one process")
    assert str(verdict).count(signatures.DIVIDED) == 6
    assert len(str(verdict).splitlines()) <= 30
    assert repr(verdict) == str(verdict)  # pytest shows the repr
    assert "finish that was called: the second thing" in str(verdict)


def mlp_in_bf16():
    module, batch, _ = mlp()

    def loss(model, batch):
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    return module.bfloat16(), batch, loss


def test_a_right_verdict_says_which_errors_rounding_would_hide():
    verdict = check_gradients(mlp, "bucketed")
    assert verdict.right and 0 < verdict.unseen_pct < 0.1 and "rounding" not in str(verdict)
    verdict = check_gradients(mlp_in_bf16, "bucketed")
    assert verdict.right and verdict.unseen_tensor in dict(mlp()[0].named_parameters())
    assert verdict.unseen_pct > 2  # P + M additions alone allow about that much
    sentence = f"less than {verdict.unseen_pct:.0f} % could not be told from rounding (in '"
    assert sentence in str(verdict) and "Check in fp32 as well" in str(verdict)


def test_a_wrong_norm_is_in_the_headline():
    verdict = check_gradients(mlp, "tests.check_matrix:norm_before_averaging")
    assert not verdict.right
    assert {(each.what, each.signature) for each in verdict.findings} == {
        ("norm", signatures.NORM_LOCAL)
    }
    headline = "WRONG: 6 of 6 tensors as in one process, the norm of the gradient is not"
    assert str(verdict).startswith(headline)


def checked(*options, model="mlp"):
    """`distlab check` of a model in this file, in a process that forks its ranks."""
    return python("-m", "launch", "check", f"{HERE}:{model}", *options)


def test_the_command_ends_with_the_verdict():
    begin = time.monotonic()
    done = checked("--strategy", "local", "--json")
    assert time.monotonic() - begin < 30  # 3 on a quiet machine
    assert done.returncode == 1, done.stderr
    shown = json.loads(done.stdout)
    assert not shown["right"] and {each["what"] for each in shown["findings"]} == {"initial value"}
    assert done.stderr == ""  # nothing about processes that were stopped


def test_the_command_compares_states_and_modules():
    done = checked("--strategy", "zero1", "--optimizer", "AdamW", "--where")
    assert done.returncode == 0, done.stderr
    assert "state of AdamW: 18 tensors compared\nwhere: no module differs" in done.stdout


@pytest.mark.parametrize(
    "options, headline",
    [
        ([], "right with one backward per step; does not support accumulation: 6 of 6 tensors"),
        (
            ["--micro-batches", "1"],
            "right: 6 of 6 tensors as in one process (2 ranks × 1 micro-batch, 2 steps)",
        ),
    ],
)
def test_the_command_says_that_a_wrapper_needs_one_backward(options, headline):
    done = checked("--wrap", "tests.check_matrix:overlapped", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(headline)


def test_the_command_refuses_a_strategy_beside_a_wrapper():
    done = checked("--wrap", f"{HERE}:ddp", "--strategy", "fsdp")
    assert done.returncode == 2 and "give --wrap or --strategy" in done.stderr


def test_the_command_ends_with_a_sentence_where_a_rank_aborts():
    # Not in pytest's process: its handler of crashes would be inherited by the ranks.
    done = checked("--wrap", f"{HERE}:other_order", "--timeout", "5")
    assert done.returncode != 0 and done.stdout == ""
    # on a slow machine
    said = [line for line in done.stderr.splitlines() if "loading torch" not in line]
    assert len(said) == 1, done.stderr
    assert "same calls in the same order" in done.stderr
    log = re.search(r"the ranks wrote: (.*)\)", done.stderr)
    assert log and Path(log[1]).is_file()
    shutil.rmtree(Path(log[1]).parent)
