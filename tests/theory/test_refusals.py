"""What no closed form has an answer to is refused, and the message has the value or the choices."""

import pytest

from distlab.hardware import A100_SXM_80GB, H100_SXM
from distlab.model import preset
from distlab.parallel import STRATEGIES
from distlab.theory import flops, gpu, volume
from distlab.theory.collective_time import Link, collective_seconds, fit_collective
from distlab.theory.memory.activations import PRECISIONS
from distlab.theory.memory.peak import step_memory
from distlab.theory.model_shape import ModelShape
from distlab.theory.operators import Workload
from distlab.theory.reliability import Failures
from distlab.theory.rounding import FloatFormat
from distlab.theory.step_time import ComputeTime, Messages, Network, pipeline, step_time

TINY = ModelShape.of(preset("tiny"))
LOCAL = {"context": 8, "strategy": STRATEGIES["local"]}
STEP = (ComputeTime(1.0, 2.0, 1.0), Messages(8.0, 8.0, 1, 1, 1), Network(1, 1), 2)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: Link(0.0), "bytes_per_s=0"),
        (lambda: collective_seconds("ring all-reduce", 1, 0, Link(1.0)), "ranks=0"),
        (lambda: fit_collective([1, 1], [1.0, 2.0]), "two or more different sizes"),
        (lambda: volume.bucketed([1], [4], 0), "bucket_size_mb=0"),
        (lambda: volume.each_gradient([1, 2], [4]), "2 numels, 1 itemsizes"),
        (lambda: step_memory(TINY, batch=0, **LOCAL), "batch=0"),
        (lambda: step_memory(TINY, batch=1, **LOCAL, precision="int4"), "bf16-autocast"),
        (lambda: ModelShape(2560, 64, 1, 11, 10), "nearest that does is 10"),
        (lambda: ModelShape(64, 33, 1, 4, 64, tensor=2), "d_ff=33"),
        (
            lambda: Workload(TINY, 2, 512, PRECISIONS["bf16"], keep="some"),
            "gate-up, selective, none",
        ),
        (lambda: step_time(STRATEGIES["torch-zero"], *STEP), "'torch-zero' has no closed form"),
        (lambda: Network(0, 1), "inside_bytes_per_s=0"),
        (lambda: pipeline([0.0], [1], 1, compute_rate=0, communication_rate=1), r"rates \(0, 1\)"),
        (lambda: FloatFormat("fp64", 11, 52), "2 to 8 bits"),
        (lambda: gpu.roofline(A100_SXM_80GB, "fp8"), "no peak for 'fp8'.*bf16"),
        (lambda: gpu.occupancy(H100_SXM, 128, 300), "registers=300"),
        (lambda: gpu.wave_quantisation(0, 132), "blocks=0"),
        (lambda: flops.mfu(1.0, 0.0, 1.0), "must be positive"),
        (lambda: Failures(0.0, 1.0, 1.0), "must be positive"),
    ],
)
def test_what_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
