"""`distlab check` on public bug reports, each rebuilt in a few lines, and on models that are right.

A report's comment says what went wrong there. The model and the wrapper are ours. Each test runs
all of its cases on the same two ranks.
"""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from distlab.check import on_rank, signatures
from distlab.testing import run_ranks
from tests import check_matrix
from tests.check_matrix import Wrapped, average, broadcast, finishing, mean, reducing, trained

HERE = __name__
MATRIX = check_matrix.__name__


def classified(module, shape=(6,)):
    """Return a factory's three parts for a module that tells five classes of inputs apart."""

    def batch(size, generator):
        inputs = torch.randn(size, *shape, generator=generator)
        return inputs, torch.randint(5, (size,), generator=generator)

    return module, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def mlp():
    return classified(
        nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 5))
    )


def counted():
    return check_matrix.counted(torch.float32)


# -- reports
# -----------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Calls its second head in every third forward only, which is the last one of a step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.early = nn.Linear(8, 5)
        self.last = nn.Linear(8, 5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        head = self.early if self.calls % 3 else self.last
        return head(self.body(x).tanh())


def two_heads():
    return classified(TwoHeads())


# https://github.com/pytorch/pytorch/pull/124193: a parameter that is used inside no_sync() only,
# and
# not by the last micro-batch, is never reduced.
def reduces_used_by_the_last(module, group):
    used = set()

    def finish(wrapped):
        for _, parameter in trained(module):
            if parameter in used:
                mean("", parameter.grad, group)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(used.add)
    return Wrapped(module, group, finish, lambda wrapped: used.clear())


def average_in_first_step(wrapped):
    if wrapped.steps == 1:
        average(wrapped)


# https://github.com/pytorch/pytorch/pull/187732: with a static graph and no_sync(), all-reduces
# stop
# after the first step.
static_graph = finishing(average_in_first_step)


def drop_gradients(wrapped):
    for _, parameter in trained(wrapped.module):
        parameter.grad.zero_()


# https://github.com/ServiceNow/Fast-LLM/pull/551: gradient buffers are overwritten in place of
# added
# to, so that only the last micro-batch counts.
overwritten = finishing(average, drop_gradients)


# https://github.com/verl-project/verl/issues/7493: a shard group of one rank on several GPUs never
# synchronizes gradients.
def group_of_one(module, group):
    broadcast(module, group)
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]

    def finish():
        for _, parameter in trained(module):
            mean("", parameter.grad, alone)

    return module, finish


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x):
        return x * self.gain


def one_number():
    return classified(nn.Sequential(nn.Linear(6, 8), Gain(), nn.Tanh(), nn.Linear(8, 5)))


# https://github.com/pytorch/pytorch/issues/144045: the gradient of a parameter of shape (1,) is
# zero
# under FSDP2.
@reducing
def zero_for_one_number(name, gradient, group):
    mean(name, gradient, group)
    if gradient.shape == (1,):
        gradient.zero_()


# https://github.com/NVIDIA/Megatron-LM/issues/6660: a gradient buffer doubles in every micro-batch
# where its group has one rank.
def doubles(wrapped):
    if wrapped.calls > 1:
        for _, parameter in trained(wrapped.module):
            parameter.grad *= 2


doubled = finishing(average, doubles)


# https://github.com/pytorch/torchtitan/issues/2972: gradients are larger by the number of tokens,
# which AdamW hides.
@reducing
def times_tokens(name, gradient, group):
    mean(name, gradient, group)
    gradient *= 13


# https://github.com/pytorch/torchtitan/pull/2206: means over the valid tokens of each micro-batch
# are
# averaged as if all had the same number of them.
mean_of_micro_batches = check_matrix.mean_of_micro_batches


# https://github.com/ml-explore/mlx-lm/pull/1544: the same with the means of ranks.
mean_of_ranks = check_matrix.mean_of_ranks


# https://github.com/NovaSky-AI/SkyRL/pull/1886: a collective works in place on `x.contiguous()`, so
# the caller of a transposed x keeps what was not reduced.
@reducing
def copies_to_reduce(name, gradient, group):
    mean(name, gradient.contiguous(), group)


class Transposed(nn.Module):
    """Its matrix, and so its gradient, is stored by columns."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter((torch.randn(6, 8) / 3).T)

    def forward(self, x):
        return x @ self.matrix.T


def transposed():
    return classified(nn.Sequential(Transposed(), nn.Tanh(), nn.Linear(8, 5)))


# https://github.com/pytorch/pytorch/issues/160285: tokens of all ranks come to an expert, whose
# gradient is averaged as if they were of one rank.
@reducing
def experts_doubled(name, gradient, group):
    mean(name, gradient, group)
    if name.startswith("3."):
        gradient *= group.size()


# https://github.com/ROCm/TransformerEngine/pull/715: replicated weights are counted once for each
# rank in the norm of the gradient.
replicated_norm = check_matrix.norm_times_ranks


# https://github.com/pytorch/pytorch/issues/170862: clip_grad_norm_ is said to return the norm of
# this
# rank's shards in place of all.
local_norm = check_matrix.norm_of_shards(check_matrix.of_own_shard)


# https://github.com/baidu-baige/LoongForge/pull/163: no_sync() is around the wrong one of forward
# and
# backward, so that the last backward does not synchronize.
never_in_time = reducing(check_matrix.unreduced)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(12, 5)

    def block(self, x):
        return self.drop(self.first(x).tanh())

    def forward(self, x):
        return self.last(self.block(x))


def with_dropout():
    return classified(WithDropout())


# https://github.com/allenai/OLMo-core/pull/828: recomputation draws another dropout mask than
# forward.
def other_mask(module, group):
    block = module.block

    def recomputed(x):
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    module.block = recomputed
    return Wrapped(module, group, average)


# https://github.com/facebookresearch/fairseq2/pull/1374: the loss scale is not agreed upon, so that
# one rank skips a step that the others make.
skips_alone = finishing(check_matrix.remember, check_matrix.undo_on_last_rank)


class Forgets(torch.optim.AdamW):
    """AdamW that loses the state of parameters that are marked."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if getattr(parameter, "forgotten", False):
                self.state.pop(parameter, None)
        super().step()


# https://github.com/KempnerInstitute/KempnerForge/pull/115: an optimizer without lazy state is
# given
# none at a load, so that its moments begin anew.
def loses_state(module, group):
    for parameter in module.parameters():
        parameter.forgotten = True
    return Wrapped(module, group, average)


EVERY = None
REPORTS = [  # wrapper, model, signature, tensors that have it
    ("reduces_used_by_the_last", "two_heads", signatures.OWN, {"early.weight", "early.bias"}),
    ("static_graph", "mlp", signatures.OWN, EVERY),
    ("overwritten", "mlp", signatures.LAST, EVERY),
    ("group_of_one", "mlp", signatures.OWN, EVERY),
    ("zero_for_one_number", "one_number", signatures.ABSENT, {"1.gain"}),
    ("doubled", "mlp", signatures.UNKNOWN, EVERY),
    ("times_tokens", "mlp", signatures.SCALED, EVERY),
    ("mean_of_micro_batches", "counted", signatures.MEANS, EVERY),
    ("mean_of_ranks", "counted", signatures.MEANS, EVERY),
    ("copies_to_reduce", "transposed", signatures.OWN, {"0.matrix"}),
    ("experts_doubled", "mlp", signatures.SUMMED, {"3.weight", "3.bias"}),
    ("replicated_norm", "mlp", signatures.NORM_TIMES_RANKS, {"(the norm)"}),
    ("local_norm", "mlp", signatures.NORM_LOCAL, {"(the norm)"}),
    ("never_in_time", "mlp", signatures.OWN, EVERY),
    ("other_mask", "with_dropout", signatures.UNKNOWN, {"first.weight", "first.bias"}),
    ("skips_alone", "mlp", signatures.NOT_SENT, EVERY),
    ("loses_state", "mlp", signatures.STATE_RESET, EVERY),
]


def verdicts(context, cases):
    """Return the verdict on each case, or the error in its place. Runs on every rank."""
    found = []
    for model, wrap, options in cases:
        try:
            found.append(on_rank(context, model, wrap, **options))
        except (ValueError, OSError) as error:
            found.append(error)
    return found


def test_public_reports_get_their_names():
    cases = []
    for wrap, model, _, _ in REPORTS:
        options = {"micro_batches": 3} if model == "two_heads" else {}
        if wrap == "loses_state":
            options["optimizer"] = f"{HERE}:Forgets"
        cases.append((f"{HERE}:{model}", f"{HERE}:{wrap}", options))
    found = run_ranks(verdicts, 2, cases, deadline_s=200)[0]
    for (wrap, _, signature, tensors), verdict in zip(REPORTS, found, strict=True):
        assert not isinstance(verdict, Exception) and not verdict.right, f"{wrap}: {verdict}"
        assert {each.signature for each in verdict.findings} == {signature}, f"{wrap}: {verdict}"
        wrong = {each.tensor for each in verdict.findings}
        right = wrong == tensors if tensors else len(wrong) == verdict.tensors
        assert right, f"{wrap}: {verdict}"


# -- models that are right
# ---------------------------------------------------------------------------------


class Called(nn.Module):
    """Calls a function with its modules and an input.

    Args:
        call: function `call(modules, x)`.
        modules: modules by name.
    """

    def __init__(self, call, **modules):
        super().__init__()
        self.call = call
        self.modules_by_name = nn.ModuleDict(modules)

    def forward(self, x):
        return self.call(self.modules_by_name, x)


def convolution():
    return check_matrix.convolution(torch.float32)


def groups():
    return check_matrix.groups(torch.float32)


def attention():
    return check_matrix.attention(torch.float32)


def tied():
    return check_matrix.tied(torch.float32)


def frozen():
    return check_matrix.frozen(torch.float32)


def mixed():
    return check_matrix.mixed(torch.float32)


def padded_embedding():
    module = nn.Sequential(nn.Embedding(11, 8, padding_idx=0), nn.Flatten(), nn.Linear(24, 5))
    _, _, loss = classified(module)

    def batch(size, generator):
        tokens = torch.randint(11, (size, 3), generator=generator)
        return tokens, torch.randint(5, (size,), generator=generator)

    return module, batch, loss


def lstm():
    def call(modules, x):
        return modules["head"](modules["lstm"](x)[0][:, -1])

    lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
    return classified(Called(call, lstm=lstm, head=nn.Linear(8, 5)), (4, 6))


def gru():
    def call(modules, x):
        return modules["head"](modules["gru"](x)[0].mean(1))

    gru = nn.GRU(6, 8, bidirectional=True, batch_first=True)
    return classified(Called(call, gru=gru, head=nn.Linear(16, 5)), (4, 6))


def unused():
    def call(modules, x):
        return modules["used"](x)

    return classified(Called(call, used=nn.Linear(6, 5), unused=nn.Linear(6, 5)))


def normed_weight():
    return classified(nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5)))


def complex_branch():
    def call(modules, x):
        spectrum = torch.fft.rfft(modules["first"](x))
        return modules["head"](torch.cat([spectrum.real, spectrum.imag.sin()], -1))

    return classified(Called(call, first=nn.Linear(6, 8), head=nn.Linear(10, 5)))


def recomputed():
    def call(modules, x):
        return modules["head"](checkpoint(modules["block"], x, use_reentrant=False))

    block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
    return classified(Called(call, block=block, head=nn.Linear(6, 5)))


def torch_transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def call(modules, x):
        return modules["head"](modules["layer"](modules["first"](x)).mean(1))

    return classified(
        Called(call, first=nn.Linear(6, 8), layer=layer, head=nn.Linear(8, 5)), (4, 6)
    )


def called_twice():
    def call(modules, x):
        return modules["head"](modules["shared"](modules["shared"](x).relu()))

    return classified(Called(call, shared=nn.Linear(6, 6), head=nn.Linear(6, 5)))


def dead_unit():
    """A layer whose outputs ReLU cuts off for nearly all inputs: many gradients are zero."""
    module = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
    module[0].bias.data -= 2
    return classified(module)


def instance_norm():
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.SiLU(), nn.Flatten(), nn.Linear(64, 5))
    return classified(module, (3, 6, 6))


def separable():
    depthwise = nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False)
    module = nn.Sequential(
        *(nn.Conv2d(3, 4, 1), depthwise, nn.BatchNorm2d(4), nn.Hardswish(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(36, 5)),
    )
    return classified(module.to(memory_format=torch.channels_last), (3, 6, 6))


def large_inputs():
    """Inputs of 100 times the usual size."""
    module, batch, loss = mlp()

    def scaled(size, generator):
        inputs, targets = batch(size, generator)
        return inputs * 100, targets

    return module, scaled, loss


def scalar_parameter():
    """A temperature of shape ()."""

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = nn.Parameter(torch.tensor(math.log(2.0)))

        def forward(self, x: Tensor) -> Tensor:
            return x / self.log.exp()

    return classified(nn.Sequential(nn.Linear(6, 5), Temperature()))


RIGHT = [
    *("convolution", "groups", "attention", "tied", "frozen", "mixed", "padded_embedding", "lstm"),
    *("gru", "unused", "normed_weight", "complex_branch", "recomputed"),
    *("torch_transformer", "called_twice", "dead_unit", "instance_norm", "separable"),
    *("large_inputs", "scalar_parameter", "with_dropout", "two_heads"),
]
plain = finishing(average)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_right_models_raise_no_alarm(optimizer):
    cases = []
    for model in RIGHT:
        options = {"optimizer": optimizer, "where": optimizer == "adamw"}
        if model == "two_heads":
            options["micro_batches"] = 3
        # Each model under one of our strategies and under a wrapper by hand. Strategies with SGD
        # are in tests/test_check.py.
        wrap = f"{HERE}:plain" if optimizer == "sgd" else "bucketed"
        cases.append((f"{HERE}:{model}", wrap, options))
    found = run_ranks(verdicts, 2, cases, deadline_s=200)[0]
    for (model, wrap, _), verdict in zip(cases, found, strict=True):
        assert not isinstance(verdict, Exception), f"{model} under {wrap}: {verdict}"
        assert verdict.right and not verdict.warning, f"{model} under {wrap}: {verdict}"
        if optimizer == "adamw":
            assert verdict.where.startswith("no module differs"), f"{model}: {verdict}"
