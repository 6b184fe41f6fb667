"""What a plan repeats is what the operator does: with other tensors, in other layouts, in other
threads.

And nothing needs plans: without the recorder all operations work.
"""

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kernels
from kernels import _dispatch, _recorder
from kernels.flash_attention import flash_attention
from kernels.rmsnorm import rms_norm
from kernels.softmax import softmax

from .fused import DEVICE, draw, results
from .near import near, same_bits
from .operations import OPERATIONS, VARIANTS, compare_at, shapes_of

every = pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"RMSNormPyTorch"}))


def drawn(shapes, seed, dtype=torch.float32):
    return [
        draw(*s, dtype=dtype, seed=10 * seed + i).requires_grad_() for i, s in enumerate(shapes)
    ]


def plans():
    found = []
    for kept in _dispatch._kept.values():
        found += kept.values()
    return found


@every
def test_a_plan_gives_the_bits_of_the_call_that_made_none(name):
    function = OPERATIONS[name].function
    shapes = shapes_of(name)
    planned = [results(function, drawn(shapes, seed)) for seed in range(3)]
    written = []
    for seed in range(3):
        _dispatch.forget()
        written.append(results(function, drawn(shapes, seed)))
    for with_plan, without in zip(planned, written, strict=True):
        assert all(map(torch.equal, with_plan, without))
    assert not torch.equal(planned[0][0], planned[1][0]) or name in ("seeded_dropout",)


def test_one_tensor_given_thrice_makes_no_plan_for_three():
    _dispatch.forget()
    shape = (1, 2, 40, 16)
    same = draw(*shape)
    flash_attention(same, same, same)
    q, k, v = (draw(*shape, seed=seed) for seed in (1, 2, 3))
    near(
        flash_attention(q, k, v),
        torch.nn.functional.scaled_dot_product_attention(q, k, v),
        2e-5,
        1e-4,
    )


def test_options_and_layouts_have_plans_of_their_own():
    _dispatch.forget()
    w = draw(8)
    for eps in (1e-5, 1.0, 1):
        for x in (draw(4, 8), draw(4, 16)[:, ::2], draw(8, 4).T, draw(5, 8)[1:]):
            torch.testing.assert_close(
                rms_norm(x, w, eps), torch.nn.functional.rms_norm(x, (8,), w, eps)
            )


def test_copies_made_below_autograd_are_repeated():
    """There torch's `contiguous` is one operation, a view by its schema, and here a copy."""
    _dispatch.forget()
    for seed in range(3):
        x = draw(8, 4, seed=seed).T
        with FlopCounterMode(display=False):
            y = softmax(x)
        torch.testing.assert_close(y, x.softmax(-1))


def test_a_plan_holds_no_tensor_and_their_number_is_bounded(monkeypatch):
    _dispatch.forget()
    monkeypatch.setattr(_recorder, "MOST_PROGRAMS", 3)
    w, seen = draw(8), []
    for rows in range(2, 12):
        x = draw(rows, 8)
        y = rms_norm(x, w)
        seen += [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert not any(made() is not None for made in seen)
    assert 0 < len(plans()) <= 3


def test_calls_that_read_a_value_are_made_as_written():
    @_dispatch.operator("test_reads_a_value")
    def reading(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    @_dispatch.operator("test_takes_a_constant")
    def constant(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor(float(len(taken)), device=x.device)

    taken = []
    for sign in (1, -1, 1):
        x = sign * torch.ones(3, device=DEVICE)
        assert torch.equal(reading(x), x * (2 if sign > 0 else 3))
        assert torch.equal(constant(x), x + len(taken))
        taken.append(sign)


def test_operations_of_torch_between_launches_are_repeated():
    @_dispatch.operator("test_mixes")
    def mixing(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(2, 3, device=x.device)
        y.copy_(x.T)
        y[1].mul_(factor)
        halves = (y + 1).unbind(0)
        return y, torch.stack([halves[1], halves[0]])

    for seed in range(3):
        x = draw(3, 2, seed=seed)
        y = x.T.clone()
        y[1] *= 3.0
        ours = mixing(x, 3.0)
        assert torch.equal(ours[0], y) and torch.equal(ours[1], (y + 1).flip(0))


def test_autocast_does_not_cast_again_what_a_plan_repeats():
    @_dispatch.operator("test_multiplies_in_fp32")
    def product(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x @ x

    x = draw(8, 8)
    results = [product(x) for _ in range(3)]
    with torch.autocast(DEVICE, torch.bfloat16):
        results += [product(x) for _ in range(3)]
    assert all(y.dtype == torch.float32 and torch.equal(y, x @ x) for y in results)


class Seen(TorchDispatchMode):
    """The name of the last operator that was called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.name = func.name()
        return func(*args, **kwargs or {})


def test_a_plan_is_not_for_calls_under_a_mode_or_a_transform():
    x = draw(4, 8)
    expected = [softmax(x) for _ in range(3)]
    with Seen() as seen:
        y = softmax(x)
    assert torch.equal(y, expected[2]) and seen.name == "distlab_kernels::softmax_forward"
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: softmax(x).sum())(x)


def test_forced_launches_are_not_those_of_earlier_plans():
    from kernels._dispatch import forced
    from kernels._rows import Launch

    x, w = draw(4, 8), draw(8)
    before = rms_norm(x, w)
    with forced(rmsnorm=Launch(block=4)):  # half of each row
        assert not torch.equal(rms_norm(x, w), before)
    assert torch.equal(rms_norm(x, w), before)


def test_threads_record_and_repeat_at_once():
    @_dispatch.operator("test_of_threads")  # Triton's interpreter serves one thread only
    def powers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        square = torch.empty_like(x).copy_(x * x)
        return square, square * x

    wrong = []

    def work(seed):
        for step in range(200):
            x = torch.arange(1.0 + (seed + step) % 7, device=DEVICE) + seed
            square, cube = powers(x)
            if not (torch.equal(square, x**2) and torch.equal(cube, x * x * x)):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_mutated_tensor_says_so_to_autograd():
    from kernels._scale import scale_

    x, factor = draw(32), torch.tensor(2.0, device=DEVICE)
    for number in range(3):
        version, expected = x._version, x * 2
        scale_(x, factor)
        assert x._version > version and torch.equal(x, expected), number


def test_recording_keeps_nothing_alive():
    seen = []

    @_dispatch.operator("test_of_scratch")
    def with_scratch(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for step in range(3):
            scratch = x * step
            seen.append(weakref.ref(scratch))
            total += scratch
            del scratch
            assert seen[-1]() is None, "scratch outlives its use"
        return total

    for seed in range(3):
        x = draw(4, seed=seed)
        assert torch.equal(with_scratch(x), 0 * x + x + 2 * x)
    source = next(text for text in _dispatch.programs() if "test_of_scratch" in text)
    assert source.count("del ") == 3 and len(seen) == 3  # the program's own are freed as early


def test_a_module_that_is_loaded_again_defines_its_operators_anew():
    def load(factor):
        @_dispatch.operator("test_loaded_again")
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return scaled

    x = draw(3)
    for factor in (2, 3):
        assert torch.equal(load(factor)(x), torch.ops.distlab_kernels.test_loaded_again(x))
    assert torch.equal(torch.ops.distlab_kernels.test_loaded_again(x), 3 * x)


@pytest.fixture
def no_recorder(monkeypatch):
    """As if `_recorder.py` were not there."""
    monkeypatch.setitem(sys.modules, "kernels._recorder", None)
    monkeypatch.delattr(kernels, "_recorder")
    _dispatch.recorder.cache_clear()
    _dispatch.forget()
    yield
    assert _dispatch.recorder() is None and not plans()
    _dispatch.recorder.cache_clear()


@pytest.mark.parametrize("name", OPERATIONS | VARIANTS)
def test_operations_need_no_recorder(name, no_recorder):
    compare_at(name, ((5,), 36, 7))


def test_a_graph_needs_no_recorder(no_recorder):
    inputs = [draw(5, 8).requires_grad_(), draw(8, seed=1).requires_grad_()]
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    same_bits(results(compiled, inputs), results(rms_norm, inputs))
