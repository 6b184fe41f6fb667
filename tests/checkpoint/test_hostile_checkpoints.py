"""Checkpoints that were made up, with checksums that fit: one clear sentence each, and nothing of
the model touched.

Kinds of damage that a checksum shows are in `test_checkpoint.py`.
"""

import copy
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from distlab.checkpoint import files
from distlab.checkpoint.checkpointer import CheckpointError
from distlab.checkpoint.files import (
    FORMAT,
    MARKER,
    CheckpointFolder,
    Damaged,
    OtherFormat,
    check_sizes,
    digest_of,
)
from distlab.train import sample
from tests.train.cases import Run, digest

REPLACEMENTS = (None, True, -1, 7, 2.5, float("nan"), "x", [], {}, [[]], {"a": 1})
SAMPLES = (  # of each kind one, out of many that are treated alike
    "model/embedding.weight",
    "optimizer/exp_avg/embedding.weight",
    "optimizer/step/embedding.weight",
    "rng/0/torch",
)


@pytest.fixture
def run(one_rank, tmp_path):
    """A run of one rank with one checkpoint, of step 1, in `tmp_path/run`."""
    run = Run(one_rank, tmp_path / "run")
    run.save(steps=1)
    yield run
    run.trainer.close()


def path_of(run):
    return run.trainer.checkpoints.folder.path_of(1)


def marker_of(run):
    return json.loads((path_of(run) / MARKER).read_text())


def forge(run, content, *, seal=True):
    """Write a marker, with a checksum of itself that fits."""
    if isinstance(content, dict) and seal:
        content = content | {"digest": digest_of(content)}
    (path_of(run) / MARKER).write_text(json.dumps(content))


def load(run):
    """All that a run does with a checkpoint, but for hashing files that did not change."""
    stored = CheckpointFolder(path_of(run).parent).open(1)
    check_sizes(stored)
    run.trainer.resume(stored)


def refusal(run, load=load):
    """What it is refused with: an error that every command turns into one line."""
    with pytest.raises((Damaged, CheckpointError, ValueError)) as caught:
        load(run)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def kind(value):
    """Replacing a value by another of its kind need not be an error: it may be another run's."""
    return float if isinstance(value, float) else type(value)


def replaced(whole, path, change):
    """A copy in which what lies at a path is changed."""
    if not path:
        return change(whole)
    copied = whole.copy()
    copied[path[0]] = replaced(whole[path[0]], path[1:], change)
    return copied


def mutations(value, path=()):
    """(what, how) of every change to a JSON value: a key less, an element less, or another kind of
    value.
    """

    def changed(change):
        return lambda whole: replaced(whole, path, change)

    for new in REPLACEMENTS:
        if kind(new) is not kind(value) and not (kind(value) is float and kind(new) is int):
            yield f"{path} → {new!r}", changed(lambda old, new=new: new)
    if isinstance(value, dict):
        for key in [key for key in value if path != ("tensors",) or key in SAMPLES]:
            yield (
                f"{path} without {key}",
                changed(lambda old, key=key: {k: v for k, v in old.items() if k != key}),
            )
            yield from mutations(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield f"{path} shorter", changed(lambda old: old[1:])
        yield from mutations(value[0], (*path, 0))


def test_every_key_removed_and_every_value_of_another_kind_is_an_error_and_none_loads(run):
    before, original = digest(run.trainer.wrapper), marker_of(run)
    seal = original.pop("digest")
    found = [(what, change(original), True) for what, change in mutations(original)]
    assert len(found) > 500
    found += [
        (f"digest {new!r}", original | {"digest": new}, False)
        for new in (*REPLACEMENTS, seal[1:], seal[::-1])
    ]
    for what, content, seal in found:
        forge(run, content, seal=seal)
        try:
            load(run)
        except (ValueError, CheckpointError) as error:
            assert str(error) and "\n" not in str(error), what
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            pytest.fail(f"{what} was loaded")
        assert digest(run.trainer.wrapper) == before, what
    forge(run, original)
    load(run)  # the one that was not changed


def test_what_contradicts_itself_is_named(run):
    original = marker_of(run)
    name = "model/embedding.weight"

    def with_tensor(key, shape):
        """Return the change that adds a tensor without elements to the index."""
        added = {key: {"shape": shape, "dtype": "float32", "parts": []}}
        return {"tensors": original["tensors"] | added}

    for changes, message in (
        ({"step": 2}, "it says step 2"),
        ({"files": {}}, "'files' is not a table of files"),
        (
            {"files": original["files"] | {"/etc/passwd": original["files"]["rank_0_0.bin"]}},
            "a file '/etc/passwd', which no",
        ),
        ({"world_size": 2}, "generators of ranks [0], and 2 ranks wrote it"),
        (with_tensor("optimizer/exp_avg/other", [0, 3]), "of other, and no such parameter"),
        (with_tensor("model/other", [0]), "another model: other exists only there"),
        (
            with_tensor("optimizer/other/embedding.weight", [0]),
            "has shape [0], and the parameter [31, 32]",
        ),
        (with_tensor("rng/1/torch", [0]), "generators of ranks [0, 1], and 1 ranks wrote it"),
        (with_tensor("other", [0]), "a tensor 'other', which no checkpoint has"),
        ({"extra": original | {"extra": original}}, "does not say which run it belongs to"),
        (
            {
                "tensors": original["tensors"]
                | {name: original["tensors"][name] | {"dtype": "int32"}}
            },
            "embedding.weight has torch.int32 there and torch.float32 here",
        ),
    ):
        forge(run, original | changes)
        assert message in refusal(run), changes.keys()


def test_another_format_is_an_error_and_not_a_reason_to_go_back(run):
    for version, message in (
        (FORMAT + 1, "update distlab"),
        (1, "format 1, this version reads 3: start over"),
    ):
        forge(run, marker_of(run) | {"format": version})
        with pytest.raises(OtherFormat, match=message):
            run.trainer.resume()


def test_a_marker_that_is_no_marker(run):
    depth = 200_000
    for text in ("[" * depth, '{"a":' * depth, "[" * depth + "]" * depth, "", "9" * 5000, "\udcff"):
        (path_of(run) / MARKER).write_bytes(text.encode(errors="surrogateescape"))
        assert MARKER in refusal(run), text[:20]


def test_what_is_no_regular_file_is_not_opened(run, tmp_path):
    """A pipe that nobody writes to would be waited for without end.

    A link leads out of the folder.
    """
    data = path_of(run) / "rank_0_0.bin"
    data.rename(tmp_path / "data")
    os.mkfifo(data)
    assert "not a regular file" in refusal(run)
    data.unlink()
    data.symlink_to(tmp_path / "data")
    assert "not a regular file" in refusal(run)
    (path_of(run) / MARKER).unlink()
    os.mkfifo(path_of(run) / MARKER)
    assert "not a regular file" in refusal(run)


# -- the index and the tensors ---------------------------------------------------------------------


EMBEDDING, SIZE = "model/embedding.weight", 31 * 32


def test_an_index_that_was_made_up_is_named(run):
    before, original = digest(run.trainer.wrapper), marker_of(run)
    ((start, count, name, offset),) = original["tensors"][EMBEDDING]["parts"]
    for parts, message in (
        (
            [[start, count, "../../x", offset]],
            "is stored in '../../x', which is not a file of this checkpoint",
        ),
        ([[start, count, name, -1]], "are not lists of first element"),
        ([[start, count, name, offset + 4]], "has a gap or an overlap at byte"),
        ([[5, SIZE - 5, name, offset]], "has a hole or an overlap at element 0"),
        ([[0, 5, name, offset]], f"has 5 of {SIZE} elements"),
        (
            [[0, 5, name, offset], [4, SIZE - 4, name, offset]],
            "has a hole or an overlap at element 5",
        ),
    ):
        content = copy.deepcopy(original)
        content["tensors"][EMBEDDING]["parts"] = parts
        forge(run, content)
        assert message in refusal(run), parts
    for dtype, message in (
        ("float64", "has a gap or an overlap at byte"),  # bytes that are not there
        ("object", "the dtype of model/embedding.weight is 'object'"),
    ):
        content = copy.deepcopy(original)
        content["tensors"][EMBEDDING]["dtype"] = dtype
        forge(run, content)
        assert message in refusal(run), dtype
    assert digest(run.trainer.wrapper) == before


def test_no_number_of_a_marker_decides_how_long_it_is_checked(run):
    """A world of a billion ranks took 40 seconds, and then all memory.

    Each of these must be refused at once.
    """
    original = marker_of(run)
    nothing = {"shape": [2**62, 0], "dtype": "uint8", "parts": []}
    ((_, _, name, offset),) = original["tensors"][EMBEDDING]["parts"]
    # As many boxes as elements, along one dimension or two: pairs of them would be a million.
    rows = [
        [0, 1, name, offset + 4 * i, [[i // 32, i // 32 + 1], [i % 32, i % 32 + 1]]]
        for i in range(SIZE)
    ]
    line = {"shape": [2000, 1], "dtype": "float32"}
    line["parts"] = [[0, 1, name, 4 * i, [[i, i + 1], [0, 1]]] for i in range(2000)]
    generator = original["tensors"]["rng/0/torch"] | {"shape": [0], "parts": []}
    generators = {f"rng/{rank}/torch": generator for rank in range(1, 100)}
    for changes, message in (
        ({"world_size": 10**9}, "has the generators of ranks [0], and 1000000000 ranks wrote it"),
        ({"world_size": 2**63}, "'world_size' is not a number of ranks"),
        ({"step": 2**63}, "'step' is not a whole number"),
        ({"tensors": {EMBEDDING: {"shape": [10**4000] * 1000}}}, "the shape of"),
        ({"tensors": {EMBEDDING: {"shape": [2**63, 1]}}}, "the shape of"),
        (
            {"tensors": {"optimizer/step/embedding.weight": {"shape": [1] * 1000}}},
            "has 1000 dimensions",
        ),
        ({"tensors": {EMBEDDING: {"parts": rows}}}, "cut along 2 dimensions, and not along one"),
        ({"tensors": {"model/line": line}}, "has 2000 boxes, and no tensor has more than 1024"),
        ({"tensors": {"rng/0/torch": {"shape": [2**40]}}}, "rng/0/torch has "),
        (
            {"tensors": {"rng/0/new": nothing}},
            "has shape [4611686018427387904, 0], which the state of no random",
        ),
        (
            {"tensors": generators},
            "has the generators of ranks 0 to 99 (100 of them), and 1 ranks wrote it",
        ),
        (
            {"files": {"rank_0_0.bin": {"bytes": 2**63}}},
            "what it says of rank_0_0.bin is not a size and checksum",
        ),
        (
            {"files": {"rank_0_0.bin": {"bytes": 2**50}}},
            "has 1125899906842624 bytes, and tensors of",
        ),
    ):
        content = copy.deepcopy(original)
        for field, value in changes.items():
            if field in ("tensors", "files"):
                for key, entry in value.items():
                    content[field][key] = content[field].get(key, {}) | entry
            else:
                content[field] = value
        forge(run, content)
        begin = time.process_time()
        assert message in refusal(run), message
        assert time.process_time() - begin < 5, message


def test_boxes_that_overlap_are_named(run):
    content = marker_of(run)
    ((_, _, name, offset),) = content["tensors"][EMBEDDING]["parts"]
    upper, lower = [[0, 16], [0, 32]], [[15, 31], [0, 32]]
    parts = [[0, 512, name, offset, upper], [0, 512, name, offset + 2048, lower]]
    content["tensors"][EMBEDDING]["parts"] = parts
    forge(run, content)
    assert "has boxes that overlap" in refusal(run)


def test_a_marker_that_is_larger_than_any_is_not_read(run):
    with open(path_of(run) / MARKER, "r+b") as file:
        file.truncate(2**40)  # takes no space on the disk
    assert "has 1099511627776 bytes, and no marker has more than" in refusal(run)


def test_data_that_was_made_up_is_refused_in_one_line_though_its_checksum_fits(run):
    """All bytes are numbers of some tensor.

    But not every number is a weight, or the state of a generator.
    """
    path, original = path_of(run) / "rank_0_0.bin", marker_of(run)
    data = path.read_bytes()

    def overwritten(key):
        ((_, _, _, offset), *_) = original["tensors"][key]["parts"]
        return data[:offset] + b"\xff" * 80 + data[offset + 80 :]

    for made_up, message in (
        (data + b"x", "bytes, and tensors of"),
        (overwritten("rng/0/python"), "a stored random generator cannot be restored"),
        (
            overwritten("model/norm.weight"),
            "step_00000001 holds NaN in model/norm.weight, though its checksums fit",
        ),
    ):
        path.write_bytes(made_up)
        entry = {"bytes": len(made_up), "sha256": hashlib.sha256(made_up).hexdigest()}
        forge(run, original | {"files": {path.name: entry}})
        assert message in refusal(run)


def test_nothing_in_this_package_can_run_code_from_a_file():
    for path in Path(files.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert not any(
            word in text
            for word in ("import pickle", "torch.load", "allow_pickle", "eval(", "exec(")
        )


def test_a_model_that_was_made_up_is_not_built_for_sampling(run, one_rank, tmp_path):
    """Sampling builds the model that the checkpoint describes; numbers could ask for any memory."""
    original = marker_of(run)
    shutil.copytree(path_of(run).parent, tmp_path / "copy")

    def load_model(run):
        sample.load_model(CheckpointFolder(path_of(run).parent).open(1), one_rank)

    for changes in ({"d_model": 128_000_000}, {"num_layers": 10**9}, {"num_heads": 3}):
        content = copy.deepcopy(original)
        content["extra"]["identity"]["model"] |= changes
        forge(run, content)
        assert "model" in refusal(run, load_model), changes
    for identity in (None, {}, {"model": {"d_model": 8}}):
        forge(run, original | {"extra": {"identity": identity}})
        assert "does not describe its model" in refusal(run, load_model)
    forge(run, original)
    load_model(run)
