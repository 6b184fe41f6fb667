"""The arithmetic of `distlab run plan WORD`: worked figures, as users see them."""

import json

import pytest

from experiments.plan import arithmetic
from launch.__main__ import main


def ask(capsys, *argv):
    assert main(["run", "plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_worked_figures(capsys):
    found = ask(capsys, "occupancy", "--threads", "128", "--registers", "160")
    assert (found["blocks"], found["fraction"], found["limiter"]) == (3, 0.1875, "registers")
    assert ask(capsys, "waves", "--blocks", "160", "--gpu", "B200")["last"] == 12
    assert main(["run", "plan", "gpus"]) == 0
    assert "H200" in capsys.readouterr().out


def test_rms_norm_on_an_h100_is_memory_bound(capsys):
    found = ask(capsys, "kernel", "rms_norm", "8192", "4096")
    assert found["bound"] == "memory"
    assert found["seconds"] == pytest.approx(40.1e-6, rel=0.01)  # 134.3 MB at 3,350 GB/s


@pytest.mark.parametrize("kernel", arithmetic.KERNELS)
def test_every_kernel_has_a_cost(capsys, kernel):
    shape = ("64", "32", "128") if kernel in ("matmul", "linear_cross_entropy") else ("64", "128")
    assert ask(capsys, "kernel", kernel, *shape)["bytes"] > 0


def test_block(capsys):
    block = ask(capsys, "block")
    assert block["kernels"]["ours"] < block["kernels"]["eager"]
    assert {d["action"] for d in block["decisions"]} >= {"fuse", "split"}
