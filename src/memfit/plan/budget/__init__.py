"""Compute, tokens, time and money."""
