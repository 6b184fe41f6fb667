"""Are the gradients right?

Trains two steps of a model on several ranks and in one process, and names what differs.

    distlab check my_model:build --strategy fsdp
    distlab check my_model:build --wrap my_code:parallelize --nproc 4

What `build` and `parallelize` return: docs/learn/check.md. Exit code 1 when something is wrong, 0
also with a warning, and for a wrapper that is right with one backward per step and does not claim
to accumulate gradients.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distlab.bench.task import check_name
from distlab.check import on_rank
from distlab.comm import RankContext, RankEnvironment
from distlab.experiment import RankOptions
from distlab.options import SEED, config_from, option, parser_of
from distlab.parallel import STRATEGIES
from launch.ranks import run_on_ranks

NAME = "distlab check"
STDERR = "ranks.log"  # file in the command's temporary folder


@dataclass(frozen=True)
class CheckOptions(RankOptions):
    """Model to check, and the wrapper or strategy around it."""

    model: str = option(
        "", "your model: package.module:function, see docs/learn/own_model.md", positional=True
    )
    wrap: str | None = option(None, "your wrapper: package.module:function (module, group)")
    strategy: str | None = option(
        None, "strategy to check, without --wrap [bucketed]", choices=tuple(STRATEGIES)
    )
    optimizer: str = option(
        "sgd", "a class of torch.optim, or your own as package.module:Class; its state is compared"
    )
    batch: int = option(4, "examples per micro-batch", minimum=1)
    micro_batches: int | None = option(
        None, "number per rank and step [ranks + 1, and where that is wrong also one]", minimum=1
    )
    same_batch: bool = option(
        False, "give all ranks the same batches, as in tensor or context parallelism"
    )
    where: bool = option(
        False, "name the first module whose output, or its gradient, differs from one process"
    )
    seed: int = option(0, "seed of parameters and data", **SEED)
    backend: str | None = option("gloo", "backend of the ranks", choices=("nccl", "gloo"))
    timeout: float = option(30.0, "seconds a collective may take", above=0, maximum=3600)
    json: bool = option(False, "print only the line of JSON")


def parser() -> argparse.ArgumentParser:
    return parser_of("distlab check", __doc__, CheckOptions)


def main(arguments: Sequence[str]) -> int:
    """Run `distlab check`. Return the exit code, which is 1 if something is wrong."""
    options = config_from(CheckOptions, parser().parse_args(arguments))
    if not options.model:
        raise ValueError(
            "give your model as package.module:function, such as examples.own_model:build"
        )
    if options.wrap is not None:
        if options.strategy is not None:
            raise ValueError("give --wrap or --strategy: a check has one of them")
        check_name(options.wrap, "--wrap")

    def work(context: RankContext) -> int:
        verdict = on_rank(
            context,
            options.model,
            options.wrap or options.strategy or "bucketed",
            batch=options.batch,
            same_batch=options.same_batch,
            micro_batches=options.micro_batches,
            seed=options.seed,
            optimizer=options.optimizer,
            where=options.where,
        )
        # The command takes its exit code from rank 0, so the other ranks end as if nothing were
        # wrong.
        if not context.is_main:
            return 0
        print(json.dumps(verdict.to_dict()) if options.json else verdict, flush=True)
        return 0 if verdict.right else 1

    # The option that a launching process got is passed on as it was given, and each rank parses it.
    command = ["check", *arguments]
    # Started by torchrun, whose process writes the ranks' output.
    if RankEnvironment.read().launched:
        return run_on_ranks(work, command, options, 2, NAME)
    folder = Path(tempfile.mkdtemp(prefix="distlab-check-"))
    keep = False
    try:
        judged = folder / "exit_code"
        with _stderr_into(folder / STDERR):
            code = run_on_ranks(work, command, options, 2, NAME, judged)
        written = (folder / STDERR).read_text(errors="replace")
        # Rank 0 came to a verdict, and the command ended by it. All other ends are told in one
        # sentence.
        if judged.exists() and code == int(judged.read_text()):
            print(written, end="", file=sys.stderr, flush=True)
            return code
        said = _what_happened(written, folder / STDERR)
        # The sentence names the log, which the user may want to read.
        keep = str(folder) in said
        print(said, file=sys.stderr, flush=True)
        # Without a verdict nothing is known to be right, so the code must not be 0.
        return code or 1
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _stderr_into(file: Path) -> Iterator[None]:
    """Write stderr of this process and of those that it starts into a file.

    Ranks that lose another one print stacks of a hundred lines, in which the sentence that says
    what happened is lost.
    """
    # Buffered text belongs to the old stderr.
    sys.stderr.flush()
    # The file descriptor is replaced, not `sys.stderr`: child processes and C++ code write to the
    # descriptor.
    before = os.dup(2)
    with open(file, "wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def _what_happened(written: str, file: Path) -> str:
    """Return one sentence for a check that came to no verdict, from what was written to stderr."""
    lines = written.splitlines()
    stopped = [line for line in lines if line.startswith(NAME) and "stopped by" in line]
    errors = [line for line in lines if re.search(rf"{NAME}: error:", line)]
    ended = [line for line in lines if re.match(r"rank \d+ (ended with|was stopped by)", line)]
    # A single line is the whole story, so the log is not worth keeping.
    if errors and len(lines) == 1:
        return errors[0]
    if errors:
        return f"{errors[0]} (all that the ranks wrote: {file})"
    if ended:
        reason = ""
        # gloo raises this C++ error where two messages of unequal size meet.
        if "EnforceNotMet" in written:
            reason = (
                ", because another rank sent it a message of another size: every rank must make "
                "the same calls in the same order, with tensors of the same sizes"
            )
        return f"{NAME}: error: {ended[0]}{reason} (all that the ranks wrote: {file})"
    if stopped:
        return stopped[0]
    return f"{NAME}: error: the ranks ended without a verdict (all that they wrote: {file})"
