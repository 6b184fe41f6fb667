"""Let a model that was trained on text (`launch/train.py --data my.txt`) continue a prompt.

python launch/sample.py outputs/train/my-tiny-bucketed --prompt "Once"
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from distlab.comm import RankContext
from distlab.ending import USAGE_ERROR
from distlab.report.options import real, seed, whole
from distlab.train.sample import generate, load_model, newest_usable
from launch.ranks import leave_process, run_rank


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("run", help="folder of the run")
    p.add_argument("--prompt", default="\n", help="what to continue")
    p.add_argument("--tokens", type=whole(0), default=200, help="how many more [%(default)s]")
    p.add_argument("--temperature", type=real(least=0), default=0.8, help="0 takes the likeliest [%(default)s]")
    p.add_argument("--seed", type=seed, default=0)
    p.add_argument("--backend", choices=("nccl", "gloo"), help="[nccl where there are GPUs]")
    return p


def sample(context: RankContext, args: argparse.Namespace) -> int:
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


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if not args.prompt:
        print("sample: error: --prompt is empty: give at least one character to continue", file=sys.stderr)
        return USAGE_ERROR
    return run_rank(
        lambda context: sample(context, args), backend=args.backend, timeout_s=60.0, name="sample"
    )


if __name__ == "__main__":
    leave_process(main())
