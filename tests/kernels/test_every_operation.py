"""What holds for every operation: fake tensors, layouts, and gradients of gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import matmul as matmul_module
from kernels import reference
from kernels.cross_entropy import cross_entropy
from kernels.dropout import dropout, linear_gelu_dropout
from kernels.elementwise import add, gelu
from kernels.layernorm import layer_norm
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.matmul import matmul
from kernels.rmsnorm import RMSNormPyTorch, add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.softmax import softmax
from kernels.swiglu import swiglu
from kernels.weighted_sum import weighted_sum

from .fused import DEVICE, compare, draw

X, D = (3, 8), (8,)


def classes(x):
    return torch.arange(len(x), device=x.device)


def tables(x):
    angles = torch.arange(12.0, device=x.device).view(3, 4)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


# name → (function, the same in plain torch, shapes of its tensors)
OPERATIONS = {
    "add": (add, reference.add, X, X),
    "gelu": (gelu, reference.gelu, X),
    "swiglu": (swiglu, reference.swiglu, X, X),
    "rope": (lambda x: rope(x, *tables(x)), lambda x: reference.rope(x, *tables(x)), X),
    "dropout": (lambda x: dropout(x, 0.0), lambda x: x, X),
    "seeded_dropout": (lambda x: dropout(x, 1.0, seed=1), lambda x: 0 * x, X),
    "linear_gelu_dropout": (lambda *t: linear_gelu_dropout(*t, 0.0), lambda *t: reference.gelu(F.linear(*t)), X, (5, 8),
                            (5,)),
    "softmax": (softmax, reference.softmax, X),
    "weighted_sum": (weighted_sum, reference.weighted_sum, X, D),
    "rms_norm": (rms_norm, reference.rms_norm, X, D),
    "RMSNormPyTorch": (RMSNormPyTorch.apply, reference.rms_norm, X, D),
    "add_rms_norm": (add_rms_norm, reference.add_rms_norm, X, X, D),
    "layer_norm": (layer_norm, reference.layer_norm, X, D, D),
    "cross_entropy": (lambda z: cross_entropy(z, classes(z)), lambda z: F.cross_entropy(z, classes(z)), X),
    "cross_entropies": (lambda z: cross_entropy(z, classes(z), reduction="none"),
                        lambda z: F.cross_entropy(z, classes(z), reduction="none"), X),
    "linear_cross_entropy": (lambda x, w: linear_cross_entropy(x, w, classes(x)),
                             lambda x, w: F.cross_entropy(x @ w.T, classes(x)), X, (5, 8)),
    "matmul": (matmul, lambda a, b: a @ b, X, (8, 5)),
    "matmul_gelu": (lambda *t: matmul(*t, epilogue="gelu"), lambda *t: reference.matmul(*t, "gelu"), X, (8, 5), (5,)),
}
every = pytest.mark.parametrize("name", OPERATIONS)


def results(function, inputs):
    """Outputs, and the gradients of all inputs from a contiguous upstream."""
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    return *out, *torch.autograd.grad(out, inputs, [torch.ones_like(y) for y in out])


def facts(tensors):
    return [(t.dtype, t.device.type, t.shape, t.stride()) for t in tensors]


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fake_tensors_are_like_real_ones(name, dtype, either):
    function, _, *shapes = OPERATIONS[name]
    real = facts(results(function, [draw(*s, dtype=dtype).requires_grad_() for s in shapes]))
    with FakeTensorMode():
        fakes = [torch.empty(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes]
        assert facts(results(function, fakes)) == real
    metas = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    assert facts(results(function, metas)) == [(dtype, "meta", *rest) for dtype, _, *rest in real]


@every
def test_meta_tensors_under_autocast_of_a_device(name):
    function, _, *shapes = OPERATIONS[name]
    with torch.autocast(DEVICE, torch.float16):
        out = results(function, [torch.empty(s, device="meta", requires_grad=True) for s in shapes])
    assert all(t.is_meta for t in out)


@every
def test_views_that_overlap(name, either):
    """Rows of a sliding window, and of a matrix that is one row many times."""
    function, plain, *shapes = OPERATIONS[name]
    windows = [draw(s[-1] + 2 * (s[0] - 1)).unfold(0, s[-1], 2) if len(s) == 2 else draw(*s) for s in shapes]
    repeated = [draw(1, s[-1]).expand(s) if len(s) == 2 else draw(1).expand(s) for s in shapes]
    for views in (windows, repeated, [draw(*s[::-1]).T for s in shapes]):
        inputs = [v.detach().requires_grad_() for v in views]
        ours = results(function, inputs)
        exact = results(plain, [v.double().requires_grad_() for v in views])
        for x, y in zip(ours, exact, strict=True):
            torch.testing.assert_close(x.double(), y, atol=3e-5, rtol=3e-5)


def negative(x):
    """x as the negatives of what lies in memory."""
    return torch.complex(x, -x).conj().imag


@every
def test_values_that_do_not_lie_in_memory(name, either):
    """Negatives by torch's bit and zeros without memory, as inputs and from upstream."""
    function, plain, *shapes = OPERATIONS[name]
    assert negative(draw(2)).is_neg()
    for make in (negative, lambda x: torch._efficientzerotensor(x.shape, device=x.device)):
        inputs = [make(draw(*s, seed=i)).requires_grad_() for i, s in enumerate(shapes)]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        ours, theirs = (y if isinstance(y, tuple) else (y,) for y in (function(*inputs), plain(*exact)))
        upstream = [make(draw(*y.shape, seed=7)) for y in ours]
        ours += torch.autograd.grad(ours, inputs, upstream)
        theirs += torch.autograd.grad(theirs, exact, [u.double() for u in upstream])
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x.double(), y, atol=3e-5, rtol=3e-5)


@every
def test_gradients_of_gradients_are_refused(name, either):
    """Also where the upstream gradient requires none: a penalty on the gradient would lack its own gradient."""
    function, _, *shapes = OPERATIONS[name]
    inputs = [draw(*s).requires_grad_() for s in shapes]
    out = function(*inputs)
    out = sum(y.sum() for y in out) if isinstance(out, tuple) else out.sum()
    if name in ("add", "dropout"):  # whose gradients depend on nothing
        assert not any(g.requires_grad for g in torch.autograd.grad(out, inputs, create_graph=True))
        return
    with pytest.raises(RuntimeError, match="the gradient of its gradient is not defined"):
        torch.autograd.grad(out, inputs, create_graph=True)


def test_the_gradient_of_a_sums_gradient_is_right():
    x, y = draw(3).requires_grad_(), draw(3, seed=1).requires_grad_()
    slope, = torch.autograd.grad((add(x, y) ** 3).sum(), x, create_graph=True)
    second, = torch.autograd.grad(slope.sum(), y)
    torch.testing.assert_close(second, 6 * (x + y).detach())


def test_the_slopes_of_an_epilogue_are_contiguous_as_their_fake():
    h = draw(3, 5)
    for dy in (draw(5, 3).T, torch.ones((), device=DEVICE).expand(3, 5)):
        slope = matmul_module.slope_op(dy, h, "gelu")
        assert slope.stride() == (5, 1)
        torch.testing.assert_close(slope, reference.epilogue_backward(dy, h, "gelu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert matmul_module.slope_op(dy, h, "gelu").stride() == (5, 1)


def test_every_epilogue_keeps_its_gradient_in_half_precision(either):
    """h is computed again in fp32 for fp16: f′ of what fp16 rounds to 0 or beyond its range."""
    tiny = torch.tensor([[1e-4, -1e-4]], device=DEVICE, dtype=torch.float16)
    for epilogue in ("relu", "leaky_relu"):
        compare(lambda *t, e=epilogue: matmul(*t, epilogue=e), lambda *t, e=epilogue: reference.matmul(*t, None, e),
                tiny[:, :1], tiny)
