"""Causes of exposed and idle time, in traces that the tests write by hand."""

import itertools
import json
import time

import pytest

from distlab.measure.trace.kernels import short_kernel_name
from distlab.trace import explain_traces
from distlab.trace.explanation import parts_of
from tests.trace import handmade
from tests.trace.handmade import STEP_MS, STEPS, Writer, gpu_run


@pytest.mark.parametrize("cause", handmade.CAUSES)
def test_each_cause_is_the_first_finding(tmp_path, cause):
    explanation = explain_traces(gpu_run(tmp_path, handmade.CAUSES[cause]))
    assert explanation.findings[0].cause == cause
    assert explanation.first == explanation.findings[0].sentence
    for rank in explanation.ranks:
        assert len(rank.steps) == STEPS and rank.found_by == "ProfilerStep# ranges"
        for step in rank.steps.values():
            total, *parts = parts_of(step.account).values()
            assert sum(parts) == pytest.approx(total)
            exposed_ms = sum(message.exposed_ms for message in step.messages)
            assert exposed_ms == pytest.approx(step.account.exposed_ms)


def test_a_healthy_run_has_no_finding(tmp_path):
    explanation = explain_traces(gpu_run(tmp_path, handmade.healthy))
    assert not any(finding.is_large for finding in explanation.findings)
    assert explanation.first.startswith("Nothing to act on")
    assert explanation.ranks[0].mean.overlap_pct == pytest.approx(100)


def test_the_timeline_has_the_launches_and_waits_of_the_host(tmp_path):
    def step(writer, begin):
        handmade.layers(writer, begin, 15, 29, launched=14)
        writer.span("cuda_runtime", "cudaStreamSynchronize", begin + 2, begin + 5)

    explanation = explain_traces(gpu_run(tmp_path, step))
    _, rows = explanation.worst()
    for lanes in rows.values():
        assert lanes["host waits"] == [(pytest.approx(2), pytest.approx(5))]
        # each kernel is launched once, and drawn on the device's row later
        assert len(lanes["host launches"]) > 1
        assert all(14 <= start < 15 and start == end for start, end in lanes["host launches"])
        assert lanes["compute"][0][0] >= 15


def test_a_straggler_is_named_with_the_part_in_which_it_falls_behind(tmp_path):
    found = explain_traces(gpu_run(tmp_path, handmade.straggler)).findings[0]
    assert (found.rank, found.late_rank, found.behind) == (0, 1, "compute of the forward")
    assert found.ms == pytest.approx(6)

    def late_data(writer, begin):
        ready = 7 if writer.rank == 1 else 0.1
        writer.span("user_annotation", "enumerate(DataLoader)#x", begin + 0.05, begin + ready)
        handmade.layers(writer, begin, ready + 0.05, ready + 10, launched=ready + 0.02)
        writer.all_reduce(begin + ready + 0.5, begin + ready + 10, begin + 20)
        handmade.layers(writer, begin, 20, 29.9, launched=ready + 0.6)

    found = explain_traces(gpu_run(tmp_path, late_data)).findings
    straggler = next(finding for finding in found if finding.cause == "straggler")
    assert (straggler.late_rank, straggler.behind) == (1, "data loading")


def test_a_value_that_is_on_the_host_already_does_not_stall(tmp_path):
    def host_bound(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        writer.span("cpu_op", "aten::item", begin + 12, begin + 12.01)
        handmade.layers(writer, begin, 15, 29.9, launched=14.98)

    found = explain_traces(gpu_run(tmp_path, host_bound)).findings[0]
    # 5 ms before the item's layers, and 0.1 ms at each end of the step
    assert (found.cause, found.ms) == ("host-bound", pytest.approx(5.2))


def test_compute_that_communication_slows_is_contention(tmp_path):
    def contended(writer, begin):
        handmade.layers(writer, begin, 1, 10)
        handmade.layers(writer, begin, 10, 28, ms=2.0, launched=0.2)
        writer.all_reduce(begin + 0.4, begin + 10, begin + 28)
        handmade.layers(writer, begin, 28, 30, launched=0.5)

    found = explain_traces(gpu_run(tmp_path, contended)).findings[0]
    assert found.cause == "contention" and found.ms == pytest.approx(9, rel=0.05)


def test_two_collectives_at_once_share_the_exposed_time(tmp_path):
    def two_streams(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        writer.all_reduce(begin + 1, begin + 9, begin + 15)
        writer.launched("ncclDevKernel_SendRecv", begin + 1.1, begin + 12, begin + 18, tid=30)
        handmade.layers(writer, begin, 18, 29.9, launched=1.2)

    explanation = explain_traces(gpu_run(tmp_path, two_streams))
    step = explanation.ranks[0].steps[5]
    assert step.account.exposed_ms == pytest.approx(8)
    assert [message.exposed_ms for message in step.messages] == pytest.approx([5, 3])


def test_groups_have_bytes_and_bus_bandwidth(tmp_path):
    (group,) = explain_traces(gpu_run(tmp_path, handmade.straggler)).groups()
    assert (group.operation, group.count, group.size_bytes) == ("all_reduce", 1, 40e6)
    # 40 MB in the 2 ms after both ranks have come, times 2 (n - 1) / n = 1
    assert group.bus_gb_per_s == pytest.approx(20)


def stripped(paths, keep):
    """Remove all annotations of the steps but those that `keep` accepts, in place."""
    for path in paths:
        trace = json.loads(path.read_text())
        trace["traceEvents"] = [
            event
            for event in trace["traceEvents"]
            if not event["name"].startswith("ProfilerStep#") or keep(event["name"])
        ]
        path.write_text(json.dumps(trace))
    return paths


def test_steps_are_found_by_repetition_and_by_a_window(tmp_path):
    paths = stripped(gpu_run(tmp_path, handmade.straggler), keep=lambda name: False)
    explanation = explain_traces(paths)
    # The last step has no next one to end at.
    windows = [step.window for step in explanation.ranks[0].steps.values()]
    assert explanation.ranks[0].found_by == "repetition of the work"
    assert [end - begin for begin, end in windows] == pytest.approx([STEP_MS] * (STEPS - 1))
    assert explanation.findings[0].cause == "straggler"
    explanation = explain_traces(paths, window=(40.0, 60.0))
    assert parts_of(explanation.ranks[0].mean)["step"] == 20
    with pytest.raises(ValueError, match="has no work from 400 to 500 ms"):
        explain_traces(paths, window=(400.0, 500.0))


def test_ranks_with_other_steps_are_compared_where_they_meet(tmp_path):
    paths = gpu_run(tmp_path, handmade.straggler)
    stripped(paths[1:], keep=lambda name: name != "ProfilerStep#5")
    explanation = explain_traces(paths)
    assert any("different numbers of steps" in note for note in explanation.notes)
    assert any(finding.late_rank == 1 and finding.is_large for finding in explanation.findings)


def test_overlapping_steps_are_counted_once(tmp_path):
    writer = Writer()
    for number, begin in enumerate((0.0, 20.0)):
        writer.span("user_annotation", f"ProfilerStep#{number}", begin, begin + 30)
    writer.compute(1, 1.1, 49)
    windows = [
        step.window
        for step in explain_traces([writer.write(tmp_path / "t.json")]).ranks[0].steps.values()
    ]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(windows))


def test_further_communication_is_named_by_a_pattern(tmp_path):
    writer = Writer()
    writer.launched("my_fabric_kernel", 1, 2, 4, tid=9)
    writer.compute(1.1, 5, 9)
    path = writer.write(tmp_path / "t.json")
    assert explain_traces([path]).ranks[0].mean.comm_ms == 0
    assert explain_traces([path], communication=["my_fabric"]).ranks[0].mean.comm_ms == 2
    with pytest.raises(ValueError, match="not a regular expression"):
        explain_traces([path], communication=["("])


def test_files_without_work_and_two_files_of_a_rank_are_refused(tmp_path):
    empty = Writer().write(tmp_path / "empty.json")
    with pytest.raises(ValueError, match=r"empty\.json has no kernels"):
        explain_traces([empty])
    paths = gpu_run(tmp_path, handmade.healthy)
    with pytest.raises(ValueError, match="both of rank 0"):
        explain_traces([paths[0], paths[0]])


def test_time_grows_linearly_with_the_events(tmp_path):
    """A 16 times larger trace takes 16 times as long, and not 256 times.

    40 is between, for noise.
    """
    seconds = []
    for steps in (5, 80):
        writer = Writer()
        for number in range(steps):
            begin = number * STEP_MS
            writer.span("user_annotation", f"ProfilerStep#{number}", begin, begin + STEP_MS)
            handmade.layers(writer, begin, 0.1, 29, ms=0.1)
            writer.all_reduce(begin + 1, begin + 29, begin + 29.9)
        path = writer.write(tmp_path / f"{steps}.json")
        began = time.process_time()
        explain_traces([path])
        seconds.append(time.process_time() - began)
    assert seconds[1] < 40 * seconds[0]


@pytest.mark.parametrize(
    "name, short",
    [
        (
            "void at::native::elementwise_kernel<128, 2>(int, (x)::y)",
            "at::native::elementwise_kernel",
        ),
        ("void fbgemm_gpu::(anonymous namespace)::_to_float<float>(int)", "fbgemm_gpu::_to_float"),
        ("nvjet_tst_128x256", "nvjet_tst_128x256"),
    ],
)
def test_a_kernel_is_named_without_its_types(name, short):
    assert short_kernel_name(name) == short


def test_a_host_that_lost_its_lead_by_a_wait_is_late_because_of_it(tmp_path):
    def wait_then_late(writer, begin):
        handmade.layers(writer, begin, 0.1, 5)
        writer.span("cpu_op", "aten::item", begin + 2, begin + 5.01)  # waits for 3 ms
        for at in (6, 8, 10, 12):  # 1 ms of work and 1 ms of waiting for the host, in turn
            handmade.layers(writer, begin, at, at + 1, launched=at - 0.02)
        handmade.layers(writer, begin, 13, 29.95, launched=12.1)

    found = explain_traces(gpu_run(tmp_path, wait_then_late)).findings
    by_cause = {finding.cause: finding.ms for finding in found}
    # Four gaps of 1 ms. The wait has cost a lead of 3.01 ms.
    assert by_cause["item"] == pytest.approx(3.01, abs=0.02)
    assert by_cause["host-bound"] == pytest.approx(0.99 + 0.15, abs=0.02)


def test_launching_small_messages_counts_as_their_cost(tmp_path):
    def launched_one_by_one(writer, begin):
        handmade.layers(writer, begin, 0.1, 18)
        for number in range(100):
            at = begin + 18.05 + 0.1 * number
            writer.all_reduce(at - 0.02, at, at + 0.05, 25_000)
        handmade.layers(writer, begin, 28, 29.95, launched=18)

    found = explain_traces(gpu_run(tmp_path, launched_one_by_one)).findings[0]
    assert found.cause == "small messages"
    assert found.ms == pytest.approx(10, abs=0.1)  # 5 ms of messages, 5 ms of launching them


@pytest.mark.parametrize("is_launching_late", [True, False])
def test_what_makes_a_rank_late_comes_before_the_wait_for_it(tmp_path, is_launching_late):
    def late_rank(writer, begin):
        end = 16 if writer.rank == 1 else 10
        if writer.rank == 0:
            handmade.layers(writer, begin, 0.1, 10)
        elif is_launching_late:
            for at in range(10):  # launched 0.5 ms after the one before has ended
                first = 1.6 * at + 0.5
                handmade.layers(writer, begin, first, first + 1.1, ms=1.1, launched=first - 0.02)
        else:
            handmade.layers(writer, begin, 0.1, 16, ms=1.59)
        writer.all_reduce(begin + 1, begin + end, begin + 18)
        handmade.layers(writer, begin, 18, 29.9, launched=16.5)

    found = explain_traces(gpu_run(tmp_path, late_rank)).findings
    causes = [finding.cause for finding in found[:2]]
    if is_launching_late:
        assert causes == ["host-bound", "straggler"]
        assert found[0].rank == found[1].late_rank == 1
    else:
        assert causes[0] == "straggler"
