"""Imports without what no step calls, which is most of what libraries would take along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from memfit.certify.deferred_lists import defer_lists
from memfit.core.libraries import hidden_packages, uncollected

# what transformers and peft import where it is installed, and no step here calls through them
UNUSED = ("bitsandbytes", "torchao", "scipy", "sklearn", "pandas")
CERTIFYING = ("memfit.certify.evidence.certificate",)  # imports all that traces a step
PEFT_ASKS = ("is_bnb_available", "is_bnb_4bit_available", "is_torchao_available")


def import_lean(
    modules: Sequence[str], *, adapters: bool, prepare: Callable[[], None] = defer_lists
) -> None:
    """Import these modules, but for packages that no step calls; for a fresh process alone.

    adapters: with what LoRA's step imports. prepare: what is done before anything is imported.
    """
    with uncollected(), hidden_packages(UNUSED):
        prepare()
        for module in modules:
            import_module(module)
        if adapters:
            found = import_module("peft.import_utils")
            for question in PEFT_ASKS:  # and remembers the answers
                getattr(found, question)()
