"""Names that people import: they stay, and say what they are."""

import importlib

import pytest

NAMES = {
    "distlab.parallel": "NaiveDDP FlatDDP OverlapDDP BucketedDDP ShardedOptimizer ZeroOptimizer FSDP",
    "kernels.flash_attention": "FlashAttention2 FlashAttention2PyTorch flash_attention",
    "kernels.nn": "Attention CrossEntropyLoss LayerNorm LinearCrossEntropyLoss RMSNorm SwiGLU",
    "kernels.rmsnorm": "RMSNorm RMSNormPyTorch rms_norm",
    "distlab.testing": "check_gradients run_ranks",
    "distlab.comm": "RankContext rank_context",
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_there_and_documented(module):
    for name in NAMES[module].split():
        assert getattr(importlib.import_module(module), name).__doc__, name
