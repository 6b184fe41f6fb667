"""The sweeps in small: collectives, bucket sizes, scaling. What they write, what reads it, what they refuse."""

import dataclasses
import itertools
import json

import pytest
import torch

from distlab.bench.bucket_size import best_bucket_size
from distlab.bench.subject import Workbench, variants
from distlab.comm import RankContext
from distlab.measure import bandwidth
from distlab.report import view
from distlab.report.record import OutputFolder, Record, read_json, write_json
from distlab.simulate.calibrate import MeasuredLinks, measured_links
from distlab.testing import run_ranks
from distlab.theory.collective_time import CollectiveFit, Piece
from experiments import allreduce_sweep, bucket_sweep, scaling_measured
from experiments.allreduce_sweep import SweepConfig
from experiments.bucket_sweep import BucketSweepConfig
from experiments.bucket_sweep import parts as sweep_parts
from experiments.bucket_sweep.choice import optimum
from experiments.scaling_measured import MeasureConfig, Regime, cells, prediction
from launch import allreduce_sweep as launch_sweep
from launch import bucket_sweep as launch_buckets
from launch import scaling as launch_scaling

COLLECTIVES = SweepConfig(
    operations=("all_reduce", "broadcast", "whole_all_reduce"),
    sizes=(4096, 65536, 262144),
    group_sizes=(2, 3),
    warmup=1,
    repeats=5,
    contention_bytes=4096,
    matrix=128,
)


def sweep_of_collectives(context):
    return allreduce_sweep.run(COLLECTIVES, context)


def sweep_with_a_broken_broadcast(context):
    """It throws away what arrives."""
    original = bandwidth.collectives.broadcast
    bandwidth.collectives.broadcast = lambda tensor, group: original(tensor.clone(), group)
    try:
        config = dataclasses.replace(COLLECTIVES, group_sizes=(2,), sizes=(64, 4096), contention_bytes=0)
        return allreduce_sweep.run(config, context)
    finally:
        bandwidth.collectives.broadcast = original


def test_collectives_are_timed_fitted_and_read_again(tmp_path):
    records, *others = run_ranks(sweep_of_collectives, 3)
    assert all([r.to_dict() for r in other] == [r.to_dict() for r in records] for other in others)
    assert len(allreduce_sweep.timings(records)) == 2 * 3 * 3
    assert {r.config["world_size"] for r in allreduce_sweep.fits(records)} == {2, 3}
    assert {r.variant for r in allreduce_sweep.contention(records)} == {
        "contention matmul",
        "contention copy",
    }
    assert allreduce_sweep.wrong_rows(records) == []
    for record in allreduce_sweep.timings(records):
        m = record.metrics
        assert m["time_p20_ms"] <= m["time_p50_ms"] <= m["time_p80_ms"]
        share = bandwidth.traffic(record.variant, record.config["world_size"])
        assert m["busbw_gb_per_s"] == pytest.approx(m["algbw_gb_per_s"] * share)
        assert m["fit_error_pct"] == pytest.approx(100 * (m["fit_ms"] / m["time_p50_ms"] - 1))
        assert m["link_ms"] is None  # no datasheet of this machine
    view.write(allreduce_sweep.VIEW, records, tmp_path)
    assert {"bandwidth.png", "fit.png", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    links = measured_links(
        read_json(tmp_path / "records.json"), records[0].environment["device_name"], "gloo"
    )
    (fit,) = (r for r in records if r.variant == "fit all_reduce" and r.config["world_size"] == 3)
    expected = fit.metrics["pieces"][0]["latency_s"] + 1000 / fit.metrics["pieces"][0]["bytes_per_s"]
    assert links.time("all_reduce", 1000, 3) == pytest.approx(expected)
    assert links.time("all_reduce", 1000, 1) == 0 < links.time("broadcast", 1000, 2)
    assert links.time("all_reduce", 1e9, 8) > links.time(
        "all_reduce", 1e9, 3
    )  # 14/8 of a payload instead of 4/3
    with pytest.raises(ValueError, match="no fit of 'all_gather'"):
        links.time("all_gather", 1000, 2)
    with pytest.raises(ValueError, match="no collectives measured on 'another GPU'"):
        measured_links(records, "another GPU")


def test_a_broken_collective_is_printed_as_wrong():
    records = run_ranks(sweep_with_a_broken_broadcast, 2)[0]
    wrong = allreduce_sweep.findings(records)
    assert len([line for line in wrong if line.startswith("WRONG: broadcast")]) == 2
    assert not [line for line in wrong if line.startswith("WRONG: all_reduce")]


BUCKETS = BucketSweepConfig(batch=1, context=16, bucket_sizes_mb=(1.0, None), warmup=1, steps=3, rounds=1)


KNOWN_LINK = MeasuredLinks({("all_reduce", 2): CollectiveFit((Piece(0.0, 1e-4, 1e9),))})


def sweep_of_buckets(context):
    taken_here = sweep_parts._all_reduce_fit(context, 16384, None)
    return bucket_sweep.run(BUCKETS, context, links=KNOWN_LINK), taken_here.seconds(8192)


def test_bucket_sizes_are_predicted_measured_and_chosen(tmp_path):
    (records, seconds), (other, _) = run_ranks(sweep_of_buckets, 2)
    assert 0 < seconds < 1
    assert [r.to_dict() for r in other] == [r.to_dict() for r in records]
    by_name = {r.variant: r for r in records}
    names = ["bucketed-1", "bucketed-unbounded", "torch-ddp-tuned-1", "torch-ddp-tuned-unbounded"]
    assert list(by_name) == ["parts", "local", *names, "optimum"]
    parts, one = by_name["parts"].metrics, by_name["bucketed-unbounded"].metrics
    assert one["buckets"] == 1 < by_name["bucketed-1"].metrics["buckets"]
    assert parts["packed_parameters"] == len(parts["ready_ms"])  # buckets offer their memory on GPUs only
    assert len(parts["ready_ms"]) > 20 and max(parts["ready_ms"]) <= parts["backward_ms"]
    sent_ms = 0.1 + 4e-6 * (
        by_name["parts"].config["num_parameters"] + len(parts["ready_ms"])
    )  # flags ride along
    assert one["predicted_comm_ms"] == pytest.approx(sent_ms)
    # One bucket is sent when all is made and packed: nothing overlaps.
    packed_ms = 4e-6 * by_name["parts"].config["num_parameters"] / parts["pack_gb_per_s"]
    least = one["predicted_comm_ms"] + packed_ms - (parts["backward_ms"] - max(parts["ready_ms"]))
    slowed = one["predicted_comm_ms"] / parts["communication_rate"] + packed_ms
    assert least - 1e-6 <= one["predicted_exposed_comm_ms"] <= slowed + 1e-6
    best = min(names[:2], key=lambda name: by_name[name].metrics["step_p50_ms"])
    found = by_name["optimum"].metrics
    assert found["best_bucket_mb"] == best.removeprefix("bucketed-") and found["regret_pct"] >= 0
    view.write(bucket_sweep.VIEW, records, tmp_path)
    assert (tmp_path / "bucket_sweep.png").stat().st_size > 10_000

    here = {"device_name": records[0].environment["device_name"], "world_size": 2, "size": "tiny", "batch": 4}
    assert best_bucket_size(records, **here) == by_name[best].config["bucket_size_mb"]
    for change in ({"world_size": 4}, {"size": "xl"}, {"device_name": "another"}):
        with pytest.raises(ValueError, match=r"no bucket sweep of .* run launch/bucket_sweep\.py"):
            best_bucket_size(records, **here | change)


def test_gradients_that_are_written_in_place_are_not_packed():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]

    def backward():
        assert parameters[1].__dict__.pop("gradient_target").shape == (
            5,
        )  # as a layer that writes there does

    assert sweep_parts._declined(parameters, backward) == [True, False]
    assert not any("gradient_target" in parameter.__dict__ for parameter in parameters)


SCALING = MeasureConfig(
    regimes=(Regime("weak", "tiny", 1), Regime("strong", "tiny", 4)),
    strategies=("bucketed", "fsdp"),
    context=16,
    dtype="fp32",
    warmup=1,
    steps=3,
    sweep_bytes=(4096, 16384),
    device="h200",
)


def scaling_in_two_parts(context, root):
    """A first run has no time for more than it must; the second goes on."""
    folder = OutputFolder(root, scaling_measured.NAME, "run")
    first = scaling_measured.run(dataclasses.replace(SCALING, regimes=SCALING.regimes[:1]), context, folder)
    return first, scaling_measured.run(SCALING, context, folder)


def test_scaling_goes_on_where_it_was_cut_off(tmp_path):
    folder = OutputFolder(tmp_path, scaling_measured.NAME, "run").path
    begun = [
        Record(
            scaling_measured.NAME,
            name,
            {"regime": str(regime), "world_size": ranks},
            {"predicted_step_ms": 2.0 + n},
            {},
            None,
        )
        for n, (regime, ranks, name) in enumerate(
            itertools.product(SCALING.regimes, (1, 2), ("local", "bucketed", "fsdp"))
        )
    ]
    write_json(begun, folder / "predictions.json")  # what an earlier run wrote is kept
    (first, records), (_, others) = run_ranks(scaling_in_two_parts, 2, str(tmp_path))
    assert [r.to_dict() for r in records] == [r.to_dict() for r in others]
    assert [r.to_dict() for r in records[: len(first)]] == [
        r.to_dict() for r in first
    ]  # nothing is timed twice
    timed = {(r.config["regime"], r.config["world_size"], r.variant) for r in records}
    regimes = ("weak:tiny:1", "strong:tiny:4")
    assert timed == (
        {("collectives", 2, f"fit {name}") for name in cells.COLLECTIVES}
        | {(regime, 1, "local") for regime in regimes}
        | {(regime, 2, name) for regime in regimes for name in ("local", "bucketed", "fsdp")}
    )
    assert scaling_measured.wrong_rows(records) == []
    predicted = {
        (r.config["regime"], r.config["world_size"], r.variant): r.metrics["predicted_step_ms"] for r in begun
    }
    for record in (r for r in records if r.config["regime"] != "collectives"):
        m = record.metrics
        assert (
            m["predicted_step_ms"]
            == predicted[record.config["regime"], record.config["world_size"], record.variant]
        )
        assert m["error_pct"] == pytest.approx(100 * (m["predicted_step_ms"] / m["step_p50_ms"] - 1))
        if record.variant != "local":
            assert m["parameters_identical"] is True
            assert m["gradients_identical"] is (True if record.variant == "bucketed" else None)
    strong = {
        (r.config["world_size"], r.variant): r.metrics
        for r in records
        if r.config["regime"] == "strong:tiny:4"
    }
    alone, pair = strong[1, "local"]["step_p50_ms"], strong[2, "bucketed"]
    assert pair["efficiency_pct"] == pytest.approx(100 * alone / pair["step_p50_ms"] / 2)
    view.write(scaling_measured.VIEW, records, folder)
    written = {path.name for path in folder.iterdir()}
    assert {"regime1.png", "regime2.png", "report.html"} <= written and "regime3.png" not in written


def test_predictions_are_made_in_a_process_of_their_own():
    assert prediction.in_own_process(sorted, [3, 1, 2]) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        prediction.in_own_process(divmod, 1, 0)
    weak = dataclasses.replace(SCALING, regimes=SCALING.regimes[:1], strategies=("bucketed", "torch-ddp"))
    assert prediction.predictions(dataclasses.replace(weak, device=None), 2, "some CPU") == []
    found = prediction.predictions(weak, 2, "some CPU")  # the device that the config names
    alone, local, bucketed, peer = (r.metrics for r in found)
    assert alone == local and bucketed == peer and bucketed["predicted_step_ms"] > local["predicted_step_ms"]
    expected = 100 * local["predicted_step_ms"] / bucketed["predicted_step_ms"]
    assert bucketed["predicted_efficiency_pct"] == pytest.approx(expected)
    assert [Regime("strong", "tiny", 4).per_rank(ranks) for ranks in (1, 2, 3, 4)] == [4, 2, None, 1]


def different_ranks(context):
    """Ranks that never synchronised: local's."""
    (row,) = variants(["local"], [None])
    bench = Workbench(context, SCALING.model(SCALING.regimes[0]), batch_size=1)
    with bench.attached(row) as attached:
        attached()
        return cells.compare_ranks(context, row, attached)


def test_ranks_that_differ_are_seen():
    for answer in run_ranks(different_ranks, 2):
        assert answer == {"parameters_identical": False, "gradients_identical": False}
    record = Record("", "bucketed", {"regime": "weak:xl:8", "world_size": 2}, answer, {}, None)
    assert len(scaling_measured.wrong_rows([record])) == 2


def elsewhere(context, root):
    folder = OutputFolder(root, scaling_measured.NAME, "run")
    with pytest.raises(ValueError, match="holds records of a GPU, this is"):
        scaling_measured.run(SCALING, context, folder)


def test_records_of_another_machine_are_not_continued(tmp_path):
    folder = OutputFolder(tmp_path, scaling_measured.NAME, "run")
    record = Record(
        scaling_measured.NAME, "local", {"regime": "x", "world_size": 1}, {}, {"device_name": "a GPU"}, None
    )
    write_json([record], folder.path / "records.json")
    run_ranks(elsewhere, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SweepConfig(operations=("all_to_all",)), "'all_to_all' is unknown; choose among all_reduce"),
        (lambda: SweepConfig(sizes=(4096,)), "give two or more positive sizes"),
        (lambda: SweepConfig(repeats=2), "repeats=2"),
        (lambda: SweepConfig().groups(1), "one rank alone sends nothing: start two or more with --nproc"),
        (lambda: SweepConfig(group_sizes=(2, 4)).groups(3), r"group sizes \(2, 4\) on 3 rank"),
        (lambda: BucketSweepConfig(dtype="int8"), "'int8' is unknown; allowed: fp32, bf16, fp16"),
        (lambda: BucketSweepConfig(bucket_sizes_mb=(25.0,)), "give two or more to compare"),
        (lambda: BucketSweepConfig(bucket_sizes_mb=(25.0, -1.0)), "bucket size -1.0"),
        (lambda: BucketSweepConfig(steps=0), "steps=0"),
        (lambda: Regime.parse("weak:xl"), "write KIND:MODEL:BATCH, such as weak:xl:8"),
        (lambda: Regime.parse("medium:xl:8"), "say weak or strong"),
        (lambda: MeasureConfig(strategies=("magic",)), "'magic' is unknown"),
        (lambda: MeasureConfig(device="h99"), "'h99' is unknown"),
        (lambda: MeasureConfig(minutes=0), "minutes=0"),
        (lambda: MeasureConfig(ranks=(1, 4)).groups(2), r"ranks \(1, 4\): between 1 and the 2"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (launch_sweep, ["--nproc=2", "--backend=nccl"], "needs an NVIDIA GPU"),
        (launch_sweep, ["--operations=sum"], "'sum' is unknown"),
        (launch_buckets, ["--bucket-size-mb", "0", "1"], "bucket size 0.0"),
        (launch_scaling, ["--regimes", "weak"], "write KIND:MODEL:BATCH"),
        (launch_scaling, ["--from", "missing.json"], "missing.json"),
    ],
)
def test_commands_say_what_is_wrong(command, arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_records_of_two_machines_stay_apart(tmp_path):
    """The same sweep on two devices: a picture for each, and a column that tells the rows apart."""

    def record(device, size, ms):
        config = {"operation": "all_reduce", "world_size": 2, "backend": "nccl"}
        metrics = {f"time_{p}_ms": ms for p in ("p20", "p50", "p80")}
        metrics |= {"payload_bytes": size, "algbw_gb_per_s": 1.0, "busbw_gb_per_s": 1.0, "link_ms": 0.5}
        return Record(
            "allreduce_sweep", "all_reduce", config, metrics, {"device_name": device, "torch": "2"}, None
        )

    records = [record(device, size, 1.0) for device in ("GPU A", "GPU B") for size in (4096, 8192)]
    page = view.write(allreduce_sweep.VIEW, records, tmp_path)
    assert {"bandwidth.png", "bandwidth-2.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "GPU A" in page.read_text() and "GPU B" in page.read_text()
    assert (
        json.loads((tmp_path / "records.json").read_text())["records"][3]["environment"]["device_name"]
        == "GPU B"
    )


def test_a_best_bucket_size_names_those_that_tie_with_it():
    def swept(size: float, p50: float, spread: float) -> Record:
        steps = {"step_p20_ms": p50 - spread, "step_p50_ms": p50, "step_p80_ms": p50 + spread}
        config = {"strategy": "bucketed", "bucket_size_mb": size}
        metrics = steps | {"predicted_step_ms": 1.0, "error_pct": 1.0}
        return Record("bucket_sweep", f"bucketed-{size:g}", config, metrics, {}, None)

    found = optimum([swept(1.0, 100.0, 1.0), swept(10.0, 101.0, 3.0), swept(25.0, 120.0, 1.0)])
    assert (found["best_bucket_mb"], found["tied_with_best_mb"]) == ("1", ["10"])
    (line,) = bucket_sweep.VIEW.findings([Record("bucket_sweep", "optimum", {}, found, {}, None)])
    assert line.startswith("Best measured: 1 MiB (tie with 10), 100.0 ms")


def too_large(context: RankContext) -> str:
    try:
        allreduce_sweep.run(SweepConfig(sizes=(4096, 10**15), contention_bytes=0), context)
    except MemoryError as error:
        return str(error)
    return "timed"


def test_payloads_that_do_not_fit_are_refused_before_anything_is_timed():
    assert all("give smaller --sizes" in answer for answer in run_ranks(too_large, 2))


def test_only_a_run_that_was_cut_off_can_be_resumed(tmp_path):
    for folder in (tmp_path, "/", tmp_path / "missing"):
        arguments = launch_scaling.parser().parse_args([f"--resume={folder}"])
        with pytest.raises(ValueError, match="no folder of a run that was cut off"):
            launch_scaling.measure(None, None, arguments)
