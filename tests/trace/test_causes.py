"""Causes of exposed and idle time, in traces that the tests write by hand."""

import itertools
import json
import time
from pathlib import Path

import pytest

from distlab.measure.trace.kernels import short_kernel_name
from distlab.measure.trace.reader import Event
from distlab.trace import explain_traces
from distlab.trace.explanation import parts_of
from distlab.trace.page import against, records_of, result
from distlab.trace.ranks import Phases
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


def test_copies_next_to_which_nothing_computes_are_a_cause(tmp_path):
    def offloads(writer, begin):
        for at in (0.1, 3):  # two at the same time, and 1 ms of them next to compute
            writer.span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin + at, begin + 9, 8)
        handmade.layers(writer, begin, 8, 29.9)

    explanation = explain_traces(gpu_run(tmp_path, offloads))
    assert explanation.first == (
        "Copies take 7.90 ms per step (26 %) on rank 0 in which nothing computes, mostly Memcpy "
        "HtoD (Pinned -> Device). Copy less, or copy earlier: from pinned memory, with "
        "non_blocking=True, on a stream of their own."
    )
    assert explanation.ranks[0].mean.copy_ms == pytest.approx(explanation.findings[0].ms)


def test_idle_time_without_a_known_cause_is_not_called_nothing(tmp_path):
    def pauses(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        handmade.layers(writer, begin, 20, 29.9, launched=0.5)

    explanation = explain_traces(gpu_run(tmp_path, pauses))
    assert explanation.first == (
        "No cause with a remedy takes 5 % of the step, but nothing runs for 10.00 ms per step (33 "
        "%) on rank 0, although the next work was queued. Look at the timeline of the longest step."
    )
    assert result(records_of(explanation)) == (
        "idle for an unknown reason, 10.00 ms per step (33 %)"
    )


def test_perfect_overlap_saves_no_more_than_the_rank_that_computes_most_can(tmp_path):
    explanation = explain_traces(gpu_run(tmp_path, handmade.straggler))
    exposed_ms = [rank.mean.exposed_ms for rank in explanation.ranks]
    assert exposed_ms == pytest.approx([8, 2])
    # In steps of the same length, noise decides which rank is the slower one.
    assert "perfect overlap would save 2.00 ms (7 %)" in explanation.summary


def test_what_a_steps_end_divides_counts_once(tmp_path):
    def beyond_its_end(writer, begin):
        handmade.layers(writer, begin, 1, 29, ms=28)
        writer.all_reduce(begin + 0.6, begin + 26, begin + 34)
        writer.launched("late kernel", begin + 0.7, begin + 26, begin + 32, tid=9)

    explanation = explain_traces(gpu_run(tmp_path, beyond_its_end))
    (group,) = explanation.groups()
    assert (group.count, group.ms, group.size_bytes) == pytest.approx((1, 8, 40e6))
    kernels = {kernel.name: (kernel.count, kernel.ms) for kernel in explanation.kernels()}
    assert kernels["late kernel"] == pytest.approx((1, 6))
    # The rest is exposed in the step after it.
    assert group.exposed_ms == pytest.approx(sum(exposed_of(explanation)) / (2 * STEPS))


def exposed_of(explanation):
    """Return the exposed communication of every step of every rank, in ms."""
    steps = [step for rank in explanation.ranks for step in rank.steps.values()]
    return [step.account.exposed_ms for step in steps]


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


def test_compute_of_an_unknown_phase_is_not_called_forward(tmp_path):
    """As the kernels of a CUDA graph, which have one launch and no operators."""
    paths = gpu_run(tmp_path, handmade.straggler)
    for path in paths:
        trace = json.loads(path.read_text())
        kept = [event for event in trace["traceEvents"] if event.get("cat") != "cpu_op"]
        path.write_text(json.dumps(trace | {"traceEvents": kept}))
    found = explain_traces(paths).findings[0]
    assert (found.cause, found.behind) == ("straggler", "compute")
    assert "find out why its compute is slower" in found.sentence


def test_kernels_of_a_graph_have_no_phase_next_to_work_that_has_one():
    def of_graph(launched_ms):
        return Event("gemm", "compute", "stream 7", 5, 6, launched_ms)

    backward = of_graph(3)._replace(operator="MmBackward0")
    phases = Phases([of_graph(1), of_graph(1), of_graph(2), backward], [])
    assert [phases.of(each) for each in (of_graph(1), of_graph(2), backward)] == [
        None,
        "forward",
        "backward",
    ]


def first_sentence(folder, extra_ms):
    """Return what is said of a run whose ranks are late by `extra_ms`, see `handmade.late_by`."""
    paths = gpu_run(folder, handmade.late_by(extra_ms), steps=len(extra_ms))
    return explain_traces(paths).first


def test_ranks_that_are_late_in_turn_are_not_stragglers(tmp_path):
    paths = gpu_run(tmp_path, handmade.late_by([{0: 6}, {1: 6}] * 5), steps=10)
    explanation = explain_traces(paths)
    assert explanation.first == (
        "Ranks wait for each other in turn, up to 3.00 ms per step (10 %): 3.00 ms for rank 0, "
        "3.00 ms for rank 1; none of them is slower beyond the spread of 10 steps. Trace more "
        "steps, or find out what delays single ones, such as other programs on the machine."
    )
    causes = {finding.cause for finding in explanation.findings}
    assert "jitter" in causes and "straggler" not in causes
    assert explanation.collectives()[0]["cause"] == "jitter"


NAMED = (
    " per step ({pct} %) for rank 1, which spends more time in compute of the forward. Give rank 1 "
    "less of it, or find out why its compute of the forward is slower."
)


def test_a_rank_that_is_late_in_most_steps_is_a_straggler(tmp_path):
    extra_ms = [{1: 6}] * 4 + [{0: 2}] + [{1: 6}] * 4 + [{0: 2}]
    said = first_sentence(tmp_path, extra_ms)
    assert said == "Rank 0 waits 4.80 ms" + NAMED.format(pct=16)


def test_steps_in_which_no_rank_waits_do_not_hide_a_straggler(tmp_path):
    # Late in 18 of 30 steps, and the other rank in 6.
    extra_ms = ([{1: 6}] * 9 + [{0: 5}] * 3 + [{}] * 3) * 2
    assert first_sentence(tmp_path, extra_ms) == "Rank 0 waits 3.60 ms" + NAMED.format(pct=12)


def test_a_rank_that_is_late_in_few_steps_is_not_slower(tmp_path):
    said = first_sentence(tmp_path, [{}] * 4 + [{1: 7.5}] * 3 + [{}] * 3)
    assert said.startswith(
        "Rank 0 waits 2.25 ms per step (8 %) for rank 1, but not steadily: rank 1 is not slower "
        "beyond the spread of 10 steps. Trace more steps"
    )


@pytest.mark.parametrize("steps, said", [(1, "1 step"), (2, "2 steps")])
def test_one_or_two_steps_cannot_tell_a_straggler(tmp_path, steps, said):
    assert first_sentence(tmp_path, [{1: 6}] * steps) == (
        "Rank 0 waits 6.00 ms per step (20 %) for rank 1, which spends more time in compute of the "
        f"forward. {said} cannot tell whether rank 1 is always the late one: trace ten or more."
    )


def test_many_ranks_that_are_late_in_turn_are_listed_in_part(tmp_path):
    clocks = [0.0] * 5
    extra_ms = [{number % 5: 8 - number % 5} for number in range(10)]
    paths = gpu_run(tmp_path, handmade.late_by(extra_ms), ranks=5, clocks=clocks, steps=10)
    assert explain_traces(paths).first.startswith(
        "Ranks wait for each other in turn, up to 5.20 ms per step (17 %): 1.60 ms for rank 0, "
        "1.40 ms for rank 1, 1.20 ms for rank 2, less for 2 other ranks; none of them"
    )


def test_three_steps_tell_a_straggler_only_where_they_agree(tmp_path):
    (tmp_path / "alike").mkdir()
    said = first_sentence(tmp_path / "alike", [{1: 6}, {1: 5.5}, {1: 6.5}])
    assert said == "Rank 0 waits 6.00 ms" + NAMED.format(pct=20)
    assert "not steadily" in first_sentence(tmp_path, [{1: 7}, {1: 1}, {1: 3}])


def test_a_rank_that_is_late_in_another_part_of_each_step_is_a_straggler(tmp_path):
    def step(writer, begin):
        end = 16 if writer.rank == 1 else 10
        is_forward = begin % (2 * STEP_MS) == 0
        operator = "aten::mm" if is_forward else "MmBackward0"
        handmade.layers(writer, begin, 0.1, end, operator=operator)
        writer.all_reduce(begin + 1, begin + end, begin + 17)
        handmade.layers(writer, begin, 17, 29.9, operator="MmBackward0", launched=0.5)

    first = explain_traces(gpu_run(tmp_path, step, steps=10)).first
    # In each part alone it is late in only half of the steps.
    assert first.startswith("Rank 0 waits 6.00 ms per step (20 %) for rank 1, which spends more")


def test_two_ranks_that_are_late_in_other_parts_of_each_step_are_both_named(tmp_path):
    """Neither rank is slower in the whole step, and yet each is so in one part of all steps."""

    def step(writer, begin):
        forward, backward = (12, 18) if writer.rank == 1 else (6, 24)
        layers = handmade.layers
        layers(writer, begin, 0.1, forward)
        writer.all_reduce(begin + 1, begin + forward, begin + 14)
        layers(writer, begin, 14, backward, operator="MmBackward0", launched=0.5)
        writer.all_reduce(begin + 1.1, begin + backward, begin + 26)
        handmade.optimizer(writer, begin, 26, 29.9)

    found = explain_traces(gpu_run(tmp_path, step, steps=10)).findings
    stragglers = {f.late_rank: f.behind for f in found if f.cause == "straggler"}
    assert stragglers == {1: "compute of the forward", 0: "compute of the backward"}


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


def test_a_collective_within_an_earlier_one_has_no_exposed_time(tmp_path):
    def nested(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        writer.all_reduce(begin + 1, begin + 10, begin + 17)
        writer.launched("ncclDevKernel_SendRecv", begin + 1.1, begin + 12, begin + 15, tid=30)
        # The device is idle for 1 ms after the earlier one.
        handmade.layers(writer, begin, 18, 29.9, launched=1.2)

    step = explain_traces(gpu_run(tmp_path, nested)).ranks[0].steps[5]
    assert step.account.exposed_ms == pytest.approx(7)
    assert [message.exposed_ms for message in step.messages] == pytest.approx([7, 0])


def pipeline(writer, begin):
    """Add a step of one micro-batch in a pipeline: stage 1 receives what stage 0 has computed."""
    of_stage = {"Seq": writer.number, "dtype": "Float", "Group size": 2, "In msg nelems": 10**7}
    called = {0: "send", 1: "recv"}[writer.rank]
    arguments = {"Collective name": called, **of_stage}
    if writer.rank == 0:
        handmade.layers(writer, begin, 0.1, 14)
        writer.launched(
            "ncclDevKernel_SendRecv", begin + 1, begin + 14, begin + 15, 20, **arguments
        )
        handmade.layers(writer, begin, 15, 29.9, launched=1.1)
    else:
        writer.launched("ncclDevKernel_SendRecv", begin + 1, begin + 2, begin + 15, 20, **arguments)
        handmade.layers(writer, begin, 15, 29.9, launched=1.1)


@pytest.mark.parametrize("name", ["send and recv", "coalesced"])
def test_a_pipeline_has_no_straggler(tmp_path, name):
    paths = gpu_run(tmp_path, pipeline)
    if name == "coalesced":
        for path in paths:
            path.write_text(path.read_text().replace('"send"', f'"{name}"'))
            path.write_text(path.read_text().replace('"recv"', f'"{name}"'))
    explanation = explain_traces(paths)
    assert not {"straggler", "jitter"} & {finding.cause for finding in explanation.findings}
    assert explanation.first.startswith(
        "Sends and receives take 13.00 ms per step (43 %) on rank 1"
    )
    assert all(group.bus_gb_per_s is None for group in explanation.groups())
    assert explanation.notes == []


def test_a_stage_that_waits_for_its_peer_is_not_told_to_do_less(tmp_path):
    def then_meets(writer, begin):
        received = 2 if writer.rank == 0 else 12
        end = received + 10
        called = {"Collective name": "recv"}
        writer.launched(
            "ncclDevKernel_SendRecv", begin + 1, begin + 1.5, begin + received, 20, **called
        )
        handmade.layers(writer, begin, received, end)
        writer.all_reduce(begin + 1.1, begin + end, begin + 23)
        handmade.layers(writer, begin, 23, 29.9, operator="MmBackward0", launched=0.5)

    found = explain_traces(gpu_run(tmp_path, then_meets)).findings
    assert found[0].cause == "send or receive" and found[0].rank == 1
    assert found[1].sentence == (
        "Rank 0 waits 10.00 ms per step (33 %) for rank 1, which waits longer in sends and "
        "receives before. Use more micro-batches, or balance the stages."
    )


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
    with pytest.raises(ValueError, match="the window ends after 500 ms"):
        explain_traces(paths, window=(40.0, 500.0))


def test_a_step_of_many_micro_batches_is_not_one_of_them(tmp_path):
    """The optimizer tells. It is one of 31 names, so that a shift by a micro-batch matches most."""
    writer = handmade.Writer()
    now = 0.0
    for _ in range(4):
        for _ in range(16):
            for number in range(30):
                writer.compute(now, now, now + 0.9, operator=f"aten::layer{number}")
                now += 1.0
        writer.compute(now, now, now + 9.0, operator="aten::_fused_adamw_")
        now += 10.0
    explanation = explain_traces([writer.write(tmp_path / "rank0.json")])
    assert explanation.ranks[0].found_by == "repetition of the work"
    windows = [step.window for step in explanation.ranks[0].steps.values()]
    assert [end - begin for begin, end in windows] == pytest.approx([490.0] * 3)


def test_ranks_with_other_steps_are_compared_where_they_meet(tmp_path):
    paths = gpu_run(tmp_path, handmade.straggler)
    stripped(paths[1:], keep=lambda name: name != "ProfilerStep#5")
    explanation = explain_traces(paths)
    assert any("different numbers of steps" in note for note in explanation.notes)
    assert any(finding.late_rank == 1 and finding.is_large for finding in explanation.findings)


def renumbered(paths, by, without_sequence=False):
    """Raise the numbers of the `ProfilerStep#` ranges, in place."""
    for path in paths:
        trace = json.loads(path.read_text())
        for event in trace["traceEvents"]:
            if event["name"].startswith("ProfilerStep#"):
                event["name"] = f"ProfilerStep#{int(event['name'][13:]) + by}"
            if without_sequence:
                event.get("args", {}).pop("Seq", None)
        path.write_text(json.dumps(trace))
    return paths


def test_ranks_that_number_their_steps_differently_are_compared_by_their_collectives(tmp_path):
    extra_ms = [{1: 6}] * 10
    paths = gpu_run(tmp_path, handmade.late_by(extra_ms), steps=10)
    renumbered(paths[1:], by=100)
    explanation = explain_traces(paths)
    assert explanation.first == "Rank 0 waits 6.00 ms" + NAMED.format(pct=20)
    assert list(explanation.ranks[1].steps) == list(range(5, 15))
    assert any("number their steps differently" in note for note in explanation.notes)


def test_ranks_without_a_common_step_are_accounted_for_by_themselves(tmp_path):
    paths = gpu_run(tmp_path, handmade.straggler)
    for path in paths:
        renumbered([path], by=100 * paths.index(path), without_sequence=True)
    explanation = explain_traces(paths)
    assert explanation.notes[0].startswith("the ranks have no step in common: trace the same")
    assert not any(finding.cause == "straggler" for finding in explanation.findings)
    rows, _ = against(explanation, explanation)
    assert {row.metrics["verdict"] for row in rows} == {"tie"}


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


def test_numbers_that_come_again_are_further_steps(tmp_path):
    """As of two profilers, one after the other."""
    writer = Writer()
    for place in range(6):
        begin = place * STEP_MS
        for late in (0, 0.01):  # each step is annotated twice
            name = f"ProfilerStep#{place % 3}"
            writer.span("user_annotation", name, begin + late, begin + STEP_MS + late)
        handmade.layers(writer, begin, 0.1, 29.9)
    rank = explain_traces([writer.write(tmp_path / "t.json")]).ranks[0]
    assert list(rank.steps) == list(range(6))
    lengths = [end - begin for begin, end in (step.window for step in rank.steps.values())]
    assert lengths == pytest.approx([STEP_MS] * 6, abs=0.02)


def test_the_waits_of_a_thread_that_launches_no_kernels_delay_none(tmp_path):
    """As of a thread that saves a checkpoint, which copies to the host and waits."""

    def saves(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        copy = {"correlation": 10**6 + round(begin)}
        writer.span("cuda_runtime", "cudaMemcpyAsync", begin + 1, begin + 1.01, tid=99, **copy)
        writer.span("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", begin + 2, begin + 9, 8, **copy)
        writer.span("cuda_runtime", "cudaStreamSynchronize", begin + 1.1, begin + 10, tid=99)
        handmade.layers(writer, begin, 20, 29.9, launched=19.98)

    found = explain_traces(gpu_run(tmp_path, saves)).findings[0]
    assert (found.cause, found.ms) == ("host-bound", pytest.approx(10.2))


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
    with pytest.raises(ValueError, match=r"empty\.json has no kernels.* give it repeat=1"):
        explain_traces([empty])
    paths = gpu_run(tmp_path, handmade.healthy)
    with pytest.raises(ValueError, match="both of rank 0"):
        explain_traces([paths[0], paths[0]])


def test_time_grows_linearly_with_the_events(tmp_path):
    """An 8 times larger trace takes 8 times as long, and not 64 times.

    20 is between, for noise.
    """
    seconds = []
    for steps in (20, 160):
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
    assert seconds[1] < 20 * seconds[0]


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


def test_contention_is_the_price_of_overlap_while_it_costs_less_than_half(tmp_path):
    def slower(ms):
        def step(writer, begin):
            slow_until = 8.1 + 8 * ms
            handmade.layers(writer, begin, 0.1, 8.1)
            handmade.layers(writer, begin, 8.1, slow_until, ms=ms, launched=0.2)
            writer.all_reduce(begin + 0.4, begin + 8.1, begin + slow_until)
            handmade.layers(writer, begin, slow_until, 29.9, launched=0.5)

        return step

    for ms, is_price in ((1.3, True), (2.3, False)):
        found = explain_traces(gpu_run(tmp_path, slower(ms))).findings
        contention = next(finding for finding in found if finding.cause == "contention")
        assert contention.pct > 5
        # It costs 8 (ms - 1) and hides 8 ms of communication.
        assert (contention.is_price, contention.is_large) == (is_price, not is_price)
        assert (found[-1] is contention) == is_price


def test_a_rank_that_keeps_its_lead_over_hidden_collectives_is_behind_where_it_lost_it(tmp_path):
    def late_in_the_forward(writer, begin):
        forward = 12 if writer.rank == 1 else 6
        handmade.layers(writer, begin, 0.1, forward, ms=(forward - 0.1) / 6)
        handmade.layers(
            writer, begin, forward, forward + 12, ms=2, operator="MmBackward0", launched=0.5
        )
        # Rank 0 computes on during the first all-reduce, for which it waits, and ends 6 ms early.
        writer.all_reduce(begin + 1, begin + forward + 4, begin + 19)
        writer.all_reduce(begin + 1.1, begin + max(forward + 12, 19), begin + 26)
        handmade.optimizer(writer, begin, 26, 29.9)

    found = explain_traces(gpu_run(tmp_path, late_in_the_forward)).findings
    straggler = next(finding for finding in found if finding.cause == "straggler")
    assert (straggler.late_rank, straggler.behind) == (1, "compute of the forward")


@pytest.mark.parametrize("name", ["<built-in function collect>", "gc.py(12): collect"])
def test_a_collection_of_garbage_is_known_by_several_names(tmp_path, name):
    def collected(writer, begin):
        handmade.layers(writer, begin, 0.1, 5)
        writer.span("python_function", name, begin + 4, begin + 12)
        handmade.layers(writer, begin, 12.1, 29.9, launched=12.05)

    assert explain_traces(gpu_run(tmp_path, collected)).findings[0].cause == "garbage collection"


def test_copies_into_a_buffer_belong_to_its_message(tmp_path):
    def waits_then_gathers(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        writer.span("cuda_runtime", "cudaDeviceSynchronize", begin + 2, begin + 10.02)
        writer.span("user_annotation", "FSDP::pre_forward (blocks.1)", begin + 10.03, begin + 13)
        writer.compute(begin + 11.98, begin + 12, begin + 12.5, "aten::_foreach_copy_")
        writer.compute(begin + 11.99, begin + 12.5, begin + 12.9, "aten::_foreach_copy_")
        writer.all_reduce(begin + 12.98, begin + 13, begin + 20)
        handmade.layers(writer, begin, 20, 29.9, launched=12.1)

    (found, *_) = explain_traces(gpu_run(tmp_path, waits_then_gathers)).findings
    assert found.cause == "synchronisation"
    assert found.ms == pytest.approx(2 + 7, abs=0.2)  # idle, then the exposed message


def test_a_wait_that_ends_below_a_message_is_the_cause_of_what_follows_it(tmp_path):
    """As a copy from the host at the end of backward, while the last gradients are sent."""

    def waits_for_compute(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        writer.all_reduce(begin + 1, begin + 9, begin + 14)
        copy = {"External id": 5000}
        writer.span("cpu_op", "aten::copy_", begin + 1.9, begin + 10.03, **copy)
        writer.span("cuda_runtime", "cudaStreamSynchronize", begin + 2, begin + 10.02, **copy)
        writer.compute(begin + 10.2, begin + 10.21, begin + 10.22, "aten::add")
        handmade.layers(writer, begin, 17, 29.9, launched=16.9)

    found = explain_traces(gpu_run(tmp_path, waits_for_compute)).findings
    by_cause = {finding.cause: finding for finding in found}
    assert by_cause["synchronisation"].ms == pytest.approx(3, abs=0.2)
    assert by_cause["synchronisation"].detail == "cudaStreamSynchronize in aten::copy_"
    assert by_cause["host-bound"].ms == pytest.approx(0.1, abs=0.01)  # before the first layer


def test_a_wait_owes_no_more_than_it_took(tmp_path):
    """The device idles for longer than the wait was, and later for another reason."""

    def waits_for_a_moment(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        writer.span("cuda_runtime", "cudaDeviceSynchronize", begin + 9, begin + 10.02)
        handmade.layers(writer, begin, 14, 20, launched=13.9)
        handmade.layers(writer, begin, 22, 29.9, launched=21.9)

    explanation = explain_traces(gpu_run(tmp_path, waits_for_a_moment))
    by_cause = {finding.cause: finding.ms for finding in explanation.findings}
    assert by_cause["synchronisation"] == pytest.approx(4, abs=0.05)
    # Before the first layer, between the others, and at the end of the step.
    assert by_cause["host-bound"] == pytest.approx(0.1 + 2 + 0.1, abs=0.05)


def test_the_host_is_late_for_other_work_because_it_launches_small_messages(tmp_path):
    def ahead_on_the_network(writer, begin):
        handmade.layers(writer, begin, 0.1, 10)
        for number in range(80):  # launched during the compute, and fast
            at = begin + 10 + 0.02 * number
            launch = begin + 1 + 0.1 * number
            writer.span("cpu_op", "c10d::allreduce_", launch, launch + 0.09)
            writer.all_reduce(launch + 0.05, at, at + 0.02, 25_000)
        handmade.layers(writer, begin, 16, 29.95, launched=15.9)

    found = explain_traces(gpu_run(tmp_path, ahead_on_the_network)).findings
    by_cause = {finding.cause: finding.ms for finding in found}
    # 1.6 ms of messages and 4.4 ms until the next work, of the 7.2 ms of launching
    assert by_cause["small messages"] == pytest.approx(6, abs=0.3)
    assert "host-bound" not in by_cause


def test_what_follows_a_wait_for_communication_is_a_part_of_it(tmp_path):
    def waits(writer, begin):
        for number in range(3):
            at = begin + 9 * number
            handmade.layers(writer, at, 0.1, 3)
            writer.all_reduce(at + 1, at + 3, at + 6)
            writer.span("cuda_runtime", "cudaStreamSynchronize", at + 1.1, at + 6.01)
            writer.compute(at + 8.98, at + 9, at + 9.1, "aten::add")

    found = explain_traces(gpu_run(tmp_path, waits)).findings
    assert found[0].cause == "blocking wait"
    # Three messages of 3 ms, 3 ms after each, and 1.9 ms that the last wait still owes at the end
    assert found[0].ms == pytest.approx(3 * 6 + 1.9, abs=0.1)
    assert "synchronisation" not in {finding.cause for finding in found}


TRACES = Path(__file__).parents[2] / "docs" / "learn" / "traces"


@pytest.mark.parametrize("name, cause", [("ddp-straggler", "straggler"), ("fsdp2-item", "item")])
def test_the_traces_of_the_page_have_their_cause(name, cause):
    explanation = explain_traces(sorted(TRACES.glob(f"{name}-rank*.json.gz")))
    assert explanation.findings[0].cause == cause and explanation.findings[0].is_large
    page = (TRACES.parent / "your_trace.md").read_text()
    assert (str(explanation) in page) == (name == "ddp-straggler")
