"""What a wrapper refuses, and that the message says what to do."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import RankContext
from distlab.measure.recorder import CollectiveRecorder
from distlab.parallel import BucketedDDP, NaiveDDP, get_strategy
from distlab.testing import run_ranks
from tests.parallel.test_contract import STRATEGIES


def message_of(make) -> str:
    """The text of the ValueError, TypeError or RuntimeError that `make` raises."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        make()
    return str(caught.value)


def different_models(context: RankContext, difference: str) -> tuple[str, int]:
    """Wrap models that differ on rank 1; the error, and how many broadcasts had been sent by then."""
    differs = context.rank == 1
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 if difference == "shape" and differs else 3))
    if difference == "dtype" and differs:
        model.to(torch.float64)
    if difference == "count" and differs:
        model.append(nn.Linear(1, 1))
    if difference == "frozen" and differs:
        model[0].bias.requires_grad_(False)
    if difference == "stride" and differs:
        model[0].weight = nn.Parameter(torch.randn(3, 4).t())
    if difference == "buffer" and differs:
        model.register_buffer("extra", torch.zeros(1))
    with CollectiveRecorder() as recorder:
        text = message_of(lambda: NaiveDDP(model, process_group=context.group))
    return text, recorder.by_op().get("broadcast", (0, 0))[0]


@pytest.mark.parametrize("difference", ["shape", "dtype", "count", "frozen", "stride", "buffer"])
def test_ranks_with_different_models_all_get_the_same_error(difference):
    """RELIABILITY 3: before any broadcast, on every rank, naming both ranks' tensors."""
    answers = run_ranks(different_models, 3, difference)
    assert len(set(answers)) == 1
    text, broadcasts = answers[0]
    assert broadcasts == 0
    assert "rank 0" in text and "rank 1" in text and "build the same model on every rank" in text


def refusals(context: RankContext) -> dict[str, str]:
    group = context.group
    frozen = nn.Linear(2, 2).requires_grad_(False)
    two_devices = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    integer = nn.Linear(2, 2)
    integer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    wrapped = nn.Linear(2, 2)
    first = BucketedDDP(wrapped, process_group=group)
    only_rank_0 = dist.new_group([0])
    answers = {
        "frozen": message_of(lambda: NaiveDDP(frozen, process_group=group)),
        "devices": message_of(lambda: NaiveDDP(two_devices, process_group=group)),
        "complex": message_of(lambda: NaiveDDP(integer, process_group=group)),
        "wrapped": message_of(lambda: NaiveDDP(wrapped, process_group=group)),
        "bucket": message_of(lambda: BucketedDDP(nn.Linear(2, 2), 0, process_group=group)),
        "bucket-nan": message_of(lambda: BucketedDDP(nn.Linear(2, 2), float("nan"), process_group=group)),
        "copy": message_of(lambda: copy.deepcopy(first)),
        "pickle": message_of(lambda: pickle.dumps(first)),
        "assign": message_of(lambda: wrapped.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)),
    }
    if context.rank == 1:
        answers["member"] = message_of(lambda: NaiveDDP(nn.Linear(2, 2), process_group=only_rank_0))
    first.close()
    NaiveDDP(wrapped, process_group=group)  # after close() the same module can be wrapped again
    return answers


def test_mistakes_are_named_with_what_to_do_instead():
    """RELIABILITY 5, 13, 17, 18; DESIGN §3 Refusals."""
    answers = run_ranks(refusals, 2)[1]
    assert "no parameter that requires a gradient" in answers["frozen"]
    assert "move the module to one device" in answers["devices"]
    assert "'weight' is torch.complex64" in answers["complex"]
    assert "call close() on that wrapper first" in answers["wrapped"]
    assert "bucket_size_mb=0" in answers["bucket"] and "positive" in answers["bucket"]
    assert "positive" in answers["bucket-nan"]
    assert "wrap the copy again" in answers["copy"] and "wrap the copy again" in answers["pickle"]
    assert "assign" in answers["assign"] and "before wrapping" in answers["assign"]
    assert "not a member" in answers["member"]


def sparse_gradient(context: RankContext, strategy: str) -> str:
    wrapper = STRATEGIES[strategy](nn.Embedding(5, 3, sparse=True), process_group=context.group)
    return message_of(lambda: wrapper(torch.tensor([1, 2])).sum().backward())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sparse_gradient_is_refused_by_name(strategy):
    """RELIABILITY 13."""
    for text in run_ranks(sparse_gradient, 2, strategy):
        assert "'weight' is sparse" in text


def unfrozen_later(context: RankContext) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    wrapper = NaiveDDP(model, process_group=context.group)
    model[0].bias.requires_grad_(True)
    wrapper(torch.ones(1, 2)).sum().backward()
    return message_of(wrapper.finish_gradient_synchronization)


def test_a_parameter_unfrozen_after_wrapping_is_named():
    """A hook cannot be there for it, so its gradient would silently differ between ranks."""
    assert "'0.bias' was frozen" in run_ranks(unfrozen_later, 2)[0]


def test_wrapping_without_a_process_group_says_how_to_get_one():
    assert "rank_context" in message_of(lambda: NaiveDDP(nn.Linear(2, 2)))


def test_an_unknown_strategy_lists_those_that_exist():
    text = message_of(lambda: get_strategy("bucket"))
    assert "'bucket' is unknown" in text and "bucketed" in text
