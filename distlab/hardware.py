"""Limits of GPUs, from their makers' documents: the only source of peaks in this lab.

A device that is not listed has no peak here, and reports say n/a. A guessed peak once gave an MFU
of 152 %. Variants of one name differ (an "H100 PCIe" has 24 % fewer FLOP/s than an "H100 80GB
HBM3"), so names are matched exactly.

Units: bytes and KiB/MiB of two for memories on the chip, powers of ten for HBM, links and FLOP/s,
as in the documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

KIB, MIB, GB, TERA = 2**10, 2**20, 10**9, 10**12


@dataclass(frozen=True)
class GPUSpec:
    """One GPU model.

    Attributes:
        name: model and form factor.
        sms: number of streaming multiprocessors enabled in the product.
        registers_per_sm: number of 32-bit registers.
        max_warps_per_sm: largest number of resident warps of 32 threads.
        shared_memory_per_sm: largest number of bytes that an SM can give to shared memory.
        shared_memory_per_block: largest number of bytes that one block can ask for (the system
            takes 1 KiB per block).
        l1_bytes: bytes of L1 and shared memory together, per SM.
        l2_bytes: bytes of the L2 of the whole chip.
        hbm_bytes: bytes by the datasheet, in powers of ten. torch's `total_memory` is a few per
            cent more, and decides what fits.
        hbm_bandwidth: bytes per second.
        nvlink_bandwidth: bytes per second in one direction, all links (documents add both
            directions).
        pcie_bandwidth: bytes per second in one direction, ×16, before protocol overhead.
        peak: dense FLOP/s by dtype (`fp64 fp32 tf32 bf16 fp16`, `fp8` where present). fp32 is
            without tensor cores, all others with them. This is the limit of a matmul in that dtype.
        source: names of the documents.
        fp32_lanes_per_sm: number of fp32 multiply-adds per clock without tensor cores.
        l2_bytes_per_clock: bytes per clock that the whole L2 can read, if the maker states it.
        watts: power limit of the board, in watts.
        full_watts: power limit, in watts, of the same chip at its stated peak. None if that is
            `watts`.
    """

    name: str
    sms: int
    registers_per_sm: int
    max_warps_per_sm: int
    shared_memory_per_sm: int
    shared_memory_per_block: int
    l1_bytes: int
    l2_bytes: int
    hbm_bytes: int
    hbm_bandwidth: float
    nvlink_bandwidth: float
    pcie_bandwidth: float
    # A mapping has no hash, and caches (`simulate.estimate`) take specifications as keys.
    peak: Mapping[str, float] = field(hash=False)
    source: str
    fp32_lanes_per_sm: int = 128
    l2_bytes_per_clock: int | None = None
    watts: int | None = None
    full_watts: int | None = None

    @property
    def clock(self) -> float:
        """Hertz at which the stated peak is reached, from fp32 peak = SMs · lanes · 2 · clock."""
        return self.peak["fp32"] / (self.sms * self.fp32_lanes_per_sm * 2)

    @property
    def register_bandwidth(self) -> float:
        """Bytes per second of one 4-byte operand of each multiply-add, at the fp32 peak.

        A multiply-add reads three operands. `gpu_lessons --parts levels` measures one.
        """
        # One 4-byte register per lane and clock.
        return self.sms * self.fp32_lanes_per_sm * 4 * self.clock

    @property
    def shared_bandwidth(self) -> float:
        """Bytes per second of all shared memories: 32 banks of 4 bytes per SM and clock."""
        return self.sms * 128 * self.clock

    @property
    def l2_bandwidth(self) -> float | None:
        """Bytes per second that the whole L2 can read. None if no document states it."""
        if self.l2_bytes_per_clock is None:
            return None
        return self.l2_bytes_per_clock * self.clock


def _tera(**peaks: float) -> Mapping[str, float]:
    """Return peaks by dtype, given in TFLOP/s, in FLOP/s."""
    # Read-only, because `replace` lets variants share the mapping.
    return MappingProxyType({dtype: value * TERA for dtype, value in peaks.items()})


A100_SXM_40GB = GPUSpec(
    name="A100 SXM 40GB",
    sms=108,
    registers_per_sm=65536,
    max_warps_per_sm=64,
    shared_memory_per_sm=164 * KIB,
    shared_memory_per_block=163 * KIB,
    l1_bytes=192 * KIB,
    l2_bytes=40 * MIB,
    hbm_bytes=40 * GB,
    hbm_bandwidth=1555 * GB,
    nvlink_bandwidth=300 * GB,
    pcie_bandwidth=32 * GB,
    peak=_tera(fp64=19.5, fp32=19.5, tf32=156, bf16=312, fp16=312),
    source=(
        "NVIDIA A100 Tensor Core GPU datasheet; NVIDIA A100 Tensor Core GPU Architecture white "
        "paper; CUDA C++ Programming Guide, compute capability 8.0"
    ),
    fp32_lanes_per_sm=64,
    l2_bytes_per_clock=5120,  # architecture white paper, "A100 L2 cache"
    watts=400,
)

A100_SXM_80GB = replace(
    A100_SXM_40GB, name="A100 SXM 80GB", hbm_bytes=80 * GB, hbm_bandwidth=2039 * GB
)

H100_SXM = GPUSpec(
    name="H100 SXM",
    sms=132,
    registers_per_sm=65536,
    max_warps_per_sm=64,
    shared_memory_per_sm=228 * KIB,
    shared_memory_per_block=227 * KIB,
    l1_bytes=256 * KIB,
    l2_bytes=50 * MIB,
    hbm_bytes=80 * GB,
    hbm_bandwidth=3350 * GB,
    nvlink_bandwidth=450 * GB,
    pcie_bandwidth=64 * GB,
    # The datasheet's figures with sparsity, halved; digits after the point from the white paper.
    peak=_tera(fp64=66.9, fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9),
    source=(
        "NVIDIA H100 Tensor Core GPU datasheet; NVIDIA H100 Tensor Core GPU Architecture white "
        "paper; CUDA C++ Programming Guide, compute capability 9.0"
    ),
    watts=700,
)

H100_SXM_96GB = replace(
    H100_SXM,
    name="H100 SXM 96GB HBM2e",
    hbm_bytes=96 * GB,
    hbm_bandwidth=2400 * GB,
    watts=500,
    full_watts=700,
    source="Grattafiori et al. 2024, The Llama 3 Herd of Models, and torchtitan's performance "
    "page: the Grand Teton platform's H100s have 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W; "
    "the chip is the H100's",
)

H100_PCIE = replace(
    H100_SXM,
    name="H100 PCIe",
    sms=114,
    hbm_bandwidth=2000 * GB,
    nvlink_bandwidth=300 * GB,  # by a bridge to one neighbour
    peak=_tera(fp64=51.2, fp32=51.2, tf32=378, bf16=756, fp16=756, fp8=1513),
    watts=350,
)

H200_SXM = replace(
    H100_SXM,
    name="H200 SXM",
    hbm_bytes=141 * GB,
    hbm_bandwidth=4800 * GB,
    l2_bytes=60 * MIB,  # reported by its driver; the H100 has 50
    source="NVIDIA H200 Tensor Core GPU datasheet; the chip is the H100's, see its white paper",
)

B200 = replace(
    H100_SXM,
    name="B200",
    sms=148,
    l2_bytes=126 * MIB,
    hbm_bytes=180 * GB,
    hbm_bandwidth=8000 * GB,
    nvlink_bandwidth=900 * GB,
    # An eighth of an HGX B200; where the datasheet says "with sparsity", half of that.
    peak=_tera(fp64=37, fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500),
    source=(
        "NVIDIA HGX B200 and DGX B200 datasheets (1,440 GB for 8 GPUs are 180 GB each; the chip's "
        "memory is 192 GB); NVIDIA Blackwell Tuning Guide, compute "
        "capability 10.0 (an SM's registers, warps and memories are the H100's); SM count and L2 "
        "from published device queries, not checked on a device here"
    ),
    watts=1000,
)

# Names of `torch.cuda.get_device_name()`, without the "NVIDIA " in front that recent drivers add.
_BY_DEVICE_NAME = {
    "A100-SXM4-40GB": A100_SXM_40GB,
    "A100-SXM4-80GB": A100_SXM_80GB,
    "H100 80GB HBM3": H100_SXM,
    "H100 PCIe": H100_PCIE,
    "H200": H200_SXM,
    "B200": B200,
}

# Short names, for planning without the device.
BY_ALIAS = {
    "a100-40": A100_SXM_40GB,
    "a100": A100_SXM_80GB,
    "h100": H100_SXM,
    "h100-pcie": H100_PCIE,
    "h100-96": H100_SXM_96GB,
    "h200": H200_SXM,
    "b200": B200,
}

# Bytes per second between nodes, in one direction per adapter (one per GPU in the makers'
# reference designs). Sources: NVIDIA ConnectX-6, ConnectX-7 and ConnectX-8 datasheets (200, 400 and
# 800 Gb/s), Ethernet by its name.
NETWORK_LINKS = {
    "ib-hdr": 25 * GB,
    "ib-ndr": 50 * GB,
    "ib-xdr": 100 * GB,
    "eth-100g": 12.5 * GB,
    "eth-25g": 3.125 * GB,
}

# Seconds that one more hop of a collective takes with NCCL's simple protocol on rings: `hwLat` in
# its src/graph/tuning.cc (2.18 and later).
NVLINK_HOP_S = 3.4e-6
NETWORK_HOP_S = 14e-6  # through a network card


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts of several GPUs, and the links inside and between them.

    Args:
        name: name of the platform.
        gpu: model of the GPUs, the same in every host.
        hosts: number of hosts.
        gpus_per_host: number of GPUs in each host.
        card_bytes_per_s: bytes per second of one network card in one direction.
        cards_per_host: number of network cards. It equals the number of GPUs if each has its own
            card, and is smaller if GPUs share cards.
        oversubscription: ratio of what the cards can send together to what the switches above them
            carry. 1 is a full fat tree.
        inside_bytes_per_s: bytes per second of one GPU to others of its host, in one direction.
            None for the GPU's NVLink.
        inside_hop_s: seconds of latency of one more hop of a collective, inside a host.
        between_hop_s: seconds of latency of one more hop of a collective, between hosts.
        source: names of the documents.

    Raises:
        ValueError: a size below one, a bandwidth that is not positive, or links that contradict
            each other.
    """

    name: str
    gpu: GPUSpec
    hosts: int = 1
    gpus_per_host: int = 8
    card_bytes_per_s: float = 50 * GB
    cards_per_host: int = 8
    oversubscription: float = 1.0
    inside_bytes_per_s: float | None = None
    inside_hop_s: float = NVLINK_HOP_S
    between_hop_s: float = NETWORK_HOP_S
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("hosts", "gpus_per_host", "cards_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a cluster has at least one")
        has_bandwidths = self.card_bytes_per_s > 0 and self.inside > 0
        has_latencies = self.inside_hop_s >= 0 and self.between_hop_s >= 0
        if not (has_bandwidths and has_latencies):
            raise ValueError(
                f"card_bytes_per_s={self.card_bytes_per_s}, inside_bytes_per_s={self.inside}, hops "
                f"of {self.inside_hop_s} and {self.between_hop_s} s: bandwidths must be positive, "
                "latencies not negative"
            )
        if self.oversubscription < 1:
            raise ValueError(
                f"oversubscription={self.oversubscription}: 1 for switches that carry all that the "
                "cards send, more where they carry less"
            )
        # A network faster than NVLink is a mistake of units, such as bits for bytes.
        if self.hosts > 1 and self.between > self.inside:
            raise ValueError(
                f"a GPU of {self.name} sends {self.between / GB:g} GB/s to other hosts and "
                f"{self.inside / GB:g} GB/s inside its own: give cards_per_host and "
                "card_bytes_per_s in bytes (not bits) per second"
            )

    @property
    def gpus(self) -> int:
        """Number of GPUs of all hosts."""
        return self.hosts * self.gpus_per_host

    @property
    def inside(self) -> float:
        """Bytes per second that a GPU sends to others of its host."""
        if self.inside_bytes_per_s is None:
            return self.gpu.nvlink_bandwidth
        return self.inside_bytes_per_s

    @property
    def between(self) -> float:
        """Bytes per second that a GPU sends to other hosts while all GPUs of its host do."""
        host = self.card_bytes_per_s * self.cards_per_host
        # GPUs of a host share its cards evenly. An oversubscribed switch passes on a part of that.
        return host / self.gpus_per_host / self.oversubscription


CLUSTERS = {
    spec.name: spec
    for spec in (
        ClusterSpec(
            "dgx-a100",
            A100_SXM_80GB,
            card_bytes_per_s=25 * GB,
            source=(
                "NVIDIA DGX A100 datasheet: 8 × A100, NVSwitch, 8 × ConnectX-6 of 200 Gb/s for "
                "compute"
            ),
        ),
        ClusterSpec(
            "p4d",
            A100_SXM_40GB,
            card_bytes_per_s=12.5 * GB,
            cards_per_host=4,
            source=(
                "Amazon EC2 P4d page: 8 × A100 40GB, NVSwitch, 4 × 100 Gb/s of EFA, each for two "
                "GPUs"
            ),
        ),
        ClusterSpec(
            "dgx-h100",
            H100_SXM,
            source="NVIDIA DGX H100 datasheet: 8 × H100, NVSwitch, 8 × ConnectX-7 of 400 Gb/s",
        ),
        ClusterSpec(
            "dgx-h200",
            H200_SXM,
            source="NVIDIA DGX H200 datasheet: 8 × H200, NVSwitch, 8 × ConnectX-7 of 400 Gb/s",
        ),
        ClusterSpec(
            "dgx-b200",
            B200,
            source="NVIDIA DGX B200 datasheet: 8 × B200, NVSwitch, 8 × ConnectX-7 of 400 Gb/s",
        ),
        ClusterSpec(
            "grand-teton",
            H100_SXM_96GB,
            source=(
                "torchtitan's performance page and the Llama 3 paper: 8 × H100 (see there), 400 "
                "Gb/s RDMA per GPU"
            ),
        ),
    )
}
# An HGX is the same board of 8 GPUs in another maker's host.
for _name in [name for name in CLUSTERS if name.startswith("dgx")]:
    CLUSTERS[_name.replace("dgx", "hgx")] = CLUSTERS[_name]


def cluster(text: str) -> ClusterSpec:
    """Parse a cluster: `dgx-h100:128x8` (hosts × GPUs per host) or `dgx-h100:1024` (GPUs).

    Raises:
        ValueError: an unknown name, or GPUs that do not fill whole hosts; the message says what is
            allowed.
    """
    name, _, size = text.partition(":")
    if name not in CLUSTERS:
        raise ValueError(f"cluster {name!r} is unknown; choose one of {', '.join(CLUSTERS)}")
    spec = CLUSTERS[name]
    if not size:
        return spec
    numbers = size.split("x")
    if len(numbers) > 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(
            f"cluster {text!r}: give NAME:HOSTSxGPUS or NAME:GPUS, such as {name}:16x8 or "
            f"{name}:128"
        )
    if len(numbers) == 2:
        gpus_per_host = int(numbers[1])
        # As many cards per GPU as in a whole host, rounded up.
        cards_per_host = -(-spec.cards_per_host * gpus_per_host // spec.gpus_per_host)
        return replace(
            spec,
            hosts=int(numbers[0]),
            gpus_per_host=gpus_per_host,
            cards_per_host=cards_per_host,
        )
    gpus = int(size)
    each = spec.gpus_per_host
    # A part of one host may be used, and several hosts only as a whole.
    if gpus > each and gpus % each:
        near = max(1, round(gpus / each)) * each
        raise ValueError(
            f"{gpus} GPUs do not fill hosts of {each}; nearest: {name}:{near}, or {name}:HOSTSxGPUS"
        )
    # Fewer GPUs than a host has are one smaller host, whose cards the call below scales.
    hosts = -(-gpus // each)  # rounded up
    return cluster(f"{name}:{hosts}x{min(gpus, each)}")


_DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def lookup(device_name: str) -> GPUSpec | None:
    """Return the specification of a device by its name in torch, or None if it is unknown.

    A name is for example "NVIDIA H100 80GB HBM3". Only whole names match, because a slice of a GPU
    ("… MIG 1g.10gb") is not the GPU.
    """
    return _BY_DEVICE_NAME.get(device_name.removeprefix("NVIDIA "))


def by_alias(name: str) -> GPUSpec:
    """Return the specification of a GPU by a short name such as `h100`.

    Raises:
        ValueError: an unknown name. The message lists the known names.
    """
    if name not in BY_ALIAS:
        raise ValueError(f"device {name!r} is unknown; choose one of {', '.join(BY_ALIAS)}")
    return BY_ALIAS[name]


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Return the dense FLOP/s of a device in a dtype. None if the device or its peak is unknown.

    Args:
        device_name: name from `torch.cuda.get_device_name()`.
        dtype: torch dtype, or one of `fp64 fp32 tf32 bf16 fp16 fp8`. fp32 means without tensor
            cores. Where `torch.backends.cuda.matmul.allow_tf32` is set, ask for `tf32`.
    """
    spec = lookup(device_name)
    if spec is None:
        return None
    # "" is no dtype's name, so integers and others have no peak.
    name = _DTYPE_NAMES.get(dtype, "") if isinstance(dtype, torch.dtype) else dtype
    return spec.peak.get(name)


def peak_of(device: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of this device in `fp32`, `bf16` or `fp16`. None if it is unknown.

    fp32 counts TF32 if that is allowed.
    """
    if device.type != "cuda":
        return None
    # torch multiplies fp32 matrices in TF32 where that is allowed, so the higher peak counts.
    tf32 = dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32
    return peak_flops(torch.cuda.get_device_name(device), "tf32" if tf32 else dtype)
