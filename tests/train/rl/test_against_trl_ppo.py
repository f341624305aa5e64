"""PPO beside the trainer of TRL 1.12, the last version with one.

One micro-batch a step: losses of every update to 1e-6, gradients to 1e-6 of the largest at equal
weights and to 2e-6 after updates that each side made itself, advantages to 1e-6 of the largest.
`trl_ppo.json` is what TRL's own classes said; where `make neighbours` has installed them, they say
it again.
"""

import json
from pathlib import Path

import pytest

from neighbour_programs import run_with_older
from other_trainers.given_ppo import CASES, LENGTHS, fingerprint, make_answers, ours

RECORDED = json.loads((Path(__file__).parent / "trl_ppo.json").read_text())


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    run_with_older("ppo", "trl_ppo.py", home, home / "found.json")
    return json.loads((home / "found.json").read_text())


@pytest.mark.parametrize("cut", [8, 2])
@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_figures_are_those_that_trl_had(case, cut):
    losses, gradients, figures, advantages = ours(case, make_answers(), cut)
    recorded = RECORDED[case]
    assert losses == pytest.approx(recorded["losses"], abs=1e-6)
    assert len(losses) == CASES[case].get("num_ppo_epochs", 4)
    expected = recorded["gradients"]
    found = fingerprint(gradients[-1])
    assert found.keys() == expected.keys()
    valued = [n for n in found if "value." in n]
    assert valued
    assert len(valued) < len(found)
    scale = max(map(abs, expected.values()))
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, abs=5e-6 * scale), name
    most = max(abs(x) for row in recorded["advantages"] for x in row)
    for mine, row in zip(advantages.tolist(), recorded["advantages"], strict=True):
        assert mine == pytest.approx(row, abs=1e-6 * most)
    for name in ("value_loss", "clipped_values"):
        assert figures[name] == pytest.approx(recorded[name], abs=1e-6)
    clipped = figures["clipped_low"] + figures["clipped_high"]
    assert clipped == pytest.approx(recorded["clipped"], abs=1e-6)
    if "kl" in figures:
        assert figures["kl"] == pytest.approx(recorded["kl"], abs=1e-6)


def test_cases_reach_every_clause():
    """Else a bug in one of them could stay."""
    assert set(RECORDED) == set(CASES)
    for case in ("clipped", "all weights, clipped"):
        assert RECORDED[case]["clipped"] > 0.1
        assert RECORDED[case]["clipped_values"] > 0.1
    assert min(LENGTHS) == 1
    assert LENGTHS.count(6) > 1
    plain = RECORDED["as they come"]["losses"]
    for case in set(CASES) - {"as they come", "one update"}:
        assert abs(RECORDED[case]["losses"][-1] - plain[-1]) > 1e-5, case


@pytest.mark.slow
@pytest.mark.wide  # what TRL had said is held to the product in the first test
@pytest.mark.parametrize("case", CASES)
def test_trl_says_it_again(compared, case):
    now, recorded = compared[case], RECORDED[case]
    assert now["losses"] == pytest.approx(recorded["losses"], abs=1e-6)
    scale = max(map(abs, recorded["gradients"].values()))
    for name, number in recorded["gradients"].items():
        assert now["gradients"][name] == pytest.approx(number, abs=5e-6 * scale), name
    for name in ("apart", "apart, cut"):
        assert now[name][0] < 1e-6
        assert max(now[name]) < 2e-6
