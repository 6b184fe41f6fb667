"""Token files and the order in which ranks read them."""

import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_each_window_once_per_epoch_disjoint_and_alike_at_every_world_size(
    count, world_size, micro, share, seed
):
    batch = world_size * micro * share
    if batch > count:
        return
    steps = 3 * count // batch + 1
    parts = {"micro_batches": micro, "seed": seed, "batch": batch}
    orders = [GlobalOrder(count, rank=rank, world_size=world_size, **parts) for rank in range(world_size)]
    alone = GlobalOrder(count, rank=0, world_size=1, batch=batch, seed=seed)
    seen = []
    for step in range(steps):
        mine = [joined(order.numbers(step)) for order in orders]
        assert all(len(part) == micro * share for part in mine)
        assert joined(mine) == alone.numbers(step)[0]  # so the data of a step is that of one process
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
    assert inputs.tolist() == [[20, 21, 22, 23, 0]] and shifted.tolist() == [[21, 22, 23, IGNORED, IGNORED]]


@pytest.mark.parametrize("name", ["t.bin", "t.npy", "t.txt"])
def test_files_of_each_kind(tmp_path, name):
    path = tmp_path / name
    values = np.array([1, 2, 250], dtype=np.uint8 if name == "t.txt" else np.uint16)
    np.save(path, values) if name == "t.npy" else values.tofile(path)
    assert open_tokens(path).tolist() == [1, 2, 250]


def test_bad_files_are_refused_with_a_clear_message(tmp_path):
    odd, floats, empty = tmp_path / "odd.bin", tmp_path / "floats.npy", tmp_path / "empty.txt"
    odd.write_bytes(b"12345")
    np.save(floats, np.zeros((2, 2), dtype=np.float32))
    empty.touch()
    with pytest.raises(ValueError, match="5 bytes, which is no multiple of 2"):
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
def test_every_token_is_hashed_once_and_alike_at_every_world_size(count, block, world_size, changed):
    tokens = np.arange(count, dtype=np.uint32)
    alone = examine(tokens, 100, block=block)[0]
    shares = [examine(tokens, 100, rank, world_size, block=block)[0] for rank in range(world_size)]
    assert joined(shares) == alone
    if changed < count:
        other = tokens.copy()
        other[changed] ^= 1
        found = examine(other, 100, block=block)[0]
        assert [a == b for a, b in zip(found, alone, strict=True)].index(False) == changed // block
    assert examine(tokens.view(np.int32), 100, block=block)[0] == alone  # bytes, whatever they are called


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
    with pytest.raises(ValueError, match=f"{path} is no array of tokens in numpy's .npy format") as refused:
        open_tokens(path)
    assert "allow_pickle" not in str(refused.value) and "unsafely" not in str(refused.value)
    assert "\n" not in str(refused.value)
