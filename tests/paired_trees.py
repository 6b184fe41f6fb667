"""Is a strategy's step slower than it was?

Time two versions of this repository in the same processes. It is not a part of the test suite.

    git archive --prefix=before/ COMMIT distlab kernels | tar x -C outputs
    torchrun --standalone --nproc-per-node 2 -m tests.paired_trees outputs/before --size xl
    torchrun --standalone --nproc-per-node 2 -m tests.paired_trees . --strategies fsdp --now hsdp

The last command compares two strategies of this version. Each round builds every strategy with the
code of the other tree and with that of this one, in alternating order, and times a block of steps
of each. Sample i of both form a pair. Clock drift, which is larger than the differences that matter
here, affects both. The other tree may be as old as commit 1ad93b35.
"""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm import RankContext, rank_context
from distlab.measure.interleaved import MIN_PAIRS, paired_ratio, percentiles

# Shape of the model of `ddp_bench --host`.
HOST = {"d_model": 64, "d_ff": 64, "heads": 2, "vocab": 64, "context": 16}
HERE = Path(__file__).resolve().parents[1]


@contextmanager
def tree(root: Path) -> Iterator[None]:
    """Let `import distlab` and `import kernels` find the packages under `root`, imported anew."""
    outside = _forget()
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name, module in _forget().items():
            # torch allows one definition of an operator's namespace
            if name.endswith("comm.copy_engine"):
                module._library._destroy()
        sys.modules.update(outside)


def _forget() -> dict[str, ModuleType]:
    """Remove the packages of this repository from the imported modules, and return them."""
    removed = {}
    for name in list(sys.modules):
        if name.split(".")[0] in ("distlab", "kernels"):
            removed[name] = sys.modules.pop(name)
    return removed


# torch's own class, and a number for each build of a model.
_prefix_store = dist.PrefixStore
_builds = itertools.count()


def _use_new_keys() -> None:
    """Give the next model that is built keys of its own in the job's store.

    On gloo, wrappers connect their ranks once per import of `distlab.comm.agreement`, under one
    name, and would find the addresses of the tree before.
    """
    number = next(_builds)

    def numbered_store(prefix: str, store: dist.Store) -> dist.PrefixStore:
        return _prefix_store(f"{prefix}/{number}", store)

    dist.PrefixStore = numbered_store


def step_samples(
    context: RankContext, options: argparse.Namespace, strategy: str, shard_size: int | None
) -> list[float]:
    """Build a model with the tree that is imported now, and return its step times in ms."""
    _use_new_keys()
    try:
        from distlab.bench.step_timing import time_rounds
        from distlab.bench.variant import BenchOptions, variants
    except ModuleNotFoundError:
        # Until commit 1ad93b35, one module held all three, and rounds were a method.
        from distlab.bench.timing import BenchOptions, Workbench, variants

        time_rounds = None
    shape = HOST if options.host else {}
    config = BenchOptions(size=options.size, batch=options.batch, dtype=options.dtype, **shape)
    rows = variants([strategy], [options.bucket_size_mb], shard_size)
    if time_rounds is None:
        timings = Workbench(context, config).time_rounds(
            rows, rounds=1, warmup=options.warmup, steps=options.steps, inspect=_no_inspection
        )
    else:
        timings = time_rounds(
            config,
            rows,
            context,
            rounds=1,
            warmup=options.warmup,
            steps=options.steps,
            inspect=_no_inspection,
        )
    return timings[rows[0].name].phases["step"]


def _no_inspection(variant: object, trial: object) -> None:
    """Do nothing between two blocks of steps."""


def losses(context: RankContext, options: argparse.Namespace, strategy: str) -> list[str]:
    """Train with the tree that is imported now, and return the losses in hex.

    Steps of the second half have two micro-batches.
    """
    from distlab.model import TransformerLM, cross_entropy, preset
    from distlab.parallel import get_strategy

    _use_new_keys()
    torch.manual_seed(context.rank)
    config = preset(options.size)
    module = TransformerLM(config).to(context.device)
    model, optimizer = get_strategy(strategy).build(
        module, context.group, torch.optim.AdamW, {"lr": 1e-2}
    )
    found = []
    for step in range(options.losses):
        micro_batches = 2 if step >= options.losses // 2 else 1
        for number in range(micro_batches):
            tokens = torch.randint(config.vocab_size, (options.batch, 33), device=context.device)
            is_last = number == micro_batches - 1
            with nullcontext() if is_last else model.no_sync():
                loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
                loss.backward()
            found.append(loss.item().hex())
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return found


@dataclass
class Side:
    """One of the two versions that are compared.

    Attributes:
        root: folder of its `distlab` and `kernels`.
        strategy: name of the strategy to time.
        shard_size: ranks in a shard group, or None for those of a host.
        samples_ms: step times so far.
    """

    root: Path
    strategy: str
    shard_size: int | None = None
    samples_ms: list[float] = field(default_factory=list)


def compare(context: RankContext, options: argparse.Namespace, strategy: str) -> dict[str, Any]:
    """Time a strategy in both trees, in alternating order, and return what was found."""
    before = Side(options.before.resolve(), strategy)
    now = Side(HERE, options.now or strategy, options.shard_size)
    for number in range(options.rounds):
        for side in (before, now) if number % 2 == 0 else (now, before):
            with tree(side.root):
                side.samples_ms += step_samples(context, options, side.strategy, side.shard_size)
    found = {"before_ms": percentiles(before.samples_ms), "now_ms": percentiles(now.samples_ms)}
    if len(now.samples_ms) >= MIN_PAIRS:
        found["now_over_before"] = paired_ratio(now.samples_ms, before.samples_ms)._asdict()
    if options.losses:
        with tree(before.root):
            losses_before = losses(context, options, before.strategy)
        with tree(now.root):
            losses_now = losses(context, options, now.strategy)
        found["losses"] = losses_now
        found["losses_equal"] = losses_before == losses_now
    return found


def main() -> None:
    """Time, and print one line of JSON per strategy on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "before", type=Path, help="folder that holds the other version's distlab and kernels"
    )
    parser.add_argument("--strategies", default="zero1,fsdp", help="comma-separated [zero1,fsdp]")
    parser.add_argument("--now", help="strategy of this version to compare with it [the same]")
    parser.add_argument(
        "--shard-size", type=int, help="ranks of a shard group in this version [those of a host]"
    )
    parser.add_argument("--size", default="tiny", help="model preset [tiny]")
    parser.add_argument(
        "--host", action="store_true", help="layers so small that the CPU is the bottleneck"
    )
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank [2]")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16 [fp32]")
    parser.add_argument("--bucket-size-mb", type=float, default=400.0, help="MiB [400]")
    parser.add_argument("--rounds", type=int, default=4, help="builds of each version [4]")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps per build [3]")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per build [8]")
    parser.add_argument(
        "--losses", type=int, default=0, help="steps whose losses are compared, in fp32 [0: none]"
    )
    options = parser.parse_args()
    with rank_context(timeout_s=120) as context:
        for strategy in options.strategies.split(","):
            found = compare(context, options, strategy)
            if context.is_main:
                line = {"strategy": strategy} | vars(options) | found
                print(json.dumps(line, default=str), flush=True)


if __name__ == "__main__":
    main()
