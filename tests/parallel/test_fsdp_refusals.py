"""What FSDP refuses, each with one message that says what to do."""

import copy
import pickle
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from distlab.parallel import BucketedDDP, ShardedOptimizer
from distlab.parallel.fsdp import FSDP
from tests.parallel.test_contract import (
    BACKENDS,
    assert_same_on_all_ranks,
    on_one_rank,
    on_two_ranks,
)
from tests.parallel.test_fsdp import backward_and_finish, wrapped
from tests.parallel.test_zero1 import Said, Scaled


def linear():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@on_one_rank
def test_modules_that_cannot_be_wrapped(context):
    """Issue 4's bad input: no parameters, a compute type that is no float, wrapped twice."""
    half_on_meta, alias = linear(), linear()
    half_on_meta[0].to("meta")
    alias[2].weight = nn.Parameter(alias[0].weight.detach()[:2, :3])
    module = linear()
    ddp = BucketedDDP(module, process_group=context.group)
    wrap = partial(FSDP, process_group=context.group)
    for words, given in [
        ("no parameters", (nn.ReLU(),)),
        (r"compute_dtype=.*give a floating-point torch.dtype", (linear(), torch.int32)),
        (r"compute_dtype=.*give a floating-point torch.dtype", (linear(), "bfloat16")),
        (
            r"has no forward.*wrap the module whose forward reads them",
            (nn.ParameterList([torch.zeros(2, 2)]),),
        ),
        ("lies on meta and has no values: give init_fn", (linear().to("meta"),)),
        ("move the module to one device first", (half_on_meta,)),
        ("recurrent module", (nn.LSTM(2, 2),)),
        (r"'weight' is uninitialized, a lazy module's: run one forward", (nn.LazyLinear(2),)),
        (r"'0\.weight' and '2\.weight' are two parameters on the same memory", (alias,)),
        (r"'0.weight' carries a gradient hook .* close\(\) that wrapper", (module,)),
    ]:
        with pytest.raises(ValueError, match=words):
            wrap(*given)
    with pytest.raises(ValueError, match="for a module built on meta"):
        wrap(linear(), init_fn=print)
    ddp.close()
    fsdp = wrap(module)
    with pytest.raises(ValueError, match=r"'0\.weight' is wrapped already"):
        wrap(module)
    fsdp.close()
    wrap(module)


@on_one_rank
def test_units_inside_a_compiled_graph(context):
    """The contract's "With the rest": compiled blocks work, a graph around units is refused."""
    blocks = nn.Sequential(*(torch.compile(linear(), backend="aot_eager") for _ in range(2)))
    fsdp = FSDP(nn.Sequential(blocks, nn.Linear(2, 2)), process_group=context.group)
    assert [unit.name for unit in fsdp._units] == ["0.0", "0.1", "1"]
    fsdp.close()
    attention = nn.MultiheadAttention(4, 1)  # reads its child's weight
    attention.out_proj = torch.compile(attention.out_proj, backend="aot_eager")
    fsdp = FSDP(nn.Sequential(attention), process_group=context.group)
    assert [unit.name for unit in fsdp._units] == ["0"]
    fsdp.close()
    in_place = nn.Sequential(linear(), nn.ReLU())
    in_place[0].compile(backend="aot_eager")
    for module in (torch.compile(linear(), backend="aot_eager"), in_place):
        with pytest.raises(ValueError, match=r"inside the compiled module .* = torch\.compile"):
            FSDP(module, process_group=context.group)


@on_one_rank
def test_a_unit_compiled_in_place(context):
    """A unit after `block.compile()`: the sentence names the form of compilation that works."""
    module = nn.Sequential(nn.ModuleList([linear()]), nn.ReLU())
    module[0][0].compile(backend="aot_eager")
    with pytest.raises(ValueError, match=r"'0\.0' was compiled in place .* = torch\.compile"):
        FSDP(module, process_group=context.group)


@on_one_rank
def test_an_optimizer_built_before_wrapping(context):
    """Issue 4: it would step parameters that are in use no more."""
    module = linear()
    vectors = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    optimizers = [torch.optim.AdamW(vectors), torch.optim.AdamW(matrices)]
    wrapper = FSDP(module, process_group=context.group)
    for optimizer in optimizers:
        with pytest.raises(RuntimeError, match="wrap first, then build the optimizer"):
            optimizer.step()
    wrapper.close()


@on_one_rank
def test_what_a_wrapped_module_refuses(context):
    """Check that moving, copying, replaced parameters and sparse gradients raise errors."""
    fsdp = FSDP(linear(), process_group=context.group)
    for change in (fsdp.half, fsdp.double, lambda: fsdp.to("meta")):
        with pytest.raises(TypeError, match=r"cannot change.*before wrapping it.*compute_dtype"):
            change()
    assert fsdp.to("cpu").float() is fsdp
    for duplicate in (copy.deepcopy, pickle.dumps):
        # The DDPs advise to copy `.module`, which holds shards here.
        with pytest.raises(TypeError, match=r"cannot be copied or pickled, nor.*full_state_dict"):
            duplicate(fsdp)
    full = fsdp.gather_full_params()
    with pytest.raises(ValueError, match=r"'0.bias' is missing"):
        fsdp.load_full_params({"0.weight": full["0.weight"], "2.weight": full["2.weight"]})
    with pytest.raises(
        ValueError, match=r"'0.weight' has shape \(4, 4\); that of the model has shape \(3, 4\)"
    ):
        fsdp.load_full_params({**full, "0.weight": torch.zeros(4, 4)})

    sparse = FSDP(nn.Embedding(4, 3, sparse=True), process_group=context.group)
    with pytest.raises(TypeError, match="gradient of 'weight' is sparse"):
        sparse(torch.tensor([1])).sum().backward()


class Returning(nn.Linear):
    """A unit whose output the test decides."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how

    def forward(self, x):
        if self.how == "generator":
            return (row @ self.weight for row in x)
        if self.how == "function":
            return x, lambda: x @ self.weight
        if self.how == "parameter":
            return x, self.weight.t()
        self.aside = torch.ones(1, 4) @ self.weight
        return x


@on_one_rank
def test_units_whose_backward_could_not_be_seen(context):
    """What a unit returns or keeps without FSDP finding the tensors in it: named, not a crash or a
    lost gradient.
    """
    x = torch.ones(2, 4)
    for how, message, error in (
        ("generator", r"unit '1' returns a generator, .*: return tensors", TypeError),
        ("function", r"unit '1' returns a function, .*: return tensors", TypeError),
        (
            "parameter",
            r"unit '1' returns one of its parameters.*: return parameter\.clone\(\)",
            RuntimeError,
        ),
    ):
        with pytest.raises(error, match=message):
            FSDP(nn.Sequential(nn.Linear(4, 4), Returning(how)), process_group=context.group)(x)
    fsdp = FSDP(nn.Sequential(nn.Linear(4, 4), Returning("aside")), process_group=context.group)
    fsdp(x)
    fsdp.module[1].aside.sum().backward()
    with pytest.raises(
        RuntimeError, match=r"parameters of unit '1' past its outputs.*: return every tensor"
    ):
        fsdp.finish_gradient_synchronization()


@on_two_ranks
def test_a_graph_of_the_backward(context):
    """A gradient penalty differentiates the backward, when the parameters that it used are
    freed.
    """
    fsdp = FSDP(linear(), process_group=context.group)
    x = torch.ones(2, 4, requires_grad=True)
    out = fsdp(x).sum()
    with pytest.raises(
        RuntimeError, match=r"create_graph=True reaches unit '2', .* under BucketedDDP"
    ):
        torch.autograd.grad(out, x, create_graph=True)
    fsdp(x).sum().backward()  # and goes on
    fsdp.finish_gradient_synchronization()


@pytest.mark.parametrize("backend", BACKENDS)
@on_two_ranks
def test_what_is_not_elementwise_is_refused_before_its_first_step(context, backend):
    """FSDP never sees the optimizer's construction; nothing is stepped, and people's own are."""
    fsdp = wrapped(context)
    matrices = [p for p in fsdp.parameters() if p.dim() >= 2]
    before = fsdp.gather_full_params()
    backward_and_finish(fsdp, context)
    for name, optimizer in (
        ("Scaled", Scaled(fsdp.parameters(), lr=0.1)),
        (
            "ShardedOptimizer",
            ShardedOptimizer(fsdp.parameters(), torch.optim.SGD, context.group, lr=0.1),
        ),
        ("Muon", torch.optim.Muon(matrices, lr=0.1)),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{name} "):
                optimizer.step()
    for name, parameter in fsdp.gather_full_params().items():
        assert torch.equal(parameter, before[name]), name
    # Vectors are whole on every rank: what steps them alone may do as it likes.
    groups = [{"params": matrices}, {"params": [p for p in fsdp.parameters() if p.dim() < 2]}]
    Said(groups, lr=0.1).step()
    torch.optim.Adafactor(groups[1]["params"], lr=0.1).step()
    after = fsdp.gather_full_params()
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert_same_on_all_ranks(list(after.values()), context)


@on_two_ranks
def test_deferred_initialisation_that_is_not_in_order_is_refused(context):
    """test_build.py has models that are made in order."""

    def back_and_forth(module):
        module.head.weight.fill_(0)
        module.embedding.weight.fill_(0)
        module.head.weight.fill_(1)

    for init_fn, message in [
        (torch.no_grad()(back_and_forth), "returns to 'head.weight'"),
        (torch.no_grad()(lambda m: m.head.weight.copy_(m.embedding.weight)), "in one operator"),
        (lambda m: m.head.reset_parameters(), "left .*embedding.weight"),
    ]:
        with torch.device("meta"):
            built = nn.Sequential(OrderedDict(embedding=nn.Embedding(9, 4), head=nn.Linear(4, 9)))
        with pytest.raises(RuntimeError, match=message):
            FSDP(built, process_group=context.group, init_fn=init_fn, device=context.device)
