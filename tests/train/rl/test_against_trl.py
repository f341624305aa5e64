"""GRPO and RLOO beside TRL's own trainers, which `make neighbours` installs.

One micro-batch a step: loss and advantages to 1e-6, gradients to 1e-6 of the largest. RLOO's ratio
is of whole answers, whose log is a sum over tokens: its rounding is a few times larger.
"""

import json

import pytest

from neighbour_programs import run_program

CASES = (
    "dapo", "grpo", "dr_grpo", "batch", "gspo", "gspo, kl", "kl", "kl without the ratio",
    "clip higher", "delta", "masked", "masked, dapo", "on policy", "chunked", "rloo", "rloo, kl",
    "rloo, normalised", "rloo, masked",
)  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    run_program("trl_policies.py", home / "found.json")
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
