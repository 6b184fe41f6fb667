"""`distlab sample`: each line that is typed is a prompt, and an export reads the same model."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from distlab.experiment import lone_context
from distlab.model.config import ModelConfig
from distlab.model.transformer import TransformerLM
from distlab.train.sample import newest_usable
from launch import sample
from launch.sample import SampleOptions


@pytest.fixture
def trained(monkeypatch):
    model = TransformerLM(ModelConfig(16, 16, 1, 2, vocab_size=256, context_length=8))
    monkeypatch.setattr(
        sample, "newest_usable", lambda folder: SimpleNamespace(step=3, path=folder)
    )
    monkeypatch.setattr(sample, "load_model", lambda stored, context: model)


def test_each_line_is_a_prompt_and_an_empty_one_is_none(trained, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Once\n\nThe é"))
    assert sample.sample(lone_context("cpu"), SampleOptions(run="r", tokens=0)) == 0
    assert capsys.readouterr().out == "Once\nThe é\n"


def test_an_export_says_where_it_is(trained, tmp_path, capsys):
    folder = tmp_path / "llama"
    assert sample.sample(lone_context("cpu"), SampleOptions(run="r", export=str(folder))) == 0
    assert {path.name for path in Path(folder).iterdir()} == {"config.json", "model.safetensors"}
    assert str(folder) in capsys.readouterr().out


def test_an_export_overwrites_no_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    for folder, says in (
        (tmp_path, "its config.json is not of an export"),
        ("", "names no folder"),
    ):
        with pytest.raises(ValueError, match=says):
            sample.main([str(tmp_path), "--export", str(folder)])
    (tmp_path / "model.safetensors").touch()
    sample.check_export(str(tmp_path))  # an earlier export is replaced
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_folder_that_does_not_exist_is_not_taken_for_one_without_checkpoints(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, says in (("run", "holds no usable checkpoint"), ("none", "does not exist")):
        with pytest.raises(ValueError, match=says):
            newest_usable(tmp_path / name / "checkpoints")
