"""Layers with a state that does not grow with the length of a row."""
