"""`distlab trace`: what it prints and writes, and its errors."""

import json
from pathlib import Path

import pytest

from distlab.trace import explain_traces
from distlab.trace.page import against, changed, changed_causes, records_of, result
from launch import trace
from tests.trace import handmade


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = handmade.gpu_run(tmp_path / "old", handmade.healthy)
    new = handmade.gpu_run(tmp_path / "new", handmade.straggler)
    return [str(path) for path in old], [str(path) for path in new]


def test_the_sentence_to_act_on_comes_first_and_a_page_is_written(runs, tmp_path, capsys):
    old, new = runs
    out = tmp_path / "outputs"
    assert trace.main([*new, "--against", *old, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("Rank 0 waits 6.00 ms per step (20 %) for rank 1")
    assert max(map(len, lines[:-1])) <= 100
    assert "exposed communication" in printed and "New cause: straggler" in printed
    (page,) = out.glob("trace/*/report.html")
    assert "straggler" in page.read_text() and (page.parent / "timeline.png").exists()
    assert "the command was not recorded" not in page.read_text()
    assert "New cause: straggler" in page.read_text()
    assert "what changed in the median step</h3>" in page.read_text()
    assert "; straggler, 6.00 ms per step (20 %)</li>" in (out / "index.html").read_text()


def test_the_list_of_runs_says_that_a_healthy_run_lost_no_time(runs):
    old, _ = runs
    assert result(records_of(explain_traces(old))) == (
        "no cause of lost time takes 5 % of the step"
    )


def test_json_has_everything_and_writes_nothing(runs, tmp_path, capsys, monkeypatch):
    old, new = runs
    monkeypatch.chdir(tmp_path)
    assert trace.main([*new, "--against", *old, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["causes"][0]["cause"] == "straggler" and found["act_on"].startswith("Rank 0")
    assert found["collectives"][0]["exposed_ms"] == pytest.approx(8)
    assert len(found["ranks"][1]["steps"]) == handmade.STEPS
    assert found["against"]["parts"]["compute"]["difference_pct"] < 0
    assert not (tmp_path / "outputs").exists()


def test_a_part_that_was_absent_before_took_no_time(tmp_path):
    """A healthy step has no exposed communication, and none has copies."""
    explained = []
    for name, step in (("old", handmade.healthy), ("new", handmade.straggler)):
        folder = tmp_path / name
        folder.mkdir()
        explained.append(explain_traces(handmade.gpu_run(folder, step, steps=5)))
    rows, _ = against(*explained)
    found = {row.variant: row.metrics for row in rows}
    assert found["exposed communication"]["run_0"] == 0
    assert found["exposed communication"]["verdict"] == "worse"
    assert found["copies"]["verdict"] == "tie"
    said = changed(*explained)
    assert said[0] == "New cause: straggler, 6.00 ms per step."
    assert said[-1] == "Inside the noise: step, optimizer, copies, idle."


def test_too_few_steps_say_how_many_are_needed(runs):
    said = changed(*map(explain_traces, runs))
    assert any(line.startswith("Noise unknown: ") for line in said)
    assert said[-1] == "With 5 traced steps or more in both runs, the noise is known."


def test_a_run_against_itself_has_changed_nothing(runs):
    _, new = runs
    explanation = explain_traces(new)
    rows, _ = against(explanation, explanation)
    assert {row.metrics["verdict"] for row in rows} == {"tie"}
    assert changed_causes(explanation, explanation) == []


def stretched(paths, folder):
    """Write traces in which everything takes twice as long."""
    folder.mkdir()
    found = []
    for path in map(Path, paths):
        body = json.loads(path.read_text())
        for event in body["traceEvents"]:
            for name in {"ts", "dur"} & set(event):
                event[name] *= 2
        file = folder / path.name
        file.write_text(json.dumps(body))
        found.append(str(file))
    return found


def test_a_step_that_changed_in_all_parts_is_not_put_down_to_the_machine(runs, tmp_path, capsys):
    """The rows are parts of one step, so that they move together does not tell of the machine."""
    old, _ = runs
    new = stretched(old, tmp_path / "stretched")
    assert trace.main([*new, "--against", *old, "--out", str(tmp_path / "outputs")]) == 0
    printed = capsys.readouterr().out
    assert "+100.0" in printed
    assert "machine" not in printed and "one direction" not in printed
    # Both steps say which average they are.
    assert "of 60.00 ms on average" in printed
    assert "What changed in the median step (above: means over the steps):" in printed


def test_a_cause_that_fell_below_the_limit_is_said_with_what_is_left(runs):
    healthy, with_straggler = map(explain_traces, runs)
    said = changed_causes(with_straggler, healthy)
    assert said[0].startswith("No longer large: straggler, 6.00 ms per step before, now ")


def test_a_folder_stands_for_the_traces_in_it(runs, tmp_path, capsys):
    old, new = runs
    (tmp_path / "new" / "notes.txt").write_text("mine")
    folders = [str(tmp_path / "new"), "--against", str(tmp_path / "old"), "--json"]
    assert trace.main([*new, "--against", *old, "--json"]) == 0
    named = capsys.readouterr().out
    assert trace.main(folders) == 0
    assert capsys.readouterr().out == named
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty has no \.json or \.json\.gz file"):
        trace.main([str(empty)])


def test_a_folder_with_the_traces_of_several_runs_names_them(tmp_path):
    """As of `ddp_bench`. Names that differ in more than the rank can be of one run."""

    def files(*names):
        for name in names:
            (tmp_path / name).write_text("{}")
        return trace.files_of([str(tmp_path)])

    stamped = ("rank0.17.trace.json", "rank1.17.trace.json", "rank2.18.trace.json")
    assert [Path(file).name for file in files(*stamped)] == [*stamped]
    for name in stamped:
        (tmp_path / name).unlink()
    message = r"trace_flat_rank\*\.json\.gz or .*trace_local_rank\*\.json\.gz$"
    with pytest.raises(ValueError, match=message):
        files(
            *(f"trace_{name}_rank{rank}.json.gz" for name in ("local", "flat") for rank in (0, 1))
        )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give the trace of each rank"),
        (["t.json", "--window", "5"], "--window: give its begin and its end"),
        (["t.json", "--window", "5", "3"], "--window: give its begin and its end"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        trace.main(arguments)
