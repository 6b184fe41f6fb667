"""Roofline, occupancy, waves, bank conflicts, traffic and the fusion advisor, against figures
worked out by hand.
"""

from dataclasses import replace

import pytest

from distlab.hardware import B200, H100_SXM
from distlab.theory.fusion import (
    MATMUL,
    OPAQUE,
    ROWS,
    Graph,
    Operator,
    advise,
    chip_bytes,
    transformer_block,
)
from distlab.theory.gpu import (
    Roofline,
    l2_hit_share,
    occupancy,
    roofline,
    tile_order,
    wave_quantisation,
)
from distlab.theory.warp_access import (
    bank_conflicts,
    swizzle,
    warp_divergence,
)
from kernels.cost import Cost

H100 = roofline(H100_SXM)


def test_roofline_seconds_take_the_slower_of_both():
    roof = Roofline(peak=100.0, bandwidth=10.0)
    assert roof.seconds(Cost(1000, 1)) == 10 and roof.seconds(Cost(1, 1000)) == 100
    assert Roofline(7e14, 3.0e12).ridge == pytest.approx(7e14 / 3e12)


@pytest.mark.parametrize(
    "threads, registers, shared, blocks, limiter",
    [
        # 65,536 / 32 = 2,048 threads: exactly all places, and all registers
        (1024, 32, 0, 2, "registers"),
        (32, 16, 0, 32, "blocks"),
        (256, 16, 0, 8, "warps"),
        # four would fit were it not for the system's KiB per block
        (128, 32, 57 * 1024, 3, "shared memory"),
        (128, 255, 0, 2, "registers"),  # 255 rounds to 256: 8 warps
        (96, 40, 0, 16, "registers"),  # 1,280 registers per warp: 51 → 48 warps of 3 each
    ],
)
def test_occupancy_limiters(threads, registers, shared, blocks, limiter):
    found = occupancy(H100_SXM, threads, registers, shared)
    assert (found.blocks, found.limiter) == (blocks, limiter)


def test_wave_quantisation():
    waves = wave_quantisation(160, B200.sms)
    assert (waves.waves, waves.last) == (2, 12)
    # 54 %: 160 blocks on 148 SMs take as long as 296
    assert waves.efficiency == pytest.approx(160 / 296)
    assert wave_quantisation(132, 132).efficiency == 1
    assert wave_quantisation(133, 132, 2).waves == 1


def test_bank_conflicts_and_the_swizzle():
    rows = range(32)  # of a tile of 32 × 32 words, of which a warp reads the first column
    assert bank_conflicts([32 * row for row in rows]) == 32
    assert bank_conflicts([32 * row + swizzle(row, 0) for row in rows]) == 1
    assert bank_conflicts([33 * row for row in rows]) == 1  # padded
    assert bank_conflicts([0] * 32) == 1  # a broadcast
    assert bank_conflicts([2 * lane for lane in range(32)]) == 2


def test_warp_divergence():
    assert warp_divergence([0] * 32, [10.0]).efficiency == 1
    half = warp_divergence([lane % 2 for lane in range(32)], [10.0, 10.0])
    assert (half.cycles, half.efficiency) == (20, 0.5)
    lonely = warp_divergence([1] + [0] * 31, [0.0, 100.0])
    assert lonely.efficiency == pytest.approx(1 / 32)


def test_traffic_of_a_pointwise_chain():
    operators = tuple(Operator(f"f{i}", (f"x{i}",), (f"x{i + 1}",), 1000) for i in range(4))
    graph = Graph(operators, {f"x{i}": 2000 for i in range(5)})
    assert graph.unfused().bytes == 4 * 2 * 2000  # each step reads and writes
    assert graph.fused().bytes == 2 * 2000
    assert graph.fused().flops == graph.unfused().flops == 4000
    assert graph.speed_up(H100, operators) == pytest.approx(4)
    assert graph.unfused().bytes > graph.fused(graph.operators[:2]).bytes


def test_traffic_writes_what_is_used_elsewhere():
    ops = (
        Operator("f", ("x",), ("y",)),
        Operator("g", ("y",), ("z",)),
        Operator("h", ("y", "z"), ("w",)),
    )
    graph = Graph(ops, {name: 100 for name in "xyzw"})
    assert graph.fused(ops[:2]).bytes == 300  # x, and y, which h reads, and z
    assert graph.fused().bytes == 200


F, G = Operator("f", ("x",), ("y",)), Operator("g", ("y",), ("z",))
CHIP = chip_bytes(H100_SXM)
# what differs from two pointwise operators in a row, what the second is advised to do, and why
ADVICE = [
    ({}, {"reads": ("x",)}, "split", "reads nothing"),
    # 1.01 ms one by one and fused
    ({"flops": 1e12, "pattern": MATMUL}, {}, "leave", "as an epilogue saves 1.00"),
    ({"flops": 1e6, "pattern": MATMUL}, {}, "fuse", ""),
    ({}, {"flops": 1e12, "pattern": MATMUL}, "split", "compute-bound"),
    ({"flops": 1e12, "pattern": MATMUL}, {"pattern": ROWS}, "split", "pattern"),
    ({}, {"pattern": OPAQUE}, "split", "library"),
    ({}, {"pattern": ROWS, "row_bytes": CHIP + 4}, "split", "exceed 0.6"),
    ({}, {"pattern": ROWS, "row_bytes": CHIP}, "fuse", ""),
]


@pytest.mark.parametrize("first, second, action, reason", ADVICE)
def test_the_advisor_gives_its_reasons(first, second, action, reason):
    graph = Graph((replace(F, **first), replace(G, **second)), dict.fromkeys("xyz", 10**6))
    decision = advise(graph, H100_SXM).decisions[1]
    assert decision.action == action and reason in decision.reason


def test_the_advisor_minds_who_reads_it():
    used = Graph((F, G, Operator("h", ("y", "z"), ("w",))), dict.fromkeys("xyzw", 10**6))
    assert "used elsewhere" in advise(used, H100_SXM).decisions[1].reason


def test_the_advisor_proposes_the_kernels_of_this_labs_block():
    """Residual addition and norm, which save more together than the addition does as an epilogue,
    also of small matmuls whose epilogue would pay; the epilogues of large ones save less than the
    rule asks for.
    """
    for sizes in ((8, 2048, 4096, 11008, 32), (8, 1024, 1024, 4096, 16)):
        plan = advise(transformer_block(*sizes, autocast=True), H100_SXM)
        groups = []
        for group in plan.groups:
            if len(group) > 1:
                groups.append(tuple(operator.name for operator in group))
        assert groups == [("norm1", "cast1"), ("add1", "norm2", "cast2"), ("silu", "multiply")]
        left = {d.operator: d for d in plan.decisions if d.action == "leave"}
        assert all("less than 1.5" in left[name].reason for name in ("add2", "rope"))
        assert "with norm2, which follows" in left["add1"].reason


def test_square_waves_share_most():
    """Of 16 tiles at once, 4 × 4 fetch 8 strips for 32 loads, and 1 × 16 fetch 17."""
    assert l2_hit_share(tile_order(16, 16, 4), 16) == 1 - 8 / 32
    assert l2_hit_share(tile_order(16, 16, 1), 16) == 1 - 17 / 32
    assert l2_hit_share(tile_order(16, 16, 4), 1) == 0


def test_hits_of_a_record_are_computed_again():
    """8192³ in tiles of 128 × 256 on 132 multiprocessors: `records/gpu_lessons/h200-all.json`."""
    hits = [100 * l2_hit_share(tile_order(64, 32, group), 132) for group in (1, 4, 16)]
    assert hits == [85.595703125, 84.8388671875, 89.16015625]
