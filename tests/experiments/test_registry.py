"""Every experiment of the registry: runs in its smallest form, is listed, and what it saved is
shown anew.
"""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distlab import __version__
from distlab.experiment import Experiment
from distlab.options import declared_options
from distlab.report import read_json
from distlab.report.terminal import say
from distlab.testing import run_ranks
from launch.__main__ import main
from launch.registry import CATALOGUE, EXPERIMENTS, experiments, load
from tests.commands import ROOT
from tests.pages import Command
from tests.test_pages import check


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_runs_in_small_and_its_rows_are_shown_again(name, smoke, capsys):
    records, folder = smoke(name)
    assert records and {record.experiment for record in records} == {name}
    assert "WRONG" not in {record.metrics.get("status") for record in records}
    written = {path.name for path in folder.iterdir()}
    assert {"run.json", "records.json", "records.csv", "table.md", "report.html"} <= written
    saved = read_json(folder / "records.json")
    assert [record.variant for record in saved] == [record.variant for record in records]
    capsys.readouterr()
    say(load(name).EXPERIMENT.view, saved, folder / "report.html")
    table = capsys.readouterr().out.splitlines()
    assert table and all(len(text) <= 100 for text in table if not text.startswith("report:"))
    say(load(name).EXPERIMENT.view, saved, folder / "report.html", quiet=True)
    assert len(json.loads(capsys.readouterr().out)["records"]) == len(records)


def test_the_list_has_every_experiment_with_its_question_and_imports_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    for name in experiments():
        experiment = load(name).EXPERIMENT
        needs = ""
        if experiment.gpus:
            needs = "GPU"
        elif experiment.ranks == "many":
            needs = "ranks"
        assert f"  {name:<24} {needs:<5}  {experiment.view.question}" in lines
    assert len(lines) == len(CATALOGUE) + len(experiments()) + 2


@pytest.mark.parametrize("words", [["list"], ["--help"]])
def test_the_list_and_the_help_fit_the_terminal(words, capsys, monkeypatch):
    texts = {}
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(words) == 0
        texts[columns] = capsys.readouterr().out
    assert max(map(len, texts[80].splitlines())) <= 80
    assert texts[80].split() == texts[200].split()
    # What does not fit goes on in its own column.
    assert len(texts[80].splitlines()) > len(texts[200].splitlines())


def test_the_catalogue_has_every_file_of_experiments():
    files = set()
    for path in EXPERIMENTS.rglob("*.py"):
        module = path.parent if path.name == "__init__.py" else path.with_suffix("")
        is_in_a_folder = module.parent not in (EXPERIMENTS, EXPERIMENTS / "lessons")
        if not is_in_a_folder and not module.name.startswith("_") and module.name != "lessons":
            files.add(f"experiments.{'.'.join(module.relative_to(EXPERIMENTS).parts)}")
    assert files == set(experiments().values())


@pytest.fixture
def help_of(monkeypatch, capsys):
    """Function that returns what a command prints with --help on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")

    def text_of(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        return capsys.readouterr().out

    return text_of


@pytest.mark.parametrize("name", experiments())
def test_the_short_help_names_options_that_there_are_and_commands_that_run(name, help_of):
    text = help_of("run", name, "--help")
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 100
    assert name != "predict" or "rows of ddp_bench [all]\n" in text
    examples = re.findall(r"^    .*?(distlab run .*?)(?: {2}.*)?$", text, re.MULTILINE)
    for example in examples:
        check(Command(name, example))
    assert examples
    assert f"distlab run {name} --help all" in examples
    own = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert own and set(own) <= set(load(name).EXPERIMENT.parser()._option_string_actions)


def test_list_takes_no_torch_and_ends_quietly_where_nobody_reads():
    code = "import sys; from launch.__main__ import console; sys.argv[1:] = ['list']; console()"
    command = f'{sys.executable} -X importtime -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and " torch" not in done.stderr and "Error" not in done.stderr


def test_the_version_is_said(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"distlab {__version__}")


def test_every_experiment_is_experiments():
    for name in experiments():
        assert isinstance(load(name).EXPERIMENT, Experiment), name


def test_an_unknown_experiment_or_command_is_named(capsys):
    assert main(["run", "plam"]) == 2
    assert "'plam' is unknown (did you mean plan?); `distlab list`" in capsys.readouterr().err
    assert main(["plam"]) == 2
    assert "'plam' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_without_run_is_told_the_word(name, capsys):
    assert main([name, "--quick"]) == 2
    assert f"did you mean `distlab run {name}`?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "doctor", "list"])
def test_a_command_after_run_is_told_to_go_without_it(name, capsys):
    assert main(["run", name]) == 2
    assert f"did you mean `distlab {name}`?" in capsys.readouterr().err


@pytest.mark.parametrize("name", experiments())
def test_all_of_the_help_has_every_option_once(name, help_of):
    text = help_of("run", name, "--help", "all")
    assert max(map(len, text.splitlines())) <= 100
    for option in declared_options(load(name).EXPERIMENT.config):
        flag = option.name.upper() if option.declaration.positional else option.flag
        assert len(re.findall(rf"^  {flag}\b(?!-)", text, re.MULTILINE)) == 1, flag


@pytest.mark.parametrize("name", experiments())
def test_no_table_has_two_columns_of_one_name(name):
    for view in load(name).EXPERIMENT.views().values():
        titles = [column.title for column in view.columns]
        assert "" not in titles and len(set(titles)) == len(titles), (view.name, titles)


def test_the_experiment_of_contributing_is_complete(tmp_path, monkeypatch):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page[page.index("## Add an experiment") :]
    (tmp_path / "halves.py").write_text(re.search(r"```python\n(.*?)```", section, re.S)[1])
    records = run_ranks(halves_on_rank, 2, str(tmp_path), deadline_s=60)[0]
    assert [record.variant for record in records] == ["whole", "halves"]
    assert records[0].metrics["over_whole"] == 1 < records[1].metrics["over_whole_high"]


def halves_on_rank(context, folder):
    """Rows of the example of CONTRIBUTING, which is a file in this folder."""
    sys.path.insert(0, folder)
    try:
        experiment = importlib.import_module("halves").EXPERIMENT
    finally:
        sys.path.remove(folder)
    config = experiment.config(**experiment.preset("smoke", on_gpu=False))
    run = experiment.open(config, context, Path(folder))
    experiment.measure(config, context, run)
    return list(experiment.view.derived(run.records))
