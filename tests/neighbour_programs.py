"""Programs run where `make neighbours` has installed TRL, as oracles; skipped where it has not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PYTHON = Path(sys.prefix) / "neighbours" / "trainers" / "bin" / "python"


def run_program(name, home, *arguments, text=None):
    """Run tests/neighbours/`name` with memfit and the tests to import, and return its output.

    home: a folder that is its HOME. text: its stdin.
    """
    if not PYTHON.exists():
        pytest.skip("`make neighbours` installs TRL")
    around = {
        **os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}",
        "HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), str(TESTS / "neighbours" / name), *map(str, arguments)], input=text,
        capture_output=True, text=True, check=False, env=around,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
