"""Every experiment of the registry: runs in its smallest form, is listed, and is drawn anew from what it saved."""

import json

import pytest

from distlab.experiment import Experiment
from distlab.report import read_json
from launch.__main__ import GONE, experiments, load, main
from tests.experiments.frame import measured

IN_WORDS = ("calculator",)  # answers on one line, without rows


def registered() -> list[str]:
    return [name for name in experiments() if isinstance(getattr(load(name), "EXPERIMENT", None), Experiment)]


@pytest.mark.parametrize("name", registered())
def test_an_experiment_runs_in_small_and_its_rows_are_drawn_again(name, tmp_path, capsys):
    experiment = load(name).EXPERIMENT
    records = measured(experiment, tmp_path)
    assert records and {record.experiment for record in records} == {name}
    assert "WRONG" not in {record.metrics.get("status") for record in records}
    folder = tmp_path / name / "run"
    written = {path.name for path in folder.iterdir()}
    assert {"run.json", "records.json", "records.csv", "table.md", "table.tex", "report.html"} <= written
    pictures = {path for path in written if path.endswith(".png")}

    capsys.readouterr()
    assert main(["show", str(folder / "records.json"), "--out", str(tmp_path / "again")]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert all(len(text) <= 100 for text in table if not text.startswith("report:"))
    answer = json.loads(line)
    assert [row["variant"] for row in answer["records"]] == [record.variant for record in records]
    (again,) = (tmp_path / "again" / name).iterdir()
    assert pictures <= {path.name for path in again.iterdir()}


def test_the_list_has_every_experiment_with_its_question_and_imports_nothing(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in registered():
        question = load(name).EXPERIMENT.view.question
        assert name in text and question.split()[0] in text and max(map(len, text.splitlines())) <= 100


def test_every_experiment_is_registered():
    assert [name for name in experiments() if name not in (*registered(), *IN_WORDS)] == []


def test_a_run_of_a_name_is_resumed_or_refused(tmp_path, capsys):
    arguments = ["run", "plan", "--model", "tiny", "--batch", "4", "--devices", "h100:4", "--out", str(tmp_path)]
    assert main([*arguments, "--name", "mine"]) == 0
    rows = len(read_json(tmp_path / "plan" / "mine" / "records.json"))
    assert main([*arguments, "--name", "mine"]) == 0
    assert len(read_json(tmp_path / "plan" / "mine" / "records.json")) == rows
    capsys.readouterr()
    assert main([*arguments[:4], "--batch", "8", *arguments[6:], "--name", "mine"]) == 2
    assert "holds another run: option batch was 4 and is 8" in capsys.readouterr().err


def test_an_unknown_experiment_or_command_is_named(capsys):
    assert main(["run", "plam"]) == 2
    assert "'plam' is unknown; there are " in capsys.readouterr().err
    for name in GONE:
        assert main(["run", name, "--quick"]) == 2 and name not in experiments()
        assert f"experiment {name!r} is gone: {GONE[name]}" in capsys.readouterr().err
    assert main(["rum"]) == 2
    assert "'rum' is unknown; allowed: list, run" in capsys.readouterr().err
