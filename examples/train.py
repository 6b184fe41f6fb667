"""Train a small language model on the bytes of a text: the whole of a training on one page.

    python examples/train.py                                         # alone
    torchrun --nproc-per-node 2 examples/train.py --strategy zero1   # two ranks

    data ─ model ─ strategy ─ resume
    for each step:   zero_grad ─ (forward ─ backward) × k ─ finish ─ clip ─ optimizer step
    now and then:    evaluate, checkpoint
    at the end:      sample

Where the folder holds a checkpoint, training goes on from there, under any strategy and at any
number of ranks:

    python examples/train.py --strategy fsdp --steps 150   # continues either of the two above

`distlab train` is the same loop with what long runs need: a learning-rate schedule, mixed
precision, a check that data and options are still those of the checkpoint, and an orderly end on
NaN, on signals and when ranks die.
"""

import argparse
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from distlab.checkpoint.checkpointer import Checkpointer
from distlab.comm import RankContext, collectives, rank_context
from distlab.model import PRESETS, TransformerLM, cross_entropy, preset
from distlab.parallel import get_strategy
from distlab.train.config import TRAINABLE
from distlab.train.data import GlobalOrder, TokenWindows, to_batch
from distlab.train.evaluate import validation_loss
from distlab.train.sample import generate

WORDS = ("small old red quick happy", "cat dog bird horse fish", "sees likes follows finds carries")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file; without one, simple sentences")
    parser.add_argument(
        "--strategy", choices=TRAINABLE, default="bucketed", help="how ranks share the work"
    )
    parser.add_argument("--size", choices=PRESETS, default="tiny", help="of the model")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default="outputs/example", help="of the checkpoints")
    return parser.parse_args(argv)


def sentences(count: int = 10_000) -> bytes:
    """Make a text that is soon learnt.

    A line has five choices of five words, so no loss is below 5·ln 5 nats a line, 0.23 a byte.
    """
    draw = random.Random(0)  # every rank makes the same text
    adjectives, nouns, verbs = (words.split() for words in WORDS)

    def line() -> str:
        who, whom = (f"{draw.choice(adjectives)} {draw.choice(nouns)}" for _ in range(2))
        return f"The {who} {draw.choice(verbs)} the {whom}.\n"

    return "".join(line() for _ in range(count)).encode()


def train(options: argparse.Namespace, context: RankContext) -> dict[int, float]:
    """Train on this rank, each rank on its share of every batch.

    Return the printed losses by step.
    """

    def say(text: str) -> None:
        if context.is_main:  # only rank 0 prints
            print(text, flush=True)

    # Data: each byte is a token. The last twentieth is never trained on.
    text = np.frombuffer(options.text.read_bytes() if options.text else sentences(), dtype=np.uint8)
    config = preset(options.size, vocab_size=256)
    cut = len(text) - len(text) // 20
    train_data = TokenWindows(text[:cut], config.vocab_size, config.context_length)
    held_out = TokenWindows(text[cut:], config.vocab_size, config.context_length, ragged=True)
    order = GlobalOrder(
        train_data.count,
        batch=options.batch,
        rank=context.rank,
        world_size=context.world_size,
        micro_batches=options.accumulate,
    )

    # Model: on meta it has shapes and no values yet, because a strategy that shards never holds all
    # of them on one GPU.
    module = TransformerLM(config, device="meta")

    # Strategy: wraps the module, so that gradients become means over ranks, and makes the optimizer
    # that fits.
    model, optimizer = get_strategy(options.strategy).build(
        module, context.group, torch.optim.AdamW, {"lr": options.lr}, device=context.device
    )

    # Resume: every rank reads its part of the newest checkpoint, from the files of all ranks that
    # wrote it. The constructor refuses parameters that cannot be stored.
    checkpoints = Checkpointer(options.folder, context, model=model)
    first, stored = 0, checkpoints.newest()
    if stored is not None:
        checkpoints.load(stored, model, optimizer)
        first, wrote = stored.step, stored.content
        say(
            f"from step {first}, which {wrote['world_size']} rank(s) wrote under "
            f"{wrote['strategy']}"
        )

    losses = {}
    for step in range(first, options.steps):
        optimizer.zero_grad()
        mean_loss = torch.zeros((), device=context.device)
        # of this step alone: a resumed run skips and repeats nothing
        micro_batches = order.numbers(step)
        for number, windows in enumerate(micro_batches, start=1):
            tokens, targets = to_batch(train_data.rows(windows), context.device)
            # Gradients of micro-batches add up on each rank. Only the last backward sends their
            # sum.
            with nullcontext() if number == len(micro_batches) else model.no_sync():
                loss = cross_entropy(model(tokens), targets) / len(micro_batches)
                loss.backward()
            mean_loss += loss.detach()
        model.finish_gradient_synchronization()  # gradients are now means over ranks
        # by the norm of the whole, also where ranks hold parts of it
        model.clip_grad_norm_(options.clip)
        optimizer.step()

        done = step + 1
        if done % options.log_every == 0 or done == options.steps:
            # Not in every step: `.item()` waits until the device has finished it.
            collectives.all_reduce_mean(mean_loss, context.group).wait()
            losses[done] = mean_loss.item()
            say(f"step {done:5}   loss {losses[done]:.3f}")
        if done % options.save_every == 0 or done == options.steps:
            unseen = validation_loss(model, held_out, context, sequences=64, batch=8)
            say(f"step {done:5}   loss {unseen:.3f} on text it was not trained on")
            checkpoints.save(done, model, optimizer, strategy=options.strategy, extra={})
    checkpoints.wait()  # files are written while training goes on; what failed there is raised here

    # Sample, from an ordinary module. Every rank calls full_state_dict: where they are sharded, all
    # send their part.
    whole = TransformerLM(config, device=context.device)
    whole.load_state_dict(model.full_state_dict())
    prompt = torch.tensor(list(b"The "), device=context.device)
    say(bytes(generate(whole.eval(), prompt, 200).tolist()).decode(errors="replace"))
    return losses


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Join the ranks that torchrun started, or be the only one, and train."""
    options = parse(argv)
    with rank_context() as context:
        return train(options, context)


if __name__ == "__main__":
    main()
