"""Closed-form prediction and search. Never imports torch."""

from memfit.core.callable_package import make_callable

make_callable(__name__)
