"""`python -m memfit.certify`: orders on stdin, a certificate (or an error) each on stdout."""

from __future__ import annotations

import os
import sys

from memfit.core.system.processes import end_with_parent


def main() -> None:
    """Answer line by line. What libraries print goes to stderr; only answers go to stdout."""
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()
    from memfit.certify import answer_order, import_step, measure_imports

    lines = sys.stdin.read().splitlines()
    imports = measure_imports(lines)
    if "torch" not in sys.modules:  # as it is where imports were just measured
        import_step(lines)
    for line in lines:
        answer_to.write(answer_order(line, imports) + "\n")
        answer_to.flush()
    os._exit(0)  # no destructors: fake CUDA tensors have no driver to return to


if __name__ == "__main__":
    main()
