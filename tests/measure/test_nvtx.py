"""Ranges say what ran, and cost nothing when they are off."""

import pytest
import torch

from distlab.measure.nvtx import Emitter, named_ranges
from distlab.model import TransformerLM, cross_entropy, preset
from distlab.parallel import BucketedDDP


def tiny(attention="naive", device="cpu"):
    model = TransformerLM(
        preset("tiny", attention=attention, num_layers=1, context_length=16), device=device
    )
    return model, torch.arange(32, device=device).reshape(2, 16)


def train(model, tokens, optimizer=None):
    cross_entropy(model(tokens), tokens).backward()
    if optimizer is not None:
        optimizer.step()


class Log:
    """An emitter that notes each range with its depth, and that every range is closed.

    Like NVTX's it returns depths, which hooks must not hand on: torch would take them for
    gradients.
    """

    def __init__(self):
        self.names, self.depth = [], 0
        self.emitter = Emitter(self.push, self.pop)

    def push(self, name):
        self.names.append((self.depth, name))
        self.depth += 1
        return self.depth - 1

    def pop(self):
        self.depth -= 1
        return self.depth


def test_parts_operations_backward_and_the_optimizer_are_ranges():
    model, tokens = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = Log()
    with named_ranges(model, log.emitter, optimizer):
        train(model, tokens, optimizer)
    assert log.depth == 0
    attention = "blocks.0.attention/attention"
    names = [name for _, name in log.names]
    assert [name for name in names if name.startswith(attention) and "backward" not in name] == [
        attention,
        f"{attention}/scores",
        f"{attention}/softmax",
        f"{attention}/values",
    ]
    depth = {name: depth for depth, name in reversed(log.names)}
    assert depth["model"] == 0 and depth["blocks.0"] == 1 and depth["blocks.0.attention"] == 2
    assert depth[attention] == 3 and depth[f"{attention}/softmax"] == 4
    # Backward in reverse, each node under the part that made it, and nothing nested.
    backward = [name for name in names if name.endswith("backward")]
    order = [f"{attention}/{part} backward" for part in ("values", "softmax", "scores")]
    assert sorted(order, key=backward.index) == order
    assert backward[0] == "head backward" and backward[-1] == "embedding backward"
    assert all(depth[name] == 0 for name in backward)
    assert names[-1] == "optimizer"


def test_an_exception_closes_the_ranges_and_detaches():
    model, tokens = tiny()
    log = Log()
    with pytest.raises(ValueError, match="expected"), named_ranges(model, log.emitter):
        model(tokens[0])
    assert log.depth == 0 and not model._forward_pre_hooks


@pytest.mark.ranks(2)
def test_buckets_are_numbered_ranges_of_their_size(context):
    model, tokens = tiny("sdpa")
    wrapper = BucketedDDP(model, bucket_size_mb=2.0, process_group=context.group)
    log = Log()
    with named_ranges(wrapper, log.emitter):
        for _ in range(2):
            train(wrapper, tokens)
            wrapper.finish_gradient_synchronization()
    inside = len(log.names)
    train(wrapper, tokens)
    wrapper.finish_gradient_synchronization()
    wrapper.close()
    names = [name for _, name in log.names]
    assert len(names) == inside  # nothing was noted after it was taken off
    sent = [name for name in names if name.startswith("message")]
    half = len(sent) // 2
    assert sent[:half] == sent[half:] and sent[0].startswith("message 0: all_reduce_mean 5.1 MB")
    assert [int(name.split()[1].rstrip(":")) for name in sent[:half]] == list(
        range(half)
    ) and half >= 2
    assert names.count("finish_gradient_synchronization") == 2
    attention = "blocks.0.attention/attention"
    assert attention in names and f"{attention}/scores" not in names  # fused, it has no parts
