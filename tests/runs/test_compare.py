"""Differences between runs: found above the noise, not below it.

What differs is named; bad input in one message.
"""

import dataclasses
import gzip
import json
import pickle
import re
from pathlib import Path

import pytest

from distlab.compare import (
    SavedRun,
    compared,
    differences,
    failures,
    findings,
    gone,
    other_set_up,
    undecided,
    worse_by,
)
from distlab.measure.interleaved import percentiles
from distlab.report import Record, write_json
from launch.__main__ import main
from launch.runs import judged
from tests.runs.cases import MACHINE, record, saved

# Steps on a calm host of what `python -m tests.slowed` runs: two gloo ranks; `slower_…` sleeps so
# long after bucketed's last bucket.
SLOWED = json.loads(Path(__file__).with_name("slowed.json").read_text())


def samples(variant, values, **more):
    times = {f"step_{name}_ms": value for name, value in percentiles(values).items()}
    return record(variant, None, **times, step_samples_ms=list(values), **more)


@pytest.fixture
def recorded(tmp_path):
    found = {}
    for name, rows in SLOWED.items():
        records = [samples(row, steps) for row, steps in rows.items()]
        found[name] = SavedRun.read(saved(tmp_path, name, *records))
    return found


def unsaved(*records):
    return SavedRun(Path(__file__), list(records))


def verdicts(rows):
    return {row.variant: row.metrics["verdict"] for row in rows}


def test_a_sleep_of_2_ms_in_a_hook_is_found(recorded):
    rows = compared([recorded["as_it_is"], recorded["slower_2ms"]], control="torch-ddp")
    assert verdicts(rows) == {"bucketed": "worse", "torch-ddp": "tie"}
    assert findings(rows)[0].startswith("bucketed is worse: step_ratio ")
    assert failures(rows, 5) == ["bucketed"] and failures(rows, 100) == []
    assert max(row.metrics["difference_pct"] for row in rows) > 5  # slower is more


@pytest.mark.parametrize("name", ["slower_10us", "again"])
def test_a_sleep_below_the_noise_is_not(recorded, name):
    for control in (None, "torch-ddp"):
        rows = compared([recorded["as_it_is"], recorded[name]], control=control)
        assert set(verdicts(rows).values()) == {"tie"}, control
        assert failures(rows, 0) == []


def test_rows_without_samples_go_by_their_noise():
    def rows(*noises):
        old = [record("a", 10.0, noise_pct=noises[0]), record("rate", 10.0)]
        new = [record("a", 11.0, noise_pct=noises[1]), record("rate", 10.0)]
        return compared([unsaved(*old), unsaved(*new)])

    assert verdicts(rows(2.0, 3.0)) == {"a": "worse", "rate": "tie"}
    assert verdicts(rows(2.0, 30.0))["a"] == "tie"
    assert verdicts(rows(None, None))["a"] == "noise unknown"


def test_zero_is_a_value():
    def spilled(*values):
        return unsaved(*(record(name, None, main_bytes=value) for name, value in values))

    old = spilled(("none", 0), ("more", 0), ("less", 8))
    new = spilled(("none", 0), ("more", 8), ("less", 0))
    rows = compared([old, new])
    assert verdicts(rows) == {"none": "tie", "more": "worse", "less": "better"}
    assert any("more is worse: main_bytes" in found for found in findings(rows))


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([5.0] * 5, "worse"),
        ([5.0] * 4, "noise unknown"),
        ([5.0, 5.0, 5.0, 0.0, 0.0], "tie"),
        (None, "noise unknown"),
    ],
)
def test_a_time_from_or_to_zero_counts_if_enough_samples_are_above_zero(samples, verdict):
    zero = unsaved(record("a", None, part_p50_ms=0.0))
    some = unsaved(record("a", None, part_p50_ms=5.0, part_samples_ms=samples))
    (row,) = compared([zero, some])
    assert row.metrics["verdict"] == verdict
    assert row.metrics["difference_pct"] is None
    json.dumps(row.metrics, allow_nan=False)
    assert failures([row], 1000) == (["a"] if verdict == "worse" else [])
    (back,) = compared([some, zero])
    assert back.metrics["verdict"] == {"worse": "better"}.get(verdict, verdict)
    assert back.metrics["difference_pct"] == -100


def test_a_time_from_zero_is_named_first_and_a_tie_from_zero_is_undecided():
    old = unsaved(record("a", None, part_p50_ms=1.0), record("b", None, part_p50_ms=0.0))
    for noise_pct, verdict in ((1.0, "worse"), (60.0, "tie")):
        metrics = {"part_p50_ms": 5.0, "noise_pct": noise_pct}
        new = unsaved(record("a", None, **metrics), record("b", None, **metrics))
        rows = compared([old, new])
        assert verdicts(rows) == {"a": "worse", "b": verdict}
        assert findings(rows)[0].startswith(
            "b is worse: part_p50_ms 0 ms → 5 ms, noise 1.0 %." if verdict == "worse" else "a is"
        )
        assert ("b (from zero)" in undecided(rows, 5)) == (verdict == "tie")


def test_a_difference_that_prints_as_zero_is_none():
    def peak(value):
        return unsaved(record("a", None, peak_bytes=value))

    assert verdicts(compared([peak(100_000), peak(100_040)])) == {"a": "tie"}
    assert verdicts(compared([peak(100_000), peak(100_060)])) == {"a": "worse"}


def test_more_of_a_rate_is_better():
    old, new = (unsaved(record("a", None, tokens_per_s=rate, noise_pct=1.0)) for rate in (1.0, 2.0))
    assert (
        verdicts(compared([old, new])) == {"a": "better"}
        and failures(compared([old, new]), 5) == []
    )
    assert verdicts(compared([new, old])) == {"a": "worse"}


def test_rows_that_came_went_or_ran_out_of_memory():
    old = unsaved(record("a", 1.0), record("b", 1.0), record("same", 1.0))
    new = unsaved(record("a", "OOM"), record("c", 1.0), record("same", 1.0))
    rows = compared([old, new])
    assert verdicts(rows) == {
        "a": "only in the first run",
        "b": "only in the first run",
        "same": "tie",
        "c": "only in the last run",
    }
    assert gone(rows) == failures(rows, 5) == ["a", "b"]
    assert judged(rows, 5)[0] == 1
    assert "Only in the first run: a, b." in findings(rows)


def test_rows_of_one_variant_are_matched_by_what_tells_them_apart():
    run = unsaved(*(record("sum", float(n), config={"numel": n}) for n in (1, 2)))
    assert verdicts(compared([run, run])) == {"sum numel 1": "tie", "sum numel 2": "tie"}


# Regression: names also had length, batch and heads, which the shape says, and 60 rows inside the
# noise were 50 lines of names.
def test_names_are_as_short_as_tells_rows_apart_and_sentences_name_a_few():
    def rows(factor):
        return unsaved(
            *(
                samples("ours", [n * factor] * 9, config={"shape": f"1x{n}", "length": n})
                for n in range(1, 10)
            )
        )

    found = compared([rows(1.0), rows(1.0)])
    assert verdicts(found) == {f"ours shape 1x{n}": "tie" for n in range(1, 10)}
    (sentence,) = findings(found)
    assert sentence.startswith("Inside the noise: ours shape 1x1, ")
    assert sentence.endswith(", ours shape 1x6 and 3 more.")
    sentences = findings(compared([rows(1.0), rows(2.0)]))
    assert [" is worse: " in sentence for sentence in sentences] == [True] * 6 + [False] * 2
    assert sentences[6] == "3 more rows are worse, by less: the table has them."


def test_a_name_that_tells_rows_of_two_runs_apart_stays():
    # Within each run the shape would suffice. The dtypes are of different rows all the same.
    def run(dtype):
        rows = [record("a", 1.0, config={"shape": n, "dtype": dtype}) for n in (1, 2)]
        return unsaved(*rows, record("a", 1.0, config={"shape": 3, "dtype": "fp32"}))

    found = verdicts(compared([run("bf16"), run("fp16")]))
    assert found["a shape 1 dtype bf16"] == "only in the first run"
    assert found["a shape 3 dtype fp32"] == "tie"


def test_two_machines_are_said_first(tmp_path, capsys, monkeypatch):
    saved(tmp_path, "old", record("a", 1.0, config={"batch": 8}))
    saved(
        tmp_path,
        "new",
        record("a", 1.5, machine=MACHINE | {"device_name": "NVIDIA H100", "torch": "2.12"}),
    )
    arguments = ["compare", "bench/old", "bench/new", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    main(arguments)
    shown = capsys.readouterr().out
    assert shown.startswith("DIFFERENT MACHINES: NVIDIA H100")
    assert (
        shown.index("torch: 2.11 → 2.12")
        < shown.index("option batch: 8 → 4")
        < shown.index("baseline")
    )
    assert (
        max(
            len(re.sub(r"\033\[\d+m", "", line))
            for line in shown.splitlines()
            if "report:" not in line
        )
        <= 100
    )
    page = next((tmp_path / "compare").glob("*/report.html"))
    assert '<p class="alarm">DIFFERENT MACHINES' in page.read_text()


def test_a_row_that_is_worse_than_allowed_fails_the_comparison(tmp_path, capsys):
    for day, step in enumerate([10.0, 10.1, 13.0], 1):
        saved(tmp_path, f"run{day}", record("a", step, noise_pct=2.0))
    code = main(
        [
            "compare",
            *(f"bench/run{day}" for day in (1, 2, 3)),
            "--out",
            str(tmp_path),
            "--fail-above",
            "5%",
        ]
    )
    assert code == 1 and "worse by more than 5 %, or gone: a" in capsys.readouterr().err


def test_noise_that_hides_the_limit_has_an_exit_code_of_its_own(tmp_path, capsys):
    for name, step, noise in (("before", 10.0, 47.0), ("after", 10.5, 40.0)):
        saved(tmp_path, name, record("a", step, noise_pct=noise), record("b", 1.0))
    for later, limit, code, said in (
        (
            "after",
            "5%",
            3,
            r"cannot tell whether .* by more than 5 %: a \(up to 99\.0 %\)\. Measure .* --rounds",
        ),
        ("after", "99.1%", 0, ""),
    ):
        arguments = [
            "compare",
            "bench/before",
            f"bench/{later}",
            "--fail-above",
            limit,
            "--out",
            str(tmp_path),
        ]
        assert main(arguments) == code, later
        assert re.search(said, capsys.readouterr().err)


def test_training_runs_are_compared_by_loss_whatever_their_strategies(tmp_path, capsys):
    for name, strategy, loss in (("a", "bucketed", 3.0), ("b", "zero1", 2.7)):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        metrics = {"steps": 2, "validation_loss": loss, "step_p50_ms": 10.0}
        write_json(
            [Record("train", strategy, {"steps": 2}, metrics, MACHINE, None)],
            folder / "records.json",
        )
    assert (
        main(["compare", "train/a", "train/b", "--out", str(tmp_path), "--fail-above", "5%"]) == 3
    )
    shown = capsys.readouterr()
    assert re.search(r"bucketed → zero1 +3 nats +2\.7 nats +-10\.0 +noise unknown", shown.out)
    assert "bucketed → zero1 (noise unknown)" in shown.err


def test_bad_input_is_one_message_each(tmp_path, capsys):
    mine = saved(tmp_path, "mine", record("a", 1.0))
    other, old = (tmp_path / name for name in ("other.json", "old.json"))
    write_json([dataclasses.replace(record("a", 1.0), experiment="elsewhere")], other)
    write_json([record("a", None, time_ms=1.0)], old)
    for arguments, line in (
        ((mine, other), "only runs of one experiment can be compared"),
        ((mine,), "give two runs or more"),
        ((old, mine), "has no step_p50_ms: it was written by another version"),
        ((mine, mine, "--against", "b"), "no samples of 'b'"),
    ):
        assert main(["compare", *map(str, arguments)]) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        assert line in said
    for limit in ("a lot", "-1", "inf", "1e309", "nan", "infinity%"):
        with pytest.raises(SystemExit):
            main(["compare", f"--fail-above={limit}"])
        assert "give a finite percentage" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, said",
    [
        pytest.param(gzip.compress(b"{}"), "is a trace, not a run: `distlab trace", id="gzip"),
        pytest.param(b'{"traceEvents": []}', "is a trace, not a run: `distlab trace", id="plain"),
        pytest.param(pickle.dumps({}), "is a snapshot, not a run: `distlab memory", id="pickle"),
    ],
)
@pytest.mark.parametrize("command", ["show", "compare"])
def test_a_file_of_another_command_is_sent_there(command, content, said, tmp_path, capsys):
    file = tmp_path / "mine"
    file.write_bytes(content)
    assert main([command, str(file), str(file), "--out", str(tmp_path)]) == 2
    assert f"{file} {said} {file}` explains it" in capsys.readouterr().err


def test_another_set_up_is_another_machine_or_rows_of_other_options():
    row = record("a", 1.0, config={"bucket": 25, "rows": ["a"], "former": 1})
    assert other_set_up(unsaved(row), unsaved(row)) == []
    # A list says which rows there are, and an option that only one run has is of another version.
    more = record("a", 1.0, config={"bucket": 25, "rows": ["a", "b"], "later": 2})
    assert other_set_up(unsaved(row), unsaved(more, record("b", 1.0))) == []
    other = record("a", 1.0, config={"bucket": 100}, machine=MACHINE | {"device_name": "H100"})
    # More traces and more rounds measure the same thing.
    often = record("a", 1.0, config={"profile_steps": 1, "rounds": 2})
    more_often = record("a", 1.0, config={"profile_steps": 3, "rounds": 3})
    assert other_set_up(unsaved(often), unsaved(more_often)) == []
    assert other_set_up(unsaved(row, record("b", 1.0)), unsaved(other, record("b", 1.0))) == [
        "NVIDIA H200, 2 on the host → H100, 2 on the host",
        "option bucket: 25 → 100",
    ]


def test_what_does_not_differ_is_not_listed():
    assert (
        differences([unsaved(record("a", 1.0, date=f"2026-0{month}-01")) for month in (1, 2)]) == []
    )


def test_a_difference_below_twice_the_noise_is_none(tmp_path):
    """The same code twice on a busy host: 10.1 and 13.2 ms, each with a noise of 16 %."""
    runs = [
        SavedRun.read(
            saved(
                tmp_path, name, record("local", p50, step_p20_ms=0.84 * p50, step_p80_ms=1.16 * p50)
            )
        )
        for name, p50 in (("before", 10.05), ("after", 13.18), ("slower", 13.4))
    ]
    assert verdicts(compared(runs[:2])) == {"local": "tie"}
    assert verdicts(compared([runs[0], runs[2]])) == {"local": "worse"}


def row(
    difference,
    low=None,
    high=None,
    *,
    least=None,
    verdict="worse",
    metric="step_p50_ms",
    variant="a",
):
    metrics = {
        "difference_pct": difference,
        "low_pct": low,
        "high_pct": high,
        "least_pct": least,
        "verdict": verdict,
    }
    return Record("compare", variant, {"metric": metric}, metrics, {}, None)


@pytest.mark.parametrize(
    "rows, code",
    [
        ([row(4.8, 3.7, 5.7)], 3),  # found worse, and the interval holds the limit
        ([row(5.2, 4.9, 5.7)], 3),
        ([row(6.0, 5.1, 7.0)], 1),
        ([row(4.0, 3.0, 4.9)], 0),  # worse, by less
        ([row(4.8, 4.0, 5.0)], 0),  # does not reach above
        ([row(1.0, -4.0, 5.7, verdict="tie")], 3),
        ([row(1.0, -4.0, 4.7, verdict="tie")], 0),
        # its noise hides more than its interval
        ([row(1.0, 0.9, 1.1, least=6.0, verdict="tie")], 3),
        ([row(7.0, least=1.0)], 1),  # no samples: the noise to both sides
        ([row(7.0, least=3.0)], 3),
        ([row(4.0, least=2.0)], 3),
        ([row(4.0, least=0.5)], 0),
        ([row(10.0, metric="peak_alloc_bytes")], 1),  # bytes are counted
        ([row(-6.0, -7.0, -5.1, metric="tokens_per_s")], 1),  # less of a rate is worse
        ([row(-4.8, -5.7, -3.7, metric="tokens_per_s")], 3),
        ([row(-4.8, -4.9, -3.7, metric="tokens_per_s")], 0),
        ([row(4.8, 3.7, 5.7, metric="tokens_per_s", verdict="better")], 0),
        ([row(-9.0, -10.0, -8.0, verdict="better")], 0),
        ([row(9.0, verdict="noise unknown")], 3),
        ([row(None, verdict="only in the first run")], 1),
        ([row(None, verdict="only in the last run"), row(None, verdict="in neither run")], 0),
        ([row(9.0, 8.0, 10.0), row(9.0, 8.0, 10.0)], 1),
        ([row(9.0, 8.0, 10.0), row(40.0, 39.0, 41.0), row(8.0, 6.0, 9.0)], 3),  # all: the machine
        ([row(9.0, 8.0, 10.0), row(40.0, 39.0, 41.0), row(0.0, -1.0, 1.0, verdict="tie")], 1),
        (
            [row(-9.0, verdict="better"), row(-9.0, verdict="better"), row(-9.0, verdict="better")],
            3,
        ),
        # a row is gone all the same
        ([*[row(9.0, 8.0, 10.0)] * 3, row(None, verdict="only in the first run")], 1),
    ],
)
def test_one_rule_decides_the_exit_code(rows, code):
    assert judged(rows, 5.0)[0] == code, (
        worse_by(rows[0]) if rows[0].metrics["difference_pct"] else ""
    )


def test_a_worse_row_that_may_exceed_the_limit_is_named():
    rows = [row(4.8, 3.7, 5.7, variant="bucketed")]
    assert failures(rows, 5) == [] and undecided(rows, 5) == ["bucketed (up to 5.7 %)"]
    assert undecided(rows, 6) == [] and failures(rows, 3) == ["bucketed"]
