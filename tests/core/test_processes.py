"""A process ends with the one that started it."""

import os
import subprocess
import sys
import time
from pathlib import Path

SOURCE = str(Path(__file__).parents[2] / "src")
WATCHER = """
import os, subprocess, sys, time
from memfit.core.system.processes import end_with_parent, name_parent
if len(sys.argv) == 2:
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)
else:
    environment = {**os.environ, **name_parent()}
    subprocess.Popen([sys.executable, __file__, "child"], env=environment)
    time.sleep(600)
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    script = tmp_path / "watcher.py"
    script.write_text(WATCHER)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    ) as parent:  # fmt: skip
        child = int(parent.stdout.readline())
        time.sleep(1.2)  # two looks, at which the parent is there
        os.kill(child, 0)
        parent.kill()
        parent.wait()
    limit = time.monotonic() + 5
    while time.monotonic() < limit and _is_there(child):
        time.sleep(0.05)
    assert not _is_there(child)


def _is_there(process):
    try:
        os.kill(process, 0)
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2][:3]
    except (ProcessLookupError, FileNotFoundError):
        return False
