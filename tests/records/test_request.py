"""Requests: strict reading, with the key and its value in every refusal."""

import subprocess
import sys

import pytest

from memfit.core.errors import InvalidRequest
from memfit.records import from_data, read_json, to_data, write_json
from memfit.records.recipe import Recipe
from memfit.records.request import Request, read_request


def write(folder, text):
    path = folder / "request.yaml"
    path.write_text(text)
    return path


def refuse(folder, text):
    with pytest.raises(InvalidRequest) as caught:
        read_request(write(folder, text))
    return str(caught.value).replace(str(folder), "")


def test_yaml_scalars_are_what_they_look_like(tmp_path):
    request = read_request(
        write(tmp_path, "model: a\noptimizer: {learning_rate: 2e-4}\nrecompute: {blocks: 3}\n")
    )
    assert request.optimizer.learning_rate == 2e-4
    assert request.recompute.blocks == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmodle: 3", "unknown key `modle` in /request.yaml\nhint: did you mean `model`?"),
        (
            "model: a\ntask: {sequence_lenght: 4}",
            "unknown key `task.sequence_lenght` in /request.yaml\n"
            "hint: did you mean `sequence_length`?",
        ),
        (
            "model: a\ntask: {sequence_length: -4}",
            "`task.sequence_length: -4` in /request.yaml: expected `int` >= 1\n"
            "hint: a whole number, 1 or more",
        ),
        (
            "model: a\nprecision: no",
            "`precision: no` in /request.yaml: invalid enum value 'no'\n"
            "hint: one of: auto, fp32, bf16, bf16-mixed, fp16-mixed, fp16, fp8-mixed, fp4-mixed",
        ),
        (
            "model: a\nlimits: {memory: 72 Gib}",
            "cannot read `72 Gib` as a memory size\n"
            "hint: write a memory size with its unit, for example `72 GiB`",
        ),
        (
            "model: a\nlimits: {time: 2}",
            "`limits.time: 2` in /request.yaml: a number without its unit\n"
            "hint: a time with its unit, for example `2 h`",
        ),
        (
            "model: a\nlimits: {cost: 50000}",
            "`limits.cost: 50000` in /request.yaml: a number without its unit\n"
            "hint: an amount with its unit, for example `500 USD`",
        ),
        (
            "- a",
            "`/request.yaml` holds a list, not keys with values\n"
            "hint: start with `model: llama-3.1-8b`; `memfit init` writes a commented file",
        ),
        (
            "model: a\ntask: {steps: 3, epochs: 1}",
            "`task.steps` and `task.epochs` both say how long to train\n"
            "hint: keep one of steps, epochs, tokens",
        ),
    ],
)
def test_each_mistake_is_named_with_a_hint(tmp_path, text, message):
    assert refuse(tmp_path, text) == message


def test_broken_yaml_names_the_line(tmp_path):
    assert "line 2, column" in refuse(tmp_path, "model: a\ntask: [")


def test_yaml_cannot_make_objects(tmp_path):
    refused = refuse(tmp_path, "model: !!python/object/apply:os.system ['echo']")
    assert "python/object" in refused


def test_a_missing_or_binary_file_is_one_clear_error(tmp_path):
    with pytest.raises(InvalidRequest, match="No such file"):
        read_request(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="is not a text file"):
        read_request(tmp_path / "binary.yaml")


def test_nouns_survive_a_file_unchanged(tmp_path):
    request = from_data({"model": "llama-3.1-8b", "method": "lora"}, Request, source="here")
    write_json(tmp_path / "request.json", request)
    assert read_json(tmp_path / "request.json", Request) == request
    assert [p.name for p in tmp_path.iterdir()] == ["request.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "request.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, object())
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["request.json"]


def test_the_digest_follows_every_field_of_the_recipe(tiny_recipe):
    data = to_data(tiny_recipe)
    assert from_data(data, Recipe, source="here").digest == tiny_recipe.digest
    changed = {**data, "seed": data["seed"] + 1}
    assert from_data(changed, Recipe, source="here").digest != tiny_recipe.digest
    data["optimizer"]["learning_rate"] *= 2
    assert from_data(data, Recipe, source="here").digest != tiny_recipe.digest


FULL_DISK = """
import resource, sys
from pathlib import Path
from memfit.records import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_atomically(Path(sys.argv[1]), b"x" * 10_000)
except OSError:
    sys.exit(7)
"""


def test_a_disk_that_fills_up_while_writing_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=False)
    assert done.returncode == 7
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
