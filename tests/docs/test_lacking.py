"""docs/lacking.md: no family on it is described, and no model that was left out is planned."""

import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from memfit import catalog
from memfit.catalog import published_names
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.families import families, references

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lacking.md").read_text(encoding="utf-8")
LACKING, LEFT_OUT = PAGE.split("## Left out of the catalogue")
ROWS = [line.split(" | ") for line in LACKING.splitlines() if line.startswith("| `")]
NAMES = sorted(set(re.findall(r"`([\w.-]+/[\w.-]+)`", LEFT_OUT)))
WITHOUT_A_CLASS = {"nemotron-nas", "mimo"}  # their repositories bring the code


def test_a_family_that_lacks_is_no_family_of_memfits():
    named = [name for row in ROWS for name in re.findall(r"`([\w-]+)`", row[0])]
    assert len(named) == len(set(named)) > 20
    assert not set(named) & {*families.names(), *references.names()}
    assert set(named) - set(CONFIG_MAPPING_NAMES) == WITHOUT_A_CLASS


def test_rows_are_complete_and_by_downloads_from_the_most_on():
    assert all(len(row) == 5 for row in ROWS)
    counts = [int(row[2].replace(",", "").replace("—", "0")) for row in ROWS]
    rest = counts[counts.index(max(counts)) :]
    assert rest == sorted(rest, reverse=True)
    assert len(rest) > 10


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_was_left_out_is_not_taken_for_another(name):
    with pytest.raises(UnknownName):
        catalog.find_model(name)


def test_names_of_a_family_that_lacks_are_refused_with_the_family():
    named = {name for row in ROWS for name in re.findall(r"`([\w-]+)`", row[0])}
    assert set(published_names.UNSUPPORTED.values()) <= named
    for name, family in [
        ("google/gemma-4-E2B-it", "gemma4"), ("unsloth/gemma-4-31B-it", "gemma4"),
        ("ibm-granite/granite-4.0-h-small", "granitemoehybrid"), ("LiquidAI/LFM2-1.2B", "lfm2"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "nemotron-nas"),
    ]:  # fmt: skip
        with pytest.raises(InvalidRequest, match=f"family `{family}`"):
            catalog.find_model(name)


def test_no_row_begins_as_the_names_of_a_family_that_lacks():
    for model in catalog.models():
        for name in (model.id, model.hub, *model.aliases):
            assert not published_names.find_unsupported(name)
