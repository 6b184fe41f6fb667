"""Timing of a user's kernel where there is nothing to show: one sentence says why."""

import pytest
import torch
import torch.nn.functional as F

from launch import kernel_timing
from launch.kernel_timing import timed


def wrong_backward(logits, targets):
    return WrongBackward.apply(logits, targets)


def test_a_timing_that_does_not_end_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_timing, "MOST_S", 0.1)
    timing = timed("my:kernel", "rms_norm", "cpu", str(tmp_path), "run")
    assert timing.sentences == ["not timed: kernel_roofline took longer than 0.1 s"]
    assert not timing.is_wrong and timing.view is None


def test_a_timing_that_fails_is_one_sentence(tmp_path):
    timing = timed("no_such_module:kernel", "causal_attention", "cpu", str(tmp_path), "run")
    (sentence,) = timing.sentences
    assert sentence.startswith("not timed: attention_sweep failed (")
    assert "the import of no_such_module failed" in sentence


class WrongBackward(torch.autograd.Function):
    """Cross-entropy whose gradient is three times too large."""

    @staticmethod
    def forward(ctx, logits, targets):
        with torch.enable_grad():
            ctx.logits = logits.detach().requires_grad_()
            ctx.loss = F.cross_entropy(ctx.logits, targets)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return 3 * torch.autograd.grad(ctx.loss, ctx.logits, upstream)[0], None


@pytest.mark.parametrize("forward", [True, pytest.param(False, marks=pytest.mark.commands)])
def test_a_backward_counts_unless_the_forward_alone_is_examined(forward, tmp_path):
    kernel = f"{__name__}:wrong_backward"
    timing = timed(kernel, "cross_entropy", "cpu", str(tmp_path), "run", forward=forward)
    assert timing.is_wrong is not forward, timing
    assert {row.config["direction"] for row in timing.yours} == {"fwd" if forward else "both"}


def test_each_operation_has_an_experiment_that_times_it():
    assert kernel_timing.options_for("softmax", "cuda")[:2] == (
        "kernel_roofline",
        ["--only", "softmax", "--variants", *kernel_timing.PEERS],
    )
    name, options = kernel_timing.options_for("attention", "cuda")
    assert name == "attention_sweep" and "2x32x2048x128/full" in options
