"""What a child process does with a submission's kernels: run them on hard inputs.

Attention and RMSNorm are judged as by `distlab kernel`, input by input. A family of inputs has one
thing that is hard, so that a row of the report says which.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from distlab.grade.experiments import Noted, Place, is_tensor
from distlab.grade.hooks import function_of
from distlab.kernel_check.hostile import Case, drawn
from distlab.kernel_check.judge import judge
from distlab.kernel_check.operations import OPERATIONS, Operation

EPS = 1e-5  # of the course's RMSNorm

# Sizes of attention: batch, heads, queries, keys, head dim. Small, because Triton's interpreter
# takes a second for larger ones.
ATTENTION = {"B": 1, "H": 1, "T": 32, "S": 32, "D": 32}
CAUSAL = {name: size for name, size in ATTENTION.items() if name != "S"}
RMSNORM = {"N": 16, "D": 64}


def attention_families(is_causal: bool, dtypes: tuple[str, ...]) -> dict[str, list[Case]]:
    """Return family → inputs of attention, the smallest first.

    Args:
        is_causal: True for causal attention, which has as many keys as queries.
        dtypes: dtypes to try in addition to fp32.
    """
    name = "causal_attention" if is_causal else "attention"
    plain_sizes = CAUSAL if is_causal else ATTENTION

    def case(seed: int = 0, **changed: Any) -> Case:
        sizes = {key: changed.pop(key, size) for key, size in plain_sizes.items()}
        return Case(name, tuple(sizes.items()), seed=seed, **changed)

    families = {
        "powers of two": [
            case(T=16, D=16, **_keys(is_causal, 16)),
            case(),
            case(B=2, T=128, D=64, **_keys(is_causal, 128)),
        ],
        "head dims 16 to 128": [case(D=16), case(D=64), case(D=128)],
        "several batches and heads": [case(B=3), case(B=2, H=2)],
        "scores up to ±50 and equal scores": [
            case(values="±50"),
            case(values="constant"),
            case(values="zeros"),
            case(values="tiny"),
        ],
        "lengths that are no multiple of a tile": [
            case(T=size, **_keys(is_causal, size)) for size in (1, 15, 17, 33, 65)
        ],
        "inputs with other strides": [
            case(layout="transposed"),
            case(layout="sliced"),
            case(layout="every second"),
        ],
        "upstream gradients with other strides": [
            case(upstream="transposed"),
            case(upstream="expanded"),
        ],
        "a second call with other values": [case(is_repeated=True)],
    }
    if not is_causal:
        families["other numbers of keys than queries"] = [
            case(T=16, S=64),
            case(T=64, S=16),
        ]
    if dtypes:
        families["fp16 and bf16"] = [case(dtype=dtype) for dtype in dtypes]
    return families


def _keys(is_causal: bool, size: int) -> dict[str, int]:
    """Return the number of keys as a size, where it is one of its own."""
    return {} if is_causal else {"S": size}


def rmsnorm_families(dtypes: tuple[str, ...]) -> dict[str, list[Case]]:
    """Return family → inputs of RMSNorm, the smallest first."""

    def case(seed: int = 0, **changed: Any) -> Case:
        sizes = {key: changed.pop(key, size) for key, size in RMSNORM.items()}
        return Case("rms_norm", tuple(sizes.items()), seed=seed, **changed)

    families = {
        "powers of two": [case(N=2, D=16), case(), case(seed=1)],
        "rows that are no power of two": [case(D=size) for size in (1, 15, 17, 100, 1000)],
        "other numbers of rows": [case(N=size) for size in (1, 3, 17, 33)],
        "large means, ±50, zeros": [
            case(values="mean 1,000"),
            case(values="±50"),
            case(values="zeros"),
            case(values="tiny"),
        ],
        "inputs of other ranks": [case(layout="rank 4")],
        "inputs with other strides": [
            case(layout="transposed"),
            case(layout="sliced"),
            case(layout="every second"),
        ],
        "upstream gradients with other strides": [
            case(upstream="transposed"),
            case(upstream="expanded"),
        ],
        "a second call with other values": [case(is_repeated=True)],
    }
    if dtypes:
        families["fp16 and bf16"] = [case(dtype=dtype) for dtype in dtypes]
    return families


def families_of(kind: str, is_causal: bool, dtypes: tuple[str, ...]) -> dict[str, list[Case]]:
    """Return the families of a part."""
    if kind == "attention":
        return attention_families(is_causal, dtypes)
    return rmsnorm_families(dtypes)


def run_family(place: Place, family: str, is_causal: bool, dtypes: tuple[str, ...]) -> Noted:
    """Run a kernel on the inputs of one family, forward alone and with backward.

    Each ends with the first input that is wrong.
    """
    function = kernel_of(place, is_causal)
    noted: Noted = {"forward": [], "backward": []}
    for case in families_of(place.part.kind, is_causal, dtypes)[family]:
        operation = OPERATIONS[case.operation]
        for pass_name, upstream in (("forward", None), ("backward", case.upstream)):
            outcomes = noted[pass_name]
            if outcomes and outcomes[-1]["status"] == "wrong":
                continue
            outcome = judge(function, operation, replace(case, upstream=upstream), place.device)
            outcomes.append(asdict(outcome) | {"case": str(case)})
    return noted


def run_families(place: Place, is_causal: bool, dtypes: tuple[str, ...]) -> Noted:
    """Run a kernel on the inputs of all families, in one process."""
    found = {}
    for family in families_of(place.part.kind, is_causal, dtypes):
        found[family] = run_family(place, family, is_causal, dtypes)
    return found


def kernel_of(place: Place, is_causal: bool) -> Callable[..., Tensor]:
    """Return a submission's kernel in the form that `distlab kernel` examines."""
    kernel = function_of(place.module, place.part.hook)()
    if place.part.kind == "rmsnorm":

        def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
            return kernel.apply(x, weight, EPS)

        return rms_norm

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # A course's attention has no dimension of heads.
        flat = [each.flatten(0, 1) for each in (q, k, v)]
        return kernel.apply(*flat, is_causal).unflatten(0, q.shape[:2])

    return attention


def save_tensors(place: Place, length: int) -> Noted:
    """Note what attention keeps for its backward, and the log-sum-exp of the scores among it."""
    sizes = {**ATTENTION, "T": length, "S": length}
    case = Case("attention", tuple(sizes.items()))
    operation: Operation = OPERATIONS["attention"]
    q, k, v = (each.to(place.device) for each in drawn(case, operation, place.device))
    flat = [each.flatten(0, 1).contiguous().requires_grad_() for each in (q, k, v)]
    kernel = function_of(place.module, place.part.hook)()
    result = kernel.apply(*flat, False)
    # Tensors may also be kept as attributes of `ctx`, which is the result's grad_fn.
    kept = [each for each in vars(result.grad_fn).values() if is_tensor(each)]
    saved = [*getattr(result.grad_fn, "saved_tensors", ()), *kept]
    return {
        "inputs": [each.detach().cpu() for each in flat],
        "saved": [each.detach().cpu() for each in saved if each is not None],
    }


def rmsnorm_backward(place: Place, hook: str, position: int) -> Noted:
    """Note what a function that computes one gradient of RMSNorm returns."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, 20, generator=generator)
    gain = torch.randn(20, generator=generator)
    upstream = torch.randn(5, 7, 20, generator=generator)
    result = function_of(place.module, hook)(upstream, x, gain)
    return {"position": position, "result": result.detach().cpu()}
