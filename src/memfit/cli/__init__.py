"""The command line: parse, call `memfit.api`, print. Data to stdout, everything else to stderr."""

from memfit.cli.app import main

__all__ = ["main"]
