"""Raw bytes and their index: what was written by some ranks and threads is read in any
other parts.
"""

import pytest
import torch

from distlab.checkpoint import files, tensors
from distlab.checkpoint.files import CheckpointError, CheckpointFolder
from distlab.parallel.shard import Shard, whole

WHOLE = {
    "model/a": torch.arange(24.0).view(4, 6),
    "model/b": torch.arange(7, dtype=torch.bfloat16),
    "model/none": torch.empty(0, 3),
    "optimizer/step/a": torch.tensor(3.0),
    "rng/0/torch": torch.arange(200, dtype=torch.uint8),
    "rng/1/mask": torch.tensor([True, False, True]),
    "model/c": torch.arange(5, dtype=torch.int64),
}


def written(folder, ranks, threads):
    """Write a checkpoint of WHOLE, each tensor cut into one part per rank."""
    temporary = folder.begin(1)
    results = []
    for rank in range(ranks):
        shards = [whole(key, value).portion(rank, ranks) for key, value in WHOLE.items()]
        results.append(tensors.write(temporary, rank, shards, threads))
    content = {"world_size": 2, "groups": [{"params": []}], "extra": {}}
    content |= dict.fromkeys(("strategy", "torch", "optimizer"), "x")
    content["files"] = {}
    for files_of_rank, _ in results:
        content["files"] |= files_of_rank
    content["tensors"] = tensors.merged([index for _, index in results])
    folder.commit(1, content)
    return folder.open(1)


@pytest.mark.parametrize("ranks, threads", [(1, 1), (5, 20)])
def test_every_dtype_and_part_comes_back(tmp_path, ranks, threads):
    stored = written(CheckpointFolder(tmp_path), ranks, threads)
    files.check_files(stored)
    assert len(stored.content["files"]) == ranks * threads
    for key, value in WHOLE.items():
        assert tensors.shapes_and_dtypes(stored)[key] == (tuple(value.shape), value.dtype)
        for first in range(min(2, value.numel())):
            values = torch.empty(value.numel() - first, dtype=value.dtype)
            tensors.read(stored, [Shard(key, value.shape, first, values)])
            assert torch.equal(values, value.view(-1)[first:]), key
    cast = torch.empty(7)
    tensors.read(stored, [Shard("model/b", torch.Size((7,)), 0, cast)])
    assert torch.equal(cast, torch.arange(7.0))


def test_a_file_that_shrinks_after_it_was_checked_is_an_error(tmp_path):
    stored = written(CheckpointFolder(tmp_path), 1, 1)
    (stored.path / "rank_0_0.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"rank_0_0\.bin ends within model/a"):
        tensors.read(stored, [Shard("model/a", torch.Size((4, 6)), 0, torch.empty(24))])


def test_a_dtype_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(WHOLE, "model/complex", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match="the dtype of model/complex is 'complex64'; allowed: float64"
    ):
        written(CheckpointFolder(tmp_path), 1, 1)
    assert CheckpointFolder(tmp_path).steps() == []
