"""The line of Python that called an operator of torch, found on the stack."""

from __future__ import annotations

import sys
from types import FrameType

# Frames that are on the way to every operator and say nothing about it: torch, the standard
# library, the script that was started, and what watches.
_PASSED = frozenset({"torch", "__main__", *sys.stdlib_module_names})
_WATCHING = ("memfit.certify", "memfit.train.measure.live", "memfit.train.measure.source")
_files: dict[str, str] = {}  # module -> the file that is shown; "" is passed over
_lines: dict[tuple[str, int], str] = {}  # one text a line, however many tensors it made


def find_source() -> str:
    """`transformers/models/llama/modeling_llama.py:123`: the nearest frame outside torch.

    Named by its module, so that no path of this machine occurs. "" where no frame qualifies.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        file = _files.get(name)
        if file is None:
            file = _files[name] = _file_of(name, frame)
        if file:
            place = (file, frame.f_lineno)
            found = _lines.get(place)
            if found is None:
                found = _lines[place] = f"{file}:{frame.f_lineno}"
            return found
        frame = frame.f_back
    return ""


def _file_of(module: str, frame: FrameType) -> str:
    if module.partition(".")[0] in _PASSED or module.startswith(_WATCHING):
        return ""
    ending = "/__init__.py" if "__path__" in frame.f_globals else ".py"
    return module.replace(".", "/") + ending
