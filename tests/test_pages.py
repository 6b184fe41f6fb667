"""The pages: tables as their records say, code as the package has it, links that lead there,
commands that exist.
"""

import re
import runpy
import shlex

import pytest

from distlab.options import given
from distlab.report.docs_tables import (
    code_of,
    definition,
    embed,
    pictures_of,
    redrawn,
    rows_of,
    table_of,
)
from experiments.plan import arithmetic
from launch import check as check_command
from launch import kernel as kernel_command
from launch import runs, sample, trainer
from launch.__main__ import COMMANDS, view_of
from launch.registry import experiments, load
from tests.commands import ROOT
from tests.pages import Command, commands_of, fenced_lines, pages

PAGES = pages()
# What a page leaves to the reader.
FILLED_IN = {
    r"local,<name>,": "local,naive,",
    r"run NAME": "run ddp_bench",
    r" MACHINE": " cpu",
    r" …$": "",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_and_code_are_drawn_from_records_and_source(page):
    text = page.read_text(encoding="utf-8")
    assert redrawn(text, view_of, ROOT) == text, "run make tables"
    assert text.count("<!-- picture") == len(pictures_of(text))
    for source, name, _ in pictures_of(text):
        view, _ = rows_of(source, view_of, ROOT)
        assert name in view.pictures


def test_rows_with_commas_in_their_names_and_values_of_what_was_varied_can_be_chosen():
    drawn = table_of("records/kernel_chains/h200-all.json#one by one;fused, ours", view_of, ROOT)
    forms = {line.split("|")[2].strip() for line in drawn.splitlines() if "8192×4096" in line}
    assert forms == {"one by one", "fused, ours"}
    source = "records/collectives/cpux6-all-reduce.json?num_bytes=1000000,10000000"
    rows = [line for line in table_of(source, view_of, ROOT).splitlines() if "all_reduce" in line]
    # Of 6 ranks each has as many bytes, so sizes are rounded up.
    sizes = {line.split("|")[3].strip() for line in rows}
    assert sizes == {"1,000,000", "1,000,008", "10,000,000", "10,000,008"}
    with pytest.raises(ValueError, match="not all of 513 are values of num_bytes"):
        table_of("records/collectives/cpux6-all-reduce.json?num_bytes=513", view_of, ROOT)


def test_columns_that_only_some_tables_of_a_record_have_can_be_chosen():
    source = "records/gpu_lessons/h200-all.json"
    drawn = table_of(f"{source}@gb_per_s,in_flight_kib", view_of, ROOT)
    headings = [line for line in drawn.splitlines() if line.startswith("| case")]
    assert {"GB/s" in line for line in headings} == {True, False}
    with pytest.raises(ValueError, match="no column gone; there are"):
        table_of(f"{source}@gb_per_s,gone", view_of, ROOT)


def test_code_that_is_not_there_is_an_error():
    found = definition(ROOT / "distlab/parallel/zero.py", "Slices.gather")
    assert found.startswith("@torch.no_grad()")
    with pytest.raises(ValueError, match="defines no"):
        code_of("distlab/parallel/naive.py NaiveDDP.gone", ROOT)
    with pytest.raises(ValueError, match="end code"):
        embed("<!-- code distlab/parallel/naive.py NaiveDDP -->\n", "code", lambda source: "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_of_this_repository(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", text):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor and target.suffix == ".md":
            assert anchor[1:] in headings(target), f"{page.name} links to {path}{anchor}"


def headings(page):
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_exist_with_their_options(page):
    listed = commands_of(page)
    known = {filled_in(command.text) for command in listed}
    for line in fenced_lines(page):
        assert filled_in(line) in known, f"{page.name}: {line} begins with no known program"
    for command in listed:
        check(Command(command.page, filled_in(command.text)))


def filled_in(text):
    for left_open, filled in FILLED_IN.items():
        text = re.sub(left_open, filled, text)
    return text


def check(command):
    """Fail if a command names what is not there, or an option that it does not take."""
    words = [word for word in shlex.split(command.text) if not re.match(r"[A-Z_]+=", word)]
    where = f"{command.page}: {command.text}"
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
    for place, word in enumerate(words):
        if re.fullmatch(
            r"(tests|launch|experiments|examples|distlab|kernels|records)/[\w/-]*\.\w+", word
        ):
            assert (ROOT / word).exists() or words[place - 1] in ("--table", "--out"), (
                f"{where}: {word}"
            )
        if word == "-m" and words[place + 1].split(".")[0] in ("tests", "launch", "distlab"):
            module = ROOT / words[place + 1].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), where
    ours = arguments_of(words)
    if ours:
        assert ours[0] in COMMANDS, where
        parser = parser_of(ours)
        if parser is not None:
            try:
                args = parser.parse_args(ours[2:] if ours[0] == "run" else ours[1:])
            except SystemExit as end:
                assert end.code == 0, where
                return
            if ours[0] == "run" and len(ours) > 2 and not answers_in_words(ours):
                # These options are also allowed together.
                experiment = load(ours[1]).EXPERIMENT
                chosen = experiment.preset(getattr(args, "preset", None) or "", on_gpu=True)
                experiment.config(**chosen | given(experiment.config, args))


def arguments_of(words):
    """The arguments of `distlab` in a command, however it is started.

    [] if it is another command.
    """
    for place, word in enumerate(words):
        if word == "distlab" or (word == "launch" and words[place - 1] == "-m"):
            return words[place + 1 :]
        if word == "launch/ddp_bench.py":
            return ["run", "ddp_bench", *words[place + 1 :]]
        if word in ("launch/train.py", "launch/sample.py"):
            return [word[len("launch/") : -len(".py")], *words[place + 1 :]]
    return []


def answers_in_words(arguments):
    """Whether `distlab run` answers by arithmetic, without an experiment: `run plan gpus`."""
    return arguments[2:] and arguments[2] in getattr(load(arguments[1]), "WORDS", ())


def parser_of(arguments):
    if arguments[0] == "run":
        if answers_in_words(arguments):
            return arithmetic.parser()
        return load(arguments[1]).EXPERIMENT.parser()
    if arguments[0] == "runs":
        return runs.runs_parser()
    if arguments[0] == "compare":
        return runs.compare_parser()
    modules = {
        "train": trainer,
        "sample": sample,
        "check": check_command,
        "kernel": kernel_command,
    }
    if arguments[0] in modules:
        return modules[arguments[0]].parser()
    return None


def test_every_experiment_answers_a_question():
    text = (ROOT / "docs" / "learn" / "questions.md").read_text(encoding="utf-8")
    assert [name for name in experiments() if not re.search(rf"distlab run {name}\b", text)] == []


def test_drawings_are_of_the_code_as_it_is():
    drawn = runpy.run_path(str(ROOT / "docs/drawings.py"))
    for name, rows in drawn["DRAWINGS"].items():
        assert (ROOT / f"docs/images/drawn_{name}.svg").read_text(encoding="utf-8") == drawn["svg"](
            rows()
        ), name
