"""Files and folders that cannot be written: every verb names the place, and none calls it a bug."""

import importlib
import json
import os

import pytest

from memfit.records import write_atomically
from typed_commands import ASKED, memfit, quick

WRITES = {
    "plan": ["plan", "gpt2", "--device", "t4", "--folder", "{place}"],
    "export": ["export", "qwen3-0.6b", "--device", "4090", "--to", "trl", "--out", "{place}"],
    "launch": ["launch", "qwen3-0.6b", "--device", "4090", "--on", "slurm", "--out", "{place}"],
    "init": ["init", "{place}/request.yaml"],
}


def make_places(folder):
    """Where no folder can be: below a file, below a link to what is gone, with too long a name."""
    (folder / "file").write_text("text")
    (folder / "link").symlink_to(folder / "gone")
    return [folder / "file" / "x", folder / "link" / "x", folder / ("n" * 300)]


@pytest.mark.parametrize("verb", WRITES)
def test_a_place_that_cannot_be_is_named_by_every_verb_that_writes(verb, tmp_path):
    for place in make_places(tmp_path):
        code, _, err = quick(*(word.format(place=place) for word in WRITES[verb]))
        first, hint, *rest = err.splitlines()
        assert code == 2, (place, err)
        assert first.startswith(("error: cannot use `", "error: cannot write in `")), err
        assert str(place.parent)[:40] in first
        assert hint.startswith("hint: name another ")
        assert not rest


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_training_where_no_folder_can_be_is_no_bug_of_the_process_that_certifies(
    apart, tmp_path, monkeypatch, certified_here
):
    """In processes of its own, and in this one, which has imported what they would."""
    request = tmp_path / "request.yaml"
    (tmp_path / "text.txt").write_text("once upon a time\n\n" * 99)
    task = {"data": "text.txt", "steps": 1, "sequence_length": 32, "global_batch": 2}
    request.write_text(json.dumps({**ASKED, "task": task}))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    words = ("train", request, "--folder", "link/run", "--quiet")
    if apart:
        done = memfit(*words, cwd=tmp_path)
        code, told = done.returncode, done.stderr
    else:
        importlib.import_module("torch")  # or it would be prepared in another process
        code, _, told = quick(*words)
    said = "error: cannot use `link/run`: No folder can be made there"
    assert (code, told.splitlines()[0]) == (2, said)


def test_a_folder_without_the_right_to_write_is_named_by_the_file_that_was_meant(
    tmp_path, monkeypatch
):
    def refuse(**_):
        raise PermissionError(13, "Permission denied", str(tmp_path / ".plan.json.1-abcdefgh"))

    monkeypatch.setattr("tempfile.mkstemp", refuse)  # whom the tests run as may have every right
    with pytest.raises(PermissionError) as refused:
        write_atomically(tmp_path / "plan.json", b"{}")
    assert refused.value.filename == os.fspath(tmp_path / "plan.json")
