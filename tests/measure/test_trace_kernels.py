"""Kernels by time and kind, and FLOPs by kind: on written traces, and on a step that really ran."""

import pytest
import torch

from distlab.measure.flops import FlopsByCategory
from distlab.measure.trace.capture import Phases, profile_steps
from distlab.measure.trace.kernels import CATEGORIES, category, readable, summarise
from distlab.measure.trace.reader import Event, load_trace
from distlab.model import TransformerLM, cross_entropy, preset
from distlab.theory.flops import step_flops

# As they stand in traces of an H100 and of a CPU.
NAMES = {
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_nn_align8>": (
        "matrix products"
    ),
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "matrix products",
    "void gemv2T_kernel_val<int, int, float>": "matrix products",
    "MmBackward0": "matrix products",
    "aten::linear": "matrix products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, cutlass::bfloat16_t>": (
        "attention"
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>": (
        "softmax"
    ),
    "void cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>": "loss",
    "nll_loss_forward_reduce_cuda_kernel_2d": "loss",
    "void at::native::vectorized_layer_norm_kernel<float, float, true>(int, float)": (
        "normalisation"
    ),
    "FusedRmsNormBackward0": "normalisation",
    "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>": (
        "optimizer"
    ),
    "vectorized_elementwise_kernel<4, BinaryFunctor<float, binary_internal::MulFunctor<float>>>": (
        "element-wise"
    ),
    "triton_poi_fused_mul_silu_0": "element-wise",
    "triton_red_fused__fused_rms_norm_add_1": "normalisation",
    "aten::add": "element-wise",
    "unrolled_elementwise_kernel<direct_copy_kernel_cuda(TensorIteratorBase&)>": "casts and copies",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
    "EmbeddingBackward0": "other",
    "aten::comm": "other",  # no `mm` of its own
}


@pytest.mark.parametrize("name", NAMES)
def test_kinds_of_work_by_name(name):
    assert category(name) == NAMES[name] and NAMES[name] in CATEGORIES


def test_a_kernel_that_says_little_is_told_by_its_operator():
    assert category("forward_kernel") == "other"
    assert category("forward_kernel", "distlab_kernels::rms_norm_forward") == "normalisation"
    assert category("dkdv_kernel", "distlab_kernels::flash_attention_backward") == "attention"
    assert (
        category("reduce_kernel<512, 1>", "distlab_kernels::rms_norm_backward") == "normalisation"
    )
    assert category("ampere_sgemm_128x64_nn", "some::operator") == "matrix products"


def test_names_for_people():
    assert readable("## Call CompiledFxGraph fnci3pvdez ##") == "compiled graph"
    assert readable("autograd::engine::evaluate_function: MmBackward0") == "MmBackward0"


def test_kernels_belong_to_the_phase_that_launched_them():
    """A GPU runs behind the host: what forward launched counts there, though backward has begun on
    the host.
    """
    events = [
        Event("distlab:step", "range", "thread 1", 0, 100),
        Event("distlab:forward", "range", "thread 1", 0, 10),
        Event("distlab:backward", "range", "thread 1", 10, 20),
        Event("distlab:optimizer", "range", "thread 1", 20, 25),
        Event("nvjet_a", "compute", "stream 7", 5, 30, 4, "aten::mm"),
        Event("nvjet_a", "compute", "stream 7", 30, 40, 9, "aten::mm"),
        Event(
            "forward_kernel",
            "compute",
            "stream 7",
            40,
            45,
            15,
            "distlab_kernels::rms_norm_backward",
        ),
        Event("nccl", "communication", "stream 9", 40, 60, 16),
        Event("adam", "compute", "stream 7", 60, 70, 21),
        Event("late", "compute", "stream 7", 70, 80, 26),
        Event("before", "compute", "stream 7", -9, -5, -10),
    ]
    profile = summarise(events)
    assert {(k.name, k.phase, k.category, k.ms) for k in profile.kernels} == {
        ("nvjet_a", "forward", "matrix products", 35),
        ("forward_kernel", "backward", "normalisation", 5),
        ("nccl", "backward", "communication", 20),
        ("adam", "optimizer", "optimizer", 10),
        ("late", "outside", "other", 10),
    }
    assert [(k.name, k.count, k.ms) for k in profile.top("forward", 3)] == [("nvjet_a", 2, 35)]
    assert profile.kernel_ms == 80 and profile.busy_ms == 75 and profile.step_ms == 100
    with pytest.raises(ValueError, match="distlab:step"):
        summarise(events[1:])


def test_a_step_in_figures(tmp_path):
    """Products are counted as the closed form does, exactly.

    A trace of the step accounts for most of its time.
    """
    config = preset("tiny", attention="naive", context_length=32, num_layers=2)
    model, tokens = TransformerLM(config), torch.arange(64).reshape(2, 32)
    optimizer, phases = torch.optim.AdamW(model.parameters(), fused=True), Phases()

    def step():
        with phases.step():
            loss = cross_entropy(model(tokens), tokens)
            phases.mark("forward")
            loss.backward()
            phases.mark("backward")
            optimizer.step()
            phases.mark("optimizer")
            optimizer.zero_grad()

    with FlopsByCategory() as counted:
        step()
    sizes = {"d_model": 128, "d_ff": 512, "num_layers": 2, "vocab_size": config.vocab_size}
    assert counted.flops["matrix products"] == step_flops(batch=2, context=32, **sizes)
    profile_steps(step, steps=2, path=tmp_path / "t.json", rank=0, world_size=1, device="cpu")
    profile = summarise(load_trace(tmp_path / "t.json"))
    assert profile.steps == 2 and 0.5 * profile.step_ms < profile.busy_ms <= 1.01 * profile.step_ms
    assert {kernel.phase for kernel in profile.kernels} <= {
        "forward",
        "backward",
        "optimizer",
        "outside",
    }
    products = [k for k in profile.top("backward", 5) if k.category == "matrix products"]
    assert products and products[0].name == "MmBackward0" and products[0].count == 5 * 2 + 1
