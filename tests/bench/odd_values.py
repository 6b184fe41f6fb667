"""Models whose values a fixed tolerance would misjudge: half precision, and data around ±100."""

import torch
from torch import nn


def regression(dtype, scale):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)

    def batch(size, generator):
        inputs = scale * torch.randn(size, 16, generator=generator)
        targets = scale * torch.randn(size, 4, generator=generator)
        return inputs.to(dtype), targets.to(dtype)

    def loss(model, examples):
        inputs, targets = examples
        return (model(inputs) - targets).square().mean()

    return model, batch, loss


def bf16():
    return regression(torch.bfloat16, 1.0)


def large():
    return regression(torch.float32, 100.0)
