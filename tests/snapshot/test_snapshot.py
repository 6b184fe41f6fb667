"""`distlab memory`: a snapshot's account, from files that tests write by hand and from a GPU."""

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest

from distlab.snapshot import explain, read_snapshot
from distlab.snapshot.history import site_of
from distlab.snapshot.page import (
    BY_LINE,
    BY_PURPOSE,
    CHANGES,
    FINDINGS,
    GROWTH,
    SLICES,
    UNUSED,
    _line,
)
from launch.__main__ import main
from tests.commands import python
from tests.snapshot import planted

MIB = 2**20
USER = {"filename": "/home/me/train.py", "line": 7, "name": "train"}
FORWARD = {
    "filename": "/env/site-packages/torch/nn/modules/module.py",
    "line": 1,
    "name": "forward",
}
# Frames of a model of the user, and of what calls it.
CALL = {**FORWARD, "name": "_call_impl"}
LINEAR = {**FORWARD, "filename": "/env/site-packages/torch/nn/modules/linear.py"}
BLOCK = {"filename": "/home/me/model.py", "line": 5, "name": "forward"}
HEAD = {**BLOCK, "line": 8}
BUILD = {**BLOCK, "line": 2, "name": "__init__"}
RECOMPUTE = {
    "filename": "/env/site-packages/torch/utils/checkpoint.py",
    "line": 1,
    "name": "unpack_hook",
}
ADAM = {"filename": "/env/site-packages/torch/optim/adamw.py", "line": 1, "name": "step"}


def frame(line):
    return {**USER, "line": line}


def alloc(address, mib, *frames):
    return {
        "action": "alloc",
        "addr": address,
        "size": mib * MIB,
        "stream": 0,
        "frames": list(frames),
    }


def free(address, mib):
    return {"action": "free_completed", "addr": address, "size": mib * MIB, "stream": 0}


def segment(*blocks, stream=0, address=0):
    entries = [{"size": mib * MIB, "state": state, "frames": []} for mib, state in blocks]
    total = sum(entry["size"] for entry in entries)
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "stream": stream,
        "blocks": entries,
    }


def held(trace, device=0):
    """Return the segment of all blocks that a trace leaves open."""
    opened = {}
    for event in trace:
        if event["action"] == "alloc":
            opened[event["addr"]] = event["size"]
        else:
            opened.pop(event["addr"], None)
    entries = [
        {"address": address, "size": size, "state": "active_allocated"}
        for address, size in opened.items()
    ]
    return {"device": device, "total_size": sum(opened.values()), "blocks": entries}


def snapshot_of(*traces, segments=()):
    """Return the content of a snapshot whose segments hold what the traces leave open."""
    found = [held(trace, device) for device, trace in enumerate(traces) if trace]
    return {"segments": [*found, *segments], "device_traces": list(map(list, traces))}


def explained(tmp_path, trace=(), segments=()):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(trace, segments=segments)))
    return explain(read_snapshot(path)).devices[0]


def temporaries(first_address):
    """Return the events of 20 blocks, each of which is freed at once."""
    events = []
    for address in range(first_address, first_address + 20):
        events += [alloc(address, 1), free(address, 1)]
    return events


def training(steps=4, leaks=False):
    """Return the events of a training of one layer."""
    events = [alloc(1, 100, frame(3)), alloc(2, 200, ADAM, frame(9))]
    for number in range(steps):
        events.append(alloc(10, 50, FORWARD, frame(5)))
        events += temporaries(30)
        events.append(alloc(11, 100))  # by autograd's thread
        events.append(free(10, 50))
        events += temporaries(60)
        events.append(free(11, 100))
        if leaks:
            events.append(alloc(1000 + number, 10, frame(42)))
    return events


def test_the_peak_is_divided_by_purpose_and_line(tmp_path):
    device = explained(tmp_path, training())
    assert device.peak_bytes == 450 * MIB
    held = {purpose: size // MIB for purpose, size in device.purposes.items()}
    assert held == {
        "parameters and other state": 100,
        "optimizer state": 200,
        "activations": 50,
        "gradients": 100,
    }
    assert device.sites[0][0] == "me/train.py:9 train"
    assert not device.growth
    assert "train.py:9" in device.advice()


def test_a_leak_is_named_with_its_line(tmp_path):
    device = explained(tmp_path, training(steps=6, leaks=True))
    assert [(each.site, each.steps) for each in device.growth] == [("me/train.py:42 train", 6)]
    assert "Memory grows at me/train.py:42 train: 10.0 MiB each of 6 times" in device.advice()


def test_a_line_that_keeps_memory_in_each_inference_grows(tmp_path):
    # The input of each step is allocated outside of the model, so the steps are several calls.
    events = []
    for number in range(6):
        events += [alloc(1, 1, frame(30)), alloc(2, 1, CALL, frame(31)), free(1, 1)]
        events += temporaries(30)
        events += [alloc(1000 + number, 10, LINEAR, HEAD, CALL, frame(31)), free(2, 1)]
    device = explained(tmp_path, events)
    assert [(each.site, each.steps) for each in device.growth] == [("me/model.py:8 forward", 6)]


def test_activations_of_an_unfinished_forward_do_not_grow(tmp_path):
    events = [alloc(1, 100, frame(3))]
    for layer in range(24):
        for address in range(30, 45):
            events += [alloc(address, 1, LINEAR, BLOCK, CALL, frame(5)), free(address, 1)]
        events.append(alloc(1000 + layer, 32, BLOCK, CALL, frame(5)))
    failed = {"action": "oom", "size": 64 * MIB, "device_free": 0, "stream": 0, "frames": []}
    device = explained(tmp_path, events)
    assert not device.growth and "activations" in device.advice()
    segments = [held(events)]
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[*events, failed]]}))
    assert not explain(read_snapshot(path)).devices[0].growth


def test_gradients_of_an_unfinished_backward_do_not_grow(tmp_path):
    events = [alloc(1, 100, frame(3))]
    for layer in range(24):
        for address in range(30, 45):
            # A forward that is recomputed in backward.
            events += [alloc(address, 1, BLOCK, CALL, RECOMPUTE), free(address, 1)]
        events.append(alloc(1000 + layer, 32))
    assert not explained(tmp_path, events).growth


def test_parameters_of_a_model_that_is_built_do_not_grow(tmp_path):
    events = []
    for layer in range(32):
        for address in range(30, 45):
            events += [alloc(address, 1, frame(12)), free(address, 1)]
        events.append(alloc(1000 + layer, 64, BUILD, frame(9)))
    device = explained(tmp_path, events)
    assert not device.growth and "model.py:2" in device.advice()


def test_stacks_of_cpp_alone_are_those_of_backward(tmp_path):
    engine = {"filename": "??", "line": 0, "name": "torch::autograd::Engine::thread_main"}
    events = training()
    for event in events:
        if event["action"] == "alloc" and not event["frames"]:
            event["frames"] = [engine]
    device = explained(tmp_path, events)
    assert device.purposes["gradients"] == 100 * MIB


def test_a_recording_without_stacks_is_not_divided(tmp_path):
    events = training()
    for event in events:
        event["frames"] = []
    device = explained(tmp_path, events)
    assert device.purposes == {"unknown: recorded without stacks": device.peak_bytes}
    assert 'Record it with torch.cuda.memory._record_memory_history(stacks="python")' in (
        device.advice()
    )


def test_memory_that_was_released_after_the_recording_is_not_held(tmp_path):
    path = tmp_path / "snapshot.pickle"
    free_segment = segment((2, "inactive"), address=1)
    content = {"segments": [free_segment], "device_traces": [training(6, leaks=True)]}
    path.write_bytes(pickle.dumps(content))
    device = explain(read_snapshot(path)).devices[0]
    assert not device.growth and device.end_bytes == 0
    # The segments of the peak were given back later, and no event says so.
    assert device.reserved_bytes is None and "reserved then is not recorded" in device.summary()
    assert main(["memory", str(path), "--against", str(path), "--out", str(tmp_path)]) == 0


def test_a_small_leak_has_its_size_and_comes_last(tmp_path):
    events = training(6)
    for number in range(6):
        small = {**alloc(2000 + number, 0, frame(42)), "size": 4096}
        events += [small, *training(2)[2:]]
    device = explained(tmp_path, events)
    *_, last = device.findings()
    assert "42 train: 4.0 KiB each of 6 times, 24.0 KiB in all" in last.sentence
    assert "At the peak" in device.advice()


def test_a_project_in_a_folder_torch_is_the_users():
    inner = {"filename": "/home/me/torch/nn/modules/linear.py", "line": 9, "name": "__init__"}
    user = {"filename": "/home/me/torch/train.py", "line": 5, "name": "build"}
    assert site_of([inner, user]) == "torch/train.py:5 build"


def test_gaps_are_told_apart_by_kind(tmp_path):
    used = "active_allocated"
    gap = "inactive"
    waiting = "active_pending_free"
    device = explained(
        tmp_path,
        segments=[
            segment((10, used), (40, gap), address=0),
            segment((20, gap), address=10**9),
            segment((1, used), (5, gap), (3, waiting), stream=7, address=2 * 10**9),
        ],
    )
    found = {each.kind: each.bytes // MIB for each in device.unused}
    assert found == {
        "gaps in segments that are partly used": 40,
        "segments that are free as a whole": 20,
        "gaps in segments of side streams": 5,
        "freed, and waiting for another stream": 3,
    }
    assert "expandable_segments" in device.advice()


class Malicious:
    """An object whose pickle runs a command."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_malicious_pickle_runs_nothing(tmp_path, capsys):
    path, touched = tmp_path / "snapshot.pickle", tmp_path / "touched"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Malicious(touched)]]}))
    assert main(["memory", str(path)]) == 2
    assert "has no objects" in capsys.readouterr().err
    assert not touched.exists()


SIZED = {"size": MIB, "state": "inactive"}


@pytest.mark.parametrize(
    "segments, traces",
    [
        ([1], []),
        ([{}], []),
        ([{"device": "x", "total_size": 1, "blocks": []}], []),
        ([{"device": 0, "total_size": 10**400}], []),
        ([{"device": 0, "total_size": 1, "blocks": [{}]}], []),
        ([{"device": 0, "total_size": 1, "blocks": [{"size": 1}]}], []),
        ([{"device": 0, "total_size": 1, "blocks": [{**SIZED, "frames": [1]}]}], []),
        ([{"device": 0, "total_size": 1, "blocks": [{**SIZED, "history": 3}]}], []),
        ([], 5),
        ([], [[3]]),
        ([], [[{"addr": 1}]]),
        ([], [[{"action": "alloc", "addr": 1}]]),
        ([], [[{"action": "alloc", "addr": [], "size": 1}]]),
        ([], [[{"action": "alloc", "addr": 1, "size": "big"}]]),
        ([], [[{"action": "alloc", "addr": 1, "size": -1}]]),
        ([], [[{"action": "alloc", "addr": 1, "size": 5, "frames": "abc"}]]),
    ],
)
def test_a_snapshot_of_another_shape_is_refused_in_a_sentence(segments, traces, tmp_path, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces}))
    assert main(["memory", str(path)]) == 2
    assert f"{path} is no memory snapshot that can be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"text", pickle.dumps([1]), pickle.dumps({"segments": 3}), b"\x80\x05}\x94("]
)
def test_another_file_is_refused_in_a_sentence(content, tmp_path, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    assert main(["memory", str(path)]) == 2
    assert "is no memory snapshot" in capsys.readouterr().err


def test_the_command_reads_gzip_and_compares(tmp_path, capsys):
    paths = []
    for name, leaks in (("before", False), ("after", True)):
        content = snapshot_of(training(6, leaks))
        paths.append(tmp_path / f"{name}.pickle.gz")
        paths[-1].write_bytes(gzip.compress(pickle.dumps(content)))
    out = tmp_path / "outputs"
    words = ["memory", str(paths[1]), "--against", str(paths[0]), "--out", str(out)]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    shown = "\n".join(lines)
    assert "memory grows at" in shown and "change" in shown and "+50.0" in shown
    assert max(map(len, lines)) <= 100
    (page,) = out.glob("memory/*/report.html")
    assert last == f"report: {page}"
    assert CHANGES in page.read_text() and "+50.0" in page.read_text()
    assert "Memory grows at me/train.py:42" in (out / "index.html").read_text()


def test_json_has_everything_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = snapshot_of(training(6, True))
    Path("snapshot.pickle").write_bytes(pickle.dumps(content))
    assert main(["memory", "snapshot.pickle", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["growth"][0]["times"] == 6
    # A second snapshot is compared in this form as well. One device is only in the one, one only in
    # the other.
    earlier = snapshot_of([], training(3))
    Path("earlier.pickle").write_bytes(pickle.dumps(earlier))
    assert main(["memory", "snapshot.pickle", "--against", "earlier.pickle", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    peaks = [change for change in found["changes"] if change["name"] == "peak, allocated"]
    assert [change["device"] for change in peaks] == [0, 1]
    assert peaks[0]["before_bytes"] == 0 < peaks[0]["after_bytes"]
    assert peaks[1]["before_bytes"] > 0 == peaks[1]["after_bytes"]
    assert main(["memory", "snapshot.pickle", "--against", "no.pickle", "--json"]) == 2
    assert not Path("outputs").exists()


def test_the_page_has_every_table_and_a_picture(tmp_path, capsys):
    hostile = {**frame(42), "name": "<script>alert(1)</script>\x1b\ud800"}
    events = training(6)
    for address in range(500, 504):
        events += [alloc(address, 30, hostile), *training(2)]
    gap = segment((10, "active_allocated"), (40, "inactive"))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(events, training(3), segments=[gap])))
    before = tmp_path / "before.pickle"
    before.write_bytes(pickle.dumps(snapshot_of(training(6))))
    words = ["memory", str(path), "--against", str(before), "--out", str(tmp_path)]
    assert main(words) == 0
    (page,) = tmp_path.glob("memory/*/report.html")
    text = page.read_text()
    printed = capsys.readouterr().out
    assert "\x1b" not in printed + text and r"\x1b\ud800" in text
    advice = printed.splitlines()[0]
    assert text.index(advice[:40]) < text.index("<table>")
    for table in (FINDINGS, BY_PURPOSE, BY_LINE):
        assert f"device 0: {table}</h3>" in text and f"device 1: {table}</h3>" in text
    assert f"device 0: {UNUSED}</h3>" in text and f"device 0: {GROWTH}</h3>" in text
    assert "expandable_segments" in text
    assert (page.parent / "memory.png").exists()
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_a_snapshot_without_events_has_a_page_without_a_picture(tmp_path):
    path = tmp_path / "snapshot.pickle"
    content = {"segments": [segment((40, "inactive"))], "device_traces": []}
    path.write_bytes(pickle.dumps(content))
    assert main(["memory", str(path), "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("memory/*/report.html")
    assert "Nothing is allocated." in page.read_text() and not list(page.parent.glob("*.png"))


def test_a_long_recording_is_drawn_in_slices_that_keep_the_peak():
    events = 10 * SLICES
    changes = [(event, 100 if event == 12_345 else event % 7) for event in range(events)]
    line = _line("allocated", changes, events)
    assert len(line.x) == SLICES and max(line.y) == 100 / MIB
    assert line.x[line.y.index(100 / MIB)] == 12_340


def line_with(mark):
    """The number of the line of `planted.py` that ends with this comment."""
    lines = Path(planted.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


@pytest.mark.gpu
@pytest.mark.parametrize("program", ["healthy", "leak", "fragmentation", "peak"])
def test_a_planted_fault_is_the_first_thing_that_is_said(program, tmp_path):
    path = tmp_path / "snapshot.pickle"
    done = python("-m", "tests.snapshot.planted", program, str(path))
    assert done.returncode == 0, done.stderr
    device = explain(read_snapshot(path)).devices[0]
    said = device.advice()
    if program == "leak":
        assert f"snapshot/planted.py:{line_with('LEAK')} leak" in said, said
    elif program == "fragmentation":
        assert "gaps in segments that are partly used" in said, said
    elif program == "peak":
        assert f"snapshot/planted.py:{line_with('PEAK')} peak" in said, said
    else:
        assert not device.growth, said
        # 16 MiB of weights, and twice as many of AdamW's moments
        assert 15 <= device.purposes["parameters and other state"] / MIB <= 18, device.purposes
        assert 31 <= device.purposes["optimizer state"] / MIB <= 34, device.purposes
