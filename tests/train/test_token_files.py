"""Token files and the order in which ranks read them."""

import bz2
import gzip
import lzma
import os
import pickle
import tarfile
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.train.config import DataConfig
from distlab.train.data import (
    IGNORED,
    GlobalOrder,
    TokenWindows,
    examine,
    open_tokens,
    to_batch,
)


def joined(lists):
    return list(chain.from_iterable(lists))


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5)
)
def test_each_window_once_per_epoch_disjoint_and_alike_at_every_world_size(
    count, world_size, micro, share, seed
):
    batch = world_size * micro * share
    if batch > count:
        return
    steps = 3 * count // batch + 1
    parts = {"micro_batches": micro, "seed": seed, "batch": batch}
    orders = [
        GlobalOrder(count, rank=rank, world_size=world_size, **parts) for rank in range(world_size)
    ]
    alone = GlobalOrder(count, rank=0, world_size=1, batch=batch, seed=seed)
    seen = []
    for step in range(steps):
        mine = [joined(order.numbers(step)) for order in orders]
        assert all(len(part) == micro * share for part in mine)
        # so the data of a step is that of one process
        assert joined(mine) == alone.numbers(step)[0]
        seen += joined(mine)
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    if count > 8:
        assert seen[:count] != seen[count : 2 * count]  # each epoch has an order of its own


def test_every_token_is_a_target_once_and_the_tail_is_ragged_only_for_validation():
    tokens = np.arange(24, dtype=np.uint16)
    windows = TokenWindows(tokens, 100, 5)
    assert windows.count == 4  # 23 targets: 4 windows of 5, three left over
    assert windows.rows([1]).tolist() == [[5, 6, 7, 8, 9, 10]]
    ragged = TokenWindows(tokens, 100, 5, ragged=True)
    targets = ragged.rows(range(ragged.count))[:, 1:].flatten()
    assert targets[targets != IGNORED].tolist() == list(range(1, 24))
    inputs, shifted = to_batch(ragged.rows([4]), torch.device("cpu"))
    assert inputs.tolist() == [[20, 21, 22, 23, 0]] and shifted.tolist() == [
        [21, 22, 23, IGNORED, IGNORED]
    ]


@pytest.mark.parametrize("name", ["t.bin", "t.npy", "t.txt"])
def test_files_of_each_kind(tmp_path, name):
    path = tmp_path / name
    values = np.array([1, 2, 250], dtype=np.uint8 if name == "t.txt" else np.uint16)
    if name == "t.npy":
        np.save(path, values)
    else:
        values.tofile(path)
    assert open_tokens(path).tolist() == [1, 2, 250]


def test_bad_files_are_refused_with_a_clear_message(tmp_path):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"12345")
    floats = tmp_path / "floats.npy"
    np.save(floats, np.zeros((2, 2), dtype=np.float32))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match="5 bytes, which is not a multiple of 2"):
        open_tokens(odd)
    with pytest.raises(ValueError, match="float32 of shape"):
        open_tokens(floats)
    with pytest.raises(ValueError, match="is empty"):
        open_tokens(empty)
    with pytest.raises(ValueError, match="2 windows, too few for one batch of 4"):
        GlobalOrder(2, batch=4, rank=0, world_size=2)


def test_an_id_out_of_range_is_named_by_the_rank_that_has_it():
    tokens = np.array([0, 1, 2, 3, 9, 1], dtype=np.uint16)
    assert examine(tokens, 5, rank=0, world_size=2, block=3)[1] is None
    assert examine(tokens, 5, rank=1, world_size=2, block=3)[1] == (
        "token 4 is 9, but the model's vocabulary has 5 entries"
    )


@given(st.integers(0, 20), st.integers(1, 7), st.integers(1, 5), st.integers(0, 19))
def test_every_token_is_hashed_once_and_alike_at_every_world_size(
    count, block, world_size, changed
):
    tokens = np.arange(count, dtype=np.uint32)
    alone = examine(tokens, 100, block=block)[0]
    shares = [examine(tokens, 100, rank, world_size, block=block)[0] for rank in range(world_size)]
    assert joined(shares) == alone
    if changed < count:
        other = tokens.copy()
        other[changed] ^= 1
        found = examine(other, 100, block=block)[0]
        assert [a == b for a, b in zip(found, alone, strict=True)].index(False) == changed // block
    # bytes, whatever they are called
    assert examine(tokens.view(np.int32), 100, block=block)[0] == alone


@pytest.mark.parametrize("kind", ["a pickle", "objects", "a half"])
def test_a_npy_file_that_is_none_is_named_and_nobody_is_told_to_unpickle_it(tmp_path, kind):
    path = tmp_path / "x.npy"
    if kind == "a pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "objects":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    else:
        np.save(path, np.arange(1000, dtype=np.uint16))
        path.write_bytes(path.read_bytes()[:700])
    said = (
        "is a pickle" if kind == "a pickle" else "is not an array of tokens in numpy's .npy format"
    )
    with pytest.raises(ValueError, match=f"{path} {said}") as refused:
        open_tokens(path)
    assert "allow_pickle" not in str(refused.value) and "unsafely" not in str(refused.value)
    assert "\n" not in str(refused.value)


def npz(path):
    with open(path, "wb") as file:
        np.savez(file, tokens=np.arange(9, dtype=np.uint16))


def tar(path):
    with tarfile.open(path, "w") as archive:
        archive.add(__file__)


def legacy_torch(path):
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def safetensors(path):
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")


TEXT = b"to be or not to be, " * 30
CONTAINERS = {
    "a zip archive": [npz, lambda path: torch.save(torch.ones(3), path)],
    "a gzip archive": [lambda path: path.write_bytes(gzip.compress(TEXT))],
    "an xz archive": [lambda path: path.write_bytes(lzma.compress(TEXT))],
    "a bzip2 archive": [
        lambda path: path.write_bytes(bz2.compress(TEXT)),
        lambda path: path.write_bytes(bz2.compress(TEXT, 1)),
    ],
    "a Zstandard archive": [lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd" + TEXT)],
    "a Parquet table": [lambda path: path.write_bytes(b"PAR1" + TEXT + b"PAR1")],
    "a pickle": [legacy_torch, lambda path: path.write_bytes(pickle.dumps([1, 2]))],
    "a safetensors file": [safetensors],
    "a tar archive": [tar],
}
WRITTEN = []  # (said, function that writes such a file)
for _said, _writers in CONTAINERS.items():
    WRITTEN += [(_said, write) for write in _writers]


@pytest.mark.parametrize("name", ["x.txt", "x", "x.BIN", "x.npy", "x.npz"])
@pytest.mark.parametrize("said, write", WRITTEN)
def test_a_container_is_known_by_its_content_and_refused(tmp_path, said, write, name):
    path = tmp_path / name
    write(path)
    with pytest.raises(ValueError, match=f"{name} is {said}"):
        open_tokens(path)
    with pytest.raises(ValueError, match=f"{name} is {said}"):
        DataConfig(data=str(path)).check_files()


@pytest.mark.parametrize("name", ["x.NPY", "x.txt", "x", "x.bin"])
def test_an_array_of_numpys_is_one_under_every_name(tmp_path, name):
    path = tmp_path / name
    with open(path, "wb") as file:
        np.save(file, np.array([1, 70_000], dtype=np.uint32))
    assert open_tokens(path).tolist() == [1, 70_000]
    assert not DataConfig(data=str(path)).is_bytes


def test_suffixes_are_compared_without_case(tmp_path):
    path = tmp_path / "x.BIN"
    np.array([1, 300], dtype=np.uint16).tofile(path)
    assert open_tokens(path).tolist() == [1, 300]
    data = DataConfig(data=str(path), token_dtype="uint32")
    assert not data.is_bytes
    assert open_tokens(path, data.token_dtype).tolist() == [1 + 300 * 65536]


def fifo(path):
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda path: path.mkdir() or path, "is a folder, .* give a file in it"),
        (fifo, r"is a pipe \(FIFO\), .* write the data to a file"),
        (lambda path: "/dev/zero", "/dev/zero is a device"),
    ],
)
def test_what_is_not_a_file_is_named(tmp_path, make, said):
    path = make(tmp_path / "x.txt")
    for check in (open_tokens, lambda path: DataConfig(data=str(path)).check_files()):
        with pytest.raises(ValueError, match=said):
            check(path)


@pytest.mark.parametrize(
    "values", [np.arange(1, 400), np.array([5, 128_000, 17, 900] * 8)], ids=["zeros", "high"]
)
def test_uint32_without_its_type_is_refused(tmp_path, values):
    path = tmp_path / "x.bin"
    values.astype(np.uint32).tofile(path)
    with pytest.raises(ValueError, match=r"seems to hold uint32: .* --token-dtype uint32"):
        open_tokens(path)
    assert open_tokens(path, "uint32").tolist() == values.tolist()
    assert len(open_tokens(path, "uint16")) == 2 * len(values)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(64),
        np.arange(64),
        np.array([3, 0, 1, 2] * 16),
        np.array([40_000, 2, 1, 9_000] * 16),
    ],
)
def test_tokens_that_are_uint16_are_not_taken_for_uint32(tmp_path, values):
    path = tmp_path / "x.bin"
    values.astype(np.uint16).tofile(path)
    assert open_tokens(path).tolist() == values.tolist()


@pytest.mark.parametrize(
    "text",
    [b"PK, said he", b"BZh9 was here", b"PAR1 is a word", b"SQLite format", b"{}", "é\n".encode()],
)
def test_a_text_that_begins_like_a_container_is_a_text(tmp_path, text):
    path = tmp_path / "x.txt"
    path.write_bytes(text)
    assert bytes(open_tokens(path)) == text
    assert DataConfig(data=str(path)).is_bytes
