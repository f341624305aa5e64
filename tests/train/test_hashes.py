"""Hashes of data files are remembered while the files are what they were, and no longer."""

import hashlib
import os

import pytest

from memfit.train.data import hashes
from memfit.train.data.readers import find_sources


@pytest.fixture
def counted(monkeypatch):
    """The files that were read."""
    read, found = hashes._read, []
    monkeypatch.setattr(hashes, "WORTH", 0)
    monkeypatch.setattr(
        hashes, "_read", lambda path, text: found.append(path.name) or read(path, text=text)
    )
    return found


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled at once: tests cannot set the time of an inode's change."""
    monkeypatch.setattr(hashes, "SETTLED", -(10**12))


def digest_of(folder, cache):
    sources = find_sources(str(folder), cache)
    for source in sources.files:
        assert source.sha256 == hashlib.sha256(source.path.read_bytes()).hexdigest()
    return sources


def write(folder):
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("the cat")
    (folder / "data" / "b.bin").write_bytes(b"\0\1")
    return folder / "data"


def test_a_second_start_reads_no_file(counted, settled, tmp_path):
    data = write(tmp_path)
    first = digest_of(data, tmp_path)
    assert counted == ["a.txt", "b.bin"]
    assert digest_of(data, tmp_path) == first
    assert counted == ["a.txt", "b.bin"]
    assert first.notes == (f"1 binary files passed over in `{data}`",)


@pytest.mark.parametrize("change", ["content", "times set back", "replaced"])
def test_a_changed_file_is_read(change, counted, settled, tmp_path):
    data = write(tmp_path)
    digest_of(data, tmp_path)
    file = data / "a.txt"
    before = file.stat()
    if change == "replaced":
        (data / "c").write_text("the mat")
        os.utime(data / "c", ns=(before.st_atime_ns, before.st_mtime_ns))
        (data / "c").replace(file)
    else:
        file.write_text("the mat")
        if change == "times set back":
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    counted.clear()
    digest_of(data, tmp_path)
    assert counted == ["a.txt"]


def test_a_file_that_has_just_changed_is_not_remembered(counted, tmp_path):
    data = write(tmp_path)
    digest_of(data, tmp_path)
    counted.clear()
    digest_of(data, tmp_path)
    assert counted == ["a.txt", "b.bin"]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    counted, settled, tmp_path, monkeypatch
):
    data = write(tmp_path)
    read = hashes._read

    def read_and_change(path, text):
        found = read(path, text=text)
        if path.name == "a.txt":
            path.write_text("the mat")
        return found

    monkeypatch.setattr(hashes, "_read", read_and_change)
    find_sources(str(data), tmp_path)
    monkeypatch.setattr(hashes, "_read", read)
    counted.clear()
    digest_of(data, tmp_path)
    assert counted == ["a.txt"]


def test_little_data_and_a_damaged_record_are_read(counted, settled, tmp_path, monkeypatch):
    data = write(tmp_path)
    digest_of(data, tmp_path)
    (record,) = (tmp_path / "hashes").iterdir()
    for content in ("{", "[]", '{"a": 1}', '{"a": [1, 2, 3]}'):
        record.write_text(content)
        counted.clear()
        digest_of(data, tmp_path)
        assert counted == ["a.txt", "b.bin"], content
    record.unlink()
    monkeypatch.setattr(hashes, "WORTH", 2**30)
    digest_of(data, tmp_path)
    assert not record.exists()
