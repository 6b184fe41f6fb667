"""What holds for every operation of the table in operations.py, and what a few of them share."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kernels import matmul as matmul_module
from kernels import reference
from kernels.elementwise import add

from .fused import DEVICE, compare, draw, outputs, results
from .near import near, same_bits
from .operations import OPERATIONS, VARIANTS, compare_at, shapes_of

every = pytest.mark.parametrize("name", OPERATIONS)
each_variant = pytest.mark.parametrize("name", OPERATIONS | VARIANTS)
# n, d and o of shapes: more rows and columns than some tiles have, the least, a single row, and
# many dimensions
SIZES = [((35,), 33, 65), ((5,), 260, 7), ((1,), 1, 1), ((), 12, 5), ((2, 1, 2, 2, 3), 4, 3)]
EMPTY = [((0,), 8, 5), ((2, 0), 8, 5), ((3,), 0, 5)]


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_and_gradients(name, dtype, either, poisoned):
    """Compare results and gradients with float64, also where no tile divides rows or columns."""
    for sizes in SIZES if dtype is torch.float32 else SIZES[:2]:
        compare_at(name, sizes, dtype)


@pytest.mark.parametrize(
    "name", [x for x in OPERATIONS | VARIANTS if not x.startswith(("matmul", "attention"))]
)
def test_small_tiles(name, in_pieces):
    """Rows in pieces whose last is full, partly filled and the only one.

    More elements than a tile has.
    """
    for d in (7, 64, 65, 97):
        compare_at(name, ((3,), d, d))


@pytest.mark.parametrize(
    "name", ["rms_norm", "add_rms_norm_silu", "layer_norm", "layer_norm_without_bias"]
)
@pytest.mark.parametrize("many", [False, True])
def test_norms_of_few_rows_and_of_many(name, many, request):
    """And of more than a program that sums columns reads at once."""
    if many:
        request.getfixturevalue("many_rows")
    for sizes in (*SIZES * many, ((300,), 20)):
        compare_at(name, sizes)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "entrop" not in name])
def test_empty(name, either):
    """No rows, and rows of no columns; means over no rows are tested with the losses."""
    for sizes in EMPTY:
        compare_at(name, sizes)


def test_compile_has_no_break():
    """All operations in one graph; the same bits as without compiling."""
    inputs = {}  # operation → its tensors
    leaves = []  # all of them
    for name in OPERATIONS:
        inputs[name] = [draw(*shape).requires_grad_() for shape in shapes_of(name)]
        leaves += inputs[name]

    def all_outputs(*_):
        found = []
        for name, tensors in inputs.items():
            found += outputs(OPERATIONS[name].function, tensors)
        return tuple(found)

    compiled = torch.compile(all_outputs, fullgraph=True, backend="aot_eager")
    same_bits(results(compiled, leaves), results(all_outputs, leaves))


CAST = {
    "swiglu",
    "linear_gelu_dropout",
    "rms_norm",
    "RMSNormPyTorch",
    "add_rms_norm",
    "layer_norm",
    "matmul",
    "matmul_gelu",
    "attention",
    "attention_lse",
    "attention_torch",
}


@every
def test_autocast_gives_gradients_back_in_the_type_of_the_inputs(name):
    function, plain, _ = OPERATIONS[name]
    inputs = [draw(*s, seed=i).requires_grad_() for i, s in enumerate(shapes_of(name))]
    with torch.autocast(DEVICE, torch.float16):
        ours = results(function, inputs)
        metas = results(
            function, [torch.empty_like(x, device="meta", requires_grad=True) for x in inputs]
        )
    near(ours, results(plain, inputs), 2e-2)
    assert (ours[0].dtype is torch.float16) == (name in CAST)
    assert {t.dtype for t in ours[1:]} == {torch.float32}
    assert all(t.is_meta for t in metas)


@pytest.mark.parametrize(
    "name, flops",
    [
        ("matmul", 6 * 3 * 8 * 5),
        ("linear_cross_entropy", 6 * 3 * 8 * 5),
        ("attention", (4 + 10) * 8 * 6),
    ],
)
def test_flops_of_forward_and_backward_are_counted(name, flops):
    """By torch's counter; of causal attention over three rows the six pairs."""
    with FlopCounterMode(display=False) as counter:
        results(OPERATIONS[name].function, [draw(*s).requires_grad_() for s in shapes_of(name)])
    assert counter.get_total_flops() == flops


def facts(tensors):
    return [(t.dtype, t.device.type, t.shape, t.stride()) for t in tensors]


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fake_tensors_are_like_real_ones(name, dtype, either):
    function = OPERATIONS[name].function
    shapes = shapes_of(name)
    real = facts(results(function, [draw(*s, dtype=dtype).requires_grad_() for s in shapes]))
    with FakeTensorMode():
        fakes = [torch.empty(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes]
        assert facts(results(function, fakes)) == real
    metas = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    assert facts(results(function, metas)) == [(dtype, "meta", *rest) for dtype, _, *rest in real]


@every
def test_views_that_overlap(name, either):
    """Rows of a sliding window, and of a matrix that is one row many times."""
    function, plain, _ = OPERATIONS[name]
    shapes = shapes_of(name)
    windows = [
        draw(s[-1] + 2 * (s[0] - 1)).unfold(0, s[-1], 2) if len(s) == 2 else draw(2 * s[0])[::2]
        for s in shapes
    ]
    repeated = [draw(1, s[-1]).expand(s) if len(s) == 2 else draw(1).expand(s) for s in shapes]
    for views in (windows, repeated, [draw(*s[::-1]).T for s in shapes]):
        compare(function, plain, *views, upstream=lambda drawn: drawn.new_ones(()).expand_as(drawn))


def negative(x):
    """x as the negatives of what lies in memory."""
    return torch.complex(x, -x).conj().imag


@every
def test_values_that_do_not_lie_in_memory(name, either):
    """Negatives by torch's bit and zeros without memory, as inputs and from upstream."""
    function, plain, _ = OPERATIONS[name]
    shapes = shapes_of(name)
    assert negative(draw(2)).is_neg()
    for make in (negative, lambda x: torch._efficientzerotensor(x.shape, device=x.device)):
        compare(
            function, plain, *(make(draw(*s, seed=i)) for i, s in enumerate(shapes)), upstream=make
        )


@every
def test_gradients_of_gradients_are_refused(name, either):
    """Also where the upstream gradient requires none: a penalty on the gradient would lack its own
    gradient.
    """
    function = OPERATIONS[name].function
    shapes = shapes_of(name)
    inputs = [draw(*s).requires_grad_() for s in shapes]
    out = sum(y.sum() for y in outputs(function, inputs))
    if name in ("add", "dropout"):  # whose gradients depend on nothing
        assert not any(g.requires_grad for g in torch.autograd.grad(out, inputs, create_graph=True))
        return
    with pytest.raises(RuntimeError, match="the gradient of its gradient is not defined"):
        torch.autograd.grad(out, inputs, create_graph=True)


def test_the_gradient_of_a_sums_gradient_is_right():
    x, y = draw(3).requires_grad_(), draw(3, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad((add(x, y) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), y)
    torch.testing.assert_close(second, 6 * (x + y).detach())


def test_the_slopes_of_an_epilogue_are_contiguous_as_their_fake():
    h = draw(3, 5)
    for dy in (draw(5, 3).T, torch.ones((), device=DEVICE).expand(3, 5)):
        slope = matmul_module.slope_op(dy, h, "gelu")
        assert slope.stride() == (5, 1)
        torch.testing.assert_close(slope, reference.epilogue_backward(dy, h, "gelu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert matmul_module.slope_op(dy, h, "gelu").stride() == (5, 1)
