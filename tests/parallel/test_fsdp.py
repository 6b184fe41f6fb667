"""FSDP against the micro-batch reference: gradients, steps, precision, accumulation, clipping.

`gather_full_params()` is what is compared: never the pieces, whose boundaries are nobody's business.
"""

import copy
import gc
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.comm import RankContext, collectives
from distlab.comm.subgroups import hybrid_mesh
from distlab.measure.collectives import CollectiveRecorder
from distlab.parallel.fsdp import FSDP
from distlab.parallel.fsdp.unit import State
from tests.parallel.cases import CASES, Reference, build
from tests.parallel.test_contract import BACKENDS, MESHES, assert_same_on_all_ranks, run

SAME_UNITS = [case for case in CASES if case != "unused-on-some"]


def full_gradients(fsdp: FSDP, context: RankContext) -> dict[str, Tensor | None]:
    """Every trainable parameter's mean gradient in full, put together from all ranks' pieces."""
    found: dict[str, Tensor | None] = {}
    for param in fsdp.flat_params:
        for index, entry in enumerate(param.entries):
            gradient = param.shards[index].grad
            mine = None if gradient is None else entry.flatten(gradient).cpu()
            parts = collectives.gather_objects(mine, param.group)
            missing = [part is None for part in parts]
            assert all(missing) or not any(missing), entry.name
            found[entry.name] = None if missing[0] else entry.unflatten(torch.cat(parts)).to(context.device)
    for entry, master in zip(fsdp._replicated.entries, fsdp._replicated.masters, strict=True):
        found[entry.name] = master.grad
    return {name: found[name] for name, _ in named_trainable(fsdp)}


def named_trainable(fsdp: FSDP) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in fsdp.module.named_parameters() if p.requires_grad]


def assert_shards_are_well_formed(fsdp: FSDP) -> None:
    for name, piece in fsdp.named_parameters():
        assert piece.dtype in (torch.float32, torch.float64) and piece.is_leaf, name
        if piece.grad is not None:
            assert piece.requires_grad and piece.grad.shape == piece.shape and piece.grad.dtype == piece.dtype


def train_beside_reference(
    context: RankContext, case: str, steps: int, set_to_none: bool, shard_size: int | None = None
) -> None:
    model = build(case, context.rank, context.device)  # rank 0's seed is the reference's
    mesh = None if shard_size is None else hybrid_mesh(context.group, shard_size)
    fsdp = FSDP(model, mesh=mesh, process_group=context.group)
    reference = Reference(case, context.world_size, context.device)
    optimizer = torch.optim.SGD([p for p in fsdp.parameters() if p.requires_grad], lr=0.1)
    names = [name for name, p in reference.replicas[0].named_parameters() if p.requires_grad]
    exact = context.world_size <= 2 and case not in ("odd-strides", "mixed-dtypes")
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        CASES[case].loss(fsdp, context.rank, step, context.device).backward()
        fsdp.finish_gradient_synchronization()
        assert_shards_are_well_formed(fsdp)
        reference.backward(step)
        expected = dict(zip(names, reference.average(), strict=True))
        gradients = full_gradients(fsdp, context)
        assert list(gradients) == names
        for name, gradient in gradients.items():
            reference_gradient = expected[name]
            if gradient is None or reference_gradient is None:
                assert reference_gradient is None and (gradient is None or not gradient.any()), name
            elif exact:
                assert torch.equal(gradient, reference_gradient), (step, name)
            else:
                # Sums in another order (a ring; other strides): a few ulp of the coarsest type involved.
                ulps = 8 * context.world_size * torch.finfo(reference_gradient.dtype).eps
                torch.testing.assert_close(
                    gradient.to(reference_gradient.dtype), reference_gradient, rtol=ulps, atol=ulps
                )
        optimizer.step()
        reference.step()
        full = fsdp.gather_full_params()
        assert_same_on_all_ranks(list(full.values()), context)
        for name, theirs in reference.replicas[0].named_parameters():
            assert full[name].shape == theirs.shape
            if exact:
                assert torch.equal(full[name], theirs), (step, name)
        if not exact:
            fsdp.load_full_params(dict(reference.replicas[0].named_parameters()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", SAME_UNITS)
def test_sgd_steps_equal_the_micro_batch_reference(case, world_size, backend):
    """RELIABILITY 28, 29, 30 and the contract's 1, 2, 4, 5, 7, 17: bit for bit at two ranks, None where unused."""
    run(train_beside_reference, world_size, case, 3, True, backend=backend)


@pytest.mark.parametrize(("backend", "world_size", "shard_size"), MESHES)
@pytest.mark.parametrize("case", SAME_UNITS)
def test_sgd_steps_in_hybrid_sharding_equal_the_micro_batch_reference(case, backend, world_size, shard_size):
    """Sharded inside a group and replicated between groups; None where unused."""
    run(train_beside_reference, world_size, case, 3, case != "tied", shard_size, backend=backend)


class OwnLinear(nn.Module):
    """As people write it in a course: a weight, a product, no cast."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class OwnEmbedding(nn.Module):
    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class OwnRMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight).to(x.dtype)


class OwnBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = OwnRMSNorm(width), OwnLinear(width, 13), OwnLinear(13, width)
        self.bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.bias


class OwnModel(nn.Module):
    """Seven columns and eleven rows: nothing divides by two, three or four."""

    def __init__(self, tied: bool = False, frozen: tuple[str, ...] = ()):
        super().__init__()
        self.embedding = OwnEmbedding(11, 7)
        self.blocks = nn.ModuleList(OwnBlock(7) for _ in range(3))
        self.norm = OwnRMSNorm(7)
        self.head = OwnLinear(7, 11)
        if tied:
            self.head.weight = self.embedding.weight
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def own_loss(model: nn.Module, rank: int, step: int, device: torch.device) -> Tensor:
    tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1000 * rank + step)).to(
        device
    )
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def own_model(seed: int, device: torch.device, **options) -> OwnModel:
    torch.manual_seed(seed)
    return OwnModel(**options).to(device)


def cast_matrices(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module with what FSDP casts in `dtype`: not the vectors of modules that hold no matrix."""
    if dtype is not None:
        for each in module.modules():
            if any(p.ndim >= 2 for p in each.parameters()):
                for parameter in each._parameters.values():
                    if parameter is not None:
                        parameter.data = parameter.data.to(dtype)
    return module


class OneProcess:
    """The micro-batches of all ranks on copies of one fp32 model, averaged in rank order; any optimizer.

    Args:
        make: builds the model, each time with the same values.
        compute_dtype: the copies' matrices, and the vectors of modules that hold matrices, have this dtype; gradients
            are averaged in fp32.
    """

    def __init__(self, make, world_size: int, optimizer_cls, compute_dtype=None, **options):
        self.model = make()
        self.replicas = [cast_matrices(make(), compute_dtype) for _ in range(world_size)]
        self.optimizer = optimizer_cls([p for p in self.model.parameters() if p.requires_grad], **options)

    def backward(self, loss) -> float:
        """`loss(model, rank)` on every replica; afterwards the model has the mean gradients."""
        for replica in self.replicas:
            replica.load_state_dict(self.model.state_dict())
        losses = [loss(replica, rank) for rank, replica in enumerate(self.replicas)]
        for value in losses:
            value.backward()
        for mine, *same in zip(
            self.model.parameters(), *(r.parameters() for r in self.replicas), strict=True
        ):
            if mine.requires_grad and any(p.grad is not None for p in same):
                total = torch.zeros_like(mine)
                for parameter in same:
                    total += 0 if parameter.grad is None else parameter.grad.float()
                mine.grad = total / len(same)
        return sum(value.item() for value in losses) / len(losses)

    def zero_grad(self) -> None:
        for model in [self.model, *self.replicas]:
            model.zero_grad()


def own_classes(
    context: RankContext, dtype: torch.dtype | None, options: dict, steps: int, shard_size: int | None = None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = None if shard_size is None else hybrid_mesh(context.group, shard_size)
        model = own_model(context.rank, context.device, **options)
        fsdp = FSDP(model, dtype, mesh=mesh, process_group=context.group)
        trainable = [p for p in fsdp.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        one = OneProcess(
            lambda: own_model(0, context.device, **options),
            context.world_size,
            torch.optim.SGD,
            dtype,
            lr=0.1,
        )
        for step in range(steps):
            optimizer.zero_grad()
            own_loss(fsdp, context.rank, step, context.device).backward()
            fsdp.finish_gradient_synchronization()
            assert_shards_are_well_formed(fsdp)
            assert all(p.grad is not None for p in trainable)
            assert all(p.dtype == torch.float32 for p in fsdp.parameters())
            optimizer.step()
            one.zero_grad()
            one.backward(lambda model, rank, step=step: own_loss(model, rank, step, context.device))
            one.optimizer.step()
        full = fsdp.gather_full_params()
    expected = dict(one.model.named_parameters(remove_duplicate=False))
    assert list(full) == list(expected)
    for name, parameter in expected.items():
        assert full[name].shape == parameter.shape and full[name].dtype == torch.float32
        if not parameter.requires_grad:
            assert torch.equal(full[name], parameter)  # frozen: rank 0's, not moved
        elif context.world_size == 2:  # in fp16 too: the same products in fp16, the same sums in fp32
            assert torch.equal(full[name], parameter), name
        else:
            torch.testing.assert_close(full[name], parameter, rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(list(full.values()), context)


OPTIONS = {
    "plain": {},
    "tied": {"tied": True},
    "frozen-unit": {"frozen": ("blocks.1.up.weight", "blocks.1.down.weight", "blocks.1.bias")},
    "frozen-part": {"frozen": ("blocks.0.up.weight", "blocks.2.norm.weight", "embedding.weight")},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_own_classes_train_without_a_warning(dtype, options, backend):
    """RELIABILITY 28, 30, 31: fp32 masters and gradients, whatever the type of computation."""
    run(own_classes, 2, dtype, OPTIONS[options], 10, backend=backend)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_that_the_world_size_does_not_divide(world_size):
    """RELIABILITY 29: 7, 11 and 13 rows over 3 ranks; names, shapes and values come back unpadded."""
    run(own_classes, world_size, None, {}, 3)


class FewRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def fewer_elements_than_ranks(context: RankContext) -> list[int]:
    torch.manual_seed(context.rank)
    fsdp = FSDP(FewRows().to(context.device), process_group=context.group)
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.1, foreach=True)
    before = fsdp.gather_full_params()
    fsdp(torch.ones(2, 2, device=context.device)).square().sum().backward()
    fsdp.finish_gradient_synchronization()
    assert_shards_are_well_formed(fsdp)
    assert fsdp.clip_grad_norm_(1.0).isfinite()
    optimizer.step()
    after = fsdp.gather_full_params()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    return [piece.numel() for piece in fsdp.parameters()]


def test_a_rank_may_own_nothing_of_a_parameter():
    """RELIABILITY 29: two elements on four ranks; empty pieces are stepped, clipped and gathered like others."""
    sizes = run(fewer_elements_than_ranks, 4)
    assert sorted(rank_sizes[0] for rank_sizes in sizes) == [0, 0, 1, 1]


class Buffers(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("own", torch.full((3,), float(rank)))
        self.register_buffer("counts", torch.tensor([rank]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def different_buffers(context: RankContext, deferred: bool) -> None:
    def write(module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (*module.layer.parameters(), *module.norm.parameters(), *module.buffers()):
                tensor.fill_(context.rank)

    if deferred:
        with torch.device("meta"):
            module = Buffers(context.rank)
        fsdp = FSDP(module, process_group=context.group, init_fn=write, device=context.device)
    else:
        module = Buffers(context.rank).to(context.device)
        write(module)
        fsdp = FSDP(module, process_group=context.group)
    for tensor in (*fsdp.buffers(), fsdp.module.norm.weight, fsdp.module.norm.bias, fsdp.module.layer.bias):
        assert not tensor.any(), "rank 0's are zero"
    assert len(list(fsdp.buffers())) == 5


@pytest.mark.parametrize("deferred", [False, True], ids=["", "from-meta"])
def test_construction_takes_the_buffers_of_rank_0(deferred):
    """And, of a module built on meta, the replicated parameters, which ranks need not have drawn alike."""
    run(different_buffers, 2, deferred)


class Heads(nn.Module):
    """A trunk and two heads that one batch uses and another does not."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, heads: str) -> Tensor:
        x = torch.relu(self.trunk(x))
        return sum(getattr(self, head)(x) for head in heads.split())


def used_only_under_no_sync(context: RankContext) -> None:
    torch.manual_seed(0)
    model = Heads().to(context.device)
    twin = copy.deepcopy(model)
    fsdp = FSDP(model, process_group=context.group)
    x = torch.full((2, 6), 1.0 + context.rank, device=context.device)
    with fsdp.no_sync():
        fsdp(x, "left").sum().backward()
    fsdp.relearn_order()
    fsdp(x, "right").sum().backward()
    fsdp.finish_gradient_synchronization()
    for rank in range(context.world_size):
        x = torch.full((2, 6), 1.0 + rank, device=context.device)
        (twin(x, "left").sum() / context.world_size).backward()
        (twin(x, "right").sum() / context.world_size).backward()
    for name, gradient in full_gradients(fsdp, context).items():
        torch.testing.assert_close(gradient, twin.get_parameter(name).grad)


def test_a_unit_that_only_an_earlier_micro_batch_used_is_sent_too():
    """The contract's 8."""
    run(used_only_under_no_sync, 2)


def several_passes(context: RankContext, how: str, dtype: torch.dtype | None) -> None:
    fsdp = FSDP(own_model(context.rank, context.device), dtype, process_group=context.group)
    one = OneProcess(lambda: own_model(0, context.device), context.world_size, torch.optim.SGD, dtype, lr=0.1)
    for step in range(0, 4, 2):  # the second time the order is known and units are fetched ahead
        fsdp.zero_grad()
        one.zero_grad()
        losses = [own_loss(fsdp, context.rank, step + i, context.device) for i in range(2)]
        if how == "one-backward":
            sum(losses).backward()
        elif how == "two-backwards":
            for loss in losses:
                loss.backward()
        else:
            sum(losses).backward(retain_graph=True)
            fsdp.zero_grad()
            sum(losses).backward()
        fsdp.finish_gradient_synchronization()
        one.backward(
            lambda m, r, s=step: own_loss(m, r, s, context.device) + own_loss(m, r, s + 1, context.device)
        )
        gradients = full_gradients(fsdp, context)
        for name, parameter in one.model.named_parameters():
            # Two means added, or one sum averaged: a rounding or two apart.
            exact = {"rtol": 1e-5, "atol": 1e-7} if dtype is None else {"rtol": 0.01, "atol": 2e-3}
            torch.testing.assert_close(gradients[name], parameter.grad, **exact)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["one-backward", "two-backwards", "retained-graph"])
def test_several_forwards_before_backward(how, dtype):
    """The contract's 9."""
    run(several_passes, 2, how, dtype)


class Recurrent(nn.Module):
    """One block used three times, twice in a row and once after another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        a, b = self.layers
        x = torch.tanh(a(torch.tanh(a(x))))
        y = torch.tanh(b(x))
        return {"out": a(y), "aux": [y, 3], "mask": y > 0}


def recurrent(context: RankContext) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        out = model(torch.full((2, 6), 0.1 + rank, device=context.device))
        return out["out"].square().sum() + out["aux"][0].sum()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Recurrent().to(context.device)

    fsdp, one = FSDP(make(), process_group=context.group), OneProcess(make, 2, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        fsdp.zero_grad()
        one.zero_grad()
        with CollectiveRecorder() as recorder:
            loss(fsdp, context.rank).backward()
            fsdp.finish_gradient_synchronization()
        assert recorder.by_op()["reduce_scatter"][0] == 2  # one per unit, not one per use
        one.backward(loss)
        gradients = full_gradients(fsdp, context)
        for name, parameter in one.model.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), name


def test_a_unit_that_runs_several_times_and_nested_outputs():
    """The contract's 9 and 19: its gradient leaves once, complete."""
    run(recurrent, 2)


def evaluate(context: RankContext) -> None:
    fsdp = FSDP(own_model(context.rank, context.device), process_group=context.group)
    twin = own_model(0, context.device)
    tokens = torch.arange(10, device=context.device).view(2, 5)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fsdp.eval()(tokens), twin(tokens))
    with torch.inference_mode():
        assert torch.equal(fsdp(tokens), twin(tokens))
    assert not any(unit.state is not State.SHARDED for unit in fsdp._units)
    with CollectiveRecorder() as recorder:
        fsdp.finish_gradient_synchronization()
        fsdp.finish_gradient_synchronization()
    assert recorder.count == 0
    assert torch.equal(fsdp.train()(tokens), twin(tokens))


def test_evaluation_gathers_and_frees_and_needs_no_finish():
    """The contract's 19."""
    run(evaluate, 2)


class Part(nn.Module):
    """Three layers, of which rank 1 uses one, the other ranks two, and nobody the last."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return torch.tanh(self.sometimes(x)) if both else x


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        for part in self.parts:
            x = part(x, both)
        return x


def partly_used(context: RankContext) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return PartlyUsed().to(context.device)

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(torch.full((2, 6), 0.1 + rank, device=context.device), rank != 1).square().sum()

    fsdp, one = FSDP(make(), process_group=context.group), OneProcess(make, 2, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        fsdp.zero_grad()
        one.zero_grad()
        # Memory that a forgotten zero would leave in the flat gradient.
        garbage = [torch.full((n,), float("nan")) for n in range(100, 160) for _ in range(3)]
        del garbage
        loss(fsdp, context.rank).backward()
        fsdp.finish_gradient_synchronization()
        one.backward(loss)
        gradients = full_gradients(fsdp, context)
        for name, parameter in one.model.named_parameters():
            if "never" not in name:
                assert torch.equal(gradients[name], parameter.grad), name
            elif name.endswith("weight"):
                assert gradients[name] is not None and not gradients[name].any(), name
            else:
                assert gradients[name] is None


def test_parameters_that_some_ranks_or_nobody_use_inside_a_unit():
    """The contract's 6 and 7 within a unit: averaged with zeros; unused by all is zero (documented), biases None."""
    run(partly_used, 2)


class Standard(nn.Module):
    """Torch's own layers on a floating-point input, some of which refuse operands of two types."""

    def __init__(self):
        super().__init__()
        self.first, self.batch_norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.conv, self.head = nn.LayerNorm(8), nn.Conv1d(8, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(self.first(x))[:, None].expand(-1, 5, -1)
        x = x.float() + self.attention(x, x, key_padding_mask=None, value=x, need_weights=False)[0]
        return self.head(self.conv(self.norm(x).transpose(1, 2)).mean(-1))


def standard_modules(context: RankContext) -> None:
    torch.manual_seed(context.rank)
    model = Standard().to(context.device)
    twin = copy.deepcopy(model)
    fsdp = FSDP(model, torch.bfloat16, process_group=context.group)
    twin.load_state_dict(fsdp.gather_full_params(), strict=False)
    x = torch.randn(16, 6, device=context.device)
    out = fsdp(x)
    assert out.dtype == torch.bfloat16 and fsdp.module.batch_norm.running_mean.dtype == torch.float32
    # Five layers, each off by a few 2^-9 of values around one.
    torch.testing.assert_close(out.float(), twin(x), rtol=0.05, atol=0.05)
    out.float().square().sum().backward()
    fsdp.finish_gradient_synchronization()
    for name, parameter in fsdp.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_modules_in_bf16(backend):
    """RELIABILITY 31: inputs are cast for the modules that own parameters; BatchNorm stays in fp32."""
    run(standard_modules, 2, backend=backend)


def matrices_in_memory() -> tuple[int, int]:
    """How many tensors of the shape of `forgotten`'s weights there are, and how many of them hold memory."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and not thing.is_meta]
    matrices = [tensor for tensor in tensors if tensor.shape in ((37, 41), (41, 37))]
    return len(matrices), sum(tensor.untyped_storage().nbytes() > 0 for tensor in matrices)


def forgotten(context: RankContext) -> None:
    model = nn.Sequential(nn.Linear(37, 41), nn.ReLU(), nn.Linear(41, 37)).to(context.device)
    fsdp = FSDP(model, process_group=context.group)
    for _ in range(2):
        gc.collect()
        deadline = time.monotonic() + 10
        while matrices_in_memory()[1] and time.monotonic() < deadline:
            pass  # `wait()` returns before gloo's thread drops what it sent: some 10 ms on a busy machine
        there, held = matrices_in_memory()
        assert there > 0 and held == 0
        fsdp(torch.ones(2, 37, device=context.device)).sum().backward()
        fsdp.finish_gradient_synchronization()
    held = sum(param.master.numel() for param in fsdp.flat_params)
    assert context.world_size == 2 and held == 21 * 37 + 19 * 41  # half of 41 and of 37 rows, rounded up


def test_full_parameters_are_let_go():
    """RELIABILITY 33: nothing keeps a full matrix, and a rank holds 1/N."""
    run(forgotten, 2)
