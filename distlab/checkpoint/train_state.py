"""What a checkpoint holds besides model and optimizer: the random generators of each rank, as tensors."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_rank(seed: int, rank: int) -> None:
    """Seed every generator of this process; ranks differ, so that dropout does."""
    mixed = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)  # CUDA's too


def generators() -> dict[str, Tensor]:
    """Copies of all states: Python's, NumPy's legacy one, torch's on the CPU and on the current GPU."""
    version, words, gauss = random.getstate()
    # Integers below 2³² are exact in fp64; NaN stands for "no second Gaussian waiting".
    python = [version, *words, float("nan") if gauss is None else gauss]
    _, keys, position, has_gauss, cached = np.random.get_state()
    found = {
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_generators(saved: Mapping[str, Tensor]) -> None:
    """The inverse of `generators`; kinds that are missing, or not of this machine, are left as they are.

    Raises:
        ValueError: what is no state of a generator.
    """
    mine = generators()
    for kind, state in saved.items():
        if kind in mine and (state.shape, state.dtype) != (mine[kind].shape, mine[kind].dtype):
            raise ValueError(
                f"the stored random generator '{kind}' has {tuple(state.shape)} {state.dtype}, and needs "
                f"{tuple(mine[kind].shape)} {mine[kind].dtype}"
            )
    try:
        if "python" in saved:
            version, *words, gauss = saved["python"].tolist()
            random.setstate((int(version), tuple(map(int, words)), None if gauss != gauss else gauss))
        if "numpy" in saved:
            *keys, position, has_gauss, cached = saved["numpy"].tolist()
            key_array = np.array(keys, dtype=np.uint32)
            np.random.set_state(("MT19937", key_array, int(position), int(has_gauss), cached))
        if "torch" in saved:
            torch.set_rng_state(saved["torch"])
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"a stored random generator cannot be restored: {error}") from None
