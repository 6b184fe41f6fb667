"""The Python frame in which the host is while the device waits for it."""

import os
import time

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from distlab.measure.trace.frames import is_own
from distlab.trace import explain_traces
from distlab.trace.page import CAUSES, records_of
from tests.trace import handmade
from tests.trace.handmade import STEP_MS, gpu_run

LAUNCHING, OTHER = 1, 2  # threads
WORK_MS = 3.0  # that Python works between two operators
CALL_IMPL = "torch/nn/modules/module.py(1782): _call_impl"


def frame(writer, name, start, end, thread=LAUNCHING):
    writer.span("python_function", name, start, end, thread)


def late_host(writer, begin):
    """Add a step in which the device waits from 10 to 20 ms for the host."""
    handmade.layers(writer, begin, 0.1, 10)
    handmade.layers(writer, begin, 20, 29.9, launched=19.98)


def finding(folder, step, cause="host-bound"):
    explanation = explain_traces(gpu_run(folder, step, ranks=1))
    return next(each for each in explanation.findings if each.cause == cause), explanation


def test_the_innermost_frame_of_the_users_code_is_named(tmp_path):
    def step(writer, begin):
        late_host(writer, begin)
        frame(writer, "train.py(90): <module>", begin, begin + STEP_MS)
        frame(writer, "train.py(41): step", begin, begin + 29)
        frame(writer, "nn.Module: Block_0", begin + 1, begin + 28)
        frame(writer, CALL_IMPL, begin + 1, begin + 28)
        frame(writer, "model.py(7): forward", begin + 2, begin + 27)
        # 6 of the 10 ms, in two calls, and inside of them the library's and built-in functions
        for start in (11, 15):
            frame(writer, "model.py(30): tokenize", begin + start, begin + start + 3)
            inner = (begin + start + 0.1, begin + start + 2.9)
            frame(writer, "re/__init__.py(163): match", *inner)
            frame(writer, "<built-in function sorted>", *inner)
            # long, but not on the thread that launches
            frame(writer, "logger.py(3): write", *inner, OTHER)
        # inside of the idle time, but not for long
        frame(writer, "model.py(50): check", begin + 18, begin + 19)

    found, explanation = finding(tmp_path, step)
    assert found.frame == "model.py(30): tokenize"
    assert found.detail == "before aten::mm"
    assert "mostly before aten::mm. " in found.sentence
    assert found.sentence.endswith("Meanwhile Python is mostly in model.py(30): tokenize.")
    assert "host-bound        10.20       34.0     0      3  model.py(30): tokenize, before" in str(
        explanation
    )
    assert explanation.to_dict()["causes"][0]["frame"] == found.frame
    (row,) = [row for row in records_of(explanation) if row.config["part"] == CAUSES]
    assert row.metrics["mostly"] == "model.py(30): tokenize, before aten::mm"


def test_a_function_called_from_two_others_is_inside_of_them(tmp_path):
    def step(writer, begin):
        late_host(writer, begin)
        frame(writer, "train.py(50): validate", begin + 10, begin + 16)
        frame(writer, "train.py(60): report", begin + 16, begin + 20)
        # It is active for longer than `validate`, and still inside of it.
        frame(writer, "train.py(9): read", begin + 10.5, begin + 15.5)
        frame(writer, "train.py(9): read", begin + 16.5, begin + 19.5)

    assert finding(tmp_path, step)[0].frame == "train.py(9): read"


def test_a_function_that_calls_itself_counts_once(tmp_path):
    def step(writer, begin):
        late_host(writer, begin)
        frame(writer, "train.py(41): step", begin + 1, begin + 29)
        # 4 of the 10 ms, three calls deep
        for depth in range(3):
            frame(writer, "train.py(9): visit", begin + 11 + 0.1 * depth, begin + 15)

    assert finding(tmp_path, step)[0].frame == "train.py(41): step"


def test_without_own_code_it_is_the_innermost_frame(tmp_path):
    def step(writer, begin):
        late_host(writer, begin)
        frame(writer, "runpy.py(198): _run_module_as_main", begin, begin + STEP_MS)
        frame(writer, CALL_IMPL, begin + 9, begin + 19)

    assert finding(tmp_path, step)[0].frame == CALL_IMPL


def test_no_frame_that_is_active_for_long_is_no_frame(tmp_path):
    def step(writer, begin):
        late_host(writer, begin)
        frame(writer, "train.py(41): step", begin + 1, begin + 14)

    assert finding(tmp_path, step)[0].frame is None


def test_without_stacks_there_is_no_frame(tmp_path):
    found, explanation = finding(tmp_path, late_host)
    assert explanation.ranks[0].trace.frames is None and found.frame is None
    assert "Python is mostly" not in found.sentence


def test_a_late_launch_has_the_frame_before_it_and_other_causes_have_none(tmp_path):
    def step(writer, begin):
        handmade.late_launch(writer, begin)
        frame(writer, "train.py(41): step", begin, begin + STEP_MS)
        frame(writer, "hooks.py(5): compress", begin + 8.1, begin + 10.9)
        frame(writer, "hooks.py(5): compress", begin + 20.1, begin + 22.9)

    assert finding(tmp_path, step, "late launch")[0].frame == "hooks.py(5): compress"

    def garbage(writer, begin):
        handmade.garbage(writer, begin)
        frame(writer, "train.py(41): step", begin, begin + STEP_MS)

    assert finding(tmp_path, garbage, "garbage collection")[0].frame is None


def test_frames_without_work_are_refused_as_any_trace_without_work(tmp_path):
    writer = handmade.Writer()
    frame(writer, "train.py(41): step", 0, 5)
    with pytest.raises(ValueError, match="has no kernels"):
        explain_traces([writer.write(tmp_path / "t.json")])


@pytest.mark.parametrize(
    "name, expected",
    [
        ("train.py(41): forward", True),
        ("/home/me/project/train.py(41): <lambda>", True),
        ("transformers/trainer.py(3700): training_step", True),
        ("/opt/lib/python3.12/site-packages/mine/loop.py(1): run", True),
        ("tests/trace/test_frames.py(1): work", True),
        ("torch/optim/adamw.py(220): step", False),
        ("/usr/lib/python3/dist-packages/torch/_tensor.py(566): backward", False),
        ("/usr/lib/python3.12/json/decoder.py(340): decode", False),
        ("threading.py(1002): _bootstrap", False),
        ("/tmp/torchinductor_me/ab/cabc.py(80): call", False),
        ("<frozen os>(674): __getitem__", False),
        ("<string>(2): __init__", False),
        ("<built-in method run_backward of torch._C._EngineBase object at 0x7f>", False),
        ("nn.Module: Linear_0", False),
    ],
)
def test_own_code_is_told_by_its_file(name, expected):
    assert is_own(name) is expected


def test_a_users_file_may_have_the_name_of_a_standard_module():
    assert is_own("trace.py(12): train_step")
    assert is_own("profile.py(3): <module>")
    assert is_own("test.py(5): run")
    # functions that the standard library has
    assert not is_own("threading.py(982): run")
    assert not is_own("queue.py(154): get")
    assert not is_own("threading.py(5): <lambda>")
    assert not is_own("/usr/lib/python3.12/profile.py(3): train_step")


@pytest.mark.parametrize(
    "length_ms, said", [(15, "Long gaps per step: 1. Python does"), (1.5, "Compile the model")]
)
def test_one_long_gap_is_told_from_many_short_ones(tmp_path, length_ms, said):
    """Without a GPU: operators, and as much time without any."""

    def step(writer, begin):
        for start in range(int(15 / length_ms)):
            at = begin + 2 * length_ms * start
            writer.span("cpu_op", "aten::mm", at, at + 0.99 * length_ms)

    found, _ = finding(tmp_path, step, "between operators")
    assert said in found.sentence
    assert ("with_stack=True" in found.sentence) == (length_ms == 15)


def work_between_operators(value):
    """Compute without torch for `WORK_MS`."""
    end = time.perf_counter() + WORK_MS / 1e3
    while time.perf_counter() < end:
        value = (value * 1103515245 + 12345) % 2**31
    return value


class Hesitant(nn.Module):
    """Four layers, and Python that works between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            work_between_operators(1)
        return x.sum()


def test_a_recorded_trace_names_the_function_that_works_between_operators(tmp_path):
    model = Hesitant()
    steps = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, with_stack=True) as profiler:
        for _ in range(3):
            model(torch.ones(2, 8)).backward()
            profiler.step()
    path = tmp_path / "rank0.json"
    profiler.export_chrome_trace(os.fspath(path))
    explanation = explain_traces([path])
    found = explanation.findings[0]
    assert found.cause == "between operators"
    assert found.frame.endswith(": work_between_operators")
    assert "test_frames.py(" in explanation.first and found.frame in explanation.first
