"""What a block saves for backward: eager to the byte, compiled less, parameters never."""

import pytest
import torch
from torch import nn

from distlab.measure.memory import OUTSIDE, gradient_bytes, saved_for_backward
from distlab.model import TransformerLM, cross_entropy, preset


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.sigmoid(x @ self.weight)


def test_every_storage_once_and_no_parameter():
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(4, 8)
    found = saved_for_backward(lambda: model(x).exp().sum(), model, {"0": model[0], "1": model[1]})
    # Layer 0 keeps its input (for the weight's gradient) and its output; layer 1 its output; exp its result.
    assert [saved.bytes for saved in found["0"]] == [128, 128]
    assert [(s.shape, s.made_by) for s in found["1"]] == [((4, 8), "SigmoidBackward0")]
    assert [(s.bytes, s.made_by) for s in found[OUTSIDE]] == [(128, "ExpBackward0")]
    assert {saved.made_by for saved in found["0"]} == {"detached", "SigmoidBackward0"}
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    model(x).sum().backward()
    assert gradient_bytes({"0": model[0]}) == {"0": 8 * 8 * 4}


def test_casts_of_parameters_are_named():
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = saved_for_backward(lambda: layer(x), layer, {"layer": layer})
    assert {s.made_by for s in found["layer"]} == {"leaf (cast)", "SigmoidBackward0"}
    assert all(s.dtype == torch.bfloat16 for s in found["layer"])


def blocks_of(model):
    return {f"blocks.{index}": block for index, block in enumerate(model.blocks)}


@pytest.mark.parametrize("form", ["eager", "compiled", "checkpointed"])
def test_forms_of_a_block(form):
    """Compiled blocks recompute what is cheap; checkpointed ones keep their input, which is a layer of (B, T, d)."""
    model = TransformerLM(preset("tiny", attention="naive", num_layers=1, context_length=32))
    tokens = torch.arange(64).reshape(2, 32)
    if form == "compiled":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="aot_eager_decomp_partition")
    model.checkpoint_blocks = form == "checkpointed"
    saved = saved_for_backward(lambda: cross_entropy(model(tokens), tokens), model, blocks_of(model))
    size = sum(s.bytes for s in saved["blocks.0"])
    width, inner, scores = 2 * 32 * 128 * 4, 2 * 32 * 512 * 4, 2 * 4 * 32 * 32 * 4
    if form == "eager":
        # Four tensors of the inner width, the softmax twice (masked scores are not kept), and the residual stream.
        assert [s.bytes for s in saved["blocks.0"][:4]] == [inner] * 4
        assert {"SiluBackward0", "MulBackward0"} <= {s.made_by for s in saved["blocks.0"][:4]}
        assert size > 4 * inner + 7 * width + scores
    elif form == "compiled":
        assert 3 * inner < size < 4 * inner + 6 * width + scores
    else:
        assert size == width + 2 * 32 * 32 * 4  # the block's input, and the tables of rotation
