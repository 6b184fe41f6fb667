"""A kernel of anyone's against its operation: right ones pass, and each mistake is named."""

import importlib
import json
import math
import multiprocessing
import os
import subprocess
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from distlab.kernel_check import OPERATIONS, check_kernel
from distlab.kernel_check.calls import call_of
from distlab.kernel_check.judge import BREAKS_GPU
from distlab.testing import PRELOADED
from kernels import cross_entropy, layernorm, rmsnorm, rope, softmax, swiglu
from launch.__main__ import main
from tests.commands import be_python
from tests.kernel_check import hostile_kernels

INTERPRETED = 10  # inputs of a kernel that Triton interprets
child_module = importlib.import_module("distlab.kernel_check.child")
hostile = importlib.import_module("distlab.kernel_check.hostile")
judge = importlib.import_module("distlab.kernel_check.judge")
report_module = importlib.import_module("distlab.kernel_check.report")

CPU = torch.device("cpu")
OURS = {
    "softmax": softmax.softmax,
    "layer_norm": layernorm.layer_norm,
    "rms_norm": rmsnorm.rms_norm,
    "swiglu": swiglu.swiglu,
    "rope": rope.rope,
    "cross_entropy": cross_entropy.cross_entropy,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_torchs_own_operations_are_right(name):
    report = check_kernel(OPERATIONS[name].exact, name, count=5, device="cpu", seconds=math.inf)
    assert report.has_backward and not report.refused and report.left == 0
    assert report.is_right, report


def textbook_layer_norm(x, weight, bias):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


# Regression: on some inputs torch's own LayerNorm happens to round little, as here on all of them.
# The textbook's gradient was then called wrong: where two elements of a row are nearly equal, it is
# all rounding.
def test_a_textbook_layer_norm_is_right_where_torchs_own_rounds_little(monkeypatch):
    operation = OPERATIONS["layer_norm"]

    def rounds_once(x, weight, bias):
        return operation.exact(x.double(), weight.double(), bias.double()).to(x.dtype)

    monkeypatch.setitem(OPERATIONS, "layer_norm", replace(operation, exact=rounds_once))
    report = check_kernel(textbook_layer_norm, "layer_norm", device="cpu")
    assert report.is_right, report


class FusedLayerNorm(torch.autograd.Function):
    """A LayerNorm whose backward rounds g·weight − mean once, as a fused multiply-add does."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x32 = x.float()
        mean = x32.mean(-1, keepdim=True)
        scale = torch.rsqrt((x32 - mean).square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, mean, scale)
        return ((x32 - mean) * scale * weight.float() + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, mean, scale = ctx.saved_tensors
        normed = (x.float() - mean) * scale
        scaled = gradient.float() * weight.float()
        along_x = normed * (normed * scaled).mean(-1, keepdim=True)
        exact_scaled = gradient.double() * weight.double()
        centred = (exact_scaled - scaled.mean(-1, keepdim=True).double()).float()
        rows = tuple(range(x.ndim - 1))
        return (
            ((centred - along_x) * scale).to(x.dtype),
            (gradient.float() * normed).sum(rows).to(weight.dtype),
            gradient.float().sum(rows).to(weight.dtype),
        )


# Regression: in a row of one element, g·weight and its mean are equal. A GPU's fused multiply-add
# leaves a rounding of 316 times their size, and a right kernel was called wrong.
def test_a_fused_multiply_add_in_a_layer_norm_is_right():
    report = check_kernel(FusedLayerNorm, "layer_norm", device="cpu")
    assert report.is_right, report


def casts_twice(x, weight, bias):
    """Return LayerNorm by a formula whose autograd adds two parts of the gradient in x's dtype."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


# What is subtracted is allowed a rounding of fp32, and not one of the dtype of the input.
def test_a_gradient_that_is_added_up_in_half_precision_is_wrong():
    case = hostile.Case("layer_norm", (("N", 3), ("D", 2)), "bf16", "zeros", upstream="expanded")
    statuses = set()
    for seed in range(20):
        drawn = replace(case, seed=seed)
        statuses.add(judge.judge(casts_twice, OPERATIONS["layer_norm"], drawn, CPU).status)
    assert "wrong" in statuses


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not interpret kernels")
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "rms_norm", "rope", "cross_entropy"),
        # Their inputs are drawn as those of softmax and of rms_norm.
        pytest.param("layer_norm", marks=pytest.mark.commands),
        pytest.param("swiglu", marks=pytest.mark.commands),
    ],
)
def test_our_kernels_are_right(name, monkeypatch):
    """The first inputs, since the interpreter is slow."""
    every = report_module.cases
    monkeypatch.setattr(
        report_module, "cases", lambda *words, **more: list(every(*words, **more))[:INTERPRETED]
    )
    report = check_kernel(OURS[name], name, count=0, device="cpu")
    assert report.is_right and report.right == INTERPRETED and report.left == 0, report


def test_inputs_that_were_not_tried_are_not_called_right(monkeypatch):
    times = iter([0.0, 0.0])
    clock = SimpleNamespace(monotonic=lambda: next(times, 100.0))
    monkeypatch.setattr(report_module, "time", clock)
    report = check_kernel(hostile_kernels.right, "rms_norm", count=0, device="cpu", seconds=10)
    assert report.right == 1 and report.left > 10
    first, *_, last = str(report).splitlines()
    others = report.left
    assert first.startswith(f"nothing wrong in 1 of {1 + others} inputs, the others not tried: as")
    assert last.endswith(
        f"{others} inputs were not tried, because the time was over: give more seconds"
    )


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_kernel_stays_compiled(fullgraph):
    """Dynamo's own limit is eight graphs of a function, after which it runs eager or raises."""
    ran_eager = []

    @torch.compile(backend="eager", dynamic=False, fullgraph=fullgraph)
    def gelu(x):
        if not torch.compiler.is_compiling():
            ran_eager.append(x.shape)
        return F.gelu(x, approximate="tanh")

    report = check_kernel(gelu, "gelu", count=20, device="cpu")
    assert report.is_right and report.refused == 0 and not ran_eager


def test_a_backward_that_is_compiled_stays_compiled():
    ran_eager = []

    @torch.compile(backend="eager", dynamic=False)
    def unchanged(upstream):
        if not torch.compiler.is_compiling():
            ran_eager.append(upstream.shape)
        return upstream * 1

    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return F.gelu(x, approximate="tanh")

        @staticmethod
        def backward(ctx, upstream):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                result = F.gelu(leaf, approximate="tanh")
            return torch.autograd.grad(result, leaf, unchanged(upstream))

    report = check_kernel(Gelu, "gelu", count=20, device="cpu")
    assert report.is_right and not ran_eager


def test_a_kernel_may_refuse_what_it_does_not_support():
    report = check_kernel(hostile_kernels.refuses_strides, "rms_norm", count=0, device="cpu")
    assert report.is_right and report.refused >= 3
    assert "ValueError: x must be contiguous" in report.refusals


@pytest.mark.parametrize(
    "said",
    [
        "0 active drivers ([]). There should only be one.",
        "Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)",
    ],
)
def test_a_kernel_is_not_accused_of_what_the_machine_lacks(said):
    """In a process without Triton's interpreter, no Triton kernel runs on a CPU."""

    def softmax(x):
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before triton is imported"):
        check_kernel(softmax, "softmax", backward=False, device="cpu")


def test_a_kernel_may_not_refuse_the_plain_input():
    report = check_kernel(hostile_kernels.raises, "rms_norm", count=0, device="cpu", seconds=5)
    assert not report.is_right and list(report.findings) == ["raises"]
    assert report.findings["raises"].detail == "KeyError: 'no such\\nthing'"


@pytest.mark.parametrize(
    "function, kind",
    [
        ("changes_its_input", "changes an input"),
        ("ChangesTheUpstreamGradient", "changes the upstream gradient"),
        ("returns_no_tensor", "no tensor"),
    ],
)
def test_what_a_kernel_must_not_do_is_named(function, kind):
    report = check_kernel(getattr(hostile_kernels, function), "rms_norm", count=0, device="cpu")
    assert list(report.findings) == [kind]
    assert report.findings[kind].smallest == "N=1 D=1, fp32"


@pytest.mark.parametrize("function", ["ReturnsABufferThatItKeeps", "KeepsAGradient"])
def test_a_result_that_a_later_call_changes_is_a_mistake(function):
    report = check_kernel(getattr(hostile_kernels, function), "rms_norm", count=0, device="cpu")
    assert list(report.findings) == ["changes an earlier result"], report
    (finding,) = report.findings.values()
    assert finding.smallest == "N=1 D=1, fp32, after a call with other values"


@pytest.mark.parametrize(
    "function, kind",
    [
        ("changes_its_input_in_inference", "changes an input"),
        ("keeps_a_buffer_in_inference", "changes an earlier result"),
    ],
)
def test_inputs_without_gradients_are_tried(function, kind):
    report = check_kernel(getattr(hostile_kernels, function), "rms_norm", count=0, device="cpu")
    assert list(report.findings) == [kind], report
    assert "N=1 D=1, fp32, without gradients" in report.findings[kind].smallest


def test_rows_after_the_first_tile_count_in_the_gradient_of_a_weight():
    kernel = hostile_kernels.WeightOfTheFirst64Rows
    report = check_kernel(kernel, "rms_norm", count=0, device="cpu")
    (finding,) = report.findings.values()
    assert finding.kind == "gradient of weight" and finding.smallest == "N=65 D=1, fp32", report


def test_a_sum_over_rows_in_half_precision_is_a_mistake():
    kernel = hostile_kernels.WeightSummedInHalf
    report = check_kernel(kernel, "rms_norm", count=0, device="cpu")
    (finding,) = report.findings.values()
    assert finding.kind == "gradient of weight" and "N=257" in finding.smallest, report


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_after_two_tiles_of_64_are_tried(name):
    operation = OPERATIONS[name]

    def kernel(*tensors):
        results = judge.as_tuple(operation.exact(*tensors))
        is_wrong = tensors[0].shape[-2] > 128
        results = tuple(result * 2 if is_wrong else result for result in results)
        return results if len(results) > 1 else results[0]

    report = check_kernel(kernel, name, backward=False, count=0, device="cpu")
    smallest = report.findings["result 1" if name == "add_rms_norm" else "result"].smallest
    assert f"{operation.rows}=129" in smallest.split(",")[0].split(), report


def test_rounding_of_a_gradient_that_cancels_is_no_mistake():
    """With equal upstream gradients, all gradients of softmax are 0 in exact arithmetic."""
    report = check_kernel(hostile_kernels.softmax_through_the_maximum, "softmax", device="cpu")
    assert report.is_right and report.has_backward, report


def test_more_than_rounding_of_a_gradient_that_cancels_is_a_mistake():
    report = check_kernel(hostile_kernels.SoftmaxOffset, "softmax", count=0, device="cpu")
    assert report.wrong["gradient of x"] > 20, report


@pytest.mark.parametrize("name", ["attention_of_scores", "attention_of_logsumexp"])
@pytest.mark.parametrize("values", ["constant", "±50"])
@pytest.mark.parametrize("upstream", ["contiguous", "expanded"])
def test_rounding_of_equal_scores_is_no_mistake(name, values, upstream):
    """Exact gradients of q and k are 0, and weights are as exact as a score of 324 or more."""
    function = getattr(hostile_kernels, name)
    for rows, keys in ((1, 31), (31, 3), (15, 65)):
        sizes = (("B", 1), ("H", 1), ("D", 16), ("T", rows), ("S", keys))
        for seed in range(4):
            case = {"sizes": sizes, "values": values, "upstream": upstream, "seed": seed}
            outcome = outcome_of(function, "attention", **case)
            assert outcome.status == "right", outcome


def test_more_than_rounding_of_a_gradient_of_attention_is_a_mistake():
    report = check_kernel(hostile_kernels.AttentionOffset, "attention", count=0, device="cpu")
    assert report.wrong["gradient of q"] > 30, report


def test_a_result_in_the_dtype_of_ropes_tables_is_explained():
    def kernel(x, cos, sin):
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    report = check_kernel(kernel, "rope", count=0, device="cpu")
    assert report.findings["dtype"].detail == (
        "result is torch.float32, and x is torch.float16 (cos and sin are fp32 in every dtype)"
    )


def test_a_finding_has_the_digits_that_differ():
    def kernel(x):
        return x.softmax(-1) * (1 + 3e-6)

    report = check_kernel(kernel, "softmax", backward=False, count=0, device="cpu")
    assert "it is 1.000003, and exact is 1 " in report.findings["result"].detail, report


def case_of(name, **attributes):
    """Plain input of an operation, with other attributes."""
    plain = next(hostile.cases(OPERATIONS[name], ["fp32"], backward=True, count=0, seed=0))
    return replace(plain, **attributes)


def outcome_of(function, name, **attributes):
    """Outcome of a function on the plain input of an operation with other attributes."""
    return judge.judge(function, OPERATIONS[name], case_of(name, **attributes), CPU)


def test_a_result_that_overflows_is_not_said_to_read_outside():
    report = check_kernel(hostile_kernels.overflows, "add", seed=2, device="cpu")
    assert list(report.findings) == ["result is infinite"], report
    assert report.findings["result is infinite"].detail.endswith("elements are infinite"), report


def test_infinity_is_right_where_torchs_own_sum_overflows():
    """The mean of these losses is 30,000. On a CPU torch adds them in fp16."""
    sizes = (("N", 33), ("D", 129))
    case = {"sizes": sizes, "dtype": "fp16", "values": "−1e5", "seed": 2}
    operation = OPERATIONS["cross_entropy"]
    tensors = hostile.drawn(case_of("cross_entropy", **case), operation, CPU)
    assert operation.exact(*tensors).isinf()
    assert outcome_of(operation.exact, "cross_entropy", **case).status == "right"


def as_if(tensor, strides):
    """Return a tensor as a kernel reads it that is given the strides of another one."""
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def with_own_strides():
    """Operation and number of each argument whose strides a kernel can take for others."""
    found = []
    for name, operation in OPERATIONS.items():
        for number, argument in enumerate(operation.arguments):
            is_like_the_last = argument.shape == operation.arguments[number - 1].shape
            if argument.role != "values" or (number > 0 and is_like_the_last):
                found.append((name, number))
    return found


@pytest.mark.parametrize("name, number", with_own_strides())
def test_the_strides_of_each_argument_count(name, number):
    """A kernel takes those of the argument before, or those of a contiguous parameter."""
    operation = OPERATIONS[name]
    is_parameter = operation.arguments[number].role != "values"

    def kernel(*tensors):
        tensors = list(tensors)
        strides = tensors[number - 1].stride()
        if is_parameter:
            strides = torch.empty(tensors[number].shape, device="meta").stride()
        tensors[number] = as_if(tensors[number], strides)
        return operation.exact(*tensors)

    report = check_kernel(kernel, name, count=0, device="cpu")
    words = "every second element of weights" if is_parameter else "different strides"
    assert any(words in finding.smallest for finding in report.findings.values()), report


def causal(q, k, v, scale=None, causal=True):
    return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)


class CausalFunction(torch.autograd.Function):
    """Causal attention without a backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.mark_non_differentiable(result := causal(q, k, v))
        return result


class FunctionWithScale(torch.autograd.Function):
    """Attention, which is causal if it is asked for."""

    @staticmethod
    def forward(ctx, q, k, v, scale=None, causal=False):
        result = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)
        ctx.mark_non_differentiable(result)
        return result


class FunctionWithSetup(torch.autograd.Function):
    """The same, in the form with `setup_context`."""

    @staticmethod
    def forward(q, k, v, is_causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)


@pytest.mark.parametrize(
    "function, called",
    [
        (lambda q, k, v: causal(q, k, v), "(q, k, v)"),
        (lambda q, k, v, scale=None: causal(q, k, v, scale), "(q, k, v, scale=1/√D)"),
        (lambda q, k, v, *, scale=0.5: causal(q, k, v, scale), "(q, k, v, scale=1/√D)"),
        (lambda *tensors: causal(*tensors), "(q, k, v)"),
        (lambda q, k, v, causal_: causal(q, k, v, None, causal_), "(q, k, v, causal_=True)"),
        (
            lambda q, k, v, sm_scale, causal_: causal(q, k, v, sm_scale, causal_),
            "(q, k, v, sm_scale=1/√D, causal_=True)",
        ),
        (lambda q, k, v, *, is_causal: causal(q, k, v, None, is_causal), "is_causal=True)"),
        (lambda *tensors, **named: causal(*tensors, None, named["is_causal"]), "is_causal=True)"),
        (lambda *tensors, is_causal=False: causal(*tensors, None, is_causal), "is_causal=True)"),
        (causal, "(q, k, v, causal=True, scale=1/√D)"),
        (CausalFunction, "(q, k, v)"),
        (FunctionWithScale, "(q, k, v, 1/√D, True)"),
        (FunctionWithSetup, "(q, k, v, True)"),
    ],
)
def test_an_option_is_given_to_its_own_parameter(function, called):
    # A backward has no arguments that a caller gives.
    report = check_kernel(function, "causal_attention", backward=False, count=0, device="cpu")
    assert report.is_right and not report.refused, report
    assert report.called.endswith(called) and f"called with {report.called}" in str(report)


class NormFunction(torch.autograd.Function):
    """RMSNorm without a backward, whose eps comes after an option with a default."""

    @staticmethod
    def forward(ctx, x, weight, one_pass=False, eps=1e-6):
        ctx.mark_non_differentiable(result := F.rms_norm(x, weight.shape, weight, eps))
        return result


@pytest.mark.parametrize(
    "name, function, called",
    [
        (
            "rms_norm",
            lambda x, weight, eps=1e-6: F.rms_norm(x, weight.shape, weight, eps),
            "(x, weight, eps=1e-05)",
        ),
        ("rms_norm", NormFunction, "(x, weight, False, 1e-05)"),
        (
            "layer_norm",
            lambda x, w, b, *, epsilon: F.layer_norm(x, w.shape, w, b, epsilon),
            "(x, weight, bias, epsilon=1e-05)",
        ),
        ("softmax", lambda x, dim: x.softmax(dim), "(x, dim=-1)"),
        ("gelu", lambda x, approximate="none": F.gelu(x, approximate=approximate), "=tanh)"),
        (
            "attention",
            lambda q, k, v, causal, sm_scale: F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=sm_scale
            ),
            "(q, k, v, causal=False, sm_scale=1/√D)",
        ),
    ],
)
def test_a_constant_is_given_to_a_parameter_of_its_name(name, function, called):
    report = check_kernel(function, name, backward=False, count=0, device="cpu")
    assert report.is_right and not report.refused, report
    assert report.called.endswith(called)


def test_what_is_timed_is_the_kernel_itself():
    """Python that finds its arguments would take longer than the launch of a small kernel."""
    norm, queries = OPERATIONS["rms_norm"], torch.empty(1, 2, 8, 64)

    def plain(x, weight):
        return x

    def given(*tensors, **named):
        return named

    def with_eps(x, weight, eps=1e-6):
        return given(eps=eps)

    def scaled(q, k, v, causal, sm_scale):
        return given(causal=causal, sm_scale=sm_scale)

    x = torch.empty(2, 64)
    assert call_of(plain, norm).for_sizes([x]) is plain
    with_its_eps = call_of(with_eps, norm).for_sizes([x])
    assert with_its_eps.func is with_eps and with_its_eps(x, x) == {"eps": 1e-5}
    of_queries = call_of(scaled, OPERATIONS["causal_attention"]).for_sizes([queries])
    assert of_queries(queries, queries, queries) == {"causal": True, "sm_scale": 0.125}


def test_a_wrong_verdict_says_what_the_operation_is():
    """A kernel may be another form of the operation, with constants that it does not take."""
    report = check_kernel(lambda x: F.gelu(x), "gelu", count=0, device="cpu")
    assert not report.is_right and "expected: GeLU with the tanh approximation" in str(report)
    report = check_kernel(lambda x: F.gelu(x, approximate="tanh"), "gelu", count=0, device="cpu")
    assert report.is_right and "expected" not in str(report)


def test_a_parameter_that_nothing_gives_is_named():
    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, rows, eps):
            return F.rms_norm(x, weight.shape, weight, eps)

    report = check_kernel(Normed, "rms_norm", backward=False, count=0, device="cpu")
    assert not report.right and all("'rows'" in error for error in report.refusals), report


@pytest.fixture(autouse=True)
def away(tmp_path, monkeypatch):
    """Write the pages of runs into a folder of the test."""
    monkeypatch.chdir(tmp_path)


def be_child(command, pipe, output):
    """Be `python -m distlab.kernel_check.child SETTINGS DESCRIPTOR`."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    be_python([*command, str(pipe.fileno())])


class ForkedChild:
    """A child of the command that is a fork with torch imported, and not a new interpreter.

    It has the attributes of `subprocess.Popen` that the command uses.
    """

    def __init__(self, command, stdout, pass_fds, **options):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # A connection is a descriptor that can be sent to another process.
        sent = [Connection(os.dup(each)) for each in (*pass_fds, stdout.fileno())]
        module = command[command.index("-m") : -1]
        self.process = context.Process(target=be_child, args=(module, *sent))
        self.process.start()
        self.pid = self.process.pid
        # The end of the pipe tells that the child is gone.
        for connection in sent:
            connection.close()

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a child", timeout)
        return self.process.exitcode


@pytest.fixture
def forks(monkeypatch):
    """Fork the children of the command, each of which would import torch for three seconds."""
    replaced = SimpleNamespace(
        Popen=ForkedChild,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    monkeypatch.setattr(child_module, "subprocess", replaced)


def examined(function, capsys, *options):
    """Exit code, and the answer of `distlab kernel` as JSON."""
    name = f"tests.kernel_check.hostile_kernels:{function}"
    arguments = [name, "--as", "rms_norm", "--device", "cpu", "--count", "0", "--json", *options]
    code = main(["kernel", *arguments])
    return code, json.loads(capsys.readouterr().out)


def found_by(answer):
    """Return smallest input → kind and detail of each finding."""
    found = {}
    for finding in answer["findings"]:
        found[finding["smallest"]] = (finding["kind"], finding["detail"])
    return found


def test_a_kernel_that_hangs_or_ends_or_breaks_the_gpu_costs_its_input_alone(forks, capsys):
    """After each of the three another process goes on with the next input.

    An input that does not hang has ten seconds, because a machine may be busy with other work.
    """
    code, answer = examined("hangs_exits_or_breaks_the_gpu", capsys, "--case-seconds", "10")
    found = found_by(answer)
    kind, _ = found.pop("N=16 D=64, fp32")  # where it returned the right result
    assert kind == BREAKS_GPU
    assert found == {
        "N=3 D=64, fp32": ("does not end", "there is no result after 10 s"),
        "N=5 D=64, fp32": ("ends the process", "the process ended (exit code 7)"),
    }
    assert code == 1 and answer["right"] > 30 and answer["not_tried"] == 0
    assert all(finding["inputs"] == 1 for finding in answer["findings"])


def test_a_kernel_that_always_hangs_ends_when_the_time_is_over(forks, capsys):
    begin = time.monotonic()
    code, answer = examined("hangs", capsys, "--case-seconds", "1", "--seconds", "1")
    assert time.monotonic() - begin < child_module.START_S
    assert found_by(answer) == {"N=2 D=64, fp32": ("does not end", "there is no result after 1 s")}
    assert code == 1 and answer["right"] == 0 and answer["not_tried"] > 50


def test_a_compiled_kernel_has_time_to_compile_for_each_input(forks, capsys):
    """1.5 seconds, where an input of a kernel that compiles nothing may take 0.5."""
    code, answer = examined("slow_to_compile", capsys, "--case-seconds", "0.5")
    assert code == 0 and answer["right"] > 40 and not answer["findings"]


def test_a_kernel_that_crashes_costs_its_input_alone_and_one_that_prints_is_ended(forks, capsys):
    code, answer = examined("crashes_or_prints", capsys)
    assert code == 1 and answer["right"] > 30
    assert found_by(answer) == {
        "N=3 D=64, fp32": ("ends the process", "the process ended (SIGSEGV)"),
        "N=2 D=1000, fp32": ("prints", "it printed more than 20 MiB"),
    }


@pytest.mark.parametrize("where", ["plain", "smaller"])
def test_nothing_runs_on_a_broken_gpu(where, monkeypatch):
    """The input that broke it is named, also where it is one that makes another smaller."""
    is_broken = False

    def kernel(x, weight):
        nonlocal is_broken
        is_broken = is_broken or where == "plain" or x.numel() == 1
        result = hostile_kernels.right(x, weight)
        return result if where == "plain" else result + 1

    for module in (judge, report_module):
        monkeypatch.setattr(module, "works", lambda device: not is_broken)
    report = check_kernel(kernel, "rms_norm", count=0, device="cpu")
    smallest = report.findings[BREAKS_GPU].smallest
    assert is_broken and report.wrong[BREAKS_GPU] == 1 and report.left > 0
    assert f"{report.left} inputs were not tried" in str(report)
    assert "the time was over" not in str(report)
    assert smallest == ("N=2 D=64, fp32" if where == "plain" else "N=1 D=1, fp32")


def test_a_right_kernel_passes_the_command_and_has_a_page(capsys, tmp_path):
    code, answer = examined("right", capsys, "--time", "--name", "mine")
    assert code == 0 and answer["is_right"] and answer["wrong"] == 0 and answer["has_backward"]
    times = {(row["variant"], row["direction"]): row for row in answer["times"]}
    assert times["yours", "fwd"]["status"] == times["yours", "bwd"]["status"] == "ok", times
    assert {variant for variant, _ in times} == {"ours", "naive", "builtin", "yours"}
    page = tmp_path / "outputs" / "kernel" / "mine" / "report.html"
    assert answer["page"] == str(page.relative_to(tmp_path))
    assert "right: as rms_norm" in page.read_text() and "% of copy" in page.read_text()
    # `distlab show` and the list of runs know it
    assert main(["show", "kernel/mine"]) == 0 and "yours" in capsys.readouterr().out
    assert main(["runs"]) == 0 and "kernel/mine" in capsys.readouterr().out


def test_a_wrong_kernel_ends_with_its_page(forks, capsys):
    name = "tests.kernel_check.hostile_kernels:changes_its_input"
    assert main(["kernel", name, "--as", "rms_norm", "--device", "cpu", "--count", "0"]) == 1
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert any("changes an input" in line for line in lines) and last.startswith("report: outputs")
    page = Path(last.removeprefix("report: ")).read_text()
    assert "WRONG: as rms_norm" in page and "N=1 D=1, fp32" in page
    assert "% of copy" not in page  # on a CPU only where it is asked for


def test_a_page_that_cannot_be_written_does_not_hide_the_verdict(forks, capsys, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("launch.kernel.write_page", full)
    name = "tests.kernel_check.hostile_kernels:changes_its_input"
    words = ["kernel", name, "--as", "rms_norm", "--device", "cpu", "--count", "0"]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "changes an input" in printed.out and "No space left" in printed.err
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["page"] is None


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give your kernel as package.module:function"),
        (["--list", "--json"], "--list prints text"),
        (["no_colon", "--as", "rms_norm"], "give package.module:function"),
        (["my_kernels.py:f", "--as", "rms_norm"], "not its file: my_kernels:f"),
        (["a:b"], "--as '' is unknown"),
        (["a:b", "--as", "rms_nrom"], "did you mean rms_norm?"),
        (["no_such_module:b", "--as", "rms_norm"], "the import of no_such_module failed"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(arguments, said, forks, capsys, tmp_path):
    assert main(["kernel", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and not list(tmp_path.glob("outputs/kernel/*"))


def test_the_operations_are_listed(capsys):
    assert main(["kernel", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(operation.signature in text for operation in OPERATIONS.values())
