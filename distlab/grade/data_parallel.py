"""What must hold of a data-parallel wrapper, and the judgement of what the ranks noted."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.grade.hooks import Part
from distlab.grade.invariant import Broken, Invariant, is_near, largest_difference
from distlab.grade.models import (
    FROZEN,
    OTHER_ORDER,
    PLAIN,
    TIED,
    UNUSED,
    UNUSED_ON_ONE,
    Branches,
    batch_of,
    loss_of,
)

Noted = list[dict[str, Any]]

# MiB per bucket: each tensor alone, several buckets, one bucket.
BUCKET_SIZES = (0.0001, 0.0012, 1.0)
WIDE = 2048  # width whose layers have 16 MiB, so that buckets of 25 MiB are several
WHOLE_STEP = "two steps of a model of four layers"


def invariants(part: Part) -> list[Invariant]:
    """Return what must hold of a part of kind `ddp`."""
    # The middle size gives several buckets, so both full ones and a last one with room occur.
    size = BUCKET_SIZES[1] if part.before else None
    plain = {"form": PLAIN, "bucket_size_mb": size}
    found = [
        Invariant(
            title="every rank starts from rank 0's parameters",
            experiment="train_wrapped",
            settings=plain,
            judge=partial(_starts_equal, buffers=False),
            input="ranks with unequal seeds",
        ),
        Invariant(
            title="every rank starts from rank 0's buffers",
            experiment="train_wrapped",
            settings=plain,
            judge=partial(_starts_equal, buffers=True),
            input="ranks with unequal seeds, a buffer of 3 numbers",
            is_beyond=True,
        ),
        Invariant(
            title="gradients are the mean over ranks",
            experiment="train_wrapped",
            settings=plain,
            judge=partial(_mean, steps=(0,), form=PLAIN),
            input="first step",
        ),
        Invariant(
            title="the second step is also right",
            experiment="train_wrapped",
            settings=plain,
            judge=partial(_mean, steps=(1,), form=PLAIN),
            input="second step, after zero_grad(set_to_none=True)",
        ),
        Invariant(
            title="ranks stay equal",
            experiment="train_wrapped",
            settings=plain,
            judge=_stays_equal,
            input="parameters after two steps of SGD",
        ),
        Invariant(
            title="each gradient is sent once",
            experiment="train_wrapped",
            settings=plain,
            judge=partial(_bytes_of_step, form=PLAIN),
            input="bytes of the collectives of the second step",
        ),
        Invariant(
            title="all ranks send the same collectives in the same order",
            experiment="train_wrapped",
            settings=plain,
            judge=_same_calls,
            input="collectives of two steps",
        ),
        Invariant(
            title="zero_grad(set_to_none=False) works",
            experiment="train_wrapped",
            settings={**plain, "sets_to_none": False},
            judge=partial(_mean, steps=(0, 1), form=PLAIN),
            input="two steps, gradients zeroed in place",
        ),
        Invariant(
            title="batches of unequal size work",
            experiment="train_wrapped",
            settings={**plain, "unequal_batches": True},
            judge=partial(_mean, steps=(0, 1), form=PLAIN, unequal=True),
            input="rank r has 4 + r examples",
        ),
        Invariant(
            title="tied weights are averaged once",
            experiment="train_wrapped",
            settings={**plain, "form": TIED},
            judge=partial(_mean, steps=(0, 1), form=TIED),
            input="two layers with one weight",
        ),
        Invariant(
            title="frozen parameters stay, and the others are right",
            experiment="train_wrapped",
            settings={**plain, "form": FROZEN},
            judge=partial(_mean, steps=(0, 1), form=FROZEN),
            input="a weight and a bias with requires_grad=False",
        ),
        Invariant(
            title="gradients accumulate over micro-batches",
            experiment="train_wrapped",
            settings={**plain, "backwards": 2},
            judge=partial(_mean, steps=(0, 1), form=PLAIN, backwards=2),
            input="two backwards per step, the hook after each",
            is_beyond=True,
            may_refuse=True,
        ),
        Invariant(
            title="a layer that no rank uses does no harm",
            experiment="train_wrapped",
            settings={**plain, "form": UNUSED},
            judge=partial(_mean, steps=(0, 1), form=UNUSED),
            input="a layer without a gradient",
            is_beyond=True,
            may_refuse=True,
        ),
        Invariant(
            title="a layer that one rank does not use does no harm",
            experiment="train_wrapped",
            settings={**plain, "form": UNUSED_ON_ONE},
            judge=partial(_mean, steps=(0, 1), form=UNUSED_ON_ONE),
            input="the last rank skips a layer",
            is_beyond=True,
            may_refuse=True,
        ),
        Invariant(
            title="the order of gradients does not matter",
            experiment="train_wrapped",
            settings={**plain, "form": OTHER_ORDER},
            judge=partial(_mean, steps=(0, 1), form=OTHER_ORDER),
            input="the last rank uses two layers in the other order",
            is_beyond=True,
            may_refuse=True,
        ),
        Invariant(
            title="communication begins before backward ends",
            experiment="train_wrapped",
            settings={
                "form": PLAIN,
                # Buckets of 8 MiB are smaller than a layer of 16 MiB, so the first can go long
                # before the end.
                "bucket_size_mb": 8.0 if part.before else None,
                "width": WIDE,
            },
            ranks=(2,),
            judge=_overlaps,
            input=f"layers of {WIDE} × {WIDE}, two steps",
        ),
        Invariant(
            title="it works in a group of some of the ranks",
            experiment="train_wrapped",
            settings={**plain, "in_subgroup": True},
            # A group of two that leaves one rank out needs three ranks.
            ranks=(3,),
            judge=partial(_mean, steps=(0, 1), form=PLAIN, first_rank=1),
            input="ranks 1 and 2 of 3",
            is_beyond=True,
        ),
        Invariant(
            title="50 steps leave nothing behind",
            experiment="train_long",
            settings={"bucket_size_mb": size},
            # A leak shows on any number of ranks, and 50 steps of two are the quickest.
            ranks=(2,),
            judge=_no_leak,
            input="tensors that are alive after steps 10 to 50",
        ),
    ]
    # Only this part's handout fixes the number of messages. Other wrappers may join gradients.
    if part.name == "ddp-individual":
        found.append(
            Invariant(
                title="one message per parameter",
                experiment="train_wrapped",
                settings=plain,
                judge=_message_per_parameter,
                input="collectives of the second step",
            )
        )
    if part.before:
        # Each size has a row about the number of messages and one about values: either can break
        # alone.
        for size_mb in BUCKET_SIZES:
            settings = {**plain, "bucket_size_mb": size_mb}
            found.append(
                Invariant(
                    title=f"buckets of {size_mb} MiB: as many messages as that gives",
                    experiment="train_wrapped",
                    settings=settings,
                    ranks=(2,),
                    judge=partial(_messages, size_mb=size_mb),
                    input="collectives of the second step",
                )
            )
            found.append(
                Invariant(
                    title=f"buckets of {size_mb} MiB: gradients are the mean over ranks",
                    experiment="train_wrapped",
                    settings=settings,
                    ranks=(2,),
                    judge=partial(_mean, steps=(0, 1), form=PLAIN),
                    input="two steps",
                )
            )
    return found


def _starts_equal(ranks: Noted, buffers: bool) -> None:
    """Raise Broken unless every rank starts from what rank 0 was built with."""
    # Each rank was built with its number as the seed, so rank 0's values can be made here again.
    built = Branches(PLAIN, seed=0)
    expected = dict(built.named_buffers() if buffers else built.named_parameters())
    for rank, noted in enumerate(ranks):
        for name, tensor in expected.items():
            seen = noted["initial"].get(name)
            # The tolerance is zero, because a broadcast copies bits.
            if seen is None or not is_near(seen, tensor.detach(), 0.0):
                own = dict(Branches(PLAIN, seed=rank).state_dict())[name]
                what = "another value"
                if seen is None:
                    what = "no such tensor"
                elif is_near(seen, own, 0.0):
                    # A rank's own initial value means that nothing was broadcast.
                    what = f"rank {rank}'s own value"
                raise Broken(f"{name} of rank 0 on rank {rank}", what)


def _expected_gradients(
    ranks: Noted, step: int, form: str, unequal: bool, backwards: int, first_rank: int
) -> list[dict[str, Tensor | None]]:
    """Return the gradients of each rank by itself, computed here from the parameters it had."""
    found = []
    for rank in range(len(ranks)):
        # Places are positions among all ranks, because batches and seeds were drawn by these.
        place = first_rank + rank
        last = first_rank + len(ranks) - 1
        # The seed does not matter: the next statement overwrites every parameter.
        model = Branches(form, seed=0, is_last=place == last)
        # From the parameters that the rank really had, so that a mistake in the first step is not
        # reported again in the second.
        model.load_state_dict(_with_tied(model, ranks[rank]["steps"][step]["before"]))
        for number in range(backwards):
            # Rank r has 4 + r examples, so averaging by examples gives other gradients than
            # averaging by ranks.
            examples = 4 + place if unequal else 4
            inputs, targets = batch_of(place, step * backwards + number, examples)
            loss_of(model(inputs), targets).backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    return found


def _with_tied(model: Branches, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with the second name of a tied weight, which a copy by name leaves out."""
    state = dict(values)
    for name in model.state_dict():
        if name not in state:
            state[name] = values["left.weight"]
    return state


def _mean(
    ranks: Noted,
    steps: tuple[int, ...],
    form: str,
    unequal: bool = False,
    backwards: int = 1,
    first_rank: int = 0,
) -> None:
    """Raise Broken unless each gradient is the mean over ranks in these steps."""
    # With a subgroup, rank 0 does not train.
    ranks = [noted for noted in ranks if not noted.get("is_left_out")]
    number = len(ranks)
    for step in steps:
        alone = _expected_gradients(ranks, step, form, unequal, backwards, first_rank)
        before = None
        if step > 0:
            # A gradient of the step before may have been left in place, which `_described` can
            # name.
            before = _expected_gradients(ranks, step - 1, form, unequal, backwards, first_rank)
        for name in alone[0]:
            mean = _mean_of([gradients[name] for gradients in alone], number)
            earlier = None
            if before is not None:
                earlier = _mean_of([gradients[name] for gradients in before], number)
            for rank in range(number):
                seen = ranks[rank]["steps"][step]["gradients"].get(name)
                if _agrees(seen, mean):
                    continue
                what = _described(seen, mean, [each[name] for each in alone], rank, earlier)
                where = f"{name} on rank {first_rank + rank} in step {step + 1}"
                # A text that begins so is a number without a known cause. Later rows must not be
                # folded into it.
                is_named = not what.startswith("differs by")
                raise Broken(f"the mean of {number} ranks for {where}", what, is_named=is_named)
            # This comes after the last step, because `final` holds the parameters at the
            # experiment's end.
            if form == FROZEN and step == steps[-1] and alone[0][name] is None:
                _is_unchanged(ranks, name)


def _is_unchanged(ranks: Noted, name: str) -> None:
    """Raise Broken if a frozen parameter changed."""
    for rank, noted in enumerate(ranks):
        if not is_near(noted["final"][name], noted["initial"][name], 0.0):
            raise Broken(f"an unchanged {name}, which is frozen, on rank {rank}", "another value")


def _mean_of(gradients: list[Tensor | None], number: int) -> Tensor | None:
    """Return the mean over ranks, in which a rank without a gradient counts as zero."""
    # A wrapper sends zeros for a parameter that this rank's forward did not use.
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    return torch.stack(given).sum(0) / number


def _agrees(seen: Tensor | None, mean: Tensor | None) -> bool:
    """Return whether a gradient is right; of a parameter that no rank uses, zero is also right."""
    if mean is None:
        return seen is None or not seen.any()
    # The parent has no GPU context, and expected values are on the CPU.
    return seen is not None and is_near(seen.cpu(), mean)


def _described(
    seen: Tensor | None,
    mean: Tensor | None,
    alone: list[Tensor | None],
    rank: int,
    earlier: Tensor | None,
) -> str:
    """Return what a wrong gradient is, if it is a known mistake."""
    if seen is None:
        return "no gradient"
    seen = seen.cpu()
    if mean is None:
        return "a gradient, although no rank computed one"
    number = len(alone)
    own = alone[rank]
    # The simplest mistakes first: a small tensor may agree with several.
    if is_near(seen, mean * number):
        return f"the sum over ranks, {number} times the mean"
    if own is not None and is_near(seen, own):
        return "the rank's own gradient, which is not averaged"
    # A wrapper that divides in the hook and again afterwards averages twice.
    for divided, times in ((number, "twice"), (number * number, "three times")):
        if is_near(seen, mean / divided):
            return f"the mean divided by {divided}: averaged {times}"
    for other, gradient in enumerate(alone):
        if gradient is not None and is_near(seen, gradient):
            return f"the gradient of rank {other}"
        # A broadcast in place of an all-reduce looks like this, before or after a division.
        if gradient is not None and is_near(seen, gradient / number):
            return f"the gradient of rank {other} divided by {number}: nothing was added"
    if earlier is not None:
        if is_near(seen, earlier):
            return "the gradient of the step before"
        if is_near(seen, mean + earlier):
            return "the sum of this step's gradient and that of the step before"
    if not seen.any():
        return "zeros"
    return largest_difference(seen, mean)


def _stays_equal(ranks: Noted) -> None:
    """Raise Broken unless all ranks end with the same parameters."""
    for rank, noted in enumerate(ranks):
        for name, tensor in ranks[0]["final"].items():
            # `scale` is a buffer, which each rank may keep for itself.
            if not is_near(noted["final"][name], tensor, 0.0) and name != "scale":
                raise Broken(
                    f"{name} on rank {rank} as on rank 0",
                    largest_difference(noted["final"][name], tensor),
                )


def _gradient_bytes(form: str) -> int:
    """Return the bytes of all gradients of a model."""
    model = Branches(form, seed=0)
    # Each element is fp32, so it takes 4 bytes. A tied weight is listed once by `parameters()`.
    return sum(4 * each.numel() for each in model.parameters() if each.requires_grad)


def _bytes_of_step(ranks: Noted, form: str) -> None:
    """Raise Broken unless a step sends each gradient once."""
    expected = _gradient_bytes(form)
    for rank, noted in enumerate(ranks):
        # The first step may also broadcast parameters or build buckets, so the second one is
        # counted.
        calls = noted["steps"][1]["calls"]
        sent = sum(num_bytes for _, num_bytes, _, _ in calls)
        # Buckets may be padded, and a few numbers for agreement are no harm.
        if not expected <= sent <= 1.15 * expected + 64:
            raise Broken(
                f"{expected:,} bytes, those of all gradients",
                f"{sent:,} bytes in {len(calls)} collectives on rank {rank}",
            )


def _same_calls(ranks: Noted) -> None:
    """Raise Broken unless all ranks made the same calls."""
    for step in range(2):
        first = ranks[0]["steps"][step]["calls"]
        for rank, noted in enumerate(ranks):
            calls = noted["steps"][step]["calls"]
            # NCCL matches collectives by position, so one difference breaks all that follow.
            if calls == first:
                continue
            # The first difference is named, because the later ones often follow from it.
            for position, (mine, others) in enumerate(zip(calls, first, strict=False)):
                if mine != others:
                    raise Broken(
                        f"on rank {rank} the collectives of rank 0 in step {step + 1}",
                        f"collective {position + 1} is {mine[0]} of {mine[1]:,} bytes, and on "
                        f"rank 0 {others[0]} of {others[1]:,}",
                    )
            # All common positions agree, so one of the ranks made more calls than the other.
            raise Broken(f"{len(first)} collectives on rank {rank}", f"{len(calls)}")


def _message_per_parameter(ranks: Noted) -> None:
    """Raise Broken unless each gradient is a message, and at most one small one comes in addition.

    Ranks may agree on something in it, for example on which parameters have a gradient.
    """
    wanted = sorted(each.numel() for each in Branches(PLAIN, seed=0).parameters())
    seen = [numel for _, _, _, numel in ranks[0]["steps"][1]["calls"]]
    # Each found message is struck out, and what is left is in addition.
    others = list(seen)
    for numel in wanted:
        if numel not in others:
            raise Broken(
                f"{len(wanted)} messages, one per parameter",
                f"{len(seen)}, and none of {numel} elements",
            )
        # One message for each parameter of this size: two of equal size need two.
        others.remove(numel)
    if len(others) > 1 or sum(others) > 64:
        raise Broken(f"{len(wanted)} messages, one per parameter", f"{len(seen)}")


def _messages(ranks: Noted, size_mb: float) -> None:
    """Raise Broken unless the number of messages is that of the bucket size.

    Args:
        size_mb: MiB per bucket.
    """
    model = Branches(PLAIN, seed=0)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    # Without integers, because a wrapper may agree on something with the other ranks, and without
    # broadcasts, which torch's DDP makes of buffers in every forward.
    calls = 0
    for op, _, dtype, _ in ranks[0]["steps"][1]["calls"]:
        if "float" in dtype and op != "broadcast":
            calls += 1
    limit = size_mb * 2**20
    # At least the bytes divided by the size of a bucket. A tensor larger than a bucket makes a
    # larger one.
    least = max(1, math.ceil(sum(sizes) / max(limit, max(sizes))))
    most = 1 if limit >= sum(sizes) else _greedy(sizes, limit)
    if limit < sum(sizes) / 20:  # hardly two tensors fit into one
        least = max(least, sum(size > limit for size in sizes))
    if not least <= calls <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise Broken(f"{wanted} messages for {len(sizes)} parameters", f"{calls}")


def _greedy(sizes: list[int], limit: float) -> int:
    """Return the most buckets that a plan in order of the parameters makes, from either end.

    A bucket may close before or after the tensor that exceeds its size, so two more are allowed.
    """
    most = 0
    # Gradients arrive from the last layer to the first, but a plan may follow either order.
    for order in (sizes, sizes[::-1]):
        buckets, held = 1, 0
        for size in order:
            if held and held + size > limit:
                buckets, held = buckets + 1, 0
            held += size
        most = max(most, buckets)
    return min(len(sizes), most + 2)


def _overlaps(ranks: Noted) -> None:
    """Raise Broken if nothing was sent before the last gradient of a backward was complete."""
    for step in (0, 1):
        # Lines begin with the number of collectives issued so far, see `_note_gradients`.
        log = ranks[0]["steps"][step]["log"]
        in_backward = log[: log.index("backward ends")]
        sent_by_then = [int(line.split()[0]) for line in in_backward]
        if not sent_by_then or max(sent_by_then) == 0:
            calls = len(ranks[0]["steps"][step]["calls"])
            raise Broken(
                "a collective before the last gradient is complete",
                f"none of the {calls} collectives of step {step + 1} was issued by then",
            )


def _no_leak(ranks: Noted) -> None:
    """Raise Broken if the number of live tensors grows from step to step."""
    # Counts are taken after steps 10, 20, …, 50. Some tensors are made once, so the first is
    # skipped.
    alive = ranks[0]["alive"]
    # Some tensors more are no leak, and a leak grows until the end. Both must hold.
    if alive[-1] > alive[1] + 20 and alive[-1] > alive[-2]:
        raise Broken(
            "as many tensors after step 50 as after step 20", f"{alive[1]}, then {alive[-1]}"
        )
