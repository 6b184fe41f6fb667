"""The contract of gradient synchronisation: every strategy × world size × kind of model.

After `finish_gradient_synchronization()` every trainable parameter's `.grad` is the mean over ranks. At two
ranks that is bit for bit the mean computed in one process; at three and more the order of the additions
differs between a ring and a plain sum, so the ranks must equal each other bit for bit and the reference closely.
"""

import hashlib
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from textwrap import dedent
from unittest.mock import patch

import pytest
import torch

from distlab.comm import RankContext
from distlab.comm.subgroups import hybrid_mesh
from distlab.parallel import BucketedDDP, CopyEngineDDP, FlatDDP, NaiveDDP, OverlapDDP
from distlab.testing import run_ranks
from tests.commands import ROOT
from tests.parallel.cases import CASES, Reference, build

STRATEGIES = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": lambda module, **kw: BucketedDDP(
        module, bucket_size_mb=1e-4, **kw
    ),  # 104 bytes: many buckets
    "bucketed-unbounded": lambda module, **kw: BucketedDDP(module, bucket_size_mb=None, **kw),
}
ON_A_MESH = {name: make for name, make in STRATEGIES.items() if name != "bucketed-unbounded"}
MESHES = [  # backend, ranks, ranks of a shard group
    ("gloo", 4, 2),
    *(pytest.param("nccl", ranks, size, marks=pytest.mark.multigpu) for ranks, size in ((2, 1), (2, 2), (4, 2))),
]
ON_GPUS = {"bucketed-dma": lambda module, **kw: CopyEngineDDP(module, bucket_size_mb=1e-4, **kw)}
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]
STEPS = 2


def run(fn, world_size: int, *args, backend: str = "gloo", **options):
    if backend == "nccl" and world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
    return run_ranks(fn, world_size, *args, backend=backend, **options)


def assert_same_on_all_ranks(tensors: list[torch.Tensor | None], context: RankContext) -> None:
    """Bit for bit, and None where the others have None; told from digests, for which one message does."""
    mine = torch.tensor([_digest(tensor) for tensor in tensors], device=context.device)
    both = torch.cat([mine, -mine])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, context.group)
    highest, lowest = both[: len(mine)], -both[len(mine) :]
    assert torch.equal(highest, lowest), f"ranks differ in tensors {(highest != lowest).nonzero().flatten().tolist()}"


def _digest(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    host = tensor.detach().cpu().contiguous()
    assert not host.isnan().any()  # which equals nothing
    text = f"{host.dtype} {host.shape}".encode() + host.view(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def assert_equals_reference(gradients, expected, world_size: int) -> None:
    for gradient, reference in zip(gradients, expected, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is None:
            continue
        assert gradient.dtype == reference.dtype and gradient.shape == reference.shape
        if world_size <= 2:
            assert torch.equal(gradient, reference)
        else:
            # N roundings of 1/N·g and N − 1 additions in another order: a few ulp of the largest summand.
            ulps = 4 * world_size * torch.finfo(gradient.dtype).eps
            torch.testing.assert_close(gradient, reference, rtol=ulps, atol=ulps)


def train_beside_reference(
    context: RankContext, strategy: str, case: str, set_to_none: bool, shard_size: int | None = None
) -> None:
    model = build(case, context.rank, context.device)  # rank 0's seed is the reference's
    mesh = {} if shard_size is None else {"mesh": hybrid_mesh(context.group, shard_size)}
    wrapper = (STRATEGIES | ON_GPUS)[strategy](model, process_group=context.group, **mesh)
    reference = Reference(case, context.world_size, context.device)
    assert_same_on_all_ranks([*model.state_dict().values()], context)  # RELIABILITY 2, 12
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        CASES[case].loss(wrapper, context.rank, step, context.device).backward()
        wrapper.finish_gradient_synchronization()
        reference.backward(step)
        expected = reference.average()
        gradients = [parameter.grad for parameter in trainable]
        if not set_to_none:  # zeroed instead of dropped: zeros stand for what would be None
            expected = [
                g if e is None and g is not None and not g.any() else e
                for e, g in zip(expected, gradients, strict=True)
            ]
        assert_equals_reference(gradients, expected, context.world_size)
        assert_same_on_all_ranks(gradients, context)
        optimizer.step()
        reference.step()
        if context.world_size > 2:
            reference.follow(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, name  # RELIABILITY 5
    assert_same_on_all_ranks([*model.parameters()], context)
    if context.world_size <= 2:
        for mine, theirs in zip(model.parameters(), reference.replicas[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)
    wrapper.close()


def every_row(context: RankContext, check: Callable[..., None], rows: Iterable[tuple]) -> None:
    """`check(context, *row)` for all rows; on gloo each in a group of its own, so that none meets another's leftovers.

    On NCCL a group takes hundreds of MB of a GPU until the process ends.

    Raises:
        AssertionError: with each row that failed and its reason.
    """
    failures = []
    for row in rows:
        group = context.group
        if context.backend == "gloo":
            group = torch.distributed.new_group(timeout=timedelta(seconds=6))
        try:
            check(replace(context, group=group), *row)
        except Exception:
            failures.append(f"{row}: {traceback.format_exc()}")
    assert not failures, "\n".join(failures)


def every_kind_of_model(
    context: RankContext, strategy: str, dropped: Iterable[str], zeroed: Iterable[str], shard_size: int | None = None
) -> None:
    """All cases.

    Args:
        dropped: cases whose gradients are dropped between steps.
        zeroed: cases whose gradients are zeroed instead.
    """
    rows = [*((case, True) for case in dropped), *((case, False) for case in zeroed)]
    every_row(context, train_beside_reference, [(strategy, *row, shard_size) for row in rows])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_the_mean_over_ranks(strategy, world_size, backend):
    """RELIABILITY 1, 2, 4, 5, 6, 7, 11, 13, 17: one process's training, whatever the model.

    zero_grad(set_to_none=False) keeps bucket views, and autograd accumulates into them.
    """
    zeroed = ["plain", "tied", "unused-on-some", "odd-strides"] if world_size == 2 else []
    run(every_kind_of_model, world_size, strategy, [*CASES], zeroed, backend=backend)


@pytest.mark.parametrize(("backend", "world_size", "shard_size"), MESHES)
@pytest.mark.parametrize("strategy", ON_A_MESH)
def test_gradients_are_the_mean_over_a_mesh(strategy, backend, world_size, shard_size):
    """The same in two levels: inside shard groups, between them, and inside again."""
    zeroed = ["plain", "tied", "odd-strides"]
    dropped = [case for case in CASES if case not in zeroed]
    run(every_kind_of_model, world_size, strategy, dropped, zeroed, shard_size, backend=backend)


def run_recipe(context: RankContext, recipe: str) -> None:
    names = {"__name__": "late"}
    exec(recipe, names)
    with patch.dict(STRATEGIES, late=names["LateDDP"]):
        every_kind_of_model(context, "late", CASES, CASES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_ddp_is_right_as_the_page_has_it(backend):
    """The recipe of CONTRIBUTING.md, on every kind of model."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = re.search(r"## Add a strategy.*?```python\n(.*?)```", page, re.DOTALL)[1]
    run(run_recipe, 2, dedent(recipe), backend=backend)


@pytest.mark.multigpu
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ON_GPUS)
def test_gradients_are_the_mean_over_gpus(strategy, case, world_size, set_to_none):
    """RELIABILITY 1, 2, 4, 5, 6, 7, 11, 13, 17, for what runs on GPUs only."""
    run(train_beside_reference, world_size, strategy, case, set_to_none, backend="nccl")


def tied_weights_travel_once(context: RankContext, strategy: str) -> tuple[int, int]:
    from distlab.measure.collectives import CollectiveRecorder

    model = build("tied", context.rank, context.device)
    wrapper = STRATEGIES[strategy](model, process_group=context.group)
    assert model.head.weight is model.embedding.weight  # still tied
    with CollectiveRecorder() as recorder:
        CASES["tied"].loss(wrapper, context.rank, 0, context.device).backward()
        wrapper.finish_gradient_synchronization()
    return recorder.total_bytes, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_weight_is_sent_once(strategy):
    """RELIABILITY 4: the bytes on the wire are those of each distinct parameter, plus one flag each."""
    for sent, numel in run(tied_weights_travel_once, 2, strategy):
        assert sent == 4 * (numel + 3)  # three distinct parameters, three flags
