"""`python -m memfit.certify`: orders on stdin, a certificate (or an error) each on stdout."""

from __future__ import annotations

import os
import sys

from memfit.core.system.ahead import AHEAD
from memfit.core.system.processes import end_with_parent


def main(*, ahead: bool) -> None:
    """Answer line by line. What libraries print goes to stderr; only answers go to stdout.

    ahead: the orders are not known yet, so torch is imported before they are read.
    """
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()
    environment = dict(os.environ)
    from memfit.certify import answer_order, import_step, start_measuring
    from memfit.core.libraries import uncollected
    from memfit.core.system.beside import allow_forks

    if ahead:
        with uncollected():
            import torch  # noqa: F401
    lines = sys.stdin.read().splitlines()
    if lines:
        imports = start_measuring(lines, environment)
        import_step(lines)
    with allow_forks():
        for line in lines:
            answer_to.write(answer_order(line, imports) + "\n")
            answer_to.flush()
    os._exit(0)  # no destructors: fake CUDA tensors have no driver to return to


if __name__ == "__main__":
    main(ahead=AHEAD in sys.argv)
