"""Predicted, certified and measured, joined and drawn."""

from memfit.core.callable_package import make_callable

make_callable(__name__)
