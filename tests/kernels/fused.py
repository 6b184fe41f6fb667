"""What the tests of the fused kernels share: inputs, and the comparison with float64."""

import pytest
import torch

from kernels import _dispatch, rmsnorm, softmax
from kernels._dispatch import forced
from kernels._rows import Launch

from .near import near

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32: sums of some thousand terms of order 1 in another order, each rounded to 6e-8 of its size,
# and gradients of weights that sum over rows. fp16: inputs are exact here, results and gradients
# rounded to 11 bits, of values up to 10.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def draw(*shape, dtype=torch.float32, seed=0, device=DEVICE):
    """Normal numbers, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.fixture(params=[True, False], ids=["triton", "plain"])
def either(request, monkeypatch):
    """Run a test with the kernels and with the plain-torch path of machines that have no Triton.

    Without programs, which would launch what an earlier test has recorded of such a call.
    """
    _dispatch.forget()
    if not request.param:
        monkeypatch.setattr(_dispatch, "runs_triton", lambda tensor: False)
    yield request.param
    _dispatch.forget()


@pytest.fixture
def in_pieces(monkeypatch):
    """Every row is too long for one tile, pieces have 32 columns, and tiles of element-wise kernels
    16 elements.
    """
    for module in (rmsnorm, softmax):
        monkeypatch.setattr(module, "ONE_TILE", 4)
        monkeypatch.setattr(module, "ONE_TILE_BACKWARD", 4)
    monkeypatch.setattr(softmax, "HALF_TILE_BACKWARD", 4)
    long = (
        "long_forward",
        "long_products",
        "long_strips",
        "softmax_long",
        "softmax_long_backward",
        "cross_entropy",
        "cross_entropy_gradient",
        "cross_entropy_both",
    )
    short = ("add", "gelu", "gelu_backward", "swiglu", "swiglu_backward")
    with forced(
        **dict.fromkeys(long, Launch(32, warps=1, per_sm=1)), **dict.fromkeys(short, Launch(16))
    ):
        yield


@pytest.fixture
def many_rows(monkeypatch):
    """No rows of a norm are few: its backward takes two launches."""
    monkeypatch.setattr(rmsnorm, "FEW_ROWS", 0)
    with forced():
        yield


@pytest.fixture
def poisoned():
    """Have torch fill fresh memory with NaN: an element that is read before it is written, or never
    written, shows.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def outputs(function, inputs):
    """What a function of these tensors returns, always as a tuple."""
    out = function(*inputs)
    return out if isinstance(out, tuple) else (out,)


def results(function, inputs):
    """Outputs, and the gradients of all inputs for an upstream gradient of ones."""
    out = outputs(function, inputs)
    return *out, *torch.autograd.grad(out, inputs, [torch.ones_like(y) for y in out])


def compare(function, reference, *tensors, tolerance=None, upstream=lambda drawn: drawn):
    """Outputs and the gradients of the inputs, which stay as they lie in memory, against the
    reference in float64.

    `function` and `reference` take the tensors and return one tensor or a tuple; `upstream` makes
    each gradient of an output from random numbers.
    """
    inputs = [t.detach().requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    ours, theirs = outputs(function, inputs), outputs(reference, exact)
    upstreams = [
        upstream(draw(*y.shape, dtype=y.dtype, seed=7 + i, device=y.device))
        for i, y in enumerate(ours)
    ]
    grads = torch.autograd.grad(ours, inputs, upstreams)
    exact_grads = torch.autograd.grad(theirs, exact, [u.double() for u in upstreams])
    near(
        (*ours, *grads),
        (*theirs, *exact_grads),
        TOLERANCE[tensors[0].dtype] if tolerance is None else tolerance,
    )
    assert [grad.dtype for grad in grads] == [x.dtype for x in inputs]
