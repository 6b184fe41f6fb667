"""An instrument leaves compiled code compiled: the step after an observed step runs the same
compiled graphs.
"""

from dataclasses import replace

import pytest
import torch
from torch.distributed._functional_collectives import all_reduce

from distlab.measure import CollectiveRecorder, FlopsByCategory
from distlab.measure.memory import saved_for_backward
from distlab.measure.memory_timeline import record_memory
from distlab.measure.nvtx import emitter, named_ranges
from distlab.measure.trace.capture import CompiledCalls, Phases, compiled_calls, profile_steps
from distlab.model import TransformerLM, preset
from distlab.parallel.meta import initialize_in_turn
from distlab.testing import run_ranks
from distlab.train.step import compiled

SHAPE = replace(preset("tiny"), num_layers=3, d_model=16, d_ff=16, num_heads=2, vocab_size=64)
TOKENS = torch.arange(16).reshape(2, 8)


def compiled_model(how="blocks"):
    """Build a small model whose parts run under Dynamo.

    The plain backend tells as much as Inductor does.
    """
    return compiled(TransformerLM(SHAPE, device="cpu", seed=0), how, backend="eager")


def step(model):
    model.zero_grad()
    model(TOKENS).square().mean().backward()


def record_collectives(model, tmp_path):
    with CollectiveRecorder():
        step(model)


def count_flops(model, tmp_path):
    with FlopsByCategory():
        step(model)


def list_saved_tensors(model, tmp_path):
    blocks = {str(number): block for number, block in enumerate(model.blocks)}
    saved_for_backward(lambda: model(TOKENS).square().mean(), model, blocks)


def trace(model, tmp_path):
    profile_steps(
        lambda: step(model), steps=1, path=tmp_path / "t.json", rank=0, world_size=1, device="cpu"
    )


def trace_memory(model, tmp_path):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def marked(mark):
        step(model)
        mark("forward")
        mark("backward")
        optimizer.step()
        mark("optimizer")

    record_memory(marked, model, optimizer, tmp_path / "m.json", "cpu")


def name_ranges(model, tmp_path):
    with named_ranges(model, emitter("profiler")):
        step(model)


def mark_phases(model, tmp_path):
    with Phases().step():
        step(model)


def initialize_another_model(model, tmp_path):
    """Cut a module's parameters into shards, whose initialisation calls the compiled model."""
    linear = torch.nn.Linear(4, 4, bias=False)
    kept = []

    def init(module):
        torch.nn.init.ones_(module.weight)
        step(model)

    initialize_in_turn(
        linear, [("weight", linear.weight, lambda value: kept.append(value.clone()))], init
    )
    assert kept[0].eq(1).all()


INSTRUMENTS = [
    record_collectives,
    count_flops,
    list_saved_tensors,
    trace,
    trace_memory,
    name_ranges,
    mark_phases,
    initialize_another_model,
]


@pytest.fixture
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_a_step_after_an_observed_one_is_compiled(instrument, tmp_path, fresh_dynamo):
    model = compiled_model()
    for _ in range(2):
        step(model)
    before = compiled_calls(lambda: step(model))
    assert before == CompiledCalls(regions=3, lookups=3)
    instrument(model, tmp_path)
    assert compiled_calls(lambda: step(model)) == before
    # A model that is compiled after the observation must not find its blocks marked as eager,
    # either.
    torch.compiler.reset()
    another = compiled_model()
    instrument(another, tmp_path)
    for _ in range(2):
        step(another)
    assert compiled_calls(lambda: step(another)) == before


def test_eager_code_is_counted_as_eager(fresh_dynamo):
    """A plain dispatch mode makes Dynamo skip the blocks for good, which is what `compiled_calls`
    must show.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = compiled_model()
    with Plain():
        step(model)
    assert compiled_calls(lambda: step(model)).regions == 0


def _record_in_graph(context):
    def double_sum(x):
        return all_reduce(x, "sum", context.group) * 2

    function = torch.compile(double_sum, backend="aot_eager")
    x = torch.ones(3)
    function(x)
    with CollectiveRecorder() as recorder:
        function(x)
    return [(call.op, call.bytes) for call in recorder.calls]


def test_collectives_inside_a_graph_are_counted():
    assert run_ranks(_record_in_graph, 2) == [[("all_reduce", 12)]] * 2
