"""docs/notebook.ipynb: every cell runs, and shows what stands in the file."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import notebook_page  # noqa: E402


def outline(cell):
    """What a cell shows but for its figures, which `make docs` brings up to date."""
    found = []
    for output in cell.get("outputs", ()):
        text = "".join(output.get("data", {}).get("text/plain", ""))
        found.append((output["output_type"], re.split(r"\d", text)[0]))
    return found


@pytest.mark.wide  # `make check` runs them, too
def test_every_cell_runs_and_shows_what_the_file_holds():
    made, held = json.loads(notebook_page.page()), json.loads(notebook_page.PAGE.read_text())
    assert len(held["cells"]) == len(made["cells"]) > 10
    for fresh, old in zip(made["cells"], held["cells"], strict=True):
        assert outline(fresh) == outline(old), "run `make docs`"


def test_a_notebook_shows_results_and_no_script():
    held = json.loads(notebook_page.PAGE.read_text())
    shown = [output for cell in held["cells"] for output in cell.get("outputs", ())]
    drawn = ["".join(output["data"]["text/html"]) for output in shown if "data" in output]
    assert len(drawn) == 3
    assert not any("<script" in html for html in drawn)


def test_a_cell_that_fails_is_an_error():
    with pytest.raises(ZeroDivisionError):
        notebook_page.run("1 / 0", {}, 1)
