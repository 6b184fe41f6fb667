"""Are the gradients right? Trains two steps of a model on several ranks and in one process, and names what differs.

    distlab check my_model:build --strategy fsdp
    distlab check my_model:build --wrap my_code:parallelize --nproc 4

What `build` and `parallelize` return: docs/learn/check.md. Exit code 1 when something is wrong.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from distlab.bench.task import check_name
from distlab.check import on_rank
from distlab.comm import RankContext
from distlab.experiment import RankOptions
from distlab.options import SEED, config_from, option, parser_of
from distlab.parallel import STRATEGIES
from launch.ranks import run_on_ranks


@dataclass(frozen=True)
class CheckOptions(RankOptions):
    """What to check, and under what."""

    model: str = option("", "your model: package.module:function, see docs/learn/own_model.md", positional=True)
    wrap: str | None = option(None, "your wrapper: package.module:function (module, group)")
    strategy: str = option("bucketed", "without --wrap: what to check instead", choices=tuple(STRATEGIES))
    batch: int = option(4, "examples per micro-batch", least=1)
    same_batch: bool = option(False, "ranks get the same batches, as in tensor or context parallelism")
    seed: int = option(0, "of parameters and data", **SEED)
    backend: str | None = option("gloo", "of the ranks", choices=("nccl", "gloo"))
    timeout: float = option(30.0, "seconds a collective may take", above=0, most=3600)
    json: bool = option(False, "print the line of JSON alone")


def parser() -> argparse.ArgumentParser:
    return parser_of("distlab check", __doc__, CheckOptions)


def main(arguments: Sequence[str]) -> int:
    """`distlab check`; returns the exit code: 1 when something is wrong."""
    options = config_from(CheckOptions, parser().parse_args(arguments))
    if not options.model:
        raise ValueError("give your model as package.module:function, such as examples.own_model:build")
    if options.wrap is not None:
        check_name(options.wrap, "--wrap")

    def work(context: RankContext) -> int:
        chosen = {name: getattr(options, name) for name in ("batch", "same_batch", "seed")}
        verdict = on_rank(context, options.model, options.wrap or options.strategy, **chosen)
        if context.is_main:
            print(json.dumps(verdict.to_dict()) if options.json else verdict)
        return 0 if verdict.right or not context.is_main else 1

    return run_on_ranks(work, ["check", *arguments], options, 2, "distlab check")
