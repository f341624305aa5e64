"""Importing libraries that talk while they are imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# torchao, which peft imports where it is installed, warns of each kernel that this build of torch
# cannot load, and torch's pytree of how torchao registers its enums: nothing a user could act on.
TALKATIVE = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Their warnings are left out while the block imports; errors are still shown."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
