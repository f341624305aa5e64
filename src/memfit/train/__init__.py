"""The lean step and the loop around it, on PyTorch-native parts."""
