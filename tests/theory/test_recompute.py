"""Recomputation in groups: torch's own count of FLOPs, brute force over blocks, and the square-root
rule.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distlab.model import ModelConfig, TransformerLM, checkpoint_segments
from distlab.model.config import RECOMPUTATION
from distlab.theory.flops import forward_flops, step_flops
from distlab.theory.memory.recompute import Segments, nested_bytes, recomputed_flops
from distlab.train.memory_budget import checkpoint_plan


@pytest.mark.parametrize(
    "choice", ["none", "block", "every-3", "every-5", "every-7", "every-4-2", "every-5-3-1"]
)
def test_what_runs_again_is_what_torch_counts(choice):
    config = ModelConfig(16, 32, 5, 2, vocab_size=11, context_length=8, attention="naive")
    sizes = {"batch": 2, "context": 8, "d_model": 16, "d_ff": 32, "num_layers": 5, "vocab_size": 11}
    model = TransformerLM(config, device="meta", checkpoint_blocks=choice)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(2, 8, dtype=torch.int64, device="meta")).sum().backward()
    again = recomputed_flops(Segments(checkpoint_segments(choice)), **sizes)
    assert counter.get_total_flops() == step_flops(**sizes) + again


@pytest.mark.parametrize("plan", [*RECOMPUTATION, "block:1,qkv:4"])
def test_what_blocks_keep_does_not_run_again(plan):
    """Matmuls as torch counts them, with grouped queries.

    Attention's own runs again where blocks keep nothing.
    """
    config = ModelConfig(16, 32, 5, 2, vocab_size=11, context_length=8, num_kv_heads=1)
    found = []
    for choice in (plan, "none"):
        model = TransformerLM(config, checkpoint_blocks=choice)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        found.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
    sizes, keeps = config.sizes(2), checkpoint_plan(plan, 5)
    scores = forward_flops(**sizes).attention_scores // 5 * keeps.count("block")
    assert found[0] - found[1] == recomputed_flops(keeps, **sizes) - scores


@pytest.mark.parametrize("exponent", [4, 6, 8, 10])
def test_equal_cuts_of_segments_keep_as_many_inputs_as_the_closed_form_says(exponent):
    """(m + 1)·L^(1/(m + 1)) for m levels, where it is exact, and never more than √L·log₂ L."""
    blocks = 2**exponent
    for levels in range(1, exponent):
        if exponent % (levels + 1):
            continue
        cut = blocks ** (1 / (levels + 1))
        segments = tuple(round(blocks / cut**level) for level in range(1, levels + 1))
        kept = nested_bytes(blocks, segments, input_bytes=1, block_bytes=1)
        assert kept == round((levels + 1) * cut)
        assert kept <= blocks**0.5 * exponent
