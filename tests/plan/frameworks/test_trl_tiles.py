"""TRL's loss from tiles of the logits, beside TRL's own code, which `make neighbours` installs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent.parent
PYTHON = Path(sys.prefix) / "neighbours" / "trainers" / "bin" / "python"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("`make neighbours` installs TRL")
    around = {
        **os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}",
        "HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), str(TESTS / "neighbours" / "trl_tiles.py")],
        capture_output=True, text=True, check=False, env=around,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: rest for name, *rest in json.loads(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["one tile", "tiles of both kinds", "16 bits", "autocast", "a frozen head"]
)
def test_every_allocation_and_free_of_the_loss_is_trls_own(measured, case):
    (saved, kept), real, mine = measured[case]
    assert kept == saved
    assert mine == real
