"""Files are whole or absent."""

import pytest

from distlab.files import atomic_path, write_whole


def test_nothing_half_written_is_left(tmp_path):
    target = tmp_path / "a.json"
    write_whole(target, "old")
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("ne")
        assert temporary.suffix == ".json" and target.read_text() == "old"
        raise RuntimeError("killed in the middle")
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError) as caught, atomic_path(tmp_path / "a.json"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a.json")


def test_a_library_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a.png"):
        pass
    assert not list(tmp_path.iterdir())
