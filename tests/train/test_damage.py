"""Damaged files of a run: what is whole is used, what is lost is said, nothing is silent."""

import json
import os
import shutil

import pytest
from test_loop import cache, go, request_  # noqa: F401 - fixtures
from tiny_runs import tiny_recipe

from memfit.core.errors import InvalidRequest
from memfit.records import read_json
from memfit.records.results import Run
from memfit.train.checkpoint.files import find_damage, remove_old
from memfit.train.run.logs import read_log

STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory, request):
    """A run that is done, to be copied; and what it learned."""
    from memfit.train.run.loop import Cadence, train

    folder = tmp_path_factory.mktemp("finished") / "run"
    wanted, kept = request.getfixturevalue("request_"), request.getfixturevalue("cache")
    run = train(
        tiny_recipe(steps=STEPS), wanted, folder, cache=kept,
        cadence=Cadence(save_every=2, evaluate_every=3),
    )  # fmt: skip
    return folder, run


@pytest.fixture
def begun(finished, tmp_path):
    """The same before its end: checkpoints of steps 4 and 6, no model."""
    shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    return tmp_path / "run"


def change_manifest(change):
    def damage(folder):
        file = folder / "manifest.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return damage


MANIFESTS = {
    "a key renamed": change_manifest(lambda m: m["files"]["state.json"].pop("sha256")),
    "null": change_manifest(lambda m: m["files"].update({"state.json": None})),
    "no bytes": change_manifest(lambda m: m["files"]["state.json"].pop("bytes")),
    "no files": change_manifest(lambda m: m.update(files={})),
    "one file": change_manifest(lambda m: m["files"].pop("state.json")),
    "a list": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "bytes": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{"),
    "deep": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    "another folder": change_manifest(
        lambda m: m["files"].update({"../../x": {"bytes": 1, "sha256": ""}})
    ),
    "a name too long": change_manifest(
        lambda m: m["files"].update({"x" * 5000: {"bytes": 1, "sha256": ""}})
    ),
    "a name with a zero": change_manifest(
        lambda m: m["files"].update({"x\0": {"bytes": 1, "sha256": ""}})
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_damaged_manifest_is_a_damaged_checkpoint(name, begun):
    folder = begun / "checkpoints" / "step-000006"
    assert find_damage(folder) == ""
    MANIFESTS[name](folder)
    assert find_damage(folder)


def test_a_run_goes_on_from_the_older_checkpoint(begun, finished, go):  # noqa: F811
    MANIFESTS["a key renamed"](begun / "checkpoints" / "step-000006")
    run = go(tiny_recipe(steps=STEPS))
    assert run.losses == finished[1].losses
    assert any("passing over" in text for text in run.warnings)


def test_checkpoints_that_are_damaged_do_not_push_out_whole_ones(tmp_path):
    for step in (2, 4, 8, 10):
        (tmp_path / f"step-{step:06}").mkdir()
    remove_old(tmp_path, tmp_path / "step-000004")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000002", "step-000004", "step-000008", "step-000010",
    ]  # fmt: skip
    remove_old(tmp_path, tmp_path / "step-000008")
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "step-000004"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b'{"steps_done": null}'])
def test_a_damaged_run_json_is_said_and_written_anew(content, begun, finished, go):  # noqa: F811
    (begun / "run.json").write_bytes(content)
    run = go(tiny_recipe(steps=STEPS))
    assert run.losses == finished[1].losses
    assert any("run.json is damaged" in text for text in run.warnings)
    assert read_json(begun / "run.json", Run).finished


def cut(log):
    log.write_bytes(log.read_bytes()[:-40])


def change_line(number, text):
    def damage(log):
        lines = log.read_text().splitlines()
        lines[number] = text
        log.write_text("\n".join(lines) + "\n")

    return damage


def change_digit(log):
    row = json.loads(log.read_text().splitlines()[1])
    log.write_text(log.read_text().replace(str(row["loss"]), str(row["loss"] + 1)))


LOGS = {
    "cut": (cut, "lacks steps 6"),
    "empty": (lambda log: log.write_bytes(b""), "lacks steps 1 to 6"),
    "missing": (lambda log: log.unlink(), "lacks steps 1 to 6"),
    "a number": (change_line(2, "1"), "lacks steps 3"),
    "no loss": (change_line(2, '{"step": 3}'), "lacks steps 3"),
    "a step twice": (change_line(2, '{"step": "3"}'), "lacks steps 3"),
    "infinite": (change_line(3, '{"step": 4, "loss": Infinity}'), "lacks steps 4"),
    "deep": (change_line(3, "[" * 100_000), "lacks steps 4"),
    "two apart": (lambda log: (change_line(1, "")(log), change_line(4, "x")(log)), "2, 5"),
    "another loss": (change_digit, "was changed after the checkpoint of step 6"),
}


@pytest.mark.parametrize("name", LOGS)
def test_holes_in_a_log_are_said(name, begun, finished, go):  # noqa: F811
    damage, said = LOGS[name]
    damage(begun / "log.jsonl")
    run = go(tiny_recipe(steps=STEPS))
    assert [text for text in run.warnings if said in text], run.warnings
    held = dict(finished[1].losses)
    if "changed" not in said:
        assert all(held[step] == loss for step, loss in run.losses)


def test_a_whole_log_is_not_said_to_be_damaged(begun, finished, go):  # noqa: F811
    run = go(tiny_recipe(steps=STEPS))
    assert run.losses == finished[1].losses
    assert not [text for text in run.warnings if "log.jsonl" in text]


def test_a_log_without_its_newest_lines_is_read(begun):
    rows = read_log(begun)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def test_a_changed_model_of_a_finished_run_is_refused(finished, tmp_path, go):  # noqa: F811
    shutil.copytree(finished[0], tmp_path / "run")
    assert go(tiny_recipe(steps=STEPS)).losses == finished[1].losses
    weights = tmp_path / "run" / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InvalidRequest, match=r"the content of model\.safetensors has changed") as e:
        go(tiny_recipe(steps=STEPS))
    assert "remove" in e.value.hint
    shutil.rmtree(tmp_path / "run" / "model")
    assert go(tiny_recipe(steps=STEPS)).finished
    assert weights.read_bytes() == content


def test_a_lock_that_is_a_link_is_not_followed(tmp_path, go):  # noqa: F811
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with pytest.raises(InvalidRequest, match="is a link to"):
        go(tiny_recipe(steps=1))
    assert victim.read_text() == "precious"


def test_what_a_killed_process_had_begun_to_write_is_removed(begun, go):  # noqa: F811
    gone = 2**22 + 7  # above the most that Linux gives a process
    left = begun / f".run.json.{gone}-abcdefgh"
    rank = begun / "ranks" / "rank-00001" / f".log.jsonl.{gone}-abcdefgh"
    rank.parent.mkdir(parents=True)
    others = begun / f".report.json.{os.getpid()}-abcdefgh", begun / ".notes.1-x"
    for path in (left, rank, *others):
        path.write_text("{")
    go(tiny_recipe(steps=STEPS))
    assert not left.exists()
    assert not rank.exists()
    assert all(path.exists() for path in others)
