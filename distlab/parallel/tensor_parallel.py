"""Tensor and sequence parallelism: P ranks share every matrix, and the sequence between matrices.

    x (B, T/P, d) ─ norm ─ Enter ─ (B, T, d) ─ qkv: H/P heads ─ attention ─ output: its columns ─
    Leave ─ + x …

    matrix            a rank keeps            its result
    qkv, w1, w3       rows                    its heads, its columns
    output, w2        columns                 partial sums: `Leave` sums them and keeps a part of T
    embedding         rows of the vocabulary  partial sums: likewise
    head              rows of the vocabulary  logits of its words, which the loss does not gather

Norms run on a part of the sequence with a weight that all ranks have: `Share` sums its gradients.
Each block has 4 collectives of B·T·d elements in forward and 4 in backward (Enter and Leave,
twice). A rank sends (P − 1)/P of the elements of each.

What is left on a rank is an ordinary, smaller module, which any data strategy can wrap. The model
says how ranks can share it (`splits()`) and accepts other operations (`replace_ops()`). Therefore
this file does not depend on the layers of a model.

Sources: Megatron-LM (Shoeybi et al. 2019), sequence parallelism (Korthikanti et al. 2022).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Keep this rank's part of every matrix of a model, and add the communication.

    Ranks take the values of rank 0 of the group. A model on the meta device has no values and keeps
    its shapes only.

    Args:
        model: exports `splits()` and `replace_ops()`, see `distlab.model.TransformerLM`.
        group: ranks that share the matrices.

    Returns:
        The part that this rank keeps of each parameter that is cut, by plain name.

    Raises:
        TypeError: a model that does not export them.
        ValueError: sizes that the ranks do not divide, or dropout, whose masks would have to agree.
    """
    cuts = find_cuts(model, group)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                "tensor parallelism: dropout would draw other masks on each rank: set dropout to 0"
            )
    if not any(parameter.is_meta for parameter in model.parameters()):
        collectives.broadcast_all([*model.parameters(), *model.buffers()], group)
    parts = {}
    for name, parameter, cut in _cut_parameters(model, cuts):
        parts[name] = cut.of(parameter.detach())
    _replace(model, parts)
    _replace_operations(model, cuts, group)
    return cuts


def find_cuts(model: nn.Module, group: ProcessGroup) -> dict[str, Cut]:
    """Return the part that this rank keeps of each parameter that is cut, by plain name.

    Raises:
        TypeError, ValueError: see `parallelize`.
    """
    if not (hasattr(model, "splits") and hasattr(model, "replace_ops")):
        raise TypeError(
            f"tensor parallelism: {type(model).__name__} does not say how ranks can share it: it "
            "has no splits() and replace_ops(), as distlab.model.TransformerLM does"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rank = group.rank()
    ranks = group.size()
    cuts = {}
    for name, split in model.splits().items():
        for size in split.sizes:
            if size % ranks:
                raise ValueError(
                    f"tensor parallelism: {ranks} ranks cannot share {size} {split.what} evenly"
                )
        # One range of each matrix that the parameter consists of, such as q, k and v.
        ranges = []
        offset = 0
        for size in split.sizes:
            each = size // ranks
            first = offset + rank * each
            ranges.append((first * split.unit, (first + each) * split.unit))
            offset += size
        cuts[plain_name(name)] = Cut(shapes[name], split.dim, tuple(ranges))
    return cuts


def initialize_cut(
    module: nn.Module, cuts: Mapping[str, Cut], init: Callable[[nn.Module], Any]
) -> None:
    """Call `init(module)` on whole parameters, one at a time, and keep this rank's parts.

    So the values depend on the seed alone, and not on the layout.
    """
    parts = {name: parameter for name, parameter, _ in _cut_parameters(module, cuts)}
    initialize_in_turn(module, _whole_stand_ins(module, cuts), init)
    _replace(module, parts)


def _whole_stand_ins(module: nn.Module, cuts: Mapping[str, Cut]) -> Iterator[StandIn]:
    """Put a parameter of the whole shape into the module for each that is cut, and yield it."""
    for name, part, cut in list(_cut_parameters(module, cuts)):
        # Only the dtype and device of `part` are used. No operator may touch it: under FSDP it is a
        # stand-in itself, and its memory would be allocated.
        full = torch.empty(cut.shape, dtype=part.dtype, device=part.device)
        whole = nn.Parameter(full, part.requires_grad)
        _replace(module, {name: whole})
        yield name, whole, partial(_keep_part, part, cut)


def _keep_part(part: nn.Parameter, cut: Cut, whole: Tensor) -> None:
    """Copy this rank's part of the whole parameter."""
    part.detach().copy_(cut.of(whole))


def gather_cuts(
    parameters: Mapping[str, Tensor], cuts: Mapping[str, Cut], group: ProcessGroup
) -> dict[str, Tensor]:
    """Return whole parameters from the parts of all ranks. A collective: call it on every rank."""
    found = {}
    for name, value in parameters.items():
        cut = cuts.get(plain_name(name))
        if cut is not None:
            value = cut.joined(gathered(value.detach()[None], group, 0))
        found[name] = value
    return found


# -- operations of a model whose matrices are shared ----------------------------------------------


def _replace_operations(model: nn.Module, cuts: Mapping[str, Cut], group: ProcessGroup) -> None:
    """Give a model operations that communicate, around its own."""
    ops = model.operations()
    first_word = 0  # first word of this rank's part of the vocabulary
    for name in ("embedding.weight", "head.weight"):
        if name in cuts:
            first_word = cuts[name].ranges[0][0]
            break

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x, _shared(weight, group), eps)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        return ops.add_rms_norm(x, residual, _shared(weight, group), eps)

    model.replace_ops(
        enter=partial(_apply, Enter, group),
        leave=partial(_apply, Leave, group),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        embedding=partial(vocabulary_embedding, first=first_word, group=group),
        logits=partial(whole_logits, local=ops.logits, group=group),
        linear_cross_entropy=partial(
            vocabulary_cross_entropy, local=ops.logits, first=first_word, group=group
        ),
    )


@torch._disable_dynamo
def _apply(region: Any, group: ProcessGroup, x: Tensor) -> Tensor:
    """Apply `Enter` or `Leave` along the sequence."""
    return region.apply(x, group, SEQUENCE)


@torch._disable_dynamo
def _shared(weight: Tensor, group: ProcessGroup) -> Tensor:
    """Return the weight. Its gradient is summed over the parts of the sequence."""
    return Share.apply(weight, group)


@torch._disable_dynamo
def vocabulary_embedding(
    tokens_BT: Tensor, weight: Tensor, *, first: int, group: ProcessGroup
) -> Tensor:
    """Return the embeddings of this rank's part of the sequence, `(B, T) -> (B, T/P, d)`.

    Each rank looks up the words that it has, and takes zeros for the others. The sum over the ranks
    is the embedding.

    Args:
        tokens_BT: the same whole sequences on every rank.
        weight: this rank's rows, `(V/P, d)`.
        first: number of this rank's first word.
        group: ranks that share the vocabulary.
    """
    T = tokens_BT.shape[SEQUENCE]
    if T % group.size():
        raise ValueError(
            f"tensor parallelism: {group.size()} ranks cannot share sequences of {T} tokens evenly"
        )
    rows, is_own = _own_rows(tokens_BT, first, weight.shape[0])
    partial_sums = F.embedding(rows, weight) * is_own[..., None]
    return Leave.apply(partial_sums, group, SEQUENCE)


@torch._disable_dynamo
def whole_logits(
    x: Tensor, weight: Tensor, *, local: Callable[[Tensor, Tensor], Tensor], group: ProcessGroup
) -> Tensor:
    """Return logits over the whole vocabulary, on every rank, `(B, T/P, d) -> (B, T, V)`.

    Args:
        x: this rank's part of the sequence.
        weight: this rank's rows of the head, `(V/P, d)`.
        local: function that returns the logits of this rank's words.
        group: ranks that share the vocabulary.
    """
    own_logits = local(Enter.apply(x, group, SEQUENCE), weight)
    return Gather.apply(own_logits, group, 2)


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
    """Return the mean cross-entropy. No rank has the logits of other ranks' words.

    Three all-reduces of B·T numbers: the largest logit, the sum of exponentials and the logit of
    the target. Computes in fp32, or in fp64 if the logits have it.

    Args:
        x: this rank's part of the sequence, `(B, T/P, d)`.
        weight: this rank's rows of the head, `(V/P, d)`.
        targets_BT: the same whole sequences on every rank. −100 is not counted.
        local: function that returns the logits of this rank's words.
        first: number of this rank's first word.
        group: ranks that share the vocabulary.
    """
    logits = local(Enter.apply(x, group, SEQUENCE), weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest logit needs no gradient: it cancels in log(Σ exp(logit − top)) + top.
    top = summed(logits.detach().amax(-1), group, largest=True)
    exp_sum = Total.apply((logits - top[..., None]).exp().sum(-1), group)
    # One rank has the target's logit, the others add zero.
    rows, is_own = _own_rows(targets_BT, first, weight.shape[0])
    target = Total.apply(logits.gather(-1, rows[..., None])[..., 0] * is_own, group)
    is_counted = targets_BT != -100
    losses = exp_sum.log() + top - target
    return (losses * is_counted).sum() / is_counted.sum()


def _own_rows(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return each token's row among this rank's words, and whether the word is this rank's.

    The row of another rank's word is 0.
    """
    is_own = (tokens >= first) & (tokens < first + count)
    return torch.where(is_own, tokens - first, 0), is_own


# -- cut parameters -------------------------------------------------------------------------------


def _cut_parameters(
    module: nn.Module, cuts: Mapping[str, Cut]
) -> Iterable[tuple[str, nn.Parameter, Cut]]:
    """Yield name, parameter and cut of each parameter that is cut."""
    for name, parameter in module.named_parameters():
        cut = cuts.get(plain_name(name))
        if cut is not None:
            yield name, parameter, cut


def _replace(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace parameters by parameters of other sizes.

    A tied parameter is replaced under each of its names.

    Args:
        values: new values by name. Plain tensors become parameters.
    """
    old = dict(module.named_parameters())
    new: dict[int, nn.Parameter] = {}  # by the identity of the old parameter
    for name, value in values.items():
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, old[name].requires_grad)
        new[id(old[name])] = value
    for owner in module.modules():
        for attribute, parameter in owner._parameters.items():
            if id(parameter) in new:
                owner._parameters[attribute] = new[id(parameter)]
