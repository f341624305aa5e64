"""The process that measures: units come in as lines, rows go out as lines."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from typing import Any

from on_gpu import slices
from on_gpu.rows import Place, Row

PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


def serve(place: Place) -> int:
    """Measure what standard input names until it ends; the rows are the only standard output."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no row
    _load()
    for line in sys.stdin:
        told = json.loads(line)
        row = slices.measure(told["slice"], told["unit"], place)
        answers.write(json.dumps(row) + "\n")
        answers.flush()
    return 0


def _load() -> None:
    """Import what takes seconds while nothing has been asked for yet; CUDA is not started."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from memfit import api  # noqa: F401


class Worker:
    """A measuring process as its parent sees it."""

    def __init__(self, place: Place, allocator: str = "") -> None:
        self.allocator = allocator
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until `end`)
        command = [sys.executable, "-W", "ignore", str(_entry()), "--worker", "--device"]
        self._process = subprocess.Popen(
            [*command, place.device, "--row", place.row, "--out", str(place.out)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            start_new_session=True,
            env=os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}),
        )  # fmt: skip

    def measure(self, slice_name: str, unit: str, seconds: float) -> Row | str | None:
        """The unit's row; why there is none where the process died; None after so many seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"slice": slice_name, "unit": unit}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._last_words()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self.end()
            return None
        line = self._process.stdout.readline()
        if not line:
            return self._last_words()
        row: dict[str, Any] = json.loads(line)
        return row

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {said[-1][:300] if said else 'nothing said'}"

    def end(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                pipe.close()


def _entry() -> str:
    from on_gpu.paths import ROOT

    return str(ROOT / "bench" / "on_gpu")
