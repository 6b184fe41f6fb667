"""The contract of gradient synchronisation: every strategy × world size × kind of model.

After `finish_gradient_synchronization()` every trainable parameter's `.grad` is the mean over
ranks. At two ranks that is bit for bit the mean computed in one process; at three and more the
order of the additions differs between a ring and a plain sum, so the ranks must equal each other
bit for bit and the reference closely.
"""

import hashlib
import re
import traceback
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from textwrap import dedent
from unittest.mock import patch

import pytest
import torch
from torch import nn

from distlab.comm import collectives
from distlab.comm.subgroups import hybrid_mesh
from distlab.parallel import (
    FSDP,
    BucketedDDP,
    CopyEngineDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    registry,
)
from distlab.parallel.shard import view_like
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
WITH_FSDP = STRATEGIES | {"fsdp": FSDP}
ON_A_MESH = [name for name in WITH_FSDP if name != "bucketed-unbounded"]
ON_A_MESH_TOO = ("unused-on-some", "batch-norm", "mixed-dtypes", "odd-strides")
MESHES = [  # backend, ranks, ranks of a shard group
    ("gloo", 4, 2),
    *(
        pytest.param("nccl", ranks, size, marks=pytest.mark.multigpu)
        for ranks, size in ((2, 1), (2, 2), (4, 2))
    ),
]
ON_GPUS = {"bucketed-dma": lambda module, **kw: CopyEngineDDP(module, bucket_size_mb=1e-4, **kw)}
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)]
STEPS = 2
# A test with this mark is what each rank runs, with its context; see tests/conftest.py.
on_one_rank, on_two_ranks, on_four_ranks = map(pytest.mark.ranks, (1, 2, 4))


def run(fn, world_size, *args, backend="gloo", **options):
    if backend == "nccl" and world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
    return run_ranks(fn, world_size, *args, backend=backend, **options)


def assert_same_on_all_ranks(tensors, context):
    """Bit for bit, and None where the others have None.

    Told from digests, for which one message does.
    """
    mine = torch.tensor([_digest(tensor) for tensor in tensors], device=context.device)
    both = torch.cat([mine, -mine])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, context.group)
    highest, lowest = both[: len(mine)], -both[len(mine) :]
    assert torch.equal(highest, lowest), (
        f"ranks differ in tensors {(highest != lowest).nonzero().flatten().tolist()}"
    )


def _digest(tensor):
    if tensor is None:
        return 0
    host = tensor.detach().cpu().contiguous()
    assert not host.isnan().any()  # which equals nothing
    text = f"{host.dtype} {host.shape}".encode() + host.view(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def full_gradients(wrapper, context):
    """Put every trainable parameter's gradient together from all ranks' shards, if they are
    sharded.
    """
    names = [
        name for name, parameter in wrapper.module.named_parameters() if parameter.requires_grad
    ]
    if not isinstance(wrapper, FSDP):
        return {name: wrapper.module.get_parameter(name).grad for name in names}
    found = {entry.name: master.grad for entry, master in wrapper._replicated.masters}
    for param in wrapper.flat_params:
        for index, entry in enumerate(param.entries):
            shard = param.shards[index]
            mine = None
            if shard.grad is not None:
                mine = shard.grad.permute(entry.memory_order).reshape(-1).cpu()
            parts = collectives.gather_objects(mine, param.group)
            missing = [part is None for part in parts]
            assert all(missing) or not any(missing), entry.name
            found[entry.name] = None
            if not missing[0]:
                whole = torch.cat(parts).to(context.device)
                found[entry.name] = view_like(whole, shard.spread.like)
    return {name: found[name] for name in names}


def train_beside_reference(context, strategy, case, set_to_none, shard_size=None, micro=1):
    """Train two steps of so many micro-batches.

    Gradients, parameters and buffers are those of one process.
    """
    model = build(case, context.rank, context.device)  # rank 0's seed is the reference's
    mesh = {} if shard_size is None else {"mesh": hybrid_mesh(context.group, shard_size)}
    wrapper = (WITH_FSDP | ON_GPUS)[strategy](model, process_group=context.group, **mesh)
    reference = Reference(case, context.world_size, context.device)
    parameters = wrapper.full_parameters()
    assert_same_on_all_ranks([*parameters.values(), *model.buffers()], context)  # rank 0's values
    optimizer = torch.optim.SGD(
        [parameter for parameter in wrapper.parameters() if parameter.requires_grad], lr=0.1
    )
    sharded = strategy == "fsdp"
    exact = context.world_size <= 2 and not (sharded and case in ("odd-strides", "mixed-dtypes"))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(micro * step, micro * (step + 1)):
            with nullcontext() if number % micro == micro - 1 else wrapper.no_sync():
                CASES[case].loss(wrapper, context.rank, number, context.device).backward()
            reference.backward(number)
        wrapper.finish_gradient_synchronization()
        gradients = full_gradients(wrapper, context)
        for name, gradient in gradients.items():
            expected = reference.model.get_parameter(name).grad
            # zeros may stand for what nobody used
            if expected is None and (sharded or not set_to_none):
                assert gradient is None or not gradient.any(), name
                continue
            assert (gradient is None) == (expected is None), name
            if gradient is not None:
                assert gradient.shape == expected.shape and (
                    sharded or gradient.dtype == expected.dtype
                ), name
                # N roundings of 1/N·g and N − 1 additions in another order: a few ulp of the
                # largest summand.
                ulps = 0 if exact else 8 * context.world_size * torch.finfo(expected.dtype).eps
                torch.testing.assert_close(
                    gradient.to(expected.dtype), expected, rtol=ulps, atol=ulps, msg=name
                )
        assert_same_on_all_ranks([*gradients.values()], context)
        optimizer.step()
        reference.step()
        parameters = wrapper.full_parameters()
        if not exact:
            # the next step compares its own rounding alone
            reference.model.load_state_dict(parameters, strict=False)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, name  # frozen: no gradient
    assert_same_on_all_ranks([*parameters.values()], context)
    for name, expected in reference.model.named_parameters():
        assert not exact or torch.equal(parameters[name], expected), name
    wrapper.sync_buffers()
    assert_same_on_all_ranks([*model.buffers()], context)
    wrapper.close()


def every_row(context, check, rows):
    """`check(context, *row)` for all rows; on gloo each in a group of its own, so that none meets
    another's leftovers.

    On NCCL a group takes hundreds of MB of a GPU until the process ends.

    Raises:
        AssertionError: with each row that failed and its reason.
    """
    failures = []
    for row in rows:
        group = context.group
        if context.backend == "gloo":
            group = torch.distributed.new_group(timeout=timedelta(seconds=context.timeout_s))
        try:
            check(replace(context, group=group), *row)
        except Exception:
            failures.append(f"{row}: {traceback.format_exc()}")
    assert not failures, "\n".join(failures)


def rows_of(strategy, world_size, shard_size=None):
    """Every kind of model that the strategy takes, its gradients dropped between steps, or zeroed.

    Micro-batches.
    """
    for case in CASES if shard_size is None else ON_A_MESH_TOO:
        if strategy != "fsdp" or case != "unused-on-some":
            both = world_size == 2 and case in ("plain", "tied", "unused-on-some", "odd-strides")
            for set_to_none in (True, False) if both else (True,):
                yield strategy, case, set_to_none, shard_size, 3 if both else 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", WITH_FSDP)
def test_gradients_are_the_mean_over_ranks(strategy, world_size, backend):
    """Compare training with one process, for parameters and buffers of every kind.

    zero_grad(set_to_none=False) keeps bucket views, and autograd accumulates into them. In
    "unused-on-some" a rank uses a head in an earlier micro-batch only. Three ranks are covered by
    random models.
    """
    run(
        every_row,
        world_size,
        train_beside_reference,
        [*rows_of(strategy, world_size)],
        backend=backend,
    )


@pytest.mark.parametrize("backend, world_size, shard_size", MESHES)
@pytest.mark.parametrize("strategy", ON_A_MESH)
def test_gradients_are_the_mean_over_a_mesh(strategy, backend, world_size, shard_size):
    """The same in two levels: inside shard groups, between them, and inside again."""
    rows = [*rows_of(strategy, world_size, shard_size)]
    run(every_row, world_size, train_beside_reference, rows, backend=backend)


def run_recipe(context, recipe, registration):
    """The class, and the entry of the table, whose expression is the block's last line."""
    names = {"__name__": "late"}
    exec(recipe, names)
    with patch.dict(WITH_FSDP, late=names["LateDDP"]):
        every_row(context, train_beside_reference, rows_of("late", context.world_size))
    function, entry = registration.split("\n\n")
    names = vars(registry) | names
    exec(function, names)
    strategy = eval(entry.strip(), names)
    module = nn.Linear(2, 2, device=context.device)
    model, _ = strategy.build(module, context.group, torch.optim.SGD, {"lr": 0.1})
    assert type(model) is names["LateDDP"] and model.process_group is context.group


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_ddp_is_right_as_the_page_has_it(backend):
    """The recipe of CONTRIBUTING.md, on every kind of model."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(r"## Add a strategy.*?(?=\n## )", page, re.DOTALL)[0]
    recipe, registration = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    run(run_recipe, 2, dedent(recipe), dedent(registration), backend=backend)


@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ON_GPUS)
def test_gradients_are_the_mean_over_gpus(strategy, world_size):
    """Compare training with one process, for strategies that run on GPUs only."""
    run(
        every_row,
        world_size,
        train_beside_reference,
        [*rows_of(strategy, world_size)],
        backend="nccl",
    )
