"""Let a model that was trained on text (`distlab train --data my.txt`) continue a prompt.

    distlab sample outputs/train/my-tiny-bucketed --prompt "Once"
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from distlab.comm import RankContext
from distlab.comm.rank_process import run_rank
from distlab.options import SEED, Options, config_from, option, parser_of
from distlab.train.sample import generate, load_model, newest_usable


@dataclass(frozen=True)
class SampleOptions(Options):
    """What to continue, and how."""

    run: str = option("", "folder of the run", positional=True)
    prompt: str = option("\n", "what to continue")
    tokens: int = option(200, "how many more", least=0)
    temperature: float = option(0.8, "0 takes the likeliest", least=0)
    seed: int = option(0, "of the draws", **SEED)
    backend: str | None = option(None, "[nccl where there are GPUs]", choices=("nccl", "gloo"))


def parser() -> argparse.ArgumentParser:
    return parser_of("distlab sample", __doc__, SampleOptions)


def sample(context: RankContext, args: SampleOptions) -> int:
    stored = newest_usable(Path(args.run) / "checkpoints")
    model = load_model(stored, context)
    if model.config.vocab_size != 256:
        raise ValueError(f"{stored.path} was not trained on bytes (vocabulary of {model.config.vocab_size})")
    prompt = torch.tensor(list(os.fsencode(args.prompt)), dtype=torch.int64, device=context.device)
    tokens = generate(model, prompt, args.tokens, temperature=args.temperature, seed=args.seed)
    if context.is_main:
        print(bytes(tokens.tolist()).decode(errors="replace"))
        print(f"(step {stored.step} of {args.run})", file=sys.stderr)
    return 0


def main(argv: list[str]) -> int:
    """`distlab sample`; returns the exit code."""
    args = parser().parse_args(argv)
    options = config_from(SampleOptions, args)
    if not options.prompt:
        raise ValueError("--prompt is empty: give at least one character to continue")
    return run_rank(lambda context: sample(context, options), backend=options.backend, timeout_s=60.0, name="sample")
