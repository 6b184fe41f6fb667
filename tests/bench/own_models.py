"""Models as users have them, each behind a factory for `--model`, and factories that are wrong."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def classify(model, *size):
    def batch(count, generator):
        return torch.randn(count, *size, generator=generator), torch.randint(
            10, (count,), generator=generator
        )

    def loss(model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    return model, batch, loss


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


def resnet():
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
    return classify(
        nn.Sequential(stem, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head),
        3,
        8,
        8,
    )


class MixtureOfExperts(nn.Module):
    """Send each token to one of six experts. Batches leave some unused, two always."""

    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, 10)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = chosen == expert
            out[rows] = self.experts[expert](x[rows]) * weights[rows, expert, None]
        return self.head(x + out)


def compiled_blocks():
    block = torch.compile(nn.Linear(8, 8), backend="eager")
    return classify(nn.Sequential(nn.Linear(8, 8), block, nn.ReLU(), nn.Linear(8, 10)), 8)


def compiled_here():
    """Compiled, of a class that is another one in each call: no two models share their graphs."""

    class Layers(nn.Sequential):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                raise RuntimeError("it ran eager")
            return super().forward(x)

    layers = Layers(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
    return classify(torch.compile(layers, backend="eager", fullgraph=True), 8)


def mixture():
    return classify(MixtureOfExperts(), 8)


class Encoder(nn.Module):
    """As BERT: bidirectional attention with a padding mask, dropout, a head over the vocabulary."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        # copies the layer
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens, padding):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))


def bert():
    def batch(count, generator):
        tokens = torch.randint(50, (count, 12), generator=generator)
        return {
            "tokens": tokens,
            "padding": torch.arange(12).expand(count, 12) > 9,
            "targets": tokens,
        }

    def loss(model, batch):
        logits = model(batch["tokens"], padding=batch["padding"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    return Encoder(), batch, loss


class TakesDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(3, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, inputs):
        return {"logits": self.out(self.left(inputs["left"]) * self.right(inputs["right"]))}


def dictionary():
    def batch(count, generator):
        sides = {
            "left": torch.randn(count, 4, generator=generator),
            "right": torch.randn(count, 3, generator=generator),
        }
        return sides, torch.randint(10, (count,), generator=generator)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0])["logits"], batch[1])

    return TakesDictionary(), batch, loss


@dataclass
class Logits:
    """A type that pytree does not know."""

    logits: torch.Tensor


class ReturnsDataclass(TakesDictionary):
    def forward(self, inputs):
        return Logits(super().forward(inputs)["logits"])


def returns_dataclass():
    _, batch, _ = dictionary()
    return (
        ReturnsDataclass(),
        batch,
        lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
    )


def fails():
    raise RuntimeError("no such file of weights")


def bare_module():
    return nn.Linear(2, 2)


def vector_loss():
    model, batch, _ = dictionary()
    return model, batch, lambda model, batch: model(batch[0])["logits"]


def fails_in_torch():
    model, _, _ = dictionary()
    return (
        model,
        lambda count, generator: torch.randn(count, 1, generator=generator),
        lambda model, batch: nn.Linear(2, 2)(batch).sum(),
    )


def batch_without_generator():
    model, _, loss = dictionary()
    return model, lambda count: None, loss


def frozen():
    model, batch, loss = dictionary()
    return model.requires_grad_(False), batch, loss
