"""The modules of `kernels.nn` beside torch's: values, gradients, weights that go both ways,
refusals.
"""

import pytest
import torch
from torch.nn import functional as F

from kernels import nn
from tests.commands import python

from .attention_reference import attention
from .fused import DEVICE, TOLERANCE, draw
from .near import near, same_bits


class LlamaMLP(torch.nn.Module):
    """As Hugging Face writes it."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, hidden, bias=False)
        self.up_proj = torch.nn.Linear(width, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LinearCrossEntropyLoss(torch.nn.Module):
    """As torch 2.13 has it."""

    def __init__(self, width, classes, **options):
        super().__init__()
        self.linear, self.options = torch.nn.Linear(width, classes, bias=False), options

    def forward(self, x, targets):
        return F.cross_entropy(self.linear(x), targets, **self.options)


class MultiHead(torch.nn.Module):
    """Attention over heads side by side, in plain torch."""

    def __init__(self, heads, kv_heads=None, **options):
        super().__init__()
        self.heads, self.options = (heads, kv_heads or heads, kv_heads or heads), options

    def forward(self, *tensors):
        q, k, v = (
            x.unflatten(-1, (h, -1)).transpose(1, 2)
            for x, h in zip(tensors, self.heads, strict=True)
        )
        return (
            attention(q, k, v, alignment="bottom-right", **self.options).transpose(1, 2).flatten(-2)
        )


X = draw(3, 5, 24)
LOGITS = draw(5, 24)
TARGETS = torch.tensor([3, 0, -1, 23, 7], device=DEVICE)
Q = draw(2, 5, 32)
K = draw(2, 9, 16)
V = draw(2, 9, 16, seed=1)
CASES = {  # name → ours, torch's, their arguments, inputs
    "rms_norm": (nn.RMSNorm, torch.nn.RMSNorm, dict(normalized_shape=24, eps=1e-3), (X,)),
    "layer_norm": (nn.LayerNorm, torch.nn.LayerNorm, dict(normalized_shape=24, eps=1e-3), (X,)),
    "layer_norm_plain": (
        nn.LayerNorm,
        torch.nn.LayerNorm,
        dict(normalized_shape=24, elementwise_affine=False),
        (X,),
    ),
    "swiglu": (nn.SwiGLU, LlamaMLP, dict(width=24, hidden=40), (X,)),
    "cross_entropy_none": (
        nn.CrossEntropyLoss,
        torch.nn.CrossEntropyLoss,
        dict(ignore_index=7, reduction="none", label_smoothing=0.1),
        (LOGITS, TARGETS.abs()),
    ),
    "linear_cross_entropy_sum": (
        nn.LinearCrossEntropyLoss,
        LinearCrossEntropyLoss,
        dict(width=24, classes=30, ignore_index=-1, reduction="sum", label_smoothing=0.1),
        (LOGITS, TARGETS),
    ),
    "attention_causal": (
        nn.Attention,
        MultiHead,
        dict(heads=4, kv_heads=2, causal=True, scale=0.3),
        (Q, K, V),
    ),
    "attention_window": (
        nn.Attention,
        MultiHead,
        dict(heads=4, kv_heads=2, window=2, softcap=2.0),
        (Q, K, V),
    ),
}
OURS = {
    "width": "in_features",
    "hidden": "hidden_features",
    "classes": "num_classes",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
}


def made(name, dtype):
    """(ours, torch's in float64, inputs): weights drawn for torch's, rounded to `dtype`, and given
    to ours.
    """
    ours, theirs, options, inputs = CASES[name]
    ours, theirs = (
        ours(**{OURS.get(key, key): value for key, value in options.items()}),
        theirs(**options),
    )
    for i, p in enumerate(theirs.parameters()):
        p.data = draw(*p.shape, seed=i).to(dtype) / (p.shape[-1] ** 0.5 if p.dim() == 2 else 1)
    ours.to(DEVICE, dtype).load_state_dict(theirs.state_dict())
    return ours, theirs.double(), [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def run(module, inputs):
    """The output and the gradients of floating-point inputs and of parameters, by name."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = module(*inputs)
    y.backward(draw(*y.shape, seed=7).to(y.dtype))
    grads = {f"input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
    return {
        "output": y.detach(),
        **grads,
        **{name: p.grad for name, p in module.named_parameters()},
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_as_torch(name, dtype, either):
    """Values and gradients for torch's weights, which ours give back.

    Gradients have the dtype of what they are of.
    """
    ours, theirs, inputs = made(name, dtype)
    found = run(ours, inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    near(found, run(theirs, wide), TOLERANCE[dtype])
    assert {x.dtype for key, x in found.items() if key != "output"} == {dtype}
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_default_eps_of_rms_norm(dtype):
    """Torch's: small inputs, of which it is a part that shows."""
    x = 1e-3 * X.to(dtype)
    near(nn.RMSNorm(24).to(DEVICE)(x), torch.nn.RMSNorm(24).to(DEVICE, dtype)(x), TOLERANCE[dtype])


def test_documents_do_not_see_each_other():
    """Packed sequences are computed as each alone."""
    q, ids = draw(1, 5, 16), torch.tensor([[0, 0, 1, 1, 1]], device=DEVICE)
    module = nn.Attention(2, causal=True)
    alone = torch.cat([module(x, x, x) for x in q.split((2, 3), 1)], 1)
    near(module(q, q, q, document_ids=ids), alone, 1e-6)


def test_attention_says_its_options():
    assert (
        repr(nn.Attention(2, window=3))
        == "Attention(num_heads=2, num_kv_heads=2, causal=False, scale=None, "
        "window=3, softcap=None)"
    )


@pytest.mark.parametrize("name", CASES)
def test_compiles_in_one_graph(name):
    """With the bits of the module that is not compiled."""
    module, _, inputs = made(name, torch.float32)
    expected = run(module, inputs)
    module.zero_grad()
    module.compile(fullgraph=True, backend="aot_eager")
    same_bits(run(module, inputs), expected)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nn.CrossEntropyLoss(torch.ones(3)), "weight is given, which no kernel"),
        (lambda: nn.LinearCrossEntropyLoss(8, 3, bias=True), "bias is given, which no kernel"),
        (
            lambda: nn.LinearCrossEntropyLoss(8, 3, weight=torch.ones(3)),
            "weight is given, which no kernel",
        ),
        (
            lambda: nn.LayerNorm((5, 24)),
            r"over the last dimension, and normalized_shape is \(5, 24\)",
        ),
        (
            lambda: nn.RMSNorm([5, 24]),
            r"over the last dimension, and normalized_shape is \(5, 24\)",
        ),
    ],
)
def test_what_no_kernel_computes_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_imports_no_kernel():
    """Whether kernels are interpreted is decided when one is first needed."""
    code = (
        "import sys, kernels.nn; "
        "assert not [m for m in sys.modules if m.startswith(('triton', 'kernels._'))]"
    )
    assert python("-c", code).returncode == 0
