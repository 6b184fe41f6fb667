"""The simulated step against the same strategy on real ranks: every collective in order, bytes and
types; FLOPs against the closed form. Memory and volume are compared in
tests/theory/test_axes.py."""

import sys

import pytest
import torch
import torch.distributed as dist

from distlab.measure.collectives import CollectiveRecorder
from distlab.model import ModelConfig, TransformerLM, preset
from distlab.parallel import STRATEGIES, get_strategy
from distlab.simulate.step import simulate_step, simulate_training
from distlab.simulate.world import fake_world
from distlab.testing import run_ranks
from distlab.theory.flops import forward_flops
from distlab.train.step import TrainStep, next_token_loss

CONFIG = ModelConfig(
    d_model=64, d_ff=128, num_layers=2, num_heads=2, vocab_size=300, context_length=8
)
OURS = [
    name for name, strategy in STRATEGIES.items() if not (strategy.is_peer or strategy.needs_gpu)
]
BUCKET_MB = 0.1


def _calls(recorded):
    return [(call.op, call.bytes, str(call.dtype), call.numel) for call in recorded.calls]


def _recorded(context, name, compute_dtype):
    """The third step of a strategy on gloo."""
    strategy = get_strategy(name)
    wrapper, optimizer = strategy.build(
        TransformerLM(CONFIG),
        context.group,
        torch.optim.AdamW,
        compute_dtype=compute_dtype,
        bucket_size_mb=BUCKET_MB,
    )
    train = TrainStep(wrapper, optimizer, next_token_loss)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(3):
        with CollectiveRecorder() as recorder:
            train([(tokens, tokens)])
    wrapper.synchronize()
    dist.barrier(context.group)
    return _calls(recorder)


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, "fp32") for name in OURS if name != "local"), ("bucketed", "bf16"), ("fsdp", "bf16")],
)
def test_sends_what_real_ranks_send(name, dtype):
    compute_dtype = torch.bfloat16 if dtype == "bf16" else None
    recorded = run_ranks(_recorded, 2, name, compute_dtype)
    for rank in (0, 1) if name in ("zero1", "sharded-optimizer") else (1,):
        step = simulate_step(
            name,
            lambda: TransformerLM(CONFIG, device="cpu"),
            _train,
            world_size=2,
            rank=rank,
            bucket_size_mb=BUCKET_MB,
            compute_dtype=compute_dtype,
            like_nccl=False,
        )
        assert _calls(step) == recorded[rank]
    assert recorded[0]


def _train(wrapper, optimizer, mark):
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    train = TrainStep(wrapper, optimizer, next_token_loss, mark=mark)
    return lambda: train([(tokens, tokens)])


def test_a_compiled_module_runs_eager():
    """Compiled code reads memory, which fake tensors do not have: the process would crash."""
    compiled_for = []

    def backend(graph, inputs):
        compiled_for.append(graph)
        return graph.forward

    def build():
        model = TransformerLM(CONFIG, device="cpu")
        model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
        return model

    plain = simulate_step(
        "bucketed", lambda: TransformerLM(CONFIG, device="cpu"), _train, world_size=2
    )
    step = simulate_step("bucketed", build, _train, world_size=2)
    assert not compiled_for and step.peak.total == plain.peak.total


def test_flops_by_phase():
    config = preset("tiny", num_layers=2)
    step = simulate_training(config, "local", batch=3, world_size=2, dtype="fp32")
    sizes = {"d_model": 128, "d_ff": 512, "num_layers": 2, "vocab_size": config.vocab_size}
    scores = forward_flops(batch=3, context=64, **sizes).attention_scores
    forward = forward_flops(batch=3, context=64, causal=True, **sizes)
    flops = {"forward": 0, "backward": 0, "optimizer": 0}
    for operator in step.operators:
        flops[operator.phase] += operator.flops
    assert flops["forward"] == forward.total
    # A fused backward makes the scores anew: five products of which forward has two, half of each
    # masked.
    products = 2 * (forward.total - forward.attention_scores)
    assert flops["backward"] == products + scores * 5 // 4
    assert flops["optimizer"] == 0


def test_refusals_and_the_world_is_left():
    with pytest.raises(ValueError, match="torch-ddp cannot be simulated"):
        simulate_training(CONFIG, "torch-ddp", batch=1, world_size=2)
    with pytest.raises(ValueError, match="rank=4 of world_size=4"), fake_world(4, 4):
        pass
    before = sys.excepthook
    with pytest.raises(ZeroDivisionError), fake_world(2):
        raise ZeroDivisionError
    assert sys.excepthook is before
    assert not dist.is_initialized()
    with (
        fake_world(2),
        pytest.raises(RuntimeError, match="has a process group already"),
        fake_world(2),
    ):
        pass


def test_questions_about_a_fake_tensors_device_are_answered_before_they_cost_anything(monkeypatch):
    """C++ asks for it twice per operator, which made two thirds of all that was dispatched."""
    dispatched = []
    forward = CollectiveRecorder.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        dispatched.append(func.namespace)
        return forward(self, func, types, args, kwargs)

    monkeypatch.setattr(CollectiveRecorder, "__torch_dispatch__", noted)
    simulate_training(CONFIG, "bucketed", batch=1, world_size=2)
    assert dispatched.count("aten") > 50 and "prim" not in dispatched
