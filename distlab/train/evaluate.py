"""Validation loss over all tokens of all ranks, each token counted once."""

import math

import torch
import torch.nn.functional as F

from distlab.comm import RankContext, collectives
from distlab.parallel import ParallelModel
from distlab.parallel.layout import DATA_PARALLEL, Axes
from distlab.train.data import IGNORED, Sequences, to_batch


@torch.no_grad()
def validation_loss(
    wrapper: ParallelModel,
    data: Sequences,
    context: RankContext,
    *,
    sequences: int,
    batch: int,
    axes: Axes | None = None,
) -> float:
    """Return the mean cross-entropy in nats per token over `sequences` sequences, on every rank.

    Ranks share the sequences. All run the same number of forwards (sharded models need that), some
    of them without data.

    Args:
        wrapper: model under its strategy.
        data: sequences to validate on.
        context: context of this rank.
        sequences: number of sequences over all ranks.
        batch: number of sequences per forward.
        axes: groups of ranks that share the model. Default: each rank has all of it.
    """
    axes = axes or DATA_PARALLEL.axes(context.group)
    total = sequences if data.count is None else min(sequences, data.count)
    # Ranks that share a model have the same number, and so read the same sequences.
    mine = list(range(axes.batch_rank, total, axes.batch_ranks))
    # By the rank with most sequences, so that all ranks run as many forwards as it does.
    rounds = math.ceil(math.ceil(total / axes.batch_ranks) / batch)
    empty = data.rows([0])
    # A batch of ignored targets: it takes part in every collective of a forward, and counts
    # nothing.
    empty[:] = IGNORED
    # Sum of the losses, and number of the tokens. A sum over millions of tokens in fp32 would lose
    # the last digits.
    totals = torch.zeros(2, dtype=torch.float64, device=context.device)
    was_training = wrapper.training
    # Without dropout, whose draws would make the loss differ from run to run.
    wrapper.eval()
    for number in range(rounds):
        numbers = mine[number * batch : (number + 1) * batch]
        rows = data.rows(numbers) if numbers else empty
        tokens, targets = axes.share(to_batch(rows, context.device))
        if wrapper.pipeline is None:
            with wrapper.autocast():
                logits = wrapper(tokens)
        else:
            logits = wrapper.pipeline.forward(wrapper, (tokens,))
        if logits is None:
            continue  # this rank is not in the last stage of the pipeline, which has the logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        # On the device, without waiting for it in each round.
        totals += torch.stack((losses.double(), (targets != IGNORED).sum().double()))
    wrapper.train(was_training)
    loss_sum, count = collectives.sum_tensor(totals, context.group).tolist()
    # Of all tokens and not a mean of ranks' means, since ranks may have different numbers of
    # tokens.
    return loss_sum / count
