"""Synthetic tokens: made on the spot, nothing is downloaded.

A batch is a pure function of (seed, rank, step). So every rank reads different data, a restarted run sees
exactly the batches it would have seen, and all ranks have equally many steps because nobody can run out.
"""

import math

import numpy as np
import torch
from torch import Tensor


class SyntheticTokens:
    """Random walks over the vocabulary: each token is its predecessor plus one of 1 … `branching`, modulo the
    size.

    Unlike uniform noise this can be learnt: the loss starts at ln(vocab_size) and has the known floor
    ln(branching), so a loss curve shows whether training works. All tokens are equally frequent.

    Args:
        vocab_size: tokens lie in [0, vocab_size).
        batch_size: sequences per rank.
        context_length: tokens per sequence.
        seed: of the data, ≥ 0.
        rank: this process's share of the data, ≥ 0; ranks differ from each other.
        device: where batches are put.
        branching: possible successors of a token, 1 … vocab_size.

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
        self.device = torch.device(device)
        self.branching = min(branching, vocab_size)

    @property
    def loss_floor(self) -> float:
        """The smallest mean loss a model can reach on this data, in nats per token: ln(branching)."""
        return math.log(self.branching)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step, whatever was drawn before.

        Returns:
            `(tokens_BT, targets_BT)`, int64 on the device; `targets[:, t]` is the token after `tokens[:, t]`.

        Raises:
            ValueError: a negative step.
        """
        if step < 0:
            raise ValueError(f"step={step}: must be 0 or more")
        # numpy hashes the whole triple into 128 bits; torch's CPU generator keeps only 32 bits of its seed.
        generator = np.random.default_rng((self.seed, self.rank, step))
        start_B1 = generator.integers(0, self.vocab_size, (self.batch_size, 1))
        moves_BT = generator.integers(1, self.branching + 1, (self.batch_size, self.context_length))
        walk_BT1 = np.concatenate((start_B1, start_B1 + moves_BT.cumsum(axis=1)), axis=1) % self.vocab_size
        tokens = torch.from_numpy(walk_BT1)
        if self.device.type == "cuda":
            # Pinned memory lets the copy run behind the host instead of stopping it.
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        else:
            tokens = tokens.to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
