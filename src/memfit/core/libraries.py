"""The libraries a step runs on: their versions, and importing those that talk meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# torchao, which peft imports where it is installed, warns of each kernel that this build of torch
# cannot load, and torch's pytree of how torchao registers its enums, bitsandbytes of a package
# of kernels that it would rather have: nothing a user could act on.
TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Their warnings are left out while the block imports; errors are still shown."""
    import logging  # a plan imports this module and needs none

    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each library here, memfit among them; `not installed` where it is not."""
    from importlib.metadata import PackageNotFoundError, version

    from memfit import __version__

    found = {}
    for name in names:
        try:
            found[name] = __version__ if name == "memfit" else version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
