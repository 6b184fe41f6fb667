"""What must hold of attention and of RMSNorm, and the judgement of what a child noted."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.grade.hooks import Part
from distlab.grade.invariant import (
    Absent,
    Broken,
    Invariant,
    Refused,
    Skipped,
    is_near,
    largest_difference,
)
from distlab.grade.kernels import ATTENTION, EPS, families_of

Noted = list[dict[str, Any]]

# Families that handouts do not ask for. A kernel may refuse them with an error.
BEYOND = (
    "lengths that are not a multiple of a tile",
    "inputs with other strides",
    "upstream gradients with other strides",
    "fp16 and bf16",
)
LENGTHS = (64, 256)  # the second has 16 times the scores of the first


def invariants(part: Part, dtypes: tuple[str, ...]) -> list[Invariant]:
    """Return what must hold of a part of kind `attention` or `rmsnorm`.

    Args:
        dtypes: dtypes to try in addition to fp32.
    """
    found = []
    forms = (False, True) if part.kind == "attention" else (False,)
    for is_causal in forms:
        prefix = "causal: " if is_causal else ""
        for family, cases in families_of(part.kind, is_causal, dtypes).items():
            for pass_name in ("forward", "backward"):
                # A forward does not get an upstream gradient.
                if family.startswith("upstream") and pass_name == "forward":
                    continue
                found.append(
                    Invariant(
                        title=f"{prefix}{family}: {pass_name}",
                        experiment="run_family",
                        settings={
                            "family": family,
                            "is_causal": is_causal,
                            "dtypes": dtypes,
                        },
                        ranks=(0,),
                        judge=partial(_right, pass_name=pass_name),
                        input=f"{len(cases)} input{'' if len(cases) == 1 else 's'}",
                        is_beyond=family in BEYOND,
                        may_refuse=family in BEYOND,
                    )
                )
    if part.kind == "attention":
        for length in LENGTHS:
            found.append(
                Invariant(
                    title=f"the log-sum-exp is saved for backward, length {length}",
                    experiment="save_tensors",
                    settings={"length": length},
                    ranks=(0,),
                    judge=_saves_log_sum_exp,
                    input=f"saved tensors of {length} queries and keys",
                )
            )
        found.append(
            Invariant(
                title="memory does not grow with the square of the length",
                experiment="save_tensors",
                settings={"length": LENGTHS[-1]},
                ranks=(0,),
                judge=partial(_saves_no_scores, length=LENGTHS[-1]),
                input=f"saved tensors of {LENGTHS[-1]} queries and keys",
            )
        )
    return found


def rmsnorm_backwards() -> list[tuple[str, Invariant]]:
    """Return (hook, invariant) of the functions that compute one gradient of RMSNorm."""
    found = []
    for name, position in (("x", 0), ("g", 1)):
        hook = f"rmsnorm_backward_{name}_pytorch"
        found.append(
            (
                hook,
                Invariant(
                    title=f"the gradient of {name} by hand",
                    experiment="rmsnorm_backward",
                    settings={"hook": hook, "position": position},
                    ranks=(0,),
                    judge=_rmsnorm_gradient,
                    input="x (5, 7, 20)",
                ),
            )
        )
    return found


def _right(ranks: Noted, pass_name: str) -> None:
    """Raise Broken if the result of an input was wrong, else Refused if an input raised an error.

    A backward is judged where the forward is right, because its row would say the same.
    """
    if pass_name == "backward" and any(
        outcome["status"] == "wrong" for outcome in ranks[0]["forward"]
    ):
        raise Skipped("the forward is wrong, see above")
    for outcome in ranks[0][pass_name]:
        if outcome["status"] == "wrong":
            raise Broken(f"torch's result, {outcome['case']}", outcome["detail"])
        if outcome["is_absent"]:
            raise Absent(outcome["detail"])
    # A second loop: a wrong result weighs more than an error for an earlier input.
    for outcome in ranks[0][pass_name]:
        if outcome["status"] == "refused":
            raise Refused(f"{outcome['case']}: {outcome['detail']}")


def _log_sum_exp(inputs: list[Tensor]) -> Tensor:
    """Return log Σ exp of the scores of each query, (batch, length)."""
    q, k, _ = (each.double() for each in inputs)
    return (q @ k.mT / ATTENTION["D"] ** 0.5).logsumexp(-1)


def _saves_log_sum_exp(ranks: Noted) -> None:
    """Raise Broken unless one of the saved tensors is the log-sum-exp of each query."""
    expected = _log_sum_exp(ranks[0]["inputs"])
    saved = ranks[0]["saved"]
    # The form is free: (batch, length), with a dimension of 1, or flat.
    of_shape = [each for each in saved if each.numel() == expected.numel()]
    for each in of_shape:
        # 1 % also allows for half precision, and tells natural from binary logarithms.
        if is_near(each.reshape(expected.shape).double(), expected, 1e-2):
            return
    shape = tuple(expected.shape)
    if not of_shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in saved) or "nothing"
        raise Broken(f"a saved tensor of shape {shape}", shapes)
    found = largest_difference(of_shape[0].reshape(expected.shape), expected)
    raise Broken(f"the log-sum-exp of the scaled scores, {shape}", found)


def _saves_no_scores(ranks: Noted, length: int) -> None:
    """Raise Broken if a saved tensor has an element for each pair of a query and a key."""
    for each in ranks[0]["saved"]:
        # Every tensor of a query and a key per element is at least that large. All others grow with
        # the length alone.
        if each.numel() >= length * length:
            raise Broken("no tensor of length × length", f"one of shape {tuple(each.shape)}")


def _rmsnorm_gradient(ranks: Noted) -> None:
    """Raise Broken unless a gradient of RMSNorm is that of torch."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, 20, generator=generator).requires_grad_()
    gain = torch.randn(20, generator=generator).requires_grad_()
    upstream = torch.randn(5, 7, 20, generator=generator)
    torch.nn.functional.rms_norm(x, (20,), gain, EPS).backward(upstream)
    expected = (x.grad, gain.grad)[ranks[0]["position"]]
    seen = ranks[0]["result"]
    if not is_near(seen, expected):
        raise Broken("torch's gradient", largest_difference(seen, expected))
