"""The tables of devices and clusters: names found and not found, figures that fit, and the device
at hand.
"""

from dataclasses import replace

import pytest
import torch

from distlab import hardware
from distlab.hardware import CLUSTERS, GB, cluster, lookup, peak_flops

NAMES = [
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe",
    "NVIDIA H200",
    "NVIDIA B200",
]


@pytest.mark.parametrize("name", NAMES)
def test_known_devices(name):
    spec = lookup(name)
    assert spec is not None
    assert lookup(name.removeprefix("NVIDIA ")) is spec  # older drivers leave the maker out
    assert spec.source
    hash(spec)
    figures_fit_each_other(spec)


def test_peaks_of_the_datasheets():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float16) == 312e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert lookup("NVIDIA H200").hbm_bandwidth == 4.8e12


@pytest.mark.parametrize(
    "name",
    ["cpu", "", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 NVL"],
)
def test_unknown_devices_have_no_peak(name):
    assert lookup(name) is None
    assert peak_flops(name, torch.bfloat16) is None


def test_unknown_dtypes_have_no_peak():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None  # Ampere has none
    assert peak_flops("NVIDIA H200", torch.int8) is None


def figures_fit_each_other(spec):
    assert spec.shared_memory_per_block < spec.shared_memory_per_sm < spec.l1_bytes
    # Tensor cores halve with each doubling of the width.
    assert spec.peak["tf32"] <= spec.peak["bf16"] / 2 * 1.001
    assert spec.peak["bf16"] == spec.peak["fp16"]
    assert spec.peak["fp32"] < spec.peak["tf32"]
    assert hardware.GB * 1000 < spec.hbm_bandwidth < hardware.GB * 10_000


def test_bandwidth_grows_towards_the_core():
    for name in NAMES:
        spec = lookup(name)
        assert (
            spec.l2_bandwidth is None
            or spec.hbm_bandwidth < spec.l2_bandwidth < spec.shared_bandwidth
        )
        assert spec.shared_bandwidth > 3 * spec.hbm_bandwidth
        assert spec.register_bandwidth > spec.shared_bandwidth
        assert 4 * spec.registers_per_sm == 256 * hardware.KIB
        assert 1.2e9 < spec.clock < 2.1e9  # from peak and SMs: a slip of a power of ten shows
    assert lookup("NVIDIA A100-SXM4-80GB").clock == pytest.approx(1.41e9, rel=2e-3)
    assert lookup("NVIDIA H100 80GB HBM3").shared_bandwidth == pytest.approx(33.4e12, rel=2e-2)


def test_clusters_by_their_names():
    spec = cluster("grand-teton:128")
    assert (spec.hosts, spec.gpus_per_host, spec.between) == (16, 8, 50 * GB)
    assert spec.gpu.hbm_bandwidth == 2.4e12 and spec.gpu.watts == 500
    shared = cluster("p4d:2x8")
    assert shared.between == 6.25 * GB  # four cards of 100 Gb/s for eight GPUs
    assert replace(shared, oversubscription=2.0).between == 3.125 * GB
    assert all(spec.source for spec in CLUSTERS.values())


@pytest.mark.parametrize(
    "text, says",
    [("dgx-z9", "choose one of"), ("dgx-h100:12", "nearest"), ("p4d:0", "HOSTSxGPUS")],
)
def test_refused_names(text, says):
    with pytest.raises(ValueError, match=says):
        cluster(text)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"oversubscription": 0.5}, "oversubscription"),
        ({"card_bytes_per_s": 400 * 8 * GB}, "not bits"),
    ],
)
def test_contradictory_links(wrong, says):
    with pytest.raises(ValueError, match=says):
        replace(CLUSTERS["dgx-h100"], **{"hosts": 2} | wrong)


@pytest.mark.gpu
def test_the_device_at_hand_is_what_the_table_says():
    spec = lookup(torch.cuda.get_device_name())
    if spec is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in the table")
    properties = torch.cuda.get_device_properties(0)
    assert properties.multi_processor_count == spec.sms
    assert properties.regs_per_multiprocessor == spec.registers_per_sm
    assert properties.max_threads_per_multi_processor == spec.max_warps_per_sm * 32
    assert properties.shared_memory_per_multiprocessor == spec.shared_memory_per_sm
    assert properties.shared_memory_per_block_optin == spec.shared_memory_per_block
    assert properties.L2_cache_size == spec.l2_bytes
    assert 0.9 * spec.hbm_bytes < properties.total_memory < 1.1 * spec.hbm_bytes
