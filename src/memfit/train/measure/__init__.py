"""Counters of what a step takes."""
