"""Losses, with shapes only."""
