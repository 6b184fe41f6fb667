"""How much memory could be taken, as Linux and a control group say."""

import pytest

from distlab.measure.memory import free_bytes

MIB = 2**20


# the folder of a control group, its files, MiB that are free on a machine with 800 available
GROUPS = {
    "none": ("", {}, 800),
    "less, and the page cache can be taken back": (
        "",
        {
            "memory.max": 500 * MIB,
            "memory.current": 300 * MIB,
            "memory.stat": f"anon 1\nfile {50 * MIB}",
        },
        250,
    ),
    "without a limit": (
        "",
        {"memory.max": "max", "memory.current": 5, "memory.stat": "file 0"},
        800,
    ),
    "of the older form": (
        "memory",
        {
            "memory.limit_in_bytes": 100 * MIB,
            "memory.usage_in_bytes": 40 * MIB,
            "memory.stat": f"cache 0\ntotal_cache {10 * MIB}",
        },
        70,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_control_group_counts_where_it_allows_less(tmp_path, name):
    folder, files, mib = GROUPS[name]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {800 * 1024} kB\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    for file, text in files.items():
        (group / file).write_text(f"{text}\n")
    assert free_bytes("cpu", tmp_path) == mib * MIB


def test_nobody_says_anything(tmp_path):
    assert free_bytes("cpu", tmp_path) is None


@pytest.mark.gpu
def test_on_a_gpu_what_the_allocator_keeps_in_reserve_is_free():
    import torch

    before = free_bytes("cuda")
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    taken = before - free_bytes("cuda")
    del held
    assert taken >= 64 * MIB and abs(free_bytes("cuda") - before) <= 4 * MIB
