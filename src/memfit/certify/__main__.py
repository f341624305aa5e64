"""`python -m memfit.certify`: orders on stdin, a certificate (or an error) each on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from memfit.core.system.ahead import AHEAD
from memfit.core.system.processes import end_with_parent
from memfit.core.system.streams import answers_alone


def read_orders(
    environment: Mapping[str, str],
) -> tuple[list[str], Callable[[], int | None]]:
    """The orders, a line each, and what finds what their runs' imports take, begun already."""
    from memfit.certify import start_measuring

    lines = sys.stdin.read().splitlines()
    return lines, start_measuring(lines, environment)


def main(*, ahead: bool) -> None:
    """Answer line by line. What libraries print goes to stderr; only answers go to stdout.

    ahead: the orders are not known yet, so torch is imported before they are read.
    """
    answer_to = answers_alone()
    end_with_parent()
    environment = dict(os.environ)
    from memfit.certify import answer_order, import_step
    from memfit.core.libraries import uncollected
    from memfit.core.system.beside import allow_forks

    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read_orders, environment)
        if ahead:
            with uncollected():
                import torch  # noqa: F401
        lines, imports = reading.result()
    if lines:
        import_step(lines)
    with allow_forks():
        for line in lines:
            answer_to.write(answer_order(line, imports) + "\n")
            answer_to.flush()
    os._exit(0)  # no destructors: fake CUDA tensors have no driver to return to


if __name__ == "__main__":
    main(ahead=AHEAD in sys.argv)
