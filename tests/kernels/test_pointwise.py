"""Element-wise kernels, RoPE, dropout and AdamW: interpreted on a CPU, compiled where there is a
GPU.
"""

import copy

import pytest
import torch

from kernels import _dispatch
from kernels._dispatch import forced
from kernels._rows import Launch
from kernels.adamw import AdamW, Addresses
from kernels.dropout import dropout, linear_gelu_dropout
from kernels.elementwise import gelu

from .fused import DEVICE, draw
from .near import near, same_bits


def test_the_gradient_of_a_bias_beside_half_precision_is_summed_in_its_own_dtype(either):
    """A thousand rows whose gradients are 100: the sum is beyond fp16."""
    x = draw(1000, 2) * 0
    w = draw(3, 2)
    b = torch.full((3,), 20.0, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.float16):
        y = linear_gelu_dropout(x, w, b, 0.0)
    (db,) = torch.autograd.grad(y, b, torch.full_like(y, 100.0))
    assert y.dtype == torch.float16 and torch.equal(db, torch.full_like(b, 1e5))


# Regression: tanh written with exponentials is NaN above 10
def test_gelu_is_finite_for_large_inputs(either):
    x = torch.tensor(
        [11.0, 50.0, 1e10, 3e38, -11.0, -50.0, -1e10, -3e38], device=DEVICE, requires_grad=True
    )
    y = gelu(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y[:4], x[:4])
    assert y[4:].abs().max() == 0
    assert torch.equal(slope.cpu(), torch.tensor([1.0] * 4 + [0.0] * 4))
    assert gelu(torch.tensor([float("nan")], device=DEVICE)).isnan().all()


def test_dropout_drops_as_often_as_asked_and_keeps_the_mean():
    x = torch.ones(200, 1000, device=DEVICE)
    y = dropout(x, 0.3, seed=3)
    kept = (y != 0).float().mean().item()
    # six standard deviations of a binomial
    assert abs(kept - 0.7) < 6 * (0.3 * 0.7 / x.numel()) ** 0.5
    assert y.max().item() == pytest.approx(1 / 0.7, rel=2e-5)
    drawn = (y != 0).flatten()
    for distance in (1, 2, 4, 8):  # neighbours share a counter, but no random bits
        both = (drawn[:-distance] & drawn[distance:]).float().mean().item()
        # overlapping pairs vary a little more
        assert abs(both - 0.49) < 6 * (0.49 * 0.51 / x.numel()) ** 0.5 * 1.5


def test_dropout_repeats_by_torchs_seed(either):
    x = draw(3, 1000)
    assert dropout(x, 0.0) is x and dropout(x, 0.9, training=False) is x
    assert not torch.equal(dropout(x, 0.5, seed=11), dropout(x, 0.5, seed=12))
    assert not torch.equal(dropout(x, 0.5), dropout(x, 0.5))
    torch.manual_seed(0)
    first = dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, dropout(x, 0.5))


def test_forward_and_backward_drop_the_same_elements_where_a_number_is_the_threshold_too():
    """Of 200,000 numbers of 16 bits some three are.

    One forward that drops them and one backward that does not.
    """
    x = torch.ones(200_000, device=DEVICE, requires_grad=True)
    y = dropout(x, 0.5, seed=3)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, y)


def test_dropout_does_not_depend_on_the_tile():
    x = draw(1000)
    with forced(dropout=Launch(64)):
        small = dropout(x, 0.4, seed=1)
    assert torch.equal(small, dropout(x, 0.4, seed=1))


# fp32: a few operations of 6e-8 each. Else parameters rounded to 11 or 8 bits; both go on from
# there.
LIMITS = {torch.float32: 3e-7, torch.float16: 2e-3} | (
    {torch.bfloat16: 2e-2} if DEVICE == "cuda" else {}
)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_adamw_equals_torchs(dtype, either):
    ours = [draw(*s, dtype=dtype).requires_grad_() for s in ((3, 50), (1,), (2500,), (0,), (4, 4))]
    theirs = [p.detach().clone().float().requires_grad_() for p in ours]
    mine, torchs = (
        make(
            [{"params": tensors[:2]}, {"params": tensors[2:], "lr": 1e-3, "weight_decay": 0.0}],
            lr=1e-2,
        )
        for make, tensors in ((AdamW, ours), (torch.optim.AdamW, theirs))
    )
    for step in range(3):
        for p, q in zip(ours[:4], theirs[:4], strict=True):  # the last has no gradient
            grad = draw(*p.shape, dtype=dtype, seed=step)
            if step == 1:  # where the last one was, so that no address changes
                p.grad.copy_(grad)
            else:
                p.grad = grad
            q.grad = p.grad.float()
        before = [p.detach().clone() for p in ours]
        mine.step()
        torchs.step()
        for p, q in zip(ours, theirs, strict=True):
            near(p.detach().float(), q.detach(), LIMITS[dtype])
            q.data.copy_(p.detach())
        assert torch.equal(before[4], ours[4])


def passed_in_fp32(launch):
    """`_dispatch.launch` with numbers rounded as a GPU gets them.

    The interpreter leaves them in double precision.
    """

    def rounding(kernel, grid, *args, **options):
        launch(
            kernel,
            grid,
            *(torch.tensor(a).item() if isinstance(a, float) else a for a in args),
            **options,
        )

    return rounding


def test_adamw_averages_over_a_hundred_thousand_steps(monkeypatch, either):
    """1 − β₂ = 10⁻⁵ and β₂ itself must be exact to more digits than fp32 gives β₂: else both are
    0.14 % of 10⁻⁵ off.
    """
    monkeypatch.setattr(_dispatch, "launch", passed_in_fp32(_dispatch.launch))
    p = draw(2000).requires_grad_()
    optimizer = AdamW([p], lr=1e-3, betas=(0.9, 0.99999))
    p.grad = draw(2000, seed=1)
    optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"]
    near(v, p.grad.double() ** 2 * (1 - 0.99999), 0, 1e-6)
    p.grad.zero_()
    before = v.double()
    for _ in range(20):
        optimizer.step()
    # Each step rounds, up as often as down: over 2,000 elements the mean shows what does not
    # average out.
    drift = (optimizer.state[p]["exp_avg_sq"].double() / before / 0.99999**20 - 1).mean().abs()
    assert drift < 3e-8  # a β₂ rounded to fp32 would make it 2.7e-7


def test_small_weight_decay_is_not_lost_in_rounding(monkeypatch, either):
    monkeypatch.setattr(_dispatch, "launch", passed_in_fp32(_dispatch.launch))
    p = (
        (1 + torch.rand(2000, generator=torch.Generator().manual_seed(0)))
        .to(DEVICE)
        .requires_grad_()
    )
    before, optimizer = p.detach().double(), AdamW([p], lr=1e-5, weight_decay=2e-2)
    p.grad = torch.zeros_like(p)
    for _ in range(10):
        optimizer.step()
    decay = 1 - (p.detach().double() / before).mean()
    assert decay.item() == pytest.approx(10 * 2e-7, rel=2e-2)  # 1 − 2e-7 in fp32 would be 11 % off


@pytest.mark.parametrize("of_gradient", [True, False])
def test_adamw_steps_by_negatives_that_do_not_lie_in_memory(of_gradient, either):
    x = draw(50)
    away = torch.complex(x, -x).conj().imag  # x by torch's negative bit
    p, theirs = (
        (away if not of_gradient else x.clone()).requires_grad_(),
        x.clone().requires_grad_(),
    )
    p.grad, theirs.grad = away if of_gradient else x.clone(), x.clone()
    AdamW([p], lr=1e-2).step()
    torch.optim.AdamW([theirs], lr=1e-2).step()
    near(p.detach(), theirs.detach(), 1e-6)


def test_adamw_stays_where_an_average_of_squares_has_overflowed(either):
    """As torch's: an infinite average makes updates of 0, not NaN."""
    p = torch.ones(2, device=DEVICE, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], lr=1e-2, weight_decay=0.0)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"][0] = float("inf")
    before = p.detach().clone()
    optimizer.step()
    assert p[0] == before[0] and p[1] < before[1]


def test_adamw_is_refused_while_a_cuda_graph_is_captured(monkeypatch):
    p = draw(4).requires_grad_()
    p.grad = torch.ones_like(p)
    optimizer, before = AdamW([p]), p.detach().clone()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"a CUDA graph would repeat.*capturable"):
        optimizer.step()
    assert torch.equal(p, before) and not optimizer.state


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"lr": torch.tensor(1e-3)}, TypeError, "lr is tensor"),
        ({"betas": (torch.tensor(0.9), 0.99)}, TypeError, "betas is tensor.*number each"),
        ({"betas": 0.9}, ValueError, "betas is 0.9"),
        ({"betas": (1.0, 0.9)}, ValueError, "betas is 1.0"),
        ({"eps": "1"}, TypeError, "eps is '1'"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay is nan"),
        ({"lr": True}, TypeError, "lr is True"),
    ],
)
def test_adamw_names_an_option_that_does_not_fit(options, error, message):
    p = draw(4).requires_grad_()
    p.grad = torch.ones_like(p)
    with pytest.raises(error, match=message):
        AdamW([p], **options)
    with pytest.raises(error, match=message):
        AdamW([{"params": [p], **options}])
    optimizer = AdamW([p])
    optimizer.param_groups[0].update(options)  # as a scheduler might
    with pytest.raises(error, match=message):
        optimizer.step()


def test_addresses_are_sent_again_only_when_a_tensor_has_moved():
    columns = [[draw(8), draw(8)] for _ in range(4)]
    addresses = Addresses()
    table = addresses.of(columns)
    for row, tensors in zip(table.tolist(), zip(*columns, strict=True), strict=True):
        assert row == [tensor.data_ptr() for tensor in tensors]
    assert addresses.aligned and addresses.of(columns) is table
    columns[1][0] = draw(9)[1:]
    assert addresses.of(columns)[0, 1] == columns[1][0].data_ptr() and not addresses.aligned


def resumed(optimizer):
    """Another optimizer, of copies of the parameters, that has loaded the state of this one."""
    again = AdamW(
        [p.detach().clone().requires_grad_() for p in optimizer.param_groups[0]["params"]], lr=5.0
    )
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again


@pytest.mark.parametrize("copied", [resumed, copy.deepcopy])
def test_adamw_resumes_and_follows_a_schedule(copied):
    """With all bits of the moments, which are fp32.

    Torch's own loading rounds them to the 11 of the parameter here.
    """
    p = draw(40, dtype=torch.float16).requires_grad_()
    p.grad = draw(40, dtype=torch.float16, seed=1) / 3
    first = AdamW([p], lr=1e-2)
    first.step()
    again = copied(first)
    (q,) = again.param_groups[0]["params"]
    for optimizer in (first, again):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["params"][0].grad = draw(40, dtype=torch.float16, seed=2)
        optimizer.step(lambda: torch.tensor(1.0))
    assert torch.equal(p, q) and p is not q
    assert (
        set(first.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        and first.state[p]["exp_avg"].dtype is torch.float32
    )
    same_bits(again.state[q], first.state[p])
