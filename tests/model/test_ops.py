"""Each operation against its formula, and how it behaves under autocast."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from distlab.model import TransformerLM, get_ops, ops, preset
from distlab.model.config import ModelConfig
from distlab.train.step import compiled

# fp32 sums of a few dozen terms of size 1 taken in another order: errors of a few 1e-7 each.
FP32 = {"atol": 1e-5, "rtol": 1e-5}


def _qkv(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def test_naive_attention_keeps_its_softmax_in_fp32():
    q, k, v = _qkv(1, 1, 64, 16, dtype=torch.bfloat16)
    out = ops.naive_attention(q, k, v)
    exact = ops.naive_attention(q.double(), k.double(), v.double())
    assert out.dtype is torch.bfloat16
    # Scores, weights and result are each rounded to bf16, by up to 2^-8 = 0.4 % of values of size 1
    # to 4.
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


def test_flash_is_refused_without_cuda(monkeypatch):
    # Triton decides where a kernel's module is imported whether it interprets it, for all later
    # tests of this process. So they are imported before the variable changes.
    get_ops("flash")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"CUDA device.*choose sdpa"):
        get_ops("flash")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert get_ops("flash").attention is not None


def test_flash_is_causal_attention(monkeypatch):
    pytest.importorskip("kernels.flash_attention")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    inputs = _qkv(1, 2, 20, 16)
    # On CPU tensors the kernel's plain-torch tiles answer.
    torch.testing.assert_close(
        get_ops("flash").attention(*inputs), ops.naive_attention(*inputs), **FP32
    )


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match=r"'cuda'.*torch, triton"):
        get_ops("sdpa", "cuda")
    with pytest.raises(ValueError, match=r"'fast'.*naive, sdpa, flash"):
        get_ops("fast")


def test_rms_norm_formula():
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    weight = torch.randn(16, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.1), expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_under_autocast_is_quiet_and_precise(x_dtype):
    x = (torch.randn(4, 1024) * 1000).to(x_dtype)
    weight = torch.rand(1024) + 0.5
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        out = ops.rms_norm(x, weight, 1e-5)
    assert out.dtype is torch.bfloat16
    exact = ops.rms_norm(x.double(), weight.double(), 1e-5)
    # Statistics in fp32: only the result is rounded, by at most half a unit in bf16's last place,
    # 2^-8.
    torch.testing.assert_close(out.double(), exact, atol=0, rtol=2**-7.99)


def test_rope_angles():
    # Pair i of position t is turned by t·theta^(-2i/D): one plane at a time, as complex numbers.
    D = 6  # width of a head
    T = 5  # positions
    theta = 50.0
    x = torch.randn(2, T, D, dtype=torch.float64)
    cos, sin = ops.rope_tables(ops.positions(T, torch.device("cpu")), D, theta)
    assert cos.dtype is torch.float32
    out = ops.rope(x, cos, sin)
    for i in range(D // 2):
        angle = torch.arange(T, dtype=torch.float64) * theta ** (-2 * i / D)
        turned = torch.complex(x[..., i], x[..., i + D // 2]) * torch.polar(
            torch.ones_like(angle), angle
        )
        torch.testing.assert_close(out[..., i], turned.real, **FP32)
        torch.testing.assert_close(out[..., i + D // 2], turned.imag, **FP32)


def test_rope_tables_stay_exact_under_autocast():
    positions = ops.positions(512, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        tables = ops.rope_tables(positions, 64, 10_000.0)
    assert all(map(torch.equal, tables, ops.rope_tables(positions, 64, 10_000.0)))


def test_cross_entropy_is_the_token_mean_in_fp32():
    logits, targets = torch.randn(2, 3, 7).bfloat16(), torch.tensor([[1, 2, 3], [4, 5, -100]])
    loss = ops.cross_entropy(logits, targets)
    assert loss.dtype is torch.float32
    picked = F.log_softmax(logits.float(), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -picked.flatten()[:-1].mean())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_of_two_dtypes_saves_its_input_as_it_is(dtype):
    """An fp32 weight beside a half-precision input under autocast: the fp32 norm's values, no fp32
    copy of x.
    """
    x = torch.randn(64, 512, device="cuda").to(dtype).requires_grad_()
    weight = (torch.rand(512, device="cuda") + 0.5).requires_grad_()
    with torch.autocast("cuda", dtype=dtype):
        y = ops.rms_norm(x, weight, 1e-5)
    expected = F.rms_norm(x.float(), (512,), weight, 1e-5).to(dtype)
    assert y.dtype == dtype and torch.equal(y, expected)
    saved = [t for t in y.grad_fn.saved_tensors if t.shape == x.shape]
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()
    dy = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(o, [x, weight], dy) for o in (y, expected))
    for gradient, other in zip(ours, theirs, strict=True):
        assert gradient.dtype == other.dtype and torch.equal(gradient, other)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ops._CastLinear.apply(x, w, torch.bfloat16),
        lambda x, w: ops._MixedRMSNorm.apply(x, w[0], 1e-5),
    ],
    ids=["linear", "norm"],
)
def test_gradients_of_gradients_of_cast_operations_are_refused(function):
    """What they save is cast, and does not lead back to x and the weight: their share would be left
    out.
    """
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y = function(x, weight)
    with pytest.raises(RuntimeError, match="the gradient of a gradient is not defined"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def wide_product_on_a_cpu(a, b, dtype, out=None):
    product = a.to(dtype) @ b.to(dtype)
    return product if out is None else out.copy_(product)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_compiled_code_writes_gradients_into_their_targets(device, monkeypatch):
    """One graph serves weights with a target and without, and steps that add to a gradient."""
    if device == "cpu":
        monkeypatch.setattr(ops, "on_gpu", lambda x: True)
        monkeypatch.setattr(ops, "_wide_product", wide_product_on_a_cpu)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    weight = torch.nn.Parameter(torch.randn(24, 16, device=device))
    x = torch.randn(2, 5, 16, device=device, requires_grad=True)

    def gradients(function):
        with torch.autocast(device, torch.bfloat16):
            y = function(x, weight)
        return torch.autograd.grad(y.float().square().sum(), (x, weight))

    expected = gradients(ops.linear)
    compiled = torch.compile(ops.linear, fullgraph=True, backend="aot_eager")
    # The weight and the first target are parts of one storage, as in a strategy's buffers.
    both = torch.empty(2, 24, 16, device=device)
    weight.data = both[0].copy_(weight.data)
    targets = [both[1], torch.empty_like(weight)]
    for target in (None, *targets):
        if target is not None:
            weight.gradient_target = target
        found = gradients(compiled)
        for gradient, other in zip(found, expected, strict=True):
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)
        assert target is None or found[1].data_ptr() == target.data_ptr()
    # Where there is a gradient to add to, the target stays unused.
    weight.grad, weight.gradient_target = torch.ones_like(weight), targets[0]
    assert gradients(compiled)[1].data_ptr() != targets[0].data_ptr()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_no_cuda_graph_replays_the_choice_of_a_target():
    """torch.compile(mode="reduce-overhead") captures what its operators may be captured with."""
    assert torch.Tag.cudagraph_unsafe in torch.ops.distlab.weight_gradient.default.tags


@pytest.mark.parametrize("checkpointing", ["none", "block", "attention", "selective"])
def test_compiled_blocks_that_recompute_fill_their_targets(checkpointing, monkeypatch):
    """The gradients are those of eager blocks, which compute the same products."""
    monkeypatch.setattr(ops, "on_gpu", lambda x: True)
    monkeypatch.setattr(ops, "_wide_product", wide_product_on_a_cpu)
    torch.compiler.reset()
    config = ModelConfig(
        d_model=16, d_ff=24, num_layers=2, num_heads=2, vocab_size=32, context_length=8
    )
    torch.manual_seed(0)
    model = TransformerLM(config, device="cpu", checkpoint_blocks=checkpointing)
    tokens = torch.randint(32, (2, 8))
    parameters = list(model.parameters())

    def gradients(run):
        with torch.autocast("cpu", torch.bfloat16):
            logits = run(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        return torch.autograd.grad(loss, parameters)

    expected = gradients(model)
    targets = {}
    for parameter in parameters:
        if parameter.ndim == 2 and parameter is not model.embedding.weight:
            targets[parameter] = parameter.gradient_target = torch.empty_like(parameter)
    found = gradients(compiled(model, "blocks", backend="aot_eager"))
    for parameter, gradient, other in zip(parameters, found, expected, strict=True):
        assert torch.equal(gradient, other)
        if parameter in targets:
            assert gradient.data_ptr() == targets[parameter].data_ptr()


def test_very_many_logits_are_computed_in_chunks(monkeypatch):
    """The same loss and gradients, with torch's operations too.

    Which is decided by bytes of logits.
    """
    x, weight = torch.randn(2, 24, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    targets = torch.randint(40, (2, 24))
    found = []
    for limit in (2**31, 1024):
        monkeypatch.setattr("distlab.model.ops.LOGITS_AT_ONCE", limit)
        monkeypatch.setattr("distlab.model.ops.LOGITS_CHUNK", 1024)
        loss = get_ops().linear_cross_entropy(x, weight, targets)
        found.append((loss, *torch.autograd.grad(loss, (x, weight))))
    assert (
        found[0][0].grad_fn.name() == "NllLossBackward0"
        and "LinearCrossEntropy" in found[1][0].grad_fn.name()
    )
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=1e-5)  # sums in another order
    assert preset("tiny", ops="triton").loss_in_head and not preset("tiny").loss_in_head


@pytest.mark.parametrize(
    "shape, dtype, hopper, source",
    [
        ((1, 32, 32768, 128), torch.bfloat16, True, "flash"),
        ((4, 16, 1024, 64), torch.bfloat16, True, "sdpa"),  # a call of ours is bound by the host
        ((2, 32, 2048, 256), torch.bfloat16, True, "flash"),
        ((2, 32, 2048, 160), torch.bfloat16, True, "sdpa"),
        ((1, 32, 32768, 128), torch.float32, True, "sdpa"),
        ((1, 32, 32768, 128), torch.bfloat16, False, "sdpa"),
    ],
)
def test_attention_auto_takes_what_was_measured_to_be_faster(shape, dtype, hopper, source):
    assert ops.attention_source(shape, dtype, hopper=hopper) == source
