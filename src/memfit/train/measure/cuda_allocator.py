"""The allocator's settings of this process: those of the recipe, or nothing runs."""

from __future__ import annotations

import os

import torch

from memfit.allocator.settings import read_settings
from memfit.core.errors import InvalidRequest

_set: list[str] = []  # what this process set, for a torch that cannot be asked


def running_settings() -> str:
    """What this process's allocator follows: the variable of torch's name, or what was set last."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask())
    if _set:  # torch 2.11 can be told, and not asked
        return _set[-1]
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def set_allocator(text: str) -> None:
    """Make torch's CUDA allocator follow a recipe's `allocator`; call it before memory is taken.

    That CUDA has started is not enough to refuse: importing torchao starts it. Raises
    InvalidRequest when this torch does not know a setting, and when the process already follows
    others: torch keeps some from one call to the next, and memory that is held was taken under the
    old ones.
    """
    running = running_settings()
    if _same(running, text):
        return
    if _holds_memory() or not _same(running, ""):
        raise InvalidRequest(
            f"this process's CUDA allocator is set to `{running}`, and the recipe's `allocator` is"
            f" `{text}`",
            hint="unset PYTORCH_ALLOC_CONF, or plan again with `allocator` set to its value; one"
            " process runs one setting",
        )
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(
            f"torch {torch.__version__} does not take the recipe's `allocator: {text}`:"
            f" {str(error).partition(chr(10))[0]}",
            hint="an older torch has fewer settings; leave it out and plan again",
        ) from None
    _set.append(text)


def _holds_memory() -> bool:
    """Whether the allocator of this process has taken anything of a device."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and any(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))


def _same(running: str, wanted: str) -> bool:
    try:
        return read_settings(running) == read_settings(wanted)
    except InvalidRequest:  # one that no recipe can name
        return False
