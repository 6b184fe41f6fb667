"""The launches of one block, counted here as operators at torch's dispatcher, beside what theory counts."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.bench.timing import synthetic_batches
from distlab.experiment import lone_context
from distlab.hardware import H100_SXM
from distlab.model import TransformerLM
from distlab.report import Record
from distlab.theory.fusion import kernel_counts, transformer_block
from experiments import model_comparison
from experiments.model_comparison import Config, Way, launch_findings, predicted_launches
from tests.experiments.frame import measured


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def dispatched(call):
    with Dispatched() as counted:
        call()
    return counted.names


def test_what_one_block_launches(monkeypatch):
    monkeypatch.setattr(model_comparison, "launched", dispatched)
    config = Config(size="tiny", batch=1, context=16, dtype="fp32")
    base = TransformerLM(config.model(), seed=0)
    optimizer = torch.optim.AdamW(base.parameters())
    batches = synthetic_batches(lone_context("cpu"), config)
    found = Way("torch", config, base, optimizer, batches).block_launches()
    assert found["forward"]["mm"] == 5 and found["backward"]["mm"] == 10
    assert found["forward"]["silu"] == found["backward"]["silu_backward"] == 1 and "silu" not in found["backward"]
    assert Way("torch-graphs", config, base, optimizer, batches).block_launches() is None


@pytest.mark.parametrize(("dtype", "autocast"), [("fp32", False), ("bf16", True)])
def test_both_counts_of_theory_agree(dtype, autocast):
    """The advisor's graph of a block and the operators of a step, forward; in one kernel each what can be."""
    config = Config(size="medium", batch=8, context=1024, dtype=dtype)
    model = config.model()
    graph = transformer_block(8, 1024, model.d_model, model.d_ff, model.num_heads, 2 if autocast else 4, autocast)
    counts = kernel_counts(graph, H100_SXM)
    for way, name in (("torch", "eager"), ("ours", "ours"), ("torch-compiled", "compiled")):
        assert predicted_launches(way, config)["predicted_forward_launches"] == counts[name]
    assert predicted_launches("ours-graphs", config) == {}


def test_launches_are_written(monkeypatch, tmp_path):
    """As a GPU's rows have them."""
    counts = {"forward_launches": 24, "backward_launches": 50, "often_launched": {"forward": {}, "backward": {"mm": 9}}}
    predicted = model_comparison.predicted_launches
    monkeypatch.setattr(model_comparison, "predicted_launches", lambda *args: counts | predicted(*args))
    measured(model_comparison.EXPERIMENT, tmp_path, ways=("torch",))
    assert "of a block: forward" in (tmp_path / "model_comparison" / "run" / "table.md").read_text()


def test_a_miss_names_the_kernels():
    metrics = {"forward_launches": 24, "predicted_forward_launches": 24, "backward_launches": 50,
               "predicted_backward_launches": 36, "often_launched": {"forward": {}, "backward": {"nvjet": 9}}}
    (line,) = launch_findings([Record("model_comparison", "torch", {}, metrics, {}, None)])
    assert line == "torch: a block's backward launches 50, predicted 36; 9 × nvjet"
