"""Candidates, and the fastest of them that fits."""
