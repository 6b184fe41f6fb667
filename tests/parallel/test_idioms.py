"""What scripts do to a wrapped module besides training it: right under every strategy, or refused
in one sentence.
"""

import copy
import gc
import io
from functools import partial

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from distlab.comm import collectives
from distlab.measure import CollectiveRecorder
from distlab.model.ops import gradient_target
from distlab.parallel import FSDP, BucketedDDP, NaiveDDP, get_strategy
from tests.parallel.cases import drawn
from tests.parallel.test_contract import on_two_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def wrapped(context, kind, module=None):
    return get_strategy(kind).build(module or net(), context.group, torch.optim.SGD, {"lr": 0.5})


def step(forward, made, context, number, update=None):
    wrapper, optimizer = made
    x = drawn(10 * number + context.rank, 4, 6)
    optimizer.zero_grad()
    forward(x).square().mean().backward()
    wrapper.finish_gradient_synchronization()
    (update or optimizer.step)()


def full(made):
    return [value.detach().clone() for value in made[0].full_parameters().values()]


# -- values assigned by `.data` --------------------------------------------------------------------


def _as_a_vector(parameters):
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector / 2, parameters)


def _one_by_one(parameters):
    for parameter in parameters:
        parameter.data = parameter.data / 2


def _swapped(parameters):
    for parameter in parameters:
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() / 2))


@on_two_ranks
def test_values_are_not_assigned_to_shards_and_what_was_kept_is_restored(context):
    """An average swapped in and out: `p.data` that was kept is an alias, which nothing may
    overwrite.
    """
    for kind in ("zero1", "zero2", "fsdp"):
        made = wrapped(context, kind)
        wrapper, parameters = made[0], list(made[0].parameters())
        step(wrapper, made, context, 0)
        before = full(made)
        keep = [parameter.data for parameter in parameters]
        for assign in (_one_by_one, _as_a_vector, _swapped):
            assign(parameters)
            uses = (
                [wrapper.gather_full_params]
                if kind == "fsdp"
                else [wrapper.shards, wrapper.grad_norm]
            )
            for use in [*uses, partial(step, wrapper, made, context, 1)]:
                with pytest.raises(
                    RuntimeError,
                    match=r"'0\.weight' is sharded and was given other memory .*in place",
                ):
                    use()
            for parameter, data in zip(parameters, keep, strict=True):
                parameter.data = data
            assert all(map(torch.equal, full(made), before))
            step(wrapper, made, context, 1)
            before = full(made)


# -- gradients that no backward of the wrapper made ------------------------------------------------


@on_two_ranks
def test_gradients_that_were_assigned_are_averaged(context):
    """Of `autograd.grad`, or of an evolution strategy."""
    x = drawn(context.rank, 4, 6)
    for kind in ("naive", "flat", "overlap", "bucketed", "sharded-optimizer"):
        wrapper, optimizer = wrapped(context, kind)
        parameters = list(wrapper.parameters())
        for number in range(3):
            gradients = torch.autograd.grad(wrapper.module(x).square().mean(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if number < 2 else parameter.grad.copy_(gradient)
            wrapper.finish_gradient_synchronization()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                ranks = collectives.gather_objects(gradient, context.group)
                torch.testing.assert_close(parameter.grad, sum(ranks) / 2)
            with CollectiveRecorder() as recorder:  # a second call has nothing to do
                wrapper.finish_gradient_synchronization()
            assert recorder.count == 0
            optimizer.step()


class OnVectors(nn.Module):
    """Forward adds two vectors; one matrix of the three parameters is never used."""

    def __init__(self):
        super().__init__()
        self.bias, self.norm = nn.Parameter(torch.zeros(6)), nn.LayerNorm(6)
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        return self.norm(x) + self.bias


@on_two_ranks
def test_a_loss_on_vectors_alone_and_an_early_finish_are_right(context):
    x = drawn(context.rank, 4, 6)

    def ends(kind, loss, module):
        made = wrapper, optimizer = wrapped(context, kind, module)
        for _ in range(2):
            optimizer.zero_grad()
            value = loss(wrapper)
            wrapper.finish_gradient_synchronization()  # too early: nothing is there
            value.backward()
            with pytest.raises(RuntimeError, match=r"finish_gradient_synchronization\(\)"):
                optimizer.step()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
        return full(made)

    for loss, make in (
        (
            lambda wrapper: wrapper(x).square().mean() * 0 + wrapper.module[0].bias.square().sum(),
            net,
        ),
        (lambda wrapper: wrapper(x).detach().sum() + wrapper.module[2].bias.sum(), net),
        (lambda wrapper: wrapper(x).square().mean(), OnVectors),
    ):
        torch.testing.assert_close(ends("fsdp", loss, make()), ends("bucketed", loss, make()))


# -- copies ----------------------------------------------------------------------------------------


@on_two_ranks
def test_a_copy_of_the_wrapped_module_is_an_ordinary_module(context):
    """Averaged weights by deepcopy, `torch.save(wrapper.module)`.

    Shards are no module by themselves.
    """
    x = torch.ones(2, 6)
    for kind in ("naive", "flat", "bucketed", "zero1", "zero2"):
        made = wrapped(context, kind)
        step(made[0], made, context, 0)
        module = made[0].module
        average = copy.deepcopy(module)
        average.load_state_dict(module.state_dict())  # as an average of weights begins
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.load_state_dict(module.state_dict(), assign=True)
        for other in (average, loaded):
            assert torch.equal(other(x), module(x))
            other(x).sum().backward()  # on one rank as on two: nothing is sent
        assert made[0].check_step() is None
        with pytest.raises(RuntimeError, match=r"replaced '0\.weight'"):
            module.load_state_dict(average.state_dict(), assign=True)
    module = FSDP(net(), process_group=context.group).module
    for duplicate in (copy.deepcopy, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(
            TypeError, match=r"holds this rank's shards and cannot be copied, .*: take gather_full"
        ):
            duplicate(module)


@on_two_ranks
def test_parameters_that_were_saved_load_with_torch_s_defaults(context):
    """A list or a dictionary of parameters, as of adapters."""
    for kind in ("naive", "flat", "bucketed", "zero1", "zero2", "fsdp"):
        made = wrapped(context, kind)
        step(made[0], made, context, 0)
        full(made)  # waits until the parameters are whole
        file = io.BytesIO()
        torch.save(dict(made[0].module.named_parameters()), file)
        file.seek(0)
        for name, loaded in torch.load(file).items():
            assert torch.equal(loaded, made[0].module.get_parameter(name)), (kind, name)
            assert gradient_target(loaded) is None


# -- the optimizer's state -------------------------------------------------------------------------

SHARDING = ("sharded-optimizer", "zero1", "zero2", "fsdp")


def adam(context, kind):
    return get_strategy(kind).build(net(), context.group, torch.optim.AdamW, {"lr": 0.1})


@on_two_ranks
def test_reading_the_state_of_every_parameter_changes_nothing(context):
    """Reads of a state that another rank has left an empty one here, which was saved for it."""
    expected = adam(context, "bucketed")
    for number in range(4):
        step(expected[0], expected, context, number)
    for kind in SHARDING:
        made = wrapper, optimizer = adam(context, kind)
        for number in range(2):
            for parameter in wrapper.parameters():
                optimizer.state[parameter].get("exp_avg_sq")
            step(wrapper, made, context, number)
        for parameter in wrapper.parameters():
            optimizer.state[parameter].get("exp_avg_sq")
        if kind == "fsdp":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            saved = optimizer.state_dict()
            assert all(len(state) == 3 for state in saved["state"].values()), kind
            optimizer.load_state_dict(saved)
        for number in (2, 3):
            step(wrapper, made, context, number)
        torch.testing.assert_close(full(made), full(expected), msg=kind)


def _pop(state, parameter):
    state.pop(parameter, None)


def _assign(state, parameter):
    state[parameter] = {}


def _delete(state, parameter):
    if parameter in state:
        del state[parameter]


@on_two_ranks
def test_the_state_of_one_parameter_is_reset_under_every_strategy(context):
    for reset in (_pop, _assign, _delete):
        results = {}
        for kind in ("bucketed", *SHARDING):
            made = wrapper, optimizer = adam(context, kind)
            for number in range(3):
                step(wrapper, made, context, number)
                if number == 0:
                    reset(optimizer.state, next(wrapper.parameters()))
            results[kind] = full(made)
        for kind in SHARDING:
            torch.testing.assert_close(results[kind], results["bucketed"], msg=kind)


@on_two_ranks
def test_hooks_of_an_optimizer_s_state_see_the_whole_of_it(context):
    for kind in ("sharded-optimizer", "zero1", "zero2"):
        made = wrapper, optimizer = adam(context, kind)
        step(wrapper, made, context, 0)
        seen = []

        def saved(optimizer, found, seen=seen):
            seen.append(("saved", len(found["state"])))
            return found | {"of_a_hook": 1}

        def before_load(optimizer, found, seen=seen):
            seen.append(("loading", found.pop("of_a_hook")))

        optimizer.register_state_dict_pre_hook(lambda _, seen=seen: seen.append("saving"))
        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_pre_hook(before_load)
        optimizer.register_load_state_dict_post_hook(lambda _, seen=seen: seen.append("loaded"))
        found = optimizer.state_dict()
        optimizer.load_state_dict(found)
        assert seen == ["saving", ("saved", 4), ("loading", 1), "loaded"], kind
        assert found["of_a_hook"] == 1  # a hook changed a copy


@on_two_ranks
def test_a_tensor_that_is_not_stepped_has_an_empty_state_which_cannot_be_set(context):
    """A frozen parameter, in a loop over those of the model. torch's own has an empty state."""
    stranger = nn.Parameter(torch.ones(2))
    for kind in ("sharded-optimizer", "zero1", "zero2"):
        state = adam(context, kind)[1].state
        assert stranger not in state and state.get(stranger) is None
        optimizer = adam(context, kind)[1]
        for group in optimizer.local.param_groups:  # by the tensors that are stepped, before a step
            assert all(optimizer.state[tensor] == {} for tensor in group["params"])
        assert state[stranger] == {} and state.pop(stranger, None) is None and len(state) == 0
        with pytest.raises(KeyError):
            state[stranger] = {}


# -- steps that are skipped ------------------------------------------------------------------------

AVERAGING = ("naive", "flat", "overlap", "bucketed", "sharded-optimizer", "zero1", "zero2", "fsdp")


@on_two_ranks
def test_a_step_is_skipped_by_dropping_its_gradients_at_any_time(context):
    """Before the next forward, between it and the next backward, or before finish."""

    def trained(kind, skipped):
        made = wrapper, optimizer = wrapped(context, kind)
        loss = wrapper(drawn(90 + context.rank, 4, 6)).square().mean()
        if skipped:
            loss.backward()
        if skipped == "before finish":
            optimizer.zero_grad()
            wrapper.finish_gradient_synchronization()
            assert all(parameter.grad is None for parameter in wrapper.parameters())
            optimizer.step()
        if skipped == "before the forward":
            optimizer.zero_grad()
        for number in range(2):
            loss = wrapper(drawn(10 * number + context.rank, 4, 6)).square().mean()
            optimizer.zero_grad()  # torch's tutorial zeroes here
            loss.backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
        return full(made)

    # Gradients that were exchanged for others are not dropped, and their step is not skipped.
    for kind in ("naive", "bucketed", "zero1"):
        wrapper, _ = wrapped(context, kind)
        wrapper(torch.ones(2, 6)).sum().backward()
        for parameter in wrapper.parameters():
            parameter.grad = parameter.grad.clone()
        wrapper(torch.ones(2, 6))
        with pytest.raises(RuntimeError, match="was changed between backward and finish"):
            wrapper.finish_gradient_synchronization()

    for kind in AVERAGING:
        expected = trained(kind, "")
        for skipped in ("before the forward", "before the backward", "before finish"):
            torch.testing.assert_close(trained(kind, skipped), expected, msg=f"{kind}: {skipped}")


# -- modules with hooks ----------------------------------------------------------------------------


@on_two_ranks
def test_a_pruned_module_trains_alike_under_every_strategy(context):
    """Pruning reads the parameter in a forward pre-hook, so FSDP must have gathered it by then."""

    def pruned():
        module = net()
        torch.nn.utils.prune.l1_unstructured(module[0], "weight", 0.5)
        torch.nn.utils.prune.random_unstructured(module[2], "bias", 0.5)
        return module

    results = {}
    for kind in ("bucketed", "zero1", "zero2", "fsdp"):
        torch.manual_seed(1)
        made = wrapped(context, kind, pruned())
        for number in range(3):
            step(made[0], made, context, number)
        results[kind] = full(made)
    for kind, result in results.items():
        torch.testing.assert_close(result, results["bucketed"], msg=kind)


@on_two_ranks
def test_fsdp_wraps_a_module_whose_ddp_was_dropped(context):
    """Nobody holds that wrapper any more, so nobody could close it."""
    for kind in ("naive", "bucketed"):
        module = net()
        wrapper, _ = wrapped(context, kind, module)
        wrapper(torch.ones(2, 6)).sum().backward()
        wrapper.finish_gradient_synchronization()
        del wrapper, _
        gc.collect()
        made = wrapped(context, "fsdp", module)
        step(made[0], made, context, 0)


@on_two_ranks
def test_a_load_that_exchanges_parameters_is_refused(context):
    """torch's setting takes the hooks along with the old tensor."""
    for kind in ("naive", "overlap", "bucketed"):
        wrapper, _ = wrapped(context, kind)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(
                RuntimeError, match=r"exchanged the parameters.*: load before wrapping"
            ):
                wrapper.module.load_state_dict(net().state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


# -- wrapped again ---------------------------------------------------------------------------------


@on_two_ranks
def test_an_optimizer_of_a_closed_wrapper_does_not_step(context):
    """It would step shards that no module reads, or by gradients of an earlier step."""
    for kind in ("zero1", "zero2", "fsdp"):
        for is_wrapped_again in (False, True):
            made = wrapper, optimizer = wrapped(context, kind)
            if not is_wrapped_again:
                step(wrapper, made, context, 0)
            wrapper.close()
            module = wrapper.module
            if is_wrapped_again:
                again = get_strategy("fsdp" if kind == "fsdp" else "bucketed")
                wrapper, right = again.build(module, context.group, torch.optim.SGD, {"lr": 0.5})
                wrapper(torch.ones(2, 6)).square().mean().backward()
                wrapper.finish_gradient_synchronization()
            with pytest.raises(RuntimeError, match=r"closed.*: build another"):
                optimizer.step()
            if is_wrapped_again:
                right.step()


@on_two_ranks
def test_an_optimizer_inside_backward_is_refused(context):
    """Its hook takes the gradient before it is averaged: each rank would train its own model."""

    def stepped_and_dropped(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for kind in ("naive", "flat", "overlap", "bucketed", "zero1", "zero2"):
        module = net()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(stepped_and_dropped)
        wrapper, _ = wrapped(context, kind, module)
        with pytest.raises(RuntimeError, match=r"'2\.\w+' was dropped by a hook .*: step after"):
            wrapper(torch.ones(2, 6)).square().mean().backward()


# -- torch.compile ---------------------------------------------------------------------------------


@on_two_ranks
def test_a_compiled_step_and_a_compiled_wrapper_train_alike(context):
    def trained(kind, part, module):
        made = wrapper, optimizer = wrapped(context, kind, module)
        forward = torch.compile(wrapper, backend="aot_eager") if part == "wrapper" else wrapper
        update = torch.compile(optimizer.step, backend="aot_eager") if part == "step" else None
        for number in range(3):
            step(forward, made, context, number, update)
        return full(made)

    # it was the second FSDP at which Dynamo failed
    for module in (net(), net().append(nn.LayerNorm(3))):
        expected = trained("bucketed", "", copy.deepcopy(module))
        for kind, part in (
            ("zero1", "step"),
            ("zero2", "step"),
            ("sharded-optimizer", "step"),
            ("fsdp", "step"),
            ("fsdp", "wrapper"),
        ):
            torch.testing.assert_close(trained(kind, part, copy.deepcopy(module)), expected)


# -- refused ---------------------------------------------------------------------------------------


def _clip(optimizer, *_):
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


@on_two_ranks
def test_what_a_strategy_cannot_do_it_names(context):
    """Hooks on shards, `backward(inputs=…)`, other parameters, clipping in a step's pre-hook,
    `max_norm`.
    """
    x = torch.ones(2, 6)
    for hook in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        wrapper = FSDP(net(), process_group=context.group)
        handle = hook(wrapper.module[2].weight, lambda _: None)
        wrapper(x).sum().backward()
        with pytest.raises(ValueError, match=r"hook on '2\.weight' never fires.*: remove it"):
            wrapper.finish_gradient_synchronization()
        handle.remove()
        wrapper.finish_gradient_synchronization()
    wrapper = FSDP(net(), torch.bfloat16, process_group=context.group)
    # forward reads a copy of it
    dict(wrapper.module.named_parameters())["2.bias"].register_hook(lambda _: None)
    wrapper(x).sum().backward()
    with pytest.raises(ValueError, match=r"hook on '2\.bias' never fires"):
        wrapper.finish_gradient_synchronization()

    wrapper = FSDP(net(), process_group=context.group)
    wrapper(x).sum().backward(inputs=list(wrapper.parameters()))
    with pytest.raises(
        RuntimeError, match=r"no backward has brought .*: call loss\.backward\(\) without inputs"
    ):
        wrapper.finish_gradient_synchronization()
    inputs = x.clone().requires_grad_()
    assert torch.autograd.grad(wrapper(inputs).sum(), inputs)[0].any()  # is not refused
    wrapper(x).sum().backward()
    wrapper.finish_gradient_synchronization()

    halves = {
        name: parameter.detach() / 2 for name, parameter in net().named_parameters(prefix="module")
    }
    with pytest.raises(
        RuntimeError, match=r"FSDP: '0\.weight' is another parameter .*functional_call.*load_full"
    ):
        torch.func.functional_call(wrapped(context, "fsdp")[0], halves, (x,))
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3))
    wrapper = wrapped(context, "fsdp", normed)[0]
    cached = pytest.raises(
        RuntimeError, match=r"unit '1' runs .*parametrize\.cached\(\).* is not for sharded modules"
    )
    with cached, torch.nn.utils.parametrize.cached():
        (wrapper(x).sum() + wrapper(2 * x).sum()).backward()

    for kind in ("zero1", "fsdp"):
        wrapper, optimizer = wrapped(context, kind)
        step(wrapper, (wrapper, optimizer), context, 0)
        optimizer.register_step_pre_hook(_clip)
        for _ in range(2):
            optimizer.zero_grad()
            wrapper(x).square().mean().backward()
            wrapper.finish_gradient_synchronization()
            before = full((wrapper, optimizer))
            with pytest.raises(RuntimeError, match=r"(edited|is not as finish).*clip_grad_norm_"):
                optimizer.step()
            assert all(map(torch.equal, full((wrapper, optimizer)), before))

    with pytest.raises(
        ValueError, match=r"'0' renormalises its rows in forward \(max_norm\).*: leave max_norm out"
    ):
        wrapped(context, "zero1", nn.Sequential(nn.Embedding(5, 4, max_norm=0.5)))
    with pytest.raises(
        RuntimeError, match=r"forward writes to '0\.weight' in place .*: write to fsdp\.parameters"
    ):
        module = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5))
        FSDP(module, process_group=context.group)(torch.tensor([1, 2]))


@pytest.mark.ranks(2)
def test_arguments_in_torch_s_habit(context):
    """A process group by position, as the first keyword of torch's DDP, and the default
    `norm_type`.
    """
    with pytest.raises(
        TypeError, match=r"got a process group by position: give it by name, process_group="
    ):
        BucketedDDP(nn.Linear(2, 2), context.group)
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        BucketedDDP(nn.Linear(2, 2), bucket_cap_mb=25)
    wrapper = BucketedDDP(nn.Linear(2, 2), process_group=context.group)
    wrapper(torch.ones(1, 2)).sum().backward()
    wrapper.finish_gradient_synchronization()
    assert wrapper.clip_grad_norm_(1.0, norm_type=2) > 0
    for each in (wrapper, FSDP(nn.Linear(2, 2), process_group=context.group)):
        assert each.require_backward_grad_sync
        with each.no_sync():
            assert not each.require_backward_grad_sync
        with pytest.raises(TypeError, match=r"inside `with wrapper\.no_sync\(\):`"):
            each.require_backward_grad_sync = False  # torch's DDP takes it
    for strategy in (BucketedDDP, NaiveDDP):
        with pytest.raises(ValueError, match="on meta and have no values: give them values"):
            strategy(nn.Linear(2, 2, device="meta"), process_group=context.group)
    with pytest.raises(ValueError, match="only the 2-norm"):
        wrapper.clip_grad_norm_(1.0, norm_type=1.0)
