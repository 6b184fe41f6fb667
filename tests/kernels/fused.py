"""What the tests of the fused kernels share: inputs, and the comparison with float64."""

import pytest
import torch

from kernels import _triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32: sums of some thousand terms of order 1 in another order, each rounded to 6e-8 of its size, and gradients of
# weights that sum over rows. fp16: inputs are exact here, results and gradients rounded to 11 bits, of values up to 10.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def draw(*shape, dtype=torch.float32, seed=0, device=DEVICE):
    """Normal numbers, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.fixture(params=[True, False], ids=["triton", "plain"])
def either(request, monkeypatch):
    """Run a test with the kernels and with the plain-torch path of machines that have no Triton."""
    if not request.param:
        monkeypatch.setattr(_triton, "runs_triton", lambda tensor: False)
    return request.param


def compare(function, reference, *tensors, tolerance=None, seed=7):
    """Outputs and the gradient of every floating-point input against the reference in float64.

    `function` and `reference` take the tensors and return one tensor or a tuple; the upstream gradients are random.
    """
    inputs = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    ours, theirs = function(*inputs), reference(*exact)
    ours = ours if isinstance(ours, tuple) else (ours,)
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    upstream = [draw(*y.shape, seed=seed + i, device=y.device).to(y.dtype) for i, y in enumerate(ours)]
    grads = torch.autograd.grad(ours, inputs, upstream)
    exact_grads = torch.autograd.grad(theirs, exact, [u.double() for u in upstream])
    limit = TOLERANCE[tensors[0].dtype] if tolerance is None else tolerance
    for place, (x, y) in enumerate(zip((*ours, *grads), (*theirs, *exact_grads), strict=True)):
        assert x.shape == y.shape, place
        torch.testing.assert_close(x.double(), y, atol=limit, rtol=limit, msg=lambda m, n=place: f"result {n}: {m}")
    for grad, x in zip(grads, inputs, strict=True):
        assert grad.dtype == x.dtype
