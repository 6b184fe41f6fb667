"""The doctor says what is, and why something will not run."""

import importlib
import json
import sys

import pytest
import torch

import distlab
from distlab import doctor
from distlab.doctor import LIMITED, MISSING, OK, Finding
from tests.commands import python


def healthy(gpus):
    names = ["Python", "torch", "matplotlib", "tabulate", "gloo", "NCCL", "two ranks"]
    cards = [Finding(f"GPU {index}", OK, "NVIDIA H200") for index in range(gpus)]
    return [Finding(name, OK, "there") for name in names] + cards


def test_it_examines_this_machine():
    """As a user runs it: two ranks are started, and the JSON says what the report says."""
    result = python("-m", "distlab.doctor", "--json", timeout=180)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    states = {finding["name"]: finding["state"] for finding in said["findings"]}
    assert states["torch"] == states["gloo"] == states["two ranks"] == OK
    assert said["abilities"][0]["runs"]
    if not torch.cuda.is_available():
        assert states["GPUs"] == LIMITED
        timed = next(a for a in said["abilities"] if a["what"] == "kernels, timed")
        assert not timed["runs"] and "there is none" in timed["why"]


@pytest.mark.parametrize(
    "gpus, command", [(0, "--backend gloo"), (1, "--backend gloo"), (2, "distlab run ddp_bench")]
)
def test_the_first_command_suits_the_hardware(gpus, command):
    able = doctor.abilities(healthy(gpus))
    assert doctor.first_command(able).endswith(command)
    assert able[1].runs == (gpus >= 2)


@pytest.mark.parametrize("lost", ["torch", "tabulate", "gloo", "two ranks"])
def test_what_is_missing_is_the_reason(lost, capsys, monkeypatch):
    findings = [f if f.name != lost else Finding(lost, MISSING, "gone") for f in healthy(2)]
    able = doctor.abilities(findings)
    assert not any(a.runs for a in able) and all(f"{lost}: gone" in a.why for a in able)
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert doctor.main([]) == 1
    assert doctor.INSTALL in capsys.readouterr().out


def test_without_torch_it_reports_instead_of_crashing(monkeypatch):
    real = importlib.import_module

    def without_torch(name):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", without_torch)
    findings = doctor.examine()
    assert ("torch", MISSING) in [(finding.name, finding.state) for finding in findings]
    assert "No module named" in doctor.report(findings, doctor.abilities(findings))


def kernels_modules():
    return {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kernels"
    }


@pytest.fixture
def their_folder(monkeypatch, tmp_path):
    """A folder that comes first on `sys.path`, with `kernels` not yet imported."""
    before = kernels_modules()
    for name in before:
        del sys.modules[name]
    # The environment of the tests may have an editable installation of another clone, with a finder
    # of its own.
    finders = [
        finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")
    ]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in kernels_modules():
        del sys.modules[name]
    sys.modules.update(before)


def test_modules_of_another_project_that_hide_ours_are_named(their_folder):
    theirs = their_folder / "kernels"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    (theirs / "softmax.py").touch()
    (theirs / "nn").mkdir()
    (theirs / "nn" / "__init__.py").touch()
    found = distlab.foreign_kernels()
    assert (
        found.startswith(f"`import kernels.nn` finds the module in {theirs}")
        and "in all 2 modules" in found
    )
    assert found in doctor.find_triton()[-1].found
    with pytest.warns(RuntimeWarning, match=r"rename the folder"):
        importlib.reload(distlab)


def test_a_file_of_that_name_is_named(their_folder):
    (their_folder / "kernels.py").touch()
    assert f"finds the file {their_folder / 'kernels.py'}" in distlab.foreign_kernels()


@pytest.mark.parametrize("files", [["__init__.py", "layer.py"], ["matmul.cu", "nn/matmul.cu"]])
def test_another_project_s_kernels_that_hide_none_are_not_in_the_way(their_folder, files):
    """Theirs are imported, and so are ours, although theirs come first."""
    for file in files:
        (their_folder / "kernels" / file).parent.mkdir(parents=True, exist_ok=True)
        (their_folder / "kernels" / file).touch()
    assert distlab.foreign_kernels() is None
    for name in [name for name in files if name == "layer.py"]:
        assert importlib.import_module("kernels.layer").__file__ == str(
            their_folder / "kernels" / name
        )
    cost = importlib.import_module("kernels.cost")
    assert cost.__file__ == str(distlab.KERNELS / "cost.py")


def test_old_versions_are_named():
    assert doctor.package("torch", (99, 0), "").state == LIMITED
    assert doctor.version_tuple("2.13.0+cpu") == (2, 13) and doctor.version_tuple("nightly") == (
        0,
        0,
    )
    assert not doctor.abilities([Finding("torch", LIMITED, "1.0")])[0].runs


def test_ranks_that_cannot_start_are_a_finding(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no loopback")

    monkeypatch.setattr("distlab.testing.run_ranks", fail)
    finding = doctor.find_ranks()
    assert finding.state == MISSING and "no loopback" in finding.found


def test_the_topology_matrix_is_read():
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n"
    assert doctor.parse_topology(matrix) == "GPU 0 – GPU 1: NV18 (NVLink)"
    assert doctor.parse_topology("no such thing") is None
