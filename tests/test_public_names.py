"""Names that people import: they stay, and say what they are."""

import importlib
import inspect

import pytest

NAMES = {
    "distlab.parallel": (
        "NaiveDDP FlatDDP OverlapDDP BucketedDDP ShardedOptimizer ZeroOptimizer FSDP"
    ),
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


WRAPPED = "(module, *, mesh=None, process_group=None)"
SIGNATURES = {  # argument names, their order and their defaults
    "NaiveDDP": WRAPPED,
    "FlatDDP": WRAPPED,
    "OverlapDDP": WRAPPED,
    "BucketedDDP": "(module, bucket_size_mb=25.0, *, mesh=None, process_group=None)",
    "ShardedOptimizer": "(params, optimizer_cls, process_group=None, **kwargs)",
    "ZeroOptimizer": "(ddp, optimizer_cls, *, params=None, elementwise=False, "
    "overlap_gather=False, shard_gradients=False, **kwargs)",
    "FSDP": "(module, compute_dtype=None, *, mesh=None, process_group=None, init_fn=None, "
    "device=None, keep_gathered=False)",
}
METHODS = {  # of every wrapper
    "no_sync": "(self)",
    "finish_gradient_synchronization": "(self)",
    "sync_buffers": "(self)",
    "close": "(self, *, restore=True)",
    "full_state_dict": "(self)",
    "load_full_state_dict": "(self, state_dict)",
    "clip_grad_norm_": "(self, max_norm, norm_type=2.0)",
}
FUNCTIONS = {
    "distlab.testing.run_ranks": "(fn, world_size, *args, backend='gloo', device=None, "
    "deadline_s=60.0, group_timeout_s=20.0, memory_bytes=None)",
    "distlab.testing.check_gradients": "(model, wrap, ranks=2, *, batch=4, same_batch=False, "
    "micro_batches=None, timeout_s=20.0, optimizer='sgd', where=False)",
    "distlab.comm.rank_context": "(*, backend=None, device=None, timeout_s=60.0, store=None, "
    "rank=None, world_size=None)",
    "kernels.rmsnorm.rms_norm": "(x, weight, eps=1e-05)",
    "kernels.flash_attention.flash_attention": "(q, k, v, *, causal=False, scale=None, "
    "window=None, alignment='top-left', precision='emulated', document_ids=None, "
    "deterministic=None, softcap=None, return_lse=False)",
}


def arguments(callable_):
    """The signature without annotations."""
    signature = inspect.signature(callable_)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_of_a_strategy_stay(name):
    strategy = getattr(importlib.import_module("distlab.parallel"), name)
    assert arguments(strategy) == SIGNATURES[name]
    if not name.endswith("Optimizer"):
        for method, expected in METHODS.items():
            assert arguments(getattr(strategy, method)) == expected, method
    if name == "FSDP":
        assert arguments(strategy.gather_full_params) == "(self)"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_of_a_function_stay(name):
    module, _, function = name.rpartition(".")
    assert arguments(getattr(importlib.import_module(module), function)) == FUNCTIONS[name]
