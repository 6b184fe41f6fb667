"""The main job: its numbers, its files, and what it says to bad input."""

import io
import itertools
import json
import os
import signal
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from distlab.bench import reference, step_timing
from distlab.bench.reference import parameter_difference
from distlab.bench.step_timing import time_rounds
from distlab.bench.trial import Trial
from distlab.bench.variant import Variant, variants
from distlab.measure import percentile_metrics
from distlab.parallel import Layout, OverlapDDP, get_strategy, strategies_on
from distlab.report.record import Record, read_json
from distlab.testing import run_ranks
from experiments import ddp_bench
from experiments.ddp_bench import VIEW, DDPBenchConfig, auto_size, columns, comparison
from experiments.ddp_bench import rows as measured_rows
from experiments.ddp_bench.columns import draw_step_times
from experiments.ddp_bench.comparison import compare, open_rows
from launch.__main__ import _to_end
from tests.commands import ROOT, children, on_terminal, python, shown
from tests.experiments.frame import measured
from tests.experiments.noisy import each_seed

SMOKE = DDPBenchConfig(**ddp_bench.EXPERIMENT.preset("smoke", on_gpu=False))
SMOKE_ARGUMENTS = ["--preset=smoke", "--layers=2", "--steps=3", "--rounds=2"]


def test_every_row_is_complete_checked_and_written(smoke):
    records, folder = smoke("ddp_bench")
    by_name = {record.variant: record.metrics for record in records}
    assert list(by_name) == list(strategies_on("cpu"))
    assert ddp_bench.wrong_rows(records) == []
    for name, metrics in by_name.items():
        # FSDP2 has no closed form yet.
        assert metrics["volume_as_predicted"] is (
            None if name in ("fsdp2", "torch-hsdp") else True
        ), name
        if name != "local":
            assert metrics["max_abs_param_diff"] < 1e-6
            assert metrics["comm_ms"] > 0 and 0 <= metrics["overlap_pct"] <= 100
        causes = ("exposed", "slowdown", "copies", "optimizer", "idle", "unexplained")
        explained = sum(metrics[f"overhead_{cause}_ms"] for cause in causes)
        assert metrics["overhead_ms"] == pytest.approx(explained, abs=1e-6)
    assert by_name["local"]["comm_bytes_per_step"] == 0 and by_name["local"]["comm_ms"] == 0
    assert (
        by_name["naive"]["collectives_per_step"] == by_name["overlap"]["collectives_per_step"] > 15
    )
    pictures = {"step_time.png", "timeline.png"}
    assert {path.name for path in folder.iterdir()} >= pictures | {
        f"trace_naive_rank{rank}.json.gz" for rank in (0, 1)
    }


def test_a_row_that_is_given_twice_is_measured_once(tmp_path):
    twice = ("local", "naive", "naive")
    short = {"layers": 2, "check_steps": 0, "profile_steps": 0}
    records = measured(ddp_bench.EXPERIMENT, tmp_path, strategies=twice, **short)
    assert [record.variant for record in records] == ["local", "naive"]


@pytest.mark.ranks(4)
def test_stages_of_a_replica_have_the_same_sequences(context):
    """Those of one replica are not neighbours: the pipeline is the outermost axis."""
    row = Variant("bucketed-pp2", get_strategy("bucketed"), layout=Layout(pipeline=2))
    assert parameter_difference(context, row, steps=1) < 1e-6


def out_of_memory_on_one_rank(context, where):
    """Rank 1's overlap row runs out of memory in construction, warm-up, step or inspection."""
    calls = itertools.count(1)
    calls_until = {"construction": 1, "warm-up": 2, "timed step": 3, "inspection": 5}

    def reached(*_):
        if next(calls) == calls_until[where]:
            raise RuntimeError(DRIVER)

    def wrap(module, how):
        model = OverlapDDP(module, process_group=how.process_group)
        if context.rank == 1 and where == "construction":
            reached()
        elif context.rank == 1:
            module.norm.weight.register_hook(reached)
        return model

    naive, overlap, bucketed = variants(["naive", "overlap", "bucketed"], [1.0])
    rows = [naive, replace(overlap, strategy=replace(overlap.strategy, wrap=wrap)), bucketed]
    with redirect_stderr(io.StringIO()) as said:
        timings = time_rounds(
            SMOKE,
            rows,
            context,
            rounds=2,
            warmup=2,
            steps=2,
            inspect=lambda variant, trial: trial(),
        )
    found = {}
    for name, timing in timings.items():
        found[name] = timing.out_of_memory or len(timing.phases["step"])
    return found, said.getvalue()


DRIVER = "CUDA driver error: out of memory"


@pytest.mark.parametrize("where", ["construction", "warm-up", "timed step", "inspection"])
def test_a_row_without_memory_says_so_and_the_sweep_goes_on(where):
    answers, said = zip(*run_ranks(out_of_memory_on_one_rank, 2, where), strict=True)
    assert answers == ({"naive": 4, "overlap": True, "bucketed": 4},) * 2
    line = f"[rank 1] no memory left in a step of overlap: {DRIVER}\n"
    assert said == ("", line * (where != "construction"))


def test_an_option_that_is_given_twice_keeps_both():
    words = [
        "--strategies",
        "local",
        "--strategies",
        "zero1,fsdp",
        "--rounds",
        "2",
        "--rounds",
        "3",
    ]
    config, _ = ddp_bench.EXPERIMENT.chosen(ddp_bench.EXPERIMENT.parser().parse_args(words))
    assert config.strategies == ("local", "zero1", "fsdp")
    assert config.rounds == 3  # of an option with one value, the last


def ended(context, out, fault):
    """Return exit code, stdout and stderr of a run in which something happens on this rank."""
    arguments = [*SMOKE_ARGUMENTS, "--strategies=local,naive,flat", f"--out={out}", "--name=run"]
    config, frame = ddp_bench.EXPERIMENT.chosen(ddp_bench.EXPERIMENT.parser().parse_args(arguments))
    profile = Trial.profile
    time_block = step_timing._time_block
    blocks = itertools.count()

    def stops():
        signal.raise_signal(signal.SIGTERM)

    def fails():
        raise RuntimeError("two\nlines" if fault == "bug" else DRIVER)

    def traced(self, *options, **more):
        profile(self, *options, **more)
        if self._name == "local":
            return
        if fault in ("bug", "trace"):
            fails()
        elif fault == "signal":
            stops()

    def timed(*arguments, **more):
        if next(blocks) == 4 and fault == "round":
            stops()
        time_block(*arguments, **more)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Trial, "profile", traced))
        # reading longer traces takes seconds
        stack.enter_context(patch.object(measured_rows, "TRACED_ON_CPU", 1))
        stack.enter_context(patch.object(step_timing, "_time_block", timed))
        if fault == "trace":
            stack.enter_context(
                patch.object(reference, "parameter_difference", lambda *_, **more: fails())
            )
        # the rounds take 10 s, the first row 5 and 30 until the second is explained
        if fault == "limit":
            moments = iter([0, 10, 100, 105, 130])
            clock = SimpleNamespace(monotonic=moments.__next__)
            stack.enter_context(patch.object(ddp_bench, "monotonic", moments.__next__))
            stack.enter_context(patch.object(measured_rows, "time", clock))
        said = stack.enter_context(redirect_stdout(io.StringIO()))
        errors = stack.enter_context(redirect_stderr(io.StringIO()))
        code = _to_end("ddp_bench", lambda: ddp_bench.EXPERIMENT.run(config, context, frame))
    return code, said.getvalue(), errors.getvalue()


MISSING = {  # what happens → exit code, what stderr says of it, rows that are explained
    "bug": (
        2,
        "ddp_bench: error: not explained: {} (RuntimeError('two\\nlines')); the rest is in",
        ["local"],
    ),
    "signal": (143, "; not explained: {}\n", ["local"]),
    "limit": (0, "not explained, since that would take longer than measuring did: {}\n", ["local"]),
    "trace": (0, "not explained: naive, for whose trace no memory is left\n", ["local"]),
    "round": (143, "; 3 steps of each row, and not explained: local, naive, flat\n", []),
}


@pytest.mark.parametrize("fault", MISSING)
def test_what_was_measured_stays_and_what_is_missing_is_said(fault, tmp_path):
    (code, said, errors), _ = run_ranks(ended, 2, str(tmp_path), fault)
    folder = tmp_path / "ddp_bench" / "run"
    rows = {record.variant: record.metrics for record in read_json(folder / "records.json")}
    assert list(rows) == ["local", "naive", "flat"] and "flat" in VIEW.table(
        read_json(folder / "records.json")
    )
    assert {len(metrics["step_samples_ms"]) for metrics in rows.values()} == {
        3 if fault == "round" else 6
    }
    assert all(metrics["volume_as_predicted"] for metrics in rows.values())
    assert (rows["flat"]["max_abs_param_diff"] is None) == (fault == "trace")
    fastest = sorted(("naive", "flat"), key=lambda name: rows[name]["step_p50_ms"])
    expected, line, explained = MISSING[fault]
    assert code == expected and errors.count(line.format(", ".join(fastest))) >= 1, errors
    assert "Traceback" not in errors
    assert [name for name, metrics in rows.items() if metrics["comm_ms"] is not None] == explained
    assert (folder / "table.md").exists() == ("strategy" in said) == (fault != "round")
    assert ("report: " in said) == (code == 0)


def said(variant, **metrics):
    records = [Record("ddp_bench", variant, {}, {"step_p50_ms": 20.0} | metrics, {}, None)]
    return comparison.what_communication_costs(records) + comparison.against_the_peer(records)


def over_local(middle, low, high):
    """Return the metrics of a row of 20 ms whose overhead is this share of its step, in %."""
    shares = (("", middle), ("_low", low), ("_high", high))
    ratios = {f"vs_local{end}": 1 / (1 - share / 100) for end, share in shares}
    return ratios | {"overhead_ms": 20 * middle / 100, "overlap_pct": 90.0}


def test_communication_is_in_the_way_where_the_whole_interval_says_so():
    parts = {"overhead_exposed_ms": 3.0, "overhead_slowdown_ms": 1.0, "overhead_idle_ms": -1.0}
    closed = parts | {"overhead_closes": True}
    sentence = (
        "Communication is in the way: bucketed, the fastest of ours that overlaps, takes 4.4 ms "
        "more than local, 22 % of its step (95 %: 20 to 24 %)"
    )
    cause = ", most of it exposed communication (3.0 ms)"
    assert said("bucketed", **over_local(22, 20, 24), **closed) == [f"{sentence}{cause}."]
    assert said("bucketed", **over_local(22, 20, 24), **parts) == [f"{sentence}."]


def test_communication_is_hidden_where_interval_and_trace_say_so():
    (line,) = said("fsdp", **over_local(3, 2, 5))
    assert line.startswith("Communication is hidden: fsdp,") and line.endswith(
        "covers 90 % of its communication."
    )


@pytest.mark.parametrize(
    "variant, share, overlap, reason",
    [
        # a tie
        ("bucketed", (22, -5, 40), 90.0, "The interval reaches above 10 %. Noise is ± 30 %"),
        # no tie, and not clear either
        ("bucketed", (19, 8, 30), 90.0, "The interval reaches above 10 %"),
        ("bucketed", (-74, -90, -60), 90.0, "cannot be faster than no communication"),
        (
            "bucketed",
            (14, -210, 73),
            90.0,
            "(its rounds differ too much for an interval). Noise is",
        ),
        ("overlap", (3, 2, 5), 33.0, "Compute covers only 33 %"),
        ("bucketed", (3, 2, 5), None, "There is no trace"),
    ],
)
def test_a_run_says_that_it_cannot_tell(variant, share, overlap, reason):
    (line,) = said(variant, noise_pct=30.0, **over_local(*share) | {"overlap_pct": overlap})
    assert (
        line.startswith("This run cannot tell whether communication is hidden") and reason in line
    )


def test_a_strategy_that_updates_a_part_may_be_faster_than_no_communication():
    assert said("fsdp", **over_local(-3, -4, -2))[0].startswith("Communication is hidden")


def test_the_fastest_of_ours_is_compared_with_torch_s():
    peer = {"vs_torch_ddp": 1.25, "vs_torch_ddp_low": 1.2, "vs_torch_ddp_high": 1.3}
    slower = (
        "flat, the fastest of ours, takes 1.250 times as long as torch DDP's fastest row "
        "(95 %: 1.200 to 1.300)."
    )
    assert said("flat", **peer) == [slower]
    tie = (
        "flat, the fastest of ours, ties with torch DDP's fastest row: 1.250 "
        "(95 %: 0.900 to 1.300)."
    )
    assert said("flat", **peer | {"vs_torch_ddp_low": 0.9}) == [tie]
    assert said("naive", **over_local(22, 20, 24)) == said("fsdp2", **over_local(22, 20, 24)) == []


def test_noise_makes_no_finding(few_resamples):
    each_seed(findings_follow_intervals)


def findings_follow_intervals(seed):
    """Of made-up runs: every claim holds for the interval of the same records."""
    random = Random(seed)
    noise = random.choice([0.005, 0.05, 0.3, 0.8])
    pairs = random.choice([3, 5, 12, 24])
    records = []
    for variant in ("local", "naive", "bucketed", "fsdp", "torch-ddp"):
        true_ms = 100.0 if variant == "local" else random.choice([100.0, 104.0, 125.0])
        steps = [true_ms * random.lognormvariate(0, noise) for _ in range(pairs)]
        metrics = {"step_samples_ms": steps, "overlap_pct": random.choice([None, 20.0, 95.0])}
        metrics |= percentile_metrics("step", steps)
        records.append(Record("ddp_bench", variant, {"backend": "gloo"}, metrics, {}, None))
    records = compare(records)
    of = {record.variant: record.metrics for record in records}
    for line in VIEW.findings(records):
        best = of.get(line.partition(": ")[2].partition(",")[0], {})
        if "is hidden: " in line and not line.startswith("This run"):
            assert best["vs_local_high"] <= 1 / 0.9 and best["overlap_pct"] >= 50
        elif "is in the way" in line:
            assert best["vs_local_low"] > 1 / 0.9
        elif "times as long" in line:
            best = of[line.partition(",")[0]]
            assert not best["vs_torch_ddp_low"] <= 1 <= best["vs_torch_ddp_high"]
        else:
            assert line.startswith("This run cannot tell") or " ties with " in line, line


def test_an_oom_row_is_shown_as_oom(tmp_path):
    local, flat = (
        compared("local", forward_backward_p50_ms=3.0, optimizer_p50_ms=3.0),
        compared("flat"),
    )
    records = [local, replace(flat, metrics={"step_p50_ms": "OOM"})]
    assert "OOM" in VIEW.table(records)
    draw_step_times(records, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


# As on a machine with a GPU, where ranks are new interpreters and no forks.
STARTED = (
    "import runpy, sys, torch; torch.cuda.is_available = lambda: True; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def test_plain_python_starts_its_ranks_and_ends_with_one_line_of_json(tmp_path):
    """In a folder whose files are called as our packages are."""
    (tmp_path / "launch.py").write_text("")
    (tmp_path / "experiments.py").write_text("")
    arguments = [
        "--nproc=2",
        "--backend=gloo",
        "--strategies=local,bucketed",
        "--json",
        "--profile-steps=0",
    ]
    done = python(
        "-c", STARTED, ROOT / "launch" / "ddp_bench.py", *arguments, *SMOKE_ARGUMENTS, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["experiment"] == "ddp_bench"
    assert [record["variant"] for record in answer["records"]] == ["local", "bucketed"]
    assert answer["records"][1]["metrics"]["step_p50_ms"] > 0
    assert (
        "bucketed" in done.stdout
        and "checking bucketed" in done.stderr
        and "checking" not in done.stdout
    )


def test_one_rank_is_told_how_to_get_more(one_rank, tmp_path):
    config, said = replace(SMOKE, strategies=("local",), profile_steps=0), []
    run = ddp_bench.EXPERIMENT.open(config, one_rank, tmp_path)
    run.notice = said.append
    ddp_bench.EXPERIMENT.measure(config, one_rank, run)
    assert "one rank: nothing is communicated. For more: --nproc 2" in said


def test_a_killed_rank_ends_the_run_with_a_message_and_nothing_half_written(tmp_path):
    """Check that SIGKILL of a rank ends the run with an error and leaves no partial file."""
    out, stdout = tmp_path / "out", tmp_path / "stdout"
    command = ["launch/ddp_bench.py", "--nproc=2", "--backend=gloo", f"--out={out}"]
    command += ["--rounds=1000", "--check-steps=0", "--timeout=8", "--strategies=naive,flat"]
    process, terminal = on_terminal(command, stdout)
    lines = shown(terminal)
    assert any("round 1/1000: naive" in line for line in lines)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    begin = time.monotonic()
    process.join(60)
    errors = "\n".join(lines)
    assert process.exitcode not in (None, 0) and time.monotonic() - begin < 45
    assert "SIGKILL" in errors or "lost another rank" in errors
    assert stdout.read_text() == ""
    assert [path for path in out.rglob("*") if path.is_file()] == []


def compared(variant, **metrics):
    config = {
        "size": "tiny",
        "num_parameters": 1e6,
        "batch": 1,
        "context": 2,
        "dtype": "fp32",
        "world_size": 2,
    }
    config |= {"backend": "gloo", "profile_steps": 1, "steps": 6}
    steps = {"step_p20_ms": 40.0, "step_p50_ms": 60.0, "step_p80_ms": 61.0, "overhead_ms": 4.0}
    return Record(
        "ddp_bench",
        variant,
        config,
        steps | metrics,
        {"device_name": "some CPU", "torch": "2"},
        None,
    )


def cells(record):
    ((_, _, columns),) = VIEW.tables([record])
    return {column.title: column.text(record) for column in columns}


def test_a_comparison_inside_its_interval_prints_as_a_tie():
    ratio = {"vs_torch_ddp": 1.013, "vs_torch_ddp_low": 0.98, "vs_torch_ddp_high": 1.05}
    ratio |= {"vs_local": 1.07, "vs_local_low": 0.99, "vs_local_high": 1.1}
    found = cells(compared("bucketed", **ratio))
    assert (found["÷ torch DDP"], found["overhead ms"]) == ("1.013 tie", "4.0 tie")
    found = cells(compared("bucketed", **ratio | {"vs_torch_ddp_low": 1.001, "vs_local_low": 1.01}))
    assert (found["÷ torch DDP"], found["overhead ms"]) == ("1.013", "4.0")


OPEN = {"overhead_closes": False, "overhead_unexplained_ms": -30.0}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "noise, remedy", [(9.0, "More --profile-steps"), (60.0, "Steps differ by up to ± 60 %")]
)
def test_an_open_account_is_named_and_marked_on_every_backend(backend, noise, remedy):
    record = compared("naive", noise_pct=noise, **OPEN)
    record.config["backend"] = backend
    (line,) = VIEW.findings([record])
    assert "overhead of naive (marked open)" in line and remedy in line
    assert cells(record)["overhead ms"] == "4.0 open"
    assert open_rows([record, compared("flat", overhead_closes=True)]) == ["naive"]


def test_bars_do_not_invent_causes():
    """Draw causes with their length in the trace, and an open account as one unexplained part."""
    local = {"step_p50_ms": 100.0, "optimizer_p50_ms": 10.0}
    row = {
        "step_p50_ms": 140.0,
        "optimizer_p50_ms": 10.0,
        "overhead_exposed_ms": 30.0,
        "overhead_copies_ms": 4.0,
    }
    account = {"overhead_closes": True, "overhead_unexplained_ms": 6.0}
    closed = columns._step_parts(row | account, local)
    assert (
        closed["compute"] == 90.0
        and closed["exposed communication"] == 30.0
        and closed["copies"] == 4.0
    )
    assert closed["not explained"] == 6.0 and sum(closed.values()) == 140.0
    # Compute that is 8 ms faster and an optimizer with 5 ms less work shorten their own parts. The
    # clock's optimizer time has idle time in it, which counts once.
    saving = {"overhead_slowdown_ms": -8.0, "overhead_optimizer_ms": -5.0, "overhead_idle_ms": 13.0}
    saved = columns._step_parts(row | account | saving | {"optimizer_p50_ms": 18.0}, local)
    assert (saved["compute"], saved["slower compute"], saved["optimizer"]) == (82.0, 0.0, 5.0)
    assert sum(saved.values()) == 140.0
    for metrics in (row, row | {"overhead_closes": False}):
        parts = columns._step_parts(metrics, local)
        assert parts["not explained"] == 40.0 and parts["exposed communication"] == 0.0
    faster = columns._step_parts(row | {"step_p50_ms": 80.0}, local)
    assert faster["not explained"] == 0.0


def test_a_row_that_ran_eager_is_wrong():
    row = compared("naive", compiled_calls=0, compiled_parts=24, ran_eager=True)
    row.config["compile"] = "blocks"
    (line,) = comparison.wrong_rows([row])
    assert line.startswith(
        "naive: measured eager code, although --compile blocks was given: 0 of 24 compiled parts"
    )
    assert cells(row)["compiled"] == "0 of 24"


@pytest.mark.parametrize(
    "free_gib, choice",
    [(139, ("medium", 8)), (23, ("medium", 4)), (15, ("small", 8)), (7, ("small", 2))],
)
def test_the_size_follows_the_free_memory(monkeypatch, free_gib, choice):
    config = ddp_bench.DDPBenchConfig(**ddp_bench.EXPERIMENT.preset("", on_gpu=True))
    context = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    monkeypatch.setattr(auto_size, "computes_in_bf16", lambda device: True)
    monkeypatch.setattr(auto_size, "memory_of_a_rank", lambda device, context: free_gib * 2**30)
    sized = auto_size.sized(config, context)
    assert (sized.size, sized.batch, sized.dtype) == (*choice, "bf16")
    assert auto_size.peak_bytes(sized, context) < free_gib * 2**30
    # An option that was given stays.
    given = auto_size.sized(replace(config, size="large"), context)
    assert (given.size, given.batch) == ("large", 8)


def test_an_older_gpu_computes_in_fp16(monkeypatch):
    config = ddp_bench.DDPBenchConfig(**ddp_bench.EXPERIMENT.preset("", on_gpu=True))
    context = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    monkeypatch.setattr(auto_size, "computes_in_bf16", lambda device: False)
    monkeypatch.setattr(auto_size, "memory_of_a_rank", lambda device, context: 15 * 2**30)
    assert auto_size.sized(config, context).dtype == "fp16"


def test_the_default_on_gpus_leaves_a_users_model_uncompiled():
    preset = ddp_bench.EXPERIMENT.preset("", on_gpu=True)
    config = ddp_bench.DDPBenchConfig(**preset | {"factory": "examples.own_model:build"})
    assert preset["compile"] == "blocks" and config.compile == "off"


@pytest.mark.parametrize(
    "of_local, of_fsdp2, said",
    [
        (9.0, 9.0, ""),
        (11.0, 30.0, "; this run measures the host: the GPU is idle in 11 % of local's step"),
        # One row alone, as FSDP2's in a model that other strategies keep the GPU busy with.
        (2.0, 30.0, "; the GPU waits for the host: fsdp2 30 % of the step"),
    ],
)
def test_the_headline_says_when_the_host_is_measured(of_local, of_fsdp2, said):
    records = []
    for name, idle_pct in [("local", of_local), ("fsdp2", of_fsdp2)]:
        records.append(Record("ddp_bench", name, {}, {"gpu_idle_pct": idle_pct}, {}, None))
    assert comparison.host_bound(records) == said
