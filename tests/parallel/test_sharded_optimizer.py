"""ShardedOptimizer: an ordinary optimizer to its user, a share of the state on each rank."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from distlab.parallel import BucketedDDP, ShardedOptimizer, ZeroOptimizer, get_strategy
from tests.fuzz import Matrix
from tests.parallel.cases import CASES, build, drawn
from tests.parallel.test_contract import BACKENDS, assert_same_on_all_ranks, on_two_ranks, run


def set_gradients(model, step):
    """The same averaged gradients on every rank, as after a DDP's synchronisation."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        set_gradients(model, step)
        optimizer.step()


def assert_equal_parameters(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.ranks
def test_parity_with_the_unsharded_optimizer(context, implementation, world_size, backend):
    """Compare with torch's optimizer bit for bit. Random models cover other optimizers."""
    options = {"lr": 0.01, "weight_decay": 0.1, implementation: True}
    model, plain = build("plain", 0, context.device), build("plain", 0, context.device)
    sharded = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=context.group, **options
    )
    train(model, sharded, range(5))
    train(plain, torch.optim.AdamW(plain.parameters(), **options), range(5))
    assert_equal_parameters(model, plain)
    assert_same_on_all_ranks(list(model.parameters()), context)


def shares(context):
    """Return elements of Adam's state under both sharded optimizers, and of the parameters.

    Returns:
        Elements of the state under `sharded-optimizer` and under `zero1`, of all parameters, and of
            the largest one.
    """
    held = []
    for kind in ("sharded-optimizer", "zero1"):
        model = nn.Sequential(*(nn.Linear(3, width) for width in (3, 40, 7, 25, 31, 12)))
        wrapper, optimizer = get_strategy(kind).build(model, context.group, torch.optim.Adam)
        sum(layer(torch.ones(3)).sum() for layer in model).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        elements = 0
        for state in optimizer.state.values():
            for value in state.values():
                if value.ndim > 0:  # not Adam's count of steps
                    elements += value.numel()
        held.append(elements)
    sizes = [parameter.numel() for parameter in model.parameters()]
    return [*held, sum(sizes), max(sizes)]


def test_state_is_divided_evenly():
    """Check that no rank exceeds its share by more than one parameter or one element."""
    *loads, (total, *_), (largest, *_) = zip(*run(shares, 3), strict=True)
    for load, uneven in zip(loads, (largest, 1), strict=True):
        assert sum(load) == 2 * total  # Adam keeps two numbers per element
        assert max(load) < 2 * (total / 3 + uneven)


def groups(model):
    return [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": list(model[1:3].parameters()), "weight_decay": 0.3},
    ]


@on_two_ranks
def test_groups_schedulers_and_late_groups(context):
    """Check that a scheduler reaches the inner optimizer, in a late group and after loading."""
    model, plain = build("plain", 0, context.device), build("plain", 0, context.device)
    sharded = ShardedOptimizer(
        groups(model), torch.optim.AdamW, process_group=context.group, lr=0.01
    )
    reference = torch.optim.AdamW(groups(plain), lr=0.01)
    for m, optimizer in ((model, sharded), (plain, reference)):
        train(m, optimizer, range(1))
        optimizer.add_param_group({"params": m[4].parameters(), "lr": 0.05})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(m, optimizer, range(1, 2))
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
        # after load_state_dict, which replaces the groups' dicts
        optimizer.param_groups[0]["lr"] = 0.7
        train(m, optimizer, range(2, 3))
    assert_equal_parameters(model, plain)


@on_two_ranks
def test_parameters_come_as_generators_and_mistakes_are_refused(context):
    """Check that a generator works, and that an empty list or a wrong type raises an error."""
    model = nn.Linear(2, 2)
    sgd = partial(
        ShardedOptimizer, optimizer_cls=torch.optim.SGD, process_group=context.group, lr=0.1
    )
    sgd(p for p in model.parameters())
    with pytest.raises(ValueError, match="empty parameter list"):
        sgd([])
    with pytest.raises(TypeError):
        sgd([1.0])
    with pytest.raises(ValueError, match="more than one parameter group"):
        sgd([{"params": model.parameters()}, {"params": model.parameters()}])
    with pytest.raises(
        ValueError, match=r"L-BFGS steps all parameters together.*without ShardedOptimizer"
    ):
        ShardedOptimizer(model.parameters(), torch.optim.LBFGS, process_group=context.group)
    optimizer = sgd(model.parameters())
    with pytest.raises(
        ValueError, match=r"saved groups hold \[1\] parameters, this optimizer's \[2\]"
    ):
        optimizer.load_state_dict(torch.optim.SGD([model.weight], lr=0.1).state_dict())


@on_two_ranks
def test_groups_and_state_that_are_changed_from_outside_are_refused(context):
    """A local optimizer would not learn of it.

    Under both sharded optimizers.
    """
    for make in (
        lambda wrapper: ShardedOptimizer(
            groups(wrapper.module), torch.optim.SGD, context.group, lr=0.1, momentum=0.9
        ),
        lambda wrapper: ZeroOptimizer(
            wrapper, torch.optim.SGD, params=groups(wrapper.module), lr=0.1, momentum=0.9
        ),
    ):
        wrapper = BucketedDDP(build("plain", 0, context.device), process_group=context.group)
        optimizer = make(wrapper)
        CASES["plain"].loss(wrapper, context.rank, 0, context.device).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        with pytest.raises(
            ValueError, match=r"state is this rank's share and cannot be assigned: call load_state"
        ):
            optimizer.state = {}
        optimizer.state.clear()
        optimizer.step()
        assert optimizer.state  # begun anew
        removed = optimizer.param_groups[1]["params"].pop()
        for change in (lambda: None, optimizer.param_groups.pop):
            change()
            before = removed.detach().clone()
            with pytest.raises(
                ValueError, match="hold other parameters than it was given: build another"
            ):
                optimizer.step()
            assert torch.equal(removed, before)


def with_scale(seed):
    """A parameter without dimensions, whose state has none either, and transposed matrices, whose
    state is, too.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), Matrix("scalar", 8), Matrix("transposed", 8))


def train_alike(model, optimizer, steps):
    """Every rank on the same data: the mean of equal gradients is exact at any power of two."""
    for step in steps:
        optimizer.zero_grad()
        model(drawn(step, 4, 6)).square().mean().backward()
        if isinstance(model, BucketedDDP):
            model.finish_gradient_synchronization()
        optimizer.step()


def sharded(context, kind, seed, lr):
    wrapper = BucketedDDP(with_scale(seed), 1e-4, process_group=context.group)
    params = groups(wrapper.module)
    optimizer = get_strategy(kind).optimizer(wrapper, torch.optim.AdamW, params, {"lr": lr})
    return wrapper, optimizer


def save(context, kind):
    wrapper, optimizer = sharded(context, kind, 0, 0.01)
    train_alike(wrapper, optimizer, range(3))
    wrapper.synchronize()  # ZeRO gathers under the next forward
    plain = copy.deepcopy(wrapper.module)
    unsharded = torch.optim.AdamW(groups(plain), lr=0.5)
    # it takes the state as it is; names serve torch as ids
    unsharded.load_state_dict(optimizer.state_dict())
    saved = {"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}
    train_alike(plain, unsharded, range(3, 5))
    return saved | {"trained": [parameter.detach() for parameter in plain.parameters()]}


def resume(context, kind, saved):
    wrapper, optimizer = sharded(context, kind, 1, 0.9)
    wrapper.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train_alike(wrapper, optimizer, range(3, 5))
    return [parameter.detach().clone() for parameter in wrapper.full_parameters().values()]


@pytest.mark.parametrize("kind", ["sharded-optimizer", "zero1", "zero2"])
def test_a_state_saved_at_two_ranks_resumes_at_any_number(kind):
    """Check that padding is not stored, by loading at 4 ranks and in an unsharded process."""
    plain = with_scale(0)
    train_alike(plain, torch.optim.AdamW(groups(plain), lr=0.01), range(5))
    saved = run(save, 2, kind)[0]
    for trained in (saved["trained"], *(run(resume, ranks, kind, saved)[0] for ranks in (1, 4))):
        assert all(map(torch.equal, trained, plain.parameters()))
