"""Tensor and sequence parallelism: P ranks share every matrix of a model, and the sequence between them.

    x (B, T/P, d) ─ norm ─ Enter ─ (B, T, d) ─ qkv: H/P heads ─ attention ─ output: its columns ─
    Leave ─ + x …

    matrix            a rank keeps            so its result is
    qkv, w1, w3       rows: heads, columns    its heads, its columns
    output, w2        columns                 a part of a sum: `Leave` sums, and keeps a part of the sequence
    embedding, head   rows of the vocabulary  partial sums; logits of its words, which nobody gathers for the loss

Norms act on a part of the sequence with a weight that all ranks have: `Share` sums its gradients.
Per block 4 transfers of B·T·d elements forward and 4 backward, × (P − 1)/P each (Enter and Leave,
twice).

What is left on a rank is an ordinary, smaller module, which any data strategy wraps. The model says
how it can be shared (`splits()`) and takes other operations (`replace_ops()`), so that nothing here
knows its layers.

Source: Megatron-LM (Shoeybi et al. 2019), sequence parallelism (Korthikanti et al. 2022).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm import collectives
from distlab.parallel.meta import StandIn, initialize_in_turn
from distlab.parallel.regions import Enter, Gather, Leave, Share, Total, gathered, summed
from distlab.parallel.shard import Cut, plain_name

SEQUENCE = 1  # the dimension of T


def parallelize(model: nn.Module, group: ProcessGroup) -> dict[str, Cut]:
    """Leave on this rank its share of every matrix of a model, and put the communication around it.

    Ranks keep what rank 0 of the group has, if the model has values; one on meta keeps the shapes.

    Args:
        model: exports `splits()` and `replace_ops()`, see `distlab.model.TransformerLM`.

    Returns:
        Where this rank's part of each cut parameter lies, by its plain name.

    Raises:
        TypeError: a model that does not export them.
        ValueError: sizes that the ranks do not divide, or dropout, whose masks would have to agree.
    """
    cuts = find_cuts(model, group)
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise ValueError(
            "tensor parallelism: dropout would draw other masks on each rank: set dropout to 0"
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        collectives.broadcast_all([*model.parameters(), *model.buffers()], group)
    _replace(
        model,
        {name: cut.of(parameter.detach()) for name, parameter, cut in _cut_parameters(model, cuts)},
    )
    ops = model.operations()
    words = next((cuts[name] for name in ("embedding.weight", "head.weight") if name in cuts), None)
    first = 0 if words is None else words.ranges[0][0]  # of this rank's words, where it has any
    model.replace_ops(
        enter=partial(_apply, Enter, group),
        leave=partial(_apply, Leave, group),
        rms_norm=lambda x, weight, eps: ops.rms_norm(x, _shared(weight, group), eps),
        add_rms_norm=lambda x, residual, weight, eps: ops.add_rms_norm(
            x, residual, _shared(weight, group), eps
        ),
        embedding=partial(vocabulary_embedding, first=first, group=group),
        logits=partial(whole_logits, local=ops.logits, group=group),
        linear_cross_entropy=partial(
            vocabulary_cross_entropy, local=ops.logits, first=first, group=group
        ),
    )
    return cuts


def find_cuts(model: nn.Module, group: ProcessGroup) -> dict[str, Cut]:
    """What this rank keeps of each parameter that is cut.

    Raises:
        TypeError, ValueError: see `parallelize`.
    """
    if not (hasattr(model, "splits") and hasattr(model, "replace_ops")):
        raise TypeError(
            f"tensor parallelism: {type(model).__name__} does not say how ranks can share it: it has no splits() and "
            "replace_ops(), as distlab.model.TransformerLM does"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rank, ranks, cuts = group.rank(), group.size(), {}
    for name, split in model.splits().items():
        uneven = [size for size in split.sizes if size % ranks]
        if uneven:
            raise ValueError(
                f"tensor parallelism: {ranks} ranks cannot share {uneven[0]} {split.what} evenly"
            )
        ranges, offset = [], 0
        for size in split.sizes:
            each = size // ranks
            ranges.append(
                ((offset + rank * each) * split.unit, (offset + (rank + 1) * each) * split.unit)
            )
            offset += size
        cuts[plain_name(name)] = Cut(shapes[name], split.dim, tuple(ranges))
    return cuts


def initialize_cut(
    module: nn.Module, cuts: Mapping[str, Cut], init: Callable[[nn.Module], Any]
) -> None:
    """Call `init(module)` on whole parameters, one at a time, of which this rank keeps its share.

    So values depend on the seed alone, whatever the layout.
    """
    local = {name: parameter for name, parameter, _ in _cut_parameters(module, cuts)}

    def stand_ins() -> Iterable[StandIn]:
        for name, parameter, cut in list(_cut_parameters(module, cuts)):
            # No operator on `parameter`, which may be a stand-in itself, FSDP's.
            full = torch.empty(cut.shape, dtype=parameter.dtype, device=parameter.device)
            whole = nn.Parameter(full, parameter.requires_grad)
            _replace(module, {name: whole})
            yield name, whole, lambda full, cut=cut, own=parameter: own.detach().copy_(cut.of(full))

    initialize_in_turn(module, stand_ins(), init)
    _replace(module, local)


def gather_cuts(
    parameters: Mapping[str, Tensor], cuts: Mapping[str, Cut], group: ProcessGroup
) -> dict[str, Tensor]:
    """Whole parameters out of every rank's cut ones. A collective: call it on every rank."""
    found = {}
    for name, value in parameters.items():
        cut = cuts.get(plain_name(name))
        found[name] = value if cut is None else cut.joined(gathered(value.detach()[None], group, 0))
    return found


# -- operations of a model whose matrices are shared -------------------------------------------------------------------


@torch._disable_dynamo
def _apply(region: Any, group: ProcessGroup, x: Tensor) -> Tensor:
    return region.apply(x, group, SEQUENCE)


@torch._disable_dynamo
def _shared(weight: Tensor, group: ProcessGroup) -> Tensor:
    return Share.apply(weight, group)


@torch._disable_dynamo
def vocabulary_embedding(
    tokens_BT: Tensor, weight: Tensor, *, first: int, group: ProcessGroup
) -> Tensor:
    """Rows of the ranks' words, `(B, T) -> (B, T/P, d)`: zeros for words of others, summed and shared along T."""
    if tokens_BT.shape[SEQUENCE] % group.size():
        raise ValueError(
            f"tensor parallelism: {group.size()} ranks cannot share sequences of {tokens_BT.shape[SEQUENCE]} tokens "
            "evenly"
        )
    index, here = _own(tokens_BT, first, weight.shape[0])
    return Leave.apply(F.embedding(index, weight) * here[..., None], group, SEQUENCE)


@torch._disable_dynamo
def whole_logits(
    x: Tensor, weight: Tensor, *, local: Callable[[Tensor, Tensor], Tensor], group: ProcessGroup
) -> Tensor:
    """Logits over the whole vocabulary, `(B, T/P, d) -> (B, T, V)`, on every rank alike."""
    return Gather.apply(local(Enter.apply(x, group, SEQUENCE), weight), group, 2)


@torch._disable_dynamo
def vocabulary_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets_BT: Tensor,
    *,
    local: Callable[[Tensor, Tensor], Tensor],
    first: int,
    group: ProcessGroup,
) -> Tensor:
    """Mean cross-entropy, the logits of a rank's words on that rank alone; in fp32, or fp64.

    Three all-reduces of B·T numbers: the largest logit, the sum of exponentials, the target's
    logit.
    """
    logits = local(Enter.apply(x, group, SEQUENCE), weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = summed(logits.detach().amax(-1), group, largest=True)
    total = Total.apply((logits - top[..., None]).exp().sum(-1), group)
    index, here = _own(targets_BT, first, weight.shape[0])
    target = Total.apply(logits.gather(-1, index[..., None])[..., 0] * here, group)
    counted = targets_BT != -100
    return ((total.log() + top - target) * counted).sum() / counted.sum()


def _own(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Rows of this rank's words, 0 for others', and whether they are this rank's."""
    here = (tokens >= first) & (tokens < first + count)
    return torch.where(here, tokens - first, 0), here


# -- cut parameters ----------------------------------------------------------------------------------------------------


def _cut_parameters(
    module: nn.Module, cuts: Mapping[str, Cut]
) -> Iterable[tuple[str, nn.Parameter, Cut]]:
    for name, parameter in module.named_parameters():
        if plain_name(name) in cuts:
            yield name, parameter, cuts[plain_name(name)]


def _replace(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put parameters of other sizes in place of those of these names, of a tied one under each of its names."""
    old = dict(module.named_parameters())
    new = {
        id(old[name]): value
        if isinstance(value, nn.Parameter)
        else nn.Parameter(value, old[name].requires_grad)
        for name, value in values.items()
    }
    for owner in module.modules():
        for attribute, parameter in owner._parameters.items():
            if id(parameter) in new:
                owner._parameters[attribute] = new[id(parameter)]
