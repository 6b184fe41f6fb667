"""The small models that are trained through a submission's hooks, and their data.

Child processes train them. The parent builds the same models with the same seeds, to know what
must come out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 0.1
EXAMPLES = 4  # examples in a batch of rank 0
WIDTH = 16
VOCABULARY, FSDP_WIDTH = 48, 64

# Forms of the model of data parallelism, each with one thing that is hard for a wrapper.
PLAIN = "plain"
TIED = "two layers share a weight"
FROZEN = "a layer is frozen"
UNUSED = "a layer is used by no rank"
UNUSED_ON_ONE = "a layer is not used on the last rank"
OTHER_ORDER = "the last rank uses two layers in the other order"


class Branches(nn.Module):
    """Four linear layers, of which two may be called in either order.

    Args:
        form: one of the constants above, `PLAIN` or a following one.
        seed: integer that fixes the initial parameters and the buffer.
        is_last: True on the last rank, whose forward may differ.
        width: width of the layers.
    """

    def __init__(self, form: str, seed: int, is_last: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        # A seed per rank makes a missing broadcast visible.
        torch.manual_seed(seed)
        self.form = form
        self.is_last = is_last
        self.first = nn.Linear(6, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)
        self.register_buffer("scale", 1 + torch.rand(3))
        if form == TIED:
            self.right.weight = self.left.weight
        if form == FROZEN:
            self.left.weight.requires_grad_(False)
            self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return three numbers for each example of six."""
        x = torch.tanh(self.first(x))
        branches = [self.left, self.right]
        if self.form == UNUSED or (self.form == UNUSED_ON_ONE and self.is_last):
            branches = [self.right]
        if self.form == OTHER_ORDER and self.is_last:
            branches.reverse()
        for branch in branches:
            x = torch.tanh(branch(x))
        return self.last(x) * self.scale


def batch_of(rank: int, step: int, examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """Return inputs (examples, 6) and targets (examples, 3) of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(examples, 6, generator=generator)
    targets = torch.randn(examples, 3, generator=generator)
    return inputs, targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(outputs, targets)


class Words(nn.Module):
    """Language model without attention, for FSDP: large weights and few activations.

    Args:
        seed: integer that fixes the initial parameters.
        linear, embedding: classes of the layers, called with two sizes. A course has its own.
        is_tied: True for one weight as embedding and head.
        is_frozen: True if the second layer is not trained.
    """

    def __init__(
        self,
        seed: int,
        linear: type[nn.Module] | None = None,
        embedding: type[nn.Module] = nn.Embedding,
        is_tied: bool = False,
        is_frozen: bool = False,
    ) -> None:
        super().__init__()
        linear = linear or PlainLinear
        self.embedding = embedding(VOCABULARY, FSDP_WIDTH)
        self.layers = nn.ModuleList([linear(FSDP_WIDTH, FSDP_WIDTH) for _ in range(4)])
        self.gain = nn.Parameter(torch.ones(FSDP_WIDTH))
        self.head = linear(FSDP_WIDTH, VOCABULARY)
        if is_tied:
            self.head.weight = self.embedding.weight
        if is_frozen:
            self.layers[1].weight.requires_grad_(False)
        # Drawn after the layers were made, so that a course's own initialisation does not matter.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values / FSDP_WIDTH**0.5)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (examples, vocabulary) for words (examples)."""
        x = self.embedding(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x * self.gain.to(x.dtype))


class PlainLinear(nn.Linear):
    """Linear layer without bias, made from two sizes like a course's own layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


def words_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return words (examples) and the words that follow them."""
    generator = torch.Generator().manual_seed(1000 * rank + step + 7)
    words = torch.randint(VOCABULARY, (EXAMPLES,), generator=generator)
    # A rule that the model can learn, so that gradients are not noise.
    return words, (words * 5 + 1) % VOCABULARY


def word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, computed in fp32."""
    return F.cross_entropy(logits.float(), targets)
