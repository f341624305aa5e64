"""TRL's loss from tiles of the logits, beside TRL's own code, which `make neighbours` installs."""

import json

import pytest

from neighbour_programs import run_program


@pytest.fixture(scope="module")
def measured():
    found = json.loads(run_program("trl_tiles.py"))
    return {name: rest for name, *rest in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["one tile", "tiles of both kinds", "16 bits", "autocast", "a frozen head"]
)
def test_every_allocation_and_free_of_the_loss_is_trls_own(measured, case):
    (saved, kept), real, mine = measured[case]
    assert kept == saved
    assert mine == real
