"""Whether this torch's fake tensors are proved to hold what real ones hold, for `memfit doctor`.

`python -m memfit.certify.evidence.prove DEVICE` runs the checks of known bytes for one device.
"""

from __future__ import annotations

import os
import subprocess
import sys

from memfit import catalog
from memfit.certify import LAST_LINES
from memfit.core.errors import NotCertified
from memfit.core.system.processes import child_environment, end_with_parent
from memfit.core.system.streams import answers_alone


def prove(device: str) -> str:
    """How many checks of known bytes passed for a catalogue device, in a process of its own.

    Raises NotCertified: what differs from the bytes expected, or how the process ended.
    """
    child = subprocess.run(
        [sys.executable, "-m", "memfit.certify.evidence.prove", device],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    if child.returncode == 0:
        return child.stdout.strip()
    if child.returncode == NotCertified.exit_code:
        raise NotCertified(child.stdout.strip())
    output = " ".join(child.stderr.splitlines()[-LAST_LINES:])
    raise NotCertified(f"the checking process ended with code {child.returncode}: {output}")


def main(device: str) -> None:
    """Print what was proved, or what differs with the exit code of NotCertified."""
    from memfit.certify.tracing.fake_device import fake_device

    answer_to = answers_alone()  # what libraries print is no answer
    end_with_parent()
    try:
        with fake_device(catalog.find_device(device)) as mode:
            words, code = f"{len(mode.proofs)} checks of known bytes passed", 0
    except NotCertified as error:
        words, code = error.message, error.exit_code
    answer_to.write(words)
    answer_to.flush()
    os._exit(code)  # no destructors: see `memfit.certify.__main__`


if __name__ == "__main__":
    main(sys.argv[1])
