"""Check that the list of mutations fits the tree: each text is found once, each test file
exists.
"""

import re

import pytest

from tests import mutations
from tests.commands import ROOT
from tests.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_text_stands_in_the_tree_once(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.find) == 1 and mutation.replacement != mutation.find
    if mutation.file.endswith(".py"):
        compile(text.replace(mutation.find, mutation.replacement), mutation.file, "exec")
    files = [
        argument.split("::")[0] for argument in mutation.tests if argument.startswith("tests/")
    ]
    assert files and all((ROOT / file).exists() for file in files)


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


FILE = "value = 1\n"
TEST = "from code_under_test import value\n\ndef test_value():\n    assert value == 1\n"


@pytest.mark.parametrize(
    "replacement, code", [("value = 2", 0), ("value = 1 ", 1)], ids=["seen", "not-seen"]
)
def test_the_command_tells_survivors(monkeypatch, tmp_path, capsys, replacement, code):
    def copy_tree(target):
        target.mkdir()
        (target / "code_under_test.py").write_text(FILE)
        (target / "test_it.py").write_text(TEST)

    mutation = Mutation(
        "a value", "data", "code_under_test.py", "value = 1", replacement, ("test_it.py",)
    )
    monkeypatch.setattr(mutations, "MUTATIONS", (mutation,))
    monkeypatch.setattr(mutations, "copy_tree", copy_tree)
    assert mutations.main([]) == code
    said = capsys.readouterr().out
    assert ("1 of 1 killed" in said) == (code == 0) and bool(re.search("SURVIVED", said)) == (
        code == 1
    )
    assert mutations.main(["--list"]) == 0 and "a value" in capsys.readouterr().out
    assert mutations.main(["--only", "nothing"]) == 2


@pytest.mark.parametrize("text", ["", "value = 1\nvalue = 1\n"])
def test_a_text_that_is_missing_or_ambiguous_is_an_error(tmp_path, text):
    (tmp_path / "code_under_test.py").write_text(text)
    with pytest.raises(ValueError, match="times, not once"):
        Mutation("a value", "data", "code_under_test.py", "value = 1", "", ()).apply(tmp_path)
