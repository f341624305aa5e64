"""The table of techniques names tests that exist, and every method and format has a row."""

import sys
from pathlib import Path

import pytest

from memfit.adapters import adapters
from memfit.core.errors import InvalidRequest
from memfit.optimizers import optimizers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import techniques_page
from techniques_page import read_techniques


def test_every_cell_names_a_test_or_a_reason():
    assert len(read_techniques()) >= 10


@pytest.mark.parametrize(
    "cell", ["", "no: ", "train/test_step.py", "train/test_step.py::test_that_is_not"]
)
def test_a_cell_that_names_nothing_is_refused(tmp_path, monkeypatch, cell):
    text = techniques_page.ROWS.read_text()
    first = text.index('trains = "') + len('trains = "')
    (tmp_path / "rows.toml").write_text(text[:first] + cell + text[text.index('"', first) :])
    monkeypatch.setattr(techniques_page, "ROWS", tmp_path / "rows.toml")
    with pytest.raises(InvalidRequest, match="which is no test"):
        read_techniques()


@pytest.mark.parametrize("name", [*adapters.names(), *optimizers.names()])
def test_every_method_and_optimizer_has_a_row(name):
    said = " ".join(row.how for row in read_techniques())
    assert name in said.replace(",", " ").replace("}", " ").split()
