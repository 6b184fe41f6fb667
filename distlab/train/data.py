"""Tokens, synthetic or from files mapped into memory, and the order in which ranks read them.

    tokens      │ 0 1 2 3 4 5 6 7 8 9 …
    windows     │ window 0   │ window 1   │ …

A window has T tokens, and the same shifted by one as targets. Every token is a target in one
window. Fewer than T tokens are left over.

The order is that of one global sequence: epoch after epoch, each a permutation that depends on
(seed, epoch) alone. Position p of the sequence belongs to step p // batch; ranks take equal,
disjoint parts of a step. So the data of a step is the same at every world size, each window is read
once per epoch, and the position *is* the sampler's state.

Synthetic tokens are random walks over the vocabulary, generated locally. They are a pure function
of a few numbers, so that every rank reads other data and a restarted run sees what it would have
seen.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlab.comm import RankContext, collectives
from distlab.train.config import DataConfig, TrainConfig
from distlab.train.token_files import open_tokens

HELD_OUT = 20  # one token in 20, at the end of the file, is for validation
IGNORED = -100  # a target that no loss counts
BLOCK = 1 << 22  # tokens that are hashed together; part of what a data set's digest means


def random_walks(
    key: tuple[int, ...], vocab_size: int, batch: int, length: int, branching: int = 4
) -> np.ndarray:
    """Return `(batch, length + 1)` int64 tokens.

    Each token is its predecessor plus one of 1 … `branching`, modulo the vocabulary's size.

    Unlike uniform noise this can be learnt: the loss starts at ln(vocab_size) and has the known
    floor ln(branching) nats per token, so a loss curve shows whether training works. All tokens are
    equally frequent.
    """
    # numpy hashes the whole key into 128 bits; torch's CPU generator keeps only 32 bits of its
    # seed.
    generator = np.random.default_rng(key)
    start_B1 = generator.integers(0, vocab_size, (batch, 1))
    moves_BT = generator.integers(1, min(branching, vocab_size) + 1, (batch, length))
    return np.concatenate((start_B1, start_B1 + moves_BT.cumsum(axis=1)), axis=1) % vocab_size


class DataChanged(ValueError):
    """A file of tokens that has changed since the run began."""


def stamp(path: str | Path) -> tuple[int, int] | None:
    """Return the size of a file and its time of writing. None if it is gone."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    return None


class SyntheticSequences:
    """Sequences of `random_walks`, one per number. Numbers never end."""

    count = None
    file = None

    def __init__(self, vocab_size: int, context_length: int, seed: int):
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.seed = seed

    def rows(self, numbers: Sequence[int]) -> np.ndarray:
        """Return `(len(numbers), T + 1)` int64. The last T of a row are targets of the first T."""
        rows = []
        for number in numbers:
            key = (self.seed, number, 0)
            rows.append(random_walks(key, self.vocab_size, 1, self.context_length))
        return np.concatenate(rows)


class SyntheticTokens:
    """Batches of `random_walks`, a pure function of (seed, rank, step).

    Args:
        vocab_size: number of tokens, which are in [0, vocab_size).
        batch_size: number of sequences per rank.
        context_length: number of tokens per sequence.
        seed: integer ≥ 0 that fixes the data of all ranks.
        rank: number of this process, ≥ 0. Ranks have different data.
        device: device for the batches.
        branching: number of possible successors of a token, 1 … vocab_size.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        vocab_size: int,
        batch_size: int,
        context_length: int,
        *,
        seed: int,
        rank: int,
        device: torch.device | str = "cpu",
        branching: int = 4,
    ) -> None:
        for name, value, least in (
            ("vocab_size", vocab_size, 1),
            ("batch_size", batch_size, 1),
            ("context_length", context_length, 1),
            ("seed", seed, 0),
            ("rank", rank, 0),
            ("branching", branching, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.context_length = context_length
        self.seed = seed
        self.rank = rank
        self.branching = branching
        self.device = torch.device(device)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, whatever was drawn before.

        Returns:
            `(tokens_BT, targets_BT)`, int64 on the device; `targets[:, t]` is the token after
                `tokens[:, t]`.

        Raises:
            ValueError: a negative step.
        """
        if step < 0:
            raise ValueError(f"step={step}: must be 0 or more")
        rows = random_walks(
            (self.seed, self.rank, step),
            self.vocab_size,
            self.batch_size,
            self.context_length,
            self.branching,
        )
        return to_batch(rows, self.device)


class TokenWindows:
    """Windows of `context_length` tokens over an array of tokens.

    Args:
        tokens: one-dimensional, of any integer dtype, usually mapped from a file.
        vocab_size: number of tokens of the model.
        context_length: number of tokens per window.
        ragged: True to also give the last, shorter window, with `IGNORED` for missing targets (for
            validation).
        source: name of the tokens, for the message.
        file: file that they are mapped from, and its `stamp` before anything was read. None for
            tokens in memory.

    Raises:
        ValueError: too few tokens for one window.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        vocab_size: int,
        context_length: int,
        *,
        ragged: bool = False,
        source: str = "data",
        file: tuple[str, tuple[int, int] | None] | None = None,
    ):
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.file = file
        # The first token has no predecessor that predicts it.
        targets = max(len(tokens) - 1, 0)
        self.count: int = targets // context_length
        if ragged and targets % context_length:
            self.count += 1
        if self.count == 0:
            raise ValueError(
                f"{source}: {len(tokens)} tokens are too few for one window of context_length + 1 "
                f"= {context_length + 1}: give more data or a smaller --context"
            )

    def rows(self, numbers: Sequence[int]) -> np.ndarray:
        """Return `(len(numbers), T + 1)` int64. IGNORED follows the end of the tokens."""
        length = self.context_length
        rows = np.full((len(numbers), length + 1), IGNORED, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            # One token more than a window: the last token's target is the first of the next window.
            found = self.tokens[number * length : (number + 1) * length + 1]
            row[: len(found)] = found
        return rows


Sequences = SyntheticSequences | TokenWindows


def is_unchanged(data: Sequences) -> bool:
    """Return True if the file of the tokens is as it was before anything was read.

    Tokens in memory never change.
    """
    return data.file is None or stamp(data.file[0]) == data.file[1]


class GlobalOrder:
    """Order of the sequences that each rank reads in each step.

    Args:
        count: number of sequences per epoch. None for numbers that never end.
        batch: number of sequences per step over all ranks.
        rank: number of this rank, from 0.
        world_size: number of ranks that divide the batch.
        micro_batches: number of parts of a rank's share.
        seed: integer that, with the number of the epoch, fixes the order of an epoch.

    Raises:
        ValueError: ranks × micro-batches do not divide the batch, or it is larger than an epoch.
    """

    def __init__(
        self,
        count: int | None,
        *,
        batch: int,
        rank: int,
        world_size: int,
        micro_batches: int = 1,
        seed: int = 0,
    ):
        if batch % (world_size * micro_batches):
            raise ValueError(
                f"a batch of {batch} sequences cannot be divided among {world_size} ranks × "
                f"{micro_batches} micro-batches: make --batch a multiple of "
                f"{world_size * micro_batches}"
            )
        if count is not None and batch > count:
            raise ValueError(
                f"the data has {count} windows, too few for one batch of {batch}: give more data, "
                "or a smaller --batch or --context"
            )
        self.count = count
        self.batch = batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.micro_batches = micro_batches

    def numbers(self, step: int) -> list[list[int]]:
        """Return the sequences of this rank's micro-batches in a step."""
        share = self.batch // self.world_size
        first = step * self.batch + self.rank * share
        mine = []
        for position in range(first, first + share):
            if self.count is None:
                mine.append(position)
            else:
                epoch, place = divmod(position, self.count)
                # Positions count all sequences ever read, so the order does not depend on the
                # number of ranks.
                mine.append(int(_permutation(self.count, self.seed, epoch)[place]))
        size = share // self.micro_batches
        return [mine[start : start + size] for start in range(0, share, size)]


@lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which an epoch reads its sequences."""
    # A pair and not a sum: seed 1 in epoch 0 would otherwise read like seed 0 in epoch 1.
    return np.random.default_rng((seed, epoch)).permutation(count)


def examine(
    tokens: np.ndarray, vocab_size: int, rank: int = 0, world_size: int = 1, *, block: int = BLOCK
) -> tuple[list[str], str | None]:
    """Read this rank's share of the tokens once, hash its blocks and look for unknown ids.

    Shares are whole blocks, so all ranks' digests in rank order are the same at every world size.

    Args:
        tokens: 1-D array of all token ids of a file, of which ranks read parts.
        vocab_size: number of entries of the model's vocabulary.
        rank: number of this rank.
        world_size: number of ranks that share the tokens.
        block: number of tokens per block.

    Returns:
        (SHA-256 of each block of the share, message about the first id out of range or None).
    """
    blocks = -(-len(tokens) // block)
    digests = []
    problem = None
    # Rank r has the blocks from r/N to (r + 1)/N. Rounding leaves none out and repeats none.
    for number in range(rank * blocks // world_size, (rank + 1) * blocks // world_size):
        part = np.ascontiguousarray(tokens[number * block : (number + 1) * block])
        digests.append(hashlib.sha256(part.view(np.uint8)).hexdigest())
        if problem is None and int(part.max()) >= vocab_size:
            place = int((part >= vocab_size).argmax())
            problem = (
                f"token {number * block + place} is {int(part[place])}, but the model's vocabulary "
                f"has {vocab_size} entries"
            )
    return digests, problem


def to_batch(rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `(tokens_BT, targets_BT)` on the device from `(B, T + 1)` int64.

    Tokens are 0 where their value is `IGNORED`.
    """
    whole = torch.from_numpy(rows)
    if device.type == "cuda":
        # Pinned, so that the copy runs while the host goes on.
        whole = whole.pin_memory().to(device, non_blocking=True)
    # IGNORED is no row of the embedding. Its target is ignored, so the token's value does not
    # matter.
    return whole[:, :-1].contiguous().clamp(min=0), whole[:, 1:].contiguous()


def load(
    data: DataConfig, config: TrainConfig, context: RankContext
) -> tuple[Sequences, Sequences, dict[str, Any]]:
    """Return training data, validation data, and their identity, which a resumed run must match.

    Every token is read once before training, each rank reading a share: ids are compared with the
    vocabulary, and the same pass hashes all of both files. So no byte can change unseen, at the
    price of the hash alone.

    Raises:
        OSError, ValueError: on every rank, for a file that cannot be used.
    """
    model = config.model()
    if data.data is None:
        train = SyntheticSequences(model.vocab_size, model.context_length, config.seed)
        # Another seed, so that no walk is seen in training.
        validate = SyntheticSequences(model.vocab_size, model.context_length, config.seed + 1)
        return train, validate, {"kind": "synthetic"}
    # Before anything is read: a file that changes from here on is noticed.
    train_file = (data.data, stamp(data.data))
    validation_path = data.val_data or data.data
    validation_file = (validation_path, stamp(validation_path))
    tokens = open_tokens(data.data, data.token_dtype)
    cut = len(tokens)
    identity = {
        "kind": "tokens",
        "count": len(tokens),
        "dtype": tokens.dtype.name,
        "sha256": _digest(data.data, tokens, model.vocab_size, context),
    }
    if data.val_data is None:
        # At least two tokens: one to predict from, one to predict.
        cut = max(0, cut - max(cut // HELD_OUT, 2))
        held_out = tokens[cut:]
        identity |= {"validation": f"the last {len(held_out)} tokens"}
    else:
        held_out = open_tokens(data.val_data, data.token_dtype)
        digest = _digest(data.val_data, held_out, model.vocab_size, context)
        identity |= {"validation": f"{len(held_out)} tokens of a file", "validation_sha256": digest}
    train = TokenWindows(
        tokens[:cut],
        model.vocab_size,
        model.context_length,
        source=f"{data.data} ({len(tokens)} tokens, {cut} of them to train on)",
        file=train_file,
    )
    validate = TokenWindows(
        held_out,
        model.vocab_size,
        model.context_length,
        ragged=True,
        source=f"{validation_path} (for validation)",
        file=validation_file,
    )
    return train, validate, identity | {"trained_on": cut}


def _digest(path: str, tokens: np.ndarray, vocab_size: int, context: RankContext) -> str:
    """Return the SHA-256 of the digests of all blocks. Call it on every rank.

    Raises:
        ValueError: on every rank, for an id that is out of range.
    """
    shares = collectives.gather_objects(
        examine(tokens, vocab_size, context.rank, context.world_size), context.group
    )
    # Every rank sees all ranks' problems, so all raise the same error.
    for _, problem in shares:
        if problem is not None:
            raise ValueError(f"{path}: {problem}")
    blocks = []
    for digests, _ in shares:
        blocks += digests
    return hashlib.sha256("".join(blocks).encode()).hexdigest()
