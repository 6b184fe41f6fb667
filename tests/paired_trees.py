r"""Is a strategy's step slower than it was?

Two versions of this repository, timed in the same processes.

    git archive --prefix=before/ COMMIT distlab kernels | tar x -C outputs
    torchrun --standalone --nproc-per-node 2 -m tests.paired_trees outputs/before \
        --size xl --batch 2 --dtype bf16
    torchrun --standalone --nproc-per-node 2 -m tests.paired_trees . \
        --strategies fsdp --now hsdp --size xl --dtype bf16

Not part of the test suite. The last command compares two strategies of this version. Each round
attaches every strategy with the code of the other tree and with that of this one, in alternating
order, and times a block of steps of each; sample i of both form a pair. Clock drift between two
runs, which is larger than the differences that matter here, hits both.
"""

import argparse
import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from distlab.comm import RankContext, rank_context
from distlab.measure.interleaved import paired_ratio, percentiles

# as in ddp_bench's preset
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
    ours = [name for name in sys.modules if name.split(".")[0] in ("distlab", "kernels")]
    return {name: sys.modules.pop(name) for name in ours}


# torch's own function, and how many times a tree has been attached.
_prefix_store, _attached = dist.PrefixStore, itertools.count()


def _use_new_keys() -> None:
    """Give what is attached next keys of its own in the job's store.

    On gloo, wrappers connect their ranks once per import of `distlab.comm.agreement`, under one name,
    and would find the addresses of the tree before.
    """
    number = next(_attached)
    dist.PrefixStore = lambda prefix, store: _prefix_store(f"{prefix}/{number}", store)


def samples(
    context: RankContext, options: argparse.Namespace, strategy: str, shard_size: int | None
) -> list[float]:
    """Step times in ms of one attachment, by whichever tree is imported now."""
    from distlab.model.config import preset

    try:
        bench_module = importlib.import_module("distlab.bench.timing")
        shape = HOST if options.host else {}
        config = bench_module.BenchOptions(
            size=options.size, batch=options.batch, dtype=options.dtype, **shape
        )
        bench = bench_module.Workbench(context, config)
    except ModuleNotFoundError:  # an older tree
        bench_module = importlib.import_module("distlab.train.workbench")
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
        bench = bench_module.Workbench(
            context, preset(options.size), batch_size=options.batch, compute_dtype=dtype
        )
    # which an older tree does not know
    mesh = {} if shard_size is None else {"shard_size": shard_size}
    row = bench_module.variants([strategy], [options.bucket_size_mb], **mesh)
    _use_new_keys()
    blocks = {
        "rounds": 1,
        "warmup": options.warmup,
        "steps": options.steps,
        "inspect": lambda *_: None,
    }
    return bench.time_rounds(row, **blocks)[row[0].name].phases["step"]


def losses(context: RankContext, options: argparse.Namespace, strategy: str) -> list[str]:
    """Losses of a training in hex, by whichever tree is imported now; two micro-batches a step from the middle on."""
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
        accumulates = step >= options.losses // 2
        for micro_batch in range(1 + accumulates):
            tokens = torch.randint(config.vocab_size, (options.batch, 33), device=context.device)
            with model.no_sync() if accumulates and micro_batch == 0 else nullcontext():
                loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
                loss.backward()
            found.append(loss.item().hex())
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    model.close()
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
    parser.add_argument("--now", help="strategy of this version to hold against it [the same]")
    parser.add_argument(
        "--shard-size", type=int, help="ranks of a shard group in this version [those of a host]"
    )
    parser.add_argument("--size", default="tiny", help="model preset [tiny]")
    parser.add_argument("--host", action="store_true", help="layers so small that the host decides")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank [2]")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16 [fp32]")
    parser.add_argument("--bucket-size-mb", type=float, default=400.0, help="MiB [400]")
    parser.add_argument("--rounds", type=int, default=4, help="attachments of each version [4]")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps per attachment [3]")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per attachment [8]")
    parser.add_argument(
        "--losses", type=int, default=0, help="steps whose losses are compared, in fp32 [0: none]"
    )
    options = parser.parse_args()
    with rank_context(timeout_s=120) as context:
        for strategy in options.strategies.split(","):
            before: list[float] = []
            now: list[float] = []
            sides = [
                (options.before.resolve(), strategy, None, before),
                (HERE, options.now or strategy, options.shard_size, now),
            ]
            for number in range(options.rounds):
                for root, name, shard_size, taken in sides[:: 1 if number % 2 == 0 else -1]:
                    with tree(root):
                        taken += samples(context, options, name, shard_size)
            pair = []
            for root, name, *_ in sides if options.losses else ():
                with tree(root):
                    pair.append(losses(context, options, name))
            if context.is_main:
                ratio = paired_ratio(now, before)._asdict()
                found = {
                    "before_ms": percentiles(before),
                    "now_ms": percentiles(now),
                    "now_over_before": ratio,
                }
                if pair:
                    found |= {"losses": pair[1], "losses_equal": pair[0] == pair[1]}
                print(
                    json.dumps({"strategy": strategy} | vars(options) | found, default=str),
                    flush=True,
                )


if __name__ == "__main__":
    main()
