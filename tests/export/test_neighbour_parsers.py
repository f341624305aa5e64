"""Exports are read by the targets' own code, which `make neighbours` installs, as CI does. The
heavy ones are bench/neighbours.py's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import neighbour_plans
from memfit import api

PARSERS = Path(__file__).resolve().parents[2] / "bench" / "neighbour_parsers.py"
PLACE = Path(sys.prefix) / "neighbours"
LIGHT = {
    "accelerate": "trainers", "trl": "trainers", "deepspeed": "trainers", "skypilot": "jobs",
    "dstack": "jobs", "k8s": "jobs", "slurm": "jobs",
}  # fmt: skip


def skip_without_parsers(target):
    if not PLACE.exists():
        pytest.skip(f"`make neighbours` installs what reads files for {target}")


def parse(target, folder):
    """What the target's own code says of each plan."""
    skip_without_parsers(target)
    python = PLACE / LIGHT[target] / "bin" / "python"
    command = [str(python), str(PARSERS), target, str(folder)]
    around = {**os.environ, "HOME": str(folder.parent), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["plans"]


@pytest.mark.slow
@pytest.mark.parametrize("target", LIGHT)
def test_the_targets_own_code_reads_every_plan(target, tmp_path):
    skip_without_parsers(target)
    written, place = [], tmp_path / "plans"
    for name in neighbour_plans.REQUESTS:
        made = neighbour_plans.find_export(name, target)
        if made is None:
            continue
        api.write_export(made, place / name)
        written.append(name)
    assert len(written) >= 12
    if target == "trl":
        write_of_data(tmp_path)
        written.append("of data here")
    assert parse(target, place) == dict.fromkeys(written, "ok")


def write_of_data(tmp_path):
    """A plan whose data are a file of this machine: its `datasets:`, a list of what to load."""
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": "Hello", "completion": "Good day"}) + "\n")
    asked = api.change(neighbour_plans.find_request("trl-qlora"), {"task.data": str(data)})
    api.write_export(api.export(asked, "trl"), tmp_path / "plans" / "of data here")
    assert str(data) in (tmp_path / "plans" / "of data here" / "trl.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("target", "file", "key"), [
    ("accelerate", "accelerate.yaml", "fsdp_offload_params"),  # accelerate passes over others
    ("k8s", "trainjob.yaml", "resourcesPerNode"),
])  # fmt: skip
def test_a_key_that_a_target_does_not_know_is_found(target, file, key, tmp_path):
    """The parsers can fail."""
    made = api.export(neighbour_plans.find_plan("trl-full-fsdp"), target)
    api.write_export(made, tmp_path / "plans" / "one")
    path = tmp_path / "plans" / "one" / file
    path.write_text(path.read_text().replace(key, f"{key}_"))
    assert f"{key}_" in parse(target, tmp_path / "plans")["one"]
