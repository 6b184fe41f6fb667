"""What a child process does with a submission's kernels: run them on hard inputs.

Attention and RMSNorm are judged as by `distlab kernel`, input by input. A family of inputs has one
thing that is hard, so that a row of the report says which.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor

from distlab.grade.experiments import Noted, Place, is_tensor
from distlab.grade.hooks import is_left_out, result_of
from distlab.kernel_check.hostile import Case, drawn
from distlab.kernel_check.judge import judge, run
from distlab.kernel_check.operations import OPERATIONS, Operation

EPS = 1e-5  # number that the course's RMSNorm adds to the mean square

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
    if is_causal:
        plain = Case("causal_attention", tuple(CAUSAL.items()))
    else:
        plain = Case("attention", tuple(ATTENTION.items()))

    def of_length(length: int, batch: int = 1, head_dim: int = 32) -> Case:
        """Return the plain input with as many queries as keys."""
        keys = {} if is_causal else {"S": length}
        return sized(plain, {"B": batch, "T": length, "D": head_dim, **keys})

    families = {
        "powers of two": [
            of_length(16, head_dim=16),
            plain,
            of_length(128, batch=2, head_dim=64),
        ],
        "head dims 16 to 128": [sized(plain, {"D": size}) for size in (16, 64, 128)],
        "several batches and heads": [sized(plain, {"B": 3}), sized(plain, {"B": 2, "H": 2})],
        "scores up to ±50 and equal scores": [
            replace(plain, values=values) for values in ("±50", "constant", "zeros", "tiny")
        ],
        "lengths that are not a multiple of a tile": [
            of_length(size) for size in (1, 15, 17, 33, 65)
        ],
        **_families_of_any(plain),
    }
    if not is_causal:
        families["other numbers of keys than queries"] = [
            sized(plain, {"T": 16, "S": 64}),
            sized(plain, {"T": 64, "S": 16}),
        ]
    if dtypes:
        families["fp16 and bf16"] = [replace(plain, dtype=dtype) for dtype in dtypes]
    return families


def rmsnorm_families(dtypes: tuple[str, ...]) -> dict[str, list[Case]]:
    """Return family → inputs of RMSNorm, the smallest first."""
    plain = Case("rms_norm", tuple(RMSNORM.items()))
    families = {
        "powers of two": [sized(plain, {"N": 2, "D": 16}), plain, replace(plain, seed=1)],
        "rows that are not a power of two": [
            sized(plain, {"D": size}) for size in (1, 15, 17, 100, 1000)
        ],
        "other numbers of rows": [sized(plain, {"N": size}) for size in (1, 3, 17, 33)],
        "large means, ±50, zeros": [
            replace(plain, values=values) for values in ("mean 1,000", "±50", "zeros", "tiny")
        ],
        "inputs of other ranks": [replace(plain, layout="rank 4")],
        **_families_of_any(plain),
    }
    if dtypes:
        families["fp16 and bf16"] = [replace(plain, dtype=dtype) for dtype in dtypes]
    return families


def _families_of_any(plain: Case) -> dict[str, list[Case]]:
    """Return the families that every kernel has."""
    layouts = ("transposed", "sliced", "every second")
    return {
        "inputs with other strides": [replace(plain, layout=layout) for layout in layouts],
        "upstream gradients with other strides": [
            replace(plain, upstream="transposed"),
            replace(plain, upstream="expanded"),
        ],
        "a second call with other values": [replace(plain, is_repeated=True)],
    }


def sized(plain: Case, sizes: dict[str, int]) -> Case:
    """Return an input with some sizes changed."""
    return replace(plain, sizes=tuple({**dict(plain.sizes), **sizes}.items()))


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
            # upstream is None for the forward alone, which does not ask for gradients.
            tried = replace(case, upstream=upstream)
            outcome = judge(function, operation, tried, place.device)
            is_absent = outcome.status == "refused" and leaves_out(function, tried, place)
            outcomes.append(asdict(outcome) | {"case": str(case), "is_absent": is_absent})
    return noted


def leaves_out(function: Callable[..., Tensor], case: Case, place: Place) -> bool:
    """Return whether the submission itself raises NotImplementedError on an input."""
    operation = OPERATIONS[case.operation]
    try:
        run(function, operation, case, drawn(case, operation, place.device))
    except NotImplementedError as error:
        return is_left_out(error, place.folder)
    except Exception:
        return False  # another error, which `judge` has noted
    return False


def run_families(place: Place, is_causal: bool, dtypes: tuple[str, ...]) -> Noted:
    """Run a kernel on the inputs of all families, in one process."""
    found = {}
    for family in families_of(place.part.kind, is_causal, dtypes):
        found[family] = run_family(place, family, is_causal, dtypes)
    return found


def kernel_of(place: Place, is_causal: bool) -> Callable[..., Tensor]:
    """Return a submission's kernel in the form that `distlab kernel` examines."""
    # The hook returns a class of torch.autograd.Function.
    kernel = place.make()
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
    kernel = place.make()
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
    result = result_of(place.module, hook, upstream, x, gain)
    return {"position": position, "result": result.detach().cpu()}
