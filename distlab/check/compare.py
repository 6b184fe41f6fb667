"""Train on ranks and in one process, compare, and try again what is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distlab.bench.compiling import with_more_graphs
from distlab.bench.task import Task, examined, own_task
from distlab.bench.wrappers import wrapped_by
from distlab.check.jobs import STEPS, Jobs
from distlab.check.judge import Judge, NothingToCompare
from distlab.check.messages import from_main, gather_on_main, on_all
from distlab.check.optimizer import optimizer_class
from distlab.check.reference import EACH_FORWARD, EACH_STEP, OWN_BUFFERS, Copy, Run, step_size
from distlab.check.signatures import LIKE_BF16, LIKE_FP16, STALE, UNKNOWN, UNNAMED
from distlab.check.tensors import Tensors
from distlab.check.training import Trained, train
from distlab.check.verdict import NORM, Finding, Verdict
from distlab.check.where import first_difference
from distlab.comm import RankContext
from distlab.comm.rank_process import on_main
from distlab.parallel import Strategy, get_strategy

# Least cosine of the angle between a difference and that of the same step under autocast. Measured
# on nine models at 2 and 3 ranks: 1 for autocast, and 0.31 to 1 for FSDP2 that computes in bf16.
# Other small mistakes are below 0.35, with one exception of 0.5 on a model of 48 elements.
LEAST_LIKENESS = 0.35
# Largest number of modules with which each one is tried with old weights, one at a time.
MOST_MODULES = 32


def check(
    context: RankContext,
    task: Task,
    strategy: Strategy,
    *,
    candidate: Task | None = None,
    same_batch: bool = False,
    micro_batches: int | None = None,
    seed: int = 0,
    optimizer: type[Optimizer] = torch.optim.SGD,
    where: bool = False,
) -> Verdict:
    """Train two steps on all ranks and in one process and compare them; call it on every rank.

    Args:
        candidate: task that the ranks train, if it is compared with another `task`.
        same_batch: ranks get the same batches, as ranks do that share a model's layers or a
            sequence.
        micro_batches: number per rank and step. Default: ranks + 1, so that a factor of one cannot
            be taken for a factor of the other. What is wrong then is tried again with one.
        optimizer: class that steps the parameters. Its state is compared as well.
        where: True to name the first module whose output, or its gradient, differs.

    Returns:
        The verdict, the same on every rank.

    Raises:
        ValueError: fewer than two ranks; a model that is random or not a number in one process, or
            whose gradients are all zero; an error in forward, backward, step or wrapper, with its
            place.
        TimeoutError: a rank waited in a collective that not every rank calls.
    """
    if context.world_size < 2:
        raise ValueError("one rank has no other to disagree with: give --nproc 2 or more")
    # Messages of the check's own, which cannot meet those of a wrapper that some ranks do not send.
    # A rank that failed waits here for the others, which may first wait for it until their own
    # timeout.
    patience = timedelta(seconds=4 * context.timeout_s + 60)
    own = replace(context, group=dist.new_group(timeout=patience))
    try:
        # The model, which may be compiled, is built many times.
        with with_more_graphs():
            # One rank decides. A difference in the last bit between ranks would be taken for a
            # mistake of the wrapper.
            lr = on_main(
                own, lambda: step_size(task, task.batches(0, 0, own.device)[0], seed, own.device)
            )
            if optimizer is not torch.optim.SGD:
                # The size of another optimizer's step does not follow from the gradient.
                lr = task.lr
            task, candidate = replace(task, lr=lr), replace(candidate or task, lr=lr)
            jobs = Jobs(task, candidate, strategy, same_batch, seed, optimizer, where)
            # A number that was asked for is checked alone, without a second try.
            if micro_batches is not None:
                return _compare(own, context.group, jobs, micro_batches).verdict
            return _compare_twice(own, context.group, jobs)
    finally:
        dist.destroy_process_group(own.group)


def on_rank(
    context: RankContext,
    model: str,
    wrap: str,
    *,
    batch: int = 4,
    same_batch: bool = False,
    micro_batches: int | None = None,
    seed: int = 0,
    optimizer: str = "sgd",
    where: bool = False,
) -> Verdict:
    """Check a user's model, named `package.module:function`, under a wrapper or a strategy.

    The wrapper is named in the same form, the strategy by its name in the registry, the optimizer
    by that of its class in `torch.optim` or in the same form.

    Raises:
        ValueError, TimeoutError: as in `check`. Also if a factory fails or returns something else.
    """
    # The user's model is examined first, so that its own mistakes are not reported as the
    # wrapper's.
    task = own_task(model, batch, seed)
    examined(model, task, context, seed)
    strategy = wrapped_by(wrap) if ":" in wrap else get_strategy(wrap)
    return check(
        context,
        task,
        strategy,
        same_batch=same_batch,
        micro_batches=micro_batches,
        seed=seed,
        optimizer=optimizer_class(optimizer),
        where=where,
    )


@dataclass(frozen=True)
class _Compared:
    verdict: Verdict
    can_accumulate: bool


def _compare_twice(own: RankContext, group: ProcessGroup, jobs: Jobs) -> Verdict:
    """Compare with ranks + 1 micro-batches per step, and where that is wrong also with one.

    A wrapper that sums over ranks in every backward is right in the usual loop of one backward per
    step. It is accused of accumulation only if it says, by having `no_sync()`, that it can
    accumulate.
    """
    failure = None
    try:
        several = _compare(own, group, jobs, own.world_size + 1)
    except ValueError as error:
        if isinstance(error, NothingToCompare):
            raise
        failure = error
    else:
        # A wrapper that is right with several micro-batches is also right with one.
        if several.verdict.right:
            return several.verdict
    try:
        one = _compare(own, group, jobs, 1)
    except NothingToCompare:
        # Nothing can be said about such a model, whatever the number of micro-batches.
        # For example, the step of an optimizer in fp16 is not a number.
        raise
    except (ValueError, TimeoutError):
        # The first run's error is the better one: the second failed as well, and perhaps for that
        # reason.
        if failure is not None:
            raise failure from None
        return several.verdict
    # It failed with several micro-batches only. That is a mistake if the wrapper says that it can
    # accumulate.
    if failure is not None:
        if one.can_accumulate or not one.verdict.right:
            # The error counts, because accumulation was promised or one micro-batch is wrong as
            # well.
            if one.verdict.right:
                raise ValueError(
                    f"{failure}. With one micro-batch per step it is right: try --micro-batches 1"
                ) from None
            raise failure
        raised = Finding("(the training step)", "error", 0, 0.0, str(failure))
        return replace(one.verdict, accumulation=(raised,))
    # The wrapper is right in the usual loop, and it never claimed more.
    if one.verdict.right and not one.can_accumulate:
        several = several.verdict
        return replace(one.verdict, accumulation=several.findings, together=several.together)
    if not one.can_accumulate and all(each.tensor == NORM for each in one.verdict.findings):
        return one.verdict  # what several micro-batches break would hide the norm
    return replace(several.verdict, right_with_one=one.verdict.right)


def _compare(own: RankContext, group: ProcessGroup, jobs: Jobs, micro_batches: int) -> _Compared:
    """Train on ranks, repeat that on each rank without a wrapper, and judge on rank 0."""
    trained = on_all(own, lambda: train(own, group, jobs, micro_batches))
    # Rank 0 judges, because a comparison needs the tensors of all ranks.
    everyone = gather_on_main(trained, own)
    # Each step is repeated from the parameters that rank 0 had in it (they are judged as well), so
    # that a difference of a last bit after the first step does not grow in the second.
    parameters = from_main((trained.initial, trained.values), own)
    copy = on_all(own, lambda: Copy(jobs.task, parameters[0], jobs.seed, own.device, jobs.where))
    # The batches are drawn again, and not sent: the task gives the same ones for the same numbers.
    steps = [
        jobs.batches(jobs.task, own.rank, step, micro_batches, own.device) for step in range(STEPS)
    ]

    def judged(
        policy: str, main_states: Sequence[Sequence[Tensors]]
    ) -> tuple[list[Finding], list["Run"]]:
        run = on_all(
            own,
            lambda: copy.run(parameters, steps, parameters[0], policy, main_states, own),
        )
        runs = gather_on_main(run, own)
        # Rank 0 judges and sends its findings, so that all ranks decide alike what to try next.
        return on_main(own, lambda: Judge(everyone, runs, copy, jobs).findings()), runs

    findings, runs = judged(OWN_BUFFERS, ())
    # Batch statistics and the like may follow rank 0, as under torch DDP. That is right as well, so
    # the kinder result counts.
    if findings and copy.has_state and not jobs.same_batch:
        # Rank 0's buffers are needed by the other ranks, which repeat its policy.
        main_states = from_main(runs[0].states if own.is_main else None, own)
        for policy in (EACH_STEP, EACH_FORWARD):
            found, others = judged(policy, main_states)
            # The policy with the fewest findings is the one that the wrapper follows most likely.
            if len(found) < len(findings):
                findings, runs = found, others
            if not findings:
                break
    # Only a gradient of the second step without a known mistake can come from stale weights.
    if any(
        each.step == STEPS and each.what == "gradient" and each.signature in UNNAMED
        for each in findings
    ):
        findings = _named_stale(own, copy, findings, everyone, trained, parameters, steps, jobs)
    if any(each.signature == UNKNOWN for each in findings):
        findings = _named_in_half(own, copy, findings, everyone, runs, parameters, steps, jobs)
    ranks = own.world_size

    def verdict() -> Verdict:
        loss = sum(rank.loss for rank in everyone) / ranks
        expected = sum(run.loss for run in runs) / ranks
        number = len(steps[0])
        judge = Judge(everyone, runs, copy, jobs)
        warning = judge.warning()
        unseen_tensor, unseen_pct = judge.unseen()
        return Verdict(
            ranks,
            number,
            len(copy.trainable),
            tuple(findings),
            loss,
            expected,
            trained.finish,
            warning=warning,
            optimizer=jobs.optimizer.__name__,
            states=judge.states(),
            where=_where(everyone, runs) if jobs.where else "",
            together=judge.together(findings),
            unseen_tensor=unseen_tensor,
            unseen_pct=unseen_pct,
        )

    return _Compared(on_main(own, verdict), trained.can_accumulate)


def _where(everyone: Sequence[Trained], runs: Sequence[Run]) -> str:
    """Return a sentence about the first module that differs."""
    return first_difference(
        [rank.calls for rank in everyone],
        [run.calls[0] for run in runs],
        [run.calls[1] for run in runs],
    )


def _named_in_half(
    own: RankContext,
    copy: Copy,
    findings: list[Finding],
    everyone: Sequence[Trained],
    runs: Sequence[Run],
    parameters: Sequence[Tensors],
    steps: Sequence[Sequence[Any]],
    jobs: Jobs,
) -> list[Finding]:
    """Rename findings if the gradients differ as they do under autocast to bf16 or fp16."""
    likeness = {}  # signature → how alike the differences are
    for dtype, signature in ((torch.bfloat16, LIKE_BF16), (torch.float16, LIKE_FP16)):

        def in_half(dtype: torch.dtype = dtype) -> Run | None:
            try:
                with torch.autocast(own.device.type, dtype):
                    return copy.run(parameters, steps, parameters[0], OWN_BUFFERS, (), own)
            except RuntimeError:
                return None  # torch refuses some operations, such as binary_cross_entropy

        others = gather_on_main(on_all(own, in_half), own)

        def compared(others: Sequence[Run | None] = others) -> float:
            if None in others:
                return 0.0
            judge = Judge(everyone, runs, copy, jobs)
            return judge.likeness(Judge(everyone, others, copy, jobs), findings)

        likeness[signature] = on_main(own, compared)
    # What is computed in fp16 is near to bf16 by chance, and nearer to fp16.
    best = max(likeness, key=likeness.__getitem__)
    if likeness[best] < LEAST_LIKENESS:
        return findings
    return [
        replace(each, signature=best) if each.signature == UNKNOWN else each for each in findings
    ]


def _named_stale(
    own: RankContext,
    copy: Copy,
    findings: list[Finding],
    everyone: Sequence[Trained],
    trained: Trained,
    parameters: Sequence[Tensors],
    steps: Sequence[Sequence[Any]],
    jobs: Jobs,
) -> list[Finding]:
    """Rename findings if the second step read weights from before the first update.

    That is tried by repeating the step with such weights.

    All weights are tried, and those of one module at a time. Of each rank all of them are old, or
    all but the part that its own optimizer has updated. They are old in the whole step, or new ones
    arrive before the first backward or the second forward.
    """
    # The first parameters are those before the update, and the second those after it.
    old, new = parameters
    modules = {name.rpartition(".")[0] for name in copy.trainable}
    # A wrapper may miss the update of everything, or of the layers that it gathered too early.
    sets = [set(copy.trainable)]
    # Each module costs 6 more runs, so models of many modules are tried only as a whole.
    if len(modules) <= MOST_MODULES:
        sets += [
            {name for name in copy.trainable if name.rpartition(".")[0] == each}
            for each in sorted(modules)
        ]
    for stale, keeps_own, arrival in product(sets, (False, True), (0, 1, 2)):
        mixed = dict(new)
        for name in stale:
            mixed[name] = old[name].clone()
            # The part that a rank's own optimizer updates is new there, also if nothing was sent.
            for start, number in trained.owned.get(name, ()) if keeps_own else ():
                mixed[name].view(-1)[start : start + number] = new[name].reshape(-1)[
                    start : start + number
                ]
        run = on_all(
            own,
            # The loop's variables are bound now, because the call may come after the next turn.
            lambda mixed=mixed, arrival=arrival: copy.run(
                (old, mixed),
                steps,
                old,
                OWN_BUFFERS,
                (),
                own,
                new if arrival > 0 else None,
                arrival,
            ),
        )
        others = gather_on_main(run, own)
        left = on_main(
            own, lambda others=others: Judge(everyone, others, copy, jobs).wrong_gradients()
        )
        # Every gradient agrees with stale weights, so that explains all of the findings.
        if not left:
            return [replace(each, signature=STALE, part=None) for each in findings]
    return findings
