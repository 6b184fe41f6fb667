"""How much memory could be taken, as Linux and a control group say."""

import pytest

from distlab.measure.memory import free_bytes

MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """A file system of 800 MiB available memory; `group` adds what a control group says."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {800 * 1024} kB\n")

    def group(folder: str, **files: str):
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "sys/fs/cgroup" / folder / name.replace("__", ".")).write_text(text)
        return tmp_path

    return group


def test_without_a_control_group_it_is_what_linux_calls_available(machine):
    assert free_bytes("cpu", machine("")) == 800 * MIB


def test_a_control_group_counts_where_it_allows_less(machine):
    root = machine(
        "", memory__max=f"{500 * MIB}\n", memory__current=f"{300 * MIB}\n", memory__stat=f"anon 1\nfile {50 * MIB}\n"
    )
    assert free_bytes("cpu", root) == 250 * MIB  # the page cache can be taken back


def test_a_control_group_without_a_limit_does_not_count(machine):
    root = machine("", memory__max="max\n", memory__current="5\n", memory__stat="file 0\n")
    assert free_bytes("cpu", root) == 800 * MIB


def test_the_older_form_of_control_groups(machine):
    root = machine(
        "memory", memory__limit_in_bytes=f"{100 * MIB}", memory__usage_in_bytes=f"{40 * MIB}",
        memory__stat=f"cache 0\ntotal_cache {10 * MIB}\n",
    )  # fmt: skip
    assert free_bytes("cpu", root) == 70 * MIB


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
