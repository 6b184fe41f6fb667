"""What a block saves for backward: eager to the byte, compiled less, parameters never."""

import torch
from torch import nn

from distlab.measure.memory import OUTSIDE, gradient_bytes, saved_for_backward


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
    # Layer 0 keeps its input (for the weight's gradient) and its output; layer 1 its output; exp
    # its result.
    assert [saved.bytes for saved in found["0"]] == [128, 128]
    assert [(s.shape, s.made_by) for s in found["1"]] == [((4, 8), "SigmoidBackward0")]
    assert [(s.bytes, s.made_by) for s in found[OUTSIDE]] == [(128, "ExpBackward0")]
    assert {saved.made_by for saved in found["0"]} == {"detached", "SigmoidBackward0"}
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    model(x).sum().backward()
    assert gradient_bytes({"0": model[0]}) == {"0": 8 * 8 * 4}
