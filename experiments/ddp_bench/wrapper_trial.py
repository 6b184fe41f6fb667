"""Try each of the user's wrappers in ranks of its own, where it cannot harm the run.

A wrapper may raise on one rank, hang, end its process or take all memory. So before anything is
timed, rank 0 starts processes in which the wrapper trains two steps and is compared with one
process, and ends them if they take too long or too much memory. The other ranks of the run wait for
the result: a verdict, or a sentence that says what happened. Only wrappers that came through are
timed, in the ranks of the run.

With several hosts, the ranks are those of the host of rank 0.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from distlab.bench.reference import small
from distlab.bench.task import NOT_THE_USERS, blamed
from distlab.bench.trial import Trial
from distlab.bench.variant import Variant
from distlab.bench.wrappers import wrapped_by
from distlab.comm import RankContext, RankEnvironment, collectives
from distlab.comm.rank_process import is_lost_peer, on_main
from distlab.experiment import Run
from distlab.measure import CollectiveRecorder
from distlab.measure.memory import free_bytes
from distlab.testing import DIED, NO_ANSWER, TOO_LARGE, RanksFailed, run_ranks, shut_down
from experiments.ddp_bench.comparison import FAILED
from experiments.ddp_bench.rows import Row, is_checked, verdict_on

if TYPE_CHECKING:
    from experiments.ddp_bench import DDPBenchConfig

# Seconds for imports, building, compilation, the steps and the comparison, in addition to one
# timeout of a collective.
WORK_S = 180.0
# Free memory that is left to other programs: this, or a tenth of it if that is more.
RESERVE_BYTES = 2**29
TOLD = "the wrapper "  # beginning of a line that a rank writes for rank 0 of the run


def try_wrappers(
    rows: Sequence[Row], config: DDPBenchConfig, context: RankContext, run: Run
) -> None:
    """Fill in the verdict of each of the user's wrappers. Call it on every rank.

    The verdict is `failed` for a wrapper that must not be timed, with the reason in a sentence.
    """
    if not rows:
        return
    # The ranks that wait need a group whose collectives may take longer than the run's own. Also
    # with NCCL it is gloo's, so that they do not keep their GPUs busy.
    longest_s = WORK_S + context.timeout_s
    # Twice the deadline of `tried`: `run_ranks` waits up to one deadline until its processes have
    # started, and up to another for their answers.
    waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * longest_s))
    patient = replace(context, group=waiting)
    try:
        for row in rows:
            run.progress(f"trying {row.name} in processes of its own")
            log = run.path / f"wrap_{row.name}.log"
            # A verdict, or an error, of rank 0 reaches every rank. All of them drop the same rows,
            # so that their collectives keep matching.
            row.verdict = on_main(patient, partial(tried, row.name, config, context, log))
            if row.verdict.get("verdict") == FAILED:
                run.progress(f"{row.name} {row.verdict['verdict_detail']}; its output: {log}")
    finally:
        dist.destroy_process_group(waiting)


def tried(name: str, config: DDPBenchConfig, context: RankContext, log: Path) -> dict[str, str]:
    """Try one wrapper in new processes, and end them.

    Args:
        name: the wrapper, as `package.module:function`.
        context: rank 0 of the run. The new ranks have its backend and timeout.
        log: file for the output of the new ranks.

    Returns:
        `verdict` and `verdict_detail`, see `verdict_on`. Empty if nothing was compared.
    """
    place = RankEnvironment.read()
    # `run_ranks` starts processes on this host only, and NCCL needs a GPU of its own for each.
    ranks = place.local_world_size if place.launched else context.world_size
    # Ranks append to it. An earlier run's lines must not be taken for theirs.
    log.write_text("")
    try:
        verdicts = run_ranks(
            try_on_rank,
            ranks,
            name,
            config,
            log,
            backend=context.backend,
            # With NCCL each rank takes the GPU of its number. gloo's ranks would otherwise all use
            # the CPU.
            device=None if context.backend == "nccl" else str(context.device),
            deadline_s=WORK_S + context.timeout_s,
            group_timeout_s=context.timeout_s,
            memory_bytes=memory_limit(config, ranks),
        )
    except RanksFailed as failed:
        written = log.read_text(errors="replace")
        sentence = what_happened(failed, written, ranks, context.timeout_s)
        # The sentence goes into a table. The stacks of all ranks are kept here.
        log.write_text(f"{written}\n{failed}\n")
        return {"verdict": FAILED, "verdict_detail": sentence}
    finally:
        shut_down()  # the next wrapper must not meet what this one has changed
    # `verdict_on` compares all ranks, so each of them has the same verdict.
    return verdicts[0]


def memory_limit(config: DDPBenchConfig, ranks: int) -> int | None:
    """Return the bytes that each rank may have resident. None if the free memory is not known."""
    if config.wrap_memory_gib is not None:
        return int(config.wrap_memory_gib * 2**30)
    free = free_bytes("cpu")
    if free is None:
        return None
    # The ranks share the host's memory in equal parts.
    return (free - max(RESERVE_BYTES, free // 10)) // ranks


def try_on_rank(
    context: RankContext, name: str, config: DDPBenchConfig, log: Path
) -> dict[str, str]:
    """Train two steps under a wrapper and compare it with one process, on a rank of its own."""
    os.setsid()  # then rank 0 of the run ends this process with all that the wrapper starts
    with open(log, "ab") as file:
        # The file descriptors themselves, so that output of C++ and of processes that the wrapper
        # starts also goes to the log.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Only now, with the output redirected: this imports the user's module, which may print or fail.
    strategy = wrapped_by(name)
    try:
        # `blamed` adds the wrapper's name to an error, so that the message says whose code failed.
        with blamed(name, "the training step", "under"):
            # First the steps as they will be timed, then the comparison with one process.
            messages = collectives.if_it_fits(
                lambda: _messages_of_a_step(Variant(name, strategy), config, context),
                context.device,
                context.group,
            )
        if messages is None:
            return {}  # out of memory, as its row will say
        if not is_checked(config, context):
            return {}
        if config.factory is not None:
            task = config.task()
        else:
            # A model of two layers has every kind of parameter, and its check takes seconds.
            task = small(num_layers=2, d_model=64, d_ff=128, vocab_size=256)
        verdict = verdict_on(context, strategy, task)
    # SystemExit is not an Exception: a wrapper that calls sys.exit would otherwise end silently.
    except SystemExit as end:
        _tell(f"ended the process of rank {context.rank} (sys.exit({end.code!r}))")
        raise
    except Exception as error:
        traceback.print_exc()
        # The error of the user's code is the cause of the one that `blamed` raises.
        first = error.__cause__ or error
        # A rank that waited in vain is not the one that failed, and must not be named.
        if not isinstance(error, TimeoutError) and not is_lost_peer(first):
            # The row's name already says which wrapper it is.
            said = str(error).removeprefix(f"under {name}: ")
            _tell(f"raised on rank {context.rank}: {said}")
        raise
    # The verdict alone does not show whether the wrapper communicated.
    if messages == 0 and "verdict" in verdict:
        verdict["verdict"] += ", sent nothing"
    return verdict


def _messages_of_a_step(variant: Variant, config: DDPBenchConfig, context: RankContext) -> int:
    """Run two steps of the trial that will be timed. Return the collectives of the second."""
    with closing(Trial(context, config, variant)) as trial:
        # The first step may compile, build buckets, or broadcast the model. Only the second is a
        # step as any other.
        trial()
        with CollectiveRecorder() as recorder:
            trial()
        trial.settle()
    return recorder.count


def _tell(text: str) -> None:
    """Write a line for `what_happened`. A rank that failed may not come to give an answer."""
    print(f"{TOLD}{text}", flush=True)


def what_happened(failed: RanksFailed, written: str, ranks: int, timeout_s: float) -> str:
    """Say in a sentence without its subject, the wrapper, why the ranks did not come to a verdict.

    Args:
        written: text that the ranks have printed.
        ranks: number of ranks that were started.
        timeout_s: seconds that a collective may take.
    """
    # The first failure is the cause. Later ones are ranks that it left waiting.
    rank, text = next(iter(failed.failures.items()))
    if failed.kind == TOO_LARGE:
        return f"{failed.cause.removeprefix('the process ')} on rank {rank}"
    # Lines without this beginning are what the wrapper printed itself.
    told = [line.removeprefix(TOLD) for line in written.splitlines() if line.startswith(TOLD)]
    if told:
        rank_said = re.search(r"rank \d+", told[0])[0]
        # Equal but for the number of the rank: then one sentence for all ranks says it.
        same = {re.sub(r"rank \d+", "", line, count=1) for line in told}
        on_all = ranks > 1 and len(told) == ranks and len(same) == 1
        return told[0].replace(rank_said, "every rank", 1) if on_all else told[0]
    # On NCCL a rank that waited in vain ends its process, after this message.
    waited = re.search(r"^rank \d+ was .*?, and (.* did not come)", written, re.MULTILINE)
    if failed.kind == DIED and waited is None:
        return (
            f"ended the process of rank {rank} ({failed.cause.removeprefix('the process died, ')})"
        )
    if failed.kind == NO_ANSWER and "in vain" in failed.cause:
        place = _users_line(text)
        return f"hangs: the other ranks waited {timeout_s:g} s for rank {rank}{place}"
    if failed.kind == NO_ANSWER:
        return f"hangs: rank {rank} gave {failed.cause}{_users_line(text)}"
    missing = f": {waited[1]}" if waited else ", which not every rank joined"
    return f"hangs: a rank waited {timeout_s:g} s in a collective{missing}"


def _users_line(stack: str) -> str:
    """Return the user's innermost line in a stack, for the end of a sentence. Empty if none."""
    # A stack of `faulthandler` lists the innermost call first, and torch's own frames come before
    # the user's.
    for file, line in re.findall(r'File "([^"]+)", line (\d+)', stack):
        path = Path(file)
        # Paths of torch, of the lab and of Python itself are not the user's.
        if path.is_file() and not any(map(path.is_relative_to, NOT_THE_USERS)):
            return f", which was at {path.name}:{line}"
    return ""
