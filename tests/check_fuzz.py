"""Hold `distlab check` against right wrappers of random models: it must accuse none.

    python -m tests.check_fuzz --seeds 500 --ranks 2

The models are those of `tests.fuzz`: trees of layers and containers, ties, frozen parts, parameters
read elsewhere. Each seed has one strategy in turn. In every ninth seed all ranks share the matrices
of a random Transformer instead, and `gather` puts them together. What a strategy refuses, or cannot
be compared, is counted apart. Exits with 1 if a right wrapper is accused.
"""

import argparse
import random
import re
import sys
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.bench.task import own_task
from distlab.bench.wrappers import as_strategy
from distlab.check import check
from distlab.check.judge import NothingToCompare
from distlab.model import ModelConfig, TransformerLM
from distlab.parallel import get_strategy
from distlab.parallel.tensor_parallel import gather_cuts, parallelize
from distlab.testing import run_ranks
from tests.fuzz import (
    LENGTH,
    ON_A_MESH,
    VOCABULARY,
    Root,
    as_allowed,
    generate,
    is_refusal,
    tensors_in,
)
from tests.fuzz import STRATEGIES as FUZZED

SHARED = "tensor"  # not a strategy: the ranks share matrices, and get the same batches
STRATEGIES = (*(name for name in FUZZED if name not in ON_A_MESH), SHARED)
BATCH = 3  # examples
AT_ONCE = 20  # seeds for which the ranks are asked together
ACCUSED = "ACCUSED"
# What `check` cannot compare. ZeRO-1 cuts a parameter in the order of its memory, which then cannot
# be put together. Other models have no parameter to train, or none on the way to the loss.
OUTSIDE = re.compile("row-major order|no parameter to train|does not require grad")


def strategy_of(seed: int) -> str:
    """Return the name of the strategy that a seed is for."""
    return STRATEGIES[seed % len(STRATEGIES)]


def random_model(seed: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return a factory's three parts for the random model of a seed."""
    if strategy_of(seed) == SHARED:
        return random_transformer(seed, dtype)
    case = as_allowed(generate(seed), strategy_of(seed))

    def batch(size: int, generator: torch.Generator) -> Tensor:
        if case.tokens:
            return torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
        return torch.randn(size, LENGTH, case.width, generator=generator).to(dtype)

    def loss(model: nn.Module, inputs: Tensor) -> Tensor:
        losses = []
        for place, output in enumerate(tensors_in(model(inputs))):
            target = torch.full_like(output, 0.3 + 0.1 * place)
            losses.append(F.smooth_l1_loss(output, target))
        return torch.stack(losses).sum()

    return Root(case, case.seed).to(dtype), batch, loss


def random_transformer(seed: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return a factory's three parts for a Transformer whose sizes 2, 3 and 4 ranks divide."""
    draw = random.Random(seed)
    kv_heads = draw.choice((12, 24))
    config = ModelConfig(
        d_model=24 * draw.choice((2, 4)),
        d_ff=12 * draw.randint(1, 6),
        num_layers=draw.randint(1, 3),
        num_heads=24,
        num_kv_heads=kv_heads,
        vocab_size=12 * draw.randint(1, 4),
        context_length=12 * draw.randint(1, 2),
        tie_embeddings=draw.random() < 0.5,
        attention=draw.choice(("naive", "sdpa")),
    )
    model = TransformerLM(config).to(dtype)
    model.reset_parameters(seed)
    if draw.random() < 0.3:
        model.blocks[0].requires_grad_(False)

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        length = config.context_length + 1
        tokens = torch.randint(config.vocab_size, (size, length), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return model, batch, loss


class SharesMatrices(nn.Module):
    """The lab's tensor parallelism in the form of a user's wrapper."""

    def __init__(self, module: nn.Module, group: ProcessGroup):
        super().__init__()
        self.module, self.group = module, group
        self.cuts = parallelize(module, group)
        if module.head.weight is module.embedding.weight:
            # A tied matrix is cut by one of its names, and `check` asks by the other, too.
            self.cuts["head.weight"] = self.cuts["embedding.weight"]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Return the whole of a parameter, or of its gradient."""
        return gather_cuts({name: local}, self.cuts, self.group)[name]


def __getattr__(name: str) -> Any:
    """Return the factory `model_SEED`, which ranks look up by its name."""
    found = re.fullmatch(r"model_(\d+)", name)
    if found is None:
        raise AttributeError(name)
    return partial(random_model, int(found[1]), torch.float32)


def judge(context: Any, seeds: range) -> list[tuple[str, str]]:
    """Return for each seed the outcome in a word or two, and what was said. Runs on every rank."""
    outcomes = []
    for seed in seeds:
        name = strategy_of(seed)
        is_shared = name == SHARED
        case = as_allowed(generate(seed), name)
        try:
            task = own_task(f"{__name__}:model_{seed}", BATCH)
            strategy = as_strategy(SHARED, SharesMatrices) if is_shared else get_strategy(name)
            verdict = check(context, task, strategy, same_batch=is_shared)
        except NothingToCompare as error:
            outcomes.append(("nothing to compare", str(error)))
        except (ValueError, RuntimeError) as error:
            is_known = not is_shared and (
                is_refusal(case, name, str(error)) or OUTSIDE.search(str(error)) is not None
            )
            outcomes.append(("refused" if is_known else "error", str(error)))
        else:
            said = "; ".join(finding.signature for finding in verdict.findings)
            outcomes.append(("right" if verdict.right else ACCUSED, said))
    return outcomes


def main() -> int:
    """Check the models of all seeds. Return 1 if a right wrapper is accused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=500, help="number of seeds")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    end = options.first + options.seeds
    for first in range(options.first, end, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, end))
        for seed, (outcome, said) in zip(
            seeds, run_ranks(judge, options.ranks, seeds, deadline_s=600.0)[0], strict=True
        ):
            totals[outcome] += 1
            if outcome in (ACCUSED, "error"):
                print(f"seed {seed}, {strategy_of(seed)}: {outcome}: {said[:300]}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in totals.most_common()))
    return int(totals[ACCUSED] > 0)


if __name__ == "__main__":
    # As an imported module, whose functions the rank processes know by name.
    from tests import check_fuzz

    sys.exit(check_fuzz.main())
