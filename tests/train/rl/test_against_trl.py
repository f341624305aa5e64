"""GRPO and RLOO beside TRL's own trainers, which `make neighbours` installs.

One micro-batch a step: loss and advantages to 1e-6, gradients to 1e-6 of the largest. RLOO's ratio
is of whole answers, whose log is a sum over tokens: its rounding is a few times larger.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent.parent
PYTHON = Path(sys.prefix) / "neighbours" / "trainers" / "bin" / "python"
CASES = (
    "dapo", "grpo", "dr_grpo", "batch", "gspo", "gspo, kl", "kl", "kl without the ratio",
    "clip higher", "delta", "masked", "masked, dapo", "on policy", "chunked", "rloo", "rloo, kl",
    "rloo, normalised", "rloo, masked",
)  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("`make neighbours` installs TRL")
    home = tmp_path_factory.mktemp("home")
    around = {
        **os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}",
        "HOME": str(home), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), str(TESTS / "neighbours" / "trl_policies.py"), str(home / "found.json")],
        capture_output=True, text=True, check=False, env=around,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((home / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_advantages_and_gradients_are_trls(compared, case):
    found = compared[case]
    rloo = case.startswith("rloo")
    assert found["advantages"] < 1e-6
    assert found["ours"] == pytest.approx(found["loss"], abs=1e-6)
    assert found["gradients"] < (4e-6 if rloo else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cut_into_micro_batches_they_stay_the_same(compared, case):
    found = compared[case]
    assert found["cut"] == pytest.approx(found["ours"], abs=1e-6)
    assert found["cut gradients"] < 1e-5


@pytest.mark.slow
def test_every_case_is_held(compared):
    assert set(compared) == set(CASES)
