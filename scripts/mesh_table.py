"""The table of docs/techniques.md that says which technique trains on which axis of a mesh.

Its cells are those of tests/certify/mesh_cells.py, whose test trains each that says so.
`python scripts/mesh_table.py` prints the share alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
TEST = "certify/test_mesh_cells.py"
ASKED = r", and `parallel[.]\w+: 2` is asked for$"
SAMPLED_TEST = "certify/test_sampled_ranks.py"
PROOF = "test_a_cell_trains_as_one_process_and_holds_what_is_certified_and_predicted"
SAMPLED_PROOF = "test_ranks_learn_what_one_process_does_and_hold_what_is_certified_and_predicted"
HEAD = """## Techniques on the axes of a mesh

{share} (`python scripts/mesh_table.py`).
A cell is *yes* where two ranks on gloo train to the losses, gradients and norms of one process
(fp32: to 1e-5), hold what their certificates say in every phase, to the byte, and what is predicted
in closed form: [one test does all three]({link}), of sampled
answers [another]({sampled}); of compiled
blocks, what they keep is, as on one device. *ours*: torch has
the parts, and memfit's step does not put them together. *torch*: the library itself does not run
there; such cells are not counted. `copies` are FSDP2's replicas (HSDP), and `ep` is a mixture's
experts divided among ranks; what a step holds there is measured under an even routing, which the
test forces, and what it learns under the router's own.
"""


def page() -> str:
    """The section: the share, the table, and why cells are empty."""
    cells = _read()
    reasons: dict[str, int] = {}
    rows = [_row(technique, cells, reasons) for technique in _techniques(cells)]
    axes = tuple(cells.AXES)
    head = ["| technique | " + " | ".join(axes) + " |", "|---|" + "---|" * len(axes)]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(
        [
            HEAD.format(
                share=count(),
                link=f"../tests/{TEST} '{PROOF}'",
                sampled=f"../tests/{SAMPLED_TEST} '{SAMPLED_PROOF}'",
            ),
            *head,
            *rows,
            "",
            *notes,
            "",
        ]
    )


def count() -> str:
    """The share of cells that torch supports and that train here, in a sentence."""
    cells = _read()
    trained = len(cells.CELLS) + sum(map(len, cells.SAMPLED.values()))
    rows = [t for t in _techniques(cells) if t not in cells.NOT_OURS]
    supported = len(rows) * len(cells.AXES)
    return f"{trained} of {supported} cells that torch supports train ({trained / supported:.0%})"


def _techniques(cells: Any) -> tuple[str, ...]:
    return (*cells.TECHNIQUES, *cells.SAMPLED)


def _row(technique: str, cells: Any, reasons: dict[str, int]) -> str:
    found = (_cell(technique, axis, cells, reasons) for axis in cells.AXES)
    return f"| {technique} | {' | '.join(found)} |"


def _cell(technique: str, axis: str, cells: Any, reasons: dict[str, int]) -> str:
    if technique in cells.NOT_OURS:
        return _note("torch", cells.NOT_OURS[technique], reasons)
    if axis in {**cells.TRAINED, **cells.SAMPLED}[technique]:
        return "yes"
    if technique in cells.SAMPLED:
        recipe = cells.make_sampled("GRPO", axis)
    else:
        recipe = cells.make_cell(technique, axis)
    refused = cells.refusal(recipe)
    return _note("ours", re.sub(ASKED, "", refused), reasons)


def _note(word: str, reason: str, reasons: dict[str, int]) -> str:
    """The word, with the number of its reason below the table."""
    number = reasons.setdefault(reason, len(reasons) + 1)
    return f"{word} ({number})"


def _read() -> Any:
    """tests/certify/mesh_cells.py, which the tests import from their own folder."""
    wanted = [str(TESTS / "certify"), str(TESTS)]
    sys.path[:0] = [path for path in wanted if path not in sys.path]
    import mesh_cells

    return mesh_cells


if __name__ == "__main__":
    sys.stdout.write(count() + "\n")
