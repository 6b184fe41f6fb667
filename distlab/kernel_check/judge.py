"""Judgement of a kernel on one input: its results against float64, and what it did to memory.

A result is right if its error is not much larger than that of torch's own operation in the same
dtype. The kernel runs twice. The first time its allocations are guarded and full of NaN
(`guards.py`), which shows writes outside of them and elements that it never writes.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distlab.bench.compiling import with_more_graphs
from distlab.kernel_check.calls import Function, call_of
from distlab.kernel_check.guards import NAN, GuardedAllocations
from distlab.kernel_check.hostile import DTYPES, GUARD, Case, drawn
from distlab.kernel_check.operations import Operation

# Errors of torch's own operation, or of its formula, that a kernel may have. Its order of summation
# may be better or worse than torch's, and on a GPU exp and division are approximate.
TIMES_TORCH = 6
# Times the change of the exact result when each input changes by a rounding of fp32. Kernels
# compute in fp32, so this much cannot be avoided where the result is sensitive, as with large
# logits.
TIMES_CONDITION = 4
# Roundings of each element that are allowed in any case, in units of the dtype's eps.
ROUNDINGS = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
# Error that is allowed relative to the largest element, in units of eps: sums cancel.
OF_LARGEST = 0.05

# Error of a gradient that is allowed relative to the largest gradient of any argument, or to what
# the backward subtracts (`Operation.subtracted`), in units of `ROUNDINGS`: what is left where it
# subtracts equal numbers, as attention does for a query with one key. The exact gradient is then 0,
# and so is that of torch's own operation.
OF_LARGEST_GRADIENT = 1.0
# Error of a gradient that is allowed relative to what cancels (`Operation.cancelling`), in units of
# fp32's eps, in which kernels compute. Softmax that is differentiated through the maximum collects
# the rounding of a whole row in one element. 2 is the largest seen, of rows of up to 1,000
# elements.
OF_CANCELLED = 4

# What is wrong after an illegal or misaligned access on a GPU. The process can compute no more.
BREAKS_GPU = "breaks the GPU's context"


@dataclass(frozen=True)
class Outcome:
    """Result of a kernel on one input.

    Attributes:
        case: description of the input.
        status: `right`, `refused` (it raised an error, which a kernel may for an input that it does
            not support), `wrong`, or `not tried` (the device is too small).
        kind: what is wrong, in two or three words. Empty unless it is wrong.
        detail: sentence with numbers, or the reason why it was not tried.
        differs: largest difference between two runs on the same input, 0 for equal bits.
        has_backward: True if gradients were compared.
        called: arguments that the kernel was called with, if it got more than the tensors or if the
            operation has an option.
    """

    case: Case
    status: str
    kind: str = ""
    detail: str = ""
    differs: float = 0.0
    has_backward: bool = False
    called: str = ""


class Wrong(Exception):
    """A result that is not what it must be.

    Args:
        kind: what is wrong, in two or three words.
        detail: sentence with numbers.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def judge(function: Function, operation: Operation, case: Case, device: torch.device) -> Outcome:
    """Run a kernel on one input and judge what it did.

    Args:
        function: function of the operation's tensors, or a subclass of `torch.autograd.Function`.
        operation: operation that it claims to be.
        case: description of the input, from which its tensors are made.
        device: device to run on.
    """
    tensors = drawn(case, operation, device)
    call = call_of(function, operation)
    # Before the kernel runs, and kept on the CPU: a kernel that writes anywhere cannot change it.
    expected = Expected(operation, case, tensors)

    def work() -> Outcome:
        return _outcome(call, operation, case, tensors, expected)

    outcome = guarded_outcome(case, device, work)
    if operation.options or call.by_position or call.by_name:
        return replace(outcome, called=call.form(operation))
    return outcome


def guarded_outcome(case: Case, device: torch.device, work: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of `work`, which runs a kernel, or that of its error.

    A GPU reports an illegal access late: by the next call that waits for it, or by none of this
    input. So it is asked before this input is left, whatever `work` returned.
    """
    try:
        outcome = work()
    except Wrong as wrong:
        outcome = Outcome(case, "wrong", wrong.kind, wrong.detail)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        # An error without a message is its name alone, without a colon.
        detail = f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")
        outcome = Outcome(case, "refused", "raises", detail)
    if not works(device):
        detail = outcome.detail or "it returned, and then every call of the GPU failed"
        return Outcome(case, "wrong", BREAKS_GPU, detail)
    return outcome


def _outcome(
    call: Function,
    operation: Operation,
    case: Case,
    tensors: Sequence[Tensor],
    expected: "Expected",
) -> Outcome:
    """Return the outcome of a kernel that does not raise.

    Raises:
        Exception: the kernel's own.
    """
    has_backward = False
    try:
        if case.is_repeated:
            other = replace(case, seed=case.seed + 1)
            others = drawn(other, operation, tensors[0].device)
            first = run(call, operation, case, others)
            first_bits = [_bits_around(tensor).clone() for tensor in first.tensors()]
        # First with guards, which catch what would otherwise destroy memory of others.
        guarded = guarded_run(call, operation, case, tensors, NAN).to_cpu()
        has_backward = guarded.has_backward
        # NaN may come from memory next to the inputs, or from memory of `empty` that was never
        # written. With 0 in the latter it is gone in the second case alone.
        if expected.is_nan_of(guarded):
            zeroed = guarded_run(call, operation, case, tensors, 0).to_cpu()
            if not expected.is_nan_of(zeroed):
                raise Wrong(
                    "uninitialised memory",
                    "it returns NaN if the memory that it allocates with torch.empty holds NaN",
                )
        # Without guards, as the kernel is called in use. These are the results that are judged.
        found = run(call, operation, case, tensors).to_cpu()
        expected.compare(found)
        if case.is_repeated:
            for tensor, bits in zip(first.tensors(), first_bits, strict=True):
                if not torch.equal(_bits_around(tensor), bits):
                    raise Wrong(
                        "changes an earlier result",
                        "a result or a gradient of the first call was changed by a later call",
                    )
    except Wrong as wrong:
        return Outcome(case, "wrong", wrong.kind, wrong.detail, has_backward=has_backward)
    return Outcome(case, "right", differs=differences(found, guarded), has_backward=has_backward)


def works(device: torch.device) -> bool:
    """Return whether a GPU still computes. After an illegal access, no call of the process does."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class Run:
    """Results of one call, and the gradients of its differentiable arguments."""

    results: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]

    @property
    def has_backward(self) -> bool:
        """True if a backward ran."""
        return bool(self.gradients)

    def tensors(self) -> list[Tensor]:
        """Return the results, and the gradients that there are."""
        gradients = [gradient for gradient in self.gradients.values() if gradient is not None]
        return [*self.results, *gradients]

    def to_cpu(self) -> "Run":
        """Return the same on the CPU. It waits for the GPU, and raises what went wrong there."""
        gradients = {}
        for name, gradient in self.gradients.items():
            gradients[name] = None if gradient is None else gradient.cpu()
        return Run(tuple(result.cpu() for result in self.results), gradients)


def run(call: Function, operation: Operation, case: Case, tensors: Sequence[Tensor]) -> Run:
    """Call a kernel and, if the case asks for it and the result has a graph, its backward.

    Raises:
        Wrong: it returned something else than tensors, or changed an input or the upstream
            gradient.
    """
    # As bytes, since NaN is not equal to itself.
    before = [_bits_around(tensor).clone() for tensor in tensors]
    leaves = []
    for argument, tensor in zip(operation.arguments, tensors, strict=True):
        wants_gradient = case.upstream is not None and argument.has_gradient
        leaves.append(tensor.detach().requires_grad_(wants_gradient))
    with every_input_compiled(), torch.set_grad_enabled(case.upstream is not None):
        results = as_tuple(call(*leaves))
    gradients = {}
    with_graph = [result for result in results if result.requires_grad]
    if case.upstream is not None and with_graph:
        upstream = [upstream_of(result, case) for result in with_graph]
        upstream_before = [_bits_around(gradient).clone() for gradient in upstream]
        # In this thread, because Dynamo's limit holds for a thread. A backward may be compiled too.
        with every_input_compiled(), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(with_graph, upstream)
        for argument, leaf in zip(operation.arguments, leaves, strict=True):
            if argument.has_gradient:
                gradients[argument.name] = leaf.grad
        for gradient, bits in zip(upstream, upstream_before, strict=True):
            if not torch.equal(_bits_around(gradient), bits):
                # Autograd passes the same tensor to other operations, as to x of x + f(x).
                raise Wrong(
                    "changes the upstream gradient",
                    "the gradient that the backward was given, or memory next to it, was changed",
                )
    for argument, tensor, bits in zip(operation.arguments, tensors, before, strict=True):
        if not torch.equal(_bits_around(tensor), bits):
            raise Wrong("changes an input", f"{argument.name}, or memory next to it, was changed")
    return Run(tuple(result.detach() for result in results), gradients)


def every_input_compiled() -> AbstractContextManager[Any]:
    """Let Dynamo compile a function for every kind of input inside a `with` block."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes a second
        return nullcontext()
    return with_more_graphs()


def has_compiled() -> bool:
    """Return whether Dynamo has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a kernel returned.

    Raises:
        Wrong: it returned something else.
    """
    found = results if isinstance(results, tuple | list) else (results,)
    for result in found:
        if not isinstance(result, Tensor):
            raise Wrong("no tensor", f"it returned {type(result).__name__}")
    return tuple(found)


def _bits_around(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor and of the buffer around it."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def upstream_of(result: Tensor, case: Case) -> Tensor:
    """Return the gradient that a backward is given, in the layout of the case."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    if case.upstream == "expanded":  # the form in which `result.sum().backward()` gives it
        value = torch.randn((), generator=generator).to(result.device, result.dtype)
        # One number in a buffer of NaN, which a kernel that ignores the strides reads.
        buffer = torch.full((GUARD + result.numel(),), float("nan"), dtype=result.dtype)
        buffer = buffer.to(result.device)
        buffer[0] = value
        return buffer[0].expand(result.shape)
    values = torch.randn(result.shape, generator=generator).to(result.device, result.dtype)
    if case.upstream == "transposed" and result.ndim >= 2:
        # The same values, with the columns next to each other in memory.
        return values.mT.contiguous().mT
    return values


def guarded_run(
    call: Function, operation: Operation, case: Case, tensors: Sequence[Tensor], fill: int
) -> Run:
    """Run a kernel whose allocations are guarded.

    Args:
        fill: value of each byte of memory that is not initialised.

    Raises:
        Wrong: it wrote outside of its outputs, or as `run`.
    """
    with GuardedAllocations(fill) as guard, torch.autograd.set_multithreading_enabled(False):
        found = run(call, operation, case, tensors)
    overwritten = guard.overwritten()
    if overwritten:
        raise Wrong(
            "writes outside", f"{overwritten} bytes next to what it allocated were overwritten"
        )
    return found


class Expected:
    """Results and gradients that a kernel must return for one input, on the CPU.

    Attributes:
        first, fp32_tables: name of the first argument, and words about rope's tables.
        exact: those of torch in float64.
        near: the same for inputs that differ by a rounding of fp32.
        usual: those of torch in the dtype of the case, then those of `Operation.formula`.
        cancelled: size of what the backward subtracts from an equal number, at most, by
            `Operation.cancelling`.
        subtracted: the same by `Operation.subtracted`.
        of_weights: error of weights in fp32, relative to them, by `Operation.largest_logit`.
    """

    def __init__(self, operation: Operation, case: Case, tensors: Sequence[Tensor]) -> None:
        self.dtype = DTYPES[case.dtype]
        self.first = operation.arguments[0].name
        tables = [each.name for each in operation.arguments if each.role in ("cosines", "sines")]
        self.fp32_tables = f" ({' and '.join(tables)} are fp32 in every dtype)" if tables else ""
        self.exact = _reference(operation, case, tensors, torch.float64).to_cpu()
        near = _reference(operation, case, tensors, torch.float64, is_rounded=True)
        self.near = near.to_cpu()
        usual = [_reference(operation, case, tensors, self.dtype)]
        if operation.formula is not None:
            written_out = replace(operation, exact=operation.formula)
            usual.append(_reference(written_out, case, tensors, self.dtype))
        self.usual = [each.to_cpu() for each in usual]
        self.cancelled = 0.0
        self.subtracted = 0.0
        self.of_weights = 0.0
        if operation.largest_logit is not None:
            logit = operation.largest_logit(tensors)
            self.of_weights = torch.finfo(torch.float32).eps * logit
        if case.upstream is not None:
            upstream = [upstream_of(result, case) for result in self.usual[0].results]
            if operation.cancelling is not None:
                self.cancelled = operation.cancelling(tensors, upstream[0])
            if operation.subtracted is not None:
                (result,) = self.exact.results
                self.subtracted = operation.subtracted(tensors, result, upstream[0])

    def is_nan_of(self, found: Run) -> bool:
        """Return whether some element is NaN that is a number in the exact result."""
        pairs = list(zip(found.results, self.exact.results, strict=False))
        for name, gradient in found.gradients.items():
            if gradient is not None:
                pairs.append((gradient, self.exact.gradients[name]))
        return any(_has_new_nan(mine, exact) for mine, exact in pairs)

    def compare(self, found: Run) -> None:
        """Compare results and gradients on the CPU with the exact ones.

        Raises:
            Wrong: a shape, a dtype or a value is not what it must be.
        """
        if len(found.results) != len(self.exact.results):
            raise Wrong(
                "number of results",
                f"it returned {len(found.results)}, not {len(self.exact.results)}",
            )
        for number, result in enumerate(found.results):
            name = "result" if len(found.results) == 1 else f"result {number + 1}"
            if result.dtype != self.dtype and result.ndim:
                raise Wrong(
                    "dtype",
                    f"{name} is {result.dtype}, and {self.first} is {self.dtype}{self.fp32_tables}",
                )
            _compare(
                name,
                result,
                self.exact.results[number],
                self.near.results[number],
                [usual.results[number] for usual in self.usual],
                self.dtype,
                of_all=self.of_weights * _largest(self.exact.results[number]),
            )
        eps = ROUNDINGS[self.dtype] * torch.finfo(self.dtype).eps
        largest = max([self.subtracted, *map(_largest, self.exact.gradients.values())])
        of_largest = (OF_LARGEST_GRADIENT * eps + self.of_weights) * largest
        of_cancelled = OF_CANCELLED * torch.finfo(torch.float32).eps * self.cancelled
        for name, gradient in found.gradients.items():
            where = f"gradient of {name}"
            if gradient is None:
                raise Wrong(where, f"there is no gradient of {name}")
            _compare(
                where,
                gradient,
                self.exact.gradients[name],
                self.near.gradients[name],
                [usual.gradients[name] for usual in self.usual],
                self.dtype,
                of_all=of_largest + of_cancelled,
            )


def _has_new_nan(mine: Tensor, exact: Tensor) -> bool:
    if mine.shape != exact.shape:  # `compare` reports the wrong shape
        return False
    return bool((mine.isnan() & exact.isfinite()).any())


def _rounded(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements are changed by a rounding of fp32, up or down."""
    # Random signs, since errors in one direction might cancel in a difference or a ratio.
    signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(7)) * 2 - 1
    return tensor * (1 + torch.finfo(torch.float32).eps * signs.to(tensor.device))


def _reference(
    operation: Operation,
    case: Case,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    is_rounded: bool = False,
) -> Run:
    """Run torch's operation on contiguous copies of the inputs in a dtype.

    Args:
        is_rounded: True to change each element of the inputs and of the upstream gradient by a
            rounding of fp32.
    """
    leaves = []
    for argument, tensor in zip(operation.arguments, tensors, strict=True):
        copy = tensor.detach().contiguous().clone()
        if copy.is_floating_point():
            copy = _rounded(copy.to(dtype)) if is_rounded else copy.to(dtype)
        wants_gradient = case.upstream is not None and argument.has_gradient
        leaves.append(copy.requires_grad_(wants_gradient))
    results = as_tuple(operation.exact(*leaves))
    gradients = {}
    if case.upstream is not None:
        # Drawn in the dtype of the case, so that all runs have the same.
        upstream = []
        for result in results:
            gradient = upstream_of(result.detach().to(DTYPES[case.dtype]), case).to(result.dtype)
            upstream.append(_rounded(gradient) if is_rounded else gradient)
        torch.autograd.backward(results, upstream)
        for argument, leaf in zip(operation.arguments, leaves, strict=True):
            if argument.has_gradient:
                gradients[argument.name] = leaf.grad
    return Run(tuple(result.detach() for result in results), gradients)


def _compare(
    name: str,
    actual: Tensor,
    exact: Tensor,
    near: Tensor,
    usual: Sequence[Tensor],
    dtype: torch.dtype,
    of_all: float,
) -> None:
    """Compare one tensor with the exact one.

    Args:
        near: the exact result of inputs that differ by a rounding.
        usual: torch's own result in the dtype of the case, and others that are as right.
        of_all: error that is allowed in addition.

    Raises:
        Wrong: it differs by more than rounding.
    """
    if actual.shape != exact.shape:
        raise Wrong("shape", f"{name} is {tuple(actual.shape)}, not {tuple(exact.shape)}")
    mine = actual.detach().double()
    # Where the exact result is not a number, any value is accepted. Where it does not fit the
    # dtype, or torch's own sum overflows on its way, so is infinity.
    fits = exact.isfinite() & (exact.abs() <= torch.finfo(dtype).max)
    own = usual[0]
    fits &= ~(own.isinf() & mine.isinf()) & ~(own.isnan() & ~mine.isfinite())
    infinite = exact.isinf()
    if not torch.equal(mine[infinite], exact[infinite]):
        raise Wrong(name, f"{name} is finite where it must be infinite")
    if not fits.any():
        return
    for word, is_so in (("NaN", mine.isnan()), ("infinite", mine.isinf())):
        wrong = int((fits & is_so).sum())
        if wrong:
            detail = f"{name}: {wrong} of {mine.numel()} elements are {word}"
            raise Wrong(f"{name} is {word}", detail)
    usual_errors = [_largest((each.double() - exact).abs()[fits]) for each in usual]
    condition_error = _largest((near - exact).abs()[fits])
    eps = torch.finfo(dtype).eps
    largest = exact[fits].abs().max()
    # For each element the sum of what each source of rounding may contribute.
    allowed = (
        TIMES_TORCH * max(usual_errors)
        + TIMES_CONDITION * condition_error
        + ROUNDINGS[dtype] * eps * exact.abs()
        + OF_LARGEST * eps * largest
        + of_all
        + torch.finfo(dtype).tiny
    )
    errors = (mine - exact).abs()
    too_large = fits & (errors > allowed)
    if too_large.any():
        at = int(torch.where(too_large, errors, -1.0).argmax())
        place = tuple(int(each) for each in torch.unravel_index(torch.tensor(at), exact.shape))
        found, wanted = _distinct(mine.flatten()[at].item(), exact.flatten()[at].item())
        raise Wrong(
            name,
            f"{name}: {int(too_large.sum())} of {mine.numel()} elements are wrong. At {place} it "
            f"is {found}, and exact is {wanted} (torch's own error: {usual_errors[0]:.1e})",
        )


def _distinct(one: float, other: float) -> tuple[str, str]:
    """Return two different numbers with six digits, or with as many more as they need to differ."""
    for digits in range(6, 18):  # 17 digits tell any two numbers of float64 apart
        texts = (f"{one:.{digits}g}", f"{other:.{digits}g}")
        if texts[0] != texts[1]:
            break
    return texts


def _largest(errors: Tensor) -> float:
    """Return the largest finite absolute value, 0 if there is none."""
    finite = errors[errors.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def differences(first: Run, second: Run) -> float:
    """Return the largest difference between two runs on the same input, 0 for equal bits."""
    largest = 0.0
    pairs = list(zip(first.results, second.results, strict=True))
    for name, gradient in first.gradients.items():
        pairs.append((gradient, second.gradients[name]))
    for one, other in pairs:
        difference = (one.double() - other.double()).abs()
        largest = max(largest, _largest(difference))
    return largest


def reads_outside(
    function: Function, operation: Operation, case: Case, device: torch.device
) -> bool:
    """Return whether a kernel returns no NaN if the memory next to its inputs is 0."""
    try:
        tensors = drawn(case, operation, device, fill=0.0)
        expected = Expected(operation, case, tensors)
        found = run(call_of(function, operation), operation, case, tensors).to_cpu()
    except Exception:
        return False
    return not expected.is_nan_of(found)
