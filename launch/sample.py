"""Let a model that was trained on text (`distlab train --data my.txt`) continue a prompt.

    distlab sample outputs/train/my-run                 asks for prompts
    distlab sample outputs/train/my-run --prompt "Once"
    distlab sample outputs/train/my-run --export llama  for transformers

The folder is the one that `distlab train` named when it ended.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from distlab.comm import RankContext
from distlab.comm.rank_process import run_rank
from distlab.model.export import export
from distlab.options import SEED, Options, config_from, given, option, parser_of
from distlab.text import for_terminal
from distlab.train.sample import generate, load_model, newest_usable


@dataclass(frozen=True)
class SampleOptions(Options):
    """Run to sample from, prompt, and how to draw."""

    run: str = option("", "folder of the run", positional=True)
    prompt: str | None = option(None, "text to continue [lines of the terminal, until its end]")
    tokens: int = option(200, "number of tokens to add", minimum=0)
    temperature: float = option(
        0.8, "temperature of the draws; 0 takes the likeliest token", minimum=0
    )
    seed: int = option(0, "seed of the draws", **SEED)
    export: str | None = option(
        None, "folder to write the model to instead, as safetensors with Llama's names"
    )
    backend: str | None = option(
        None, "communication backend [nccl if there are GPUs]", choices=("nccl", "gloo")
    )


def parser() -> argparse.ArgumentParser:
    return parser_of("distlab sample", __doc__, SampleOptions)


def sample(context: RankContext, args: SampleOptions) -> int:
    stored = newest_usable(Path(args.run) / "checkpoints")
    model = load_model(stored, context)
    if args.export is not None:
        if context.is_main:
            export(model, Path(args.export))
            print(f"{args.export}/model.safetensors and config.json")
        return 0
    # A prompt is turned into bytes below, and a model of other tokens would take them for those.
    if model.config.vocab_size != 256:
        raise ValueError(
            f"{stored.path} was not trained on bytes (vocabulary of {model.config.vocab_size})"
        )
    for prompt in _lines(context) if args.prompt is None else [args.prompt]:
        # The bytes that were typed, also those that are not UTF-8.
        bytes_T = torch.tensor(list(os.fsencode(prompt)), dtype=torch.int64, device=context.device)
        tokens = generate(model, bytes_T, args.tokens, temperature=args.temperature, seed=args.seed)
        if context.is_main:
            # A model of bytes may end within a character, or write none.
            text = bytes(tokens.tolist()).decode(errors="replace")
            print(for_terminal(text) if sys.stdout.isatty() else text, flush=True)
    # The line goes to stderr, so that a redirected stdout holds the text alone.
    if context.is_main:
        print(f"(step {stored.step} of {args.run})", file=sys.stderr)
    return 0


def check_export(folder: str) -> None:
    """Refuse a folder in which an export would overwrite a file that is not an earlier export's.

    Raises:
        ValueError: an empty name, or a folder with the config.json of a run or of another program.
    """
    if not folder:
        raise ValueError("--export '' names no folder: give one for the model")
    target = Path(folder)
    is_export = (target / "model.safetensors").exists()
    if (target / "config.json").exists() and not is_export:
        raise ValueError(
            f"--export {folder}: its config.json is not of an export, a run's for example, and "
            "would be lost: give another folder"
        )


def _lines(context: RankContext) -> Iterator[str]:
    """Yield the lines that are typed on the rank with the terminal. Ask again for an empty one."""
    # Ctrl-D ends the input without an error.
    with contextlib.suppress(EOFError):
        while context.is_main:
            if line := input("> " if sys.stdin.isatty() else ""):
                yield line


def main(argv: list[str]) -> int:
    """Run `distlab sample` and return its exit code."""
    args = parser().parse_args(argv)
    options = config_from(SampleOptions, args)
    if options.export is not None:
        check_export(options.export)
        for name in ("prompt", "tokens", "temperature", "seed"):
            if name in given(SampleOptions, args):
                raise ValueError(f"--export writes the model and draws nothing: leave --{name} out")
    if options.prompt == "":
        raise ValueError("--prompt is empty: give at least one character to continue")
    return run_rank(
        lambda context: sample(context, options),
        backend=options.backend,
        timeout_s=60.0,
        name="sample",
    )
