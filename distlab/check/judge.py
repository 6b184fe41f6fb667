"""Which tensors differ, and the mistake that explains each."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from distlab.check.expected import Expected, Right
from distlab.check.jobs import STEPS, Jobs
from distlab.check.norm import norm_error
from distlab.check.optimizer import Alone, States, step_alone
from distlab.check.parts import Part, narrowed, together
from distlab.check.reference import Copy, Run
from distlab.check.signatures import (
    ABSENT,
    ADDED,
    APART,
    BUFFER,
    BY_TOKENS,
    DECAYED,
    DIVIDED,
    FIRST,
    FROZEN,
    LAST,
    MEANS,
    MICRO_DIVIDED,
    MICRO_SUMMED,
    MISSING,
    MIXED,
    NOT_A_NUMBER,
    NOT_BROADCAST,
    NOT_SENT,
    NOT_STEPPED,
    ONE_RANK,
    OTHER_TENSOR,
    OWN,
    OWN_DIVIDED,
    PART,
    PREVIOUS,
    ROUNDED,
    SCALED,
    SEQUENCE,
    SHARE,
    STATE_COUNT,
    STATE_OWN,
    STATE_RESET,
    STATE_UNKNOWN,
    STEPPED_P_TIMES,
    STEPPED_TWICE,
    STEPPED_TWICE_OR_LR,
    STEPPED_WRONG,
    SUMMED,
    TIED,
    UNKNOWN,
    UNTIED,
    VAGUE,
    WEIGHED,
    WITH_PARTS,
)
from distlab.check.tensors import SLACK, Tensors, parameters_of, per_element, wide
from distlab.check.training import Trained
from distlab.check.verdict import NORM, Finding
from distlab.check.weights import IGNORED, TARGETS_ALIKE


class NothingToCompare(ValueError):
    """The model in one process has no gradient to which another could be compared."""


LISTED = 8  # ranks whose weights are written out

# A mistake that was tried: its signature, the values of each rank, and those that it would give.
Candidate = tuple[str, Tensor, Sequence[Right]]


class Judge:
    """Findings about tensors that differ, with the mistake that explains each. Used on rank 0.

    Args:
        ranks: result of each rank's training under the wrapper, in rank order.
        runs: result of each rank's training without a wrapper, in rank order.
    """

    def __init__(self, ranks: Sequence[Trained], runs: Sequence[Run], copy: Copy, jobs: Jobs):
        self.ranks, self.runs, self.copy, self.jobs = ranks, runs, copy, jobs
        dtypes = {name: parameter.dtype for name, parameter in copy.trainable.items()}
        count = runs[0].micro_batches
        self.expected = [
            Expected([run.sums[step] for run in runs], dtypes, count, runs[0].at_end[step])
            for step in range(STEPS)
        ]

    def findings(self) -> list[Finding]:
        """Name what differs, by its earliest evidence: later steps follow from a wrong one.

        Raises:
            NothingToCompare: as in `check`.
        """
        return (
            self._initial()
            or self._gradients(1)
            or self._states(1)
            or self._values(1)
            or self._gradients(2)
            or self._states(2)
            or self._values(2)
            or self._buffers()
            or self._norms()
        )

    def unseen(self) -> tuple[str, float]:
        """Return the gradient in which the largest error counts as right, and how large it is.

        The error is the root mean square of the differences, in % of that of the gradient, in the
        first step. Gradients of noise alone, of which any size of it is right, are left out.

        Returns:
            Name of the parameter, empty if there is none, and the error in %.
        """
        found = ("", 0.0)
        for name in self.copy.trainable:
            mean = self.expected[0].mean(name)
            if mean.agrees(torch.zeros_like(mean.value)):
                continue
            error_pct = 100 * mean.rms / mean.value.square().mean().sqrt().item()
            found = max(found, (name, error_pct), key=lambda each: each[1])
        return found

    def warning(self) -> str:
        """Return a sentence if the loss seems to be a mean of means. Empty if it does not.

        That is a loss that returns a scalar, for batches with different numbers of targets.
        """
        for number, expected in enumerate(self.expected, start=1):
            alike = [1 / expected.ranks] * expected.ranks
            means, over_targets, difference = 0.0, 0.0, 0.0  # sums of squares
            for name in self.copy.trainable:
                # The loss returned a count, or all micro-batches have the same number of targets.
                if TARGETS_ALIKE not in expected.of_ranks[0][name].others:
                    break
                right = expected.combination(name, alike, TARGETS_ALIKE).value
                mean = expected.mean(name).value
                means += mean.square().sum().item()
                over_targets += right.square().sum().item()
                difference += (mean - right).square().sum().item()
            if over_targets > 0:
                # Norms are compared as well: the direction may differ although the length does not.
                of_norm = abs(math.sqrt(means / over_targets) - 1)
                of_gradient = math.sqrt(difference / over_targets)
                return (
                    f"{MEANS}. The micro-batches of step {number} have different numbers of "
                    f"targets that are not {IGNORED}, and the loss returns one number. If that is "
                    f"their mean, the norm of the gradient differs by {of_norm:.1%} from that of "
                    "the mean over all targets, and the gradient itself by "
                    f"{of_gradient:.1%} of that norm. To weigh all targets alike, return "
                    "(sum, count) from the loss"
                )
        return ""

    def together(self, findings: Sequence[Finding]) -> tuple[str, ...]:
        """Return sentences about ranges of a flat buffer in which several tensors are wrong."""
        named = parameters_of(self.copy.module)
        sentences = []
        for signature in dict.fromkeys(each.signature for each in findings):
            parts = {each.tensor: each.part for each in findings if each.signature == signature}
            # Of a parameter that does not train, only the initial value is sent.
            names = named if findings[0].what == "initial value" else self.copy.trainable
            sizes = {name: named[name].numel() for name in names}
            sentences += together(parts, sizes)
        return tuple(sentences)

    def _refuse_nothing(self, step: int) -> None:
        """Raise NothingToCompare where one process has no gradients in a step."""
        some = False
        for name in self.copy.trainable:
            mean = self.expected[step - 1].mean(name).value
            if not mean.isfinite().all():
                raise NothingToCompare(
                    f"the gradient of {name} is not a number in one process either (step {step}): "
                    "there is nothing to compare"
                )
            # One gradient that is not zero is enough for a comparison.
            some = some or bool(mean.any())
        if step == 1 and not some:
            raise NothingToCompare(
                f"every gradient is exactly zero in one process (loss {self.runs[0].loss:.6g}): "
                "there is nothing to compare; give batches and weights for which the loss has a "
                "gradient"
            )

    def _initial(self) -> list[Finding]:
        found = []
        for name in self.ranks[0].initial:
            each = torch.stack([wide(rank.initial[name]) for rank in self.ranks])
            # NaN is never equal to NaN, so both are replaced before the comparison.
            if not torch.equal(each.nan_to_num(), each[:1].expand_as(each).nan_to_num()):
                error = _error(each, each[0])
                part = self._part_not_broadcast(name, each.nan_to_num())
                found.append(Finding(name, "initial value", 0, error, NOT_BROADCAST, part))
        return found

    def _part_not_broadcast(self, name: str, each: Tensor) -> Part | None:
        """Return the part of an initial value that was not broadcast, None if it is all of it."""
        initial = self.ranks[0].initial[name]
        wrong = (each != each[0]).any(0)
        # Zeros, such as those of a padding row, are the same on all ranks without a broadcast.
        undecided = each[0] == 0

        def mistake_in(elements: Tensor) -> str | None:
            return NOT_BROADCAST if per_element(wrong, initial.shape)[elements].any() else None

        return narrowed(NOT_BROADCAST, wrong, undecided, initial, mistake_in)[1]

    def _norms(self) -> list[Finding]:
        """Find a wrong norm, of gradients that are right."""
        found = []
        for step, expected in enumerate(self.expected, start=1):
            gradients = self.ranks[0].gradients[step - 1]
            # The gradients are known to be right here, so a wrong norm is a mistake of the norm
            # alone.
            wrong = norm_error(expected, gradients, [rank.norms[step - 1] for rank in self.ranks])
            if wrong is not None:
                signature, error = wrong
                found.append(Finding(NORM, "norm", step, error, signature))
        return found

    # -- gradients ---------------------------------------------------------------------------------

    def wrong_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient of the second step is not the right one."""
        wrong = []
        for name in self.copy.trainable:
            mean = self.expected[-1].mean(name)
            # All ranks must have the right gradient, since each of them steps by it.
            if not all(map(mean.agrees, self._seen(STEPS, name))):
                wrong.append(name)
        return wrong

    def _seen(self, step: int, name: str) -> Tensor:
        """Return every rank's gradient of a step, from 1 on."""
        return torch.stack([wide(rank.gradients[step - 1][name]) for rank in self.ranks])

    def _gradients(self, step: int) -> list[Finding]:
        """Find the gradients of a step that differ.

        Which tensors do may tell more than their values.
        """
        self._refuse_nothing(step)
        expected = self.expected[step - 1]
        named: dict[str, str | None] = {}
        parts: dict[str, Part | None] = {}
        for name in self.copy.trainable:
            named[name], parts[name] = self._signature(step, name), None
            if named[name] in WITH_PARTS:
                named[name], parts[name] = self._wrong_part(step, name, named[name])
        wrong = {name for name, signature in named.items() if signature is not None}
        vectors = {name for name, parameter in self.copy.trainable.items() if parameter.ndim < 2}
        found = []
        for name in named:
            signature = named[name]
            if signature is None:
                continue
            # Every wrong tensor is tied, and others are right: the second name explains the sum,
            # and not the ranks.
            all_tied = wrong <= self.copy.tied < named.keys()
            if signature == SUMMED and all_tied and parts[name] is None:
                signature = TIED
            # Only ranks that were given the same batch can have parts of a sequence.
            elif signature == PART and self.jobs.same_batch and wrong <= vectors < named.keys():
                signature += SEQUENCE
            error = _error(self._seen(step, name), expected.mean(name).value)
            found.append(Finding(name, "gradient", step, error, signature, parts[name]))
        return self._weighed(step, self._untied(found))

    def likeness(self, other: "Judge", findings: Sequence[Finding]) -> float:
        """Return the cosine of the angle between what differs and how another reference differs.

        Computing in the same dtype makes many of the same roundings. The size alone would not do,
        because any small mistake has the size of a rounding. The result is 0 if a finding is not a
        gradient without a name, or differs by more than the other reference.

        Args:
            other: judge whose reference was computed with more rounding.
            findings: what differs from this judge's reference.
        """
        product = square = square_of_other = 0.0
        for each in findings:
            # A tensor that has a part or a name is not explained by rounding.
            if each.what != "gradient" or each.part or each.signature not in (ROUNDED, UNKNOWN):
                return 0.0
            right = self.expected[each.step - 1].mean(each.tensor).value
            rounded = other.expected[each.step - 1].mean(each.tensor).value
            differences = self._seen(each.step, each.tensor) - right
            off = differences.flatten(1).norm(dim=1).max()
            # Two ways of computing in bf16 round in different places.
            if not off <= 3 * (rounded - right).norm():
                return 0.0
            # All ranks have the same gradient, so one of them is enough.
            product += (differences[0] * (rounded - right)).sum().item()
            square += differences[0].square().sum().item()
            square_of_other += (rounded - right).square().sum().item()
        # Neither is 0: each finding differs, and the other reference by a third of it or more.
        return product / math.sqrt(square * square_of_other)

    def _weighed(self, step: int, findings: list[Finding]) -> list[Finding]:
        """Rename gradients without a known mistake if they are sums in which ranks weigh unequally.

        All of them must be explained by the same weights.
        """
        expected = self.expected[step - 1]

        def agrees(name: str, weights: Sequence[float]) -> bool:
            right = expected.combination(name, weights)
            return all(map(right.agrees, self._seen(step, name)))

        unknown = [each.tensor for each in findings if each.signature == UNKNOWN]
        weights = self._fitted_weights(step, unknown)
        if weights is None or not all(agrees(name, weights) for name in unknown):
            return findings
        # A weight cannot be known better than the gradients.
        is_half = any(torch.finfo(expected.dtypes[name]).bits < 32 for name in unknown)
        decimals = 2 if is_half else 3
        signature = _of_weights(weights, decimals)
        shares = [run.shares[step - 1] for run in self.runs]
        if None not in shares:
            # The weights may add up to another number than 1, such as P.
            by_tokens = [sum(weights) * share for share in shares]
            apart = max(abs(one - other) for one, other in zip(weights, by_tokens, strict=True))
            # In half precision, other weights may agree as well.
            if apart <= 10**-decimals and all(agrees(name, by_tokens) for name in unknown):
                signature += BY_TOKENS
        found = []
        for each in findings:
            # Where one rank alone has a gradient, its weight scales the mean.
            is_vague = each.signature in (UNKNOWN, ROUNDED, SCALED)
            if is_vague and agrees(each.tensor, weights):
                each = replace(each, signature=signature, part=None)
            found.append(each)
        return found

    def _fitted_weights(self, step: int, names: Sequence[str]) -> list[float] | None:
        """Return the ranks' weights that come nearest to the gradients of some parameters.

        None if the weights explain little of the difference.
        """
        expected = self.expected[step - 1]
        ranks = expected.ranks
        # Least squares with one unknown per rank: its weight minus 1/P.
        products = torch.zeros(ranks, ranks, dtype=torch.float64)
        wanted = torch.zeros(ranks, 1, dtype=torch.float64)
        square, elements = 0.0, 0
        for name in names:
            own = torch.stack([rank[name].own.flatten() for rank in expected.of_ranks])
            difference = self._seen(step, name)[0].flatten() - expected.mean(name).value.flatten()
            products += own @ own.T
            wanted += own @ difference[:, None]
            square += difference.square().sum().item()
            elements += difference.numel()
        # With few elements, P weights can always be fitted.
        if elements < 4 * ranks:
            return None
        # Ranks with equal gradients leave this matrix singular, which only gelsd allows.
        unequal = torch.linalg.lstsq(products, wanted, driver="gelsd").solution
        explained = (unequal * wanted).sum().item()
        # The tolerance of large weights is large, so the fit must also halve the difference twice.
        if not square - explained <= square / 16:
            return None
        return [1 / ranks + each for each in unequal.flatten().tolist()]

    def _untied(self, findings: list[Finding]) -> list[Finding]:
        """Rename gradients without a known mistake if a tied weight was replaced."""
        pairs = self.ranks[0].untied
        vague = {each.tensor for each in findings if each.signature in VAGUE}
        # If the gradient of the tied weight itself is right or has another name, the replacement
        # does not explain it.
        if vague.isdisjoint(first for first, _ in pairs):
            return findings
        signature = "; ".join(f"'{second}' {UNTIED} '{first}'" for first, second in pairs)
        signature += ": the wrapper replaced one of the two"
        found = []
        for each in findings:
            if each.signature in VAGUE:
                each = replace(each, signature=signature, part=None)
            found.append(each)
        return found

    def _wrong_part(self, step: int, name: str, signature: str) -> tuple[str, Part | None]:
        """Return the mistake in the wrong part of a gradient, and this part.

        Args:
            signature: mistake of the whole gradient, which is returned if it is all wrong.
        """
        expected = self.expected[step - 1]
        mean = expected.mean(name)
        right = (self._seen(step, name) - mean.value).abs() <= mean.element
        wrong = ~right.all(0)  # also where it is not a number
        if wrong.all():
            return signature, None
        # A gradient of zero, or of noise, is right with most mistakes.
        size = torch.stack([rank[name].magnitude for rank in expected.of_ranks]).sum(0)

        def mistake_in(elements: Tensor) -> str | None:
            return self._of_elements(name, elements)._signature(step, name)

        undecided = size <= mean.element
        return narrowed(signature, wrong, undecided, self.copy.trainable[name], mistake_in)

    def _of_elements(self, name: str, elements: Tensor) -> "Judge":
        """Return a judge of the gradients of some elements of a parameter alone."""
        shape = self.copy.trainable[name].shape
        ranks = []
        for rank in self.ranks:
            cut = [{name: per_element(wide(of[name]), shape)[elements]} for of in rank.gradients]
            ranks.append(replace(rank, gradients=cut))
        runs = []
        for run in self.runs:
            sums = [{name: of_step[name].of_elements(elements, shape)} for of_step in run.sums]
            runs.append(replace(run, sums=sums))
        return Judge(ranks, runs, self.copy, self.jobs)

    def _signature(self, step: int, name: str) -> str | None:
        """Return which mistake gives the gradients of a tensor; None if they are right."""
        seen = self._seen(step, name)
        mean = self.expected[step - 1].mean(name)
        if all(map(mean.agrees, seen)):
            return None
        if not seen.isfinite().all():
            return NOT_A_NUMBER
        best, chosen = math.inf, None
        # Zeros are near a small value, which does not make them that value.
        factors = self._factors(step, name) if seen.any() else ()
        for signature, rights in factors:
            distance = max(right.distance(each) for each, right in zip(seen, rights, strict=True))
            # In half precision several may be near enough: 1/P and 1/M, say. The nearest is it.
            if distance <= 1 and distance < 0.5 * best:
                best, chosen = distance, signature
        if chosen is not None:
            return chosen
        # One rank has the right gradient and another none. At two ranks they also add up to it.
        if seen.any() and all(mean.agrees(each) or not each.any() for each in seen):
            return ABSENT
        for signature, values, rights in self._others(step, name, seen):
            if all(right.agrees(each) for each, right in zip(values, rights, strict=True)):
                return signature
        # Zeros on all ranks are not another tensor's gradient. If each of two tensors is used on
        # one rank only, their shares of zero would also add up to zero.
        if not seen.any():
            return ABSENT
        if self._mixed_with_another(step, name, seen):
            return OTHER_TENSOR
        # A rank without a gradient explains more than the values of the others do.
        if not all(each.any() for each in seen):
            return ABSENT
        # The ranks are compared with one another by the tolerance of the mean.
        if not all(replace(mean, value=seen[0]).agrees(each) for each in seen):
            return APART
        if self._rounded(step, name, seen):
            return ROUNDED
        return self._of_two_steps(step, name, seen) or UNKNOWN

    def _factors(self, step: int, name: str) -> Iterator[tuple[str, list[Right]]]:
        """Yield each rank's gradients under mistakes in sums and divisions, the simplest first."""
        expected = self.expected[step - 1]
        ranks, micro_batches = expected.ranks, expected.micro_batches

        def everywhere(weight: float, part: str = "own") -> list[Right]:
            # All ranks have the same wrong value, so the list repeats it.
            return [expected.combination(name, [weight] * ranks, part)] * ranks

        yield SUMMED, everywhere(1.0)
        yield DIVIDED, everywhere(1 / ranks**2)
        yield OWN, [self._of_rank(step, name, rank, 1.0) for rank in range(ranks)]
        yield OWN_DIVIDED, [self._of_rank(step, name, rank, 1 / ranks) for rank in range(ranks)]
        # With one micro-batch these mistakes give the right value.
        if micro_batches > 1:
            yield MICRO_SUMMED, everywhere(micro_batches / ranks)
            yield MICRO_DIVIDED, everywhere(1 / micro_batches / ranks)
            yield FIRST, everywhere(1 / ranks, "first")
            yield LAST, everywhere(1 / ranks, "last")
        for rank in range(ranks):
            yield ONE_RANK, [self._of_rank(step, name, rank, 1.0)] * ranks
        for rank in range(ranks):
            for weight in (1 / ranks, 1 / (ranks - 1)):
                # A missing rank may or may not change the number by which the sum is divided.
                weights = [0.0 if each == rank else weight for each in range(ranks)]
                yield MISSING, [expected.combination(name, weights)] * ranks
        for weighing in expected.of_ranks[0][name].others:
            if weighing != TARGETS_ALIKE:  # this weighing is not a mistake
                yield MEANS, everywhere(1 / ranks, weighing)

    def _of_rank(self, step: int, name: str, rank: int, weight: float) -> Right:
        """Return weight × the gradient of one rank."""
        expected = self.expected[step - 1]
        weights = [weight if each == rank else 0.0 for each in range(expected.ranks)]
        return expected.combination(name, weights)

    def _others(self, step: int, name: str, seen: Tensor) -> Iterator[Candidate]:
        """Give the values that other mistakes would give."""
        ranks = len(seen)
        mean = self.expected[step - 1].mean(name)
        yield from self._other_steps(step, name, seen)
        # A sum over ranks that is right shows that parts were not added.
        if seen.any() and not all(replace(mean, value=seen[0]).agrees(each) for each in seen):
            yield PART, seen.sum(0)[None], [mean]
            yield SHARE, seen.mean(0)[None], [mean]
        factor = _slope(seen[0], mean.value)
        # A gradient of pure noise has no direction that could be scaled.
        is_noise = mean.agrees(torch.zeros_like(mean.value))
        if abs(factor) > 1e-3 and seen[0].numel() > 1 and not is_noise:
            # This mistake is tried last, because its factor is fitted to the values.
            yield SCALED, seen, [mean.plus(mean, 0.0, factor)] * ranks

    def _other_steps(self, step: int, name: str, seen: Tensor) -> Iterator[Candidate]:
        """Yield the gradients of this step and the next if the previous step's are used."""
        ranks = len(seen)
        before = self.expected[0].mean(name)
        if step == 1:
            # A gradient that comes a step late: in the second step it is that of the first.
            late = self._seen(2, name)
            second = self.expected[1].mean(name)
            # If the second gradient is right, the first one did not come late.
            if before.value.any() and not all(map(second.agrees, late)):
                yield PREVIOUS, late, [before] * ranks
            return
        yield PREVIOUS, seen, [before] * ranks
        yield ADDED, seen, [self.expected[1].mean(name).plus(before)] * ranks

    def _of_two_steps(self, step: int, name: str, seen: Tensor) -> str | None:
        """Return MIXED if a gradient is a weighted mean of this step's and the previous step's."""
        # With fewer than four elements two weights can always be fitted.
        if step == 1 or seen[0].numel() < 4:
            return None
        now, before = self.expected[1].mean(name), self.expected[0].mean(name)
        columns = torch.stack([now.value.flatten(), before.value.flatten()], 1)
        weights = (
            torch.linalg.lstsq(columns, seen[0].flatten()[:, None]).solution.flatten().tolist()
        )
        mixed = now.plus(before, weights[1], weights[0])
        # A weight of 0 or 1 would be a mistake that was tried before.
        is_mean = all(0.01 < weight < 1 for weight in weights)
        return MIXED if is_mean and all(map(mixed.agrees, seen)) else None

    def _mixed_with_another(self, step: int, name: str, seen: Tensor) -> bool:
        """Return whether on each rank some ranks' share of the mean is that of one other tensor."""
        expected = self.expected[step - 1]
        ranks = expected.ranks
        if ranks > 8:
            return False  # 2^P ways
        sums = expected.of_ranks[0]
        alike = [
            each for each in sums if each != name and sums[each].own.shape == sums[name].own.shape
        ]
        # A tensor whose gradient is noise explains nothing: its share cannot be seen.
        alike = [
            each for each in alike if not expected.mean(each).agrees(torch.zeros_like(seen[0]))
        ]

        def explains(other: str, theirs: Sequence[bool], value: Tensor) -> bool:
            mine = expected.combination(name, [0.0 if each else 1 / ranks for each in theirs])
            mixed = mine.plus(
                expected.combination(other, [1 / ranks if each else 0.0 for each in theirs])
            )
            return mixed.agrees(value)

        changed = False
        for value in seen:
            if expected.mean(name).agrees(value):
                continue
            # Every choice of ranks is tried with every tensor of the same shape.
            ways = product(alike, product((False, True), repeat=ranks))
            if not any(explains(other, theirs, value) for other, theirs in ways if any(theirs)):
                return False
            changed = True
        return changed

    def _rounded(self, step: int, name: str, seen: Tensor) -> bool:
        """Return whether a gradient of higher precision has been through bf16 or fp16."""
        expected = self.expected[step - 1]
        # A gradient in half precision is rounded to it anyway.
        if torch.finfo(expected.dtypes[name]).bits < 32:
            return False
        mean = expected.mean(name)
        for dtype in (torch.bfloat16, torch.float16):
            eps = torch.finfo(dtype).eps
            own = torch.stack([rank[name].own for rank in expected.of_ranks])
            rounding = expected.ranks * eps * own.abs().mean(0)  # P on the way in, P in the sum
            if not bool(((seen - mean.value).abs() <= rounding + mean.element).all()):
                continue
            # Where the reduction was in that dtype, its result or its sum is a number of that
            # dtype.
            for factor in (1, expected.ranks):
                scaled = seen * factor
                if (scaled.to(dtype).double() - scaled).abs().le(1e-6 * scaled.abs()).all():
                    return True
            # Where only what was sent was rounded, the mean of the rounded ones has come.
            for factor in (1, 1 / expected.ranks):
                sent = (own * factor).to(dtype).double().mean(0) / factor
                near = (seen - sent).abs() <= mean.element
                # A value between two numbers of the dtype may have been rounded to the other one.
                if near.double().mean() > 0.9:
                    return True
        return False

    # -- the optimizer's state ---------------------------------------------------------------------

    def states(self) -> int:
        """Return how many tensors of the optimizer's state were compared after each step."""
        if self.jobs.optimizer is torch.optim.SGD:
            # SGD without momentum has no state.
            return 0
        return sum(len(self._compared_states(STEPS, name)) for name in self.copy.trainable)

    @cached_property
    def _alone(self) -> list[Alone]:
        """Return the optimizer in one process, for each rank given the gradients seen there."""
        found = []
        for rank, trained in enumerate(self.ranks):
            # Equal gradients give equal steps, so the result of rank 0 serves for this rank as
            # well.
            if rank and all(map(_equal, trained.gradients, self.ranks[0].gradients)):
                found.append(found[0])
                continue
            gradients = []
            for of_step, absent in zip(trained.gradients, trained.absent, strict=True):
                # A parameter without a gradient is left out, as its optimizer skips it.
                gradients.append({name: of_step[name] for name in of_step.keys() - absent})
            found.append(Alone(self.jobs, self._starts, gradients))
        return found

    @property
    def _starts(self) -> tuple[Tensors, Tensors]:
        """Return the parameters before each step."""
        return self.ranks[0].initial, self.ranks[0].values

    def _compared_states(self, step: int, name: str) -> dict[str, dict[int, tuple[Tensor, Right]]]:
        """Return kind of state → rank → the state there, and the right one."""
        found: dict[str, dict[int, tuple[Tensor, Right]]] = {}
        dtype = self.copy.trainable[name].dtype
        for rank, trained in enumerate(self.ranks):
            rights = self._alone[rank].state(step, name, dtype)
            for kind, seen in trained.states[step - 1].get(name, {}).items():
                seen = wide(seen)
                # A state of another shape, such as a factored one, cannot be compared element by
                # element.
                if kind in rights and seen.shape == rights[kind].value.shape:
                    found.setdefault(kind, {})[rank] = (seen, rights[kind])
        return found

    def _states(self, step: int) -> list[Finding]:
        """Find what differs in the optimizer's state after a step whose gradients were right."""
        if self.jobs.optimizer is torch.optim.SGD:
            return []  # it has none
        wrong: dict[str, dict[str, tuple[float, list[Tensor]]]] = {}
        for name in self.copy.trainable:
            for kind, of_ranks in self._compared_states(step, name).items():
                # Each kind of state is judged by itself: moments may be right and the count wrong.
                if not all(right.agrees(seen) for seen, right in of_ranks.values()):
                    error = max(_error(seen, right.value) for seen, right in of_ranks.values())
                    there = [seen for seen, _ in of_ranks.values()]
                    wrong.setdefault(name, {})[kind] = (error, there)
        mistakes = self._mistaken_states(step) if wrong else []
        found = []
        for name, kinds in wrong.items():
            named = {}
            for kind, (_, seen) in kinds.items():
                if seen[0].ndim or not self.copy.trainable[name].ndim:
                    named[kind] = self._state_signature(mistakes, name, kind, seen)
            only_reset = set(named.values()) == {STATE_RESET}
            for kind, (error, _) in kinds.items():
                # One number for the whole parameter is a count, which begins anew with the moments.
                signature = named.get(kind, STATE_RESET if only_reset else STATE_COUNT)
                found.append(Finding(name, f"state {kind}", step, error, signature))
        return found

    def _mistaken_states(self, step: int) -> list[tuple[str, list[States]]]:
        """Return the states after a step that mistakes would give, of each rank or of all."""
        mistakes = []
        # After the first step a reset cannot be seen, because the state was just made.
        if step == STEPS:
            fresh = step_alone(self.jobs, self._starts[1:], self.ranks[0].gradients[1:])
            mistakes.append((STATE_RESET, fresh.states))
        ranks = len(self.ranks)
        # Gradients of complex parameters are kept as two real parts, which the steps here cannot
        # take.
        names = [name for name, p in self.copy.trainable.items() if not p.is_complex()]
        for weight in (1.0, 1 / ranks):
            own = []
            for rank in range(ranks):
                # The steps are repeated from the first one, since moments depend on all gradients
                # before.
                gradients = []
                for number in range(1, step + 1):
                    of_rank = {}
                    for name in names:
                        of_rank[name] = self._of_rank(number, name, rank, weight).value
                    gradients.append(of_rank)
                own.append(step_alone(self.jobs, self._starts[:step], gradients).states[-1])
            mistakes.append((STATE_OWN, own))
        return mistakes

    def _state_signature(
        self,
        mistakes: Sequence[tuple[str, list[States]]],
        name: str,
        kind: str,
        seen: Sequence[Tensor],
    ) -> str:
        """Return which mistake gives the state of a parameter."""
        for signature, states in mistakes:
            if self._made_of(seen, [each[name].get(kind) for each in states], name):
                return signature
        return STATE_UNKNOWN

    def _made_of(self, seen: Sequence[Tensor], parts: Sequence[Tensor | None], name: str) -> bool:
        """Return whether each element of a wrong state is that of one of several other states.

        Sharded states have elements of several ranks. Nearness only gives a name, so it is 0.1 %
        of the usual element, or four roundings.
        """
        if any(part is None or part.shape != seen[0].shape for part in parts):
            return False
        others = torch.stack(list(parts))
        usual = others.square().mean().sqrt().item()
        near = max(1e-3, 4 * torch.finfo(self.copy.trainable[name].dtype).eps) * usual
        for each in seen:
            error = (others - each).abs().min(0).values
            if not error.square().mean().sqrt().item() <= near:
                return False
        return True

    # -- values after a step -----------------------------------------------------------------------

    def _values(self, step: int) -> list[Finding]:
        """Find what differs after a step whose gradients were right."""
        found = []
        for name in self.copy.trainable:
            signature, part, error = self._update(step, name)
            if signature is not None:
                found.append(Finding(name, "value", step, error, signature, part))
        for name in self.copy.frozen:
            right = wide(self.ranks[0].initial[name])
            after = self._after(step, name)
            if not torch.equal(after.nan_to_num(), right.expand_as(after).nan_to_num()):
                found.append(Finding(name, "value", step, _error(after, right), FROZEN))
        # An update that was not sent explains all other differences of that step.
        not_sent = [finding for finding in found if finding.signature == NOT_SENT]
        return not_sent or found

    def _after(self, step: int, name: str) -> Tensor:
        """Return every rank's value after a step."""
        return torch.stack(
            [wide((rank.final if step == STEPS else rank.values)[name]) for rank in self.ranks]
        )

    def _update(self, step: int, name: str) -> tuple[str | None, Part | None, float]:
        """Return which mistake gives the value after a step, its part, and the error.

        The mistake is None if the value is right, and the part is None if all of it is wrong.
        """
        before = wide((self.ranks[0].initial if step == 1 else self.ranks[0].values)[name])
        after = self._after(step, name)
        changes = [self._change(step, name, rank) for rank in range(len(after))]
        # No update can be compared that is not finite, for example in fp16.
        if any(change is None for change in changes):
            return None, None, 0.0
        parameter = self.copy.trainable[name]
        dtype, shape = parameter.dtype, parameter.shape
        error = _error(after, _updated(before, changes[0], 1, dtype).value)
        signature = self._mistake_in_update(before, after, changes, dtype)
        if signature not in WITH_PARTS:
            return signature, None, error
        wrong = torch.zeros_like(before, dtype=torch.bool)
        undecided = torch.ones_like(wrong)
        for each, change in zip(after, changes, strict=True):
            right = _updated(before, change, 1, dtype)
            wrong |= ~((each - right.value).abs() <= right.element)
            # An update within the rounding is right if it was sent, and if it was not.
            undecided &= change.value.abs() <= right.element

        def mistake_in(elements: Tensor) -> str | None:
            return self._mistake_in_update(
                per_element(before, shape)[elements],
                torch.stack([per_element(each, shape)[elements] for each in after]),
                [change.of_elements(elements, shape) for change in changes],
                dtype,
            )

        return *narrowed(signature, wrong, undecided, parameter, mistake_in), error

    def _mistake_in_update(
        self, before: Tensor, after: Tensor, changes: Sequence[Right], dtype: torch.dtype
    ) -> str | None:
        """Return which mistake gives the values of all ranks after a step, None if they are right.

        Args:
            before: value before the step.
            after: value of each rank after it.
            changes: right change on each rank.
        """
        rights = [_updated(before, change, 1, dtype) for change in changes]
        if all(right.agrees(each) for right, each in zip(rights, after, strict=True)):
            return None
        # Ranks that differ have not exchanged their updates.
        if not all(replace(rights[0], value=after[0]).agrees(each) for each in after):
            return NOT_SENT

        def updated(times: float) -> Right:
            return _updated(before, changes[0], times, dtype)

        ranks = len(after)
        if all(map(updated(2).agrees, after)):
            return STEPPED_TWICE_OR_LR if ranks == 2 else STEPPED_TWICE
        if all(map(updated(ranks).agrees, after)):
            return STEPPED_P_TIMES
        if all(map(updated(0).agrees, after)):
            return NOT_STEPPED
        if self._decayed(before, after, changes[0].value, updated, dtype):
            return DECAYED
        return STEPPED_WRONG

    def _change(self, step: int, name: str, rank: int) -> Right | None:
        """Return the right change of a parameter in a step. None if there is none to compare."""
        if self.jobs.optimizer is not torch.optim.SGD:
            # The optimizer was stepped alone by the gradients that this rank saw.
            return self._alone[rank].update(step, name, self.copy.trainable[name].dtype)
        gradient = self.expected[step - 1].mean(name)
        lr = self.jobs.task.lr
        return Right(-lr * gradient.value, lr * gradient.element, lr * gradient.rms)

    def _decayed(
        self,
        before: Tensor,
        after: Tensor,
        change: Tensor,
        updated: Callable[[float], Right],
        dtype: torch.dtype,
    ) -> bool:
        """Return whether a value is (1 − d) · before + times · change, for some d > 0.

        The fitted `times` must be near 1.
        """
        # With fewer elements the two fitted numbers would explain everything.
        if before.numel() < 3:
            return False
        right = updated(1)
        tries = [(_slope(after[0] - right.value, before), 1.0)]
        # Where the value has shrunk after the update, too, the update has with it.
        columns = torch.stack([before.flatten(), change.flatten()], 1)
        seen = (after[0] - before).flatten()[:, None]
        tries.append(tuple(torch.linalg.lstsq(columns, seen).solution.flatten().tolist()))
        for shrink, times in tries:
            plain = updated(times)
            # Largest error of two more products of the weight.
            rounding = torch.finfo(dtype).eps * before.abs()
            usual = rounding.square().mean().sqrt().item()
            # The fitted numbers are off by what the rounding of all elements does to them.
            element = plain.element + 2 * rounding + 4 * usual
            fitted = Right(plain.value + shrink * before, element, plain.rms + usual)
            # A decay shrinks the value, and leaves the size of the update as it is.
            if shrink < 0 and abs(times - 1) < 0.1 and all(map(fitted.agrees, after)):
                return True
        return False

    def _buffers(self) -> list[Finding]:
        """Compare the buffers of every rank with those of the runs without a wrapper.

        They are right if they follow the rank's own batches, the policy of the run, or rank 0 on
        all ranks.
        """
        found = []
        of_main = self.runs[0].states[-1][-1]
        for name in of_main:
            seen = [wide(rank.final[name]) for rank in self.ranks]
            own = [wide(run.states[-1][-1][name]) for run in self.runs]
            dtype = of_main[name].dtype
            eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            ways = (own, [own[0]] * len(own))
            if not any(all(map(_close, seen, way, [eps] * len(way))) for way in ways):
                error = max(
                    _error(each[None], right) for each, right in zip(seen, own, strict=True)
                )
                found.append(Finding(name, "buffer", STEPS, error, BUFFER))
        return found


def _updated(before: Tensor, change: Right, times: float, dtype: torch.dtype) -> Right:
    """Return a value after `times` its right change."""
    value = before + times * change.value
    # The product and the difference are each rounded by half an eps; a master copy in higher
    # precision is not.
    eps = torch.finfo(dtype).eps
    rounding = eps / 2 * (value.abs() + 2 * abs(times) * change.value.abs()) * 1.01
    rms = rounding.square().mean().sqrt().item() + abs(times) * change.rms
    # The smallest bounds keep an exact value of 0 from being refused.
    return Right(value, 2 * rounding + abs(times) * change.element + 1e-30, rms + 1e-30)


def _of_weights(weights: Sequence[float], decimals: int) -> str:
    """Return a signature that says how much each rank weighs.

    Args:
        weights: weight of each rank in a sum that should be a mean.
        decimals: least number of decimals. More are shown where all weights are near the right one.
    """
    ranks = len(weights)
    apart = max(abs(weight - 1 / ranks) for weight in weights)
    decimals = max(decimals, math.ceil(-math.log10(apart)))
    shown = [f"{round(weight, decimals):g}" for weight in weights]
    if ranks > LISTED:
        least, most = min(weights), max(weights)
        listed = f"from {round(least, decimals):g} to {round(most, decimals):g}"
    else:
        listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{WEIGHED} {listed} instead of 1/{ranks} each"


def _equal(first: Tensors, second: Tensors) -> bool:
    """Return whether two gradients have the same bits."""
    return all(torch.equal(first[name], second[name]) for name in first)


def _close(seen: Tensor, right: Tensor, eps: float) -> bool:
    """Return whether a buffer is right, up to rounding."""
    # An integer buffer, such as a count, must agree exactly.
    bound = 1e-6 + max(1e-5, SLACK * eps) * right.abs() if eps else torch.zeros_like(right)
    same = (seen - right).abs() <= bound
    return bool((same | (seen == right) | (seen.isnan() & right.isnan())).all())


def _slope(seen: Tensor, right: Tensor) -> float:
    """Return the factor that brings `right` nearest to `seen`."""
    square = right.square().sum().item()
    return (seen * right).sum().item() / square if square else 0.0


def _error(found: Tensor, right: Tensor) -> float:
    """Return the largest |Δ| over ranks and elements, relative to the largest right element.

    Where all right elements are zero, it is not relative.
    """
    largest = right.abs().max().item()
    return (found - right).abs().max().item() / (largest or 1.0)
