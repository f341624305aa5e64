"""Checkpoints and final models."""
