"""What must hold of a fully sharded wrapper: one process's steps, with a share per rank."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.grade.hooks import Part
from distlab.grade.invariant import Broken, Invariant, is_near, largest_difference
from distlab.grade.models import LEARNING_RATE, Words, word_loss, words_of

Noted = list[dict[str, Any]]

HALF = {"float16": 0.02, "bfloat16": 0.1}  # relative error of gradients that are computed in it
# A layer, the next one that is gathered ahead, the buffer that it is gathered into, and those that
# belong to the root: FSDP2 holds these at the same time.
UNITS_HELD = 4


def invariants(part: Part) -> list[Invariant]:
    """Return what must hold of the part of kind `fsdp`."""
    found = [
        _invariant("training starts from rank 0's parameters", _starts, "ranks with unequal seeds"),
        _invariant("gradients are the mean over ranks", _mean, "parameters after one step of SGD"),
        _invariant(
            "the second step is also right",
            partial(_mean, step=1),
            "parameters after two steps of SGD",
        ),
        _invariant("all ranks gather the same parameters", _equal, "after two steps"),
        _invariant("each rank holds its share of the parameters", _shares, "before the first step"),
        _invariant("gradients have the shapes of the shards", _gradients, "after backward"),
        _invariant(
            "layers are freed after they were used",
            _frees,
            "bytes of parameters that are held in and after forward",
        ),
        _invariant("parameters are gathered layer by layer", _gathers, "collectives of a forward"),
        _invariant(
            "gradients are reduced once",
            _reduces,
            "bytes of the collectives after forward",
        ),
        Invariant(
            title="tied weights",
            experiment="train_fsdp",
            settings={"is_tied": True},
            judge=partial(_mean, step=1, is_tied=True),
            input="embedding and head share a weight, two steps",
        ),
        Invariant(
            title="frozen parameters stay, and the others are right",
            experiment="train_fsdp",
            settings={"is_frozen": True},
            judge=partial(_mean, step=1, is_frozen=True),
            input="a layer with requires_grad=False, two steps",
        ),
    ]
    for dtype in ("float16", "bfloat16"):
        settings = {"compute_dtype": dtype}
        found += [
            Invariant(
                title=f"compute_dtype={dtype}: layers compute in it",
                experiment="train_fsdp",
                settings=settings,
                ranks=(2,),
                judge=partial(_computes_in, dtype=dtype),
                input="outputs of the layers",
            ),
            Invariant(
                title=f"compute_dtype={dtype}: master weights and gradients are fp32",
                experiment="train_fsdp",
                settings=settings,
                ranks=(2,),
                judge=_masters,
                input="parameters() and their .grad",
            ),
            Invariant(
                title=f"compute_dtype={dtype}: two steps are right",
                experiment="train_fsdp",
                settings=settings,
                ranks=(2,),
                judge=partial(_mean, step=1, dtype=dtype),
                input="parameters after two steps of SGD",
            ),
        ]
    return found


def _invariant(title: str, judge: Any, given: str) -> Invariant:
    return Invariant(title=title, experiment="train_fsdp", judge=judge, input=given)


def _whole(noted: dict[str, Any], point: int) -> dict[str, Tensor]:
    """Return the parameters that a rank gathered.

    Args:
        point: number of steps before.
    """
    return {name: torch.tensor(values) for name, values in noted["full"][point].items()}


def _matching(names: list[str], name: str) -> str:
    """Return the name under which a parameter was gathered; a wrapper may prefix its own."""
    # Wrappers add prefixes such as `module.`, so the end of the name decides.
    for each in names:
        if each == name or each.endswith("." + name):
            return each
    raise Broken(f"a parameter {name}", f"{', '.join(sorted(names))}")


def _starts(ranks: Noted) -> None:
    """Raise Broken unless every rank gathers what rank 0 was built with."""
    expected = Words(0)
    for rank, noted in enumerate(ranks):
        seen = _whole(noted, 0)
        for name, parameter in expected.named_parameters():
            mine = seen[_matching(list(seen), name)]
            # Bit for bit: a broadcast or a gather rounds nothing.
            if is_near(mine, parameter.detach(), 0.0):
                continue
            what = largest_difference(mine, parameter.detach())
            for other in range(1, len(ranks)):
                if is_near(mine, dict(Words(other).named_parameters())[name].detach(), 0.0):
                    what = f"the value of rank {other}"
            raise Broken(f"{name} of rank 0, gathered on rank {rank}", what)


def _equal(ranks: Noted) -> None:
    """Raise Broken unless all ranks gather the same."""
    # Index 2 is after both steps, see `train_fsdp`.
    first = _whole(ranks[0], 2)
    for rank, noted in enumerate(ranks):
        for name, tensor in _whole(noted, 2).items():
            if not is_near(tensor, first[name], 0.0):
                raise Broken(
                    f"{name} of rank 0 on rank {rank}", largest_difference(tensor, first[name])
                )


def _mean(
    ranks: Noted, step: int = 0, is_tied: bool = False, is_frozen: bool = False, dtype: str = ""
) -> None:
    """Raise Broken unless a step of SGD moved the parameters by the mean of the gradients."""
    number = len(ranks)
    # Rank 0 stands for all ranks here. That they gather the same is an invariant of its own.
    before, after = _whole(ranks[0], step), _whole(ranks[0], step + 1)
    alone = []
    for rank in range(number):
        model = Words(0, is_tied=is_tied, is_frozen=is_frozen)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[_matching(list(before), name)])
        words, targets = words_of(rank, step)
        word_loss(model(words), targets).backward()
        alone.append({name: each.grad for name, each in model.named_parameters()})
    # The bound in fp32 is 1e-3: a difference of parameters has lost digits that the gradient has.
    relative = HALF.get(dtype, 1e-3)
    for name in alone[0]:
        given = [gradients[name] for gradients in alone]
        key = _matching(list(before), name)
        # SGD moves a parameter by lr · gradient, and sharded gradients are not compared directly:
        # this is what they were.
        moved = (before[key] - after[key]) / LEARNING_RATE
        # Only a frozen parameter has no gradient, on any rank.
        if given[0] is None:
            if moved.any():
                raise Broken(f"an unchanged {name}, which is frozen", "another value")
            continue
        mean = torch.stack(given).sum(0) / number
        if is_near(moved, mean, relative):
            continue
        what = largest_difference(moved, mean)
        # The frequent mistakes are tried by their known factors, and a rank's own gradient is tried
        # last.
        if is_near(moved, mean * number, relative):
            what = f"the sum over ranks, {number} times the mean"
        elif is_near(moved, mean / number, relative):
            what = f"the mean divided by {number}: averaged twice"
        elif not moved.any():
            what = "no change"
        for rank, gradient in enumerate(given):
            if is_near(moved, gradient, relative):
                what = f"the gradient of rank {rank}"
        raise Broken(
            f"a step by the mean of {number} ranks for {name}, step {step + 1}",
            what,
            is_named=not what.startswith("differs by"),
        )


def _bytes(is_sharded: bool) -> int:
    """Return the bytes of the parameters that are sharded, or of those that may be whole."""
    total = 0
    for name, parameter in Words(0).named_parameters():
        # The gain is a vector of 64 numbers, which wrappers may leave whole.
        if (name != "gain") == is_sharded:
            total += 4 * parameter.numel()
    return total


def _largest_layer() -> int:
    return max(4 * parameter.numel() for parameter in Words(0).parameters())


def _shares(ranks: Noted) -> None:
    """Raise Broken unless each rank holds 1/N of the weights."""
    number = len(ranks)
    whole = _bytes(is_sharded=True)
    for rank, noted in enumerate(ranks):
        held = noted["held_bytes"]
        # One layer more, for a buffer that gathers it.
        if held > 1.1 * whole / number + _bytes(is_sharded=False) + _largest_layer():
            raise Broken(
                f"about 1/{number} of {whole:,} bytes on each rank",
                f"{held:,} bytes on rank {rank}, {100 * held / whole:.0f} %",
            )


def _gradients(ranks: Noted) -> None:
    """Raise Broken unless each gradient has its parameter's shape, and together 1/N of all."""
    number = len(ranks)
    for rank, noted in enumerate(ranks):
        total = 0
        for shape, gradient, _, is_trained in noted["steps"][1]["gradients"]:
            if not is_trained or gradient is None:
                continue
            if gradient != shape:
                raise Broken(f"a gradient of shape {shape}, as its parameter", f"{gradient}")
            # Gradients are fp32, 4 bytes for each element.
            total += 4 * torch.Size(gradient).numel()
        if total == 0:
            raise Broken("gradients in parameters()", f"none on rank {rank}")
        # Parameters that are not sharded have whole gradients.
        most = 1.1 * _bytes(is_sharded=True) / number + _bytes(is_sharded=False)
        if total > most:
            raise Broken(
                f"about 1/{number} of the gradients on each rank", f"{total:,} bytes on rank {rank}"
            )


def _frees(ranks: Noted) -> None:
    """Raise Broken if a rank holds more than its share and a few layers."""
    number = len(ranks)
    share = 1.1 * _bytes(is_sharded=True) / number + _bytes(is_sharded=False)
    for rank, noted in enumerate(ranks):
        # The second step is judged, because lazy wrappers set up their buffers in the first.
        step = noted["steps"][1]
        most = share + UNITS_HELD * _largest_layer()
        if step["held_in_forward"] > most:
            raise Broken(
                f"a share and {UNITS_HELD} layers in forward, {most:,.0f} bytes",
                f"{step['held_in_forward']:,} bytes on rank {rank}",
            )
        # The root, here the whole model's last layer, may stay for backward.
        most = share + 2 * _largest_layer()
        if step["held_after_forward"] > most:
            raise Broken(
                f"a share and at most two layers after forward, {most:,.0f} bytes",
                f"{step['held_after_forward']:,} bytes on rank {rank}",
            )


def _gathers(ranks: Noted) -> None:
    """Raise Broken unless forward gathers the weights in several calls, about once."""
    whole = _bytes(is_sharded=True)
    for rank, noted in enumerate(ranks):
        step = noted["steps"][1]
        calls = step["calls"][: step["calls_of_forward"]]
        # A broadcast from the owner of a layer is another way to gather it.
        gathered = sum(num_bytes for op, num_bytes in calls if op in ("all_gather", "broadcast"))
        # One call for all layers together would hold the whole model at once.
        if len(calls) < 2:
            raise Broken("an all-gather per layer in forward", f"{len(calls)} on rank {rank}")
        # The bounds leave room for padding and for a layer that stays whole.
        if not 0.8 * whole <= gathered <= 1.3 * whole:
            raise Broken(
                f"{whole:,} bytes gathered in forward, each weight once",
                f"{gathered:,} bytes in {len(calls)} collectives on rank {rank}",
            )


def _reduces(ranks: Noted) -> None:
    """Raise Broken unless the gradients of the weights are reduced about once."""
    whole = _bytes(is_sharded=True)
    for rank, noted in enumerate(ranks):
        step = noted["steps"][1]
        reduced = 0
        for op, num_bytes in step["calls"]:
            # An all-reduce with a local cut is slower than a reduce-scatter, but it reduces each
            # gradient once.
            if op in ("reduce_scatter", "all_reduce", "reduce", "all_to_all"):
                reduced += num_bytes
        # Shards may be padded, and small parameters may stay whole.
        if not 0.8 * whole <= reduced <= 1.3 * whole:
            raise Broken(
                f"{whole:,} bytes reduced, each gradient once", f"{reduced:,} bytes on rank {rank}"
            )


def _computes_in(ranks: Noted, dtype: str) -> None:
    """Raise Broken unless the layers' outputs have the dtype of computation."""
    seen = ranks[0]["steps"][1]["dtypes"]
    # A hook noted one dtype for each layer of a forward.
    if not seen or any(each != f"torch.{dtype}" for each in seen):
        raise Broken(f"{dtype} from every layer", ", ".join(sorted(set(seen))) or "no layer ran")


def _masters(ranks: Noted) -> None:
    """Raise Broken unless parameters and gradients are fp32."""
    for rank, noted in enumerate(ranks):
        for _, dtype, _ in noted["parameters"]:
            if dtype != "torch.float32":
                raise Broken(f"fp32 parameters on rank {rank}", dtype)
        for _, _, dtype, _ in noted["steps"][1]["gradients"]:
            # An empty dtype stands for a parameter without a gradient.
            if dtype not in ("", "torch.float32"):
                raise Broken(f"fp32 gradients on rank {rank}", dtype)
