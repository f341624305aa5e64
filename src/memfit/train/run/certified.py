"""Whether a certificate holds here: the libraries that it was made with, and the data."""

from __future__ import annotations

from memfit.core.libraries import installed_versions
from memfit.records.recipe import Recipe
from memfit.records.results import Certificate
from memfit.records.shapes import RowBounds, holds


def find_other_version(certificate: Certificate) -> str:
    """The first library that is another one here, with both versions; "" when none is."""
    here = installed_versions(certificate.versions)
    for name, then in certificate.versions.items():
        if here[name] != then:
            return f"it was made with {name} {then}, and this is {name} {here[name]}"
    return ""


def find_excess(
    recipe: Recipe, certificate: Certificate, training: RowBounds, held_out: RowBounds | None
) -> str:
    """How the data goes beyond what a certificate holds for, with both sides; "" when it does not.

    A certificate without bounds, of fixed micro-batches, is not checked.
    """
    for name, certified, own in (
        ("training data", certificate.data, training),
        ("held-out data", certificate.held_out or certificate.data, held_out),
    ):
        if certified is not None and own is not None and not holds(recipe, certified, own):
            return f"the {name} has {own}, and it holds for {certified}"
    return ""
