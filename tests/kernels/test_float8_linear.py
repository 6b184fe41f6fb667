"""The linear layer in fp8: its casts, its products beside those of wide numbers, what it
refuses.
"""

import pytest
import torch

from kernels import _dispatch, nn
from kernels.float8_linear import E4M3, E5M2, cast, float8_linear, transposed

from .fused import DEVICE, draw
from .near import same_bits


def cuts_off(x):
    """Whether Triton's interpreter casts: it cuts off, 127 to 64 even, and knows no NaN in fp8."""
    return _dispatch.interpreted() and _dispatch.runs_triton(x)


def near_enough(found, expected):
    """Within what rounding two factors to three bits, or to three and two, does to a product, and
    not nearer.
    """
    found = found.detach()
    error = (found.double() - expected).norm() / expected.norm()
    assert 0.01 < error < (0.2 if cuts_off(found) else 0.07)


@pytest.mark.parametrize("shape", [(48, 64), (80, 208), (256, 512)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
def test_a_cast_and_its_transpose(shape, dtype, wide, either):
    """As torch casts, once the largest element is the format's; strides do not matter."""
    x = draw(*shape[::-1]).to(wide).t()
    q, inverse = cast(x, dtype)
    most = torch.finfo(dtype).max
    assert inverse.item() == pytest.approx(x.abs().max().item() / most)
    same_bits(transposed(q).float(), q.t().float())
    expected = (x.float() / inverse).clamp(-most, most).to(dtype).float()
    assert (q.float() - expected).norm() <= (0.2 if cuts_off(x) else 0.0) * expected.norm()


def test_without_triton_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(_dispatch, "runs_triton", lambda tensor: False)
    monkeypatch.setattr(_dispatch, "launch", None)
    q, _ = cast(draw(16, 32), E4M3)
    same_bits(transposed(q).float(), q.t().float())


def test_products_are_as_near_as_the_formats_allow(either):
    x = draw(3, 16, 64).requires_grad_()
    w = draw(32, 64, seed=1).requires_grad_()
    dy = draw(3, 16, 32, seed=2)
    y = float8_linear(x, w)
    y.backward(dy)
    rows = x.detach().view(-1, 64).double()
    wide = w.detach().double()
    upstream = dy.view(-1, 32).double()
    assert y.shape == (3, 16, 32) and x.grad.shape == x.shape
    near_enough(y.view(-1, 32), rows @ wide.T)
    near_enough(x.grad.view(-1, 64), upstream @ wide)
    near_enough(w.grad, upstream.T @ rows)


def test_zeros_stay_and_what_is_not_finite_shows(either):
    x, w = torch.zeros(32, 64, device=DEVICE), draw(16, 64)
    assert not float8_linear(x, w).any()
    if not cuts_off(x):
        x[3, 5] = torch.nan
        assert float8_linear(x, w).isnan().any(1).nonzero().flatten().tolist() == [3]
    x[3, 5] = torch.inf
    assert not float8_linear(x, w).isfinite().any()


def test_the_module_has_torchs_weights_and_autocasts_dtype():
    layer, plain = nn.Float8Linear(64, 32, device=DEVICE), torch.nn.Linear(64, 32, device=DEVICE)
    layer.load_state_dict(plain.state_dict())
    x, low = draw(16, 64), torch.float16 if _dispatch.interpreted() else torch.bfloat16
    with torch.autocast(DEVICE, low):
        y = layer(x)
    assert y.dtype == low
    near_enough(y, plain(x).detach().double())
    y.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        ((15, 32), (16, 32), "rows of x = 15"),
        ((16, 24), (16, 24), "K = 24"),
        ((16, 32), (40, 32), "N = 40"),
        ((16, 32), (16, 48), r"w has shape \(16, 48\)"),
    ],
)
def test_sizes_that_tensor_cores_do_not_take(x, w, said):
    with pytest.raises(ValueError, match=said):
        float8_linear(draw(*x), draw(*w))


@pytest.mark.gpu
def test_compiled_and_eager_are_alike():
    x, w = draw(48, 64).requires_grad_(), draw(32, 64, seed=1).requires_grad_()

    def run(function):
        return torch.autograd.grad(function(x, w).square().sum(), (x, w))

    for found, expected in zip(run(torch.compile(float8_linear)), run(float8_linear), strict=True):
        same_bits(found, expected)
