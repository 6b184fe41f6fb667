"""The model, and what data parallelism relies on: order, no buffers, seeds, torch's tools."""

import contextlib
import math
from functools import partial

import pytest
import torch

from distlab.model import ModelConfig, TransformerLM, checkpoint_segments, cross_entropy, preset
from distlab.model.config import RECOMPUTATION
from distlab.model.ops import positions, rms_norm, rope, rope_tables

CONFIG = ModelConfig(
    d_model=32, d_ff=48, num_layers=2, num_heads=2, vocab_size=61, context_length=16
)


def _config(**changes):
    return ModelConfig(**{**vars(CONFIG), **changes})


def _batch():
    sequence = torch.randint(CONFIG.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    return sequence[:, :-1], sequence[:, 1:]


def _gradients(model, autocast=False, rows=3):
    tokens, targets = (x[:rows] for x in _batch())
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def _explicit_logits(model, tokens):
    """The formula of the module's docstring written out, one head at a time."""
    p = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    config = model.config
    T = tokens.shape[1]
    D = config.head_dim
    cos, sin = rope_tables(positions(T, tokens.device), D, config.rope_theta)
    tables = (cos.double(), sin.double())
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = p["embedding.weight"][tokens]
    for i in range(config.num_layers):
        block = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items()}
        h = rms_norm(x, block["attention_norm.weight"], config.norm_eps)
        qkv = h @ block["attention.qkv.weight"].T
        widths = [config.d_model, config.kv_width, config.kv_width]
        queries, keys, values = qkv.split(widths, dim=-1)
        heads = []
        for head in range(config.num_heads):
            kv_head = head * config.kv_heads // config.num_heads  # neighbours share one
            q = rope(queries[..., head * D : (head + 1) * D], *tables)
            k = keys[..., kv_head * D : (kv_head + 1) * D]
            v = values[..., kv_head * D : (kv_head + 1) * D]
            scores = (q @ rope(k, *tables).mT / math.sqrt(D)).masked_fill(future, -math.inf)
            heads.append(torch.softmax(scores, -1) @ v)
        x = x + torch.cat(heads, dim=-1) @ block["attention.output.weight"].T
        h = rms_norm(x, block["feed_forward_norm.weight"], config.norm_eps)
        gate = h @ block["feed_forward.w1.weight"].T
        up = h @ block["feed_forward.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ block["feed_forward.w2.weight"].T
    return rms_norm(x, p["norm.weight"], config.norm_eps) @ p["head.weight"].T


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_forward_is_the_formula(attention, kv_heads):
    config = _config(attention=attention, num_heads=4, num_kv_heads=kv_heads)
    model = TransformerLM(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # initial matrices are too small to show a mistake
            parameter.add_(torch.randn_like(parameter) / 4)
    tokens, _ = _batch()
    # The rotary tables are fp32 on both sides; all else is fp64.
    torch.testing.assert_close(model(tokens), _explicit_logits(model, tokens), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"attention": "naive"}, {"dropout": 0.1}, {"tie_embeddings": True}], ids=str
)
def test_gradients_become_ready_in_reverse_registration_order(changes, plain):
    """With recomputation and autocast, too."""
    model = TransformerLM(_config(**changes), checkpoint_blocks=not plain)
    ready = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    _gradients(model, autocast=not plain)
    assert ready == [name for name, _ in model.named_parameters()][::-1]


def _put(parameter, value, *_):
    """A hook that overwrites a parameter."""
    parameter.data.copy_(value)


def test_every_parameter_is_used_by_its_owners_forward_only():
    # Sharding gathers a module's weight around that module's forward: elsewhere there is none.
    model = TransformerLM(CONFIG)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = parameter.detach().clone()
            module.register_forward_pre_hook(partial(_put, parameter, full))
            module.register_forward_hook(partial(_put, parameter, float("nan") * full))
            parameter.data.fill_(float("nan"))
            assert name == "weight"
    with torch.no_grad():
        assert torch.equal(model(_batch()[0]), TransformerLM(CONFIG)(_batch()[0]))


def test_parameters_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = TransformerLM(CONFIG, seed=3)
    drawn = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(torch.rand(()), drawn)  # construction left the global generator alone
    second = TransformerLM(CONFIG, seed=3)
    other = TransformerLM(CONFIG, seed=4)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not torch.equal(first.head.weight, other.head.weight)


def test_initial_spread():
    model = TransformerLM(_config(d_model=128, d_ff=256, num_layers=8))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        writes_residual = name.endswith(("output.weight", "w2.weight"))
        expected = 0.02 / math.sqrt(16) if writes_residual else 0.02
        # A standard deviation of n numbers is off by about 1/sqrt(2n), here below 0.8 %; five of
        # those.
        assert parameter.std().item() == pytest.approx(expected, rel=0.04), name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name
    # So the untrained model knows nothing: its loss is ln V.
    loss, _ = _gradients(model)
    assert loss.item() == pytest.approx(math.log(CONFIG.vocab_size), abs=0.1)


def test_device_and_dtype_of_construction():
    model = TransformerLM(CONFIG, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(_batch()[0]).dtype is torch.bfloat16
    with torch.device("meta"):
        assert next(TransformerLM(CONFIG).parameters()).is_meta
    tied = TransformerLM(preset("tiny", tie_embeddings=True), device="meta").to_empty(device="cpu")
    assert tied.head.weight is tied.embedding.weight


SOME = ("block", "output", "block:1,gate-up:1")  # of operations that Triton interprets


@pytest.mark.parametrize(
    "attention, ops, choices",
    [("sdpa", "torch", (*RECOMPUTATION, "every-2", "every-2-1")), ("flash", "triton", SOME)],
)
def test_blocks_that_keep_something_change_nothing(attention, ops, choices):
    """Bit for bit, with grouped queries and the same dropout.

    What runs again counts tests/theory/test_recompute.py.
    """
    model = TransformerLM(_config(dropout=0.2, num_kv_heads=1, attention=attention, ops=ops))
    torch.manual_seed(7)
    loss, gradients = _gradients(model, rows=1)
    for choice in choices:
        model.checkpoint_blocks = choice
        torch.manual_seed(7)
        found, recomputed = _gradients(model, rows=1)
        assert torch.equal(loss, found), choice
        assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients), choice


@pytest.mark.parametrize(
    "choice", ["every", "every-", "every-0", "every-2-8", "every-4-0", "blocks", "auto", -1]
)
def test_groups_that_recompute_nothing_are_refused(choice):
    with pytest.raises(ValueError, match="choose none, block, every-K"):
        checkpoint_segments(choice)


@pytest.mark.parametrize("checkpoint_blocks, autocast", [(False, False), ("qkv", True)])
def test_compiles_without_graph_break(checkpoint_blocks, autocast):
    model = TransformerLM(CONFIG, checkpoint_blocks=checkpoint_blocks)
    loss, gradients = _gradients(model, autocast)
    torch.compiler.reset()
    # fullgraph=True raises at a break; aot_eager runs the traced forward and backward with torch's
    # kernels.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, targets = _batch()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        compiled_loss = cross_entropy(compiled(tokens), targets)
    compiled_loss.backward()
    # The traced backward may sum in another order; bf16 then differs in its last place.
    tolerance = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(compiled_loss.detach(), loss, atol=tolerance, rtol=tolerance)
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - gradients[name]).norm()
        assert difference <= tolerance * gradients[name].norm(), name


def test_wrong_tokens_are_refused():
    model = TransformerLM(CONFIG)
    with pytest.raises(ValueError, match=r"\(1, 17\).*context_length=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(5,\).*\(batch, sequence\)"):
        model(torch.zeros(5, dtype=torch.int64))
