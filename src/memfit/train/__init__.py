"""The lean step and the loop around it, on PyTorch-native parts."""

from memfit.core.callable_package import make_callable

make_callable(__name__)
