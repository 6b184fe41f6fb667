"""`distlab check` of mistakes in a part of a tensor, and of a tied weight that was replaced."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.check import on_rank, signatures
from distlab.testing import run_ranks

HERE = __name__


def mlp():
    """Return a model of 8 × 6, 8, 5 × 8 and 5 parameters, 101 in all."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def batch(size, generator):
        inputs = torch.randn(size, 6, generator=generator)
        return inputs, torch.randint(5, (size,), generator=generator)

    return module, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def tied():
    """Return a language model whose head is its embedding."""
    module = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11))
    module[3].weight = module[0].weight

    def batch(size, generator):
        return torch.randint(11, (size, 9), generator=generator)

    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])

    return module, batch, loss


def unused_rows():
    """Return a language model that uses the middle of its 20 tokens: other gradients are zero."""
    module = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20))

    def batch(size, generator):
        return torch.randint(5, 15, (size, 9), generator=generator)

    return module, batch, tied()[2]


def broadcast(module, group):
    """Give every rank the values of rank 0."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0, group)


def average(tensor, group):
    """Replace a tensor by its mean over the ranks."""
    dist.all_reduce(tensor, group=group)
    tensor /= group.size()


def finishing(reduce, backwards=False):
    """Return a wrapper whose finish calls `reduce(flat, group)` on the flat bucket of gradients."""

    def wrap(module, group):
        broadcast(module, group)

        def finish():
            gradients = [parameter.grad for parameter in module.parameters()]
            if backwards:
                gradients.reverse()
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            reduce(flat, group)
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))

        return module, finish

    return wrap


def each_gradient(reduce):
    """Return a wrapper whose finish calls `reduce(gradient, group)` on each gradient."""

    def wrap(module, group):
        broadcast(module, group)

        def finish():
            for parameter in module.parameters():
                reduce(parameter.grad, group)

        return module, finish

    return wrap


# -- wrappers that are wrong in a part


@finishing
def remainder_not_sent(flat, group):
    """Send whole messages of 40 elements, and forget what remains."""
    for start in range(0, flat.numel() // 40 * 40, 40):
        average(flat[start : start + 40], group)


@finishing
def one_message_summed(flat, group):
    """Send two messages, and divide the first one alone."""
    for part in flat.split(72):
        dist.all_reduce(part, group=group)
    flat[:72] /= group.size()


def _all_but_sixty(flat, group):
    average(flat[:41], group)


bucket_in_reverse = finishing(_all_but_sixty, backwards=True)


@each_gradient
def last_rows_of_rank_0(gradient, group):
    """Each rank averages its rows, and the rows that remain are those of rank 0."""
    rows = len(gradient) // 3 * 3
    average(gradient[:rows], group)
    dist.broadcast(gradient[rows:], 0, group)


@each_gradient
def second_half_summed(gradient, group):
    """Reduce in two chunks, and divide the first one alone."""
    flat = gradient.view(-1)
    dist.all_reduce(flat, group=group)
    flat[: flat.numel() // 2] /= group.size()


@each_gradient
def padded_tail_is_zero(gradient, group):
    """Cut a tensor to whole blocks of 4, and put the result into a tensor of zeros."""
    flat = gradient.view(-1)
    sent = flat[: flat.numel() // 4 * 4].clone()
    average(sent, group)
    flat.zero_()
    flat[: sent.numel()] = sent


@each_gradient
def end_of_every_shard(gradient, group):
    """Average all rows of each half but the last one."""
    for half in gradient.chunk(2):
        average(half[:-1], group)


def a_part_a_step_late(module, group):
    """Give the first four rows of the first matrix the previous step's mean."""
    broadcast(module, group)
    late = [torch.zeros(4, 6)]

    def finish():
        for parameter in module.parameters():
            average(parameter.grad, group)
        late.append(module[0].weight.grad[:4].clone())
        module[0].weight.grad[:4] = late.pop(0)

    return module, finish


def broadcast_in_part(module, group):
    """Send the first 64 elements of the flat parameters only."""
    flat = nn.utils.parameters_to_vector(module.parameters())
    dist.broadcast(flat[:64].detach(), 0, group)
    nn.utils.vector_to_parameters(flat, module.parameters())

    def finish():
        for parameter in module.parameters():
            average(parameter.grad, group)

    return module, finish


def tail_not_gathered(module, group):
    """Send all but the last 20 updated parameters from rank 1, which alone has updated them."""
    broadcast(module, group)

    def finish():
        for parameter in module.parameters():
            average(parameter.grad, group)

    def make_optimizer(parameters, cls, **options):
        optimizer = cls(parameters, **options)
        before = nn.utils.parameters_to_vector(parameters).detach().clone()

        def send(*_):
            flat = nn.utils.parameters_to_vector(parameters).detach()
            if group.rank() != 1:
                flat.copy_(before)
            dist.broadcast(flat[:-20], 1, group)
            before.copy_(flat)
            nn.utils.vector_to_parameters(flat, parameters)

        optimizer.register_step_post_hook(send)
        return optimizer

    return module, finish, make_optimizer


# -- wrappers that are wrong in all elements


@each_gradient
def other_on_each_rank(gradient, group):
    """Multiply by another factor on each rank."""
    average(gradient, group)
    gradient *= 1.4 + group.rank()


@each_gradient
def never_sent(gradient, group):
    """Send nothing."""


# -- a tied weight that was replaced


def replaces_the_head(module, group):
    """Give the head a parameter of its own."""
    module[3].weight = nn.Parameter(module[3].weight.detach().clone())
    return each_gradient(average)(module, group)


def replaces_the_head_by_another(module, group):
    """Give the head a parameter of its own, with other values."""
    module[3].weight = nn.Parameter(torch.full_like(module[3].weight, 0.1))
    return each_gradient(average)(module, group)


def replaces_both(module, group):
    """Give embedding and head one new parameter: right."""
    module[0].weight = module[3].weight = nn.Parameter(module[0].weight.detach().clone())
    return each_gradient(average)(module, group)


# -- tests

ALL = ""
PARTS = {  # wrapper → signature, tensor → wrong part
    "remainder_not_sent": (
        signatures.OWN,
        {"2.weight": "rows 3 to 4 of 5 (40%)", "2.bias": ALL},
    ),
    "one_message_summed": (
        signatures.SUMMED,
        {"2.weight": "rows 2 to 4 of 5 (60%)", "2.bias": ALL},
    ),
    "bucket_in_reverse": (
        signatures.OWN,
        {"0.weight": ALL, "0.bias": ALL, "2.weight": "elements 36 to 39 of 40 (10%)"},
    ),
    "last_rows_of_rank_0": (
        signatures.ONE_RANK,
        {
            "0.weight": "rows 6 to 7 of 8 (25%)",
            "0.bias": "elements 6 to 7 of 8 (25%)",
            "2.weight": "rows 3 to 4 of 5 (40%)",
            "2.bias": "elements 3 to 4 of 5 (40%)",
        },
    ),
    "second_half_summed": (
        signatures.SUMMED,
        {
            "0.weight": "rows 4 to 7 of 8 (50%)",
            "0.bias": "elements 4 to 7 of 8 (50%)",
            "2.weight": "elements 20 to 39 of 40 (50%)",
            "2.bias": "elements 2 to 4 of 5 (60%)",
        },
    ),
    "padded_tail_is_zero": (signatures.ABSENT, {"2.bias": "element 4 of 5 (20%)"}),
    "end_of_every_shard": (
        signatures.OWN,
        {
            "0.weight": "rows 3 and 7 of 8 (25%)",
            "0.bias": "elements 3 and 7 of 8 (25%)",
            "2.weight": "rows 2 and 4 of 5 (40%)",
            "2.bias": "elements 2 and 4 of 5 (40%)",
        },
    ),
    "a_part_a_step_late": (signatures.PREVIOUS, {"0.weight": "rows 0 to 3 of 8 (50%)"}),
    "broadcast_in_part": (
        signatures.NOT_BROADCAST,
        {"2.weight": "rows 1 to 4 of 5 (80%)", "2.bias": ALL},
    ),
    "tail_not_gathered": (
        signatures.NOT_SENT,
        {"2.weight": "elements 25 to 39 of 40 (37.5%)", "2.bias": ALL},
    ),
}
RANGES = {  # wrapper → range of the flat buffer
    "remainder_not_sent": "order of registration: from element 24 of '2.weight' to element 4 of "
    "'2.bias', which are 80 to 100 of 101",
    "bucket_in_reverse": "reverse order of registration: from element 36 of '2.weight' to element "
    "47 of '0.weight', which are 41 to 100 of 101",
}


def verdicts(context, cases):
    return [on_rank(context, f"{HERE}:{model}", f"{HERE}:{wrap}") for model, wrap in cases]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.commands)])
def test_the_wrong_part_is_named(ranks):
    cases = [("mlp", wrap) for wrap in PARTS]
    found = run_ranks(verdicts, ranks, cases, deadline_s=200)[0]
    for (_, wrap), verdict in zip(cases, found, strict=True):
        signature, parts = PARTS[wrap]
        seen = {each.tensor: str(each.part or ALL) for each in verdict.findings}
        assert {each.signature for each in verdict.findings} == {signature}, f"{wrap}: {verdict}"
        assert seen == parts, f"{wrap}: {verdict}"
        assert "the rest of the tensor is right" in str(verdict)
        for part in parts.values():
            assert part in str(verdict)
        if wrap in RANGES:
            (sentence,) = verdict.together
            assert RANGES[wrap] in sentence and sentence in str(verdict)


def test_gradients_of_zero_are_not_the_right_rest_of_a_tensor():
    cases = [("unused_rows", "other_on_each_rank"), ("unused_rows", "never_sent")]
    for verdict in run_ranks(verdicts, 2, cases, deadline_s=200)[0]:
        assert len(verdict.findings) == 3 and not verdict.together
        assert all(each.part is None for each in verdict.findings), verdict


def test_a_weight_that_is_no_longer_tied_is_named():
    cases = [
        ("tied", "replaces_the_head"),
        ("tied", "replaces_the_head_by_another"),
        ("tied", "replaces_both"),
    ]
    head, another, right = run_ranks(verdicts, 2, cases, deadline_s=200)[0]
    said = f"'3.weight' {signatures.UNTIED} '0.weight'"
    assert {each.tensor for each in head.findings} == {"0.weight"}
    # Other values in the head change every gradient.
    assert len(another.findings) == 4
    for each in (*head.findings, *another.findings):
        assert each.signature.startswith(said) and each.part is None
    assert right.right
